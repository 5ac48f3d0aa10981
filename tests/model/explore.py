"""Explore every state that a protocol can come to, and check its promises in each.

The search is breadth-first: the trace to a broken promise is one of the shortest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NamedTuple

NAMES = "ABC"  # of processes
ENDLESS = "a wait may never end"


class Step(NamedTuple):
    """What may happen next, and the state after it."""

    label: str
    after: Any
    sure: bool = True  # it happens if it stays possible; False: faults, callers that come and go


def with_process(state: Any, i: int, changes: dict[str, Any]) -> Any:
    """Return the state with one of its processes, which come first in it, changed."""
    processes, *others = state  # a fifth of the time of a search, if it were by _replace()
    changed = processes[i]._replace(**changes)
    return state._make(((*processes[:i], changed, *processes[i + 1 :]), *others))


class Model(ABC):
    """A protocol: states, which are values, and the steps from one to the next."""

    DEFECTS: ClassVar[dict[str, str]]  # name -> what is broken on purpose

    def __init__(
        self, *, processes: int = 3, ttl: int = 0, faults: int = 0, defect: str = ""
    ) -> None:
        """Let a lease end after `ttl` ticks; without it no time passes, and nobody looks."""
        assert not defect or defect in self.DEFECTS
        self.processes = processes
        self.ttl = ttl or 2
        self.timed = bool(ttl)
        self.faults = faults
        self.defect = defect

    @abstractmethod
    def start(self) -> Hashable:
        """Return the first state."""

    @abstractmethod
    def steps(self, state: Any) -> Iterator[Step]:
        """Yield what may happen next."""

    def broken(self, state: Any) -> str:
        """Return the promise that this state breaks, if any."""
        if sum(process.trust > 0 for process in state.processes) > 1:
            return "two processes trust that they have the lock"
        return "a fence does not grow" if state.repeats else ""

    def at_rest(self, state: Any) -> bool:
        """Return whether no living process waits for the lock or holds it."""
        return all(process.at == "" or process.fate for process in state.processes)

    @abstractmethod
    def normal(self, state: Any) -> Hashable:
        """Return the same state for all orders of the processes: they are alike."""

    @abstractmethod
    def show(self, state: Any) -> str:
        """Return what the server has, for people."""


@dataclass
class Result:
    """What an exploration found."""

    states: int
    steps: int
    broken: str = ""  # promise
    trace: list[tuple[str, str]] = field(default_factory=list)  # label, what the server has

    def __str__(self) -> str:
        if not self.broken:
            return f"{self.states:,} states, {self.steps:,} steps: every promise is kept"
        width = max(len(label) for label, _ in self.trace)
        lines = [f"{at:3} {label:{width}}  {shown}" for at, (label, shown) in enumerate(self.trace)]
        return "\n".join([*lines, f"    Broken: {self.broken}"])


def explore(model: Model) -> Result:
    """Check all states: safety in each, and that all processes can come to rest from it.

    The latter by the steps that are sure to happen. So nobody waits for ever in a run in which
    each of them is made that is possible again and again.
    """
    numbers: dict[Any, int] = {model.normal(model.start()): 0}
    normal = cache(model.normal)  # more than half of the steps lead where others did
    came_from = [0]
    leads_here: list[list[int]] = [[]]  # by sure steps
    resting: list[int] = []
    quiet: list[int] = []  # nothing is sure to happen there
    steps = 0
    states = deque(numbers)
    for number in range(2**63):
        if not states:
            break
        state = states.popleft()
        if promise := model.broken(state):
            return Result(len(numbers), steps, promise, _trace(model, numbers, came_from, number))
        if model.at_rest(state):
            resting.append(number)
        quiet.append(number)
        for _, after, sure in model.steps(state):
            steps += 1
            after = normal(after)
            other = numbers.setdefault(after, len(numbers))
            if other == len(came_from):
                came_from.append(number)
                leads_here.append([])
                states.append(after)
            if sure:
                leads_here[other].append(number)
                if quiet and quiet[-1] == number:
                    quiet.pop()
    stuck = _stuck(leads_here, resting, quiet)
    if stuck is None:
        return Result(len(numbers), steps)
    return Result(len(numbers), steps, ENDLESS, _trace(model, numbers, came_from, stuck))


def _stuck(leads_here: list[list[int]], resting: list[int], quiet: list[int]) -> int | None:
    """Return a state from which no sure steps lead to one where all rest.

    The first that is quiet, for its trace tells most; else the first.
    """
    good = bytearray(len(leads_here))
    while resting:
        number = resting.pop()
        if not good[number]:
            good[number] = 1
            resting += leads_here[number]
    bad = [number for number in quiet if not good[number]] or [good.find(0)]
    return None if bad[0] < 0 else bad[0]


def _trace(
    model: Model, numbers: dict[Any, int], came_from: list[int], last: int
) -> list[tuple[str, str]]:
    """Return the way to a state; each process keeps its name on it."""
    way = []
    while last:
        way.append(last)
        last = came_from[last]
    state: Any = model.start()
    lines = [("", model.show(state))]
    for number in reversed(way):
        step = next(s for s in model.steps(state) if numbers.get(model.normal(s.after)) == number)
        state = step.after
        lines.append((step.label, model.show(state)))
    return lines
