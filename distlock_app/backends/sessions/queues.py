"""Queues inside one process: few connections for many callers, waiters in order of arrival.

A process asks a server by a bounded number of connections (`Turns`). Those who wait for one lock
stand in line inside the process, and the first of them asks the server for all (`Lines`): so a
thousand waiters keep their order behind one connection.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ...primitives.threads import Worker
from ...primitives.timing import monotonic

# So many connections of a process ask at a time, beside those that stay with claims; who comes
# then waits for its turn. As many as the threads in which asyncio tasks ask.
ASKING = 8

# Who leads a line looks at its lock once a second. One that has not done so for so many seconds
# hangs (a blocked event loop, a debugger): the next one who looks takes its place.
HANGS = 3.0

Who = tuple[str, str]  # key, owner


class Turns:
    """Lets so many callers in at a time, in order of arrival.

    Without a mutex: a signal handler may ask in the middle of each of these steps.
    """

    __slots__ = ("_free", "_line")

    def __init__(self, number: int) -> None:
        self._free: deque[None] = deque([None] * number)
        self._line: deque[threading.Lock] = deque()

    def take(self, within: float, *, urgent: bool = False) -> bool:
        """Wait for a turn, at most `within` seconds; `urgent`: before those who wait."""
        turn = threading.Lock()
        turn.acquire()
        (self._line.appendleft if urgent else self._line.append)(turn)
        try:
            self._serve()
            if turn.acquire(timeout=within):
                return True
        except BaseException:  # interrupted
            if not self._left(turn):
                self.give()
            raise
        return not self._left(turn)

    def give(self) -> None:
        """Let the next one in."""
        self._free.append(None)
        self._serve()

    def _left(self, turn: threading.Lock) -> bool:
        """Leave the line; return False if the turn has come just now."""
        try:
            self._line.remove(turn)
        except ValueError:
            return False
        return True

    def _serve(self) -> None:
        while self._line:
            try:
                self._free.pop()
            except IndexError:
                return
            try:
                self._line.popleft().release()
            except IndexError:  # Another thread has served it.
                self._free.append(None)


class Line:
    """Who waits for one lock; `place` is the connection that waits on the server for them."""

    __slots__ = ("key", "left", "place", "seats", "seen_at")

    def __init__(self, key: str, left: Callable[[], None]) -> None:
        self.key = key
        self.left = left
        self.place: Any = None
        self.seats: deque[weakref.ref[Seat]] = deque()
        self.seen_at = monotonic()  # when its first was heard of

    def first(self) -> Seat | None:
        """Return who asks the server; forget those who were dropped before."""
        while self.seats:
            seat = self.seats[0]()
            if seat is not None and seat.line is not None:  # nor is it just being dropped
                return seat
            self.seats.popleft()
        return None


class Seat:
    """The place of one waiter in the line of its process; to drop it is to give it up."""

    __slots__ = ("__weakref__", "asked", "line", "place", "wake")

    def __init__(self, line: Line, wake: Callable[[Any], None] | None) -> None:
        self.line: Line | None = line
        self.wake = wake
        self.asked = False  # the server, or what waits on the server for the line
        self.place: Any = None  # which was the line's, until another one led it as this one hung

    def __del__(self) -> None:
        line, self.line = self.line, None
        if line is not None:
            line.left()


class Lines:
    """The lines of one process, by lock; `emptied` is given the place of one that ends."""

    def __init__(self, emptied: Callable[[Any], None], *, hangs: float = HANGS) -> None:
        self._emptied = emptied
        self._hangs = hangs
        # Reentrant: a signal handler may line up, or leave, in the middle of our own step.
        self._mutex = threading.RLock()
        self._lines: dict[str, Line] = {}
        self._seats: weakref.WeakValueDictionary[Who, Seat] = weakref.WeakValueDictionary()
        self._worker = Worker("distlock-leaving", lambda jobs: self.tidy())
        self._pid = os.getpid()

    def seat_of(self, who: Who) -> Seat | None:
        """Return the place of a waiter."""
        seat = self._seats.get(who)
        return None if seat is None or seat.line is None else seat

    def wanted(self, key: str) -> bool:
        """Tell whether anybody here waits for this lock."""
        return key in self._lines

    def sit(self, who: Who, wake: Callable[[Any], None] | None) -> Seat:
        """Stand at the end of the line; `wake` is called when this one comes to lead it."""
        with self._mutex:
            line = self._lines.get(who[0])
            if line is None:
                line = self._lines[who[0]] = Line(who[0], self._left)
            seat = self._seats[who] = Seat(line, wake)
            line.seats.append(weakref.ref(seat))
            return seat

    def leads(self, seat: Seat) -> bool:
        """Tell whether this one asks the server for its line, also because the first one hangs."""
        self._give_up(seat)
        with self._mutex:
            line, now = seat.line, monotonic()
            if line is None:
                return True
            first = line.first()
            if first is not seat:
                if now < line.seen_at + self._hangs:
                    return False
                if first is not None:  # it may be using the connection just now
                    first.asked = False
                    first.place, line.place = line.place, None
                line.seats.remove(weakref.ref(seat))
                line.seats.appendleft(weakref.ref(seat))
            line.seen_at = now
            return True

    def place_of(self, seat: Seat) -> Any:
        """Return what waits on the server for the line that this one leads."""
        with self._mutex:
            line = seat.line
            return line.place if line is not None and line.first() is seat else None

    def wait_at(self, seat: Seat, place: Any) -> None:
        """Let the line wait at `place`, unless another one has come to lead it."""
        with self._mutex:
            line = seat.line
            if line is not None and line.place is None and line.first() is seat:
                line.place = place
            else:
                seat.place = place

    def wait_no_more(self, seat: Seat, place: Any) -> None:
        """Forget `place`: it serves a claim, or has ended."""
        with self._mutex:
            if seat.place is place:
                seat.place = None
            elif seat.line is not None and seat.line.place is place:
                seat.line.place = None

    def rise(self, seat: Seat) -> None:
        """Leave the line, with a lock or without."""
        self._give_up(seat)
        with self._mutex:
            line, seat.line = seat.line, None
            if line is None:
                return
            line.seats.remove(weakref.ref(seat))
        self._move(line)

    def tidy(self) -> None:
        """End the lines whose waiters were dropped, and call who comes to lead one."""
        for line in list(self._lines.values()):
            self._move(line)

    def places(self) -> list[Any]:
        """Return what waits on the server."""
        return [line.place for line in list(self._lines.values()) if line.place is not None]

    def _give_up(self, seat: Seat) -> None:
        place, seat.place = seat.place, None
        if place is not None:
            self._emptied(place)

    def _left(self) -> None:
        """Have it tidied up soon; in a finalizer."""
        if self._pid == os.getpid():
            self._worker.put(None)

    def _move(self, line: Line) -> None:
        place = None
        with self._mutex:
            first = line.first()
            if first is None:
                place, line.place = line.place, None
                if self._lines.get(line.key) is line:
                    del self._lines[line.key]
            elif not first.asked:
                line.seen_at = monotonic()
        if place is not None:
            self._emptied(place)
        if first is not None and not first.asked and first.wake is not None:
            try:
                first.wake(None)
            except RuntimeError:  # its event loop is closed
                self.rise(first)
