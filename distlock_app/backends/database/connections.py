"""Connections to the lock table's database: lent per call, or kept to wait in a queue.

Some stay with a claim: the holder's keeps the *queue lock* of its name, a lock of the server's
own (GET_LOCK, pg_advisory_lock), and another one waits for it, for all waiters of that lock in
this process (sessions/queues.py). So the server wakes exactly one process, first come first
served, and one that dies leaves the queue with its connection.

1. A claim that finds the row free takes the queue lock by the same statement: an empty queue
   costs nothing. One that finds it held, or just released while others wait, lines up.
2. A release frees the row, and the queue lock by the same statement: that calls the next one.
3. The one called takes the row. If the row is held all the same, it alone asks again and again.

The row alone decides. The queue lock may be lost, or held by a process that hangs: a waiter looks
at the row once a second too, and a row that was free for `HANDOVER_US` is open to all. That costs
waiting time, never exclusion. Beyond a number of connections, claims neither take the queue lock
nor heed it: the first of each queue polls, as all do where the server cannot queue.
"""

from __future__ import annotations

import os
import select
import selectors
import weakref
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ...primitives.timing import monotonic
from ..sessions.pool import Pool, PooledSession, inherited
from ..sessions.queues import ASKING, FairSemaphore, WaiterQueues
from .sql import Dialect, dialect_for

# So many of a process stay with claims, unless the settings say otherwise.
QUEUE = 8
# A connection that was idle for so many seconds is closed after the next request.
IDLE = 60.0


class Session(PooledSession):
    """One autocommitting connection, and a cursor of its driver: Django's costs twice that."""

    def __init__(self, wrapper: BaseDatabaseWrapper, epoch: int, dialect: Dialect) -> None:
        """Connect; raises Django's database errors."""
        self.dialect = dialect
        self.parked = False  # with a claim, see QueuedConnection
        self.can_queue: bool | None = None  # not known yet
        super().__init__(wrapper, epoch)

    def adapt(self, settings: dict[str, Any]) -> None:
        self.dialect.adapt(settings)

    def prepare(self) -> None:
        with self.wrapper.wrap_database_errors:
            self.cursor = self.dialect.begin(self.wrapper)

    def queues(self) -> bool:
        """Return whether the server can queue the waiters of this session."""
        if self.can_queue is None:
            self.can_queue = self.dialect.can_queue(self.wrapper, self.cursor)
        return self.can_queue


class QueuedConnection:
    """A connection that stays with a claim, or with the waiters; dropping it closes that."""

    __slots__ = ("__weakref__", "_slots", "pid", "session", "since", "wake_fd")

    def __init__(self, slots: deque[None]) -> None:
        """Take one of the `slots`; raises IndexError if there is none."""
        self._slots: deque[None] | None = None
        self.session: Session | None = None
        self.wake_fd: int | None = None  # what a waiter waits on, as long as the server waits
        self.since = 0.0
        self.pid = os.getpid()
        self._slots = slots
        try:
            slots.pop()  # an interrupt after this gives it back
        except IndexError:
            self._slots = None
            raise

    def keep(self, session: Session) -> None:
        """Let this connection stay."""
        session.kept = session.parked = True
        self.session = session
        self.since = monotonic()

    @property
    def fresh(self) -> bool:
        """Whether a request may go there: what idles for long may have been cut off unseen."""
        if self.session is None or monotonic() - self.since >= IDLE:
            return False
        try:
            return not _readable(self.session.wrapper.connection, 0)  # else its end has come
        except Exception:
            return False  # we have closed it: an interrupt came just as it was kept

    def called(self, within: float = 0.0) -> bool:
        """Return whether the server has answered."""
        return self.wake_fd is None or _readable(self.wake_fd, within)

    def detach(self) -> None:
        """Leave the connection to others: it no longer has or wants the queue lock."""
        session, self.session = self.session, None
        if session is not None:
            session.parked = False
        self._free()

    def give_up(self) -> None:
        """Close it: that calls the next one, whatever the state of the connection."""
        session, self.session = self.session, None
        if session is not None:
            session.close()
        self._free()

    def _free(self) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.append(None)

    def __del__(self) -> None:
        # The interpreter ends, and the connection with it; or an interrupt came before __init__.
        if inherited is None or not hasattr(self, "pid"):
            return
        if self.pid == os.getpid():
            self.give_up()
        else:
            inherited.append(self.session)


class Sessions(Pool[Session]):
    """The connections of one process to one database, some of them kept to queue.

    Drivers allow to lend them as long as no two threads use one at the same time (mysqlclient 2.3
    raises at that).
    """

    def __init__(self, using: str, queue: int, emptied: Callable[[QueuedConnection], None]) -> None:
        """Let `queue` of them stay with claims, and ASKING others ask at a time."""
        self._queue = queue
        self._emptied = emptied
        super().__init__(using)

    @cached_property
    def dialect(self) -> Dialect:
        """The statements, filled in once for all connections of this process."""
        return dialect_for(connections[self.using])

    def park(self, claim_key: Any, queued: QueuedConnection) -> None:
        """Keep the connection of a grant findable, as long as its owner keeps it."""
        self._queued[claim_key] = queued

    def unpark(self, claim_key: Any) -> QueuedConnection | None:
        """Return the connection of a grant, for this caller alone."""
        return self._queued.pop(claim_key, None)

    def reserve(self) -> QueuedConnection | None:
        """Return a slot for a connection that will stay; None if as many stay as may."""
        try:
            return QueuedConnection(self._slots)
        except IndexError:
            return None

    @property
    def parked(self) -> int:
        """How many connections stay with claims, or are about to."""
        return self._queue - len(self._slots)

    def any_stay(self) -> bool:
        """Return whether a connection stays with a claim, or with the waiters."""
        return bool(self._queued or self.queues.connections())

    def holding(self, key: str) -> list[Any]:
        """Return the claims on `key` that hold the queue lock here."""
        return [k for k in list(self._queued) if k[0] == key]

    def close(self) -> None:
        """Close also those that stay, but not those of waiters, which go when the wait ends."""
        self.close_idle()
        for claim_key in list(self._queued):
            if queued := self.unpark(claim_key):
                queued.give_up()

    def _begin(self) -> None:
        super()._begin()
        self._queued = weakref.WeakValueDictionary[Any, QueuedConnection]()
        self._slots: deque[None] = deque([None] * self._queue)
        self.queues = WaiterQueues(self._emptied)
        self.semaphore = FairSemaphore(ASKING)

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


def _readable(file: Any, within: float) -> bool:
    if hasattr(select, "poll"):  # an epoll of its own costs four system calls
        poll = select.poll()
        poll.register(file, select.POLLIN)
        return bool(poll.poll(within * 1000))
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        return bool(selector.select(within))
