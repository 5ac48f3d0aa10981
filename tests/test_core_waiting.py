"""The waiting loop: deadlines, late grants, failures while waiting, and pushed grants."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress

import pytest

from distlock_app import BackendError, Lock, LockBusy, LockTimeout, all_of
from distlock_app.claims import Busy, Claim, Grant
from distlock_app.core import wakers
from distlock_app.core.waiting import InThread, acquired, arun
from distlock_app.core.wakers import AsyncWaker, Waker
from distlock_app.primitives.names import key_of
from distlock_app.primitives.timing import monotonic
from tests import engines
from tests.engines import running, until

engine = pytest.fixture(engines.install)


def claim(**options):
    fields = {"name": "a", "key": key_of("a"), "owner": "o", "ttl": 10.0, "holder": "{}"}
    return Claim(**{**fields, **options})


class Scripted:
    """What an engine answers, one after the other, without one."""

    blocks = pushes = queues = False
    poll_min = poll_max = 0.001

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def look(self, claim):
        return None

    def acquire(self, claim, wait):
        self.asked.append(wait)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer = answer()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def withdraw(self, claim):
        pass

    def release(self, grant):
        self.asked.append("release")
        return True


def _be_down():
    raise BackendError("down")


@pytest.fixture(params=["stepwise", "first try without steps"])
def get(request):
    """How a thread waits: both ways have to come to the same."""
    if request.param == "stepwise":
        return lambda backend, claim, wait, waker: InThread(backend, claim, waker).acquired(wait)
    return acquired


def test_a_late_grant_of_a_stable_owner_is_not_released(get):
    # Another process of that owner may hold it.
    ours = claim(owner="scheduler", stable=True)
    late = Grant(ours, asked_at=monotonic() - 2 * ours.ttl)
    backend = Scripted(late, Grant(ours))

    assert get(backend, ours, 5, Waker())[0] == Grant(ours)
    assert "release" not in backend.asked


@pytest.mark.parametrize("wait", [0, 0.02])
def test_a_claim_that_has_waited_is_withdrawn_at_its_time_limit(get, wait):
    backend = Scripted(Busy())
    backend.look = lambda claim: Busy()
    withdrawn = []
    backend.withdraw = withdrawn.append
    waits = claim()

    with pytest.raises(LockBusy):
        get(backend, waits, wait, Waker())

    assert withdrawn == [waits] * bool(wait)


def test_one_try_asks_once_and_leaves_nothing_behind(engine):
    held = Lock("a").acquire()

    with pytest.raises(LockBusy) as caught:
        _in_thread(lambda: Lock("a").acquire(wait=0))

    assert type(caught.value) is LockBusy
    assert 0 < caught.value.free_in <= 30
    assert engine.asked.count("acquire") == 2
    held.release()
    assert engines.free(engine)


@pytest.mark.parametrize(("woken", "sleeps"), [(False, 30.0), (True, 0.0)])
def test_who_was_woken_before_it_sleeps_does_not_sleep(monkeypatch, woken, sleeps):
    slept = []

    class Noting(wakers.Gate):  # in wakers alone: the timer has a gate, too
        def wait(self, seconds):
            slept.append(seconds)

    monkeypatch.setattr(wakers, "Gate", Noting)
    waker = Waker()
    if woken:
        waker.wake(None)

    waker.wait(30.0)

    assert slept == [sleeps]


def test_a_timeout_is_no_busy_and_comes_at_the_deadline(engine):
    held = Lock("a").acquire()
    began = time.monotonic()

    with pytest.raises(LockTimeout):
        _in_thread(lambda: Lock("a").acquire(wait=0.3))

    assert 0.3 <= time.monotonic() - began < 5
    held.release()
    assert engines.free(engine)


def test_a_try_that_took_until_the_deadline_was_the_last(get):
    def slowly():
        time.sleep(0.06)
        return Busy()

    backend = Scripted(slowly)

    with pytest.raises(LockTimeout):
        get(backend, claim(), 0.05, Waker())

    assert len(backend.asked) == 1


def test_the_last_try_is_a_look_where_nothing_is_left_behind(get):
    backend = Scripted(Busy())
    backend.look = lambda claim: Busy()

    with pytest.raises(LockTimeout):
        get(backend, claim(), 0.02, Waker())

    assert len(backend.asked) == 1


def test_tasks_whose_first_try_takes_long_hold_up_no_other_lock(engine, monkeypatch):
    gate, real = threading.Event(), engine.acquire

    def acquire(claim, wait):
        if claim.name == "pinned":
            gate.wait(engines.DEADLINE)
        return real(claim, wait)

    monkeypatch.setattr(engine, "acquire", acquire)
    monkeypatch.setattr(engine, "look", lambda claim: Busy() if claim.name == "pinned" else None)

    async def main():
        tasks = [asyncio.ensure_future(Lock("pinned").atry_acquire()) for _ in range(100)]
        await asyncio.sleep(0)
        try:
            hold = await asyncio.wait_for(Lock("free").aacquire(), 5)
            await asyncio.wait_for(hold.arelease(), 5)
        finally:
            gate.set()
        return [hold for hold in await asyncio.gather(*tasks) if hold]

    (hold,) = asyncio.run(asyncio.wait_for(main(), engines.DEADLINE))
    hold.release()


def test_an_event_loop_goes_on_locking_when_the_main_thread_has_ended():
    code = """if True:
        import asyncio, os, threading, time
        import concurrent.futures.thread  # which begins to refuse before we are told
        from django.conf import settings
        locks = {"default": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"}}
        settings.configure(DISTLOCK=locks)
        from distlock_app import Lock

        async def work():
            async with Lock("a"):
                pass
            while not shutting_down.is_set():
                time.sleep(0.01)
            async with Lock("b"):
                os.write(1, b"locked")

        shutting_down = threading.Event()
        threading._register_atexit(shutting_down.set)
        threading.Thread(target=lambda: asyncio.run(work())).start()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30)

    assert done.stdout == b"locked", done.stderr


