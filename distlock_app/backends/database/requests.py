"""Requests to the lock table: each on a connection of our own, once more if that had died."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from django.db import Error as DjangoDatabaseError
from django.db import InterfaceError

from ...claims import Claim
from ...errors import BackendError
from ...primitives.timing import monotonic
from ..base import BaseLockBackend
from ..sessions.pool import ConnectionLost
from .connections import QueuedConnection, Session, Sessions
from .sql.base import ANSWER_WAIT

T = TypeVar("T")

# SQLite, MySQL and MariaDB, PostgreSQL.
NO_TABLE = re.compile("no such table|Table .* doesn't exist|relation .* does not exist")

# Seconds without a queue after the server refused a connection.
POLLS_FOR = 60.0


class Contended(BackendError):
    """Others were changing the same rows for too long; trying again may help."""


class Requests(BaseLockBackend):
    """Asks the database, and closes what it asked on."""

    using: str  # alias of DATABASES
    _sessions: Sessions
    _polls_until: float  # by monotonic(): no connection stays with a claim until then

    def ping(self) -> None:
        self._ask(lambda s: s.dialect.ping(s.cursor))

    def close(self) -> None:
        self._sessions.close()

    def after_fork(self) -> None:
        self._sessions.forget()

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
            except ConnectionLost:
                self._sessions.close_idle()
                work = again or work
        seconds = min(within or ANSWER_WAIT, ANSWER_WAIT)
        if not self._sessions.semaphore.acquire(seconds, urgent=urgent):
            raise Contended(self._says("all connections of this process are busy"))
        try:
            session = self._lend()
            try:
                return self._attempt(session, work)
            except ConnectionLost:
                if not session.kept:
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

    def _free_queue(self, claim_key: tuple[str, str]) -> None:
        """Let the next one in the queue come, whatever became of the row.

        By a statement: the server frees nothing of a connection before it has noticed its end.
        """
        queued = self._sessions.unpark(claim_key)
        if queued is not None:
            self._ask(partial(self._unlock, queued), on=queued.session)

    def _unlock(self, queued: QueuedConnection, session: Session) -> None:
        if session is queued.session:  # else it had died, and the queue lock with it
            if queued.wake_fd is not None:  # the answer to line_up() comes before that of unlock()
                queued.wake_fd = None
                session.dialect.called(session.wrapper)
            session.dialect.unlock(session.cursor)
            queued.detach()

    def _unless_contended(self, work: Callable[[Session], int]) -> int:
        try:
            return self._ask(work)
        except Contended:
            return 0


def claim_key_of(claim: Claim) -> tuple[str, str]:
    """Return what the connections that stay with a claim are found by."""
    return claim.key, claim.owner  # a stable owner may have several locks
