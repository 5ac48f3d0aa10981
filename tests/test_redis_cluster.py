"""Locks in a Redis Cluster: where their keys are, and what happens when keys or masters move."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from distlock_app.backends.redis import RedisBackend
from distlock_app.backends.redis import cluster as redis_cluster
from distlock_app.testing.claims import a_claim
from tests.engines import interrupted_everywhere
from tests.redis_workers import Waiter, listeners

pytest_plugins = ["tests.redis_fixtures"]
NAMES = 1000


@contextmanager
def locks_at(urls, prefix="distlock", **options):
    backend = RedisBackend(alias="cluster", cluster=urls, prefix=prefix, **options)
    yield backend
    backend.close()


@pytest.fixture
def backend(cluster_urls, prefix):
    with locks_at(cluster_urls, prefix) as backend:
        yield backend
        for holding in list(backend.holders()):
            backend.clear(holding.key)


def one_of_each_master(backend):
    """Return names whose locks are on different servers."""
    names = {}
    for number in range(NAMES):
        name = f"n{number}"
        names.setdefault(backend._pool.node(backend._lock(a_claim(name).key)), name)
    assert len(names) == 3
    return list(names.values())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"location": "locks", "cluster": ["redis://a"]}, "unless OPTIONS has a CLUSTER"),
        ({"cluster": "redis://a"}, "list of URLs"),
        ({"cluster": ["redis://a/1"]}, "only database 0"),
        ({"cluster": ["redis://:s3cret@a", "http://:s3cret@b"]}, "its list of URLs"),
        ({"cluster": ["redis://a:s3cret"]}, "its list of URLs"),
    ],
)
def test_wrong_settings_are_refused(settings, says):
    with pytest.raises(ImproperlyConfigured, match=says) as refused:
        RedisBackend(alias="locks", **settings)

    assert "s3cret" not in str(refused.value)


def test_an_alias_with_the_client_class_of_clusters_will_do(cluster_urls, prefix):
    alias = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": cluster_urls[:2],
        "OPTIONS": {"REDIS_CLIENT_CLASS": "redis.cluster.RedisCluster", "SOCKET_TIMEOUT": 3},
    }
    with override_settings(CACHES={"locks": alias}):
        backend = RedisBackend(alias="redis", location="locks", prefix=prefix)
        assert backend.check() == []

    for name in one_of_each_master(backend):
        grant = backend.acquire(a_claim(name), 0)
        assert grant and not backend.acquire(a_claim(name), 0) and backend.release(grant)
    assert len(backend._pool.nodes()) == 3
    assert backend._pool.nodes()[0]._recipe.connection_kwargs["socket_timeout"] == 3
    backend.close()


def test_a_lock_is_where_other_releases_look_for_it():
    """Processes of two releases run side by side while a new one is rolled out."""
    with locks_at(["redis://a"]) as backend:
        keys = [backend._lock(key).decode() for key in ("03ff" + "f" * 36, "0401" + "0" * 36)]

    assert keys == [f"distlock:{{1023}}:03ff{'f' * 36}", f"distlock:{{1}}:0401{'0' * 36}"]


def test_a_thousand_names_are_spread_over_the_masters_without_crossslot(backend):
    claims = [a_claim(f"n{number}") for number in range(NAMES)]

    grants = [backend.acquire(one, 0) for one in claims]
    extended = backend.extend_many([(grant, 60) for grant in grants])
    held = list(backend.holders())
    released = [backend.release(grant) for grant in grants]

    assert all(grants) and extended == released == [True] * NAMES
    assert sorted(h.name for h in held) == sorted(one.name for one in claims)
    slots = {key_slot(backend._lock(one.key)) for one in claims}
    thirds = [
        sum(slot * 3 // REDIS_CLUSTER_HASH_SLOTS == third for slot in slots) for third in range(3)
    ]
    assert len(slots) > 500 and min(thirds) > 100, thirds
    assert list(backend.holders()) == []


def test_a_signal_handler_may_lock_while_the_map_is_asked_for(backend):
    names = one_of_each_master(backend)

    def steps():
        backend._pool._map = []
        backend._pool._pools.clear()
        grants = []
        yield (
            lambda: grants.append(backend.acquire(a_claim(names[0]), 0)),
            lambda: grants.append(backend.acquire(a_claim(names[1]), 0)),
        )

        assert all(backend.release(grant) for grant in grants)
        assert set(backend._pool._map) <= set(backend._pool._pools.values())

    interrupted_everywhere([redis_cluster], steps, every=7)


def test_renewals_at_one_master_do_not_wait_for_another(backend):
    names = one_of_each_master(backend)

    apart = {backend.server_of(a_claim(name).key) for name in names}

    assert len(apart) == 3
    backend._pool._map = []  # unknown, and not asked for
    assert {backend.server_of(a_claim(name).key) for name in names} == {backend._pool}


def test_requests_follow_their_keys_when_the_map_is_old(backend):
    names = one_of_each_master(backend)
    grants = [backend.acquire(a_claim(name), 0) for name in names]
    masters = backend._pool.nodes()
    others = dict(zip(masters, [*masters[1:], masters[0]], strict=True))

    for verb in (
        lambda: all(backend.extend(grant, 60) for grant in grants),
        lambda: backend.extend_many([(grant, 60) for grant in grants]) == [True] * 3,
        lambda: len(list(backend.holders())) == 3,
        lambda: [backend.release(grant) for grant in grants] == [True] * 3,
    ):
        backend._pool._map = [others[node] for node in backend._pool._map]
        assert verb()
        assert set(backend._pool.nodes()) == set(masters)


def test_a_request_follows_its_keys_when_another_thread_brought_an_older_map(backend, monkeypatch):
    grant = backend.acquire(a_claim("n"), 0)
    masters = backend._pool.nodes()
    right = backend._pool.node(backend._lock(grant.claim.key))
    wrong = next(node for node in masters if node is not right)
    old = [wrong if node is right else node for node in backend._pool._map]
    backend._pool._map = old
    exchange = wrong.exchange

    def meanwhile(*asked):
        if backend._pool._map is old:
            backend._pool._map = list(old)
        return exchange(*asked)

    monkeypatch.setattr(wrong, "exchange", meanwhile)

    assert backend.release(grant)


def test_a_waiter_is_woken_on_each_master(backend):
    for name in one_of_each_master(backend):
        grant = backend.acquire(a_claim(name), 0)
        waiter = Waiter(backend, name)
        assert not waiter.ask()

        # It does not ask again by itself: only a message can bring it the lock.
        backend.release(grant)

        assert backend.release(waiter.granted(within=30))


def test_a_waiter_that_listens_elsewhere_is_passed_over_and_hears_nothing(backend):
    # As after a failover, for a moment: messages go from each node to all others, and replicas
    # have those of their master, but only who listens where the lock is was counted.
    here, elsewhere, _ = one_of_each_master(backend)
    first = backend.acquire(a_claim(here), 0)
    listener = backend._listener(a_claim(elsewhere).key)
    right, waiter = backend._listener, Waiter(backend, here)
    backend._listener = lambda key: listener
    assert not waiter.ask()
    backend._listener = right

    assert backend.release(first)

    second = backend.acquire(a_claim(here), 0)
    assert second
    assert not waiter.event.wait(0.5), waiter.woken
    again = waiter.ask()
    assert not again and backend.release(second) and backend.release(waiter.granted())


def test_a_waiter_that_was_passed_over_because_its_keys_moved_has_its_old_place(backend):
    here, elsewhere, _ = one_of_each_master(backend)
    first = backend.acquire(a_claim(here), 0)
    listener = backend._listener(a_claim(elsewhere).key)
    right, waiters = backend._listener, [Waiter(backend, here) for _ in range(3)]
    backend._listener = lambda key: listener
    assert [bool(waiter.ask()) for waiter in waiters] == [False] * 3
    backend._listener = right
    assert backend.release(first)

    second = waiters[2].ask()  # by chance the first to ask again
    assert second and not waiters[1].ask() and not waiters[0].ask()

    assert backend.release(second) and backend.release(waiters[0].granted())
    assert backend.release(waiters[1].granted())


def test_a_waiter_in_another_process_is_woken_and_a_dead_one_skipped(backend, processes, prefix):
    first = backend.acquire(a_claim("a"), 0)
    workers = processes.start_many(
        "tests.redis_workers:wait_once", count=2, prefix=prefix, name="a", using="cluster"
    )
    assert [worker.read() for worker in workers] == ["waits"] * 2
    workers[0].kill()
    give_up = time.monotonic() + 30
    while listeners(backend, first.claim.key) > 1:
        assert time.monotonic() < give_up
        time.sleep(0.01)

    backend.release(first)

    assert workers[1].result(within=30)["fence"] > first.fence
    assert backend.acquire(a_claim("a"), 0)


def test_a_guarded_write_needs_a_key_in_the_slot_of_its_lock(backend):
    grant = backend.acquire(a_claim("a"), 0)
    with pytest.raises(ValueError, match=r"contain '\{\d+\}'") as refused:
        backend.guarded_set(grant, "stock", 1)
    tag = str(refused.value).split("'")[1]

    with pytest.raises(ValueError, match=re.escape(tag)):
        backend.guarded_script(grant, "return 1", ["stock"], [])

    assert backend.guarded_script(grant, "return #KEYS[1] > 1 and 5", [f"stock{tag}"], [1.5]) == 5
    assert backend.guarded_set(grant, f"{backend._prefix}:stock{tag}", 1, ttl=60, release=True)
    assert not backend.guarded_set(grant, f"{backend._prefix}:stock{tag}", 2, ttl=60)
