"""Statements on a connection of our own, without the driver's cursor: each is sent, then awaited.

The answer is awaited with poll(): so Ctrl-C or another thread can end the wait, a frozen server is
given up, and many connections can be asked at once. A driver's cursor also takes about as long as
the server does: it makes 20 calls for a statement in MySQLdb, and 45 in psycopg.
"""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from functools import lru_cache
from typing import Any

from ...primitives.polling import POLLIN, new_poll
from ...primitives.timing import monotonic

# Seconds to wait for the server's answer to a statement that needs no wait.
ANSWER_WAIT = 5

# How often a wait on the server notes that nothing has come yet, in seconds.
LOOK = 1.0

Rows = list[tuple[Any, ...]]
Value = str | int | float | None
Values = tuple[Value, ...]


class ServerError(Exception):
    """The server refused a statement, or the session is gone; `code` is the server's."""

    def __init__(self, code: Any, message: str) -> None:
        super().__init__(message.strip())  # those of PostgreSQL end with a line break
        self.code = code


class ReplyTimeout(Exception):
    """The server did not answer in time."""


class Link:
    """One connection; one statement at a time, by one thread at a time."""

    rowcount = 0  # of the last change
    asked_at = 0.0  # when the last statement was sent that was answered
    awaiting_reply = False

    def connect(self, connection: Any) -> None:
        """Use the `connection` of a driver."""
        self.connection = connection
        self.fd = int(connection.fileno())
        self._poll = new_poll()
        self._poll.register(self.fd, POLLIN)

    def send(self, statement: str, values: Any = None) -> None:
        """Send one statement, its values apart, without waiting; raise ServerError."""
        raise NotImplementedError

    def receive(self) -> Rows:
        """Return the whole answer, which has begun to arrive, or raise it as ServerError.

        When it was read to its end no reply is expected.
        """
        raise NotImplementedError

    def heard(self, seconds: float) -> bool:
        """Wait until there is something to read, which may be the end of the session."""
        return bool(self._poll.poll(seconds * 1000))

    def ask(self, statement: str, *values: Value) -> Rows:
        """Return the rows that answer `statement`; raise ServerError or ReplyTimeout."""
        return self.wait(statement, ANSWER_WAIT, values)[0]

    def wait(self, statement: str, seconds: float, values: Any = None) -> tuple[Rows, float]:
        """Like `ask`, for a statement that waits; also return a time before the answer came."""
        if self.awaiting_reply:
            if not self.heard(ANSWER_WAIT):
                raise ReplyTimeout("still no answer")
            self.receive()  # to an earlier statement
        asked_at = began = monotonic()
        self.send(statement, values)
        end = began + seconds
        while not self._poll.poll(1000 * min(LOOK, max(0.0, end - began))):
            if began >= end:
                raise ReplyTimeout(f"no answer within {seconds:g} s")
            began = monotonic()
        self.asked_at = asked_at
        return self.receive(), began

    def hang_up(self) -> None:
        """End the session from another thread than the one that waits on it."""
        with suppress(OSError), socket.socket(fileno=socket.dup(self.fd)) as end:
            end.shutdown(socket.SHUT_RDWR)


# How to write a number, by its type: MySQL reads what repr() returns.
WRITE: dict[type, Any] = dict.fromkeys((int, float), b"%a".__mod__)

# After these errors the session has ended: those of the client have such numbers, and the server
# says that it shuts down, or that somebody has killed the session, or that it was idle for long.
ENDED = frozenset({*range(2000, 3000), 1053, 1927, 3169, 4031})


class MySQLLink(Link):
    """MySQL or MariaDB, by mysqlclient. Values are %s, or %(named)s."""

    lastrowid = 0  # LAST_INSERT_ID(...) of the last change

    def send(self, statement: str, values: Any = None) -> None:
        connection = self.connection
        try:
            if type(values) is dict:
                query, names = positional(statement)
                write = {**WRITE, str: connection.string_literal}  # literal() takes a while
                literals = []
                for value in map(values.__getitem__, names):
                    literals.append(write.get(type(value), connection.literal)(value))
                query %= tuple(literals)
            else:
                query = statement.encode()
                if values:
                    query %= tuple(map(connection.literal, values))
            self.awaiting_reply = True
            connection.send_query(query)
        except connection.Error as error:
            raise _server_error(error) from error

    def receive(self) -> Rows:
        connection = self.connection
        try:
            connection.read_query_result()
            result = connection.store_result()
        except connection.Error as error:
            trouble = _server_error(error)
            self.awaiting_reply = trouble.code is None or trouble.code in ENDED
            raise trouble from error
        self.awaiting_reply = False
        if result is not None:
            return list(result.fetch_row(0))
        self.rowcount, self.lastrowid = connection.affected_rows(), connection.insert_id()
        return []


