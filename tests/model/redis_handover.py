"""The hand-over of a lock on Redis: `backends/redis/`, its Lua scripts and its listener.

A step is one script on the server, or what a process does between two. A process reads a grant,
and an answer that a message may overtake, later than the server gives it; others at once. Left out:
readers and permits, the order of arrival, several servers, and data that a server loses.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

from tests.model.explore import NAMES, Model, Step, with_process

FIRST = 1  # ticks of a lease that is handed over: FIRST_MS
HEARD_WITHIN = 1  # ticks: a waiter that has not asked for so long has died
FOREVER = 99  # ticks
NOBODY = -1

SENDS = "try", "ask", "ask silent", "last", "release", "give back"  # scripts
# Only then a message is for it: one that comes before its request has run is outdated by that.
LISTENING = "refused", "waits"


class Waiter(NamedTuple):
    """An entry of the queue."""

    process: int
    heard: int = 0  # ticks ago
    channel: bool = False  # it is to be woken by a message


class Process(NamedTuple):
    at: str = ""  # the script that it has sent, or "granted", "refused", "waits", "holds" ...
    age: int = 0  # ticks since it began to ask
    trust: int = 0  # ticks for which it trusts its lease
    late: int = 0  # ticks for which its last try was under way to the server
    given: int = -1  # age of a message that has overtaken the answer
    again: bool = False  # messages may have been lost: ask again
    listens: str = ""  # "asks", "subscribed" (the server knows), "yes", "cut" (unnoticed)
    inbox: tuple[int, ...] = ()  # messages under way: ticks since the lease began
    extends: bool = False  # has sent that
    extend_age: int = 0
    fate: str = ""  # "died" or, when the server has noticed, "gone"


class State(NamedTuple):
    processes: tuple[Process, ...]
    owner: int = NOBODY
    left: int = 0  # ticks until the lease ends
    repeats: bool = False  # a fence was granted that is not greater than all before
    queue: tuple[Waiter, ...] = ()
    faults: int = 0  # that may still happen

    def having(self, i: int, **changes: Any) -> State:
        """Return the state with a process changed."""
        return with_process(self, i, changes)


class RedisHandover(Model):
    """One lock, its queue, and the processes that want it."""

    DEFECTS = {
        "any owner": "a release does not compare the token",
        "same fence": "a grant keeps the fence of the one before",
        "late trust": "a lease is trusted from the message, not from its beginning",
        "asks first": "a waiter asks, and subscribes afterwards",
        "overtaken": "a message that overtakes the answer is ignored",
        "quiet return": "a listener that reconnects does not let its waiters ask again",
        "to the dead": "a lock is handed over to a waiter that does not listen",
        "no end": "a lock is handed over without a time limit",
        "left in queue": "a waiter that gives up does not say so",
        "not handed over": "a release deletes the lock, and hands it to nobody",
        "no look": "a waiter relies on messages, and never asks again",
    }

    def start(self) -> State:
        # With time, they have waited before, and so listen already: these are many states.
        process = Process(listens="yes" if self.timed else "")
        return State((process,) * self.processes, faults=self.faults)

    def normal(self, s: State) -> Hashable:
        places = {waiter.process: at for at, waiter in enumerate(s.queue)}

        def key(i: int) -> tuple[Any, ...]:
            return s.processes[i], s.owner == i, places.get(i, -1)

        order = sorted(range(len(s.processes)), key=key)
        if order == list(range(len(order))):
            return s
        new = {i: at for at, i in enumerate(order)} | {NOBODY: NOBODY}
        return s._replace(
            processes=tuple(s.processes[i] for i in order),
            owner=new[s.owner],
            queue=tuple(w._replace(process=new[w.process]) for w in s.queue),
        )

    def show(self, s: State) -> str:
        left = "for ever" if s.left == FOREVER else s.left
        owner = f"{NAMES[s.owner]} ({left})" if s.owner != NOBODY else "free"
        queue = " < ".join(NAMES[w.process] for w in s.queue) or "-"
        sent = "".join(NAMES[i] for i, p in enumerate(s.processes) if p.inbox)
        return f"lock: {owner}; queue: {queue}" + f"; message to {sent}" * bool(sent)

    def steps(self, s: State) -> Iterator[Step]:
        for i, p in enumerate(s.processes):
            if p.fate != "gone":
                yield from self._server(s, i, p)
                if not p.fate:
                    yield from self._client(s, i, p)
                    yield from self._listener(s, i, p)
                if s.faults and not p.fate:
                    yield from self._faults(s._replace(faults=s.faults - 1), i, p)
        if self.timed:
            processes = tuple(map(self._older, s.processes))
            queue = tuple(w._replace(heard=min(HEARD_WITHIN, w.heard + 1)) for w in s.queue)
            left = s.left if s.left == FOREVER else max(0, s.left - 1)
            after = s._replace(left=left, processes=processes, queue=queue)
            after = after if left else after._replace(owner=NOBODY)
            if after != s:
                yield Step("time passes", after)

    # What the server does.

    def _server(self, s: State, i: int, p: Process) -> Iterator[Step]:
        name = NAMES[i]
        if p.at in SENDS:
            after = self._release(s, i) if p.at in SENDS[-2:] else self._acquire(s, i, p.at)
            after = after.having(i, at="", listens=p.listens) if p.fate else after
            yield Step(f"{name}: {p.at} -> {after.processes[i].at or 'done'}", after)
        if p.listens == "asks":
            yield Step(f"{name}: subscribe", s.having(i, listens="subscribed"))
        if p.extends:
            yield Step(f"{name}: extend", self._extended(s, i, p))
        if p.fate == "died":
            # A process that hangs is never noticed.
            after = s.having(i, **Process(fate="gone")._asdict())
            yield Step(f"{name}: the server notices its death", after, sure=False)

    def _acquire(self, s: State, i: int, at: str) -> State:
        late = s.processes[i].age
        if s.owner == NOBODY and not s.queue:
            return _granted(self._take(s, i, self.ttl), i)
        if s.owner == i:
            return _granted(s._replace(left=max(s.left, self.ttl)), i)
        held = s.owner != NOBODY
        if at != "last" or not held:
            channel = at == "ask" or (at == "try" and self.defect == "asks first")
            entry = Waiter(i, channel=channel)
            queue = tuple(entry if w.process == i else w for w in s.queue)
            s = s._replace(queue=queue if entry in queue else (*queue, entry))
            s = s if held else self._hand_over(s, me=i)
            if s.owner == i:
                return _granted(s, i)
        if at == "last":
            s = _dropped(s, i)
            s = s if held else self._hand_over(s)
            return s.having(i, at="", age=0)
        s = s.having(i, age=0, late=min(FIRST, late))
        if at == "try":
            return self._asking(s, i)
        return s.having(i, at="refused" if at == "ask" else "waits")

    def _take(self, s: State, i: int, ttl: int) -> State:
        return s._replace(owner=i, left=ttl, repeats=s.repeats or self.defect == "same fence")

    def _hand_over(self, s: State, me: int = NOBODY) -> State:
        while s.owner == NOBODY and s.queue:
            head = s.queue[0]
            i, p = head.process, s.processes[head.process]
            s = s._replace(queue=s.queue[1:])
            there = head.heard < HEARD_WITHIN
            listens = p.listens in ("subscribed", "yes") or self.defect == "to the dead"
            if there and i == me:
                s = self._take(s, i, self.ttl)
            elif there and (listens or not head.channel):
                s = self._take(s, i, FOREVER if self.defect == "no end" else FIRST)
                if head.channel and p.at in LISTENING and not p.fate and p.listens != "cut":
                    s = s.having(i, inbox=(*p.inbox, 0))
        return s

    def _release(self, s: State, i: int) -> State:
        ours = s.owner == i or (self.defect == "any owner" and s.owner != NOBODY)
        s = s._replace(owner=NOBODY, left=0) if ours else _dropped(s, i)
        if s.owner == NOBODY and self.defect != "not handed over":
            s = self._hand_over(s)
        if s.processes[i].at == "give back":
            return self._asking(s, i)
        return s.having(i, at="")

    def _extended(self, s: State, i: int, p: Process) -> State:
        s = s.having(i, extends=False, extend_age=0)
        if s.owner != i:
            return s.having(i, trust=0)
        trust = max(p.trust, self.ttl - p.extend_age) if p.trust else 0
        return s.having(i, trust=trust)._replace(left=max(s.left, self.ttl))

    # What a process does.

    def _client(self, s: State, i: int, p: Process) -> Iterator[Step]:
        name = NAMES[i]
        if p.at == "":
            after = self._asking(s, i) if p.listens else s.having(i, at="try")
            yield Step(f"{name} comes", after, sure=False)
        elif p.at == "granted":
            after = self._got(s, i, 0 if self.defect == "late trust" else p.age, self.ttl)
            yield Step(f"{name} reads: granted", after)
        elif p.at == "refused":
            yield Step(f"{name} reads: refused", self._arm(s, i, p))
        elif p.at in ("subscribes", "waits"):
            yield from self._wait(s, i, p)
        elif p.at == "holds":
            after = s.having(i, at="release", trust=0, extends=False, extend_age=0)
            yield Step(f"{name} releases", after)
            if self.timed and p.trust and not p.extends:
                yield Step(f"{name} extends", s.having(i, extends=True))

    def _wait(self, s: State, i: int, p: Process) -> Iterator[Step]:
        name = NAMES[i]
        if p.at == "subscribes" and p.listens == "yes":
            at = "waits" if self.defect == "asks first" else "ask"
            yield Step(f"{name} is subscribed", s.having(i, at=at))
        elif p.at == "subscribes" and self.timed:
            yield Step(f"{name} waits no longer to be subscribed", s.having(i, at="ask silent"))
        elif p.at == "waits" and self.timed and self.defect != "no look":
            yield Step(f"{name} looks", self._asking(s, i))
        elif p.at == "waits" and not self.timed:
            yield self._gives_up(s, i)

    def _asking(self, s: State, i: int) -> State:
        """Return the state after a process sent its request to wait, or wants to subscribe."""
        s = s.having(i, age=0, late=0, given=-1, again=False, inbox=())
        listens = s.processes[i].listens
        if listens in ("yes", "cut"):
            return s.having(i, at="ask")
        return s.having(i, at="subscribes", listens=listens or "asks")

    def _arm(self, s: State, i: int, p: Process) -> State:
        if p.given >= 0:
            return self._got(s, i, p.given + p.late, FIRST)
        if p.again:
            return self._asking(s, i)
        return s.having(i, at="waits", again=False)

    def _got(self, s: State, i: int, age: int, ttl: int) -> State:
        s = s.having(i, age=0, late=0, given=-1, again=False, inbox=())
        if age >= ttl:
            return s.having(i, at="give back")
        return s.having(i, at="holds", trust=ttl - age)

    def _gives_up(self, s: State, i: int) -> Step:
        s = s.having(i, inbox=(), late=0)
        at = "" if self.defect == "left in queue" else "last"
        return Step(f"{NAMES[i]} gives up", s.having(i, at=at), sure=False)

    # What its listener does: one of its waiting threads, or a thread for its tasks.

    def _listener(self, s: State, i: int, p: Process) -> Iterator[Step]:
        name = NAMES[i]
        if p.listens == "cut":
            yield Step(f"{name}'s listener reconnects", s.having(i, listens="asks"))
        if p.listens == "subscribed":
            after = s.having(i, listens="yes")
            if self.defect != "quiet return":
                if p.at == "waits":
                    after = self._asking(after, i)
                elif p.at in ("ask", "refused"):
                    after = after.having(i, again=True)
            yield Step(f"{name}'s listener is subscribed", after)
        if p.listens == "yes" and p.inbox:
            age, inbox = p.inbox[0], p.inbox[1:]
            after = s.having(i, inbox=inbox)
            if p.at == "waits":
                late = 0 if self.defect == "late trust" else age + p.late
                after = self._got(after, i, late, FIRST)
            elif self.defect != "overtaken":
                after = after.having(i, given=age)
            yield Step(f"{name}'s listener reads a message", after)

    # What may go wrong.

    def _faults(self, s: State, i: int, p: Process) -> Iterator[Step]:
        name = NAMES[i]
        if self.timed:
            sent = p.at if p.at in SENDS else ""
            dead = p._replace(fate="died", at=sent, trust=0, inbox=(), given=-1)
            yield Step(f"{name} dies", s.having(i, **dead._asdict()), sure=False)
        elif p.at == "waits" and s.owner != i:
            after = s.having(i, **Process(fate="gone")._asdict())
            yield Step(f"{name} dies, and the server notices", after, sure=False)
        if self.timed and p.at == "waits":
            yield self._gives_up(s, i)
        if p.at or p.listens:
            resent = {"granted": "ask", "refused": "ask"}.get(p.at, p.at)
            listens = "cut" if p.listens else ""
            after = s.having(i, at=resent, listens=listens, inbox=(), late=0, given=-1)
            yield Step(f"{name} loses its connections", after, sure=False)

    def _older(self, p: Process) -> Process:
        """Return a process one tick later."""
        if p.fate:
            return p
        asks = p.at in ("try", "ask", "ask silent", "last", "granted")
        return p._replace(
            age=min(self.ttl, p.age + 1) if asks else 0,
            trust=max(0, p.trust - 1),
            extend_age=min(self.ttl, p.extend_age + 1) if p.extends else 0,
            inbox=tuple(min(FIRST, age + 1) for age in p.inbox),
            given=p.given if p.given < 0 else min(FIRST, p.given + 1),
        )


def _granted(s: State, i: int) -> State:
    return _dropped(s, i).having(i, at="granted", again=False)


def _dropped(s: State, i: int) -> State:
    return s._replace(queue=tuple(w for w in s.queue if w.process != i))
