"""Engines that fail, hang, answer late or lose their answers, for tests of the core.

engine = pytest.fixture(engines.install)     # DISTLOCK["default"] is a FakeBackend
engine.fail("extend", times=2)               # the request never arrives
engine.fail("release", after=True)           # it arrives, but the answer is lost
engine.hang("extend")                        # until engine.go_on()
"""

from __future__ import annotations

import asyncio
import dataclasses
import dis
import gc
import itertools
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

from distlock_app.backends.locmem import LocMemBackend
from distlock_app.core.lease import Lease
from distlock_app.core.registry import registry
from distlock_app.errors import BackendError
from distlock_app.primitives.timing import monotonic

DEADLINE = 30.0


class FakeBackend(LocMemBackend):
    """LocMem, with a hook before and after each verb; it writes down what it is asked."""

    def __init__(self, *, alias: str, location: Any = None) -> None:
        super().__init__(alias=alias, location=location)
        self.asked: list[str] = []
        self.before: dict[str, Callable[[], Any]] = {}
        self.after: dict[str, Callable[[], Any]] = {}
        self._gate = threading.Event()

    def acquire(self, claim, wait):
        return self._do("acquire", lambda: super(FakeBackend, self).acquire(claim, wait))

    def extend(self, grant, ttl):
        return self._do("extend", lambda: super(FakeBackend, self).extend(grant, ttl))

    def end_in(self, grant, ttl):
        return self._do("end_in", lambda: super(FakeBackend, self).end_in(grant, ttl))

    def release(self, grant):
        return self._do("release", lambda: super(FakeBackend, self).release(grant))

    def _do(self, verb, work):
        self.asked.append(verb)
        self.before.get(verb, _nothing)()
        answer = work()
        self.after.get(verb, _nothing)()
        return answer

    def fail(self, verb, *, error=None, times=10**9, after=False):
        """Raise BackendError, or `error`, the next `times` times."""
        left = iter(range(times))

        def hook():
            if next(left, None) is not None:
                raise error or BackendError("the engine is down")

        (self.after if after else self.before)[verb] = hook

    def hang(self, verb, *, after=False):
        """Let the verb hang until `go_on()`, at most for the tests' deadline."""
        self._gate.clear()
        (self.after if after else self.before)[verb] = lambda: self._gate.wait(DEADLINE)

    def go_on(self):
        """Let everything work again."""
        self.before.clear()
        self.after.clear()
        self._gate.set()


class BlockingBackend(FakeBackend):
    """An engine that waits on its server, in the thread that asks."""

    blocks = True
    pushes = False

    def acquire(self, claim, wait):
        end = None if wait is None else time.monotonic() + wait
        while True:
            answer = super().acquire(claim, 0)
            if answer or (end is not None and time.monotonic() >= end):
                return answer
            time.sleep(0.002)


class SessionBackend(BlockingBackend):
    """An engine whose claims live as long as a session: they never end by themselves."""

    expires = False
    heartbeat = 0.02

    def __init__(self, *, alias: str, location: Any = None) -> None:
        super().__init__(alias=alias, location=location)
        self.quiet = False  # answers None to the renewer: nothing asked, nothing known
        self._given_up: set[str] = set()

    def acquire(self, claim, wait):
        forever = dataclasses.replace(claim, ttl=10**6)
        end = None if wait is None else time.monotonic() + wait
        while claim.owner not in self._given_up:
            answer = FakeBackend.acquire(self, forever, 0)
            if answer:
                return dataclasses.replace(answer, claim=claim)
            if end is not None and time.monotonic() >= end:
                return answer
            time.sleep(0.002)
        raise BackendError("given up")

    def extend_many(self, work):
        self.asked.append("heartbeat")
        return [None] * len(work) if self.quiet else super().extend_many(work)

    def release(self, grant):
        self._given_up.add(grant.claim.owner)
        return super().release(grant)


def _nothing():
    pass


def install(settings):
    """Fixture: make `default` a FakeBackend and `other` another one; return the first."""
    fake = {"BACKEND": "tests.engines.FakeBackend"}
    blocking = {"BACKEND": "tests.engines.BlockingBackend"}
    session = {"BACKEND": "tests.engines.SessionBackend"}
    settings.DISTLOCK = {"default": fake, "other": fake, "blocking": blocking, "session": session}
    backend = registry["default"].backend
    yield backend
    for entry in registry.made():
        entry.backend.go_on()


