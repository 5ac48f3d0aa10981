"""Who is the same owner: threads, tasks, calls of sync_to_async, and several holds of one lock."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
import weakref

import pytest
from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation

from distlock_app import (
    Lock,
    LockBusy,
    LockLost,
    LockTimeout,
    NotHeld,
    all_of,
    current_hold,
)
from distlock_app.primitives import identity
from distlock_app.testing import lose
from tests import engines
from tests.engines import DEADLINE, running, until

engine = pytest.fixture(engines.install)


def busy_elsewhere(name="a"):
    """Return whether another thread finds the lock taken."""
    answers = []
    with running(lambda: answers.append(Lock(name).try_acquire())):
        pass
    if answers[0] is not None:
        answers[0].release()
    return answers[0] is None


def test_the_same_thread_takes_it_again_without_asking_the_engine(engine):
    with Lock("a") as outer:
        with Lock("a") as inner:
            assert inner.fence == outer.fence
        assert engine.asked == ["acquire"]
        assert busy_elsewhere()

    assert engines.free(engine)


def test_the_lock_is_given_up_with_the_last_of_its_holds_in_any_order(engine):
    with Lock("a") as first:
        second, third = (Lock("a").acquire() for _ in range(2))

        second.release()
        first.release()
        assert busy_elsewhere()
        third.release()

        assert not busy_elsewhere()


def test_a_stable_owner_keeps_the_lock_until_the_last_of_its_holds_is_released(engine):
    lock = Lock("a", owner="nightly")
    hold = lock.acquire()

    with lock:
        pass
    lock.acquire().release()

    assert busy_elsewhere()
    hold.check()
    hold.release()
    assert not busy_elsewhere()


def test_another_owner_is_refused_what_a_stable_owner_took_in_the_same_thread(engine):
    hold = Lock("a", owner="nightly").acquire()

    for other in Lock("a"), Lock("a", owner="hourly"):
        with pytest.raises(LockBusy):
            other.acquire(wait=0)

    hold.release()


def test_another_mode_is_another_lock(engine):
    with Lock("a", shared=True):
        with pytest.raises(LockBusy):
            Lock("a").acquire(wait=0)


def test_another_thread_is_another_owner(engine):
    with Lock("a"):
        assert busy_elsewhere()


def test_a_lock_that_is_not_reentrant_is_busy_at_once(engine):
    lock = Lock("a", reentrant=False, wait=None)

    with lock:
        with pytest.raises(LockBusy):
            lock.acquire()

    assert engine.asked.count("acquire") == 1
    lock.acquire().release()


def test_a_released_hold_that_is_kept_does_not_count_as_held(engine):
    lock = Lock("a", reentrant=False)
    kept = lock.acquire()
    kept.release()

    again = lock.acquire(wait=0)

    assert engine.asked.count("acquire") == 2
    again.release()


def test_a_lost_hold_is_not_joined(engine):
    lost = Lock("a", ttl=0.2, renew=False).acquire()
    until(lambda: lost.lost)

    fresh = Lock("a", ttl=30).acquire()

    fresh.check()
    assert fresh.fence > lost.fence
    with pytest.raises(LockLost):
        lost.release()
    fresh.check()
    assert busy_elsewhere()
    fresh.release()


def test_a_hold_may_be_released_by_another_thread_while_its_own_takes_it_again(engine):
    for _ in range(200):
        hold = Lock("a").acquire()
        with running(hold.release):
            again = Lock("a").acquire(wait=DEADLINE)
            held_still = list(engine.holders())
        again.check()
        assert [x.fence for x in engine.holders()] == [again.fence]
        assert held_still
        again.release()


def test_two_threads_that_release_one_hold_release_it_once(engine):
    for _ in range(200):
        outer = Lock("a").acquire().enter()
        inner = Lock("a").acquire()
        errors = []

        def release(hold=inner, told=errors):
            try:
                hold.release()
            except NotHeld as error:
                told.append(error)

        with running(release), running(release):
            pass

        assert len(errors) == 1
        assert busy_elsewhere()
        outer.release()


def test_releasing_twice_is_an_error_and_spares_the_other_holds(engine):
    with Lock("a"):
        inner = Lock("a").acquire()
        inner.release()

        with pytest.raises(NotHeld):
            inner.release()

        assert busy_elsewhere()


def test_another_task_is_another_owner_and_so_is_a_child_of_the_holder(engine):
    async def child():
        return await Lock("a").atry_acquire()

    async def main():
        async with Lock("a") as outer:
            async with Lock("a") as inner:
                assert inner.fence == outer.fence
            inherited = contextvars.copy_context().run(lambda: asyncio.ensure_future(child()))
            return await asyncio.gather(inherited, asyncio.create_task(child()))

    assert asyncio.run(main()) == [None, None]
    assert engines.free(engine)


def test_sync_code_in_a_task_shares_what_the_task_holds(engine, monkeypatch):
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")

    async def main():
        async with Lock("a"):
            with Lock("a"):
                return engine.asked.count("acquire")

    assert asyncio.run(main()) == 1


def test_a_hold_that_was_passed_on_is_not_taken_again_by_the_next_job_of_its_thread(engine):
    passed_on = []

    def first_job():
        passed_on.append(Lock("a").try_acquire())

    def next_job():
        return Lock("a").try_acquire()

    first_job()
    assert next_job() is None

    with passed_on[0]:
        pass
    with next_job() as hold:
        hold.check()


def test_a_task_that_serves_one_job_after_the_other_does_not_take_again_what_it_passed_on(engine):
    async def main():
        passed_on = await Lock("a").atry_acquire()
        again = await Lock("a").atry_acquire()
        await asyncio.create_task(passed_on.arelease())
        return again

    assert asyncio.run(main()) is None
    assert engines.free(engine)


def test_the_thread_that_goes_on_with_a_hold_may_take_the_lock_again(engine):
    hold = Lock("a").acquire()

    def work():
        with hold, Lock("a", wait=0) as inner:
            assert inner.fence == hold.fence

    with running(work):
        pass

    assert engine.asked.count("acquire") == 1
    assert engines.free(engine)


@pytest.mark.parametrize("mode", [{"shared": True}, {"limit": 2}], ids=str)
def test_each_of_several_bare_holds_may_be_taken_again_in_its_own_with(engine, mode):
    lock = Lock("a", wait=0, **mode)
    holds = [lock.acquire(), lock.acquire()]

    for hold in holds:
        with hold, lock as inner:
            assert inner.fence == hold.fence
            assert current_hold("a") is inner

    assert engines.free(engine)


@pytest.mark.parametrize("mode", [{"shared": True}, {"limit": 2}], ids=str)
def test_a_thread_that_goes_on_with_a_hold_still_has_its_own(engine, mode):
    lock = Lock("a", wait=0, **mode)
    hold = lock.acquire()

    def work():
        with lock as own:
            with hold:
                pass
            with lock as inner:
                assert inner.fence == own.fence

    with running(work):
        pass

    assert engines.free(engine)


def test_what_is_left_of_a_with_is_not_taken_again(engine):
    with Lock("a"):
        kept = Lock("a").acquire()

    assert Lock("a").try_acquire() is None

    kept.release()
    assert engines.free(engine)


def test_all_of_takes_a_lock_twice_only_while_it_is_entered(engine):
    twice = all_of(Lock("a"), Lock("a"))
    with twice, twice:
        assert engine.asked.count("acquire") == 1
    holds = twice.acquire()

    assert Lock("a").try_acquire() is None

    holds.release()
    assert engines.free(engine)


def test_a_thread_that_waits_for_its_own_bare_hold_is_told(engine):
    hold = Lock("a").acquire()

    with pytest.raises(LockTimeout, match="already holds the lock 'a' by acquire"):
        Lock("a").acquire(wait=0.01)

    hold.release()


@pytest.mark.parametrize(
    ("mode", "told"), [({"shared": True}, "shared"), ({"limit": 2}, "with limit=2")]
)
def test_one_of_several_that_asks_for_the_whole_lock_is_told_that_it_has_a_part(engine, mode, told):
    with Lock("a", **mode):
        with pytest.raises(LockTimeout, match=f"already holds the lock 'a', {told}: release"):
            Lock("a").acquire(wait=0.01)
        with pytest.raises(LockBusy, match="held by another owner"), running(_try_to_write):
            pass


@pytest.mark.parametrize("mode", [{"shared": True}, {"limit": 2}], ids=str)
def test_a_writer_that_asks_for_another_mode_is_told_that_it_writes_itself(engine, mode):
    with Lock("a"):
        with pytest.raises(LockBusy, match="already holds the lock 'a', exclusively: release"):
            Lock("a", **mode).acquire(wait=0)


def _try_to_write():
    Lock("a").acquire(wait=0)


@pytest.mark.parametrize("lock", [Lock("a"), all_of(Lock("a"), Lock("b"))])
def test_a_lock_that_would_block_an_event_loop_is_refused(engine, lock):
    async def main():
        for take in (lock.__enter__, lock.acquire, lock.try_acquire):
            with pytest.raises(SynchronousOnlyOperation, match="`async with`"):
                take()

    asyncio.run(main())

    assert engine.asked == []


def test_a_hold_is_released_in_an_event_loop_all_the_same(engine):
    hold = Lock("a").acquire()

    async def main():
        hold.release()

    asyncio.run(main())

    assert engines.free(engine)


def test_tasks_that_lock_in_the_shared_thread_of_sync_to_async_exclude_each_other(engine):
    counter = {"inside": 0, "most": 0}

    async def work():
        hold = await sync_to_async(Lock("a").try_acquire)()
        if hold is None:
            return 0
        counter["inside"] += 1
        counter["most"] = max(counter.values())
        await asyncio.sleep(0.01)
        counter["inside"] -= 1
        await sync_to_async(hold.release)()
        return 1

    async def main():
        return await asyncio.gather(*(work() for _ in range(5)))

    async def in_one_context():
        async with ThreadSensitiveContext():
            return await main()

    assert sum(asyncio.run(main())) == 1
    assert sum(asyncio.run(in_one_context())) == 1
    assert sum(async_to_sync(main)()) == 1
    assert counter["most"] == 1


def test_one_call_of_sync_to_async_is_one_owner(engine):
    def work():
        with Lock("a") as outer, Lock("a") as inner:
            return outer.fence == inner.fence

    async def main():
        return await sync_to_async(work)()

    assert asyncio.run(main())
    assert engine.asked.count("acquire") == 1


def test_a_thread_that_called_async_code_is_still_the_same_owner(engine):
    async def nothing():
        return await sync_to_async(lambda: None)()

    with Lock("a"):
        async_to_sync(nothing)()
        with Lock("a"):
            pass

    assert engine.asked.count("acquire") == 1


def test_async_code_called_by_a_holding_thread_is_another_owner(engine):
    async def attempt():
        return await Lock("a").atry_acquire()

    with Lock("a"):
        assert async_to_sync(attempt)() is None


@pytest.mark.parametrize(
    "call", [lambda work: work, lambda work: async_to_sync(sync_to_async(work))]
)
def test_a_call_of_sync_to_async_is_another_owner_than_who_waits_for_it_in_its_thread(engine, call):
    async def attempt():
        return await sync_to_async(Lock("a").try_acquire)()

    def work():
        with Lock("a"):
            return async_to_sync(attempt)()

    assert call(work)() is None


def test_one_lock_object_is_shared_by_threads(engine):
    lock = Lock("a", wait=DEADLINE)
    counter = {"value": 0}

    def work():
        for _ in range(25):
            with lock:
                value = counter["value"]
                threading.Event().wait(0.0001)
                counter["value"] = value + 1

    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)

    assert counter["value"] == 8 * 25


def test_one_lock_object_is_shared_by_tasks(engine):
    lock = Lock("a", wait=DEADLINE)
    counter = {"value": 0}

    async def work():
        for _ in range(10):
            async with lock:
                value = counter["value"]
                await asyncio.sleep(0)
                counter["value"] = value + 1

    async def main():
        await asyncio.gather(*(work() for _ in range(20)))

    asyncio.run(main())

    assert counter["value"] == 200


def test_generators_that_interleave_one_lock_keep_it_until_the_last(engine):
    lock = Lock("a")

    def work():
        with lock:
            yield

    first, second = work(), work()
    next(first)
    next(second)

    first.close()
    assert busy_elsewhere()
    second.close()

    assert engines.free(engine)


def test_interleaved_generators_release_their_own_holds_after_a_loss(engine):
    lock = Lock("a", ttl=30)

    def work():
        with lock as hold:
            yield hold

    first, second = work(), work()
    lose(next(first))
    kept = next(second)

    with pytest.raises(LockLost):
        next(first, None)

    kept.check()
    assert busy_elsewhere()
    second.close()


def test_a_generator_may_be_finished_by_another_thread(engine):
    lock = Lock("a")

    def work():
        with lock:
            yield

    generator = work()
    next(generator)

    with running(generator.close):
        pass

    assert engines.free(engine)


def test_generators_of_a_shared_lock_may_be_finished_by_another_thread(engine):
    lock = Lock("a", shared=True)

    def work():
        with lock:
            yield

    generators = []

    def start():
        generators.append(work())
        next(generators[-1])

    for _ in range(3):
        with running(start):
            pass
    with lock:
        for generator in generators:
            with running(generator.close):
                pass
        assert len(list(engine.holders())) == 1

    assert engines.free(engine)


def test_a_lock_works_in_an_exit_stack(engine):
    with contextlib.ExitStack() as stack:
        hold = stack.enter_context(Lock("a"))
        stack.enter_context(Lock("a"))
        hold.check()
        assert busy_elsewhere()

    assert engines.free(engine)


def test_an_exit_without_an_enter_is_an_error(engine):
    with pytest.raises(NotHeld):
        Lock("a").__exit__(None, None, None)


def test_threads_whose_identity_is_used_again_do_not_inherit(engine):
    kept = []

    def take():
        kept.append(Lock("a").try_acquire())

    for _ in range(50):
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()

    assert [hold is None for hold in kept] == [False] + [True] * 49
    kept[0].release()


def test_a_call_of_sync_to_async_that_has_released_is_not_kept(engine):
    class Request:
        pass

    def work(request):
        with Lock("a"), Lock("a"):
            pass

    async def main():
        request = Request()
        gone = weakref.ref(request)
        await sync_to_async(work)(request)
        del request
        gc.collect()
        while gone():  # the timer may be looking at the lease just now
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), DEADLINE))


def test_calls_of_sync_to_async_that_have_ended_leave_nothing_with_their_thread(engine):
    def work():
        with Lock("a"), Lock("b"):
            return len(identity._here.calls)

    async def main():
        return [await sync_to_async(work)() for _ in range(3)]

    assert asyncio.run(main()) == [1, 1, 1]
