"""What the parts of the backends' suite have in common: the backend, names, flags, deadlines."""

from __future__ import annotations

import secrets
from concurrent.futures import Future, wait
from random import uniform
from time import sleep
from typing import Any
from unittest import SkipTest

from django.core.exceptions import ImproperlyConfigured
from django.utils.functional import cached_property

from ..backends.base import BaseLockBackend
from ..claims import Grant
from ..core.offloading import begin_alone
from ..core.registry import registry
from ..primitives.timing import monotonic
from .claims import a_claim

# Why a backend without a flag is spared a test.
WITHOUT = {
    "expires": "its claims end with their session",
    "fences": "it has no fencing tokens",
    "shares": "it has no shared claims",
    "limits": "it has no semaphore permits",
    "queues": "it does not keep the order of arrival",
    "latches": "it has no latches",
    "prolongs": "its claims cannot be extended by hand",
    "lists": "it cannot list its locks",
}

# All that is either true or false.
FLAGS = (*WITHOUT, "blocks", "local", "pushes")

# The methods behind a flag.
PROMISED = {
    "lists": ("holders", "clear"),
    "latches": ("count_down", "counted"),
    "prolongs": ("prolong",),
}

# Seconds by which a wait may seem too short: the backends' clocks count whole milliseconds.
ROUNDING = 0.005


class Suite:
    """The base of the suite's parts."""

    alias = "default"
    patience = 10.0  # seconds in which all has to happen that is waited for

    @property
    def backend(self) -> Any:
        """The backend under test."""
        return registry[self.alias].backend

    def name(self) -> str:
        """Return a name that no other test uses."""
        return f"{self._mine}{secrets.token_hex(6)}"

    @cached_property
    def _mine(self) -> str:
        """What the names of this test begin with; other processes may test the same backend."""
        return f"contract-{secrets.token_hex(6)}-"

    def teardown_method(self) -> None:
        """Take away what the test still holds."""
        try:
            backend = self.backend
        except ImproperlyConfigured:
            return  # as the test has said
        if backend.lists and not lacking(backend):
            for holding in list(backend.holders()):
                if holding.name.startswith(self._mine):
                    backend.clear(holding.key)

    def eventually(self, attempt: Any, *, within: float | None = None) -> Any:
        """Return the first true answer of `attempt`, or fail after `within` or `patience` s."""
        within = self.patience if within is None else within
        deadline, pause, answer = monotonic() + within, 0.002, None
        while monotonic() < deadline:
            if answer := attempt():
                return answer
            sleep(uniform(0, pause))  # tries at the same time get in each other's way
            pause = min(2 * pause, 0.1)
        raise AssertionError(f"still {answer!r} after {within} s")

    def needs(self, *flags: str) -> None:
        """Skip the test for a backend without one of `flags`."""
        for flag in flags:
            if not getattr(self.backend, flag):
                raise SkipTest(WITHOUT[flag])

    def take(self, name: str, **fields: Any) -> Any:
        """Try once to take the lock; return the answer."""
        answer = self.asked(self.backend.acquire, a_claim(name, **fields), 0).result()
        assert isinstance(answer, Grant) or not answer, (
            f"acquire() said {answer!r}: it must be a Grant, a Busy or None"
        )
        return answer

    def take_here(self, name: str) -> Any:
        """Like `take`, but in this very thread, for races that another one would blunt."""
        return self.backend.acquire(a_claim(name), 0)

    def asked(self, verb: Any, *args: Any) -> Future[Any]:
        """Call `verb` in another thread; fail if it hangs."""
        call, limit = begin_alone(self.backend, verb, *args), 6 * self.patience
        assert wait([call], limit).done, (
            f"{verb.__qualname__}() still hangs after {limit} s: give requests a time limit"
        )
        return call

    def count_to_ten(self, counter: Any, name: str) -> None:
        """Add 1 to `counter[0]` ten times, under the lock: without it, some would be lost."""
        for _ in range(10):
            claim = a_claim(name)
            grant = self.eventually(lambda c=claim: self.backend.acquire(c, 0), within=50)
            seen = counter[0]
            sleep(0.0005)
            counter[0] = seen + 1
            self.backend.release(grant)

    def only_holding(self, key: str) -> Any:
        """Return what is listed of a lock that has one holder."""
        found = list(self.backend.holders(key))
        assert [held.key for held in found] == [key], (
            f"holders({key!r}) listed {found}: it must be the one claim under this key"
        )
        return found[0]


def lacking(backend: Any) -> list[str]:
    """Return the methods that its flags promise and that it does not have."""
    return [
        f"{flag} = True, but no {verb}()"
        for flag, verbs in PROMISED.items()
        for verb in verbs
        if getattr(backend, flag) and getattr(type(backend), verb) is getattr(BaseLockBackend, verb)
    ]
