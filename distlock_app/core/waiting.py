"""The waiting loop: retries, wake-ups and time limits, for threads and event loops.

The loop is a generator that does nothing itself: it yields calls to make and pauses to take.
`run` does both in the calling thread; `arun` makes the calls in threads (offloading.py) and takes
the pauses in the event loop, so that a waiting task occupies no thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, NamedTuple

from ..backends.base import BaseLockBackend
from ..claims import Claim, Grant
from ..errors import BackendError, LockBusy, LockError, LockTimeout
from ..primitives.names import shown
from ..primitives.timing import Deadline, full_jitter, monotonic, trusted_for
from .offloading import Begin, Seen, begin, begin_alone, begin_first, ended
from .wakers import AsyncWaker, Waker

# A claim that ends by itself is asked for this much later than the engine said, in seconds.
AFTER_EXPIRY = 0.005
# A waiter that the server will wake looks this often all the same, in seconds: a lock that was
# cleared, or whose owner hangs, wakes no waiter.
LOOK_EVERY = 1.0


class Call(NamedTuple):
    """Answers what the function returns; for an event loop `begin` makes it in a thread."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    begin: Begin = begin


class Pause(NamedTuple):
    """Answers the grant that was pushed meanwhile, if any; ends when `wake_fd` is readable."""

    seconds: float
    wake_fd: int | None


Step = Call | Pause

# Backend and name of each lock that this process waits for now, by the waiter's waker: for metrics.
waiting: dict[Waker | AsyncWaker, tuple[BaseLockBackend, str]] = {}
os.register_at_fork(after_in_child=waiting.clear)


def acquired(
    backend: BaseLockBackend, claim: Claim, wait: float | None, waker: Waker
) -> tuple[Grant, float]:
    """Run `acquiring` in this thread: a free lock is granted without any of its steps."""
    if backend.blocks:  # it waits in its first try
        return _waited(backend, claim, acquiring(backend, claim, wait), waker)
    asked_at = monotonic()
    answer: Any = backend.acquire(claim, wait)
    if answer:
        began = asked_at if answer.asked_at is None else answer.asked_at
        # Surely trusted; else asked exactly.
        if answer.ttl is None and monotonic() < began + claim.ttl / 2:
            return answer, began
        if (exactly := _trusted(answer, asked_at)) is not None:
            return answer, exactly
    steps = acquiring(backend, claim, wait, first=(asked_at, answer))
    del answer  # it may hold a ticket of a queue, which the steps alone keep or drop
    return _waited(backend, claim, steps, waker)


def _waited(
    backend: BaseLockBackend, claim: Claim, steps: Generator[Step, Any, Any], waker: Waker
) -> tuple[Grant, float]:
    waiting[waker] = backend, claim.name
    try:
        grant, began = run(steps, waker)
        return grant, began
    finally:
        waiting.pop(waker, None)


def acquiring(
    backend: BaseLockBackend,
    claim: Claim,
    wait: float | None,
    *,
    first: tuple[float, Any] | None = None,
) -> Generator[Step, Any, tuple[Grant, float]]:
    """Get the claim granted; return the grant and a time before which its lease cannot begin.

    Raise LockBusy (wait=0), LockTimeout, or BackendError: at once if the first try fails so,
    and if it still does at the deadline when the engine had answered before. `first`: when
    the first try was made already, and its answer.
    """
    deadline = Deadline(wait, since=first[0] if first else None)
    attempt = 0
    tried = first is not None  # not merely looked, because too many others try
    failures: list[LockError] = []
    answer: Any = None
    refusal: Any = None  # kept, for it may hold a ticket of a queue
    while True:
        left = deadline.remaining()
        last = left == 0
        asked_at, failures = monotonic(), []
        try:
            if first is not None:
                asked_at, answer, refusal, first, last = *first, first[1], None, wait == 0
            elif (
                not tried
                or (last and not _keeps_nothing(backend, refusal))
                or (answer := (yield Call(backend.look, (claim,)))) is None
            ):
                asked_at = monotonic()
                how: Begin = begin if tried else begin_first
                how = begin_alone if backend.blocks and not last else how
                answer = yield Call(backend.acquire, (claim, left), how)
                tried = not isinstance(answer, Seen)
                answer = refusal = answer if tried else answer.busy
            # Such as a row that is locked: to ask again would take as long again.
            last = last or (_keeps_nothing(backend, refusal) and deadline.remaining() == 0)
        except BackendError as error:
            if attempt == 0 or last:
                raise
            failures, answer, refusal = [error], None, None
        free_in = getattr(answer, "free_in", None)
        if not answer and not last:
            wake_fd = getattr(refusal, "wake_fd", None)
            notified = wake_fd is not None or getattr(refusal, "will_wake", False)
            pause = _pause(backend, attempt, free_in, notified=notified, failed=bool(failures))
            answer = yield Pause(deadline.cap(pause), wake_fd)
        if answer:
            if (began := _trusted(answer, asked_at)) is not None:
                return answer, began
            # The process or the network slept for longer than the lease: it may be over.
            failures += yield from _giving_back(backend, answer)
        if last:
            # Taken out: its traceback will refer to this frame.
            raise (failures or [busy_error(claim.name, wait, free_in)]).pop()
        attempt += 1


