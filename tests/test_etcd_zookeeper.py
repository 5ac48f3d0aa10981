"""What etcd and ZooKeeper do to locks when they die, are cut off, or lose an answer."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic, sleep
from unittest.mock import patch
from urllib.request import Request, urlopen

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from kazoo import exceptions
from kazoo.client import KazooClient

from distlock_app import BackendError, Lock, LockLost, LockTimeout
from distlock_app.backends import connecting
from distlock_app.backends.etcd.gateway import encoded
from distlock_app.backends.etcd.http import Link
from distlock_app.backends.etcd.watch import QUIET_SECONDS
from distlock_app.backends.zookeeper import session
from distlock_app.backends.zookeeper.nodes import ClaimNode, DeletionWatch
from distlock_app.backends.zookeeper.session import TRUSTED, Session
from distlock_app.claims import Grant
from distlock_app.core.registry import registry
from distlock_app.core.waiting import acquired
from distlock_app.core.wakers import Waker
from distlock_app.primitives.names import key_of
from distlock_app.testing.claims import a_claim
from tests.conftest import certified
from tests.engines import DEADLINE, closing_loop, interrupted_at, until
from tests.launching import free_port
from tests.proxy import proxy_to
from tests.redis_workers import ended_by_a_signal
from tests.servers import EtcdServer, RedisServer, ZooKeeperEnsemble, ZooKeeperServer

BACKENDS = {
    "etcd": "distlock_app.backends.etcd.EtcdBackend",
    "zookeeper": "distlock_app.backends.zookeeper.ZooKeeperBackend",
}
SESSION = 4.0
TTL = SESSION * TRUSTED  # what ZooKeeper's sessions are trusted for; etcd's leases get it as ttl


class Engine:
    """A server of the test's own, and two ways to it: `own` through a proxy, and `other`."""

    def __init__(self, name, server, proxy):
        self.name, self.server, self.proxy = name, server, proxy

    def setting(self, port):
        options = {"TIMEOUT": 2, "PREFIX": f"distlock{settings.SUFFIX}"}
        if self.name == "zookeeper":
            options["SESSION"] = SESSION
        scheme = "http://" if self.name == "etcd" else ""
        location = f"{scheme}127.0.0.1:{port}"
        return {"BACKEND": BACKENDS[self.name], "LOCATION": location, "OPTIONS": options}

    def env(self):
        """Return what lets a process use this server as alias `etcd` or `zookeeper`."""
        return {f"DISTLOCK_TEST_{self.name.upper()}_URL": self.server.url}

    def requests(self):
        """Return how many requests the server has got so far, with signs of life."""
        if self.name == "etcd":
            with urlopen(f"{self.server.url}/metrics", timeout=5) as response:
                lines = response.read().decode().splitlines()
            started = [x for x in lines if x.startswith("grpc_server_started_total")]
            return sum(float(line.rpartition(" ")[2]) for line in started)
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=5) as connection:
            connection.sendall(b"srvr")
            with connection.makefile() as answer:
                (line,) = [x for x in answer if x.startswith("Received:")]
        return int(line.split()[1])

    def settings(self):
        return {
            "own": self.setting(self.proxy.port),
            "other": self.setting(self.server.port),
        }


@pytest.fixture(scope="module", params=["etcd", "zookeeper"])
def running_server(request, private_server):
    if request.param == "etcd":
        server = private_server(EtcdServer)
    else:  # processes ask for longer sessions, by the settings of all tests
        longest = {"maxSessionTimeout": str(round(SESSION * 1000))}
        server = private_server(ZooKeeperServer, config=longest)
    yield request.param, server
    server.close()


@pytest.fixture
def engine(running_server):
    name, server = running_server
    with proxy_to(server.port) as proxy:
        made = Engine(name, server, proxy)
        with override_settings(DISTLOCK=made.settings()):
            yield made
            proxy.silent = False
            for entry in registry.made():
                entry.backend.close()


def own():
    return registry["own"].backend


def other():
    return registry["other"].backend


@contextmanager
def waiting(name, using="other", within=60.0):
    """A thread that waits for the lock; yields a list that gets the time at which it had it."""
    had_it, errors, tried = [], [], threading.Event()
    backend = registry[using].backend
    acquire = backend.acquire

    def acquire_and_tell(claim, wait):
        try:
            return acquire(claim, wait)
        finally:
            tried.set()

    def wait():
        try:
            with Lock(name, using=using, ttl=TTL, wait=within):
                had_it.append(monotonic())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    with patch.object(backend, "acquire", acquire_and_tell):
        thread.start()
        # An engine that breaks during the first try is no engine to wait for.
        assert backend.blocks or tried.wait(DEADLINE)
    try:
        yield had_it
    finally:
        thread.join(within + 10)
        assert errors == []
    assert len(had_it) == 1


def queue_of(key, size):
    """Wait until so many wait for the lock."""
    until(lambda: [h.waiters for h in other().holders(key)] == [size])


@pytest.mark.slow
def test_who_is_cut_off_is_told_before_another_gets_the_lock(engine):
    told = []
    held = Lock("a", using="own", ttl=TTL).acquire()
    held.on_lost(lambda _: told.append(monotonic()))
    with waiting("a") as had_it:
        queue_of(held._lease.grant.claim.key, 1)
        sleep(1.5)  # a renewal or two
        engine.proxy.silent = True
        until(lambda: told)
        assert held.lost and not had_it
        until(lambda: had_it)
    sleep(max(0.0, 2 * SESSION - (monotonic() - told[0])))
    engine.proxy.silent = False
    engine.proxy.cut()

    print(f"{engine.name}: told {had_it[0] - told[0]:.2f} s before another had it")
    assert told[0] < had_it[0]
    with pytest.raises((LockLost, BackendError)):
        held.release()
    with Lock("a", using="own", ttl=TTL, wait=20) as again:
        assert again.fence > held.fence


@pytest.fixture(scope="module")
def ensemble(private_server):
    made = private_server(ZooKeeperEnsemble)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("had", ["after a wait", "for a while"])
def test_two_never_trust_a_lock_when_a_follower_of_zookeeper_is_cut_off(ensemble, had):
    """The follower goes on to answer questions, long after its leader ended our session."""
    follower, leader = (Engine("zookeeper", node, None) for node in ensemble.nodes[::2])
    places = {"own": follower.setting(ensemble.nodes[0].port), "other": leader.setting(0)}
    places["other"]["LOCATION"] = leader.server.url
    told = []
    with override_settings(DISTLOCK=places):
        for using in ("own", "other"):  # connects
            until_granted(lambda using=using: try_once(using))
        before = other().acquire(a_claim("a", ttl=TTL), 0)
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(Lock("a", using="own", ttl=TTL).acquire, wait=30)
            queue_of(key_of("a"), 1)
            other().release(before)
            held = waiter.result(30)
        held.on_lost(lambda _: told.append(monotonic()))
        if had == "for a while":  # of which its leader may not know yet
            until(lambda: held._lease.trusted_until > held._lease.since + TTL)  # renewed
        ensemble.cut_off()
        with waiting("a") as had_it:
            until(lambda: told)
            until(lambda: had_it)
        ensemble.heal()
        with suppress(LockLost, BackendError):
            held.release()
        for entry in registry.made():
            entry.backend.close()
        until(ensemble.nodes[0].answers)

    print(f"told {had_it[0] - told[0]:.2f} s before another had it")
    assert told[0] < had_it[0]


