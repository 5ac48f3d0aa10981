"""The sessions of a backend whose locks end with them: which has what, and does it still?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ...claims import Claim, Grant
from ...errors import BackendError
from ...primitives.polling import POLLIN, new_poll
from ...primitives.rlock import RLock
from ...primitives.timing import monotonic
from ..base import BaseLockBackend, result_of
from .link import ReplyTimeout, ServerError
from .lock_session import LockSession, LockSessions
from .pool import database_of
from .queues import ClaimKey

# A session is asked whether it still has its lock this often, in seconds, and at least three
# times in a ttl; whether the server has closed it is seen without a question.
ASK_EVERY = 5.0

# Seconds that one heartbeat waits for the answers; late ones are picked up by the next.
BEAT_WAIT = 0.5


class SessionsBackend(BaseLockBackend):
    """Knows which session of this process has which lock; looks at them often, asks now and then.

    All else is asked of the server by sessions that hold nothing.
    """

    heartbeat = 0.3
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

    def _session_of(self, grant: Grant) -> LockSession | None:
        session = self._taken.get((grant.claim.key, grant.claim.owner))
        return session if grant.session in (None, session) else None

    def _serves(self, session: LockSession, claim: Claim) -> bool:
        """Return whether the session has this claim: not given up, nor lent to another since."""
        return self._taken.get((claim.key, claim.owner)) is session

    def _stop(self, session: LockSession) -> None:
        """Take a session out of the server's queue; it may get the lock for a moment."""
        with suppress(BackendError):
            self._pool.ask(lambda other: other.stop(session.number))

    def _drop(self, session: LockSession) -> None:
        """Close a session, and forget what it held."""
        claim = session.claim
        with self._mutex:
            if claim and self._serves(session, claim):
                del self._taken[claim.key, claim.owner]
        session.close()

    def extend(self, grant: Grant, ttl: float) -> bool:
        session = self._session_of(grant)
        return session is not None and self._ask(session, grant.claim, ttl)

    def extend_many(self, work: Sequence[tuple[Grant, float]]) -> list[Any]:
        """Look at the sessions; ask those that are due or that have something to say.

        All questions are sent before the first answer is awaited, so that one session which
        is cut off delays the others for `BEAT_WAIT` at most.
        """
        answers: list[Any] = [False] * len(work)
        asked: dict[int, tuple[int, LockSession]] = {}
        poll = new_poll()
        now = monotonic()
        for index, (grant, _) in enumerate(work):
            session = self._session_of(grant)
            if session is None:
                continue
            answers[index] = None
            if session.mutex.acquire(blocking=False):  # else another thread is asking it
                answers[index] = self._begin_beat(session, grant.claim, now)
                if answers[index] is True:
                    asked[session.fd] = index, session
                    poll.register(session.fd, POLLIN)
                else:
                    session.mutex.release()
        end = now + BEAT_WAIT
        while asked and (heard := poll.poll(max(0.0, end - monotonic()) * 1000)):
            for fd, _ in heard:
                poll.unregister(fd)
                index, session = asked.pop(fd)
                answers[index] = self._finish_beat(session, now)
                session.mutex.release()
        for index, session in asked.values():
            answers[index] = self._pool.error("no answer")
            session.mutex.release()
        return answers

    def _ask(self, session: LockSession, claim: Claim, ttl: float) -> bool:
        """Ask whether the lock is still the session's; raise BackendError if there is no answer."""
        try:
            session.reserve()
            try:
                if not self._serves(session, claim):
                    return False
                try:
                    if ttl > session.ttl:
                        session.keep(ttl)
                    statement, values = session.question(claim)
                    rows = session.ask(statement, *values)
                    answer: bool | BackendError = self._confirmed(session, rows)
                except ServerError as error:
                    answer = self._after_error(session, error)
            finally:
                session.mutex.release()
        except ReplyTimeout as error:
            raise self._pool.error(error) from error
        except BaseException:
            self._drop(session)
            raise
        return result_of(answer)

    def _begin_beat(
        self, session: LockSession, claim: Claim, now: float
    ) -> bool | BackendError | None:
        """Ask if it is time to; return True, or else the answer to the core."""
        if not self._serves(session, claim):
            return False
        try:
            heard = session.heard(0)
            if session.awaiting_reply:
                if not heard:
                    return self._pool.error("still no answer")
                session.receive()  # it comes too late to be worth anything
            elif not heard and now < session.asked_at + min(claim.ttl / 3, ASK_EVERY):
                return None
            session.send(*session.question(claim))
        except ServerError as error:
            return self._after_error(session, error)
        return True

    def _finish_beat(self, session: LockSession, asked_at: float) -> bool | BackendError:
        try:
            rows = session.receive()
        except ServerError as error:
            return self._after_error(session, error)
        session.asked_at = asked_at
        return self._confirmed(session, rows)

    def _after_error(self, session: LockSession, trouble: ServerError) -> bool | BackendError:
        """Return False if the session is gone; one that only refused a question has its lock."""
        try:
            if session.awaiting_reply:
                raise trouble
            session.wait(f"{session.note()} SELECT 1", BEAT_WAIT)
        except ServerError:
            self._drop(session)
            return False
        except ReplyTimeout:
            pass
        return self._pool.error(trouble)

    def _confirmed(self, session: LockSession, rows: Any) -> bool:
        if bool(rows) and rows[0][0] == 1:
            return True
        self._drop(session)
        return False
