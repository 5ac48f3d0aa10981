"""The lock table against the five statements that it cannot do without, sent by the raw driver.

    DISTLOCK_TEST_DATABASE=mysql DISTLOCK_TEST_MYSQL_URL=mysql://root@127.0.0.1:3306/bench \
        python -m benchmarks.lock_table

One thread, one connection each, both in turn on one table; prints the medians and their ratio.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any

import django

ROUNDS = 3000
NAMES = 100

CLOCK = {"mysql": "UTC_TIMESTAMP(6)", "postgresql": "clock_timestamp()"}
STATEMENTS = (
    "BEGIN",
    "SELECT owner, expiry <= {clock}, fence FROM {table} WHERE {key} = %s FOR UPDATE",
    "UPDATE {table} SET owner = %s, expiry = {clock} + INTERVAL {ttl}, fence = fence + 1,"
    " holder = %s WHERE {key} = %s",
    "COMMIT",
    "UPDATE {table} SET owner = '', expiry = {clock} WHERE {key} = %s AND owner = %s",
)
HOLDER = '{"host": "web1.example.com", "pid": 12345, "thread": "MainThread"}'


def raw_pair() -> Callable[[str, str], None]:
    """Return acquire + release as the least that can be sent."""
    from django.db import connection

    from distlock_app.models import DistLock

    vendor, quote = connection.vendor, connection.ops.quote_name
    begin, select, take, commit, free = (
        text.format(
            clock=CLOCK[vendor],
            table=quote(DistLock._meta.db_table),
            key=quote("key"),
            ttl="30 SECOND" if vendor == "mysql" else "'30 SECOND'",
        )
        for text in STATEMENTS
    )
    connection.ensure_connection()
    if vendor == "postgresql":
        connection.connection.prepare_threshold = 0
        cursor: Any = connection.Database.Cursor(connection.connection)
    else:
        cursor = connection.connection.cursor()

    def pair(key: str, owner: str) -> None:
        cursor.execute(begin)
        cursor.execute(select, (key,))
        cursor.fetchone()
        cursor.execute(take, (owner, HOLDER, key))
        cursor.execute(commit)
        cursor.execute(free, (key, owner))

    return pair


def our_pair() -> Callable[[str, str], None]:
    """Return acquire + release of the backend."""
    from distlock_app.backends.database import DatabaseBackend
    from distlock_app.claims import Claim, Grant

    backend = DatabaseBackend(alias="default")

    def pair(key: str, owner: str) -> None:
        claim = Claim(name="invoice:42", key=key, owner=owner, ttl=30.0, holder=HOLDER)
        grant = backend.acquire(claim, 0)
        assert isinstance(grant, Grant)
        assert backend.release(grant)

    return pair


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    pairs = {"raw": raw_pair(), "ours": our_pair()}
    times: dict[str, list[float]] = {name: [] for name in pairs}
    keys = [f"{number:040x}" for number in range(NAMES)]
    for key in keys:
        pairs["ours"](key, "made")
    for turn in range(ROUNDS):
        for name, pair in pairs.items():
            owner = secrets.token_hex(16)
            started = time.perf_counter()
            pair(keys[turn % NAMES], owner)
            times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) * 1e6 for name, values in times.items()}
    ratio = medians["ours"] / medians["raw"]
    print(f"raw {medians['raw']:.0f} us, ours {medians['ours']:.0f} us, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
