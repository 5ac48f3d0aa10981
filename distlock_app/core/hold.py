"""`Hold`: one acquisition of a lock, until it is released or lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from types import CodeType, TracebackType
from typing import Any

from django.db import connections

from ..backends.base import GuardedWrites, InTransaction
from ..claims import Grant
from ..errors import BackendError, LockError, LockLost, NotHeld
from ..primitives import transactions
from ..primitives.logs import fields, logger
from ..primitives.names import shown
from ..primitives.timing import monotonic
from ..signals import asend, lock_released, send
from .entered import Entered
from .handover import packed
from .lease import GONE, LATE, Lease
from .offloading import in_thread
from .registry import MIN_TTL, checked_ttl
from .releasing import drop_at_end, release_at_end, releaser
from .renewal import renewer
from .reporting import lease_facts
from .timer import timer


class Hold(Entered):
    """What `Lock.acquire()` returns: mine, now; release it, or use it in a `with`.

    A hold may be passed to another thread or task, which may release it. In a child of
    `fork` it is dead. Inside a `with` its thread or task may take the lock again: then
    several holds share one claim, which is given up with the last of them.
    """

    # Defaults of the class, also for what an interrupt kept from being made.
    released = True  # given up, or not joined to the lease yet
    entered = False  # in a `with`
    taken_at: tuple[CodeType, int] | None = None  # without a `with`: where it was taken

    def __init__(self, lease: Lease, *, release_now: bool, released: bool = False) -> None:
        self._lease = lease
        self._release_now = release_now
        self.runner = lease.runner
        self.released = released

    def __repr__(self) -> str:
        state = "released" if self.released else "lost" if self.lost else "held"
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
        """Whether another owner may have the lock by now, by this process's clock."""
        lease = self._lease
        return lease.lost_because is not None or (not self.released and lease.doubtful)

    def check(self) -> None:
        """Raise LockLost if the lock may no longer be ours, NotHeld after the release.

        Costs no request: it compares this process's clock with the last answer of the
        engine. A lock that was cleared by hand is noticed at the next renewal.
        """
        if self.released:
            raise NotHeld(f"the hold of {shown(self.name)!r} was released before")
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

    def release(self) -> None:
        """Give the lock up; inside `atomic()` when the outermost block has ended.

        Raise LockLost if it was lost before, NotHeld if this hold was released before, and
        BackendError if the engine could not be asked: then release() may be called again.
        """
        try:
            if self._begin_release():
                if not self._ask_release():
                    self._check_loss()
                if lock_released.receivers:
                    send(lock_released, lease_facts(self._lease))
        except Exception:
            raise
        except BaseException:  # Ctrl-C: the process may end before a worker could do it
            with suppress(Exception):
                if (not self.released and self._begin_release()) or self._lease.ended:
                    self._lease.backend.release(self._lease.grant)
            raise

    async def arelease(self) -> None:
        """Do as `release`, without blocking the event loop."""
        if self._begin_release():
            backend, grant = self._lease.backend, self._lease.grant
            kept = await in_thread(
                backend, self._ask_release, cancelled=lambda: releaser.give_back(backend, grant)
            )
            if not kept:
                self._check_loss()
            if lock_released.receivers:
                await asend(lock_released, lease_facts(self._lease))

    def abandon(self) -> None:
        """Have the lock released soon, without waiting for that: nothing was done under it."""
        self._release_now = True
        if not self.released and self._begin_release():
            releaser.give_back(self._lease.backend, self._lease.grant)

    def leave_for(self, seconds: float) -> None:
        """Give the hold up, but leave the lock taken for `seconds`, by the engine's clock.

        It stays so when this process ends. Other holds of the claim lose no time by it: with
        `owner=`, or while it is held here once more, it may last up to one ttl longer. Does not
        wait for an open transaction. Raise what `extend` raises; after a BackendError it lasts
        until its ttl is over.
        """
        lease = self._lease
        if not lease.backend.expires:
            raise LockError("this engine's locks end with their session, not at a given time")
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
                f"only a lock table in the database of the data can be pinned, not the engine of"
                f" alias {lease.alias!r}: write with a fence instead"
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

    def on_lost(self, callback: Callable[[Hold], None]) -> None:
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
            raise LockError(f"the engine of alias {self._lease.alias!r} has no guarded_set()")
        if release and self._lease.holds > 1:
            raise LockError("guarded_set(release=True) inside another hold of the same lock")
        if not backend.guarded_set(self._lease.grant, key, value, ttl=ttl, release=release):
            releaser.lose(self._lease, "the engine refused the guarded write")
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

    def leave(self, exc: BaseException | None, *, unused: bool = False) -> None:
        """Release at the end of a `with` whose body raised `exc`: that is never masked.

        `unused`: nothing was done under the lock, so no transaction matters to it.
        """
        self._release_now |= unused
        if self.released or self._lease.process.foreign:
            return
        try:
            self.release()
        except Exception as error:
            self._left_badly(error, exc)

    async def aleave(self, exc: BaseException | None, *, unused: bool = False) -> None:
        """Do as `leave`, without blocking the event loop."""
        self._release_now |= unused
        if self.released or self._lease.process.foreign:
            return
        try:
            await self.arelease()
        except Exception as error:
            self._left_badly(error, exc)

    def end_block(
        self,
        block: AbstractContextManager[None],
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Commit the `atomic()` block inside this hold, or roll it back if the lock is lost."""
        if self._lease.foreign:
            return  # A child of fork() has the parent's connection: any word would end its work.
        if exc is None and self._lease.doubtful:
            error = self._lost_error()
            block.__exit__(type(error), error, None)
            raise error
        block.__exit__(exc_type, exc, traceback)

    def __del__(self) -> None:
        if self.released:
            return
        lease = self._lease
        if lease.ended and not lease.foreign:  # its release failed, and was not tried again
            releaser.let_expire(lease)
        if lease.ended or lease.lost:
            lease.leave_runner()
            return
        # No request here, and no release: the work that the lock guards may still go on.
        # It is not renewed any more, and ends by itself.
        if lease.remove_hold(self):
            releaser.let_expire(lease)
        text = f"the hold of {shown(lease.grant.claim.name)!r} was dropped without release()"
        if self.taken_at is not None:
            code, line = self.taken_at
            text += f", taken at {code.co_filename}:{line}"
        logger.warning("%s", text, extra=self.log_fields("dropped"))
        warnings.warn(
            text,
            ResourceWarning,
            source=self,
            stacklevel=2,
        )

    def log_fields(self, event: str, **more: Any) -> dict[str, Any]:
        """Return the `extra` of a log record about this hold."""
        return fields(event, self._lease.alias, self._lease.grant, **more)

    def _lost_error(self) -> LockLost:
        lease = self._lease
        why = lease.lost_because or LATE
        if lease.foreign:
            why = "a parent process holds it"
        elif lease.release_asked and not lease.lost:
            why = "its release was asked for, and the answer did not come"
        return LockLost(f"the lock {shown(self.name)!r} may belong to another owner: {why}")

    def _check_extend(self) -> None:
        self.check()
        if self._lease.pins:
            raise LockError(f"{shown(self.name)!r} is pinned: extend it after the transaction")

    def _check_dump(self) -> None:
        if not self._lease.backend.expires:
            raise LockError("this engine's locks end with their session: they cannot be dumped")
        if self._lease.holds > 1:
            raise LockError(f"{shown(self.name)!r} was taken again here: dump the only hold of it")
        if not self._release_now and transactions.open_blocks():
            raise LockError("a lock is not handed over inside atomic(): dump it after the commit")

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

    def _begin_release(self) -> bool:
        """Note the release; return whether to ask the engine now."""
        lease = self._lease
        if lease.process.foreign:
            raise NotHeld(f"another process holds {shown(self.name)!r}: its child cannot release")
        now = self._release_now and not lease.pins
        none = now or transactions.surely_none() or lease.lost
        blocks = [] if none else transactions.open_blocks()
        with lease.lock:
            if self.released:
                raise NotHeld(f"the hold of {shown(self.name)!r} was released before")
            blocks = [block for block in blocks if id(block) not in lease.open_transactions]
            last = lease.remove_hold(self, blocks=[id(block) for block in blocks])
        if last:
            timer.cancel(lease)
        elif last is None:
            for block in blocks:
                transactions.call_at_end(
                    block,
                    before_commit=partial(check_at_end, lease),
                    committed=partial(release_at_end, lease, id(block)),
                    dropped=partial(drop_at_end, lease, id(block)),
                )
        elif lease.lost:
            raise self._lost_error()
        return bool(last)

    def _ask_release(self) -> bool:
        """Ask the engine; return whether the lock was ours until now."""
        lease = self._lease
        sure = lease.lost_because is None and monotonic() < lease.trusted_until
        in_time = sure or not lease.lost
        try:
            was_ours = lease.backend.release(lease.grant)
        except Exception as error:
            if isinstance(error, BackendError) and lease.lost:
                # It is over, whatever the engine would say: a worker goes on asking. (For engines
                # of sessions, `lose` sees to that.)
                if lease.backend.expires:
                    releaser.give_back(lease.backend, lease.grant)
                releaser.lose(lease, LATE, at_release=True)
                raise self._lost_error() from error
            lease.release_asked |= in_time
            lease.restore_hold()
            self.released = self.entered = False
            raise
        if not (in_time or lease.release_asked):
            # It was ours all the time, but that is known only now: the work was done in doubt.
            releaser.lose(lease, LATE, at_release=True)
        return was_ours and lease.lost_because is None

    def _check_loss(self) -> None:
        """Raise LockLost, if no earlier release whose answer was lost has done it."""
        lease = self._lease
        if lease.lost_because is None and not lease.release_asked:
            releaser.lose(lease, GONE, at_release=True)
        if lease.lost_because is not None:
            raise self._lost_error()

    def _left_badly(self, error: Exception, exc: BaseException | None) -> None:
        if not isinstance(error, (LockLost, NotHeld)):
            self.released = True
            releaser.give_back(self._lease.backend, self._lease.grant)
            if isinstance(error, BackendError) and not self._lease.lost:
                # The body ran under the lock: only the release is late.
                logger.warning(
                    "cannot release %r yet: %s",
                    *(shown(self.name), error),
                    extra=self.log_fields("released_late", error=str(error)),
                )
                return
            if isinstance(error, BackendError):
                error = self._lost_error()
        if exc is None:
            raise error
        about = self.log_fields("not_raised", error=str(error))
        logger.warning("while another error was raised: %s", error, extra=about)


def check_at_end(lease: Lease) -> None:
    """Raise LockLost before the commit of what was written under `lease`, if it is lost by now."""
    if lease.lost and not lease.foreign:
        raise Hold(lease, release_now=True, released=True)._lost_error()