def interrupted_everywhere(modules, steps, *, every=1):
    """Run `steps()` again and again, each time interrupted at another place in `modules`.

    `every`: only at each of so many places, where that takes long.

    `steps` yields a function to call and a handler that interrupts it, as a signal handler does,
    and goes on when both are done.
    """
    files = {module.__file__ for module in modules}
    for at in itertools.count(-2, every):  # Python 3.12 and 3.13 trace opcodes only from then on
        work = steps()
        function, handler = next(work)
        left = itertools.count(-at)

        def at_opcode(frame, event, arg, left=left, handler=handler):
            if event in ("line", "opcode") and next(left) == 0:
                handler()
            return at_opcode

        def trace(frame, event, arg, at_opcode=at_opcode):
            if frame.f_code.co_filename not in files:
                return None
            frame.f_trace_opcodes = True
            return at_opcode

        def run(function=function, trace=trace, done=(done := [])):
            sys.settrace(trace)
            try:
                function()
            finally:
                sys.settrace(None)
            done.append(True)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(DEADLINE)
        assert done, f"it hangs or fails when interrupted at {at}"
        if next(left) <= 0:  # there are no more places
            work.close()
            assert at > 20
            return
        if at < 0:
            handler()
        with suppress(StopIteration):
            next(work)


@lru_cache
def ways_out(code):
    """Return where a block ends that `with` began, until it calls `__exit__(None, None, None)`.

    The interpreter handles no signal there: a mutex would stay locked.
    """
    steps, found = list(dis.get_instructions(code)), set()
    for at in range(1, len(steps) - 4):
        nones = [
            step.opname == "DUP_TOP" or (step.opname == "LOAD_CONST" and step.argval is None)
            for step in steps[at : at + 3]
        ]
        if all(nones):
            begins = at - (steps[at - 1].opname in ("ROT_TWO", "SWAP"))  # with what is returned
            found.update(step.offset for step in steps[begins : at + 5])
    return found


def interrupted_at(at, module, function, *args):
    """Call it with Ctrl-C at one place in `module`; return whether there is no such place.

    The first two calls on Python 3.12 and 3.13 find few places: they trace opcodes only then.
    """
    left = itertools.count(-at)

    def at_opcode(frame, event, arg):
        here = event in ("line", "opcode") and frame.f_lasti not in ways_out(frame.f_code)
        if here and next(left) == 0:
            raise KeyboardInterrupt
        return at_opcode

    def trace(frame, event, arg):
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        return at_opcode

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return next(left) <= 0


def leases():
    """Return how many leases there are in this process, held or not."""
    return sum(type(x) is Lease for x in gc.get_objects())  # isinstance() would wake lazy ones


def until(condition, within=DEADLINE):
    """Wait until `condition()` is true; fail if it does not become so within the deadline."""
    end, pause = time.monotonic() + within, 0.002
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(pause)
        pause = min(1.5 * pause, 0.02)  # what takes long is seldom looked at


@contextmanager
def alarmed(condition, handler):
    """Have `handler` called as one of a signal, in this thread, when `condition()` is true."""
    caller, before = threading.get_ident(), signal.signal(signal.SIGALRM, handler)

    def alarm():
        until(condition)
        signal.pthread_kill(caller, signal.SIGALRM)

    try:
        with running(alarm):
            yield
    finally:
        signal.signal(signal.SIGALRM, before)


@contextmanager
def closing_loop(wait, waits):
    """Run the coroutine function, until `waits()`; then its loop is closed without a word."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.to_thread(until, waits))
    loop.close()
    yield
    task._log_destroy_pending = False
    task.get_coro().close()


class InterruptedSlots(deque):
    """Slots of which the first is taken just as Ctrl-C arrives."""

    interrupted = False

    def pop(self):
        super().pop()
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt


def renewed(*holds, times=1):
    """Wait until each hold was renewed `times` times from now on; raise LockLost if one is lost."""
    for _ in range(times):
        before = [hold._lease.trusted_until for hold in holds]
        for hold, end in zip(holds, before, strict=True):
            until(lambda hold=hold, end=end: hold.check() or hold._lease.trusted_until > end)


def outlast(hold):
    """Sleep until nobody could hold it any more by what the engine has answered so far."""
    time.sleep(max(0.0, hold._lease.trusted_until + 0.2 - monotonic()))


def free(backend, name="a"):
    """Return whether nobody holds the lock or waits for it, as the engine sees it."""
    from distlock_app.primitives.names import key_of

    with backend._lock:
        return key_of(name) not in backend._states


@contextmanager
def running(work, *args):
    """Run `work` in a thread; join it at the end, and raise what it raised."""
    errors = []

    def run():
        try:
            work(*args)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(DEADLINE)
    assert not thread.is_alive()
    if errors:
        raise errors[0]
