"""`ServerClock`: what time it is at the nodes, from what they answered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...primitives.timing import monotonic

# How much the clocks of two hosts may differ in rate.
RATE_DRIFT = 0.001
# How often the nodes are asked for it.
LEARN_SECONDS = 1.0
# A clock that went back by so many microseconds was set: what was learned before says nothing.
SET_BY = 50_000


class ServerClock:
    """A guess of the nodes' time that is never later than the slowest of them."""

    def __init__(self) -> None:
        self._ahead: float | None = None  # of our monotonic clock, in microseconds, at least
        self._learned = 0.0
        self._last = 0

    def stamp(self, at: float | None = None) -> int:
        """Return the nodes' time in microseconds (now, or at our monotonic time `at`).

        Greater each time, and a small number as long as nothing is known.
        """
        if self._ahead is None:
            guess = 0
        else:
            guess = int((monotonic() if at is None else at) * 1e6 + self._ahead)
        self._last = max(guess, self._last + 1)
        return self._last

    def due(self, at: float) -> bool:
        """Return whether the nodes should be asked for the time again."""
        return self._ahead is None or at - self._learned > LEARN_SECONDS

    def learn(self, heard: float, times: Sequence[int]) -> None:
        """Note the nodes' times, from answers that had come at our time `heard`.

        An answer that took long makes a clock look slow, so the greatest guess is the best. It is
        lowered slowly, because clocks may run at different rates, and at once when a clock was
        set back.
        """
        if not times:
            return
        ahead = min(times) - heard * 1e6
        if self._ahead is not None and ahead > self._ahead - SET_BY:
            ahead = max(ahead, self._ahead - (heard - self._learned) * 1e6 * RATE_DRIFT)
        self._ahead, self._learned = ahead, heard


def times_in(answers: Iterable[list[bytes]]) -> list[int]:
    """Return the nodes' times in microseconds, of those that told it (see acquire.lua)."""
    return [int(words[2]) * 1_000_000 + int(words[3]) for words in answers if words[3:]]
