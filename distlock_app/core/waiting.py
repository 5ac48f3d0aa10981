"""The waiting loop: retries, pauses, wake-ups and time limits, for threads and event loops.

The loop is a coroutine. `InThread` makes its calls and pauses in the calling thread, so that it
awaits nothing; `InLoop` makes the calls in threads (offloading.py) and pauses in the event loop, so
that a waiting task occupies no thread, unless its backend waits on the server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

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

# The grant, and a time before which its lease cannot begin.
Acquired = tuple[Grant, float]

# By id of a waker, to keep no task alive: backend and name of what it waits for, for metrics.
waiting: dict[int, tuple[BaseLockBackend, str]] = {}
in_child(waiting.clear)


def acquired(backend: BaseLockBackend, claim: Claim, wait: float | None, waker: Waker) -> Acquired:
    """Take the lock in this thread; a free one needs no loop."""
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
        return InThread(backend, claim, waker).acquired(wait, (asked_at, answer))
    finally:
        if waiting:  # else a free lock does without the call
            waiting.pop(id(waker), None)


async def arun(
    backend: BaseLockBackend, claim: Claim, wait: float | None, waker: AsyncWaker
) -> Acquired:
    """Take the lock in the event loop.

    When the task is cancelled, the claim is given back after the call in flight, or at once if that
    call waits, to end it. So it is if the waiter's turn comes after its loop was closed.
    """
    waiting[id(waker)] = backend, claim.name
    try:
        return await InLoop(backend, claim, waker).acquiring(wait)
    finally:
        waiting.pop(id(waker), None)
        waker.over = True


class WaitLoop(ABC):
    """The loop of one waiter, without the way in which it makes calls and pauses."""

    def __init__(self, backend: BaseLockBackend, claim: Claim, waker: Any) -> None:
        self.backend = backend
        self.claim = claim
        self.waker = waker
        # Whether a last try is needed to leave its queue; any other only needs withdraw().
        self.keeps_place = backend.blocks or backend.pushes or backend.queues

    @abstractmethod
    async def call(self, function: Callable[..., Any], *args: Any, how: Begin = begin) -> Any:
        """Call a function; for an event loop, `how` uses a thread."""

    @abstractmethod
    async def pause(self, seconds: float, busy: Busy) -> Grant | None:
        """Pause until woken, or as `busy` says; return a pushed grant, if any."""

    async def acquiring(
        self, wait: float | None, first: tuple[float, Any] | None = None
    ) -> Acquired:
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
                look = tried and not (last and self.keeps_place)
                asked_at, answer = first or await self._asking(left, look, tried)
                first = None
                if isinstance(answer, Seen):  # what will wake it, only a try can tell
                    busy, answer = replace(busy, free_in=answer.busy.free_in), None
                else:
                    busy, tried = answer if isinstance(answer, Busy) else Busy(), True
                # The try took all the time left (on a locked row, say): another would as well.
                last = last or (deadline.remaining() == 0 and not self.keeps_place)
            except BackendError as error:
                if attempt == 0 or last:
                    raise
                failures, answer, busy = [error], None, Busy()
            if not answer and not last:
                pause = self._seconds(attempt, busy, failed=bool(failures))
                answer = await self.pause(deadline.cap(pause), busy)
            if answer:
                if (began := trusted(answer, asked_at)) is not None:
                    return answer, began
                # The process or the network stalled for longer than the lease, which may be over.
                # If this fails, the same owner will be granted again.
                failures += await self._failures(release_of(self.backend, answer))
            if last:
                if wait != 0 and not self.keeps_place:  # else the last try has left the queue
                    await self._failures(partial(self.backend.withdraw, self.claim))
                # Removed from the list: its traceback refers to this frame.
                raise (failures or [busy_error(self.claim.name, wait, busy.free_in)]).pop()
            attempt += 1

    async def _asking(self, left: float | None, look: bool, tried: bool) -> tuple[float, Any]:
        """Try to take the lock, with `look` only if it looks free; return when, and the answer.

        Seen: it only looked.
        """
        asked_at = monotonic()
        if look:
            if (busy := await self.call(self.backend.look, self.claim)) is not None:
                return asked_at, Seen(busy)
            asked_at = monotonic()
        how: Begin = begin if tried else begin_first
        how = begin_alone if self.backend.blocks and left != 0 else how
        return asked_at, await self.call(self.backend.acquire, self.claim, left, how=how)

    async def _failures(self, call: Callable[[], Any]) -> list[BackendError]:
        """Make this call; return its error, if it fails."""
        try:
            await self.call(call)
        except BackendError as error:
            return [error]
        return []

    def _seconds(self, attempt: int, busy: Busy, *, failed: bool) -> float:
        """Return how long to pause before the next try."""
        backend = self.backend
        if backend.blocks and not failed:
            return 0.0
        if busy.wake_fd is not None or busy.will_wake:
            pause = LOOK_EVERY
        elif backend.pushes:
            pause = backend.poll_max
        else:
            pause = full_jitter(attempt, base=backend.poll_min, cap=backend.poll_max)
        return pause if busy.free_in is None else min(pause, max(0.0, busy.free_in) + AFTER_EXPIRY)


class InThread(WaitLoop):
    """Makes the calls and pauses in this thread."""

    def acquired(self, wait: float | None, first: tuple[float, Any] | None = None) -> Acquired:
        """Return what `acquiring` returns, which awaits nothing here."""
        try:
            self.acquiring(wait, first).send(None)
        except StopIteration as stop:
            grant, began = stop.value
            return grant, began
        raise RuntimeError("a thread has no event loop to await")

    async def call(self, function: Callable[..., Any], *args: Any, how: Begin = begin) -> Any:
        return function(*args)

    async def pause(self, seconds: float, busy: Busy) -> Grant | None:
        if busy.pause is not None:
            return busy.pause(seconds)
        grant: Grant | None = self.waker.wait(seconds, busy.wake_fd)
        return grant


class InLoop(WaitLoop):
    """Makes the calls in other threads, and pauses in the event loop."""

    def __init__(self, backend: BaseLockBackend, claim: Claim, waker: AsyncWaker) -> None:
        super().__init__(backend, claim, waker)
        self.give_back = partial(releaser.give_back, backend, Grant(claim))
        waker.on_loop_closed = self.give_back

    async def call(self, function: Callable[..., Any], *args: Any, how: Begin = begin) -> Any:
        alone = how is begin_alone
        return await ended(how(self.backend, function, *args), self.give_back, at_once=alone)

    async def pause(self, seconds: float, busy: Busy) -> Grant | None:
        try:
            grant: Grant | None = await self.waker.wait(seconds, busy.wake_fd)
        except BaseException:
            self.give_back()
            raise
        return grant


def trusted(grant: Grant, asked_at: float) -> float | None:
    """Return a time before which the lease cannot begin; None: it may already be over."""
    began = asked_at if grant.asked_at is None else grant.asked_at
    ttl = grant.ttl or grant.claim.ttl  # a backend may grant less than requested
    return began if monotonic() < began + trusted_for(ttl) else None


def busy_error(name: str, wait: float | None, free_in: float | None = None) -> LockBusy:
    """Return the error for a lock that was not granted within `wait` seconds."""
    name = shown(name)
    if wait == 0:
        return LockBusy(f"the lock {name!r} is held by another owner", free_in=free_in)
    within = "" if wait is None else f" within {wait:.3f} s"
    return LockTimeout(f"the lock {name!r} was not free{within}", free_in=free_in)
