"""`with` and `async with` of `Lock` and `all_of`: which hold belongs to which open block."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Generic, TypeVar

from django.db import transaction

from ..errors import LockBusy, LockError, NotHeld
from ..primitives import identity
from .limits import UNSET

HeldT = TypeVar("HeldT")


class Entered:
    """What `Hold` and `Holds` share: `with`, the record of the `with` around it, `dump`."""

    lock: Any = None
    frame: FrameType | None = None
    runner: Any = None  # that entered it
    block: Any = None  # the atomic() block inside

    def __enter__(self: HeldT) -> HeldT:
        if self.released:  # type: ignore[attr-defined]
            raise NotHeld("this hold was released: acquire the lock again")
        return self.enter()  # type: ignore[attr-defined,no-any-return]

    def __exit__(self: Any, exc_type: Any, exc: BaseException | None, traceback: Any) -> None:
        self.leave(exc)

    async def __aenter__(self: HeldT) -> HeldT:
        return Entered.__enter__(self)

    async def __aexit__(
        self: Any, exc_type: Any, exc: BaseException | None, traceback: Any
    ) -> None:
        await self.aleave(exc)

    async def acheck(self: Any) -> None:
        """Like `check`; it costs no request either."""
        self.check()

    def dump(self: Any, ttl: float | None = None) -> str:
        """Hand the lock over: return a text with which `Lock.resume` takes it over elsewhere.

        This hold ends, but the lock stays taken for `ttl` seconds from now (default: its own
        ttl), within which it must be resumed. The text is secret: it is enough to release the
        lock. Raise what `extend` raises, and LockError if the lock cannot be handed over now or
        on this backend.
        """
        self._check_dump()
        self.extend(ttl)
        return self._dumped()  # type: ignore[no-any-return]

    async def adump(self: Any, ttl: float | None = None) -> str:
        """Like `dump`, without blocking the event loop."""
        self._check_dump()
        await self.aextend(ttl)
        return self._dumped()  # type: ignore[no-any-return]


# The open `with` blocks of each frame. One thread at a time runs a frame: no mutex is needed.
_by_frame: dict[FrameType | None, list[Any]] = {}


def record(hold: Entered, lock: Any, frame: FrameType) -> None:
    """Record that the `with` of `lock` in `frame` was entered."""
    hold.lock, hold.frame = lock, frame
    _by_frame[frame] = [*_by_frame.get(frame, ()), hold]


def _break_off(hold: Any, error: BaseException, *, unused: bool = False) -> None:
    """End the `with`, and the atomic() block inside if an interrupt left that open."""
    try:
        block = hold.block
        if block and block in transaction.get_connection(block.using).atomic_blocks:
            hold.end_block(block, error)
    finally:
        try:
            hold.leave(error, unused=unused)
        finally:
            forget(hold)


def forget(hold: Entered) -> None:
    """Record that this `with` has ended, or was not entered after all; may be done again."""
    here = _by_frame.get(hold.frame)
    if here == [hold]:
        del _by_frame[hold.frame]
    elif here:  # replaced in one step: an interrupt must never find the others missing
        _by_frame[hold.frame] = [one for one in here if one is not hold]
    hold.frame = hold.block = None


def recorded(lock: Any, frame: FrameType) -> Any:
    """Return the hold or holds of the `with` of `lock` that ends in `frame`."""
    for hold in reversed(_by_frame.get(frame, ())):
        if hold.lock is lock:
            return hold
    # An ExitStack, say, enters and exits in frames of its own; and a generator may be finished by
    # another thread or task.
    frames = [*_by_frame.values()]
    latest = [hold for here in frames[::-1] for hold in here[::-1] if hold.lock is lock]
    runner = identity.current_runner()
    own = [hold for hold in latest if hold.runner is runner]
    if own or len(latest) == 1:
        return (own or latest)[0]
    raise NotHeld("cannot tell which `with` ends here: use hold = lock.acquire() instead")


class WithBlock(Generic[HeldT]):
    """What `Lock` and `all_of` share: the ways to acquire, and the `with`."""

    __slots__ = ()

    def acquire(self: Any, wait: float | None = UNSET) -> HeldT:
        """Take it within `wait` seconds; raise LockBusy (wait=0), LockTimeout or BackendError.

        Several locks are taken all or none, by default within the longest `wait` of them.
        """
        self._refuse_atomic()
        taken_at = identity.caller_location()
        hold = self._acquire(wait)
        hold.taken_at = taken_at
        return hold  # type: ignore[no-any-return]

    async def aacquire(self: Any, wait: float | None = UNSET) -> HeldT:
        """Like `acquire`, without blocking the event loop.

        A waiting task costs no thread, except on named and advisory locks.
        """
        taken_at = identity.caller_location()
        hold = await self._aacquire(wait)
        hold.taken_at = taken_at
        return hold  # type: ignore[no-any-return]

    def _refuse_atomic(self: Any) -> None:
        """Raise LockError unless a synchronous `with` takes it."""
        if self.atomic:
            raise LockError(
                "atomic= needs a synchronous `with`: it commits at the end of the block"
            )

    def try_acquire(self: Any) -> HeldT | None:
        """Take it in one try, or return None if another owner holds it."""
        try:
            return self.acquire(wait=0)  # type: ignore[no-any-return]
        except LockBusy:
            return None

    async def atry_acquire(self: Any) -> HeldT | None:
        """Like `try_acquire`, without blocking the event loop."""
        try:
            return await self.aacquire(wait=0)  # type: ignore[no-any-return]
        except LockBusy:
            return None

    def __enter__(self: Any) -> HeldT:
        hold: Any = self._acquire(entered=True)
        try:
            if self.atomic:
                using = None if self.atomic is True else self.atomic
                hold.block = transaction.atomic(using, durable=True)
                hold.block.__enter__()
            record(hold, self, sys._getframe(1))
        except BaseException as error:
            _break_off(hold, error, unused=True)
            raise
        return hold  # type: ignore[no-any-return]

    def __exit__(self: Any, exc_type: Any, exc: BaseException | None, traceback: Any) -> None:
        hold = None
        try:
            hold = recorded(self, sys._getframe(1))
            if hold.block is not None:
                hold.end_block(hold.block, exc)
            hold.leave(exc)
            forget(hold)
        except BaseException as error:
            # The commit failed, or Ctrl-C interrupted the release: not that no hold was found.
            if hold is not None or not isinstance(error, NotHeld):
                _break_off(hold or recorded(self, sys._getframe(1)), error)
            raise

    async def __aenter__(self: Any) -> HeldT:
        hold: Any = await self._aacquire(entered=True)
        record(hold, self, sys._getframe(1))
        return hold  # type: ignore[no-any-return]

    async def __aexit__(
        self: Any, exc_type: Any, exc: BaseException | None, traceback: Any
    ) -> None:
        hold = recorded(self, sys._getframe(1))
        forget(hold)
        await hold.aleave(exc)
