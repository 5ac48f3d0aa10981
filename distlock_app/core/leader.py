"""`Leader`: leader election; of all candidate processes, one does the work at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from threading import Event
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..errors import BackendError, LockLost
from ..primitives.calls import refuse_undone
from ..primitives.logs import fields, logger
from ..primitives.names import shown
from ..primitives.threads import threads_are_greenlets
from ..primitives.timing import full_jitter
from .hold import Hold
from .limits import UNSET
from .lock import Lock
from .offloading import begin_alone
from .registry import aliases_of, registry

# Seconds for which the event loop sleeps at most: Python runs the handler of a signal that came
# just before it slept, or in another thread, when it wakes.
WAKE_EVERY = 1.0
# Shortest and longest pause in seconds before retrying a backend that does not answer.
RETRY_MIN, RETRY_MAX = 0.1, 5.0


class Leader:
    """Runs `work` in one process at a time: `Leader("beat", work).run()` in each of them.

    A function runs in its own thread and receives an Event that is set when it must end: after a
    loss of the lock, or stop(). A coroutine function takes no argument and is cancelled instead.
    `ttl`: seconds until the next process leads after this one was killed.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Event], object] | Callable[[], Coroutine[Any, Any, object]],
        *,
        ttl: float = UNSET,
        using: str | tuple[str, ...] = "default",
    ) -> None:
        self._lock = Lock(name, ttl=ttl, wait=None, using=using)
        self._work: Callable[..., Any] = work
        self._stopped = False
        self._standing: asyncio.Future[None] | None = None
        self.hold: Hold | None = None  # while it leads

    @property
    def is_leader(self) -> bool:
        """Whether this process leads; turns False before another one can. Sends no request."""
        hold = self.hold
        return hold is not None and not (hold.lost or hold.released)

    def run(self) -> None:
        """Wait for the turn and do the work; repeat after a loss, until the work returns or stop().

        Exceptions of the work pass through. A backend that does not answer is retried.
        """
        if threads_are_greenlets():  # to Django, the loop would run in all of them
            raise ImproperlyConfigured(
                "gevent has patched threads: a Leader needs a process without gevent, for example"
                " a management command"
            )
        asyncio.run(self.arun())

    async def arun(self) -> None:
        """Like `run`, in this event loop; a cancellation ends the work and the lead."""
        standing = self._standing = asyncio.ensure_future(self._stand())
        self._wake_again(asyncio.get_running_loop())
        try:
            await standing
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        finally:
            self._alarm.cancel()

    def stop(self) -> None:
        """Make run() end the work and the lead, and return; from any thread or signal handler."""
        stopped, self._stopped = self._stopped, True
        if self._standing is not None and not stopped:
            with suppress(RuntimeError):  # the loop is closed
                self._standing.get_loop().call_soon_threadsafe(self._standing.cancel)

    def _wake_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = loop.call_later(WAKE_EVERY, self._wake_again, loop)

    async def _stand(self) -> None:
        failures, aliases = 0, aliases_of(self._lock.using)
        while not self._stopped:
            again, failure = False, None
            try:
                async with self._lock as hold:
                    failures = 0
                    failure = await self._lead(hold)
            except LockLost:
                again = failure is None or isinstance(failure, (LockLost, asyncio.CancelledError))
            except BackendError as error:
                again = True
                logger.warning(
                    "cannot take the lock %r to lead: %s",
                    *(shown(self._lock.name), error),
                    extra=fields("not_elected", ", ".join(aliases), error=str(error)),
                )
            if not again:
                if failure is not None:
                    raise failure
                return
            await asyncio.sleep(full_jitter(failures, base=RETRY_MIN, cap=RETRY_MAX))
            failures += 1

    async def _lead(self, hold: Hold) -> BaseException | None:
        """Do the work until it ends; return its exception, if any."""
        loop, ended = asyncio.get_running_loop(), Event()
        work: asyncio.Future[Any]
        end: Callable[[], object]
        self.hold = hold
        if iscoroutinefunction(self._work):
            work = asyncio.ensure_future(self._work())
            end = work.cancel
        else:
            backend = registry[aliases_of(self._lock.using)[0]].backend
            work = asyncio.wrap_future(begin_alone(backend, _call, self._work, ended))
            end = ended.set
        hold.on_lost(lambda _: loop.call_soon_threadsafe(end))
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            if not self._stopped:  # after stop(), the `with` ends as after the work's own end
                raise
        finally:
            while not work.done():  # however often it is cancelled: the next one leads after that
                end()
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([work])
            self.hold = None
        return asyncio.CancelledError() if work.cancelled() else work.exception()


def _call(work: Callable[[Event], object], ended: Event) -> None:
    try:
        refuse_undone(work(ended), work)
    except StopIteration as error:  # a future of asyncio refuses it, and would never be done
        raise RuntimeError("the work of a Leader raised StopIteration") from error
    finally:
        connections.close_all()
