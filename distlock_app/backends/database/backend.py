"""`DatabaseBackend`: locks in a table of any database, one row for each name."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from django.utils.functional import cached_property

from ...claims import Busy, Claim, Grant
from ...errors import BackendError
from ...primitives.timing import monotonic
from ..sessions.link import ConnectionLost
from ..sessions.pool import database_of
from ..sessions.queues import Waiter
from . import members
from .checks import refuse_wrong_options
from .connections import QUEUE, RECENT, Contended, QueuedConnection, Session, Sessions
from .extending import Extending
from .in_transaction import InCallersTransaction
from .people import ForPeople
from .requests import claim_key_of
from .sql.base import Step


class DatabaseBackend(InCallersTransaction, ForPeople, Extending):
    """LOCATION is an alias of DATABASES; every question travels on a connection of our own.

    Never on the caller's, so the caller's transaction neither hides a lock from others nor
    takes it back, and it may be broken.
    """

    fences = True
    shares = True
    limits = True
    latches = True
    prolongs = True

    def __init__(
        self,
        *,
        alias: str,
        location: Any = None,
        queue: int = QUEUE,
        poll_min: float = 0.005,
        poll_max: float = 0.1,
    ) -> None:
        """Let at most `queue` connections of a process stay with claims; with 0 waiters poll.

        `poll_min`, `poll_max`: the first and the longest pause of waiters that poll, in seconds.
        """
        super().__init__(alias=alias, location=location)
        self.using = database_of(alias, location)
        refuse_wrong_options(alias, queue, poll_min, poll_max)
        self.poll_min, self.poll_max = poll_min, poll_max
        self._queue = queue
        self._locked = set()
        give_up = weakref.WeakMethod(self._give_up)
        self._sessions = Sessions(
            self.using, queue, lambda queued: (give_up() or QueuedConnection.give_up)(queued)
        )

    @cached_property
    def _queues(self) -> bool:
        """Whether connections may stay with claims: there are some, and it is of use."""
        return self._queue > 0 and self._sessions.dialect.queues

    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy:
        if claim.latch:
            return Grant(claim, fence=0) if self.counted(claim.key) >= claim.limit else Busy()
        # Where an uncontended lock comes by, small functions are written out: each call counts.
        sessions, claim_key = self._sessions, (claim.key, claim.owner)
        queues = sessions.queues
        waiter = queues.waiter_of(claim_key) if queues.by_key else None
        if len(sessions.slots) < self._queue:  # some connections stay with claims
            self._free_queue(claim_key)  # if it was granted before, and asks again
        if wait != 0 and claim.key in queues.by_key:
            waiter = queues.enqueue(claim_key, claim.wake)
            if not queues.leads(waiter):
                return Busy(will_wake=True)
        try:
            if claim.key in self._locked:
                self._probe(claim.key, within=wait)
            answer = self._lead(waiter, claim, wait) if waiter else self._join(claim, wait)
        except Contended as error:
            self._refuse_to_wait_for_itself(claim, error)
            if wait != 0 and sessions.dialect.locks_rows:  # it will ask again
                self._locked.add(claim.key)
            answer = Busy()
        if waiter is not None and answer:
            queues.leave(waiter)
        elif waiter is not None and wait == 0:
            self.withdraw(claim)
        return answer

    def withdraw(self, claim: Claim) -> None:
        self._sessions.queues.withdraw(claim_key_of(claim), claim.wake)

    def look(self, claim: Claim) -> Busy | None:
        if claim.latch:
            return None
        queues = self._sessions.queues
        waiter = queues.waiter_of(claim_key_of(claim))
        waits = False  # on the server
        if waiter is not None and waiter.queue is not None:
            if waiter.connection is not None:
                return None  # another one leads, or did: it is not to wait for that one
            if not queues.leads(waiter):
                return Busy()
            queued = waiter.queue.connection
            waits = queued is not None and queued.wake_fd is not None
            if not waiter.asked or (waits and queued.called()):
                return None
        try:
            return self._ask(partial(members.look, claim, None if waits else self.poll_max))
        except Contended:
            return Busy()

    def count_down(self, claim: Claim) -> int:
        return self._ask(partial(members.count_down, claim))

    def counted(self, key: str) -> int:
        return self._ask(partial(members.counted, key))

    def release(self, grant: Grant) -> bool:
        if grant.claim.latch:
            return False
        sessions, claim = self._sessions, grant.claim
        claim_key = claim.key, claim.owner
        if sessions.queues.by_key and (waiter := sessions.queues.waiter_of(claim_key)) is not None:
            sessions.queues.leave(waiter)
        again = partial(self._release_again, grant)
        queued = sessions.queued.pop(claim_key, None)
        if queued is None:
            return self._ask(partial(_release, claim), again=again, urgent=True)
        # While a lease lasts, nobody evicts its connection.
        if (claim.ttl > RECENT and monotonic() < queued.since + RECENT) or queued.fresh:
            session: Any = queued.session
            verb = session.dialect.release_to_next
            try:
                released: bool = self._attempt(session, verb, session.cursor, claim)
                (queued.detach if released else queued.give_up)()
                sessions.give_back(session)
                return released
            except ConnectionLost:
                queued.give_up()
                sessions.close_idle()
                return self._ask(again, urgent=True)
        sessions.queued[claim_key] = queued  # a server without connections to spare gets it back
        try:
            return self._ask(partial(_release, claim), again=again, urgent=True)
        finally:
            self._close_connection_of(claim)  # after the row, for this calls the next one

    def _lead(self, waiter: Waiter, claim: Claim, wait: float | None) -> Grant | Busy:
        """Ask for the queue of this process, or at the deadline for this claim alone."""
        queued, asked = self._sessions.queues.connection_of(waiter), waiter.asked
        waiter.asked = True
        if queued is None:
            return self._join(claim, wait, waiter)
        if queued.called():
            return self._take_turn(queued, waiter, claim, wait)
        if wait != 0 and not asked:  # another one has lined up on the server before it left
            return Busy(wake_fd=queued.wake_fd)
        answer = self._join(claim, 0)
        if isinstance(answer, Grant):
            return answer
        return Busy(answer.free_in, wake_fd=queued.wake_fd)

    def _join(self, claim: Claim, wait: float | None, waiter: Waiter | None = None) -> Grant | Busy:
        """Take the row with the queue lock, or line up; by polling if no connection may stay."""
        if self._queues and monotonic() >= self._sessions.polls_until:
            queued = QueuedConnection(self._sessions.slots)
            if queued.slots is not None:  # fewer stay than may
                try:
                    join = partial(self._join_on, queued, waiter, claim, wait)
                    return self._ask(join, within=wait)
                finally:
                    if queued.session is None:
                        queued.give_up()
        answer = self._ask(lambda s: _try(s, claim, wait), within=wait)
        if isinstance(answer, Grant) or wait == 0 or not self._queues:
            return answer
        return self._line_up(waiter, claim, answer)

    def _join_on(
        self,
        queued: QueuedConnection,
        waiter: Waiter | None,
        claim: Claim,
        wait: float | None,
        session: Session,
    ) -> Grant | Busy:
        if not session.queues:
            return _try(session, claim, wait)
        if claim.shared or claim.limit > 1:
            answer = members.acquire(claim, session)
        else:
            step: Step = "join" if wait == 0 else "wait"
            answer = session.dialect.acquire(session.cursor, claim, step, wait=wait)
            if isinstance(answer, Grant):
                queued.keep(session)
                self._sessions.queued[claim.key, claim.owner] = queued
                return Grant(claim, fence=answer.fence, session=queued)
        if isinstance(answer, Grant) or wait == 0:
            return answer
        return self._line_up(waiter, claim, answer, queued, session)

    def _line_up(
        self,
        waiter: Waiter | None,
        claim: Claim,
        answer: Busy,
        queued: QueuedConnection | None = None,
        session: Session | None = None,
    ) -> Busy:
        """Enter the queue of this process; its first enters the server's queue, too."""
        queues = self._sessions.queues
        waiter = waiter or queues.enqueue(claim_key_of(claim), claim.wake)
        if not queues.leads(waiter):
            return Busy(will_wake=True)
        waiter.asked = True
        queue = waiter.queue
        if queued and session and queue is not None and queue.connection is None:
            # Before the request is sent: _give_up() ends a wait that it finds here.
            queued.wake_fd = session.cursor.fd
            queued.keep(session)
            try:
                session.dialect.line_up(session.cursor, claim.key)
                queues.attach(waiter, queued)
            except BaseException:  # interrupted: the server would go on waiting
                self._give_up(queued)
                raise
            return Busy(answer.free_in, wake_fd=queued.wake_fd)
        return answer

    def _take_turn(
        self, queued: QueuedConnection, waiter: Waiter, claim: Claim, wait: float | None
    ) -> Grant | Busy:
        queues = self._sessions.queues
        session: Any = queued.session
        try:
            answer = self._attempt(session, self._take_turn_on, queued, claim, wait, session)
        except BaseException as error:
            queues.detach(waiter, queued)
            queued.give_up()
            if not isinstance(error, ConnectionLost):
                raise
            answer = None
        if isinstance(answer, Busy):
            return answer
        queues.detach(waiter, queued)
        return self._granted(queued, answer) if answer else self._join(claim, wait, waiter)

    def _take_turn_on(
        self, queued: QueuedConnection, claim: Claim, wait: float | None, session: Session
    ) -> Grant | Busy | None:
        if queued.wake_fd is not None:
            queued.wake_fd = None
            if not session.dialect.called(session.cursor):  # the server waited long enough
                self._unlock(queued, session)  # granted just as the wait ended
                return None
        return _try(session, claim, wait)

    def _granted(self, queued: QueuedConnection, answer: Grant) -> Grant:
        """Let the connection, which has the queue lock, stay until the release.

        That of a reader or a permit is freed at once, for the next one in the queue may fit, too.
        """
        claim = answer.claim
        self._sessions.queued[claim.key, claim.owner] = queued
        if claim.shared or claim.limit > 1:
            self._free_queue((claim.key, claim.owner))
            return answer
        return Grant(claim, fence=answer.fence, session=queued)

    def _release_again(self, grant: Grant, session: Session) -> bool:
        """Release after a first attempt that may have arrived, although its answer did not."""
        if _release(grant.claim, session):
            return True
        if grant.fence is None or session.dialect.released(session.cursor, grant):
            return grant.fence is not None
        raise BackendError(f"lock table on {self.using!r}: the answer to a release was lost")


def _try(session: Session, claim: Claim, wait: float | None) -> Grant | Busy:
    if claim.shared or claim.limit > 1:
        return members.acquire(claim, session)
    return session.dialect.acquire(session.cursor, claim, wait=wait)


def _release(claim: Claim, session: Session) -> bool:
    if claim.shared or claim.limit > 1:
        return members.release(claim, session)
    return session.dialect.release(session.cursor, claim)
