"""A lock on several aliases, as a project has it that moves from one backend to another."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.core.management.base import BaseCommand
from django.db import transaction
from django.test import RequestFactory

from distlock_app import (
    BackendError,
    Leader,
    Lock,
    LockBusy,
    LockError,
    LockLost,
    LockTimeout,
    NotHeld,
    all_of,
    assert_locked,
    current_hold,
    locked,
    locked_command,
    locked_view,
)
from distlock_app.core.registry import registry
from distlock_app.testing import held_elsewhere, lose
from tests import engines
from tests.app.models import Counter
from tests.engines import free, running, until

BOTH = ("default", "other")

engine = pytest.fixture(engines.install)


@pytest.fixture
def other(engine):
    return registry["other"].backend


def all_free(*backends):
    return all(free(backend) for backend in backends)


# Moving


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_workers_move_from_the_lock_table_to_redis_one_by_one(redis_url, processes, tmp_path):
    counter = tmp_path / "counter"
    counter.write_text("0")
    done = []

    def start(using):
        worker = processes.start(
            "tests.lock_workers:count_until_told", path=str(counter), name="move", using=using
        )
        assert worker.read() == "counting"
        return worker

    def counted(more):
        end = int(counter.read_text()) + more
        until(lambda: int(counter.read_text()) >= end)

    workers = [start("default") for _ in range(8)]
    counted(20)
    for using in (["default", "redis"], "redis"):
        for _ in range(8):
            workers.append(start(using))
            oldest = workers.pop(0)
            oldest.tell("stop")
            done += oldest.result()
            counted(5)
    for worker in workers:
        worker.tell("stop")
        done += worker.result()

    assert sorted(done) == list(range(1, len(done) + 1))
    assert counter.read_text() == str(len(done))


# Acquiring


@pytest.mark.parametrize("alias", BOTH)
def test_it_excludes_who_has_one_of_the_aliases(engine, other, alias):
    both = Lock("a", using=BOTH)

    with held_elsewhere("a", using=alias):
        for wait, error in ((0, LockBusy), (0.05, LockTimeout)):
            with pytest.raises(error):
                both.acquire(wait=wait)
        assert both.try_acquire() is None
    assert all_free(engine, other)

    with both, running(lambda: pytest.raises(LockBusy, Lock("a", using=alias, wait=0).acquire)):
        pass
    assert all_free(engine, other)


def test_who_waits_for_it_gets_it(engine, other):
    with held_elsewhere("a", using="other"):
        hold = []
        with running(lambda: hold.append(Lock("a", using=BOTH, wait=20).acquire())):
            until(lambda: not free(engine))
            registry["other"].backend.clear(next(iter(other.holders())).key)

    hold[0].release()
    assert all_free(engine, other)


def test_if_one_backend_is_down_nothing_is_taken(engine, other):
    other.fail("acquire")

    with pytest.raises(BackendError):
        Lock("a", using=BOTH).acquire()

    assert engine.asked == ["acquire", "release"]
    until(lambda: all_free(engine, other))


def test_opposite_orders_are_one_order(engine, other):
    def work(*using):
        for _ in range(50):
            with Lock("a", using=using, wait=engines.DEADLINE):
                pass

    with running(work, *BOTH), running(work, *reversed(BOTH)):
        pass

    assert all_free(engine, other)


def test_code_that_names_one_alias_may_take_it_again_inside(engine, other):
    with Lock("a", using=BOTH) as hold:
        for alias in BOTH:
            with Lock("a", using=alias, wait=0) as again:
                assert again.fence in [each.fence for each in hold]

    bare = Lock("a", using=BOTH).acquire()
    for alias in BOTH:
        with pytest.raises(LockBusy):
            Lock("a", using=alias).acquire(wait=0)
    bare.release()


def test_aliases_are_checked_when_the_lock_is_made(engine):
    with pytest.raises(ValueError, match="no alias"):
        Lock("a", using=())
    with pytest.raises(ImproperlyConfigured, match="nowhere"):
        Lock("a", using=("default", "nowhere"))
    with pytest.raises(ValueError, match=r"owner= is not possible .* \(alias 'session'\)"):
        Lock("a", using=("default", "session"), owner="me")
    with pytest.raises(ValueError, match="once for each alias"):
        all_of(Lock("a", using=BOTH))


def test_a_hold_that_is_dropped_says_where_it_was_taken(engine):
    with pytest.warns(ResourceWarning, match="test_several_aliases.py"):
        Lock("a", using=BOTH).acquire()


# The hold


def test_its_hold_is_used_as_that_of_one_alias(engine, other):
    lock = Lock("a", using=BOTH, ttl=30)
    hold = lock.acquire()

    assert (hold.name, hold.lost, hold.released) == ("a", False, False)
    assert hold.fence == max(each.fence for each in hold)
    assert 20 < hold.expires_in <= 30
    hold.check()
    hold.extend(60)
    assert all(50 < each.expires_in <= 60 for each in hold)
    assert [holding.alias for holding in lock.holders()] == list(BOTH)
    assert lock.locked()
    hold.release()
    assert (hold.released, lock.locked()) == (True, False)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_its_release_says_what_that_of_one_alias_does(engine, other, asynchronous):
    hold = Lock("a", using=BOTH).acquire()
    release = async_to_sync(hold.arelease) if asynchronous else hold.release

    other.fail("release", times=1)
    with pytest.raises(BackendError):
        release()
    assert free(engine) and not free(other)
    release()

    assert free(other)
    with pytest.raises(NotHeld):
        release()


def test_a_lock_that_is_lost_on_one_alias_is_lost(engine, other):
    lost = []

    with pytest.raises(LockLost):
        with Lock("a", using=BOTH) as hold:
            hold.on_lost(lost.append)
            lose(hold[1])
            assert hold.lost and hold.expires_in == 0
            with pytest.raises(LockLost):
                hold.check()

    until(lambda: lost == [hold[1]])
    assert all_free(engine, other)


@pytest.mark.django_db(transaction=True)
def test_nothing_is_committed_under_a_lock_that_one_alias_lost(engine, other):
    Counter.objects.create(name="a")

    with pytest.raises(LockLost):
        with Lock("a", using=BOTH, atomic=True) as hold:
            Counter.objects.update(value=1)
            lose(hold[1])
    with Lock("a", using=BOTH, atomic=True):
        Counter.objects.update(name="b")

    assert Counter.objects.values_list("name", "value").get() == ("b", 0)


@pytest.mark.django_db(transaction=True)
def test_inside_of_a_transaction_all_are_released_at_its_end(engine, other):
    with transaction.atomic():
        with Lock("a", using=BOTH):
            pass
        assert not free(engine) and not free(other)

    assert all_free(engine, other)


def test_it_is_handed_over_whole(engine, other):
    text = Lock("a", using=BOTH).acquire().dump(60)
    for alias in BOTH:
        assert Lock("a", using=alias).try_acquire() is None

    hold = Lock.resume(text)
    hold.check()
    hold.release()
    assert all_free(engine, other)


def test_what_is_gone_on_one_alias_is_not_resumed(engine, other):
    text = Lock("a", using=BOTH).acquire().dump()
    Lock("a", using="other").clear()

    with pytest.raises(LockLost):
        Lock.resume(text)

    until(lambda: all_free(engine, other))


def test_a_resume_may_be_repeated_when_one_backend_was_down(engine, other):
    text = Lock("a", using=BOTH).acquire().dump()

    other.fail("end_in", times=1)
    with pytest.raises(BackendError):
        Lock.resume(text)

    Lock.resume(text).release()
    assert all_free(engine, other)


def test_it_can_be_left_taken_for_a_time(engine, other):
    Lock("a", using=BOTH, ttl=30).acquire().leave_for(5)

    held = [*engine.holders(), *other.holders()]
    assert [0 < holding.expires_in <= 5 for holding in held] == [True, True]


def test_none_is_left_for_a_time_if_one_cannot_be(engine):
    with Lock("a", using=("session", "default")) as hold:
        with pytest.raises(LockError, match="end with their session"):
            hold.leave_for(5)

        hold.check()

    assert free(engine)


def test_it_is_cleared_on_all_aliases(engine, other):
    hold = Lock("a", using=BOTH).acquire()

    assert Lock("a", using=BOTH).clear() == 2

    assert all_free(engine, other)
    with suppress(LockLost):
        hold.release()


# Inside of it


def test_code_inside_finds_all_holds(engine):
    with Lock("a", using=BOTH) as hold:
        assert current_hold() == current_hold("a", using=BOTH) == hold
        assert current_hold("a", using="other") is hold[1]
        assert_locked("a", using=BOTH)
        assert_locked("a", using="other")
        with Lock("b") as inner:
            assert current_hold() is inner
            assert current_hold("a", using=BOTH) == hold

    for alias in BOTH:
        with Lock("a", using=alias):
            with pytest.raises(NotHeld):
                assert_locked("a", using=BOTH)
            with pytest.raises(NotHeld):
                current_hold("a", using=BOTH)


@pytest.mark.parametrize("using", [BOTH, BOTH[::-1]])
def test_code_inside_finds_them_in_the_order_of_the_aliases(engine, using):
    with Lock("a", using=using) as hold:
        assert current_hold() == hold
        with Lock("a", using=BOTH), Lock("a", using=using) as again:
            assert current_hold() == again
        assert current_hold() == hold


def test_what_one_alias_has_by_another_with_is_not_found_with_it(engine):
    first, second = BOTH
    with Lock("a", using=first) as outer, Lock("a", using=second) as inner:
        assert current_hold() is inner
        assert current_hold("a", using=BOTH) == (outer, inner)
    with Lock("a", using=BOTH), Lock("a", using=first) as inner:
        assert current_hold() is inner


# In an event loop


def test_coroutines_take_it_as_well(engine, other):
    lock = Lock("a", using=BOTH)

    async def main():
        async with lock as hold:
            await hold.acheck()
            await hold.aextend(40)
            assert await asyncio.create_task(lock.atry_acquire()) is None
        hold = await lock.aacquire()
        hold = await Lock.aresume(await hold.adump())
        await hold.arelease()

    asyncio.run(main())
    assert all_free(engine, other)


# Decorators and commands


def test_functions_are_locked_on_all_aliases(engine, other):
    @locked("f:{number}", using=BOTH, wait=0, on_busy="skip")
    def run(number):
        current_hold().check()
        assert_locked(f"f:{number}", using=BOTH)
        return number

    @locked("a", using=BOTH)
    async def arun():
        assert not free(engine) and not free(other)

    assert run(7) == 7
    asyncio.run(arun())
    with held_elsewhere("f:7", using="other"):
        assert run(7) is None
    with pytest.raises(TypeError, match="one alias"):
        locked("a", using=BOTH, in_transaction=True)


def test_views_are_locked_on_all_aliases(engine, other):
    @locked_view("pay", using=BOTH)
    def pay(request):
        from django.http import HttpResponse

        assert_locked("pay", using=BOTH)
        return HttpResponse("paid")

    request = RequestFactory().post("/")
    assert pay(request).status_code == 200
    with held_elsewhere("pay", using="other"):
        assert pay(request).status_code == 423
    assert all_free(engine, other)


def test_commands_are_locked_on_all_aliases(engine, other):
    @locked_command("settle", using=BOTH, at_least=5)
    class Command(BaseCommand):
        requires_system_checks = ()

        def handle(self, **options):
            assert_locked("settle", using=BOTH)

    call_command(Command())
    held = [*engine.holders(), *other.holders()]
    assert [0 < holding.expires_in <= 5 for holding in held] == [True, True]
    with pytest.raises(CommandError, match="is already running: the lock 'settle' is held"):
        call_command(Command())
    with pytest.raises(ValueError, match="alias 'session'"):
        locked_command(using=("default", "session"), at_least=5)


def test_a_program_runs_under_the_lock_on_all_aliases(engine, other, settings):
    assert_fails = pytest.raises(CommandError)

    with held_elsewhere("a", using="other"), assert_fails as busy:
        call_command(
            "distlock", "run", "a", "--using", "default,other", "--wait", "0", "--", "true"
        )
    assert busy.value.returncode == 75
    assert all_free(engine, other)

    call_command("distlock", "run", "a", "--using", "default,other", "--", "true")
    assert "acquire" in engine.asked and "acquire" in other.asked
    call_command("distlock", "lead", "a", "--using", "default,other", "--", "true")
    assert all_free(engine, other)


def test_a_leader_leads_on_all_aliases(engine, other):
    def work(ended):
        assert leader.is_leader and not free(engine) and not free(other)

    leader = Leader("a", work, using=BOTH)
    leader.run()

    assert all_free(engine, other)


def test_several_aliases_may_decide_who_migrates(engine):
    with held_elsewhere("migrate:default", using="other"):
        with pytest.raises(CommandError, match="is already running"):
            call_command("migrate_locked", "--lock-using=default,other", "--lock-wait=0")
