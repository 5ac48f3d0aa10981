"""Who takes locks in the benchmarks: the raw limit, distlock_app, and the locks of others.

A contender is made in the process (or thread) that uses it; making it gives `turn(name)`, a
context in which the lock `name` is held.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import raw
from .raw import Turn

TTL = 30
WAIT = 60
OURS = ("distlock_app", "its engine alone")
# Parts of ours, measured beside it.
UNDER_LOCK = "raw, under a `Lock` on nothing"
IN_STEPS = "raw: GET_LOCK in steps"
ITS_STATEMENTS = "raw: the statements of ours"


@dataclass(frozen=True)
class Contender:
    """One way to take a lock; `limit` is what the others of its group are compared with."""

    title: str
    make: Callable[[], Turn]
    limit: bool = False  # made once for each thread
    skipped: tuple[str, ...] = ()  # in these parts of the benchmark


@dataclass(frozen=True)
class Group:
    """Contenders on one server; the first one is the raw limit."""

    title: str
    servers: tuple[str, ...]
    contenders: tuple[Contender, ...]
    database: str = "sqlite"

    def of(self, part: str, *, peers: bool) -> list[Contender]:
        """Return who is measured in this part of the benchmark."""
        mine = [one for one in self.contenders if part not in one.skipped]
        return mine if peers else [one for one in mine if one.limit or one.title in OURS]


def ours(alias: str) -> Turn:
    from distlock_app import Lock

    return lambda name: Lock(name, using=alias, wait=WAIT)


def engine_alone(alias: str) -> Turn:
    """What the engine takes of it: no Lock, no Hold, no renewal."""
    from distlock_app.core.registry import registry

    backend = registry[alias].backend

    @contextmanager
    def turn(name: str) -> Iterator[None]:
        grant: Any = backend.acquire(claim_of(name), WAIT)
        yield
        assert backend.release(grant)

    return turn


def claim_of(name: str, ttl: float = TTL) -> Any:
    from distlock_app.claims import Claim
    from distlock_app.primitives.names import key_of

    owner = secrets.token_hex(16)
    return Claim(name=name, key=key_of(name), owner=owner, ttl=ttl, holder=raw.HOLDER)


def under_lock(make: Callable[[], Turn]) -> Turn:
    """The raw pair under a Lock whose backend does nothing: what `Lock` takes beside a server."""
    from distlock_app import Lock

    turn = make()

    @contextmanager
    def under(name: str) -> Iterator[None]:
        with Lock(name, using="dummy"), turn(name):
            yield

    return under


def its_statements(alias: str, kind: str) -> Turn:
    """What our backend on a database sends for a pair, sent again: without what it does besides."""
    from distlock_app.backends.sessions.link import MySQLLink, PostgreSQLLink

    links: dict[str, Any] = {"mysql": MySQLLink, "postgresql": PostgreSQLLink}
    turn, link, send = engine_alone(alias), links[kind](), links[kind].send
    link.connect(raw.cursor_of(kind).connection)
    if kind == "mysql":
        link.ask("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    sent: dict[str, list[tuple[str, Any]]] = {}

    def record(name: str) -> None:
        with turn(name):  # connects; the row of a lock table stays
            pass
        senders: list[Any] = []
        statements: list[tuple[str, Any]] = []

        def noted(self: Any, statement: str, values: Any = None) -> None:
            statements.append((statement, values))
            senders.append(self)
            send(self, statement, values)

        links[kind].send = noted
        with turn(name):
            pass
        links[kind].send, sent[name] = send, statements
        if kind == "postgresql":  # with the same names as in the session that sent them
            for statement in list(senders[0].prepared)[len(link.prepared) :]:
                link.prepare_once(statement)

    @contextmanager
    def again(name: str) -> Iterator[None]:
        if name not in sent:
            record(name)
        for statement, values in sent[name]:
            link.wait(statement, TTL, values)
        yield

    return again


def _client() -> Any:
    import redis

    return redis.Redis.from_url(os.environ["DISTLOCK_TEST_REDIS_URL"])


def redis_py(sleep: float = 0.1) -> Turn:
    client = _client()
    return lambda name: client.lock(name, timeout=TTL, sleep=sleep)


def django_redis() -> Turn:
    from django.core.cache import caches

    cache: Any = caches["locks"]
    return lambda name: cache.lock(name, timeout=TTL)


def python_redis_lock(renewal: bool = False) -> Turn:
    import redis_lock

    client = _client()
    return lambda name: redis_lock.Lock(client, name, expire=TTL, auto_renewal=renewal)


def pottery(variable: str = "DISTLOCK_TEST_REDIS_URL") -> Turn:
    import redis
    from pottery import Redlock

    masters = {redis.Redis.from_url(url) for url in os.environ[variable].split(",")}
    return lambda name: Redlock(key=name, masters=masters, auto_release_time=TTL)


def sherlock() -> Turn:
    from sherlock import RedisLock

    client = _client()
    return lambda name: RedisLock(
        name, client=client, expire=TTL, timeout=WAIT, retry_interval=0.01
    )


def tooz(scheme: str, kind: str) -> Turn:
    from tooz.coordination import get_coordinator

    address = os.environ[f"DISTLOCK_TEST_{kind.upper()}_URL"].split("://")[-1]
    coordinator = get_coordinator(f"{scheme}://{address}", secrets.token_hex(4).encode())
    coordinator.start()
    return lambda name: coordinator.get_lock(name.encode())


def django_mysql() -> Turn:
    from django_mysql.locks import Lock

    return lambda name: Lock(name, acquire_timeout=WAIT)


def django_pglock(timeout: float | None = None) -> Turn:
    import pglock

    if timeout is None:
        return lambda name: pglock.advisory(name)
    return lambda name: pglock.advisory(name, timeout=timeout, side_effect=pglock.Raise)


def kazoo() -> Turn:
    from kazoo.client import KazooClient

    client = KazooClient(os.environ["DISTLOCK_TEST_ZOOKEEPER_URL"])
    client.start()
    return lambda name: client.Lock(f"/kazoo/{name}")


def etcd3gw() -> Turn:
    import etcd3gw as module

    host, port = os.environ["DISTLOCK_TEST_ETCD_URL"].split("://")[1].split(":")
    client = module.client(host=host, port=int(port))
    return lambda name: client.lock(name, ttl=TTL)


# What says nothing in a part: two variants of one lock, or one that would take the whole time.
ALONE = ("contended", "threads")


def _ours(alias: str, database: str = "") -> tuple[Contender, ...]:
    sent = Contender(ITS_STATEMENTS, partial(its_statements, alias, database), True, ALONE)
    return (
        *([sent] if database else []),
        Contender(OURS[0], partial(ours, alias)),
        Contender(OURS[1], partial(engine_alone, alias), skipped=ALONE),
    )


def _raw(title: str, make: Callable[[], Turn], *skipped: str) -> tuple[Contender, Contender]:
    """Return the raw limit, and the part of ours that no backend can save."""
    return (
        Contender(f"raw: {title}", make, True, skipped),
        Contender(UNDER_LOCK, partial(under_lock, make), True, skipped),
    )


GROUPS = {
    "redis": Group(
        "Redis",
        ("redis",),
        (
            *_raw("SET NX, script", raw.redis_pair, "contended"),
            *_raw("BLPOP of a token", raw.redis_token, "uncontended", "threads"),
            *_ours("redis"),
            Contender("redis-py `Lock`", redis_py),
            Contender(
                "redis-py `Lock`, sleep=0.01",
                partial(redis_py, 0.01),
                False,
                ALONE[1:] + ("uncontended",),
            ),
            Contender("django-redis `cache.lock`", django_redis, False, ("contended",)),
            Contender("python-redis-lock", python_redis_lock),
            Contender(
                "python-redis-lock, auto-renewal", partial(python_redis_lock, True), False, ALONE
            ),
            Contender("sherlock", sherlock, False, ALONE),
            Contender("tooz", partial(tooz, "redis", "redis"), False, ALONE),
            Contender("pottery", pottery),
        ),
    ),
    "redlock": Group(
        "Redlock, 5 nodes",
        ("redlock",),
        (
            *_raw("send to all, read all", raw.redlock_pair, "contended"),
            *_ours("quorum"),
            Contender("pottery", partial(pottery, "DISTLOCK_TEST_REDLOCK_URL")),
        ),
    ),
    "mysql table": Group(
        "Lock table, MariaDB",
        ("mysql",),
        (
            *_raw("five statements", partial(raw.lock_table, "mysql"), "contended"),
            *_raw("a row locked", partial(raw.row_lock, "mysql"), "uncontended", "threads"),
            *_ours("default", "mysql"),
        ),
        "mysql",
    ),
    "postgresql table": Group(
        "Lock table, PostgreSQL",
        ("postgresql",),
        (
            *_raw("five statements", partial(raw.lock_table, "postgresql"), "contended"),
            *_raw("a row locked", partial(raw.row_lock, "postgresql"), "uncontended", "threads"),
            *_ours("default", "postgresql"),
        ),
        "postgresql",
    ),
    "named": Group(
        "Named locks, MariaDB",
        ("mysql",),
        (
            *_raw("GET_LOCK", partial(raw.server_lock, "mysql")),
            Contender(IN_STEPS, raw.named_lock_in_steps, True, ("contended",)),
            *_ours("named", "mysql"),
            Contender("django-mysql", django_mysql),
            Contender("tooz", partial(tooz, "mysql", "mysql"), False, ALONE),
        ),
        "mysql",
    ),
    "advisory": Group(
        "Advisory locks, PostgreSQL",
        ("postgresql",),
        (
            *_raw("pg_advisory_lock", partial(raw.server_lock, "postgresql")),
            *_ours("advisory", "postgresql"),
            Contender("django-pglock", django_pglock),
            Contender("django-pglock, timeout", partial(django_pglock, WAIT), False, ALONE),
            Contender("tooz", partial(tooz, "postgresql", "postgresql"), False, ALONE),
        ),
        "postgresql",
    ),
    "zookeeper": Group(
        "ZooKeeper",
        ("zookeeper",),
        (
            *_raw("create, delete", raw.zookeeper_pair, "contended"),
            *_ours("zookeeper"),
            Contender("kazoo `Lock`", kazoo),
            Contender("tooz", partial(tooz, "zookeeper", "zookeeper"), False, ALONE),
        ),
    ),
    "etcd": Group(
        "etcd",
        ("etcd",),
        (
            *_raw("txn, delete", raw.etcd_pair, "contended"),
            *_ours("etcd"),
            Contender("etcd3gw", etcd3gw, False, ("contended",)),
            Contender("tooz", partial(tooz, "etcd3+http", "etcd")),
        ),
    ),
    "sqlite table": Group("Lock table, SQLite", (), _ours("default")),
    "locmem": Group("LocMem", (), _ours("locmem")),
}
