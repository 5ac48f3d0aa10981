"""`Lease`: a granted claim in this process, until when it is trusted, and whether it is lost."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, cast

from ..backends.base import BaseLockBackend
from ..claims import Grant
from ..errors import LockLost
from ..primitives import identity
from ..primitives.forks import in_child
from ..primitives.identity import Runner
from ..primitives.names import shown
from ..primitives.timing import DRIFT_FACTOR, DRIFT_FLOOR, monotonic, trusted_for

# Why a lease is lost.
LATE = "it was not renewed in time"
GONE = "the backend reports that it is gone or has another owner"
REFUSED = "the backend refused the guarded write"


class Process:
    """This process, or the parent that took a lease before the fork."""

    foreign = False


_process = Process()


def _after_fork() -> None:
    global _process
    _process.foreign = True  # what the parent holds is not the child's
    _process = Process()


in_child(_after_fork)

# The runner's key for it: backend, key and mode (shared, limit).
LeaseKey = tuple[BaseLockBackend, str, bool, int]

# Numbers the entries into a `with`: the highest is that of the innermost hold.
entry_numbers = count(1)

# Weak: otherwise the callback would keep its hold alive, and renewed forever.
Callback = tuple["weakref.ref[Any]", Callable[[Any], object]]


class Lease:
    """The claim behind one or several holds of the same runner.

    Its runner can take it again only inside a `with`. A hold without one may have been passed
    on, and a worker that starts its next job would share the lock with the new holder.

    It is *trusted* as long as, by this process's monotonic clock, the backend cannot have granted
    the lock to another owner. It ends once, by release or by loss.
    """

    # Class defaults: most leases never change these.
    ends_by = float("inf")
    due: float | None = None  # see Timed: when the renewer checks it next
    holds = 1  # holds that need it
    # Those that were in a `with`, see entered_holds(). Weak, because a dropped one ends the lease.
    with_holds: tuple[weakref.ref[Any], ...] = ()
    pins = 0  # transactions that exclude other owners
    # The release waits for the end of these: id(connection).
    open_transactions: set[int] = cast("set[int]", frozenset())
    keep_until = 0.0  # stays taken until then, by monotonic(), for the `at_least` of ended holds
    ended = False  # released or given up; no longer renewed
    release_asked = False  # sent in time, but the answer was lost
    lost_because: str | None = None
    renewal_error = ""  # the last one logged, until a renewal succeeds
    _callbacks: tuple[Callback, ...] | None = ()

    def __init__(self, attempt: Any, grant: Grant, asked_at: float) -> None:
        self.backend: BaseLockBackend = attempt.backend
        self.grant = grant
        self.runner: Runner = attempt.runner
        self.lease_key: LeaseKey = attempt.lease_key
        self.lock = self.runner.lock
        self.ttl = grant.claim.ttl
        self.since = monotonic()
        self.term = grant.ttl or self.ttl  # granted last
        # trusted_for(), written out: a call less for each lock.
        self.trusted_until = asked_at + self.term - self.term * DRIFT_FACTOR - DRIFT_FLOOR
        self.renews: bool = attempt.lock.renew
        if (max_hold := attempt.lock.max_hold) is not None:
            self.ends_by = self.since + max_hold
        self.process = _process

    @property
    def alias(self) -> str:
        """The alias of its backend."""
        return self.backend.alias

    @property
    def foreign(self) -> bool:
        """Whether a parent process took it, so this process must not renew or release it."""
        return self.process.foreign

    @property
    def lost(self) -> bool:
        """Whether the claim may belong to another owner by now."""
        if self.lost_because is not None or self.foreign:
            return True
        return not self.pins and monotonic() >= self.trusted_until

    @property
    def doubtful(self) -> bool:
        """Whether it is lost, or may have been released by a request whose answer was lost."""
        return self.release_asked or self.lost

    def lost_error(self) -> LockLost:
        """Return the error that says so, and why."""
        why = self.lost_because or LATE
        if self.foreign:
            why = "a parent process holds it"
        elif self.release_asked and not self.lost:
            why = "the answer to its release was lost"
        name = shown(self.grant.claim.name)
        return LockLost(f"the lock {name!r} may belong to another owner: {why}")

    def extended(self, ttl: float, *, asked_at: float) -> None:
        """Trust it for `ttl` seconds from `asked_at`; backends never shorten a claim.

        An answer that comes after the end of trust changes nothing: a lost lease stays lost.
        """
        with self.lock:
            if not self.lost:
                self.trusted_until = max(self.trusted_until, asked_at + trusted_for(ttl))
                self.term = self.ttl

    def pin(self) -> None:
        """Trust it regardless of time until `unpin`."""
        with self.lock:
            self.pins += 1

    def unpin(self) -> None:
        with self.lock:
            self.pins -= 1

    def capped(self, ttl: float) -> float:
        """Return `ttl`, limited by `max_hold`."""
        return max(0.001, min(ttl, self.ends_by - monotonic()))

    def lose(self, reason: str, *, at_release: bool = False) -> tuple[Callback, ...] | None:
        """Record the loss; return the callbacks to run, or None if it was recorded before."""
        with self.lock:
            if self.lost_because is not None or (self.ended and not at_release):
                return None
            self.lost_because = reason
            callbacks, self._callbacks = self._callbacks or (), None
            return callbacks

    def end(self) -> None:
        """Stop renewing it and reporting its loss."""
        with self.lock:
            self.ended = True
            self.leave_runner()

    def leave_runner(self) -> None:
        """Let its runner take the lock afresh."""
        runner = self.runner
        if runner.held.get(self.lease_key) is self:
            runner.held.pop(self.lease_key, None)
            if not runner.held:
                runner.call = None

    def add_hold(self, hold: Any) -> bool:
        """Add a hold, unless the lease has ended."""
        with self.lock:
            if self.ended:
                return False
            if hold.entry:
                self._add_entered(hold)
            # No call from here on: a signal must not separate these.
            self.holds += 1
            hold.released = False
            return True

    def entered_holds(self) -> list[Any]:
        """Return its holds that are in a `with`, where it can be taken again."""
        holds = [hold() for hold in self.with_holds]
        return [hold for hold in holds if hold and hold.entry and not hold.released]

    def _add_entered(self, hold: Any) -> None:
        self.with_holds = tuple(map(weakref.ref, [*self.entered_holds(), hold]))

    def remove_hold(self, hold: Any) -> bool:
        """Remove a hold; return whether it was the last and ended the lease."""
        with self.lock:
            self.holds -= 1
            hold.released = True
            if not (self.holds > 0 or self.open_transactions):
                self.ended = True
                self.leave_runner()
                return True
            if self._callbacks:
                self._callbacks = tuple(x for x in self._callbacks if x[0]() is not hold)
            return False

    def wait_for(self, blocks: Iterable[Any]) -> None:
        """Let the release wait for the end of these transactions, too."""
        # A separate set, because a finalizer may remove items at any time.
        self.__dict__.setdefault("open_transactions", set()).update(map(id, blocks))

    def transaction_ended(self, block: int) -> None:
        """Wait for this one no longer; the release may have been interrupted before it did."""
        if block in self.open_transactions:
            self.open_transactions.discard(block)

    def enter(self, hold: Any, *, inside: bool) -> None:
        """Record that the running thread or task is inside the `with` of a hold, or no longer."""
        with self.lock:
            if hold.released:
                return
            if inside and not hold.entry:
                self._add_entered(hold)
            # Numbered again if it is in one: the holds of all_of() were taken in another order.
            before, hold.entry = bool(hold.entry), next(entry_numbers) if inside else 0
            if before is inside:
                return
        runner = identity.current_runner()
        if moved := self.runner is not runner:
            self.leave_runner()
            self.runner = runner
        other = runner.held.get(self.lease_key)  # another reader's or permit
        if other is not self and (moved or inside) and not (other and other.entered_holds()):
            runner.held[self.lease_key] = self
            if runner.in_call:
                identity.keep_call(runner)
        if not inside and not any(lease.entered_holds() for lease in [*runner.held.values()]):
            runner.call = None  # its frame may refer to the hold, which then nobody could drop

    def end_if_unused(self) -> bool:
        """End it after the last transaction; False if it was taken again or ended meanwhile.

        It stays with its runner, which waits for the release before taking the lock afresh.
        """
        with self.lock:
            if self.holds > 0 or self.open_transactions or self.ended or self.foreign:
                return False
            self.ended = True
            return True

    def call_when_lost(self, hold: Any, callback: Callable[[Any], object]) -> bool:
        """Keep `callback` while `hold` exists; False: the lease is already lost."""
        with self.lock:
            if self._callbacks is None:
                return False
            self._callbacks = (*self._callbacks, (weakref.ref(hold), callback))
            return True
