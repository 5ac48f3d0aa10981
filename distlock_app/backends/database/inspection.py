"""Inspection of the lock table: list, clear, prolong, purge rows that were long free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import sleep

from django.core import checks

from ...claims import Claim, Grant, Holding
from ...errors import BackendError
from ...primitives.timing import monotonic
from ..base import Purgeable, no_answer
from ..sessions.pool import Contended
from . import members
from .checks import check_sharing, check_table
from .connections import Session
from .queueing import Queueing
from .sql.base import NO_ROW, PAGE, LockRow
from .sql.statements import PURGED

# Keys are lower-case hex digits, which "g" follows.
ALL_KEYS = ("", "g")
# They are hashes, so these parts are alike: short statements that read each row once.
PARTS = [f"{part:02x}" for part in range(256)]

# A live row, and how many processes wait for its lock; None: unknown.
Found = tuple[LockRow, int | None]


class Inspection(Queueing, Purgeable):
    """Reads and changes rows of any owner."""

    def holders(self, key: str | None = None) -> Iterator[Holding]:
        first, last = (key, key) if key else ALL_KEYS
        while True:
            found = self._sessions.ask(partial(self._read_holders, first, last))
            for row, waiters in found:
                yield from self._holdings(row, waiters)
            if len(found) < PAGE:
                return
            first = found[-1][0].key + "0"  # what follows that key

    def page(self, start: int, count: int) -> tuple[list[Holding], int]:
        def read(session: Session) -> tuple[list[Found], int]:
            rows = self._read_holders(*ALL_KEYS, session, start=start, count=count)
            return rows, session.dialect.count(session.cursor)

        rows, total = self._sessions.ask(read)
        return [holding for row in rows for holding in self._holdings(*row)], total

    def _holdings(self, row: LockRow, waiters: int | None) -> Iterator[Holding]:
        return (holding for _, holding in members.holdings(row, self.alias, waiters))

    def _read_holders(self, first: str, last: str, session: Session, **page: int) -> list[Found]:
        """Read live rows."""
        dialect, cursor = session.dialect, session.cursor
        rows = dialect.holders(cursor, first, last, **page)
        if not (rows and self._queue and session.can_queue):  # waiters poll: nobody knows of them
            return [(row, None) for row in rows]
        waiting = dict(dialect.waiting(cursor))
        return [(row, waiting.get(dialect.queue_of(row.key), 0)) for row in rows]

    def clear(self, key: str, if_version: str | None = None) -> int:
        def which(_: str, fence: int) -> bool:
            return if_version in (None, str(fence))

        cleared = self._sessions.ask(partial(members.remove, key, which))
        for claim_key in self._sessions.holding(key) if cleared else ():
            self._sessions.free_queue(claim_key)
        return cleared

    def prolong(self, key: str, version: str, ttl: float) -> bool:
        row = self._sessions.ask(lambda s: s.dialect.read(s.cursor, key)) or NO_ROW
        for owner, holding in members.holdings(row, self.alias, None):
            if holding.version == version:
                # A permit is extended as a reader is.
                shared = holding.kind != "exclusive"
                claim = Claim(name="", key=key, owner=owner, ttl=ttl, holder="", shared=shared)
                return self.extend(Grant(claim), ttl)
        return False

    def left_over(self, older_than: float) -> tuple[int, int]:
        return self._sessions.ask(lambda s: s.dialect.left_over(s.cursor, older_than))

    def clear_expired(self) -> int:
        """Free the rows of holders that did not renew them, which may yet try; return how many.

        Other owners may take such a lock anyway. From now on its holder may not, and is behind
        the next fence.
        """
        return sum(map(self._clear_part, PARTS))

    def purge(self, older_than: float) -> int:
        """Delete the rows of names that were free for `older_than` seconds; return how many.

        Their fences go on from the server's clock, so let it be longer than that clock may
        ever be set back.
        """
        return sum(self._purge_part(part, older_than) for part in PARTS)

    def _clear_part(self, part: str) -> int:
        return self._unless_contended(lambda s: s.dialect.clear_expired(s.cursor, part))

    def _purge_part(self, part: str, older_than: float) -> int:
        total = 0
        while True:
            began = monotonic()
            deleted = self._unless_contended(lambda s: s.dialect.purge(s.cursor, older_than, part))
            total += deleted
            if deleted < PURGED or self._sessions.dialect.locks_rows:
                return total
            sleep(monotonic() - began)  # on SQLite there is one writer at a time

    def _unless_contended(self, work: Callable[[Session], int]) -> int:
        try:
            return self._sessions.ask(work)
        except Contended:
            return 0

    def ping(self) -> None:
        self._sessions.ask(lambda s: s.dialect.ping(s.cursor))

    def check(self, *, ask: bool = False) -> list[checks.CheckMessage]:
        found = [*check_sharing(self.alias, self.using)]
        if ask:
            try:
                found += self._sessions.ask(partial(check_table, self.alias))
            except BackendError as error:
                found.append(no_answer(self.alias, error, "distlock_app.E011"))
        return found
