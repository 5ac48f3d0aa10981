"""A lock's past in the admin: its last events, and their statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..claims import Holding
from ..models import LockEvent
from ..operations import history
from ..operations.holdings import who
from ..primitives.identity import holder_fields
from ..primitives.names import shown
from .chart import Chart, chart_of

# Not an event: what became of a lock that was acquired, is not held, and has not been reported to
# have ended.
EXPIRED = "expired"
# Seconds until then: events are written a moment late, and hosts' clocks differ.
PATIENCE = 10.0

EVENTS = {
    LockEvent.ACQUIRED: _("acquired"),
    LockEvent.BUSY: _("gave up (busy)"),
    LockEvent.RELEASED: _("released"),
    LockEvent.LOST: _("lost"),
    LockEvent.CLEARED: _("cleared"),
    EXPIRED: _("expired or its process ended"),
}


@dataclass(frozen=True, slots=True)
class Line:
    """One event, for a table."""

    at: datetime | None  # None: some time after the event before
    event: str
    label: Any
    waited: float | None = None
    held: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of a lock's past."""

    name: str
    lines: list[Line]
    sums: list[tuple[Any, int, float, float]]  # what, how many, median and longest in seconds
    chart: Chart | None


def past_of(alias: str, key: str, holdings: Sequence[Holding] | None) -> Past | None:
    """Return the past of a lock that these hold now (None: not known); None without a history."""
    if not history.kept():
        return None
    events = history.events_of(alias, key)
    name = shown(events[0].name) if events else ""
    with_fence = [holding for holding in holdings or () if holding.fence is not None]
    lines = list(_lines(events, holdings))
    return Past(name, lines, _sums(events), chart_of(events, with_fence))


def _lines(events: Sequence[LockEvent], held: Sequence[Holding] | None) -> Iterable[Line]:
    told_by = timezone.now() - timedelta(seconds=PATIENCE)
    ended = {e.fence for e in events if e.event != LockEvent.ACQUIRED}
    fences = [holding.fence for holding in held or ()]
    known = {*ended, *fences, None}
    # So many of the newest acquisitions may still be held: by a holder whose fence is not known.
    spared = len(events) if held is None else fences.count(None)
    for event in events:
        gone = event.event == LockEvent.ACQUIRED and event.fence not in known
        if gone and spared:
            spared -= 1
        elif gone and event.at < told_by:
            yield Line(None, EXPIRED, EVENTS[EXPIRED])
        yield Line(
            event.at,
            event.event,
            EVENTS.get(event.event, event.event),
            waited=event.seconds if event.event in LockEvent.WAITS else None,
            held=event.seconds if event.event in LockEvent.ENDS else None,
            detail=_detail(event),
        )


def _detail(event: LockEvent) -> str:
    if event.event in LockEvent.WAITS:
        return who(holder_fields(event.detail))
    return shown(event.detail)


def _sums(events: Sequence[LockEvent]) -> list[tuple[Any, int, float, float]]:
    sums = []
    for event in (*LockEvent.WAITS, *LockEvent.ENDS):
        seconds = [e.seconds for e in events if e.event == event and e.seconds is not None]
        if seconds:
            sums.append((EVENTS[event], len(seconds), median(seconds), max(seconds)))
    return sums
