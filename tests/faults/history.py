"""What workers and the nemesis did, by CLOCK_MONOTONIC, which all processes of a machine share."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from django.utils.functional import cached_property

from tests.faults.spans import Interval, Spans

FOREVER = float("inf")


class Recorder:
    """A file of one writer; what was written outlives a SIGKILL: the system has it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, what: str, *, t: float | None = None, **facts: Any) -> None:
        """Append one line; `t` is when it happened, now by default."""
        event = {"t": monotonic() if t is None else t, "what": what, **facts}
        os.write(self._file, json.dumps(event).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


@dataclass(slots=True)
class Attempt:
    """One acquire() and what came of it; times in seconds, None: it did not come to that."""

    who: str
    number: int
    name: str
    asked: float
    wait: float = 5.0
    got: float | None = None
    fence: int | None = None
    ours: float | None = None  # when the hold was last asked, and said that it was not lost
    over: float | None = None  # when it was known to be lost, or release() was called
    done: float | None = None  # when acquire() failed, or release() answered
    # Of release(): "released", "lost", "unknown". Of acquire(): "busy", "error", "cancelled".
    answer: str = ""
    ttl: float = 0.0  # of its lease, if that is longer than the others

    @property
    def id(self) -> str:
        return f"{self.who}#{self.number}"


@dataclass(slots=True)
class Fault:
    """What the nemesis did, and how long; after `end` all is as before."""

    kind: str
    begin: float
    end: float = FOREVER
    forgets: bool = False  # the engine may forget locks by it: a crash without persistence
    outage: bool = True  # requests may fail or hang meanwhile, and for some time after


@dataclass(slots=True)
class Stop:
    """A process was stopped (SIGSTOP), or killed: then it never went on."""

    who: str
    begin: float
    end: float = FOREVER


@dataclass
class History:
    """All that the checker knows; complete before it is asked anything."""

    ttl: float
    end: float
    attempts: list[Attempt] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    kills: dict[str, float] = field(default_factory=dict)
    # What the fenced store accepted, in its own order: name, id of the attempt.
    writes: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)  # names that nobody could get at the end
    surprises: list[str] = field(default_factory=list)  # errors that nobody announced

    @cached_property
    def forgetting(self) -> Spans:
        """When the engine may have forgotten locks."""
        return Spans((fault.begin, fault.end) for fault in self.faults if fault.forgets)

    def stopped(self, who: str, since: float, until: float) -> list[Interval]:
        """Return when a process was stopped between the two times."""
        found = self._stops.get(who, Spans()).touching(since, until)
        return [(begin, end) for begin, end in found if begin < until and since < end]

    @cached_property
    def _stops(self) -> dict[str, Spans]:
        by_process: dict[str, list[Interval]] = defaultdict(list)
        for stop in self.stops:
            by_process[stop.who].append((stop.begin, stop.end))
        return {who: Spans(stops) for who, stops in by_process.items()}


def read(directory: Path, *, ttl: float) -> History:
    """Return the history of a run from its files."""
    history = History(ttl=ttl, end=0.0)
    for path in sorted(directory.glob("*.events")):
        if path.stem == "nemesis":
            _read_nemesis(history, _events(history, path))
        else:
            _read_worker(history, path.stem, _events(history, path))
    return history


def _events(history: History, path: Path) -> Iterator[dict[str, Any]]:
    """Yield what was written in full: a SIGKILL may end a line in the middle."""
    event: dict[str, Any] = {"t": 0.0}
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"}\n"):
                event = json.loads(line)
                yield event
    history.end = max(history.end, event["t"])


def _read_nemesis(history: History, events: Iterable[dict[str, Any]]) -> None:
    for event in events:
        t, what = event["t"], event["what"]
        if what == "begin":
            kind, forgets, outage = event["fault"], event["forgets"], event["outage"]
            history.faults.append(Fault(kind, t, forgets=forgets, outage=outage))
        elif what == "end":
            history.faults[-1].end = t
        elif what == "stop":
            history.stops.append(Stop(event["who"], t))
        elif what == "go on":
            stop = next(s for s in reversed(history.stops) if s.who == event["who"])
            stop.end = t
        elif what == "kill":
            history.kills[event["who"]] = t


def _read_worker(history: History, who: str, events: Iterable[dict[str, Any]]) -> None:
    attempts: dict[int, Attempt] = {}  # that are not over: a process may make several at a time
    for event in events:
        t, what = event["t"], event["what"]
        if what == "ask":
            attempt = Attempt(who, event["n"], sys.intern(event["name"]), t, event["wait"])
            attempt.ttl = event.get("ttl", 0.0)
            attempts[attempt.number] = attempt
            history.attempts.append(attempt)
        elif what == "surprise":
            history.surprises.append(f"{who}: {event['error']}")
        elif what == "stuck":
            history.stuck.append(event["name"])
        else:
            attempt = attempts[event["n"]]
            _follow(history, attempt, event)
            if attempt.done is not None:
                del attempts[attempt.number]


def _follow(history: History, attempt: Attempt, event: dict[str, Any]) -> None:
    t, what = event["t"], event["what"]
    if what == "got":
        attempt.got, attempt.fence = t, event["fence"]
    elif what == "ours":
        attempt.ours = t
    elif what == "refused":
        history.refused.append((attempt.name, attempt.id))
    elif what in ("over", "leave"):
        attempt.over = t
    else:
        attempt.done, attempt.answer = t, sys.intern(what)