@lru_cache(maxsize=1024)
def positional(statement: str) -> tuple[bytes, list[str]]:
    """Return the statement with %b for each %(name)s, and the names."""
    parts = re.split(r"%\((\w+)\)s", statement)
    return "%b".join(parts[::2]).encode(), parts[1::2]


def _server_error(error: Exception) -> ServerError:
    return ServerError(error.args[0] if error.args else None, str(error))


# How to read the text of a value, by the number of its type: boolean, bigint, smallint, integer,
# and oid, the numbers of the catalogs.
READ: dict[int, Any] = {16: {b"t": True, b"f": False}.get, **dict.fromkeys((20, 21, 23, 26), int)}


class Name(str):
    """Instead of values: the server keeps the statement under this name.

    By the protocol, not by PREPARE, whose names Pgpool and PgBouncer do not know in the protocol.
    """


class PostgreSQLLink(Link):
    """PostgreSQL, by libpq as psycopg 3 wraps it. Values are $1 and so on, or %(named)s.

    With names a statement is prepared, if it `prepares`: it takes a quarter less, but that is not
    possible where sessions are lent by the transaction.
    """

    prepares = True

    def connect(self, connection: Any) -> None:
        super().connect(connection)
        self._pq = connection.pgconn
        self.prepared: dict[str, str] = {}  # name on the server by statement

    def prepare_once(self, statement: str) -> str:
        """Have `statement` parsed once for all; return its name on the server."""
        name = f"distlock_{len(self.prepared)}"
        self.wait(statement, ANSWER_WAIT, Name(name))
        self.prepared[statement] = name
        return name

    def send(self, statement: str, values: Any = None) -> None:
        kind = type(values)
        if kind is dict:
            statement, names = numbered(statement)
            if self.prepares and statement not in self.prepared:
                self.prepare_once(statement)
            values = map(values.__getitem__, names)
        texts = []
        for value in values or ():
            texts.append(None if value is None else str(value).encode())
        self.awaiting_reply = True
        try:
            if kind is Name:
                self._pq.send_prepare(values.encode(), statement.encode())
            elif (name := self.prepared.get(statement)) is not None:
                self._pq.send_query_prepared(name.encode(), texts)
            elif values is None:  # faster, but may be several statements
                self._pq.send_query(statement.encode())
            else:
                self._pq.send_query_params(statement.encode(), texts)
            while self._pq.flush():  # what does not fit into the socket's buffer
                self.heard(0.01)
        except self.connection.Error as error:
            raise ServerError(None, str(error)) from error

    def receive(self) -> Rows:
        rows: Rows = []
        refused = None
        try:
            self._pq.consume_input()
            while True:
                while self._pq.is_busy():
                    if not self.heard(ANSWER_WAIT):
                        raise ServerError(None, "half an answer")
                    self._pq.consume_input()
                if (result := self._pq.get_result()) is None:
                    break
                if message := result.error_message:
                    code = result.error_field(ord("C")) or b""
                    refused = code.decode(), message.decode()
                self.rowcount = result.command_tuples or 0
                columns = range(result.nfields)
                for row in range(result.ntuples):
                    cells = []
                    for column in columns:
                        text = result.get_value(row, column)
                        read = READ.get(result.ftype(column), bytes.decode)
                        cells.append(None if text is None else read(text))
                    rows.append(tuple(cells))
        except self.connection.Error as error:
            raise ServerError(None, str(error)) from error
        self.awaiting_reply = False
        if refused:
            raise ServerError(*refused)
        return rows


@lru_cache(maxsize=1024)
def numbered(statement: str) -> tuple[str, list[str]]:
    """Return the statement with $1 for the first %(name)s and so on, and the names."""
    names: list[str] = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", statement)))
    return re.sub(r"%\((\w+)\)s", lambda m: f"${names.index(m[1]) + 1}", statement), names
