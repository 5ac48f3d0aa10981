"""The chart of a lock's past: how many waited for it, and how many held it, over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..claims import Holding
from ..models import LockEvent
from ..operations.holdings import local

# The number of bars, the room for each, and the height of the drawing, in units of its own.
BARS, BAR, HEIGHT = 60, 12, 56

Span = tuple[datetime, datetime]


@dataclass(frozen=True, slots=True)
class Panel:
    """One half of the chart: how many waited, or held, on average during each bar."""

    label: Any
    kind: str
    top: float  # what the highest bar stands for
    bars: Sequence[tuple[int, float, float, str]]  # left, upper edge, height, what it says


@dataclass(frozen=True, slots=True)
class Chart:
    """Both halves, from the first wait or hold to the last."""

    begin: datetime
    end: datetime
    panels: Sequence[Panel]
    overlap: bool  # whether two may seem to hold it, as one noticed late that it was lost

    # The same in every chart; the bars have a gap between them.
    width, height, bar_width = BARS * BAR, HEIGHT, BAR - 1


def chart_of(events: Sequence[LockEvent], holdings: Iterable[Holding]) -> Chart | None:
    """Return the chart of these events and holdings; None if none has a duration."""
    now = timezone.now()
    waits: list[Span] = []
    holds = [_before(now, h.held_for) for h in holdings if h.held_for]
    overlap = False
    cleared = {e.fence: e.at for e in events if e.event == LockEvent.CLEARED}
    cleared.pop(None, None)  # the fencing token is not known
    for event in events:
        if not event.seconds:
            continue
        begin, end = _before(event.at, event.seconds)
        if event.event in LockEvent.WAITS:
            waits.append((begin, end))
        elif event.event in LockEvent.ENDS:
            # Held until it was cleared, though its holder noticed that later.
            holds.append((begin, max(begin, min(end, cleared.get(event.fence, end)))))
            overlap |= event.event == LockEvent.LOST and event.fence not in cleared
    if not (spans := [*waits, *holds]):
        return None
    begins, ends = zip(*spans, strict=True)
    begin, end = min(begins), max(ends)
    panels = [
        _panel(_("waiting"), "waiting", waits, begin, end),
        _panel(_("holding"), "holding", holds, begin, end),
    ]
    return Chart(begin, end, panels, overlap)


def _before(end: datetime, seconds: float) -> Span:
    return end - timedelta(seconds=seconds), end


def _panel(label: Any, kind: str, spans: list[Span], begin: datetime, end: datetime) -> Panel:
    """Compute for each bar how many spans cover it on average."""
    width = (end - begin).total_seconds() / BARS or 1.0
    sums = [0.0] * BARS
    for span in spans:
        left, right = ((at - begin).total_seconds() / width for at in span)  # in bars
        for bar in range(int(left), min(BARS, int(right) + 1)):
            sums[bar] += min(right, bar + 1) - max(left, bar)
    top = max(1.0, *sums)
    bars = []
    for bar, value in enumerate(sums):
        if value > 0:
            height = max(1.0, value / top * HEIGHT)
            at = local(begin + timedelta(seconds=bar * width))
            bars.append((bar * BAR, HEIGHT - height, height, f"{at:%H:%M:%S}: {value:.2f}"))
    return Panel(label, kind, top, bars)
