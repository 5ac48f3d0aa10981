"""The renewer: it keeps holds, tells of losses in time, and survives whatever goes wrong."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest

from distlock_app import BackendError, Lock, LockLost
from distlock_app.claims import Grant
from distlock_app.core import releasing, reporting
from distlock_app.core import timer as core_timer
from distlock_app.core.lease import GONE, Lease
from distlock_app.core.registry import registry
from distlock_app.core.releasing import releaser
from distlock_app.core.renewal import Renewer, renewer
from distlock_app.core.timer import Timer, timer
from distlock_app.primitives import threads
from distlock_app.primitives.names import key_of
from distlock_app.primitives.timing import monotonic
from distlock_app.signals import lock_lost, lock_released
from distlock_app.testing.claims import a_claim
from tests import engines
from tests.engines import DEADLINE, outlast, renewed, until

engine = pytest.fixture(engines.install)


@pytest.fixture
def heard():
    """What the signals said."""
    told = []

    def listen(signal, **facts):
        told.append((signal, facts))

    for signal in (lock_lost, lock_released):
        signal.connect(listen)
    yield told
    for signal in (lock_lost, lock_released):
        signal.disconnect(listen)


def left_quietly(hold):
    with pytest.raises(LockLost):
        hold.release()


def test_a_hold_is_kept_far_beyond_its_ttl(engine):
    hold = Lock("a", ttl=3).acquire()
    first_end = hold._lease.trusted_until

    until(lambda: hold.check() or monotonic() > first_end + 0.5)

    assert engine.asked.count("extend") >= 2
    assert [holding.fence for holding in engine.holders()] == [hold.fence]
    hold.release()


def test_holds_that_were_taken_one_after_the_other_are_renewed_together(engine):
    with Lock("a", ttl=30).acquire() as hold:
        began = hold._lease.trusted_until - 30
        asked_at = [began + 0.001 * number for number in range(3000)]
        due = [renewer._next_look(hold._lease, at) for at in asked_at]

    assert len(set(due)) <= 11  # three seconds, in steps of a hundredth of the ttl
    assert all(9.7 <= then - at <= 10.001 for at, then in zip(asked_at, due, strict=True))


def test_a_fixed_lease_is_never_renewed_and_its_end_is_told(engine):
    told = threading.Event()
    hold = Lock("a", ttl=0.2, renew=False).acquire()
    hold.on_lost(lambda lost: told.set())

    assert told.wait(DEADLINE)

    assert hold.lost
    assert "extend" not in engine.asked
    left_quietly(hold)


def test_max_hold_ends_the_renewal(engine):
    told = threading.Event()
    began = time.monotonic()
    hold = Lock("a", ttl=0.3, max_hold=0.6).acquire()
    hold.on_lost(lambda lost: told.set())

    assert told.wait(DEADLINE)

    assert 0.3 < time.monotonic() - began < 5
    left_quietly(hold)


@pytest.mark.parametrize("renew", [True, False])
def test_extend_never_goes_beyond_max_hold(engine, renew):
    hold = Lock("a", ttl=10, max_hold=20, renew=renew).acquire()

    hold.extend(3600)

    assert 10 < hold.expires_in <= 20
    hold.release()


def test_extend_never_shortens_a_hold(engine):
    hold = Lock("a", ttl=60).acquire()

    hold.extend(1)

    assert hold.expires_in > 50
    assert next(iter(engine.holders())).expires_in > 50
    hold.release()


def test_a_renewal_under_way_does_not_keep_a_lock_that_was_left(engine):
    renews, left = threading.Event(), threading.Event()
    hold = Lock("a", ttl=600).acquire()
    engine.before["extend"] = lambda: renews.set() or left.wait(0.5)
    engine.after["end_in"] = left.set
    renewer._put_extend(hold._lease)
    assert renews.wait(DEADLINE)

    hold.leave_for(0.1)

    until(lambda: not list(engine.holders()))
    assert engine.asked[-2:] == ["extend", "end_in"]


def test_errors_of_the_engine_are_retried_until_the_trust_is_over(engine):
    engine.fail("extend", times=3)
    hold = Lock("a", ttl=3).acquire()

    renewed(hold)

    assert engine.asked.count("extend") >= 4
    hold.release()


@pytest.mark.parametrize("error", [ValueError("bug"), SystemExit(1), KeyboardInterrupt()])
def test_whatever_an_engine_raises_is_retried(engine, error):
    engine.fail("extend", error=error, times=2)
    hold = Lock("a", ttl=3).acquire()

    renewed(hold)

    assert engine.asked.count("extend") >= 3
    hold.release()


def test_an_engine_that_raises_for_a_batch_is_retried(engine, monkeypatch):
    def extend_many(work):
        engine.asked.append("extend_many")
        raise ValueError("bug")

    monkeypatch.setattr(engine, "extend_many", extend_many)
    hold = Lock("a", ttl=3).acquire()
    until(lambda: engine.asked.count("extend_many") >= 2)
    monkeypatch.undo()

    renewed(hold)

    hold.release()


def test_an_engine_that_raises_for_one_claim_of_a_batch_extends_the_others(engine):
    grants = [engine.acquire(a_claim(name), 0) for name in "ab"]
    engine.fail("extend", times=1)

    failed, extended = engine.extend_many([(grant, 30) for grant in grants])

    assert isinstance(failed, BackendError) and extended is True


def test_a_loss_is_told_once_and_before_the_lease_can_have_ended(engine, heard):
    engine.fail("extend")
    began = time.monotonic()
    told = []
    hold = Lock("told once", ttl=1).acquire()
    hold.on_lost(lambda lost: told.append(time.monotonic() - began))
    left = hold.expires_in

    until(lambda: told)
    time.sleep(0.3)

    assert len(told) == 1
    assert told[0] >= 0.8
    until(lambda: [facts for _, facts in heard if facts["name"] == "told once"])
    ((signal, facts),) = [x for x in heard if x[1]["name"] == "told once"]
    assert signal is lock_lost
    assert facts["held"] >= left - 0.2
    left_quietly(hold)


def test_lost_is_never_late_even_without_the_renewer(engine, monkeypatch):
    monkeypatch.setattr(renewer, "watch", lambda lease: None)
    hold = Lock("a", ttl=0.2).acquire()
    began = time.monotonic()

    asked_at = began
    while not hold.lost:
        assert asked_at - began < 0.2
        asked_at = time.monotonic()
    with pytest.raises(LockLost):
        hold.check()
    assert hold.expires_in == 0
    time.sleep(max(0.0, began + 0.25 - time.monotonic()))  # now the engine has forgotten it, too
    left_quietly(hold)


def test_an_engine_that_hangs_delays_no_loss_and_no_other_engine(engine):
    told = []
    other = registry["other"].backend
    engine.hang("extend")
    stuck = Lock("a", ttl=1).acquire()
    stuck.on_lost(lambda hold: told.append("stuck"))
    doomed = Lock("a", ttl=3, using="other").acquire()
    doomed.on_lost(lambda hold: told.append("doomed"))
    kept = Lock("b", ttl=3, using="other").acquire()
    first_end = kept._lease.trusted_until
    other.clear(next(iter(other.holders(doomed._lease.grant.claim.key))).key)

    until(lambda: sorted(told) == ["doomed", "stuck"], within=20)

    until(lambda: kept.check() or kept._lease.trusted_until > first_end)
    kept.release()
    assert doomed._lease.lost_because == GONE
    left_quietly(doomed)
    engine.go_on()
    left_quietly(stuck)


def test_a_server_that_hangs_delays_no_renewal_at_another_of_its_engine(engine, monkeypatch):
    """As the masters of a Cluster do."""

    class Server:
        pass

    servers = {key_of(name): Server() for name in ("a", "b")}
    hangs, goes_on, real = threading.Event(), threading.Event(), engine.extend_many

    def extend_many(work):
        if any(grant.claim.name == "a" for grant, _ in work):
            hangs.set()
            goes_on.wait(DEADLINE)
        return real(work)

    monkeypatch.setattr(engine, "server_of", servers.__getitem__)
    monkeypatch.setattr(engine, "extend_many", extend_many)
    stuck, kept = Lock("a", ttl=3).acquire(), Lock("b", ttl=3).acquire()
    assert hangs.wait(DEADLINE)

    renewed(kept, times=2)

    goes_on.set()
    kept.release()
    with suppress(LockLost):
        stuck.release()


def test_what_was_told_as_lost_stays_lost_and_is_not_renewed_by_a_late_answer(engine):
    told = threading.Event()
    engine.hang("extend", after=True)
    hold = Lock("a", ttl=0.5).acquire()
    hold.on_lost(lambda lost: told.set())
    assert told.wait(DEADLINE)

    engine.go_on()
    asked = len(engine.asked)
    time.sleep(0.7)

    assert hold.lost
    assert len(engine.asked) == asked
    left_quietly(hold)


def test_an_answer_that_comes_too_late_is_no_extension(engine):
    hold = Lock("a", ttl=0.3, renew=False).acquire()
    engine.after["extend"] = lambda: time.sleep(0.4)

    with pytest.raises(LockLost):
        hold.extend()

    assert hold.lost
    engine.go_on()
    left_quietly(hold)


def test_a_loss_in_the_middle_of_a_callback_that_blocks_is_told_all_the_same(engine):
    gate, told = threading.Event(), threading.Event()
    first = Lock("a", ttl=0.2, renew=False).acquire()
    first.on_lost(lambda hold: gate.wait(DEADLINE))
    until(lambda: first.lost)
    second = Lock("b", ttl=0.2, renew=False).acquire()
    second.on_lost(lambda hold: told.set())

    assert told.wait(DEADLINE / 2)

    gate.set()
    left_quietly(first)
    left_quietly(second)


@pytest.mark.parametrize("error", [ValueError("bug"), SystemExit(1)])
def test_callbacks_and_receivers_that_raise_silence_no_other(engine, error):
    def fail(*args, **kwargs):
        raise error

    told = threading.Event()
    lock_lost.connect(fail)
    try:
        for name in "ab":
            hold = Lock(name, ttl=0.2, renew=False).acquire()
            hold.on_lost(fail)
            hold.on_lost(lambda lost: told.set())
            assert told.wait(DEADLINE)
            told.clear()
            left_quietly(hold)
    finally:
        lock_lost.disconnect(fail)


def test_a_receiver_that_exits_silences_no_loss_that_waits_to_be_told(engine):
    told, go_on, behind = [], threading.Event(), threading.Event()

    def listen(name, **facts):
        if name in ("first", "second", "third"):  # not those of an earlier test
            told.append(name)
        if name == "first":
            go_on.wait(DEADLINE)
        elif name == "second":
            raise SystemExit(1)

    lock_lost.connect(listen)
    try:
        holds = [Lock("first", ttl=0.2, renew=False).acquire()]
        until(lambda: told == ["first"])
        holds += [
            Lock(name, ttl=ttl, renew=False).acquire()
            for name, ttl in (("second", 0.2), ("third", 0.5))
        ]
        holds[-1].on_lost(lambda lost: behind.set())
        assert behind.wait(DEADLINE)
        go_on.set()
        until(lambda: told == ["first", "second", "third"])
    finally:
        lock_lost.disconnect(listen)
    for hold in holds:
        left_quietly(hold)


def test_a_loss_is_never_told_after_the_release(engine, heard):
    told = []
    hold = Lock("released", ttl=3).acquire()
    hold.on_lost(told.append)
    engine.hang("extend")
    until(lambda: "extend" in engine.asked)
    hold.release()

    engine.go_on()
    outlast(hold)

    assert told == []
    signals = [signal for signal, facts in heard if facts["name"] == "released"]
    assert signals == [lock_released]
    assert not hold.lost


def test_a_callback_of_an_inner_hold_ends_with_that_hold(engine):
    told = []
    with pytest.raises(LockLost):
        with Lock("a", ttl=0.3, renew=False) as outer:
            with Lock("a") as inner:
                inner.on_lost(told.append)
            outer.on_lost(told.append)
            until(lambda: told)

    assert told == [outer]


def test_on_lost_comes_at_once_for_a_hold_that_is_lost_already(engine):
    told = []
    hold = Lock("a", ttl=0.2, renew=False).acquire()
    until(lambda: hold._lease.lost_because)

    hold.on_lost(told.append)

    assert told == [hold]
    left_quietly(hold)
    hold.on_lost(told.append)
    assert told == [hold]


@pytest.mark.parametrize("with_callback", [False, True])
def test_a_dropped_hold_warns_and_is_not_renewed(engine, with_callback):
    hold = Lock("a", ttl=2).acquire()
    if with_callback:
        hold.on_lost(lambda lost: None)
    gc.disable()
    try:
        with pytest.warns(ResourceWarning, match="dropped"):
            del hold
    finally:
        gc.enable()

    until(lambda: not list(engine.holders()))
    assert engine.asked.count("extend") <= 1


def test_the_renewer_frees_holds_and_forgets_what_was_released(engine):
    leases = []
    for _ in range(5000):
        hold = Lock("a").acquire()
        leases.append(weakref.ref(hold._lease))
        hold.release()
    del hold
    gc.collect()

    assert len(timer._heap) < 3000
    assert sum(ref() is not None for ref in leases) < 10


def test_a_renewal_that_fails_for_one_lease_renews_the_others(engine, monkeypatch):
    real = Renewer._look_at
    unlucky = Lock("a", ttl=3).acquire()

    def look_at(self, lease):
        if lease is unlucky._lease:
            raise ValueError("bug")
        real(self, lease)

    monkeypatch.setattr(Renewer, "_look_at", look_at)
    lucky = [Lock(f"b{n}", ttl=3).acquire() for n in range(5)]  # due together with it

    renewed(*lucky)
    until(lambda: unlucky.lost and len(list(engine.holders())) == len(lucky))

    for hold in lucky:
        hold.check()
        hold.release()
    left_quietly(unlucky)


def test_what_is_released_while_its_renewal_waits_for_others_is_not_asked_for(engine):
    first, released = Lock("a", ttl=30).acquire(), Lock("b", ttl=30).acquire()
    engine.hang("extend")
    renewer._put_extend(first._lease)
    until(lambda: "extend" in engine.asked)
    renewer._put_extend(released._lease)
    released.release()
    renewer._put_extend(first._lease)
    before = first._lease.trusted_until

    engine.go_on()
    until(lambda: engine.asked.count("extend") >= 2 and first._lease.trusted_until > before)

    assert engine.asked.count("extend") == 2
    first.release()


def test_a_process_without_threads_left_says_so_and_goes_on_when_there_are_again(
    engine, monkeypatch, caplog
):
    mine = Timer()
    for module in "acquiring", "ending", "hold", "renewal", "releasing":
        monkeypatch.setattr(f"distlock_app.core.{module}.timer", mine)
    real = threading.Thread.start

    def no_threads(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_threads)
    first = Lock("a", ttl=5).acquire()
    monkeypatch.setattr(threading.Thread, "start", real)
    assert "no_thread" in [record.lock_event for record in caplog.records]
    second = Lock("b", ttl=3).acquire()

    renewed(second)

    first.release()
    second.release()


def test_an_interrupt_while_the_thread_is_started_does_not_leave_it_off(monkeypatch):
    done = threading.Event()
    worker = threads.Worker("test", lambda jobs: done.set())
    real = threading.Thread.start

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.put("job")
    monkeypatch.setattr(threading.Thread, "start", real)
    worker.put("job")

    assert done.wait(DEADLINE)


def test_an_idle_worker_ends_and_starts_again(monkeypatch):
    monkeypatch.setattr(threads, "WORKER_IDLE", 0.02)
    done = []
    worker = threads.Worker("test-idle", lambda jobs: done.extend(jobs))

    for number in range(30):
        worker.put(number)
        until(lambda n=number: n in done)
        time.sleep(0.001 * (number % 40))
    until(lambda: not worker._running)

    worker.put("last")
    until(lambda: "last" in done)


def test_backends_are_not_kept_alive_by_their_workers(monkeypatch, settings):
    monkeypatch.setattr(threads, "WORKER_IDLE", 0.02)
    fake = {"BACKEND": "tests.engines.FakeBackend"}
    settings.DISTLOCK = {"default": fake, "own": fake}
    backend = weakref.ref(registry["own"].backend)
    hold = Lock("a", using="own", ttl=3).acquire()
    renewed(hold)
    hold.release()
    del hold

    settings.DISTLOCK = {"default": fake}

    until(lambda: gc.collect() >= 0 and backend() is None)


def test_a_hold_survives_a_reset_of_the_registry(engine):
    hold = Lock("a", ttl=3).acquire()
    registry.reset()

    renewed(hold)

    hold.release()
    assert engines.free(engine)


def test_no_renewal_waits_for_releases(engine):
    engine.hang("release")
    hold = Lock("a", ttl=3).acquire()
    for number in range(20):
        releaser.give_back(engine, Grant(a_claim(f"b{number}")))

    renewed(hold)

    engine.go_on()
    hold.release()


def test_a_release_that_hangs_holds_up_no_other(engine):
    gate, first = threading.Event(), iter([True])
    engine.before["release"] = lambda: next(first, False) and gate.wait(DEADLINE)
    stuck = engine.acquire(a_claim("stuck"), 0)
    others = [engine.acquire(a_claim(f"b{number}"), 0) for number in range(20)]

    for grant in (stuck, *others):
        releaser.give_back(engine, grant)

    until(lambda: [x.name for x in engine.holders()] == ["stuck"])
    gate.set()
    until(lambda: not engine._states)


def test_a_release_that_failed_is_tried_again_until_it_arrives(engine):
    engine.fail("release", times=3)

    with Lock("a", ttl=30):
        pass

    until(lambda: engines.free(engine))


def test_a_late_release_of_a_stable_owner_never_hits_its_next_hold(engine):
    engine.fail("release", times=1)
    lock = Lock("a", owner="scheduler", ttl=30)
    with lock:
        pass

    hold = lock.acquire(wait=0)
    releaser.drain()

    assert list(engine.holders())
    hold.release()


def test_a_release_is_not_tried_when_its_time_is_over(engine):
    grant = engine.acquire(a_claim("b", ttl=0.1), 0)
    engine.hang("release")
    for number in range(releasing.THREADS):
        releaser.give_back(engine, Grant(a_claim(f"hangs {number}")))
    releaser.give_back(engine, grant)
    over = monotonic() + 0.2
    until(lambda: monotonic() > over)

    engine.go_on()
    releaser.drain()

    assert engine.asked.count("release") == releasing.THREADS


def test_many_releases_that_an_engine_owes_do_not_ask_it_all_the_time(engine):
    engine.fail("release")
    for number in range(500):
        releaser.give_back(engine, Grant(a_claim(f"b{number}", ttl=30)))
    until(lambda: sum(isinstance(what, releasing.Release) for what in timer.scheduled()) >= 500)

    asked = engine.asked.count("release")
    engine.go_on()

    assert asked < 100
    until(lambda: engine.asked.count("release") >= asked + 500)


def test_a_lock_that_was_released_is_not_kept_until_its_renewal_was_due(engine):
    hold = Lock("a").acquire()
    lease = hold._lease
    timer.wake_at(0.0)
    until(lambda: lease.due is not None)

    hold.release()

    assert lease not in timer.scheduled()


def ended(code):
    """Run it in a process of its own, which may load Django; return how that ended."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        timeout=DEADLINE,
        env={**os.environ, "PYTHONPATH": "."},
    )


