"""What Redis and the network do to locks: restarts, lost answers, refusals, failover."""

from __future__ import annotations

import time
from functools import partial

import pytest

from distlock_app.backends import connecting
from distlock_app.backends.redis import pool as redis_pool
from distlock_app.claims import Grant
from distlock_app.errors import BackendError
from distlock_app.primitives.timing import monotonic
from distlock_app.testing.claims import a_claim
from tests.engines import until
from tests.redis_workers import Waiter, backend_at, client_of
from tests.servers import RedisServer

pytest_plugins = ["tests.redis_fixtures"]


def text_of(error):
    """Return what a traceback shows of the error and of what caused it."""
    text = ""
    while error is not None:
        text += f"{error!r} {error} "
        error = error.__cause__ or error.__context__
    return text


def test_flushed_scripts_are_loaded_again(own):
    backend, server = own
    grant = backend.acquire(a_claim("a"), 0)

    server.script_flush()
    assert backend.extend(grant, 60)
    server.script_flush()
    assert backend.release(grant)
    server.script_flush()
    assert backend.acquire(a_claim("a"), 0)


@pytest.mark.parametrize("idle", [0.0, 0.7])
def test_a_connection_that_the_server_closed_is_replaced(own, idle):
    backend, server = own
    grant = backend.acquire(a_claim("a"), 0)

    for verb in (lambda: backend.extend(grant, 60), lambda: backend.release(grant)):
        server.client_kill_filter(_type="normal", skipme=True)
        time.sleep(idle)
        assert verb() is True


def test_a_restarted_server_is_used_again_and_its_waiters_try_again(own_redis):
    backend = backend_at(own_redis.url)
    lost = backend.acquire(a_claim("a"), 0)
    waiter = Waiter(backend, "a")
    waiter.ask()

    own_redis.kill()
    with pytest.raises(BackendError):
        backend.extend(lost, 30)
    own_redis.start()

    assert waiter.event.wait(10) and waiter.woken == [None]
    grant = waiter.ask()
    assert grant.fence > lost.fence
    assert backend.extend(lost, 30) is False
    assert backend.release(grant)
    backend.close()


def test_a_server_that_does_not_answer_is_an_error_and_no_busy_lock(own_redis):
    backend = backend_at(own_redis.url, SOCKET_TIMEOUT=1, SOCKET_CONNECT_TIMEOUT=1)
    grant = backend.acquire(a_claim("a"), 0)

    own_redis.pause()
    for verb in (
        lambda: backend.acquire(a_claim("b"), 0),
        lambda: backend.extend(grant, 30),
        lambda: backend.release(grant),
        lambda: backend.ping(),
        lambda: list(backend.holders()),
    ):
        with pytest.raises(BackendError):
            verb()
    own_redis.resume()

    backend.release(grant)
    backend.ping()
    assert list(backend.holders(grant.claim.key)) == []
    backend.close()


@pytest.mark.parametrize("how", ["silent", "close"])
def test_a_lost_answer_to_acquire_leaves_no_orphan(proxy, own, how):
    backend = backend_at(proxy.url, SOCKET_TIMEOUT=2, SOCKET_CONNECT_TIMEOUT=5)
    wanted = a_claim("a")
    backend.acquire(a_claim("warm"), 0)

    proxy.swallow = how
    if how == "silent":
        with pytest.raises(BackendError):
            backend.acquire(wanted, 0)
        assert backend.acquire(wanted, 0).fence  # granted again
    else:
        assert backend.acquire(wanted, 0).fence  # on a new connection
    proxy.swallow = how
    if how == "silent":
        with pytest.raises(BackendError):
            backend.acquire(a_claim("b", owner="b" * 32), 0)
    assert backend.release(Grant(wanted)) in (True, False)
    backend.release(Grant(a_claim("b", owner="b" * 32)))

    assert [holding.name for holding in own[0].holders()] == ["warm"]
    backend.close()


