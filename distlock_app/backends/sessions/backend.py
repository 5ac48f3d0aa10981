"""The base of named and advisory locks: backends whose lock ends with its database session."""

from __future__ import annotations

import select
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, ClassVar, Generic, TypeVar

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DjangoDatabaseError
from django.db import connections

from ...claims import Claim, Grant, Holding
from ...errors import BackendError
from ...primitives.threads import Gate
from ...primitives.timing import Deadline, full_jitter, monotonic
from ..base import BaseLockBackend, no_answer
from .lock_session import LockSession
from .notes import from_note, note, same
from .pool import (
    ANSWER_WAIT,
    ConnectionLost,
    ReplyTimeout,
    ServerError,
    ServerSession,
    ServerSessions,
    database_of,
)
from .queues import ASKING, FairSemaphore, Waiter, WaiterQueues

T = TypeVar("T")
S = TypeVar("S", bound=LockSession)

# The longest wait on the server in one statement, in seconds: a longer wait starts again behind
# others. A statement that never ends keeps PostgreSQL from cleaning up behind it.
SLICE = 30.0

# So many sessions of a process wait on the server at a time, each for all waiters of its lock
# in that process; for further locks the first of them tries again and again, after pauses of at
# most POLL seconds.
WAITING = 8
POLL = 0.5

# A session is asked whether it still has its lock this often, in seconds, and at least three
# times in a ttl; whether the server has closed it is seen without a question.
ASK_EVERY = 5.0

# Seconds that one heartbeat waits for the answers; late ones are picked up by the next.
BEAT_WAIT = 0.5


