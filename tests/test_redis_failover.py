"""Failing masters: what a promoted replica knows of locks, and how long there are none."""

from __future__ import annotations

import itertools
import time
from functools import partial
from types import SimpleNamespace

import pytest
import redis
from redis.sentinel import MasterNotFoundError, Sentinel

from distlock_app.backends.redis import RedisBackend
from distlock_app.backends.redis.alias import _master
from distlock_app.backends.redis.pool import MASTER_SECONDS, SENTINELS_AWAY_SECONDS
from distlock_app.errors import BackendError
from distlock_app.testing.claims import a_claim
from tests.proxy import proxy_to
from tests.redis_workers import Waiter, backend_at, client_of, left_waiting
from tests.servers import RedisCluster, RedisServer, SentinelServer

pytest_plugins = ["tests.redis_fixtures"]

QUICK = {"repl-diskless-sync-delay": "0"}
OPTIONS = {"SOCKET_TIMEOUT": 1, "SOCKET_CONNECT_TIMEOUT": 1}
BY_SENTINEL = {
    **OPTIONS,
    "CLIENT_CLASS": "django_redis.client.SentinelClient",
    "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
}


def eventually(condition, within=30.0):
    """Return the first true answer; errors of servers are none."""
    give_up = time.monotonic() + within
    while True:
        try:
            if answer := condition():
                return answer
        except (BackendError, redis.RedisError):
            pass
        assert time.monotonic() < give_up
        time.sleep(0.02)


def in_step(client, replicas=1):
    """Whether the replicas have all that was written until now."""
    client.set("in step", 1)  # WAIT asks for what its own client wrote
    return client.wait(replicas, 1000) >= replicas


@pytest.fixture
def pair(private_server):
    """A master, its replica, and the path between them, which may be made a black hole."""
    master = private_server(RedisServer, config=QUICK)
    with proxy_to(master.port) as path:
        replica = private_server(RedisServer, config={"replicaof": f"127.0.0.1 {path.port}"})
        client = client_of(master.url)

        def mend():
            path.silent = False
            path.cut()
            eventually(lambda: in_step(client))

        def lag():
            path.silent = True

        mend()
        yield SimpleNamespace(master=master, replica=replica, lag=lag, mend=mend)
        client.close()
    for server in (master, replica):
        server.close()


@pytest.fixture
def careful(pair):
    """A backend whose locks have to be on the replica."""
    backend = backend_at(pair.master.url, replicas=1, replicas_timeout=0.2)
    yield backend
    backend.close()


def test_an_alias_that_leads_to_a_replica_is_told(pair):
    backend = backend_at(pair.replica.url)

    assert [message.id for message in backend.check(ask=True)] == ["distlock_app.E013"]
    backend.close()


def test_a_lock_counts_only_when_the_replica_has_it(pair, careful):
    first, wanted = a_claim("held"), a_claim("wanted")
    held = eventually(lambda: careful.acquire(first, 0))

    pair.lag()
    for _ in range(2):
        with pytest.raises(BackendError, match="0 of 1 replicas"):
            careful.acquire(wanted, 0)
        # A new connection wrote nothing yet: that it sees the lock is no promise of a replica.
        careful._pool.close()
    with pytest.raises(BackendError, match="0 of 1 replicas"):
        careful.extend(held, 60)
    [unknown] = careful.extend_many([(held, 60)])
    assert isinstance(unknown, BackendError)
    assert not careful.acquire(a_claim("held"), 0)  # busy is busy without a replica
    pair.mend()

    assert eventually(lambda: careful.acquire(wanted, 0))
    assert eventually(lambda: careful.extend(held, 60)) and careful.release(held)


@pytest.mark.parametrize("shared", [False, True])
def test_a_lock_that_was_handed_over_counts_only_then_too(pair, careful, shared):
    owner = a_claim("a")
    first = eventually(lambda: careful.acquire(owner, 0))
    waiter = Waiter(careful, "a", shared=shared)
    assert not waiter.ask()

    pair.lag()
    careful.release(first)
    assert waiter.event.wait(30) and waiter.woken == [None]
    for _ in range(2):
        with pytest.raises(BackendError, match="0 of 1 replicas"):
            waiter.ask()
        careful._pool.close()
    pair.mend()

    grant = eventually(waiter.ask)
    assert grant.fence > first.fence and careful.release(grant)


