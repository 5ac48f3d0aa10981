"""Readers, permits and latches on the lock table: who is inside together, what a row keeps."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from time import sleep

import pytest
from django.db import connection, connections, transaction
from django.utils import timezone

from distlock_app import Latch, Lock, LockBusy, lock_in_transaction
from distlock_app.backends.database import DatabaseBackend, inspection, members
from distlock_app.backends.sessions.pool import Contended
from distlock_app.claims import Grant
from distlock_app.models import DistLock
from distlock_app.testing.claims import a_claim
from tests.database_workers import given_back, lock_table
from tests.engines import running, until
from tests.sharing_workers import together, visits_of

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "locks"])

READER = {"shared": True}
KINDS = [READER, {"limit": 9}]

on_server = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server")


backend = pytest.fixture(params=["tuned", "generic"])(lock_table)


@pytest.fixture
def elsewhere():
    """Call a function in another thread, with connections of its own."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(60)
        pool.submit(connections.close_all).result(60)


def take(backend, **options):
    return backend.acquire(a_claim("a", **options), 0)


def rows():
    return DistLock.objects.using("locks")


# Over processes


@pytest.mark.slow
def test_64_processes_never_have_more_than_20_permits(processes, tmp_path):
    log = tmp_path / "log"

    processes.run(
        "tests.sharing_workers:visit",
        count=64,
        log=str(log),
        name="permits",
        kinds=["20"],
        hold=2.0,
        ttl=60,
        times=2,
        using="default",
    )

    visits = visits_of(log)
    inside = max(len(some) for some in together(visits))
    print(f"{inside} together")
    assert len(visits) == 64 * 2
    assert 10 < inside <= 20


def test_a_writer_is_alone_and_readers_are_not(processes, tmp_path):
    """The file in which the writers count has no other protection."""
    log = tmp_path / "log"
    log.write_text("0")

    processes.run(
        "tests.sharing_workers:visit",
        count=6,
        log=str(log),
        name="mixed",
        kinds=["reader", "reader", "writer"],
        hold=0.002,
        ttl=30,
        times=12,
        using="default",
    )

    visits = visits_of(log)
    for inside in together(visits):
        assert len(inside) == 1 or {one.kind for one in inside} == {"reader"}
    assert len(visits) == 6 * 12
    assert log.read_text() == str(6 * 4)


@pytest.mark.slow
def test_the_permits_of_killed_processes_come_back_after_their_ttl(processes, elsewhere):
    holders = processes.start_many(
        "tests.sharing_workers:hold_permit", count=2, name="a", limit=2, ttl=8.0, using="default"
    )
    for worker in holders:
        assert worker.read() == "holds"
    lock = Lock("a", limit=2, ttl=30)
    with pytest.raises(LockBusy):
        lock.acquire(wait=0)

    for worker in holders:
        worker.kill()

    one, other = elsewhere(lock.acquire, 30), lock.acquire(30)
    with pytest.raises(LockBusy):
        Lock("a", limit=2).acquire(wait=0)
    one.release()
    other.release()


# Who waits for whom


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_newcomers_wait_behind_a_writer_that_waits(backend, kind):
    inside = take(backend, **kind)
    got = threading.Event()

    def write():
        with Lock("a", using="locks", wait=60):
            got.set()

    with running(write):
        until(lambda: not (late := take(backend, **kind)) or not backend.release(late))
        assert not got.is_set()
        assert backend.release(inside) is True
        assert got.wait(60)


def test_newcomers_wait_behind_a_waiter_for_as_long_as_its_pauses_may_be(backend, monkeypatch):
    monkeypatch.setattr(members, "NEXT_US", 0)
    backend.poll_max = 60.0
    assert take(backend, **READER)

    assert backend.look(a_claim("a")) is not None

    assert not take(backend, **READER)


def test_a_waiter_that_looks_again_and_again_leaves_the_row_alone(backend, monkeypatch):
    monkeypatch.setattr(members, "NEXT_US", 60_000_000)
    assert take(backend, **READER)
    waiter = a_claim("a")
    assert backend.look(waiter) is not None
    row = rows().values().get(name="a")

    assert backend.look(waiter) is not None

    assert rows().values().get(name="a") == row


