"""How a hold ends: by `release()`, `with`, commit or rollback of a transaction, or dropped."""

from __future__ import annotations

import warnings
from asyncio import CancelledError
from dataclasses import replace
from functools import partial
from types import CodeType
from typing import Any

from ..errors import BackendError, LockError, LockLost, NotHeld, Terminated
from ..primitives import transactions
from ..primitives.logs import fields, logger
from ..primitives.names import shown
from ..primitives.timing import monotonic
from ..signals import asend, lock_released, send
from .entered import Entered
from .lease import GONE, LATE, Lease
from .limits import MIN_TTL
from .offloading import in_thread
from .releasing import releaser
from .renewal import renewer
from .reporting import lease_facts
from .timer import timer

# These interrupt the work before it is done: others may do it at once, whatever `at_least` says.
BROKEN_OFF = (KeyboardInterrupt, CancelledError, Terminated)


class Ending(Entered):
    """How a hold ends; the last hold of a claim releases it."""

    # Class defaults: an interrupt may leave an object whose __init__ has not set them.
    released = True  # or not yet added to the lease
    entry = 0  # in a `with`: the number of this entry, see entry_numbers
    entered_with: object = None  # the same for all that were entered together
    taken_at: tuple[CodeType, int] | None = None  # without a `with`: where it was taken
    keep_until = 0.0  # `at_least` of this hold, by monotonic(); its lease has that of all

    def __init__(self, lease: Lease, *, release_now: bool, released: bool = False) -> None:
        self._lease = lease
        self._release_now = release_now
        self.runner = lease.runner
        self.released = released

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._lease.grant.claim.name

    def release(self) -> None:
        """Release the lock; inside `atomic()`, when the outermost block ends.

        Raise LockLost if it was lost before, NotHeld if this hold was already released, and
        BackendError if the backend could not be reached: then release() may be called again.
        """
        try:
            if self._begin_release():
                self._ask_release()
                if lock_released.receivers:
                    send(lock_released, lease_facts(self._lease))
        except LockError:
            raise
        except BaseException:  # Ctrl-C, a time limit: the process may end before a worker does it
            try:
                if (not self.released and self._begin_release()) or self._lease.ended:
                    end_claim(self._lease)
            except BaseException as again:  # the backend is down, or a second Ctrl-C
                if self._lease.ended:
                    give_back(self._lease)
                if not isinstance(again, Exception):
                    raise
            raise

    async def arelease(self) -> None:
        """Like `release`, without blocking the event loop."""
        if self._begin_release():
            lease = self._lease
            release_again = partial(give_back, lease)
            await in_thread(lease.backend, self._ask_release, cancelled=release_again)
            if lock_released.receivers:
                await asend(lock_released, lease_facts(lease))

    def abandon(self) -> None:
        """Release the lock in the background: no work was done under it."""
        self._release_now, self.keep_until = True, 0.0
        if not self.released and self._begin_release():
            releaser.give_back(self._lease.backend, self._lease.grant)

    def leave(self, exc: BaseException | None, *, unused: bool = False) -> None:
        """Release at the end of a `with`; never mask the `exc` that its body raised.

        `unused`: no work was done under the lock, so open transactions do not matter.
        """
        if exc is not None:
            self._broken_off(exc, unused)
        if self.released or self._lease.process.foreign:
            return
        try:
            self.release()
        except Exception as error:
            self._release_failed(error, exc)

    async def aleave(self, exc: BaseException | None, *, unused: bool = False) -> None:
        """Like `leave`, without blocking the event loop."""
        if exc is not None:
            self._broken_off(exc, unused)
        if self.released or self._lease.process.foreign:
            return
        try:
            await self.arelease()
        except Exception as error:
            self._release_failed(error, exc)

    def end_block(self, block: Any, exc: BaseException | None) -> None:
        """Commit the `atomic()` block inside this hold, or roll it back if the lock is lost."""
        if self._lease.foreign:
            return  # A child of fork() shares the parent's connection: a statement would break it.
        if exc is None and self._lease.doubtful:
            error = self._lease.lost_error()
            block.__exit__(type(error), error, None)
            raise error
        block.__exit__(None if exc is None else type(exc), exc, None)

    def __del__(self) -> None:
        if self.released or releaser is None:  # or the interpreter ends, and its modules are empty
            return
        lease = self._lease
        if lease.ended or lease.lost:
            lease.leave_runner()
            return
        # No request here, and no release: the protected work may still be running. The lease is no
        # longer renewed and expires.
        if lease.remove_hold(self):
            releaser.let_expire(lease)
        text = f"the hold of {shown(lease.grant.claim.name)!r} was dropped without release()"
        if self.taken_at is not None:
            code, line = self.taken_at
            text += f", taken at {code.co_filename}:{line}"
        logger.warning("%s", text, extra=self.log_fields("dropped"))
        warnings.warn(text, ResourceWarning, source=self, stacklevel=2)

    def log_fields(self, event: str, **more: Any) -> dict[str, Any]:
        """Return the `extra` of a log record about this hold."""
        return fields(event, self._lease.alias, self._lease.grant, **more)

    def _broken_off(self, exc: BaseException, unused: bool) -> None:
        """Let nothing delay the release, if the work under the lock was not done."""
        self._release_now |= unused
        if unused or isinstance(exc, BROKEN_OFF):
            self.keep_until = 0.0

    def _begin_release(self) -> bool:
        """Note the release; return whether to send it now."""
        lease = self._lease
        if lease.process.foreign:
            raise NotHeld(
                f"the parent process holds {shown(self.name)!r}: a child cannot release it"
            )
        blocks = []
        if not ((self._release_now and not lease.pins) or transactions.surely_none() or lease.lost):
            blocks = transactions.open_blocks()
        with lease.lock:
            if self.released:
                raise NotHeld(f"the hold of {shown(self.name)!r} was already released")
            if blocks and not lease.ended:
                release_after(lease, blocks)
            if self.keep_until:
                lease.keep_until = max(lease.keep_until, self.keep_until)
            last = lease.remove_hold(self)
        if last:
            # What timer.cancel() does, without its call for a lease that is on no heap yet.
            timer.young.pop(lease, None)
            if lease.due is not None:
                timer.cancel(lease)
        elif lease.lost:
            raise lease.lost_error()
        return last

    def _ask_release(self) -> None:
        """Send the release; raise LockLost if the lock was not ours until now.

        Not if only an earlier release, whose answer was lost, has ended it.
        """
        lease = self._lease
        in_time = True
        if lease.lost_because is not None or monotonic() >= lease.trusted_until:
            in_time = not lease.lost
        try:
            if lease.keep_until:
                was_ours = end_claim(lease)
            else:  # what end_claim() would do, without its cost for every lock
                was_ours = lease.backend.release(lease.grant)
        except Exception as error:
            if isinstance(error, BackendError) and lease.lost:
                # The lease is over in any case: a worker retries the release. (For backends with
                # sessions, `lose` does that.)
                if lease.backend.expires:
                    give_back(lease)
                releaser.lose(lease, LATE, at_release=True)
                raise lease.lost_error() from error
            if not lease.release_asked:  # once, however often the caller repeats it
                releaser.let_expire(lease)  # perhaps nobody does, however long the hold is kept
            lease.release_asked |= in_time
            # It may be released again: undo remove_hold(), but the lease has ended.
            lease.holds, self.released, self.entry = lease.holds + 1, False, 0
            raise
        if not (lease.release_asked or (was_ours and in_time)):
            # LATE: it was ours all along, but the work was done without knowing that.
            releaser.lose(lease, GONE if in_time else LATE, at_release=True)
        if lease.lost_because is not None:
            raise lease.lost_error()

    def _release_failed(self, error: Exception, exc: BaseException | None) -> None:
        """Raise or log an error of the release at the end of a `with` whose body raised `exc`."""
        if not isinstance(error, (LockLost, NotHeld)):
            self.released = True
            give_back(self._lease)
        if isinstance(error, BackendError):
            if not self._lease.lost:
                # The body ran under the lock; only the release is late.
                logger.warning(
                    "cannot release %r yet: %s",
                    *(shown(self.name), error),
                    extra=self.log_fields("released_late", error=str(error)),
                )
                return
            error = self._lease.lost_error()
        if exc is None:
            raise error
        about = self.log_fields("not_raised", error=str(error))
        logger.warning("not raised, because the body of the `with` raised: %s", error, extra=about)


