"""Redlock: majorities, fences over several nodes, slow and silent nodes, late releases, waiting."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from unittest.mock import patch

import pytest
from django.core.exceptions import ImproperlyConfigured

from distlock_app import Lock
from distlock_app.backends import connecting
from distlock_app.backends.redis import listening as redis_listener
from distlock_app.backends.redlock import RedlockBackend
from distlock_app.backends.redlock import backend as redlock
from distlock_app.backends.redlock import listening as redlock_listener
from distlock_app.backends.redlock import nodes as redlock_nodes
from distlock_app.backends.redlock import quorum as redlock_quorum
from distlock_app.backends.redlock.clock import ServerClock
from distlock_app.backends.redlock.scripts import RELEASE
from distlock_app.claims import Busy, Grant
from distlock_app.errors import BackendError
from distlock_app.testing.claims import a_claim
from tests.engines import interrupted_at, interrupted_everywhere, running, until
from tests.launching import free_port
from tests.proxy import proxy_to
from tests.redis_workers import Waiter, ended_by_a_signal, wait_for
from tests.redlock_workers import caches_of, quorum_at
from tests.servers import RedisServer

pytest_plugins = ["tests.redis_fixtures"]
SCHEDULER = {"owner": "scheduler", "stable": True}
PATIENT = 5.0  # seconds for a majority to be connected and to answer; a busy machine stops for one


@pytest.fixture
def backend(nodes):
    made = quorum_at(nodes.urls)
    made._quorum._timeout = PATIENT
    yield made
    made.close()


def freed_everywhere(backend, nodes, key):
    """Ask for other locks until no node holds this one: each gets late what it has not got yet."""
    until(lambda: backend.acquire(a_claim("b"), 0) is not None and not nodes.holding(key))


def held_everywhere(backend, nodes, name="a", **options):
    """Return a grant that all nodes gave: one that was connected late has it from the extension."""
    grant = wait_for(backend, 5, name, **options)
    until(lambda: backend.extend(grant, 30) and len(nodes.holding(grant.claim.key)) == 5)
    return grant


def refused_without_majority(backend, nodes, wanted):
    for server in nodes.servers[:3]:
        server.pause()
    with patch.object(backend._quorum, "_timeout", 1.0), pytest.raises(BackendError):
        backend.acquire(wanted, 0)
    for server in nodes.servers[:3]:
        server.resume()


def timed(call):
    started = time.monotonic()
    answer = call()
    return answer, time.monotonic() - started


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("own0", "must be a list of aliases"),
        ([], "odd number"),
        (["own0"], "use RedisBackend"),
        (["own0", "own1", "own2", "own3"], "names 4 servers"),
        (["own0", "own1", "nowhere"], "LOCATION is not in CACHES"),
        (["own0", "own1", "own0"], "same server twice"),
        (["own0", "own1", "again"], "same server twice, as 'own0' and 'again'"),
        (["own0", "own1", "local"], "same server twice, as 'own0' and 'local'"),
    ],
)
def test_a_wrong_list_of_nodes_is_refused_and_told(settings, location, says):
    urls = [f"redis://127.0.0.1:{port}/0" for port in (7001, 7002, 7003, 7004)]
    with caches_of(urls):
        settings.CACHES["again"] = {**settings.CACHES["own0"], "LOCATION": urls[0][:-1] + "5"}
        local = urls[0].replace("127.0.0.1", "LocalHost")
        settings.CACHES["local"] = {**settings.CACHES["own0"], "LOCATION": local}
        with pytest.raises(ImproperlyConfigured, match=says):
            RedlockBackend(alias="quorum", location=location)
        del settings.CACHES["again"], settings.CACHES["local"]


@pytest.mark.parametrize("wanted", [{"limit": 2}, {"shared": True}, {"fair": True}])
def test_what_a_majority_cannot_promise_is_refused(redlock_urls, wanted):
    with pytest.raises(ValueError):
        Lock("a", using="quorum", **wanted)


def test_connections_that_were_idle_for_long_are_not_used_again(backend, nodes):
    backend.release(wait_for(backend, 5, "a"))
    [connections] = backend._quorum._idle
    before = set(connections._links.values())

    connections.used -= connecting.IDLE_SECONDS
    backend.release(wait_for(backend, 5, "a"))

    [connections] = backend._quorum._idle
    assert before.isdisjoint(connections._links.values())


def test_acquire_and_release_cost_one_request_each_at_each_node(backend, nodes):
    backend.release(wait_for(backend, 5, "warm"))
    backend.release(wait_for(backend, 5, "a"))
    before = nodes.sent()

    pairs = 0

    def asked():
        """Ask on until each node got 200 requests: one that is slow is left out for a moment."""
        nonlocal pairs
        backend.release(wait_for(backend, 5, "a"))
        pairs += 1
        return min(b - a for a, b in zip(before, nodes.sent(), strict=True)) >= 200

    until(asked, within=60)
    # The fence is made known with a request more when the clock was misjudged.
    assert sum(b - a for a, b in zip(before, nodes.sent(), strict=True)) <= 5 * 2 * pairs * 1.2


def test_a_fence_ahead_on_one_node_is_made_known_to_a_majority(backend, nodes):
    first = wait_for(backend, 5, "a")
    backend.release(first)
    ahead = first.fence + 10**9
    part = f"distlock:redlock:part:{int(first.claim.key[:4], 16) % 256}"

    fences = []
    for node in range(5):
        backend.release(held_everywhere(backend, nodes, "b"))  # connected to all of them
        nodes.clients[node].hset(part, ":", ahead + node * 10**6)
        # The others are not there to know better.
        others = [(node + 3) % 5, (node + 4) % 5]
        for other in others:
            nodes.servers[other].pause()
        grant = wait_for(backend, 5, "a")
        for other in others:
            nodes.servers[other].resume()
        fences.append(grant.fence)
        known = [int(client.hget(part, ":") or 0) for client in nodes.clients]
        assert sum(number >= grant.fence for number in known) >= 3
        backend.release(grant)

    assert fences == sorted(set(fences)) and fences[0] > ahead


def test_the_guess_of_the_nodes_time_is_not_ahead_of_it():
    clock = ServerClock()
    assert (clock.stamp(1.0), clock.stamp(1.0)) == (1, 2)

    clock.learn(1.0, [5_000_900, 5_000_700])
    assert clock.stamp(2.0) == 6_000_700
    clock.learn(3.0, [7_000_900])  # a faster answer
    assert clock.stamp(4.0) == 8_000_900
    clock.learn(5.0, [8_980_000])  # a slow one tells little
    assert 8_998_500 <= clock.stamp(5.0) <= 9_000_900
    clock.learn(6.0, [2_000_000])  # the clock was set back
    assert clock.stamp(60.0) == 56_000_000


def test_what_undoes_a_try_spares_a_later_try_of_the_same_owner(backend, nodes):
    grant = held_everywhere(backend, nodes)
    again = backend.acquire(grant.claim, 0)

    late = backend._request(RELEASE, grant.claim, b"%d" % grant.session)
    backend._quorum.ask([late])

    assert again.session > grant.session
    assert len(late.no) >= 3 and not late.yes
    assert backend.extend(again, 30) is True and backend.release(again) is True


def test_tries_that_come_after_the_release_leave_nothing(backend, nodes):
    """A busy node takes what came over two connections in any order."""
    grant = held_everywhere(backend, nodes)
    gone = a_claim("a")
    stamp = backend._clock.stamp()
    backend.release(Grant(gone))
    place = b"-", b"%d" % stamp
    waiting = [
        backend._taking(gone, 30, stamp, *place),
        backend._releasing(gone, stamp, *place),
    ]
    backend._quorum.ask(waiting)
    backend.release(grant)
    grant = backend.acquire(a_claim("a"), 0)
    assert grant, "nobody is in the queues"
    backend.release(grant)
    backend._quorum.ask([backend._taking(gone, 30, stamp)])
    assert not nodes.holding(gone.key)
    assert backend.acquire(a_claim("a"), 0), "nor now"


def test_a_lock_on_a_minority_blocks_nobody_and_one_on_a_majority_does(backend, nodes):
    wanted = a_claim("a")
    for count, free in ((2, True), (3, False)):
        for client in nodes.clients[:count]:
            client.set(f"distlock:redlock:{wanted.key}", "stranger 5 1 {} a", px=60_000)

        # A node that is slow to be reached has no vote in the first try.
        answer = wait_for(backend, 30, "a") if free else backend.acquire(a_claim("a"), 0)

        assert bool(answer) is free
        if free:
            assert backend.release(answer) is True
        else:
            assert isinstance(answer, Busy) and 0 < answer.free_in <= 60
    # What the minority gave was given back.
    until(lambda: nodes.holding(wanted.key) == [0, 1, 2])


def test_a_waiter_that_reaches_a_minority_keeps_nobody_out(nodes):
    nowhere = [f"redis://127.0.0.1:{free_port()}/0" for _ in range(3)]
    cut_off = quorum_at([*nodes.urls[:2], *nowhere])
    backend = quorum_at([*nodes.urls[:3], *nowhere[:2]])
    grant = wait_for(backend, 30, "a")
    waiter = Waiter(cut_off, "a")
    cut_off._listener.ensure_subscribed()  # it waits since it reached them all

    for _ in range(2):  # the lock is held, then free
        with pytest.raises(BackendError):
            waiter.ask()
        backend.release(grant)

    assert backend.acquire(a_claim("a"), 0)
    cut_off.close()
    backend.close()


def test_a_node_that_comes_back_has_no_waiter_in_its_queue_that_did_not_ask(backend, nodes):
    held, waiter = held_everywhere(backend, nodes), Waiter(backend, "a")
    for server in nodes.servers[:2]:
        server.kill()
    assert not waiter.ask()
    queues = [client.exists(f"distlock:redlock:{held.claim.key}:q") for client in nodes.clients[2:]]
    assert queues == [1, 1, 1]

    for server in nodes.servers[:2]:
        server.start()
    held_everywhere(backend, nodes, "b")

    for client in nodes.clients[:2]:
        assert not client.exists(f"distlock:redlock:{held.claim.key}:q")


@pytest.mark.parametrize("silent", [[0], [1, 3]])
def test_frozen_nodes_slow_nobody_down_and_forget_what_they_missed(backend, nodes, silent):
    backend.release(held_everywhere(backend, nodes))
    for at in silent:
        nodes.servers[at].pause()

    slowest, granted = 0.0, []
    # Until the nodes count as down, and some time after that.
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        grant, took = timed(lambda: backend.acquire(a_claim("a"), 0))
        assert grant and backend.extend(grant, 30) is True
        granted.append(grant)
        slowest = max(slowest, took)
        released, took = timed(lambda: backend.release(granted[-1]))
        assert released is True
        slowest = max(slowest, took)
        time.sleep(0.01)
    for at in silent:
        nodes.servers[at].resume()

    assert slowest < PATIENT / 2  # a silent node was waited for if this fails
    key = granted[0].claim.key
    # They have the releases of what they were asked for while they were frozen.
    freed_everywhere(backend, nodes, key)

    def whole():
        grant = backend.acquire(a_claim("a"), 0)
        everywhere = len(nodes.holding(key)) == 5
        return backend.release(grant) and everywhere

    until(whole)


def test_a_new_process_does_not_wait_for_a_frozen_node(nodes):
    nodes.servers[2].pause()
    took = []
    for name in "abc":
        with closing(quorum_at(nodes.urls)) as backend:
            grant, seconds = timed(partial(backend.acquire, a_claim(name), 0))
            took.append(seconds)
            assert backend.release(grant) is True
    nodes.servers[2].resume()

    assert min(took) < 0.75  # each time a second, if it waits


@pytest.mark.parametrize("how", ["pause", "kill"])
def test_without_a_majority_nothing_is_busy_or_free_but_unknown(backend, nodes, how):
    grant = backend.acquire(a_claim("a"), 0)
    backend._quorum._timeout = 1.0
    for server in nodes.servers[:3]:
        getattr(server, how)()

    for verb in (
        lambda: backend.acquire(a_claim("b"), 0),
        lambda: backend.extend(grant, 30),
        lambda: backend.release(grant),
        lambda: list(backend.holders()),
        lambda: backend.clear(grant.claim.key),
        lambda: backend.ping(),
    ):
        started = time.monotonic()
        with pytest.raises(BackendError, match=r"2 of 5 nodes answered, not own0 \("):
            verb()
        assert time.monotonic() - started < 5

    for server in nodes.servers[:3]:
        server.resume()
        server.start()
    until(lambda: backend.acquire(a_claim("c"), 0))
    backend.ping()


@pytest.mark.parametrize("sent", [False, True])
def test_a_process_that_is_stopped_as_it_asks_finds_answers(backend, nodes, monkeypatch, sent):
    backend.release(held_everywhere(backend, nodes))
    send, stops = redlock_nodes.NodeConnections._send, []
    for module in redlock_nodes, redlock_quorum:
        monkeypatch.setattr(module, "monotonic", lambda: time.monotonic() + sum(stops))
    if sent:
        monkeypatch.setattr(backend._quorum, "_timeout", 0.0)  # it is over when they have come

    def stopped(connections, *asked):
        stops.append(60.0)
        send(connections, *asked)
        until(lambda: not sent or len(connections._poll.poll(0)) == len(connections._links))

    monkeypatch.setattr(redlock_nodes.NodeConnections, "_send", stopped)
    grant = backend.acquire(a_claim("a"), 0)

    assert backend.extend(grant, 30) and backend.release(grant)


def test_a_grant_without_majority_is_undone_where_it_was_given(backend, nodes):
    backend.release(wait_for(backend, 5, "warm"))
    wanted = a_claim("a")

    refused_without_majority(backend, nodes, wanted)

    freed_everywhere(backend, nodes, wanted.key)


def test_connections_that_the_servers_closed_are_replaced(backend, nodes):
    grant = backend.acquire(a_claim("a"), 0)

    for idle in (0.0, 0.7):
        for verb in (lambda: backend.extend(grant, 60), lambda: backend.acquire(grant.claim, 0)):
            for client in nodes.clients:
                client.client_kill_filter(_type="normal", skipme=True)
            time.sleep(idle)
            assert verb()
    assert backend.release(grant) is True


def test_restarted_nodes_are_used_again(backend, nodes):
    grant = backend.acquire(a_claim("a"), 0)

    for server in nodes.servers:
        server.kill()
        server.start()

    assert backend.extend(grant, 30) is False
    again = backend.acquire(a_claim("a"), 0)
    assert again.fence > grant.fence
    assert backend.release(again) is True


def test_flushed_scripts_are_sent_again(backend, nodes):
    grant = backend.acquire(a_claim("a"), 0)

    for verb in (lambda: backend.extend(grant, 60), lambda: backend.release(grant)):
        for client in nodes.clients:
            client.script_flush()
        assert verb() is True
    freed_everywhere(backend, nodes, grant.claim.key)


def test_flushed_scripts_are_sent_again_also_with_connections_to_spare(backend, nodes):
    grant = backend.acquire(a_claim("a"), 0)

    for verb in (lambda: backend.extend(grant, 60), lambda: backend.release(grant)):
        for node, client in zip(backend._quorum.nodes, nodes.clients, strict=True):
            node.fresh.append(node.connect())
            client.script_flush()
        assert verb() is True
    freed_everywhere(backend, nodes, grant.claim.key)


@pytest.fixture
def proxied(nodes):
    with ExitStack() as stack:
        proxies = [stack.enter_context(proxy_to(server.port)) for server in nodes.servers]
        backend = quorum_at([f"redis://127.0.0.1:{proxy.port}/0" for proxy in proxies])
        backend.release(held_everywhere(backend, nodes, "warm"))  # connected to all of them
        yield backend, proxies
        backend.close()


def test_a_release_does_not_overtake_requests_that_a_signal_ended(proxied, nodes):
    (backend, proxies), wanted = proxied, a_claim("a", ttl=60)
    ended_by_a_signal(lambda: backend.acquire(wanted, 0), *proxies)

    assert len(nodes.holding(wanted.key)) == 5  # none is on its way, to be carried out at any time
    backend.release(Grant(wanted))
    freed_everywhere(backend, nodes, wanted.key)


@pytest.mark.parametrize("lost", [[0], [0, 1]])
def test_lost_answers_of_a_minority_change_nothing_and_leave_nothing(proxied, nodes, lost):
    backend, proxies = proxied
    fences = []
    for _ in range(3):
        for at in lost:
            proxies[at].lose = 1.0
        grant = backend.acquire(a_claim("a"), 0)
        assert backend.extend(grant, 30) is True
        assert backend.release(grant) is True
        fences.append(grant.fence)
        for at in lost:
            proxies[at].lose = 0.0
        backend.release(wait_for(backend, 5, "b"))

    assert fences == sorted(set(fences))
    freed_everywhere(backend, nodes, grant.claim.key)


def test_lost_answers_of_a_majority_are_unknown_and_leave_nothing(proxied, nodes):
    backend, proxies = proxied
    wanted = a_claim("a")
    for proxy in proxies[:3]:
        proxy.lose = 1.0

    with pytest.raises(BackendError):
        backend.acquire(wanted, 0)
    with pytest.raises(BackendError):
        backend.release(Grant(wanted))
    for proxy in proxies[:3]:
        proxy.lose = 0.0

    until(lambda: _answers(backend) and not nodes.holding(wanted.key))


def _answers(backend):
    try:
        return backend.release(backend.acquire(a_claim("b"), 5))
    except (BackendError, AttributeError):
        return False


def test_a_lost_answer_to_release_is_not_taken_for_a_lost_lock(proxied):
    backend, proxies = proxied
    grant = backend.acquire(a_claim("a"), 0)
    for proxy in proxies[:3]:
        proxy.lose = 1.0

    with pytest.raises(BackendError):
        backend.release(grant)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("end", ["release", "extend"])
def test_what_a_slow_connection_would_decide_waits_for_it(backend, nodes, end, ours):
    grant = held_everywhere(backend, nodes)
    for at in (0, 1) if ours else (0, 1, 4):
        nodes.clients[at].flushall()
    [*_, connections] = backend._quorum._idle
    connections._drop(4, "it was slow to connect")

    assert (backend.release(grant) if end == "release" else backend.extend(grant, 30)) is ours


def test_an_extension_heals_emptied_nodes_and_fails_without_a_majority(backend, nodes):
    grant = held_everywhere(backend, nodes)

    for pair in ((0, 1), (2, 3), (4, 0)):
        for at in pair:
            nodes.clients[at].flushall()
        assert backend.extend(grant, 30) is True
        until(lambda: len(nodes.holding(grant.claim.key)) == 5)
    assert not backend.acquire(a_claim("a"), 0)
    for client in nodes.clients[1:4]:
        client.flushall()

    assert backend.extend(grant, 30) is False
    assert nodes.holding(grant.claim.key) == [0, 4]  # and nothing was taken again


def test_an_extension_tells_emptied_nodes_the_fence(backend, nodes):
    """They would give one by their own clocks, which may be behind."""
    grant = held_everywhere(backend, nodes)
    lock = f"distlock:redlock:{grant.claim.key}"

    for client in nodes.clients:
        client.flushall()
        assert backend.extend(grant, 30) is True
        until(lambda: len(nodes.holding(grant.claim.key)) == 5)

    until(lambda: {int(one.get(lock).split()[1]) for one in nodes.clients} == {grant.fence})


def test_an_extension_heals_nodes_although_others_wait_for_the_lock(backend, nodes):
    grant = held_everywhere(backend, nodes)
    waiter = Waiter(backend, "a")
    assert not waiter.ask()

    for client in nodes.clients:
        client.flushall()
        assert not waiter.ask()  # with three emptied nodes it would be the second owner
        assert backend.extend(grant, 30) is True
        until(lambda: len(nodes.holding(grant.claim.key)) == 5)

    assert backend.release(grant)
    until(waiter.ask)


def test_an_extension_that_crosses_the_release_brings_nothing_back(backend, nodes, monkeypatch):
    grant = held_everywhere(backend, nodes)
    nodes.clients[0].flushall()
    ask = redlock_quorum.Quorum.ask

    def ask_while_it_is_released(quorum, requests, heal, **options):
        def release_and_heal(connections):
            backend.release(grant)
            heal(connections)

        monkeypatch.undo()
        ask(quorum, requests, release_and_heal, **options)

    monkeypatch.setattr(redlock_quorum.Quorum, "ask", ask_while_it_is_released)
    assert backend.extend(grant, 30) is True

    for _ in range(3):  # until the node has read what it was sent
        nodes.clients[0].ping()
    assert not nodes.holding(grant.claim.key)


def test_a_stable_owner_keeps_what_is_healed_after_an_earlier_release(backend, nodes):
    backend.release(wait_for(backend, 5, "a", **SCHEDULER))
    grant = held_everywhere(backend, nodes, **SCHEDULER)
    nodes.clients[0].flushall()

    assert backend.extend(grant, 30) is True

    until(lambda: len(nodes.holding(grant.claim.key)) == 5)
    assert not backend.acquire(a_claim("a"), 0)


def test_a_try_of_a_stable_owner_that_fails_takes_nothing_from_who_has_the_lock(backend, nodes):
    held = held_everywhere(backend, nodes, **SCHEDULER)

    refused_without_majority(backend, nodes, a_claim("a", **SCHEDULER))

    until(lambda: backend.acquire(a_claim("b"), 0))
    for client in nodes.clients * 3:  # until the node has read what it was sent
        client.ping()
    assert len(nodes.holding(held.claim.key)) == 5


def test_a_stable_owner_that_is_refused_keeps_nothing_of_a_minority(backend, nodes):
    wanted = a_claim("a", **SCHEDULER)
    for client in nodes.clients[:3]:
        client.set(f"distlock:redlock:{wanted.key}", "stranger 5 1 {} a", px=60_000)

    until(lambda: isinstance(backend.acquire(wanted, 0), Busy))

    until(lambda: nodes.holding(wanted.key) == [0, 1, 2])


def test_a_stable_owner_releases_what_it_took_when_the_clocks_were_ahead(backend, nodes):
    earlier = quorum_at(nodes.urls)
    earlier._clock._last = 4 * 10**15  # in the year 2096
    assert wait_for(earlier, 5, "a", **SCHEDULER)
    earlier.close()

    resumed = wait_for(backend, 5, "a", **SCHEDULER)

    assert backend.release(resumed) is True
    freed_everywhere(backend, nodes, resumed.claim.key)


def test_an_error_says_that_a_command_inside_a_script_is_not_permitted(backend, nodes):
    try:
        for client in nodes.clients:
            client.execute_command("ACL", "SETUSER", "default", "-set")
        with pytest.raises(BackendError, match="NOPERM"):
            backend.acquire(a_claim("a"), 0)
    finally:
        for client in nodes.clients:
            client.execute_command("ACL", "SETUSER", "default", "+@all")


def test_a_release_that_a_node_refuses_is_sent_again(backend, nodes):
    grant = held_everywhere(backend, nodes)
    nodes.clients[0].config_set("min-replicas-to-write", 1)
    try:
        assert backend.release(grant) is True
        # Who was late to answer gets it with a later request.
        key = grant.claim.key
        until(lambda: backend.acquire(a_claim("b"), 0) is not None and nodes.holding(key) == [0])
    finally:
        nodes.clients[0].config_set("min-replicas-to-write", 0)

    freed_everywhere(backend, nodes, grant.claim.key)


def test_a_node_that_is_connected_as_a_lock_is_released_has_the_release_too(
    backend, nodes, monkeypatch
):
    grant = held_everywhere(backend, nodes, ttl=60)
    [*_, connections] = backend._quorum._idle
    node, send = backend._quorum.nodes[4], connections._send
    connections._drop(4)
    node.opening = node.failing = True  # and no request waits for it

    def send_and_connect(*asked):
        send(*asked)
        if node.opening:
            node.fresh.append(node.connect())
            node.opening = False

    monkeypatch.setattr(connections, "_send", send_and_connect)
    assert backend.release(grant)

    freed_everywhere(backend, nodes, grant.claim.key)


def test_a_lock_that_was_healed_everywhere_is_released_by_the_process_it_was_handed_to(
    backend, nodes
):
    grant = held_everywhere(backend, nodes)
    for client in nodes.clients:
        client.flushall()
        assert backend.extend(grant, 30)
        until(lambda: len(nodes.holding(grant.claim.key)) == 5)
    other = quorum_at(nodes.urls)

    released = other.release(Grant(grant.claim, grant.fence, session=grant.session))

    assert released is True
    freed_everywhere(other, nodes, grant.claim.key)
    other.close()


def test_connections_of_a_burst_are_closed_with_a_later_request(backend, monkeypatch):
    quorum = backend._quorum
    for connections in [quorum._take() for _ in range(4)]:
        quorum._idle.append(connections)
    monkeypatch.setattr(connecting, "IDLE_SECONDS", 0.0)

    backend.ping()

    assert len(quorum._idle) == 1


@pytest.fixture
def full(nodes):
    """A call that fills the memory of so many nodes."""

    def fill(many):
        for client in nodes.clients[:many]:
            client.config_set("maxmemory", 1)

    yield fill
    for client in nodes.clients:
        client.config_set("maxmemory", 0)


@pytest.mark.parametrize("many", [2, 5])
def test_full_nodes_go_on_with_what_they_have(backend, nodes, full, many):
    grant = held_everywhere(backend, nodes)
    waiter = Waiter(backend, "a")
    assert not waiter.ask()
    full(many)

    for _ in range(3):
        if many == 5:
            with pytest.raises(BackendError, match="OOM"):
                backend.acquire(a_claim("new"), 0)
        else:
            assert backend.acquire(a_claim("new", owner="0" * 32), 0)
        assert backend.extend(grant, 60)
        assert not waiter.ask()
        assert len(nodes.holding(grant.claim.key)) == 5
    assert backend.release(grant)
    until(lambda: not nodes.holding(grant.claim.key))
    assert waiter.event.wait(5)
    granted = waiter.ask()
    assert granted and backend.extend(granted, 60)
    assert backend.clear(granted.claim.key) == 1
    assert not nodes.holding(granted.claim.key)


def test_an_extension_that_no_majority_answers_is_unknown(backend, nodes):
    grant = held_everywhere(backend, nodes)
    for client in nodes.clients[:2]:
        client.flushall()
    nodes.servers[4].pause()

    with patch.object(backend._quorum, "_timeout", 1.0), pytest.raises(BackendError):
        backend.extend(grant, 30)


def test_many_holds_are_extended_in_few_round_trips(backend):
    work = [(wait_for(backend, 5, f"n{number}"), 60.0) for number in range(100)]
    stranger = (Grant(a_claim("n0")), 60.0)

    assert backend.extend_many([*work, stranger]) == [True] * 100 + [False]
    assert all(backend.release(grant) for grant, _ in work)


def test_names_that_are_free_again_are_forgotten(backend, nodes, monkeypatch):
    monkeypatch.setattr(redlock, "PARTS", 1)
    held = wait_for(backend, 5, "held")
    for number in range(1500):
        backend.release(backend.acquire(a_claim(f"once-{number}"), 0))

    # All of them are dropped each 128th time or so.
    assert max(client.hlen("distlock:redlock:part:0") for client in nodes.clients) < 1300
    assert [holding.name for holding in backend.holders(held.claim.key)] == ["held"]
    assert backend.release(held) is True


def test_holders_are_what_a_majority_says(backend, nodes):
    grant = held_everywhere(backend, nodes)
    orphan = a_claim("orphan")
    lock = f"distlock:redlock:{orphan.key}"
    part = f"distlock:redlock:part:{int(orphan.key[:4], 16) % 256}"
    for client in nodes.clients[:2]:
        client.set(lock, "stranger 5 1 {} orphan", px=60_000)
        client.hset(part, lock, "")

    [held] = backend.holders()

    assert (held.name, held.fence, held.holder["host"]) == ("a", grant.fence, "elsewhere")
    assert 0 < held.expires_in <= 30 and 0 <= held.held_for < 30
    for client in nodes.clients[:2]:
        client.flushall()
    assert [one.fence for one in backend.holders(grant.claim.key)] == [grant.fence]
    assert backend.clear(grant.claim.key, "1") == 0
    assert backend.clear(grant.claim.key, held.version) == 1
    assert backend.extend(grant, 30) is False


def test_a_holder_is_shown_with_the_fence_of_the_majority(backend, nodes):
    """Not with one that a node gave which was asked late."""
    grant = held_everywhere(backend, nodes)
    lock = f"distlock:redlock:{grant.claim.key}"
    for later, client in enumerate(nodes.clients[:4]):
        token, _, rest = client.get(lock).split(" ", 2)
        client.set(lock, f"{token} {grant.fence + 3 - later} {rest}", px=30_000)
    nodes.clients[4].flushall()

    [held] = backend.holders(grant.claim.key)

    assert held.fence == grant.fence


def test_each_lock_of_an_owner_is_listed(backend):
    """Also if the index has both in parts that are read together."""
    owner = a_claim("a").owner
    grants = [wait_for(backend, 5, f"n{number}", owner=owner) for number in range(40)]

    listed = [holding.name for holding in backend.holders()]

    assert sorted(listed) == sorted(f"n{number}" for number in range(40))
    assert all(backend.release(grant) for grant in grants)


# Python 3.14: an interrupt as a generator is closed, where Python itself handles no signal.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_node_is_reached_although_connecting_was_interrupted(nodes):
    wanted = a_claim("a")
    for at in range(-2, 10**6):
        backend = quorum_at(nodes.urls)
        done = interrupted_at(at, redlock_quorum, backend.acquire, wanted, 0)
        until(lambda backend=backend: backend.extend(backend.acquire(wanted, 0), 30))
        until(lambda backend=backend: not any(node.opening for node in backend._quorum.nodes))
        backend.close()
        if done and at > 0:
            break

    assert at > 20


def test_a_release_wakes_the_waiters_in_order_of_arrival(backend, nodes):
    grant = held_everywhere(backend, nodes)
    waiters = [Waiter(backend, "a") for _ in range(5)]
    for waiter in waiters:
        assert isinstance(waiter.ask(), Busy)
    for waiter in reversed(waiters):
        waiter.ask()  # asking again is not arriving again

    for waiter in waiters:
        assert backend.release(grant) is True
        assert waiter.event.wait(5), "not woken"
        assert set(waiter.woken) == {None}  # twice, if a majority of the nodes was late
        others = [other for other in waiters if other is not waiter and not other.event.is_set()]
        assert not backend.acquire(a_claim("a"), 0), "nobody overtakes"
        assert not any(other.ask() for other in others)
        grant = waiter.ask()
        assert grant


def test_a_stable_owner_who_waits_for_two_locks_is_called_to_the_one_that_came_free(backend):
    first, other = wait_for(backend, 5, "a"), wait_for(backend, 5, "b")
    owner = a_claim("of both").owner
    waits_for_a, waits_for_b = Waiter(backend, "a", owner=owner), Waiter(backend, "b", owner=owner)
    also_for_a = Waiter(backend, "a", owner=owner)
    for waiter in waits_for_a, waits_for_b, also_for_a:
        waiter.ask()

    backend.release(first)

    assert waits_for_a.event.wait(5) and also_for_a.event.wait(5), "not woken"
    assert waits_for_a.ask() and waits_for_b.woken == []
    backend.release(other)
    assert waits_for_b.event.wait(5), "not woken"
    assert waits_for_b.ask()


def test_a_signal_handler_may_lock_and_release_in_the_middle_of_waiting(backend):
    Waiter(backend, "a").ask()  # from then on it listens

    def steps():
        first, other = backend.acquire(a_claim("b"), 0), backend.acquire(a_claim("c"), 0)
        waiter, quitter = Waiter(backend, "b"), Waiter(backend, "b")

        def handler():
            quitter.ask()
            backend.acquire(quitter.claim, 0)
            backend.release(other)

        yield waiter.ask, handler

        backend.release(first)
        assert waiter.event.wait(5), "not woken"
        assert backend.release(waiter.ask()) is True

    interrupted_everywhere([redlock_listener, redis_listener], steps)  # the second: what both share


def test_a_waiter_needs_no_poll(backend, monkeypatch):
    monkeypatch.setattr(RedlockBackend, "poll_max", 60.0)
    grant = wait_for(backend, 5, "a")
    got = []

    thread = threading.Thread(target=lambda: got.append(wait_for(backend, 50, "a")))
    thread.start()
    until(lambda: next(iter(backend.holders(grant.claim.key))).waiters == 1)
    backend.release(grant)
    thread.join(30)

    assert got and got[0].fence > grant.fence


def test_a_waiter_whose_process_died_is_passed_over(nodes, backend, processes):
    grant = wait_for(backend, 5, "a")
    env = {"DISTLOCK_TEST_REDLOCK_URL": ",".join(nodes.urls)}
    dead = processes.start("tests.redlock_workers:wait_to_die", name="a", env=env)
    assert dead.read() == "waits"
    until(lambda: next(iter(backend.holders(grant.claim.key))).waiters == 1)
    living = Waiter(backend, "a")
    living.ask()

    dead.kill()
    until(lambda: all(client.pubsub_channels("*wake*") for client in nodes.clients))
    until(lambda: max(len(client.pubsub_channels("*wake*")) for client in nodes.clients) == 1)
    backend.release(grant)

    assert living.event.wait(5), "not woken"
    assert living.ask()


def test_one_who_gives_up_lets_the_next_one_in(backend):
    grant = wait_for(backend, 5, "a")
    quitter, next_one = Waiter(backend, "a"), Waiter(backend, "a")
    quitter.ask()
    next_one.ask()

    backend.release(grant)
    assert quitter.event.wait(5)
    backend.release(Grant(quitter.claim))

    assert next_one.event.wait(5), "not woken"
    assert next_one.ask()


def test_a_backend_may_be_closed_while_threads_wait(backend):
    grant = backend.acquire(a_claim("a"), 0)

    with ExitStack() as stack:
        for _ in range(3):
            work = running(lambda: backend.release(wait_for(backend, 30, "a")))
            stack.enter_context(work)
        until(lambda: [held.waiters for held in backend.holders()] == [3])
        time.sleep(0.2)  # one of them reads
        backend.close()
        backend.release(grant)


def test_a_thread_that_is_interrupted_while_it_connects_stops_no_other(nodes, backend):
    class Interrupt(BaseException):
        pass

    def interrupt(frame, event, arg):
        if frame.f_code is threading.Thread.start.__code__:
            raise Interrupt

    def interrupted():
        sys.settrace(interrupt)
        with suppress(Interrupt):
            backend.acquire(a_claim("of the interrupted"), 0)
        sys.settrace(None)

    with running(interrupted):
        pass
    backend.release(wait_for(backend, 5, "a"))
    until(lambda: not any(node.opening for node in backend._quorum.nodes))


def test_connecting_enters_no_condition(nodes, backend):
    class Condition(threading.Condition):  # stays locked if a handler raises as it is entered
        def __enter__(self):
            raise AssertionError

    backend._quorum._opened = Condition(backend._quorum._opened._lock)

    assert backend.release(wait_for(backend, 5, "a"))


def test_a_node_that_closes_every_subscription_is_not_asked_for_more_at_once(backend, nodes):
    grant, closed = backend.acquire(a_claim("a"), 0), 0

    with running(lambda: backend.release(wait_for(backend, 30, "a"))):
        until(lambda: nodes.clients[0].client_list(_type="pubsub"))
        end = time.monotonic() + 1
        while time.monotonic() < end:
            closed += nodes.clients[0].client_kill_filter(_type="pubsub")
            time.sleep(0.001)
        backend.release(grant)

    assert 1 <= closed < 6


def test_waiters_are_served_while_two_nodes_are_frozen(backend, nodes):
    grant = held_everywhere(backend, nodes)
    waiter = Waiter(backend, "a")
    waiter.ask()
    for server in nodes.servers[3:]:
        server.pause()

    backend.release(grant)

    assert waiter.event.wait(5), "not woken"
    assert waiter.ask()


def test_a_forked_child_has_connections_of_its_own(nodes, backend):
    grant = wait_for(backend, 5, "a")
    Waiter(backend, "a").ask()  # the listening thread runs
    read, write = os.pipe()

    pid = os.fork()
    if pid == 0:
        try:
            backend.after_fork()
            own = backend.acquire(a_claim("of the child"), 0)
            fine = not backend.acquire(a_claim("a"), 0) and backend.release(own)
            os.write(write, b"y" if fine else b"n")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)

    assert os.read(read, 1) == b"y"
    os.close(read)
    os.close(write)
    assert backend.extend(grant, 30) is True
    assert backend.release(grant) is True


def test_checks_tell_of_forgetful_nodes_and_of_one_named_twice(nodes):
    urls = [*nodes.urls[:2], nodes.urls[0].replace("127.0.0.1", "127.1")]
    with caches_of(urls) as aliases:
        backend = RedlockBackend(alias="quorum", location=aliases)
        assert backend.check() == []
        found = {message.id: message for message in backend.check(ask=True)}
        nodes.servers[1].kill()
        down = {message.id for message in backend.check(ask=True)}

    assert set(found) == {"distlock_app.E014", "distlock_app.W015"}
    assert "own0" in found["distlock_app.E014"].msg and "own2" in found["distlock_app.E014"].msg
    assert down == {*found, "distlock_app.E013"}


def test_no_error_shows_a_password(private_server):
    servers = [
        private_server(RedisServer, config={"requirepass": "correct-horse"}) for _ in range(3)
    ]
    backend = quorum_at([server.url.replace("correct", "wr0ng") for server in servers])

    with pytest.raises(BackendError, match="rejected the credentials") as refused:
        backend.ping()
    for server in servers:
        server.close()

    assert "horse" not in repr(refused.value) and "redis://" not in str(refused.value)
