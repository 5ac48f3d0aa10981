"""Locks in asyncio: cancellation at any step leaves nothing behind; waiting takes no thread."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from contextlib import asynccontextmanager

import pytest

from distlock_app import (
    BackendError,
    Lock,
    LockBusy,
    LockLost,
    LockTimeout,
    NotHeld,
    all_of,
    locked,
)
from distlock_app.core import offloading
from distlock_app.core.registry import registry
from distlock_app.core.releasing import releaser
from distlock_app.core.waiting import waiting
from distlock_app.signals import lock_acquired, lock_busy, lock_lost, lock_released
from distlock_app.testing import lose
from tests import engines
from tests.engines import DEADLINE, outlast, until

engine = pytest.fixture(engines.install)


def all_free(engine):
    return not engine._states


async def use():
    async with Lock("a", wait=DEADLINE):
        await asyncio.sleep(0.001)


async def use_explicitly():
    hold = await Lock("a", wait=DEADLINE).aacquire()
    try:
        await hold.acheck()
        await hold.aextend()
    finally:
        await hold.arelease()


async def use_group():
    async with all_of(Lock("a", wait=DEADLINE), Lock("b"), Lock("c")):
        await asyncio.sleep(0.001)


async def use_with_receivers():
    async def listen(**kwargs):
        await asyncio.sleep(0.001)

    signals = (lock_acquired, lock_released, lock_busy)
    for signal in signals:
        signal.connect(listen)
    try:
        await use()
    finally:
        for signal in signals:
            signal.disconnect(listen)


async def cancelled_after(work, seconds):
    task = asyncio.ensure_future(work())
    await asyncio.sleep(seconds)
    asked = task.cancel()
    (answer,) = await asyncio.gather(task, return_exceptions=True)
    assert answer is None or isinstance(answer, asyncio.CancelledError), repr(answer)
    return asked and answer is not None


async def cancelled_at_step(work, steps):
    task = asyncio.ensure_future(work())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    (answer,) = await asyncio.gather(task, return_exceptions=True)
    assert answer is None or isinstance(answer, asyncio.CancelledError), repr(answer)


@pytest.mark.parametrize("work", [use, use_explicitly, use_group, use_with_receivers])
def test_a_task_cancelled_at_any_step_leaves_nobody_holding(engine, work):
    for verb in ("acquire", "extend", "release"):
        engine.before[verb] = engine.after[verb] = lambda: time.sleep(0.001)

    async def main():
        for steps in range(0, 200, 3):
            await cancelled_at_step(work, steps)
        cancelled = [await cancelled_after(work, number * 0.0005) for number in range(60)]
        assert any(cancelled)

    asyncio.run(main())

    until(lambda: all_free(engine))


def test_waiting_tasks_cancelled_at_any_time_leave_nobody_holding(engine):
    engine.before["acquire"] = engine.after["acquire"] = lambda: time.sleep(0.0005)

    async def main():
        tasks = [asyncio.ensure_future(use()) for _ in range(100)]
        for number, task in enumerate(tasks):
            await asyncio.sleep(0.001 * (number % 3))
            if number % 2:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())

    until(lambda: all_free(engine))


def test_a_cancelled_task_does_not_wait_for_an_engine_that_hangs(engine):
    engine.hang("acquire", after=True)

    async def main():
        began = time.monotonic()
        await cancelled_after(use, 0.1)
        return time.monotonic() - began

    assert asyncio.run(main()) < 5
    engine.go_on()
    until(lambda: all_free(engine))


def test_a_cancelled_release_is_done_all_the_same_and_no_loss_is_told(engine):
    told = []

    async def main():
        hold = await Lock("a", ttl=2).aacquire()
        hold.on_lost(told.append)
        engine.hang("release")
        task = asyncio.ensure_future(hold.arelease())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.go_on()
        return hold

    hold = asyncio.run(main())
    until(lambda: all_free(engine))
    outlast(hold)

    assert told == []
    with pytest.raises(NotHeld):
        hold.release()


def test_a_release_cancelled_before_it_got_a_thread_is_done_all_the_same(engine):
    told = []

    async def main():
        hold = await Lock("a", ttl=2).aacquire()
        hold.on_lost(told.append)
        engine.hang("acquire")  # in all threads of the engine
        stuck = [asyncio.ensure_future(Lock(f"b{n}").aacquire()) for n in range(8)]
        while engine.asked.count("acquire") < 9:
            await asyncio.sleep(0.001)
        task = asyncio.ensure_future(hold.arelease())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.go_on()
        for taken in await asyncio.gather(*stuck):
            await taken.arelease()
        return hold

    hold = asyncio.run(main())
    until(lambda: all_free(engine))
    outlast(hold)

    assert told == []
    assert not hold._lease.lost_because


@pytest.mark.parametrize("kept", [False, True])
def test_a_cancelled_task_whose_turn_comes_is_no_error(engine, caplog, kept):
    holder = Lock("a").acquire()
    come = threading.Event()
    tasks = []

    def give_back_late():
        if threading.current_thread().name.startswith("distlock-release"):
            come.wait(DEADLINE)

    async def main():
        task = asyncio.ensure_future(Lock("a", wait=DEADLINE).aacquire())
        while not Lock("a").holders()[0].waiters:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        if kept:
            tasks.append(task)
        del task
        await asyncio.sleep(0)  # what asyncio itself keeps of it
        gc.collect()

    engine.before["release"] = give_back_late
    asyncio.run(main())
    holder.release()
    come.set()

    until(lambda: all_free(engine))
    assert "could not be woken" not in caplog.text


def test_a_coroutine_that_is_dropped_leaves_nobody_holding(engine):
    engine.before["acquire"] = lambda: time.sleep(0.05)
    loop = asyncio.new_event_loop()
    coroutine = Lock("a").aacquire()
    task = loop.create_task(coroutine)
    loop.call_later(0.01, loop.stop)
    loop.run_forever()

    task._log_destroy_pending = False
    coroutine.close()
    loop.close()

    until(lambda: "acquire" in engine.asked and all_free(engine))


def test_an_error_of_the_body_is_never_masked(engine):
    async def main(lock, prepare):
        async with lock as hold:
            prepare(hold)
            raise ValueError("of the body")

    for prepare in (lose, lambda hold: engine.fail("release", times=2)):
        with pytest.raises(ValueError, match="of the body"):
            asyncio.run(main(Lock("a"), prepare))

    until(lambda: all_free(engine))


def test_leaving_a_lost_lock_raises(engine):
    async def main():
        async with Lock("a") as hold:
            lose(hold)

    with pytest.raises(LockLost):
        asyncio.run(main())


def test_a_lost_lock_is_told_without_a_thread(engine, monkeypatch):
    """All threads of the backend may be waiting for it."""
    monkeypatch.setattr("distlock_app.core.hold.in_thread", None)

    async def main():
        hold = await Lock("a").aacquire()
        lose(hold)
        await hold.aextend()

    with pytest.raises(LockLost):
        asyncio.run(main())


@pytest.mark.parametrize("alias", ["default", "blocking"])
def test_a_holder_can_release_however_many_tasks_wait(engine, alias):
    counter = {"value": 0}

    async def work():
        async with Lock("a", using=alias, wait=None):
            value = counter["value"]
            await asyncio.sleep(0)
            counter["value"] = value + 1

    async def main():
        async with Lock("a", using=alias):
            tasks = [asyncio.ensure_future(work()) for _ in range(200)]
            await asyncio.sleep(0.2)
        await asyncio.wait_for(asyncio.gather(*tasks), 2 * DEADLINE)

    asyncio.run(main())

    assert counter["value"] == 200


def test_a_release_does_not_stand_behind_the_tries_of_waiting_tasks(engine):
    async def main():
        hold = await Lock("a").aacquire()
        engine.hang("acquire")
        tasks = [asyncio.ensure_future(use()) for _ in range(20)]
        await asyncio.sleep(0)  # each has asked for a thread
        release = asyncio.ensure_future(hold.arelease())
        await asyncio.wait([release], timeout=DEADLINE / 2)
        released = release.done()
        engine.go_on()
        await asyncio.gather(release, *tasks)
        return released

    assert asyncio.run(main())


def test_waiting_tasks_take_no_threads(engine):
    def threads():
        return {t for t in threading.enumerate() if t.name.startswith("distlock-")}

    async def main():
        before = threads()
        async with Lock("a"):
            tasks = [asyncio.ensure_future(use()) for _ in range(200)]
            await asyncio.sleep(0.3)
            more = threads() - before
        await asyncio.gather(*tasks)
        return len(more)

    assert asyncio.run(main()) < 15


def test_an_engine_that_hangs_holds_up_no_other(engine):
    async def main():
        engine.hang("acquire")
        stuck = [asyncio.ensure_future(Lock(f"a{n}").aacquire()) for n in range(20)]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        async with Lock("a", using="other"):
            pass
        took = time.monotonic() - began
        engine.go_on()
        for hold in await asyncio.gather(*stuck):
            await hold.arelease()
        return took

    assert asyncio.run(main()) < 10


def test_a_call_that_gets_no_thread_is_not_made_later(engine, monkeypatch):
    async def main():
        async with busy(engine) as one:
            monkeypatch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(BackendError, match="thread"):
                await Lock("a").aacquire()
            monkeypatch.undo()
            engine.go_on()
            await (await one).arelease()
            await use_explicitly()  # by the thread that was busy, after all that it was left

    asyncio.run(main())

    assert engine.asked.count("acquire") == 2
    until(lambda: all_free(engine))


def test_a_call_that_gets_another_thread_than_its_own_is_made_once(engine, monkeypatch):
    def late(thread):
        engine.go_on()
        until(lambda: engine.asked.count("acquire") == 2)
        no_thread(thread)

    async def main():
        async with busy(engine) as one:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", late)
                request = asyncio.ensure_future(Lock("a").aacquire())
                await asyncio.sleep(0)
            for taken in await asyncio.gather(one, request):
                await taken.arelease()

    asyncio.run(main())

    assert engine.asked.count("acquire") == 2
    assert all_free(engine)


@asynccontextmanager
async def busy(engine):
    """Keep the only thread that the engine has busy until it goes on; yield the task."""
    engine.hang("acquire")
    task = asyncio.ensure_future(Lock("b").aacquire())
    while engine.asked != ["acquire"]:
        await asyncio.sleep(0.001)
    yield task


def no_thread(thread):
    raise RuntimeError("can't start new thread")


def test_a_call_that_waits_on_the_server_and_gets_no_thread_is_told_so(engine, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", no_thread)

    with pytest.raises(BackendError, match="thread"):
        asyncio.run(Lock("a", using="blocking", wait=None).aacquire(wait=0.1))

    monkeypatch.undo()
    until(lambda: all_free(registry["blocking"].backend))


def test_an_event_loop_that_outlives_the_main_thread_can_lock(engine):
    for holder in (False, True):
        offloading.begin(engine, int, holder=holder).result(DEADLINE)
    threads = offloading.threads_of(engine)
    threads.for_all.shutdown()
    threads.for_holders.shutdown()

    asyncio.run(use_explicitly())

    assert all_free(engine)


def test_a_task_that_waits_on_the_server_can_be_cancelled(engine):
    blocking = registry["blocking"].backend

    async def main():
        hold = await Lock("a", using="blocking").aacquire()
        waiter = asyncio.ensure_future(Lock("a", using="blocking", wait=None).aacquire())
        await asyncio.sleep(0.05)
        waiter.cancel()
        answers = await asyncio.gather(waiter, return_exceptions=True)
        await hold.arelease()
        return answers

    assert isinstance(asyncio.run(main())[0], asyncio.CancelledError)
    until(lambda: all_free(blocking))


def test_the_deadline_of_a_task_is_kept(engine):
    async def main():
        async with Lock("a"):
            began = time.monotonic()
            for wait, error in ((0, LockBusy), (0.2, LockTimeout)):
                with pytest.raises(error):
                    await asyncio.ensure_future(Lock("a").aacquire(wait=wait))
            return time.monotonic() - began

    assert 0.2 <= asyncio.run(main()) < 5


@pytest.mark.parametrize("asynchronous", [True, False])
def test_receivers_of_any_kind_hear_of_async_locks_and_break_none(engine, asynchronous):
    told = []

    def listen(signal, name, **facts):
        told.extend([signal] * (name == "heard"))
        raise ValueError("bug")

    async def alisten(signal, **facts):
        listen(signal, **facts)

    receiver = alisten if asynchronous else listen
    signals = (lock_acquired, lock_released, lock_busy)
    for signal in signals:
        signal.connect(receiver)
    try:

        async def main():
            async with Lock("heard"):
                assert await asyncio.ensure_future(Lock("heard").atry_acquire()) is None

        asyncio.run(main())
    finally:
        for signal in signals:
            signal.disconnect(receiver)

    assert told == [lock_acquired, lock_busy, lock_released]
    assert all_free(engine)


def test_async_receivers_break_no_sync_lock_in_an_event_loop(engine, monkeypatch):
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")

    async def listen(**kwargs):
        pass

    signals = (lock_acquired, lock_released, lock_busy, lock_lost)
    for signal in signals:
        signal.connect(listen)
    try:

        async def main():
            with Lock("a"):
                pass

        asyncio.run(main())
    finally:
        for signal in signals:
            signal.disconnect(listen)

    assert all_free(engine)


def test_a_release_that_fails_may_be_repeated(engine):
    async def main():
        hold = await Lock("a").aacquire()
        engine.fail("release", times=1)
        with pytest.raises(BackendError):
            await hold.arelease()
        await hold.arelease()

    asyncio.run(main())

    assert all_free(engine)


def test_an_async_generator_keeps_the_lock_while_it_runs(engine):
    async def work():
        async with Lock("a"):
            yield 1
            yield 2

    async def main():
        generator = work()
        await anext(generator)
        held = bool(list(engine.holders()))
        await generator.aclose()
        return held, all_free(engine)

    assert asyncio.run(main()) == (True, True)


def test_an_async_generator_may_be_finished_by_another_task(engine):
    async def work():
        async with Lock("a", shared=True):
            yield 1

    async def main():
        generators = [work() for _ in range(3)]
        for generator in generators:
            await asyncio.ensure_future(anext(generator))
        for generator in generators:
            await asyncio.ensure_future(generator.aclose())

    asyncio.run(main())

    assert all_free(engine)


def test_what_an_ended_program_began_is_released_before_the_process_ends(engine):
    taken = threading.Event()

    def answer_late():
        time.sleep(0.1)
        taken.set()

    async def main():
        engine.after["acquire"] = answer_late
        asyncio.ensure_future(Lock("a").aacquire())
        while "acquire" not in engine.asked:
            await asyncio.sleep(0.001)

    asyncio.run(main())  # cancels what still runs
    assert taken.wait(DEADLINE)
    until(lambda: releaser._under_way or all_free(engine))
    releaser.drain()

    assert all_free(engine)


def test_to_leave_one_of_many_decorated_coroutines_looks_at_no_other(engine, monkeypatch):
    from distlock_app.core import entered

    class Entries(dict):
        def values(self):
            raise AssertionError("all open locks are looked at")

    monkeypatch.setattr(entered, "_by_frame", Entries())

    @locked("a:{number}")
    async def work(number):
        await asyncio.sleep(0)

    async def main():
        await asyncio.gather(*(work(number) for number in range(20)))

    asyncio.run(main())

    assert not entered._by_frame


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="a frame keeps what its coroutine awaits, and so its task"
)
# Its `async with` ends while the garbage collector looks: it cannot await anything there.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_task_of_a_closed_loop_that_waits_keeps_no_lock_of_another_one_taken():
    lock = Lock("a", using="locmem", ttl=1, wait=DEADLINE)

    async def work():
        async with lock:
            await asyncio.sleep(DEADLINE)

    async def main():
        await asyncio.gather(work(), work())

    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    loop.run_until_complete(asyncio.to_thread(until, lambda: waiting))
    task._log_destroy_pending = False
    loop.close()
    del loop, task
    # A call in flight keeps its task.
    until(lambda: gc.collect() >= 0 and not waiting)

    lock.acquire().release()


def test_tasks_leave_nothing_in_memory(engine):
    from distlock_app.core import entered

    gc.collect()
    before = engines.leases()

    async def main():
        for _ in range(300):
            await use()
            with pytest.raises(LockBusy):
                async with Lock("b"):
                    await asyncio.ensure_future(Lock("b").aacquire(wait=0))

    asyncio.run(main())
    gc.collect()

    assert not entered._by_frame
    assert engines.leases() <= before + 10  # some that the renewer has yet to forget
    assert not engine._states