def test_the_first_waiter_keeps_its_place_before_it_is_over_and_no_other_takes_it(
    backend, monkeypatch
):
    monkeypatch.setattr(members, "NEXT_US", 20_000_000)
    assert take(backend, **READER)
    waiter = a_claim("a")
    assert backend.look(waiter) is not None
    row = rows().values().get(name="a")
    monkeypatch.setattr(members, "NEXT_US", 60_000_000)  # it has less than half of it

    assert backend.look(a_claim("a")) is not None
    assert rows().values().get(name="a") == row

    assert backend.look(waiter) is not None
    assert rows().values().get(name="a") != row


def test_a_waiter_that_died_is_waited_for_no_longer_than_a_moment(backend, monkeypatch):
    inside = take(backend, **READER)
    waiter, dead = a_claim("a"), a_claim("a")

    monkeypatch.setattr(members, "NEXT_US", 200_000)
    assert backend.look(dead) is not None
    until(lambda: take(backend, **READER))

    monkeypatch.setattr(members, "NEXT_US", 60_000_000)
    until(lambda: backend.look(waiter) is not None and not take(backend, **READER))
    assert backend.extend(inside, 30) is True


def test_a_waiter_that_has_come_in_keeps_nobody_out(backend, monkeypatch):
    monkeypatch.setattr(members, "NEXT_US", 60_000_000)
    inside = [take(backend, limit=2) for _ in range(2)]
    waiter = a_claim("a", limit=2)
    assert backend.look(waiter) is not None

    assert backend.release(inside[0])
    assert not take(backend, limit=2)
    assert backend.acquire(waiter, 0)

    assert backend.release(inside[1])
    assert take(backend, limit=2)


def test_a_try_that_does_not_wait_keeps_nobody_out(backend):
    assert take(backend, **READER)

    assert not take(backend)

    assert take(backend, **READER)


@on_server
def test_only_the_first_in_the_queue_keeps_newcomers_out():
    ahead, behind = a_claim("a"), a_claim("a")
    first, second = (DatabaseBackend(alias="default", location="locks") for _ in range(2))
    assert take(first, **READER)
    assert not first.acquire(ahead, 60)
    until(lambda: first.look(ahead) is None)  # called

    assert not second.acquire(behind, 60)
    assert second.look(behind) is not None
    assert take(first, **READER)

    assert not first.acquire(ahead, 60)
    until(lambda: first.look(ahead) is not None and not take(first, **READER))
    for backend, claim in (first, ahead), (second, behind):
        backend.withdraw(claim)
        backend.close()


@on_server
def test_waiters_of_all_kinds_come_in_as_they_arrived():
    backend = DatabaseBackend(alias="default", location="locks")
    order = []

    def work(number, kind):
        with Lock("a", using="locks", wait=60, **kind):
            order.append(number)

    kinds = [READER, {}, {"limit": 2}, {}, READER, {"limit": 2}]
    held = take(backend)
    threads = [threading.Thread(target=work, args=item) for item in enumerate(kinds)]
    for number, thread in enumerate(threads):
        thread.start()
        until(lambda n=number: len(waiters_of("a")) == n + 1)
    backend.release(held)
    for thread in threads:
        thread.join(60)

    assert order == sorted(order) == list(range(len(kinds)))
    backend.close()


def waiters_of(name):
    from distlock_app.core.registry import registry

    queues = registry["locks"].backend._sessions.queues.by_key
    return [waiter for queue in list(queues.values()) for waiter in list(queue.waiters)]


@pytest.mark.parametrize("kind", [READER, {"limit": 2}], ids=str)
def test_who_is_inside_and_asks_again_is_inside_once(backend, kind):
    claims = [a_claim("a", **kind) for _ in range(2)]
    grants = [backend.acquire(claim, 0) for claim in claims]

    assert backend.look(claims[0]) is None
    assert backend.acquire(claims[0], 0).fence == grants[0].fence

    assert len(list(backend.holders())) == 2


def test_a_permit_is_waited_for_until_the_first_of_them_ends(backend):
    assert take(backend, limit=2, ttl=5) and take(backend, limit=2, ttl=60)

    assert take(backend, limit=2).free_in <= 5


@pytest.mark.parametrize("kind", [READER, {}], ids=str)
def test_a_claim_ends_sooner_only_if_that_is_asked_for(backend, kind):
    grant = take(backend, ttl=60, **kind)

    assert backend.extend(grant, 5) is True
    assert next(backend.holders()).expires_in > 50
    assert backend.end_in(grant, 5) is True
    assert next(backend.holders()).expires_in <= 5