def test_the_end_of_the_process_waits_for_releases_under_way():
    code = """
import os, sys, django
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
django.setup()
from django.test import override_settings
from distlock_app import Lock
from distlock_app.core import releasing
from distlock_app.core.registry import registry
releasing.EXIT_PATIENCE = 20.0
fake = {"BACKEND": "tests.engines.FakeBackend"}
override_settings(DISTLOCK={"default": fake}).enable()
engine = registry["default"].backend
hold = Lock("a").acquire()
engine.after["release"] = lambda: os.write(1, b"released")
engine.fail("release", times=2)
hold.leave(None)
"""
    done = ended(code)

    assert done.stdout == b"released", done.stderr


def test_the_end_of_the_process_waits_until_a_loss_is_told():
    code = """if True:
        import os, time, django
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        django.setup()
        from distlock_app import Lock, LockLost
        from distlock_app.signals import lock_lost

        def listen(**facts):
            time.sleep(0.3)
            os.write(1, b"told")

        lock_lost.connect(listen)
        lock = Lock("a", using="locmem")
        hold = lock.acquire()
        lock.clear()
        try:
            hold.release()
        except LockLost:
            pass
    """
    done = ended(code)

    assert (done.returncode, done.stdout) == (0, b"told"), done.stderr


def test_the_end_of_the_process_waits_for_an_on_lost_callback():
    code = """if True:
        import os, time, django
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        django.setup()
        from distlock_app import Lock, LockLost

        def stop(hold):
            time.sleep(0.3)
            os.write(1, b"stopped")

        lock = Lock("a", using="locmem", on_lost=stop)
        hold = lock.acquire()
        lock.clear()
        try:
            hold.release()
        except LockLost:
            pass
    """
    done = ended(code)

    assert (done.returncode, done.stdout) == (0, b"stopped"), done.stderr


