"""What happens while a backend is down: an error, a 503, or, if settings say so, no lock at all."""

from __future__ import annotations

import asyncio
import threading
from time import sleep

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.http import HttpResponse
from django.test import Client
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from distlock_app import (
    BackendError,
    Lock,
    LockBusy,
    LockError,
    all_of,
    assert_locked,
    current_hold,
    locked_view,
)
from distlock_app.core.registry import registry
from distlock_app.guards.fencing import fence_of
from distlock_app.operations import doctor
from distlock_app.signals import lock_acquired, lock_failed, lock_released
from distlock_app.testing import held_elsewhere
from tests import engines
from tests.engines import free, renewed, running, until

FAKE = "tests.engines.FakeBackend"

engine = pytest.fixture(engines.install)


@pytest.fixture
def opening(settings):
    """The backend of `default`, without which locks are not taken."""
    settings.DISTLOCK = {
        "default": {"BACKEND": FAKE, "ON_DOWN": "open"},
        "other": {"BACKEND": FAKE},
    }
    backend = registry["default"].backend
    yield backend
    backend.go_on()


@pytest.fixture
def heard():
    """What the signals said of the lock `heard`."""
    said = []

    def listen(signal, sender, **facts):
        if facts["name"] == "heard":
            said.append((signal, {key: facts[key] for key in ("error", "opened") if key in facts}))

    signals = (lock_acquired, lock_failed, lock_released)
    for signal in signals:
        signal.connect(listen)
    yield said
    for signal in signals:
        signal.disconnect(listen)


def lines(caplog, event):
    return [r.getMessage() for r in caplog.records if getattr(r, "lock_event", "") == event]


# An error


def test_by_default_nothing_runs_without_its_lock(engine, heard, caplog):
    engine.fail("acquire")

    with pytest.raises(BackendError):
        with Lock("heard"):
            raise AssertionError("not under the lock")
    with pytest.raises(BackendError):
        asyncio.run(Lock("heard").aacquire())

    assert heard == 2 * [(lock_failed, {"error": "the engine is down", "opened": False})]
    assert lines(caplog, "opened") == []


def test_a_program_is_not_started_and_the_exit_code_says_so(engine):
    engine.fail("acquire")

    with pytest.raises(CommandError) as down:
        call_command("distlock", "run", "a", "--", "true")

    assert down.value.returncode == 69
    assert str(down.value) == "cannot take the lock 'a' (alias 'default'): the engine is down"


@pytest.mark.parametrize("value", ["other", True, None])
def test_the_setting_has_two_values(settings, value):
    settings.DISTLOCK = {"default": {"BACKEND": FAKE, "ON_DOWN": value}, "other": {"BACKEND": FAKE}}

    with pytest.raises(ImproperlyConfigured, match="'ON_DOWN' must be 'raise' or 'open'"):
        Lock("a")


# No lock at all


def test_with_open_the_work_goes_on_and_each_time_a_warning_is_logged(opening, heard, caplog):
    opening.fail("acquire")

    for _ in range(2):
        with Lock("heard") as hold:
            hold.check()
            assert (hold.opened, hold.fence, hold.released) == (True, None, False)

    warning = (
        "going on without the lock 'heard' (alias 'default'), whose backend is down: the engine"
    )
    assert [line.startswith(warning) for line in lines(caplog, "opened")] == [True, True]
    failed = (lock_failed, {"error": "the engine is down", "opened": True})
    assert heard == 2 * [failed, (lock_released, {})]


def test_an_opened_hold_is_kept_without_a_request_to_the_backend(opening):
    opening.fail("acquire")
    hold = Lock("a", ttl=3).acquire()
    until(lambda: opening.asked == ["acquire", "release"])  # of what may have been granted

    renewed(hold)
    hold.release()

    assert opening.asked == ["acquire", "release"]


def test_what_was_granted_without_an_answer_is_given_back(opening):
    opening.fail("acquire", after=True, times=1)

    with Lock("a") as hold:
        assert hold.opened
        until(lambda: free(opening))


