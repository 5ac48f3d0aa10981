"""The sessions of a backend whose locks end with them: which has what, and questions to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ...claims import Claim, Grant
from ...errors import BackendError
from ...primitives.rlock import RLock
from ..base import BaseLockBackend
from .link import ANSWER_WAIT, ReplyTimeout, ServerError
from .lock_session import LockSession, LockSessions
from .pool import database_of
from .queues import ASKING, ClaimKey, FairSemaphore

T = TypeVar("T")


class SessionsBackend(BaseLockBackend):
    """Knows which session of this process has which lock, and asks the server by others."""

    vendor: ClassVar[str]
    session_type: ClassVar[type[LockSession]]

    def __init__(self, *, alias: str, location: Any = None) -> None:
        super().__init__(alias=alias, location=location)
        self.using = database_of(location)
        if connections[self.using].vendor != self.vendor:
            raise ImproperlyConfigured(
                f"{type(self).__name__} requires {self.vendor}, but the database {self.using!r} "
                f"is {connections[self.using].vendor}"
            )
        title = f"{type(self).__name__} on {self.using!r}"
        self._pool = LockSessions(self.using, self.session_type, title)
        self._begin()

    def _begin(self) -> None:
        # Reentrant: a signal handler may lock or release in the middle of our own call.
        self._mutex = RLock()
        self._taken: dict[ClaimKey, LockSession] = {}  # held, or waited for
        self._semaphore = FairSemaphore(ASKING)

    def _session_of(self, grant: Grant) -> LockSession | None:
        session = self._taken.get((grant.claim.key, grant.claim.owner))
        return session if grant.session in (None, session) else None

    def _serves(self, session: LockSession, claim: Claim) -> bool:
        """Return whether the session has this claim: not given up, nor lent to another since."""
        return self._taken.get((claim.key, claim.owner)) is session

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Wait for the turn of the calling thread among those that ask."""
        if not self._semaphore.acquire(ANSWER_WAIT):
            raise self._pool.error("all sessions of this process are busy")
        try:
            yield
        finally:
            self._semaphore.release()

    def _question(self, work: Callable[[LockSession], T]) -> T:
        """Do `work` on a session that holds nothing."""
        with self._asking():
            while True:
                session = self._pool.lend()
                try:
                    answer = work(session)
                except BaseException as error:
                    session.close()
                    if not isinstance(error, (ServerError, ReplyTimeout)):
                        raise
                    if not session.kept:
                        raise self._pool.error(error) from error
                else:
                    self._pool.give_back(session)
                    return answer

    def _stop(self, session: LockSession) -> None:
        """Take a session out of the server's queue; it may get the lock for a moment."""
        with suppress(BackendError):
            self._question(lambda other: other.stop(session.number))

    def _drop(self, session: LockSession) -> None:
        """Close a session, and forget what it held."""
        claim = session.claim
        with self._mutex:
            if claim and self._serves(session, claim):
                del self._taken[claim.key, claim.owner]
        session.close()
