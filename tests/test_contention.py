"""Many processes for one lock: few requests, and everybody in turn."""

from __future__ import annotations

from contextlib import closing, contextmanager
from functools import partial

import pytest
import redis

from tests.servers import MariaDBServer, PostgreSQLServer
from tests.turns import Turns

pytestmark = pytest.mark.slow


def redis_requests(client):
    """Return how many requests clients sent; what scripts do inside does not count."""
    calls = {name: stats["calls"] for name, stats in client.info("commandstats").items()}
    sent_by_clients = ("evalsha", "eval", "ping", "subscribe", "hello", "client", "script", "auth")
    return sum(
        number
        for name, number in calls.items()
        if name.removeprefix("cmdstat_").split("|")[0] in sent_by_clients
    )


def test_16_processes_take_turns_with_two_requests_each_on_redis(own_redis, processes):
    env = {"DISTLOCK_TEST_REDIS_URL": own_redis.url, "DISTLOCK_TEST_REDIS_DB": ""}
    with closing(redis.Redis.from_url(own_redis.url)) as client:
        sent = partial(redis_requests, client)
        turns = Turns(processes, sent, using="redis", count=16, seconds=10, env=env)

    print(turns)
    assert min(turns.acquisitions) >= 4
    assert turns.requests <= 2.2 + turns.looks
    # Within 1.1 on an idle machine; a busy one keeps a process from asking again.
    assert turns.spread <= 1.25
    # A round: each of the others once.
    assert turns.overtaken <= 3 * 16


@contextmanager
def counting_on_mariadb(server):
    """Make the workers' database; yield a function that returns how many statements came so far."""
    import MySQLdb

    with closing(MySQLdb.connect(host="127.0.0.1", port=server.port, user="root")) as client:
        cursor = client.cursor()
        cursor.execute("CREATE DATABASE distlock")

        def statements():
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
            return int(cursor.fetchone()[1])

        yield statements


@contextmanager
def counting_on_postgresql(server):
    """Yield a function that returns how many transactions there were so far."""
    import psycopg

    with psycopg.connect(server.url, autocommit=True) as client:

        def transactions():
            row = client.execute(
                "SELECT xact_commit + xact_rollback FROM pg_stat_database"
                " WHERE datname = current_database()"
            ).fetchone()
            return row[0]

        yield transactions


COUNTING = {MariaDBServer: counting_on_mariadb, PostgreSQLServer: counting_on_postgresql}


@pytest.fixture(params=COUNTING, ids=lambda kind: kind.name)
def own_database(request, private_server, processes):
    """A server of this test alone with a lock table: the workers' environment, its statements."""
    with private_server(request.param) as server, COUNTING[request.param](server) as count:
        env = {
            "DISTLOCK_TEST_DATABASE": server.name,
            f"DISTLOCK_TEST_{server.name.upper()}_URL": server.url,
            "DISTLOCK_TEST_DB_NAME": "",
        }
        processes.run("tests.database_workers:migrate", count=1, env=env)
        yield env, count


def test_32_processes_take_turns_with_five_requests_each_on_the_lock_table(own_database, processes):
    env, statements = own_database
    turns = Turns(processes, statements, using="default", count=32, seconds=8, env=env)

    print(turns)
    assert min(turns.acquisitions) >= 4
    assert turns.requests <= 5 + 2 * turns.looks
    assert max(turns.acquisitions) <= 1.25 * min(turns.acquisitions) + 2
    assert turns.overtaken <= 3 * 32
