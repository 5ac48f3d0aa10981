"""Claims that hold a name together: readers, permits, and the parties that a latch counted.

All of them are in the one row of the name. Its `owner` says what they are and its `expiry` when the
last of them ends, so that every statement about a mutex finds a leased row. Who they are stands in
`holder`, beside the fields of the one that came last:

    {"host": ..., "shared": {owner: [fence, end, holder]}, "next": [owner, end]}    or "permit"
    {"host": ..., "counted": [owner, ...]}                                          of a latch

1. A change is a compare-and-swap: read the row, decide here, and write it if it is as it was read.
   Each write moves the fence on, so no two states of a row are alike. The time is the server's, as
   it read the row: it may be early, which ends a claim too early, never too late.
2. The first waiter notes itself as the `next` to come in, again and again as long as it waits.
   Newcomers wait behind it, even if they fit beside the members: readers do not starve a writer.
3. A latch holds nothing: its row has no owner, and an expiry that comes when it may be forgotten.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ...claims import Busy, Claim, Grant, Holding
from ...primitives.identity import holder_fields
from ...primitives.timing import Deadline
from ..sessions.pool import Contended
from .connections import Session
from .sql.base import NO_ROW, ROW_WAIT, LockRow, busy
from .sql.statements import HANDOVER_US

# The owner of such a row, and the kind of its holdings. Owners of claims are hex digits.
SHARED, PERMIT = "shared", "permit"

# Answers something, and says how the row is to be; None: as it is.
T = TypeVar("T")
Decide = Callable[[LockRow], tuple[T, LockRow | None]]

# Microseconds for which newcomers wait behind the first waiter, or longer if it looks seldom.
NEXT_US = 1_000_000


def kind_of(claim: Claim) -> str:
    """Return what claims like this one are together; '' for a mutex."""
    return SHARED if claim.shared else PERMIT if claim.limit > 1 else ""


class Members:
    """The claims in a row, as it was read; `row()` is how it is to be written."""

    def __init__(self, row: LockRow) -> None:
        self._row = row
        self.now = row.now_us
        self.kind = row.owner if row.expiry_us > self.now else ""
        self.about = fields_of(row.holder)
        members = self.about.pop(row.owner, {}) if self.kind else {}
        self.live = {owner: m for owner, m in members.items() if m[1] > self.now}
        self.next, self.next_until = self.about.pop("next", ("", 0))

    def refusal(self, claim: Claim) -> Busy | None:
        """Say what is in the way of the claim of another owner."""
        alike = self.live and self.kind == kind_of(claim)
        if self.kind and not (alike and (claim.shared or len(self.live) < claim.limit)):
            end = min(self._ends()) if alike else self._row.expiry_us
        elif self.next != claim.owner and self.next_until > self.now:
            end = self.next_until
        else:
            return None
        return busy(end - self.now)

    def keep(self, owner: str, ttl: float, *, exactly: bool = False) -> bool:
        """Let a member end no earlier than `ttl` seconds from now; return whether it is one."""
        if (member := self.live.get(owner)) is None:
            return False
        end = _end(self._row, ttl)
        member[1] = end if exactly else max(member[1], end)
        return True

    def add(self, claim: Claim, name: str) -> int:
        """Let a claim in, on the lock of that name; return its fence."""
        fence = self._row.next_fence
        self.about = fields_of(claim.holder)
        self.live[claim.owner] = [fence, _end(self._row, claim.ttl), dict(self.about)]
        self.kind = kind_of(claim)
        self.next_until = 0  # it was the next, or there is none: see refusal()
        self._row = self._row._replace(name=name, acquired_us=self.now)
        return fence

    def reserve(self, owner: str, pause: float) -> bool:
        """Let newcomers wait behind this waiter, which looks again within `pause` seconds.

        Return whether anything is to be written.
        """
        left, next_us = self.next_until - self.now, max(NEXT_US, round(3e6 * pause))
        if not self.live or (left > 0 if self.next != owner else left > next_us // 2):
            return False
        self.next, self.next_until = owner, self.now + next_us
        return True

    def row(self) -> LockRow:
        """Return the row with these members; without an owner if there are none."""
        about = dict(self.about)
        if self.live:
            about[self.kind] = self.live
        if self.next_until > self.now:
            about["next"] = self.next, self.next_until
        return self._row._replace(
            owner=self.kind if self.live else "",
            holder=_text(about),
            expiry_us=max(self._ends(), default=self.now),
        )

    def _ends(self) -> list[int]:
        return [end for _, end, _ in self.live.values()]


def acquire(claim: Claim, session: Session) -> Grant | Busy:
    """Let a reader or a permit in, or say what is in the way."""
    name = session.dialect.text_of(claim.name)

    def decide(row: LockRow) -> tuple[Grant | Busy, LockRow | None]:
        members = Members(row)
        if members.kind == kind_of(claim) and members.keep(claim.owner, claim.ttl):
            return Grant(claim, fence=members.live[claim.owner][0]), members.row()
        if (refusal := members.refusal(claim)) is not None:
            return refusal, None
        return Grant(claim, fence=members.add(claim, name)), members.row()

    return _changed(session, claim.key, decide, claim)


def look(claim: Claim, pause: float | None, session: Session) -> Busy | None:
    """Say what is in the way of a waiter; `pause`: it is the first one, and polls so often."""

    def decide(row: LockRow) -> tuple[Busy | None, LockRow | None]:
        members = Members(row)
        if claim.owner == row.owner or claim.owner in members.live:
            return None, None
        refusal = members.refusal(claim)
        write = refusal is not None and pause is not None and members.reserve(claim.owner, pause)
        return refusal, members.row() if write else None

    return _changed(session, claim.key, decide)


def extend(
    key: str, owners: Mapping[str, float], session: Session, *, exactly: bool = False
) -> set[str]:
    """Extend members by so many seconds each; return those that are still there."""

    def decide(row: LockRow) -> tuple[set[str], LockRow | None]:
        members = Members(row)
        kept = {o for o, ttl in owners.items() if members.keep(o, ttl, exactly=exactly)}
        return kept, members.row() if kept else None

    return _changed(session, key, decide)


def remove(key: str, which: Callable[[str, int], bool], session: Session) -> int:
    """Take away the claims of which `which` (member or '', fence) is true; return how many."""

    def decide(row: LockRow) -> tuple[int, LockRow | None]:
        members = Members(row)
        if row.owner and not members.live:  # one exclusive owner: the row is taken from it
            if not which("", row.fence):
                return 0, None
            return 1, row._replace(owner="", expiry_us=row.now_us - HANDOVER_US)
        gone = [owner for owner, (fence, _, _) in members.live.items() if which(owner, fence)]
        for owner in gone:
            del members.live[owner]
        return len(gone), members.row() if gone else None

    return _changed(session, key, decide)


def release(claim: Claim, session: Session) -> bool:
    """Take this claim away."""
    return remove(claim.key, lambda owner, _: owner == claim.owner, session) > 0


def holdings(row: LockRow, alias: str, waiters: int | None) -> Iterator[tuple[str, Holding]]:
    """Yield the owner of each live claim in a row, and what people see of the claim."""
    members = Members(row)
    live, together = members.live, members.kind in (SHARED, PERMIT)
    if not together and members.kind:
        live = {row.owner: [row.fence, row.expiry_us, members.about]}
    elif waiters is not None:
        waiters += members.next_until > members.now  # the first one polls
    for owner, (fence, end_us, holder) in live.items():
        began_us = fence if together else row.acquired_us  # a member came at its fence
        holding = Holding(
            name=row.name,
            key=row.key,
            alias=alias,
            version=str(fence),
            kind=members.kind if together else "exclusive",
            fence=fence,
            expires_in=(end_us - row.now_us) / 1e6,
            held_for=None if began_us is None else max(0, row.now_us - began_us) / 1e6,
            waiters=waiters,
            holder=holder_fields(_text(holder)),
        )
        yield owner, holding


def count_down(claim: Claim, session: Session) -> int:
    """Count the claim's owner for a latch; return how many are counted."""

    def decide(row: LockRow) -> tuple[int, LockRow | None]:
        counted = dict.fromkeys([*_counted(row), claim.owner])
        about = {**fields_of(claim.holder), "counted": list(counted)}
        end = max(row.expiry_us, _end(row, claim.ttl))
        return len(counted), row._replace(owner="", holder=_text(about), expiry_us=end)

    return _changed(session, claim.key, decide, claim)


