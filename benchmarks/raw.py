"""The least that can be sent to take a lock and give it back: what everything is compared with.

Each function returns `turn(name)`, a context in which the lock is held, over one connection of
the ordinary client, for one thread.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import secrets
import select
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from urllib.parse import urlsplit

Turn = Callable[[str], AbstractContextManager[Any]]

TTL_MS = 30_000
HOLDER = '{"host":"web1.example.com","pid":12345,"thread":"MainThread"}'
COMPARE_AND_DELETE = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
)


def turn_of(take: Callable[[str, str], object], free: Callable[[str, str], object]) -> Turn:
    """Return turns that call `take(name, token)` and `free(name, token)`."""

    @contextmanager
    def turn(name: str) -> Iterator[None]:
        token = secrets.token_hex(16)
        take(name, token)
        yield
        free(name, token)

    return turn


def redis_pair(variable: str = "DISTLOCK_TEST_REDIS_URL") -> Turn:
    """SET NX PX, then compare and delete."""
    import redis

    url = os.environ[variable]
    client = redis.Redis.from_url(url, single_connection_client=True)
    sha = client.script_load(COMPARE_AND_DELETE)
    return turn_of(
        lambda name, token: client.set(f"raw:{name}", token, nx=True, px=TTL_MS),
        lambda name, token: client.evalsha(sha, 1, f"raw:{name}", token),
    )


def redis_token() -> Turn:
    """BLPOP of a token that RPUSH gives back: nobody owns it, and it never expires."""
    import redis

    url = os.environ["DISTLOCK_TEST_REDIS_URL"]
    client = redis.Redis.from_url(url, single_connection_client=True)
    if client.set("token made", 1, nx=True):
        client.rpush("token", "1")
    return turn_of(
        lambda name, token: client.blpop("token", 60),
        lambda name, token: client.rpush("token", "1"),
    )


def redlock_pair() -> Turn:
    """SET NX PX, then compare and delete: sent to all nodes before the answers are read."""
    import redis

    connections: list[Any] = []
    for url in os.environ["DISTLOCK_TEST_REDLOCK_URL"].split(","):
        client = redis.Redis.from_url(url, protocol=2)
        sha = client.script_load(COMPARE_AND_DELETE)
        connections.append(client.connection_pool.get_connection())
    pack = connections[0].pack_command

    def ask(*words: Any) -> None:
        request = pack(*words)
        for connection in connections:
            connection.send_packed_command(request, check_health=False)
        for connection in connections:
            connection.read_response()

    return turn_of(
        lambda name, token: ask("SET", f"raw:{name}", token, "NX", "PX", TTL_MS),
        lambda name, token: ask("EVALSHA", sha, 1, f"raw:{name}", token),
    )


def cursor_of(kind: str, database: str = "default") -> Any:
    """Return a cursor of the driver itself: it prepares statements where it can."""
    url = os.environ[f"DISTLOCK_TEST_{kind.upper()}_URL"]
    if kind == "mysql":
        import MySQLdb

        at = urlsplit(url)
        connection = MySQLdb.connect(
            host=at.hostname, port=at.port, user=at.username, database=f"test_distlock_{database}"
        )
        connection.autocommit(True)
        return connection.cursor()
    import psycopg

    here = urlsplit(url)._replace(path=f"/test_postgres_{database}").geturl()
    return psycopg.connect(here, autocommit=True, prepare_threshold=0).cursor()


def server_lock(kind: str) -> Turn:
    """GET_LOCK and RELEASE_LOCK, pg_advisory_lock and pg_advisory_unlock."""
    cursor = cursor_of(kind)
    take, free = {
        "mysql": ("SELECT GET_LOCK(%s, 60)", "SELECT RELEASE_LOCK(%s)"),
        "postgresql": (
            "SELECT pg_advisory_lock(hashtext(%s))",
            "SELECT pg_advisory_unlock(hashtext(%s))",
        ),
    }[kind]

    def ask(statement: str, name: str) -> None:
        cursor.execute(statement, (name,))
        cursor.fetchall()

    return turn_of(lambda name, token: ask(take, name), lambda name, token: ask(free, name))


def in_steps(connection: Any) -> Callable[[bytes], object]:
    """Return what asks MariaDB by those calls of the driver that let a signal be handled.

    Its `query()` waits in C, where Ctrl-C has no effect.
    """
    answers = select.poll()
    answers.register(connection.fileno(), select.POLLIN)

    def ask(statement: bytes) -> None:
        connection.send_query(statement)
        answers.poll(60_000)
        connection.read_query_result()
        if (result := connection.store_result()) is not None:
            result.fetch_row(0)

    return ask


def named_lock_in_steps() -> Turn:
    """GET_LOCK and RELEASE_LOCK, each in steps."""
    connection = cursor_of("mysql").connection
    literal, ask = connection.string_literal, in_steps(connection)
    return turn_of(
        lambda name, token: ask(b"SELECT GET_LOCK(%b, 60)" % literal(name)),
        lambda name, token: ask(b"SELECT RELEASE_LOCK(%b)" % literal(name)),
    )


def row_lock(kind: str) -> Turn:
    """BEGIN, SELECT FOR UPDATE; COMMIT: the lock lasts as long as the transaction."""
    from django.db import connections
    from django.utils import timezone

    from distlock_app.models import DistLock
    from distlock_app.primitives.names import key_of

    cursor = cursor_of(kind)
    quoted = {"mysql": "`key`", "postgresql": '"key"'}[kind]
    select_row = f"SELECT 1 FROM distlock_app_distlock WHERE {quoted} = %s FOR UPDATE"
    made: set[str] = set()

    def take(name: str, token: str) -> None:
        key = key_of(name)
        if name not in made:
            DistLock.objects.get_or_create(key=key, defaults={"expiry": timezone.now()})
            connections.close_all()
            made.add(name)
        cursor.execute("BEGIN")
        cursor.execute(select_row, (key,))
        cursor.fetchall()

    return turn_of(take, lambda name, token: cursor.execute("COMMIT"))


TABLE_STATEMENTS = (
    "SELECT owner, expiry <= {clock}, fence FROM {table} WHERE {key} = %s FOR UPDATE",
    "UPDATE {table} SET owner = %s, expiry = {clock} + INTERVAL {ttl}, fence = fence + 1,"
    " holder = %s WHERE {key} = %s",
    "UPDATE {table} SET owner = '', expiry = {clock} WHERE {key} = %s AND owner = %s",
)


def lock_table(kind: str, database: str = "default") -> Turn:
    """BEGIN, SELECT FOR UPDATE, UPDATE, COMMIT; UPDATE. The rows are there already."""
    cursor = cursor_of(kind, database)
    quote, clock, ttl = {
        "mysql": ("`{}`", "UTC_TIMESTAMP(6)", "30 SECOND"),
        "postgresql": ('"{}"', "clock_timestamp()", "'30 SECOND'"),
    }[kind]
    words = {"clock": clock, "ttl": ttl, "key": quote.format("key")}
    table = quote.format("distlock_app_distlock")
    look, update, release = (text.format(table=table, **words) for text in TABLE_STATEMENTS)
    from distlock_app.primitives.names import key_of

    def take(name: str, token: str) -> None:
        key = key_of(name)
        cursor.execute("BEGIN")
        cursor.execute(look, (key,))
        cursor.fetchone()
        cursor.execute(update, (token, HOLDER, key))
        cursor.execute("COMMIT")

    return turn_of(take, lambda name, token: cursor.execute(release, (key_of(name), token)))


def etcd_pair() -> Turn:
    """One transaction and one deletion, without a lease, over one connection of http.client."""
    connection = http.client.HTTPConnection(urlsplit(os.environ["DISTLOCK_TEST_ETCD_URL"]).netloc)

    def ask(path: str, **body: object) -> None:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = json.loads(connection.getresponse().read())
        assert answer.get("succeeded") or answer.get("deleted"), answer

    def take(name: str, token: str) -> None:
        key = base64.b64encode(f"raw/{name}".encode()).decode()
        value = base64.b64encode(f"{token} {HOLDER}".encode()).decode()
        missing = {"key": key, "target": "CREATE", "create_revision": 0}
        put = {"request_put": {"key": key, "value": value}}
        ask("/v3/kv/txn", compare=[missing], success=[put])

    def free(name: str, token: str) -> None:
        ask("/v3/kv/deleterange", key=base64.b64encode(f"raw/{name}".encode()).decode())

    return turn_of(take, free)


def zookeeper_pair() -> Turn:
    """One ephemeral node made and deleted."""
    from kazoo.client import KazooClient

    client = KazooClient(os.environ["DISTLOCK_TEST_ZOOKEEPER_URL"])
    client.start()
    client.ensure_path("/raw")
    return turn_of(
        lambda name, token: client.create(
            f"/raw/{name}", f"{token} {HOLDER}".encode(), ephemeral=True
        ),
        lambda name, token: client.delete(f"/raw/{name}"),
    )
