"""all_of() on Redis: one request if all are free, one after the other if not."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, transaction

from distlock_app import BackendError, Lock, LockBusy, LockError, LockTimeout, all_of
from distlock_app.backends.redis import RedisBackend
from distlock_app.backends.redis.inspection import part_of
from distlock_app.core.groups import Holds
from distlock_app.core.registry import registry
from distlock_app.core.releasing import releaser
from distlock_app.primitives.names import key_of
from distlock_app.signals import lock_acquired, lock_failed
from distlock_app.testing.claims import a_claim
from tests.engines import DEADLINE, running, until
from tests.redis_workers import backend_at

pytest_plugins = ["tests.redis_fixtures"]


@pytest.fixture
def names(redis_url):
    made = [f"group-{secrets.token_hex(4)}" for _ in range(4)]
    yield made
    for name in made:
        registry["redis"].backend.clear(key_of(name))


@pytest.fixture
def asked(monkeypatch):
    """What the engine is asked, and how often."""
    calls = []
    for verb in ("acquire", "acquire_all"):
        real = getattr(RedisBackend, verb)

        def noted(self, *args, verb=verb, real=real):
            calls.append(verb)
            return real(self, *args)

        monkeypatch.setattr(RedisBackend, verb, noted)
    return calls


def locks(names, **options):
    return [Lock(name, using="redis", **options) for name in names]


def free(names):
    return not any(list(registry["redis"].backend.holders(key_of(name))) for name in names)


@pytest.mark.django_db(transaction=True)
def test_a_task_inside_of_a_block_gets_no_group_that_ends_before_it(names, asked):
    async def work():
        async with all_of(*locks(names)):
            pass

    with transaction.atomic(), pytest.raises(LockError, match="async_to_sync"):
        async_to_sync(work)()

    assert asked == []


@pytest.mark.django_db(transaction=True)
def test_a_group_of_a_call_of_sync_to_async_is_one_owner(names):
    def call():
        with transaction.atomic():
            all_of(*locks(names)).acquire().release()
            for lock in locks(names, wait=0):
                with lock:
                    pass
        connection.close()  # of the thread

    asyncio.run(sync_to_async(call)())

    assert free(names)


@pytest.mark.django_db(transaction=True)
def test_a_guarded_write_releases_after_the_commit(names):
    key = f"{names[0]}-data"
    with transaction.atomic():
        Lock(names[0], using="redis").acquire().guarded_set(key, "1", ttl=5, release=True)

        assert not free(names[:1])
    assert free(names[:1])


@pytest.mark.parametrize("count", [2, 4])
def test_free_locks_are_taken_by_one_request(names, asked, count):
    names, told = names[:count], []

    def receiver(name, **facts):
        told.append(name)

    lock_acquired.connect(receiver)
    with all_of(*locks(names)) as holds:
        assert [hold.name for hold in holds] == names
        assert len({hold.fence for hold in holds}) == count
        for hold, name in zip(holds, names, strict=True):
            hold.extend()
            assert Lock(name, using="redis").holders()[0].fence == hold.fence

    assert asked == ["acquire_all"]
    assert told == names
    assert free(names)


def test_a_backend_need_not_say_when_it_was_asked(names, asked, monkeypatch):
    real = RedisBackend.acquire_all

    def untimed(self, claims):
        return [replace(grant, asked_at=None) for grant in real(self, claims)]

    monkeypatch.setattr(RedisBackend, "acquire_all", untimed)
    with all_of(*locks(names)):
        pass

    assert "acquire" not in asked


def test_tasks_take_them_by_one_request_too(names, asked):
    told = []

    async def receiver(name, **facts):
        told.append(name)

    async def work():
        async with all_of(*locks(names)) as holds:
            return [hold.name for hold in holds]

    lock_acquired.connect(receiver)
    assert asyncio.run(work()) == names
    assert asked == ["acquire_all"]
    assert told == names
    assert free(names)


@pytest.mark.parametrize("kind", [{}, {"shared": True}, {"limit": 3}], ids=str)
def test_one_that_is_held_or_waited_for_leaves_all_untaken(names, kind):
    backend = registry["redis"].backend
    held = backend.acquire(a_claim(names[2], **kind), 0)

    assert backend.acquire_all([a_claim(name) for name in names]) is None
    with pytest.raises(LockBusy):
        all_of(*locks(names)).acquire(wait=0)
    with pytest.raises(LockTimeout):
        all_of(*locks(names)).acquire(wait=0.1)

    assert backend.release(held)
    assert free(names)
    all_of(*locks(names)).acquire(wait=0).release()


def test_who_has_to_wait_is_woken_and_overtakes_nobody(names):
    backend = registry["redis"].backend
    held = backend.acquire(a_claim(names[1]), 0)
    got = []

    def take():
        with all_of(*locks(names, wait=60)) as holds:
            got.extend(holds)

    with running(take):
        until(lambda: next(iter(backend.holders(held.claim.key))).waiters == 1)
        assert backend.acquire_all([a_claim(name) for name in names[1:]]) is None
        backend.release(held)

    assert [hold.name for hold in got] == names
    assert free(names)


def test_opposite_orders_do_not_deadlock(names):
    counter, errors = [0], []

    def work(mine):
        try:
            for _ in range(25):
                with all_of(*locks(mine, wait=60)):
                    seen = counter[0]
                    threading.Event().wait(0.0005)
                    counter[0] = seen + 1
        except BaseException as error:
            errors.append(error)

    orders = [names, names[::-1], names[1:] + names[:1], names[2:] + names[:2]]
    threads = [threading.Thread(target=work, args=(order,), daemon=True) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert errors == []
    assert counter == [4 * 25]
    assert free(names)


@pytest.mark.django_db(transaction=True)
def test_manual_transaction_management_is_refused(names, asked):
    transaction.set_autocommit(False)
    try:
        with pytest.raises(LockError, match="release="):
            all_of(*locks(names)).acquire()
        all_of(*locks(names, release="now")).acquire().release()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)

    assert asked == ["acquire_all"]
    assert free(names)


def test_what_the_thread_has_already_is_entered_again(names, asked):
    with Lock(names[1], using="redis") as outer, all_of(*locks(names)) as holds:
        assert holds[1].fence == outer.fence
    with all_of(*locks([names[0], names[0]])) as (one, two):
        assert one.fence == two.fence

    assert "acquire_all" not in asked
    assert free(names)


def test_locks_of_several_aliases_are_each_taken_of_their_own(names, asked):
    elsewhere = Lock(names[1], using="locmem")

    with all_of(*locks(names[:1]), elsewhere):
        assert asked == ["acquire"]
        assert elsewhere.locked() and free(names[1:])

    assert free(names) and not elsewhere.locked()


def test_what_a_stable_owner_has_already_ends_no_earlier_for_a_group(backend, server):
    held = a_claim("a", owner="f" * 32, ttl=300)
    backend.acquire(held, 0)

    for ttl, least in (1, 290), (600, 590):
        pair = [a_claim("a", owner="f" * 32, ttl=ttl), a_claim("b", owner="f" * 32, ttl=ttl)]
        assert backend.acquire_all(pair)
        assert next(iter(backend.holders(held.key))).expires_in > least
        listed_until = server.zscore(backend._index(part_of(held.key)), held.key) / 1000
        assert listed_until - time.time() > least


@pytest.mark.parametrize("kind", [{"shared": True}, {"limit": 2}], ids=str)
def test_a_group_of_readers_or_permits_leaves_room_for_others(names, kind):
    with all_of(*locks(names, **kind)):
        for name in names:
            other = registry["redis"].backend.acquire(a_claim(name, **kind), 0)
            assert other and registry["redis"].backend.release(other)


def test_readers_and_permits_are_taken_one_after_the_other(names):
    with all_of(*locks(names, shared=True)), all_of(*locks(names[:1], shared=True)):
        assert not Lock(names[0], using="redis", limit=2).try_acquire()

    assert free(names)


@pytest.mark.parametrize("how", ["silent", "close"])
def test_a_request_whose_answer_was_lost_is_repeated_without_harm(proxy, own_redis, how):
    backend = backend_at(proxy.url, SOCKET_TIMEOUT=2)
    wanted = [a_claim("a"), a_claim("b")]
    backend.release(backend.acquire(a_claim("a"), 0))

    proxy.swallow = how
    grants = None
    while not grants:
        with suppress(BackendError):
            grants = backend.acquire_all(wanted)

    again = backend.acquire_all(wanted)
    assert [grant.fence for grant in again] == [grant.fence for grant in grants]
    assert [backend.release(grant) for grant in grants] == [True, True]
    backend.close()


@pytest.fixture
def answers_are_lost(monkeypatch):
    real = RedisBackend.acquire_all

    def fails(self, claims):
        real(self, claims)
        raise BackendError("the answer was lost")

    monkeypatch.setattr(RedisBackend, "acquire_all", fails)


def test_what_was_granted_to_a_failing_caller_is_given_back(names, answers_are_lost):
    with pytest.raises(BackendError):
        all_of(*locks(names)).acquire(wait=5)

    until(lambda: free(names))


def test_all_is_given_back_also_if_the_task_is_cancelled_meanwhile(names, answers_are_lost):
    async def tells(**facts):
        task.cancel()
        await asyncio.sleep(60)

    async def main():
        nonlocal task
        task = asyncio.create_task(all_of(*locks(names)).aacquire())
        with suppress(asyncio.CancelledError):
            await task

    task = None
    lock_failed.connect(tells)
    try:
        asyncio.run(main())
    finally:
        lock_failed.disconnect(tells)

    until(lambda: free(names), within=10)


def test_a_group_that_is_interrupted_is_given_back_before_the_process_can_end(names, monkeypatch):
    caller, go_on, real = threading.current_thread(), threading.Event(), RedisBackend.release

    def release(self, grant):
        if threading.current_thread() is not caller:  # it would end with the process
            go_on.wait(DEADLINE)
        return real(self, grant)

    def interrupt(**facts):
        raise KeyboardInterrupt

    monkeypatch.setattr(RedisBackend, "release", release)
    lock_acquired.connect(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            all_of(*locks(names)).acquire()
        assert free(names)
    finally:
        lock_acquired.disconnect(interrupt)
        go_on.set()
        releaser.drain()


def test_a_group_of_a_task_that_is_interrupted_before_it_has_its_holds_is_given_back(
    names, monkeypatch
):
    def interrupt(self, **options):
        raise KeyboardInterrupt

    async def main():
        with pytest.raises(KeyboardInterrupt):
            await all_of(*locks(names)).aacquire()
        assert free(names)

    monkeypatch.setattr(Holds, "enter", interrupt)

    asyncio.run(main())
