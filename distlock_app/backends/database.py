"""The lock table: locks in a database that the project has anyway, one row for each name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeVar

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections
from django.db import Error as DjangoDatabaseError

from ..claims import Busy, Claim, Grant, Holding
from ..errors import BackendError
from .base import BaseLockBackend
from .sessions import Session, Sessions
from .sql import dialect_for
from .sql.base import MAX_FENCE

T = TypeVar("T")

# Rows extended by one statement; SQLite allows 999 parameters before 3.32.
BATCH = 400


class Crowded(BackendError):
    """Others were changing the same rows for too long; trying again may help."""


class Died(BackendError):
    """The connection, or the server, ended before the answer came."""


class DatabaseBackend(BaseLockBackend):
    """LOCATION is an alias of DATABASES; every question travels on a connection of our own.

    Never on the caller's, so the caller's transaction neither hides a lock from others nor
    takes it back, and it may be broken.
    """

    fences = True

    def __init__(self, *, alias: str, location: Any = None) -> None:
        super().__init__(alias=alias, location=location)
        self.using = DEFAULT_DB_ALIAS if location is None else location
        if self.using not in list(connections):
            raise ImproperlyConfigured(
                f"DISTLOCK[{alias!r}]: LOCATION {self.using!r} is no alias of DATABASES"
            )
        self._sessions = Sessions(self.using)

    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy:
        try:
            return self._ask(lambda s: s.dialect.acquire(s.cursor, claim))
        except Crowded as error:
            self._refuse_to_wait_for_itself(error)
            return Busy()

    def look(self, claim: Claim) -> Busy | None:
        try:
            return self._ask(lambda s: s.dialect.look(s.cursor, claim))
        except Crowded:
            return Busy()

    def extend(self, grant: Grant, ttl: float) -> bool:
        return self._ask(lambda s: s.dialect.extend(s.cursor, grant.claim, ttl))

    def extend_many(self, work: Sequence[tuple[Grant, float]]) -> list[bool | Exception]:
        """Extend by one statement for each 400 claims of one ttl."""
        places: dict[float, list[int]] = {}
        for place, (_, ttl) in enumerate(work):
            places.setdefault(ttl, []).append(place)
        results: list[bool | Exception] = [False] * len(work)
        for same in places.values():
            for start in range(0, len(same), BATCH):
                batch = same[start : start + BATCH]
                answers = self._extend_batch([work[place] for place in batch])
                for place, answer in zip(batch, answers, strict=True):
                    results[place] = answer
        return results

    def release(self, grant: Grant) -> bool:
        return self._ask(
            lambda s: s.dialect.release(s.cursor, grant.claim),
            again=lambda s: self._release_again(s, grant),
        )

    def pin(self, grant: Grant, ttl: float) -> bool:
        """Lock the row in the caller's own transaction, where it is the caller's to end.

        The one verb on the caller's connection. Raises Django's database errors.
        """
        connection: Any = connections[self.using]
        connection.validate_no_broken_transaction()
        dialect = self._sessions.dialect or dialect_for(connection)
        with connection.wrap_database_errors, closing(connection.connection.cursor()) as cursor:
            return dialect.extend(cursor, grant.claim, ttl)

    def holders(self, key: str | None = None) -> Iterator[Holding]:
        for row in self._ask(lambda s: s.dialect.holders(s.cursor, key)):
            key_of_row, name, fence, holder, left_us, held_us = row
            yield Holding(
                name=name,
                key=key_of_row,
                alias=self.alias,
                seen=str(fence),
                fence=fence,
                expires_in=left_us / 1e6,
                held_for=None if held_us is None else held_us / 1e6,
                holder=_as_mapping(holder),
            )

    def clear(self, key: str, seen: str | None = None) -> int:
        try:
            fences = (0, MAX_FENCE) if seen is None else (int(seen), int(seen))
        except ValueError:
            return 0
        return self._ask(lambda s: s.dialect.clear(s.cursor, key, fences))

    def purge(self, older_than: float) -> int:
        """Delete the rows of names that nobody has held for `older_than` seconds; return how many.

        Their fences go on from the server's clock, so let it be longer than that clock may
        ever be set back.
        """
        # Keys are hashes, so these parts are alike: short statements that read each row once.
        return sum(self._purge_part(older_than, f"{part:02x}") for part in range(256))

    def ping(self) -> None:
        self._ask(lambda s: s.cursor.execute("SELECT 1") and s.cursor.fetchall())

    def check(self, *, ask: bool = False) -> list[checks.CheckMessage]:
        return [*self._check_settings(), *(self._check_server() if ask else ())]

    def close(self) -> None:
        self._sessions.close()

    def after_fork(self) -> None:
        self._sessions.forget()

    def _ask(
        self, work: Callable[[Session], T], *, again: Callable[[Session], T] | None = None
    ) -> T:
        """Do `work` on a connection of our own, and once more if an idle one had died.

        The server may have closed it (restart, KILL, wait_timeout). Whatever became of the
        first attempt, it is harmless: every verb is checked by owner.
        """
        session = self._lend()
        try:
            return self._attempt(session, work)
        except (Crowded, Died) as error:
            if isinstance(error, Crowded) or not session.kept:
                raise
        self._sessions.close()
        return self._attempt(self._lend(), again or work)

    def _attempt(self, session: Session, work: Callable[[Session], T]) -> T:
        database = session.wrapper.Database
        try:
            answer = work(session)
        except BaseException as error:
            # Whatever it is: after a KeyboardInterrupt, too, its transaction may hold the row.
            session.close()
            if not isinstance(error, database.Error):
                raise
            kind: type[BackendError] = BackendError
            if session.dialect.crowded(error):
                kind = Crowded
            elif isinstance(error, (database.OperationalError, database.InterfaceError)):
                kind = Died
            raise kind(self._says(error)) from error
        self._sessions.give_back(session)
        return answer

    def _lend(self) -> Session:
        try:
            return self._sessions.lend()
        except DjangoDatabaseError as error:
            raise BackendError(self._says(error)) from error

    def _says(self, error: BaseException) -> str:
        return f"lock table on {self.using!r}: {error}"

    def _release_again(self, session: Session, grant: Grant) -> bool:
        """Release after a first attempt that may have arrived, although its answer did not."""
        if session.dialect.release(session.cursor, grant.claim):
            return True
        if grant.fence is None or session.dialect.released(session.cursor, grant):
            return grant.fence is not None
        raise BackendError(f"lock table on {self.using!r}: the answer to a release was lost")

    def _purge_part(self, older_than: float, part: str) -> int:
        try:
            return self._ask(lambda s: s.dialect.purge(s.cursor, older_than, part))
        except Crowded:
            return 0

    def _extend_batch(self, work: Sequence[tuple[Grant, float]]) -> list[bool | Exception]:
        pairs = [(grant.claim.key, grant.claim.owner) for grant, _ in work]
        try:
            ours = self._ask(lambda s: s.dialect.extend_pairs(s.cursor, pairs, work[0][1]))
        except Exception as error:
            dialect = self._sessions.dialect
            if isinstance(error, Crowded) and dialect and dialect.locks_rows:
                # One row is in somebody's transaction: the others must not expire for it.
                return super().extend_many(work)
            return [error] * len(work)
        return [pair in ours for pair in pairs]

    def _refuse_to_wait_for_itself(self, error: Crowded) -> None:
        """Raise if the file is locked by the transaction of the thread that asks for the lock."""
        ours = connections[self.using]
        for other in connections.all(initialized_only=True):
            same_file = other.settings_dict["NAME"] == ours.settings_dict["NAME"]
            if ours.vendor == "sqlite" and same_file and other.in_atomic_block:
                raise BackendError(
                    f"This thread's own transaction has locked the SQLite file of {self.using!r},"
                    " and would wait for itself. Take the lock before atomic(), or give the"
                    " locks a database file of their own (LOCATION)."
                ) from error

    def _check_settings(self) -> Iterable[checks.CheckMessage]:
        ours = connections[self.using]
        names = [settings["NAME"] for settings in connections.settings.values()]
        shared = self.using == DEFAULT_DB_ALIAS or names.count(ours.settings_dict["NAME"]) > 1
        if ours.vendor == "sqlite" and shared:
            yield checks.Warning(
                f"DISTLOCK[{self.alias!r}] keeps its locks in the same SQLite file as other data.",
                hint="A lock waits for every transaction that writes, and cannot be taken inside"
                " of one. Add a database file for locks to DATABASES and name it as LOCATION.",
                id="distlock_app.W011",
            )

    def _check_server(self) -> Iterable[checks.CheckMessage]:
        try:
            session = self._lend()
            with session.wrapper.wrap_database_errors:
                tables = session.wrapper.introspection.table_names()
        except (BackendError, DjangoDatabaseError) as error:
            yield checks.Error(f"DISTLOCK[{self.alias!r}]: {error}", id="distlock_app.E011")
            return
        self._sessions.give_back(session)
        if session.dialect.table_name not in tables:
            yield checks.Error(
                f"DISTLOCK[{self.alias!r}]: the database {self.using!r} has no lock table.",
                hint=f"Run: manage.py migrate distlock_app --database={self.using}",
                id="distlock_app.E012",
            )


def _as_mapping(holder: str) -> dict[str, Any]:
    try:
        value = json.loads(holder)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
