"""A holding as people and dashboards read it: state, holder, times, what to look at first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timedelta
from datetime import timezone as zones
from typing import Any

from django.utils import timezone

from ..claims import Holding
from ..core.registry import registry
from ..primitives.identity import machine
from ..primitives.names import shown

# States of a lock.
HELD, CONTENDED, EXPIRING, ORPHANED = "held", "contended", "expiring", "orphaned"

# A lock that is renewed always has about two thirds of its ttl left. With less than OVERDUE_BELOW
# of it, nobody renewed it in time: neither the holder shown nor a process that took it over.
OVERDUE_BELOW = 0.6
EXPIRING_BELOW = 0.1


def state_of(holding: Holding) -> str:
    """Return the first that applies: ORPHANED, EXPIRING, CONTENDED or HELD.

    Orphaned: its process has ended, no other renews it, and it was not to be kept (`at_least`).
    Expiring: it was not renewed in time, or it is not to be renewed and ends in a moment.
    """
    left, ttl = holding.expires_in, _ttl_of(holding)
    kept = holding.held_for is not None and holding.held_for < at_least_of(holding)
    overdue = left is None or left < ttl * OVERDUE_BELOW
    if overdue and not kept and _process_ended(holding.holder):
        return ORPHANED
    below = OVERDUE_BELOW if is_renewed(holding) and not kept else EXPIRING_BELOW
    if left is not None:
        lease = min(ttl, left + (holding.held_for or 0.0))  # the first may be shorter than the ttl
        if left < lease * below:
            return EXPIRING
    return CONTENDED if holding.waiters else HELD


def facts_of(holding: Holding) -> dict[str, Any]:
    """Return what programs get as JSON."""
    return {**asdict(holding), "state": state_of(holding)}


def has_version(holding: Holding, version: str | None) -> bool:
    """Return whether it may be the holding that was shown with this version; None: any."""
    backend = registry[holding.alias].backend
    return version is None or backend.same_version(holding.version, version)


def is_renewed(holding: Holding) -> bool:
    """Return whether its holder renews it; not with `renew=False`."""
    return holding.holder.get("renew") is not False


def at_least_of(holding: Holding) -> float:
    """Return for how many seconds after its acquisition it outlives its process."""
    at_least = holding.holder.get("at_least")
    return float(at_least) if isinstance(at_least, (int, float)) else 0.0


def urgency(holding: Holding) -> tuple[bool, int]:
    """Return the sort key: contended locks first, then those held longest.

    In whole seconds: backends are not read in the same instant.
    """
    return not holding.waiters, -int(holding.held_for or 0.0)


def said(holder: Mapping[str, Any], *keys: str) -> str:
    """Return what the holder said of itself, with ":" between, as printable text; or nothing."""
    return shown(":".join(str(holder[key]) for key in keys if holder.get(key)))


def place_of(holder: Mapping[str, Any]) -> str:
    """Return where the holder runs, host:pid, as printable text."""
    return said(holder, "host", "pid")


def origin_of(holder: Mapping[str, Any]) -> str:
    """Return where the holder runs, host:pid:thread, as printable text."""
    return said(holder, "host", "pid", "thread")


def activity_of(holder: Mapping[str, Any]) -> str:
    """Return what the holder does, as printable text; empty if it did not say."""
    return said(holder, "who")


def who(holder: Mapping[str, Any]) -> str:
    """Return where a holder runs and what for, in one line; empty if it did not say."""
    return " – ".join(filter(None, (origin_of(holder), activity_of(holder))))


def clock(seconds: float) -> str:
    """Return a duration as 0:07, 2:07 or 1:02:07: the same in every language."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def local(at: datetime) -> datetime:
    """Return a time in the current time zone; a naive one (USE_TZ = False) is in it already."""
    return timezone.localtime(at) if timezone.is_aware(at) else at


def since(holding: Holding) -> str:
    """Return when it was acquired, in the current time zone; empty if that is not known."""
    if holding.held_for is None:
        return ""
    at = timezone.localtime(datetime.now(zones.utc) - timedelta(seconds=holding.held_for))
    return f"{at:%Y-%m-%d %H:%M:%S}"


def _ttl_of(holding: Holding) -> float:
    ttl = holding.holder.get("ttl")  # if it is not that of the alias
    return float(ttl) if isinstance(ttl, (int, float)) else registry[holding.alias].ttl


def _process_ended(holder: Mapping[str, Any]) -> bool:
    """Return whether it has certainly ended: it ran on this machine, and its id is free."""
    pid = holder.get("pid")
    if not machine() or holder.get("machine") != machine() or not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # of another user; no process id at all
        return False
    return False
