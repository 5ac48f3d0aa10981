"""`Latch`: wait until a number of parties are done."""

from __future__ import annotations

import asyncio
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ..backends.base import BaseLockBackend
from ..claims import Claim, Grant
from ..errors import LockBusy
from ..primitives import identity, names
from .acquiring import stable_token
from .limits import UNSET, checked_ttl, checked_wait
from .offloading import in_thread
from .registry import registry
from .releasing import releaser
from .waiting import acquired, arun
from .wakers import AsyncWaker, Waker


@dataclass(frozen=True, slots=True)
class Latch:
    """A gate that opens when `count` parties have counted down, and stays open.

    A description, free of I/O and safe to share. All parties use the same name and count. The
    count is deleted `ttl` seconds after the last count_down(), which closes the latch again, so
    use a new name for each round. A latch is independent of a lock of the same name.

    Raise TypeError, ValueError or ImproperlyConfigured when it is created.
    """

    name: str
    count: int
    _: KW_ONLY
    ttl: float = 3600.0
    using: str = "default"

    def __post_init__(self) -> None:
        names.checked(self.name)
        checked_ttl(self.ttl)
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"count must be a whole number of 1 or more, not {self.count!r}")
        if not self._backend.latches:
            kind = type(self._backend).__name__
            raise ValueError(f"a Latch is not possible with {kind} (alias {self.using!r})")

    def count_down(self, *, by: str | None = None) -> int:
        """Count one more as done; return how many are left.

        Calls with the same `by` count once, so a task may be run again.
        """
        return self._left(self._backend.count_down(self._claim(by)))

    async def acount_down(self, *, by: str | None = None) -> int:
        """Like `count_down`, without blocking the event loop."""
        return self._left(await in_thread(self._backend, self._backend.count_down, self._claim(by)))

    def wait(self, timeout: float | None = UNSET) -> bool:
        """Wait until it is open; return whether it is within `timeout` seconds.

        By default the alias's WAIT; None waits forever. Raise BackendError.
        """
        if asyncio._get_running_loop() is not None:
            identity.refuse_to_block("`await latch.await_()`")
        waker = Waker()
        claim = self._claim(None, waker)
        try:
            acquired(self._backend, claim, self._timeout(timeout), waker)
        except LockBusy:
            return False
        except BaseException:
            releaser.give_back(self._backend, Grant(claim))
            raise
        return True

    async def await_(self, timeout: float | None = UNSET) -> bool:
        """Like `wait`, without blocking the event loop: a waiting task costs no thread."""
        waker = AsyncWaker()
        claim = self._claim(None, waker)
        try:
            await arun(self._backend, claim, self._timeout(timeout), waker)
        except LockBusy:
            return False
        except Exception:
            releaser.give_back(self._backend, Grant(claim))
            raise
        return True

    def left(self) -> int:
        """Return how many have yet to count down."""
        return self._left(self._backend.counted(self._key))

    async def aleft(self) -> int:
        """Like `left`, without blocking the event loop."""
        return self._left(await in_thread(self._backend, self._backend.counted, self._key))

    @property
    def _backend(self) -> BaseLockBackend:
        return registry[self.using].backend

    @property
    def _key(self) -> str:
        return names.key_of(self.name, b"latch")

    def _left(self, counted: int) -> int:
        return max(0, self.count - counted)

    def _timeout(self, timeout: Any) -> float | None:
        return registry[self.using].wait if timeout is UNSET else checked_wait(timeout)

    def _claim(self, by: str | None, waker: Waker | AsyncWaker | None = None) -> Claim:
        if by is not None and not isinstance(by, str):
            raise TypeError(f"by must be a text, not {by!r}")
        return Claim(
            name=self.name,
            key=self._key,
            owner=identity.new_token() if by is None else stable_token(by),
            ttl=self.ttl,
            holder=identity.holder_text(),
            limit=self.count,
            latch=True,
            wake=None if waker is None else waker.wake,
            blocking=waker is not None and waker.blocking,
        )
