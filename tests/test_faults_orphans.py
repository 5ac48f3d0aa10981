"""No lock is left behind by an acquire that nobody heard of."""

from __future__ import annotations

import asyncio
import random
from time import monotonic, sleep
from urllib.parse import urlsplit

import pytest
from django.conf import settings
from django.db import connection, connections
from django.test import override_settings

from distlock_app import BackendError, Lock, LockBusy, LockLost
from distlock_app.core.registry import registry
from tests.proxy import proxy_to

LONG = 600.0  # seconds; nothing in these tests may come free by expiry


def eventually_free(using, within=5.0):
    """Return what is still held on the alias after `within` seconds."""
    deadline = monotonic() + within
    while (left := list(registry[using].backend.holders())) and monotonic() < deadline:
        sleep(0.02)
    return left


pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "locks"])


@pytest.fixture(autouse=True)
def databases(transactional_db, django_db_blocker):
    """Let the tests use databases that they add themselves; they write only locks."""
    with django_db_blocker.unblock():
        yield


@pytest.fixture(params=["default", "redis"])
def using(request):
    if request.param == "redis":
        request.getfixturevalue("redis_url")
    backend = registry[request.param].backend
    for holding in list(backend.holders()):  # of a test that killed its holder
        backend.clear(holding.key)
    return request.param


@pytest.fixture
def bad_network(using):
    """A proxy in front of the engine's server, and the aliases `bad` through it, `good` past it."""
    if using == "redis":
        url = urlsplit(settings.CACHES["locks"]["LOCATION"])
        caches = {name: dict(settings.CACHES["locks"]) for name in ("good", "bad")}
        with proxy_to(url.port or 6379) as proxy:
            caches["bad"]["LOCATION"] = url._replace(
                netloc=f"{url.netloc.rpartition(':')[0]}:{proxy.port}"
            ).geturl()
            locks = {
                name: {**settings.DISTLOCK["redis"], "LOCATION": name, "OPTIONS": {"PREFIX": "bad"}}
                for name in caches
            }
            with override_settings(CACHES={**settings.CACHES, **caches}, DISTLOCK=locks):
                yield proxy
        return
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no network")
    with proxy_to(int(connection.settings_dict["PORT"])) as proxy:
        behind = {**connections.settings["locks"], "PORT": proxy.port}
        connections.settings["behind"] = behind
        locks = {
            name: {**settings.DISTLOCK["default"], "LOCATION": location}
            for name, location in (("good", "locks"), ("bad", "behind"))
        }
        with override_settings(DISTLOCK=locks):
            yield proxy
        connections["behind"].close()
        del connections["behind"]
        del connections.settings["behind"]


@pytest.mark.slow
def test_lost_answers_leave_no_lock(using, bad_network):
    lost_wanted = 1000 if using == "redis" else 200
    # A database greets in some ten answers before it may be asked anything.
    bad_network.lose = 0.4 if using == "redis" else 0.05
    outcomes = {"held": 0, "unknown": 0}
    deadline = monotonic() + 240
    while bad_network.lost < lost_wanted and monotonic() < deadline:
        name = f"lost-{bad_network.lost}-{outcomes['held']}"
        try:
            held = Lock(name, using="bad", ttl=LONG, wait=0).acquire()
        except BackendError:
            outcomes["unknown"] += 1
            continue
        outcomes["held"] += 1
        held.leave(None)

    bad_network.lose = 0.0
    assert eventually_free("good", within=15) == []
    assert bad_network.lost >= lost_wanted
    assert outcomes["held"] > 0
    assert outcomes["unknown"] > 0


def test_cancelled_tasks_leave_no_lock(using):
    chance = random.Random(2)
    outcomes = {"held": 0, "cancelled": 0}

    async def one(number):
        lock = Lock(f"cancelled-{number % 7}", using=using, ttl=LONG, wait=5)
        task = asyncio.create_task(lock.aacquire())
        await asyncio.sleep(chance.choice([0, 0.002, 0.004, 0.1]))
        task.cancel()
        try:
            held = await task
        except asyncio.CancelledError:
            outcomes["cancelled"] += 1
        else:
            outcomes["held"] += 1
            await held.arelease()

    async def all_of_them():
        for number in range(0, 200, 4):
            await asyncio.gather(*(one(number + i) for i in range(4)))

    asyncio.run(all_of_them())

    assert outcomes["cancelled"] > 20
    assert outcomes["held"] > 0
    assert eventually_free(using) == []


@pytest.mark.slow
def test_200_interrupts_leave_no_lock_that_python_lets_us_release(using, processes):
    ended = processes.run("tests.lock_workers:interrupt_children", count=1, number=200,
                          using=using, ttl=LONG, deadline=400)[0]  # fmt: skip

    left = eventually_free(using, within=2)
    for holding in left:
        registry[using].backend.clear(holding.key)

    # A driver may make an error of its own of a signal that comes in the middle of its work.
    assert ended["interrupted"] >= 194
    # These loops do nothing but take and release: about one in 300 stops at that call.
    assert {holding.name for holding in left} <= set(ended["helpless"])
    assert len(ended["helpless"]) <= 5


def test_a_release_whose_answer_was_lost_can_be_repeated(bad_network):
    held = Lock("release", using="bad", ttl=LONG).acquire(wait=0)
    bad_network.silent = True
    bad_network.cut()
    bad_network.lose, bad_network.silent = 1.0, False
    with pytest.raises(BackendError):
        held.release()
    bad_network.lose = 0.0

    # The first attempt arrived, so the engine may say that the lock is not ours any more.
    try:
        held.release()
    except (LockLost, BackendError):
        pass
    assert list(registry["good"].backend.holders()) == []


def test_a_second_owner_gets_in_only_after_the_lease(bad_network):
    """The client is cut off: its hold is lost, by its own clock, before anybody else has it."""
    held = Lock("cut off", using="bad", ttl=2.0).acquire(wait=0)
    bad_network.silent = True

    with Lock("cut off", using="good", wait=10):
        lost_when_the_other_had_it = held.lost

    assert lost_when_the_other_had_it
    bad_network.silent = False
    bad_network.cut()
    with pytest.raises((LockLost, BackendError)):
        held.release()


def test_a_busy_lock_stays_busy_through_lost_answers(bad_network):
    with Lock("busy", using="good", ttl=LONG):
        bad_network.lose = 0.5
        for _ in range(20):
            with pytest.raises((LockBusy, BackendError)):
                Lock("busy", using="bad", ttl=LONG).acquire(wait=0)
        bad_network.lose = 0.0