@pytest.mark.parametrize(
    "answers",
    [
        (_be_down,),
        (Busy(), _be_down),
        (Busy(),),
    ],
)
def test_an_error_keeps_nothing_of_its_caller(answers):
    class Mine:
        pass

    def ask(end):
        mine = Mine()
        weakref.finalize(mine, end.append, "sync")
        backend = Scripted(*answers)
        with pytest.raises((BackendError, LockBusy)) as caught:
            acquired(backend, claim(), 0.02, Waker())
        del caught

    async def aask(end):
        mine = Mine()
        weakref.finalize(mine, end.append, "async")
        backend = Scripted(*answers)
        with pytest.raises((BackendError, LockBusy)) as caught:
            await arun(backend, claim(), 0.02, AsyncWaker())
        del caught

    gc.collect()
    gc.disable()
    ended = []
    try:
        ask(ended)
        asyncio.run(aask(ended))
        with suppress(AssertionError):  # the thread that asked may still be at its end
            until(lambda: len(ended) == 2, within=5)
    finally:
        gc.enable()

    assert ended == ["sync", "async"]


def test_the_last_try_has_no_wait_whatever_came_before(get):
    backend = Scripted(Busy())
    backend.queues = True  # without a queue a try just before the deadline is the last one

    with pytest.raises(LockTimeout):
        get(backend, claim(), 0.05, Waker())

    assert backend.asked[-1] == 0
    assert all(wait > 0 for wait in backend.asked[:-1])
    assert backend.asked[:-1] == sorted(backend.asked[:-1], reverse=True)


def test_an_engine_that_waited_until_the_deadline_is_asked_once_more_without_a_wait(get):
    def slowly():
        time.sleep(1.1)
        return Busy()

    backend = Scripted(slowly, Busy())
    backend.blocks = True

    with pytest.raises(LockTimeout):
        get(backend, claim(), 1.0, Waker())

    assert 0 < backend.asked[0] <= 1.0
    assert backend.asked[1:] == [0]


@pytest.mark.parametrize("wait", [None, float("inf")])
def test_waiting_for_ever_has_no_deadline(engine, wait):
    held = Lock("a").acquire()

    with running(lambda: Lock("a").acquire(wait=wait).release()) as waiter:
        waiter.join(0.2)
        assert waiter.is_alive()
        held.release()

    assert engines.free(engine)


