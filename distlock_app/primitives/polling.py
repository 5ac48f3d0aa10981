"""poll(): wait until sockets can be read; by select() on Windows, which has no poll()."""

from __future__ import annotations

import select
from time import sleep
from typing import Any

# As in poll.h: Windows has no names for them.
POLLIN, POLLOUT = 1, 4


def new_poll() -> Any:
    """Return an object of poll(), or one that does the same."""
    # Looked up here: gevent replaces it.
    return select.poll() if hasattr(select, "poll") else Selecting()


def readable(file: Any, seconds: float) -> bool:
    """Return whether something comes within so many seconds, be it the end of file."""
    poll = new_poll()  # of its own: several threads may look
    poll.register(file, POLLIN)
    return bool(poll.poll(seconds * 1000))


class Selecting:
    """What this package uses of `select.poll()`."""

    def __init__(self) -> None:
        self._events: dict[int, int] = {}  # by file descriptor

    def register(self, file: Any, events: int) -> None:
        self._events[file if isinstance(file, int) else file.fileno()] = events

    def unregister(self, file: int) -> None:
        del self._events[file]

    def poll(self, milliseconds: float | None) -> list[tuple[int, int]]:
        """Return the descriptors that are ready; all, if one was closed: its reader is told."""
        seconds = None if milliseconds is None else max(0.0, milliseconds / 1000)
        if not self._events:  # which select() refuses on Windows
            sleep(seconds or 0.0)
            return []
        readers = [fd for fd, events in self._events.items() if events & POLLIN]
        writers = [fd for fd, events in self._events.items() if events & POLLOUT]
        try:
            reads, writes, _ = select.select(readers, writers, [], seconds)
        except (OSError, ValueError):
            return list(self._events.items())
        return [(fd, POLLIN) for fd in reads] + [(fd, POLLOUT) for fd in writes]
