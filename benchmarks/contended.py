"""Many processes, one lock that each holds for 1 ms and asks for again at once: ours and others.

    python -m benchmarks.contended                     # prints a table, 3 minutes
    python -m benchmarks.contended --count 8 --only redis

Starts a Redis, a MariaDB and a PostgreSQL of its own (tests/servers.py). All are measured in
turn, several times. `pip install -r benchmarks/requirements.txt` adds python-redis-lock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# By server: how one process takes the lock for a moment. The first is the least that can be sent;
# on Redis it is no lock at all: nobody owns the token, and it never expires.
CONTENDERS = {
    "redis": ("raw BLPOP of a token", "distlock_app", "redis-py Lock", "python-redis-lock"),
    "mysql": ("raw GET_LOCK", "distlock_app named lock", "distlock_app lock table"),
    "postgresql": ("raw advisory lock", "distlock_app advisory lock", "distlock_app lock table"),
}
TITLES = {"redis": "Redis", "mysql": "MariaDB", "postgresql": "PostgreSQL"}
ALIASES = {
    "distlock_app": "redis",
    "distlock_app named lock": "named",
    "distlock_app advisory lock": "advisory",
    "distlock_app lock table": "default",
}
NAME = "contended"
HOLD = 0.001  # seconds


# In a process that contends.


def turn_of(contender: str) -> Callable[[], Any]:
    """Return what makes a context in which the lock is held."""
    if contender in ALIASES:
        import django

        django.setup()
        from distlock_app import Lock

        lock = Lock(NAME, using=ALIASES[contender], wait=60)
        return lambda: lock
    if contender == "raw GET_LOCK":
        return _raw_sql(
            _mysql(), f"SELECT GET_LOCK('{NAME}', 60)", f"SELECT RELEASE_LOCK('{NAME}')"
        )
    if contender == "raw advisory lock":
        take, free = "SELECT pg_advisory_lock(7)", "SELECT pg_advisory_unlock(7)"
        return _raw_sql(_postgresql(), take, free)
    import redis

    client = redis.Redis.from_url(os.environ["DISTLOCK_TEST_REDIS_URL"])
    if contender == "redis-py Lock":
        return lambda: client.lock(NAME, timeout=30)
    if contender == "python-redis-lock":
        import redis_lock

        return lambda: redis_lock.Lock(client, NAME, expire=30)
    return _token(client)


def _token(client: Any) -> Callable[[], Any]:
    @contextmanager
    def turn() -> Iterator[None]:
        client.blpop("token", 60)
        yield
        client.rpush("token", "1")

    return turn


def _raw_sql(cursor: Any, take: str, free: str) -> Callable[[], Any]:
    @contextmanager
    def turn() -> Iterator[None]:
        cursor.execute(take)
        cursor.fetchall()
        yield
        cursor.execute(free)
        cursor.fetchall()

    return turn


def _mysql() -> Any:
    from urllib.parse import urlsplit

    import MySQLdb

    url = urlsplit(os.environ["DISTLOCK_TEST_MYSQL_URL"])
    connection = MySQLdb.connect(host=url.hostname, port=url.port, user=url.username)
    connection.autocommit(True)
    return connection.cursor()


def _postgresql() -> Any:
    import psycopg

    url = os.environ["DISTLOCK_TEST_POSTGRESQL_URL"]
    connection = psycopg.connect(url, autocommit=True, prepare_threshold=0)
    return connection.cursor()


def contend(contender: str, count: int, seconds: float) -> None:
    """Fork `count` children that take turns; print when each asked and got the lock."""
    gate, start = os.pipe()
    answers = []
    for _ in range(count):
        mine, theirs = os.pipe()
        if os.fork() == 0:
            status = 1
            try:
                os.close(start)
                turn = turn_of(contender)
                os.read(gate, 1)
                with os.fdopen(theirs, "w") as answer:
                    json.dump(_take_turns(turn, seconds), answer)
                status = 0
            finally:
                os._exit(status)
        os.close(theirs)
        answers.append(mine)
    os.close(gate)
    time.sleep(2)  # until all are ready
    os.close(start)
    waits = [json.loads(Path(f"/dev/fd/{answer}").read_text()) for answer in answers]
    print(json.dumps(waits))


def _take_turns(turn: Callable[[], Any], seconds: float) -> list[tuple[float, float]]:
    waits = []
    end = time.monotonic() + seconds
    while (asked := time.monotonic()) < end:
        with turn():
            waits.append((asked, time.monotonic()))
            time.sleep(HOLD)
    return waits


# In the process that measures.


def requests_of(kind: str, server: Any) -> Callable[[], int]:
    """Return what tells how many requests the server has read from its clients so far."""
    os.environ[f"DISTLOCK_TEST_{kind.upper()}_URL"] = server.url
    if kind == "redis":
        import redis

        client = redis.Redis.from_url(server.url)
        return lambda: int(client.info("stats")["total_reads_processed"])  # type: ignore[index]
    if kind == "mysql":
        cursor = _mysql()
        cursor.execute("CREATE DATABASE IF NOT EXISTS distlock")

        def questions() -> int:
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
            return int(cursor.fetchone()[1])

        return questions
    watcher = _postgresql()

    def transactions() -> int:  # a statement each, in autocommit; told when a session ends
        time.sleep(1.5)
        watcher.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database"
            " WHERE datname = current_database()"
        )
        return int(watcher.fetchone()[0])

    return transactions


def measure(
    contender: str, requests: Callable[[], int], count: int, seconds: float, env: dict[str, str]
) -> dict[str, float]:
    """Let them contend once; return what came of it."""
    before = requests()
    command = [sys.executable, "-m", "benchmarks.contended", "--child", contender]
    done = subprocess.run(
        [*command, "--count", str(count), "--seconds", str(seconds)],
        env={**os.environ, **env},
        check=True,
        stdout=subprocess.PIPE,
    )
    waits = json.loads(done.stdout)
    sent = requests() - before
    asked = [one[0][0] for one in waits if one]
    # The first and the last second do not count: somebody is not there yet, or not any more.
    begin, end = min(asked) + 1, min(asked) + seconds - 1
    got = [sum(begin < at < end for _, at in one) for one in waits]
    return {
        "rate": sum(got) / (end - begin),
        "requests": sent / sum(map(len, waits)),
        "spread": max(got) / max(1, min(got)),
        "longest": max(at - asked for one in waits for asked, at in one) * 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=32, help="processes")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=CONTENDERS, action="append")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    if args.child:
        contend(args.child, args.count, args.seconds)
        return
    from tests.servers import MariaDBServer, PostgreSQLServer, RedisServer

    kinds = {"redis": RedisServer, "mysql": MariaDBServer, "postgresql": PostgreSQLServer}
    print(f"{args.count} processes, median of {args.rounds} rounds of {args.seconds:g} s\n")
    print("| Server | | acquisitions/s | of raw | requests each | max/min | longest wait, ms |")
    print("|---|---|---|---|---|---|---|")
    for kind in args.only or CONTENDERS:
        with kinds[kind]() as server:
            rows = _measure_all(kind, server, args)
        raw = statistics.median(r["rate"] for r in rows[CONTENDERS[kind][0]])
        for contender, rounds in rows.items():
            median = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
            print(
                f"| {TITLES[kind]} | {contender} | {median['rate']:.0f} |"
                f" {median['rate'] / raw:.2f} | {median['requests']:.2f} |"
                f" {median['spread']:.2f} | {median['longest']:.0f} |",
                flush=True,
            )


def _measure_all(kind: str, server: Any, args: argparse.Namespace) -> dict[str, Any]:
    requests = requests_of(kind, server)
    env = {} if kind == "redis" else {"DISTLOCK_TEST_DATABASE": kind}
    if kind == "redis":
        import redis

        redis.Redis.from_url(server.url).rpush("token", "1")
    else:
        migrate = [sys.executable, "-m", "django", "migrate", "-v0", "--skip-checks"]
        subprocess.run(migrate, env={**os.environ, **env}, check=True)
    rows: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for contender in CONTENDERS[kind]:
            if contender == "python-redis-lock" and not _installed("redis_lock"):
                continue
            found = measure(contender, requests, args.count, args.seconds, env)
            rows.setdefault(contender, []).append(found)
    return rows


def _installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


if __name__ == "__main__":
    main()
