"""The verbs of the lock table, one by one, and exclusion by a retry loop over them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.utils import timezone

from distlock_app.backends.database import DatabaseBackend, inspection, members
from distlock_app.backends.database.backend import BATCH
from distlock_app.backends.sessions.pool import Contended
from distlock_app.claims import Busy, Grant
from distlock_app.errors import BackendError
from distlock_app.models import DistLock
from distlock_app.testing.claims import a_claim
from tests.database_workers import given_back, grab, lock_table
from tests.engines import until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "locks"])

NASTY = ["job", "JOB", "job ", " job", "jöb", "jo\u0308b", "job\x00", "job\x00x", "{job}", "%s",
         "'; --", "\u202ejob", "\ud800", "日本", "🔒", "a" * 10_000, "a" * 9_999]  # fmt: skip


backend = pytest.fixture(params=["tuned", "generic"])(lock_table)


def rows():
    return DistLock.objects.using("locks")


@pytest.fixture
def one_part(monkeypatch):
    """Clear up by one statement instead of 256, where it does not matter how keys begin."""
    monkeypatch.setattr(inspection, "PARTS", [""])


def test_a_lock_is_granted_to_one_and_others_are_told_how_long_it_may_take(backend):
    first = backend.acquire(a_claim("a", ttl=30), 0)

    second = backend.acquire(a_claim("a"), 0)

    assert isinstance(first, Grant)
    assert isinstance(second, Busy)
    assert 20 < second.free_in <= 30


def test_the_same_owner_again_is_granted_again_with_the_same_fence(backend):
    wanted = a_claim("a", ttl=5)
    first = backend.acquire(wanted, 0)
    since = rows().get().acquired_at

    again = backend.acquire(a_claim("a", owner=wanted.owner, ttl=20), 0)

    assert again.fence == first.fence
    assert rows().get().acquired_at == since
    assert backend.look(a_claim("a")).free_in > 19


def test_a_lock_taken_before_the_clock_was_set_back_is_held_for_no_time(backend):
    grab(backend, "a")
    rows().update(acquired_at=rows().get().acquired_at + timedelta(hours=3))

    [held] = backend.holders()

    assert held.held_for == 0  # `distlock list` leaves out what is held for less than --held-for


def test_release_spares_the_next_owner(backend):
    first = grab(backend, "a")
    backend.release(first)
    grab(backend, "a")

    assert backend.release(first) is False
    assert isinstance(backend.acquire(a_claim("a"), 0), Busy)


def test_release_is_safe_for_a_claim_that_never_was(backend):
    assert backend.release(Grant(a_claim("never"))) is False


def test_extend_is_refused_to_anybody_but_the_owner(backend):
    held = grab(backend, "a", ttl=5)

    assert backend.extend(Grant(a_claim("a")), 60) is False
    assert backend.extend(held, 20) is True
    assert 10 < backend.look(a_claim("a")).free_in <= 20


def test_an_expired_lock_is_taken_over_with_a_greater_fence(backend):
    dead = grab(backend, "a", ttl=0.05)
    time.sleep(0.1)

    taken = backend.acquire(a_claim("a"), 0)

    assert taken.fence > dead.fence
    assert backend.extend(dead, 30) is False
    assert backend.release(dead) is False


def test_an_expired_lock_that_nobody_wanted_is_still_its_owners(backend):
    late = grab(backend, "a", ttl=0.05)
    time.sleep(0.1)

    assert backend.extend(late, 30) is True
    assert isinstance(backend.acquire(a_claim("a"), 0), Busy)


def test_a_free_or_own_or_expired_lock_is_worth_another_try(backend):
    assert backend.look(a_claim("never")) is None
    held = grab(backend, "a", ttl=0.05)
    assert backend.look(held.claim) is None
    time.sleep(0.1)
    assert backend.look(a_claim("a")) is None
    backend.release(held)
    assert backend.look(a_claim("a")) is None


def test_fences_grow_from_owner_to_owner(backend):
    fences = []
    for _ in range(20):
        grant = grab(backend, "a")
        backend.release(grant)
        fences.append(grant.fence)

    assert fences == sorted(set(fences))


@pytest.mark.skipif(connection.vendor != "mysql", reason="about MySQL and MariaDB")
def test_fences_grow_from_owner_to_owner_beside_a_trigger(backend):
    table = DistLock._meta.db_table
    with connections["locks"].cursor() as cursor:
        for when in ("UPDATE", "INSERT"):
            cursor.execute(
                f"CREATE TRIGGER distlock_{when} BEFORE {when} ON {table}"
                " FOR EACH ROW SET NEW.name = UPPER(NEW.name)"
            )
    try:
        fences = []
        for _ in range(3):
            grant = grab(backend, "a")
            fences.append(grant.fence)
            backend.release(grant)
        with transaction.atomic(using="locks"):
            locked = backend.lock_row(grant.claim.key, grant.claim.name, 0)
            if locked is not None:  # else by a lease
                fences.append(locked)
    finally:
        with connections["locks"].cursor() as cursor:
            cursor.execute("DROP TRIGGER distlock_UPDATE")
            cursor.execute("DROP TRIGGER distlock_INSERT")
    assert all(fences)
    assert fences == sorted(set(fences))


@pytest.mark.usefixtures("one_part")
def test_fences_grow_on_after_a_purge(backend):
    before = grab(backend, "a")
    backend.release(before)
    time.sleep(0.01)

    assert backend.purge(0.0) == 1
    assert rows().count() == 0
    assert grab(backend, "a").fence > before.fence


@pytest.mark.skipif(connection.vendor != "sqlite", reason="a server locks rows, not everything")
@pytest.mark.parametrize("backend", ["tuned"], indirect=True)
@pytest.mark.usefixtures("one_part")
def test_a_purge_deletes_few_rows_by_one_statement(backend, monkeypatch):
    DistLock.objects.using("locks").bulk_create(
        DistLock(key=f"{number:040x}", name="old", expiry=timezone.now() - timedelta(days=1))
        for number in range(1201)
    )
    backend.ping()
    dialect, deleted = backend._sessions.dialect, []
    real = dialect.purge
    monkeypatch.setattr(dialect, "purge", lambda *args: deleted.append(real(*args)) or deleted[-1])

    assert backend.purge(60.0) == 1201
    assert deleted == [500, 500, 201]


@pytest.mark.skipif(connection.vendor != "postgresql", reason="only there Django makes another")
def test_keys_have_one_index():
    with connections["locks"].cursor() as cursor:
        found = connections["locks"].introspection.get_constraints(cursor, DistLock._meta.db_table)

    assert [one for one in found.values() if one["columns"] == ["key"] and one["index"]] == []


@pytest.mark.usefixtures("one_part")
def test_a_purge_spares_what_is_held_or_was_held_lately(backend):
    backend.release(grab(backend, "lately"))
    grab(backend, "held", ttl=600)

    assert backend.purge(300) == 0
    time.sleep(0.01)
    assert backend.purge(0.0) == 1
    assert rows().get().name == "held"


@pytest.mark.usefixtures("one_part")
def test_clearing_what_expired_ends_it_for_its_holder_and_spares_what_is_held(backend):
    late = grab(backend, "late", ttl=0.1)
    held = grab(backend, "held")
    backend.release(grab(backend, "free"))
    time.sleep(0.2)

    assert backend.left_over(3600) == (1, 0)
    assert backend.left_over(0) == (1, 2)
    assert backend.clear_expired() == 1
    assert backend.left_over(0)[0] == 0
    assert backend.extend(late, 30) is False
    assert backend.extend(held, 30) is True
    assert grab(backend, "late").fence > late.fence


def test_what_expired_is_cleared_and_purged_however_its_key_begins(backend, monkeypatch, request):
    if "generic" in request.node.name:  # it takes any part alike: these are fewer statements
        monkeypatch.setattr(inspection, "PARTS", list("0123456789abcdef"))
    DistLock.objects.using("locks").bulk_create(
        DistLock(key=f"{number:02x}" * 20, owner="dead", expiry=timezone.now() - timedelta(days=1))
        for number in range(256)
    )

    assert backend.clear_expired() == 256
    time.sleep(0.01)
    assert backend.purge(0.0) == 256


def test_clear_takes_only_the_claim_that_was_seen(backend):
    seen = grab(backend, "a")
    backend.release(seen)
    now = grab(backend, "a")

    assert backend.clear(now.claim.key, str(seen.fence)) == 0
    assert backend.clear(now.claim.key, "no number") == 0
    assert backend.extend(now, 30) is True
    assert backend.clear(now.claim.key, str(now.fence)) == 1
    assert backend.extend(now, 30) is False
    assert backend.clear(now.claim.key) == 0


def test_clear_leaves_the_old_fence_behind(backend):
    held = grab(backend, "a")

    assert backend.clear(held.claim.key) == 1
    assert rows().get().fence > held.fence
    assert grab(backend, "a").fence > held.fence


def test_holders_lists_the_live_ones_without_their_secrets(backend):
    held = grab(backend, "invoice:42", ttl=30)
    grab(backend, "dead", ttl=0.01)
    backend.release(grab(backend, "free"))
    time.sleep(0.05)

    (shown,) = backend.holders()

    assert (shown.name, shown.key, shown.fence) == ("invoice:42", held.claim.key, held.fence)
    assert (shown.version, shown.alias) == (str(held.fence), "default")
    assert 20 < shown.expires_in <= 30
    assert 0 <= shown.held_for < 30
    assert shown.holder["pid"]
    assert held.claim.owner not in repr(shown)


def test_holders_of_one_key_are_only_its_own(backend):
    held = grab(backend, "a")
    grab(backend, "b")

    assert [shown.key for shown in backend.holders(held.claim.key)] == [held.claim.key]


def test_holders_are_read_page_by_page(backend, monkeypatch):
    keys = {grab(backend, f"n{number}").claim.key for number in range(5)}
    dialect = backend._sessions.dialect
    monkeypatch.setattr(dialect, "holders", partial(dialect.holders, count=2))
    monkeypatch.setattr(inspection, "PAGE", 2)

    assert sorted(shown.key for shown in backend.holders()) == sorted(keys)


def test_many_are_extended_at_once_and_the_lost_ones_are_named(backend):
    claims = [a_claim(f"n{number}", ttl=5) for number in range(BATCH + 20)]
    soon = timezone.now() + timedelta(seconds=5)
    rows().bulk_create(
        DistLock(key=claim.key, name=claim.name, owner=claim.owner, expiry=soon, fence=1)
        for claim in claims
    )
    work = [(Grant(claim), 20.0) for claim in claims]
    work += [(grab(backend, "long", ttl=5), 40.0)]
    backend.clear(claims[250].key)

    results = backend.extend_many(work)

    assert results == [place != 250 for place in range(len(work))]
    for name in ("n0", claims[-1].name):
        assert 10 < backend.look(a_claim(name)).free_in <= 20
    assert 25 < backend.look(a_claim("long")).free_in <= 40
    assert backend.extend_many([]) == []


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite locks files, not rows")
def test_a_row_in_somebodys_transaction_does_not_cost_the_others_their_locks(backend):
    work = [(grab(backend, name, ttl=5), 20.0) for name in "abc"]

    with transaction.atomic(using="locks"):
        rows().select_for_update().get(key=work[1][0].claim.key)
        busy = backend.acquire(a_claim("b"), 0)
        results = backend.extend_many(work)

    assert isinstance(busy, Busy)
    assert (results[0], results[2]) == (True, True)
    assert isinstance(results[1], BackendError)
    assert backend.extend_many(work) == [True, True, True]


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite locks files, not rows")
@pytest.mark.parametrize("kind", [{}, {"shared": True}])
def test_a_row_in_somebodys_transaction_is_waited_for_once(backend, monkeypatch, kind):
    in_the_way = backend.acquire(replace(a_claim("a"), **kind), 0)
    work = [(in_the_way, 20.0), (grab(backend, "b"), 20.0)]
    key, waits = in_the_way.claim.key, []
    of_one, of_many = members.extend, backend._sessions.dialect.extend
    monkeypatch.setattr(
        members,
        "extend",
        lambda key, *rest, **how: waits.append([key]) or of_one(key, *rest, **how),
    )
    monkeypatch.setattr(
        backend._sessions.dialect,
        "extend",
        lambda cursor, pairs, *rest, **how: (
            waits.append(dict(pairs)) or of_many(cursor, pairs, *rest, **how)
        ),
    )

    with transaction.atomic(using="locks"):
        rows().select_for_update().get(key=key)
        results = [backend.extend_many(work) for _ in range(3)]

    assert [isinstance(ours, BackendError) for ours, _ in results] == [True] * 3
    assert [other for _, other in results] == [True] * 3
    assert sum(key in keys for keys in waits) == 1
    assert backend.extend_many(work) == [True, True]


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite locks files, not rows")
def test_a_failure_of_the_server_is_met_once_for_all_that_it_was_to_extend(backend, monkeypatch):
    work = [(grab(backend, name), 20.0) for name in "abc"]
    asked = []

    def fail(cursor, pairs, *_, **how):
        asked.append(pairs)
        cursor.execute("SELECT 1 FROM nothing")

    monkeypatch.setattr(backend._sessions.dialect, "extend", fail)
    results = backend.extend_many(work)

    assert [type(result) for result in results] == [BackendError] * 3
    assert len(asked) == 1


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite locks files, not rows")
def test_after_it_was_locked_a_row_is_extended_by_the_ttl_of_each_stable_owner(backend):
    short, claim = grab(backend, "a", ttl=5), a_claim("a", ttl=40)
    long = backend.acquire(replace(claim, owner=short.claim.owner), 0)
    backend.end_in(short, 5)
    work = [(short, 5.0), (long, 40.0)]

    with transaction.atomic(using="locks"):
        rows().select_for_update().get(key=short.claim.key)
        refused = backend.extend_many(work)

    assert [type(answer) for answer in refused] == [Contended] * 2
    assert backend.extend_many(work) == [True, True]
    assert 25 < backend.look(a_claim("a")).free_in <= 40


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite locks files, not rows")
@pytest.mark.parametrize("kinds", [({"shared": True}, {}), ({}, {"shared": True})])
def test_after_its_row_was_locked_a_lock_outlives_a_lost_one_of_another_kind(backend, kinds):
    lost, kept = (replace(a_claim("a"), **kind) for kind in kinds)
    lost = backend.acquire(lost, 0)
    backend.clear(lost.claim.key)
    kept = backend.acquire(kept, 0)
    work = [(lost, 20.0), (kept, 20.0)]

    with transaction.atomic(using="locks"):
        rows().select_for_update().get(key=lost.claim.key)
        backend.extend_many(work)

    assert backend.extend_many(work) == [False, True]


def test_names_are_exact_to_the_last_byte_and_shown_as_text(backend):
    grants = [backend.acquire(a_claim(name), 0) for name in NASTY]

    assert all(isinstance(grant, Grant) for grant in grants)
    shown = {holding.key: holding.name for holding in backend.holders()}
    assert len(shown) == len(NASTY)
    assert {"日本", "🔒", "job\\x00", "\\u202ejob"} <= set(shown.values())


def test_new_names_under_repeatable_read_give_no_errors(processes):
    isolation = {"DISTLOCK_TEST_ISOLATION": "repeatable read"}

    fences = processes.run(
        "tests.database_workers:take_each", count=8, env=isolation, prefix="new", names=40
    )

    for number in range(40):
        assert len({of_worker[number] for of_worker in fences}) == 8


def test_an_unprotected_counter_loses_nothing_between_processes(processes, tmp_path):
    path = tmp_path / "counter"
    path.write_text("0")

    fences = processes.run("tests.database_workers:count", count=8, path=str(path), times=25)

    assert path.read_text() == "200"
    assert all(of_worker == sorted(of_worker) for of_worker in fences)
    assert len({fence for of_worker in fences for fence in of_worker}) == 200


def test_an_unprotected_counter_loses_nothing_between_threads(backend):
    total = 0

    def add():
        nonlocal total
        for _ in range(10):
            grant = grab(backend, "counter")
            number = total
            time.sleep(0.0005)
            total = number + 1
            until(partial(given_back, backend, grant))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert total == 40


def test_a_lock_is_seen_by_others_whatever_becomes_of_the_callers_transaction(backend):
    with transaction.atomic(using="locks"):
        list(rows().all())
        held = grab(backend, "a")
        assert isinstance(
            DatabaseBackend(alias="b", location="locks").acquire(a_claim("a"), 0), Busy
        )
        transaction.set_rollback(True, using="locks")

    assert backend.release(held) is True


def test_a_broken_transaction_of_the_caller_does_not_matter(backend):
    with transaction.atomic(using="locks"):
        with pytest.raises(Exception, match="nonsense"):
            connections["locks"].cursor().execute("SELECT nonsense")
        held = grab(backend, "a")
        assert backend.extend(held, 30) is True
        assert backend.release(held) is True
        transaction.set_rollback(True, using="locks")


def test_the_table_is_compared_to_the_last_byte_whatever_the_database_defaults_to():
    if connection.vendor == "mysql":
        with connections["locks"].cursor() as cursor:
            cursor.execute(
                "SELECT table_collation, engine FROM information_schema.tables"
                " WHERE table_schema = DATABASE() AND table_name = %s",
                [DistLock._meta.db_table],
            )
            assert cursor.fetchone() == ("utf8mb4_bin", "InnoDB")
    DistLock.objects.create(key="a", name="a", expiry=timezone.now())
    DistLock.objects.create(key="A", name="🔒", expiry=timezone.now())

    assert DistLock.objects.get(key="A").name == "🔒"


def test_the_migration_is_complete():
    call_command("makemigrations", "distlock_app", check=True, dry_run=True, verbosity=0)
