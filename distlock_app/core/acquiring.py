"""One call of `acquire`: its claim, re-entrancy, and the hold made from its grant."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any
from weakref import ref

from ..claims import Claim, Grant
from ..errors import BackendError, LockBusy
from ..primitives import identity, names
from ..primitives.logs import SLOW_WAIT, fields, logger
from ..primitives.names import shown
from ..primitives.timing import monotonic
from .hold import Hold
from .lease import Lease, entry_numbers
from .limits import UNSET, checked_wait
from .registry import aliases_of, registry
from .releasing import releaser
from .renewal import renewer
from .timer import timer
from .wakers import AsyncWaker, Waker


class Attempt:
    """The state of one call of acquire."""

    __slots__ = "backend", "entered", "key", "lease_key", "lock", "runner", "started", "ttl", "wait"

    def __init__(self, lock: Any, wait: float | None, entered: bool = False) -> None:
        """`entered`: the hold is for a `with`."""
        entry = registry[lock.using]
        if wait is UNSET:
            wait = lock.wait
        self.wait = entry.wait if wait is UNSET else checked_wait(wait)
        self.ttl = entry.ttl if lock.ttl is UNSET else lock.ttl
        if lock.max_hold is not None:
            self.ttl = min(self.ttl, lock.max_hold)
        self.lock = lock
        self.entered = entered
        self.backend = entry.backend
        self.key = names.key_of(lock.name)
        self.runner = identity.current_runner()
        self.lease_key = (entry.backend, self.key, lock.shared, lock.limit)
        self.started = monotonic()

    def reenter(self) -> Hold | None:
        """Return another hold of a lock that this runner already has, without a request."""
        lease = self.lease()
        if lease is None or not self._shares(lease):
            return None
        if lease.holds > 0 and not self.lock.reentrant:
            raise LockBusy(f"this thread or task already holds the lock {shown(self.lock.name)!r}")
        hold = Hold(lease, release_now=self.lock.release == "now", released=True)
        hold.entry = next(entry_numbers) if self.entered else 0
        try:
            if lease.add_hold(hold):
                self._options(hold, lease)
                return hold
        except BaseException:  # Ctrl-C: the caller never gets the hold
            hold.abandon()
            raise
        releaser.drain(lease)
        return None

    def _shares(self, lease: Lease) -> bool:
        """Whether this runner may take its lease again, instead of asking the backend."""
        # A lease without holds is still ours: it waits for a commit, or for its release after a
        # rollback.
        if lease.entered_holds() or not lease.holds:
            return True
        # The backend would grant it again to the same owner. Then two leases would share one claim,
        # and the first release would end both.
        return self.lock.owner is not None and lease.grant.claim.owner == _stable_owner(self.lock)

    def lease(self) -> Lease | None:
        """Return the lease that this runner already has, unless it was lost."""
        lease: Lease | None = self.runner.held.get(self.lease_key)
        return lease if lease is not None and not lease.lost else None

    def claim(self, waker: Waker | AsyncWaker) -> Claim:
        """Return the claim to ask the backend for."""
        lock, holder = self.lock, self.runner.text()
        if lock.ttl is not UNSET or not lock.renew or lock.at_least:
            holder = identity.of_lease(
                holder, ttl=self.ttl, renew=lock.renew, at_least=lock.at_least
            )
        return Claim(
            name=lock.name,
            key=self.key,
            owner=identity.new_token() if lock.owner is None else _stable_owner(lock),
            ttl=self.ttl,
            holder=holder,
            shared=lock.shared,
            fair=lock.fair,
            limit=lock.limit,
            stable=lock.owner is not None,
            renew=lock.renew,
            wake=waker.wake,
            blocking=waker.blocking,
        )

    def hold(self, grant: Grant, asked_at: float) -> Hold:
        """Return a hold for the grant, renewed from now on."""
        lock, runner = self.lock, self.runner
        lease = Lease(self, grant, asked_at)
        hold = Hold(lease, release_now=lock.release == "now")
        if self.entered:
            hold.entry, lease.with_holds = next(entry_numbers), (ref(hold),)
        try:
            runner.held[self.lease_key] = lease
            if lock.at_least or lock.on_lost is not None:
                self._options(hold, lease)
            if runner.in_call:
                identity.keep_call(runner)
            renewer.watch(lease)
        except BaseException:  # Ctrl-C: the caller never gets the hold, so release the lock
            hold.released = True
            lease.end()
            timer.cancel(lease)
            raise
        if lease.since - self.started >= SLOW_WAIT:
            self.note_wait("slow_wait", grant)
        return hold

    def _options(self, hold: Hold, lease: Lease) -> None:
        if self.lock.at_least:
            hold.keep_until = monotonic() + self.lock.at_least
        if self.lock.on_lost is not None:
            hold.on_lost(self.lock.on_lost)

    def give_back(self, claim: Claim, *, at_once: bool) -> None:
        """Release what may have been granted by an answer that never reached us.

        `at_once`: in this thread, because after Ctrl-C the process may end before a worker does it.
        """
        give_back = releaser.give_back_now if at_once else releaser.give_back
        give_back(self.backend, Grant(claim))

    def opened(self, claim: Claim, error: BackendError) -> Hold:
        """Return a hold that locks nothing, because the backend is down.

        Raise `error` unless ON_DOWN is "open".
        """
        stand_in = registry[self.lock.using].stand_in
        if stand_in is None:
            raise error
        name = shown(self.lock.name)
        logger.warning(
            "going on without the lock %r (alias %r), whose backend is down: %s",
            *(name, self.lock.using, error),
            extra=fields("opened", self.lock.using, Grant(claim), error=str(error)),
        )
        self.backend = stand_in
        return self.hold(Grant(claim), monotonic())

    def note_wait(self, event: str, grant: Grant | None = None) -> None:
        """Log the outcome of a long wait."""
        waited = monotonic() - self.started
        if waited >= SLOW_WAIT:
            name = shown(self.lock.name)
            logger.info(
                "%s the lock %r (alias %r) after %.3f s",
                *("got" if grant else "gave up waiting for", name, self.lock.using, waited),
                extra=fields(event, self.lock.using, grant, name=name, key=self.key, waited=waited),
            )

    def busy(self, error: LockBusy) -> dict[str, Any]:
        """Say in the error if this runner itself has the lock; return the signal's arguments."""
        for key, lease in list(self.runner.held.items()):
            if key[:2] != self.lease_key[:2] or not lease.holds or lease.lost:
                continue
            text = f"this thread or task already holds the lock {shown(self.lock.name)!r}"
            if key == self.lease_key:
                text += " by acquire(): it can be taken again only inside a `with`"
            else:
                _, _, shared, limit = key
                kind = "shared" if shared else f"with limit={limit}" if limit > 1 else "exclusively"
                text += f", {kind}: release it before taking it in another mode"
            error.args = (text,)
        self.note_wait("timeout")
        return self.facts()

    def facts(self, **more: Any) -> dict[str, Any]:
        """Return the arguments of a signal about acquiring, with `more` of them."""
        return {
            "sender": type(self.backend),
            "alias": self.lock.using,
            "name": self.lock.name,
            "waited": monotonic() - self.started,
            **more,
        }

    def failed(self, claim: Claim, error: BackendError) -> dict[str, Any]:
        """Give back what may have been granted; return the signal's arguments."""
        self.give_back(claim, at_once=False)
        opened = registry[self.lock.using].stand_in is not None
        return self.facts(error=str(error), opened=opened)


