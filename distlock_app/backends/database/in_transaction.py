"""The row of a lock in the transaction of the caller: pinned, released or locked there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from time import sleep
from typing import Any, TypeVar

from django.db import OperationalError, connections
from django.db.transaction import mark_for_rollback_on_error

from ...claims import Busy, Claim, Grant
from ...errors import BackendError
from ...primitives.names import checked_key, shown
from ...primitives.timing import Deadline, full_jitter
from ...primitives.transactions import fence_of
from ..base import InTransaction
from ..sessions.pool import Contended
from ..sessions.queues import claim_key_of
from .queueing import Queueing
from .sql import Dialect

T = TypeVar("T")

# Seconds in which another session's statement has surely changed the row and unlocked it.
STATEMENT = 0.25

# The code of a deadlock on MySQL and MariaDB; see retry_on_deadlock().
DEADLOCK = 1213


class InCallersTransaction(Queueing, InTransaction):
    """On the connection of the caller, whose transaction it is; raises Django's errors."""

    def pin(self, grant: Grant, ttl: float) -> bool:
        claim_keys = [(grant.claim.key, grant.claim.owner)]
        return bool(self._in_transaction(lambda d, cursor: d.extend(cursor, claim_keys, ttl)))

    def release_at_commit(self, grant: Grant) -> bool:
        released = self._in_transaction(lambda d, cursor: d.release_at_commit(cursor, grant.claim))
        self._sessions.free_queue(claim_key_of(grant.claim))  # the next one waits for the row
        return released

    def lock_row(self, key: str, name: str, wait: float | None) -> int | Busy | None:
        # It becomes part of the SQL: PostgreSQL takes no parameters with several statements.
        checked_key(key)
        deadline, attempt = Deadline(wait), 0
        connection = connections[self.using]
        if connection.vendor == "sqlite":
            # Not with the file locked: then nobody could release.
            while any(self.holders(key)):
                if deadline.remaining() == 0:
                    return Busy()
                sleep(deadline.cap(full_jitter(attempt, base=self.poll_min, cap=self.poll_max)))
                attempt += 1
        elif not connection.features.has_select_for_update_skip_locked:
            return None  # such as MariaDB before 10.6
        left, free = deadline.remaining(), Claim(name=name, key=key, owner="", ttl=0, holder="")
        return self._in_transaction(lambda d, cursor: self._lock_row(d, cursor, free, left))

    def _lock_row(
        self, dialect: Dialect, cursor: Any, claim: Claim, wait: float | None
    ) -> int | Busy | None:
        answer = dialect.lock_row(cursor, claim, wait)
        if isinstance(answer, int) or not dialect.may_have_kept(cursor):
            return answer
        give_up = Deadline(STATEMENT)
        while not self._sessions.ask(lambda s: s.dialect.try_row(s.cursor, claim.key)):
            if give_up.remaining():
                sleep(give_up.cap(STATEMENT / 50))
            elif not dialect.try_row(cursor, claim.key):  # another transaction has locked it
                break
            else:
                cursor.execute("ROLLBACK")  # as in a deadlock: to a savepoint frees no row
                raise OperationalError(
                    DEADLOCK, "a Lock took the name just as its row was locked here: try again"
                )
        return answer

    def _in_transaction(self, work: Callable[[Dialect, Any], T]) -> T:
        connection: Any = connections[self.using]
        connection.validate_no_broken_transaction()
        dialect = self._sessions.dialect
        with (
            mark_for_rollback_on_error(self.using),
            connection.wrap_database_errors,
            closing(dialect.cursor(connection)) as cursor,
        ):
            return work(dialect, cursor)

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
