"""The waiting loop: retries, pauses, wake-ups and time limits, for threads and event loops.

The loop is a generator that yields calls and pauses. `run` executes both in the calling thread;
`arun` makes the calls in threads (offloading.py) and pauses in the event loop, so that a waiting
task occupies no thread, unless its backend waits on the server.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ..backends.base import BaseLockBackend
from ..claims import Busy, Claim, Grant
from ..errors import BackendError, LockBusy, LockError, LockTimeout
from ..primitives.forks import in_child
from ..primitives.names import shown
from ..primitives.timing import Deadline, full_jitter, monotonic, trusted_for
from .offloading import Begin, Seen, begin, begin_alone, begin_first, ended
from .releasing import release_of, releaser
from .wakers import AsyncWaker, Waker

# Seconds between the expected expiry of a claim and the next try.
AFTER_EXPIRY = 0.005
# Seconds between checks of a waiter that the server will wake: clearing a lock, or an owner that
# hangs, wakes no waiter.
LOOK_EVERY = 1.0


class Call(NamedTuple):
    """Call a function and send back its result; for an event loop, `begin` uses a thread."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    begin: Begin = begin


class Pause(NamedTuple):
    """Pause until woken or `wake_fd` is readable; send back a pushed grant, if any.

    `within`: what a thread calls for that, if its backend has something.
    """

    seconds: float
    wake_fd: int | None
    within: Callable[[float], Grant | None] | None


Step = Call | Pause

# By id of a waker, to keep no task alive: backend and name of what it waits for, for metrics.
waiting: dict[int, tuple[BaseLockBackend, str]] = {}
in_child(waiting.clear)


def acquired(
    backend: BaseLockBackend, claim: Claim, wait: float | None, waker: Waker
) -> tuple[Grant, float]:
    """Run `acquiring` in this thread; a free lock needs none of its steps."""
    asked_at = monotonic()
    if backend.blocks:  # it waits in its first try
        waiting[id(waker)] = backend, claim.name
    try:
        answer: Any = backend.acquire(claim, wait)
        if answer:
            began = asked_at if answer.asked_at is None else answer.asked_at
            # Certainly trusted; otherwise compute it exactly.
            if answer.ttl is None and monotonic() < began + claim.ttl / 2:
                return answer, began
            if (exactly := trusted(answer, asked_at)) is not None:
                return answer, exactly
        waiting[id(waker)] = backend, claim.name
        grant, began = run(acquiring(backend, claim, wait, first=(asked_at, answer)), waker)
        return grant, began
    finally:
        if waiting:  # else a free lock does without the call
            waiting.pop(id(waker), None)


def acquiring(
    backend: BaseLockBackend,
    claim: Claim,
    wait: float | None,
    *,
    first: tuple[float, Any] | None = None,
) -> Generator[Step, Any, tuple[Grant, float]]:
    """Wait for the claim; return the grant and a time before which its lease cannot begin.

    Raise LockBusy (wait=0) or LockTimeout. Raise BackendError if the first try fails, or if the
    backend still fails at the deadline. `first`: time and answer of a first try that was
    already made.
    """
    deadline = Deadline(wait, since=first[0] if first else None)
    attempt = 0
    tried = False  # not by the first step, if begin_first() only looked
    busy = Busy()  # what to wait for
    while True:
        last = (left := wait if first else deadline.remaining()) == 0
        failures: list[LockError] = []
        try:
            look = tried and not (last and _keeps_place(backend))
            asked_at, answer = first or (yield from _asking(backend, claim, left, look, tried))
            first = None
            if isinstance(answer, Seen):  # what will wake it, only a try can tell
                busy, answer = replace(busy, free_in=answer.busy.free_in), None
            else:
                busy, tried = answer if isinstance(answer, Busy) else Busy(), True
            # The try took all the time left (on a locked row, say): another would take as long.
            last = last or (deadline.remaining() == 0 and not _keeps_place(backend))
        except BackendError as error:
            if attempt == 0 or last:
                raise
            failures, answer, busy = [error], None, Busy()
        if not answer and not last:
            pause = _seconds(backend, attempt, busy, failed=bool(failures))
            answer = yield Pause(deadline.cap(pause), busy.wake_fd, busy.pause)
        if answer:
            if (began := trusted(answer, asked_at)) is not None:
                return answer, began
            # The process or the network stalled for longer than the lease, which may be over.
            failures += yield from _giving_back(backend, answer)
        if last:
            yield from _withdrawing(backend, claim, wait)
            # Removed from the list: its traceback refers to this frame.
            raise (failures or [busy_error(claim.name, wait, busy.free_in)]).pop()
        attempt += 1