def test_a_task_whose_loop_was_closed_takes_no_lock_with_it(careful):
    wanted = a_claim("a")  # the same again: one that the replicas were late to confirm is held
    first = eventually(lambda: careful.acquire(wanted, 0))
    with left_waiting(careful, "a"):
        living = Waiter(careful, "a")
        living.ask()
        careful.release(first)

        # The message says that the replicas were late; a waiter that is silent for 3 s is passed
        # over.
        assert eventually(lambda: living.woken or living.ask(), within=20)  # less than a ttl
        assert living.woken in ([], [None])
        assert eventually(living.ask)


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_promoted_replica_knows_every_lock_if_it_was_asked(pair, replicas):
    backend = backend_at(pair.master.url, replicas=replicas, replicas_timeout=0.2)
    early = a_claim("early")
    assert eventually(lambda: backend.acquire(early, 0))
    eventually(lambda: in_step(client_of(pair.master.url)))

    pair.lag()
    granted = [early]
    for wanted in (a_claim("late"), a_claim("later")):
        try:
            backend.acquire(wanted, 0)
        except BackendError:
            continue
        granted.append(wanted)
    pair.master.kill()
    client_of(pair.replica.url).replicaof("NO", "ONE")  # as a Sentinel does

    after = backend_at(pair.replica.url)
    twice = [one.name for one in granted if after.acquire(a_claim(one.name), 0)]
    # What the option is for: without it, locks that their holders trust are given away.
    assert twice == ([] if replicas else ["late", "later"])
    for one in (backend, after):
        one.close()


def test_missing_replicas_are_warned_of(pair, careful):
    asks_for_two = backend_at(pair.master.url, replicas=2)

    assert careful.check(ask=True) == []
    [warning] = asks_for_two.check(ask=True)

    assert warning.id == "distlock_app.W016" and "has 1 replicas" in warning.msg
    asks_for_two.close()


def test_a_waiter_listens_at_the_server_to_which_its_name_moved(pair):
    """As a service does that points its name to the replica and makes it the master."""
    with proxy_to(pair.master.port) as name:
        backend = backend_at(f"redis://127.0.0.1:{name.port}")
        first = backend.acquire(a_claim("a"), 0)
        waiter = Waiter(backend, "a")
        assert not waiter.ask()
        old, new = client_of(pair.master.url), client_of(pair.replica.url)
        eventually(lambda: in_step(old))

        name.lead_to(pair.replica.port)
        new.replicaof("NO", "ONE")
        old.replicaof("127.0.0.1", pair.replica.port)
        eventually(lambda: backend.extend(first, 30))  # refused once, or until the old one knows

        assert waiter.event.wait(10)
        waiter.event.clear()
        assert not waiter.ask()  # it asks where it is subscribed now
        assert backend.release(first) is True
        assert backend.release(waiter.granted()) is True
        for one in (backend, old, new):
            one.close()


def overlaps(turns):
    """Return the pairs of turns during which two holders trusted one lock."""
    turns = sorted(turns)
    return [(a, b) for a, b in itertools.combinations(turns, 2) if b[0] < a[1] and a[0] < b[1]]


