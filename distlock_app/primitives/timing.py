"""The monotonic clock, deadlines, and random pauses."""

from __future__ import annotations

import random
import time
from functools import partial

# The clock of every lease and wait. Where there is a choice (Linux), the one that goes on while the
# machine is suspended: what was held then must not be trusted afterwards. A partial in any case:
# freezegun replaces time.monotonic itself, in all modules, and waits would never end.
monotonic = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else partial(time.monotonic)
)

# A lease is trusted this much shorter than its ttl: clocks may run at rates that differ by
# one per cent, and servers count whole milliseconds (the drift of the Redlock specification).
DRIFT_FACTOR = 0.01
DRIFT_FLOOR = 0.002


def trusted_for(ttl: float) -> float:
    """Seconds for which a lease that the backend grants for `ttl` seconds is trusted."""
    return ttl - ttl * DRIFT_FACTOR - DRIFT_FLOOR


class Deadline:
    """One point in time, computed once; `wait=None` never comes."""

    __slots__ = ("at", "wait")

    def __init__(self, wait: float | None, *, since: float | None = None) -> None:
        self.wait = wait
        self.at = None if wait is None else (since or monotonic()) + wait

    def remaining(self) -> float | None:
        """Seconds left, never below 0; None: forever."""
        return None if self.at is None else max(0.0, self.at - monotonic())

    def cap(self, seconds: float) -> float:
        """Return `seconds`, or less if the deadline comes first."""
        left = self.remaining()
        return seconds if left is None else min(seconds, left)


def full_jitter(attempt: int, *, base: float, cap: float) -> float:
    """Return a random pause in seconds that grows with `attempt` (0, 1, ...).

    "Full jitter" of M. Brooker, Exponential Backoff And Jitter (AWS Architecture Blog, 2015).
    """
    return random.uniform(0.0, min(cap, base * 2 ** min(attempt, 32)))
