"""The lock table's queue: `backends/database/` on PostgreSQL, MySQL and MariaDB.

A step is one statement on the server, or what a process does between two. A process reads a grant
later than the server gives it; other answers at once, for then it only sends its next statement,
which may be as late. Left out: readers, permits and pins; the queue inside a process; `look`, which
only saves a take.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

from tests.model.explore import NAMES, Model, Step, with_process

HANDOVER = 1  # ticks for which a released row is kept for the queue (HANDOVER_US)
FREE, NO_ROW = -1, -2  # instead of an owner

# A connection that waits for the queue lock, or has it: (process, "waiter" or "holder").
Session = tuple[int, str]


class Process(NamedTuple):
    at: str = ""  # the statement that it has sent, or "granted", "waits", "called", "holds"
    age: int = 0  # ticks since acquire() began
    trust: int = 0  # ticks for which it trusts its lease
    # Its connections: "open", "asks" (for the queue lock) or "killed".
    waiter: str = ""
    holder: str = ""
    extends: bool = False  # has sent that
    extend_age: int = 0
    fate: str = ""  # "died" or, when the server has noticed, "gone"


class State(NamedTuple):
    processes: tuple[Process, ...]
    owner: int = NO_ROW
    left: int = 0  # ticks until the lease ends, or until a free row is open to all
    fence: int = 0  # of the row, counted from the greatest that was granted
    repeats: bool = False  # a fence was granted that is not greater than all before
    commits: int = FREE  # whose release has locked the row, and is to commit
    line: tuple[Session, ...] = ()  # the first has the queue lock, the others wait for it
    faults: int = 0  # that may still happen

    def having(self, i: int, **changes: Any) -> State:
        """Return the state with a process changed."""
        return with_process(self, i, changes)

    def without(self, *sessions: Session) -> State:
        """Return the state after sessions freed the queue lock, or left its queue."""
        return self._replace(line=tuple(s for s in self.line if s not in sessions))


class LockTable(Model):
    """One row, its queue lock, and the processes that want it."""

    DEFECTS = {
        "any owner": "a release does not compare the owner",
        "same fence": "a claim that takes over an expired row keeps its fence",
        "late trust": "a lease is trusted from the answer, not from the request",
        "no row lock": "a take reads the row, and writes it by a second statement",
        "early call": "a release frees the queue lock by a statement before the row's",
        "lock after row": "a claim that makes a row takes the queue lock by the next statement",
        "newcomers": "a free row is taken without the queue lock",
        "kept for ever": "only the claim that has the queue lock may ever take a free row",
        "no end": "a lease does not end",
        "left in line": "a waiter that gives up leaves its connection in the queue",
        "no look": "a waiter relies on being called, and never looks",
        "fence forgotten": "the fence of a row that was purged begins anew",
    }

    def __init__(self, *, mysql: bool = False, **options: Any) -> None:
        """On MySQL a claim first makes a free row, and a lease begins as its statement does."""
        super().__init__(**options)
        self.mysql = mysql

    def start(self) -> State:
        return State((Process(),) * self.processes, faults=self.faults)

    def normal(self, s: State) -> Hashable:
        places = {session: at for at, session in enumerate(s.line)}

        def key(i: int) -> tuple[Any, ...]:
            at = places.get((i, "waiter"), -1), places.get((i, "holder"), -1)
            return s.processes[i], s.owner == i, s.commits == i, at

        order = sorted(range(len(s.processes)), key=key)
        if order == list(range(len(order))):
            return s
        new = {i: at for at, i in enumerate(order)} | {FREE: FREE, NO_ROW: NO_ROW}
        return s._replace(
            processes=tuple(s.processes[i] for i in order),
            owner=new[s.owner],
            commits=new[s.commits],
            line=tuple((new[i], kind) for i, kind in s.line),
        )

    def show(self, s: State) -> str:
        owner = {FREE: "free", NO_ROW: "none"}.get(s.owner) or NAMES[s.owner]
        line = " < ".join(NAMES[i] for i, _ in s.line) or "-"
        return f"row: {owner} ({s.left}); queue lock: {line}"

    def steps(self, s: State) -> Iterator[Step]:
        for i, p in enumerate(s.processes):
            if p.fate != "gone":
                yield from self._server(s, i, p)
                if not p.fate:
                    yield from self._client(s, i, p)
                if s.faults and not p.fate:
                    yield from self._faults(s._replace(faults=s.faults - 1), i, p)
        if s.commits != FREE:
            yield Step(f"{NAMES[s.commits]}: the release is committed", _committed(s))
        if self.timed:
            yield from self._time(s)

    # What the server does.

    def _server(self, s: State, i: int, p: Process) -> Iterator[Step]:
        name = NAMES[i]
        verb, _, step = p.at.partition(" ")
        if s.commits == FREE and (execute := getattr(self, f"_{verb}", None)) is not None:
            after = execute(s, i, step)
            after = after.having(i, at="", waiter=p.waiter) if p.fate else after
            yield Step(f"{name}: {p.at} -> {after.processes[i].at or 'done'}", after)
        if p.extends and s.commits == FREE:
            yield Step(f"{name}: extend", self._extended(s, i, p))
        if p.waiter == "asks":
            after = s.having(i, waiter="open")._replace(line=(*s.line, (i, "waiter")))
            yield Step(f"{name}: asks for the queue lock", after)
        if p.fate == "died" and s.commits != i:
            after = _closed(_closed(s, i, "waiter"), i, "holder")
            after = after.having(i, **Process(fate="gone")._asdict())
            # A process that hangs is never noticed.
            yield Step(f"{name}: the server notices its death", after, sure=not self.timed)

    def _take(self, s: State, i: int, step: str) -> State:
        if s.owner == NO_ROW:
            if self.mysql and step == "wait" and s.fence < 0:  # it was there when asked last
                return _refused(s, i, step)
            return s.having(i, at=f"insert {step}")
        if s.owner == i:
            left = max(s.left, self._lease(s.processes[i].age))
            return s.having(i, at=f"granted {step}")._replace(left=left)
        if s.owner != FREE and s.left:
            return _refused(s, i, step)
        if step != "turn" and self.defect != "newcomers":
            s, had = _try_lock(s, i)
            if not (had or s.owner != FREE or s.left == 0):
                return _refused(s, i, step)
        if self.defect == "no row lock":
            return s.having(i, at=f"write {step}")
        same = s.owner != FREE and self.defect == "same fence"
        return self._grant(s, i, step, s.fence + (not same))

    def _write(self, s: State, i: int, step: str) -> State:
        return self._grant(s, i, step, s.fence + 1)

    def _insert(self, s: State, i: int, step: str) -> State:
        if s.owner != NO_ROW:
            return s.having(i, at=f"take {step}")
        # By the clock, it is greater than all before.
        fence = s.fence + 1 if self.defect == "fence forgotten" else 1
        if self.mysql and step != "turn" and self.defect != "lock after row":
            made = s._replace(owner=FREE, left=HANDOVER, fence=fence)
            return made.having(i, at=f"take {step}")
        if self.defect != "lock after row" and step != "turn":
            s, _ = _try_lock(s, i)
        s = self._grant(s, i, step, fence)
        return s.having(i, at=f"lock {step}") if self.defect == "lock after row" else s

    def _lock(self, s: State, i: int, step: str) -> State:
        return _try_lock(s, i)[0].having(i, at=f"granted {step}")

    def _release(self, s: State, i: int, step: str) -> State:
        ours = s.owner == i or (self.defect == "any owner" and s.owner != NO_ROW)
        if step != "next":  # on another connection; "old": this one was idle for long
            s = s._replace(owner=FREE, left=HANDOVER) if ours else s
            return _closed(s, i, "holder").having(i, at="")
        if not ours:
            return _closed(s, i, "holder").having(i, at="")
        had = (i, "holder") in s.line[:1]
        s = s.without((i, "holder"))
        if self.defect == "early call":
            return s.having(i, at="release", holder="")
        return s._replace(commits=i).having(
            i, at="commits" if had else "commits, had no queue lock"
        )

    def _evict(self, s: State, i: int, step: str) -> State:
        if s.line:
            s = _killed(s, *s.line[0])
        return s.having(i, at="", holder="")

    def _extended(self, s: State, i: int, p: Process) -> State:
        s = s.having(i, extends=False, extend_age=0)
        if s.owner != i:
            return _closed(s, i, "holder").having(i, trust=0)
        trust = max(p.trust, self.ttl - p.extend_age) if p.trust else 0
        return s.having(i, trust=trust)._replace(left=max(s.left, self._lease(p.extend_age)))

    def _grant(self, s: State, i: int, step: str, fence: int) -> State:
        left = self._lease(s.processes[i].age)
        s = s._replace(owner=i, left=left, fence=0, repeats=s.repeats or fence <= 0)
        return s.having(i, at=f"granted {step}")

    def _lease(self, age: int) -> int:
        return self.ttl - age if self.mysql else self.ttl

    # What a process does.

    def _client(self, s: State, i: int, p: Process) -> Iterator[Step]:
        name = NAMES[i]
        if p.at == "" and not (p.waiter or p.holder):
            yield Step(f"{name} comes", s.having(i, at="take wait", holder="open"), sure=False)
        elif p.at.startswith("granted"):
            yield Step(f"{name} has the lock", self._got(s, i, p))
        elif p.at == "holds":
            after = _releasing(s, i)
            yield Step(f"{name} releases", after)
            if p.holder == "open":
                yield Step(f"{name} releases after long", after.having(i, at="release old"))
            if self.timed and self.ttl > 1 and p.trust and not p.extends:
                yield Step(f"{name} extends", s.having(i, extends=True))
        elif p.at in ("waits", "called"):
            yield from self._wait(s, i, p)

    def _got(self, s: State, i: int, p: Process) -> State:
        trust = self.ttl if self.defect == "late trust" else self.ttl - p.age
        s = s.having(i, at="holds", trust=trust, age=0)
        if p.at.endswith("turn"):
            line = tuple((i, "holder") if one == (i, "waiter") else one for one in s.line)
            s = s._replace(line=line).having(i, holder=p.waiter, waiter="")
        else:
            s = _closed(s, i, "waiter")
        return s if trust else _releasing(s, i)

    def _wait(self, s: State, i: int, p: Process) -> Iterator[Step]:
        name = NAMES[i]
        asks_again = p.at == "called" and self.timed
        if p.waiter == "killed" and (p.at == "waits" or asks_again):
            after = s.having(i, at="take wait", waiter="", holder="open")
            yield Step(f"{name} finds its waiter closed", after)
        elif asks_again or (s.line[:1] == ((i, "waiter"),) and p.at == "waits"):
            yield Step(f"{name} is called", s.having(i, at="take turn"))
        if self.timed and p.at == "waits" and self.defect != "no look":
            yield Step(f"{name} looks", s.having(i, at="take join", holder="open"))
        if not self.timed:
            yield from self._given_up(s, i, p)

    def _given_up(self, s: State, i: int, p: Process) -> Iterator[Step]:
        s = s if self.defect == "left in line" else _closed(s, i, "waiter")
        yield Step(f"{NAMES[i]} gives up", s.having(i, at=""), sure=False)

    # What may go wrong.

    def _faults(self, s: State, i: int, p: Process) -> Iterator[Step]:
        name, waits = NAMES[i], p.at in ("waits", "called")
        if self.timed or (waits and s.owner != i):
            sent = "" if p.at[:4] in ("wait", "call", "gran", "hold") else p.at
            yield Step(f"{name} dies", s.having(i, fate="died", at=sent, trust=0), sure=False)
        if self.timed and waits:
            yield from self._given_up(s, i, p)
        if self.timed and p.at:
            after = _killed(_killed(s, i, "waiter"), i, "holder")
            yield Step(f"{name} loses its connections", after, sure=False)

    def _time(self, s: State) -> Iterator[Step]:
        keeps = self.defect == ("kept for ever" if s.owner == FREE else "no end")
        processes = tuple(map(self._older, s.processes))
        after = s._replace(left=s.left if keeps else max(0, s.left - 1), processes=processes)
        if after != s:
            yield Step("time passes", after)
        if s.faults and s.owner != NO_ROW and s.left == 0 and s.commits == FREE:
            after = s._replace(owner=NO_ROW, fence=-1, faults=s.faults - 1)
            yield Step("purge", after, sure=False)

    def _older(self, p: Process) -> Process:
        """Return a process one tick later."""
        if not p.at or p.fate:
            return p
        acquires = p.at[:4] in ("take", "inse", "writ", "lock", "gran")
        return p._replace(
            age=min(self.ttl, p.age + 1) if acquires else 0,
            trust=max(0, p.trust - 1),
            extend_age=min(self.ttl, p.extend_age + 1) if p.extends else 0,
        )


def _try_lock(s: State, i: int) -> tuple[State, bool]:
    if s.line:
        return s, s.line[0] == (i, "holder")
    return s._replace(line=((i, "holder"),)), True


def _refused(s: State, i: int, step: str) -> State:
    if step == "turn":
        return s.having(i, at="called", age=0)
    s = s.having(i, at="waits", age=0, holder="")
    return s.having(i, waiter="asks") if step == "wait" else s


def _releasing(s: State, i: int) -> State:
    s = s.having(i, trust=0, extends=False, extend_age=0)
    if s.processes[i].holder == "open":
        return s.having(i, at="release next")
    return s.having(i, at="release", holder="")


def _committed(s: State) -> State:
    i = s.commits
    s = s._replace(owner=FREE, left=HANDOVER, commits=FREE)
    then = {"commits": "", "commits, had no queue lock": "evict"}
    at = then.get(s.processes[i].at)
    if at is None:  # the answer was lost
        return s
    return s.having(i, at=at, holder=at and "open")


def _closed(s: State, i: int, kind: str) -> State:
    """Return the state after a connection has ended, and the server has noticed."""
    return s.without((i, kind)).having(i, **{kind: ""})


def _killed(s: State, i: int, kind: str) -> State:
    """Return the state after the process has lost a connection: it sends its statement again."""
    p = s.processes[i]
    verb, _, step = p.at.partition(" ")
    if getattr(p, kind):
        s = s.without((i, kind)).having(i, **{kind: "killed"})
    if p.at in ("", "waits", "called", "holds", "release"):
        return s
    if kind != ("waiter" if step == "turn" else "holder"):
        return s
    if verb in ("release", "commits", "commits,"):
        return s.having(i, at="release", holder="")
    if verb == "evict":
        return s.having(i, at="", holder="")
    if step == "turn":
        return s.having(i, at="take wait", waiter="", holder="open")
    return s.having(i, at=f"take {step}", holder="open")
