"""Settings, descriptions of locks, and the backends that are made of them."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from distlock_app import Lock, LockError, errors
from distlock_app.backends.base import BaseLockBackend
from distlock_app.backends.locmem import LocMemBackend
from distlock_app.core.registry import Registry, registry
from tests import engines
from tests.engines import DEADLINE

engine = pytest.fixture(engines.install)
LOCMEM = {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"}


@pytest.mark.parametrize(
    "wrong, error",
    [
        ({"ttl": 0}, ValueError),
        ({"ttl": -1}, ValueError),
        ({"ttl": None}, TypeError),
        ({"ttl": float("inf")}, ValueError),
        ({"ttl": float("nan")}, ValueError),
        ({"ttl": 1e12}, ValueError),
        ({"ttl": True}, TypeError),
        ({"wait": -0.1}, ValueError),
        ({"wait": "5"}, TypeError),
        ({"max_hold": 0}, ValueError),
        ({"max_hold": 1e-9}, ValueError),
        ({"max_hold": 10**400}, ValueError),
        ({"max_hold": float("nan")}, ValueError),
        ({"limit": 0}, ValueError),
        ({"limit": 1.5}, ValueError),
        ({"limit": True}, ValueError),
        ({"limit": 2, "shared": True}, ValueError),
        ({"owner": ""}, ValueError),
        ({"owner": 7}, ValueError),
        ({"release": "later"}, ValueError),
        ({"atomic": "nowhere"}, ImproperlyConfigured),
        ({"using": "nowhere"}, ImproperlyConfigured),
    ],
)
def test_a_lock_that_makes_no_sense_is_refused_when_it_is_made(engine, wrong, error):
    with pytest.raises(error):
        Lock("a", **wrong)


@pytest.mark.parametrize("name, error", [("", ValueError), (7, TypeError), (b"a", TypeError)])
def test_a_name_is_text(engine, name, error):
    with pytest.raises(error):
        Lock(name)


def test_only_the_name_is_positional(engine):
    with pytest.raises(TypeError):
        Lock("a", 30)


class Mutex(BaseLockBackend):
    """An engine of the least that is required."""

    acquire, extend, release = LocMemBackend.acquire, LocMemBackend.extend, LocMemBackend.release


@pytest.mark.parametrize("wanted", [{"shared": True}, {"fair": True}, {"limit": 2}])
def test_what_an_engine_cannot_do_is_refused_when_the_lock_is_made(settings, wanted):
    settings.DISTLOCK = {"default": {"BACKEND": "tests.test_core_settings.Mutex"}}

    with pytest.raises(ValueError, match="Mutex"):
        Lock("a", **wanted)


def test_a_lock_can_be_copied_and_sent_to_another_process(engine):
    lock = Lock("a", max_hold=60, shared=True)

    for other in (copy.copy(lock), copy.deepcopy(lock), pickle.loads(pickle.dumps(lock))):
        assert other == lock and hash(other) == hash(lock)
        with other as hold:
            assert hold.expires_in > 25


def test_a_lock_is_immutable(engine):
    with pytest.raises(AttributeError):
        Lock("a").ttl = 5


def test_the_alias_says_what_the_lock_does_not(settings):
    settings.DISTLOCK = {"default": {**LOCMEM, "TTL": 100, "WAIT": 0}}

    with Lock("a") as hold:
        assert 90 < hold.expires_in <= 100
        thread = threading.Thread(target=Lock("a").try_acquire)
        thread.start()
        thread.join(DEADLINE)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "setting, words",
    [
        ({"default": {}}, ["'default'", "BACKEND"]),
        ({"default": {"BACKEND": "nowhere.Backend"}}, ["'default'", "nowhere.Backend"]),
        ({"default": {"BACKEND": "distlock_app.testing.LOCMEM"}}, ["'default'", "LOCMEM"]),
        ({"default": {"BACKEND": "collections.OrderedDict"}}, ["'default'", "OrderedDict"]),
        ({"default": {**LOCMEM, "TIMEOUT": 5}}, ["'default'", "TIMEOUT"]),
        ({"default": {**LOCMEM, "TTL": 0}}, ["'default'", "ttl"]),
        ({"default": {**LOCMEM, "WAIT": "x"}}, ["'default'", "wait"]),
        ({"default": {**LOCMEM, "OPTIONS": {"TYPO": 1}}}, ["'default'", "TYPO"]),
        ({"default": {**LOCMEM, "OPTIONS": [1]}}, ["'default'", "OPTIONS"]),
        ({"default": "locmem"}, ["DISTLOCK"]),
        ([], ["DISTLOCK"]),
    ],
)
def test_a_wrong_setting_names_the_alias_and_the_key(setting, words):
    with override_settings(DISTLOCK=setting):
        with pytest.raises(ImproperlyConfigured) as caught:
            Lock("a")

    assert all(word in str(caught.value) for word in words)


def test_without_the_setting_locks_are_in_the_default_database():
    with override_settings():
        from django.conf import settings

        del settings.DISTLOCK
        registry.reset()
        assert type(registry["default"].backend).__name__ == "DatabaseBackend"
    registry.reset()


def test_a_backend_is_made_once_however_many_threads_ask(settings):
    settings.DISTLOCK = {"default": LOCMEM}
    made = []
    barrier = threading.Barrier(8)

    def work():
        barrier.wait(DEADLINE)
        made.append(registry["default"].backend)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)

    assert len(made) == 8 and len({id(backend) for backend in made}) == 1


def test_no_first_lock_imports_what_another_thread_may_be_importing():
    """As one does that asks a cache on Redis: Python then ends one import with an error."""
    code = (
        "import sys, django; django.setup(); before = set(sys.modules)\n"
        "from distlock_app.core.registry import registry\n"
        "made = [registry[alias].alias for alias in registry]\n"
        "print(sorted({'redis', 'quorum', 'etcd', 'zookeeper'} - set(made)))\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    nodes = [f"redis://127.0.0.1:{port}/0" for port in (1, 2, 3)]
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DISTLOCK_TEST_REDIS_URL": nodes[0],
        "DISTLOCK_TEST_REDLOCK_URL": ",".join(nodes),
        "DISTLOCK_TEST_ETCD_URL": "http://127.0.0.1:1",
        "DISTLOCK_TEST_ZOOKEEPER_URL": "127.0.0.1:1",
    }

    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )

    assert done.stdout == "[]\n[]\n", done.stderr


@pytest.mark.parametrize("wrong", [[], {"default": {}}, {"default": {"BACKEND": "no.such.One"}}])
def test_a_wrong_setting_is_no_error_before_it_is_used(settings, wrong):
    settings.DISTLOCK = wrong

    Registry().load()


def test_what_a_module_of_a_backend_raises_is_not_taken_for_a_wrong_setting(settings, monkeypatch):
    settings.DISTLOCK = {"default": LOCMEM}
    monkeypatch.setattr("distlock_app.core.registry.import_string", lambda path: os.environ["NONE"])

    with pytest.raises(KeyError, match="NONE"):
        _ = Registry()["default"]


def test_a_backend_whose_module_makes_locks_does_not_wait_for_itself(tmp_path):
    (tmp_path / "own_backend.py").write_text(
        "from distlock_app import Lock\n"
        "from distlock_app.backends.locmem import LocMemBackend\n"
        "class Own(LocMemBackend): pass\n"
        "LOCK = Lock('a', using='other')\n"
    )
    code = (
        "import django; django.setup()\n"
        "from django.test import override_settings\n"
        "own = {'BACKEND': 'own_backend.Own'}\n"
        "mem = {'BACKEND': 'distlock_app.backends.locmem.LocMemBackend'}\n"
        "override_settings(DISTLOCK={'default': own, 'other': mem}).enable()\n"
        "from distlock_app import Lock\n"
        "with Lock('a') as hold: print(type(hold._lease.backend).__name__)\n"
    )
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PYTHONPATH": f".{os.pathsep}{tmp_path}",
    }

    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=DEADLINE
    )

    assert done.stdout == "Own\n", done.stderr


class Unforkable(LocMemBackend):
    def after_fork(self):
        raise ValueError("a bug of the engine")


def test_one_backend_that_fails_after_fork_does_not_keep_others_from_it(settings, caplog):
    told = []

    class Told(LocMemBackend):
        def after_fork(self):
            told.append(self.alias)

    mine = Registry()
    settings.DISTLOCK = {
        "bad": {"BACKEND": "tests.test_core_settings.Unforkable"},
        "good": LOCMEM,
    }
    _ = mine["bad"], mine["good"]
    object.__setattr__(mine["good"], "backend", Told(alias="good"))

    mine.after_fork()

    assert told == ["good"]
    assert "bad" in caplog.text


class Uncloseable(LocMemBackend):
    closed: list[str] = []

    def close(self):
        self.closed.append(self.alias)
        raise ValueError("a bug of the engine")


def test_a_reset_closes_every_backend(settings):
    settings.DISTLOCK = {
        name: {"BACKEND": "tests.test_core_settings.Uncloseable"} for name in ("one", "two")
    }
    _ = registry["one"], registry["two"]
    Uncloseable.closed.clear()

    registry.reset()

    assert sorted(Uncloseable.closed) == ["one", "two"]


def test_a_backend_without_a_verb_is_never_made():
    class CannotExtend(BaseLockBackend):
        acquire, release = LocMemBackend.acquire, LocMemBackend.release

    with pytest.raises(TypeError, match="abstract .*extend"):
        CannotExtend(alias="default")


def test_every_error_can_be_pickled_and_explains_itself():
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    assert LockError in kinds

    for kind in kinds:
        again = pickle.loads(pickle.dumps(kind()))
        assert type(again) is kind
        assert str(again) == kind.__doc__
    busy = pickle.loads(pickle.dumps(errors.LockTimeout("late", free_in=3.5)))
    assert (str(busy), busy.free_in) == ("late", 3.5)
