"""What worker processes do with readers, permits and latches; what they write down about it."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

from distlock_app import Latch, Lock, LockBusy, LockLost
from distlock_app.backends.redis import waiting as redis_waiting
from distlock_app.backends.redis.waiting import Listener
from tests.lock_workers import bump
from tests.processes import hear, say

OPTIONS: dict[str, dict[str, Any]] = {"writer": {}, "reader": {"shared": True}}


class Visit(NamedTuple):
    """One acquisition: when it arrived and was granted, by the server's clock in microseconds;
    when it came in and left (None: it was killed), by the clock that all processes share."""

    kind: str
    arrived: int
    granted: int
    came: float
    left: float | None


def visit(
    *,
    log: str,
    name: str,
    kinds: list[str],
    hold: float,
    ttl: float,
    times: int | None = None,
    using: str = "redis",
) -> int:
    """Take the lock again and again, as each kind in turn; a number is that of the permits."""
    done = 0
    arrivals = note_arrivals()
    with open(f"{log}.{os.getpid()}", "a", buffering=1) as lines:
        while done != times:
            kind = kinds[done % len(kinds)]
            options = OPTIONS.get(kind) or ({"limit": int(kind)} if kind.isdigit() else {})
            with (
                suppress(LockBusy, LockLost),
                Lock(name, using=using, wait=60, ttl=ttl, **options) as held,
            ):
                granted = held.fence or 0
                arrived = arrivals.pop(held._lease.grant.claim.owner, granted)
                lines.write(f"{kind} {arrived} {granted} {monotonic()}")
                if kind == "writer":
                    bump(log)
                else:
                    sleep(hold)
                # What the machine let sleep for longer than the ttl proves nothing.
                left = monotonic()
                lines.write(f" {left}\n" if not held.lost else "\n")
            done += 1
    return done


def visit_twice(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Do two rounds of visits in one process: starting it takes longer than they do."""
    visit(**first)
    visit(**second)


def note_arrivals() -> dict[str, int]:
    """Return what this process's waiters are told of the time of their arrival, by owner."""
    arrivals: dict[str, int] = {}
    real = Listener.arm

    def arm(self: Listener, claim: Any, waiter: Any, asked: float, answer: Any, losses: int) -> Any:
        arrivals[claim.owner] = answer[-1]
        return real(self, claim, waiter, asked, answer, losses)

    vars(redis_waiting)["Listener"].arm = arm
    return arrivals


def visits_of(log: Path) -> list[Visit]:
    """Return what all processes wrote down, in the order in which they came in."""
    found = []
    for file in log.parent.glob(f"{log.name}.*"):
        if file.suffix[1:].isdigit():
            lines = file.read_text().split("\n")
            for line in lines[:-1]:  # the last one is being written
                kind, arrived, granted, came, *rest = line.split(" ")
                left = float(rest[0]) if rest else None
                found.append(Visit(kind, int(arrived), int(granted), float(came), left))
    return sorted(found, key=lambda visit: visit.came)


def together(visits: list[Visit]) -> list[set[Visit]]:
    """Return who was inside, at each moment at which somebody came in."""
    inside: set[Visit] = set()
    seen = []
    for one in visits:
        inside = {other for other in inside if (other.left or other.came) > one.came}
        inside.add(one)
        seen.append(set(inside))
    return seen


def overtakings(visits: list[Visit]) -> int:
    """Return by how many who arrived later the one was overtaken who suffered most from it."""
    return max(
        sum(other.arrived > one.arrived and other.granted < one.granted for other in visits)
        for one in visits
    )


def hold_permit(*, name: str, limit: int, ttl: float, using: str = "redis") -> None:
    """Take a permit, say so, and keep it until the process is killed."""
    with Lock(name, using=using, limit=limit, ttl=ttl, wait=30):
        say("holds")
        hear()


def wait_at_latch(*, name: str, parties: int, threads: int) -> list[bool]:
    """Wait at a latch in several threads; return what each was told."""
    told: list[bool] = []
    latch = Latch(name, parties, using="redis", ttl=60)
    pool = [threading.Thread(target=lambda: told.append(latch.wait(60))) for _ in range(threads)]
    for thread in pool:
        thread.start()
    say("waits")
    for thread in pool:
        thread.join(90)
    return told
