"""Wait for the answers of PostgreSQL with a time limit, in the place of psycopg's own wait()."""

from __future__ import annotations

import select
from contextlib import suppress
from typing import Any

from ....errors import BackendError
from ....primitives.timing import monotonic
from .base import ANSWER_WAIT, ROW_WAIT


def wait_for_answer(connection: Any, steps: Any, *args: Any, **kwargs: Any) -> Any:
    """Like psycopg's Connection.wait(), with a time limit for a server that is frozen."""
    try:
        return _answer(connection, steps)
    except BackendError:
        raise
    except BaseException:  # of a signal handler
        _outlast(connection.pgconn)
        raise


def _outlast(pgconn: Any) -> None:
    """Wait for the end of the statement under way: no release may overtake it."""
    end, poll = monotonic() + 2 * ROW_WAIT, select.poll()
    with suppress(Exception):  # the connection is closed next
        poll.register(pgconn.socket, select.POLLIN)
        while pgconn.is_busy() and poll.poll(max(0.0, end - monotonic()) * 1000):
            pgconn.consume_input()


def _answer(connection: Any, steps: Any) -> Any:
    """Run `steps`, which yields what to wait for on the socket: 1 to read, 2 to write, or both."""
    end = monotonic() + ANSWER_WAIT
    poll = select.poll()
    try:
        wanted = next(steps)
        while True:
            mask = (select.POLLIN if wanted & 1 else 0) | (select.POLLOUT if wanted & 2 else 0)
            poll.register(connection.pgconn.socket, mask)
            found = poll.poll(max(0.0, end - monotonic()) * 1000)
            if not found:
                raise BackendError(f"PostgreSQL did not answer within {ANSWER_WAIT} s")
            # An end of the connection is found out by reading it.
            ready = (1 if found[0][1] & ~select.POLLOUT else 0) | (
                found[0][1] & select.POLLOUT
            ) // 2
            wanted = steps.send(ready & wanted or wanted)
    except StopIteration as stop:
        return stop.value