def end_claim(lease: Lease) -> bool:
    """Release the claim, or let it end when `at_least` is over; return whether it was ours."""
    grant, backend = lease.grant, lease.backend
    if lease.keep_until <= monotonic():
        return backend.release(grant)
    end_in = backend.end_in
    if grant.claim.stable:  # other processes may have it, too
        end_in = backend.extend
    else:
        renewer.await_renewal(lease)  # it would prolong the claim again
    was_ours = end_in(grant, lease.capped(max(lease.keep_until - monotonic(), MIN_TTL)))
    lease.grant = replace(grant, session=None)  # what the backend keeps with it here
    return was_ours


def give_back(lease: Lease) -> None:
    """Let a worker repeat `end_claim` until the backend answers."""
    releaser.give_back(lease.backend, lease.grant, partial(end_claim, lease))


def release_after(lease: Lease, blocks: list[Any]) -> None:
    """Have `lease` released when these transactions have ended, beside those it waits for."""
    new = [block for block in blocks if id(block) not in lease.open_transactions]
    for block in new:
        transactions.call_at_end(
            block,
            before_commit=partial(check_at_end, lease),
            committed=partial(release_at_end, lease, id(block)),
            dropped=partial(drop_at_end, lease, id(block)),
        )
    lease.wait_for(new)  # last: an interrupt before it leaves no hold that nobody releases


def release_at_end(lease: Lease, block: int) -> None:
    """Release `lease` after the last commit, unless it was taken again meanwhile."""
    lease.transaction_ended(block)
    try:
        if not lease.end_if_unused():
            return
        lease.leave_runner()
        timer.cancel(lease)
        in_time = not lease.lost
        was_ours = end_claim(lease)
    except BaseException as error:
        if lease.ended:
            give_back(lease)
        if not isinstance(error, BackendError):
            raise
    else:
        releaser.ended(lease, was_ours and in_time)


def drop_at_end(lease: Lease, block: int) -> None:
    """Have `lease` released after the last rollback; runs in a finalizer."""
    lease.transaction_ended(block)
    releaser.release_later(lease, partial(end_claim, lease))


def check_at_end(lease: Lease) -> None:
    """Raise LockLost before a commit of work done under `lease`, if it is lost by now."""
    if lease.lost and not lease.foreign:
        raise lease.lost_error()
