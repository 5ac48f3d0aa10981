"""The contract suite fails a backend that breaks one promise, and only then."""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import uniform
from time import sleep, time_ns

import pytest

from distlock_app.backends.base import BaseLockBackend
from distlock_app.backends.locmem import LocMemBackend
from distlock_app.claims import Busy, Grant
from distlock_app.errors import BackendError
from distlock_app.testing import LockBackendContract, processes


class Unreachable(LocMemBackend):
    """Says of each question that there is no answer."""

    def ping(self):
        raise BackendError("no route")

    def acquire(self, claim, wait):
        raise BackendError("no route")

    def extend(self, grant, ttl):
        raise BackendError("no route")

    end_in = extend

    def release(self, grant):
        raise BackendError("no route")

    def holders(self, key=None):
        raise BackendError("no route")

    def clear(self, key, if_version=None):
        raise BackendError("no route")


class SaysBusy(Unreachable):
    def acquire(self, claim, wait):
        return Busy()


class SaysLost(Unreachable):
    def extend(self, grant, ttl):
        return False


class SaysReleased(Unreachable):
    def release(self, grant):
        return True


class SaysFree(Unreachable):
    def holders(self, key=None):
        return []


class OnFiles(LocMemBackend):
    """A session's locks in files, which all processes see: closing the session ends them."""

    expires = False
    local = False
    lists = False
    directory: Path

    def __init__(self, *, alias, location=None):
        super().__init__(alias=alias)
        self.ours = set()

    def acquire(self, claim, wait):
        try:
            with (self.directory / claim.key).open("x") as file:
                file.write(claim.owner)
        except FileExistsError:
            return Grant(claim) if self._is_ours(claim) else Busy()
        self.ours.add(claim.key)
        return Grant(claim, time_ns())

    def extend(self, grant, ttl):
        return self._is_ours(grant.claim)

    def release(self, grant):
        if found := self._is_ours(grant.claim):
            (self.directory / grant.claim.key).unlink()
            self.ours.remove(grant.claim.key)
        return found

    def close(self):
        for key in self.ours:
            (self.directory / key).unlink(missing_ok=True)

    def after_fork(self):
        self.ours = set()

    def _is_ours(self, claim):
        try:
            return (self.directory / claim.key).read_text() == claim.owner
        except FileNotFoundError:
            return False


class ClosesItsParentsSession(OnFiles):
    def after_fork(self):
        pass


class KeepsItsParentsLocks(LocMemBackend):
    def after_fork(self):
        pass


class SharesAConnection(LocMemBackend):
    """Reads the next answer on its connection, whoever has asked."""

    def __init__(self, *, alias, location=None):
        super().__init__(alias=alias)
        self.connection = os.pipe()

    def acquire(self, claim, wait):
        answer = super().acquire(claim, wait)
        os.write(self.connection[1], b"1" if answer else b"0")
        sleep(uniform(0, 0.02))  # parent and child overlap
        return answer if os.read(self.connection[0], 1) == b"1" else Busy()


class ForOneProcess(LocMemBackend):
    """Says that it excludes other processes."""

    local = False


class KeepsAMutexOverForks(OnFiles):
    """Its requests are one at a time, in the child of a fork too."""

    mutex = threading.Lock()

    def acquire(self, claim, wait):
        with self.mutex:
            sleep(0.005)
            return super().acquire(claim, wait)


class Hangs(Unreachable):
    def acquire(self, claim, wait):
        threading.Event().wait(60)


class RaisesItsOwnError(Unreachable):
    def release(self, grant):
        raise ConnectionResetError("by peer")


class CannotList(BaseLockBackend):
    acquire, extend, release = Unreachable.acquire, Unreachable.extend, Unreachable.release


class ListsAllLocks(LocMemBackend):
    def holders(self, key=None):
        return super().holders()


