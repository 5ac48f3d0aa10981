"""The base of named and advisory locks: backends whose lock ends with its database session."""

from __future__ import annotations

from collections import deque
from math import inf

from ...claims import Claim, Grant
from ...errors import BackendError
from ...primitives.threads import Gate
from ...primitives.timing import Deadline, full_jitter, monotonic
from .inspection import Inspection
from .link import ANSWER_WAIT, ReplyTimeout, ServerError
from .lock_session import LockSession
from .queues import ClaimKey, WaiterQueues

# The longest wait on the server in one statement, in seconds: a longer wait starts again behind
# others. A statement that never ends keeps PostgreSQL from cleaning up behind it.
SLICE = 30.0

# So many sessions of a process wait on the server at a time: for each lock one for the first caller
# and one for all others. For further locks the first of them tries again and again, after pauses of
# at most POLL seconds.
WAITING = 8
POLL = 0.5

GIVEN_UP = "the wait was given up"  # by a release() of the claim


class SessionLocksBackend(Inspection):
    """LOCATION is an alias of DATABASES; each lock has a session of its own while it is held.

    The server ends a session that says nothing for the ttl of its lock, and the lock with it:
    so the core's trust is as sound as with a lease. Nothing here joins the caller's
    transaction, nor stays behind on a connection of Django's.
    """

    blocks = True
    expires = False
    fences = True  # the server's time in microseconds, read when the lock is granted
    sessions_waiting = WAITING

    def _begin(self) -> None:
        super()._begin()
        # When claims were given up that nobody has yet: their thread may still be connecting.
        self._given_up: dict[ClaimKey, float] = {}
        # Keys that one thread waits for ahead of the queue, which needs none then.
        self._ahead: set[str] = set()
        # The first of a queue waits in a thread of its own, and says nothing until it has waited.
        self._queues = WaiterQueues(lambda connection: None, hangs=inf)
        self._waiting: deque[None] = deque([None] * self.sessions_waiting)

    def acquire(self, claim: Claim, wait: float | None) -> Grant | None:
        session = self._taken.get((claim.key, claim.owner))
        if session is not None:
            fence = session.fence  # once asked, it may be lent to another claim
            if self._ask(session, claim, claim.ttl):
                return Grant(claim, fence, session=session)
        if wait == 0:
            return self._try(claim)
        if claim.key in self._ahead or claim.key in self._queues.by_key:
            return self._wait_in_queue(claim, Deadline(wait))
        began = monotonic()
        self._ahead.add(claim.key)
        try:
            grant = self._lead(claim, SLICE if wait is None else min(wait, SLICE))
        finally:
            self._ahead.discard(claim.key)
        if grant is not None or (deadline := Deadline(wait, since=began)).remaining() == 0:
            return grant
        return self._wait_in_queue(claim, deadline)

    def _wait_in_queue(self, claim: Claim, deadline: Deadline) -> Grant | None:
        """Enter the queue of this process: its first waits on the server for all."""
        attempt, gate, claim_key = 0, Gate(), (claim.key, claim.owner)
        with self._mutex:
            self._refuse_what_was_given_up(claim_key)
            waiter = self._queues.enqueue(claim_key, lambda _: gate.open())
        try:
            while True:
                pause = SLICE
                if self._queues.leads(waiter):
                    waiter.asked = True
                    if (grant := self._lead(claim, deadline.cap(SLICE))) is not None:
                        return grant
                    pause = full_jitter(attempt, base=self.poll_min, cap=POLL)
                    attempt += not self._waiting
                gate.wait(deadline.cap(pause))
                if waiter.queue is None:
                    raise self._pool.error(GIVEN_UP)
                if deadline.remaining() == 0:
                    return None
        finally:
            self._queues.leave(waiter)

    def _lead(self, claim: Claim, wait: float) -> Grant | None:
        """Wait on the server; only try if as many sessions wait there as may."""
        may_wait = True
        try:
            try:
                self._waiting.pop()  # an interrupt after this gives it back
            except IndexError:
                may_wait = False
            return self._take(claim, wait) if may_wait else self._try(claim)
        finally:
            if may_wait:
                self._waiting.append(None)

    def _try(self, claim: Claim) -> Grant | None:
        if not self._pool.semaphore.acquire(ANSWER_WAIT):
            raise self._pool.busy()
        try:
            return self._take(claim, 0.0)
        finally:
            self._pool.semaphore.release()

    def release(self, grant: Grant) -> bool:
        claim, claim_key = grant.claim, (grant.claim.key, grant.claim.owner)
        with self._mutex:
            session = self._taken.get(claim_key)
            if session is None or grant.session not in (None, session):
                waiter = self._queues.waiter_of(claim_key)
                if grant.session is None:
                    self._note_given_up(claim_key)
                if waiter is not None:
                    self._queues.leave(waiter)
                    waiter.wake()
                return False
            del self._taken[claim_key]
            waits = session.waits
            if waits:
                session.hang_up()  # the thread that waits on it closes it
        if waits:
            self._stop(session)
            return False
        was_ours = False
        try:
            if not session.mutex.acquire(blocking=False):
                session.reserve()
            try:
                was_ours = session.unlock(claim)
            finally:
                session.mutex.release()
        except ServerError:
            pass  # a session that is gone took its lock with it
        except ReplyTimeout as error:
            raise self._pool.error(error) from error
        finally:
            if was_ours:
                session.claim = None
                self._pool.give_back(session)
            else:
                session.close()
        return was_ours

    def close(self) -> None:
        self._pool.close()

    def after_fork(self) -> None:
        self._pool.forget()
        self._begin()

    def _take(self, claim: Claim, timeout: float) -> Grant | None:
        """Take the lock on a session of its own; on another one if an idle one had died."""
        end, claim_key = monotonic() + timeout, (claim.key, claim.owner)
        session = self._pool.lend()
        try:
            with self._mutex:
                if self._given_up:
                    self._refuse_what_was_given_up(claim_key)
                session.claim, session.waits = claim, True
                self._taken[claim_key] = session  # before it is asked: release() has to find it
        except BackendError:
            self._pool.give_back(session)
            raise
        try:
            if session.ttl != claim.ttl:
                session.keep(claim.ttl)
            granted = session.take(claim, timeout)
            fence, began = granted or (None, None)
            with self._mutex:
                session.waits, session.fence = False, fence
                given_up = self._taken.get(claim_key) is not session
                if granted is None and not given_up:
                    del self._taken[claim_key]
        except BaseException as error:
            self._fail(session, claim, error)
            return self._take(claim, max(0.0, end - monotonic()))
        if given_up:
            session.close()
            raise self._pool.error(GIVEN_UP)
        if granted is None:
            session.claim = None
            self._pool.give_back(session)
            return None
        return Grant(claim, fence, asked_at=began, session=session)

    def _fail(self, session: LockSession, claim: Claim, error: BaseException) -> None:
        """Close the session; raise what became of it, unless it may have died while it was idle."""
        given_up = not self._serves(session, claim)
        refused = isinstance(error, ServerError)
        self._drop(session)
        if given_up or not refused:
            self._stop(session)  # before another one is opened
        if given_up and refused:  # release() hung up: it is not to line up again
            raise self._pool.error(GIVEN_UP) from error
        if isinstance(error, ReplyTimeout) or (refused and not session.kept):
            raise self._pool.error(error) from error
        if not refused:
            raise error

    def _refuse_what_was_given_up(self, claim_key: ClaimKey) -> None:
        if self._given_up.pop(claim_key, None) is not None:
            raise self._pool.error(GIVEN_UP)

    def _note_given_up(self, claim_key: ClaimKey) -> None:
        now = monotonic()
        while self._given_up and next(iter(self._given_up.values())) <= now - SLICE:
            del self._given_up[next(iter(self._given_up))]
        self._given_up[claim_key] = now
