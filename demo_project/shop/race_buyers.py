"""The buyers of a race: processes of the operating system, each with connections of its own."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from threading import BrokenBarrierError
from typing import Any

from .race_terms import Terms

# Seconds: for processes to start and connect; for the longest wait for a guard; for a buyer to
# end by itself when the time is over.
START, PATIENCE, GRACE = 20.0, 10.0, 2.0

# Forked from a server that has one thread and no connection, whatever the director has.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["demo_project.wsgi"])  # it sets Django up


@dataclass
class Report:
    """What a buyer says of itself: times and troubles. What was sold is counted in the books."""

    waits: list[float] = field(default_factory=list)  # seconds, of each successful purchase
    attempts: int = 0  # of optimistic changes
    purchases: int = 0  # by them
    conflicts: int = 0
    gave_up: int = 0
    note: str = ""
    began: float = 0.0  # monotonic
    ended: float = 0.0


class Customer:
    """A buyer in its own process; what the strategies call `buyer`."""

    def __init__(self, number: int, terms: Terms, gun: Any) -> None:
        self.number = number
        self.report = Report()
        self._terms = terms
        self._gun = gun
        self._ends = self._clicked = 0.0

    def ready(self) -> None:
        """Wait for the starting gun, the first time."""
        if self.report.began:
            return
        try:
            self._gun.wait(START)
        except BrokenBarrierError:
            pass  # somebody did not get that far; the others race all the same
        self.report.began = self._clicked = time.monotonic()
        self._ends = self._clicked + self._terms.seconds

    def think(self) -> None:
        """Take the time that a purchase needs between reading and writing."""
        self.ready()
        time.sleep(self._terms.think)

    def patience(self) -> float:
        """Return how long to wait for a guard, in seconds."""
        return max(0.05, min(PATIENCE, self._ends - time.monotonic()))

    def changing(self) -> None:
        """Count an attempt of an optimistic change."""
        self.report.attempts += 1

    def in_time(self) -> bool:
        return not self.report.began or time.monotonic() < self._ends

    def shop(self, strategy: Any, rows: list[int]) -> None:
        """Buy one unit, of the first row that has any left."""
        from django.db import DatabaseError

        from distlock_app import LockError, StaleObjectError

        from .race_strategies import SoldOut

        report = self.report
        self._clicked = time.monotonic()
        for pk in rows:
            attempts = report.attempts
            try:
                strategy.buy(pk, self)
            except SoldOut:
                continue
            except (LockError, StaleObjectError, DatabaseError) as error:
                report.gave_up += 1
                report.note = report.note or f"{type(error).__name__}: {error}"
                return
            finally:
                report.purchases += report.attempts > attempts
            waited = time.monotonic() - self._clicked - self._terms.think
            report.waits.append(max(0.0, waited))
            return


class Choice:
    """What a buyer wants next; the same in every strategy."""

    def __init__(self, number: int, terms: Terms, items: dict[str, int]) -> None:
        self._share = terms.hot
        self._hot = {name: pk for name, pk in items.items() if name.startswith("hot")}
        self._cold = [pk for name, pk in items.items() if name not in self._hot]
        self._random = random.Random(number)

    def rows(self) -> list[int]:
        """Return the row to buy from, and those to look at if it is empty."""
        from distlock_app import bucket

        if self._cold and self._random.random() >= self._share:
            return [self._random.choice(self._cold)]
        wanted = bucket("hot", self._random.random(), buckets=len(self._hot))
        first = list(self._hot).index(wanted)
        rows = list(self._hot.values())
        return rows[first:] + rows[:first]


def work(
    number: int, key: str, terms: Terms, items: dict[str, int], tickets: Any, gun: Any, pipe: Any
) -> None:
    """Buy until there are no more tickets or the time is over; send the report."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the director's to hear
    # Whatever happens to the director and to us: the kernel ends this process.
    signal.alarm(int(START + terms.seconds + GRACE) + 5)
    import django

    django.setup()
    from django.db import connections

    from distlock_app.core.registry import registry
    from distlock_app.signals import version_conflict

    from .race_strategies import strategies

    customer, choice = Customer(number, terms, gun), Choice(number, terms, items)
    report = customer.report

    def count(**facts: Any) -> None:
        report.conflicts += 1

    version_conflict.connect(count)
    strategy, director = strategies()[key], multiprocessing.parent_process()
    try:
        strategy.warm_up(number)
        while customer.in_time() and director and director.is_alive() and draw(tickets):
            customer.shop(strategy, choice.rows())
    except Exception as error:
        report.note = f"{type(error).__name__}: {error}"
    customer.ready()  # who found nothing to buy keeps nobody waiting
    report.ended = time.monotonic()
    with suppress(BrokenPipeError):  # the director is gone
        pipe.send(asdict(report))
    registry.reset()
    connections.close_all()


def draw(tickets: Any) -> bool:
    """Take one of the purchases that are left to try."""
    with tickets.get_lock():
        if not tickets.value:
            return False
        tickets.value -= 1
        return True


# In the director.


class Crowd:
    """The buyers of one strategy, from their start to their end."""

    def __init__(self, key: str, terms: Terms, items: dict[str, int]) -> None:
        self.reports: list[Report] = []
        self._tickets = context.Value("i", terms.purchases)
        self._purchases = terms.purchases
        self._gun = context.Barrier(terms.buyers)  # kept: it ends with its last owner here
        self._pipes = []
        self._processes = []
        for number in range(terms.buyers):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (number, key, terms, items, self._tickets, self._gun, theirs)
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def tried(self) -> int:
        """How many purchases were begun."""
        # Not under its lock, which a buyer that was killed may have kept.
        return self._purchases - int(self._tickets.get_obj().value)

    def wait(self, seconds: float) -> bool:
        """Wait so long for reports; return whether all are there."""
        for pipe in connection.wait(self._pipes, seconds):
            try:
                self.reports.append(Report(**pipe.recv()))  # type: ignore[union-attr]
            except EOFError:  # it was killed
                pass
            self._pipes.remove(pipe)  # type: ignore[arg-type]
            pipe.close()  # type: ignore[union-attr]
        return not self._pipes

    def close(self) -> None:
        """End whoever still runs, by its process id."""
        for process in self._processes:
            process.join(0 if self._pipes else GRACE)
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
