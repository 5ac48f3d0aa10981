"""Several locks with one request, if the backend can and all of them are free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..backends.base import BaseLockBackend
from ..claims import Claim, Grant
from ..errors import BackendError
from ..primitives import transactions
from .acquiring import Attempt
from .hold import Hold
from .registry import registry
from .waiting import trusted
from .wakers import Waker


class Together:
    """One try to take several locks of one alias at once, and its result."""

    __slots__ = ("asked", "attempts", "backend", "claims", "holds")

    def __init__(self, backend: BaseLockBackend, attempts: list[Attempt]) -> None:
        self.backend = backend
        self.attempts = attempts
        self.claims: list[Claim] = [attempt.claim(Waker()) for attempt in attempts]
        self.asked = list(zip(attempts, self.claims, strict=True))
        self.holds: list[Hold] = []

    @classmethod
    def of(cls, locks: Sequence[Any]) -> Together | None:
        """Return the try, or None if they must be taken one after the other."""
        backend = registry[locks[0].using].backend
        if type(backend).acquire_all is BaseLockBackend.acquire_all:
            return None
        several = len({lock.name for lock in locks}) == len(locks) > 1
        if not several or len({lock.using for lock in locks}) > 1:
            return None
        attempts = [Attempt(lock, 0) for lock in locks]
        for attempt in attempts:  # a call of sync_to_async that holds nothing yet is new to each
            attempt.runner = attempts[0].runner
        if any(attempt.lease() for attempt in attempts):
            return None
        if not transactions.surely_none():
            for lock in locks:
                transactions.check_before_lock(release_now=lock.release == "now")
        return cls(backend, attempts)

    def hold(self, grants: Sequence[Grant] | None) -> bool:
        """Make the holds of the grants; False if nothing was granted, or too late."""
        if grants is None:
            return False
        trusted_grants = [
            (attempt, grant, since)
            for attempt, grant in zip(self.attempts, grants, strict=True)
            if (since := trusted(grant, attempt.started)) is not None
        ]
        if len(trusted_grants) < len(grants):
            self.give_back()
            return False
        for attempt, grant, since in trusted_grants:
            self.holds.append(attempt.hold(grant, since))
        return True

    def facts(self) -> list[dict[str, Any]]:
        """Return what the signals of the holds say."""
        held = zip(self.attempts, self.holds, strict=True)
        return [attempt.facts(fence=hold.fence) for attempt, hold in held]

    def failed(self, error: BackendError) -> list[dict[str, Any]]:
        """Give back what may have been granted; return what the signals of that say."""
        return [attempt.failed(claim, error) for attempt, claim in self.asked]

    def opened(self, error: BackendError) -> list[Hold]:
        """Return holds of nothing, for the backend is down; see `Attempt.opened`."""
        return [attempt.opened(claim, error) for attempt, claim in self.asked]

    def give_back(self, *, at_once: bool = False) -> None:
        """Release what may have been granted; `at_once` if this process may end soon."""
        for hold in self.holds:
            hold.abandon()
        for attempt, claim in self.asked if at_once else self.asked[len(self.holds) :]:
            attempt.give_back(claim, at_once=at_once)