def counted(key: str, session: Session) -> int:
    """Return how many are counted for a latch."""
    row = session.dialect.read(session.cursor, key)
    return len(_counted(row)) if row else 0


def fields_of(holder: str) -> dict[str, Any]:
    """Read an object of JSON; empty if it is none."""
    try:
        value = json.loads(holder)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _counted(row: LockRow) -> list[str]:
    about = fields_of(row.holder) if row.expiry_us > row.now_us else {}
    found: list[str] = about.get("counted", [])
    return found


def _end(row: LockRow, ttl: float) -> int:
    return row.now_us + math.ceil(ttl * 1000) * 1000  # SQLite keeps whole milliseconds


def _text(fields: dict[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"))


def _changed(session: Session, key: str, decide: Decide[T], claim: Claim | None = None) -> T:
    """Repeat the change until no other came in between; insert a missing row for `claim`."""
    dialect, cursor = session.dialect, session.cursor
    deadline = Deadline(ROW_WAIT)
    while True:
        row = dialect.read(cursor, key)
        answer, new = decide(row or NO_ROW)
        if new is None:
            return answer
        if row is not None and dialect.replace(cursor, row, new._replace(fence=row.next_fence)):
            return answer
        if claim is not None:
            dialect.make(cursor, claim)  # it may have been purged, or not have been there yet
            claim = None
        elif not deadline.remaining():
            raise Contended(f"others changed the row of {key} all the time")
