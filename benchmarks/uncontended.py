"""A free lock taken and given back by one thread, all contenders in turn: the medians."""

from __future__ import annotations

import signal
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, perf_counter
from typing import Any

from .contenders import GROUPS, OURS
from .raw import Turn

NAMES = [f"invoice:{number}" for number in range(100)]
BATCH = 20  # of one contender in a row, for at most
BATCH_SECONDS = 0.01


def measure(group: str, seconds: float, peers: bool) -> dict[str, Any]:
    """Return by contender {"us": p50 of acquire + release} or {"error": why not}."""
    results: dict[str, Any] = {}
    turns: dict[str, Turn] = {}
    for contender in GROUPS[group].of("uncontended", peers=peers):
        try:
            with at_most(20):
                turns[contender.title] = turn = contender.make()
        except BaseException as error:
            results[contender.title] = failure(error)
            continue
        if contender.title == OURS[0]:  # the rows of a lock table stay
            for name in NAMES:
                with turn(name):
                    pass
    times: dict[str, list[float]] = {title: [] for title in turns}
    end = monotonic() + seconds
    number = 0
    while monotonic() < end:
        # The batches are no multiple of the names.
        number += BATCH + 1
        for title, turn in list(turns.items()):
            try:
                with at_most(20):
                    times[title] += _batch(turn, number)
            except BaseException as error:
                results[title] = failure(error)
                del turns[title]
    for title in turns:
        results[title] = {"us": statistics.median(times[title]) * 1e6, "n": len(times[title])}
    return results


def _batch(turn: Turn, number: int) -> list[float]:
    times: list[float] = []
    begun = perf_counter()
    while len(times) < BATCH and perf_counter() < begun + BATCH_SECONDS:
        name = NAMES[(number + len(times)) % len(NAMES)]
        started = perf_counter()
        with turn(name):
            pass
        times.append(perf_counter() - started)
    return times


def failure(error: BaseException) -> dict[str, str]:
    """Return what became of a contender that raised, for the report."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, ImportError):
        return {"error": f"skipped: {error}"}
    text = f"{type(error).__name__}: {error}"
    print(text, file=sys.stderr)
    return {"error": text.splitlines()[0][:120]}


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread when the block takes longer."""

    def ring(*args: object) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
