"""Plots as SVG text: lines over a few positions, and bars, both with logarithmic values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from math import ceil, floor, log10

RAW, OURS, PART_OF_OURS = "#999999", "#1f6feb", "#9ecbff"
OTHERS = (
    *("#d08770", "#8c564b", "#2da44e", "#a371f7", "#d4a72c", "#e377c2", "#17becf", "#444444"),
    "#bcbd22",
)
WIDTH, HEIGHT = 300, 240  # of a panel
LEFT, TOP, GAP = 60, 40, 70

# Of one panel: a line's title to its value at each position; None where there is none.
Panel = dict[str, list[float | None]]


def lines(panels: dict[str, Panel], positions: Sequence[object], *, label: str) -> str:
    """Return a plot with a panel beside the other, over the same positions."""
    titles = list(dict.fromkeys(title for panel in panels.values() for title in panel))
    colours = _colours(titles)
    values = [v for panel in panels.values() for line in panel.values() for v in line if v]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    columns = 2
    rows = ceil(len(panels) / columns)
    parts: list[str] = []
    for at, (title, panel) in enumerate(panels.items()):
        x0 = LEFT + at % columns * (WIDTH + GAP)
        y0 = TOP + at // columns * (HEIGHT + 2 * TOP)
        parts.append(_text(x0, y0 - 16, title, 'font-weight="bold"'))
        for step in [n * 10**power for power in range(low, high) for n in (1, 2, 5)] + [10**high]:
            y = _y(step, low, high, y0)
            parts.append(f'<path d="M{x0} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
            parts.append(_text(x0 - 6, y + 4, f"{step:,}", 'text-anchor="end"'))
        xs = [x0 + number * WIDTH / max(1, len(positions) - 1) for number in range(len(positions))]
        for x, position in zip(xs, positions, strict=True):
            parts.append(_text(x, y0 + HEIGHT + 18, str(position), 'text-anchor="middle"'))
        for name, line in panel.items():
            spots = [(x, _y(v, low, high, y0)) for x, v in zip(xs, line, strict=True) if v]
            parts += _line(spots, colours[name])
    bottom = TOP + rows * (HEIGHT + 2 * TOP) - TOP + 4
    parts.append(_text(LEFT, bottom, label))
    for number, title in enumerate(titles):
        x, y = LEFT + number % 2 * (WIDTH + GAP), bottom + 24 + number // 2 * 20
        parts.append(f'<path d="M{x} {y - 4}h24" stroke="{colours[title]}" stroke-width="3"/>')
        parts.append(_text(x + 32, y, title))
    return _svg(770, bottom + 24 + ceil(len(titles) / 2) * 20, parts, label)


def bars(groups: dict[str, dict[str, float]], *, label: str) -> str:
    """Return a plot of horizontal bars, group below group; a bar of 1 has the length 0.1."""
    parts: list[str] = []
    left, width, y = 250, 400, 30
    high = max(value for group in groups.values() for value in group.values())
    scale = width / (log10(high) + 1)
    for title, group in groups.items():
        parts.append(_text(10, y, title, 'font-weight="bold"'))
        for name, value in group.items():
            y += 18
            length = max(2.0, scale * (log10(value) + 1))
            colour = _colours([name])[name]
            parts.append(_text(left - 8, y, name, 'text-anchor="end"'))
            parts.append(
                f'<rect x="{left}" y="{y - 10}" width="{length:.1f}" height="12" fill="{colour}"/>'
            )
            parts.append(_text(left + length + 6, y, f"{value:.2f}"))
        y += 30
    parts.append(_text(10, y, label))
    return _svg(770, y + 16, parts, label)


def _colours(titles: list[str]) -> dict[str, str]:
    begins = {"raw": RAW, "distlock_app": OURS, "its engine": PART_OF_OURS}
    others = cycle(OTHERS)
    return {
        title: next((begins[start] for start in begins if title.startswith(start)), "")
        or next(others)
        for title in titles
    }


def _y(value: float, low: int, high: int, top: float) -> float:
    return top + HEIGHT * (high - log10(value)) / (high - low)


def _line(spots: list[tuple[float, float]], colour: str) -> list[str]:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    line = f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in spots]
    return [line, *dots]


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    plain = text.replace("`", "").replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{plain}</text>'


def _svg(width: int, height: float, parts: list[str], label: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}"'
        f' width="{width}" height="{height:.0f}" font-family="sans-serif" font-size="12"'
        f' role="img" aria-label="{label}">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
