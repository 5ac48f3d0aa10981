"""Hurts workers, servers and networks, by a schedule that a seed reproduces."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import sleep

from tests.faults.base import Act, Engine
from tests.faults.history import Recorder
from tests.processes import Worker

REAP_WITHIN = 60.0
TRIES = 100  # to stop a process while it waits


@dataclass(frozen=True, slots=True)
class Round:
    """One fault, and the quiet time after it; seconds."""

    kind: str
    lasts: float
    pause: float
    seed: int


def schedule(seed: int, kinds: list[str], *, ttl: float) -> Iterator[Round]:
    """Yield rounds without end: all kinds in a random order, then again in another one."""
    chance = Random(seed)
    for _ in itertools.count():
        for kind in chance.sample(sorted(kinds), len(kinds)):
            # Longer than the ttl about every other time: then a lease ends while it lasts.
            lasts = chance.uniform(0.2, 2.0) * ttl
            yield Round(kind, lasts, chance.uniform(0.2, 0.8), chance.randrange(2**32))


class Crew:
    """The workers: forked by a nest, each with a number, and a new incarnation after a kill."""

    def __init__(self, nest: Worker, size: int) -> None:
        self._nest = nest
        self.pids: dict[str, int] = {}
        for number in range(size):
            self.start(f"{number}.0")

    def start(self, who: str) -> None:
        self.pids[who] = self._ask({"do": "work", "who": who})

    def replace(self, who: str) -> None:
        """Start the next incarnation of a worker that was killed."""
        del self.pids[who]
        number, _, incarnation = who.partition(".")
        self.start(f"{number}.{int(incarnation) + 1}")

    def send(self, who: str, number: signal.Signals) -> None:
        os.kill(self.pids[who], number)

    def until_stopped(self, who: str) -> None:
        """Wait until a worker that was sent SIGSTOP writes nothing more."""
        path = Path(f"/proc/{self.pids[who]}/stat")
        while path.read_text().rpartition(")")[2].split()[0] != "T":
            sleep(0.0005)

    def reap(self, who: str, within: float = REAP_WITHIN) -> str:
        """Wait for the end of a worker; return what is wrong if it does not come."""
        found: str = self._ask({"do": "reap", "pid": self.pids[who], "within": within}, within)
        return found

    def take_each(self, within: float) -> str:
        """Let a new worker take every lock once."""
        self.pids["last.0"] = self._ask({"do": "take each", "who": "last.0", "within": within})
        return self.reap("last.0", within + REAP_WITHIN)

    def _ask(self, order: dict[str, object], within: float = 0.0):
        self._nest.tell(order)
        return self._nest.read(within + 60.0)


class Nemesis:
    """Plays rounds on an engine and its crew, and notes them."""

    def __init__(self, engine: Engine, crew: Crew, directory: Path) -> None:
        self.engine = engine
        self.crew = crew
        self.directory = directory
        self.note = Recorder(directory / "nemesis.events").note
        self.acts: dict[str, Act] = {
            "kill": self.kill,
            "stop": self.stop,
            "first waiter": self.first_waiter,
            "clock": self.clock,
            **engine.faults(),
        }

    def play(self, one: Round) -> None:
        """Do the fault, and wait for the rest of the round."""
        forgets, outage = one.kind in self.engine.forgetful, one.kind not in self.engine.harmless
        self.note("begin", fault=one.kind, forgets=forgets, outage=outage)
        with self.acts[one.kind](Random(one.seed)):
            sleep(one.lasts)
        self.note("end")
        sleep(one.pause)

    def some(self, chance: Random) -> list[str]:
        """Return some of the workers, at least one."""
        number = max(1, int(len(self.crew.pids) * self.engine.share))
        return chance.sample(sorted(self.crew.pids), number)

    def kill(self, chance: Random) -> AbstractContextManager[None]:
        return self._kill(self.some(chance))

    @contextmanager
    def _kill(self, victims: list[str]) -> Iterator[None]:
        """Kill workers wherever they are (SIGKILL), and start others."""
        for who in victims:
            self.crew.send(who, signal.SIGKILL)
            self.crew.reap(who)
            self.note("kill", who=who)
        yield
        for who in victims:
            self.crew.replace(who)

    @contextmanager
    def stop(self, chance: Random) -> Iterator[None]:
        """Stop workers where they are (SIGSTOP), and let them go on."""
        victims = self.some(chance)
        for who in victims:
            self._stop(who)
        yield
        for who in victims:
            self._go_on(who)

    @contextmanager
    def first_waiter(self, chance: Random) -> Iterator[None]:
        """Stop who has waited longest for a lock, and let it go on."""
        who = None
        for _ in range(TRIES):
            if (who := self._longest_waiting()) is None:
                continue
            self._stop(who)
            self.crew.until_stopped(who)
            if self._asked(who):
                break
            self._go_on(who)  # it got the lock just now
            who = None
        yield
        if who is not None:
            self._go_on(who)

    def _longest_waiting(self) -> str | None:
        asked = {who: at for who in self.crew.pids if (at := self._asked(who))}
        return min(asked, key=lambda who: asked[who], default=None)

    def _asked(self, who: str) -> float:
        """Return when a worker asked for the lock that it waits for; 0 if it does not wait."""
        path = self.directory / f"{who}.events"
        if not path.exists():
            return 0.0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 1000))
            last = file.read().splitlines()[-1:]
        event = json.loads(last[0]) if last and last[0].endswith(b"}") else {}
        return event["t"] if event.get("what") == "ask" and event["wait"] else 0.0

    def _stop(self, who: str) -> None:
        self.note("stop", who=who)
        self.crew.send(who, signal.SIGSTOP)

    def _go_on(self, who: str) -> None:
        self.crew.send(who, signal.SIGCONT)
        self.note("go on", who=who)

    @contextmanager
    def clock(self, chance: Random) -> Iterator[None]:
        """Set the wall clock of workers forward by an hour, then back by two."""
        victims = self.some(chance)
        for who in victims:
            self.crew.send(who, signal.SIGUSR1)
        yield
        for who in victims:
            self.crew.send(who, signal.SIGUSR1)
