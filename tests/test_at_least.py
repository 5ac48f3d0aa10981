"""Options that a lock and every decorator have alike: `at_least=` and `on_lost=`."""

from __future__ import annotations

import asyncio
import threading

import pytest
from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.db import transaction
from django.http import HttpResponse
from django.test import RequestFactory

from distlock_app import (
    Lock,
    LockLost,
    all_of,
    current_hold,
    locked,
    locked_command,
    locked_view,
)
from distlock_app.backends.redis.scripts import pack
from distlock_app.core.registry import registry
from distlock_app.core.renewal import renewer
from distlock_app.primitives.names import key_of
from distlock_app.primitives.timing import monotonic
from distlock_app.signals import lock_released
from distlock_app.testing import held_elsewhere, lose
from tests import engines
from tests.engines import free, renewed, until

engine = pytest.fixture(engines.install)


def left(backend, name="a"):
    """Return for how long the lock stays taken, in seconds; None if it is free."""
    return next((h.expires_in for h in backend.holders() if h.name == name), None)


def command(**options):
    class Command(BaseCommand):
        requires_system_checks = ()

        def handle(self, **options):
            pass

    return lambda: call_command(locked_command("a", **options)(Command)())


def view(**options):
    view = locked_view("a", **options)(lambda request: HttpResponse())
    return lambda: view(RequestFactory().post("/"))


def function(**options):
    return locked("a", **options)(lambda: None)


def coroutine(**options):
    @locked("a", **options)
    async def work():
        pass

    return lambda: asyncio.run(work())


def block(**options):
    def work():
        with Lock("a", **options):
            pass

    return work


def released(**options):
    return lambda: Lock("a", **options).acquire().release()


USES = pytest.mark.parametrize("use", [block, released, function, coroutine, view, command])


# At least


@USES
def test_a_lock_is_kept_for_at_least_so_long_and_no_longer(engine, use):
    work = use(at_least=5, ttl=30)

    started = monotonic()
    work()

    kept = left(engine)
    assert 5 - (monotonic() - started) <= kept <= 5
    assert Lock("a").try_acquire() is None


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("using", ["default", "redis"])
def test_servers_keep_it_exactly(request, using):
    if using == "redis":
        request.getfixturevalue("redis_url")
    asked_at = monotonic()
    with Lock("exactly", using=using, ttl=60, at_least=1.5) as hold:
        pass

    assert (left(registry[using].backend, "exactly") or 0) <= 1.5
    with Lock("exactly", using=using, wait=50) as after:
        assert monotonic() - asked_at >= 1.5
        assert after.fence > hold.fence


def test_what_took_longer_is_released_at_once(engine):
    with Lock("a", at_least=0.1) as hold:
        until(lambda: hold.keep_until < monotonic())

    assert free(engine)
    assert engine.asked == ["acquire", "release"]


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, GeneratorExit])
def test_work_that_failed_keeps_it(engine, error):
    with pytest.raises(error):
        with Lock("a", at_least=5):
            raise error

    assert 0 < left(engine) <= 5


@pytest.mark.parametrize("after", [False, True])
def test_work_that_was_done_keeps_it_although_its_release_is_interrupted(engine, after):
    engine.fail("end_in", error=TimeoutError(), times=1, after=after)
    with pytest.raises(TimeoutError):
        with Lock("a", at_least=5):
            pass

    assert 0 < left(engine) <= 5


def test_work_that_was_broken_off_does_not(engine):
    with pytest.raises(KeyboardInterrupt):
        with Lock("a", at_least=5):
            raise KeyboardInterrupt
    assert free(engine)

    async def main():
        entered = asyncio.Event()

        async def work():
            async with Lock("a", at_least=5):
                entered.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert free(engine)


def test_a_task_cancelled_as_it_releases_keeps_the_lock_for_its_time(engine):
    async def main():
        hold = await Lock("a", at_least=60).aacquire()
        engine.hang("end_in", after=True)
        task = asyncio.ensure_future(hold.arelease())
        give_up = monotonic() + engines.DEADLINE
        while "end_in" not in engine.asked and monotonic() < give_up:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.go_on()

    asyncio.run(main())
    until(lambda: engine.asked.count("end_in") >= 2)  # also asked for as the loop is closed

    assert Lock("a").locked()
    assert "release" not in engine.asked


def test_a_lock_that_was_not_used_is_not_kept(engine):
    first, second = sorted(["a", "b"], key=key_of)  # in which order a group takes them
    locks = all_of(Lock("a", at_least=5), Lock("b", at_least=5))

    with held_elsewhere(second):
        assert locks.try_acquire() is None
        assert free(engine, first)
        with Lock(first, at_least=5):
            assert locks.try_acquire() is None
        assert 0 < left(engine, first) <= 5

    Lock(first).clear()
    with locks:
        pass
    assert 0 < left(engine) <= 5 and 0 < left(engine, "b") <= 5


@pytest.mark.django_db(transaction=True)
def test_one_that_was_not_used_takes_nothing_from_the_work_that_was_done_before(engine):
    first, second = sorted(["a", "b"], key=key_of)
    with transaction.atomic():
        with Lock(first, at_least=5):
            pass
        with held_elsewhere(second):
            assert all_of(Lock(first), Lock(second)).try_acquire() is None

    assert 0 < left(engine, first) <= 5


