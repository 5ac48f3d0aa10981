"""`AllOf`, `Holds`: several locks at once, all or none, always in the same order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from operator import attrgetter
from types import CodeType
from typing import Any

from ..errors import BackendError, LockBusy, LockTimeout, NotHeld
from ..primitives import identity, names
from ..primitives.names import shown
from ..primitives.timing import Deadline
from ..primitives.transactions import check_caller
from ..signals import asend, lock_acquired, lock_failed, send
from .batch import Together
from .entered import Entered, WithBlock
from .hold import Hold
from .limits import UNSET, checked_wait
from .offloading import begin, ended
from .registry import aliases_of, registry


class Holds(tuple[Hold, ...], Entered):
    """The holds of several locks, in the order of the arguments.

    A lock on several aliases returns it as its hold. `pin` and `guarded_set` are of one backend:
    `holds[0].pin()`.
    """

    @property
    def name(self) -> str:
        """The name of the first lock."""
        return self[0].name

    @property
    def fence(self) -> int | None:
        """The highest of their fencing tokens, or None."""
        return max((hold.fence for hold in self if hold.fence is not None), default=None)

    @property
    def expires_in(self) -> float:
        """Seconds for which all are certainly ours if no renewal succeeds."""
        return min(hold.expires_in for hold in self)

    @property
    def lost(self) -> bool:
        """Whether another owner may have one of them by now."""
        return any(hold.lost for hold in self)

    @property
    def opened(self) -> bool:
        """Whether one of them locks nothing, because its backend was down."""
        return any(hold.opened for hold in self)

    @property
    def released(self) -> bool:
        """Whether all were released."""
        return all(hold.released for hold in self)

    def check(self) -> None:
        """Raise LockLost if any of the locks may no longer be ours."""
        for hold in self:
            hold.check()

    def extend(self, ttl: float | None = None) -> None:
        """Like `Hold.extend` with each."""
        for hold in self:
            hold.extend(ttl)

    async def aextend(self, ttl: float | None = None) -> None:
        """Like `extend`, without blocking the event loop."""
        for hold in self:
            await hold.aextend(ttl)

    def on_lost(self, callback: Callable[[Hold], object]) -> None:
        """Call `callback(hold)` with each of them that is lost, on a thread of its own."""
        for hold in self:
            hold.on_lost(callback)

    def _check_dump(self) -> None:
        for hold in self:
            hold._check_dump()

    def _dumped(self) -> str:
        return " ".join(hold._dumped() for hold in self)

    def leave_for(self, seconds: float) -> None:
        """Like `Hold.leave_for` with each; raise the first error after trying each.

        With none of them if the locks of one backend end with their session.
        """
        for hold in self:
            hold._check_leave()
        self._each(lambda hold: hold.leave_for(seconds))

    def release(self) -> None:
        """Release all; raise the first error after trying each. May be called again after that."""
        self._each(Hold.release)

    async def arelease(self) -> None:
        """Like `release`, without blocking the event loop."""
        await self._aeach(Hold.arelease)

    def abandon(self) -> None:
        """Release all in the background; see `Hold.abandon`."""
        self._each(Hold.abandon)

    def leave(self, exc: BaseException | None, *, unused: bool = False) -> None:
        """Release all at the end of a `with` whose body raised `exc`; see `Hold.leave`."""
        self._each(lambda hold: hold.leave(exc, unused=unused))

    async def aleave(self, exc: BaseException | None, *, unused: bool = False) -> None:
        """Like `leave`, without blocking the event loop."""
        await self._aeach(lambda hold: hold.aleave(exc, unused=unused))

    def _each(self, end: Callable[[Hold], None]) -> None:
        error: BaseException | None = None
        for hold in self._to_end():
            try:
                end(hold)
            except BaseException as raised:
                error = error or raised
        if error is not None:
            raise error

    async def _aeach(self, end: Callable[[Hold], Awaitable[None]]) -> None:
        error: BaseException | None = None
        for hold in self._to_end():
            try:
                await end(hold)
            except BaseException as raised:
                error = error or raised
        if error is not None:
            raise error

    def _to_end(self) -> list[Hold]:
        """Return those that are not released, last first; if all are, one of them, to say so."""
        return [hold for hold in reversed(self) if not hold.released] or [*self[-1:]]

    def end_block(self, block: Any, exc: BaseException | None) -> None:
        """Like `Hold.end_block`: one lost lock rolls it back."""
        lost = [hold for hold in self if hold.lost]
        (lost or self)[0].end_block(block, exc)

    def enter(self, *, inside: bool = True) -> Holds:
        """Like `Hold.enter` with each, in their order, whichever was taken first."""
        together = object()
        for hold in self:
            hold.enter(inside=inside)
            hold.entered_with = together
        self.runner = identity.current_runner()
        return self

    def _taken_at(self, where: tuple[CodeType, int]) -> None:
        for hold in self:
            hold.taken_at = where

    taken_at = property(None, _taken_at)


@dataclass(frozen=True, slots=True)
class AllOf(WithBlock[Holds]):
    """Several locks to take together; a description that can be shared like a Lock."""

    locks: tuple[Any, ...]
    atomic = False

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
                holds.check()  # one may have been lost while the next was waited for
            return holds.enter(inside=entered)
        except BaseException as error:
            (holds or Holds(taken.values())).leave(error, unused=True)
            raise _as_timeout(error, deadline) from error.__cause__

    async def _aacquire(self, wait: float | None = UNSET, *, entered: bool = False) -> Holds:
        deadline = Deadline(self._wait(wait))
        taken: dict[int, Hold] = {}
        holds = None
        for lock in self.locks:
            await check_caller(lock.name, release_now=lock.release == "now")
        try:
            if (holds := await self._aat_once()) is None:
                for index, lock in self._order():
                    taken[index] = await lock._aacquire(deadline.remaining(), entered=True)
                holds = _in_order(taken)
                holds.check()
            return holds.enter(inside=entered)
        except BaseException as error:
            await (holds or Holds(taken.values())).aleave(error, unused=True)
            raise _as_timeout(error, deadline) from error.__cause__

    def _at_once(self) -> Holds | None:
        """Take all with one request if the backend can and all are free, else none."""
        together = Together.of(self.locks)
        if together is None:
            return None
        try:
            if not together.hold(together.backend.acquire_all(together.claims)):
                return None
            for facts in together.facts():
                send(lock_acquired, facts)
            return Holds(together.holds)
        except BackendError as error:
            for facts in together.failed(error):
                send(lock_failed, facts)
            return Holds(together.opened(error))
        except BaseException as error:
            together.give_back(at_once=not isinstance(error, Exception))
            raise

    async def _aat_once(self) -> Holds | None:
        """Like `_at_once`, without blocking the event loop."""
        together = Together.of(self.locks)
        if together is None:
            return None
        try:
            request = begin(together.backend, together.backend.acquire_all, together.claims)
            if not together.hold(await ended(request, together.give_back)):
                return None
            for facts in together.facts():
                await asend(lock_acquired, facts)
            return Holds(together.holds)
        except BackendError as error:
            for facts in together.failed(error):
                await asend(lock_failed, facts)
            return Holds(together.opened(error))
        except BaseException as error:
            # If cancelled during the request, ended() gives back when the request has ended.
            if together.holds or isinstance(error, Exception):
                together.give_back()
            raise

    def _wait(self, wait: float | None) -> float | None:
        if wait is not UNSET:
            return checked_wait(wait)
        waits = [registry[x.using].wait if x.wait is UNSET else x.wait for x in self.locks]
        return None if None in waits else max(w for w in waits if w is not None)

    def _order(self) -> list[tuple[int, Any]]:
        # The same order for everybody, by what the backends compare: otherwise A-B and B-A
        # wait for each other.
        return sorted(
            enumerate(self.locks), key=lambda x: (x[1].using, names.key_of(x[1].name), x[0])
        )


def one_or_all(holds: list[Hold]) -> Hold:
    """Return the hold of a lock on one alias, or the `Holds` of a lock on several."""
    return holds[0] if len(holds) == 1 else Holds(holds)  # type: ignore[return-value]


def _in_order(taken: dict[int, Hold]) -> Holds:
    return Holds(taken[index] for index in sorted(taken))


def _as_timeout(error: BaseException, deadline: Deadline) -> BaseException:
    """Return the error to raise: "busy" at the last lock, after a wait, is a timeout."""
    waited = deadline.wait != 0 and deadline.remaining() == 0
    if type(error) is LockBusy and waited:
        return LockTimeout(error.args[0], free_in=error.free_in)
    return error


def current_hold(name: str | None = None, *, using: str | tuple[str, ...] = "default") -> Hold:
    """Return the hold of the `with` or decorated function around the caller; sends no request.

    With `name` that of this lock, else of the lock taken last. Raise NotHeld outside any. A bare
    `acquire()` does not count, and `lock_in_transaction()` has no hold.
    """
    by_entry = attrgetter("entry")
    leases = [*identity.current_runner().held.values()]  # another thread may release one of them
    innermost = [max(holds, key=by_entry) for x in leases if (holds := x.entered_holds())]
    innermost.sort(key=by_entry)
    found: list[Any]
    if name is None:
        found = [hold for hold in innermost if _as_one(hold, innermost[-1])]
    else:
        held = {hold._lease.lease_key[:2]: hold for hold in innermost}  # the one taken last wins
        wanted = [(registry[alias].backend, names.key_of(name)) for alias in aliases_of(using)]
        found = [held.get(lock) for lock in wanted]
    if not found or None in found:
        what = "no lock is held here" if name is None else f"{shown(name)!r} is not held"
        raise NotHeld(what)
    return one_or_all(found)


def _as_one(hold: Hold, last: Hold) -> bool:
    """Whether it is of the lock that `last` is of, on another alias, and of the same `with`."""
    same = hold._lease.lease_key[1:] == last._lease.lease_key[1:]
    return hold is last or (same and hold.entered_with is last.entered_with is not None)
