"""What the lock table's databases do alike.

One row for each name; a free one has `owner = ''`. Every time is the database server's.
A statement that changes a row names its owner, or holds the row: each may be sent again when
its answer was lost. Parameters: key, owner, name, holder, fence, ttl_us (microseconds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...claims import Busy, Claim, Grant
from ...names import shown

# Seconds to wait for a row that somebody else is just changing, which takes as long as a
# commit; whoever holds it longer keeps it for a person's reasons. MySQL knows no less than 1.
ROW_WAIT = 1

# Seconds to wait for the server's answer, unless the alias says otherwise: a path that was
# cut without a word must not hang the renewal of every other lock.
ANSWER_WAIT = 5

# How often the row may come and go (purge) under one try before it is called busy.
ROUNDS = 3

MAX_FENCE = 2**63 - 1

Named = Mapping[str, Any]
Asked = Named | Sequence[Any]
Pair = tuple[str, str]  # key, owner


class Cursor(Protocol):
    """What is used of a driver's cursor (PEP 249)."""

    rowcount: int

    def execute(self, statement: str, asked: Any = ..., /) -> Any: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> Any: ...

    def nextset(self) -> Any: ...


class Dialect:
    """The statements of one database, and the steps around them that all share."""

    locks_rows = True  # not the whole database at once

    INSERT: str  # a row that is ours from the start, unless there is a row
    FENCE: str  # fence of a row that is ours
    LOOK: str  # microseconds left, if the row is in the way
    EXTEND: str
    RELEASE: str
    RELEASED: str  # a row, if this is how our own release left it
    HOLDERS: str
    CLEAR: str
    PURGE: str

    def __init__(self, table_name: str, table: str) -> None:
        """Fill in the `table`, quoted; compiled once for all connections of a process."""
        self.table_name = table_name
        for word in dir(type(self)):
            if word.isupper() and isinstance(text := getattr(self, word), str):
                setattr(self, word, text.replace("{table}", table))

    def adapt(self, settings: dict[str, Any]) -> None:
        """Change our copy of the alias's settings before it connects."""

    def begin(self, wrapper: Any) -> Cursor:
        """Prepare a new session of Django's; return the driver's cursor to use on it."""
        raise NotImplementedError

    def crowded(self, error: Exception) -> bool:
        """Tell whether others were at the same rows, so that another try may succeed."""
        raise NotImplementedError

    def execute(self, cursor: Cursor, statement: str, asked: Asked) -> Cursor:
        """Run one statement; return the cursor."""
        cursor.execute(statement, asked)
        return cursor

    def acquire(self, cursor: Cursor, claim: Claim) -> Grant | Busy:
        """Take the row if it is free, expired or ours; make it if there is none."""
        asked = {
            "key": claim.key,
            "owner": claim.owner,
            "name": shown(claim.name),
            "holder": claim.holder,
            "ttl_us": round(claim.ttl * 1e6),
        }
        for _ in range(ROUNDS):
            answer = self.take(cursor, claim, asked)
            if answer is not None:
                return answer
            # Outside of the transaction that found no row: on InnoDB the gap locks of both
            # would end in a deadlock (279 of 320 with 8 sessions, even on different names).
            if self.execute(cursor, self.INSERT, asked).rowcount == 1:
                return self.granted(cursor, claim, asked)
        return Busy()

    def take(self, cursor: Cursor, claim: Claim, asked: Named) -> Grant | Busy | None:
        """Take the row if it is free, expired or ours; None if there is none."""
        raise NotImplementedError

    def granted(self, cursor: Cursor, claim: Claim, asked: Named) -> Grant | Busy:
        """Read the fence of a row that the last statement made ours."""
        row = self.execute(cursor, self.FENCE, asked).fetchone()
        return Grant(claim, fence=row[0]) if row else Busy()

    def look(self, cursor: Cursor, claim: Claim) -> Busy | None:
        """Read, without a lock, whether the row is in the way."""
        row = self.execute(cursor, self.LOOK, {"key": claim.key, "owner": claim.owner}).fetchone()
        return busy(row[0]) if row else None

    def extend(self, cursor: Cursor, claim: Claim, ttl: float) -> bool:
        """Move the expiry of a row that is still ours, also if it has passed.

        Nobody had the row in between: taking it over would have changed the owner.
        """
        asked = {"key": claim.key, "owner": claim.owner, "ttl_us": round(ttl * 1e6)}
        return self.execute(cursor, self.EXTEND, asked).rowcount == 1

    def extend_pairs(self, cursor: Cursor, pairs: Sequence[Pair], ttl: float) -> set[Pair]:
        """Extend many rows by one statement; return those that are ours."""
        raise NotImplementedError

    def release(self, cursor: Cursor, claim: Claim) -> bool:
        """Free the row if it is still ours."""
        asked = {"key": claim.key, "owner": claim.owner}
        return self.execute(cursor, self.RELEASE, asked).rowcount == 1

    def released(self, cursor: Cursor, grant: Grant) -> bool:
        """Tell whether the row is as a release of this grant leaves it."""
        asked = {"key": grant.claim.key, "fence": grant.fence}
        return self.execute(cursor, self.RELEASED, asked).fetchone() is not None

    def holders(self, cursor: Cursor, key: str | None) -> Any:
        """Read the live rows: key, name, fence, holder, microseconds left, microseconds held."""
        # Keys are lower-case hex digits, which "g" follows.
        asked = {"first": key or "", "last": key or "g"}
        return self.execute(cursor, self.HOLDERS, asked).fetchall()

    def clear(self, cursor: Cursor, key: str, fences: tuple[int, int]) -> int:
        """Free the row, whoever owns it, if its fence is in between; move the fence on."""
        asked = {"key": key, "first": fences[0], "last": fences[1]}
        return self.execute(cursor, self.CLEAR, asked).rowcount

    def purge(self, cursor: Cursor, age: float, part: str) -> int:
        """Delete the rows that ended `age` seconds ago or earlier, of keys that begin so."""
        asked = {"age_us": round(age * 1e6), "first": part, "last": f"{part}g"}
        return self.execute(cursor, self.PURGE, asked).rowcount


def busy(left_us: int) -> Busy:
    """Say how long the claim in the way has, by a clock that may have passed its end by now."""
    return Busy(free_in=max(0, left_us) / 1e6)


def marked(statement: str, mark: str, pairs: Sequence[Pair]) -> tuple[str, list[str]]:
    """Write as many `mark`s as there are pairs into a statement; return it and their values."""
    text = statement.replace("{pairs}", ", ".join([mark] * len(pairs)))
    return text, [value for pair in pairs for value in pair]