def try_once(using):
    with Lock("connects", using=using, ttl=TTL, wait=0):
        return True


@pytest.mark.slow
def test_a_release_in_an_outage_longer_than_the_ttl_frees_the_lock(engine):
    with Lock("a", using="own", ttl=TTL):
        pass  # connected
    with failing_releases(own()) as failed:
        with suppress(LockLost), Lock("a", using="own", ttl=0.2):
            began = monotonic()
            engine.proxy.clear.clear()
            engine.proxy.cut()
        until(lambda: failed and failed[-1] > began + 0.2)  # when the ttl was over
        engine.proxy.clear.set()

        Lock("a", using="other", ttl=TTL).acquire(wait=20).release()


@pytest.mark.slow
def test_a_release_after_the_end_of_the_session_is_over(engine):
    """Without the server: else a process whose server has gone for good would try for ever."""
    if engine.name == "etcd":
        return  # given up after the ttl
    with Lock("a", using="own", ttl=TTL):
        pass
    grant = own().acquire(a_claim("a", ttl=TTL), 0)
    engine.proxy.clear.clear()
    engine.proxy.cut()

    with pytest.raises(BackendError):
        own().release(grant)
    until(lambda: not tried(own().release, grant))

    assert own().release(grant) is False
    with pytest.raises(BackendError):
        own().acquire(claim := a_claim("a", ttl=TTL), 0)
    assert own().release(Grant(claim)) is False  # nothing was sent


def tried(release, grant):
    """Return whether the release failed, not what it said."""
    try:
        release(grant)
    except BackendError:
        return True
    return False


@contextmanager
def failing_releases(backend):
    """Yields a list that gets the times at which releases of `backend` failed."""
    failed, release = [], backend.release

    def release_and_tell(grant):
        try:
            return release(grant)
        except BackendError:
            failed.append(monotonic())
            raise

    with patch.object(backend, "release", release_and_tell):
        yield failed


@pytest.mark.slow
def test_waiters_are_served_after_a_restart(engine):
    held = Lock("a", using="other", ttl=TTL).acquire()
    key = held._lease.grant.claim.key
    with waiting("a") as first:
        queue_of(key, 1)
        with waiting("a", using="own") as second:
            queue_of(key, 2)
            engine.server.restart()
            until(lambda: held.lost or _extended(held))
            if not held.lost:
                assert not first and not second
            try:
                held.release()
            except (LockLost, BackendError):
                pass
            until(lambda: first and second)


def _extended(hold):
    try:
        hold.extend()
    except LockLost:
        return True
    except BackendError:
        return False
    return True


@pytest.mark.slow
def test_waiters_whose_connection_goes_silent_are_served(engine):
    held = Lock("a", using="other", ttl=TTL).acquire()
    with waiting("a", using="own") as had_it:
        queue_of(held._lease.grant.claim.key, 1)
        engine.proxy.silent = True
        held.release()
        sleep(0.5)
        assert not had_it
        engine.proxy.silent = False
        engine.proxy.cut()
        until(lambda: had_it)


def test_a_waiter_whose_event_is_lost_does_not_sleep_on_a_free_lock(engine):
    if engine.name == "zookeeper":
        return  # its events come on the connection of its requests: see the silent ones below
    held = other().acquire(a_claim("a", ttl=60), 0)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(Lock("a", using="own", ttl=60).acquire, wait=50)
        queue_of(key_of("a"), 1)
        # Its stream has begun: only then there is a word to lose.
        until(lambda: (link := own()._watch._link) and link.socket.gettimeout() == QUIET_SECONDS)
        engine.proxy.silent = True
        other().release(held)
        until(lambda: engine.proxy.lost)
        engine.proxy.silent = False
        freed = monotonic()
        hold = waiter.result(60)

        assert monotonic() - freed < 10  # 20: a third of the ttl
        hold.release()


def test_a_server_that_goes_silent_is_left_by_a_process_that_goes_on_asking(zookeeper_url):
    """Each request counts as a sign of life: kazoo never asked for an answer to its own."""
    port = int(zookeeper_url.rpartition(":")[2])
    with proxy_to(port) as first, proxy_to(port) as second, ThreadPoolExecutor(8) as pool:
        setting = Engine("zookeeper", None, None).setting(0)
        setting["LOCATION"] = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        setting["OPTIONS"] |= {"TIMEOUT": 1, "SESSION": 30}
        with override_settings(DISTLOCK={"own": setting}):
            with Lock("a", using="own", ttl=12) as hold:
                (used,) = (way for way in (first, second) if way.reached)
                used.silent = True
                asked = []
                for _ in range(20):
                    asked.append(pool.submit(tried, lambda _: own().ping(), None))
                    sleep(0.5)
                assert asked[0].result() and not all(one.result() for one in asked)
                assert not hold.lost
            own().close()


def test_an_answer_that_never_comes_costs_no_session(engine):
    """The next one is taken for it, by a thread of kazoo's that ended with an error of its own."""
    if engine.name == "etcd":
        return  # a connection has one request at a time
    with Lock("a", using="own", ttl=TTL, renew=False) as hold:
        session, number = own()._session, own()._session.id()
        engine.proxy.swallow = "silent"
        sent = [session.send("exists", "/")]
        until(lambda: not engine.proxy.swallow)
        sent.append(session.send("exists", "/"))
        for one in sent:
            with pytest.raises(BackendError):
                session.answer(one)

        hold.extend()
        assert session.id() == number


def test_a_server_that_accepts_and_says_nothing_does_not_keep_us_from_the_next(engine, monkeypatch):
    if engine.name == "etcd":
        return  # see the frozen one below
    monkeypatch.setattr(session, "CONNECT", 0.3)
    monkeypatch.setattr("random.shuffle", lambda hosts: None)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        setting = engine.setting(0)
        setting["LOCATION"] = f"127.0.0.1:{mute.getsockname()[1]},{engine.server.url}"
        setting["OPTIONS"]["SESSION"] = 10 * DEADLINE  # kazoo would wait for half of it
        with override_settings(DISTLOCK={"own": setting}):
            until(lambda: not tried(lambda _: own().ping(), None))
            own().close()


