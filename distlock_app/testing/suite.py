"""What the parts of the backends' suite have in common: the backend, names, flags, deadlines."""

from __future__ import annotations

import secrets
from random import uniform
from time import sleep
from typing import Any
from unittest import SkipTest

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


class Suite:
    """The base of the suite's parts."""

    alias = "default"

    @property
    def backend(self) -> Any:
        """The backend under test."""
        return registry[self.alias].backend

    def name(self) -> str:
        """Return a name that no other test uses."""
        return f"contract-{secrets.token_hex(6)}"

    def teardown_method(self) -> None:
        """Take away what the test still holds."""
        for holding in list(self.backend.holders() if self.backend.lists else ()):
            if holding.name.startswith("contract-"):
                self.backend.clear(holding.key)

    @staticmethod
    def eventually(attempt: Any, *, within: float) -> Any:
        """Return the first true answer of `attempt`, or fail after `within` seconds."""
        deadline, pause = monotonic() + within, 0.002
        while monotonic() < deadline:
            if answer := attempt():
                return answer
            sleep(uniform(0, pause))  # tries at the same time get in each other's way
            pause = min(2 * pause, 0.1)
        raise AssertionError(f"still nothing after {within} s")

    def needs(self, *flags: str) -> None:
        """Skip the test for a backend without one of `flags`."""
        for flag in flags:
            if not getattr(self.backend, flag):
                raise SkipTest(WITHOUT[flag])

    def take(self, name: str, **fields: Any) -> Any:
        """Try once to take the lock; return the answer."""
        return self.backend.acquire(a_claim(name, **fields), 0)
