"""The engine in memory: what the contract and the model do not say of it."""

from __future__ import annotations

import itertools
import sys

import pytest

from distlock_app.backends import locmem
from distlock_app.backends.locmem import LocMemBackend
from distlock_app.claims import Grant
from distlock_app.primitives.names import key_of
from distlock_app.testing.claims import a_claim
from tests.engines import interrupted_at, interrupted_everywhere
from tests.redis_workers import Waiter, left_waiting


@pytest.fixture
def backend():
    return LocMemBackend(alias="locmem")


def test_a_task_whose_loop_was_closed_takes_no_lock_with_it(backend, caplog):
    first = backend.acquire(a_claim("a"), 0)
    with left_waiting(backend, "a"), left_waiting(backend, "a"):
        living = Waiter(backend, "a")
        living.ask()
        assert backend.release(first) is True

    assert living.granted().claim is living.claim
    assert "could not be woken" in caplog.text
    assert backend.queue(first.claim.key) == []


def test_an_exception_of_a_signal_handler_as_a_waiter_is_woken_takes_its_lock_from_nobody(backend):
    class TimeLimit(Exception):
        pass

    def wake(grant):
        waiter.append(grant)
        raise TimeLimit

    waiter = []
    first = backend.acquire(a_claim("a"), 0)
    assert not backend.acquire(a_claim("a", wake=wake), 30)

    with pytest.raises(TimeLimit):
        backend.release(first)

    assert owners(backend) == [waiter[0].claim.owner]


def owners(backend):
    """Return who holds anything."""
    return [owner for state in backend._states.values() for owner in state.held]


def test_of_a_signal_handler_and_what_it_interrupts_one_gets_the_lock():
    def steps():
        backend = LocMemBackend(alias="locmem")
        granted = []

        def take():
            if grant := backend.acquire(a_claim("a"), 0):
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
            granted.append(backend.acquire(a_claim("a"), 0))

        def take_and_release():
            if grant := backend.acquire(a_claim("a"), 0):
                granted.append(grant)
                backend.release(grant)

        yield take, take_and_release

        last = granted[-1] if granted[-1] else granted[0]
        assert last.fence == max(grant.fence for grant in granted if grant)

    interrupted_everywhere([locmem], steps)


def test_a_signal_handler_may_take_what_is_being_released():
    def steps():
        backend = LocMemBackend(alias="locmem")
        held = backend.acquire(a_claim("a"), 0)
        taken = []
        yield lambda: backend.release(held), lambda: taken.append(backend.acquire(a_claim("a"), 0))

        assert owners(backend) == [grant.claim.owner for grant in taken if grant]

    interrupted_everywhere([locmem], steps)


@pytest.mark.parametrize("wait", [0, 30])
def test_a_signal_handler_may_release_what_is_asked_for(wait):
    def steps():
        backend = LocMemBackend(alias="locmem")
        held = backend.acquire(a_claim("a"), 0)
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
        held = backend.acquire(a_claim("a"), 0)
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
        backend.counted(a_claim("b").key)
        yield (
            lambda: backend.count_down(a_claim("a", **of)),
            lambda: backend.count_down(a_claim(name, **of)),
        )

        assert [backend.counted(a_claim(n).key) for n in "ab"] == (
            [2, 0] if name == "a" else [1, 1]
        )
        assert bool(waiter.woken) is (name == "a")

    interrupted_everywhere([locmem], steps)


def test_a_signal_handler_may_change_what_is_listed_or_cleared():
    def steps():
        backend = LocMemBackend(alias="locmem")
        used = {key_of(name)[:2] for name in "abc"}  # of 256 shards, which are read alike
        backend._shards = {digits: backend._shards[digits] for digits in used}
        held = [backend.acquire(a_claim(name), 0) for name in "ab"]

        def read_and_clear():
            list(backend.holders())
            backend.queue(held[0].claim.key)
            backend.prolong(held[0].claim.key, str(held[0].fence), 60)
            backend.extend(held[0], 60)
            backend.clear(held[0].claim.key)

        def change():
            backend.release(held[0])
            backend.acquire(a_claim("c"), 0)

        yield read_and_clear, change

        assert len(owners(backend)) == 2

    interrupted_everywhere([locmem], steps)


def test_an_interrupted_release_happened_or_did_not():
    for at in itertools.count(-2):  # Python 3.12 and 3.13 trace opcodes only from then on
        backend = LocMemBackend(alias="locmem")
        first = backend.acquire(a_claim("a"), 0)
        waiter = Waiter(backend, "a")
        waiter.ask()

        done = interrupted_at(at, locmem, backend.release, first)

        assert len(owners(backend)) == 1
        backend.release(first)
        second = waiter.ask()
        assert second and second.fence > first.fence
        assert backend.release(second) is True and backend._states == {}
        if done and at > 0:
            break

    assert at > 20


