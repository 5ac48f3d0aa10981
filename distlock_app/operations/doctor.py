"""`distlock doctor`: test a configured backend by taking a lock on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ..core.lock import Lock
from ..core.registry import check_deployed, registry
from ..errors import LockError
from ..primitives.timing import monotonic
from .reading import round_trip_ms

# Seconds: another doctor may be at work, or have died.
TTL = 5.0


@dataclass(slots=True, kw_only=True)
class Finding:
    """What the doctor found out about one alias."""

    alias: str
    backend: str = ""
    ping_ms: float | None = None  # one round trip
    pair_ms: float | None = None  # a lock taken and released, on an open connection
    trouble: str = ""  # why it cannot be used
    messages: list[dict[str, Any]] = field(default_factory=list)  # of the checks

    @property
    def works(self) -> bool:
        """Whether a lock was taken and released."""
        return self.pair_ms is not None

    def facts(self) -> dict[str, Any]:
        """Return what programs get as JSON."""
        return {**asdict(self), "works": self.works}


def examine(alias: str) -> Finding:
    """Run the checks of the backend of `alias`, and take a lock on it twice."""
    found = Finding(alias=alias)
    try:
        entry = registry[alias]
        found.backend = type(entry.backend).__name__
        found.ping_ms = round(round_trip_ms(entry.backend), 3)
        messages = [*entry.backend.check(ask=True), *check_deployed(entry)]
        found.messages = [{"id": m.id, "text": m.msg, "hint": m.hint} for m in messages]
        # Always the same one: a lock table keeps a row for each name that it ever saw.
        lock = Lock("distlock doctor", using=alias, ttl=TTL, wait=2 * TTL, release="now")
        lock.acquire().release()  # connections are made, scripts loaded
        started = monotonic()
        hold = lock.acquire()
        hold.release()
        if hold.opened:
            raise LockError("no lock could be taken: the log says why (event `opened`)")
        found.pair_ms = round((monotonic() - started) * 1000, 3)
    except (LockError, ImproperlyConfigured) as error:
        found.trouble = str(error)
    except Exception as error:  # of a backend of another package: the other aliases matter too
        found.trouble = f"{type(error).__name__}: {error}"
    return found
