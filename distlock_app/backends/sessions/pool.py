"""Database sessions of our own: kept while they are in demand, and asked.

A question is sent, and its answer is waited for with poll(): so a wait on the server can be
interrupted (Ctrl-C) or ended by another thread, and many sessions can be asked at once.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from time import sleep
from typing import Any, Generic, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.base.base import NO_DB_ALIAS, BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from ...claims import Claim
from ...errors import BackendError
from ...primitives.timing import monotonic

# Seconds to wait for the server's answer to a question that needs no wait.
ANSWER_WAIT = 5

# The server ends a session that asked nothing for the ttl of its lock and so much longer: a
# client that is cut off or stopped cannot keep a lock forever. Beyond the ttl, because the answer
# that brings a lock after a wait may have been under way.
GRACE = 2.0

# Sessions that were idle for so long are closed, before the server does it for their ttl.
IDLE = 15.0

# After SET: the server's limit for any statement would end a wait. The comments with M! are for
# MariaDB alone, those with a version from 5.7 on for MySQL alone.
LONG_WAITS = "/*M! , max_statement_time = 0 */ /*!50708 , max_execution_time = 0 */"

# How often a wait on the server notes that nothing has come yet, in seconds.
LOOK = 1.0

P = TypeVar("P", bound="PooledSession")
S = TypeVar("S", bound="ServerSession")

Rows = list[tuple[Any, ...]]
Value = str | int | float
Values = tuple[Value, ...]


def database_of(alias: str, location: Any) -> str:
    """Return the alias of DATABASES that LOCATION names; raises ImproperlyConfigured."""
    if location is None:
        return DEFAULT_DB_ALIAS
    if location not in list(connections):
        # Not what it says: that may be a URL with a password.
        raise ImproperlyConfigured(
            f"DISTLOCK[{alias!r}]: LOCATION is not an alias of DATABASES "
            f"(it has: {', '.join(connections)})"
        )
    return str(location)


class ConnectionLost(BackendError):
    """The connection, or the server, ended before the answer came."""


class ServerError(Exception):
    """The server refused a question, or the session is gone; `code` is the server's."""

    def __init__(self, code: Any, message: str) -> None:
        super().__init__(message)
        self.code = code


class ReplyTimeout(Exception):
    """The server did not answer in time."""


class PooledSession:
    """A database connection of our own, in autocommit mode."""

    among: set[Any] = set()  # what is open of its pool

    def __init__(self, wrapper: BaseDatabaseWrapper, epoch: int) -> None:
        """Connect; raises Django's database errors, and those of `prepare`."""
        self.wrapper: Any = wrapper
        self.epoch = epoch
        self.kept = False  # it has been idle, and the server may have closed it meanwhile
        self.used_at = 0.0
        wrapper.settings_dict["AUTOCOMMIT"] = True
        self.adapt(wrapper.settings_dict)
        wrapper.ensure_connection()  # not connect(): this is what pytest-django guards
        try:
            self.prepare()
        except BaseException:
            self.close()
            raise

    def adapt(self, settings: dict[str, Any]) -> None:
        """Change our copy of the alias's settings before it connects."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Prepare the new connection."""
        raise NotImplementedError

    def close(self) -> None:
        """Close it whatever its state; the server frees what it holds, and undoes the rest."""
        self.among.discard(self)
        with suppress(Exception):  # closed before, by the server or by us
            self.wrapper.connection.close()