def test_a_callback_whose_thread_is_just_being_started_is_waited_for(monkeypatch):
    told = []
    thread = threading.Thread(target=told.append, args=[1], name=reporting.CALLS_BACK)
    monkeypatch.setitem(threading._limbo, thread, thread)  # as start() begins
    monkeypatch.setattr(reporting, "sleep", lambda _: thread.ident or thread.start())

    reporting.await_reports()

    assert told == [1]


@pytest.mark.parametrize("loaded_by", ["the parent", "the child"])
@pytest.mark.parametrize("work", ["lose", "roll_back"])
def test_the_end_of_a_child_of_multiprocessing_waits_until_all_is_told(loaded_by, work):
    code = f"""if True:
        import multiprocessing, os, time, django
        from contextlib import suppress
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"

        def listen(**facts):
            time.sleep(0.3)
            os.write(1, b"told")

        def lose(lock):
            hold = lock.acquire()
            lock.clear()
            hold.release()

        def roll_back(lock):
            from django.db import transaction
            with transaction.atomic(), lock:
                raise ValueError

        def work():
            django.setup()
            from distlock_app import Lock, LockLost
            from distlock_app.signals import lock_lost, lock_released
            for signal in lock_lost, lock_released:
                signal.connect(listen, weak=False)
            with suppress(LockLost, ValueError):
                {work}(Lock("a", using="locmem"))

        if {loaded_by == "the parent"}:
            django.setup()
            import distlock_app.signals
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join()
    """
    done = ended(code)

    assert (done.returncode, done.stdout) == (0, b"told"), done.stderr


