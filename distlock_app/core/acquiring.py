"""One call of `acquire`: the claim it makes, reentrancy, and what comes of a grant."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import ref

from ..claims import Claim, Grant
from ..errors import LockBusy, LockLost, NotHeld
from ..primitives import identity, names, transactions
from ..primitives.logs import SLOW_WAIT, fields, logger
from ..primitives.timing import monotonic
from .hold import Hold
from .lease import Lease
from .registry import checked_wait, registry
from .releasing import releaser
from .renewal import renewer
from .timer import timer
from .wakers import AsyncWaker, Waker


class _Unset:
    def __repr__(self) -> str:
        return "<as the alias says>"

    def __reduce__(self) -> str:
        return "UNSET"  # the same one after a copy or in another process


UNSET: Any = _Unset()


class Attempt:
    """What one call of acquire works with."""

    __slots__ = ("alias", "backend", "key", "lock", "lease_key", "runner", "started", "ttl", "wait")

    def __init__(self, lock: Any, wait: float | None) -> None:
        entry = registry[lock.using]
        if wait is UNSET:
            wait = lock.wait
        self.wait = entry.wait if wait is UNSET else checked_wait(wait)
        self.ttl = entry.ttl if lock.ttl is UNSET else lock.ttl
        if lock.max_hold is not None:
            self.ttl = min(self.ttl, lock.max_hold)
        self.lock = lock
        self.alias = lock.using
        self.backend = entry.backend
        self.key = names.key_of(lock.name)
        self.runner = identity.current_runner()
        self.lease_key = (entry.backend, self.key, lock.shared, lock.limit)
        self.started = monotonic()

    def reenter(self, *, entered: bool = False) -> Hold | None:
        """Return another hold of what this runner has already, without asking the engine.

        `entered`: it is for a `with`.
        """
        release_now = self.lock.release == "now"
        lease = self.lease() if self.lease_key in self.runner.held else None
        # Without a hold it only waits for a commit, or for its release after a rollback.
        if lease is not None and (lease.entered or not lease.holds or self._same_owner(lease)):
            if lease.holds > 0 and not self.lock.reentrant:
                raise LockBusy(f"this thread or task already holds the lock {self.lock.name!r}")
            hold = Hold(lease, release_now=release_now, released=True)
            hold.entered = entered
            if lease.add_hold(hold):
                return hold
            releaser.drain(lease)
        if not transactions.surely_none():
            transactions.check_before_lock(self.lock.name, release_now=release_now)
        return None

    def _same_owner(self, lease: Lease) -> bool:
        """Whether the engine would grant it again: two leases of it would end with one release."""
        return self.lock.owner is not None and lease.grant.claim.owner == _stable_owner(self.lock)

    def lease(self) -> Lease | None:
        """Return what this runner has already, unless it was lost."""
        lease: Lease | None = self.runner.held.get(self.lease_key)
        return lease if lease is not None and not lease.lost else None

    def claim(self, waker: Waker | AsyncWaker) -> Claim:
        """Return what the engine is asked for."""
        lock = self.lock
        return Claim(
            name=lock.name,
            key=self.key,
            owner=identity.new_token() if lock.owner is None else _stable_owner(lock),
            ttl=self.ttl,
            holder=self.runner.text(),
            shared=lock.shared,
            fair=lock.fair,
            limit=lock.limit,
            stable=lock.owner is not None,
            renew=lock.renew,
            wake=waker.wake,
        )

    def hold(self, grant: Grant, asked_at: float, *, entered: bool = False) -> Hold:
        """Return the hold of what was granted, renewed from now on."""
        lock, runner = self.lock, self.runner
        lease = Lease(
            self.backend,
            grant,
            runner,
            self.lease_key,
            asked_at=asked_at,
            renew=lock.renew,
            max_hold=lock.max_hold,
        )
        hold = Hold(lease, release_now=lock.release == "now")
        if entered:
            hold.entered, lease.entered, lease.hold = True, 1, ref(hold)
        try:
            runner.held[self.lease_key] = lease
            if runner.in_call:
                identity.keep_call(runner)
            renewer.watch(lease)
        except BaseException:  # Ctrl-C: nobody has the hold, whose lock is given back
            hold.released = True
            lease.end()
            timer.cancel(lease)
            raise
        if lease.since - self.started >= SLOW_WAIT:
            self.note_wait("slow_wait", grant)
        return hold

    def resumed(self, grant: Grant, still_ours: bool) -> Hold:
        """Return the hold of what another process handed over, or raise LockLost."""
        if not still_ours:
            name = names.shown(self.lock.name)
            raise LockLost(f"the lock {name!r} was not resumed in time, or was already released")
        return self.hold(grant, self.started)

    def note_wait(self, event: str, grant: Grant | None = None) -> None:
        """Log how it ended, if it took long."""
        waited = monotonic() - self.started
        if waited >= SLOW_WAIT:
            name = names.shown(self.lock.name)
            logger.info(
                "%s the lock %r (alias %r) after %.3f s",
                *("got" if grant else "gave up waiting for", name, self.alias, waited),
                extra=fields(event, self.alias, grant, name=name, key=self.key, waited=waited),
            )

    def explain(self, busy: LockBusy) -> None:
        """Let the error say so if this runner itself holds the lock."""
        for mode in ((False, 1), (True, 1), (False, self.lock.limit)):
            lease = self.runner.held.get((*self.lease_key[:2], *mode))
            if lease is None or not lease.holds or lease.lost:
                continue
            name = names.shown(self.lock.name)
            text = f"this thread or task already holds the lock {name!r}"
            if (self.lock.shared, self.lock.limit) != mode:
                kind = "shared" if mode[0] else "exclusively" if mode[1] == 1 else "as a permit"
                text += f", {kind}: release it before taking it in another mode"
            else:
                text += " by acquire(): it can be taken again only inside a `with`"
            busy.args = (text,)

    def facts(self) -> dict[str, Any]:
        """Return what the signals of its beginning say of the lock."""
        return {
            "sender": type(self.backend),
            "alias": self.alias,
            "name": self.lock.name,
            "waited": monotonic() - self.started,
        }


def current_hold(name: str | None = None, *, using: str = "default") -> Hold:
    """Return the hold in whose `with`, or decorated function, the caller runs; asks no backend.

    With `name` that of this lock, else of the lock that was taken last. Raise NotHeld outside of
    any. A bare `acquire()` is no `with`, and `lock_in_transaction()` has no hold.
    """
    wanted = None if name is None else (registry[using].backend, names.key_of(name))
    for lease_key, lease in reversed(identity.current_runner().held.items()):
        if wanted in (None, lease_key[:2]) and (hold := lease.hold()) is not None:
            if hold.entered and not hold.released:
                return hold  # type: ignore[no-any-return]
    raise NotHeld("no lock is held here" if name is None else f"{names.shown(name)!r} is not held")


def lease_of_runner(alias: str, name: str, *, shared: bool = False) -> Lease | None:
    """Return the lease by which the running thread or task holds the mutex `name`, lost or not."""
    lease_key = (registry[alias].backend, names.key_of(name), shared, 1)
    lease: Lease | None = identity.current_runner().held.get(lease_key)
    return lease if lease is not None and lease.holds else None


def _stable_owner(lock: Any) -> str:
    # A reader is not granted the writer's lock because it has the same owner.
    kind = "shared:" if lock.shared else "permit:" if lock.limit > 1 else ""
    return stable_token(kind + lock.owner)


def stable_token(owner: str) -> str:
    """Return the token of a stable owner, in which its name cannot be read."""
    return hashlib.sha256(b"owner:" + owner.encode("utf-8", "surrogatepass")).hexdigest()[:32]
