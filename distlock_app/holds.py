"""A hold: one acquisition of a lock, until it is released or lost."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from time import monotonic
from types import TracebackType

from . import transactions
from .errors import BackendError, LockError, LockLost, NotHeld
from .leases import Lease
from .names import shown
from .registry import MIN_TTL, checked_ttl
from .renewal import GONE, lease_facts, renewer
from .signals import lock_released
from .waiting import in_thread

logger = logging.getLogger("distlock_app")


class Hold:
    """What `Lock.acquire()` returns: mine, now; release it, or use it in a `with`.

    A hold may be passed to another thread or task, which may release it. In a child of
    `fork` it is dead. Several holds of a re-entrant lock share one claim: it is given up
    with the last of them.
    """

    __slots__ = ("__weakref__", "_lease", "_release_now", "_released")

    def __init__(self, lease: Lease, *, release_now: bool = False) -> None:
        self._lease = lease
        self._release_now = release_now
        self._released = False

    def __repr__(self) -> str:
        state = "released" if self._released else "lost" if self.lost else "held"
        return f"<Hold {shown(self.name)!r} {state} fence={self.fence}>"

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._lease.grant.claim.name

    @property
    def fence(self) -> int | None:
        """A number that grows with every new owner of the lock; None: the engine has none."""
        return self._lease.grant.fence

    @property
    def expires_in(self) -> float:
        """Seconds for which the lock is surely ours if no renewal succeeds; 0 if it is not."""
        return 0.0 if self.lost else max(0.0, self._lease.trusted_until - monotonic())

    @property
    def lost(self) -> bool:
        """Whether the lock may be somebody else's by now, by this process's clock."""
        lease = self._lease
        return lease.lost_because is not None or (not self._released and lease.lost)

    def check(self) -> None:
        """Raise LockLost if the lock may no longer be ours, NotHeld after the release.

        Costs no request: it compares this process's clock with the last answer of the
        engine. A lock that was cleared by hand is noticed at the next renewal.
        """
        if self._released:
            raise NotHeld(f"the hold of {shown(self.name)!r} was released before")
        if self._lease.lost:
            raise self._lost_error()

    async def acheck(self) -> None:
        """Do as `check`; it costs no request either."""
        self.check()

    def extend(self, ttl: float | None = None) -> None:
        """Keep the lock for at least `ttl` seconds from now (default: its own ttl).

        Never shortens it, and never beyond `max_hold`. Raise LockLost if it is gone,
        BackendError if the engine cannot tell: then it is ours until `expires_in` is 0.
        """
        self.check()
        asked_at = monotonic()
        seconds = self._lease.capped(self._lease.ttl if ttl is None else checked_ttl(ttl))
        self._extended(seconds, asked_at, self._lease.backend.extend(self._lease.grant, seconds))

    async def aextend(self, ttl: float | None = None) -> None:
        """Do as `extend`, without blocking the event loop."""
        self.check()
        lease = self._lease
        asked_at = monotonic()
        seconds = lease.capped(lease.ttl if ttl is None else checked_ttl(ttl))
        answer = await in_thread(lease.backend, lease.backend.extend, lease.grant, seconds)
        self._extended(seconds, asked_at, answer)

    def release(self) -> None:
        """Give the lock up; inside `atomic()` when the outermost block has ended.

        Raise LockLost if it was lost before, NotHeld if this hold was released before, and
        BackendError if the engine could not be asked: then release() may be called again.
        """
        if self._begin_release():
            self._finish_release(self._ask_release())

    async def arelease(self) -> None:
        """Do as `release`, without blocking the event loop."""
        if self._begin_release():
            lease = self._lease
            self._finish_release(
                await in_thread(
                    lease.backend,
                    self._ask_release,
                    cancelled=lambda: renewer.give_back(lease.backend, lease.grant),
                )
            )

    def leave_for(self, seconds: float) -> None:
        """Give the hold up, but leave the lock taken for `seconds`, by the engine's clock.

        It stays so when this process ends. It may last up to one ttl longer: no engine
        shortens a claim. Does not wait for an open transaction. Raise what `extend` raises;
        after a BackendError it lasts until its ttl is over.
        """
        if not self._lease.backend.expires:
            raise LockError("this engine's locks end with their session, not at a given time")
        self.check()
        try:
            self.extend(max(seconds, MIN_TTL))
        finally:
            self._released = True
            if self._lease.part():
                renewer.unwatch(self._lease)

    def on_lost(self, callback: Callable[[Hold], None]) -> None:
        """Call `callback(hold)` when the lock is lost, on a thread of its own.

        At once if it is lost already; never after the release.
        """
        if not self._lease.call_when_lost(lambda: callback(self)):
            callback(self)

    def guarded_set(
        self, key: str, value: str | bytes, *, ttl: float | None = None, release: bool = False
    ) -> None:
        """Write `key` in the lock's own store, only if the lock is still ours; Redis only.

        With `release=True` the same request gives the lock up. Raise LockLost if it is gone.
        """
        self.check()
        write = getattr(self._lease.backend, "guarded_set", None)
        if write is None:
            raise LockError(f"the engine of alias {self._lease.alias!r} has no guarded_set()")
        if release and self._lease.handles > 1:
            raise LockError("guarded_set(release=True) inside another hold of the same lock")
        if not write(self._lease.grant, key, value, ttl=ttl, release=release):
            renewer.lose(self._lease, "the engine refused the guarded write")
            raise self._lost_error()
        if release:
            self._released = True
            self._lease.handles = 0
            self._finish_release(True)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave(exc)

    async def __aenter__(self) -> Hold:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aleave(exc)

    def leave(self, exc: BaseException | None) -> None:
        """Release at the end of a `with` whose body raised `exc`: that is never masked."""
        if self._released or self._lease.foreign:
            return
        try:
            self.release()
        except (LockLost, BackendError) as error:
            self._left_badly(error, exc)
        except BaseException:  # Ctrl-C: the process may end before a worker could do it
            with suppress(Exception):
                self._lease.backend.release(self._lease.grant)
            raise

    async def aleave(self, exc: BaseException | None) -> None:
        """Do as `leave`, without blocking the event loop."""
        if self._released or self._lease.foreign:
            return
        try:
            await self.arelease()
        except (LockLost, BackendError) as error:
            self._left_badly(error, exc)

    def end_block(
        self,
        block: AbstractContextManager[None],
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Commit the `atomic()` block inside this hold, or roll it back if the lock is lost."""
        if exc is None and self._lease.lost:
            error = self._lost_error()
            block.__exit__(type(error), error, None)
            raise error
        block.__exit__(exc_type, exc, traceback)

    def __del__(self) -> None:
        lease = getattr(self, "_lease", None)
        if lease is None or self._released or lease.lost:
            return
        # No request here, and no release: the work that the lock guards may still go on.
        # Nothing refers to the lease any more, so it is not renewed and ends by itself.
        lease.part()
        warnings.warn(
            f"the hold of {shown(lease.grant.claim.name)!r} was dropped without release()",
            ResourceWarning,
            source=self,
            stacklevel=2,
        )

    def _lost_error(self) -> LockLost:
        why = self._lease.lost_because or "it was not renewed in time"
        if self._lease.foreign:
            why = "a parent process holds it"
        return LockLost(f"the lock {shown(self.name)!r} may be somebody else's: {why}")

    def _extended(self, ttl: float, asked_at: float, answer: bool) -> None:
        if not answer:
            renewer.lose(self._lease, GONE)
            raise self._lost_error()
        self._lease.extended(ttl, asked_at=asked_at)
        renewer.watch(self._lease)

    def _begin_release(self) -> bool:
        """Note the release; return whether to ask the engine now."""
        lease = self._lease
        if lease.foreign:
            raise NotHeld(f"another process holds {shown(self.name)!r}: its child cannot release")
        if self._released:
            raise NotHeld(f"the hold of {shown(self.name)!r} was released before")
        self._released = True
        if not lease.part():
            if lease.lost:
                raise self._lost_error()
            return False
        blocks = [] if self._release_now else transactions.open_blocks()
        if not blocks or lease.lost:
            return True
        lease.unended_blocks = len(blocks)
        transactions.call_at_end(
            blocks,
            committed=lambda: release_at_end(lease),
            dropped=lambda: drop_at_end(lease),
        )
        return False

    def _ask_release(self) -> bool:
        lease = self._lease
        renewer.unwatch(lease)
        try:
            return lease.backend.release(lease.grant)
        except BaseException:
            self._released = False
            lease.handles += 1
            raise

    def _finish_release(self, was_ours: bool) -> None:
        lease = self._lease
        renewer.unwatch(lease)
        if lease.lost_because is not None:
            raise self._lost_error()
        if not was_ours:
            renewer.lose(lease, GONE, at_release=True)
            raise self._lost_error()
        lock_released.send_robust(**lease_facts(lease))

    def _left_badly(self, error: LockError, exc: BaseException | None) -> None:
        if isinstance(error, BackendError):
            self._released = True
            renewer.give_back(self._lease.backend, self._lease.grant)
            if monotonic() < self._lease.trusted_until:
                # The body ran under the lock: only the release is late.
                logger.warning("cannot release %r yet: %s", shown(self.name), error)
                return
            error = self._lost_error()
        if exc is None:
            raise error
        logger.warning("while another error was raised: %s", error)


def release_at_end(lease: Lease) -> None:
    """Release `lease` after the last commit, unless it was taken again meanwhile."""
    if not lease.blocks_ended():
        return
    renewer.unwatch(lease)
    try:
        was_ours = lease.backend.release(lease.grant)
    except BackendError:
        renewer.give_back(lease.backend, lease.grant)
        return
    if was_ours and lease.lost_because is None:
        lock_released.send_robust(**lease_facts(lease))
    else:
        renewer.lose(lease, "it was gone before the transaction had ended", at_release=True)


def drop_at_end(lease: Lease) -> None:
    """Have `lease` released after the last rollback; runs in a finalizer."""
    if lease.blocks_ended():
        renewer.release_later(lease)
