"""What the lock table uses of a driver's cursor, on a connection of our own."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...sessions import link


class LinkCursor(link.Link):
    """Executes one statement at a time; `fetchone` and `fetchall` are of the last."""

    def __init__(self, connection: Any) -> None:
        self.connect(connection)

    def execute(self, statement: str, asked: Any = ()) -> LinkCursor:
        self.send(statement, asked)
        if not self._poll.poll(link.ANSWER_WAIT * 1000):
            raise link.ReplyTimeout(f"no answer within {link.ANSWER_WAIT:g} s")
        rows = self.receive()
        self.fetchone = partial(next, iter(rows), None)  # no methods: each call counts
        self.fetchall: Any = partial(list, rows)
        return self


class MySQLCursor(LinkCursor, link.MySQLLink):
    """On a connection of mysqlclient."""


class PostgreSQLCursor(LinkCursor, link.PostgreSQLLink):
    """On a connection of psycopg 3."""

    pid = 0  # of the session, as the server says: what a pooler says to the driver is another one


class PooledCursor:
    """A cursor behind a pooler: each statement is in a transaction, which has the limits."""

    def __init__(self, cursor: Any, around: Any, begin: str) -> None:
        """Execute by `cursor`, and by another one, `around` that, how to `begin`."""
        self._cursor = cursor
        self._around = around
        self._begin = begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    @property
    def awaiting_reply(self) -> bool:
        both = self._cursor, self._around
        return any(getattr(cursor, "awaiting_reply", False) for cursor in both)

    def execute(self, statement: str, asked: Any = ()) -> Any:
        self._around.execute(self._begin, None)
        self._cursor.execute(statement, asked)
        self._around.execute("COMMIT", None)
        return self._cursor
