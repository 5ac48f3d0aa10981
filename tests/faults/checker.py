"""Says what is wrong with a history: a pure function, which believes no lock and no fence."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from tests.faults.history import FOREVER, Attempt, History
from tests.faults.spans import Interval, Spans

# Seconds that a waiter may sleep on a free lock: it looks once a second, on a machine that is
# busy with all the others.
ASLEEP = 4.0
# Seconds without faults that somebody may wait while others get it again and again.
STARVED = 10.0
# How much longer than its `wait` an acquire() may take: an answer that does not come is waited
# for 5 s, twice in a bad case.
HANGS = 15.0
# How long after an outage a request may still be waiting for its lost answer.
SETTLE = 6.0


@dataclass(frozen=True, slots=True)
class Accusation:
    """One broken promise, and the fault during or after which it broke."""

    promise: str
    at: float
    text: str
    fault: str = ""


@dataclass(slots=True)
class Row:
    """What happened from one kind of fault to the next."""

    times: int = 0
    acquisitions: int = 0
    overlaps: int = 0
    refused: int = 0
    longest_gap: float = 0.0
    accused: dict[str, int] = field(default_factory=dict)  # by promise


@dataclass(slots=True)
class Verdict:
    """The broken promises, and the figures by kind of fault."""

    accusations: list[Accusation]
    rows: dict[str, Row]

    @property
    def promises(self) -> set[str]:
        return {accusation.promise for accusation in self.accusations}


def judge(history: History) -> Verdict:
    """Return every broken promise of a history."""
    by_name: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in history.attempts:
        by_name[attempt.name].append(attempt)
    found: list[Accusation] = []
    for attempts in by_name.values():
        held = sorted((a for a in attempts if a.got is not None), key=_got)
        found += overlaps(history, held)
        found += bad_fences(history, held)
        found += foreign_releases(history, held)
        found += asleep(history, attempts)
    found += stale_writes(history)
    found += starved_or_hung(history, by_name)
    found += [Accusation("free again", history.end, name) for name in history.stuck]
    found += [Accusation("clear errors", history.end, text) for text in history.surprises]
    return _by_fault(history, by_name, found)


def overlaps(history: History, held: list[Attempt]) -> Iterator[Accusation]:
    """Accuse two who had it at the same moment, each by its own clock.

    `ours` is the last time at which an owner asked its hold and heard that it is not lost: a
    lease that was over, a loss that was told, and a process that was stopped end it. What an
    engine forgot explains an overlap for one ttl: no renewal can succeed after that.
    """
    current: list[Attempt] = []
    for later in (a for a in held if a.ours is not None):
        current = [a for a in current if _ours(a) >= _got(later)]
        for earlier in current:
            if not _forgot(history, earlier, later):
                text = f"{earlier.id} and {later.id} both had {later.name} at {_got(later):.3f}"
                yield Accusation("one at a time", _got(later), text)
        current.append(later)


def _forgot(history: History, earlier: Attempt, later: Attempt) -> bool:
    ttl = max(history.ttl, earlier.ttl, later.ttl)
    end = min(_ours(earlier), _ours(later))
    since = max(min(earlier.asked, later.asked), end - ttl)
    return bool(history.forgetting.touching(since, _got(later)))


def bad_fences(history: History, held: list[Attempt]) -> Iterator[Accusation]:
    """Accuse fences that two owners have, and those that do not grow.

    Who asked after another had it comes after that one in any case. Between two who asked at
    the same time, the one comes later that got it later and still had it then.
    """
    seen: dict[int, Attempt] = {}
    for attempt in held:
        if attempt.fence is None:
            continue
        if (other := seen.setdefault(attempt.fence, attempt)) is not attempt:
            text = f"{other.id} and {attempt.id} both have {attempt.fence}"
            yield Accusation("fences grow", _got(attempt), text)
    times = [_got(a) for a in held]
    greatest: list[Attempt] = []  # before or at each place
    for a in held:
        last = greatest[-1] if greatest else a
        greatest.append(a if (a.fence or 0) > (last.fence or 0) else last)
    for place, attempt in enumerate(held):
        before = bisect_right(times, attempt.asked)
        if attempt.ours is not None and not _forgets_within(history, attempt):
            before = place
        if before and (attempt.fence or 0) < (greatest[before - 1].fence or 0):
            other = greatest[before - 1]
            text = f"{attempt.id} has {attempt.fence}, {other.id} before it {other.fence}"
            yield Accusation("fences grow", _got(attempt), text)


def _forgets_within(history: History, attempt: Attempt) -> bool:
    return bool(history.forgetting.touching(attempt.asked - history.ttl, _got(attempt)))


def _surely_later(history: History, one: Attempt, other: Attempt) -> bool:
    """Whether `other` was granted after `one`, who got it before.

    Not so sure is that of an owner whose grant may have been forgotten before it was heard.
    """
    return _got(one) < other.asked or not _forgets_within(history, other)


def foreign_releases(history: History, held: list[Attempt]) -> Iterator[Accusation]:
    """Accuse a release() that said yes though somebody else had got the lock before it.

    What an engine forgot explains that, too: after a failover, the old master may still know it.
    """
    sure = [a for a in held if a.ours is not None]
    for attempt, later in pairwise(sure):
        if attempt.answer != "released" or _got(later) >= (attempt.over or 0.0):
            continue
        if _surely_later(history, attempt, later) and not _forgot(history, attempt, later):
            text = f"{attempt.id} released {attempt.name}, which {later.id} had got"
            yield Accusation("releases only its own", _got(later), text)


def stale_writes(history: History) -> Iterator[Accusation]:
    """Accuse a write that the store took from an owner after one of a later owner."""
    attempts = {attempt.id: attempt for attempt in history.attempts}
    latest: dict[str, Attempt] = {}
    for name, writer in history.writes:
        attempt = attempts[writer]
        newest = latest.get(name, attempt)
        if _got(attempt) >= _got(newest):
            latest[name] = attempt
        elif _surely_later(history, attempt, newest):
            text = f"{writer} wrote {name} after {newest.id}"
            yield Accusation("refuses late writers", _got(newest), text)


def asleep(history: History, attempts: list[Attempt]) -> Iterator[Accusation]:
    """Accuse a lock that is free and has a waiter, without faults, and nobody gets it."""
    taken = [interval for a in attempts for interval in _maybe_held(history, a)]
    taken += [(f.begin, f.end + SETTLE) for f in history.faults if f.outage]
    slow = [a for a in attempts if _answered(history, a) - a.asked > ASLEEP]
    for begin, end in _between(taken, history.end):
        if end - begin <= ASLEEP:
            continue
        for a in slow:
            since, until = max(begin, a.asked), min(end, _answered(history, a))
            if until - since > ASLEEP and not history.stopped(a.who, since, until):
                text = f"{a.id} slept {until - since:.1f} s on {a.name}, which was free"
                yield Accusation("wakes waiters", since, text)
                break


def _maybe_held(history: History, attempt: Attempt) -> Iterator[Interval]:
    """Yield when the claim of an attempt may have been in the engine."""
    # So long an engine may keep what its owner does not give back; sessions a little longer.
    kept = max(history.ttl, attempt.ttl) + 3.0
    killed = history.kills.get(attempt.who, FOREVER)
    if attempt.got is not None:
        end = FOREVER if attempt.done is None else attempt.done
        if attempt.answer in ("lost", "unknown"):
            end += kept
        yield attempt.got, min(end, killed + kept)
    elif attempt.answer == "error" and attempt.done is not None:
        yield attempt.done, attempt.done + kept
    elif attempt.done is None:
        yield killed, killed + kept
    for begin, end in history.stopped(attempt.who, attempt.asked, _answered(history, attempt)):
        yield begin, end + kept  # it was called, and could not come


def starved_or_hung(history: History, by_name: dict[str, list[Attempt]]) -> Iterator[Accusation]:
    """Accuse a wait that others overtook for too long, and one that did not end in time."""
    outages = Spans((f.begin, f.end + SETTLE) for f in history.faults if f.outage)
    for name, attempts in by_name.items():
        times = sorted(a.got for a in attempts if a.got is not None)
        for a in attempts:
            end = _answered(history, a)
            if end - a.asked < min(STARVED, a.wait + HANGS):
                continue
            stops = history.stopped(a.who, a.asked, end)
            waited = sum(y - x for x, y in _between(stops, end, since=a.asked))
            if waited > a.wait + HANGS:
                text = f"{a.id} waited {waited:.1f} s for {name} instead of {a.wait}"
                yield Accusation("ends in time", a.asked, text)
            stops += outages.touching(a.asked, end)
            waited = sum(y - x for x, y in _between(stops, end, since=a.asked))
            others = bisect_right(times, end) - bisect_right(times, a.asked)
            if waited > STARVED and others > 1:
                text = f"{a.id} waited {waited:.1f} s for {name}, which others got {others} times"
                yield Accusation("starves nobody", a.asked, text)


def _between(taken: Iterable[Interval], end: float, *, since: float = 0.0) -> Iterator[Interval]:
    """Yield what is left of the time from `since` to `end` without the intervals."""
    free_from = since
    for begin, until in sorted(taken):
        if begin >= end:
            break
        if begin > free_from:
            yield free_from, begin
        free_from = max(free_from, until)
    if free_from < end:
        yield free_from, end


def _by_fault(
    history: History, by_name: dict[str, list[Attempt]], found: list[Accusation]
) -> Verdict:
    """Add up the figures from each fault to the next."""
    begins = [fault.begin for fault in history.faults]
    rows: dict[str, Row] = defaultdict(Row)

    def kind_at(t: float) -> str:
        place = bisect_right(begins, t)
        return history.faults[place - 1].kind if place else "none"

    for fault in history.faults:
        rows[fault.kind].times += 1
    for attempts in by_name.values():
        held = sorted((a for a in attempts if a.got is not None), key=_got)
        for before, attempt in zip([None, *held], held, strict=False):
            row = rows[kind_at(_got(attempt))]
            row.acquisitions += 1
            if before is None:
                continue
            row.overlaps += _over(history, before) > _got(attempt)
            gap_row = rows[kind_at((_got(before) + _got(attempt)) / 2)]
            gap_row.longest_gap = max(gap_row.longest_gap, _got(attempt) - _got(before))
    got = {attempt.id: attempt.got for attempt in history.attempts}
    for _, writer in history.refused:
        rows[kind_at(got[writer] or 0.0)].refused += 1
    accusations = []
    for one in sorted(found, key=lambda one: one.at):
        kind = kind_at(one.at)
        rows[kind].accused[one.promise] = rows[kind].accused.get(one.promise, 0) + 1
        accusations.append(Accusation(one.promise, one.at, one.text, kind))
    return Verdict(accusations, dict(rows))


def _got(attempt: Attempt) -> float:
    return FOREVER if attempt.got is None else attempt.got


def _ours(attempt: Attempt) -> float:
    return -FOREVER if attempt.ours is None else attempt.ours


def _over(history: History, attempt: Attempt) -> float:
    """Return when its owner stopped to act as one, whether it had the right to or not."""
    killed = history.kills.get(attempt.who, history.end)
    return killed if attempt.over is None else attempt.over


def _answered(history: History, attempt: Attempt) -> float:
    """Return when acquire() ended, by whatever."""
    for t in (attempt.got, attempt.done, history.kills.get(attempt.who)):
        if t is not None:
            return t
    return history.end
