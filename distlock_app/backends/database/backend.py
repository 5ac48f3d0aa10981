"""`DatabaseBackend`: locks in a table of any database, one row for each name."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from time import sleep
from typing import Any, TypeVar

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DjangoDatabaseError
from django.db import InterfaceError, connections
from django.db.transaction import mark_for_rollback_on_error

from ...claims import Busy, Claim, Grant, Holding
from ...errors import BackendError
from ...primitives.names import checked_key, shown
from ...primitives.timing import Deadline, full_jitter, monotonic
from ...primitives.transactions import fence_of
from ..base import BaseLockBackend, InTransaction, Purgeable
from ..sessions.pool import ConnectionLost, database_of
from ..sessions.queues import Waiter
from .checks import check_sharing, check_table
from .connections import QueuedConnection, Session, Sessions
from .sql import Dialect, dialect_for
from .sql.base import ANSWER_WAIT, MAX_FENCE, PAGE, PURGED, ROW_WAIT, Pair, Step

T = TypeVar("T")

# Rows extended by one statement; SQLite allows 999 parameters before 3.32.
BATCH = 400

# Keys are lower-case hex digits, which "g" follows.
ALL_KEYS = ("", "g")
# They are hashes, so these parts are alike: short statements that read each row once.
PARTS = [f"{part:02x}" for part in range(256)]

# SQLite, MySQL and MariaDB, PostgreSQL.
NO_TABLE = re.compile("no such table|Table .* doesn't exist|relation .* does not exist")

# Seconds without a queue after the server refused a connection.
POLLS_FOR = 60.0


class Contended(BackendError):
    """Others were changing the same rows for too long; trying again may help."""


class DatabaseBackend(BaseLockBackend, InTransaction, Purgeable):
    """LOCATION is an alias of DATABASES; every question travels on a connection of our own.

    Never on the caller's, so the caller's transaction neither hides a lock from others nor
    takes it back, and it may be broken.
    """

    fences = True
    prolongs = True

    def __init__(self, *, alias: str, location: Any = None, queue: int = 8) -> None:
        """Let at most `queue` connections of a process stay with claims; with 0 waiters poll."""
        super().__init__(alias=alias, location=location)
        self.using = database_of(alias, location)
        if not isinstance(queue, int) or queue < 0:
            raise ImproperlyConfigured(
                f"DISTLOCK[{alias!r}]: QUEUE must be a whole number from 0, not {queue!r}"
            )
        self._queue = queue
        self._polls_until = 0.0
        give_up = weakref.WeakMethod(self._give_up)
        self._sessions = Sessions(
            self.using, queue, lambda queued: (give_up() or QueuedConnection.give_up)(queued)
        )

    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy:
        queues = self._sessions.queues
        waiter = queues.waiter_of(_claim_key(claim))
        self._free_queue(_claim_key(claim))  # if it was granted before, and asks again
        if wait != 0:
            if waiter is None and queues.has_waiters(claim.key):
                waiter = queues.enqueue(_claim_key(claim), claim.wake)
            if waiter is not None and not queues.leads(waiter):
                return Busy(ticket=waiter, will_wake=True)
        try:
            answer = self._lead(waiter, claim, wait) if waiter else self._join(claim, wait)
        except Contended as error:
            self._refuse_to_wait_for_itself(claim, error)
            answer = Busy(ticket=waiter)
        if waiter is not None and (answer or wait == 0):
            queues.leave(waiter)
        return answer

    def look(self, claim: Claim) -> Busy | None:
        queues = self._sessions.queues
        waiter = queues.waiter_of(_claim_key(claim))
        if waiter is not None and waiter.queue is not None:
            if waiter.connection is not None:
                return None  # another one leads, or did: it is not to wait for that one
            if not queues.leads(waiter):
                return Busy()
            queued = waiter.queue.connection
            if not waiter.asked or (queued is not None and queued.wake_fd and queued.called()):
                return None
        return self._look(claim)

    def _look(self, claim: Claim) -> Busy | None:
        try:
            return self._ask(lambda s: s.dialect.look(s.cursor, claim))
        except Contended:
            return Busy()

    def extend(self, grant: Grant, ttl: float, *, exactly: bool = False) -> bool:
        ours = self._ask(
            lambda s: s.dialect.extend(s.cursor, grant.claim, ttl, exactly=exactly), urgent=True
        )
        if not ours:
            self._leave(grant.claim)
        return ours

    def end_in(self, grant: Grant, ttl: float) -> bool:
        return self.extend(grant, ttl, exactly=True)

    def extend_many(self, work: Sequence[tuple[Grant, float]]) -> list[bool | Exception]:
        """Extend by one statement for each 400 claims of one ttl."""
        indexes: dict[float, list[int]] = {}
        for index, (_, ttl) in enumerate(work):
            indexes.setdefault(ttl, []).append(index)
        results: list[bool | Exception] = [False] * len(work)
        for same in indexes.values():
            for start in range(0, len(same), BATCH):
                batch = same[start : start + BATCH]
                answers = self._extend_batch([work[index] for index in batch])
                for index, answer in zip(batch, answers, strict=True):
                    results[index] = answer
                    if answer is False:
                        self._leave(work[index][0].claim)
        return results

    def release(self, grant: Grant) -> bool:
        waiter = self._sessions.queues.waiter_of(_claim_key(grant.claim))
        if waiter is not None:
            self._sessions.queues.leave(waiter)
        queued = self._sessions.unpark(_claim_key(grant.claim))
        again = partial(self._release_again, grant)
        if queued is not None and queued.fresh:
            release = partial(self._release_to_next, queued, grant.claim)
            return self._ask(release, again=again, on=queued.session, urgent=True)
        if queued is not None:
            queued.give_up()
        release = partial(_release, grant.claim)
        try:
            return self._ask(release, again=again, urgent=True)
        finally:
            if grant.fence is None:  # given up: the process may end after this
                self._sessions.queues.drop_dead()

    def pin(self, grant: Grant, ttl: float) -> bool:
        return self._in_transaction(lambda d, cursor: d.extend(cursor, grant.claim, ttl))

    def release_at_commit(self, grant: Grant) -> bool:
        released = self._in_transaction(lambda d, cursor: d.release(cursor, grant.claim))
        self._free_queue(_claim_key(grant.claim))  # the next one waits for the row
        return released

    def lock_row(self, key: str, wait: float | None) -> int | Busy | None:
        checked_key(key)  # PostgreSQL takes no values beside several statements
        deadline, attempt = Deadline(wait), 0
        connection = connections[self.using]
        if connection.vendor == "sqlite":
            # Not with the file locked: then nobody could release.
            while any(self.holders(key)):
                if deadline.remaining() == 0:
                    return Busy()
                sleep(deadline.cap(full_jitter(attempt, base=self.poll_min, cap=self.poll_max)))
                attempt += 1
        elif getattr(connection, "mysql_is_mariadb", False):
            # Its SKIP LOCKED may be granted a row that is just being leased, and keep it locked.
            return None
        left = deadline.remaining()
        return self._in_transaction(lambda d, cursor: d.lock_row(cursor, key, left))

    def _in_transaction(self, work: Callable[[Dialect, Any], T]) -> T:
        connection: Any = connections[self.using]
        connection.validate_no_broken_transaction()
        dialect = self._sessions.dialect or dialect_for(connection)
        with (
            mark_for_rollback_on_error(self.using),
            connection.wrap_database_errors,
            closing(dialect.cursor(connection)) as cursor,
        ):
            return work(dialect, cursor)

    def holders(self, key: str | None = None) -> Iterator[Holding]:
        yield from map(self._holding, self._rows(key))

    def page(self, start: int, count: int) -> tuple[list[Holding], int]:
        def read(session: Session) -> tuple[Any, int]:
            dialect, cursor = session.dialect, session.cursor
            rows = dialect.holders(cursor, *ALL_KEYS, start=start, count=count)
            return rows, dialect.count(cursor)

        rows, total = self._ask(read)
        return list(map(self._holding, rows)), total

    def _holding(self, row: Any) -> Holding:
        key, name, fence, holder, left_us, held_us = row
        return Holding(
            name=name,
            key=key,
            alias=self.alias,
            version=str(fence),
            fence=fence,
            expires_in=left_us / 1e6,
            held_for=None if held_us is None else held_us / 1e6,
            holder=_as_mapping(holder),
        )

    def _rows(self, key: str | None) -> Iterator[Any]:
        first, last = (key, key) if key else ALL_KEYS
        while True:
            read = partial(_read_holders, first, last)
            yield from (rows := self._ask(read))
            if key is not None or len(rows) < PAGE:
                return
            first = rows[-1][0] + "0"  # what follows that key

    def clear(self, key: str, if_version: str | None = None) -> int:
        fences = (0, MAX_FENCE) if if_version is None else (fence := _fence_of(if_version), fence)
        cleared = self._ask(lambda s: s.dialect.clear(s.cursor, key, fences))
        for claim_key in self._sessions.holding(key) if cleared else ():
            self._free_queue(claim_key)
        return cleared

    def prolong(self, key: str, version: str, ttl: float) -> bool:
        owner = self._ask(lambda s: s.dialect.owner_of(s.cursor, key, _fence_of(version)))
        if owner is None:
            return False
        return self.extend(Grant(Claim(name="", key=key, owner=owner, ttl=ttl, holder="")), ttl)

    def left_over(self, older_than: float) -> tuple[int, int]:
        return self._ask(lambda s: s.dialect.left_over(s.cursor, older_than))

    def clear_expired(self) -> int:
        """Free the rows of holders that did not renew them, which may yet try; return how many.

        Other owners may take such a lock anyway. From now on its holder may not, and is behind
        the next fence.
        """
        clear = [partial(_clear_part, part) for part in PARTS]
        return sum(self._unless_contended(part) for part in clear)

    def purge(self, older_than: float) -> int:
        """Delete the rows of names that were free for `older_than` seconds; return how many.

        Their fences go on from the server's clock, so let it be longer than that clock may
        ever be set back.
        """
        return sum(self._purge_part(part, older_than) for part in PARTS)

    def _purge_part(self, part: str, older_than: float) -> int:
        total = 0
        while True:
            began = monotonic()
            deleted = self._unless_contended(partial(_purge_part, part, older_than))
            total += deleted
            if deleted < PURGED or self._sessions.dialect is None:
                return total
            if self._sessions.dialect.locks_rows:
                return total
            sleep(monotonic() - began)  # on SQLite there is one writer at a time

    def ping(self) -> None:
        self._ask(lambda s: s.dialect.ping(s.cursor))

    def check(self, *, ask: bool = False) -> list[checks.CheckMessage]:
        asked = check_table(self.alias, self._sessions) if ask else []
        return [*check_sharing(self.alias, self.using), *asked]

    def close(self) -> None:
        self._sessions.close()

    def after_fork(self) -> None:
        self._sessions.forget()

    def _lead(self, waiter: Waiter, claim: Claim, wait: float | None) -> Grant | Busy:
        """Ask for a line of this process, or at the deadline for one claim_key stands in it."""
        queued, asked = self._sessions.queues.connection_of(waiter), waiter.asked
        waiter.asked = True
        if queued is None:
            return self._join(claim, wait, waiter)
        if queued.called():
            return self._take_turn(queued, waiter, claim, wait)
        if wait != 0 and not asked:  # another one has lined up on the server before it left
            return Busy(wake_fd=queued.wake_fd, ticket=waiter)
        answer = self._join(claim, 0)
        if isinstance(answer, Grant):
            return answer
        return Busy(answer.free_in, wake_fd=queued.wake_fd, ticket=waiter)

    def _join(self, claim: Claim, wait: float | None, waiter: Waiter | None = None) -> Grant | Busy:
        """Take the row with the queue lock, or line up; by polling if no connection may stay."""
        queued = None if monotonic() < self._polls_until else self._sessions.reserve()
        if queued is not None:
            try:
                return self._ask(partial(self._join_on, queued, waiter, claim, wait), within=wait)
            finally:
                if queued.session is None:
                    queued.give_up()
        answer = self._ask(lambda s: _try(s, claim, wait), within=wait)
        if isinstance(answer, Grant) or wait == 0 or not self._queue:
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
        dialect = session.dialect
        if session.can_queue is None:
            session.can_queue = dialect.can_queue(session.wrapper, session.cursor)
        if not session.can_queue:
            return _try(session, claim, wait)
        answer = _try(session, claim, wait, "join" if wait == 0 else "wait")
        if isinstance(answer, Grant):
            queued.keep(session)
            return self._granted(queued, answer)
        return answer if wait == 0 else self._line_up(waiter, claim, answer, queued, session)

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
        waiter = waiter or queues.enqueue(_claim_key(claim), claim.wake)
        if not queues.leads(waiter):
            return Busy(ticket=waiter, will_wake=True)
        waiter.asked = True
        queue = waiter.queue
        if queued and session and queue is not None and queue.connection is None:
            queued.wake_fd = session.dialect.line_up(session.wrapper, claim.key)
            queued.keep(session)
            queues.attach(waiter, queued)
            return Busy(answer.free_in, wake_fd=queued.wake_fd, ticket=waiter)
        return Busy(answer.free_in, ticket=waiter)

    def _take_turn(
        self, queued: QueuedConnection, waiter: Waiter, claim: Claim, wait: float | None
    ) -> Grant | Busy:
        queues = self._sessions.queues
        session: Any = queued.session
        try:
            answer = self._attempt(session, partial(self._take_turn_on, queued, claim, wait))
        except BaseException as error:
            queues.detach(waiter, queued)
            queued.give_up()
            if not isinstance(error, ConnectionLost):
                raise
            answer = None
        if answer is None:
            queues.detach(waiter, queued)
            return self._join(claim, wait, waiter)
        if isinstance(answer, Grant):
            queues.detach(waiter, queued)
            return self._granted(queued, answer)
        return Busy(answer.free_in, ticket=waiter)

    def _take_turn_on(
        self, queued: QueuedConnection, claim: Claim, wait: float | None, session: Session
    ) -> Grant | Busy | None:
        if queued.wake_fd is not None:
            queued.wake_fd = None
            if not session.dialect.called(session.wrapper):  # the server waited long enough
                queued.detach()
                return None
        return _try(session, claim, wait, "turn")

    def _granted(self, queued: QueuedConnection, answer: Grant) -> Grant:
        """Let the connection, which has the queue lock, stay until the release."""
        self._sessions.park(_claim_key(answer.claim), queued)
        return Grant(answer.claim, fence=answer.fence, session=queued)

    def _leave(self, claim: Claim) -> None:
        queued = self._sessions.unpark(_claim_key(claim))
        if queued is not None:
            queued.give_up()

    def _free_queue(self, claim_key: tuple[str, str]) -> None:
        """Let the next one in the queue come, whatever became of the row.

        By a statement: the server frees nothing of a connection before it has noticed its end.
        """
        queued = self._sessions.unpark(claim_key)
        if queued is not None:
            self._ask(partial(self._unlock, queued), on=queued.session)

    def _give_up(self, queued: QueuedConnection) -> None:
        """Leave the server's queue."""
        waiting = queued.session
        try:
            # Else the server would call a waiter that has gone. Again, if our first request
            # overtook the ones before.
            for _ in range(3):
                if waiting is None or queued.called():
                    break
                self._ask(lambda s: s.dialect.leave(waiting.wrapper, s.cursor))
                queued.called(within=0.3)
        except Exception:
            pass  # The server ends the wait before long.
        finally:
            queued.give_up()

    def _release_to_next(self, queued: QueuedConnection, claim: Claim, session: Session) -> bool:
        if session.dialect.release_to_next(session.cursor, claim):
            queued.detach()
            return True
        queued.give_up()
        return False

    def _unlock(self, queued: QueuedConnection, session: Session) -> None:
        if session is queued.session:  # else it had died, and the queue lock with it
            session.dialect.unlock(session.cursor)
            queued.detach()

    def _ask(
        self,
        work: Callable[[Session], T],
        *,
        again: Callable[[Session], T] | None = None,
        on: Session | None = None,
        within: float | None = None,
        urgent: bool = False,
    ) -> T:
        """Do `work` on a connection of our own, and once more if an idle one had died.

        The server may have closed it (restart, KILL, wait_timeout). Whatever became of the
        first attempt, it is harmless: every verb is checked by owner. Wait for a connection
        `within` so many seconds: `urgent` requests before the others.
        """
        if on is not None:
            try:
                return self._attempt(on, work)
            except (Contended, ConnectionLost) as error:
                if isinstance(error, Contended):
                    raise
            self._sessions.close_idle()
            work = again or work
        seconds = min(within or ANSWER_WAIT, ANSWER_WAIT)
        if not self._sessions.semaphore.acquire(seconds, urgent=urgent):
            raise Contended(self._says("all connections of this process are busy"))
        try:
            session = self._lend()
            try:
                return self._attempt(session, work)
            except (Contended, ConnectionLost) as error:
                if isinstance(error, Contended) or not session.kept:
                    raise
            self._sessions.close_idle()
            return self._attempt(self._lend(), again or work)
        finally:
            self._sessions.semaphore.release()

    def _attempt(self, session: Session, work: Callable[[Session], T]) -> T:
        database = session.wrapper.Database
        try:
            answer = work(session)
        except BaseException as error:
            # Whatever it is: after a KeyboardInterrupt, too, its transaction may hold the row.
            session.close()
            if not isinstance(error, (database.Error, DjangoDatabaseError)):
                raise
            kind: type[BackendError] = BackendError
            if session.dialect.contended(error):
                kind = Contended
            elif isinstance(
                error, (database.OperationalError, database.InterfaceError, InterfaceError)
            ):
                kind = ConnectionLost
            raise kind(self._says(error)) from error
        if not session.parked:
            self._sessions.give_back(session)
        return answer

    def _lend(self) -> Session:
        try:
            return self._sessions.lend()
        except DjangoDatabaseError as error:
            if not self._sessions.any_stay():
                raise BackendError(self._says(error)) from error
        # The server may have no more connections to give: renewals come before the queue.
        self._polls_until = monotonic() + POLLS_FOR
        self._sessions.close()
        try:
            return self._sessions.lend()
        except DjangoDatabaseError as error:
            raise BackendError(self._says(error)) from error

    def _says(self, error: BaseException | str) -> str:
        hint = f" (run: manage.py migrate distlock_app --database={self.using})"
        return f"lock table on {self.using!r}: {error}" + hint * bool(NO_TABLE.search(str(error)))

    def _release_again(self, grant: Grant, session: Session) -> bool:
        """Release after a first attempt that may have arrived, although its answer did not."""
        if session.dialect.release(session.cursor, grant.claim):
            return True
        if grant.fence is None or session.dialect.released(session.cursor, grant):
            return grant.fence is not None
        raise BackendError(f"lock table on {self.using!r}: the answer to a release was lost")

    def _unless_contended(self, work: Callable[[Session], int]) -> int:
        try:
            return self._ask(work)
        except Contended:
            return 0

    def _extend_batch(self, work: Sequence[tuple[Grant, float]]) -> list[bool | Exception]:
        pairs = [(grant.claim.key, grant.claim.owner) for grant, _ in work]
        try:
            extend = partial(_extend_pairs, pairs, work[0][1])
            ours = self._ask(extend, urgent=True)
        except Exception as error:
            dialect = self._sessions.dialect
            if isinstance(error, Contended) and dialect and dialect.locks_rows:
                # One row is in another transaction: the others must not expire for it.
                return super().extend_many(work)
            return [error] * len(work)
        return [pair in ours for pair in pairs]

    def _refuse_to_wait_for_itself(self, claim: Claim, error: Contended) -> None:
        """Raise if the transaction of the thread that asks for the lock keeps it from it."""
        ours: Any = connections[self.using]
        if fence_of(ours, self.alias, claim.key) is not None:
            raise BackendError(
                f"This thread's own transaction holds {shown(claim.name)!r}, by"
                " lock_in_transaction(), and would wait for itself."
            ) from error
        for other in connections.all(initialized_only=True):
            same_file = other.settings_dict["NAME"] == ours.settings_dict["NAME"]
            if ours.vendor == "sqlite" and same_file and other.in_atomic_block:
                raise BackendError(
                    f"This thread's own transaction has locked the SQLite file of {self.using!r},"
                    " and would wait for itself. Take the lock before atomic(), or give the"
                    " locks a database file of their own (LOCATION)."
                ) from error


