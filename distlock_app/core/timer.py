"""One daemon thread that starts what is due: renewals, ends of leases, retried releases."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from time import sleep
from typing import Any, Protocol

from ..primitives.forks import in_child
from ..primitives.logs import fields, logger
from ..primitives.rlock import RLock
from ..primitives.threads import Gate, refuse_late_greenlets, started, threads_are_greenlets
from ..primitives.timing import monotonic

# Seconds until the thread continues after an internal error.
RECOVERY = 0.02
# It sleeps in slices, because some platforms limit timed waits.
LONGEST_SLEEP = 3600.0


class Timed(Protocol):
    """Something that can be due at one time, which the timer stores on it."""

    due: float | None


class Timer:
    """Calls functions when due, on one thread, so they must not wait for a backend."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may release in the middle of any of the methods below.
        self.lock = RLock()
        # Most leases are released before they are first due, and never get onto the heap. Here are
        # the calls for them when the thread next wakes. Add first, then check `wakes_at`.
        self.young: dict[Timed, Callable[[Any], None]] = {}
        self.wakes_at = float("inf")
        self._heap: list[tuple[float, int, Timed, Callable[[Any], None]]] = []
        self._stale = 0  # entries of what was cancelled or moved
        self._numbers = itertools.count()
        self._inbox: deque[Callable[[], None]] = deque()
        self._gate = Gate()
        self._running = False

    def at(self, due: float, what: Timed, call: Callable[[Any], None]) -> None:
        """Call `call(what)` at `due` (by `monotonic()`) instead of any earlier due time."""
        with self.lock:
            self.cancel(what)
            what.due = due
            heapq.heappush(self._heap, (due, next(self._numbers), what, call))
            self.wake_at(due)

    def wake_at(self, due: float) -> None:
        """Wake the thread at `due` or sooner."""
        with self.lock:
            if due >= self.wakes_at:
                return
            if self._running:
                self.wakes_at = due
                self._gate.open()
                return
            refuse_late_greenlets()
            if started(self._run, "distlock-timer"):
                self._running, self.wakes_at = True, due

    def cancel(self, what: Timed) -> None:
        """Do not call for `what`; its entry is removed later."""
        self.young.pop(what, None)
        if what.due is None:
            return
        with self.lock:
            what.due = None
            self._stale += 1
            if self._stale > 1000 and self._stale * 2 > len(self._heap):
                self._heap = [entry for entry in self._heap if entry[2].due == entry[0]]
                heapq.heapify(self._heap)
                self._stale = 0

    def scheduled(self) -> list[Timed]:
        """Return what it will call for."""
        with self.lock:
            return [*self.young, *(what for due, _, what, _ in self._heap if what.due == due)]

    def soon(self, call: Callable[[], None]) -> None:
        """Call `call()` now. Safe in a finalizer, which may interrupt any code."""
        self._inbox.append(call)
        self._gate.open()

    def _run(self) -> None:
        if threads_are_greenlets():
            logger.warning(
                "gevent has patched threads: code that computes without yielding delays renewals, "
                "and locks are lost after their ttl",
                extra=fields("greenlets", ""),
            )
        while True:
            try:
                self._turn()
            except BaseException:
                logger.exception("the lock timer failed and continues", extra=_FAILED)
                sleep(RECOVERY)

    def _turn(self) -> None:
        self._gate.wait(self._call_due())  # this frame must not keep a lease alive
        while self._inbox:
            self._inbox.popleft()()

    def _call_due(self) -> float:
        calls = self._due()
        for call in calls:
            try:
                call()
            except Exception:  # the other calls must still be made
                logger.exception("a call by the lock timer failed", extra=_FAILED)
        return 0.0 if calls else max(0.0, min(self.wakes_at - monotonic(), LONGEST_SLEEP))

    def _due(self) -> list[Callable[[], None]]:
        now = monotonic()
        calls: list[Callable[[], None]] = []
        with self.lock:
            if now >= self.wakes_at:
                self.wakes_at = float("inf")  # first: additions from now on wake the thread again
                for what, call in self.young.copy().items():
                    self.young.pop(what, None)
                    calls.append(partial(call, what))
            while self._heap and self._heap[0][0] <= now:
                due, _, what, call = heapq.heappop(self._heap)
                if what.due != due:
                    self._stale = max(0, self._stale - 1)
                else:
                    what.due = None
                    calls.append(partial(call, what))
            if self._heap:
                self.wakes_at = min(self.wakes_at, self._heap[0][0])
            return calls


_FAILED = fields("worker_failed", "")
timer = Timer()
in_child(timer.__init__)  # type: ignore[misc]