def test_a_process_ends_in_silence_although_a_daemon_thread_is_in_a_with():
    code = """if True:
        import os, threading, time, django
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        django.setup()
        from distlock_app import Lock
        held = threading.Event()
        def work():
            with Lock("a", using="locmem"):
                held.set()
                time.sleep(100)
        threading.Thread(target=work, daemon=True).start()
        held.wait()
    """
    done = ended(code)

    assert (done.returncode, done.stderr) == (0, b"")


def test_a_process_ends_although_a_task_still_waits():
    code = """if True:
        import asyncio, builtins
        from django.conf import settings
        locks = {"default": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"}}
        settings.configure(DISTLOCK=locks)
        from distlock_app import Lock

        async def wait():
            async with Lock("a", wait=60):
                pass

        async def main():
            builtins.task = loop.create_task(wait())  # lives until the end
            await asyncio.sleep(0.1)

        hold = Lock("a").acquire()
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        loop.close()
        hold.release()
    """
    subprocess.run([sys.executable, "-c", code], timeout=DEADLINE, check=True)


def test_the_end_of_the_process_does_not_wait_for_an_engine_that_hangs(monkeypatch, engine):
    monkeypatch.setattr(releasing, "EXIT_PATIENCE", 0.1)
    engine.hang("release")
    hold = Lock("a").acquire()
    releaser.give_back(engine, hold._lease.grant)
    began = time.monotonic()

    releaser.drain()

    assert time.monotonic() - began < 5
    engine.go_on()
    until(lambda: engines.free(engine))
    left_quietly(hold)


