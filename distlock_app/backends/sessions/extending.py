"""Renewal of locks that end with their session, and how soon a killed session is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...claims import Claim, Grant
from ...errors import BackendError
from ...primitives.polling import POLLIN, new_poll
from ...primitives.timing import monotonic
from ..base import result_of
from .asking import SessionsBackend
from .link import ReplyTimeout, ServerError
from .lock_session import LockSession

# A session is asked whether it still has its lock this often, in seconds, and at least three
# times in a ttl; whether the server has closed it is seen without a question.
ASK_EVERY = 5.0

# Seconds that one heartbeat waits for the answers; late ones are picked up by the next.
BEAT_WAIT = 0.5


class Extending(SessionsBackend):
    """Looks at the sessions often, and asks each now and then."""

    heartbeat = 0.3

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