@pytest.mark.parametrize("kind", [{}, READER])
def test_what_others_wrote_about_a_holder_breaks_no_list(backend, kind):
    """Pages and commands compute with it."""
    claim = a_claim("a", holder='{"ttl":NaN,"at_least":1e400,"who":[[]],"host":"there"}', **kind)

    assert backend.acquire(claim, 0)
    assert next(backend.holders()).holder == {"host": "there"}


def test_a_text_about_a_holder_that_cannot_be_read_stops_nobody(backend):
    take(backend)
    rows().update(holder="[" * 50_000)

    assert next(backend.holders()).holder == {}
    assert not take(backend, **READER)


def test_a_row_that_others_change_all_the_time_is_given_up(backend, monkeypatch):
    grant = take(backend, **READER)
    monkeypatch.setattr(members, "ROW_WAIT", 0.0)
    monkeypatch.setattr(backend._sessions.dialect, "replace", lambda *_: False)

    assert not take(backend, **READER)
    with pytest.raises(Contended, match="all the time"):
        backend.release(grant)


def test_permits_are_counted_also_when_all_come_at_once(backend):
    """Each thread reads the row, decides, and writes it: none of them on old facts."""
    inside, most, errors = [], [], []

    def work():
        try:
            for _ in range(5):
                claim = a_claim("a", limit=3)
                grants = []
                until(lambda c=claim, g=grants: g.append(backend.acquire(c, 0)) or g[-1], 60)
                inside.append(claim)
                most.append(len(inside))
                until(lambda: max(most) > 1, 60)  # the first holder stays until it has company
                sleep(0.02)
                inside.remove(claim)
                until(partial(given_back, backend, grants[-1]), 60)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert errors == []
    assert 1 < max(most) <= 3


def test_an_expired_mutex_makes_room_and_does_not_come_back(backend):
    late = take(backend, ttl=0.1)

    reader = []
    until(lambda: reader.append(take(backend, **READER)) or reader[-1])

    assert reader[-1].fence > late.fence
    assert backend.extend(late, 30) is False
    assert backend.release(late) is False
    assert take(backend, **READER)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_and_a_transaction_that_locks_the_row_keep_each_other_out(kind, elsewhere):
    lock = Lock("a", wait=0, **kind)

    def outcome(work):
        try:
            work()
        except LockBusy:
            return "busy"
        return "done"

    def in_transaction():
        with transaction.atomic():
            lock_in_transaction("a", wait=0)

    with lock as hold:
        assert elsewhere(outcome, in_transaction) == "busy"
        hold.extend()
    with transaction.atomic():
        fence = lock_in_transaction("a")
        assert elsewhere(outcome, lambda: lock.acquire().release()) == "busy"
    assert elsewhere(outcome, in_transaction) == "done"
    with lock as again:
        assert again.fence > fence > hold.fence


# What one row keeps


def test_reading_costs_two_requests_to_begin_and_two_to_end():
    backend = DatabaseBackend(alias="default", location="locks")
    backend.release(take(backend, **READER))  # the row is there from now on
    asked = []
    dialect = backend._sessions.dialect
    execute = type(dialect).execute
    dialect.execute = lambda *args: asked.append(args[1]) or execute(dialect, *args)

    backend.release(take(backend, **READER))

    assert asked == [dialect.READ, dialect.REPLACE] * 2
    backend.close()


def test_many_are_extended_by_one_change_of_their_row(backend):
    grants = [take(backend, ttl=5, **READER) for _ in range(5)]
    gone, alone = grants.pop(2), backend.acquire(a_claim("b", ttl=5), 0)
    backend.release(gone)
    fence = rows().get(name="a").fence

    work = [(grant, 60) for grant in (gone, *grants, alone)]
    assert backend.extend_many(work) == [False, *[True] * 5]

    assert all(holding.expires_in > 50 for holding in backend.holders())
    assert rows().get(name="a").fence > fence
    assert len(list(backend.holders())) == 5


def test_a_stable_owner_that_reads_twice_is_extended_for_the_longer_time(backend):
    grant = take(backend, ttl=5, stable=True, **READER)

    assert backend.extend_many([(grant, 60), (grant, 10)]) == [True, True]

    (holding,) = backend.holders()
    assert holding.expires_in > 50


@on_server
def test_a_row_that_is_locked_is_waited_for_once_for_all_who_hold_it(backend, elsewhere):
    grants = [take(backend, **READER) for _ in range(5)]
    asked = []
    ask = backend._sessions.ask
    backend._sessions.ask = lambda *work, **how: asked.append(work) or ask(*work, **how)

    with transaction.atomic("locks"):
        list(rows().select_for_update())
        answers = elsewhere(backend.extend_many, [(grant, 60) for grant in grants])

    assert [type(answer) for answer in answers] == [Contended] * 5
    assert len(asked) == 1


