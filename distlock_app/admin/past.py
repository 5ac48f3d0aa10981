"""A lock's past in the admin: its last events, their statistics, and a chart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..claims import Holding
from ..models import LockEvent
from ..operations import history
from ..operations.people import who
from ..primitives.names import shown

# No event says this: it is what became of a lock that was acquired, and neither ended nor
# is held.
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
_WAITS = (LockEvent.ACQUIRED, LockEvent.BUSY)
_ENDS = (LockEvent.RELEASED, LockEvent.LOST)

# The chart, in units of its own.
BARS, BAR, HEIGHT = 60, 12, 56


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
class Panel:
    """One half of the chart: how many waited, or held, on average during each bar."""

    label: Any
    kind: str
    top: float  # what the highest bar stands for
    bars: Sequence[tuple[int, float, float, str]]  # left, upper edge, height, what it says


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of a lock's past."""

    name: str
    lines: list[Line]
    sums: list[tuple[Any, int, float, float]]  # what, how many, median and longest in seconds
    begin: datetime | None = None
    end: datetime | None = None
    panels: Sequence[Panel] = ()
    overlap: bool = False  # whether two may seem to hold it, as one noticed late that it was lost
    width: int = BARS * BAR
    height: int = HEIGHT


def past_of(alias: str, key: str, holdings: Iterable[Holding]) -> Past | None:
    """Return the past of a lock that these hold now; None without a history."""
    if not history.kept():
        return None
    events = history.events_of(alias, key)
    now = timezone.now()
    held = [h for h in holdings if h.fence is not None]
    name = shown(events[0].name) if events else ""
    lines = list(_lines(events, {h.fence for h in held}, now))
    waits = [_before(e.at, e.seconds) for e in events if e.event in _WAITS and e.seconds]
    clears = [e for e in events if e.event == LockEvent.CLEARED and e.fence is not None]
    cleared = {e.fence: e.at for e in clears}
    ends = [e for e in events if e.event in _ENDS and e.seconds]
    holds = [_hold(e, cleared) for e in ends]
    holds += [_before(now, h.held_for) for h in held if h.held_for]
    spans = [*waits, *holds]
    if not spans:
        return Past(name, lines, _sums(events))
    begin, end = min(s[0] for s in spans), max(s[1] for s in spans)
    panels = [
        _panel(_("waiting"), "waiting", waits, begin, end),
        _panel(_("holding"), "holding", holds, begin, end),
    ]
    overlap = any(e.event == LockEvent.LOST and e.fence not in cleared for e in ends)
    return Past(name, lines, _sums(events), begin, end, panels, overlap)


def _lines(events: Sequence[LockEvent], held: set[int | None], now: datetime) -> Iterable[Line]:
    ended = {e.fence for e in events if e.event != LockEvent.ACQUIRED}
    for event in events:
        acquired = event.event == LockEvent.ACQUIRED
        gone = event.fence is not None and event.fence not in ended | held
        if acquired and gone and now - event.at > timedelta(seconds=PATIENCE):
            yield Line(None, EXPIRED, EVENTS[EXPIRED])
        yield Line(
            event.at,
            event.event,
            EVENTS.get(event.event, event.event),
            waited=event.seconds if event.event in _WAITS else None,
            held=event.seconds if event.event in _ENDS else None,
            detail=_detail(event),
        )


def _detail(event: LockEvent) -> str:
    if event.event not in _WAITS:
        return shown(event.detail)
    try:
        return who(json.loads(event.detail))
    except (ValueError, AttributeError):
        return ""


def _sums(events: Iterable[LockEvent]) -> list[tuple[Any, int, float, float]]:
    sums = []
    for event in (*_WAITS, *_ENDS):
        seconds = [e.seconds for e in events if e.event == event and e.seconds is not None]
        if seconds:
            sums.append((EVENTS[event], len(seconds), median(seconds), max(seconds)))
    return sums


def _before(end: datetime, seconds: float | None) -> tuple[datetime, datetime]:
    return end - timedelta(seconds=seconds or 0.0), end


def _hold(event: LockEvent, cleared: Mapping[int | None, datetime]) -> tuple[datetime, datetime]:
    """Return when it was held: until it was cleared, though its holder noticed that later."""
    begin, end = _before(event.at, event.seconds)
    return begin, max(begin, min(end, cleared.get(event.fence, end)))


def _panel(
    label: Any,
    kind: str,
    spans: Sequence[tuple[datetime, datetime]],
    begin: datetime,
    end: datetime,
) -> Panel:
    """Add up, for each bar, how long the spans were in it: divided by its width, how many."""
    width = (end - begin).total_seconds() / BARS or 1.0
    sums = [0.0] * BARS
    for first, last in spans:
        left, right = (first - begin).total_seconds(), (last - begin).total_seconds()
        for bar in range(int(left / width), min(BARS, int(right / width) + 1)):
            sums[bar] += max(0.0, min(right, (bar + 1) * width) - max(left, bar * width)) / width
    top = max(1.0, *sums)
    bars = []
    for bar, value in enumerate(sums):
        if value > 0:
            height = max(1.0, value / top * HEIGHT)
            at = timezone.localtime(begin + timedelta(seconds=bar * width))
            bars.append((bar * BAR, HEIGHT - height, height, f"{at:%H:%M:%S}: {value:.2f}"))
    return Panel(label, kind, top, bars)