def _try(session: Session, claim: Claim, wait: float | None, step: Step = "try") -> Grant | Busy:
    dialect, cursor = session.dialect, session.cursor
    # A row in somebody's transaction would keep a short wait for longer than that.
    short = wait is not None and wait < ROW_WAIT
    refusal = dialect.look(cursor, claim) if short else None
    return dialect.acquire(cursor, claim, step) if refusal is None else refusal


def _release(claim: Claim, session: Session) -> bool:
    return session.dialect.release(session.cursor, claim)


def _extend_pairs(pairs: Sequence[Pair], ttl: float, session: Session) -> set[Pair]:
    return session.dialect.extend_pairs(session.cursor, pairs, ttl)


def _read_holders(first: str, last: str, session: Session) -> Any:
    return session.dialect.holders(session.cursor, first, last)


def _clear_part(part: str, session: Session) -> int:
    return session.dialect.clear_expired(session.cursor, part)


def _purge_part(part: str, older_than: float, session: Session) -> int:
    return session.dialect.purge(session.cursor, older_than, part)


def _fence_of(version: str) -> int:
    """Return the fence of a version; one that no holder has if it is none."""
    is_number = version.isascii() and version.isdecimal() and len(version) <= len(str(MAX_FENCE))
    return min(int(version), MAX_FENCE) if is_number else -1


def _claim_key(claim: Claim) -> tuple[str, str]:
    return claim.key, claim.owner  # a stable owner may have several locks


def _as_mapping(holder: str) -> dict[str, Any]:
    try:
        value = json.loads(holder)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
