"""Locks as text for a terminal: a table of many, a card for each of a few."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unicodedata import east_asian_width

from ..claims import Holding
from ..primitives.names import key_of, shown
from . import holdings

COLUMNS: Mapping[str, Callable[[Holding], str]] = {
    "NAME": lambda held: shown(held.name),
    "STATE": lambda held: (
        holdings.state_of(held) + ("" if held.kind == "exclusive" else f" {held.kind}")
    ),
    "HELD FOR": lambda held: _clock(held.held_for),
    "WAITERS": lambda held: _number(held.waiters),
    "WHO": lambda held: holdings.activity_of(held.holder),
    "WHERE": lambda held: holdings.place_of(held.holder),
    "LEFT": lambda held: _left(held),
    "ALIAS": lambda held: held.alias,
}
# Those that may be long, and the width that each keeps on a narrow terminal.
LONG = ("NAME", "WHO", "WHERE")
SHORTEST = 12

UNKNOWN = "unknown"

# What a list may be sorted by; the locks that people look for come first.
SORTS: Mapping[str, Callable[[Holding], Any]] = {
    "urgency": holdings.urgency,
    "name": lambda held: held.name.casefold(),
    "held_for": lambda held: -(held.held_for or 0.0),
    "waiters": lambda held: -(held.waiters or 0),
    "expires_in": lambda held: float("inf") if held.expires_in is None else held.expires_in,
}


def table(held: Sequence[Holding], width: int) -> Iterable[tuple[str, str]]:
    """Yield the lines of a table, each with the state of its lock.

    `width`: of the terminal; long cells, and at last the lines, are cut to fit. 0: nothing is cut.
    """
    rows = [[*COLUMNS], *([cell(one) or UNKNOWN for cell in COLUMNS.values()] for one in held)]
    widths = {column[0]: max(map(_width, column)) for column in zip(*rows, strict=True)}
    spaces = 2 * (len(widths) - 1)
    room = width or sum(widths.values()) + spaces
    while sum(widths.values()) + spaces > room:
        longest = max(LONG, key=widths.__getitem__)
        if widths[longest] <= SHORTEST:
            break
        widths[longest] -= 1
    states = ["", *map(holdings.state_of, held)]
    for row, state in zip(rows, states, strict=True):
        yield _cut("  ".join(map(_fit, row, widths.values())).rstrip(), room), state


def card(held: Holding, queue: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    """Yield what is known of a holding, label and text, and the commands that are of use now.

    What is not known is an empty text.
    """
    holder, name = held.holder, shown(held.name)
    yield "name", name
    yield "alias", held.alias
    yield "kind", held.kind
    yield "state", holdings.state_of(held)
    yield "who", holdings.activity_of(holder)
    for label, key in ("host", "host"), ("process", "pid"), ("thread", "thread"):
        yield label, holdings.said(holder, key)
    yield "held for", _clock(held.held_for)
    yield "since", holdings.since(held)
    if at_least := holdings.at_least_of(held):
        yield "at least", holdings.clock(at_least)
    yield "time left", _left(held)
    yield "fencing token", _number(held.fence)
    yield "waiters", _number(held.waiters)
    for number, waiter in enumerate(queue, start=1):
        yield f"  {number}", holdings.who(waiter)
    if isinstance(holder.get("pid"), int):
        look = f"ps -o pid,stat,etime,args -p {holder['pid']}"
        yield "look at it", f"{look}    # on {holdings.said(holder, 'host') or UNKNOWN}"
    if key_of(name) == held.key:  # else it is shown cut, or escaped
        command = ["python", "manage.py", "distlock", "clear", "--using", held.alias]
        names = ["--", name] if name.startswith("-") else [name]
        yield "take it away", shlex.join([*command, "--if-version", held.version, *names])


def _left(held: Holding) -> str:
    if held.expires_in is None:
        return "session"
    return holdings.clock(held.expires_in) + ("" if holdings.is_renewed(held) else " fixed")


def _clock(seconds: float | None) -> str:
    return "" if seconds is None else holdings.clock(seconds)


def _number(number: int | None) -> str:
    return "" if number is None else str(number)


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes: Korean, two for each letter."""
    return len(text) + sum(east_asian_width(letter) in "WF" for letter in text)


def _fit(text: str, width: int) -> str:
    text = _cut(text, width)
    return text + " " * (width - _width(text))


def _cut(text: str, most: int) -> str:
    if _width(text) <= most:
        return text
    while _width(text) >= most:
        text = text[:-1]
    return f"{text}…"