def test_a_lost_answer_to_release_is_repeated_and_says_what_it_can(proxy, own):
    backend = backend_at(proxy.url, SOCKET_TIMEOUT=2, SOCKET_CONNECT_TIMEOUT=5)
    backend.release(backend.acquire(a_claim("a"), 0))  # the script is loaded
    closed, silent = (backend.acquire(a_claim(name), 0) for name in ("closed", "silent"))

    proxy.swallow = "close"
    with pytest.raises(BackendError, match="may have been lost before"):
        backend.release(closed)
    backend.ping()
    proxy.swallow = "silent"
    with pytest.raises(BackendError, match="did not answer"):
        backend.release(silent)

    assert backend.release(closed) is backend.release(silent) is False
    assert list(own[0].holders()) == []
    backend.close()


@pytest.mark.parametrize("how", ["close", "silent"])
def test_a_guarded_script_whose_answer_was_lost_is_not_sent_again(proxy, own, how):
    backend = backend_at(proxy.url, SOCKET_TIMEOUT=2, SOCKET_CONNECT_TIMEOUT=5)
    grant = backend.acquire(a_claim("a"), 0)
    count = partial(backend.guarded_script, grant, "return redis.call('INCR', KEYS[1])", ["n"], [])
    assert count() == 1

    proxy.swallow = how
    with pytest.raises(BackendError):
        count()

    assert count() == 3
    backend.close()


def test_lost_answers_leave_no_lock(proxy, own):
    backend = backend_at(proxy.url)
    lost = 0

    for number in range(200):
        wanted = a_claim(f"n{number % 10}")
        proxy.swallow = "close"
        try:
            assert backend.acquire(wanted, 0)
        except BackendError:
            lost += 1
        if number % 2:
            proxy.swallow = "close"
        try:
            backend.release(Grant(wanted))
        except BackendError:
            lost += 1

    assert lost >= 100
    assert list(own[0].holders()) == []
    backend.close()


def test_a_refusal_of_the_server_is_an_error_and_no_busy_lock(own):
    backend, server = own
    grant = backend.acquire(a_claim("a"), 0)

    server.config_set("maxmemory", 1)
    with pytest.raises(BackendError, match="OOM|OutOfMemory"):
        backend.acquire(a_claim("b"), 0)
    assert backend.release(grant)
    server.config_set("maxmemory", 0)

    server.replicaof("127.0.0.1", 1)
    with pytest.raises(BackendError, match="read-only replica"):
        backend.acquire(a_claim("b"), 0)
    server.replicaof("NO", "ONE")
    assert backend.acquire(a_claim("b"), 0)


def test_a_refusal_of_the_server_is_no_mistake_in_a_guarded_script(own):
    backend, server = own
    grant = backend.acquire(a_claim("a"), 0)
    write = partial(backend.guarded_script, grant, "redis.call('SET', KEYS[1], 1)", ["n"], [])

    server.config_set("min-replicas-to-write", 1)
    with pytest.raises(BackendError, match="NOREPLICAS"):
        write()
    server.config_set("min-replicas-to-write", 0)

    assert write() == 0


def test_a_full_server_still_hands_locks_over(own):
    backend, server = own
    grant = backend.acquire(a_claim("a"), 0)
    waiter = Waiter(backend, "a")
    waiter.ask()

    server.config_set("maxmemory", 1)
    assert backend.release(grant)

    assert backend.extend(waiter.granted(), 60)


@pytest.mark.parametrize("kind", [{}, {"shared": True}, {"limit": 3}])
def test_a_full_server_extends_and_releases_what_it_has(own, kind):
    backend, server = own
    wanted = a_claim("a", ttl=30, **kind)
    grant = backend.acquire(wanted, 0)

    server.config_set("maxmemory", 1)

    assert backend.extend(grant, 60)
    assert backend.acquire(wanted, 0).fence == grant.fence
    assert backend.extend_many([(grant, 60)]) == [True]
    [holding] = backend.holders()
    assert holding.expires_in > 45
    assert backend.release(grant)
    assert list(backend.holders()) == []


@pytest.mark.parametrize("kind", [{}, {"shared": True}, {"limit": 3}])
def test_a_full_server_keeps_the_place_of_those_who_wait(own, kind):
    backend, server = own
    grant = backend.acquire(a_claim("a"), 0)
    first, second = Waiter(backend, "a", **kind), Waiter(backend, "a", **kind)
    first.ask()
    server.config_set("maxmemory", 1)
    key = f"distlock:{{0}}:{first.claim.key}:w"
    before = server.hget(key, first.claim.owner)

    assert not first.ask()
    assert not second.ask()  # one more is no burden: it goes with the lock

    assert server.hget(key, first.claim.owner) != before  # it is known to be alive
    assert backend.release(grant)
    assert backend.extend(first.granted(), 60)