class ServerSession(PooledSession):
    """One session; one question at a time, by the thread that has its `mutex` or was lent it."""

    def __init__(self, wrapper: BaseDatabaseWrapper, epoch: int) -> None:
        """Connect; raises Django's database errors, ServerError and ReplyTimeout."""
        self.mutex = threading.Lock()
        self.ttl = 0.0  # the server keeps the session so long without a question, and GRACE
        self.asked_at = 0.0  # when the last question was asked that was answered
        self.awaiting_reply = False
        self.claim: Claim | None = None  # what it holds, or waits for
        self.fence: int | None = None
        self.waits = False
        super().__init__(wrapper, epoch)

    def prepare(self) -> None:
        self.fd = self.descriptor()
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self.number = self.begin()  # the session's, as the server counts

    def descriptor(self) -> int:
        """Return the number of the socket's file."""
        raise NotImplementedError

    def begin(self) -> int:
        """Prepare the new session; return its number on the server."""
        raise NotImplementedError

    def send(self, question: str, values: Values) -> None:
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

    def ask(self, question: str, *values: Value) -> Rows:
        """Return the rows that answer `question`; raise ServerError or ReplyTimeout."""
        return self.wait(question, ANSWER_WAIT, *values)[0]

    def wait(self, question: str, seconds: float, *values: Value) -> tuple[Rows, float]:
        """Like `ask`, for a statement that waits; also return a time before the answer came."""
        if self.awaiting_reply:
            self._discard_reply()
        asked_at = began = monotonic()
        self.awaiting_reply = True
        self.send(question, values)
        end = began + seconds
        while not self._poll.poll(1000 * min(LOOK, max(0.0, end - began))):
            if began >= end:
                raise ReplyTimeout(f"no answer within {seconds:g} s")
            began = monotonic()
        rows = self.receive()
        self.asked_at = asked_at
        return rows, began

    def begin_to_ask(self, question: str, *values: Value) -> None:
        """Send `question`, unless an earlier one is still unanswered (ReplyTimeout)."""
        if self.awaiting_reply:
            if not self.heard(0):
                raise ReplyTimeout("still no answer")
            self._discard_reply()  # it comes too late to be worth anything
        self.awaiting_reply = True
        self.send(question, values)

    def finish_asking(self, asked_at: float) -> Rows:
        """Return the answer, which has begun to arrive."""
        rows = self.receive()
        self.asked_at = asked_at
        return rows

    def _discard_reply(self) -> None:
        if not self.heard(ANSWER_WAIT):
            raise ReplyTimeout("still no answer")
        self.receive()

    def hang_up(self) -> None:
        """End the session from another thread than the one that waits on it."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.fd)) as end:
            end.shutdown(socket.SHUT_RDWR)


class Pool(Generic[P]):
    """The sessions of one process on one database.

    They are lent, not kept per thread: a thread that waits, that holds or that has died owns none,
    and close() reaches all. A signal handler or a finalizer that locks in the middle of our own
    call gets another one.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self._epoch = 0
        self._begin()
        _pools.add(self)
        connection_created.connect(self._make_way)

    def lend(self) -> P:
        """Return the session used last, or a new one; raise what its class raises."""
        try:
            session = self._idle.pop()
        except IndexError:
            return self._connect()
        session.kept = True
        return session

    def give_back(self, session: P) -> None:
        """Keep a session on which nothing went wrong and that holds nothing."""
        if session.epoch != self._epoch:
            session.close()
            return
        session.used_at = monotonic()
        self._idle.append(session)
        self._tidy()

    def close(self) -> None:
        """Close what nobody uses, and what is lent as soon as it comes back."""
        self.close_idle()

    def close_idle(self) -> None:
        """Close what is idle now, and what is lent as soon as it comes back."""
        self._epoch += 1
        while (session := self._take_oldest()) is not None:
            session.close()

    def forget(self) -> None:
        """Leave the sessions of a parent process alone: neither use nor close them."""
        inherited.append(self.__dict__.copy())
        for session in list(self._open):
            with suppress(Exception):  # closed before; or SQLite, which has no socket
                sever(session.wrapper.connection.fileno())
        self._epoch += 1
        self._begin()

    def _begin(self) -> None:
        self._idle: deque[P] = deque()
        self._open: set[P] = set()
        weakref.finalize(self, _close_all, self._closed_at_the_end(), os.getpid())

    def _closed_at_the_end(self) -> Iterable[P]:
        return self._idle  # no thread that still runs uses these

    def _connect(self) -> P:
        ours = connections[self.using].copy()
        ours.inc_thread_sharing()
        session = self._new(ours)
        session.among = self._open
        self._open.add(session)
        return session

    def _new(self, wrapper: BaseDatabaseWrapper) -> P:
        raise NotImplementedError

    def _tidy(self) -> None:
        """See to it that what idles for long is closed."""
        raise NotImplementedError

    def _take_oldest(self) -> P | None:
        try:
            return self._idle.popleft()
        except IndexError:
            return None

    def _make_way(self, connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
        # Django makes and drops test databases from a connection to none, and PostgreSQL
        # drops no database with a connection to it.
        if connection.alias == NO_DB_ALIAS:
            self.close()


class ServerSessions(Pool[S]):
    """Sessions that are closed by a thread, before the server does it for their ttl."""

    def __init__(self, using: str, kind: type[S]) -> None:
        self._kind = kind
        super().__init__(using)

    def give_back(self, session: S) -> None:
        session.claim = None
        super().give_back(session)

    def _begin(self) -> None:
        super()._begin()
        self._sweeper: threading.Thread | None = None

    def _closed_at_the_end(self) -> Iterable[S]:
        return self._open

    def _new(self, wrapper: BaseDatabaseWrapper) -> S:
        return self._kind(wrapper, self._epoch)

    def _tidy(self) -> None:
        if self._sweeper is None:
            self._sweeper = threading.Thread(target=self._sweep, name="distlock-idle", daemon=True)
            try:
                self._sweeper.start()
            except RuntimeError:  # no thread to be had: the server will close them
                self._sweeper = None

    def _sweep(self) -> None:
        while (session := self._take_oldest()) is not None:
            # Half of the ttl at most: by then the server has not closed it yet.
            left = session.used_at + min(IDLE, session.ttl / 2) - monotonic()
            if left <= 0:
                session.close()
            else:
                self._idle.appendleft(session)
                sleep(left)
        self._sweeper = None


def sever(fd: int) -> None:
    """Let go of the socket that a child of fork() inherited, without a word to the server.

    The driver will say goodbye when its object is freed, in the name of the parent, whose locks
    would end: let it say so to /dev/null. And an open copy of the socket would keep the locks of a
    parent that died.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)


def _close_all(sessions: Iterable[PooledSession], pid: int) -> None:
    """Say goodbye when a pool is dropped or the process ends, but not in the parent's name."""
    if pid == os.getpid():
        for session in list(sessions):
            session.close()


def _forget_all() -> None:
    for pool in list(_pools):
        pool.forget()


_pools: weakref.WeakSet[Pool[Any]] = weakref.WeakSet()
inherited: list[Any] = []  # of objects that a child of fork() must not free
os.register_at_fork(after_in_child=_forget_all)