def test_a_process_that_stops_as_it_asks_finds_a_new_name_free(backend, monkeypatch):
    monkeypatch.setattr(members, "ROW_WAIT", 0.0)  # it is over when the answer comes

    assert take(backend, **READER)
    assert backend.count_down(a_claim("b", latch=True, limit=1)) == 1


def test_people_prolong_and_clear_one_of_several(backend):
    kept, other = take(backend, ttl=5, limit=2), take(backend, ttl=5, limit=2)
    key = kept.claim.key

    assert backend.prolong(key, str(kept.fence), 3600) is True
    assert backend.prolong(key, str(other.fence + 1), 3600) is False
    assert backend.prolong(a_claim("never").key, str(kept.fence), 3600) is False
    assert backend.clear(key, str(other.fence)) == 1

    (holding,) = backend.holders(key)
    assert (holding.kind, holding.fence, holding.version) == ("permit", kept.fence, str(kept.fence))
    assert 3500 < holding.expires_in <= 3600 and 0 <= holding.held_for < 60
    assert holding.holder["host"] == "elsewhere"
    assert backend.extend(other, 30) is False
    assert take(backend, limit=2).fence > other.fence


def test_clearing_one_that_has_expired_takes_nothing_from_the_others(backend):
    kept, gone = take(backend, ttl=30, **READER), take(backend, ttl=0.1, **READER)
    until(lambda: len(list(backend.holders())) == 1)

    assert backend.clear(gone.claim.key, str(gone.fence)) == 0

    assert backend.extend(kept, 30) is True


def test_no_list_shows_a_token(backend):
    grants = [take(backend, **READER) for _ in range(2)]
    backend.count_down(a_claim("b", latch=True, limit=2))

    listed = repr([*backend.holders(), *backend.page(0, 9)[0]])

    assert len(list(backend.holders())) == 2
    assert backend.page(0, 9)[1] == 1  # locks, not holders, are counted
    assert not [grant for grant in grants if grant.claim.owner in listed]


def test_clearing_up_knows_the_rows_of_readers_and_latches(backend, monkeypatch):
    monkeypatch.setattr(inspection, "PARTS", [""])  # one statement instead of 256
    take(backend, ttl=0.1, **READER)
    backend.count_down(a_claim("b", ttl=3600, latch=True, limit=2))
    until(lambda: backend.left_over(3600) == (1, 0))

    assert backend.clear_expired() == 1
    assert backend.purge(3600) == 0
    past = timezone.now() - timedelta(days=2)
    rows().filter(name="a").update(expiry=past)

    assert backend.purge(3600) == 1
    assert backend.counted(a_claim("b").key) == 1


def test_a_row_that_says_something_else_is_taken_for_held(backend):
    reader = take(backend, **READER)
    rows().update(holder="[]")

    assert not take(backend, **READER)
    assert not take(backend)
    assert backend.release(reader) is False
    assert backend.clear(reader.claim.key) == 1
    assert take(backend)


def test_a_latch_counts_a_party_once_and_says_so_to_all_who_wait(elsewhere):
    latch = Latch("import", 2, ttl=60)
    assert latch.count_down(by="customers") == latch.count_down(by="customers") == 1
    assert latch.wait(0.05) is False

    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(latch.wait, 60) for _ in range(3)]
        assert elsewhere(partial(latch.count_down, by="orders")) == 0
        assert [one.result(60) for one in waiting] == [True] * 3
        for _ in range(4):
            pool.submit(connections.close_all)
    assert not Lock("import").locked()


def test_tasks_wait_for_permits_and_latches():
    async def work():
        latch, lock = Latch("import", 5, ttl=60), Lock("a", limit=2, wait=60)

        async def part(number):
            async with lock:
                await asyncio.sleep(0.01)
            await latch.acount_down(by=str(number))
            return await latch.await_(60)

        return await asyncio.gather(*(part(number) for number in range(5)))

    assert asyncio.run(work()) == [True] * 5


def test_what_gives_up_waiting_at_a_latch_leaves_nothing(backend):
    waiter = a_claim("b", latch=True, limit=1)
    assert not backend.acquire(waiter, 5)

    assert backend.release(Grant(waiter)) is False

    assert not rows().exists()
