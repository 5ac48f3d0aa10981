"""The plot of a race as SVG shapes: a row for each strategy, a panel for each question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log10
from typing import Any

from django.utils.translation import gettext_lazy as _

from .race_results import Result

LABEL, BAR, PANEL, ROW, TOP, RADIUS = 226, 84, 148, 34, 46, 3.5
DECADES = (1, 10, 100, 1000, 10000)  # ms
TICKS = {10: "", 1000: "", 10000: "10⁴"}


def shape(kind: str, **places: float) -> dict[str, Any]:
    """Return a shape with its coordinates as SVG wants them, in every language."""
    return {"kind": kind, **{name: f"{place:.1f}" for name, place in places.items()}}


@dataclass(slots=True)
class Plot:
    """Shapes to draw, in the order of the fields."""

    width: int
    height: int
    rects: list[dict[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    dots: list[dict[str, Any]] = field(default_factory=list)
    texts: list[dict[str, Any]] = field(default_factory=list)

    def bar(self, x: float, y: float, width: float, kind: str, height: float = 14) -> None:
        if width > 0:
            width = max(width, 1.5)
            self.rects.append(shape(kind, x=x, y=y - height / 2, width=width, height=height))

    def line(self, x: float, y: float, x2: float, y2: float, kind: str) -> None:
        self.lines.append(shape(kind, x=x, y=y, x2=x2, y2=y2))

    def dot(self, x: float, y: float, kind: str) -> None:
        self.dots.append(shape(kind, x=x, y=y, r=RADIUS))

    def text(self, x: float, y: float, text: Any, kind: str = "") -> None:
        self.texts.append({**shape(kind, x=x, y=y), "text": text})


def plot_of(results: Sequence[Result], titles: dict[str, Any]) -> Plot:
    """Draw these results, which were all run."""
    plot = Plot(LABEL + PANEL * len(PANELS), TOP + ROW * len(results) + 6)
    drawn = []
    for number, (title, drawer) in enumerate(PANELS):
        plot.text(LABEL + PANEL * number, 16, title, "head")
        drawn.append(drawer(plot, LABEL + PANEL * number, results))
    for row, result in enumerate(results):
        y = TOP + ROW * row + ROW / 2
        plot.line(0, y - ROW / 2, plot.width, y - ROW / 2, "rule")
        mark, kind = ("✓", "") if result.right else ("✗", "wrong")
        plot.text(4, y + 4, f"{mark} {titles.get(result.strategy, result.title)}", kind)
        for draw in drawn:
            draw(result, y)
    return plot


Draw = Callable[[Result, float], None]


def _sold(plot: Plot, x: float, results: Sequence[Result]) -> Draw:
    most = max(max(r.stock, r.sold) for r in results)
    there = x + results[0].stock * BAR / most
    plot.text(there, TOP - 6, results[0].stock, "tick")
    plot.line(there, TOP, there, TOP + ROW * len(results), "grid")

    def draw(result: Result, y: float) -> None:
        honest = (result.sold - result.oversold) * BAR / most
        plot.bar(x, y, honest, "good")
        plot.bar(x + honest, y, result.oversold * BAR / most, "bad")
        text = f"+ {result.oversold}" if result.oversold else result.sold
        plot.text(x + BAR + 6, y + 4, text, "value")

    return draw


def _left(plot: Plot, x: float, results: Sequence[Result]) -> Draw:
    return _bars(plot, x, "left", max(max(r.stock, r.left) for r in results), "few")


def _throughput(plot: Plot, x: float, results: Sequence[Result]) -> Draw:
    return _bars(plot, x, "throughput", max(r.throughput for r in results) or 1, "good")


def _bars(plot: Plot, x: float, figure: str, most: float, kind: str) -> Draw:
    def draw(result: Result, y: float) -> None:
        value = getattr(result, figure)
        plot.bar(x, y, value * BAR / most, kind if result.right else "bad")
        plot.text(x + BAR + 6, y + 4, f"{value:.0f}", "value")

    return draw


def _waits(plot: Plot, x: float, results: Sequence[Result]) -> Draw:
    bottom = TOP + ROW * len(results)

    def place(seconds: float) -> float:
        return x + BAR * min(1, max(0.0, log10(max(seconds * 1000, 1)) / log10(DECADES[-1])))

    for decade in DECADES:
        plot.line(place(decade / 1000), TOP, place(decade / 1000), bottom, "grid")
        plot.text(place(decade / 1000), TOP - 6, TICKS.get(decade, decade), "tick")

    def draw(result: Result, y: float) -> None:
        if result.wait_p50 is None or result.wait_p99 is None:
            return
        first, last = place(result.wait_p50), place(result.wait_p99)
        plot.line(first, y, last, y, "range")
        plot.dot(last, y, "hollow")
        plot.dot(first, y, "good")
        both = f"{short(result.wait_p50)}, {short(result.wait_p99)}"
        plot.text(x + BAR + 6, y + 4, both, "value")

    return draw


def short(seconds: float) -> str:
    """Return a time in milliseconds, in seconds if it is long."""
    return f"{seconds * 1000:.0f}" if seconds < 1 else f"{seconds:.1f}s"


def _retries(plot: Plot, x: float, results: Sequence[Result]) -> Draw:
    most = max(max(r.conflicts, r.retries) for r in results) or 1

    def draw(result: Result, y: float) -> None:
        plot.bar(x, y - 4, result.conflicts * BAR / most, "few", height=6)
        plot.bar(x, y + 4, result.retries * BAR / most, "good", height=6)
        plot.text(x + BAR + 6, y + 4, f"{result.conflicts}, {result.retries}", "value")

    return draw


def _fairness(plot: Plot, x: float, results: Sequence[Result]) -> Draw:
    most = max(max(r.per_buyer, default=0) for r in results) or 1

    def draw(result: Result, y: float) -> None:
        places = [x + RADIUS + units * (BAR - 2 * RADIUS) / most for units in result.per_buyer]
        plot.line(min(places), y, max(places), y, "range")
        for spot in places:
            plot.dot(spot, y, "buyer")
        ratio = "∞" if result.fairness is None else f"{result.fairness:.1f}"
        plot.text(x + BAR + 6, y + 4, ratio, "value")

    return draw


PANELS = (
    (_("Sold + oversold"), _sold),
    (_("Stock left"), _left),
    (_("Sold a second"), _throughput),
    (_("Wait ms: p50, p99"), _waits),
    (_("Conflicts, retries"), _retries),
    (_("Units per buyer"), _fairness),
)