def test_a_release_for_which_the_ending_process_gets_no_thread_is_made_and_told():
    code = """if True:
        import os, threading, django
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
        django.setup()
        from distlock_app import Lock
        from distlock_app.signals import lock_released
        from django.db import transaction

        def start(thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        def listen(**facts):
            os.write(1, b"released")

        lock_released.connect(listen)
        try:
            with transaction.atomic(), Lock("a", using="locmem"):
                threading.Thread.start = start
                raise ValueError
        except ValueError:
            pass
    """
    done = ended(code)

    assert (done.returncode, done.stdout) == (0, b"released"), done.stderr


def test_a_signal_handler_that_releases_in_the_middle_of_the_timer_does_not_hang(engine):
    first, second = Lock("a").acquire(), Lock("b").acquire()
    for hold in first, second:
        renewer._schedule(hold._lease, monotonic() + 5)

    def interrupt(frame, event, arg):
        if event == "call" and frame.f_code is Timer.wake_at.__code__:
            sys.setprofile(None)
            second.release()

    done = threading.Event()

    def work():
        sys.setprofile(interrupt)
        renewer._schedule(first._lease, monotonic() + 4)  # with the timer's lock
        first.release()
        done.set()

    threading.Thread(target=work, daemon=True).start()

    assert done.wait(10)
    assert engines.free(engine, "a") and engines.free(engine, "b")


