"""`LockSession`: what the session of one lock has to do, on any server; and the pool of these."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import inf
from time import sleep
from typing import NamedTuple

from django.db import Error as DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper

from ...claims import Claim
from ...errors import BackendError
from ...primitives.threads import started
from ...primitives.timing import monotonic
from .link import ANSWER_WAIT, Link, ReplyTimeout, ServerError, Values
from .notes import note
from .pool import Pool, PooledSession

# The server ends a session that asked nothing for the ttl of its lock and so much longer: a
# client that is cut off or stopped cannot keep a lock forever. Beyond the ttl, because the answer
# that brings a lock after a wait may have been under way.
GRACE = 2.0

# Sessions that were idle for so long are closed, before the server does it for their ttl.
IDLE = 15.0

# Why a session is refused: another process may ask the primary, and get the same lock.
REPLICA = "the server is a read-only replica: its locks do not exclude callers on the primary"


class HeldLock(NamedTuple):
    """A lock that is held, as the server shows it."""

    key: str
    number: int  # of the session that holds it
    address: str  # of that session's client
    note: str | None  # in what the session said last
    waiters: int
    now_us: int  # the server's clock
    since_us: int | None = None
    named: str | None = None  # in what a waiter for it said
    kind: str = "exclusive"


class LockSession(PooledSession, Link):
    """A session that holds one lock, or waits for it."""

    def __init__(self, wrapper: BaseDatabaseWrapper, epoch: int) -> None:
        """Connect; raises Django's database errors, ServerError and ReplyTimeout."""
        self.mutex = threading.Lock()  # to ask, for all but the thread that was lent the session
        self.ttl = 0.0  # the server keeps the session so long without a question, and GRACE
        self.claim: Claim | None = None  # what it holds, or waits for
        self.fence: int | None = None
        self.waits = False
        super().__init__(wrapper, epoch)

    def prepare(self) -> None:
        self.connect(self.wrapper.connection)
        self.number = self.begin()  # the session's, as the server counts

    def reserve(self) -> None:
        """Wait for the right to ask, which a heartbeat may have; raise ReplyTimeout."""
        if not self.mutex.acquire(timeout=ANSWER_WAIT):
            raise ReplyTimeout("the session is busy")

    @abstractmethod
    def begin(self) -> int:
        """Prepare the new session; return its number on the server."""

    @abstractmethod
    def take(self, claim: Claim, wait: float) -> tuple[int | None, float] | None:
        """Lock; return the fence and a time before the lock was ours, or None: it is busy."""

    @abstractmethod
    def question(self, claim: Claim) -> tuple[str, Values]:
        """Return what asks whether the lock is still this session's: a statement, its values."""

    @abstractmethod
    def unlock(self, claim: Claim) -> bool:
        """Unlock; return whether it was locked."""

    def note(self) -> str:
        """Return the note of the claim for its statements, which says whose session it is."""
        return note(self.claim, self.fence) if self.claim else ""

    @abstractmethod
    def keep(self, ttl: float) -> None:
        """Let the server keep this session for `ttl` seconds without a question."""

    @abstractmethod
    def locks(self, key: str | None, ours: Iterable[str]) -> Iterator[HeldLock]:
        """Yield the locks that the server shows, or only that of `key`.

        `ours`: keys to ask for, if the server shows no others.
        """

    @abstractmethod
    def stop(self, number: int) -> None:
        """End a session that waits: the server notices late that its client is gone, or never."""

    @abstractmethod
    def kill(self, key: str, number: int) -> bool:
        """End the session if it holds the lock, and wait until the lock is free."""


class LockSessions(Pool[LockSession]):
    """Sessions that are closed by a thread, before the server does it for their ttl."""

    NOUN = "sessions"
    TIDY_ABOVE = 0

    def __init__(self, using: str, kind: type[LockSession], title: str) -> None:
        """Open sessions of this `kind`; errors begin with `title`."""
        self._kind = kind
        self._title = title
        super().__init__(using)

    def error(self, why: object, kind: type[BackendError] = BackendError) -> BackendError:
        return kind(f"{self._title}: {why}")

    def _closed_at_the_end(self) -> Iterable[LockSession]:
        return self._open

    def _new(self, wrapper: BaseDatabaseWrapper) -> LockSession:
        try:
            return self._kind(wrapper, self._epoch)
        except (DatabaseError, ServerError, ReplyTimeout) as error:
            raise self.error(error) from error

    def _tidy(self) -> None:
        self._tidy_above = inf  # as long as the thread runs
        if not started(self._sweep, "distlock-idle"):  # the server will close them
            self._tidy_above = self.TIDY_ABOVE

    def _sweep(self) -> None:
        with suppress(IndexError):  # none is left
            while True:
                session = self._idle[0]  # stays there: to be lent, and to be closed by others
                # Half of the ttl at most: the server has not closed it yet. No ttl: it only asked.
                left = session.used_at + min(IDLE, session.ttl / 2 or IDLE) - monotonic()
                if left > 0:
                    sleep(left)
                    continue
                with suppress(ValueError):  # it was lent just now
                    self._idle.remove(session)
                    session.close()
        self._tidy_above = self.TIDY_ABOVE
        if self._idle:  # given back just before that
            self._tidy()
