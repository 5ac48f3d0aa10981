"""Connections to the lock table's database: lent per call, or kept to wait in a queue.

Some stay with a claim: the holder's keeps the *queue lock* of its name, and another one waits for
it, for all waiters of that lock in this process. How the server so wakes one after the other:
docs/explanation/how-it-works.md#the-queue-of-the-lock-table.
"""

from __future__ import annotations

import os
import re
import weakref
from collections import deque
from typing import Any

from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.functional import cached_property

from ...errors import BackendError
from ...primitives.polling import readable
from ...primitives.timing import monotonic
from ..base import ConnectionLost
from ..sessions.link import ReplyTimeout, ServerError
from ..sessions.pool import Contended, Pool, PooledSession, inherited
from ..sessions.queues import ClaimKey, WaiterQueues
from . import sql
from .sql.base import ROW_WAIT

# How many connections a process may keep for claims, unless the settings say otherwise.
QUEUE = 8
# Seconds without a queue after the server refused a connection.
POLLS_FOR = 60.0
# A connection that was idle for so many seconds is closed after the next request.
IDLE = 60.0
# One that was idle for so many seconds is checked before a request: the server may have closed it.
RECENT = 0.5

# SQLite, MySQL and MariaDB, PostgreSQL.
NO_TABLE = re.compile("no such table|Table .* doesn't exist|relation .* does not exist")


class Session(PooledSession):
    """One autocommitting connection, and a cursor: Django's costs twice what a driver's does."""

    def __init__(self, wrapper: BaseDatabaseWrapper, epoch: int, dialect: sql.Dialect) -> None:
        """Connect; raises Django's database errors."""
        self.dialect = dialect
        self.pid = os.getpid()
        super().__init__(wrapper, epoch)

    def adapt(self, wrapper: Any) -> None:
        self.dialect.adapt(wrapper)

    def prepare(self) -> None:
        try:
            with self.wrapper.wrap_database_errors:
                self.cursor: Any = self.dialect.begin(self.wrapper)
        except (ServerError, ReplyTimeout) as error:
            raise OperationalError(str(error)) from error

    @cached_property
    def can_queue(self) -> bool:
        """Whether the server can queue the waiters of this session."""
        return self.dialect.can_queue(self.wrapper, self.cursor)

    def failed(self, error: BaseException) -> type[BackendError] | None:
        """Close it after any error; return the BackendError to raise, or None to raise `error`.

        Also after a KeyboardInterrupt: the connection's transaction may still hold the row.
        """
        database = self.wrapper.Database
        lost = getattr(self.cursor, "awaiting_reply", False)
        try:
            if isinstance(error, ReplyTimeout):
                return BackendError
            if not isinstance(error, (ServerError, database.Error, DatabaseError)):
                if lost:  # Interrupted: no release may overtake the statement that is under way.
                    self.cursor.heard(2 * ROW_WAIT)
                return None
            if self.dialect.contended(error):
                return Contended
            unsure = database.OperationalError, database.InterfaceError, InterfaceError
            return ConnectionLost if lost or isinstance(error, unsure) else BackendError
        finally:
            self.close()


class QueuedConnection:
    """A connection kept for a claim, or for the waiters of a lock; dropping this closes it."""

    # Class defaults: an interrupt may leave an object whose __init__ has not set them.
    session: Session | None = None
    wake_fd: int | None = None  # what a waiter waits on, as long as the server waits
    since = 0.0
    slots: deque[None] | None = None

    def __init__(self, slots: deque[None]) -> None:
        """Take one of the `slots`. If none is free, `self.slots` is None: keep no connection."""
        self.slots = slots
        try:
            slots.pop()  # an interrupt after this gives it back
        except IndexError:
            self.slots = None

    def keep(self, session: Session) -> None:
        """Let this connection stay."""
        session.kept = session.parked = True
        self.session = session
        self.since = monotonic()

    @property
    def fresh(self) -> bool:
        """Whether a request may use it: after a long idle time it may have been cut off unseen."""
        if self.session is None or monotonic() - self.since >= IDLE:
            return False
        try:
            return not readable(self.session.wrapper.connection, 0)  # else its end has come
        except Exception:
            return False  # we have closed it: an interrupt came just as it was kept

    def called(self, within: float = 0.0) -> bool:
        """Return whether the server has answered."""
        return self.wake_fd is None or readable(self.wake_fd, within)

    def detach(self) -> Session | None:
        """Leave the connection to others: it no longer has or wants the queue lock."""
        session, self.session = self.session, None
        if session is not None:
            session.parked = False
        slots, self.slots = self.slots, None
        if slots is not None:
            slots.append(None)
        return session

    def give_up(self) -> None:
        """Close it: that calls the next one, whatever the state of the connection."""
        session = self.detach()
        if session is not None:
            session.close()

    def __del__(self) -> None:
        # No connection is kept; or the interpreter ends, and closes it anyway.
        if self.slots is None or inherited is None:
            return
        if self.session is None or self.session.pid == os.getpid():
            self.give_up()
        else:
            inherited.append(self.session)


