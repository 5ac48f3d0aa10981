"""Latches: on Redis across processes and threads, awaited, killed, and refused."""

from __future__ import annotations

import asyncio
import secrets
import threading
from contextlib import suppress
from time import monotonic, sleep

import pytest
from django.conf import settings
from django.core.exceptions import SynchronousOnlyOperation

from distlock_app import BackendError, Latch
from distlock_app.backends.redis.waiting import Listener
from distlock_app.claims import Grant
from distlock_app.core.registry import registry
from distlock_app.primitives.names import key_of
from distlock_app.testing.claims import a_claim
from tests.engines import until
from tests.redis_workers import backend_at

pytest_plugins = ["tests.redis_fixtures"]


@pytest.fixture
def name(redis_url):
    """A latch of the alias `redis` that no other test uses."""
    return f"latch-{secrets.token_hex(4)}"


def waiters_of(name, server):
    return server.hlen(f"distlock{settings.SUFFIX}:{{0}}:{key_of(name, b'latch')}:w")


def test_all_who_wait_in_processes_and_threads_are_told(processes, name, server):
    workers = processes.start_many(
        "tests.sharing_workers:wait_at_latch", count=2, name=name, parties=2, threads=5
    )
    dead = processes.start("tests.sharing_workers:wait_at_latch", name=name, parties=2, threads=2)
    latch = Latch(name, 2, using="redis", ttl=60)
    until(lambda: waiters_of(name, server) == 12)

    dead.kill()
    assert latch.count_down() == 1
    started = monotonic()
    assert latch.count_down() == 0

    assert [worker.result() for worker in workers] == [[True] * 5] * 2
    assert monotonic() - started < 20
    assert waiters_of(name, server) == 0


def test_waiting_costs_one_message_and_one_request_a_second(own):
    backend, server = own
    rung = threading.Event()
    given = []
    waiter = a_claim("a", latch=True, limit=1, wake=lambda grant: (given.append(grant), rung.set()))
    assert not backend.acquire(waiter, 30)
    server.config_resetstat()

    assert backend.count_down(a_claim("a", latch=True, limit=1)) == 1

    assert rung.wait(10)
    assert isinstance(given[0], Grant)
    assert backend.poll_max == 1
    assert server.info("commandstats")["cmdstat_publish"]["calls"] == 1


def test_a_count_whose_answer_was_lost_is_counted_once(proxy, own_redis):
    backend = backend_at(proxy.url, SOCKET_TIMEOUT=2)
    one = a_claim("a", latch=True, limit=3)
    backend.count_down(a_claim("a", latch=True, limit=3))

    for how in ("close", "silent"):
        proxy.swallow = how
        counted = None
        while counted is None:
            with suppress(BackendError):
                counted = backend.count_down(one)

    assert counted == backend.counted(one.key) == 2
    backend.close()


def test_who_gives_up_waiting_leaves_nothing(name, server):
    latch = Latch(name, 1, using="redis", ttl=60)

    assert latch.wait(0.05) is False

    assert waiters_of(name, server) == 0
    assert latch.left() == 1
    assert list(registry["redis"].backend.holders(key_of(name, b"latch"))) == []


def test_the_keys_of_a_latch_expire(name, server):
    latch = Latch(name, 2, using="redis", ttl=20)
    latch.count_down()
    thread = threading.Thread(target=latch.wait, args=(60,))
    thread.start()
    until(lambda: waiters_of(name, server) == 1)

    lasting = [server.pttl(key) for key in server.scan_iter(f"*{key_of(name, b'latch')}*")]
    latch.count_down()
    thread.join(20)

    assert len(lasting) == 2 and all(0 < left <= 20_000 for left in lasting)


@pytest.mark.parametrize("using", ["locmem", "redis"])
def test_tasks_wait_without_a_thread_each(name, using):
    async def work():
        latch = Latch(name, 2, using=using, ttl=60)
        before = threading.active_count()
        tasks = [asyncio.create_task(latch.await_(30)) for _ in range(200)]
        assert await latch.await_(0.05) is False
        assert threading.active_count() < before + 50
        left = [await latch.acount_down(by="a"), await latch.aleft(), await latch.acount_down()]
        return left, await asyncio.gather(*tasks)

    left, told = asyncio.run(work())

    assert left == [1, 1, 0]
    assert told == [True] * 200


def test_a_cancelled_task_leaves_nothing(name, server):
    async def work():
        waiting = asyncio.create_task(Latch(name, 1, using="redis").await_(30))
        while not waiters_of(name, server):
            await asyncio.sleep(0.01)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting

    asyncio.run(work())

    until(lambda: waiters_of(name, server) == 0, within=8)  # it would expire after ten


def test_waiting_goes_on_without_any_message(name, monkeypatch):
    backend = registry["redis"].backend
    monkeypatch.setattr(Listener, "ensure_subscribed", lambda self: False)
    monkeypatch.setattr(backend, "poll_max", 0.05)
    latch = Latch(name, 1, using="redis", ttl=60)
    told = []
    thread = threading.Thread(target=lambda: told.append(latch.wait(30)))
    thread.start()
    sleep(0.1)

    latch.count_down()
    thread.join(30)

    assert told == [True]


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True])
def test_a_count_is_a_whole_number_from_one(count):
    with pytest.raises(ValueError, match="count must be"):
        Latch("a", count, using="locmem")


def test_who_names_no_time_waits_as_long_as_the_alias_says(settings):
    backend = "distlock_app.backends.locmem.LocMemBackend"
    settings.DISTLOCK = {"default": {"BACKEND": backend, "WAIT": 0.01}}
    latch = Latch("never", 1)

    assert latch.wait() is False
    assert asyncio.run(latch.await_()) is False


def test_waiting_does_not_block_an_event_loop():
    async def wait():
        with pytest.raises(SynchronousOnlyOperation, match="await_"):
            Latch("blocks", 1, using="locmem").wait(0)

    asyncio.run(wait())


def test_a_party_is_named_by_a_text(redis_url):
    with pytest.raises(TypeError, match="by must be a text, not 7"):
        Latch("a", 3, using="redis").count_down(by=7)


def test_a_latch_needs_a_name_a_finite_ttl_and_an_engine_that_can():
    with pytest.raises(ValueError, match="must not be empty"):
        Latch("", 1, using="locmem")
    with pytest.raises(ValueError, match="ttl must be"):
        Latch("a", 1, using="locmem", ttl=float("inf"))
    with pytest.raises(ValueError, match="a Latch is not possible with DummyBackend"):
        Latch("a", 1, using="dummy")
