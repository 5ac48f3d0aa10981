"""Wakers end the pause of a waiting thread or task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from weakref import ref

from ..claims import Grant
from ..primitives.polling import readable
from ..primitives.threads import Gate


class Waker:
    """Ends the pause of a waiting thread."""

    blocking = True  # see Claim
    # Class defaults: most locks are free, and most wakers are never used.
    _grant: Grant | None = None
    _woken = False  # before the first sleep
    _gate: Gate | None = None

    def wake(self, grant: Grant | None) -> None:
        """Wake the waiter; may be called from any thread, any number of times."""
        if grant is not None:
            self._grant = grant
        self._woken = True  # first: `wait` checks in the opposite order
        if self._gate is not None:
            self._gate.open()

    def wait(self, seconds: float, wake_fd: int | None = None) -> Grant | None:
        """Sleep until woken or until `wake_fd` is readable, at most `seconds`."""
        if wake_fd is None:
            if self._gate is None:
                self._gate = Gate()
                if self._woken:
                    seconds = 0.0
            self._gate.wait(seconds)
        else:  # a backend with a wake_fd does not call wake()
            readable(wake_fd, seconds)  # which opens no file: there may be none left
        grant, self._grant = self._grant, None
        return grant


class AsyncWaker:
    """Ends the pause of a waiting asyncio task."""

    __slots__ = ("__weakref__", "_grant", "_loop", "_woken", "on_loop_closed", "over")

    blocking = False

    def __init__(self) -> None:
        self.on_loop_closed: Callable[[], None] | None = None
        self.over = False  # nobody waits any longer: what it is granted now is given back
        self._grant: Grant | None = None
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    @property
    def wake(self) -> Callable[[Grant | None], None]:
        """What wakes the waiter; may be called from any thread, any number of times.

        It raises RuntimeError if its loop is closed: no waiter is left to take a grant. A backend
        that keeps it keeps no task alive: those of a closed loop may hold locks.
        """
        found = ref(self)

        def wake(grant: Grant | None) -> None:
            if (waker := found()) is not None and not waker.over:
                waker._wake(grant)

        return wake

    def _wake(self, grant: Grant | None) -> None:
        if grant is not None:
            self._grant = grant
        try:
            self._loop.call_soon_threadsafe(self._woken.set)
        except RuntimeError:
            if self.on_loop_closed is not None:
                self.on_loop_closed()
            raise

    async def wait(self, seconds: float, wake_fd: int | None = None) -> Grant | None:
        """Sleep until woken or until `wake_fd` is readable, at most `seconds`."""
        # Not wait_for(): before Python 3.12 it swallows a cancellation as it is woken.
        timer = self._loop.call_later(seconds, self._woken.set)
        if wake_fd is not None:
            with suppress(NotImplementedError):  # the default loop of Windows: it polls
                self._loop.add_reader(wake_fd, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()
            if wake_fd is not None:
                with suppress(NotImplementedError):
                    self._loop.remove_reader(wake_fd)
        self._woken.clear()
        grant, self._grant = self._grant, None
        return grant
