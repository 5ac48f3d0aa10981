"""The connections of the lock table: its own, replaced when they die, left alone after a fork."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import warnings
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction

from distlock_app.backends.base import ConnectionLost
from distlock_app.backends.database import DatabaseBackend, inspection
from distlock_app.backends.database import connections as table_connections
from distlock_app.backends.database.sql.cursors import PooledCursor
from distlock_app.backends.sessions import link, one_server, pool
from distlock_app.backends.sessions.link import ServerError
from distlock_app.backends.sessions.pool import Contended, adapt_to_mysql
from distlock_app.backends.sessions.queues import FairSemaphore
from distlock_app.claims import Busy, Grant
from distlock_app.errors import BackendError
from distlock_app.models import DistLock
from distlock_app.primitives.names import Made
from distlock_app.testing.claims import Waiter, a_claim
from tests.app.models import Counter
from tests.database_workers import connection_id, grab, parked

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "locks"])

on_server = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server")
on_mysql = pytest.mark.skipif(connection.vendor != "mysql", reason="about MySQL and MariaDB")
on_sqlite = pytest.mark.skipif(connection.vendor != "sqlite", reason="only SQLite locks its file")


@pytest.fixture
def backend():
    """The lock table in the second database, as one process has it."""
    backend = DatabaseBackend(alias="default", location="locks")
    yield backend
    backend.close()


OWN_NUMBER = {"mysql": "CONNECTION_ID()", "postgresql": "pg_backend_pid()"}.get(connection.vendor)
TYPES = {int: "bigint", float: "float8"}


def kill(number):
    order = {"mysql": f"KILL {number}", "postgresql": f"SELECT pg_terminate_backend({number})"}
    with connection.cursor() as cursor:
        cursor.execute(order[connection.vendor])
    time.sleep(0.05)


def test_a_location_that_is_no_database_is_refused_with_the_names_of_those_that_are():
    with pytest.raises(ImproperlyConfigured, match="it has: default, locks") as no:
        DatabaseBackend(alias="night", location="nowhere")

    assert "nowhere" not in str(no.value)  # it may be a URL with a password


@pytest.mark.skipif(connection.vendor != "postgresql", reason="psycopg warns of an open connection")
def test_a_connection_that_the_server_lets_in_but_not_on_is_closed(backend):
    options = {**connections["locks"].settings_dict["OPTIONS"], "assume_role": "nobody_at_all"}
    with patch.dict(connections["locks"].settings_dict, OPTIONS=options):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with pytest.raises(BackendError, match="role"):
                backend.ping()
            gc.collect()

    assert not warned


@on_server
def test_only_who_misses_the_table_is_told_to_migrate(backend):
    nowhere = patch.dict(connections["locks"].settings_dict, NAME="nowhere")
    with nowhere, pytest.raises(BackendError, match="nowhere") as error:
        backend.acquire(a_claim("a"), 0)

    assert "migrate" not in str(error.value)


@on_mysql
def test_a_session_that_takes_one_statement_at_a_time_takes_new_names(backend):
    one_at_a_time = {"multi_statements": False}

    with patch.dict(connections["locks"].settings_dict["OPTIONS"], one_at_a_time):
        held = grab(backend, "a")

    assert held.session is not None  # It has the queue lock, too.
    assert backend.release(held) is True


@on_mysql
def test_an_extension_to_a_sooner_end_is_no_loss_whatever_flags_the_alias_has(backend):
    with patch.dict(connections["locks"].settings_dict["OPTIONS"], client_flag=0):
        held = grab(backend, "a")
        assert backend.extend(held, 0.5) is True  # the row stays as it is

    assert backend.release(held) is True


@pytest.mark.skipif(connection.vendor != "postgresql", reason="about psycopg")
def test_an_alias_that_prepares_all_statements_can_have_the_locks():
    backend = DatabaseBackend(alias="own", location="default")
    options = {"server_side_binding": True, "prepare_threshold": 0}
    connection.close()
    with patch.dict(connection.settings_dict["OPTIONS"], options):
        held = grab(backend, "a")
        assert backend.release(held) is True
        with transaction.atomic():
            assert backend.lock_row(held.claim.key, held.claim.name, 0) > held.fence
        connection.close()
    backend.close()


@on_mysql
@pytest.mark.slow
@pytest.mark.parametrize(
    "own_server", [{"log-bin": "on", "binlog-format": "STATEMENT"}], indirect=True
)
def test_a_binary_log_of_statements_takes_the_locks_changes(own_server):
    backend = DatabaseBackend(alias="own", location="own")

    held = grab(backend, "a")

    assert backend.extend(held, 30) is True
    assert backend.release(held) is True
    with connections["own"].cursor() as cursor:
        cursor.execute("SHOW BINLOG EVENTS")
        logged = " ".join(row[-1] for row in cursor.fetchall())
    assert f"UPDATE `{DistLock._meta.db_table}`" in logged
    assert "GET_LOCK" not in logged  # a replica would repeat it, with another answer
    backend.close()


def test_nothing_connects_before_the_first_question(backend):
    assert not backend._sessions._idle


@on_server
@pytest.mark.parametrize("verb", ["acquire", "look", "extend", "release", "holders", "clear"])
def test_a_connection_that_the_server_closed_is_replaced_unseen(backend, verb):
    held = grab(backend, "a")
    before = connection_id(backend)
    kill(before)

    answer = {
        "acquire": lambda: isinstance(backend.acquire(held.claim, 0), Grant),
        "look": lambda: backend.look(a_claim("a")).free_in > 0,
        "extend": lambda: backend.extend(held, 30),
        "release": lambda: backend.release(held),
        "holders": lambda: len(list(backend.holders())) == 1,
        "clear": lambda: backend.clear(held.claim.key) == 1,
    }[verb]()

    assert answer is True
    assert connection_id(backend) != before


@on_server
def test_connections_that_died_together_are_replaced_by_one_request(backend):
    lent = [backend._sessions.lend() for _ in range(3)]
    for session in lent:
        kill(session.cursor.execute(f"SELECT {OWN_NUMBER}").fetchone()[0])
        backend._sessions.give_back(session)

    backend.ping()

    assert not backend._sessions._open.intersection(lent)


@on_server
def test_a_release_whose_connection_was_killed_just_before_frees_the_lock(backend):
    held = grab(backend, "a")
    session = held.session.session
    kill(session.cursor.execute(f"SELECT {OWN_NUMBER}").fetchone()[0])

    assert backend.release(held) is True

    assert not parked(backend._sessions)
    assert isinstance(backend.acquire(a_claim("a"), 0), Grant)


@on_server
def test_values_are_quoted_whatever_they_are(backend):
    texts = ["'\\\"%s; -- /*é\U0001f600", "", Made("'", template="'"), a_claim("a").owner]
    numbers = [0, -(2**63), 2**63 - 1, 0.25]

    def echo(session):
        for value in [*texts, *numbers, None]:
            kind = f"::{TYPES.get(type(value), 'text')}" * (connection.vendor == "postgresql")
            row = session.cursor.execute(f"SELECT %(value)s{kind}", {"value": value}).fetchone()
            assert row[0] in (value, str(value)), value

    backend._sessions.ask(echo)


@on_server
@pytest.mark.parametrize("verb", ["acquire", "extend", "release", "release_to_next"])
def test_an_answer_lost_after_the_commit_does_no_harm(backend, monkeypatch, verb):
    held = grab(backend, "a")
    backend.ping()  # a connection that has been idle
    dialect = backend._sessions.dialect
    real, lost = getattr(dialect, verb), []

    def lose_the_first_answer(cursor, *args, **options):
        answer = real(cursor, *args, **options)
        if not lost:
            lost.append(answer)
            raise connection.Database.OperationalError("connection lost")
        return answer

    monkeypatch.setattr(dialect, verb, lose_the_first_answer)

    if verb == "release":
        backend.close()
        backend.ping()
    answer = {
        "acquire": lambda: backend.acquire(held.claim, 0).fence == held.fence,
        "extend": lambda: backend.extend(held, 30),
        "release": lambda: backend.release(held),
        "release_to_next": lambda: backend.release(held),
    }[verb]()

    assert answer is True
    assert lost


@pytest.mark.parametrize("after", ["taken", "taken and released", "purged"])
def test_a_release_that_may_or_may_not_have_arrived_is_unknown(backend, monkeypatch, after):
    held = grab(backend, "a")
    backend.close()
    backend.ping()
    dialect = backend._sessions.dialect
    real = dialect.release

    def release_and_let_somebody_else_in(cursor, claimed):
        monkeypatch.setattr(dialect, "release", real)
        real(cursor, claimed)
        other = grab(backend, "a")
        if after != "taken":
            assert backend.release(other)
        if after == "purged":
            DistLock.objects.using("locks").all().delete()
        raise connection.Database.OperationalError("connection lost")

    monkeypatch.setattr(dialect, "release", release_and_let_somebody_else_in)

    with pytest.raises(BackendError, match="the answer to a release was lost"):
        backend.release(held)


def test_a_release_without_an_answer_of_what_was_not_granted_is_none(backend, monkeypatch):
    backend.ping()  # a connection that has been idle
    dialect = backend._sessions.dialect
    real = dialect.release

    def lose_the_first_answer(cursor, claimed):
        monkeypatch.setattr(dialect, "release", real)
        raise connection.Database.OperationalError("connection lost")

    monkeypatch.setattr(dialect, "release", lose_the_first_answer)

    assert backend.release(Grant(a_claim("a"))) is False
    assert dialect.release == real


def test_an_interrupt_in_the_middle_leaves_no_row_locked(backend, monkeypatch):
    backend.release(grab(backend, "a"))
    dialect = backend._sessions.dialect
    real = dialect.acquire

    def interrupted(cursor, *args, **options):
        if connection.vendor != "sqlite":
            cursor.execute("BEGIN")
            cursor.execute(f"SELECT * FROM {dialect.table_name} FOR UPDATE")
        raise KeyboardInterrupt

    monkeypatch.setattr(dialect, "acquire", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.acquire(a_claim("a"), 0)
    monkeypatch.setattr(dialect, "acquire", real)

    assert isinstance(backend.acquire(a_claim("a"), 0), Grant)


def test_threads_that_have_ended_leave_no_connections(backend):
    def use(number):
        backend.release(grab(backend, f"n{number}"))

    for number in range(10):
        thread = threading.Thread(target=use, args=(number,))
        thread.start()
        thread.join(30)

    assert len(backend._sessions._idle) == 1


def test_threads_that_ask_at_once_have_connections_of_their_own(backend):
    barrier = threading.Barrier(4, timeout=30)
    numbers = []

    def ask(session):
        barrier.wait()
        numbers.append(id(session))

    threads = [threading.Thread(target=backend._sessions.ask, args=(ask,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert len(set(numbers)) == 4


def test_connections_that_idle_for_long_are_closed_with_the_next_request(backend, monkeypatch):
    lent = [backend._sessions.lend() for _ in range(4)]
    for session in lent:
        backend._sessions.give_back(session)
    monkeypatch.setattr(table_connections, "IDLE", 0)

    backend.ping()

    assert list(backend._sessions._idle) == lent[-1:]


def test_a_row_that_was_purged_is_made_again(backend):
    held = backend.acquire(a_claim("a"), 0)
    waiter = Waiter(backend, "a")
    backend.release(held)
    backend.release(waiter.granted())
    DistLock.objects.using("locks").all().delete()

    assert isinstance(backend.acquire(a_claim("a"), 0), Grant)


def test_close_reaches_every_connection_and_the_backend_goes_on(backend):
    held = grab(backend, "a")
    before = connection_id(backend)

    backend.close()

    assert not backend._sessions._idle
    assert not parked(backend._sessions)
    assert backend.release(held) is True
    assert connection_id(backend) != before


def test_what_is_lent_while_the_others_are_closed_is_closed_as_it_comes_back(backend):
    session = backend._sessions.lend()
    backend.close()

    backend._sessions.give_back(session)

    assert not backend._sessions._idle and not backend._sessions._open


def test_more_callers_than_there_are_connections_find_the_lock_busy(backend, monkeypatch):
    monkeypatch.setattr(pool, "ANSWER_WAIT", 0.01)
    monkeypatch.setattr(inspection, "PARTS", [""])
    monkeypatch.setattr(backend._sessions, "semaphore", FairSemaphore(0))

    assert isinstance(backend.acquire(a_claim("a"), 0), Busy)
    assert isinstance(backend.look(a_claim("a")), Busy)
    assert backend.clear_expired() == backend.purge(0.0) == 0
    with pytest.raises(Contended, match="all connections of this process are busy"):
        backend.ping()


@on_server
def test_a_test_database_can_be_dropped_while_the_backend_lives(backend):
    grab(backend, "a")

    with connections["locks"]._nodb_cursor():
        assert not backend._sessions._idle
        assert not parked(backend._sessions)


@pytest.mark.parametrize("at_exit", ["exit", "_exit"])
def test_a_forked_child_leaves_its_parents_connections_alone(processes, at_exit):
    worker = processes.start("tests.database_workers:fork_and_go_on", name="a", at_exit=at_exit)

    answer = worker.result()
    assert (answer.pop("child"), answer.pop("said")) == (0, "")
    assert answer == {"same": True, "parked": True, "released": True}


def test_after_fork_nothing_inherited_is_used(backend):
    held = grab(backend, "a")
    backend.ping()

    backend.after_fork()

    assert not backend._sessions._idle
    assert not parked(backend._sessions)
    if held.session is not None:
        held.session.give_up()


@on_sqlite
def test_waiting_for_ones_own_transaction_is_refused_with_the_ways_out():
    backend = DatabaseBackend(alias="default", location="default")

    with transaction.atomic():
        Counter.objects.create(name="makes this a transaction that writes")
        with pytest.raises(BackendError, match=r"LOCATION"):
            backend.acquire(a_claim("a"), 0)

    assert isinstance(backend.acquire(a_claim("a"), 0), Grant)
    backend.close()


@on_sqlite
def test_a_file_that_somebody_else_writes_to_is_busy(backend, monkeypatch):
    monkeypatch.setitem(connections["locks"].settings_dict["OPTIONS"], "timeout", 0.1)
    held = grab(backend, "a")
    started, done = threading.Event(), threading.Event()

    def write():
        with transaction.atomic(using="locks"):
            Counter.objects.using("locks").create(name="x")
            started.set()
            done.wait(30)
        connections["locks"].close()

    writer = threading.Thread(target=write)
    writer.start()
    started.wait(30)
    try:
        for wait in 0, 5, 5:
            assert isinstance(backend.acquire(a_claim("b"), wait), Busy)
        with pytest.raises(BackendError):
            backend.extend(held, 30)
    finally:
        done.set()
        writer.join(30)
    assert backend.extend(held, 30) is True


def test_ping_and_check_find_nothing_wrong(backend):
    backend.ping()

    assert backend.check() == []
    assert backend.check(ask=True) == []


def test_check_names_a_missing_table(backend, monkeypatch):
    backend.ping()
    monkeypatch.setattr(backend._sessions.dialect, "table_name", "nothing")

    assert [message.id for message in backend.check(ask=True)] == ["distlock_app.E012"]


@pytest.mark.skipif(connection.vendor != "postgresql", reason="a setting of PostgreSQL")
def test_a_lock_table_that_can_only_be_read_is_an_error(monkeypatch):
    """As on a standby, where every lock fails."""
    options = {**connections["locks"].settings_dict["OPTIONS"]}
    options["options"] = "-c default_transaction_read_only=on"
    monkeypatch.setitem(connections["locks"].settings_dict, "OPTIONS", options)
    backend = DatabaseBackend(alias="default", location="locks")
    backend.ping()

    (found,) = backend.check(ask=True)

    assert found.id == "distlock_app.E011"
    assert found.msg.endswith("cannot execute UPDATE in a read-only transaction")
    with pytest.raises(BackendError, match=r"in a read-only transaction\Z"):  # no line break
        backend.acquire(a_claim("a"), 0)
    backend.close()


@pytest.mark.skipif(connection.vendor != "mysql", reason="other databases have one engine")
@pytest.mark.parametrize("engine", ["MyISAM", "InnoDB"])
def test_a_lock_table_without_transactions_is_an_error(backend, engine):
    table = f"ALTER TABLE {DistLock._meta.db_table} ENGINE = "
    with connections["locks"].cursor() as cursor:
        cursor.execute(table + engine)
    try:
        found = [message.id for message in backend.check(ask=True)]
    finally:
        with connections["locks"].cursor() as cursor:
            cursor.execute(table + "InnoDB")

    assert found == (["distlock_app.E019"] if engine == "MyISAM" else [])


@pytest.mark.skipif(connection.vendor != "postgresql", reason="PgBouncer is for PostgreSQL")
@pytest.mark.parametrize("known", [False, True])
def test_a_transaction_pooler_that_the_settings_do_not_name_is_an_error(known, monkeypatch):
    monkeypatch.setitem(connections["locks"].settings_dict, "DISABLE_SERVER_SIDE_CURSORS", known)
    backend = DatabaseBackend(alias="default", location="locks")
    backend.ping()
    # Several clients with one session.
    session = connections["locks"].copy()
    monkeypatch.setattr(type(session), "copy", lambda self, alias=None: session)

    found = [message.id for message in backend.check(ask=True)]

    assert found == ([] if known else ["distlock_app.E018"])
    backend.close()


@pytest.mark.skipif(connection.vendor != "postgresql", reason="PgBouncer is for PostgreSQL")
def test_no_queue_behind_a_pooler_that_gives_statements_names_of_its_own(monkeypatch):
    def prepare_once(self, statement):
        name = self.prepared[statement] = f"PGBOUNCER_{len(self.prepared)}"
        self.wait(statement, link.ANSWER_WAIT, link.Name(name))
        return name

    monkeypatch.setattr(link.PostgreSQLLink, "prepare_once", prepare_once)
    backend = DatabaseBackend(alias="default", location="locks")
    held = grab(backend, "a")

    assert held.session is None
    assert backend.release(held) is True
    backend.close()


def test_connections_of_our_own_are_out_of_no_pool(backend, monkeypatch):
    # A wrapper as those of django-db-geventpool and django-db-connection-pool.
    django_s = connections["locks"]
    django_s.ensure_connection()
    pooled = {"__module__": "django_db_geventpool.backends.base", "get_new_connection": None}
    wrapper = type("DatabaseWrapper", (type(django_s),), pooled)
    monkeypatch.setattr(django_s, "__class__", wrapper)
    monkeypatch.setitem(django_s.settings_dict["OPTIONS"], "MAX_CONNS", 1)

    assert backend.release(grab(backend, "a"))
    assert not [found for found in backend.check(ask=True) if found.is_serious()]


@pytest.mark.skipif(connection.vendor != "postgresql", reason="PgBouncer is for PostgreSQL")
def test_a_check_does_not_wait_for_a_pooler_that_has_no_session_left(monkeypatch):
    monkeypatch.setattr(link, "ANSWER_WAIT", 0.2)
    began = time.monotonic()

    assert one_server._asked_at_once("locks", "SELECT pg_sleep(60)") == []
    assert time.monotonic() - began < 30
    with connection.cursor() as cursor:  # which does not notice that nobody listens
        cursor.execute("""
            SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE query = 'SELECT pg_sleep(60)'""")


@pytest.mark.skipif(connection.vendor != "postgresql", reason="about psycopg")
def test_what_is_asked_for_again_and_again_is_prepared(backend):
    assert backend.release(grab(backend, "a"))
    session = backend._sessions.lend()

    # A statement that was prepared by PREPARE is unknown to Pgpool when it is to run.
    session.cursor.execute("SELECT statement FROM pg_prepared_statements WHERE NOT from_sql", None)
    prepared = [statement for (statement,) in session.cursor.fetchall()]
    backend._sessions.give_back(session)

    assert any("UPDATE" in statement for statement in prepared)


@on_server
def test_a_driver_s_cursor_behind_a_pooler_has_read_each_answer():
    with connection.cursor() as cursor:
        assert not PooledCursor(cursor, cursor, "BEGIN").awaiting_reply


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite needs a file of its own")
def test_a_server_may_keep_locks_beside_other_data():
    assert DatabaseBackend(alias="default", location="default").check() == []


@on_sqlite
@pytest.mark.parametrize("debug, found", [(False, ["distlock_app.W011"]), (True, [])])
def test_check_warns_in_production_of_locks_in_the_file_of_other_data(settings, debug, found):
    settings.DEBUG = debug

    messages = DatabaseBackend(alias="default").check()

    assert [message.id for message in messages] == found


def test_a_missing_table_is_an_error_that_says_so(backend, monkeypatch):
    grab(backend, "a")
    monkeypatch.setattr(backend._sessions.dialect, "READ", "SELECT 1 FROM nothing")

    with pytest.raises(BackendError, match="nothing") as raised:
        backend.look(a_claim("a"))

    assert isinstance(raised.value.__cause__, (ServerError, connection.Database.Error))


@on_mysql
@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        (Contended, [1020, 1205, 1213, 3572]),
        (ConnectionLost, [1053, 1927, 3169, 4031]),
        (BackendError, [1146]),
    ],
)
def test_the_code_of_an_error_says_whether_others_were_there_or_the_session_has_ended(
    backend, monkeypatch, kind, codes
):
    for code in codes:
        refusal = f"SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = {code}"
        monkeypatch.setattr(backend._sessions.dialect, "HOLDERS", refusal)
        with pytest.raises(BackendError) as raised:
            list(backend.holders())

        assert type(raised.value) is kind, code


@pytest.fixture
def latin1():
    """Have `locks` mean a database of PostgreSQL in LATIN1, with a lock table."""
    name = f"distlock_latin1_{os.getpid()}"
    cursor = connections["default"].cursor()
    cursor.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'")
    with patch.dict(connections["locks"].settings_dict, NAME=name):
        connections["locks"].close()
        with connections["locks"].schema_editor() as editor:
            editor.create_model(DistLock)
        yield
        connections["locks"].close()
    cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.skipif(connection.vendor != "postgresql", reason="tables of MySQL are in utf8mb4")
@pytest.mark.parametrize("name", ["é日本", "a" * 300, "é" + "日" * 300])
@pytest.mark.parametrize("how", [{}, {"shared": True}])
def test_a_database_may_lack_letters_of_a_name(latin1, name, how):
    backend = DatabaseBackend(alias="default", location="locks")
    try:
        grant = backend.acquire(a_claim(name, **how), 0)
        (held,) = backend.holders(grant.claim.key)
        released = backend.release(grant)
    finally:
        backend.close()

    shortened = "a" * 199 + r"\u2026", "é" + (r"\u65e5" * 198 + r"\u2026")[:254]
    assert held.name in (r"é\u65e5\u672c", *shortened)
    assert released is True


def test_a_driver_whose_options_are_others_is_named():
    wrapper = SimpleNamespace(Database=ModuleType("mysql.connector"), alias="shop")

    with pytest.raises(ImproperlyConfigured, match="'shop' need mysqlclient or PyMySQL"):
        adapt_to_mysql(wrapper)


def test_a_release_in_an_event_loop_may_connect(backend):
    held = grab(backend, "a")
    backend.close()

    async def release():
        return backend.release(held)

    assert asyncio.run(release()) is True