def leases_of_runner(using: Any, name: str, *, shared: bool, limit: int = 1) -> list[Lease | None]:
    """Return the leases that the current thread or task has of the lock `name`, lost or not.

    One for each alias, or None; also one that only waits for the end of a transaction.
    """
    key, held = names.key_of(name), identity.current_runner().held
    return [held.get((registry[x].backend, key, shared, limit)) for x in aliases_of(using)]


def held_by_runner(lock: Any) -> list[Lease | None]:
    """Return what the current thread already has of `lock`; see `release_half_taken`."""
    return leases_of_runner(lock.using, lock.name, shared=lock.shared, limit=lock.limit)


def release_half_taken(lock: Any, held_before: list[Lease | None]) -> None:
    """Release a lock that was granted when a signal came before the caller got its hold.

    The traceback of the signal's exception still refers to it.
    """
    for lease in held_by_runner(lock):
        if lease is not None and lease not in held_before:
            lease.end()
            timer.cancel(lease)
            release = partial(lease.backend.release, lease.grant)
            releaser.give_back_now(lease.backend, lease.grant, release)


def _stable_owner(lock: Any) -> str:
    # A reader must not be granted the writer's lock for having the same owner.
    kind = "shared:" if lock.shared else "permit:" if lock.limit > 1 else ""
    return stable_token(kind + lock.owner)


def stable_token(owner: str) -> str:
    """Return the token of a stable owner; it does not reveal the name."""
    return hashlib.sha256(b"owner:" + owner.encode("utf-8", "surrogatepass")).hexdigest()[:32]
