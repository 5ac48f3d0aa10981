"""`Hold`: one acquisition of a lock, until it is released or lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from django.db import connections

from ..backends.base import GuardedWrites, InTransaction
from ..claims import Grant
from ..errors import LockError, NotHeld
from ..primitives import transactions
from ..primitives.names import shown
from ..primitives.timing import monotonic
from ..signals import lock_released, send
from .ending import Ending
from .handover import packed
from .lease import GONE
from .offloading import in_thread
from .registry import MIN_TTL, checked_ttl
from .releasing import releaser
from .renewal import renewer
from .reporting import lease_facts
from .timer import timer


class Hold(Ending):
    """What `Lock.acquire()` returns: mine, now; release it, or use it in a `with`.

    A hold may be passed to another thread or task, which may release it. In a child of
    `fork` it is dead. Inside a `with` its thread or task may take the lock again: then
    several holds share one claim, which is given up with the last of them.
    """

    def __repr__(self) -> str:
        state = "released" if self.released else "lost" if self.lost else "held"
        return f"<Hold {shown(self.name)!r} {state} fence={self.fence}>"

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
        """Whether another owner may have the lock by now, by this process's clock."""
        lease = self._lease
        return lease.lost_because is not None or (not self.released and lease.doubtful)

    def check(self) -> None:
        """Raise LockLost if the lock may no longer be ours, NotHeld after the release.

        Costs no request: it compares this process's clock with the last answer of the
        engine. A lock that was cleared by hand is noticed at the next renewal.
        """
        if self.released:
            raise NotHeld(f"the hold of {shown(self.name)!r} was already released")
        if self._lease.doubtful:
            raise self._lost_error()

    async def acheck(self) -> None:
        """Do as `check`; it costs no request either."""
        self.check()

    def extend(self, ttl: float | None = None) -> None:
        """Keep the lock for at least `ttl` seconds from now (default: its own ttl).

        Never shortens it, and never beyond `max_hold`. Raise LockLost if it is gone,
        BackendError if the engine does not answer: then it is ours until `expires_in` is 0.
        """
        self._check_extend()
        asked_at = monotonic()
        seconds = self._lease.capped(self._lease.ttl if ttl is None else checked_ttl(ttl))
        self._extended(seconds, asked_at, self._lease.backend.extend(self._lease.grant, seconds))

    async def aextend(self, ttl: float | None = None) -> None:
        """Do as `extend`, without blocking the event loop."""
        self._check_extend()
        lease = self._lease
        asked_at = monotonic()
        seconds = lease.capped(lease.ttl if ttl is None else checked_ttl(ttl))
        answer = await in_thread(lease.backend, lease.backend.extend, lease.grant, seconds)
        self._extended(seconds, asked_at, answer)

    def leave_for(self, seconds: float) -> None:
        """Give the hold up, but leave the lock taken for `seconds`, by the engine's clock.

        It stays so when this process ends. Other holds of the claim lose no time by it: with
        `owner=`, or while it is held here once more, it may last up to one ttl longer. Does not
        wait for an open transaction. Raise what `extend` raises; after a BackendError it lasts
        until its ttl is over.
        """
        lease = self._lease
        if not lease.backend.expires:
            raise LockError("this backend's locks end with their session, not at a given time")
        self._check_extend()
        ttl = lease.capped(checked_ttl(max(seconds, MIN_TTL)))
        grant, ask = self._leave_claim(), lease.backend.extend
        if lease.ended and not grant.claim.stable:
            renewer.await_renewal(lease)  # it would prolong the claim again
            ask = lease.backend.end_in
        if not ask(grant, ttl):
            releaser.lose(lease, GONE, at_release=True)
            raise self._lost_error()

    def dump(self, ttl: float | None = None) -> str:
        """Hand the lock over: return a text by which `Lock.resume` goes on holding it elsewhere.

        This hold ends without a release: the lock stays taken for `ttl` seconds from now
        (default: its own ttl), in which it has to be resumed. The text is a secret:
        it is enough to release the lock. Raise what `extend` raises, and LockError if
        the lock cannot be handed over now or on this engine.
        """
        self._check_dump()
        self.extend(ttl)
        return self._dumped()

    async def adump(self, ttl: float | None = None) -> str:
        """Do as `dump`, without blocking the event loop."""
        self._check_dump()
        await self.aextend(ttl)
        return self._dumped()

    def pin(self) -> None:
        """Keep the lock, whatever happens, until the open transaction has ended.

        Locks the row of the lock in that transaction: no other owner can take it over before the
        commit, even if this process is stopped for longer than the ttl. Only for a lock table
        in the database of the data. A rollback, of a savepoint too, ends it.

        Raise LockLost if the lock is gone already, and LockError if it cannot be pinned here.
        """
        self.check()
        lease = self._lease
        backend = lease.backend
        if not isinstance(backend, InTransaction):
            raise LockError(
                f"only a lock table in the database of the data can be pinned, not the backend of"
                f" alias {lease.alias!r}: write with a fencing token instead"
            )
        connection: Any = connections[backend.using]
        blocks = connection.atomic_blocks
        if all(getattr(block, "_from_testcase", False) for block in blocks):
            raise LockError(f"pin() needs a transaction: open atomic() on {backend.using!r} first")
        if not transactions.is_open(connection):  # in a TestCase, whose end would come too late
            self.extend()
            return
        asked_at = monotonic()
        ttl = lease.capped(lease.ttl) if lease.renews else 0.0
        if not backend.pin(lease.grant, ttl):
            releaser.lose(lease, GONE)
            raise self._lost_error()
        lease.pin()
        transactions.call_at_end(
            connection,
            committed=lambda: renewer.unpin(lease, ttl, asked_at),
            dropped=lease.unpin,
            savepoints=True,
        )

    def on_lost(self, callback: Callable[[Hold], object]) -> None:
        """Call `callback(hold)` when the lock is lost, on a thread of its own.

        At once if it is lost already; never after the release.
        """
        if self.released:
            return
        if self._lease.foreign or not self._lease.call_when_lost(self, callback):
            callback(self)

    def guarded_set(
        self, key: str, value: str | bytes, *, ttl: float | None = None, release: bool = False
    ) -> None:
        """Write `key` in the lock's own store, only if the lock is still ours; Redis only.

        With `release=True` the same request gives the lock up. Raise LockLost if it is gone.
        """
        self.check()
        backend = self._lease.backend
        if not isinstance(backend, GuardedWrites):
            raise LockError(f"the backend of alias {self._lease.alias!r} has no guarded_set()")
        if release and self._lease.holds > 1:
            raise LockError(
                "guarded_set(release=True) cannot release: another hold of the lock is open"
            )
        if not backend.guarded_set(self._lease.grant, key, value, ttl=ttl, release=release):
            releaser.lose(self._lease, "the backend refused the guarded write")
            raise self._lost_error()
        if release:
            self._lease.remove_hold(self)
            timer.cancel(self._lease)
            if lock_released.receivers:
                send(lock_released, lease_facts(self._lease))

    def enter(self, *, inside: bool = True) -> Hold:
        """Let the running thread or task take the lock again, until the release; or no longer."""
        self._lease.enter(self, inside=inside)
        return self

    def _check_extend(self) -> None:
        self.check()
        if self._lease.pins:
            raise LockError(f"{shown(self.name)!r} is pinned: extend it after the transaction")

    def _check_dump(self) -> None:
        if not self._lease.backend.expires:
            raise LockError("this backend's locks end with their session: they cannot be dumped")
        if self._lease.holds > 1:
            raise LockError(f"{shown(self.name)!r} has another hold here: release it before dump()")
        if not self._release_now and transactions.open_blocks():
            raise LockError("dump() is not possible inside atomic(): call it after the commit")

    def _dumped(self) -> str:
        return packed(self._lease.alias, self._leave_claim())

    def _leave_claim(self) -> Grant:
        """End the hold without a release, and let go of what the engine keeps with it here."""
        lease = self._lease
        grant = lease.grant
        if lease.remove_hold(self):
            timer.cancel(lease)
            lease.grant = replace(grant, session=None)
        return grant

    def _extended(self, ttl: float, asked_at: float, answer: bool) -> None:
        if not answer:
            releaser.lose(self._lease, GONE)
            raise self._lost_error()
        self._lease.extended(ttl, asked_at=asked_at)
        self.check()  # the answer may have come too late
        renewer.watch(self._lease)
