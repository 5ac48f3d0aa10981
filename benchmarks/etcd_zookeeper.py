"""Locks in etcd and ZooKeeper against the two requests that they cannot do without.

    DISTLOCK_TEST_ETCD_URL=http://127.0.0.1:2379 DISTLOCK_TEST_ZOOKEEPER_URL=127.0.0.1:2181 \
        python -m benchmarks.etcd_zookeeper

Make a key or node that was not there, and delete it: raw, over one connection of http.client
or of kazoo. One thread, both in turn; prints the medians and their ratio.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import django

ROUNDS = 1500
HOLDER = '{"host": "web1.example.com", "pid": 12345, "thread": "MainThread"}'

Pair = Callable[[str, str], None]


def raw_etcd(url: str) -> Pair:
    """Return acquire + release as one transaction and one deletion, without a lease."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)

    def ask(path: str, **body: object) -> None:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = json.loads(connection.getresponse().read())
        assert answer.get("succeeded") or answer.get("deleted"), answer

    def pair(key: str, owner: str) -> None:
        name = base64.b64encode(f"raw/{key}".encode()).decode()
        value = base64.b64encode(f"{owner} {HOLDER}".encode()).decode()
        missing = {"key": name, "target": "CREATE", "create_revision": 0}
        put = {"request_put": {"key": name, "value": value}}
        ask("/v3/kv/txn", compare=[missing], success=[put])
        ask("/v3/kv/deleterange", key=name)

    return pair


def raw_zookeeper(hosts: str) -> Pair:
    """Return acquire + release as one ephemeral node made and deleted."""
    from kazoo.client import KazooClient

    client = KazooClient(hosts)
    client.start()
    client.ensure_path("/raw")

    def pair(key: str, owner: str) -> None:
        client.create(f"/raw/{key}", f"{owner} {HOLDER}".encode(), ephemeral=True)
        client.delete(f"/raw/{key}")

    return pair


def ours(alias: str) -> Pair:
    """Return acquire + release of the backend."""
    from distlock_app.claims import Claim
    from distlock_app.registry import registry

    backend = registry[alias].backend

    def pair(key: str, owner: str) -> None:
        claim = Claim(name="invoice:42", key=key, owner=owner, ttl=30.0, holder=HOLDER)
        grant = backend.acquire(claim, 0)
        assert grant
        assert backend.release(grant)

    return pair


def engines() -> Iterator[tuple[str, Pair]]:
    """Yield the alias of each engine whose server is named, and its raw pair."""
    if url := os.environ.get("DISTLOCK_TEST_ETCD_URL"):
        yield "etcd", raw_etcd(url)
    if hosts := os.environ.get("DISTLOCK_TEST_ZOOKEEPER_URL"):
        yield "zookeeper", raw_zookeeper(hosts)


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    for alias, raw in engines():
        pairs = {"raw": raw, "ours": ours(alias)}
        times: dict[str, list[float]] = {name: [] for name in pairs}
        for turn in range(ROUNDS):
            for name, pair in pairs.items():
                key, owner = f"{turn % 100:040x}", secrets.token_hex(16)
                started = time.perf_counter()
                pair(key, owner)
                times[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(values) * 1e6 for name, values in times.items()}
        ratio = medians["ours"] / medians["raw"]
        print(f"{alias}: raw {medians['raw']:.0f} us, ours {medians['ours']:.0f} us,", end=" ")
        print(f"ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
