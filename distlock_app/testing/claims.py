"""Claims for tests that talk to a backend directly, and a waiter without the core's loop."""

from __future__ import annotations

import secrets
import threading
from typing import Any

from ..claims import Claim, Grant
from ..primitives import names
from ..primitives.timing import monotonic


def a_claim(name: str, *, ttl: float = 30.0, **fields: Any) -> Claim:
    """Return a claim of a new owner, for tests that talk to a backend directly."""
    holder = '{"host":"elsewhere","pid":1,"thread":"test"}'
    fields = {"owner": secrets.token_hex(16), "holder": holder, **fields}
    return Claim(name=name, key=names.key_of(name), ttl=ttl, **fields)


class Waiter:
    """A claim that waits, without the core's loop."""

    def __init__(self, backend: Any, name: str, **fields: Any) -> None:
        self._backend = backend
        self._woken = threading.Event()
        self._given: Grant | None = None
        self.claim = a_claim(name, wake=self._wake, **fields)
        assert not self.ask()

    def ask(self) -> Any:
        """Try once, as a waiter that will go on waiting."""
        return self._backend.acquire(self.claim, 30)

    def waits(self) -> bool:
        """Ask again; return whether it still waits."""
        return not self._given and not self.ask()

    def granted(self) -> Grant:
        """Wait for the grant, by message or by asking again."""
        deadline = monotonic() + 10
        pause = self._backend.poll_max if self._backend.pushes else self._backend.poll_min
        while monotonic() < deadline:
            if self._woken.wait(pause) and self._given:
                return self._given
            self._woken.clear()
            answer: Grant | None = self.ask() or None
            if answer:
                return answer
        raise AssertionError("not granted within 10 s")

    def _wake(self, grant: Grant | None) -> None:
        self._given = grant
        self._woken.set()