class ListsWhatHasExpired(LocMemBackend):
    def __init__(self, *, alias, location=None):
        super().__init__(alias=alias)
        self.seen = {}

    def acquire(self, claim, wait):
        answer = super().acquire(claim, wait)
        self.seen |= {held.key: held for held in super().holders(claim.key)}
        return answer

    def holders(self, key=None):
        return [held for held in self.seen.values() if key in (None, held.key)]


class ListsTheNameAsItIs(LocMemBackend):
    def acquire(self, claim, wait):
        self.names = {**getattr(self, "names", {}), claim.key: claim.name}
        return super().acquire(claim, wait)

    def holders(self, key=None):
        return [replace(held, name=self.names[held.key]) for held in super().holders(key)]


class ListsTextOfItsHolder(LocMemBackend):
    def holders(self, key=None):
        return [replace(held, holder=json.dumps(held.holder)) for held in super().holders(key)]


class CountsHoldersOnItsPages(LocMemBackend):
    def page(self, start, count):
        held = list(self.holders())
        return held[start : start + count], len(held)


class ClearsWhatIsFree(LocMemBackend):
    def clear(self, key, if_version=None):
        return super().clear(key, if_version) or int(if_version is None)


class CountsMilliseconds(LocMemBackend):
    def acquire(self, claim, wait):
        answer = super().acquire(claim, wait)
        return answer or Busy(free_in=30_000.0)


class NeverExpires(LocMemBackend):
    def acquire(self, claim, wait):
        return super().acquire(replace(claim, ttl=3600.0), wait)

    def count_down(self, claim):
        return super().count_down(replace(claim, ttl=3600.0))


class HasNoFence(LocMemBackend):
    def acquire(self, claim, wait):
        return super().acquire(claim, wait) and Grant(claim)


class WaitsForEver(LocMemBackend):
    """Waits whatever it is told, here until the test must have failed."""

    def acquire(self, claim, wait):
        answer = super().acquire(claim, 0)
        if not answer:
            sleep(6)
        return answer


class SaysTrue(LocMemBackend):
    def acquire(self, claim, wait):
        return bool(super().acquire(claim, wait))


class WaitsUnasked(OnFiles):
    def acquire(self, claim, wait):
        sleep(min(wait, 2))
        return super().acquire(claim, wait)


class DoesNotWait(OnFiles):
    blocks = True


class KeepsNoOrder(OnFiles):
    queues = True


class CountsFromOne(LocMemBackend):
    def __init__(self, *, alias, location=None):
        super().__init__(alias=alias)
        self.numbers = count(1)

    def acquire(self, claim, wait):
        answer = super().acquire(claim, wait)
        return Grant(claim, fence=next(self.numbers)) if answer else answer


class CountsInEachProcess(CountsFromOne, OnFiles):
    """Does so on a store that all processes share."""


class CountsInText(LocMemBackend):
    def acquire(self, claim, wait):
        answer = super().acquire(claim, wait)
        return Grant(claim, fence=str(answer.fence)) if answer else answer


class ExtendsInMilliseconds(LocMemBackend):
    def extend(self, grant, ttl):
        return super().extend(grant, 1000 * ttl)


class ExtendsOnlyOne(LocMemBackend):
    def extend_many(self, work):
        return [True for _ in work]


class TakesAllAnyway(LocMemBackend):
    def acquire_all(self, claims):
        return [Grant(claim, 1) for claim in claims]


class TakesSome(LocMemBackend):
    def acquire_all(self, claims):
        grants = [self.acquire(claim, 0) for claim in claims]
        return grants if all(grants) else None


class AsksByTheClockOnTheWall(LocMemBackend):
    def acquire(self, claim, wait):
        answer = super().acquire(claim, wait)
        return replace(answer, asked_at=float(time_ns()))


class GrantsMore(LocMemBackend):
    def acquire(self, claim, wait):
        answer = super().acquire(claim, wait)
        return replace(answer, ttl=2 * claim.ttl)


