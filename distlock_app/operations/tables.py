"""The locks that are held as a table, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..claims import Holding
from ..primitives.names import shown
from .people import activity_of, clock, origin_of, state_of


def table(held: Sequence[Holding]) -> Iterable[str]:
    """Yield the lines of a table; nothing for no locks."""
    rows = [("NAME", "ALIAS", "STATE", "KIND", "LEFT", "HELD FOR", "WAITERS", "FENCE", "HOLDER")]
    for h in sorted(held, key=lambda h: (h.alias, h.name, h.fence or 0)):
        holder = [origin_of(h.holder), activity_of(h.holder)]
        rows.append(
            (
                shown(h.name),
                h.alias,
                state_of(h),
                h.kind,
                "session" if h.expires_in is None else clock(h.expires_in),
                "-" if h.held_for is None else clock(h.held_for),
                "-" if h.waiters is None else str(h.waiters),
                "-" if h.fence is None else str(h.fence),
                " ".join(filter(None, holder)) or "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if held else ():
        yield "  ".join(map(str.ljust, row, widths)).rstrip()