def through_failure(processes, tmp_path, fail, **arguments):
    """Let workers take turns while `fail` is called; return what they tell, and the gap."""
    stop = tmp_path / "stop"
    workers = processes.start_many(
        "tests.failover_workers:hold_in_turns",
        count=4,
        name="busy",
        seconds=0.05,
        stop=str(stop),
        **arguments,
    )
    for worker in workers * 4:
        worker.read()
    fail()
    failed = time.time() * 1e6
    for worker in workers:  # a fence is the time of its grant
        give_up = time.monotonic() + 60
        while worker.read(within=60) < failed:
            assert time.monotonic() < give_up
    stop.touch()
    results = [worker.result() for worker in workers]

    turns = sorted(turn for result in results for turn in result["turns"])
    gap = max(b[0] - a[1] for a, b in itertools.pairwise(turns))
    longest = max(result["longest"] for result in results)
    errors = [result["errors"] for result in results]
    print(
        f"{len(turns)} turns, {len(overlaps(turns))} overlaps, {sum(t[3] for t in turns)} told of "
        f"a loss, longest gap {gap:.1f} s, longest call {longest:.1f} s, errors {errors}"
    )
    fences = [turn[2] for turn in turns]
    assert fences == sorted(set(fences))
    assert longest < 30
    return turns, gap


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "how"), [(0, "pause"), (1, "kill")])
def test_sentinels_make_a_new_master_under_load(private_server, processes, tmp_path, replicas, how):
    master = private_server(RedisServer, config=QUICK)
    config = {**QUICK, "replicaof": f"127.0.0.1 {master.port}"}
    others = [private_server(RedisServer, config=config) for _ in range(2)]
    eventually(lambda: in_step(client_of(master.url), 2))
    sentinel = private_server(SentinelServer, master)
    eventually(lambda: len(client_of(sentinel.url).sentinel_slaves("locks")) == 2)
    cache = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": "redis://locks/0",
        "OPTIONS": {**BY_SENTINEL, "SENTINELS": [("127.0.0.1", sentinel.port)]},
    }
    params = {
        "BACKEND": "distlock_app.backends.redis.RedisBackend",
        "LOCATION": "own",
        "OPTIONS": {"REPLICAS": replicas, "REPLICAS_TIMEOUT": 0.5},
    }

    turns, gap = through_failure(
        processes, tmp_path, getattr(master, how), caches={"own": cache}, params=params
    )

    if replicas:
        assert overlaps(turns) == []
    for one, other in overlaps(turns):  # the first holder was told by its next renewal
        assert min(one[1], other[1]) - max(one[0], other[0]) < 1.5
    assert gap < 30  # a second to take it for dead, two or three to promote and connect
    for server in (sentinel, *others, master):
        server.close()


@pytest.mark.slow
def test_an_old_master_that_lives_is_left_before_its_sentinel_tells_it(private_server):
    master = private_server(RedisServer, config=QUICK)
    follow = {**QUICK, "replicaof": f"127.0.0.1 {master.port}"}
    replica = private_server(RedisServer, config=follow)
    sentinel = private_server(SentinelServer, master)
    names = client_of(sentinel.url)
    eventually(lambda: len(names.sentinel_slaves("locks")) == 1)
    backend = backend_at("redis://locks/0", **BY_SENTINEL, SENTINELS=[("127.0.0.1", sentinel.port)])
    grant = backend.acquire(a_claim("before"), 0)
    eventually(lambda: in_step(client_of(master.url)))

    eventually(lambda: names.sentinel_failover("locks"))
    eventually(lambda: names.sentinel_get_master_addr_by_name("locks")[1] == replica.port)
    time.sleep(MASTER_SECONDS)  # so often it asks; the connection that it has works all the time

    assert backend.acquire(a_claim("after"), 0)
    assert client_of(replica.url).exists(backend._lock(a_claim("after").key))
    assert client_of(master.url).info("replication")["role"] == "master"
    assert backend.extend(grant, 60)
    sentinel.close()
    backend._pool._ask_again = 0.0
    assert backend.release(grant)
    backend.close()
    for server in (replica, master):
        server.close()


def test_the_sentinels_are_not_asked_at_each_request(private_server):
    master = private_server(RedisServer)
    sentinel = private_server(SentinelServer, master)
    backend = backend_at("redis://locks/0", **BY_SENTINEL, SENTINELS=[("127.0.0.1", sentinel.port)])
    sentinels = backend._pool._recipe.sentinel_manager
    asked, discover = [], sentinels.discover_master
    sentinels.discover_master = lambda service: asked.append(service) or discover(service)

    for _ in range(50):
        assert backend.release(backend.acquire(a_claim("a"), 0))

    assert len(asked) < 50  # two as it connects, and one a second
    backend.close()
    for server in (sentinel, master):
        server.close()


def test_a_master_that_lost_its_place_while_it_was_connected_to_is_left(private_server):
    old, new = private_server(RedisServer), private_server(RedisServer)
    sentinel = private_server(SentinelServer, new)
    backend = backend_at("redis://locks/0", **BY_SENTINEL, SENTINELS=[("127.0.0.1", sentinel.port)])
    sentinels = backend._pool._recipe.sentinel_manager
    named, discover = [("127.0.0.1", old.port)], sentinels.discover_master
    sentinels.discover_master = lambda service: named.pop() if named else discover(service)

    grant = backend.acquire(a_claim("a"), 0)

    assert not named
    assert client_of(new.url).exists(backend._lock(grant.claim.key))
    sentinels.discover_master = lambda service: ("127.0.0.1", next(ports))
    ports = itertools.cycle([old.port, new.port])
    backend._pool.close()
    with pytest.raises(BackendError):
        backend.release(grant)
    backend.close()
    for server in (sentinel, old, new):
        server.close()


