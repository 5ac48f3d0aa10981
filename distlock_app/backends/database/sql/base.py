"""What all dialects of the lock table share: `Dialect`, and reading its answers.

One row for each name; a free one has `owner = ''`. Every time is the database server's.
A statement that changes a row names its owner, or holds the row: each may be sent again when
its answer was lost. Parameters: key, owner, name, holder, fence, ttl_us (microseconds), queue
(the server's lock that waiters queue for: docs/explanation/how-it-works.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

from django.apps import apps

from ....claims import Busy, Claim, Grant
from ....primitives.drivers import code_of
from ....primitives.names import shown
from ...sessions.link import ServerError
from ...sessions.queues import ClaimKey
from .statements import Statements

# Seconds to wait for a row that another transaction is just changing, which takes as long as a
# commit; a longer one is a person's, in a console. MySQL knows no less than 1.
ROW_WAIT = 1

# Seconds that a place in the queue is kept on the server. It bounds how long a waiter whose host
# was cut off keeps its connection, and on PostgreSQL how long a waiter holds a snapshot.
QUEUE_WAIT = 30

# How often the row may come and go (purge) under one try before it is called busy.
ROUNDS = 3

PAGE = 5_000  # rows of a list that one statement reads: rarely all are wanted

Named = Mapping[str, Any]
Step = Literal["try", "join", "wait"]


class LockRow(NamedTuple):
    """A row as it was read, with the server's time of the reading; all in microseconds."""

    key: str
    owner: str
    fence: int
    name: str
    holder: str
    acquired_us: int | None
    expiry_us: int
    now_us: int

    @property
    def left_us(self) -> int:
        """How long its claim has, if it has an owner."""
        return self.expiry_us - self.now_us

    @property
    def next_fence(self) -> int:
        """A fence behind its own, and, by the time, behind those of a row that was purged."""
        return max(self.fence + 1, self.now_us)


NO_ROW = LockRow("", "", 0, "", "", None, 0, 0)


class Cursor(Protocol):
    """What is used of a driver's cursor (PEP 249), and of our own (cursors.py)."""

    connection: Any
    rowcount: int
    lastrowid: Any

    def execute(self, statement: str, asked: Any = ..., /) -> Any: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> Any: ...

    def nextset(self) -> Any: ...

    def close(self) -> Any: ...