class KeepsItsConnectionsInAFlag(LocMemBackend):
    local = threading.local()  # type: ignore[assignment]


class LooksAndThenTakes(OnFiles):
    """Excludes others, but for those who look before it has taken the lock."""

    def acquire(self, claim, wait):
        path = self.directory / claim.key
        if path.exists() and not self._is_ours(claim):
            return Busy()
        sleep(0.01)  # as a request to a server
        path.write_text(claim.owner)
        return Grant(claim)

    def release(self, grant):
        (self.directory / grant.claim.key).unlink(missing_ok=True)
        return True


class ReleasesByFence(LocMemBackend):
    """Knows a claim by what came with its grant, not by its owner."""

    def release(self, grant):
        return grant.fence is not None and super().release(grant)


class StaysInLine(LocMemBackend):
    def withdraw(self, claim):
        pass


class WithdrawsWhatItHolds(LocMemBackend):
    def withdraw(self, claim):
        self.release(Grant(claim))


class GrantsAgainForTheRest(LocMemBackend):
    def acquire(self, claim, wait):
        state = self._states.get(claim.key)
        if state and claim.owner in state.held and state.held[claim.owner].until > 0:
            return Grant(claim, state.held[claim.owner].fence)
        return super().acquire(claim, wait)


class WakesNobody(LocMemBackend):
    poll_max = 3600.0

    def _wake(self, grants, but=""):
        pass


class SaysTooLate(WakesNobody):
    """Says how long the lock may last at most, but not when it has ended."""

    def acquire(self, claim, wait):
        answer = super().acquire(claim, wait)
        return answer or Busy(free_in=3600.0)


class EndsAfterItsTtl(LocMemBackend):
    expires = False


class WaitsForTooLong(LocMemBackend):
    blocks = True
    pushes = False

    def acquire(self, claim, wait):
        answer = super().acquire(claim, 0)
        if not answer and wait != 0:
            sleep(1.5)
        return answer


BREAKS = [
    *((wrong, "does_not_answer") for wrong in (SaysBusy, SaysLost, SaysReleased, SaysFree)),
    (ForOneProcess, "many_processes"),
    *((wrong, "who_holds") for wrong in (ListsTheNameAsItIs, ListsTextOfItsHolder)),
    (ListsWhatHasExpired, "has_expired"),
    (CountsHoldersOnItsPages, "pages_have"),
    (EndsAfterItsTtl, "without_expiry"),
    (ClearsWhatIsFree, "changed_hands"),
    (CountsMilliseconds, "refused_to_another"),
    (HasNoFence, "free_lock_is_granted"),
    *((wrong, "backend_that_blocks") for wrong in (WaitsUnasked, DoesNotWait)),
    (KeepsNoOrder, "waiters_are_served_in_order"),
    (CountsFromOne, "data_was_lost"),
    (CountsInEachProcess, "process_to_process"),
    *((wrong, "free_lock_is") for wrong in (CountsInText, AsksByTheClockOnTheWall, GrantsMore)),
    *((wrong, "acquired_in_one_step") for wrong in (TakesAllAnyway, TakesSome)),
    (ExtendsOnlyOne, "prolongs_and_never"),
    (ExtendsInMilliseconds, "extended_claim_ends"),
    (ReleasesByFence, "lost_answer"),
    (GrantsAgainForTheRest, "whole_ttl_again"),
    *((wrong, "waiter_that_withdraws") for wrong in (StaysInLine, WithdrawsWhatItHolds)),
    *((wrong, "child_process") for wrong in (ClosesItsParentsSession, KeepsItsParentsLocks)),
    (SharesAConnection, "child_process"),
    (WakesNobody, "after_the_release"),
    (SaysTooLate, "after_the_holder_died"),
    (WaitsForTooLong, "stays_held"),
]