def test_a_server_that_the_sentinels_name_but_do_not_confirm_gets_no_request(private_server):
    master = private_server(RedisServer)
    sentinel = private_server(SentinelServer, master)
    backend = backend_at("redis://locks/0", **BY_SENTINEL, SENTINELS=[("127.0.0.1", sentinel.port)])
    sentinels = backend._pool._recipe.sentinel_manager
    named, discover = [("127.0.0.1", master.port)], sentinels.discover_master

    def in_doubt(service):
        if named:
            return named.pop()
        raise MasterNotFoundError(service)

    sentinels.discover_master = in_doubt
    with pytest.raises(BackendError, match="could not be reached"):
        backend.acquire(a_claim("a"), 0)

    assert client_of(master.url).dbsize() == 0
    sentinels.discover_master = discover
    assert backend.acquire(a_claim("a"), 0)
    backend.close()
    for server in (sentinel, master):
        server.close()


def test_the_address_that_a_project_forces_on_its_master_is_kept(private_server):
    master = private_server(RedisServer)
    sentinel = private_server(SentinelServer, master)
    sentinels = Sentinel([("127.0.0.1", sentinel.port)], force_master_ip="localhost")

    assert _master(sentinels, "locks") == ("localhost", master.port)

    for server in (sentinel, master):
        server.close()


def test_an_old_master_is_left_though_the_sentinels_knew_none_for_a_moment(private_server):
    old, new = private_server(RedisServer), private_server(RedisServer)
    sentinel = private_server(SentinelServer, old)
    names = client_of(sentinel.url)
    backend = backend_at("redis://locks/0", **BY_SENTINEL, SENTINELS=[("127.0.0.1", sentinel.port)])
    backend.acquire(a_claim("before"), 0)

    names.sentinel_remove("locks")
    backend._pool._ask_again = 0.0
    backend.acquire(a_claim("meanwhile"), 0)
    names.sentinel_monitor("locks", "127.0.0.1", new.port, 1)

    wanted = a_claim("after")
    reached = client_of(new.url)
    eventually(
        lambda: backend.acquire(wanted, 0) and reached.exists(backend._lock(wanted.key)),
        within=SENTINELS_AWAY_SECONDS / 2,
    )
    backend.close()
    for server in (sentinel, old, new):
        server.close()


def test_a_waiter_listens_at_the_master_that_the_sentinels_name(private_server):
    old, new = private_server(RedisServer), private_server(RedisServer)
    sentinel = private_server(SentinelServer, old)
    names = client_of(sentinel.url)
    backend = backend_at("redis://locks/0", **BY_SENTINEL, SENTINELS=[("127.0.0.1", sentinel.port)])
    assert backend.acquire(a_claim("a"), 0)
    waiter = Waiter(backend, "a")
    assert not waiter.ask()

    names.sentinel_remove("locks")
    names.sentinel_monitor("locks", "127.0.0.1", new.port, 1)
    first = eventually(lambda: backend.acquire(a_claim("a"), 0))  # the new one knows no lock

    assert waiter.event.wait(10)
    waiter.event.clear()
    assert not waiter.ask()
    assert backend.release(first) is True
    assert backend.release(waiter.granted()) is True
    backend.close()
    for server in (sentinel, old, new):
        server.close()


@pytest.fixture(scope="module")
def six(private_server):
    return private_server(RedisCluster)


@pytest.fixture
def own_cluster(six):
    six.settle()
    yield six
    for node in six.nodes:
        if not node.running:
            node.start()


@pytest.fixture
def clustered(own_cluster):
    urls = [f"{node.url}?socket_timeout=1" for node in own_cluster.nodes]
    backend = RedisBackend(alias="own", cluster=urls, replicas=1)
    yield backend
    for holding in list(backend.holders()):
        backend.clear(holding.key)
    backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ip", "hostname", "unknown-endpoint"])
def test_a_cluster_may_call_its_nodes_by_names_that_it_does_not_know(kind, own_cluster, clustered):
    for node in own_cluster.nodes:  # an older Redis has addresses only
        node.tell(f"CONFIG SET cluster-preferred-endpoint-type {kind}")
    try:
        for name in "abcdef":
            assert clustered.release(eventually(partial(clustered.acquire, a_claim(name), 0)))
    finally:
        for node in own_cluster.nodes:
            node.tell("CONFIG SET cluster-preferred-endpoint-type ip")