class SessionLocksBackend(BaseLockBackend, ABC, Generic[S]):
    """LOCATION is an alias of DATABASES; each lock has a session of its own while it is held.

    The server ends a session that says nothing for the ttl of its lock, and the lock with it:
    so the core's trust is as sound as with a lease. Nothing here joins the caller's
    transaction, nor stays behind on a connection of Django's.
    """

    blocks = True
    expires = False
    fences = True  # the server's time in microseconds, read when the lock is granted
    heartbeat = 0.3

    vendor: ClassVar[str]
    session_type: ClassVar[type[Any]]

    def __init__(self, *, alias: str, location: Any = None) -> None:
        super().__init__(alias=alias, location=location)
        self.using = database_of(alias, location)
        if connections[self.using].vendor != self.vendor:
            raise ImproperlyConfigured(
                f"DISTLOCK[{alias!r}]: {type(self).__name__} is for {self.vendor}, and the "
                f"database {self.using!r} is {connections[self.using].vendor}"
            )
        self._pool = ServerSessions(self.using, self.session_type)
        self._begin()

    def _begin(self) -> None:
        # Reentrant: a signal handler may lock or release in the middle of our own call.
        self._mutex = threading.RLock()
        self._taken: dict[tuple[str, str], S] = {}  # by owner and key: held, or waited for
        # When claims were given up that were neither: their thread may still be connecting.
        self._given_up: dict[tuple[str, str], float] = {}
        # The first of a queue waits in a thread of its own, and says nothing until it has waited.
        self._queues = WaiterQueues(lambda connection: None, hangs=inf)
        self._semaphore = FairSemaphore(ASKING)
        self._waiting: deque[None] = deque([None] * WAITING)

    def acquire(self, claim: Claim, wait: float | None) -> Grant | None:
        session = self._taken.get((claim.owner, claim.key))
        if session is not None:
            if self._ask(session, claim.ttl):
                return Grant(claim, session.fence, session=session)
            self._drop(session)
        if wait == 0:
            return self._try(claim)
        deadline, attempt, gate = Deadline(wait), 0, Gate()
        waiter = self._enqueue(claim, lambda _: gate.open())
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
                    raise BackendError(self._says("the wait was given up"))
                if deadline.remaining() == 0:
                    return None
        finally:
            self._queues.leave(waiter)

    def _enqueue(self, claim: Claim, wake: Callable[[Any], None]) -> Waiter:
        """Enter the queue of this process: its first waits on the server for all."""
        with self._mutex:
            self._refuse_what_was_given_up(claim)
            return self._queues.enqueue((claim.key, claim.owner), wake)

    def _lead(self, claim: Claim, wait: float) -> Grant | None:
        """Wait on the server; only try if as many sessions wait there as may."""
        try:
            self._waiting.pop()
        except IndexError:
            return self._try(claim)
        try:
            return self._take(claim, wait)
        finally:
            self._waiting.append(None)

    def _try(self, claim: Claim) -> Grant | None:
        with self._asking():
            return self._take(claim, 0.0)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Wait for the turn of the calling thread among those that ask."""
        if not self._semaphore.acquire(ANSWER_WAIT):
            raise BackendError(self._says("all sessions of this process are busy"))
        try:
            yield
        finally:
            self._semaphore.release()

    def extend(self, grant: Grant, ttl: float) -> bool:
        session = self._session_of(grant)
        return session is not None and self._ask(session, ttl)

    def extend_many(self, work: Sequence[tuple[Grant, float]]) -> list[Any]:
        """Look at the sessions; ask those that are due or that have something to say.

        All questions are sent before the first answer is awaited, so that one session which
        is cut off delays the others for `BEAT_WAIT` at most.
        """
        answers: list[Any] = [False] * len(work)
        asked: dict[int, tuple[int, S]] = {}
        poll = select.poll()
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
                    poll.register(session.fd, select.POLLIN)
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
            answers[index] = BackendError(self._says("no answer"))
            session.mutex.release()
        return answers

    def release(self, grant: Grant) -> bool:
        with self._mutex:
            session = self._session_of(grant)
            if session is None:
                waiter = self._queues.waiter_of((grant.claim.key, grant.claim.owner))
                if grant.session is None:
                    self._note_given_up(grant.claim)
                if waiter is not None and waiter.wake is not None:
                    self._queues.leave(waiter)
                    waiter.wake(None)
                return False
            del self._taken[grant.claim.owner, grant.claim.key]
            waits = session.waits
            if waits:
                session.hang_up()  # the thread that waits on it closes it
        if waits:
            self._stop(session)
            return False
        try:
            with _exclusive(session):
                was_ours = session.unlock(grant.claim)
        except BaseException as error:
            self._pool.drop(session)
            if isinstance(error, ServerError):
                return False  # a session that is gone took its lock with it
            if isinstance(error, ReplyTimeout):
                raise BackendError(self._says(error)) from error
            raise
        if was_ours:
            self._pool.give_back(session)
        else:
            self._pool.drop(session)
        return was_ours

    def holders(self, key: str | None = None) -> Iterator[Holding]:
        ours = {
            session.number: session for session in list(self._taken.values()) if not session.waits
        }
        keys = [session.claim.key for session in ours.values() if session.claim]
        for fields in self._question(lambda session: list(session.locks(key, keys))):
            number, now_us = fields.pop("number"), fields.pop("now_us")
            since_us, named = fields.pop("since_us", None), fields.pop("named", None)
            session = ours.get(number)
            claim = session.claim if session else None
            # What we know ourselves, or else what the session's last statement said.
            lock, said = fields["key"], fields.pop("note", None)
            if session and claim and claim.key == lock:
                said = note(claim, session.fence)
            fields |= from_note(said, lock)
            fields.setdefault("name", from_note(named, lock).get("name", f"({lock})"))
            if (began_us := fields.get("fence") or since_us) is not None:
                fields["held_for"] = max(0.0, (now_us - began_us) / 1e6)
            yield Holding(alias=self.alias, version=f"{number}-{fields.pop('tag', '')}", **fields)

    def clear(self, key: str, if_version: str | None = None) -> int:
        held = [holding.version for holding in self.holders(key)]
        found = [one for one in held if if_version is None or same(one, if_version)]
        numbers = [int(one.partition("-")[0]) for one in found]
        return self._question(lambda session: sum(session.kill(key, number) for number in numbers))

    def ping(self) -> None:
        self._question(lambda session: session.ask("SELECT 1"))

    def check(self, *, ask: bool = False) -> list[checks.CheckMessage]:
        if not ask:
            return []
        try:
            return self._question(lambda session: list(self.look_around(session)))
        except BackendError as error:
            return [no_answer(self.alias, error, "distlock_app.E031")]

    @abstractmethod
    def look_around(self, session: S) -> Iterator[checks.CheckMessage]:
        """Yield what makes these locks unreliable on this server."""

    def close(self) -> None:
        self._pool.close()

    def after_fork(self) -> None:
        self._pool.forget()
        self._begin()

    def _take(self, claim: Claim, timeout: float) -> Grant | None:
        while True:
            session = self._lend()
            try:
                return self._take_on(session, claim, timeout)
            except ConnectionLost:
                if not session.kept:
                    raise

    def _refuse_what_was_given_up(self, claim: Claim) -> None:
        if self._given_up.pop((claim.owner, claim.key), None) is not None:
            raise BackendError(self._says("the wait was given up"))

    def _take_on(self, session: S, claim: Claim, timeout: float) -> Grant | None:
        claim_key = (claim.owner, claim.key)
        try:
            with self._mutex:
                self._refuse_what_was_given_up(claim)
                session.claim, session.waits = claim, True
                self._taken[claim_key] = session  # before it is asked: release() has to find it
        except BackendError:
            self._pool.give_back(session)
            raise
        try:
            granted = session.take(claim, timeout)
            with self._mutex:
                session.waits = False
                given_up = self._taken.get(claim_key) is not session
                if granted is None and not given_up:
                    del self._taken[claim_key]
        except BaseException as error:
            given_up = self._taken.get(claim_key) is not session
            self._drop(session)
            if isinstance(error, ServerError) and not given_up:
                raise ConnectionLost(self._says(error)) from error
            self._stop(session)  # before another one is opened
            if isinstance(error, ServerError):  # release() hung up: it is not to line up again
                raise BackendError(self._says("the wait was given up")) from error
            if isinstance(error, ReplyTimeout):
                raise BackendError(self._says(error)) from error
            raise
        if given_up:
            self._pool.drop(session)
            raise BackendError(self._says("the wait was given up"))
        if granted is None:
            self._pool.give_back(session)
            return None
        session.fence, began = granted
        return Grant(claim, session.fence, asked_at=began, session=session)

    def _note_given_up(self, claim: Claim) -> None:
        now = monotonic()
        while self._given_up and next(iter(self._given_up.values())) <= now - SLICE:
            del self._given_up[next(iter(self._given_up))]
        self._given_up[claim.owner, claim.key] = now

    def _session_of(self, grant: Grant) -> S | None:
        session = self._taken.get((grant.claim.owner, grant.claim.key))
        return session if grant.session in (None, session) else None

    def _ask(self, session: S, ttl: float) -> bool:
        """Ask whether the lock is still the session's; raise BackendError if there is no answer."""
        claim: Any = session.claim
        try:
            with _exclusive(session):
                try:
                    if ttl > session.ttl:
                        session.keep(ttl)
                    statement, values = session.question(claim)
                    rows = session.ask(statement, *values)
                except ServerError as error:
                    answer = self._after_error(session, error)
                else:
                    answer = self._confirmed(session, rows)
        except ReplyTimeout as error:
            raise BackendError(self._says(error)) from error
        except BaseException:
            self._drop(session)
            raise
        if isinstance(answer, BackendError):
            raise answer
        return answer

    def _begin_beat(self, session: S, claim: Claim, now: float) -> bool | BackendError | None:
        """Ask if it is time to; return True, or else the answer to the core."""
        try:
            if not session.awaiting_reply and not session.heard(0):
                if now < session.asked_at + min(claim.ttl / 3, ASK_EVERY):
                    return None
            statement, values = session.question(claim)
            session.begin_to_ask(statement, *values)
        except ReplyTimeout as error:
            return BackendError(self._says(error))
        except ServerError as error:
            return self._after_error(session, error)
        return True

    def _finish_beat(self, session: S, asked_at: float) -> bool | BackendError:
        try:
            rows = session.finish_asking(asked_at)
        except ServerError as error:
            return self._after_error(session, error)
        return self._confirmed(session, rows)

    def _after_error(self, session: S, trouble: ServerError) -> bool | BackendError:
        """Return False if the session is gone; one that only refused a question has its lock."""
        try:
            if session.awaiting_reply:
                raise trouble
            session.wait(f"SELECT {session.note()} 1", BEAT_WAIT)
        except ServerError:
            self._drop(session)
            return False
        except ReplyTimeout:
            pass
        return BackendError(self._says(trouble))

    def _confirmed(self, session: S, rows: Any) -> bool:
        if bool(rows) and rows[0][0] in (1, "t"):
            return True
        self._drop(session)
        return False

    def _stop(self, session: S) -> None:
        """Take a session out of the server's queue; it may get the lock for a moment."""
        with suppress(BackendError):
            self._question(lambda other: other.stop(session.number))

    def _drop(self, session: S) -> None:
        """Close a session, and forget what it held."""
        claim = session.claim
        with self._mutex:
            if claim and self._taken.get((claim.owner, claim.key)) is session:
                del self._taken[claim.owner, claim.key]
        self._pool.drop(session)

    def _lend(self) -> S:
        try:
            return self._pool.lend()  # type: ignore[return-value]
        except (DjangoDatabaseError, ServerError, ReplyTimeout) as error:
            raise BackendError(self._says(error)) from error

    def _question(self, work: Callable[[S], T]) -> T:
        """Do `work` on a session that holds nothing."""
        with self._asking():
            while True:
                session = self._lend()
                try:
                    answer = work(session)
                except BaseException as error:
                    self._pool.drop(session)
                    if not isinstance(error, (ServerError, ReplyTimeout)):
                        raise
                    if not session.kept:
                        raise BackendError(self._says(error)) from error
                else:
                    self._pool.give_back(session)
                    return answer

    def _says(self, error: Any) -> str:
        return f"{type(self).__name__} on {self.using!r}: {error}"


class _exclusive:
    """The right to ask a session, which a heartbeat may have; raises ReplyTimeout."""

    __slots__ = ("_session",)

    def __init__(self, session: ServerSession) -> None:
        self._session = session

    def __enter__(self) -> None:
        if not self._session.mutex.acquire(timeout=ANSWER_WAIT):
            raise ReplyTimeout("the session is busy")

    def __exit__(self, *exc_info: object) -> None:
        self._session.mutex.release()