def test_answers_that_a_tls_proxy_puts_into_one_record_are_read_at_once(tmp_path):
    certificate, key = certified(tmp_path)
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(certificate, key)
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        ours, theirs = map(stack.enter_context, socket.socketpair())
        shaken = pool.submit(served.wrap_socket, theirs, server_side=True)
        trusting = ssl.create_default_context(cafile=certificate)
        link = stack.enter_context(trusting.wrap_socket(ours, server_hostname="127.0.0.1"))
        proxy = stack.enter_context(shaken.result(DEADLINE))
        proxy.sendall(b"one two")
        assert link.recv(3) == b"one"

        assert session.Handler().select([link], [], [], 0)[0] == [link]
        assert link.recv(4) == b" two"
        assert session.Handler().select([link], [], [], 0)[0] == []


def test_an_address_where_nobody_answers_costs_little_of_the_session(monkeypatch):
    monkeypatch.setattr(session, "CONNECT", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as stack:
        for _ in range(2):  # its queue is full then: what comes is not answered
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        began = monotonic()
        with pytest.raises(TimeoutError):
            session.Handler().create_connection(full.getsockname(), timeout=DEADLINE)
    assert monotonic() - began < DEADLINE / 2


def test_why_a_server_could_not_be_reached_is_forgotten_once_it_was():
    handler = session.Handler()
    with pytest.raises(ConnectionRefusedError):
        handler.create_connection(("127.0.0.1", free_port()))
    assert handler.trouble == "Connection refused"

    with socket.create_server(("127.0.0.1", 0)) as server:
        handler.create_connection(server.getsockname()).close()
    assert handler.trouble == ""


def test_a_release_wakes_the_next_waiter_before_it_looks_by_itself(engine):
    held = other().acquire(a_claim("a", ttl=60), 0)
    with ThreadPoolExecutor(1) as pool, patch.object(own(), "poll_max", 3 * DEADLINE):
        waiter = pool.submit(Lock("a", using="own", ttl=60).acquire, wait=2 * DEADLINE)
        queue_of(key_of("a"), 1)
        other().release(held)
        waiter.result(DEADLINE).release()


def test_a_long_wait_costs_few_requests(engine):
    held = Lock("a", using="other", ttl=60).acquire()
    with waiting("a", using="own"):
        queue_of(key_of("a"), 1)
        before = engine.requests()
        sleep(3)
        sent = engine.requests() - before
        held.release()
    # Two each second, with signs of life and the renewals of both sessions.
    assert sent <= 4 * 3


def test_a_waiter_renews_its_lease_and_reads_no_queue(engine):
    """Else many waiters read it all the time, each all of it."""
    if engine.name == "zookeeper":
        return  # has no leases
    held, claim = other().acquire(a_claim("a", ttl=60), 0), a_claim("a", ttl=60)
    assert held and not own().acquire(claim, 5)
    lease = own()._waiters[claim.owner, claim.key].lease

    lease.began -= lease.seconds / 2
    assert lease.is_due
    assert own().look(claim) is not None
    assert not lease.is_due

    own()._gateway.ask("/v3/lease/revoke", {"ID": lease.id})
    lease.began -= lease.seconds / 2
    assert own().look(claim) is None
    assert not own().acquire(claim, 5)  # in line again
    queue_of(claim.key, 1)
    own().withdraw(claim)
    assert other().release(held) is True


def test_a_waiter_looks_for_the_node_before_its_own_and_reads_no_queue(engine):
    if engine.name == "etcd":
        return  # see the test before
    held, claim = other().acquire(a_claim("a", ttl=TTL), 0), a_claim("a", ttl=TTL)
    assert held and not own().acquire(claim, 5)
    node = own()._nodes[claim.owner]

    node.look_again_at = 0.0
    with patch.object(own(), "_list", side_effect=AssertionError):
        assert not own().acquire(claim, 5)
    assert node.look_again_at > monotonic()

    assert own().release(Grant(claim)) is True
    assert other().release(held) is True


@pytest.mark.slow
def test_who_is_killed_is_passed_over_within_the_session(engine, processes):
    options = {"env": engine.env(), "name": "killed", "using": engine.name, "ttl": TTL}
    holder = processes.start("tests.lock_workers:hold", **options)
    fence = holder.read()["fence"]
    waiters = []
    for size in (1, 2):
        waiters.append(processes.start("tests.lock_workers:take_once", wait=60, **options))
        assert waiters[-1].read() == "waiting"
        queue_of(key_of("killed"), size)

    for worker in (holder, waiters[0]):
        worker.kill()
    killed = monotonic()

    late = waiters[1].result() - killed
    print(f"{engine.name}: served {late:.1f} s after")
    assert 0 < late < 3 * SESSION
    with Lock("killed", using="other", ttl=TTL, wait=5) as hold:
        assert hold.fence > fence


def test_no_increment_is_lost_by_processes_and_threads(engine, processes, tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")

    results = processes.run(
        "tests.lock_workers:count",
        count=4,
        env=engine.env(),
        path=str(counter),
        name="count",
        times=6,
        threads=3,
        using=engine.name,
    )

    assert [error for result in results for error in result["errors"]] == []
    assert counter.read_text() == str(4 * 6 * 3)


@pytest.mark.slow
def test_16_processes_take_turns_with_few_requests_each(engine, processes):
    before = engine.requests()
    waits = processes.run(
        "tests.lock_workers:contend",
        count=16,
        env=engine.env(),
        name="contended",
        using=engine.name,
        seconds=4,
    )
    sent = engine.requests() - before

    turns = sum(map(len, waits))
    least, most = min(map(len, waits)), max(map(len, waits))
    print(f"{engine.name}: {sent} requests for {turns} turns, {least} to {most} each")
    assert sent <= 6 * turns + 16 * 20  # a process that connects sends some, too
    assert most <= 2 * least + 3  # they do not all begin at once


def test_a_child_leaves_the_locks_of_its_parent_alone(engine, processes):
    worker = processes.start(
        "tests.lock_workers:fork_under_a_lock",
        env=engine.env(),
        name="forked",
        using=engine.name,
        ttl=TTL,
    )

    assert worker.result() == "busy"


def test_a_lost_answer_leaves_no_orphan(engine):
    lock = Lock("a", using="own", ttl=TTL)
    lock.acquire().release()  # everything is connected, and the session has a length
    other().ping()
    engine.proxy.lose = 1.0
    with pytest.raises(BackendError):
        lock.acquire(wait=0)
    assert engine.proxy.lost >= 1
    engine.proxy.lose = 0.0

    began = monotonic()
    with Lock("a", using="other", ttl=TTL, wait=20):
        pass
    # By the release that the core tries again, not by the end of the lease or session.
    assert monotonic() - began < TTL


def lose_the_answer_to(claim, engine):
    """Ask for the claim on a connection that works until then."""
    own().release(own().acquire(a_claim("a", ttl=TTL), 0))
    engine.proxy.lose = 1.0
    with pytest.raises(BackendError):
        own().acquire(claim, 0)
    engine.proxy.lose = 0.0


def test_a_release_after_a_lost_answer_believes_no_server_that_lags(engine, monkeypatch):
    """A session may have come to a server that does not know yet what another one has done."""
    if engine.name == "etcd":
        return  # deletes the key without a look
    claim = a_claim("a", ttl=TTL)
    lose_the_answer_to(claim, engine)
    until(lambda: not tried(lambda _: own().ping(), None))
    session, written = own()._session, []
    ask, prove = session.ask, session.prove

    def ask_who_lags(method, *args, **kwargs):
        return [] if method == "get_children" and not written else ask(method, *args, **kwargs)

    def prove_and_tell():
        prove()
        written.append(True)

    monkeypatch.setattr(session, "ask", ask_who_lags)
    monkeypatch.setattr(session, "prove", prove_and_tell)

    assert own().release(Grant(claim)) is True
    assert list(other().holders(claim.key)) == []


def test_the_same_owner_finds_its_claim_after_a_lost_answer(engine):
    claim = a_claim("a", ttl=TTL)
    lose_the_answer_to(claim, engine)

    grant = until_granted(lambda: own().acquire(claim, 0))

    assert grant and not other().acquire(a_claim("a", ttl=TTL), 0)
    (holding,) = other().holders(claim.key)
    assert holding.fence == grant.fence and holding.waiters == 0
    assert own().release(grant) is True
    assert list(other().holders(claim.key)) == []


def until_granted(attempt):
    end = monotonic() + 30
    while monotonic() < end:
        try:
            if answer := attempt():
                return answer
        except BackendError:
            pass
        sleep(0.05)
    raise AssertionError("not granted in time")


def test_the_same_owner_with_a_shorter_ttl_shortens_nothing(engine):
    if engine.name == "zookeeper":
        return  # has no stable owners
    long = a_claim("a", ttl=300)
    held = own().acquire(long, 0)
    for backend in (own(), other()):  # as two processes
        short = backend.acquire(replace(long, ttl=1), 3)
        assert short.fence == held.fence
    assert left(long.key) > 250
    assert own().release(held) is True

    # What is used again is no longer than it was asked for.
    after = own().acquire(a_claim("a", ttl=60), 0)
    assert left(long.key) <= 61
    assert own().release(after) is True


def test_the_same_owner_waits_with_a_longer_ttl(engine):
    if engine.name == "zookeeper":
        return  # has no stable owners
    held = other().acquire(a_claim("a", ttl=60), 0)
    short = a_claim("a", ttl=1)
    long = replace(short, ttl=300)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(waited_for, other(), short)
        queue_of(short.key, 1)
        second = pool.submit(waited_for, own(), long)
        until(lambda: own()._waiters)
        assert other().release(held) is True
        grants = [one.result(30) for one in (first, second)]
    assert grants[0].fence == grants[1].fence
    assert left(long.key) > 250
    assert own().release(grants[1]) is True


def test_no_lease_is_given_to_two_locks(engine):
    if engine.name == "zookeeper":
        return  # has no leases
    left_for = own().acquire(a_claim("a", ttl=60), 0)
    lease = lease_of(left_for)
    assert own().end_in(left_for, 60)
    grants = [own().acquire(a_claim("b", ttl=60), 0)]
    assert lease_of(grants[0]) == lease  # used again

    assert own().release(left_for) is True

    grants += [own().acquire(a_claim(f"c{number}", ttl=60), 0) for number in range(2)]
    assert len({lease_of(grant) for grant in grants}) == 3
    assert all(own().release(grant) for grant in grants)


def test_a_request_that_is_carried_out_late_takes_no_lock_that_another_keeps_alive(
    engine, monkeypatch
):
    if engine.name == "zookeeper":
        return  # has no leases
    assert own().release(own().acquire(a_claim("b", ttl=TTL), 0)) is True
    with held_back(monkeypatch, engine) as carry_out:
        grant = own().acquire(a_claim("a", ttl=TTL), 0)
    assert own().release(grant) is True
    after = own().acquire(a_claim("b", ttl=TTL), 0)

    carry_out()

    assert [h.name for h in other().holders(key_of("a"))] == ["a"]  # and nobody has it
    until(lambda: own().extend(after, TTL) and not list(other().holders(key_of("a"))))
    assert own().release(after) is True


def test_a_longer_lease_that_comes_late_is_no_other_locks(engine, monkeypatch):
    if engine.name == "zookeeper":
        return  # has no leases
    grant = own().acquire(a_claim("a", ttl=TTL), 0)
    with held_back(monkeypatch, engine) as carry_out:
        assert own().extend(grant, 60) is True
    assert own().end_in(grant, 60)
    after = own().acquire(a_claim("b", ttl=60), 0)

    carry_out()

    assert lease_of(grant) != lease_of(after)
    assert own().release(grant) is True and own().release(after) is True


@contextmanager
def held_back(monkeypatch, engine):
    """Let the first write with a lease time out; yield what has the server carry it out."""
    late, send = [], Link.send

    def send_later(link, path, data, token):
        if b'"request_put"' in data and not late:
            late.append(Request(engine.server.url + path, data))
            raise TimeoutError
        send(link, path, data, token)

    with monkeypatch.context() as patch:
        patch.setattr(Link, "send", send_later)
        yield lambda: urlopen(late[0], timeout=10).close()


def lease_of(grant):
    """Return the number of the lease that the key of a claim has."""
    return own()._entry(own()._key(grant.claim)).lease


def test_a_connection_that_was_idle_for_long_is_not_used_again(engine):
    if engine.name == "zookeeper":
        return  # has one, with a heartbeat
    own().ping()
    [link] = own()._gateway._idle

    link.used -= connecting.IDLE_SECONDS
    own().ping()

    [new] = own()._gateway._idle
    assert new is not link and link.socket.fileno() == -1


def waited_for(backend, claim):
    waker = Waker()
    return acquired(backend, replace(claim, wake=waker.wake), 20, waker)[0]


def test_an_owner_of_two_locks_leaves_no_waiter_behind(engine):
    if engine.name == "zookeeper":
        return  # has no stable owners
    first = other().acquire(a_claim("a", ttl=60), 0)
    claim = a_claim("a", ttl=60)
    assert not own().acquire(claim, 5)
    queue_of(claim.key, 1)
    second = own().acquire(replace(claim, name="b", key=key_of("b")), 5)
    assert not own().acquire(claim, 0)  # the last try
    queue_of(claim.key, 0)
    assert own().release(second) is True
    assert other().release(first) is True
    assert own()._waiters == other()._waiters == {}


def test_an_owner_who_only_tries_takes_no_lock_from_its_other_self(engine):
    """By the time at which a last try takes its place away the lock may have come to it."""
    if engine.name == "zookeeper":
        return  # has no stable owners
    held = other().acquire(a_claim("a", ttl=60), 0)
    claim = a_claim("a", ttl=60)
    with ThreadPoolExecutor(1) as pool:
        assert not own().acquire(claim, 0.1)
        waiter = pool.submit(waited_for, other(), claim)
        enter = own()._enter

        def enter_and_be_late(*args, **kwargs):
            view = enter(*args, **kwargs)
            assert other().release(held) is True
            waiter.result(30)
            return view

        with patch.object(own(), "_enter", enter_and_be_late):
            grant = own().acquire(claim, 0)
        first = waiter.result(30)
    assert first and grant and first.fence == grant.fence
    assert own().extend(grant, TTL)
    assert own().release(grant) is True


def test_an_owner_who_comes_back_is_behind_who_did_not_hear_it_leave(engine, monkeypatch):
    if engine.name == "zookeeper":
        return  # has no stable owners
    monkeypatch.setattr(own()._watch, "start", lambda: None)  # it begins too late
    again, claim = a_claim("a", ttl=60), a_claim("a", ttl=60)
    held = other().acquire(again, 5)
    assert held and not own().acquire(claim, 5)
    assert own().look(claim) is not None
    assert other().release(held) is True
    assert not other().acquire(again, 5)

    assert own().look(claim) is None

    grant = own().acquire(claim, 5)
    assert grant and own().release(grant) is True
    assert other().release(other().acquire(again, 5)) is True


def left(key):
    (holding,) = other().holders(key)
    return holding.expires_in


def test_waiters_are_served_in_order_of_arrival(engine):
    held = Lock("a", using="other", ttl=TTL).acquire()
    key, order = held._lease.grant.claim.key, []

    def wait(number):
        with Lock("a", using="own" if number % 2 else "other", ttl=TTL, wait=60) as hold:
            order.append((number, hold.fence))

    with ThreadPoolExecutor(5) as pool:
        done = []
        for number in range(5):
            done.append(pool.submit(wait, number))
            queue_of(key, number + 1)
        held.release()
        for one in done:
            one.result(60)

    assert [number for number, _ in order] == [0, 1, 2, 3, 4]
    assert order == sorted(order, key=lambda item: item[1])


def test_a_free_lock_costs_few_requests(engine):
    lock = Lock("a", using="other", ttl=TTL)
    lock.acquire().release()
    before = engine.requests()
    for _ in range(20):
        lock.acquire().release()

    # A lease of etcd serves many locks; a sign of life may come in between.
    assert engine.requests() - before <= 20 * {"etcd": 2, "zookeeper": 3}[engine.name] + 8


def test_a_leader_that_has_ended_the_session_is_no_proof_that_it_lives(engine, monkeypatch):
    """It says so inside an answer that is no error."""
    if engine.name == "etcd":
        return  # has no sessions
    grant = own().acquire(a_claim("a", ttl=TTL), 0)
    session, before = own()._session, own()._session.proved_at
    with monkeypatch.context() as patch:
        patch.setattr(session, "answer", lambda result: [exceptions.SessionExpiredError()])
        with pytest.raises(BackendError, match="SessionExpiredError"):
            own().extend(grant, TTL)

    assert session.proved_at == before
    with monkeypatch.context() as patch:
        patch.setattr(session, "_root", "/no such node")  # the answer is of a session that lives
        session.prove()
    assert session.proved_at > before
    assert own().release(grant) is True


def test_one_write_renews_all_holds_of_a_session(engine):
    if engine.name == "etcd":
        return  # each has a lease of its own
    claims = [a_claim(f"hold {number}", ttl=TTL) for number in range(100)]
    work = [(own().acquire(claim, 0), TTL) for claim in claims]
    before, written = engine.requests(), []

    for _ in range(3):
        last = changes(engine)
        assert own().extend_many(work) == [True] * 100
        written.append(changes(engine) - last)

    assert 1 <= min(written) <= 3  # sessions of other tests may end
    assert engine.requests() - before <= 3 * 101 + 15  # and signs of life
    assert all(own().release(grant) for grant, _ in work)


def changes(engine):
    """Return how many writes a ZooKeeper has carried out."""
    with socket.create_connection(("127.0.0.1", engine.server.port), timeout=5) as connection:
        connection.sendall(b"srvr")
        with connection.makefile() as answer:
            (line,) = [x for x in answer if x.startswith("Zxid:")]
    return int(line.split()[1], 16)


def test_a_clear_whose_answer_is_lost_does_not_say_that_nothing_was_cleared(engine, monkeypatch):
    if engine.name == "zookeeper":
        return  # repeats nothing
    held = other().acquire(a_claim("a", ttl=60), 0)
    send, receive, deleting = Link.send, Link.receive, []

    def note_and_send(link, path, data, token):
        if b"request_delete_range" in data:
            deleting.append(link)
        send(link, path, data, token)

    def receive_and_lose(link):
        answer = receive(link)
        if deleting == [link]:
            raise ConnectionResetError
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Link, "send", note_and_send)
        patch.setattr(Link, "receive", receive_and_lose)
        with pytest.raises(BackendError):
            own().clear(key_of("a"))

    assert other().release(held) is False


def test_a_claim_with_a_longer_lease_is_renewed_with_as_few_requests(engine):
    if engine.name == "zookeeper":
        return  # has no leases
    grant = own().acquire(a_claim("a", ttl=TTL), 0)
    assert own().extend(grant, 60) is True
    before = engine.requests()

    for _ in range(10):
        assert own().extend(grant, TTL) is True

    assert engine.requests() - before <= 2 * 10 + 5
    assert own().release(grant) is True


def test_a_hold_is_extended_beyond_its_ttl_only_where_the_engine_can(engine):
    with Lock("a", using="own", ttl=TTL) as hold:
        if engine.name == "etcd":
            hold.extend(60)
            assert hold.expires_in > 30
        else:
            with pytest.raises(BackendError, match="SESSION"):
                hold.extend(60)
        hold.extend()
        assert not other().acquire(a_claim("a", ttl=TTL), 0)


def test_a_waiter_who_gives_up_leaves_no_place(engine):
    held = Lock("a", using="other", ttl=TTL).acquire()
    with pytest.raises(Exception, match="was not free within"):
        Lock("a", using="own", ttl=TTL).acquire(wait=0.3)
    queue_of(held._lease.grant.claim.key, 0)

    held.release()


def test_a_storm_of_cancelled_waiters_stays_within_its_bound(engine, request):
    """Each request that a client aborts under ASGI is a cancelled waiter."""
    left, open_files, threads, aliases = [], [], [], engine.settings()
    if engine.name == "zookeeper":  # where sessions may last as long as a busy machine needs
        for setting in aliases.values():
            setting["LOCATION"] = request.getfixturevalue("zookeeper_url")
            setting["OPTIONS"]["SESSION"] = 20

    async def give_up(end):
        while monotonic() < end:
            task = asyncio.ensure_future(Lock("a", using="other", ttl=30).aacquire(wait=None))
            await asyncio.wait([task], timeout=0.05)
            task.cancel()

    async def look(hold, end):
        while monotonic() < end:
            left.append(hold.expires_in)
            open_files.append(len(os.listdir("/dev/fd")))
            threads.append(threading.active_count())
            await asyncio.sleep(0.02)

    async def storm(hold):
        end = monotonic() + 5
        await asyncio.gather(look(hold, end), *(give_up(end) for _ in range(8)))

    with override_settings(DISTLOCK=aliases), closing(own()), closing(other()):
        with Lock("a", using="own", ttl=30), Lock("unrelated", using="other", ttl=6) as unrelated:
            asyncio.run(storm(unrelated))
            queue_of(key_of("a"), 0)

    assert min(left) > 2
    assert max(open_files) - open_files[0] <= 32
    assert max(threads) - threads[0] <= 32


def test_a_watch_that_says_nothing_is_replaced_and_ends_with_its_waiters(engine):
    if engine.name == "zookeeper":
        return  # its watches are on the connection of its requests
    held = other().acquire(a_claim("a", ttl=60), 0)
    with patch("distlock_app.backends.etcd.watch.QUIET_SECONDS", 0.2):
        with waiting("a", using="own"):
            until(lambda: own()._watch._link)
            first = own()._watch._link
            until(lambda: own()._watch._link not in (None, first))
            assert not own().acquire(a_claim("a", ttl=1), 5)  # and never asks again
            assert other().release(held) is True

        until(lambda: own()._watch._link is None)
    until(lambda: not list(other().holders(key_of("a"))))


def test_waiters_who_come_and_go_leave_no_watches(engine):
    if engine.name == "etcd":
        return  # a watch there is a connection, and ends with it
    held = other().acquire(a_claim("a", ttl=TTL), 0)
    for _ in range(5):
        with pytest.raises(LockTimeout):
            Lock("a", using="own", ttl=TTL).acquire(wait=0.01)
    client, _ = own()._session._client
    assert [len(watchers) for watchers in client._data_watchers.values()] in ([], [1])
    assert not any(deletion.wakes for deletion in own()._deletions.values())
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(Lock("a", using="own", ttl=TTL).acquire, wait=50)
        queue_of(key_of("a"), 1)
        freed = monotonic()
        assert other().release(held) is True
        waiter.result(60).release()
    assert monotonic() - freed < 5  # by the watch: else it looks after ten seconds
    until(lambda: not own()._deletions and not client._data_watchers)


def test_a_waiter_whose_event_loop_was_closed_keeps_nobody_else_asleep():
    def closed(grant):
        raise RuntimeError("Event loop is closed")

    woken = []
    deletion = DeletionWatch(lambda: None)
    deletion.wakes = {ClaimNode(0, "a"): woken.append, ClaimNode(0, "b"): closed}

    deletion(None)

    assert woken == [None]


def test_a_task_whose_loop_was_closed_takes_no_lock_with_it(engine):
    held = other().acquire(a_claim("a", ttl=TTL), 0)
    ttl = 60 if engine.name == "etcd" else TTL  # ZooKeeper: until its session ends

    def waits():
        return [holding.waiters for holding in other().holders(key_of("a"))] == [1]

    with closing_loop(Lock("a", using="own", ttl=ttl).aacquire, waits):
        assert other().release(held) is True
        Lock("a", using="other", ttl=TTL, wait=15).acquire().release()


def test_a_release_does_not_overtake_a_request_that_a_signal_ended(engine):
    if engine.name == "zookeeper":
        return  # its requests go over one connection
    own().release(own().acquire(a_claim("a", ttl=TTL), 0))  # it has a lease to use again
    wanted, already = a_claim("a", ttl=TTL), engine.requests()
    ended_by_a_signal(lambda: own().acquire(wanted, 0), engine.proxy)
    own().release(Grant(wanted))

    assert engine.requests() - already == 2  # not given up, to be carried out at any time
    assert list(other().holders(key_of("a"))) == []


@pytest.mark.parametrize("where", ["begins to connect", "connects"])
def test_a_signal_handler_that_locks_while_the_session_is_opened_does_not_hang(engine, where):
    if engine.name == "etcd":
        return  # shares no session
    codes = {"begins to connect": Session._open, "connects": KazooClient.start_async}
    code, grants = codes[where].__code__, []

    def interrupt(frame, event, arg):
        if event == "call" and frame.f_code is code:
            sys.setprofile(None)
            grants.append(own().acquire(a_claim("a", ttl=TTL), 0))

    def work():
        sys.setprofile(interrupt)
        grants.append(own().acquire(a_claim("b", ttl=TTL), 0))

    before = clients()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(DEADLINE)

    assert len(grants) == 2 and all(own().extend(grant, TTL) for grant in grants)
    until(lambda: clients() == before + 1)
    assert all(own().release(grant) for grant in grants)


@pytest.mark.slow
def test_an_interrupted_attempt_to_connect_leaves_no_client_behind(engine):
    if engine.name == "etcd":
        return  # its connections end with the objects
    before = clients()
    for at in range(-2, 10**6):
        done = interrupted_at(at, session, own().ping)
        own().close()
        if done and at > 0:
            break

    assert at > 20
    until(lambda: clients() == before)


def clients():
    """Return how many clients of ZooKeeper this process runs."""
    return len([thread for thread in threading.enumerate() if "zk_loop" in thread.name])


def test_a_cleared_waiter_does_not_believe_that_it_has_the_lock(engine):
    held = own().acquire(a_claim("a", ttl=TTL), 0)
    claim = a_claim("a", ttl=TTL)
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(own().acquire, claim, 3)
        queue_of(claim.key, 1)
        own().release(Grant(claim))  # by another thread, as a cancelled task's
        assert not waiter.result(30)
        queue_of(claim.key, 0)
    assert own().release(held) is True


def test_fences_grow_when_the_data_is_lost(private_server, running_server):
    name, _ = running_server
    server = private_server({"etcd": EtcdServer, "zookeeper": ZooKeeperServer}[name])
    with proxy_to(server.port) as proxy:
        with override_settings(DISTLOCK=Engine(name, server, proxy).settings()):
            fences = []
            for _ in range(2):
                for _ in range(3):
                    grant = until_granted(lambda: other().acquire(a_claim("a", ttl=TTL), 0))
                    fences.append(grant.fence)
                    other().release(grant)
                server.stop()
                wipe(server.home / "data")
                server.start()
            other().close()
    server.close()

    assert fences == sorted(set(fences))


def test_fences_grow_when_an_operator_deletes_the_tree(engine):
    """Processes that knew it before count on with those that did not."""
    if engine.name == "etcd":
        return  # has no tree
    backends = [other(), own(), other(), own(), other()]
    fences = []
    for number, backend in enumerate(backends):
        if number == 3:
            delete_tree(engine)
            own().close()
        grant = backend.acquire(a_claim("a", ttl=TTL), 0)
        fences.append(grant.fence)
        assert backend.release(grant) is True

    assert fences == sorted(set(fences))


def test_a_waiter_lines_up_again_when_an_operator_deletes_the_tree(engine):
    if engine.name == "etcd":
        return  # has no tree
    held = other().acquire(a_claim("a", ttl=TTL), 0)
    claim = a_claim("a", ttl=TTL)
    assert not own().acquire(claim, 5)
    delete_tree(engine)

    assert not own().acquire(claim, 0)
    assert other().extend(held, TTL) is False
    assert own().release(until_granted(lambda: own().acquire(claim, 0))) is True


def delete_tree(engine):
    """Delete all that is ours, as an operator may."""
    client = KazooClient(engine.server.url)
    client.start()
    client.delete(f"/distlock{settings.SUFFIX}", recursive=True)
    client.stop()
    client.close()


def wipe(directory):
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()


def test_a_wrong_location_is_refused(engine):
    of_etcd, of_zookeeper = (
        ["http://user:secret@127.0.0.1", ["ftp://x"]],
        ["h:port", "h:1/a/../b", ["h:1"]],
    )
    for location in [None, "", *(of_etcd if engine.name == "etcd" else of_zookeeper)]:
        with pytest.raises(ImproperlyConfigured, match="default") as raised:
            refused(engine, location)
        assert "secret" not in str(raised.value)


def test_wrong_options_are_refused(engine):
    wrong = {"COLOUR": 1, "PREFIX": "", "TIMEOUT": "3"}
    if engine.name == "zookeeper":
        wrong |= {"SESSION": -1}
    for option, value in wrong.items():
        with pytest.raises(ImproperlyConfigured, match=option):
            refused(engine, "http://127.0.0.1" if engine.name == "etcd" else "h:1", option, value)


@pytest.mark.parametrize("text", [None, "no certificate"])
@pytest.mark.parametrize("option", ["CA", "CERT"])
@pytest.mark.parametrize(
    "name, location, tls",
    [
        ("etcd", "https://h", {}),
        ("etcd", "HTTPS://h", {}),
        ("zookeeper", "h:1", {"TLS": True}),
    ],
)
def test_files_for_tls_that_are_of_no_use_are_named(name, location, tls, option, text, tmp_path):
    file = tmp_path / "file.pem"
    if text:
        file.write_text(text)
    setting = {
        "BACKEND": BACKENDS[name],
        "LOCATION": location,
        "OPTIONS": {**tls, option: str(file)},
    }
    with override_settings(DISTLOCK={"default": setting}):
        with pytest.raises(ImproperlyConfigured, match=r"DISTLOCK\['default'\]: CA, CERT or KEY"):
            registry["default"]


@pytest.mark.parametrize("option", ["CA", "CERT", "KEY", "PASSWORD"])
def test_what_would_not_protect_anything_is_refused(engine, option):
    needs = {"PASSWORD": "USER"}.get(option, "https:" if engine.name == "etcd" else "TLS: True")
    location = "http://127.0.0.1" if engine.name == "etcd" else "h:1"

    with pytest.raises(ImproperlyConfigured, match=f"{option}.* needs? .*{needs}"):
        refused(engine, location, option, "secret")


@pytest.mark.parametrize(
    "name, location, tls", [("etcd", "https://h", {}), ("zookeeper", "h:1", {"TLS": True})]
)
def test_a_key_without_its_certificate_is_refused(name, location, tls):
    options = {**tls, "KEY": __file__}
    setting = {"BACKEND": BACKENDS[name], "LOCATION": location, "OPTIONS": options}
    with override_settings(DISTLOCK={"default": setting}):
        with pytest.raises(ImproperlyConfigured, match="KEY needs a CERT"):
            registry["default"]


def refused(engine, location, option="PREFIX", value="x"):
    setting = {"BACKEND": BACKENDS[engine.name], "LOCATION": location, "OPTIONS": {option: value}}
    with override_settings(DISTLOCK={"default": setting}):
        return registry["default"]


@pytest.mark.parametrize("name", ["etcd", "zookeeper"])
def test_an_error_says_why_a_certificate_is_refused(private_server, tmp_path, name):
    certificate, key = certified(tmp_path)
    config = {"tls-port": str(free_port()), "tls-cert-file": str(certificate)}
    config |= {"tls-key-file": str(key), "tls-auth-clients": "no"}
    with private_server(RedisServer, config=config):  # speaks TLS, which is all it takes
        place = f"127.0.0.1:{config['tls-port']}"
        setting = {
            "etcd": {"BACKEND": BACKENDS[name], "LOCATION": f"https://{place}"},
            "zookeeper": {"BACKEND": BACKENDS[name], "LOCATION": place, "OPTIONS": {"TLS": True}},
        }[name]
        with override_settings(DISTLOCK={"own": setting}):
            with pytest.raises(BackendError, match="certificate verify failed: self.signed"):
                own().ping()
            own().close()


def test_another_etcd_is_asked_when_one_is_down_or_frozen(engine):
    if engine.name != "etcd":
        return  # kazoo does that
    engine.proxy.silent = True
    places = [free_port(), engine.proxy.port, engine.server.port]
    setting = engine.setting(0) | {"LOCATION": [f"http://127.0.0.1:{port}" for port in places]}
    with override_settings(DISTLOCK={"own": setting}):
        for _ in range(2):
            with Lock("a", using="own", ttl=TTL):
                assert [h.name for h in own().holders(key_of("a"))] == ["a"]
        own().close()


def test_an_outage_of_etcd_says_what_the_system_or_the_gateway_said():
    with answering("{}", 503) as answered:
        for url, why in (
            (answered, "HTTP 503"),
            (f"http://127.0.0.1:{free_port()}", "Connection refused"),
        ):
            setting = {"BACKEND": BACKENDS["etcd"], "LOCATION": url}
            with override_settings(DISTLOCK={"own": setting}):
                with pytest.raises(BackendError, match=f": {why}\\.$"):
                    own().ping()
                own().close()


@pytest.mark.parametrize("status", [200, 404, 503])
@pytest.mark.parametrize(
    "nonsense", ["[]", '"not found"', "null", "17", "{}", '{"result": []}', '{"code": "gone"}']
)
def test_json_of_another_server_than_etcd_is_told_as_an_outage(nonsense, status):
    with answering(nonsense, status) as url:
        setting = {"BACKEND": BACKENDS["etcd"], "LOCATION": url}
        with override_settings(DISTLOCK={"own": setting, "user": with_login(setting)}):
            claim = a_claim("a", ttl=TTL)
            grant = Grant(claim)
            for ask in (
                lambda: own().acquire(claim, 0),
                lambda: own().acquire(claim, 5),
                lambda: own().extend(grant, TTL),
                lambda: own().end_in(grant, TTL),
                lambda: own().release(grant),
                lambda: own().clear(claim.key),
                lambda: list(own().holders()),
                lambda: own()._leases.renew(own()._leases.of(7)),
                lambda: own()._leases.remaining(7),
                own().ping,
                registry["user"].backend.ping,
            ):
                with pytest.raises(BackendError):
                    ask()
            for entry in registry.made():
                entry.backend.close()


def with_login(setting):
    return setting | {"OPTIONS": {"USER": "locks", "PASSWORD": "opensesame"}}


@contextmanager
def answering(text, status):
    """Run an HTTP server with one answer to all requests; yield its URL."""

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_watch_that_says_nonsense_is_replaced(engine, monkeypatch, caplog):
    if engine.name == "zookeeper":
        return  # kazoo reads its answers
    said, messages = [], Link.messages

    def nonsense_first(link):
        if said:
            return messages(link)
        said.append([])
        return iter(said)

    monkeypatch.setattr(Link, "messages", nonsense_first)
    held = other().acquire(a_claim("a", ttl=60), 0)

    with waiting("a", using="own"):
        until(lambda: said and own()._watch._link)
        assert other().release(held) is True

    assert "failed and continues" not in caplog.text


@pytest.mark.parametrize("verb", ["acquire", "release"])
def test_an_etcd_that_goes_silent_is_asked_once(engine, monkeypatch, verb):
    if engine.name != "etcd":
        return  # kazoo sends its requests
    setting = engine.setting(0)
    setting["LOCATION"] = f"http://127.0.0.1:{engine.proxy.port},{engine.server.url}"
    asked, send = [], Link.send

    def note_and_send(link, *args):
        asked.append(int(link.endpoint.rpartition(":")[2]))
        send(link, *args)

    with override_settings(DISTLOCK={"own": setting}):
        grant = own().acquire(a_claim("a", ttl=60), 0)
        engine.proxy.silent = True
        monkeypatch.setattr(Link, "send", note_and_send)
        if verb == "acquire":
            assert own().release(own().acquire(a_claim("b", ttl=60), 0)) is True
        assert own().release(grant) is True
        own().close()

    assert asked[0] == engine.proxy.port and set(asked[1:]) == {engine.server.port}


def test_an_only_etcd_that_is_silent_is_not_asked_again(engine, monkeypatch):
    if engine.name != "etcd":
        return  # kazoo sends its requests
    sent, send = [], Link.send

    def note_and_send(link, *args):
        sent.append(bool(link.used))
        send(link, *args)

    setting = engine.setting(engine.proxy.port)
    setting["OPTIONS"]["TIMEOUT"] = 1
    with override_settings(DISTLOCK={"own": setting}):
        own().ping()
        monkeypatch.setattr(Link, "send", note_and_send)
        engine.proxy.silent = True
        for _ in range(2):
            with pytest.raises(BackendError, match="did not answer"):
                own().ping()
        own().close()

    assert sent == [True, False, False]  # on the kept connection, and on a new one for each


def test_a_user_logs_in(running_server, private_server):
    name, server = running_server
    if name == "etcd":
        server = private_server(EtcdServer)
        protect_etcd(server.url)
    login = {"USER": "locks", "PASSWORD": "opensesame", "PREFIX": "secured"}
    setting = {"BACKEND": BACKENDS[name], "LOCATION": server.url, "OPTIONS": login}
    wrong = setting | {"OPTIONS": login | {"PASSWORD": "wrong"}}
    with override_settings(DISTLOCK={"own": setting, "other": wrong}):
        with ThreadPoolExecutor(1) as pool, Lock("a", using="own", ttl=TTL) as hold:
            waiter = pool.submit(Lock("a", using="own", ttl=TTL).acquire, wait=20)
            until(lambda: [h.waiters for h in own().holders(key_of("a"))] == [1])
            with pytest.raises(BackendError) as raised:
                Lock("a", using="other", ttl=TTL).acquire(wait=0)
            own().ping()
            with pytest.raises(BackendError):
                other().ping()
            hold.release()
            waiter.result(30).release()
        for entry in registry.made():
            entry.backend.close()

    assert "wrong" not in str(raised.value)
    if name == "etcd":
        server.close()


def test_a_check_finds_a_user_that_may_only_read(private_server):
    server = private_server(EtcdServer)
    login = {"USER": "locks", "PASSWORD": "opensesame", "PREFIX": "secured"}
    setting = {"BACKEND": BACKENDS["etcd"], "LOCATION": server.url}
    anybody, reader = ({"OPTIONS": {"PREFIX": "secured"}}, {"OPTIONS": login})
    with override_settings(DISTLOCK={"own": setting | anybody, "other": setting | reader}):
        own().ping()
        with Lock("a", using="own", ttl=TTL):
            pass
        own().close()
        protect_etcd(server.url, may="READ")
        [found] = other().check(ask=True)
        other().close()

    assert "permission denied" in found.msg


@pytest.mark.parametrize("says", ["error and message", "message"])
def test_locks_go_on_when_the_users_of_etcd_change(private_server, tmp_path, monkeypatch, says):
    received = Link.receive

    def as_since_3_6(link):
        status, text, stays = received(link)
        answer = json.loads(text)
        if status >= 400:
            answer.pop("error", None)
        return status, json.dumps(answer).encode(), stays

    if says == "message":
        monkeypatch.setattr(Link, "receive", as_since_3_6)
    secret = tmp_path / "secret"
    secret.write_text("opensesame")
    tokens = {"auth-token": f"jwt,sign-method=HS256,priv-key={secret},ttl=10m"}
    server = private_server(EtcdServer, config=tokens)
    protect_etcd(server.url)
    login = {"USER": "locks", "PASSWORD": "opensesame", "PREFIX": "secured"}
    setting = {"BACKEND": BACKENDS["etcd"], "LOCATION": server.url, "OPTIONS": login}
    with override_settings(DISTLOCK={"own": setting, "other": setting}):
        with ThreadPoolExecutor(8) as pool, Lock("a", using="own", ttl=30) as hold:
            waiter = pool.submit(Lock("a", using="other", ttl=30).acquire, wait=20)
            queue_of(key_of("a"), 1)
            root = ask_etcd(server.url, "authenticate", name="root", password="secret")["token"]
            ask_etcd(server.url, "user/changepw", root, name="locks", password="opensesame")

            others = [Lock(f"b{number}", using="own", ttl=30) for number in range(8)]
            for taken in list(pool.map(Lock.acquire, others)):
                taken.release()
            hold.extend()
            hold.release()
            waiter.result(30).release()
        for entry in registry.made():
            entry.backend.close()
    server.close()


def ask_etcd(url, path, token="", **body):
    request = Request(f"{url}/v3/auth/{path}", json.dumps(body).encode())
    if token:
        request.add_header("Authorization", token)
    with urlopen(request, timeout=10) as response:
        return json.load(response)


def protect_etcd(url, may="READWRITE"):
    """Let only the user `locks` at the keys that begin with "secured", and only there."""
    ask = partial(ask_etcd, url)
    ask("user/add", name="root", password="secret")
    ask("role/add", name="root")
    ask("user/grant", user="root", role="root")
    ask("user/add", name="locks", password="opensesame")
    ask("role/add", name="locks")
    keys = {"key": encoded("secured"), "range_end": encoded("securee")}
    ask("role/grant", name="locks", perm={"permType": may, **keys})
    ask("user/grant", user="locks", role="locks")
    ask("enable")
