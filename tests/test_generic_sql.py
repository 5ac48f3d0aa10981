"""The lock table by SQL that Django writes, for databases whose own the app does not know.

MariaDB, PostgreSQL and SQLite (which has no FOR UPDATE) stand in for them. The contract suite and
test_database_backend.py have the verbs.
"""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest
from django.conf import settings
from django.core import checks
from django.db import connection, connections, transaction

from distlock_app.backends.database import DatabaseBackend
from distlock_app.backends.database.sql.rows import Rows
from distlock_app.claims import Busy, Grant
from distlock_app.errors import BackendError
from distlock_app.models import DistLock
from distlock_app.testing.claims import a_claim
from tests.app.models import Counter
from tests.database_workers import grab

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "locks"])

on_mysql = pytest.mark.skipif(connection.vendor != "mysql", reason="of MySQL")
on_server = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server")
ISOLATION = ["read committed", "repeatable read", "serializable"]


@pytest.mark.parametrize("isolation", ISOLATION if settings.ENGINE != "sqlite" else [""])
def test_an_unprotected_counter_loses_nothing_between_processes(isolation, processes, tmp_path):
    path = tmp_path / "counter"
    path.write_text("0")

    fences = processes.run(
        "tests.database_workers:count",
        count=8,
        env={"DISTLOCK_TEST_ISOLATION": isolation},
        path=str(path),
        times=5,  # 40 in all: each is polled for by up to seven
        generic=True,
    )

    assert path.read_text() == "40"
    assert all(of_worker == sorted(of_worker) for of_worker in fences)
    assert len({fence for of_worker in fences for fence in of_worker}) == 40


@pytest.fixture
def options(backend, monkeypatch):
    """The options of the database's next connections."""
    backend.close()
    options = {**connections["locks"].settings_dict["OPTIONS"]}
    monkeypatch.setitem(connections["locks"].settings_dict, "OPTIONS", options)
    return options


@pytest.fixture
def backend(generic_dialect):
    backend = DatabaseBackend(alias="default", location="locks")
    yield backend
    backend.close()


def test_a_refused_claim_locks_no_row(backend, monkeypatch):
    """Many who poll kept the owner from its row: its release timed out (InnoDB, SERIALIZABLE)."""
    held = grab(backend, "a")

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "lock", None)
        refused = backend.acquire(a_claim("a"), 5)

    assert isinstance(refused, Busy) and refused.free_in > 20
    assert backend.release(held) is True


def test_a_release_in_an_event_loop_is_no_query_of_djangos(backend):
    held = grab(backend, "a")

    async def release():
        return backend.release(held)

    assert asyncio.run(release()) is True


def test_in_a_notebook_the_connection_of_the_caller_stays_in_its_thread(backend, monkeypatch):
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    held = grab(backend, "a")

    async def cell():
        with closing(connections["locks"]), transaction.atomic(using="locks"):
            return backend.pin(held, 30)

    assert asyncio.run(cell()) is True


def test_what_doctor_says_is_missing(backend):
    (found,) = backend.check(ask=True)

    assert (found.id, found.level) == ("distlock_app.I011", checks.INFO)
    assert connection.display_name in found.msg and "Waiters poll" in found.msg


@on_mysql
@pytest.mark.parametrize(("zone", "ids"), [("+02:00", ["W012"]), ("+00:02", [])])
def test_a_clock_in_another_time_zone_is_told(backend, options, zone, ids):
    options["init_command"] = f"SET SESSION time_zone = '{zone}'"

    found = backend.check(ask=True)[1:]
    assert [m.id for m in found] == [f"distlock_app.{id}" for id in ids]
    assert all("+120 minutes from UTC" in m.msg for m in found)
    held = grab(backend, "a")
    assert 20 < next(iter(backend.holders())).expires_in <= 30
    assert backend.release(held) is True


def test_two_databases_have_two_locks_of_one_name(backend):
    other = DatabaseBackend(alias="other", location="default")
    first = grab(backend, "a")

    assert isinstance(other.acquire(first.claim, 0), Grant)
    assert other.release(first) is True
    assert backend.release(first) is True
    other.close()


@pytest.fixture
def no_table():
    def rename(*names):
        with connections["locks"].schema_editor() as editor:
            editor.alter_db_table(DistLock, *names)

    name = DistLock._meta.db_table
    rename(name, "elsewhere")
    yield
    rename("elsewhere", name)


def test_a_missing_table_is_an_error_that_says_so(backend, no_table):
    one_line = r"^lock table on 'locks': [^\n]*distlock_app_distlock[^\n]* \(run: manage.py migrate"
    with pytest.raises(BackendError, match=one_line):
        backend.acquire(a_claim("a"), 0)


@on_server
def test_a_server_that_refuses_to_write_is_an_error_and_not_busy(backend, options):
    backend.release(grab(backend, "a"))
    backend.close()
    if connection.vendor == "mysql":
        options["init_command"] = "SET SESSION TRANSACTION READ ONLY"
    else:
        options["options"] = "-c default_transaction_read_only=on"

    with pytest.raises(BackendError, match="(?i)read.only") as raised:
        backend.acquire(a_claim("a"), 5)

    assert type(raised.value) is BackendError


@on_server
def test_a_connection_that_was_closed_meanwhile_is_replaced(backend):
    held = grab(backend, "a")
    for session in list(backend._sessions._idle):
        session.wrapper.connection.close()

    assert backend.extend(held, 30) is True


@on_server
def test_a_manual_alias_makes_no_difference(backend, monkeypatch):
    monkeypatch.setitem(connections["locks"].settings_dict, "AUTOCOMMIT", False)

    held = grab(backend, "a")

    assert isinstance(DatabaseBackend(alias="b", location="locks").acquire(a_claim("a"), 0), Busy)
    assert backend.release(held) is True


@on_server
@pytest.mark.parametrize("isolation", ISOLATION)
def test_a_transaction_and_a_lock_of_one_name_exclude_each_other(isolation, processes):
    Counter.objects.create(name="a", value=0)

    errors = processes.run(
        "tests.in_transaction_workers:count",
        count=4,
        env={"DISTLOCK_TEST_ISOLATION": isolation},
        name="a",
        times=6,
        threads=2,
        generic=True,
    )

    assert errors == [[]] * 4
    assert Counter.objects.get(name="a").value == 4 * 6 * 2
