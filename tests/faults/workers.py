"""What worker processes do: take a lock, write with its fence, release it, and note all of it."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from django.conf import settings
from django.db import connections
from django.test import override_settings
from django.utils import timezone

from distlock_app import BackendError, Lock, LockBusy, LockLost
from tests.faults.history import Recorder
from tests.faults.odd import oddities
from tests.faults.store import FencedStore
from tests.faults.turn import Turn
from tests.launching import die_with_parent
from tests.processes import hear, say


def nest(
    *,
    directory: str,
    store: str,
    seed: int,
    locks: dict[str, Any],
    caches: dict[str, Any],
    migrate: bool,
    **plan: Any,
) -> None:
    """Fork workers when told to, which costs less than to start them; report their numbers."""
    faulthandler.cancel_dump_traceback_later()  # children would miss its thread
    with ExitStack() as stack:
        stack.enter_context(override_settings(CACHES={**settings.CACHES, **caches}))
        stack.enter_context(override_settings(DISTLOCK={"default": locks}))
        if migrate:
            from tests.database_workers import migrate as make_tables

            make_tables()
            connections.close_all()
        say("ready")
        while (order := hear()) is not None:
            if order["do"] == "reap":
                say(_reap(order["pid"], order["within"]))
                continue
            pid = os.fork()
            if pid == 0:
                _be_worker(Path(directory), order, store, seed, plan)
            say(pid)


def _reap(pid: int, within: float) -> str:
    """Wait for the end of a child; "" if it came, else it is made to say where it hangs."""
    deadline = monotonic() + within
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if monotonic() > deadline:
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGABRT)
            os.waitpid(pid, 0)
            return "it did not end"
        sleep(0.01)
    return ""


def _be_worker(
    directory: Path, order: dict[str, Any], store: str, seed: int, plan: dict[str, Any]
) -> None:
    try:
        die_with_parent()  # as a stopped process never looks
        who = order["who"]
        faulthandler.enable((directory / f"{who}.stack").open("w"))
        recorder = Recorder(directory / f"{who}.events")
        chance = random.Random(f"{seed}:{who}")
        let_the_clock_jump()
        if order["do"] == "work":
            worker = Worker(recorder, chance, FencedStore(store), who, **plan)
            worker.work(stop=directory / "stop")
        else:
            take_each(recorder, plan["names"], within=order["within"])
    finally:
        os._exit(0)


def let_the_clock_jump() -> None:
    """Have SIGUSR1 move the wall clock of this process, as Python sees it, by an hour."""
    jumps = [0.0]
    wall, wall_ns, now = time.time, time.time_ns, timezone.now

    def jump(*_: object) -> None:
        jumps[0] = {0.0: 3600.0, 3600.0: -3600.0}.get(jumps[0], 0.0)

    time.time = lambda: wall() + jumps[0]
    time.time_ns = lambda: wall_ns() + int(jumps[0] * 1e9)
    timezone.now = lambda: now() + timedelta(seconds=jumps[0])
    signal.signal(signal.SIGUSR1, jump)


def take_each(recorder: Recorder, names: list[str], *, within: float) -> None:
    """Take every lock once more, when all is quiet; note those that do not come free."""
    end = monotonic() + within
    for name in names:
        while True:
            try:
                with Lock(name, wait=max(1.0, end - monotonic())):
                    break
            except (LockBusy, BackendError, LockLost) as error:
                if monotonic() > end:
                    recorder.note("stuck", name=name, error=repr(error))
                    break
                sleep(0.05)


class Worker:
    """Takes locks until its time is over; every step is noted, those that fail too."""

    def __init__(
        self,
        recorder: Recorder,
        chance: random.Random,
        store: FencedStore,
        who: str,
        *,
        names: list[str],
        ttl: float,
        work: float,
        long: float,
        overstays: float,
        odd: float,
        waits: Sequence[float] = (0.0, 1.0, 3.0, 3.0, 12.0),
    ) -> None:
        """`work`: for so many seconds at most, but those that work longer than their lease;
        `long`: the share of these; `overstays`: of those that do not renew it; `odd`: of those
        that do it as no other, see tests/faults/odd.py."""
        self.recorder = recorder
        self.chance = chance
        self.store = store
        self.who = who
        self.names = names
        self.waits = waits
        self.ttl = ttl
        self.longest = work
        self.long = long
        self.overstays = overstays
        self.odd = odd
        self.oddities = oddities()
        self.number = 0

    def work(self, *, stop: Path) -> None:
        while not stop.exists():
            try:
                if self.chance.random() < self.odd:
                    self.chance.choice(self.oddities)(self)
                else:
                    self.turn()
            except Exception as error:
                self.recorder.note("surprise", error=repr(error))
                sleep(0.05)

    def turn(self) -> None:
        """Acquire once, and use what comes of it."""
        renew = self.chance.random() >= self.overstays
        is_long = not renew or self.chance.random() < self.long
        turn = Turn(self, renew=renew)
        if (hold := turn.acquire()) is None:
            return
        turn.write(hold, self.ttl * 1.4 if is_long else self.chance.uniform(0, self.longest))
        turn.release(hold)
