"""Releases that no caller waits for, in worker threads with retries; and the end of lost leases.

Requests go to a few worker threads per backend, so that a backend that hangs does not delay the
others, and renewals do not wait for releases. Failed releases are retried until the claim expires.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import sleep
from typing import Any
from weakref import WeakKeyDictionary, finalize

from ..backends.base import BaseLockBackend
from ..claims import Grant
from ..errors import BackendError
from ..primitives.forks import at_exit, in_child
from ..primitives.logs import fields, logger
from ..primitives.threads import Worker
from ..primitives.timing import monotonic
from .lease import Lease
from .reporting import EXIT_PATIENCE, report_lost, report_released
from .timer import timer

THREADS = 4  # per backend
# Seconds until a failed release is retried, before and after the end of the claim.
RETRY = 0.25
RETRY_LATE = 1.0


@dataclass(slots=True, eq=False)
class Release:
    """A claim to release, retried until it succeeds or until `until`."""

    backend: BaseLockBackend
    grant: Grant
    until: float  # by monotonic()
    ask: Callable[[], Any]  # releases it
    lease: Lease | None = None  # its end is reported
    due: float | None = None


def release_of(backend: BaseLockBackend, grant: Grant) -> Callable[[], Any]:
    """Return the call that releases a claim which may have been granted.

    A stable owner only leaves the queue: others may have the claim, or the caller again.
    """
    if grant.claim.stable:
        return partial(backend.withdraw, grant.claim)
    return partial(backend.release, grant)


class Releaser:
    """Makes releases that no caller waits for."""

    def __init__(self) -> None:
        self._under_way: set[Release] = set()
        # Weak: otherwise the workers would keep the backend alive.
        self._workers: WeakKeyDictionary[BaseLockBackend, Worker] = WeakKeyDictionary()
        # After a failed release its backend is left alone until this time: there may be very many.
        self._quiet: WeakKeyDictionary[BaseLockBackend, float] = WeakKeyDictionary()

    def give_back(
        self, backend: BaseLockBackend, grant: Grant, ask: Callable[[], Any] | None = None
    ) -> None:
        """Let a worker release what may have been granted, by `ask` unless others share it."""
        if ask is None or grant.claim.stable:
            ask = release_of(backend, grant)
        release = Release(backend, grant, monotonic() + grant.claim.ttl, ask)
        self._under_way.add(release)
        self._put(release)

    def give_back_now(
        self, backend: BaseLockBackend, grant: Grant, ask: Callable[[], Any] | None = None
    ) -> None:
        """Like `give_back`, in this thread if it succeeds; after Ctrl-C the process may end."""
        try:
            (ask or release_of(backend, grant))()
        except BaseException as again:  # the backend is down, or a second Ctrl-C
            self.give_back(backend, grant, ask)
            if not isinstance(again, Exception):
                raise

    def release_later(self, lease: Lease, ask: Callable[[], bool]) -> None:
        """Release `lease` unless it is taken again first. Never blocks; safe in a finalizer."""
        release = Release(lease.backend, lease.grant, 0.0, ask, lease)
        self._under_way.add(release)
        timer.soon(partial(self._end, release, lease))

    def let_expire(self, lease: Lease) -> None:
        """Release a dropped lease when its time is over, if its backend does not; never blocks.

        Safe in a finalizer.
        """
        timer.cancel(lease)
        if not lease.backend.expires:
            timer.soon(partial(self._at_its_end, lease))

    def lose(self, lease: Lease, reason: str, *, at_release: bool = False) -> None:
        """End `lease` as lost and report it, once."""
        callbacks = lease.lose(reason, at_release=at_release)
        if callbacks is None:
            return
        if not lease.backend.expires:
            self.give_back(lease.backend, lease.grant)
        report_lost(lease, reason, callbacks)

    def ended(self, lease: Lease, was_ours: bool) -> None:
        """Report the outcome of a release that no caller waits for."""
        if was_ours and lease.lost_because is None:
            report_released(lease)
        else:
            self.lose(lease, "it was lost before the transaction ended", at_release=True)

    def drain(self, lease: Lease | None = None) -> None:
        """Wait for pending releases, or one, but not for a backend that does not answer."""
        end = monotonic() + EXIT_PATIENCE
        while monotonic() < end:
            pending = [one for one in self._under_way.copy() if lease in (None, one.lease)]
            if not pending:
                return
            for release in pending:
                if (worker := self._workers.get(release.backend)) is not None:
                    worker.do_without_thread()
            sleep(0.001)

    def _end(self, release: Release, lease: Lease) -> None:
        if lease.end_if_unused():
            timer.cancel(lease)
            release.until = lease.trusted_until
            self._put(release)
        else:
            self._under_way.discard(release)

    def _at_its_end(self, lease: Lease) -> None:
        end, ask = lease.trusted_until, release_of(lease.backend, lease.grant)
        timer.at(end, Release(lease.backend, lease.grant, end + lease.ttl, ask), self._put)

    def _put(self, release: Release) -> None:
        backend = release.backend
        worker = self._workers.get(backend) or self._workers.setdefault(
            backend, Worker(f"distlock-release-{backend.alias}", self._try, threads=THREADS)
        )
        worker.put(release)

    def _try(self, release: Release) -> None:
        backend, now = release.backend, monotonic()
        if now < (quiet_until := self._quiet.get(backend, 0.0)):
            timer.at(quiet_until, release, self._put)
            return
        late = now >= release.until
        # A claim without expiry is retried: its backend says when the session is over.
        over = late and backend.expires
        try:
            if over:
                raise BackendError("its lease has ended")
            was_ours = release.ask()
        except BaseException as error:
            if over or release.grant.claim.stable:
                self._done(release)
                logger.warning(
                    "gave up releasing a lock (alias %r): %s",
                    *(backend.alias, error),
                    extra=fields("not_released", backend.alias, release.grant, error=str(error)),
                )
                return
            again = self._quiet[backend] = monotonic() + (RETRY_LATE if late else RETRY)
            timer.at(again, release, self._put)
        else:
            if release.lease is not None:
                self.ended(release.lease, was_ours)
            self._done(release)

    def _done(self, release: Release) -> None:
        self._under_way.discard(release)
        if release.lease is not None:
            release.lease.leave_runner()


releaser = Releaser()
in_child(releaser.__init__)  # type: ignore[misc]
# The first finalizer registers the exit hook of all, and hooks run in reverse: drain() has to come
# before the finalizers that close connections. This one does nothing.
finalize(releaser, int)
at_exit(releaser, releaser.drain)