def test_a_backend_that_answers_is_obeyed(opening):
    with held_elsewhere("a"):
        with pytest.raises(LockBusy):
            Lock("a").acquire(wait=0)
    with Lock("a") as hold:
        assert not hold.opened


def test_code_inside_finds_the_lock_that_it_goes_on_without(opening):
    opening.fail("acquire")

    with Lock("a") as hold:
        assert current_hold("a") is hold
        assert_locked("a")
        with Lock("a") as again:
            assert again.opened
    assert opening.asked.count("acquire") == 1


def test_a_write_that_wants_a_fence_is_refused(opening):
    opening.fail("acquire")

    with Lock("a") as hold, pytest.raises(LockError, match="no fencing token"):
        fence_of(hold)


def test_a_coroutine_goes_on_as_well(opening):
    opening.fail("acquire")

    async def main():
        async with Lock("a") as hold:
            return hold.opened

    assert asyncio.run(main())


def test_of_several_aliases_the_others_still_exclude(opening):
    opening.fail("acquire")

    with Lock("a", using=("default", "other")) as hold:
        assert hold.opened and hold.fence is not None
        with running(lambda: pytest.raises(LockBusy, Lock("a", using="other", wait=0).acquire)):
            pass


# What people see


def test_the_doctor_says_what_a_backend_that_is_down_means(opening, capsys):
    call_command("distlock", "doctor")
    assert capsys.readouterr().out.count("distlock_app.I001: DISTLOCK['default'] has ON_DOWN") == 1

    opening.fail("acquire")
    assert not doctor.examine("default").works


# On a server


sold = 0
fences: list[int | None] = []


@csrf_exempt
@locked_view("stock", wait=0.02)
def buy(request):
    """Sell one, as unprotected as can be."""
    global sold
    fences.append(current_hold("stock").fence)
    before = sold
    sleep(0.002)
    sold = before + 1
    return HttpResponse()


urlpatterns = [path("buy", buy)]


@pytest.fixture
def on_redis(own_redis, settings):
    """Answer `buy` under a lock on a Redis of this test; return a way to change its alias."""
    global sold
    sold = 0
    fences.clear()
    settings.ROOT_URLCONF = __name__
    settings.CACHES = {
        **settings.CACHES,
        "own": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": own_redis.url},
    }

    def use(**keys):
        redis = {"BACKEND": "distlock_app.backends.redis.RedisBackend", "LOCATION": "own"}
        settings.DISTLOCK = {"default": {**redis, **keys}}

    use()
    return use


@pytest.mark.once
def test_a_redis_that_stops_under_load_answers_503_and_lets_nobody_in(own_redis, on_redis):
    answers = []
    stop = threading.Event()

    def post():
        client = Client(raise_request_exception=False)
        while not stop.is_set():
            answers.append(client.post("/buy").status_code)

    with running(post), running(post), running(post), running(post):
        try:
            until(lambda: answers.count(200) > 50)
            own_redis.kill()
            until(lambda: answers.count(503) > 50)
        finally:
            stop.set()

    assert set(answers) <= {200, 423, 503}
    assert set(answers[-20:]) == {503}
    assert answers.count(200) == sold == len(fences)
    assert None not in fences and fences == sorted(set(fences))


def test_with_open_a_redis_that_stops_lets_everybody_in(own_redis, on_redis, caplog):
    on_redis(ON_DOWN="open")
    assert Client().post("/buy").status_code == 200
    assert lines(caplog, "opened") == []

    own_redis.kill()

    assert [Client().post("/buy").status_code for _ in range(3)] == [200, 200, 200]
    assert [fence is None for fence in fences] == [False, True, True, True]
    assert len(lines(caplog, "opened")) == 3
    with all_of(Lock("a"), Lock("b")) as holds:
        assert [hold.opened for hold in holds] == [True, True]

    async def both():
        async with all_of(Lock("a"), Lock("b")) as holds:
            return holds.opened

    assert asyncio.run(both())
