"""The engine in memory: what the contract and the model do not say of it."""

from __future__ import annotations

import pytest

from distlock_app.backends import locmem
from distlock_app.backends.locmem import LocMemBackend
from distlock_app.claims import Grant
from tests.engines import interrupted_everywhere
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


def owners(backend):
    """Return who holds anything."""
    return [owner for state in backend._states.values() for owner in state.held]


def test_of_a_signal_handler_and_what_it_interrupts_one_gets_the_lock():
    def steps():
        backend = LocMemBackend(alias="locmem")
        granted = []

        def take():
            if grant := backend.acquire(claim("a"), 0):
                granted.append(grant)

        yield take, take

        [grant] = granted
        assert owners(backend) == [grant.claim.owner]
        assert backend.release(grant) is True
        assert backend._states == {}

    interrupted_everywhere([locmem], steps)


def test_a_lock_that_a_signal_handler_had_meanwhile_is_taken_with_a_greater_fence():
    def steps():
        backend = LocMemBackend(alias="locmem")
        granted = []

        def take():
            granted.append(backend.acquire(claim("a"), 0))

        def take_and_release():
            if grant := backend.acquire(claim("a"), 0):
                granted.append(grant)
                backend.release(grant)

        yield take, take_and_release

        last = granted[-1] if granted[-1] else granted[0]
        assert last.fence == max(grant.fence for grant in granted if grant)

    interrupted_everywhere([locmem], steps)


def test_a_signal_handler_may_take_what_is_being_released():
    def steps():
        backend = LocMemBackend(alias="locmem")
        held = backend.acquire(claim("a"), 0)
        taken = []
        yield lambda: backend.release(held), lambda: taken.append(backend.acquire(claim("a"), 0))

        assert owners(backend) == [grant.claim.owner for grant in taken if grant]

    interrupted_everywhere([locmem], steps)


@pytest.mark.parametrize("wait", [0, 30])
def test_a_signal_handler_may_release_what_is_asked_for(wait):
    def steps():
        backend = LocMemBackend(alias="locmem")
        held = backend.acquire(claim("a"), 0)
        waiter, answers = Waiter(backend, "a"), []
        yield (
            lambda: answers.append(backend.acquire(waiter.claim, wait)),
            lambda: backend.release(held),
        )

        got = bool(answers[0]) or bool(waiter.woken)
        assert got or wait == 0
        assert owners(backend) == ([waiter.claim.owner] if got else [])

    interrupted_everywhere([locmem], steps)


@pytest.mark.parametrize("wait", [0, 30])
def test_a_release_that_is_interrupted_passes_the_lock_on(wait):
    def steps():
        backend = LocMemBackend(alias="locmem")
        held = backend.acquire(claim("a"), 0)
        waiter, other = Waiter(backend, "a"), Waiter(backend, "a")
        waiter.ask()
        yield lambda: backend.release(held), lambda: backend.acquire(other.claim, wait)

        assert waiter.granted().claim is waiter.claim and len(waiter.woken) == 1
        assert owners(backend) == [waiter.claim.owner]
        assert backend.release(Grant(waiter.claim)) is True
        assert [grant.claim for grant in other.woken] == ([other.claim] if wait else [])

    interrupted_everywhere([locmem], steps)


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_signal_handler_may_count_a_latch_down(name):
    def steps():
        backend = LocMemBackend(alias="locmem")
        of = {"latch": True, "limit": 2}
        waiter = Waiter(backend, "a", **of)
        waiter.ask()
        backend.counted(claim("b").key)
        yield (
            lambda: backend.count_down(claim("a", **of)),
            lambda: backend.count_down(claim(name, **of)),
        )

        assert [backend.counted(claim(n).key) for n in "ab"] == ([2, 0] if name == "a" else [1, 1])
        assert bool(waiter.woken) is (name == "a")

    interrupted_everywhere([locmem], steps)


def test_a_signal_handler_may_change_what_is_listed_or_cleared():
    def steps():
        backend = LocMemBackend(alias="locmem")
        held = [backend.acquire(claim(name), 0) for name in "ab"]

        def read_and_clear():
            list(backend.holders())
            backend.queue(held[0].claim.key)
            backend.prolong(held[0].claim.key, str(held[0].fence), 60)
            backend.extend(held[0], 60)
            backend.clear(held[0].claim.key)

        def change():
            backend.release(held[0])
            backend.acquire(claim("c"), 0)

        yield read_and_clear, change

        assert len(owners(backend)) == 2

    interrupted_everywhere([locmem], steps)


def test_latches_that_nobody_counted_down_are_forgotten(backend):
    for number in range(50):
        backend.acquire(claim(f"waited for {number}", latch=True, limit=1), 0)
        backend.counted(claim(f"asked about {number}").key)
    waiter = Waiter(backend, "waits", latch=True, limit=1)
    waiter.ask()
    backend.release(Grant(waiter.claim))
    backend.count_down(claim("counted", latch=True, limit=1))

    assert list(backend._latches) == [claim("counted").key]
