"""The contract suite fails a backend that breaks one promise, and only then."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from random import uniform
from time import sleep

import pytest

from distlock_app.backends.locmem import LocMemBackend
from distlock_app.claims import Busy, Grant
from distlock_app.errors import BackendError
from distlock_app.testing import LockBackendContract


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
        return Grant(claim)

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
        path = self.directory / claim.key
        return path.exists() and path.read_text() == claim.owner


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


class CountsFromOne(LocMemBackend):
    def __init__(self, *, alias, location=None):
        super().__init__(alias=alias)
        self.fences = count(1)

    def acquire(self, claim, wait):
        answer = super().acquire(claim, wait)
        return Grant(claim, fence=next(self.fences)) if answer else answer


class ReleasesByFence(LocMemBackend):
    """Knows a claim by what came with its grant, not by its owner."""

    def release(self, grant):
        return grant.fence is not None and super().release(grant)


class GrantsAgainForTheRest(LocMemBackend):
    def acquire(self, claim, wait):
        state = self._states.get(claim.key)
        if state and claim.owner in state.held and state.held[claim.owner].until > 0:
            return Grant(claim, state.held[claim.owner].fence)
        return super().acquire(claim, wait)


class WakesNobody(LocMemBackend):
    poll_max = 3600.0

    def _wake(self, grant):
        return True


class SaysTooLate(WakesNobody):
    """Says how long the lock may last at most, but not when it has ended."""

    def acquire(self, claim, wait):
        answer = super().acquire(claim, wait)
        return answer or Busy(free_in=3600.0)


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
    (CountsFromOne, "data_was_lost"),
    (ReleasesByFence, "lost_answer"),
    (GrantsAgainForTheRest, "whole_ttl_again"),
    *((wrong, "child_process") for wrong in (ClosesItsParentsSession, KeepsItsParentsLocks)),
    (SharesAConnection, "child_process"),
    (WakesNobody, "after_the_release"),
    (SaysTooLate, "after_the_holder_died"),
    (WaitsForTooLong, "stays_held"),
]


@pytest.fixture
def suite(settings, tmp_path):
    """Return what makes the suite of a class here, and the one case whose name has some words."""
    OnFiles.directory = tmp_path

    def make(backend, words, broken=Unreachable):
        path = f"{backend.__module__}.{backend.__name__}"
        settings.DISTLOCK = {"default": {"BACKEND": path}}

        class Tried(Suite):
            def broken(self):
                return broken(alias="broken")

        [case] = [name for name in dir(Tried) if words in name and name.startswith("test_")]
        return getattr(Tried(), case)

    return make


class Suite(LockBackendContract):
    __test__ = False
    patience = 1.0

    def lose_data(self):
        self.backend.__init__(alias=self.alias)


@pytest.mark.parametrize(("wrong", "words"), BREAKS)
def test_the_suite_fails_a_backend_that_breaks_a_promise(suite, wrong, words):
    case = suite(wrong, words, broken=wrong if issubclass(wrong, Unreachable) else Unreachable)

    with pytest.raises(AssertionError):
        case()


@pytest.mark.parametrize("words", sorted({words for _, words in BREAKS}))
def test_the_suite_passes_a_backend_that_keeps_the_promise(suite, words):
    suite(LocMemBackend if words != "child_process" else OnFiles, words)()
