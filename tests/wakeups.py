"""Lose wake-ups on purpose, on Redis: for how long is a lock left free that somebody waits for?

    python -m tests.wakeups --times 10000

In each round two callers wait for a lock, or one. Within a few milliseconds of its release the
subscription is killed by which the process hears of hand-overs, or the first waiter is interrupted,
cancelled, or left behind by its event loop. The other one has to get the lock: a message or not, a
waiter looks for itself each second. Prints how long that took; exits with 1 if it took longer.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import random
import signal
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic, sleep
from typing import Any

from tests.engines import until
from tests.processes import Processes
from tests.servers import RedisServer

KINDS = ["subscription killed", "thread interrupted", "task cancelled", "event loop closed"]
APART = 0.003  # seconds, at most, between the release and what disturbs it
MOST = 1.5  # seconds: a waiter looks each second, and the machine is busy
PROCESSES = 6

# Starts the first waiter; yields what disturbs it, and returns when what it got is released.
Victim = Callable[[str], Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wakeups", description=__doc__)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    group, server = Processes(), RedisServer().start()
    try:
        found = lost(group, server.url, given.times, given.seed)
    finally:
        group.close()
        server.close()
    print("| disturbed by | times | median, ms | longest, ms |\n|---|---:|---:|---:|")
    for kind, gaps in found.items():
        print(f"| {kind} | {len(gaps)} | {statistics.median(gaps):.1f} | {max(gaps):.0f} |")
    return int(max(map(max, found.values())) > MOST * 1000)


def lost(group: Processes, url: str, times: int, seed: int) -> dict[str, list[float]]:
    """Return by kind the milliseconds for which each lock was free."""
    rounds = -(-times // PROCESSES)
    workers = [
        group.start(
            "tests.wakeups:work",
            deadline=60 + rounds,
            env={"DISTLOCK_TEST_REDIS_URL": url},
            rounds=rounds,
            seed=f"{seed}:{number}",
        )
        for number in range(PROCESSES)
    ]
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for worker in workers:
        for kind, gap in worker.result():
            found[kind].append(gap)
    return found


def work(*, rounds: int, seed: str) -> list[tuple[str, float]]:
    """Make rounds in a thread of their own: only the main one can be interrupted."""
    orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    interrupted = InMainThread(orders)
    victims: dict[str, Victim] = {
        "subscription killed": subscription,
        "thread interrupted": interrupted,
        "task cancelled": partial(on_loop, closing=False),
        "event loop closed": partial(on_loop, closing=True),
    }
    chance, gaps = random.Random(seed), []

    def all_rounds() -> None:
        try:
            for number in range(rounds):
                kind = chance.choice(KINDS)
                apart = chance.uniform(-APART, APART)
                gap = one_round(f"{seed}:{number}", victims[kind], apart)
                gaps.append((kind, gap * 1000))
        finally:
            orders.put(None)

    thread = threading.Thread(target=all_rounds, daemon=True)
    thread.start()
    interrupted.wait_for_locks()
    thread.join()
    assert len(gaps) == rounds, "a round failed, see above"
    return gaps


def one_round(name: str, victim: Victim, apart: float) -> float:
    """Return for how many seconds the lock was left free."""
    hold, got = lock(name).acquire(wait=0), []

    def wait() -> None:
        with lock(name):
            got.append(monotonic())

    with victim(name) as disturb:
        before = waiters(name)
        survivor = threading.Thread(target=wait, daemon=True)
        survivor.start()
        until(lambda: waiters(name) == before + 1)
        first, then = (hold.release, disturb) if apart > 0 else (disturb, hold.release)
        first()
        sleep(abs(apart))
        then()
    free_since = monotonic()
    survivor.join(60)
    return max(0.0, got[0] - free_since)


def lock(name: str) -> Any:
    from distlock_app import Lock

    return Lock(name, using="redis", wait=60)


def waiters(name: str) -> int:
    return sum(holding.waiters for holding in lock(name).holders())


@contextmanager
def subscription(name: str) -> Iterator[Callable[[], object]]:
    from django_redis import get_redis_connection

    client = get_redis_connection("locks")
    yield lambda: client.client_kill_filter(_type="pubsub")


class Interrupted(Exception):
    pass


class InMainThread:
    """The main thread, which waits for locks and is interrupted by a signal."""

    def __init__(self, orders: queue.SimpleQueue[str | None]) -> None:
        self.orders = orders
        self.waits = False
        self.ended = threading.Event()
        signal.signal(signal.SIGUSR1, self.interrupt)

    def interrupt(self, *_: object) -> None:
        if self.waits:
            self.waits = False
            raise Interrupted

    def wait_for_locks(self) -> None:
        while (name := self.orders.get()) is not None:
            with suppress(Interrupted):
                self.waits = True
                with lock(name):
                    self.waits = False
            self.ended.set()

    @contextmanager
    def __call__(self, name: str) -> Iterator[Callable[[], object]]:
        self.ended.clear()
        self.orders.put(name)
        until(lambda: waiters(name) == 1)
        yield partial(signal.pthread_kill, threading.main_thread().ident or 0, signal.SIGUSR1)
        assert self.ended.wait(60)


@contextmanager
def on_loop(name: str, *, closing: bool) -> Iterator[Callable[[], object]]:
    """Wait in a task that is cancelled, or whose event loop ends without it."""
    loop, holds = asyncio.new_event_loop(), []

    async def wait() -> None:
        holds.append(await lock(name).aacquire())

    task = loop.create_task(wait())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    until(lambda: waiters(name) == 1)
    yield partial(loop.call_soon_threadsafe, loop.stop if closing else task.cancel)
    if not closing:
        until(task.done)
        loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()
    for hold in holds:
        hold.release()
    if not task.done():
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        coroutine: Any = task.get_coro()  # None is possible since Python 3.12, of eager tasks
        coroutine.close()


if __name__ == "__main__":
    sys.exit(main())