def test_the_first_try_tells_at_once_that_the_engine_is_down(engine):
    engine.fail("acquire")
    began = time.monotonic()

    with pytest.raises(BackendError):
        Lock("a").acquire(wait=20)

    assert time.monotonic() - began < 5


def test_a_waiter_survives_an_engine_that_fails_for_a_while(engine, monkeypatch):
    monkeypatch.setattr(engine, "poll_max", 0.02)
    held = Lock("a").acquire()
    got = []

    with running(lambda: got.append(Lock("a").acquire(wait=20).release())):
        until(lambda: engine.asked.count("acquire") >= 2)
        engine.fail("acquire")
        asked = engine.asked.count("acquire")
        until(lambda: engine.asked.count("acquire") >= asked + 4)
        engine.go_on()
        held.release()

    assert got == [None]


def test_an_engine_that_is_down_at_the_deadline_is_no_timeout(get):
    backend = Scripted(Busy(), BackendError("down"))
    backend.queues = True  # without a queue a first try that takes as long is the last one

    with pytest.raises(BackendError):
        get(backend, claim(), 0.05, Waker())


@pytest.mark.parametrize("blocks", [True, False])
def test_a_failing_engine_is_asked_again_after_a_pause(blocks, get):
    backend = Scripted(Busy(), BackendError("down"))
    backend.blocks, backend.queues = blocks, True
    backend.poll_min = backend.poll_max = 0.1

    with pytest.raises(BackendError):
        get(backend, claim(), 1.0, Waker())

    assert len(backend.asked) < 100


def test_a_grant_that_comes_after_its_own_lease_is_given_back(get):
    def slowly():
        time.sleep(0.12)
        return Grant(claim(ttl=0.1))

    backend = Scripted(slowly, Grant(claim()))
    began = monotonic()

    grant, asked_at = get(backend, claim(ttl=0.1), 60, Waker())

    assert grant.claim.ttl == 10 and asked_at >= began + 0.12
    assert backend.asked[1] == "release"
    assert len(backend.asked) == 3


def test_an_engine_that_fails_to_take_a_late_grant_back_does_not_end_the_wait(get):
    def slowly():
        time.sleep(0.12)
        return Grant(claim(ttl=0.1))

    backend = Scripted(slowly, Grant(claim()))
    backend.release = lambda grant: _raise(BackendError("down"))

    grant, _ = get(backend, claim(ttl=0.1), 10, Waker())

    assert grant.claim.ttl == 10


def test_the_time_that_a_grant_names_decides_when_its_lease_began(get):
    began = monotonic() - 5
    backend = Scripted(Grant(claim(), asked_at=began))

    _, asked_at = get(backend, claim(), 10, Waker())

    assert asked_at == began


def test_a_late_pushed_grant_is_refused_once_and_not_again(get):
    wanted = claim(ttl=3)
    stale = Grant(wanted, asked_at=monotonic() - 5)
    backend = Scripted(Busy(), Busy(), Busy(), Grant(wanted))
    backend.pushes = True
    waker = Waker()
    waker.wake(stale)

    get(backend, wanted, 10, waker)

    assert backend.asked.count("release") == 1


def test_an_async_bell_forgets_a_grant_that_was_heard():
    async def main():
        waker = AsyncWaker()
        waker.wake(Grant(claim()))
        return [await waker.wait(0.5), await waker.wait(0.01)]

    heard = asyncio.run(main())

    assert heard == [Grant(claim()), None]


def test_a_bell_that_rang_before_the_pause_ends_it_at_once():
    waker = Waker()
    waker.wake(None)
    began = time.monotonic()

    waker.wait(20)

    assert time.monotonic() - began < 5


def test_cancelling_a_pause_is_never_swallowed_by_the_bell():
    async def main():
        waker = AsyncWaker()
        task = asyncio.ensure_future(waker.wait(20))
        await asyncio.sleep(0)
        waker._woken.set()
        await asyncio.sleep(0)
        task.cancel()
        return await asyncio.gather(task, return_exceptions=True)

    async def at_every_step(steps):
        waker = AsyncWaker()
        task = asyncio.ensure_future(waker.wait(20))
        await asyncio.sleep(0.01)
        waker._woken.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        asked = task.cancel()
        (answer,) = await asyncio.gather(task, return_exceptions=True)
        return not asked or isinstance(answer, asyncio.CancelledError)

    asyncio.run(main())
    assert all(asyncio.run(at_every_step(steps)) for steps in range(6))


