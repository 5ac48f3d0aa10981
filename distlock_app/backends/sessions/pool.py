"""Database sessions of our own, kept while they are in demand."""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from importlib import import_module
from typing import Any, Generic, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, OperationalError, connections
from django.db import Error as DatabaseError
from django.db.backends.base.base import NO_DB_ALIAS, BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from ...errors import BackendError
from ...primitives.forks import in_child
from ...primitives.threads import in_no_event_loop
from ...primitives.timing import monotonic
from ..base import ConnectionLost
from .link import ANSWER_WAIT, ReplyTimeout, ServerError
from .queues import ASKING, FairSemaphore

FOUND_ROWS = 2  # a flag of MySQL's protocol

# After SET: the server's limit for any statement would end a wait. The comments with M! are for
# MariaDB alone, those with a version from 5.7 on for MySQL alone.
LONG_WAITS = "/*M! , max_statement_time = 0 */ /*!50708 , max_execution_time = 0 */"

# What the sessions of MySQL or MariaDB do; as bytes, for what they say may be no text (a blob).
# From 8.0.22 on MySQL has them elsewhere, too: the first table is an error there if one of them
# says what is not utf8mb3.
PROCESSES = """(
        SELECT id, host, state, CAST(info AS BINARY) AS info
          FROM information_schema.processlist
        /*!80022 WHERE NOT @@performance_schema UNION ALL
        SELECT id, host, state, CAST(info AS BINARY) FROM performance_schema.processlist */
       ) AS process"""

# Packages whose wrappers take connections from one pool of the alias, as large as Django needs it,
# and close() gives them back to it, as they are; and their options beside those of the driver.
POOLING = ("dj_db_conn_pool.", "django_db_geventpool.")
POOL_OPTIONS = ("MAX_CONNS", "REUSE_CONNS")

P = TypeVar("P", bound="PooledSession")
T = TypeVar("T")


class Contended(BackendError):
    """Others were in the way for too long; trying again may help."""


def database_of(location: Any) -> str:
    """Return the alias of DATABASES that LOCATION names; raises ImproperlyConfigured."""
    if location is None:
        return DEFAULT_DB_ALIAS
    if location not in list(connections):
        # Not what it says: that may be a URL with a password.
        raise ImproperlyConfigured(
            f"LOCATION is not an alias of DATABASES (it has: {', '.join(connections)})"
        )
    return str(location)


def copy_of(using: str) -> Any:
    """Return a copy of an alias's wrapper, for a connection of our own: out of no pool."""
    wrapper: Any = connections[using]
    kinds = type(wrapper).__mro__
    pooling = [at for at, kind in enumerate(kinds) if kind.__module__.startswith(POOLING)]
    if not pooling:
        return wrapper.copy()
    settings = deepcopy(wrapper.settings_dict)
    for option in POOL_OPTIONS:
        settings["OPTIONS"].pop(option, None)
    return kinds[pooling[-1] + 1](settings, using)


def adapt_to_mysql(wrapper: Any) -> None:
    """Change our copy of an alias of MySQL or MariaDB for connections of our own."""
    if wrapper.Database.__name__ == "mysql.connector":  # which has other options
        raise ImproperlyConfigured(
            f"locks on {wrapper.alias!r} need mysqlclient or PyMySQL, not MySQL Connector/Python"
        )
    options = wrapper.settings_dict["OPTIONS"]
    options["charset"] = "utf8mb4"
    options.pop("collation", None)  # it may be of another charset
    # Flags of the alias replace Django's. Without this one a row that need not change is not found.
    options["client_flag"] = options.get("client_flag", 0) | FOUND_ROWS
    for wait in ("connect_timeout", "read_timeout", "write_timeout"):
        options.setdefault(wait, ANSWER_WAIT)


def adapt_to_postgresql(wrapper: Any) -> None:
    """Change our copy of an alias of PostgreSQL for connections of our own."""
    # Django would set the zone, and wait for a pooler that lets it in without a server for it.
    wrapper.timezone_name = None
    options = wrapper.settings_dict["OPTIONS"]
    options.pop("pool", None)
    options.pop("isolation_level", None)
    options.setdefault("connect_timeout", ANSWER_WAIT)
    options.setdefault("tcp_user_timeout", ANSWER_WAIT * 1000)


