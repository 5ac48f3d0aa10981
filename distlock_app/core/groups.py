"""`all_of`: several locks at once, all or none, always in the same order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import CodeType

from ..errors import LockBusy, LockTimeout
from ..primitives import identity, names
from ..primitives.timing import Deadline
from ..signals import asend, lock_acquired, send
from .acquiring import UNSET
from .batch import Together
from .entered import Entered, WithBlock
from .hold import Hold
from .lock import Lock
from .offloading import in_thread
from .registry import checked_wait, registry


class Holds(tuple[Hold, ...], Entered):
    """The holds of several locks, in the order of the arguments."""

    def check(self) -> None:
        """Raise LockLost if any of the locks may no longer be ours."""
        for hold in self:
            hold.check()

    def release(self) -> None:
        """Release all; raise the first error after trying each."""
        self.leave(None)

    async def arelease(self) -> None:
        """Like `release`, without blocking the event loop."""
        await self.aleave(None)

    def leave(self, exc: BaseException | None, *, unused: bool = False) -> None:
        """Release all at the end of a `with` whose body raised `exc`; see `Hold.leave`."""
        error: BaseException | None = None
        for hold in reversed(self):
            try:
                hold.leave(exc, unused=unused)
            except BaseException as raised:
                error = error or raised
        if error is not None:
            raise error

    async def aleave(self, exc: BaseException | None, *, unused: bool = False) -> None:
        """Like `leave`, without blocking the event loop."""
        error: BaseException | None = None
        for hold in reversed(self):
            try:
                await hold.aleave(exc, unused=unused)
            except BaseException as raised:
                error = error or raised
        if error is not None:
            raise error

    def enter(self) -> Holds:
        """Like `Hold.enter` with each."""
        for hold in self:
            hold.enter()
        self.runner = identity.current_runner()
        return self

    def bare(self, taken_at: tuple[CodeType, int]) -> Holds:
        """Record where each was taken, outside a `with`."""
        for hold in self:
            hold.enter(inside=False)
            hold.taken_at = taken_at
        return self


@dataclass(frozen=True, slots=True)
class AllOf(WithBlock[Holds]):
    """Several locks to take together; a description that can be shared like a Lock."""

    locks: tuple[Lock, ...]
    atomic = False

    def acquire(self, wait: float | None = UNSET) -> Holds:
        """Take all locks within `wait` seconds, or none; raise what `Lock.acquire` raises.

        By default it waits for the longest `wait` of the locks.
        """
        taken_at = identity.caller_location()
        return self._acquire(wait).bare(taken_at)

    def _acquire(self, wait: float | None = UNSET, *, entered: bool = False) -> Holds:
        if asyncio._get_running_loop() is not None:
            identity.refuse_to_block("`async with`, or `await locks.aacquire()`")
        deadline = Deadline(self._wait(wait))
        taken: dict[int, Hold] = {}
        holds = None
        try:
            if (holds := self._at_once()) is None:
                for index, lock in self._order():
                    # Entered, because the same lock may be given twice.
                    taken[index] = lock._acquire(deadline.remaining(), entered=True)
                holds = _in_order(taken)
            return holds.enter() if entered else holds
        except BaseException as error:
            (holds or Holds(taken.values())).leave(error, unused=True)
            raise _as_timeout(error, deadline) from error.__cause__

    async def aacquire(self, wait: float | None = UNSET) -> Holds:
        """Like `acquire`, without blocking the event loop."""
        taken_at = identity.caller_location()
        return (await self._aacquire(wait)).bare(taken_at)

    async def _aacquire(self, wait: float | None = UNSET, *, entered: bool = False) -> Holds:
        deadline = Deadline(self._wait(wait))
        taken: dict[int, Hold] = {}
        try:
            if (holds := await self._aat_once()) is None:
                for index, lock in self._order():
                    taken[index] = await lock._aacquire(deadline.remaining(), entered=True)
                holds = _in_order(taken)
            return holds.enter() if entered else holds
        except BaseException as error:
            await Holds(taken.values()).aleave(error, unused=True)
            raise _as_timeout(error, deadline) from error.__cause__

    def _at_once(self) -> Holds | None:
        """Take all with one request if the backend can and all are free, else none."""
        together = Together.of(self.locks)
        if together is None:
            return None
        try:
            holds = together.hold(together.backend.acquire_all(together.claims))
            if holds is None:
                return None
            if lock_acquired.receivers:
                for hold, attempt in zip(holds, together.attempts, strict=True):
                    send(lock_acquired, {"fence": hold.fence, **attempt.facts()})
            return Holds(holds)
        except BaseException as error:
            together.give_back(at_once=not isinstance(error, Exception))
            raise

    async def _aat_once(self) -> Holds | None:
        """Like `_at_once`, without blocking the event loop."""
        together = Together.of(self.locks)
        if together is None:
            return None
        try:
            grants = await in_thread(
                together.backend,
                together.backend.acquire_all,
                together.claims,
                cancelled=together.give_back,
            )
            holds = together.hold(grants)
            if holds is None:
                return None
            if lock_acquired.receivers:
                for hold, attempt in zip(holds, together.attempts, strict=True):
                    await asend(lock_acquired, {"fence": hold.fence, **attempt.facts()})
            return Holds(holds)
        except BaseException as error:
            # If cancelled during the request, in_thread() gives back when the request has ended.
            if together.holds or isinstance(error, Exception):
                together.give_back()
            raise

    def _wait(self, wait: float | None) -> float | None:
        if wait is not UNSET:
            return checked_wait(wait)
        waits = [registry[x.using].wait if x.wait is UNSET else x.wait for x in self.locks]
        return None if None in waits else max(w for w in waits if w is not None)

    def _order(self) -> list[tuple[int, Lock]]:
        # The same order for all callers, by what backends compare: otherwise A-B and B-A deadlock.
        return sorted(
            enumerate(self.locks), key=lambda x: (x[1].using, names.key_of(x[1].name), x[0])
        )


def _in_order(taken: dict[int, Hold]) -> Holds:
    return Holds(taken[index] for index in sorted(taken))


def _as_timeout(error: BaseException, deadline: Deadline) -> BaseException:
    """Return the error to raise: "busy" at the last lock, after a wait, is a timeout."""
    waited = deadline.wait != 0 and deadline.remaining() == 0
    if type(error) is LockBusy and waited:
        return LockTimeout(error.args[0], free_in=error.free_in)
    return error


def all_of(*locks: Lock) -> AllOf:
    """Combine locks that are taken all or none: `with all_of(a, b) as (hold_a, hold_b)`."""
    if not locks:
        raise ValueError("all_of() needs at least one lock")
    if any(lock.atomic for lock in locks):
        raise ValueError(
            "all_of() does not take locks with atomic=: open atomic() inside its `with`"
        )
    return AllOf(locks)