@pytest.mark.slow
def test_a_slot_that_moves_takes_its_locks_along(own_cluster, clustered):
    owner = a_claim("moving")
    held = eventually(lambda: clustered.acquire(owner, 0))
    waiter = Waiter(clustered, "moving")
    assert not waiter.ask()
    client = redis.cluster.RedisCluster.from_url(own_cluster.nodes[0].url)
    slot = client.keyslot(clustered._lock(owner.key))
    old = client.get_node_from_key(clustered._lock(owner.key))
    new = next(node for node in client.get_primaries() if node != old)
    source, target = (redis.Redis(port=node.port) for node in (old, new))
    names = [one.execute_command("CLUSTER MYID").decode() for one in (source, target)]

    target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", names[0])
    source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", names[1])
    keys = source.execute_command("CLUSTER GETKEYSINSLOT", slot, 100)
    source.execute_command("MIGRATE", "127.0.0.1", new.port, keys[0], 0, 5000)
    with pytest.raises(BackendError, match="(?i)try ?again|ask"):  # neither side has all the keys
        clustered.extend(held, 60)
    source.execute_command("MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "KEYS", *keys[1:])
    for one in (target, source):
        one.execute_command("CLUSTER SETSLOT", slot, "NODE", names[1])

    assert clustered.extend(held, 60)
    assert [holding.waiters for holding in clustered.holders(owner.key)] == [1]
    assert not waiter.ask()  # now it listens at the new server
    assert clustered.release(held)
    assert waiter.event.wait(30)
    assert clustered.release(eventually(waiter.ask))
    for one in (client, source, target):
        one.close()


@pytest.mark.slow
def test_a_cluster_loses_a_master_and_no_lock_that_its_replica_confirmed(own_cluster, clustered):
    claims = [a_claim(f"n{number}") for number in range(1000)]
    grants = [eventually(lambda one=one: clustered.acquire(one, 0)) for one in claims]
    others = [a_claim(one.name) for one in claims]

    idle = RedisBackend(alias="own", cluster=[node.url for node in own_cluster.nodes])
    idle.ping()

    own_cluster.nodes[0].kill()
    killed = time.monotonic()
    # "Busy" or unknown, never free; and never two keys in different slots.
    for other in others[:30]:
        try:
            assert not clustered.acquire(other, 0)
        except BackendError as error:
            assert "CROSSSLOT" not in str(error).upper()
    # Until the master is back, as a replica, its locks have none to confirm more.
    plain = RedisBackend(alias="own", cluster=[node.url for node in own_cluster.nodes])
    for grant in grants:
        assert eventually(lambda grant=grant: plain.extend(grant, 60))
    print(f"1,000 locks were served again {time.monotonic() - killed:.1f} s after the kill")
    assert {holding.name for holding in plain.holders()} == {one.name for one in claims}
    assert not any(plain.acquire(other, 0) for other in others)
    assert all(plain.release(grant) for grant in grants)
    idle.ping()
    idle.close()

    own_cluster.nodes[0].start()
    own_cluster.settle()
    again = [eventually(lambda other=other: clustered.acquire(other, 0)) for other in others]
    assert all(one.fence > grant.fence for one, grant in zip(again, grants, strict=True))
    plain.close()


@pytest.mark.slow
def test_a_cluster_loses_a_master_under_load(own_cluster, processes, tmp_path):
    urls = [f"{node.url}?socket_timeout=1" for node in own_cluster.nodes]
    params = {
        "BACKEND": "distlock_app.backends.redis.RedisBackend",
        "OPTIONS": {"CLUSTER": urls, "REPLICAS": 0},
    }
    backend = RedisBackend(alias="own", cluster=urls)
    owner = backend._pool.node(backend._lock(a_claim("busy").key))
    port = owner._recipe.connection_kwargs["port"]
    backend.close()
    [master] = [node for node in own_cluster.nodes if node.port == port]

    turns, gap = through_failure(processes, tmp_path, master.kill, caches={}, params=params)

    for one, other in overlaps(turns):
        assert min(one[1], other[1]) - max(one[0], other[0]) < 1.5
    assert gap < 30