# What the suite says besides that it failed.
SAYS = [
    (NeverExpires, "holders_to_expire", "after 0.5 s"),
    (NeverExpires, "forgotten_after", "after 0.5 s"),
    (Hangs, "does_not_answer", "Hangs.acquire() still hangs after 3.0 s: give requests a time"),
    (RaisesItsOwnError, "does_not_answer", "it must raise BackendError"),
    (KeepsAMutexOverForks, "fork_amid", "has to be replaced in after_fork()"),
    (KeepsItsConnectionsInAFlag, "flags_say", "give your attribute another name"),
    (LooksAndThenTakes, "threads_that_come", "look and take in one atomic step"),
    (LooksAndThenTakes, "processes_that_come", "look and take in one atomic step"),
    (CannotList, "flags_promise", "lists = True, but no clear()"),
    (ListsAllLocks, "who_holds", "it must be the one claim under this key"),
    (WaitsForEver, "refused_to_another", "WaitsForEver.acquire() still hangs after 3.0 s"),
    (WaitsForEver, "backend_that_blocks", "WaitsForEver.acquire() still hangs after 3.0 s"),
    (WaitsForEver, "stays_held", "acquire() still hangs after 3.0 s"),
    (SaysTrue, "refused_to_another", "said True: it must be a Grant, a Busy or None"),
]


@pytest.fixture
def suite(settings, tmp_path, monkeypatch):
    """Return what makes the suite of a class here, and the one case whose name has some words."""
    OnFiles.directory = tmp_path
    monkeypatch.setattr(processes, "CHILD_LIVES", 4)

    def make(backend, words, broken=Unreachable, patience=10.0):
        path = f"{backend.__module__}.{backend.__name__}"
        settings.DISTLOCK = {"default": {"BACKEND": path}}

        class Tried(Suite):
            def broken(self):
                return broken(alias="broken")

        Tried.patience = patience
        [case] = [name for name in dir(Tried) if words in name and name.startswith("test_")]
        return getattr(Tried(), case)

    return make


class Suite(LockBackendContract):
    __test__ = False

    def lose_data(self):
        self.backend.__init__(alias=self.alias)


@pytest.mark.parametrize(("wrong", "words"), BREAKS)
def test_the_suite_fails_a_backend_that_breaks_a_promise(suite, wrong, words):
    broken = wrong if issubclass(wrong, Unreachable) else Unreachable
    case = suite(wrong, words, broken, patience=1.0)

    with pytest.raises(AssertionError):
        case()


def test_the_suite_lets_processes_that_start_slowly_begin_together(suite, monkeypatch):
    fork = Suite._fork

    def slowly(case, work):
        sleep(0.2)
        return fork(case, work)

    monkeypatch.setattr(Suite, "_fork", slowly)
    case = suite(ForOneProcess, "many_processes")

    with pytest.raises(AssertionError, match="two processes had it at a time"):
        case()


@pytest.mark.parametrize(("wrong", "words", "text"), SAYS)
def test_the_suite_says_what_is_wrong(suite, wrong, words, text):
    broken = wrong if issubclass(wrong, Unreachable) else Unreachable
    case = suite(wrong, words, broken, patience=0.5)

    with pytest.raises(AssertionError, match=re.escape(text)):
        case()


@pytest.mark.parametrize("words", sorted({words for _, words, *_ in BREAKS + SAYS}))
def test_the_suite_passes_a_backend_that_keeps_the_promise(suite, words):
    of_sessions = words in (
        *("child_process", "many_processes", "fork_amid", "processes_that_come"),
        *("process_to_process", "without_expiry"),
    )
    suite(OnFiles if of_sessions else LocMemBackend, words)()


def test_the_suite_spares_the_locks_of_a_suite_in_another_process(settings):
    settings.DISTLOCK = {"default": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"}}
    ours, theirs = Suite(), Suite()
    held = theirs.take(theirs.name())
    ours.take(ours.name())

    ours.teardown_method()

    assert [holding.key for holding in ours.backend.holders()] == [held.claim.key]
