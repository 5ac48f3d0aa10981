"""Requests to the lock table: each on a connection of our own, once more if that had died."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from django.db import Error as DatabaseError

from ...errors import BackendError
from ..base import BaseLockBackend, ConnectionLost
from ..sessions.link import ANSWER_WAIT
from .connections import Contended, Session, Sessions

T = TypeVar("T")

# SQLite, MySQL and MariaDB, PostgreSQL.
NO_TABLE = re.compile("no such table|Table .* doesn't exist|relation .* does not exist")


class Requests(BaseLockBackend):
    """Asks the database, and closes what it asked on."""

    using: str  # alias of DATABASES
    _sessions: Sessions

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
        within: float | None = None,
        urgent: bool = False,
    ) -> T:
        """Do `work` on a connection of our own, and once more if an idle one had died.

        The server may have closed it (restart, KILL, wait_timeout). Whatever became of the
        first attempt, it is harmless: every verb is checked by owner. Wait for a connection
        `within` so many seconds: `urgent` requests before the others.
        """
        sessions = self._sessions
        if not sessions.semaphore.acquire(min(within or ANSWER_WAIT, ANSWER_WAIT), urgent=urgent):
            raise Contended(self._says("all connections of this process are busy"))
        try:
            session = sessions.lend()
            try:
                return self._attempt(session, work, session)
            except ConnectionLost:
                if not session.kept:
                    raise
            sessions.close_idle()
            session = sessions.lend()
            return self._attempt(session, again or work, session)
        except DatabaseError as error:  # by connecting
            raise BackendError(self._says(error)) from error
        finally:
            sessions.semaphore.release()

    def _attempt(self, session: Session, work: Callable[..., T], *args: Any) -> T:
        """Do `work` on this connection; close it if that raises, else give it back to be lent."""
        try:
            answer = work(*args)
        except BaseException as error:
            if (kind := session.failed(error)) is None:
                raise
            raise kind(self._says(error)) from error
        if not session.parked:
            self._sessions.give_back(session)
        return answer

    def _says(self, error: BaseException | str) -> str:
        text = str(error)
        if NO_TABLE.search(text):  # PostgreSQL quotes the statement below
            hint = f"run: manage.py migrate distlock_app --database={self.using}"
            text = f"{text.splitlines()[0]} ({hint})"
        return f"lock table on {self.using!r}: {text}"

    def _unless_contended(self, work: Callable[[Session], int]) -> int:
        try:
            return self._ask(work)
        except Contended:
            return 0
