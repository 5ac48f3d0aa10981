"""Many intervals of time, of which a few are asked for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate

Interval = tuple[float, float]


class Spans:
    """Intervals in any order, which may overlap."""

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self._sorted = sorted(intervals)
        self._begins = [begin for begin, _ in self._sorted]
        # The latest end up to each place: these grow even where the ends do not.
        self._latest = list(accumulate((end for _, end in self._sorted), max))

    def touching(self, since: float, until: float) -> list[Interval]:
        """Return those that began by `until`, and did not end before `since`."""
        first, behind = bisect_left(self._latest, since), bisect_right(self._begins, until)
        return [one for one in self._sorted[first:behind] if one[1] >= since]
