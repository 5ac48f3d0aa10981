"""Engines whose claims live as long as a session: what the core does for them."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest

from distlock_app import BackendError, Lock, LockLost
from distlock_app.backends.database import connections
from distlock_app.backends.sessions.queues import FairSemaphore
from distlock_app.core import renewal
from distlock_app.core.registry import registry
from distlock_app.core.releasing import releaser
from distlock_app.primitives.timing import trusted_for
from tests import engines
from tests.engines import DEADLINE, InterruptedSlots, alarmed, free, renewed, until

engine = pytest.fixture(engines.install)


@pytest.fixture
def sessions(engine):
    """An engine of sessions, as `using="session"`."""
    return registry["session"].backend


def test_a_session_that_ended_is_noticed_however_long_the_ttl(sessions):
    told = threading.Event()
    hold = Lock("a", ttl=1000, using="session").acquire()
    hold.on_lost(lambda lost: told.set())

    sessions.clear(hold._lease.grant.claim.key)

    assert told.wait(DEADLINE)
    with pytest.raises(LockLost):
        hold.release()


def test_a_heartbeat_without_an_answer_prolongs_no_trust(sessions):
    sessions.quiet = True
    hold = Lock("a", ttl=2, using="session").acquire()

    until(lambda: sessions.asked.count("heartbeat") >= 3)
    until(lambda: hold.lost)

    assert "extend" not in sessions.asked


def test_a_heartbeat_with_an_answer_keeps_the_hold(sessions):
    hold = Lock("a", ttl=3, using="session").acquire()

    renewed(hold, times=3)

    hold.release()


def test_a_short_ttl_is_looked_at_in_time_whenever_it_began(monkeypatch):
    """Sessions are asked from a third of the ttl on, at a beat."""
    ttl, now = 0.4, [0.0]
    monkeypatch.setattr(renewal, "monotonic", lambda: now[0])
    for began in [1000 + number / 100 for number in range(60)]:
        lease = SimpleNamespace(backend=SimpleNamespace(heartbeat=0.3), term=ttl, renews=True)
        lease.trusted_until = began + trusted_for(ttl)
        now[0] = began
        while now[0] < began + ttl / 3:
            now[0] = renewal.renewer._next_look(lease) + 0.001  # it takes a while
        assert now[0] < lease.trusted_until


def test_a_session_is_looked_at_once_in_each_heartbeat(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(renewal, "monotonic", lambda: now[0])
    for began in [1000 + number / 100 for number in range(60)]:
        lease = SimpleNamespace(backend=SimpleNamespace(heartbeat=0.3), term=30, renews=True)
        lease.trusted_until = began + trusted_for(30)
        now[0] = began
        assert began < renewal.renewer._next_look(lease) < began + 0.301


@pytest.mark.parametrize("limits", [{"renew": False}, {"max_hold": 0.3}])
def test_a_hold_whose_time_is_up_is_given_back(sessions, limits):
    began = time.monotonic()
    hold = Lock("a", ttl=0.3, using="session", **limits).acquire()

    until(lambda: free(sessions))

    assert time.monotonic() - began >= 0.28
    assert hold.lost


def test_a_fixed_hold_hears_of_the_end_of_its_session(sessions):
    hold = Lock("a", ttl=1000, renew=False, using="session").acquire()

    sessions.clear(hold._lease.grant.claim.key)

    until(lambda: hold.lost)


def test_a_dropped_hold_is_given_back_when_its_time_is_up(sessions):
    began = time.monotonic()
    hold = Lock("a", ttl=2, using="session").acquire()

    with pytest.warns(ResourceWarning, match="dropped"):
        del hold

    until(lambda: free(sessions))
    assert time.monotonic() - began >= 1.9


def test_a_hold_that_is_kept_after_its_release_failed_is_given_back_at_its_end(sessions):
    hold = Lock("a", ttl=2, using="session").acquire()
    sessions.fail("release", times=1)
    with pytest.raises(BackendError):
        hold.release()
    assert not free(sessions)

    until(lambda: free(sessions))

    hold.release()  # as if it came while the answer was awaited: no loss


def test_a_release_that_fails_again_and_again_is_repeated_by_one_worker(sessions, monkeypatch):
    hold, left_to_worker = Lock("a", using="session").acquire(), []
    sessions.fail("release", times=2)
    monkeypatch.setattr(releaser, "let_expire", left_to_worker.append)
    for _ in range(2):
        with pytest.raises(BackendError):
            hold.release()

    assert left_to_worker == [hold._lease]
    hold.release()


def test_a_release_is_tried_again_for_as_long_as_its_session_lives(sessions):
    sessions.fail("release")
    over = time.monotonic() + 1
    Lock("a", ttl=1, using="session").acquire().abandon()

    until(lambda: sessions.asked.count("release") >= 5 and time.monotonic() > over)
    sessions.go_on()

    until(lambda: free(sessions))


def test_a_cancelled_task_ends_its_wait_on_the_server(sessions):
    async def main():
        hold = await Lock("a", using="session").aacquire()
        waiter = asyncio.ensure_future(Lock("a", using="session", wait=None).aacquire())
        await asyncio.sleep(0.05)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        # Before the lock is free: the thread that waits for it does not stay.
        ended = asyncio.get_running_loop().run_in_executor(None, until, nobody_waits)
        await asyncio.wait_for(ended, DEADLINE)
        await hold.arelease()

    def nobody_waits():
        return not [t for t in threading.enumerate() if t.name == "distlock-wait"]

    asyncio.run(main())
    until(lambda: free(sessions))


def test_a_connection_that_is_dropped_as_the_interpreter_ends_raises_nothing(monkeypatch):
    queued = connections.QueuedConnection(deque([None]))
    for name in "inherited", "os":  # Python takes a module's names away in this order
        monkeypatch.setattr(connections, name, None)

    queued.__del__()

    assert queued.session is None


def test_a_caller_that_is_interrupted_as_it_waits_takes_nobody_s_turn():
    semaphore = FairSemaphore(1)
    assert semaphore.acquire(0)

    with pytest.raises(KeyboardInterrupt):
        with alarmed(lambda: semaphore._queue, signal.default_int_handler):
            semaphore.acquire(DEADLINE)

    semaphore.release()

    assert semaphore.acquire(0)


def test_an_interrupt_as_a_turn_is_passed_on_takes_it_from_nobody():
    semaphore, turn = FairSemaphore(0), threading.Lock()
    turn.acquire()
    semaphore._queue.append(turn)
    semaphore._free = InterruptedSlots()

    with pytest.raises(KeyboardInterrupt):
        semaphore.release()

    assert turn.acquire(timeout=0)


def test_an_interrupt_leaves_the_slot_of_a_connection_free_and_raises_nothing_else(monkeypatch):
    slots, raised = InterruptedSlots([None]), []
    gc.collect()  # what other tests left raises nothing here
    monkeypatch.setattr(sys, "unraisablehook", raised.append)

    connections.QueuedConnection.__new__(connections.QueuedConnection)  # interrupted at once
    with pytest.raises(KeyboardInterrupt) as error:
        connections.QueuedConnection(slots)
    del error
    gc.collect()

    assert len(slots) == 1
    assert raised == []
