"""The engine in memory: what the contract and the model do not say of it."""

from __future__ import annotations

import pytest

from distlock_app.backends.locmem import LocMemBackend
from tests.redis_workers import Waiter, claim, left_waiting


@pytest.fixture
def backend():
    return LocMemBackend(alias="locmem")


def test_a_task_whose_loop_was_closed_takes_no_lock_with_it(backend, caplog):
    first = backend.acquire(claim("a"), 0)
    with left_waiting(backend, "a"), left_waiting(backend, "a"):
        living = Waiter(backend, "a")
        living.ask()
        assert backend.release(first) is True

    assert living.granted().claim is living.claim
    assert "could not be woken" in caplog.text
    assert backend.queue(first.claim.key) == []
