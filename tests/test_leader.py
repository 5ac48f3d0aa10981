"""`Leader`: one process does the work at a time, the next one as soon as it ends."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import time
from threading import Event
from weakref import ref

import pytest

from distlock_app import BackendError, Leader, Lock, LockLost
from distlock_app.core import leader as leading
from distlock_app.testing import held_elsewhere, lose
from tests import engines
from tests.engines import DEADLINE, free, running, until

engine = pytest.fixture(engines.install)


class Work:
    """Notes when it begins and ends; ends when it has to."""

    def __init__(self):
        self.log = []

    def __call__(self, ended):
        self.log.append("begun")
        assert ended.wait(DEADLINE)
        self.log.append("ended")


def test_a_leader_works_until_it_is_stopped(engine):
    work = Work()
    leader = Leader("a", work)

    with running(leader.run):
        until(lambda: work.log == ["begun"])
        assert leader.is_leader and leader.hold.fence
        leader.stop()

    assert work.log == ["begun", "ended"]
    assert not leader.is_leader and leader.hold is None
    assert free(engine)


def test_a_candidate_leads_when_the_leader_is_stopped(engine):
    first, second = Work(), Work()
    leader, candidate = Leader("a", first), Leader("a", second)

    with running(leader.run):
        until(lambda: first.log == ["begun"])
        with running(candidate.run):
            until(lambda: engine.asked.count("acquire") > 1)
            assert not candidate.is_leader
            leader.stop()
            until(lambda: second.log == ["begun"])
            assert first.log == ["begun", "ended"]
            candidate.stop()


def test_after_a_loss_the_work_ends_and_begins_again_in_its_turn(engine):
    work = Work()
    leader = Leader("a", work)

    with running(leader.run):
        until(lambda: work.log == ["begun"])
        lose(leader.hold)
        until(lambda: work.log == ["begun", "ended", "begun"])
        leader.stop()


def test_the_run_is_over_when_the_work_returns(engine):
    Leader("a", lambda ended: None).run()

    assert free(engine)


def test_what_the_work_raises_ends_the_run_and_gives_the_lead_up(engine):
    def work(ended):
        raise BackendError("of a lock of its own")

    with pytest.raises(BackendError, match="of its own"):
        Leader("a", work).run()

    assert free(engine)


def test_work_that_lets_a_stop_iteration_out_ends_the_run(engine):
    leader = Leader("a", lambda ended: next(iter(())))

    with pytest.raises(RuntimeError, match="StopIteration"), running(leader.run):
        pass

    assert free(engine)


def test_work_that_is_not_done_when_it_returns_is_refused(engine):
    class Later:
        async def __call__(self, ended):
            pass

    for work in (Later(), lambda ended: (step for step in ())):
        with pytest.raises(TypeError, match="would run without the lock"):
            Leader("a", work).run()

    assert free(engine)


def test_work_that_notices_the_loss_by_itself_begins_again(engine):
    begun = []

    def work(ended):
        begun.append(ended)
        if len(begun) == 1:
            lose(leader.hold)
            raise LockLost("noticed")

    leader = Leader("a", work)
    leader.run()

    assert len(begun) == 2


def test_a_candidate_stops_waiting_when_it_is_stopped(engine):
    work = Work()
    leader = Leader("a", work)

    with held_elsewhere("a"):
        with running(leader.run):
            until(lambda: "acquire" in engine.asked[1:])
            leader.stop()

        assert work.log == []


def test_a_leader_that_was_stopped_before_does_not_begin(engine):
    leader = Leader("a", Work())
    leader.stop()

    leader.run()

    assert engine.asked == []


def test_a_candidate_asks_a_backend_until_it_answers(engine, caplog):
    engine.fail("acquire", times=2)

    Leader("a", lambda ended: None).run()

    assert [r.lock_event for r in caplog.records].count("not_elected") == 2


def test_a_leader_that_gets_no_thread_for_its_work_stands_again(engine, monkeypatch):
    start, refused = threading.Thread.start, []

    def refuse_once(thread):
        if thread.name == "distlock-wait" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    work = Work()
    leader = Leader("a", work)

    with running(leader.run):
        until(lambda: refused)
        until(lambda: work.log == ["begun"])
        leader.stop()

    assert free(engine)


def test_the_pauses_of_a_candidate_grow_with_each_failure(engine, monkeypatch):
    pauses = []
    monkeypatch.setattr(leading, "full_jitter", lambda number, **_: pauses.append(number) or 0.0)
    engine.fail("acquire", times=3)

    Leader("a", lambda ended: None).run()

    assert pauses == [0, 1, 2]


def test_a_coroutine_is_cancelled_when_the_lead_is_lost():
    log = []

    async def work():
        log.append("begun")
        try:
            await asyncio.sleep(DEADLINE)
        finally:
            log.append("ended")

    async def main():
        task = asyncio.ensure_future(leader.arun())
        while log != ["begun"]:
            await asyncio.sleep(0.001)
        lose(leader.hold)
        while log != ["begun", "ended", "begun"]:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    leader = Leader("a", work, using="locmem")
    asyncio.run(asyncio.wait_for(main(), DEADLINE))

    assert log == ["begun", "ended", "begun", "ended"]
    assert not Lock("a", using="locmem").locked()


@pytest.mark.parametrize("threaded", [False, True])
def test_a_second_cancellation_does_not_end_the_lead_before_the_work(threaded):
    begun, cancelled, may_end, led_at_end = Event(), [], Event(), []

    def in_thread(ended):
        begun.set()
        assert ended.wait(DEADLINE)
        assert may_end.wait(DEADLINE)
        led_at_end.append(leader.is_leader)

    async def in_loop():
        begun.set()
        while not may_end.is_set():
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                cancelled.append(True)
        led_at_end.append(leader.is_leader)

    async def main():
        task = asyncio.ensure_future(leader.arun())
        while not begun.is_set():
            await asyncio.sleep(0.001)
        for number in range(2):
            task.cancel()
            await asyncio.sleep(0.05)
            while len(cancelled) == number and not threaded:
                await asyncio.sleep(0.001)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    leader = Leader("a", in_thread if threaded else in_loop, using="locmem")
    asyncio.run(asyncio.wait_for(main(), DEADLINE))

    assert led_at_end == [True]
    assert len(cancelled) == (0 if threaded else 2)
    assert not Lock("a", using="locmem").locked()


def test_a_coroutine_that_awaits_what_others_cancelled_has_not_returned():
    async def work():
        task = asyncio.ensure_future(asyncio.sleep(DEADLINE))
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        Leader("a", work, using="locmem").run()

    assert not Lock("a", using="locmem").locked()


def test_a_coroutine_that_returns_ends_the_run():
    async def work():
        await asyncio.sleep(0)

    async def lead():
        leader = Leader("a", work, using="locmem")
        await leader.arun()
        gone = ref(leader)
        del leader
        gc.collect()
        assert gone() is None, "the loop goes on waking it"

    asyncio.run(lead())

    assert not Lock("a", using="locmem").locked()


def test_a_leader_that_lost_its_lock_leads_no_longer_before_its_work_has_noticed(engine):
    seen = []

    def work(ended):
        lose(leader.hold)
        seen.append(leader.is_leader)
        leader.stop()

    leader = Leader("a", work)
    leader.run()

    assert seen == [False]


def test_a_signal_that_does_not_wake_the_loop_stops_it():
    waited, main = [], threading.get_ident()

    def work(ended):
        until(lambda: sys._current_frames()[main].f_code.co_name == "select")
        time.sleep(0.05)  # for the system call; if it has not begun by then, this shows nothing
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # not of the loop's thread
        waited.append(ended.wait(DEADLINE))

    leader = Leader("a", work, using="locmem")
    before = signal.signal(signal.SIGUSR1, lambda *_: leader.stop())
    try:
        leader.run()
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert waited == [True]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("ends, within", [(signal.SIGTERM, 20.0), (signal.SIGKILL, None)])
def test_the_next_process_leads_when_the_leader_ends(processes, ends, within):
    # Stopped, it gives the lead up; killed, it is followed when its ttl is over.
    ttl = 30.0 if within else 1.0
    lead = "tests.lock_workers:lead"
    first = processes.start(lead, name="a", using="default", ttl=ttl)
    assert first.read() == "leads"
    second = processes.start(lead, name="a", using="default", ttl=ttl)

    ended_at = time.monotonic()
    first.process.send_signal(ends)

    assert second.read() == "leads"
    took = time.monotonic() - ended_at
    print(f"{ends.name}: the next one led after {took:.3f} s")
    assert took < (within or DEADLINE)
    second.process.send_signal(signal.SIGTERM)
    assert second.result() is None