def _keeps_nothing(backend: BaseLockBackend, refusal: Any) -> bool:
    """Return whether the engine keeps nothing of the claim that a last try would take away."""
    polled = not (backend.blocks or backend.pushes or backend.queues)
    return polled and getattr(refusal, "ticket", None) is None


def _giving_back(backend: BaseLockBackend, grant: Grant) -> Generator[Step, Any, list[LockError]]:
    try:
        yield Call(backend.release, (grant,))
    except BackendError as error:
        return [error]  # the same owner is granted again
    return []


def _trusted(grant: Grant, asked_at: float) -> float | None:
    """Return a time before which the lease cannot begin; None: it may be over already."""
    began = asked_at if grant.asked_at is None else grant.asked_at
    ttl = grant.ttl or grant.claim.ttl  # an engine may give less than it was asked for
    return began if monotonic() < began + trusted_for(ttl) else None


def _pause(
    backend: BaseLockBackend,
    attempt: int,
    free_in: float | None,
    *,
    notified: bool,
    failed: bool,
) -> float:
    if backend.blocks and not failed:
        return 0.0
    if notified:
        pause = LOOK_EVERY
    elif backend.pushes:
        pause = backend.poll_max
    else:
        pause = full_jitter(attempt, base=backend.poll_min, cap=backend.poll_max)
    return pause if free_in is None else min(pause, free_in + AFTER_EXPIRY)


def busy_error(name: str, wait: float | None, free_in: float | None = None) -> LockBusy:
    """Return the error for a lock that was not granted within `wait` seconds."""
    name = shown(name)
    if wait == 0:
        return LockBusy(f"the lock {name!r} is held by another owner", free_in=free_in)
    return LockTimeout(f"the lock {name!r} was not free within {wait:.3f} s", free_in=free_in)


def run(steps: Generator[Step, Any, Any], waker: Waker) -> Any:
    """Run the generator in this thread; return what it returns."""
    answer: Any = None
    error: Exception | None = None
    try:
        while True:
            try:
                step = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value
            error = None
            try:
                if isinstance(step, Pause):
                    answer = waker.wait(*step)
                else:
                    answer = step.function(*step.args)
            except Exception as raised:
                error = raised
    finally:
        error = None  # its traceback refers to this frame


async def arun(
    backend: BaseLockBackend,
    steps: Generator[Step, Any, Any],
    waker: AsyncWaker,
    *,
    cancelled: Callable[[], None],
) -> Any:
    """Run the generator in the event loop; its calls are made in threads.

    `cancelled` is called when the task was cancelled and no call is under way any more, and
    at once if that call waits: to end it. Also when its turn comes after its loop was closed.
    """
    waker.on_loop_closed = cancelled
    answer: Any = None
    error: Exception | None = None
    request: Future[Any] | None = None
    try:
        while True:
            try:
                step = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value
            error = None
            try:
                if isinstance(step, Pause):
                    answer = await _paused(waker, step, cancelled)
                else:
                    request = step.begin(backend, step.function, *step.args)
                    answer = await ended(request, cancelled, at_once=step.begin is begin_alone)
            except Exception as raised:
                error = raised
    finally:
        error = request = None  # their tracebacks refer to this frame


async def _paused(waker: AsyncWaker, pause: Pause, cancelled: Callable[[], None]) -> Any:
    try:
        return await waker.wait(*pause)
    except BaseException:
        cancelled()
        raise
