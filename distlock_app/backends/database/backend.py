"""`DatabaseBackend`: locks in a table of any database, one row for each name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ...claims import Busy, Claim, Grant
from ...errors import BackendError
from ...primitives.timing import monotonic
from ..base import ConnectionLost, batches, check_seconds, result_of
from ..sessions.pool import Contended, database_of
from ..sessions.queues import claim_key_of
from . import members
from .connections import QUEUE, RECENT, Session, Sessions
from .in_transaction import InCallersTransaction
from .inspection import Inspection
from .members import kind_of

# Rows extended by one statement; SQLite allows 999 parameters before 3.32.
BATCH = 400


class DatabaseBackend(InCallersTransaction, Inspection):
    """LOCATION is an alias of DATABASES; requests use the backend's own connections.

    Never the caller's: its transaction would hide the lock from others until the commit, take it
    back at a rollback, and refuse all requests once it is broken.
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
        """Keep the settings.

        `queue`: how many connections a process may keep for claims that are held or waited for;
        with 0, waiters poll. `poll_min`, `poll_max`: the first and the longest pause of waiters
        that poll, in seconds.
        """
        super().__init__(alias=alias, location=location)
        self.using = database_of(location)
        if not isinstance(queue, int) or queue < 0:
            raise ImproperlyConfigured(f"QUEUE must be a whole number from 0, not {queue!r}")
        check_seconds(poll_min=poll_min, poll_max=poll_max)
        if poll_min > poll_max:
            raise ImproperlyConfigured("POLL_MIN is longer than POLL_MAX")
        self.poll_min, self.poll_max = poll_min, poll_max
        self._queue = queue
        self._locked: set[str] = set()  # keys whose rows were in other transactions, last we asked
        self._sessions = Sessions(self.using, queue)

    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy:
        if claim.latch:
            return Grant(claim, fence=0) if self.counted(claim.key) >= claim.limit else Busy()
        # Every uncontended lock passes here, so small functions are written out: each call counts.
        sessions, queues = self._sessions, self._sessions.queues
        claim_key = claim_key_of(claim) if claim.stable else (claim.key, claim.owner)
        waiter = queues.waiter_of(claim_key) if queues.by_key else None
        if len(sessions.slots) < self._queue:  # some are kept for claims
            sessions.free_queue(claim_key)  # if it was granted before, and asks again
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
        if waiter is not None and (answer or wait == 0):
            queues.leave(waiter)
        return answer

    def withdraw(self, claim: Claim) -> None:
        queues = self._sessions.queues
        if (waiter := queues.waiter_of(claim_key_of(claim))) is not None:
            queues.leave(waiter)

    def look(self, claim: Claim) -> Busy | None:
        if claim.latch:
            return None
        queues = self._sessions.queues
        waiter = queues.waiter_of(claim_key_of(claim))
        waits = False  # on the server
        if waiter is not None:
            if waiter.connection is not None:
                return None  # it hung, and another waiter took over the queue: it tries by itself
            if not queues.leads(waiter):
                return Busy()
            queued = queues.connection_of(waiter)
            waits = queued is not None and queued.wake_fd is not None
            if not waiter.asked or (waits and queued.called()):
                return None
        try:
            look = partial(members.look, claim, None if waits else self.poll_max)
            return self._sessions.ask(look)
        except Contended:
            return Busy()

    def extend(self, grant: Grant, ttl: float, *, exactly: bool = False) -> bool:
        [answer] = self._extend_batch([(grant, ttl)], exactly=exactly)
        return result_of(answer)

    def end_in(self, grant: Grant, ttl: float) -> bool:
        return self.extend(grant, ttl, exactly=True)

    def extend_many(self, work: Sequence[tuple[Grant, float]]) -> list[bool | Exception]:
        """Extend by one statement for each 400 mutexes of one ttl, or members of one row."""
        groups: defaultdict[Any, list[int]] = defaultdict(list)
        for index, (grant, ttl) in enumerate(work):
            key = grant.claim.key
            if kind_of(grant.claim):
                groups[key].append(index)
            elif key in self._locked:  # by itself: no other renewal waits for the locked row
                groups[key, ttl].append(index)
            else:
                groups[ttl].append(index)
        results: list[bool | Exception] = [False] * len(work)
        for group in groups.values():
            for batch in batches(group, BATCH):
                answers = self._extend_batch([work[index] for index in batch])
                for index, answer in zip(batch, answers, strict=True):
                    results[index] = answer
        return results

    def _probe(self, key: str, **how: Any) -> None:
        """Raise Contended at once if another transaction has the row, instead of after a second."""
        self._sessions.ask(lambda s: s.dialect.probe(s.cursor, key), **how)
        self._locked.discard(key)

    def _extend_batch(
        self, work: Sequence[tuple[Grant, float]], *, exactly: bool = False
    ) -> list[bool | Exception]:
        """Extend mutexes of one ttl, or members of one row."""
        keys = {grant.claim.key for grant, _ in work}
        key = work[0][0].claim.key
        try:
            if key in self._locked:
                self._probe(key, urgent=True)
            answers = self._sessions.ask(partial(_extend, work, exactly), urgent=True)
        except Exception as error:
            if isinstance(error, Contended) and self._sessions.dialect.locks_rows:
                # A row is in another transaction: the others must not expire for it. Until it is
                # found unlocked, no renewal waits for it again.
                self._locked |= keys
                if len(keys) > 1:
                    return [self._extend_batch([one])[0] for one in work]
            return [error] * len(work)
        for (grant, _), ours in zip(work, answers, strict=True):
            if not ours:
                self._sessions.close_kept(claim_key_of(grant.claim))
        return answers

    def count_down(self, claim: Claim) -> int:
        return self._sessions.ask(partial(members.count_down, claim))

    def counted(self, key: str) -> int:
        return self._sessions.ask(partial(members.counted, key))

    def release(self, grant: Grant) -> bool:
        if grant.claim.latch:
            return False
        sessions, claim = self._sessions, grant.claim
        claim_key = claim_key_of(claim) if claim.stable else (claim.key, claim.owner)
        if sessions.queues.by_key and (waiter := sessions.queues.waiter_of(claim_key)) is not None:
            sessions.queues.leave(waiter)
        again = partial(self._release_again, grant)
        queued = sessions.queued.pop(claim_key, None)
        if queued is None:
            return sessions.ask(partial(_release, claim), again=again, urgent=True)
        # While a lease lasts, nobody evicts its connection.
        if (claim.ttl > RECENT and monotonic() < queued.since + RECENT) or queued.fresh:
            session: Any = queued.session
            verb = session.dialect.release_to_next
            try:
                released: bool = sessions.attempt(session, verb, session.cursor, claim)
                (queued.detach if released else queued.give_up)()
                sessions.give_back(session)
                return released
            except ConnectionLost:
                queued.give_up()
                sessions.close_idle()
                return sessions.ask(again, urgent=True)
        # Put back meanwhile: if the server has no connections to spare, this one is closed, too.
        sessions.queued[claim_key] = queued
        try:
            return sessions.ask(partial(_release, claim), again=again, urgent=True)
        finally:
            sessions.close_kept(claim_key)  # last, when the row is free: this calls the next one

    def close(self) -> None:
        self._sessions.close()

    def after_fork(self) -> None:
        self._sessions.forget()

    def _release_again(self, grant: Grant, session: Session) -> bool:
        """Release after a first attempt that may have arrived, although its answer did not."""
        if _release(grant.claim, session):
            return True
        if grant.fence is None:  # it may never have been granted
            return False
        if session.dialect.released(session.cursor, grant):
            return True
        raise BackendError(f"lock table on {self.using!r}: the answer to a release was lost")


def _release(claim: Claim, session: Session) -> bool:
    if claim.shared or claim.limit > 1:
        return members.release(claim, session)
    return session.dialect.release(session.cursor, claim)


def _extend(
    work: Sequence[tuple[Grant, float]], exactly: bool, session: Session
) -> list[bool | Exception]:
    claim, ttl = work[0][0].claim, work[0][1]
    if kind_of(claim):
        # A stable owner may be there twice: for the longer time.
        owners = {grant.claim.owner: ttl for grant, ttl in sorted(work, key=lambda one: one[1])}
        kept = members.extend(claim.key, owners, session, exactly=exactly)
        return [grant.claim.owner in kept for grant, _ in work]
    claim_keys = [(grant.claim.key, grant.claim.owner) for grant, _ in work]
    ours = session.dialect.extend(session.cursor, claim_keys, ttl, exactly=exactly)
    return [claim_key in ours for claim_key in claim_keys]
