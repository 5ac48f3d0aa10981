"""One attempt of a worker: acquire, write with the fence, release; all of it is noted."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from distlock_app import BackendError, Hold, Lock, LockBusy, LockLost

if TYPE_CHECKING:
    from tests.faults.workers import Worker


class Turn:
    """An attempt with a number of its own, so that a worker can make several at a time."""

    def __init__(
        self, worker: Worker, *, renew: bool = True, name: str = "", ttl: float = 0.0
    ) -> None:
        """Ask for a lock that the worker chooses, for its ttl, unless they are given."""
        worker.number += 1
        self.worker = worker
        self.number = worker.number
        name = name or worker.chance.choice(worker.names)
        wait = worker.chance.choice(worker.waits)
        self.lock = Lock(name, ttl=ttl or worker.ttl, wait=wait, renew=renew)
        self.note("ask", name=name, wait=wait, **({"ttl": ttl} if ttl else {}))

    def note(self, what: str, *, t: float | None = None, **facts: Any) -> None:
        self.worker.recorder.note(what, t=t, n=self.number, **facts)

    def acquire(self) -> Hold | None:
        """Acquire; None if that failed."""
        try:
            hold = self.lock.acquire()
        except (LockBusy, BackendError) as error:
            self.failed(error)
            sleep(0.005 if isinstance(error, LockBusy) else 0.05)
            return None
        self.note("got", fence=hold.fence)
        return hold

    def failed(self, error: LockBusy | BackendError | CancelledError) -> None:
        """Note how acquire() ended without a hold."""
        kinds = {LockBusy: "busy", CancelledError: "cancelled"}
        what = next((kinds[kind] for kind in kinds if isinstance(error, kind)), "error")
        self.note(what, error=repr(error))

    def write(self, hold: Hold, for_seconds: float = 0.0) -> None:
        """Write to the store as long as the hold says that the lock is ours."""
        worker, end = self.worker, monotonic() + for_seconds
        while True:
            looked = monotonic()
            if hold.lost:
                self.note("over", t=looked)
                sleep(worker.chance.uniform(0, worker.ttl))  # its release comes late
                return
            self.note("ours", t=looked)
            # Here the process may be stopped for long: so late a write is for the fence to refuse.
            if not worker.store.write(hold.name, hold.fence, f"{worker.who}#{self.number}"):
                self.note("refused")
                return
            if monotonic() >= end:
                return
            sleep(min(0.002 if for_seconds < 0.1 else 0.05, max(0.0, end - monotonic())))

    def release(self, hold: Hold) -> None:
        with self.leaving():
            hold.release()
        if self.answer == "unknown":
            with suppress(LockLost):
                hold.leave(None)

    async def arelease(self, hold: Hold) -> None:
        with self.leaving():
            await hold.arelease()
        if self.answer == "unknown":
            with suppress(LockLost):
                await hold.aleave(None)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Note how the release went that is done inside of it."""
        self.note("leave")
        self.answer = "released"
        try:
            yield
        except LockLost:
            self.answer = "lost"
        except BackendError:
            self.answer = "unknown"
        self.note(self.answer)
