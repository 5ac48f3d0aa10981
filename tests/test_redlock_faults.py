"""Nodes killed, frozen and emptied under load: who had the lock when, by one clock for all."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress

import pytest

from distlock_app.claims import Grant
from distlock_app.errors import BackendError
from distlock_app.testing.claims import a_claim
from tests.engines import running
from tests.redlock_workers import quorum_at

pytest_plugins = ["tests.redis_fixtures"]
pytestmark = pytest.mark.slow

TTL = 1.0


@pytest.fixture
def env(nodes):
    return {"DISTLOCK_TEST_REDLOCK_URL": ",".join(nodes.urls)}


def assert_one_at_a_time(holds, *, at_least):
    """Every hold ended before the next began, and had a smaller fence."""
    holds = sorted(tuple(hold) for hold in holds)
    assert len(holds) >= at_least
    for (_, ended, fence), (began, _, next_fence) in zip(holds, holds[1:], strict=False):
        assert ended <= began, "two owners at once"
        assert fence < next_fence


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_any_two_nodes_may_fail_while_locks_are_held(nodes, env, processes, fault):
    chance = random.Random(1)
    workers = processes.start_many(
        "tests.redlock_workers:work", count=4, env=env, name="load", seconds=7, ttl=TTL
    )
    end = time.monotonic() + 6
    while time.monotonic() < end:
        pair = chance.sample(nodes.servers, 2)
        time.sleep(chance.uniform(0.1, 0.3))
        for server in pair:
            server.kill() if fault == "kill" else server.pause()
        # A node that comes back empty must not come back before the locks that it knew are over.
        time.sleep(TTL + 0.2)
        for server in pair:
            server.start() if fault == "kill" else server.resume()

    holds = [hold for worker in workers for hold in worker.result()]

    assert_one_at_a_time(holds, at_least=10)


def test_any_two_nodes_may_be_emptied_when_all_five_had_granted(nodes, env, processes):
    chance = random.Random(2)
    key = a_claim("emptied").key
    holds = []
    rivals = processes.start_many(
        "tests.redlock_workers:work", count=2, env=env, name="emptied", seconds=8
    )
    for _ in range(5):
        holder = processes.start("tests.redlock_workers:hold_for", env=env, name="emptied")
        assert holder.read() == "holding"
        tokens = [client.get(f"distlock:redlock:{key}") for client in nodes.clients]
        if len({token and token.split()[0] for token in tokens}) == 1 and tokens[0]:
            for at in chance.sample(range(5), 2):
                if chance.random() < 0.5:
                    nodes.clients[at].flushall()
                else:
                    nodes.servers[at].kill()
                    nodes.servers[at].start()
            time.sleep(0.3)  # the rivals try all the while
        holder.tell("let go")
        result = holder.result()
        assert not result["lost"]
        holds.append(result["hold"])

    holds += [hold for rival in rivals for hold in rival.result()]
    assert_one_at_a_time(holds, at_least=10)


@pytest.mark.parametrize("emptied", [3, 5])
def test_when_more_are_emptied_the_fence_still_refuses_the_older_owner(nodes, emptied):
    backend, rival = quorum_at(nodes.urls), quorum_at(nodes.urls)
    written = 0

    for _ in range(50):
        older = backend.acquire(a_claim("a"), 0)
        for client in nodes.clients[:emptied]:
            client.flushall()
        newer = None
        while not newer:
            newer = rival.acquire(a_claim("a"), 0)

        # The store keeps the greatest fence that it saw.
        written = max(written, newer.fence)
        assert older.fence < written, "the older owner could still write"
        assert backend.extend(older, 30) is False
        rival.release(newer)
        backend.release(older)
        for client in nodes.clients:
            client.flushall()
    backend.close()
    rival.close()


def break_pairs(nodes, faults, done):
    """Until done, break two nodes at a time in some way, and write down how."""
    chance = random.Random(3)
    while not done.is_set():
        pair = chance.sample(range(5), 2)
        faults.append(chance.choice(["kill", "freeze", "empty"]))
        for at in pair:
            if faults[-1] == "kill":
                nodes.servers[at].kill()
            elif faults[-1] == "freeze":
                nodes.servers[at].pause()
            else:
                nodes.clients[at].flushall()
        done.wait(chance.uniform(0.1, 0.4))
        for at in pair:
            nodes.servers[at].resume()
            nodes.servers[at].start()


def take_once(backend):
    """Take and release the lock; return the fence, or None when no majority could be asked."""
    wanted = a_claim("a", ttl=2)
    try:
        grant = backend.acquire(wanted, 0)
    except BackendError:  # one pair is just back, and another gone
        grant = None
    with suppress(BackendError):
        backend.release(grant or Grant(wanted))
    return grant.fence if grant else None


def test_fences_grow_over_a_thousand_acquisitions_through_all_of_it(nodes):
    backends = [quorum_at(nodes.urls) for _ in range(2)]
    faults, done = [], threading.Event()
    fences, slowest = [], 0.0

    with running(break_pairs, nodes, faults, done):
        end = time.monotonic() + 60
        while (len(fences) < 1000 or len(faults) < 12) and time.monotonic() < end:
            started = time.monotonic()
            fence = take_once(backends[len(fences) % 2])
            slowest = max(slowest, time.monotonic() - started)
            fences += [fence] if fence else []
            time.sleep(0.001)
        done.set()
    for backend in backends:
        backend.close()

    print(f"{len(fences)} acquisitions, {len(faults)} faults, slowest {slowest * 1e3:.0f} ms")
    assert len(fences) >= 1000 and set(faults) == {"kill", "freeze", "empty"}
    assert all(fence < following for fence, following in zip(fences, fences[1:], strict=False))
