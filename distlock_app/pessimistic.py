"""Import path for `guards/pessimistic`: row locks with bounded waits, retries on deadlock."""

from __future__ import annotations

from .guards.pessimistic import LockingManager, LockingQuerySet, for_update, next_unlocked
from .guards.retrying import retry_on_deadlock

__all__ = ["LockingManager", "LockingQuerySet", "for_update", "next_unlocked", "retry_on_deadlock"]