@pytest.mark.parametrize("error", [KeyboardInterrupt, None], ids=["broken off", "not used"])
def test_an_inner_one_that_did_no_work_does_not_keep_what_the_outer_holds(engine, error):
    first, second = sorted(["a", "b"], key=key_of)
    inner = Lock(first, at_least=5)
    with Lock(first), held_elsewhere(second):
        if error:
            with pytest.raises(error), inner:
                raise error
        else:
            assert all_of(inner, Lock(second)).try_acquire() is None

    assert free(engine, first)


def test_several_aliases_keep_it_alike(engine):
    with Lock("a", using=("default", "other"), at_least=5):
        pass

    assert all(0 < left(registry[alias].backend) <= 5 for alias in ("default", "other"))


def test_of_several_holds_the_last_one_ends_it_for_all(engine):
    with Lock("a"):
        with Lock("a", at_least=5):
            pass
        with Lock("a", at_least=1):
            pass
        assert left(engine) > 20

    assert 1 < left(engine) <= 5


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_in_a_transaction_it_is_kept_from_its_end(engine, end):
    with transaction.atomic():
        with Lock("a", at_least=5):
            pass
        assert left(engine) > 5
        transaction.set_rollback(end == "rollback")

    until(lambda: left(engine) <= 5)
    assert left(engine) > 0


def test_a_release_whose_request_failed_is_repeated_and_keeps_it_as_long(engine):
    engine.fail("end_in", times=2)

    with Lock("a", at_least=5):
        pass

    until(lambda: engine.asked.count("end_in") == 3)
    until(lambda: left(engine) <= 5)
    assert "release" not in engine.asked


def test_a_renewal_under_way_does_not_keep_it_for_longer(engine):
    renews, renewed_it, ended = (threading.Event() for _ in range(3))
    engine.before["extend"] = lambda: renews.set() or ended.wait(0.5)
    engine.after = {"extend": renewed_it.set, "end_in": ended.set}
    with Lock("a", ttl=600, at_least=5) as hold:
        renewer._put_extend(hold._lease)
        assert renews.wait(engines.DEADLINE)

    assert renewed_it.wait(engines.DEADLINE)
    assert 0 < left(engine) <= 5


def test_a_claim_of_a_named_owner_is_never_shortened(engine):
    with Lock("a", ttl=60, owner="job 7", at_least=5):
        pass

    assert left(engine) > 50


def test_max_hold_caps_it(engine):
    with Lock("a", max_hold=5, at_least=5):
        pass
    assert 0 < left(engine) <= 5


def test_the_release_is_signalled_when_the_hold_ends(engine):
    said = []

    def listen(name, held, **facts):
        if name == "signalled":
            said.append(held < 5)

    lock_released.connect(listen)
    try:
        with Lock("signalled", at_least=5):
            pass
    finally:
        lock_released.disconnect(listen)

    assert said == [True]


def test_a_guarded_write_that_releases_keeps_it_too(redis_url):
    with Lock("guarded", using="redis", at_least=5) as hold:
        hold.guarded_set("distlock-test-guarded", "1", ttl=5, release=True)
        assert hold.released
        [written] = registry["redis"].backend._pool.ask(pack(b"GET", b"distlock-test-guarded"))

    assert written == b"1"
    assert 0 < left(registry["redis"].backend, "guarded") <= 5
    Lock("guarded", using="redis").clear()


def test_wrong_values_are_refused_when_the_lock_is_made(engine):
    for wrong in (-1, 1e9, float("nan")):
        with pytest.raises(ValueError, match="at_least must be"):
            Lock("a", at_least=wrong)
    with pytest.raises(TypeError, match="at_least must be"):
        Lock("a", at_least="5")
    with pytest.raises(ValueError, match="longer than max_hold"):
        Lock("a", at_least=5, max_hold=4)
    with pytest.raises(ValueError, match=r"at_least= is not possible with SessionBackend"):
        locked_view("a", at_least=5, using="session")
    with pytest.raises(TypeError, match="on_lost"):
        locked_command("a", on_lost="print")
    with Lock("a") as hold, pytest.raises(TypeError, match="on_lost"):
        hold.on_lost("print")


# On lost


def test_a_loss_is_told_to_every_hold_of_the_lock(engine):
    told = []

    with pytest.raises(LockLost):
        with Lock("a", on_lost=told.append) as outer:
            with pytest.raises(LockLost):
                with Lock("a", on_lost=told.append) as inner:
                    lose(outer)
                    until(lambda: len(told) == 2)

    assert set(told) == {outer, inner}


@pytest.mark.parametrize("use", ["function", "coroutine", "view", "command"])
def test_decorated_code_is_told_of_a_loss(engine, use):
    told = threading.Event()
    options = {"on_lost": lambda hold: told.set()}

    def work(*args, **kwargs):
        lose(current_hold("a"))
        assert told.wait(engines.DEADLINE)

    with pytest.raises(LockLost):
        if use == "function":
            locked("a", **options)(work)()
        elif use == "view":
            locked_view("a", **options)(work)(RequestFactory().post("/"))
        elif use == "command":

            class Command(BaseCommand):
                requires_system_checks = ()
                handle = work

            call_command(locked_command("a", **options)(Command)())
        else:

            @locked("a", **options)
            async def awork():
                work()

            asyncio.run(awork())


def test_a_lock_that_is_not_lost_tells_nobody(engine):
    told = []

    with Lock("a", ttl=3, on_lost=told.append) as hold:
        renewed(hold)

    assert told == []
