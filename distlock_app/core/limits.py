"""`ttl`, `wait` and `max_hold` in seconds: defaults, bounds, checks of what callers pass."""

from __future__ import annotations

import sys
from typing import Any

DEFAULT_TTL = 30.0
DEFAULT_WAIT = 10.0

# Backends count milliseconds, and several renewals must fit into a ttl. The upper bound limits
# the damage of a mistake (milliseconds for seconds).
MIN_TTL = 0.1
MAX_TTL = 31 * 24 * 3600.0

# A longer one is probably a mistake: renewal covers longer work.
LONG_TTL = 3600.0


class _Unset:
    def __repr__(self) -> str:
        return "<the alias's default>"

    def __reduce__(self) -> str:
        return "UNSET"  # the same one after a copy or in another process


UNSET: Any = _Unset()


def checked_ttl(ttl: Any, what: str = "ttl") -> float:
    """Return `ttl` as seconds, or raise TypeError / ValueError: always finite, within bounds."""
    _check_number(ttl, what)
    if not MIN_TTL <= ttl <= MAX_TTL:
        raise ValueError(f"{what} must be {MIN_TTL} to {MAX_TTL:.0f} seconds, not {ttl!r}")
    return float(ttl)


def checked_wait(wait: Any) -> float | None:
    """Return `wait` as seconds or None (forever), or raise TypeError / ValueError."""
    if wait is None:
        return None
    _check_number(wait, "wait", or_else=" or None (forever)")
    if not wait >= 0:
        raise ValueError(f"wait must be 0 (one try) or more seconds, not {wait!r}")
    return None if wait > sys.float_info.max else float(wait)


def check_max_hold(seconds: Any) -> None:
    """Raise TypeError or ValueError unless `seconds` can be a `max_hold`."""
    _check_number(seconds, "max_hold")
    if not MIN_TTL <= seconds <= sys.float_info.max and seconds != float("inf"):
        raise ValueError(f"max_hold must be {MIN_TTL} seconds or more, not {seconds!r}")


def _check_number(seconds: Any, what: str, *, or_else: str = "") -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{what} must be a number of seconds{or_else}, not {seconds!r}")
