"""How a claim gets its row: it takes it, or waits in the server's queue.

The protocol is in docs/explanation/how-it-works.md#the-queue-of-the-lock-table.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from ...claims import Busy, Claim, Grant
from ...primitives.timing import monotonic
from ..base import BaseLockBackend, ConnectionLost
from ..sessions.queues import Waiter, claim_key_of
from . import members
from .connections import QueuedConnection, Session, Sessions
from .members import kind_of
from .sql.base import Step

NO_SLOTS: deque[None] = deque()  # no connection may be kept


class Queueing(BaseLockBackend):
    """Takes rows, with the queue lock if a connection may be kept; else waits for its turn."""

    using: str  # alias of DATABASES
    _sessions: Sessions
    _queue: int  # how many connections of this process may be kept for claims

    def _lead(self, waiter: Waiter, claim: Claim, wait: float | None) -> Grant | Busy:
        """Ask for the queue of this process, or at the deadline for this claim alone."""
        queued, asked = self._sessions.queues.connection_of(waiter), waiter.asked
        waiter.asked = True
        if queued is None:
            return self._join(claim, wait, waiter)
        if queued.called():
            return self._take_turn(queued, waiter, claim, wait)
        # An earlier waiter of this process has entered the server's queue, and left ours.
        if wait != 0 and not asked:
            return Busy(wake_fd=queued.wake_fd)
        answer = self._join(claim, 0)
        if isinstance(answer, Grant):
            return answer
        return Busy(answer.free_in, wake_fd=queued.wake_fd)

    def _join(self, claim: Claim, wait: float | None, waiter: Waiter | None = None) -> Grant | Busy:
        """Take the row with the queue lock, or line up; poll if no connection may be kept."""
        sessions = self._sessions
        if not (self._queue and sessions.dialect.queues):
            return sessions.ask(lambda s: _try(s, claim, wait), within=wait)
        polls = monotonic() < sessions.polls_until
        queued = QueuedConnection(NO_SLOTS if polls else sessions.slots)
        join = partial(self._join_on, queued, waiter, claim, wait)
        try:
            return sessions.ask(join, within=wait)
        finally:
            if queued.session is None:
                queued.give_up()

    def _join_on(
        self,
        queued: QueuedConnection,
        waiter: Waiter | None,
        claim: Claim,
        wait: float | None,
        session: Session,
    ) -> Grant | Busy:
        # Every free lock passes here, so small functions are written out: each call counts.
        if queued.slots is None or not session.can_queue or claim.shared or claim.limit > 1:
            answer = _try(session, claim, wait)
        else:
            step: Step = "join" if wait == 0 else "wait"
            answer = session.dialect.acquire(session.cursor, claim, step, wait=wait)
            if isinstance(answer, Grant):
                queued.keep(session)
                claim_key = claim_key_of(claim) if claim.stable else (claim.key, claim.owner)
                self._sessions.queued[claim_key] = queued
                return Grant(claim, fence=answer.fence, session=queued)
        if isinstance(answer, Grant) or wait == 0 or not session.can_queue:
            return answer
        queues = self._sessions.queues
        waiter = waiter or queues.enqueue(claim_key_of(claim), claim.wake)
        if not queues.leads(waiter):
            return Busy(will_wake=True)
        waiter.asked = True
        queue = waiter.queue  # None: it has just left
        if queued.slots is not None and queue is not None and queue.connection is None:
            self._line_up(queued, waiter, session)
        return Busy(answer.free_in, wake_fd=queued.wake_fd)

    def _line_up(self, queued: QueuedConnection, waiter: Waiter, session: Session) -> None:
        """Enter the server's queue, for the queue of this process."""
        # Set before the request is sent: after an interrupt, leave_queue() ends a wait found here.
        queued.wake_fd = session.cursor.fd
        queued.keep(session)
        try:
            session.dialect.line_up(session.cursor, waiter.claim_key[0])
            self._sessions.queues.attach(waiter, queued)
        except BaseException:  # interrupted: the server would go on waiting
            self._sessions.leave_queue(queued)
            raise

    def _take_turn(
        self, queued: QueuedConnection, waiter: Waiter, claim: Claim, wait: float | None
    ) -> Grant | Busy:
        queues = self._sessions.queues
        session: Any = queued.session
        try:
            answer = self._sessions.attempt(
                session, self._take_turn_on, queued, claim, wait, session
            )
        except BaseException as error:
            queues.detach(waiter, queued)
            queued.give_up()
            if not isinstance(error, ConnectionLost):
                raise
            answer = None
        if isinstance(answer, Busy):
            return answer
        queues.detach(waiter, queued)
        if answer is None:
            return self._join(claim, wait, waiter)
        self._sessions.queued[claim_key_of(claim)] = queued
        if kind_of(claim):  # the next one in the queue may fit beside it
            self._sessions.free_queue(claim_key_of(claim))
            return answer
        return Grant(claim, fence=answer.fence, session=queued)

    def _take_turn_on(
        self, queued: QueuedConnection, claim: Claim, wait: float | None, session: Session
    ) -> Grant | Busy | None:
        if queued.wake_fd is not None:
            queued.wake_fd = None
            if not session.dialect.called(session.cursor):  # the server waited long enough
                self._sessions.unlock(queued, session)  # granted just as the wait ended
                return None
        return _try(session, claim, wait)


def _try(session: Session, claim: Claim, wait: float | None) -> Grant | Busy:
    if claim.shared or claim.limit > 1:
        return members.acquire(claim, session)
    return session.dialect.acquire(session.cursor, claim, wait=wait)
