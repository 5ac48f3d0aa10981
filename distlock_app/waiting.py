"""The one waiting loop, and the two ways to run it: in a thread and in an event loop.

The loop is a generator that does nothing itself: it yields calls to make and pauses to take.
`run` makes them in the calling thread; `arun` makes the calls in a small pool of threads and
takes the pauses in the event loop, so that a waiting task occupies no thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

from .backends.base import BaseLockBackend
from .claims import Claim, Grant
from .errors import BackendError, LockBusy, LockTimeout
from .names import shown
from .timing import Deadline, drift, full_jitter

# A claim that ends by itself is asked for this much later than the engine said, in seconds.
AFTER_EXPIRY = 0.005
IO_THREADS = 8

# ("call", function, arguments) answers what the function returns; ("pause", seconds) answers
# the grant that was pushed meanwhile, or None.
Step = tuple[Any, ...]


def acquiring(
    backend: BaseLockBackend, claim: Claim, wait: float | None
) -> Generator[Step, Any, tuple[Grant, float]]:
    """Get the claim granted; return the grant and a time before which its lease cannot begin.

    Raise LockBusy (wait=0), LockTimeout, or BackendError: at once if the first try fails so,
    and if it still does at the deadline when the engine had answered before.
    """
    deadline = Deadline(wait)
    attempt = 0
    failure: BackendError | None = None
    answer: Any = None
    while True:
        left = deadline.remaining()
        last = left == 0
        asked_at = monotonic()
        try:
            if attempt == 0 or last or (answer := (yield ("call", backend.look, claim))) is None:
                asked_at = monotonic()
                answer = yield ("call", backend.acquire, claim, left)
            failure = None
        except BackendError as error:
            if attempt == 0 or last:
                raise
            failure, answer = error, None
        free_in = getattr(answer, "free_in", None)
        if not answer and not last:
            pause = _pause(backend, attempt, free_in)
            answer = yield ("pause", deadline.cap(pause))
        if answer:
            began = asked_at if answer.asked_at is None else answer.asked_at
            if monotonic() < began + claim.ttl - drift(claim.ttl):
                return answer, began
            # The process or the network slept for longer than the lease: it may be over.
            yield ("call", backend.release, answer)
        if last:
            raise failure or _refusal(claim, wait, free_in)
        attempt += 1


def _pause(backend: BaseLockBackend, attempt: int, free_in: float | None) -> float:
    if backend.blocks:
        return 0.0
    if backend.pushes:
        pause = backend.poll_max
    else:
        pause = full_jitter(attempt, base=backend.poll_min, cap=backend.poll_max)
    return pause if free_in is None else min(pause, free_in + AFTER_EXPIRY)


def _refusal(claim: Claim, wait: float | None, free_in: float | None) -> LockBusy:
    name = shown(claim.name)
    if wait == 0:
        return LockBusy(f"the lock {name!r} is held by somebody else", free_in=free_in)
    return LockTimeout(f"the lock {name!r} was held by others for {wait} s", free_in=free_in)


class Bell:
    """Ends the pause of a waiting thread."""

    __slots__ = ("_grant", "_rung")

    def __init__(self) -> None:
        self._grant: Grant | None = None
        self._rung = threading.Lock()
        self._rung.acquire()

    def ring(self, grant: Grant | None) -> None:
        """Wake the waiter; may be called from any thread, any number of times."""
        if grant is not None:
            self._grant = grant
        try:
            self._rung.release()
        except RuntimeError:  # it rings already
            pass

    def pause(self, seconds: float) -> Grant | None:
        """Sleep until it rings, at most `seconds`."""
        self._rung.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))
        return self._grant


class AsyncBell:
    """Ends the pause of a waiting asyncio task."""

    __slots__ = ("_grant", "_loop", "_rung")

    def __init__(self) -> None:
        self._grant: Grant | None = None
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    def ring(self, grant: Grant | None) -> None:
        """Wake the waiter; may be called from any thread, any number of times."""
        if grant is not None:
            self._grant = grant
        try:
            self._loop.call_soon_threadsafe(self._rung.set)
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass

    async def pause(self, seconds: float) -> Grant | None:
        """Sleep until it rings, at most `seconds`."""
        try:
            await asyncio.wait_for(self._rung.wait(), seconds)
        except asyncio.TimeoutError:
            pass
        self._rung.clear()
        return self._grant


def run(steps: Generator[Step, Any, Any], bell: Bell) -> Any:
    """Run the generator in this thread; return what it returns."""
    answer: Any = None
    error: Exception | None = None
    while True:
        try:
            step = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as stop:
            return stop.value
        error = None
        try:
            if step[0] == "call":
                answer = step[1](*step[2:])
            else:
                answer = bell.pause(step[1])
        except Exception as raised:
            error = raised


async def arun(
    steps: Generator[Step, Any, Any], bell: AsyncBell, *, cancelled: Callable[[], None]
) -> Any:
    """Run the generator in the event loop; its calls are made in the pool of threads.

    `cancelled` is called when the task was cancelled and no call is under way any more.
    """
    answer: Any = None
    error: Exception | None = None
    while True:
        try:
            step = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as stop:
            return stop.value
        error = None
        try:
            if step[0] == "call":
                answer = await in_thread(*step[1:], cancelled=cancelled)
                continue
        except Exception as raised:
            error = raised
            continue
        try:
            answer = await bell.pause(step[1])
        except BaseException:
            cancelled()
            raise


def _new_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(IO_THREADS, thread_name_prefix="distlock-io")


_pool = _new_pool()


def _after_fork() -> None:
    global _pool
    _pool = _new_pool()


os.register_at_fork(after_in_child=_after_fork)


async def in_thread(
    function: Callable[..., Any], *args: Any, cancelled: Callable[[], None] | None = None
) -> Any:
    """Call `function` in the pool.

    A cancellation does not wait for the call; `cancelled` is called when it has ended.
    """
    request = _pool.submit(function, *args)
    try:
        return await asyncio.wrap_future(request)
    except asyncio.CancelledError:
        if cancelled is not None:
            request.add_done_callback(lambda _: cancelled())
        raise