def test_all_locks_of_a_group_share_one_deadline(engine):
    held = Lock("b").acquire()
    began = time.monotonic()

    with pytest.raises(LockTimeout):
        _in_thread(lambda: all_of(Lock("a"), Lock("b"), Lock("c")).acquire(wait=0.3))

    assert 0.3 <= time.monotonic() - began < 5
    held.release()
    assert all(engines.free(engine, name) for name in "abc")


def test_a_group_that_waited_until_its_deadline_times_out_at_a_later_lock(engine):
    first, second = sorted(["a", "b"], key=key_of)
    held = Lock(second).acquire()
    engine.after["acquire"] = lambda: time.sleep(0.1)

    with pytest.raises(LockTimeout):
        _in_thread(lambda: all_of(Lock(first), Lock(second)).acquire(wait=0.05))

    held.release()


def test_a_group_that_did_not_want_to_wait_is_busy(engine):
    held = Lock("b").acquire()

    with pytest.raises(LockBusy) as caught:
        _in_thread(lambda: all_of(Lock("a"), Lock("b")).acquire(wait=0))

    assert type(caught.value) is LockBusy
    held.release()


def test_the_same_owner_is_granted_again_when_the_answer_was_lost(engine, monkeypatch):
    held, lost, got = engine.acquire(claim(owner="other"), 0), [], []
    acquire = engine.acquire

    def losing_the_first_grant(wanted, wait):
        answer = acquire(wanted, wait)
        if answer and not lost:
            lost.append(answer)
            raise BackendError("the answer was lost")
        return answer

    monkeypatch.setattr(engine, "acquire", losing_the_first_grant)
    monkeypatch.setattr(engine, "poll_max", 0.02)
    with running(lambda: got.extend(InThread(engine, claim(), Waker()).acquired(20))):
        until(lambda: engine.asked.count("acquire") > 2)
        engine.release(held)

    assert lost == got[:1]


def test_a_lost_answer_to_the_first_try_leaves_nobody_holding(engine):
    engine.fail("acquire", times=1, after=True)

    with pytest.raises(BackendError):
        Lock("a").acquire(wait=0)

    until(lambda: engines.free(engine))


def test_a_wait_that_is_no_number_of_seconds_is_refused(engine):
    for wait, error in ((-1, ValueError), (float("nan"), ValueError), ("1", TypeError)):
        with pytest.raises(error):
            Lock("a").acquire(wait=wait)
        with pytest.raises(error):
            Lock("a", wait=wait)


def test_nobody_gets_the_lock_twice_at_once_by_a_pushed_and_an_asked_grant(engine):
    counter = {"in": 0, "most": 0, "done": 0}

    def work():
        for _ in range(20):
            with Lock("a", wait=DEADLINE):
                counter["in"] += 1
                counter["most"] = max(counter["most"], counter["in"])
                counter["done"] += 1
                counter["in"] -= 1

    threads = [threading.Thread(target=work, daemon=True) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)

    assert counter == {"in": 0, "most": 1, "done": 20 * 64}


DEADLINE = 60.0


def _raise(error):
    raise error


def _in_thread(work):
    """Return what `work` returns in another thread, or raise what it raises."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(DEADLINE)


def test_a_waiter_that_is_woken_before_it_first_sleeps_does_not_sleep():
    waker, given = Waker(), Grant(claim())
    waker.wake(given)

    began = monotonic()
    assert waker.wait(30) is given
    assert monotonic() - began < 15
    assert waker.wait(0.01) is None


def test_a_backend_may_say_that_the_lock_was_free_a_moment_ago(engine, monkeypatch):
    monkeypatch.setattr(engine, "acquire", lambda claim, wait: Busy(free_in=-0.2))

    with pytest.raises(LockTimeout):
        Lock("a").acquire(wait=0.1)