def _asking(
    backend: BaseLockBackend, claim: Claim, left: float | None, look: bool, tried: bool
) -> Generator[Step, Any, tuple[float, Any]]:
    """Try to take the lock; with `look` only if it looks free. Return when it asked, the answer.

    Seen: it only looked.
    """
    asked_at = monotonic()
    if look:
        if (busy := (yield Call(backend.look, (claim,)))) is not None:
            return asked_at, Seen(busy)
        asked_at = monotonic()
    how: Begin = begin if tried else begin_first
    how = begin_alone if backend.blocks and left != 0 else how
    return asked_at, (yield Call(backend.acquire, (claim, left), how))


def _giving_back(backend: BaseLockBackend, grant: Grant) -> Generator[Step, Any, list[LockError]]:
    try:
        yield Call(release_of(backend, grant), ())
    except BackendError as error:
        return [error]  # the same owner will be granted again
    return []


def _keeps_place(backend: BaseLockBackend) -> bool:
    """Whether a last try is needed to leave its queue; any other only needs withdraw()."""
    return backend.blocks or backend.pushes or backend.queues


def _withdrawing(
    backend: BaseLockBackend, claim: Claim, wait: float | None
) -> Generator[Step, Any, None]:
    """Leave the backend's queue, unless the last try has done that."""
    if wait != 0 and not _keeps_place(backend):
        with suppress(BackendError):
            yield Call(backend.withdraw, (claim,))


def trusted(grant: Grant, asked_at: float) -> float | None:
    """Return a time before which the lease cannot begin; None: it may already be over."""
    began = asked_at if grant.asked_at is None else grant.asked_at
    ttl = grant.ttl or grant.claim.ttl  # a backend may grant less than requested
    return began if monotonic() < began + trusted_for(ttl) else None


def _seconds(backend: BaseLockBackend, attempt: int, busy: Busy, *, failed: bool) -> float:
    """Return how long to pause before the next try."""
    if backend.blocks and not failed:
        return 0.0
    if busy.wake_fd is not None or busy.will_wake:
        pause = LOOK_EVERY
    elif backend.pushes:
        pause = backend.poll_max
    else:
        pause = full_jitter(attempt, base=backend.poll_min, cap=backend.poll_max)
    return pause if busy.free_in is None else min(pause, max(0.0, busy.free_in) + AFTER_EXPIRY)


def busy_error(name: str, wait: float | None, free_in: float | None = None) -> LockBusy:
    """Return the error for a lock that was not granted within `wait` seconds."""
    name = shown(name)
    if wait == 0:
        return LockBusy(f"the lock {name!r} is held by another owner", free_in=free_in)
    within = "" if wait is None else f" within {wait:.3f} s"
    return LockTimeout(f"the lock {name!r} was not free{within}", free_in=free_in)


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
                if not isinstance(step, Pause):
                    answer = step.function(*step.args)
                elif step.within is not None:
                    answer = step.within(step.seconds)
                else:
                    answer = waker.wait(step.seconds, step.wake_fd)
            except Exception as raised:
                error = raised
    finally:
        error = None  # its traceback refers to this frame


async def arun(
    backend: BaseLockBackend, claim: Claim, wait: float | None, waker: AsyncWaker
) -> tuple[Grant, float]:
    """Run `acquiring` in the event loop; its calls are made in threads.

    When the task is cancelled, the claim is given back after the call in flight, or at once if that
    call waits, to end it. So it is if the waiter's turn comes after its loop was closed.
    """
    give_back = waker.on_loop_closed = partial(releaser.give_back, backend, Grant(claim))
    steps = acquiring(backend, claim, wait)
    answer: Any = None
    error: Exception | None = None
    request: Future[Any] | None = None
    waiting[id(waker)] = backend, claim.name
    try:
        while True:
            try:
                step = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as stop:
                grant, began = stop.value
                return grant, began
            error = None
            try:
                if isinstance(step, Pause):
                    answer = await _paused(waker, step, give_back)
                else:
                    request = step.begin(backend, step.function, *step.args)
                    answer = await ended(request, give_back, at_once=step.begin is begin_alone)
            except Exception as raised:
                error = raised
    finally:
        waiting.pop(id(waker), None)
        waker.over = True
        error = request = None  # their tracebacks refer to this frame


async def _paused(waker: AsyncWaker, pause: Pause, give_back: Callable[[], None]) -> Any:
    try:
        return await waker.wait(pause.seconds, pause.wake_fd)
    except BaseException:
        give_back()
        raise
