"""`Hold`: one acquisition of a lock, until it is released or lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from django.db import connections

from ..backends.base import GuardedWrites, InTransaction
from ..errors import BackendError, LockError, NotHeld
from ..primitives import transactions
from ..primitives.names import shown
from ..primitives.timing import monotonic
from ..signals import lock_released, send
from .ending import Ending
from .handover import packed
from .lease import GONE, REFUSED
from .limits import MIN_TTL, checked_ttl
from .offloading import in_thread
from .releasing import releaser
from .renewal import renewer
from .reporting import lease_facts
from .timer import timer


class Hold(Ending):
    """One acquisition of a lock, returned by `Lock.acquire()`: release it, or use it in a `with`.

    A hold may be passed to another thread or task, which may release it. In a child of `fork` it
    cannot be used. Inside a `with`, its thread or task can take the lock again: then several
    holds share one claim, which ends with the last of them.
    """

    def __repr__(self) -> str:
        state = "released" if self.released else "lost" if self.lost else "held"
        return f"<Hold {shown(self.name)!r} {state} fence={self.fence}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Hold cannot be copied or pickled: pass on dump(), and Lock.resume() it")

    @property
    def fence(self) -> int | None:
        """The fencing token: grows with every new owner of the lock. None: the backend has none."""
        return self._lease.grant.fence

    @property
    def expires_in(self) -> float:
        """Seconds for which the lock is certainly ours if no renewal succeeds; 0 if lost."""
        return 0.0 if self.lost else max(0.0, self._lease.trusted_until - monotonic())

    @property
    def lost(self) -> bool:
        """Whether another owner may have the lock by now, by this process's clock."""
        lease = self._lease
        return lease.lost_because is not None or (not self.released and lease.doubtful)

    @property
    def opened(self) -> bool:
        """Whether nothing is locked: the backend was down, and `ON_DOWN` of its alias is "open"."""
        return self._lease.lease_key[0] is not self._lease.backend

    def check(self) -> None:
        """Raise LockLost if the lock may no longer be ours, NotHeld after the release.

        Costs no request: it compares this process's clock with the backend's last answer. A lock
        cleared by hand is noticed at the next renewal.
        """
        if self.released:
            raise NotHeld(f"the hold of {shown(self.name)!r} was already released")
        if self._lease.doubtful:
            raise self._lease.lost_error()

    def extend(self, ttl: float | None = None) -> None:
        """Keep the lock for at least `ttl` seconds from now (default: its own ttl).

        Never shortens it, and never exceeds `max_hold`. Raise LockLost if it is gone,
        BackendError if the backend does not answer: then it is ours until `expires_in` is 0.
        """
        self._check_extend()
        asked_at = monotonic()
        seconds = self._lease.capped(self._lease.ttl if ttl is None else checked_ttl(ttl))
        self._extended(seconds, asked_at, self._lease.backend.extend(self._lease.grant, seconds))

    async def aextend(self, ttl: float | None = None) -> None:
        """Like `extend`, without blocking the event loop."""
        self._check_extend()  # a lost lock is told without a wait for a thread
        await in_thread(self._lease.backend, self.extend, ttl)

    def leave_for(self, seconds: float) -> None:
        """End the hold, but keep the lock taken for `seconds`, by the backend's clock.

        The lock stays taken even if this process ends. With `owner=` it may last up to one ttl
        longer, because other processes may have the claim too. Does not wait for an open
        transaction. Raise what `release` raises, and LockError where locks end with their session.
        """
        self._check_leave()
        self._check_extend()
        if not seconds >= 0:
            raise ValueError(f"leave_for() takes 0 or more seconds, not {seconds!r}")
        until = monotonic() + checked_ttl(max(seconds, MIN_TTL), "seconds")
        self.keep_until = max(self.keep_until, until)
        self._release_now = True
        self.release()

    def pin(self) -> None:
        """Keep the lock, whatever happens, until the open transaction ends.

        Locks the row of the lock in that transaction: no other owner can take the lock before the
        commit, even if this process is stopped for longer than the ttl. Only for an exclusive lock
        on a lock table in the database of the data. A rollback, also to a savepoint, ends it.

        Raise LockLost if the lock is already gone, LockError if it cannot be pinned.
        """
        self.check()
        lease, backend = self._lease, self._pinning()
        connection: Any = connections[backend.using]
        if not transactions.is_open(connection):  # in a TestCase, which ends too late
            self.extend()
            return
        asked_at = monotonic()
        ttl = lease.capped(lease.ttl) if lease.renews else 0.0
        if not backend.pin(lease.grant, ttl):
            self._lose(GONE)
        lease.pin()
        transactions.call_at_end(
            connection,
            committed=lambda: renewer.unpin(lease, ttl, asked_at),
            dropped=lease.unpin,
            savepoints=True,
        )

    def on_lost(self, callback: Callable[[Hold], object]) -> None:
        """Call `callback(hold)` on a separate thread when the lock is lost.

        At once if it is already lost; never after the release.
        """
        if not callable(callback):
            raise TypeError(f"on_lost() takes a function of a hold, not {callback!r}")
        if self.released:
            return
        if self._lease.foreign or not self._lease.call_when_lost(self, callback):
            callback(self)

    def guarded_set(
        self, key: str, value: str | bytes, *, ttl: float | None = None, release: bool = False
    ) -> None:
        """Write `key` in the lock's store if the lock is still ours, in one step; Redis only.

        With `release=True` the same request releases the lock. Raise LockLost if it is gone.
        """
        if not isinstance(value, (str, bytes, int, float)):
            raise TypeError(f"guarded_set() writes text, bytes or a number, not {value!r}")
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl must be more than 0 seconds, not {ttl!r}")
        kept = self.keep_until or self._lease.keep_until
        if release and (kept or self._waits_for_commit()):
            self.guarded_set(key, value, ttl=ttl)
            self.release()
            return
        backend = self._guarding("guarded_set()")
        if release and self._lease.holds > 1:
            raise LockError(
                "guarded_set(release=True) cannot release: another hold of the lock is open"
            )
        try:
            written = backend.guarded_set(self._lease.grant, key, value, ttl=ttl, release=release)
        except BackendError:
            self._lease.release_asked |= release
            raise
        if not written:
            self._lose(REFUSED)
        if release:
            self._lease.remove_hold(self)
            timer.cancel(self._lease)
            if lock_released.receivers:
                send(lock_released, lease_facts(self._lease))

    def guarded_script(
        self, script: str, keys: Sequence[str] = (), args: Sequence[str | bytes | float] = ()
    ) -> int:
        """Run a Lua script if the lock is still ours, in one step; Redis only.

        It finds `keys` in KEYS and `args` in ARGV, and returns a whole number (nothing is 0), which
        this returns. Raise LockLost if the lock is gone, LockError for a mistake in the script, and
        BackendError if the answer was lost: the script may have run then. It is never sent twice.
        """
        if isinstance(keys, (str, bytes)) or isinstance(args, (str, bytes)):
            raise TypeError("guarded_script() takes lists of keys and of args, not one text")
        backend = self._guarding("guarded_script()")
        answer = backend.guarded_script(self._lease.grant, script, keys, args)
        if answer is None:
            self._lose(REFUSED)
        return answer

    def enter(self, *, inside: bool = True) -> Hold:
        """Let the running thread or task take the lock again until the release, or no longer."""
        self._lease.enter(self, inside=inside)
        return self

    def _pinning(self) -> InTransaction:
        """Return the backend as one that can pin the lock now, or raise LockError."""
        claim, backend = self._lease.grant.claim, self._lease.backend
        if not isinstance(backend, InTransaction):
            raise LockError(
                f"only a lock table in the database of the data can be pinned, not the backend of"
                f" alias {backend.alias!r}: write with a fencing token instead"
            )
        if claim.shared or claim.limit > 1:
            raise LockError(
                f"{shown(self.name)!r} cannot be pinned: only an exclusive lock can, readers and"
                " permits share their row"
            )
        connection: Any = connections[backend.using]
        if transactions.is_manual(connection):
            raise LockError(
                f"pin() needs autocommit on {backend.using!r}: Django does not tell when a"
                " transaction under manual management ends"
            )
        if not transactions.own_blocks(connection):
            raise LockError(
                f"pin() needs a transaction: open atomic() on {backend.using!r} first, where the"
                " lock table is" + transactions.elsewhere()
            )
        return backend

    def _guarding(self, what: str) -> GuardedWrites:
        """Return the backend as one that has `what`, or raise LockLost or LockError."""
        self.check()
        backend = self._lease.backend
        if not isinstance(backend, GuardedWrites):
            raise LockError(f"the backend of alias {self._lease.alias!r} has no {what}")
        return backend

    def _lose(self, why: str) -> NoReturn:
        releaser.lose(self._lease, why)
        raise self._lease.lost_error()

    def _waits_for_commit(self) -> bool:
        """Whether a release now, or an earlier one, is that of an open transaction."""
        open_now = not self._release_now and transactions.open_blocks()
        return bool(open_now or self._lease.open_transactions)

    def _check_extend(self) -> None:
        self.check()
        if self._lease.pins:
            raise LockError(f"{shown(self.name)!r} is pinned: extend it after the transaction")

    def _check_leave(self) -> None:
        if not self._lease.backend.expires:
            raise LockError("this backend's locks end with their session, not at a given time")

    def _check_dump(self) -> None:
        if not self._lease.backend.expires:
            raise LockError("this backend's locks end with their session: they cannot be dumped")
        if self._lease.holds > 1:
            raise LockError(f"{shown(self.name)!r} has another hold here: release it before dump()")
        if self._waits_for_commit():
            raise LockError("dump() is not possible inside atomic(): call it after the commit")

    def _dumped(self) -> str:
        """End the hold without releasing the lock; return the text that hands it over."""
        lease, grant = self._lease, self._lease.grant
        left = max(self.keep_until, lease.keep_until) - monotonic()
        if lease.remove_hold(self):
            timer.cancel(lease)
            lease.grant = replace(grant, session=None)  # what the backend keeps with it here
        return packed(
            lease.alias,
            grant,
            release="now" if self._release_now else "transaction_end",
            at_least=max(MIN_TTL, left) if left > 0 else 0.0,
        )

    def _extended(self, ttl: float, asked_at: float, answer: bool) -> None:
        if not answer:
            self._lose(GONE)
        self._lease.extended(ttl, asked_at=asked_at)
        self.check()  # the answer may have come too late
        renewer.watch(self._lease)