class PooledSession:
    """A database connection of our own, in autocommit mode."""

    among: set[Any] = set()  # the open sessions of its pool

    def __init__(self, wrapper: BaseDatabaseWrapper, epoch: int) -> None:
        """Connect; raises Django's database errors, and those of `prepare`."""
        self.wrapper: Any = wrapper
        self.epoch = epoch
        self.kept = False  # it has been idle, and the server may have closed it meanwhile
        self.used_at = 0.0
        self.parked = False  # it stays with a claim, and is not lent: see QueuedConnection
        wrapper.settings_dict["AUTOCOMMIT"] = True
        self.adapt(wrapper)
        try:
            wrapper.ensure_connection()  # not connect(): this is what pytest-django guards
            self.prepare()
        except BaseException as error:
            self.close()
            if type(error) is OSError:  # psycopg's, if the process has no more files to open
                raise OperationalError(str(error)) from error
            raise

    def adapt(self, wrapper: Any) -> None:
        """Change our copy of the alias before it connects."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Prepare the new connection."""
        raise NotImplementedError

    def failed(self, error: BaseException) -> type[BackendError] | None:
        """Close it after any error; return the BackendError to raise, or None to raise `error`."""
        self.close()
        return ConnectionLost if isinstance(error, (ServerError, ReplyTimeout)) else None

    def close(self) -> None:
        """Close it whatever its state; the server frees what it holds, and undoes the rest."""
        self.among.discard(self)
        self.epoch = -1  # of no pool
        with suppress(Exception):  # closed before, by the server or by us
            self.wrapper.connection.close()


class Pool(Generic[P]):
    """The sessions of one process on one database.

    They are lent, not kept per thread: a thread that waits, that holds or that has died owns none,
    and close() reaches all. A signal handler or a finalizer that locks in the middle of our own
    call gets another one.
    """

    NOUN = "connections"
    TIDY_ABOVE = 1  # when more than so many idle, it looks for how long

    def __init__(self, using: str) -> None:
        self.using = using
        # Else the first connection imports them: a fork meanwhile would leave a child with half.
        connections[using]
        if "MySQLdb" in sys.modules:
            import_module("MySQLdb.connections")
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

    def ask(
        self,
        work: Callable[[P], T],
        *,
        again: Callable[[P], T] | None = None,
        within: float | None = None,
        urgent: bool = False,
    ) -> T:
        """Do `work` on one of them, and once more if an idle one had died.

        The server may have closed it (restart, KILL, wait_timeout). Whatever became of the
        first attempt, it is harmless: every verb is checked by owner. Wait for a connection
        `within` so many seconds: `urgent` requests before the others.
        """
        if not self.semaphore.acquire(min(within or ANSWER_WAIT, ANSWER_WAIT), urgent=urgent):
            raise self.busy()
        try:
            session = self.lend()
            try:
                return self.attempt(session, work, session)
            except ConnectionLost:
                if not session.kept:
                    raise
            self.close_idle()
            session = self.lend()
            return self.attempt(session, again or work, session)
        except DatabaseError as error:  # by connecting
            raise self.error(error) from error
        finally:
            self.semaphore.release()

    def attempt(self, session: P, work: Callable[..., T], *args: Any) -> T:
        """Do `work` on this connection; close it if that raises, else give it back to be lent."""
        try:
            answer = work(*args)
        except BaseException as error:
            if (kind := session.failed(error)) is None:
                raise
            raise self.error(error, kind) from error
        if not session.parked:
            self.give_back(session)
        return answer

    def busy(self) -> BackendError:
        """Return the error that says that no turn to ask came in time."""
        return self.error(f"all {self.NOUN} of this process are busy", Contended)

    def error(self, why: object, kind: type[BackendError] = BackendError) -> BackendError:
        """Return the error that says what went wrong, and where."""
        raise NotImplementedError

    def give_back(self, session: P) -> None:
        """Keep a session on which nothing went wrong and that holds nothing."""
        if session.epoch != self._epoch:
            session.close()
            return
        session.used_at = monotonic()
        self._idle.append(session)
        if len(self._idle) > self._tidy_above:
            self._tidy()

    def close(self) -> None:
        """Close what nobody uses, and what is lent as soon as it comes back."""
        self.close_idle()

    def close_idle(self) -> None:
        """Close what is idle now, and what is lent as soon as it comes back."""
        self._epoch += 1
        with suppress(IndexError):  # none is left
            while True:
                self._idle.popleft().close()

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
        self._tidy_above: float = self.TIDY_ABOVE
        self.semaphore = FairSemaphore(ASKING)
        weakref.finalize(self, _close_all, self._closed_at_the_end(), os.getpid())

    def _closed_at_the_end(self) -> Iterable[P]:
        return self._idle  # no thread that still runs uses these

    def _connect(self) -> P:
        ours = copy_of(self.using)
        ours.inc_thread_sharing()
        session = in_no_event_loop(self._new)(ours)
        session.among = self._open
        self._open.add(session)
        return session

    def _new(self, wrapper: BaseDatabaseWrapper) -> P:
        raise NotImplementedError

    def _tidy(self) -> None:
        """See to it that what idles for long is closed."""
        raise NotImplementedError

    def _make_way(self, connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
        # Django makes and drops test databases from a connection to none, and PostgreSQL
        # drops no database with a connection to it.
        if connection.alias == NO_DB_ALIAS:
            self.close()


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
in_child(_forget_all)
