"""`DummyBackend`: grants every claim at once and locks nothing, for tests."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from ..claims import Claim, Grant, Holding
from .base import BaseLockBackend


class DummyBackend(BaseLockBackend):
    """For development and tests that must not wait; two holders at once are normal here."""

    local = True
    fences = True
    shares = True
    queues = True
    limits = True

    def __init__(self, *, alias: str, location: Any = None) -> None:
        super().__init__(alias=alias, location=location)
        self._fences = count(1)

    def acquire(self, claim: Claim, wait: float | None) -> Grant:
        return Grant(claim, fence=next(self._fences))

    def extend(self, grant: Grant, ttl: float) -> bool:
        return True

    def release(self, grant: Grant) -> bool:
        return True

    def holders(self, key: str | None = None) -> Iterable[Holding]:
        return ()

    def clear(self, key: str, if_version: str | None = None) -> int:
        return 0