class Dialect(Statements):
    """The statements of one database, and the steps around them that all share."""

    queues = False  # waiters, by a lock of the server's own
    locks_rows = True  # not the whole database at once
    looks_first = False  # at a row, however long a try for it may take
    crowded: frozenset[Any]  # the codes by which the server says that others were at the rows

    EVICT: str  # the session that has the queue lock
    WAITING: str  # queue locks, and how many sessions wait for each

    def __init__(self, connection: Any) -> None:
        meta = apps.get_model("distlock_app", "DistLock")._meta
        self.table_name = meta.db_table
        self.longest_name = meta.get_field("name").max_length
        super().__init__(connection.ops.quote_name(self.table_name))
        self._named = lru_cache(maxsize=4096)(
            lambda name, key: (self.text_of(name), self.queue_of(key))
        )

    def by_step(self, statement: str, joining: str) -> dict[Step, str]:
        """Return a statement for each step; if one joins, the row may be taken if `joining`."""
        always, joins = (statement.replace("{may}", may) for may in ("true", joining))
        return {"try": always, "join": joins, "wait": joins}

    def text_of(self, name: str) -> str:
        """Return what people see of the name of a lock, in letters that the table can keep."""
        return shown(name)

    def adapt(self, wrapper: Any) -> None:
        """Change our copy of the alias before it connects."""

    def begin(self, wrapper: Any) -> Any:
        """Prepare a new session of Django's; return the cursor to use on it."""
        raise NotImplementedError

    def cursor(self, wrapper: Any) -> Cursor:
        """Return a cursor on the caller's own connection."""
        cursor: Cursor = wrapper.connection.cursor()
        return cursor

    def ping(self, cursor: Cursor) -> None:
        """Ask for a sign of life."""
        cursor.execute("SELECT 1")
        cursor.fetchall()

    def contended(self, error: Exception) -> bool:
        """Return whether others were at the same rows, so that another try may succeed."""
        return code_of(error) in self.crowded

    def execute(self, cursor: Cursor, statement: str, asked: Named) -> Cursor:
        """Run one statement; return the cursor."""
        cursor.execute(statement, asked)
        return cursor

    def acquire(
        self, cursor: Cursor, claim: Claim, step: Step = "try", *, wait: float | None = None
    ) -> Grant | Busy:
        """Take the row if it is free, expired or ours; make it if there is none.

        With "join" and "wait" leave a row that is to be handed over to the queue, else take the
        queue lock, too; "wait" says that a refused caller will line up.
        """
        # A row in somebody's transaction would keep a short wait for longer than that.
        if self.looks_first or (wait is not None and wait < ROW_WAIT):
            if (refusal := self.look(cursor, claim)) is not None:
                return refusal
        name, queue = self._named(claim.name, claim.key)
        asked = {
            "key": claim.key,
            "owner": claim.owner,
            "name": name,
            "holder": claim.holder,
            "ttl_us": round(claim.ttl * 1e6),
            "queue": queue,
        }
        for _ in range(ROUNDS):
            answer = self.take(cursor, claim, asked, step)
            if answer is None:
                answer = self.insert(cursor, claim, asked, step)
            if answer is not None:
                return answer
        return Busy()

    def take(self, cursor: Cursor, claim: Claim, asked: Named, step: Step) -> Grant | Busy | None:
        """Take the row if it is free, expired or ours; None if there is none."""
        raise NotImplementedError

    def insert(self, cursor: Cursor, claim: Claim, asked: Named, step: Step) -> Grant | None:
        """Make the row; None if there is one now, which is to be taken."""
        self.make(cursor, claim)
        return None

    def make(self, cursor: Cursor, claim: Claim) -> None:
        """Make a free row, unless there is one meanwhile."""
        self.execute(cursor, self.MAKE, {"key": claim.key, "name": self.text_of(claim.name)})

    def read(self, cursor: Cursor, key: str) -> LockRow | None:
        """Read a row, without a lock."""
        row = self.execute(cursor, self.READ, {"key": key}).fetchone()
        return LockRow._make(row) if row else None

    def replace(self, cursor: Cursor, row: LockRow, new: LockRow) -> bool:
        """Write `new` if the row is as it was read; return whether it was."""
        asked = new._asdict()
        asked |= {"old_owner": row.owner, "old_fence": row.fence, "old_expiry_us": row.expiry_us}
        return self.execute(cursor, self.REPLACE, asked).rowcount == 1

    def can_queue(self, wrapper: Any, cursor: Cursor) -> bool:
        """Return whether waiters can be served in order of arrival on such a session."""
        return False

    def queue_of(self, key: str) -> Any:
        """Return the server's name of the queue lock."""
        return None

    def unlock(self, cursor: Cursor) -> None:
        """Free the queue lock that this session holds."""
        raise NotImplementedError

    def line_up(self, cursor: Any, key: str) -> None:
        """Ask for the queue lock, without waiting for the answer."""
        raise NotImplementedError

    def called(self, cursor: Any) -> bool:
        """Read the answer to line_up(): is it our turn, or did the server stop waiting?"""
        try:
            ((answer, *_),) = cursor.receive()
        except ServerError:
            return False
        return bool(answer)

    def leave(self, waiting: Any, cursor: Cursor) -> None:
        """End the wait of a session's cursor by another one's: closing it is noticed late."""

    def waiting(self, cursor: Cursor) -> Any:
        """Return the queue locks that are waited for, each with the number of sessions."""
        return self.execute(cursor, self.WAITING, {}).fetchall()

    def look(self, cursor: Cursor, claim: Claim) -> Busy | None:
        """Read, without a lock, whether the row is in the way."""
        row = self.execute(cursor, self.LOOK, {"key": claim.key, "owner": claim.owner}).fetchone()
        return busy(row[0]) if row else None

    def lock_row(self, cursor: Cursor, claim: Claim, wait: float | None) -> int | Busy | None:
        """Lock a row that is free or expired in an open transaction; free it, move its fence on.

        Leave a leased row as it is. Busy: other transactions had it for `wait` seconds.
        Return None if there is no such row, or to wait otherwise. The claim has no owner.
        """
        return None

    def may_have_kept(self, cursor: Cursor) -> bool:
        """Return whether lock_row(), which failed, may have left a leased row locked."""
        return False

    def try_row(self, cursor: Cursor, key: str) -> bool:
        """Lock the row unless another transaction has it; return whether that worked."""
        raise NotImplementedError

    def probe(self, cursor: Cursor, key: str) -> None:
        """Raise at once if another transaction has locked the row."""
        self.execute(cursor, self.PROBE, {"key": key}).fetchall()

    def extend(
        self, cursor: Cursor, claim_keys: Sequence[ClaimKey], ttl: float, *, exactly: bool = False
    ) -> set[ClaimKey]:
        """Move the expiry of rows that are still ours, also if it has passed; return which are.

        Nobody had such a row in between: taking it over would have changed the owner.
        """
        numbers = range(len(claim_keys))
        keys = ", ".join([f"%(key{n})s" for n in numbers])
        marks = ", ".join([f"(%(key{n})s, %(owner{n})s)" for n in numbers])
        asked: dict[str, Any] = {"ttl_us": round(ttl * 1e6), "exactly": exactly}
        for n, (key, owner) in enumerate(claim_keys):
            asked |= {f"key{n}": key, f"owner{n}": owner}

        def ask(statement: str) -> Cursor:
            statement = statement.replace("{marks}", marks).replace("{keys}", keys)
            return self.execute(cursor, self.written(statement), asked)

        extended = ask(self.EXTEND).rowcount
        if extended in (0, len(claim_keys)):  # also in a transaction whose snapshot is older
            return set(claim_keys if extended else ())
        return set(ask(self.OURS).fetchall())

    def release(self, cursor: Cursor, claim: Claim) -> bool:
        """Free the row if it is still ours."""
        asked = {"key": claim.key, "owner": claim.owner}
        return self.execute(cursor, self.RELEASE, asked).rowcount == 1

    def release_at_commit(self, cursor: Cursor, claim: Claim) -> bool:
        """Free the row in an open transaction, which keeps it locked, if it is still ours."""
        return self.release(cursor, claim)

    def release_to_next(self, cursor: Cursor, claim: Claim) -> bool:
        """Free the row if it is still ours and, if so, the queue lock of this session."""
        raise NotImplementedError

    def evict(self, cursor: Cursor, key: str) -> None:
        """End the session that has the queue lock although we had the row.

        It was called, or held the row before, and did not come: its process is stopped or cut
        off, and as long as it has the queue lock all wait for the hand-over in vain. One
        that lives lines up again.
        """
        with suppress(Exception):  # gone meanwhile, or another user's: then all go on as before
            cursor.execute(self.EVICT.replace("{queue}", str(self.queue_of(key))), None)

    def released(self, cursor: Cursor, grant: Grant) -> bool:
        """Return whether the row is as a release of this grant leaves it."""
        row = self.read(cursor, grant.claim.key)
        return row is not None and not row.owner and row.fence == grant.fence

    def holders(
        self, cursor: Cursor, first: str, last: str, *, start: int = 0, count: int = PAGE
    ) -> list[LockRow]:
        """Read `count` of the live rows with keys from `first` to `last`, in their order."""
        asked = {"first": first, "last": last, "start": start, "count": count}
        return [*map(LockRow._make, self.execute(cursor, self.HOLDERS, asked).fetchall())]

    def count(self, cursor: Cursor) -> int:
        """Count the live rows."""
        return int(self.execute(cursor, self.COUNT, {}).fetchone()[0])

    def clear_expired(self, cursor: Cursor, part: str) -> int:
        """Free the rows that were not renewed, of keys that begin so; move the fences on."""
        asked = {"first": part, "last": f"{part}g"}
        return self.execute(cursor, self.CLEAR_EXPIRED, asked).rowcount

    def left_over(self, cursor: Cursor, age: float) -> tuple[int, int]:
        """Count the rows that were not renewed, and those that ended `age` seconds ago."""
        row = self.execute(cursor, self.LEFT_OVER, {"age_us": round(age * 1e6)}).fetchone()
        return int(row[0]), int(row[1])

    def purge(self, cursor: Cursor, age: float, part: str) -> int:
        """Delete the rows that ended `age` seconds ago or earlier, of keys that begin so.

        Where a statement has the database to itself, PURGED of them at most.
        """
        asked = {"age_us": round(age * 1e6), "first": part, "last": f"{part}g"}
        return self.execute(cursor, self.PURGE, asked).rowcount


def busy(left_us: int) -> Busy:
    """Say how long the claim in the way has, by a clock that may have passed its end by now."""
    return Busy(free_in=max(0, left_us) / 1e6)


def refused(left_us: int) -> Busy:
    """Say the same to a try; a row that is free already is kept for the queue."""
    return busy(left_us) if left_us > 0 else Busy()
