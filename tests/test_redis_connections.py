"""Connections to Redis: TLS, Unix sockets, time limits, split answers, and interrupts."""

from __future__ import annotations

import gc
import sys
import tempfile
from contextlib import ExitStack, closing

import pytest
import redis
from redis.exceptions import ResponseError

from distlock_app.backends.redis import link, pool
from distlock_app.claims import Grant
from distlock_app.errors import BackendError
from distlock_app.testing.claims import a_claim
from tests.conftest import certified
from tests.engines import running, until
from tests.launching import free_port
from tests.proxy import proxy_to
from tests.redis_workers import DEADLINE, Waiter, backend_at, ended_by_a_signal, wait_for
from tests.servers import RedisServer

pytest_plugins = ["tests.redis_fixtures"]

LIMITS = {"SOCKET_TIMEOUT": 1, "SOCKET_CONNECT_TIMEOUT": 30}


@pytest.fixture
def short_path():
    """A directory for sockets, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="distlock-") as path:
        yield path


@pytest.fixture(params=["tcp", "unix", "tls", "resp3"])
def reached(request, private_server, tmp_path, short_path):
    """A server, and a backend that reaches it this way."""
    config, url, options = {}, "redis://127.0.0.1:{port}/0", dict(LIMITS)
    if request.param == "unix":
        config["unixsocket"] = f"{short_path}/redis.sock"
        url = f"unix://{short_path}/redis.sock?db=0"
    if request.param == "tls":
        certificate, key = certified(tmp_path)
        config = {"tls-port": str(free_port()), "tls-auth-clients": "no"}
        config |= {"tls-cert-file": str(certificate), "tls-key-file": str(key)}
        url = f"rediss://127.0.0.1:{config['tls-port']}/0"
        options["CONNECTION_POOL_KWARGS"] = {"ssl_ca_certs": str(certificate)}
    if request.param == "resp3":
        options["CONNECTION_POOL_KWARGS"] = {"protocol": 3}
    with private_server(RedisServer, config=config) as server:
        backend = backend_at(url.format(port=server.port), **options)
        yield server, backend
        backend.close()


def test_a_connection_that_is_in_use_as_all_are_closed_is_closed_when_it_comes_back(
    backend, monkeypatch
):
    grant, talk, used = backend.acquire(a_claim("a"), 0), link.Link.talk, []

    def close_and_talk(*asked):
        used.append(asked[0])
        backend.close()
        return talk(*asked)

    with monkeypatch.context() as patch:
        patch.setattr(link.Link, "talk", close_and_talk)
        assert backend.release(grant)
    gc.collect()  # the pool of before

    assert [one.connection._sock for one in used] == [None]


def test_every_kind_of_connection_carries_locks(reached):
    _, backend = reached
    grant = backend.acquire(a_claim("a"), 0)

    assert not backend.acquire(a_claim("a"), 0)
    assert backend.extend_many([(grant, 60)] * 500) == [True] * 500
    assert [held.fence for held in backend.holders()] == [grant.fence]
    waiter = Waiter(backend, "a")
    waiter.ask()
    assert backend.release(grant)
    assert backend.release(waiter.granted())


@pytest.mark.parametrize("verb", ["acquire", "ping"])
def test_every_kind_of_connection_has_a_time_limit(reached, verb):
    server, backend = reached
    backend.release(backend.acquire(a_claim("a"), 0))
    backend.ping()

    server.pause()
    with pytest.raises(BackendError, match=r"did not answer: TimeoutError\.$"):
        backend.acquire(a_claim("a"), 0) if verb == "acquire" else backend.ping()
    server.resume()


def test_every_kind_of_connection_may_be_closed_while_threads_wait(reached):
    _, backend = reached
    grant = backend.acquire(a_claim("a"), 0)

    with ExitStack() as stack:
        for waiters in range(1, 4):
            work = running(lambda: backend.release(wait_for(backend, DEADLINE, "a")))
            stack.enter_context(work)
            until(lambda waiters=waiters: len(backend.queue(grant.claim.key)) == waiters)
        backend.close()
        backend.release(grant)


def test_an_answer_may_arrive_in_pieces(backend):
    claims = [a_claim(f"name {number}") for number in range(link.RECEIVED // 10)]

    grants = backend.acquire_all(claims)

    assert len({grant.fence for grant in grants}) == len(claims)
    assert backend.extend_many([(grant, 60) for grant in grants]) == [True] * len(claims)
    assert all(backend.release(grant) for grant in grants)


def test_a_message_may_arrive_in_pieces(own, monkeypatch):
    monkeypatch.setattr(link, "RECEIVED", 7)
    monkeypatch.setattr(link, "RECEIVED_LINES", 7)
    backend, _ = own
    grant = backend.acquire(a_claim("a"), 0)
    waiter = Waiter(backend, "a")
    waiter.ask()

    assert backend.release(grant)
    assert backend.release(waiter.granted())


def test_a_subscription_without_a_sign_of_life_is_replaced(own_redis, own):
    backend, server = own
    grant = backend.acquire(a_claim("a"), 0)
    waiter = Waiter(backend, "a")
    waiter.ask()
    [before] = server.client_list(_type="pubsub")
    listener = backend._listener(grant.claim.key)

    own_redis.pause()
    until(lambda: not listener.subscribed)
    own_redis.resume()

    until(lambda: [c for c in server.client_list(_type="pubsub") if c["id"] != before["id"]])
    assert waiter.event.wait(DEADLINE)
    assert waiter.woken == [None]


def test_a_forgotten_script_is_loaded_once_for_a_whole_batch(own):
    backend, server = own
    grants = [backend.acquire(a_claim(f"name {number}"), 0) for number in range(9)]
    server.script_flush()
    server.config_resetstat()

    assert backend.extend_many([(grant, 60) for grant in grants]) == [True] * 9

    assert server.info("commandstats")["cmdstat_script|load"]["calls"] == 1


def test_an_error_says_that_loading_scripts_is_not_permitted(own):
    backend, server = own
    server.execute_command("ACL", "SETUSER", "default", "-script|load")

    with pytest.raises(BackendError, match="NOPERM|NoPermission"):
        backend.acquire(a_claim("a"), 0)

    server.execute_command("ACL", "SETUSER", "default", "+script|load")
    assert backend.acquire(a_claim("a"), 0)


@pytest.mark.parametrize("right", ["time", "pubsub|numsub"])
def test_an_error_says_that_a_command_inside_a_script_is_not_permitted(own, right):
    backend, server = own
    grant = backend.acquire(a_claim("a"), 0)
    Waiter(backend, "a").ask()
    server.execute_command("ACL", "SETUSER", "default", f"-{right}")

    with pytest.raises(BackendError, match=r"refused the request: NoPermissionError\."):
        backend.release(grant)


@pytest.mark.parametrize(
    "text",
    [
        "The user executing the script can't run this command or subcommand script: f_1f2e",
        "ACL failure in script: User default has no permissions to run the 'time' command",
    ],
    ids=["before 7.2", "since 7.2"],
)
def test_an_error_inside_a_script_names_the_acl_whatever_the_servers_version(text):
    assert pool.code_of(ResponseError(text)) == "NoPermissionError"


@pytest.mark.parametrize("module", [link, pool], ids=["link", "pool"])
def test_an_interrupt_anywhere_in_an_exchange_mixes_up_no_answers(module, own):
    """The next request never reads what an interrupted exchange left behind."""
    backend, _ = own
    backend.release(backend.acquire(a_claim("a"), 0))
    interrupted, at = True, 0

    while interrupted:
        at, left, wanted = at + 3, at + 3, a_claim("a")
        interrupted = False

        def at_opcode(frame, event, arg):
            nonlocal left, interrupted
            left -= event == "opcode"
            if left == 0 and not interrupted:
                interrupted = True
                raise KeyboardInterrupt
            return at_opcode

        def tracer(frame, event, arg):
            if frame.f_code.co_filename != module.__file__:
                return None
            frame.f_trace_opcodes = True
            return at_opcode

        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            backend.extend(backend.acquire(wanted, 0), 30)
            backend.ping()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        backend.release(Grant(wanted))
        grants = [backend.acquire(a_claim(name), 0) for name in "ab"]
        assert grants[0].fence < grants[1].fence
        assert [backend.release(grant) for grant in grants] == [True, True]

    assert at > 3, "never interrupted"


def test_a_release_does_not_overtake_a_request_that_a_signal_ended(own_redis):
    def scripts_run():
        return server.info("commandstats")["cmdstat_evalsha"]["calls"]

    with ExitStack() as stack:
        server = stack.enter_context(redis.Redis.from_url(own_redis.url))
        path = stack.enter_context(proxy_to(own_redis.port))
        backend = stack.enter_context(closing(backend_at(f"redis://127.0.0.1:{path.port}/0")))
        backend.release(backend.acquire(a_claim("a"), 0))  # the server knows the scripts
        wanted, already = a_claim("a"), scripts_run()
        ended_by_a_signal(lambda: backend.acquire(wanted, 0), path)
        backend.release(Grant(wanted))
        until(lambda: scripts_run() == already + 2)

        assert backend.acquire(a_claim("a"), 0)