def test_two_thousand_holds_are_renewed_in_batches_by_one_thread(engine, monkeypatch):
    batches = []
    real = engine.extend_many

    def extend_many(work):
        batches.append(len(work))
        return real(work)

    monkeypatch.setattr(engine, "extend_many", extend_many)
    Lock("a").acquire().release()
    threads = _renewers()
    holds = [Lock(f"a{n}", ttl=20).acquire() for n in range(2_000)]

    until(lambda: sum(batches) >= 2_000, within=60)

    assert len(batches) < 1000
    assert _renewers() == threads
    for hold in holds:
        hold.check()
        hold.release()


def test_a_pause_of_the_timer_that_is_over_at_once_ends(monkeypatch):
    mine, done = Timer(), []
    monkeypatch.setattr(mine, "_call_due", lambda: 1e-9)

    def turn():
        for _ in range(20_000):  # a SimpleQueue hangs after some thousands, before Python 3.13
            mine.soon(lambda: None)
            mine._turn()
            mine._turn()
        done.append(True)

    thread = threading.Thread(target=turn, daemon=True)
    thread.start()
    thread.join(DEADLINE)

    assert done


def test_what_is_due_while_the_timer_looks_does_not_stop_it(monkeypatch):
    now = iter([0.0, 2.0])  # it looks, and then decides for how long it may sleep
    mine, what, here = Timer(), SimpleNamespace(due=None), threading.get_ident()
    monkeypatch.setattr(mine, "wake_at", lambda due: None)
    # The timer of the process goes on by the real one.
    clock = {here: partial(next, now)}
    monkeypatch.setattr(
        core_timer, "monotonic", lambda: clock.get(threading.get_ident(), monotonic)()
    )
    mine.at(1.0, what, lambda what: None)

    assert mine._call_due() == 0.0


def _renewers():
    return [thread for thread in threading.enumerate() if thread.name == "distlock-timer"]


def test_no_warning_is_left(engine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Lock("a"):
            pass
        gc.collect()


def test_a_backend_error_of_extend_leaves_the_hold_as_it_was(engine):
    hold = Lock("a", ttl=30).acquire()
    engine.fail("extend")

    with pytest.raises(BackendError):
        hold.extend()

    hold.check()
    hold.release()


def test_what_is_released_soon_does_not_come_onto_the_heap(engine):
    for _ in range(100):
        with Lock("soon", ttl=30):
            pass

    leases = [entry[2] for entry in list(timer._heap) if isinstance(entry[2], Lease)]
    # Where the renewer woke just then, for another lock, it saw the one that was held.
    assert [lease.grant.claim.name for lease in leases].count("soon") < 10
    assert "soon" not in {lease.grant.claim.name for lease in timer.young.copy()}
