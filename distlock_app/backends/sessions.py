"""Connections of our own to one of Django's databases, each lent to one call at a time."""

from __future__ import annotations

import os
import weakref
from collections import deque
from time import monotonic
from typing import Any

from django.db import connections
from django.db.backends.base.base import NO_DB_ALIAS, BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from .sql import Dialect, dialect_for

# A connection that nobody needed for so many seconds is closed.
IDLE = 60.0

# What a child of fork() inherited. Dropping the last reference would close the connection:
# a goodbye to the server in the name of the parent, which still uses it.
_graveyard: list[Any] = []


class Session:
    """One autocommitting connection, and a cursor of its driver: Django's costs twice that."""

    __slots__ = ("cursor", "dialect", "epoch", "kept", "used_at", "wrapper")

    def __init__(self, wrapper: BaseDatabaseWrapper, dialect: Dialect, epoch: int) -> None:
        """Connect; raises Django's database errors."""
        self.wrapper: Any = wrapper
        self.dialect = dialect
        self.epoch = epoch
        self.kept = False  # it has been idle, and the server may have closed it meanwhile
        self.used_at = 0.0
        wrapper.settings_dict["AUTOCOMMIT"] = True
        dialect.adapt(wrapper.settings_dict)
        wrapper.ensure_connection()  # not connect(): this is what pytest-django guards
        try:
            with wrapper.wrap_database_errors:
                self.cursor = dialect.begin(wrapper)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection whatever its state; the server undoes what is unfinished."""
        try:
            self.wrapper.connection.close()
        except Exception:
            pass  # Closed before, by the server or by us: that is what was wanted.


class Sessions:
    """The connections of one process to one database.

    They are lent, not kept per thread: a thread that waits, that holds or that has died owns
    none, and close() reaches all. Drivers allow it as long as no two threads use one connection
    at the same time (mysqlclient 2.3 raises at that). A signal handler or a finalizer that locks
    in the middle of our own call gets another connection.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self._epoch = 0
        self.dialect: Dialect | None = None
        self._begin()
        connection_created.connect(self._make_way)

    def lend(self) -> Session:
        """Return the connection used last, or a new one; raises Django's database errors."""
        if self._pid != os.getpid():
            self.forget()
        try:
            session = self._idle.pop()
        except IndexError:
            pass
        else:
            session.kept = True
            return session
        return self._open()

    def give_back(self, session: Session) -> None:
        """Keep a connection on which nothing went wrong; close those that idle for long."""
        if session.epoch != self._epoch:
            session.close()
            return
        session.used_at = now = monotonic()
        self._idle.append(session)
        try:
            if self._idle[0].used_at < now - IDLE:
                self._idle.popleft().close()
        except IndexError:
            pass  # Another thread has taken it.

    def close(self) -> None:
        """Close what is idle now, and what is lent as soon as it comes back."""
        if self._pid != os.getpid():
            self.forget()
        self._epoch += 1
        while session := self._take_oldest():
            session.close()

    def forget(self) -> None:
        """Leave the connections of a parent process alone: neither use nor close them."""
        _graveyard.append(self._idle)
        self._epoch += 1
        self._begin()

    def _begin(self) -> None:
        self._idle: deque[Session] = deque()
        self._pid = os.getpid()
        weakref.finalize(self, _close_all, self._idle, self._pid)

    def _open(self) -> Session:
        ours = connections[self.using].copy()
        ours.inc_thread_sharing()
        if self.dialect is None:
            self.dialect = dialect_for(ours)
        return Session(ours, self.dialect, self._epoch)

    def _take_oldest(self) -> Session | None:
        try:
            return self._idle.popleft()
        except IndexError:
            return None

    def _make_way(self, connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
        # Django makes and drops test databases from a connection to none, and PostgreSQL
        # drops no database that somebody is connected to.
        if connection.alias == NO_DB_ALIAS:
            self.close()


def _close_all(idle: deque[Session], pid: int) -> None:
    """Say goodbye when a pool is dropped or the process ends, but not in the parent's name."""
    if pid != os.getpid():
        _graveyard.append(idle)
        return
    while idle:
        idle.pop().close()
