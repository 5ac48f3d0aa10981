"""For tests of projects, with pytest or not: locks in memory, one held elsewhere, one lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.test.utils import override_settings

from ..claims import Grant
from ..core.groups import Holds
from ..core.hold import Hold
from ..core.limits import checked_ttl
from ..core.offloading import begin
from ..core.registry import registry
from ..core.releasing import releaser
from ..primitives.names import checked
from .claims import a_claim

LOCMEM = "distlock_app.backends.locmem.LocMemBackend"


class override_locks(override_settings):
    """Let every alias of DISTLOCK lock in this process's memory, or with `backend`.

    In a `with`, or as the decorator of a function, a coroutine or a class derived from
    SimpleTestCase. `distlock_app.backends.dummy.DummyBackend` grants everything at once.
    """

    def __init__(self, backend: str = LOCMEM) -> None:
        if not isinstance(backend, str):
            raise TypeError("override_locks() takes the path of a backend: write @override_locks()")
        super().__init__()
        self._backend = backend

    def enable(self) -> None:
        self.options = self._options(registry.setting())
        super().enable()

    def save_options(self, test_func: Any) -> None:
        known = test_func._overridden_settings or {}
        self.options = self._options(known.get("DISTLOCK") or registry.setting())
        super().save_options(test_func)

    def _options(self, setting: dict[str, dict[str, Any]]) -> dict[str, Any]:
        def replaced(params: dict[str, Any]) -> dict[str, Any]:
            kept = {key: value for key, value in params.items() if key in ("TTL", "WAIT")}
            return {"BACKEND": self._backend, **kept}

        return {"DISTLOCK": {alias: replaced(params) for alias, params in setting.items()}}


@contextmanager
def held_elsewhere(name: str, *, using: str = "default", ttl: float = 60.0) -> Iterator[Grant]:
    """Hold the lock `name` as another process would; yield that grant."""
    backend = registry[using].backend
    claim = a_claim(checked(name), ttl=checked_ttl(ttl))
    # In another thread: the test may be a coroutine, which must not connect to a database.
    grant = begin(backend, backend.acquire, claim, 0).result()
    if not grant:
        raise AssertionError(f"the lock {name!r} is already held")
    try:
        yield grant
    finally:
        begin(backend, backend.release, grant).result()


def lose(hold: Hold | Holds) -> None:
    """Take the lock of `hold` away, and report the loss: as after an expiry or a clear.

    Other readers and permits keep theirs. Of several holds, each is lost.
    """
    if not isinstance(hold, (Hold, Holds)):
        raise TypeError(f"lose() takes a hold, not {hold!r}")
    for one in hold if isinstance(hold, Holds) else [hold]:
        lease = one._lease
        begin(lease.backend, lease.backend.release, lease.grant).result()
        releaser.lose(lease, "taken away by a test")