class Sessions(Pool[Session]):
    """The connections of one process to one database, some of them kept to queue.

    Drivers allow threads to use one in turn, but no two at the same time (mysqlclient 2.3 raises
    then).
    """

    def __init__(self, using: str, queue: int) -> None:
        """Keep up to `queue` of them for claims, and use others for requests."""
        self._queue = queue
        super().__init__(using)

    @cached_property
    def dialect(self) -> sql.Dialect:
        """The statements, filled in once for all connections of this process."""
        connection = connections[self.using]
        return sql.DIALECTS.get(connection.vendor, sql.Generic)(connection)

    def error(self, why: object, kind: type[BackendError] = BackendError) -> BackendError:
        text = str(why)
        if NO_TABLE.search(text):  # PostgreSQL quotes the statement below
            hint = f"run: manage.py migrate distlock_app --database={self.using}"
            text = f"{text.splitlines()[0]} ({hint})"
        return kind(f"lock table on {self.using!r}: {text}")

    def free_queue(self, claim_key: ClaimKey) -> None:
        """Release the queue lock, which calls the next waiter, whatever became of the row.

        By a statement: the server keeps the locks of a closed connection until it notices the end.
        """
        queued = self.queued.pop(claim_key, None)
        if queued is not None and queued.session is not None:
            try:
                self.attempt(queued.session, self.unlock, queued, queued.session)
            except ConnectionLost:  # and the queue lock with it
                queued.give_up()

    def unlock(self, queued: QueuedConnection, session: Session) -> None:
        """Release the queue lock on the connection that has it, or has just been granted it."""
        if queued.wake_fd is not None:  # the answer to line_up() comes before that of unlock()
            queued.wake_fd = None
            session.dialect.called(session.cursor)
        session.dialect.unlock(session.cursor)
        queued.detach()

    def leave_queue(self, queued: QueuedConnection) -> None:
        """Leave the server's queue."""
        waiting = queued.session
        try:
            # Otherwise the server would call a waiter that has gone. More than once, because
            # `leave` may arrive before the request that it is to end.
            for _ in range(3):
                if waiting is None or queued.called():
                    break
                self.ask(lambda s: s.dialect.leave(waiting.cursor, s.cursor))
                queued.called(within=0.3)
            if waiting is not None and queued.called():
                self.attempt(waiting, self.unlock, queued, waiting)
        except Exception:
            pass  # The server ends the wait before long.
        finally:
            queued.give_up()

    def holding(self, key: str) -> list[ClaimKey]:
        """Return the claims on `key` that hold the queue lock here."""
        return [k for k in list(self.queued) if k[0] == key]

    def close(self) -> None:
        """Close also those that stay, but not those of waiters, which go when the wait ends."""
        self.close_idle()
        for claim_key in list(self.queued):
            self.close_kept(claim_key)

    def close_kept(self, claim_key: ClaimKey) -> None:
        """Close the connection that stays with a claim, if one does: that calls the next one."""
        if queued := self.queued.pop(claim_key, None):
            queued.give_up()

    def _begin(self) -> None:
        super()._begin()
        self.__dict__.pop("dialect", None)  # a fork of a test runner has a database of its own
        # The connections kept for grants, by key and owner. Whoever takes one out of here is the
        # only one to use it.
        self.queued = weakref.WeakValueDictionary[ClaimKey, QueuedConnection]()
        self.slots: deque[None] = deque([None] * self._queue)  # for connections that are kept
        self.polls_until = 0.0  # by monotonic(): no connection is kept for a claim until then
        leave = weakref.WeakMethod(self.leave_queue)
        self.queues = WaiterQueues(lambda queued: (leave() or QueuedConnection.give_up)(queued))

    def _connect(self) -> Session:
        try:
            return super()._connect()
        except DatabaseError:
            if not (self.queued or self.queues.connections()):  # none is kept that could be closed
                raise
        # The server may have no more connections to give: renewals come before the queue.
        self.polls_until = monotonic() + POLLS_FOR
        self.close()
        return super()._connect()

    def _new(self, wrapper: BaseDatabaseWrapper) -> Session:
        if not self._queue:  # perhaps behind a pooler that lends sessions by the transaction
            wrapper.settings_dict["DISABLE_SERVER_SIDE_CURSORS"] = True
        return Session(wrapper, self._epoch, self.dialect)

    def _tidy(self) -> None:
        try:
            while self._idle[0].used_at < self._idle[-1].used_at - IDLE:
                self._idle.popleft().close()
        except IndexError:
            pass  # Another thread has taken it.
