"""The part of the backends' suite about what goes wrong: answers, data, servers, waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing, suppress
from functools import wraps
from time import sleep
from typing import Any
from unittest import SkipTest

from ..claims import Grant
from ..core.lock import Lock
from ..errors import BackendError, LockTimeout
from ..primitives.timing import monotonic
from .claims import a_claim
from .suite import ROUNDING, Suite


class FaultContract(Suite):
    """The promises of a backend when something goes wrong; see LockBackendContract."""

    def broken(self) -> Any:
        """Return a backend like the one under test, whose server does not answer."""
        raise SkipTest("the test class has no broken()")

    def lose_data(self) -> None:
        """Make the server forget everything, as after a crash without a disk."""
        raise SkipTest("the test class has no lose_data()")

    def test_a_server_that_does_not_answer_is_an_error(self) -> None:
        grant = Grant(a_claim(self.name()))

        try:
            broken = self.broken()
        except BackendError as error:
            raise AssertionError("broken() failed: nothing connects in __init__()") from error
        with closing(broken) as backend:  # its threads would go on trying to connect
            self._raises(backend.ping)
            self._raises(backend.acquire, grant.claim, 0)
            if self.backend.expires:  # else the claim has ended with its session, for certain
                self._raises(backend.extend, grant, 30)
                self._raises(backend.end_in, grant, 30)
                self._raises(backend.release, grant)
            if self.backend.lists:
                self._raises(backend.holders, grant.claim.key)
                self._raises(backend.clear, grant.claim.key)

    def test_fences_grow_also_after_the_data_was_lost(self) -> None:
        name = self.name()
        first = self.take(name)
        self.lose_data()

        assert self.backend.extend(first, 30) is False
        second = self.eventually(lambda: self.take(name))
        if self.backend.fences:
            assert second.fence > first.fence
        assert self.backend.release(first) is False
        assert self.backend.release(second) is True

    def test_what_was_granted_by_a_lost_answer_can_be_released(self) -> None:
        claim = a_claim(self.name())
        self.backend.acquire(claim, 0)

        self.backend.release(Grant(claim))  # all that the core knows then

        # Soon: the server may not have noticed yet the end of the connection that asked first.
        within = min(self.patience, claim.ttl / 3)
        assert self.eventually(lambda: self.take(claim.name), within=within)

    def test_what_is_granted_again_lasts_for_a_whole_ttl_again(self) -> None:
        self.needs("expires")
        claim = a_claim(self.name(), ttl=0.6)
        self.backend.acquire(claim, 0)
        sleep(0.3)
        asked_at = monotonic()

        assert self.backend.acquire(claim, 0)

        self.eventually(lambda: self.take(claim.name))
        assert monotonic() - asked_at >= 0.6 - ROUNDING

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

    def test_only_a_backend_that_blocks_waits_in_acquire(self) -> None:
        name = self.name()
        held, waiter = self.take(name), a_claim(name, wake=lambda grant: None)
        # Shorter than asked() waits, which would blame it for a hang.
        wait = 0.5 if self.backend.blocks else 5 * self.patience
        began = monotonic()

        refusal = self.asked(self.backend.acquire, waiter, wait).result()

        took = monotonic() - began
        assert not refusal
        if self.backend.blocks:
            assert took >= wait - ROUNDING, "it has `blocks`, so acquire() must wait itself"
        else:
            assert took < self.patience, "acquire() waits: it must answer at once, or set `blocks`"
        self.backend.acquire(waiter, 0)
        self.backend.release(held)

    def test_a_lock_that_stays_held_is_waited_for_as_long_as_asked(self) -> None:
        name = self.name()
        held = self.take(name)

        assert 0.3 - ROUNDING <= self._waited(name, 0.3) < self.patience

        assert self.backend.release(held) is True
        assert self.take(name)

    def _waited(self, name: str, wait: float) -> float:
        """Take the lock, if it can be had within `wait` seconds; return how many it took."""
        lock, began = Lock(name, using=self.alias, wait=wait), monotonic()
        with suppress(LockTimeout):
            self.asked(lock.acquire).result().release()
        return monotonic() - began

    def _raises(self, verb: Callable[..., Any], *args: Any) -> None:
        """Fail unless it raises BackendError, and soon."""

        @wraps(verb)
        def ask() -> Any:
            answer = verb(*args)
            return answer if answer is None or verb.__name__ != "holders" else [*answer]

        asked, what = self.asked(ask), f"{verb.__qualname__}()"
        error = asked.exception()
        if isinstance(error, BackendError):
            return
        must = "without an answer, it must raise BackendError"
        if error is not None:
            raise AssertionError(f"{what} raised {error!r}: {must}") from error
        raise AssertionError(f"{what} said {asked.result()!r}: {must}")