def test_the_lock_passes_hundreds_of_waiters_that_are_gone(backend, monkeypatch):
    monkeypatch.setattr(locmem, "HEARD_LATELY", 3600)

    def gone(grant):
        raise RuntimeError("Event loop is closed")

    first = backend.acquire(a_claim("a"), 0)
    for _ in range(sys.getrecursionlimit() // 2):
        backend.acquire(a_claim("a", wake=gone), 30)
    living = Waiter(backend, "a")
    living.ask()

    assert backend.release(first) is True

    assert living.granted().claim is living.claim


def waiting(backend, name, **options):
    """Return one who waits for the lock."""
    waiter = Waiter(backend, name, **options)
    assert not waiter.ask()
    return waiter


@pytest.mark.parametrize(
    "leave",
    [
        lambda backend, claim: backend.acquire(claim, 0),
        lambda backend, claim: backend.withdraw(claim),
        lambda backend, claim: backend.release(Grant(claim)),
    ],
)
def test_when_a_waiter_leaves_those_behind_are_woken_at_once(backend, leave):
    backend.acquire(a_claim("a", shared=True), 0)
    writer, reader = waiting(backend, "a"), waiting(backend, "a", shared=True)

    leave(backend, writer.claim)

    assert [grant.claim for grant in reader.woken] == [reader.claim]
    assert not writer.woken


def test_when_a_lock_is_cleared_the_first_waiter_is_woken_at_once(backend):
    held = backend.acquire(a_claim("a"), 0)
    waiter = waiting(backend, "a")

    assert backend.clear(held.claim.key) == 1

    assert [grant.claim for grant in waiter.woken] == [waiter.claim]


def test_a_claim_withdraws_itself_and_no_later_one_of_its_owner(backend):
    held = backend.acquire(a_claim("a"), 0)
    first, later = (waiting(backend, "a", owner="one", stable=True) for _ in range(2))

    backend.withdraw(first.claim)

    assert len(backend.queue(held.claim.key)) == 1
    backend.withdraw(later.claim)
    assert backend.queue(held.claim.key) == []


@pytest.mark.parametrize("latch", [False, True])
def test_a_waiter_that_was_not_heard_of_for_long_is_passed_over(backend, latch):
    held = None if latch else backend.acquire(a_claim("a"), 0)
    dead, living = (waiting(backend, "a", latch=latch) for _ in range(2))
    key = living.claim.key
    backend._states[key].queue[dead.claim.owner].heard -= locmem.HEARD_LATELY + 1

    if latch:
        backend.count_down(a_claim("a", latch=True))
    else:
        backend.release(held)

    assert [grant.claim for grant in living.woken] == [living.claim]
    assert not dead.woken and backend.queue(key) == []


def test_a_waiter_that_was_not_heard_of_for_long_keeps_nobody_out(backend):
    backend.acquire(a_claim("a", shared=True), 0)
    writer = waiting(backend, "a")
    backend._states[writer.claim.key].queue[writer.claim.owner].heard -= locmem.HEARD_LATELY + 1

    assert backend.acquire(a_claim("a", shared=True), 0)


def test_who_passes_a_latch_holds_nothing(backend):
    waiter = waiting(backend, "a", latch=True)

    backend.count_down(a_claim("a", latch=True))

    assert [grant.fence for grant in waiter.woken] == [None]
    assert list(backend.holders()) == []


def test_what_expired_and_nobody_uses_again_is_forgotten(backend):
    held = backend.acquire(a_claim("held"), 0)
    counted = a_claim("counted", latch=True, limit=2)
    backend.count_down(counted)
    expired = backend.acquire(a_claim("waited for"), 0)
    waiting(backend, "waited for")
    backend._states[expired.claim.key].held[expired.claim.owner].until = 0

    for number in range(5000):
        backend.acquire(a_claim(f"left {number}", ttl=1e-6), 0)
        backend.count_down(a_claim(f"counted {number}", ttl=1e-6, latch=True, limit=2))

    assert len(backend._states) <= len(backend._shards) * locmem.SWEEP_EVERY
    assert held.claim.key in backend._states
    assert backend.counted(counted.key) == 1
    assert len(backend.queue(expired.claim.key)) == 1


def test_a_change_among_thousands_of_locks_copies_few(backend):
    grants = [backend.acquire(a_claim(f"lock {number}"), 0) for number in range(10_000)]

    assert max(map(len, backend._shards.values())) < 100
    assert len(backend._states) == len(grants)


def test_latches_that_nobody_counted_down_are_forgotten(backend):
    for number in range(50):
        backend.acquire(a_claim(f"waited for {number}", latch=True, limit=1), 0)
        backend.counted(a_claim(f"asked about {number}").key)
    waiter = Waiter(backend, "waits", latch=True, limit=1)
    waiter.ask()
    backend.release(Grant(waiter.claim))
    backend.count_down(a_claim("counted", latch=True, limit=1))

    assert list(backend._states) == [a_claim("counted").key]
