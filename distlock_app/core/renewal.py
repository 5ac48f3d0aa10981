"""Background threads: renew leases, report losses, retry releases that failed.

One daemon thread per process keeps the time of every lease, and never waits for an engine:
so a loss is reported on time even while an engine hangs. Requests go to worker threads of each
engine in use (one hanging engine delays no other), which end when idle: one renews in batches,
and a few others release, so that no renewal waits for a release.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import os
import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from time import sleep
from typing import Any

from django.db import connections

from ..backends.base import BaseLockBackend
from ..claims import Grant
from ..errors import BackendError
from ..primitives.logs import fields, logger
from ..primitives.names import shown
from ..primitives.threads import Worker, started
from ..primitives.timing import monotonic
from ..signals import lock_lost, lock_released, send
from .lease import Lease

RENEW_AT = 1 / 3  # of the ttl
# Renewals begin at multiples of this, also of the ttl: those of many holds go together.
RENEW_STEP = 1 / 100
# What is held for longer than this, of the ttl before its end, goes onto the heap.
YOUNG_UNTIL = 1 - RENEW_AT + RENEW_STEP
# After an error: tried again this often in what is left of the trust, within these bounds.
RETRIES_LEFT = 8
RETRY_MIN = 0.02
RETRY_MAX = 1.0
LATE = "it was not renewed in time"
GONE = "the engine says that it is gone or has another owner"
FAILED = "the lock renewer failed and goes on"
RELEASERS = 4  # threads of each engine
EXIT_PATIENCE = 2.0  # seconds that the end of the process waits for releases under way


class Renewer:
    """The clock of all leases of this process, and the workers that ask their engines."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may release in the middle of any of the methods below.
        self._lock = threading.RLock()
        # (due, number, lease or the arguments of a release to try again)
        self._heap: list[tuple[float, int, Lease | tuple[Any, ...]]] = []
        # Most are released before the renewer looks at them, and never come onto the heap.
        self._young: set[Lease] = set()
        self._stale = 0  # entries in the heap of leases that have ended or moved on
        self._numbers = itertools.count()
        self._wakes_at = float("inf")
        # SimpleQueue.put may be called from a finalizer, in whatever the thread was doing.
        self._inbox: queue.SimpleQueue[tuple[int | None, Lease] | None] = queue.SimpleQueue()
        self._running = False
        # The one that extends, and the one that releases.
        self._workers: weakref.WeakKeyDictionary[BaseLockBackend, tuple[Worker, Worker]]
        self._workers = weakref.WeakKeyDictionary()
        # Until when no other release is tried, after one that failed: they may be very many.
        self._quiet: weakref.WeakKeyDictionary[BaseLockBackend, float]
        self._quiet = weakref.WeakKeyDictionary()
        self._notifier = Worker("distlock-notifier", _call_all)
        self._releases: set[int] = set()  # numbers of the releases under way

    def watch(self, lease: Lease) -> None:
        """Keep `lease` renewed, and report its loss, until it has ended."""
        # In this order: `_due` looks the other way round.
        self._young.add(lease)
        first_look = lease.trusted_until - lease.term * YOUNG_UNTIL
        if lease.backend.heartbeat is not None:
            first_look = min(first_look, self._next_look(lease))
        if first_look < self._wakes_at:
            self._wake_at(first_look)

    def unwatch(self, lease: Lease) -> None:
        """Forget `lease`, which has ended."""
        if not lease.ended:
            lease.end()
        self._young.discard(lease)
        if lease.due is not None:
            with self._lock:
                lease.due = None
                self._note_stale()

    def await_renewal(self, lease: Lease) -> None:
        """Wait for the end of a renewal of `lease`, which has ended, if one is under way."""
        if (workers := self._workers.get(lease.backend)) is None:
            return
        done = threading.Event()
        workers[0].put((lease.backend, done))  # it is set when those before have ended
        done.wait(max(0.0, lease.trusted_until - monotonic()))

    def release_later(self, lease: Lease) -> None:
        """Release `lease` on a worker thread, trying until it ends by itself; never blocks.

        Unless it is taken again meanwhile. Safe in a finalizer.
        """
        number = next(self._numbers)
        self._releases.add(number)
        lease.pending_release = number
        self._inbox.put((number, lease))

    def let_expire(self, lease: Lease) -> None:
        """Release a dropped lease when its time is up, if its engine does not; never blocks.

        Safe in a finalizer.
        """
        self._young.discard(lease)
        if not lease.backend.expires:
            self._inbox.put((None, lease))

    def give_back(self, backend: BaseLockBackend, grant: Grant) -> None:
        """Release what may have been granted, on a worker thread, trying until it ends by itself.

        Not for a stable owner, which may have got the lock again by then.
        """
        if not grant.claim.stable:
            self._give_back(backend, grant)

    def _give_back(self, backend: BaseLockBackend, grant: Grant) -> None:
        number = next(self._numbers)
        self._releases.add(number)
        self._put_release(backend, number, grant, monotonic() + grant.claim.ttl, None)

    def released(self, lease: Lease, was_ours: bool) -> None:
        """Report the outcome of a release in the background."""
        if was_ours and lease.lost_because is None:
            if lock_released.receivers:
                self._notifier.put(partial(send, lock_released, lease_facts(lease)))
        else:
            self.lose(lease, "it was gone before the transaction had ended", at_release=True)

    def lose(self, lease: Lease, reason: str, *, at_release: bool = False) -> None:
        """Report that `lease` is lost: each callback on a thread of its own, for it may block."""
        callbacks = lease.lose(reason, at_release=at_release)
        if callbacks is None:
            return
        if not lease.backend.expires:
            self._give_back(lease.backend, lease.grant)
        for callback in callbacks:
            work = partial(_call_back, *callback)
            if not started(work, "distlock-lost"):
                self._notifier.put(work)
        facts = lease_facts(lease)
        about = fields("lost", lease.alias, lease.grant, held=facts["held"], reason=reason)
        self._notifier.put(partial(_notify_lost, facts, reason, about))

    def drain(self, lease: Lease | None = None) -> None:
        """Wait for the releases under way, or one; but not for an engine that does not answer."""
        end = monotonic() + EXIT_PATIENCE
        releases = self._releases
        while (lease.pending_release in releases if lease else releases) and monotonic() < end:
            sleep(0.001)

    def _schedule(self, lease: Lease, due: float) -> None:
        with self._lock:
            self._young.discard(lease)
            if lease.ended:
                return
            if lease.due is not None:
                self._note_stale()
            lease.due = due
            self._push(due, lease)

    def _push(self, due: float, what: Lease | tuple[Any, ...]) -> None:
        heapq.heappush(self._heap, (due, next(self._numbers), what))
        self._wake_at(due)

    def _wake_at(self, due: float) -> None:
        with self._lock:
            if due >= self._wakes_at:
                return
            if self._running:
                self._wakes_at = due
                self._inbox.put(None)
            elif started(self._run, "distlock-renewer"):
                self._running, self._wakes_at = True, due

    def _note_stale(self) -> None:
        self._stale += 1
        if self._stale > 1000 and self._stale * 2 > len(self._heap):
            self._heap = [
                (due, number, what)
                for due, number, what in self._heap
                if isinstance(what, tuple) or what.due == due
            ]
            heapq.heapify(self._heap)
            self._stale = 0

    def _run(self) -> None:
        while True:
            try:
                self._turn()
            except BaseException:
                logger.exception(FAILED, extra=fields("worker_failed", ""))
                sleep(RETRY_MIN)

    def _turn(self) -> None:
        found, pause = self._due()
        for what in found:
            try:
                if isinstance(what, Lease):
                    self._look_at(what)
                else:
                    self._put_release(*what)
            except Exception:  # the others must not be lost for it
                logger.exception(FAILED, extra=fields("worker_failed", ""))
        try:
            late = self._inbox.get(timeout=0 if found else pause)
        except queue.Empty:
            return
        if late is not None:
            self._end(*late)

    def _end(self, number: int | None, lease: Lease) -> None:
        if number is None:
            until = lease.trusted_until
            job = (lease.backend, -1, lease.grant, until + lease.ttl, None)
            with self._lock:
                self._push(until, job)
        elif lease.end_if_unused():
            self.unwatch(lease)
            until = lease.trusted_until
            self._put_release(lease.backend, number, lease.grant, until, lease)
        else:
            self._releases.discard(number)

    def _due(self) -> tuple[list[Lease | tuple[Any, ...]], float]:
        now = monotonic()
        found: list[Lease | tuple[Any, ...]] = []
        with self._lock:
            if now >= self._wakes_at:
                self._wakes_at = float("inf")  # first: what is watched from now on wakes it again
                for lease in self._young.copy():
                    self._schedule(lease, self._next_look(lease))
            while self._heap and self._heap[0][0] <= now:
                due, _, what = heapq.heappop(self._heap)
                if isinstance(what, tuple):
                    found.append(what)
                elif what.due != due:
                    self._stale = max(0, self._stale - 1)
                else:
                    what.due = None
                    found.append(what)
            if self._heap:
                self._wakes_at = min(self._wakes_at, self._heap[0][0])
            # An idle process sleeps in long slices: some platforms limit a timed wait.
            return found, min(self._wakes_at - now, 3600.0)

    def _next_look(self, lease: Lease, asked_at: float | None = None) -> float:
        beat = lease.backend.heartbeat
        if beat is not None:  # all at the same beat, so that the engine looks at them together
            return min(lease.trusted_until, (monotonic() // beat + 1) * beat)
        if not lease.renews:
            return lease.trusted_until
        if asked_at is None:
            asked_at = lease.trusted_until - lease.term
        due, step = asked_at + lease.term * RENEW_AT, lease.term * RENEW_STEP
        return min(lease.trusted_until, due - due % step)

    def _look_at(self, lease: Lease) -> None:
        now = monotonic()
        if lease.ended or lease.foreign:
            return
        if lease.pins:  # no other owner can have it, and the row is locked for us as well
            self._schedule(lease, now + lease.ttl * RENEW_AT / 4)
            return
        renews = _renews(lease, now)
        if now >= lease.trusted_until:
            self.lose(lease, LATE if renews else "its time was up")
            return
        self._schedule(lease, lease.trusted_until)
        if renews or lease.backend.heartbeat is not None:
            self._put_extend(lease)

    def _workers_of(self, backend: BaseLockBackend) -> tuple[Worker, Worker]:
        with self._lock:
            if (workers := self._workers.get(backend)) is None:
                # Without a reference to the backend, which lives on with them otherwise.
                workers = self._workers[backend] = (
                    Worker(f"distlock-worker-{backend.alias}", self._extend_all),
                    Worker(
                        f"distlock-release-{backend.alias}", self._release_all, threads=RELEASERS
                    ),
                )
            return workers

    def _put_extend(self, lease: Lease) -> None:
        self._workers_of(lease.backend)[0].put((lease.backend, lease))

    def _put_release(self, backend: BaseLockBackend, *job: Any) -> None:
        self._workers_of(backend)[1].put((backend, *job))

    def _extend_all(self, jobs: list[Any]) -> None:
        leases = []
        for _, job in jobs:
            if isinstance(job, threading.Event):
                job.set()
            elif not (job.ended or job.pins or job.lost_because):
                leases.append(job)
        if leases:
            self._extend(jobs[0][0], leases)

    def _release_all(self, jobs: list[Any]) -> None:
        for job in jobs:
            self._release(*job)

    def _extend(self, backend: BaseLockBackend, leases: list[Lease]) -> None:
        asked_at = monotonic()
        ttls = [lease.capped(lease.ttl) for lease in leases]
        work = [(lease.grant, ttl) for lease, ttl in zip(leases, ttls, strict=True)]
        answers: list[Any]
        try:
            answers = list(backend.extend_many(work))
        except BaseException as error:
            answers = [error] * len(work)
        for lease, ttl, answer in zip(leases, ttls, answers, strict=True):
            if lease.ended or lease.lost_because is not None:
                continue
            if answer is True or answer is None:  # None: the engine saw no need to ask
                if answer and _renews(lease, asked_at):
                    lease.extended(ttl, asked_at=asked_at)
                self._schedule(lease, self._next_look(lease, asked_at))
            elif answer is False:
                self.lose(lease, GONE)
            else:
                self._retry(lease, answer)

    def _retry(self, lease: Lease, error: Any) -> None:
        if lease.pins:
            return  # `_look_at` has it in view
        name = shown(lease.grant.claim.name)
        left = lease.trusted_until - monotonic()
        logger.warning(
            "cannot renew the lock %r (alias %r): %s",
            *(name, lease.alias, error),
            extra=fields("not_renewed", lease.alias, lease.grant, left=left, error=str(error)),
        )
        pause = min(max(left / RETRIES_LEFT, RETRY_MIN), RETRY_MAX)
        self._schedule(lease, min(lease.trusted_until, monotonic() + pause))

    def _release(
        self, backend: BaseLockBackend, number: int, grant: Grant, until: float, lease: Lease | None
    ) -> None:
        now = monotonic()
        late = now >= until
        if now < (quiet_until := self._quiet.get(backend, 0.0)):
            with self._lock:
                self._push(quiet_until, (backend, number, grant, until, lease))
            return
        try:
            if late and backend.expires:
                raise BackendError("its time is over")
            was_ours = backend.release(grant)
        except BaseException as error:
            # A claim without an end stays, and the engine says when its session is over.
            if grant.claim.stable or (late and backend.expires):
                self._done(number, lease)
                logger.warning(
                    "gave up releasing a lock (alias %r): %s",
                    *(backend.alias, error),
                    extra=fields("not_released", backend.alias, grant, error=str(error)),
                )
                return
            job = (backend, number, grant, until, lease)
            again = monotonic() + (RETRY_MAX if late else RETRY_MAX / 4)
            self._quiet[backend] = again
            with self._lock:
                self._push(again, job)
        else:
            self._done(number, lease)
            if lease is not None:
                self.released(lease, was_ours)

    def _done(self, number: int, lease: Lease | None) -> None:
        self._releases.discard(number)
        if lease is not None:
            lease.leave_runner()


def _renews(lease: Lease, now: float) -> bool:
    return lease.renews and lease.ends_by - now > lease.ttl * RENEW_AT


def lease_facts(lease: Lease) -> dict[str, Any]:
    """Return what the signals of its end say of `lease`."""
    return {
        "sender": type(lease.backend),
        "alias": lease.alias,
        "name": lease.grant.claim.name,
        "held": monotonic() - lease.since,
        "fence": lease.grant.fence,
    }


def _call_all(jobs: list[Callable[[], None]]) -> None:
    for job in jobs:
        try:
            job()
        except BaseException:
            logger.exception(
                "reporting the end of a lock failed", extra=fields("worker_failed", "")
            )


def _call_back(hold_ref: weakref.ref[Any], callback: Callable[[Any], None]) -> None:
    hold = hold_ref()
    if hold is None:  # dropped meanwhile
        return
    try:
        callback(hold)
    except BaseException:  # also SystemExit, which ends no process from here
        logger.exception("a callback of on_lost failed", extra=hold.log_fields("callback_failed"))
    finally:
        connections.close_all()  # those of this thread


def _notify_lost(facts: dict[str, Any], reason: str, about: dict[str, Any]) -> None:
    logger.warning(
        "lost the lock %r (alias %r) after %.3f s: %s",
        *(about["lock_name"], facts["alias"], facts["held"], reason),
        extra=about,
    )
    send(lock_lost, {**facts, "reason": reason})


renewer = Renewer()
os.register_at_fork(after_in_child=renewer.__init__)  # type: ignore[misc]
atexit.register(renewer.drain)
