"""Much at once: many held locks, many renewed holds, many waiting tasks."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from . import raw
from .contended import requests_of
from .contenders import claim_of


def held(kind: str, count: int) -> dict[str, Any]:
    """Hold `count` locks; compare acquiring beside them with acquiring on an empty server.

    The raw pair on both, too, because two servers or tables are not equally fast.
    """
    full, empty, size = _full_and_empty(kind)
    pairs = {"empty": _pair(empty), "full": _pair(full), **_raw_pairs(kind)}
    probes = [f"probe:{number}" for number in range(100)]
    for name in probes:  # connect, prepare; rows of a lock table stay
        for pair in pairs.values():
            pair(name)
    before = size()
    _fill(kind, full, count)
    after = size()
    times: dict[str, list[float]] = {title: [] for title in pairs}
    for name in probes * 15:
        for title, pair in pairs.items():
            started = time.perf_counter()
            pair(name)
            times[title].append(time.perf_counter() - started)
    medians = {title: statistics.median(values) * 1e6 for title, values in times.items()}
    return {**medians, "bytes": (after - before) / count, "count": count}


def _full_and_empty(kind: str) -> tuple[Any, Any, Callable[[], int]]:
    from django.db import connection

    from distlock_app.core.registry import registry

    if kind != "redis":
        table = "distlock_app_distlock"
        statement = {
            "mysql": f"SELECT file_size FROM information_schema.innodb_sys_tablespaces"
            f" WHERE name = CONCAT(DATABASE(), '/{table}')",
            "postgresql": f"SELECT pg_total_relation_size('{table}')",
        }[kind]

        def size() -> int:
            with connection.cursor() as cursor:
                cursor.execute(statement)
                return int(cursor.fetchone()[0])

        return registry["default"].backend, registry["locks"].backend, size
    import redis
    from django.conf import settings

    # A server of its own, so that its memory is that of the held locks.
    url = os.environ["DISTLOCK_TEST_SPARE_URL"]
    settings.CACHES["spare"] = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}
    engine = "distlock_app.backends.redis.RedisBackend"
    registry.add("spare", {"BACKEND": engine, "LOCATION": "spare"})
    client = redis.Redis.from_url(url)
    return (
        registry["spare"].backend,
        registry["redis"].backend,
        lambda: int(client.info("memory")["used_memory"]),  # type: ignore[index]
    )


def _raw_pairs(kind: str) -> dict[str, Callable[[str], None]]:
    if kind == "redis":
        variables = {"empty": "DISTLOCK_TEST_REDIS_URL", "full": "DISTLOCK_TEST_SPARE_URL"}
        turns = {at: raw.redis_pair(variable) for at, variable in variables.items()}
    else:
        databases = {"empty": "locks", "full": "default"}
        turns = {at: raw.lock_table(kind, database) for at, database in databases.items()}

    def pair(turn: raw.Turn, name: str) -> None:
        with turn(name):
            pass

    return {f"raw {at}": partial(pair, turn) for at, turn in turns.items()}


def _pair(backend: Any) -> Callable[[str], None]:
    def pair(name: str) -> None:
        assert backend.release(backend.acquire(claim_of(name), 0))

    return pair


def _fill(kind: str, backend: Any, count: int) -> None:
    claims = (claim_of(f"held:{number}", ttl=3600) for number in range(count))
    if kind == "redis":
        for claim in claims:
            assert backend.acquire(claim, 0)
        return
    from datetime import timedelta

    from django.utils import timezone

    from distlock_app.models import DistLock

    now = timezone.now()
    ends = now + timedelta(hours=1)
    facts = {"expiry": ends, "acquired_at": now, "fence": 1, "holder": raw.HOLDER}
    rows = (DistLock(key=x.key, name=x.name, owner=x.owner, **facts) for x in claims)
    DistLock.objects.bulk_create(rows, batch_size=2000)


def renewal(kind: str, count: int, ttl: float) -> dict[str, Any]:
    """Hold `count` locks in this process, with renewal; see what that takes in one ttl / 3."""
    from distlock_app import Lock

    using = "redis" if kind == "redis" else "default"
    requests = requests_of(kind)
    threads = threading.active_count()
    holds = [Lock(f"invoice:{number}", using=using, ttl=ttl).acquire() for number in range(count)]
    started, cpu, asked = time.monotonic(), time.process_time(), requests()
    most = 0
    while time.monotonic() < started + ttl / 3:
        most = max(most, threading.active_count() - threads)
        time.sleep(0.1)
    took = time.monotonic() - started
    share = (time.process_time() - cpu) / took
    sent = (requests() - asked) / took
    found = {
        "count": count,
        "threads": most,
        "cpu": share,
        "requests": sent,
        "lost": sum(hold.lost for hold in holds),
        "least_left": min(hold.expires_in for hold in holds),
    }
    for hold in holds:
        hold.release()
    return found


def tasks(count: int) -> dict[str, Any]:
    """Let `count` asyncio tasks wait for as many locks, which are then given up one by one."""
    import redis

    from distlock_app import Lock
    from distlock_app.core.registry import registry

    server = redis.Redis.from_url(os.environ["DISTLOCK_TEST_REDIS_URL"])
    backend = registry["redis"].backend
    grants = [backend.acquire(claim_of(f"task:{number}", ttl=120), 0) for number in range(count)]
    before = _memory()

    def connected() -> int:
        return int(server.info("clients")["connected_clients"])  # type: ignore[index]

    async def wait(number: int) -> float:
        async with Lock(f"task:{number}", using="redis", wait=60):
            return time.monotonic()

    async def run() -> dict[str, Any]:
        waiting = [asyncio.create_task(wait(number)) for number in range(count)]
        give_up = time.monotonic() + 30
        while sum(holding.waiters or 0 for holding in backend.holders()) < count:
            if time.monotonic() > give_up:
                raise TimeoutError("the tasks do not wait")
            await asyncio.sleep(0.2)
        await asyncio.sleep(1.5)  # longer than a waiter waits before it asks again
        found = {
            "count": count,
            "connections": connected() - 1,
            "threads": threading.active_count(),
        }
        found["memory_mib"], found["more_mib"] = _memory(), _memory() - before
        started = time.monotonic()
        await asyncio.to_thread(lambda: [backend.release(grant) for grant in grants])
        got = await asyncio.gather(*waiting)
        return {**found, "handed_over_s": max(got) - started}

    return asyncio.run(run())


def _memory() -> float:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def frozen(seconds: float) -> dict[str, Any]:
    """Redlock with one of five nodes stopped (SIGSTOP) against the same with all of them."""
    import signal

    from distlock_app.core.registry import registry

    pair = _pair(registry["quorum"].backend)
    pid = int(os.environ["DISTLOCK_BENCHMARK_NODE"])
    whole: list[float] = []
    slow: list[float] = []
    worst = 0.0
    for _ in range(4):  # in turn, as the machine may be busier now than then
        whole.append(_median(pair, seconds / 8))
        os.kill(pid, signal.SIGSTOP)
        try:
            started = time.perf_counter()
            pair("first")
            worst = max(worst, time.perf_counter() - started)
            slow.append(_median(pair, seconds / 8))
        finally:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.2)
    medians = {"whole": statistics.median(whole), "frozen": statistics.median(slow)}
    return {**medians, "ratio": medians["frozen"] / medians["whole"], "first_ms": worst * 1e3}


def _median(pair: Callable[[str], None], seconds: float) -> float:
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.perf_counter()
        pair(f"invoice:{len(times) % 100}")
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6
