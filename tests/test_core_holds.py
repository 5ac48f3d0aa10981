"""Holds: release, loss and errors, and what an interrupt at any moment leaves behind."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import pickle
import sys
import threading
import time
import warnings
from contextlib import ExitStack, suppress

import pytest
from django.db import connection, transaction

from distlock_app import (
    BackendError,
    Lock,
    LockLost,
    LockTimeout,
    NotHeld,
    all_of,
    locked,
)
from distlock_app.core import entered
from distlock_app.core.acquiring import held_by_runner, release_half_taken
from distlock_app.core.registry import registry
from distlock_app.primitives import identity
from distlock_app.primitives.names import key_of
from distlock_app.primitives.rlock import SafeRLock
from distlock_app.signals import lock_acquired, lock_busy, lock_lost, lock_released
from distlock_app.testing import lose
from tests import engines
from tests.engines import DEADLINE, alarmed, running, until

engine = pytest.fixture(engines.install)


def test_release_spares_the_next_owner(engine):
    stale = Lock("a", ttl=0.2, renew=False).acquire()
    until(lambda: stale.lost and not list(engine.holders()))
    got = []
    with running(lambda: got.append(Lock("a").acquire())):
        pass

    with pytest.raises(LockLost):
        stale.release()

    assert [x.fence for x in engine.holders()] == [got[0].fence]
    got[0].release()


def test_fences_grow_with_every_owner(engine):
    fences = []
    for _ in range(100):
        with Lock("a") as hold:
            fences.append(hold.fence)

    assert fences == sorted(set(fences))


def test_a_hold_may_move_to_another_thread(engine):
    hold = Lock("a").acquire()

    with running(hold.check):
        pass
    with running(hold.release):
        pass

    assert engines.free(engine)


def test_a_hold_knows_what_it_is(engine):
    hold = Lock("a\x00" + "b" * 300, ttl=30).acquire()

    assert 25 < hold.expires_in <= 30
    assert "held" in repr(hold) and len(repr(hold)) < 300 and "\x00" not in repr(hold)
    assert hold._lease.grant.claim.owner not in repr(hold)
    hold.release()
    assert "released" in repr(hold)
    for verb in (hold.check, hold.release, hold.extend):
        with pytest.raises(NotHeld):
            verb()


@pytest.mark.parametrize("work", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_hold_is_passed_on_by_its_dump_and_not_as_a_copy(engine, work):
    with Lock("a") as hold, pytest.raises(TypeError, match=r"dump\(\)"):
        work(hold)


def test_the_answer_of_a_release_is_lost_and_the_release_repeated(engine):
    hold = Lock("a").acquire()
    engine.fail("release", times=1, after=True)
    with pytest.raises(BackendError):
        hold.release()

    hold.release()

    assert engines.free(engine)


def test_a_hold_is_in_doubt_while_the_answer_to_its_release_is_missing(engine):
    hold = Lock("a").acquire()
    engine.fail("release", times=1, after=True)
    with pytest.raises(BackendError):
        hold.release()

    assert hold.lost and hold.expires_in == 0
    for verb in (hold.check, hold.extend):
        with pytest.raises(LockLost, match="the answer to its release was lost"):
            verb()

    hold.release()
    assert not hold.lost


def test_a_transaction_is_not_committed_while_the_answer_to_a_release_is_missing(engine):
    ended = []

    class Block:
        def __exit__(self, kind, error, traceback):
            ended.append(kind)

    hold = Lock("a").acquire()
    engine.fail("release", times=1, after=True)
    with pytest.raises(BackendError):
        hold.release()

    with pytest.raises(LockLost):
        hold.end_block(Block(), None)

    assert ended == [LockLost]
    hold.release()


def test_a_release_that_never_arrived_may_be_repeated(engine):
    hold = Lock("a").acquire()
    engine.fail("release", times=1)
    with pytest.raises(BackendError):
        hold.release()
    assert list(engine.holders())

    hold.release()

    assert engines.free(engine)


def test_the_release_of_a_lost_lock_says_so_although_the_engine_cannot_be_asked(engine):
    hold = Lock("a", ttl=0.2, renew=False).acquire()
    until(lambda: hold.lost and not list(engine.holders()))
    engine.fail("release", times=1)

    with pytest.raises(LockLost) as lost:
        hold.release()

    assert isinstance(lost.value.__cause__, BackendError)
    with pytest.raises(NotHeld):
        hold.release()


def test_a_with_whose_release_fails_does_not_raise_while_the_lock_was_held(engine, caplog):
    engine.fail("release", times=2)

    with caplog.at_level(logging.WARNING, logger="distlock_app"):
        with Lock("a"):
            pass

    assert "cannot release 'a' yet" in caplog.text
    until(lambda: engines.free(engine))


def test_a_with_whose_release_fails_raises_if_the_lock_may_have_been_lost(engine):
    engine.fail("release", times=1)

    with pytest.raises(LockLost):
        with Lock("a", ttl=0.2, renew=False) as hold:
            until(lambda: hold.lost)


def test_leaving_a_lost_lock_raises(engine):
    with pytest.raises(LockLost):
        with Lock("a") as hold:
            lose(hold)
    assert not entered._by_frame


@pytest.mark.parametrize("mode", [{}, {"shared": True}, {"limit": 2}], ids=str)
def test_what_a_signal_kept_from_its_caller_is_released(engine, mode):
    lock = Lock("a", **mode)
    before = held_by_runner(lock)
    _kept = lock.acquire()  # as the traceback of the signal's exception keeps it

    release_half_taken(lock, before)

    assert engines.free(engine)


def test_what_a_signal_interrupts_leaves_what_was_held_before(engine):
    lock = Lock("a")
    with lock as outer:
        before = held_by_runner(lock)
        _kept = lock.acquire()  # again, by the same thread

        release_half_taken(lock, before)

        outer.check()
        assert not engines.free(engine)
        _kept.release()


def test_a_lost_hold_has_no_time_left(engine):
    hold = Lock("a", ttl=60).acquire()
    assert hold.expires_in > 50

    lose(hold)

    assert hold.expires_in == 0


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_the_twins_for_tasks_do_what_the_others_do(engine, several):
    async def twins():
        locks = all_of(Lock("a", ttl=5), Lock("b", ttl=5)) if several else Lock("a", ttl=5)
        hold = await locks.aacquire()
        await hold.aextend(60)
        assert hold.expires_in > 50
        again = await Lock.aresume(await hold.adump(90))
        for way in hold.acheck, hold.aextend, hold.adump, hold.arelease:
            with pytest.raises(NotHeld):
                await way()
        for one in again if several else [again]:
            lose(one)
        for way in again.acheck, again.aextend, again.adump:
            with pytest.raises(LockLost):
                await way()

    asyncio.run(twins())


def test_a_lock_that_was_dumped_is_kept_for_as_long_as_that_says(engine):
    for dumped in Lock("a", ttl=5).acquire(), all_of(Lock("b", ttl=5), Lock("c", ttl=5)).acquire():
        dumped.dump(90)

    assert all(holding.expires_in > 80 for holding in engine.holders())


def test_a_release_of_a_lost_lock_is_made_when_the_engine_is_back_and_the_loss_is_told(engine):
    told = []
    hold = Lock("a", ttl=60, renew=False).acquire()
    hold.on_lost(told.append)
    engine.fail("release")
    hold._lease.trusted_until = 0.0  # by our clock it is over; the engine still keeps it

    with pytest.raises(LockLost, match="not renewed in time"):
        hold.release()
    engine.go_on()

    until(lambda: told == [hold] and engines.free(engine))


def test_a_group_raises_the_first_error_of_its_release(engine):
    holds = all_of(Lock("a"), Lock("b"), Lock("c")).acquire()
    errors = [BackendError("first"), BackendError("second")]

    def fail():
        if errors:
            raise errors.pop(0)

    engine.before["release"] = fail
    with pytest.raises(BackendError, match="first"):
        holds.release()
    holds.release()

    assert not list(engine.holders())


def test_lost_holds_that_are_dropped_leave_nothing_with_their_thread(engine):
    for number in range(3):
        lose(Lock(f"a{number}").acquire())

    until(lambda: gc.collect() >= 0 and not identity.current_runner().held)


def test_a_second_interrupt_of_a_release_comes_through_and_the_lock_is_released(engine):
    interrupts = [KeyboardInterrupt(), KeyboardInterrupt()]

    def interrupt():
        if interrupts:
            raise interrupts.pop()

    hold = Lock("a", ttl=60).acquire()
    engine.before["release"] = interrupt

    with pytest.raises(KeyboardInterrupt):
        hold.release()

    until(lambda: engines.free(engine))


def test_a_with_ends_the_hold_of_its_own_lock_in_whatever_frames_it_ends(engine):
    # As a framework does that keeps context managers: not in the order in which they were entered.
    one, other = Lock("a"), Lock("b")
    stacks = {lock: ExitStack() for lock in (one, other)}
    for lock, stack in stacks.items():
        stack.enter_context(lock)

    stacks[one].close()

    assert engines.free(engine, "a")
    assert not engines.free(engine, "b")
    stacks[other].close()


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_a_with_ends_the_hold_of_its_own_thread(engine, several):
    permits, ours = Lock("a", limit=2), ExitStack()
    permits = all_of(permits, Lock("b", limit=2)) if several else permits
    ours.enter_context(permits)
    with running(lambda: ExitStack().enter_context(permits)):  # of a thread that ends without it
        pass
    theirs = entered._by_frame
    assert sum(map(len, theirs.values())) == 2

    ours.close()

    [[left]] = theirs.values()
    assert left.runner is not identity.current_runner()
    left.release()
    entered.forget(left)


def test_what_a_test_takes_away_is_the_lock_of_that_hold_only(engine):
    permit, other = (Lock("a", limit=2).acquire() for _ in range(2))
    released = Lock("b").acquire()
    released.release()
    with Lock("b"):  # LockLost, if it is taken away
        lose(permit)
        lose(released)

    assert permit.lost
    other.extend()
    other.release()


def test_of_a_lock_on_several_aliases_a_test_takes_each_away(engine):
    with pytest.raises(LockLost):
        with Lock("a", using=("default", "other")) as holds:
            lose(holds)
    assert all(hold.lost for hold in holds)


@pytest.mark.parametrize("error", [BackendError("down"), TypeError("a bug of the engine")])
def test_the_error_of_the_body_is_never_masked(engine, error):
    engine.fail("release", error=error)

    with pytest.raises(ValueError, match="of the body"):
        with Lock("a"):
            raise ValueError("of the body")
    with pytest.raises(ValueError, match="of the body"):
        with all_of(Lock("b"), Lock("c")):
            raise ValueError("of the body")


def test_a_bug_of_the_engine_is_raised(engine):
    engine.fail("release", error=TypeError("a bug of the engine"), times=1)

    with pytest.raises(TypeError, match="bug"):
        with Lock("a"):
            pass
    until(lambda: engines.free(engine))


def test_releasing_in_the_body_is_fine(engine):
    with Lock("a") as hold:
        hold.release()

    assert engine.asked == ["acquire", "release"]


def test_a_released_hold_cannot_be_entered_again(engine):
    hold, holds = Lock("a").acquire(), all_of(Lock("b"), Lock("c")).acquire()
    with hold, holds:
        pass

    for released in hold, holds:
        with pytest.raises(NotHeld, match="acquire the lock again"):
            with released:
                pass

    async def enter():
        async with hold:
            pass

    with pytest.raises(NotHeld):
        asyncio.run(enter())


def test_a_group_releases_all_and_raises_the_first_error(engine):
    with pytest.raises(LockLost):
        with all_of(Lock("a"), Lock("b"), Lock("c")) as (_, second, _):
            lose(second)

    assert not engine._states


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_group_of_which_one_was_lost_while_it_waited_for_the_next_is_not_entered(
    engine, asynchronous
):
    first, second = sorted("ab", key=key_of)
    group = all_of(Lock(first, ttl=0.2, renew=False), Lock(second, wait=DEADLINE))
    other = Lock(second).acquire()

    def enter():
        with pytest.raises(LockLost, match=first):
            asyncio.run(group.aacquire()) if asynchronous else group.acquire()

    with running(enter):
        until(lambda: Lock(second).holders()[0].waiters)
        until(lambda: not Lock(first).locked())
        other.release()

    assert not engine._states


def test_a_group_of_which_one_is_lost_is_lost(engine):
    with pytest.raises(LockLost, match="'b'"):
        with all_of(Lock("a"), Lock("b"), Lock("c")) as holds:
            lose(holds[1])
            assert holds.lost
            with pytest.raises(LockLost, match="'b'"):
                holds.check()


def test_a_group_gives_its_holds_in_the_order_of_its_arguments(engine):
    names = [f"n{number}" for number in range(10)]

    with all_of(*(Lock(name) for name in names)) as holds:
        assert [hold.name for hold in holds] == names
        assert holds.fence == max(hold.fence for hold in holds)
        holds.check()

    assert not engine._states


def test_groups_in_opposite_orders_do_not_wait_for_each_other(engine):
    def work(*names):
        for _ in range(50):
            with all_of(*(Lock(name, wait=DEADLINE) for name in names)):
                pass

    with running(work, "a", "b", "c"), running(work, "c", "b", "a"), running(work, "b", "c"):
        pass

    assert not engine._states


def test_signals_tell_of_every_step_and_break_none(engine):
    told = []

    def listen(signal, **facts):
        told.append((signal, facts["name"]))
        raise ValueError("bug")

    signals = (lock_acquired, lock_busy, lock_released, lock_lost)
    for each in signals:
        each.connect(listen)
    try:
        with Lock("steps"):
            with running(lambda: Lock("steps").try_acquire()):
                pass
    finally:
        for each in signals:
            each.disconnect(listen)

    assert [each for each, name in told if name == "steps"] == [
        lock_acquired,
        lock_busy,
        lock_released,
    ]


def test_an_exception_that_a_signal_handler_raises_while_waiting_leaves_nothing(engine):
    class TimeLimit(Exception):
        pass

    def handler(*args):
        raise TimeLimit

    hold_elsewhere = engine.acquire(_claim("a"), 0)
    with pytest.raises(TimeLimit):
        with alarmed(lambda: Lock("a").holders()[0].waiters, handler):
            Lock("a").acquire(wait=DEADLINE)

    engine.release(hold_elsewhere)
    until(lambda: engines.free(engine))


def _claim(name):
    from distlock_app.testing.contract import a_claim

    return a_claim(name)


class Interrupter:
    """Raises KeyboardInterrupt where Python looks for signals: as calls begin, after C calls."""

    def __init__(self, at):
        self.left = at
        self.where = None

    def __call__(self, frame, event, arg):
        code = frame.f_code
        ours = "distlock_app" in code.co_filename or "contextlib" in code.co_filename
        if event not in ("call", "c_return") or not ours:
            return
        if code.co_name in ("__del__", "__repr__"):
            return
        if sys.version_info >= (3, 15) and event == "c_return" and arg.__name__ == "__enter__":
            return  # before the body of a `with`, where only Python 3.14 looks for signals
        if sys.version_info < (3, 11):
            # A generator that goes on would end without leaving its `with`; a signal comes later.
            goes_on = event == "call" and frame.f_lasti >= 0
            if goes_on or _asked_by_asgiref(frame):
                return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            self.where = (code.co_name, event)
            raise KeyboardInterrupt


def _asked_by_asgiref(frame):
    """Whether Django looks for its connection here, as it does while a transaction ends."""
    while "contextlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return "asgiref" in frame.f_code.co_filename


def with_lock():
    with Lock("a", wait=0):
        pass


def with_group():
    with all_of(Lock("a", wait=0), Lock("b", wait=0)):
        pass


def with_nested():
    with Lock("a", wait=0):
        with Lock("a", wait=0):
            pass


def with_same_nested():
    lock = Lock("a", wait=0)
    with lock:
        with lock:
            pass


def with_generator():
    @locked("a", wait=0)
    def numbers():
        yield 1
        yield 2

    assert list(numbers()) == [1, 2]


def with_receivers():
    def listen(**facts):
        pass

    lock_acquired.connect(listen)
    lock_released.connect(listen)
    try:
        with_lock()
    finally:
        lock_acquired.disconnect(listen)
        lock_released.disconnect(listen)


def in_transaction():
    try:
        with transaction.atomic():
            with_lock()
    except KeyboardInterrupt:
        connection.rollback()  # Django leaves open what was interrupted in its commit
        raise


# What no code can close: an interrupt before the first line of `__exit__`. Then the lock is held
# until its process ends.
OPEN = ("__exit__", "call")


@pytest.mark.parametrize(
    "work",
    [
        with_lock,
        with_group,
        with_nested,
        with_same_nested,
        with_generator,
        with_receivers,
        pytest.param(in_transaction, marks=pytest.mark.django_db(transaction=True)),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_leaves_nobody_holding(engine, work):
    work()
    for at in range(1, 10_000):
        interrupter = Interrupter(at)
        try:
            sys.setprofile(interrupter)
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        if interrupter.where is None:
            break
        if interrupter.where == OPEN:
            entered._by_frame.clear()
            engine.after_fork()  # forgets all
        assert not entered._by_frame
        until(lambda: not engine._states, within=10)

    assert at > 90
    with running(with_lock):  # in another thread: no mutex of ours is left taken
        pass


def test_an_interrupt_at_any_moment_leaves_the_mutex_of_python_3_14_free():
    """On every version: what the test above fails for, it shows on 3.14 only."""
    mutex = SafeRLock()
    for at in range(1, 100):
        interrupter = Interrupter(at)
        try:
            sys.setprofile(interrupter)
            with mutex:
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert not mutex._is_owned()
        if interrupter.where is None:
            break

    assert at > 2


@pytest.mark.parametrize("again", [BackendError("down"), KeyboardInterrupt()], ids=repr)
def test_what_an_interrupt_leaves_is_released_though_its_release_fails_too(engine, again):
    errors = [KeyboardInterrupt(), again]

    def fail():
        if errors:
            raise errors.pop(0)

    engine.before["release"] = fail
    with pytest.raises(KeyboardInterrupt), Lock("a", ttl=60, wait=0):
        pass
    until(lambda: not engine._states)

    errors += [KeyboardInterrupt(), again]
    engine.after["acquire"] = fail
    with pytest.raises(KeyboardInterrupt):
        Lock("b", ttl=60, wait=0).acquire()
    until(lambda: not engine._states)

    lock = Lock("c", ttl=60)
    _kept = lock.acquire()  # as the traceback of a signal's exception keeps it
    errors.append(again)
    with suppress(KeyboardInterrupt):
        release_half_taken(lock, [None])
    until(lambda: not engine._states)


def test_threads_that_run_at_once_exclude_each_other_while_some_are_interrupted(engine):
    counter = {"value": 0, "done": 0}

    def work():
        for number in range(15):
            try:
                with Lock("a", wait=DEADLINE) as hold:
                    value = counter["value"]
                    if number % 5 == 4:
                        raise KeyboardInterrupt
                    time.sleep(0.0001)
                    counter["value"] = value + 1
                    hold.check()
                counter["done"] += 1
            except KeyboardInterrupt:
                pass

    threads = [threading.Thread(target=work, daemon=True) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)

    assert counter["value"] == 10 * 12
    assert engines.free(engine)


def test_a_stable_owner_is_granted_again(engine):
    lock = Lock("a", owner="nightly", reentrant=False)
    first = lock.acquire()

    with running(lambda: Lock("a", owner="nightly").acquire(wait=0).release()):
        pass

    with pytest.raises(LockLost):
        first.release()


def test_a_stable_owner_has_the_same_token_in_every_release(engine):
    # Else it could not go on with its locks after an upgrade.
    with Lock("a", owner="job 7") as hold:
        assert hold._lease.grant.claim.owner == "1ad9ba570922767e83fd2e40906bf532"


def test_an_exit_stack_that_is_dropped_in_a_thread_does_not_break_the_next_with(engine):
    lock = Lock("a", wait=0.1)
    lock.__enter__()  # nobody will leave it

    def work():
        with pytest.raises(LockTimeout):
            with lock:
                pass

    with running(work):
        pass
    with lock as hold:
        hold.check()
    lock.__exit__(None, None, None)

    assert engines.free(engine)


def test_all_threads_gone_nothing_is_left_in_memory(engine):
    gc.collect()
    before = engines.leases()

    def work():
        for number in range(50):
            with Lock(f"{threading.get_ident()} {number}"):
                pass

    for _ in range(5):
        with running(work):
            pass
    gc.collect()

    assert not engine._states
    assert not entered._by_frame
    assert engines.leases() <= before + 10  # some that the renewer has yet to forget


def test_dropping_one_of_several_holds_keeps_the_lock(engine):
    with Lock("a") as outer:
        inner = Lock("a").acquire()
        with pytest.warns(ResourceWarning) as warned:
            del inner
        assert warned[0].filename == __file__  # it was dropped here

        outer.check()
        assert list(engine.holders())

    assert engines.free(engine)


def test_a_forgotten_release_is_logged_with_the_place_of_the_acquire(engine, caplog):
    line = sys._getframe().f_lineno + 1
    holds = [Lock("a").acquire(), Lock("b").try_acquire(), *all_of(Lock("c"), Lock("d")).acquire()]

    async def take():
        return await Lock("e").aacquire(), await Lock("f").atry_acquire()

    holds += asyncio.run(take())
    with caplog.at_level(logging.WARNING, logger="distlock_app"), pytest.warns(ResourceWarning):
        holds.clear()
        gc.collect()

    dropped = [r for r in caplog.records if getattr(r, "lock_event", "") == "dropped"]
    places = [record.getMessage().partition("taken at ")[2] for record in dropped]
    assert sorted(places) == [f"{__file__}:{line}"] * 4 + [f"{__file__}:{line + 3}"] * 2


def test_a_hold_whose_release_failed_is_dropped_without_a_warning(engine):
    hold = Lock("a").acquire()
    engine.fail("release")
    with pytest.raises(BackendError):
        hold.release()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del hold
        gc.collect()


def test_the_backend_of_a_hold_is_the_one_that_granted_it(engine, settings):
    hold = Lock("a").acquire()
    settings.DISTLOCK = {"default": {"BACKEND": "tests.engines.FakeBackend"}}
    assert registry["default"].backend is not engine

    hold.release()

    assert engines.free(engine)


def test_people_are_told_of_a_ttl_of_its_own_and_of_a_lock_that_is_not_renewed():
    with Lock("usual", using="locmem"), Lock("own", using="locmem", ttl=7, renew=False):
        [usual] = Lock("usual", using="locmem").holders()
        [own] = Lock("own", using="locmem").holders()

    assert {"host", "pid", "thread"} <= set(usual.holder)
    assert own.holder == {**usual.holder, "ttl": 7, "renew": False}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_a_release_that_a_signal_handler_breaks_off_is_made_all_the_same(engine, kind):
    hold = Lock("a").acquire()

    def broken_off():
        del engine.before["release"]
        raise kind("a time limit")

    engine.before["release"] = broken_off
    with pytest.raises(kind, match="a time limit"):
        hold.release()

    assert not Lock("a").locked()


def test_an_interrupt_as_one_of_two_withs_ends_releases_that_one(monkeypatch):
    lock = Lock("a", using="locmem")

    def held():
        with lock as hold:
            yield hold

    def interrupted(*args):
        monkeypatch.setattr(entered, "recorded", find)
        raise KeyboardInterrupt

    find, (first, second) = entered.recorded, (held(), held())
    holds = [next(first), next(second)]
    monkeypatch.setattr(entered, "recorded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(first)

    assert [hold.released for hold in holds] == [True, False]
    second.close()
