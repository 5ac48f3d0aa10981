"""Servers and connections that die under holders and waiters.

No wrong owner, no lock stuck for longer than its ttl, and the holders are told.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import sleep

import pytest
from django.conf import settings
from django.db import connection, connections
from django.test import override_settings

from distlock_app import BackendError, Lock, LockLost
from distlock_app.core.registry import registry
from distlock_app.primitives.names import key_of
from distlock_app.primitives.timing import monotonic
from tests.engines import DEADLINE, renewed

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "locks"]),
    pytest.mark.slow,
]


@pytest.fixture(autouse=True)
def databases(transactional_db, django_db_blocker):
    """Let the tests use databases that they add themselves; they write only locks."""
    with django_db_blocker.unblock():
        yield


@pytest.fixture
def redis_server(own_redis):
    """A Redis of this test alone, as alias `own`; it keeps nothing on disk."""
    cache = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": own_redis.url,
        "OPTIONS": {"CLIENT_CLASS": "django_redis.client.DefaultClient", "SOCKET_TIMEOUT": 1},
    }
    locks = {"own": {"BACKEND": "distlock_app.backends.redis.RedisBackend", "LOCATION": "own"}}
    with override_settings(CACHES={**settings.CACHES, "own": cache}, DISTLOCK=locks):
        yield own_redis


@pytest.fixture
def database_server(own_server):
    """A database server of this test alone, as alias `own`."""
    engine = "distlock_app.backends.database.DatabaseBackend"
    with override_settings(DISTLOCK={"own": {"BACKEND": engine, "LOCATION": "own"}}):
        yield own_server


def free_for_another(name):
    """Try to take the lock as another runner: this thread would only enter it again."""

    def attempt():
        hold = Lock(name, using="own").try_acquire()
        if hold is not None:
            hold.release()
        return hold is not None

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(attempt).result(30)


@contextmanager
def a_waiter(name, within):
    """A thread that waits for the lock; yields a list that gets the time at which it had it."""
    had_it, errors = [], []

    def wait():
        try:
            with Lock(name, using="own", wait=within):
                had_it.append(monotonic())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    yield had_it
    thread.join(within + 5)
    assert errors == []
    assert len(had_it) == 1


def waits_on_redis(name):
    """Wait until somebody does, who knows it: an outage during the first try is an error."""
    listener = registry["own"].backend._listener(key_of(name))
    until(lambda: listener._leader, within=DEADLINE)


def until(condition, within):
    """Return how long it took until the condition held, at most `within` seconds."""
    began = monotonic()
    while not condition():
        assert monotonic() - began < within, f"not within {within} s"
        sleep(0.005)
    return monotonic() - began


def test_a_redis_that_forgets_tells_the_holder_before_its_lease_is_over(redis_server):
    told = []
    held = Lock("forgotten", using="own", ttl=5).acquire()
    held.on_lost(lambda hold: told.append(monotonic()))

    redis_server.restart()

    until(lambda: told, within=10)
    assert told[0] < held._lease.trusted_until
    assert held.lost
    with pytest.raises(LockLost):
        held.release()
    with Lock("forgotten", using="own", wait=2) as another:
        assert another.fence > held.fence


def test_waiters_are_served_after_a_restart_of_redis(redis_server):
    held = Lock("restart", using="own", ttl=3).acquire()
    with a_waiter("restart", within=15) as had_it:
        waits_on_redis("restart")
        redis_server.restart()
        assert until(lambda: had_it, within=5) < 5
    with pytest.raises(LockLost):
        held.release()


def test_a_short_outage_of_redis_with_persistence_loses_nothing(redis_server):
    """The renewer tries again until the lease is over; SIGSTOP is an outage without a loss."""
    with Lock("outage", using="own", ttl=5) as held:
        redis_server.pause()
        sleep(2)  # the first renewal comes in between
        assert not held.lost
        redis_server.resume()
        renewed(held)
        assert not held.lost
        assert not free_for_another("outage")


def test_an_engine_that_hangs_is_told_as_a_loss_in_time(redis_server):
    told = []
    held = Lock("hangs", using="own", ttl=1.0).acquire()
    held.on_lost(lambda hold: told.append(monotonic()))
    asked = monotonic()

    redis_server.pause()
    until(lambda: told, within=10)
    redis_server.resume()

    assert told[0] - asked < 1.0 + 1.5  # at the end of the last renewal's lease
    with pytest.raises((LockLost, BackendError)):
        held.release()


def test_killed_connections_of_redis_lose_no_lock_and_no_waiter(redis_server, monkeypatch):
    import redis

    # The waiter is woken: it has not just asked again by itself.
    monkeypatch.setattr(registry["own"].backend, "poll_max", 30.0)

    control = redis.Redis.from_url(redis_server.url)
    held = Lock("client-kill", using="own", ttl=10).acquire()
    with a_waiter("client-kill", within=15) as had_it:
        waits_on_redis("client-kill")
        for kind in ("normal", "pubsub"):
            control.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        sleep(0.1)
        assert not free_for_another("client-kill")
        held.extend()
        held.release()
        until(lambda: had_it, within=5)
    control.close()


def test_flushed_scripts_are_loaded_again(redis_server):
    import redis

    control = redis.Redis.from_url(redis_server.url)
    held = Lock("script-flush", using="own").acquire()
    control.script_flush()

    assert not free_for_another("script-flush")
    control.script_flush()
    held.extend()
    control.script_flush()
    held.release()
    assert free_for_another("script-flush")
    control.close()


def test_a_database_that_crashes_and_comes_back_keeps_the_lock(database_server):
    with Lock("crash", using="own", ttl=20) as held:
        database_server.kill()
        with pytest.raises(BackendError):
            free_for_another("crash")
        database_server.start()
        assert not free_for_another("crash")
        renewed(held)
        assert not held.lost
    assert not Lock("crash", using="own").locked()


def test_a_database_that_stays_away_tells_the_holder(database_server):
    told = []
    held = Lock("away", using="own", ttl=1.5).acquire()
    held.on_lost(lambda hold: told.append(monotonic()))

    database_server.kill()

    assert until(lambda: told, within=10) < 1.5 + 1.5
    with pytest.raises((LockLost, BackendError)):
        held.release()
    database_server.start()
    with a_waiter("away", within=10) as had_it:
        until(lambda: had_it, within=5)


def test_killed_sessions_of_the_database_lose_no_lock(database_server):
    with Lock("kill", using="own", ttl=3, wait=10) as held:
        with a_waiter("kill", within=15):
            sleep(0.2)
            for _ in range(5):
                kill_sessions()
                assert not free_for_another("kill")
                held.extend()
                sleep(0.2)
            held.release()


def kill_sessions():
    """End every session of the server but this one, as an operator would."""
    with connections["own"].cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
            return
        cursor.execute(
            "SELECT id FROM information_schema.processlist"
            " WHERE id <> CONNECTION_ID() AND user = 'root'"
        )
        for (session,) in cursor.fetchall():
            try:
                cursor.execute(f"KILL CONNECTION {session}")
            except Exception as error:  # it ended by itself meanwhile
                assert "1094" in str(error)
