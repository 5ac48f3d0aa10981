"""The lock table on every other database that Django knows: the protocol in textbook form.

BEGIN; SELECT ... FOR UPDATE; decide; UPDATE; COMMIT. This is what the other dialects put into one
statement each. Django writes the SQL, so there is no vendor's here.

1. The row is locked before anything is decided. Every time is the server's, as it answered when
   it locked the row. It may be early (the statement began before it had to wait for the row): that
   calls an expiring lease busy, and ends a lease too early, never too late.
2. An UPDATE asks in its WHERE for what was read. Where there is no FOR UPDATE (Spanner, SQLite),
   this tells of a change in between; so it does for claims that hold a name together, which are
   decided on before the row is locked (see ../members.py).
3. A missing row is made, free, by a transaction of its own, and then taken as any other: FOR UPDATE
   on a missing row and INSERT in one transaction deadlock on InnoDB.
4. A transaction that others were in the way of is run again, on any isolation level.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from django.db import IntegrityError
from django.db.models.functions import Now

from ....claims import Busy, Claim, Grant
from ...sessions.queues import ClaimKey
from .base import PAGE, Cursor, Dialect, LockRow, Named, Step, busy
from .rows import RowConflict, Rows, in_transaction, reading

# Rows that have an owner. Not exclude(owner=""): what that means on Oracle, where '' is NULL,
# Django asks the default database, which may be another one.
OWNED: dict[str, Any] = {"owner__gt": " "}
LIVE = OWNED | {"expiry__gt": Now()}
EXPIRED = OWNED | {"expiry__lte": Now()}


class Generic(Dialect):
    """No queue: waiters poll, and none is first because it came first."""

    # A try that is refused is to lock nothing: many of them would keep the owner from its row.
    looks_first = True

    def adapt(self, wrapper: Any) -> None:
        wrapper.settings_dict["OPTIONS"].pop("pool", None)  # our connections are pooled already

    def begin(self, wrapper: Any) -> Cursor:
        return self.cursor(wrapper)

    def cursor(self, wrapper: Any) -> Cursor:
        cursor: Cursor = wrapper.cursor()  # Django's, which knows its connection
        return cursor

    def contended(self, error: Exception) -> bool:
        return isinstance(error, RowConflict)

    @reading
    def ping(self, rows: Rows) -> None:
        rows.now()

    @in_transaction
    def take(self, rows: Rows, claim: Claim, asked: Named, step: Step) -> Grant | Busy | None:
        for row in rows.lock(key=claim.key):
            if (refusal := _in_the_way(row, claim)) is not None:
                return refusal
            ours = row.owner == claim.owner
            end = row.now_us + round(claim.ttl * 1e6)
            fence = row.fence if ours else row.next_fence
            rows.change(
                row,
                owner=claim.owner,
                name=asked["name"],
                holder=asked["holder"],
                fence=fence,
                acquired_us=row.acquired_us if ours else row.now_us,
                expiry_us=max(row.expiry_us, end) if ours else end,
            )
            return Grant(claim, fence=fence)
        return None

    def make(self, cursor: Cursor, claim: Claim) -> None:
        with suppress(IntegrityError):
            self._add(cursor, key=claim.key, name=self.text_of(claim.name))

    @in_transaction
    def _add(self, rows: Rows, **values: str) -> None:
        rows.add(**values)

    @reading
    def look(self, rows: Rows, claim: Claim) -> Busy | None:
        return next((_in_the_way(row, claim) for row in rows.read(key=claim.key)), None)

    @in_transaction
    def extend(
        self, rows: Rows, claim_keys: Sequence[ClaimKey], ttl: float, *, exactly: bool = False
    ) -> set[ClaimKey]:
        wanted = set(claim_keys)
        locked = rows.lock(key__in=[key for key, _ in claim_keys])
        ours = [row for row in locked if (row.key, row.owner) in wanted]
        for row in ours:
            end = row.now_us + round(ttl * 1e6)
            rows.change(row, expiry_us=end if exactly else max(row.expiry_us, end))
        return {(row.key, row.owner) for row in ours}

    def probe(self, cursor: Cursor, key: str) -> None:
        if not self._is_unlocked(cursor, key):
            raise RowConflict(f"the row of {key} is locked")

    @in_transaction
    def _is_unlocked(self, rows: Rows, key: str) -> bool:
        try:
            rows.lock(key=key)
        except RowConflict:  # raised here, it would be tried again
            return False
        return True

    @in_transaction
    def release(self, rows: Rows, claim: Claim) -> bool:
        for row in rows.lock(key=claim.key):
            if row.owner == claim.owner:
                rows.change(row, owner="", expiry_us=row.now_us)
                return True
        return False

    @reading
    def holders(
        self, rows: Rows, first: str, last: str, *, start: int = 0, count: int = PAGE
    ) -> list[LockRow]:
        return rows.read(start=start, count=count, key__gte=first, key__lte=last, **LIVE)

    @reading
    def count(self, rows: Rows) -> int:
        return rows.count(**LIVE)

    @reading
    def read(self, rows: Rows, key: str) -> LockRow | None:
        return next(iter(rows.read(key=key)), None)

    @in_transaction
    def replace(self, rows: Rows, row: LockRow, new: LockRow) -> bool:
        rows.lock(key=row.key)  # UPDATE would wait for a row that is locked
        try:
            rows.change(row, **new._asdict())
        except RowConflict:  # raised here, it would be tried again
            return False
        return True

    @in_transaction
    def clear_expired(self, rows: Rows, part: str) -> int:
        expired = rows.lock(key__gte=part, key__lte=f"{part}g", **EXPIRED)
        for row in expired:
            rows.change(row, owner="", expiry_us=row.now_us, fence=row.next_fence)
        return len(expired)

    @reading
    def left_over(self, rows: Rows, age: float) -> tuple[int, int]:
        before = rows.now() - timedelta(seconds=age)
        return rows.count(**EXPIRED), rows.count(expiry__lt=before)

    @in_transaction
    def purge(self, rows: Rows, age: float, part: str) -> int:
        before = rows.now() - timedelta(seconds=age)
        old = {"key__gte": part, "key__lte": f"{part}g", "expiry__lt": before}
        rows.lock(**old)  # DELETE would wait for a row that is locked, with the others locked
        return rows.delete(**old)


def _in_the_way(row: LockRow, claim: Claim) -> Busy | None:
    return None if row.owner in ("", claim.owner) or row.left_us <= 0 else busy(row.left_us)
