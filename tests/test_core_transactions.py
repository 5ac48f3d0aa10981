"""Locks and transactions of the real database: the lock outlives commit and rollback."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from unittest import mock

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, IntegrityError, connection, connections, transaction
from django.test import TestCase

from distlock_app import (
    Lock,
    LockBusy,
    LockError,
    LockLost,
    NotHeld,
    all_of,
    current_hold,
    locked,
)
from distlock_app.core import entered, lease
from distlock_app.core.acquiring import held_by_runner, release_half_taken
from distlock_app.core.releasing import releaser
from distlock_app.core.renewal import renewer
from distlock_app.primitives import identity, transactions
from distlock_app.signals import lock_lost, lock_released
from distlock_app.testing import lose
from tests import engines
from tests.app.models import Counter
from tests.engines import DEADLINE, running, until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "locks"])

engine = pytest.fixture(engines.install)


class Stop(Exception):
    pass


def held(engine):
    return bool(list(engine.holders()))


def stored():
    """Return what another connection sees."""
    answers = []

    def look():
        answers.append(Counter.objects.count())
        connections.close_all()

    with running(look):
        pass
    return answers[0]


def test_a_lock_taken_inside_a_block_is_kept_until_the_commit(engine):
    with transaction.atomic():
        with Lock("a"):
            Counter.objects.create(name="a")
        assert held(engine)
        assert stored() == 0

    assert not held(engine)
    assert stored() == 1


def test_a_lock_taken_inside_a_block_is_kept_until_the_rollback(engine):
    with pytest.raises(Stop), transaction.atomic():
        with Lock("a"):
            Counter.objects.create(name="a")
        assert held(engine)
        raise Stop

    until(lambda: not held(engine))
    assert stored() == 0


def test_the_body_that_raises_keeps_the_lock_until_the_rollback(engine):
    with pytest.raises(Stop), transaction.atomic():
        try:
            with Lock("a"):
                raise Stop
        finally:
            assert held(engine)

    until(lambda: not held(engine))


def test_a_hold_taken_before_the_block_and_released_inside_waits_for_its_end(engine):
    hold = Lock("a").acquire()

    with transaction.atomic():
        Counter.objects.create(name="a")
        hold.release()
        assert held(engine)

    assert not held(engine)


def test_a_savepoint_that_rolls_back_does_not_end_the_wait(engine):
    with transaction.atomic():
        with pytest.raises(Stop), transaction.atomic():
            with Lock("a"):
                pass
            raise Stop
        assert held(engine)

    assert not held(engine)


def test_a_savepoint_that_commits_does_not_end_the_wait(engine):
    with transaction.atomic():
        with transaction.atomic():
            with Lock("a"):
                pass
        assert held(engine)

    assert not held(engine)


def test_a_lock_may_be_taken_again_in_the_block_that_keeps_it(engine):
    with transaction.atomic():
        for _ in range(3):
            with Lock("a", wait=0):
                pass
        with Lock("a", wait=0, reentrant=False):
            pass
        assert engine.asked == ["acquire"]

    assert engine.asked == ["acquire", "release"]
    assert not held(engine)


def test_the_inner_of_two_is_kept_until_the_commit_though_the_outer_ends_at_once(engine):
    with transaction.atomic():
        with Lock("a", release="now"):
            with Lock("a"):
                Counter.objects.create(name="a")
        assert held(engine)
        assert stored() == 0

    assert not held(engine)


def test_a_lock_taken_again_inside_the_block_and_lost_before_the_commit_rolls_it_back(engine):
    with pytest.raises(LockLost), Lock("a") as hold:
        with transaction.atomic():
            with Lock("a"):
                Counter.objects.create(name="a")
            lose(hold)

    assert stored() == 0


def test_a_lock_taken_again_is_kept_beyond_the_block_by_its_new_hold(engine):
    with transaction.atomic():
        with Lock("a"):
            pass
        hold = Lock("a", wait=0).acquire()

    assert held(engine)
    hold.check()
    hold.release()
    assert not held(engine)


def test_what_an_interrupt_kept_from_its_caller_leaves_a_lock_that_waits_for_the_commit(engine):
    lock = Lock("a")
    with transaction.atomic():
        with lock:
            pass
        before = held_by_runner(lock)
        _kept = lock.acquire()  # as the traceback of the signal's exception keeps it

        release_half_taken(lock, before)

        assert not engines.free(engine)
        _kept.release()
    until(lambda: engines.free(engine))


def test_after_a_rollback_the_lock_can_be_taken_again_at_once(engine):
    for _ in range(50):
        with pytest.raises(Stop), transaction.atomic():
            with Lock("a", wait=0):
                raise Stop

        with Lock("a", wait=0) as hold:
            releaser.drain()
            hold.check()
            assert held(engine)

    until(lambda: not held(engine))


def test_a_hold_adopted_after_a_rollback_waits_for_the_next_block(engine):
    for _ in range(50):
        with pytest.raises(Stop), transaction.atomic():
            with Lock("a", wait=0):
                raise Stop
        with transaction.atomic():
            with Lock("a", wait=0):
                pass
            releaser.drain()
            assert held(engine)

        until(lambda: not held(engine))


@pytest.mark.parametrize("outer, inner", [("default", "locks"), ("locks", "default")])
def test_blocks_on_two_databases_must_both_end(engine, outer, inner):
    with transaction.atomic(using=outer):
        with transaction.atomic(using=inner):
            with Lock("a"):
                pass
        assert held(engine)

    assert not held(engine)


@pytest.mark.parametrize("first, second", [("default", "locks"), ("locks", "default")])
def test_blocks_that_end_in_any_order_must_both_end(engine, first, second):
    blocks = {using: transaction.atomic(using=using) for using in ("default", "locks")}
    for block in blocks.values():
        block.__enter__()
    with Lock("a"):
        pass

    blocks[first].__exit__(None, None, None)
    assert held(engine)
    blocks[second].__exit__(Stop, Stop(), None)

    until(lambda: not held(engine))


@pytest.mark.parametrize("error", [None, Stop()])
def test_a_block_that_began_after_the_release_is_waited_for_when_the_lock_is_taken_again(
    engine, error
):
    first, second = (transaction.atomic(using=using) for using in ("default", "locks"))
    first.__enter__()
    with Lock("a"):
        pass
    second.__enter__()
    with Lock("a", wait=0):
        pass

    first.__exit__(error and Stop, error, None)
    releaser.drain()
    assert held(engine)
    second.__exit__(None, None, None)

    until(lambda: not held(engine))


def test_what_was_written_under_a_lock_that_was_lost_since_is_not_committed(engine):
    with pytest.raises(LockLost), transaction.atomic():
        with Lock("a") as hold:
            Counter.objects.create(name="a")
        lose(hold)

    assert stored() == 0
    with transaction.atomic(), Lock("a"):
        Counter.objects.create(name="a")
    assert stored() == 1
    assert connection.get_autocommit()


def test_a_commit_that_another_app_replaced_and_put_back_is_guarded_again(engine):
    with mock.patch.object(connection, "commit", wraps=connection.commit) as commit:
        with transaction.atomic(), Lock("a"):
            Counter.objects.create(name="kept")

    with pytest.raises(LockLost), transaction.atomic():
        with Lock("a") as hold:
            Counter.objects.create(name="dropped")
        lose(hold)

    assert commit.call_count == 1
    assert [counter.name for counter in Counter.objects.all()] == ["kept"]


def test_several_locks_are_kept_until_the_end(engine):
    with transaction.atomic():
        with all_of(Lock("a"), Lock("b")):
            pass
        assert len(list(engine.holders())) == 2

    assert not held(engine)


def test_a_group_that_failed_inside_a_block_keeps_nothing(engine):
    with ExitStack() as stack:
        elsewhere = threading.Thread(target=lambda: stack.enter_context(Lock("b")))
        elsewhere.start()
        elsewhere.join()
        with transaction.atomic():
            with pytest.raises(LockBusy):
                all_of(Lock("a"), Lock("b"), Lock("c")).acquire(wait=0)

            assert [x.name for x in engine.holders()] == ["b"]


def test_release_now_does_not_wait(engine):
    with transaction.atomic():
        with Lock("a", release="now"):
            pass
        assert not held(engine)


def test_a_broken_transaction_keeps_the_lock_until_its_rollback(engine):
    Counter.objects.create(name="a")

    with pytest.raises(IntegrityError), transaction.atomic():
        try:
            with Lock("a"):
                Counter.objects.create(name="a")
        finally:
            assert held(engine)

    until(lambda: not held(engine))
    assert stored() == 1


def test_a_lock_can_be_taken_in_a_broken_transaction(engine):
    Counter.objects.create(name="a")

    with transaction.atomic():
        with pytest.raises(DatabaseError):
            with transaction.atomic(savepoint=False):
                Counter.objects.create(name="a")
        with Lock("a"):
            pass
        assert held(engine)

    until(lambda: not held(engine))


def test_a_connection_closed_inside_the_block_ends_the_wait(engine):
    with transaction.atomic():
        with Lock("a"):
            pass
        connection.close()
        until(lambda: not held(engine))

        with Lock("a"):  # the rest of the block is no transaction any more
            pass
        assert not held(engine)


def test_a_thread_that_ends_inside_its_block_gives_the_lock_up(engine):
    def work():
        transaction.atomic().__enter__()
        Counter.objects.count()
        with Lock("a"):
            pass
        connections.close_all()

    with running(work):
        pass

    until(lambda: not held(engine))


def test_callbacks_of_on_commit_that_raise_do_not_keep_the_lock(engine):
    def fail():
        raise Stop

    with pytest.raises(Stop) as kept:  # with its traceback
        with transaction.atomic():
            transaction.on_commit(fail)
            with Lock("a"):
                pass
            transaction.on_commit(fail, robust=True)

    assert kept.value
    assert not held(engine)


def test_a_commit_that_fails_does_not_keep_the_lock(engine):
    with pytest.raises(DatabaseError) as kept, transaction.atomic():  # with its traceback
        Counter.objects.create(name="a")
        with Lock("a"):
            pass
        connection.connection.close()  # the driver's

    assert kept.value
    until(lambda: not held(engine))


def test_a_release_that_fails_after_the_commit_is_tried_again(engine):
    engine.fail("release", times=2)

    with transaction.atomic():
        with Lock("a"):
            Counter.objects.create(name="a")

    assert stored() == 1
    until(lambda: not held(engine))


def test_a_release_that_raises_what_no_engine_should_drops_no_callback_of_the_commit(engine):
    called = []
    engine.fail("release", error=OSError("what no engine should raise"), times=1)

    with transaction.atomic():
        with Lock("a"):
            Counter.objects.create(name="a")
        transaction.on_commit(lambda: called.append("called"))

    assert called == ["called"]
    until(lambda: not held(engine))


@pytest.mark.parametrize("commits", [True, False])
def test_the_release_at_the_end_is_told(engine, commits):
    told = []

    def listen(name, **kwargs):
        if name == f"told {commits}":
            told.append(name)

    lock_released.connect(listen)
    try:
        with transaction.atomic():
            with Lock(f"told {commits}"):
                pass
            assert told == []
            transaction.set_rollback(not commits)
        until(lambda: told == [f"told {commits}"])
    finally:
        lock_released.disconnect(listen)


def test_a_loss_before_the_commit_is_told(engine):
    told = []

    def listen(name, **kwargs):
        if name == "lost before the commit":
            told.append(name)

    lock_lost.connect(listen)
    try:
        with pytest.raises(LockLost), transaction.atomic():
            with Lock("lost before the commit", ttl=0.2, renew=False):
                pass
            until(lambda: told)
    finally:
        lock_lost.disconnect(listen)

    assert told == ["lost before the commit"]


def test_a_loss_that_the_commit_did_not_know_of_is_told_after_it(engine):
    told = []

    def listen(name, reason, **kwargs):
        told.extend([reason] * (name == "cleared before the commit"))

    lock_lost.connect(listen)
    try:
        with transaction.atomic():
            with Lock("cleared before the commit") as hold:
                pass
            assert engine.clear(hold._lease.grant.claim.key) == 1
        until(lambda: told)
    finally:
        lock_lost.disconnect(listen)

    assert told == ["it was lost before the transaction ended"]


def test_locks_that_a_commit_released_leave_nothing_with_their_thread(engine):
    with transaction.atomic():
        for number in range(3):
            with Lock(f"a{number}"):
                pass

    assert not identity.current_runner().held
    assert not [lease for lease in renewer.held() if lease.backend is engine]


def test_a_lock_that_is_left_for_a_while_does_not_wait_for_the_commit(engine):
    with transaction.atomic():
        Lock("a").acquire().leave_for(0.1)

        until(lambda: not list(engine.holders()))


def test_a_loss_after_a_release_that_waits_is_not_told_to_its_callback(engine):
    told, heard = [], threading.Event()
    lock = Lock("a", ttl=2, renew=False)

    def listen(**kwargs):
        heard.set()

    lock_lost.connect(listen)
    try:
        with pytest.raises(LockLost), transaction.atomic():
            released = lock.acquire()
            released.on_lost(lambda hold: told.append("released"))
            released.release()
            hold = lock.acquire()  # of the same claim
            hold.on_lost(lambda hold: told.append("held"))
            assert heard.wait(DEADLINE)
            until(lambda: told)
            with pytest.raises(LockLost):
                hold.release()
    finally:
        lock_lost.disconnect(listen)

    assert told == ["held"]


def test_the_lock_is_renewed_until_the_end(engine):
    with transaction.atomic():
        with Lock("a", ttl=3) as hold:
            first_end = hold._lease.trusted_until
        until(lambda: hold._lease.trusted_until > first_end)
        assert held(engine)


def test_no_increment_is_lost_by_threads_that_lock_inside_their_transactions(engine):
    Counter.objects.create(name="a")

    def work():
        for _ in range(10):
            with transaction.atomic():
                with Lock("a", wait=DEADLINE):
                    row = Counter.objects.get(name="a")
                    row.value += 1
                    row.save()
        connections.close_all()

    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(running(work))

    assert Counter.objects.get(name="a").value == 40


class InATestCase(TestCase):
    databases = {"default"}

    def test_the_block_of_a_test_case_does_not_count(self):
        with Lock("in a test case", using="locmem"):
            pass
        with transaction.atomic():
            with Lock("in a test case", using="locmem"):
                pass

            self.assertFalse(Lock("in a test case", using="locmem").locked())

    def test_atomic_works_in_a_test_case(self):
        with Lock("in a test case", using="locmem", atomic=True):
            Counter.objects.create(name="in a test case")

        self.assertFalse(Lock("in a test case", using="locmem").locked())


def test_manual_transaction_management_is_refused_with_the_ways_out(engine):
    Lock("a").acquire().release()  # kept or not, an earlier hold makes no difference
    transaction.set_autocommit(False)
    try:
        with pytest.raises(LockError, match="release="):
            Lock("a").acquire()
        with transaction.atomic():
            with pytest.raises(LockError, match="release="):
                Lock("a").acquire()
        Lock("a", release="now").acquire().release()
        assert not held(engine)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


def test_a_task_that_is_begun_inside_of_a_block_gets_no_lock_that_ends_before_it(engine):
    async def locked(**options):
        async with Lock("a", **options):
            await sync_to_async(Counter.objects.create)(name=str(options))

    async def locked_by_a_task():
        await asyncio.create_task(locked())

    with transaction.atomic():
        for work in (locked, locked_by_a_task):
            with pytest.raises(LockError, match="async_to_sync"):
                async_to_sync(work)()
        async_to_sync(locked)(release="now")
    async_to_sync(locked)()

    assert engine.asked == ["acquire", "release"] * 2
    assert stored() == 2


def test_a_task_that_outlives_its_async_to_sync_gets_its_lock(engine):
    tasks = []

    async def locked():
        await ended.wait()
        async with Lock("a") as hold:
            hold.check()

    async def begin():
        tasks.append(asyncio.create_task(locked()))

    async def main():
        nonlocal ended
        ended = asyncio.Event()
        await sync_to_async(async_to_sync(begin))()
        ended.set()
        await asyncio.gather(*tasks)

    ended = None
    asyncio.run(main())

    assert engine.asked == ["acquire", "release"]


def test_a_loop_in_the_thread_that_async_to_sync_waits_in_gets_its_lock(engine):
    async def locked():
        async with Lock("a") as hold:
            hold.check()

    async_to_sync(sync_to_async(lambda: asyncio.run(locked())))()

    assert engine.asked == ["acquire", "release"]


def test_autocommit_off_is_refused_on_a_connection_that_is_not_open_yet(engine, monkeypatch):
    monkeypatch.setitem(connections.settings["locks"], "AUTOCOMMIT", False)
    refusals = []

    def work():
        try:
            for _ in range(2):
                with pytest.raises(LockError, match="autocommit is off") as refusal:
                    Lock("a").acquire()
                refusals.append(refusal.value)
                connections["locks"].close()
            with Lock("a", release="now"):
                pass
        finally:
            connections.close_all()

    with running(work):
        pass

    assert len(refusals) == 2
    assert engine.asked == ["acquire", "release"]


def test_a_hold_that_is_kept_does_not_hide_manual_transaction_management(engine):
    kept = Lock("a").acquire()
    kept.release()
    transaction.set_autocommit(False)
    try:
        with pytest.raises(LockError):
            Lock("a").acquire()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


# atomic=


def test_atomic_commits_before_it_releases(engine):
    seen = []
    engine.before["release"] = lambda: seen.append(stored())

    with Lock("a", atomic=True):
        Counter.objects.create(name="a")
        assert connection.in_atomic_block

    assert seen == [1]
    assert not held(engine)


def test_a_callback_of_on_commit_that_raises_not_held_does_not_keep_the_lock(engine):
    def fail():
        raise NotHeld

    with pytest.raises(NotHeld):
        with Lock("a", atomic=True):
            Counter.objects.create(name="a")
            transaction.on_commit(fail)

    assert stored() == 1
    assert not held(engine)


def test_atomic_rolls_back_when_the_body_raises(engine):
    with pytest.raises(Stop):
        with Lock("a", atomic=True):
            Counter.objects.create(name="a")
            raise Stop

    assert stored() == 0
    assert not held(engine)


def test_atomic_does_not_commit_under_a_lost_lock(engine):
    with pytest.raises(LockLost):
        with Lock("a", atomic=True) as hold:
            Counter.objects.create(name="a")
            lose(hold)

    assert stored() == 0
    assert not connection.in_atomic_block


def test_atomic_does_not_commit_when_the_trust_is_over(engine):
    with pytest.raises(LockLost):
        with Lock("a", atomic=True, ttl=0.2, renew=False) as hold:
            Counter.objects.create(name="a")
            until(lambda: hold.lost)

    assert stored() == 0


def test_atomic_does_not_mask_what_the_body_raised_under_a_lost_lock(engine):
    with pytest.raises(Stop):
        with Lock("a", atomic=True) as hold:
            lose(hold)
            raise Stop

    assert not connection.in_atomic_block


def test_a_commit_that_fails_is_not_masked_and_releases(engine, monkeypatch):
    def fail():
        raise DatabaseError("no commit today")

    with pytest.raises(DatabaseError, match="no commit today"):
        with Lock("a", atomic=True):
            Counter.objects.create(name="a")
            monkeypatch.setattr(connection, "commit", fail)
    monkeypatch.undo()

    assert stored() == 0
    assert not held(engine)


def test_atomic_inside_a_block_is_refused_and_keeps_nothing(engine):
    with transaction.atomic():
        with pytest.raises(RuntimeError, match="durable"):
            with Lock("a", atomic=True):
                pass

        assert not held(engine)


def test_a_with_that_was_never_entered_spares_the_one_around_it(engine):
    lock = Lock("a", atomic=True)

    with lock:
        with pytest.raises(RuntimeError, match="durable"):
            ExitStack().enter_context(lock)
        assert connection.in_atomic_block

    assert not connection.in_atomic_block
    assert not held(engine)


def test_a_with_that_was_never_entered_spares_that_of_another_thread(engine):
    lock = Lock("a", shared=True, atomic=True)
    inside, failed = threading.Event(), threading.Event()

    def read():
        try:
            with lock:
                inside.set()
                assert failed.wait(DEADLINE)
            return connection.in_atomic_block
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        assert inside.wait(DEADLINE)
        with transaction.atomic(), pytest.raises(RuntimeError, match="durable"):
            lock.__enter__()
        failed.set()

        assert reader.result(DEADLINE) is False
    assert not held(engine)


def is_undone_by_the_interrupt(engine):
    """Enter a lock with a transaction; neither is left."""
    with pytest.raises(KeyboardInterrupt):
        with Lock("a", atomic=True):
            pass

    assert not connection.in_atomic_block
    assert connection.get_autocommit()
    assert not held(engine)


def test_an_interrupt_after_the_block_was_opened_ends_it(engine, monkeypatch):
    def interrupted(*args):
        assert connection.in_atomic_block
        raise KeyboardInterrupt

    monkeypatch.setattr(entered, "record", interrupted)
    is_undone_by_the_interrupt(engine)


def test_an_interrupt_while_the_block_opens_ends_it(engine, monkeypatch):
    class Interrupted(transaction.Atomic):
        def __enter__(self):
            super().__enter__()
            raise KeyboardInterrupt

    monkeypatch.setattr(
        transaction, "atomic", lambda using, durable: Interrupted(using, True, True)
    )
    is_undone_by_the_interrupt(engine)


def test_an_interrupt_as_the_with_ends_rolls_its_block_back(engine, monkeypatch):
    found = entered.recorded

    def interrupted(*args):
        monkeypatch.setattr(entered, "recorded", found)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with Lock("a", atomic=True):
            Counter.objects.create(name="a")
            monkeypatch.setattr(entered, "recorded", interrupted)

    assert not connection.in_atomic_block
    assert not Lock("a").locked()
    assert stored() == 0


def test_an_interrupt_as_a_release_begins_to_wait_for_the_rollback_leaves_no_lock(
    engine, monkeypatch
):
    def interrupted():
        monkeypatch.undo()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with transaction.atomic(), Lock("a"):
            monkeypatch.setattr(lease, "set", interrupted, raising=False)

    gc.collect()
    until(lambda: not Lock("a").locked())


def test_a_lease_that_an_open_transaction_will_release_cannot_be_handed_over(engine):
    with transaction.atomic():
        with Lock("a"):
            pass
        hold = Lock("a", release="now").acquire()

        with pytest.raises(LockError, match="after the commit"):
            hold.dump()
        hold.release()


def test_the_second_with_in_a_transaction_is_the_current_hold(engine):
    with transaction.atomic():
        with Lock("a"):
            pass
        with Lock("a") as hold:
            assert current_hold("a") is hold


def test_atomic_on_a_named_database(engine):
    with Lock("a", atomic="locks"):
        assert connections["locks"].in_atomic_block
        assert not connection.in_atomic_block

    with pytest.raises(ImproperlyConfigured):
        Lock("a", atomic="nowhere")


def test_an_inner_hold_of_an_atomic_lock_does_not_end_it(engine):
    with Lock("a", atomic=True):
        with Lock("a"):
            pass
        assert held(engine)

    assert not held(engine)
    assert engine.asked == ["acquire", "release"]


def test_atomic_needs_a_with(engine):
    with pytest.raises(LockError, match="with"):
        Lock("a", atomic=True).acquire()


def test_a_process_that_stalled_for_longer_than_the_ttl_is_told_though_nobody_came(monkeypatch):
    monkeypatch.setattr(renewer, "watch", lambda lease: None)

    with pytest.raises(LockLost, match="not renewed in time"):
        with Lock("stalled", using="locks", ttl=0.2, renew=False) as hold:
            until(lambda: hold.lost)

    assert not Lock("stalled", using="locks").locked()


# REPEATABLE READ


@pytest.fixture
def repeatable_read():
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no isolation levels")
    options = connection.settings_dict["OPTIONS"]
    before = dict(options)
    connection.close()
    if connection.vendor == "postgresql":
        from django.db.backends.postgresql.psycopg_any import IsolationLevel

        options["isolation_level"] = IsolationLevel.REPEATABLE_READ
    else:
        options["isolation_level"] = "repeatable read"
    yield
    connection.close()
    options.clear()
    options.update(before)


def test_a_lock_under_repeatable_read_warns_where_it_is_taken(engine, repeatable_read):
    with transaction.atomic():
        with pytest.warns(RuntimeWarning, match="REPEATABLE READ") as caught:
            Lock("a").acquire().release()
        with pytest.warns(RuntimeWarning, match="REPEATABLE READ") as in_with:
            with Lock("b"):
                pass

    with transaction.atomic(), pytest.warns(RuntimeWarning, match="REPEATABLE READ") as in_helpers:
        locked("c")(lambda: None)()
        with all_of(Lock("d"), Lock("e")):
            pass

    warned = [*caught, *in_with, *in_helpers]
    assert [w.filename for w in warned] == [__file__] * 5
    assert len({str(w.message) for w in warned}) == 1  # Python keeps each in memory


@pytest.mark.skipif(connection.vendor != "postgresql", reason="about Django's for PostgreSQL")
def test_a_wrapper_that_pools_need_not_note_its_isolation(engine, repeatable_read, monkeypatch):
    connection.ensure_connection()
    monkeypatch.delattr(connections["default"], "isolation_level")

    with transaction.atomic(), pytest.warns(RuntimeWarning, match="REPEATABLE READ"):
        Lock("a").acquire().release()


def test_atomic_under_repeatable_read_does_not_warn(engine, repeatable_read):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Lock("a", atomic=True):
            Counter.objects.create(name="a")


def test_read_committed_does_not_warn(engine, read_committed):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with transaction.atomic():
            with Lock("a"):
                pass


def used():
    return set(transactions._used()), set(connections.all(initialized_only=True))


def test_the_open_connections_are_those_that_django_knows():
    assert connection.in_atomic_block is False  # makes it

    found, known = used()
    in_thread = []
    with running(lambda: in_thread.append(used())):
        pass

    assert found == known != set()
    assert in_thread == [(set(), set())]


def test_the_open_connections_are_those_that_django_knows_in_an_event_loop():
    async def made():
        before = used()
        connections["locks"]
        return [before, used(), await sync_to_async(used)()]

    for found, known in async_to_sync(made)():
        assert found == known
