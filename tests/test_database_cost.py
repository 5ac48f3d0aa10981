"""What a lock costs that a database keeps, in calls of Python and in waiting."""

from __future__ import annotations

import sys

import pytest
from django.conf import settings

from distlock_app import Lock
from distlock_app.core.registry import registry
from tests.cost import POLL, block, fewest, is_own_call, methods_called, pair


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("work", [pair, block])
def test_a_lock_in_the_lock_table_costs_few_calls_of_our_own(work):
    lock = Lock("a")
    registry["default"].backend.close()  # which looks through what other tests have left idle

    assert fewest(lambda: work(lock), sys.setprofile, is_own_call) <= 50


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(settings.ENGINE == "sqlite", reason="SQLite has no locks of its own")
@pytest.mark.parametrize("work", [pair, block])
def test_a_lock_of_the_database_server_costs_few_calls_of_our_own(work):
    lock = Lock("a", using=settings.SERVER_LOCKS[settings.ENGINE][0])
    registry[lock.using].backend.close()  # the sessions that other tests have left idle

    assert fewest(lambda: work(lock), sys.setprofile, is_own_call) <= 44


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(settings.ENGINE == "sqlite", reason="SQLite has no server")
@pytest.mark.parametrize("number", [0, 1])
def test_a_lock_on_a_database_server_waits_for_two_answers_and_looks_at_nothing_else(number):
    lock = Lock("a", using=("default", settings.SERVER_LOCKS[settings.ENGINE][0])[number])
    block(lock)

    assert methods_called(lambda: block(lock), POLL) == ["poll", "poll"]
