"""The part of the backends' suite about what goes wrong: answers, data, servers, forks, waits."""

from __future__ import annotations

import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from time import sleep
from typing import Any
from unittest import SkipTest

from ..claims import Grant
from ..core.lock import Lock
from ..errors import BackendError, LockTimeout
from ..primitives.timing import monotonic
from .claims import a_claim
from .suite import Suite


class FaultContract(Suite):
    """The promises of a backend when something goes wrong; see LockBackendContract."""

    patience = 10.0  # seconds in which a waiter has to notice what it waits for

    def broken(self) -> Any:
        """Return a backend like the one under test, whose server does not answer."""
        raise SkipTest("the test class has no broken()")

    def lose_data(self) -> None:
        """Make the server forget everything, as after a crash without a disk."""
        raise SkipTest("the test class has no lose_data()")

    def test_a_server_that_does_not_answer_is_an_error(self) -> None:
        grant = Grant(a_claim(self.name()))

        with closing(self.broken()) as backend:  # its threads would go on trying to connect
            _raises(backend.ping)
            _raises(backend.acquire, grant.claim, 0)
            if self.backend.expires:  # else the claim has ended with its session, for certain
                _raises(backend.extend, grant, 30)
                _raises(backend.end_in, grant, 30)
                _raises(backend.release, grant)
            if self.backend.lists:
                _raises(lambda: list(backend.holders(grant.claim.key)))
                _raises(backend.clear, grant.claim.key)

    def test_fences_grow_also_after_the_data_was_lost(self) -> None:
        name = self.name()
        first = self.take(name)
        self.lose_data()

        assert self.backend.extend(first, 30) is False
        second = self.eventually(lambda: self.take(name), within=10)
        if self.backend.fences:
            assert second.fence > first.fence
        assert self.backend.release(first) is False
        assert self.backend.release(second) is True

    def test_what_was_granted_by_a_lost_answer_can_be_released(self) -> None:
        claim = a_claim(self.name())
        self.backend.acquire(claim, 0)

        self.backend.release(Grant(claim))  # all that the core knows then

        # Soon: the server may not have noticed yet the end of the connection that asked first.
        assert self.eventually(lambda: self.take(claim.name), within=claim.ttl / 3)

    def test_what_is_granted_again_lasts_for_a_whole_ttl_again(self) -> None:
        self.needs("expires")
        claim = a_claim(self.name(), ttl=0.6)
        self.backend.acquire(claim, 0)
        sleep(0.3)
        asked_at = monotonic()

        assert self.backend.acquire(claim, 0)

        self.eventually(lambda: self.take(claim.name), within=10)
        assert monotonic() - asked_at >= 0.6 - 0.005

    def test_a_child_process_leaves_to_its_parent_what_the_parent_has(self) -> None:
        if not hasattr(os, "fork"):
            raise SkipTest("there is no fork() here")
        name = self.name()
        held = self.take(name)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork() beside other threads
            child = os.fork()
        if child == 0:
            self._run_as_child(name)
        try:
            self._use_it()  # with a shared connection, one would read the answers of the other
        finally:
            _, status = os.waitpid(child, 0)

        assert status == 0, "it failed in the child"
        assert self.backend.extend(held, 30) is True
        assert self.backend.release(held) is True

    def _run_as_child(self, name: str) -> None:
        code = 1
        try:
            signal.alarm(60)
            assert bool(self.take(name)) is self.backend.local
            self._use_it()
            self.backend.close()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _use_it(self) -> None:
        for _ in range(20):
            name = self.name()
            grant = self.eventually(lambda n=name: self.take(n), within=self.patience)
            assert not self.take(name)
            assert self.backend.release(grant) is True
            assert self.backend.release(grant) is False

    def test_a_lock_that_is_waited_for_is_had_soon_after_the_release(self) -> None:
        name = self.name()
        release = threading.Timer(0.2, self.backend.release, [self.take(name)])
        release.start()

        assert self._waited(name, 2 * self.patience) < self.patience

        release.join()

    def test_a_lock_that_is_waited_for_is_had_soon_after_the_holder_died(self) -> None:
        self.needs("expires")
        name = self.name()
        self.take(name, ttl=0.3)

        assert self._waited(name, 2 * self.patience) < self.patience

    def test_a_lock_that_stays_held_is_waited_for_as_long_as_asked(self) -> None:
        name = self.name()
        held = self.take(name)

        assert 0.3 - 0.005 <= self._waited(name, 0.3) < self.patience

        assert self.backend.release(held) is True
        assert self.take(name)

    def _waited(self, name: str, wait: float) -> float:
        """Take the lock, if it can be had within `wait` seconds; return how many it took."""
        began = monotonic()
        with suppress(LockTimeout):
            Lock(name, using=self.alias, wait=wait).acquire().release()
        return monotonic() - began


def _raises(verb: Callable[..., Any], *args: Any) -> None:
    try:
        answer = verb(*args)
    except BackendError:
        return
    raise AssertionError(f"{verb.__qualname__}() said {answer!r}: without an answer, it must raise")
