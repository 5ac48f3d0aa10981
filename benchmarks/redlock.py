"""Redlock on five private servers against the least it can do: send to all, then read all.

    python -m benchmarks.redlock

One thread, a connection to each node, both in turn; prints the medians of acquire + release and
their ratio, then the same of ours with one node frozen (SIGSTOP).
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any

import django

NODES = 5
ROUNDS = 4000
NAMES = 100
TTL = 30.0
HOLDER = '{"host":"web1.example.com","pid":12345,"thread":"MainThread"}'
COMPARE_AND_DELETE = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
)

Pair = Callable[[str, str], None]


def raw_pair(urls: list[str]) -> Pair:
    """Return acquire + release: SET NX PX, then compare and delete, over held connections."""
    import redis

    connections: list[Any] = []
    for url in urls:
        client = redis.Redis.from_url(url, protocol=2)
        sha = client.script_load(COMPARE_AND_DELETE)
        connections.append(client.connection_pool.get_connection())
    pack = connections[0].pack_command

    def send_then_read(*words: Any) -> None:
        request = pack(*words)
        for connection in connections:
            connection.send_packed_command(request, check_health=False)
        answers = [connection.read_response() for connection in connections]
        assert answers.count(1) == len(answers) or answers.count(b"OK") == len(answers)

    def pair(key: str, owner: str) -> None:
        send_then_read("SET", f"raw:{key}", owner, "NX", "PX", int(TTL * 1000))
        send_then_read("EVALSHA", sha, 1, f"raw:{key}", owner)

    return pair


def our_pair() -> Pair:
    """Return acquire + release of the backend."""
    from distlock_app.claims import Claim, Grant
    from distlock_app.registry import registry

    backend = registry["quorum"].backend

    def pair(key: str, owner: str) -> None:
        claim = Claim(name="invoice:42", key=key, owner=owner, ttl=TTL, holder=HOLDER)
        grant = backend.acquire(claim, 0)
        assert isinstance(grant, Grant)
        assert backend.release(grant)

    return pair


def medians(pairs: dict[str, Pair], rounds: int) -> dict[str, float]:
    """Run the pairs in turn; return the median of each in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in pairs}
    keys = [secrets.token_hex(20) for _ in range(NAMES)]
    for turn in range(rounds):
        for name, pair in pairs.items():
            owner = secrets.token_hex(16)
            started = time.perf_counter()
            pair(keys[turn % NAMES], owner)
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def main() -> None:
    from tests.servers import RedisServer

    servers = [RedisServer().start() for _ in range(NODES)]
    os.environ["DISTLOCK_TEST_REDLOCK_URL"] = ",".join(server.url for server in servers)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    ours, raw = our_pair(), raw_pair([server.url for server in servers])
    medians({"raw": raw, "ours": ours}, ROUNDS // 10)
    found = medians({"raw": raw, "ours": ours}, ROUNDS)
    ratio = found["ours"] / found["raw"]
    print(f"raw {found['raw']:.0f} us, ours {found['ours']:.0f} us, ratio {ratio:.2f}")
    whole, frozen, worst = [], [], 0.0
    # In turn, a second at a time, as the machine may be busier now than then.
    for _ in range(5):
        whole.append(medians({"ours": ours}, ROUNDS // 5)["ours"])
        servers[-1].pause()
        started = time.perf_counter()
        ours(secrets.token_hex(20), secrets.token_hex(16))
        worst = max(worst, time.perf_counter() - started)
        frozen.append(medians({"ours": ours}, ROUNDS // 5)["ours"])
        servers[-1].resume()
        time.sleep(0.2)
    ratio = statistics.median(frozen) / statistics.median(whole)
    print(
        f"one of {NODES} nodes frozen: {statistics.median(frozen):.0f} us against "
        f"{statistics.median(whole):.0f} us, ratio {ratio:.2f}; "
        f"the first acquisition after the freeze took {worst * 1e3:.1f} ms"
    )
    for server in servers:
        server.close()


if __name__ == "__main__":
    main()