def test_a_full_server_lets_its_latches_be_waited_for(own):
    backend, server = own
    waiter = Waiter(backend, "a", latch=True, limit=1)

    server.config_set("maxmemory", 1)
    assert not waiter.ask()

    server.config_set("maxmemory", 0)
    backend.count_down(a_claim("a", latch=True))
    assert waiter.granted()


def test_a_connection_that_was_idle_for_long_is_not_used_again(proxy, own_redis):
    backend = backend_at(proxy.url, SOCKET_TIMEOUT=2)
    backend.ping()
    proxy.silent = True  # for what was open: as a firewall that forgot it
    backend._recipe.connection_kwargs["port"] = own_redis.port

    [link] = backend._pool._idle
    link.used -= connecting.IDLE_SECONDS

    backend.ping()


@pytest.mark.parametrize(
    ("limit", "value", "kept"), [("IDLE_SECONDS", 0.0, 1), ("KEEP_IDLE", 3, 3)]
)
def test_connections_of_a_burst_are_closed_with_a_later_request(
    own, monkeypatch, limit, value, kept
):
    backend, server = own
    clients = len(server.client_list())
    backend._pool._idle.sweep_at = float("inf")
    for link in [backend._pool.connect() for _ in range(9)]:  # as nine threads at once
        link.used = monotonic()
        backend._pool._idle.append(link)

    backend.ping()
    before = len(server.client_list())
    monkeypatch.setattr(connecting, limit, value)
    monkeypatch.setattr(redis_pool, limit, value, raising=False)  # it has its own `Idle.keep()`
    if limit == "IDLE_SECONDS":  # too many are closed at once, the others from time to time
        backend._pool._idle.sweep_at = 0.0
    backend.ping()

    assert before == clients + 9
    until(lambda: len(server.client_list()) == clients + kept)


def test_a_database_that_the_server_refuses_is_no_server_that_cannot_be_reached(own_redis):
    absent = backend_at(own_redis.url.removesuffix("0") + "99")
    with pytest.raises(BackendError, match="refused the request: it has no such database number"):
        absent.ping()

    client = client_of(own_redis.url)
    client.acl_setuser("limited", enabled=True, nopass=True, commands=["+@all", "-select"])
    client.close()
    limited = backend_at(own_redis.url.replace("//", "//limited:any@").removesuffix("0") + "1")
    with pytest.raises(BackendError, match=r"refused the request: NoPermissionError\."):
        limited.ping()


def test_a_server_without_room_for_another_client_says_so(own):
    backend, server = own

    def failure():
        with pytest.raises(BackendError) as raised:
            backend.ping()
        return str(raised.value)

    server.config_set("maxclients", 1)

    # Now and then the connection is gone before its reason is read.
    until(lambda: failure().endswith("max number of clients reached."))


def test_a_server_that_runs_no_scripts_says_so_and_so_does_the_check(private_server):
    with private_server(RedisServer, config={"rename-command": 'EVALSHA ""'}) as server:
        backend = backend_at(server.url)
        why = "refused the request: unknown command 'EVALSHA'."
        with pytest.raises(BackendError, match=why):
            backend.acquire(a_claim("a"), 0)

        [message] = backend.check(ask=True)

    assert message.id == "distlock_app.E013" and why in message.msg


def test_no_error_shows_the_password(private_server):
    with private_server(RedisServer, config={"requirepass": "correct-horse"}) as server:
        right = backend_at(server.url)
        right.ping()
        right.close()
        wrong = backend_at(server.url.replace("correct-horse", "wr0ng-horse"))
        with pytest.raises(BackendError) as refused:
            wrong.ping()
        server.stop()
        with pytest.raises(BackendError) as gone:
            right.ping()

    for error in (refused.value, gone.value):
        text = text_of(error)
        assert "horse" not in text and "redis://" not in text
    why = f"could not be reached at 127.0.0.1:{server.port}: Connection refused."
    assert why in str(gone.value)
