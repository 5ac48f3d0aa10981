"""`override_locks()` in all the places where `override_settings()` may stand."""

from __future__ import annotations

import asyncio
import unittest

import pytest
from django.test import SimpleTestCase, override_settings

from distlock_app import Lock
from distlock_app.backends.dummy import DummyBackend
from distlock_app.backends.locmem import LocMemBackend
from distlock_app.core.registry import registry
from distlock_app.testing import held_elsewhere, lose, override_locks

DUMMY = "distlock_app.backends.dummy.DummyBackend"


def engine(alias="default"):
    return type(registry[alias].backend)


def run(case):
    """Run the tests of a class; return how many ran and what failed."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result.testsRun, result.errors + result.failures


def test_a_class_runs_its_tests_with_its_locks_in_memory():
    seen = []

    @override_locks()
    class Case(SimpleTestCase):
        @classmethod
        def setUpClass(cls):
            super().setUpClass()
            seen.append(engine())

        def test_plain(self):
            seen.append(engine())

        async def test_async(self):
            seen.append(engine())

    before = engine()

    assert run(Case) == (2, [])
    assert seen == [LocMemBackend] * 3
    assert engine() is before


def test_a_class_keeps_the_aliases_and_times_of_its_own_settings():
    seen = []

    @override_locks(DUMMY)
    @override_settings(DISTLOCK={"other": {"BACKEND": "not.there", "TTL": 7}})
    class Case(SimpleTestCase):
        def test(self):
            seen.append((engine("other"), registry["other"].ttl, list(registry)))

    assert run(Case) == (1, [])
    assert seen == [(DummyBackend, 7.0, ["other"])]


def test_a_coroutine_is_awaited_with_its_locks_in_memory():
    @override_locks(DUMMY)
    async def test():
        return engine()

    assert asyncio.run(test()) is DummyBackend


def test_a_function_has_its_locks_in_memory_each_time_it_is_called(settings):
    @override_locks()
    def test():
        return list(registry), engine(list(registry)[0])

    settings.DISTLOCK = {"late": {"BACKEND": DUMMY}}

    assert test() == test() == (["late"], LocMemBackend)


@pytest.mark.parametrize("wrong", [object, lambda: None])
def test_what_cannot_be_decorated_is_refused(wrong):
    with pytest.raises(TypeError, match=r"@override_locks\(\)"):
        override_locks(wrong)


def test_a_class_without_django_is_refused_as_override_settings_does():
    with pytest.raises(ValueError, match="SimpleTestCase"):
        override_locks()(unittest.TestCase)


@override_locks()
def test_what_is_no_hold_and_no_number_of_seconds_is_refused():
    with pytest.raises(TypeError, match=r"lose\(\) takes a hold, not Lock"):
        lose(Lock("a"))
    with pytest.raises(TypeError, match="ttl must be a number"), held_elsewhere("a", ttl="60"):
        pass


@pytest.mark.django_db(transaction=True)
def test_a_coroutine_may_hold_a_lock_elsewhere_and_lose_its_own():
    async def test():
        registry["default"].backend.close()  # whatever was connected before
        with held_elsewhere("a"):
            refused = await Lock("a").atry_acquire()
        hold = await Lock("a").aacquire()
        registry["default"].backend.close()
        lose(hold)
        return refused, hold.lost

    assert asyncio.run(test()) == (None, True)
