"""What goes on behind the callers' backs: renewal, telling of losses, late releases.

One daemon thread per process keeps the time of every lease, and never waits for an engine:
so a loss is told on time even while an engine hangs. Requests go to one worker thread per
engine in use (one hanging engine delays no other), which batches them and ends when idle.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from time import monotonic
from typing import Any

from django.db import connections

from .backends.base import BaseLockBackend
from .claims import Grant
from .leases import Lease
from .signals import lock_lost

logger = logging.getLogger("distlock_app")

RENEW_AT = 1 / 3  # of the ttl
# After an error: tried again this often in what is left of the trust, within these bounds.
RETRIES_LEFT = 8
RETRY_MIN = 0.02
RETRY_MAX = 1.0
GONE = "the engine says that it is somebody else's or gone"
WORKER_IDLE = 20.0  # seconds after which a worker ends, and with it its connections


class Worker:
    """A daemon thread that is handed jobs: started on demand, gone when idle."""

    def __init__(self, name: str, work: Callable[[list[Any]], None]) -> None:
        self._name = name
        self._work = work
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running = False

    def put(self, job: Any) -> None:
        """Have `job` done soon, with whatever else waits."""
        self._jobs.put(job)
        with self._lock:
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                jobs = [self._jobs.get(timeout=WORKER_IDLE)]
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._running = False
                        break
                continue
            while not self._jobs.empty():
                jobs.append(self._jobs.get())
            try:
                self._work(jobs)
            except Exception:
                logger.exception("%s failed and goes on", self._name)
            del jobs  # a lease must not live on in this frame
        connections.close_all()  # those of this thread, which callbacks may have opened


class Renewer:
    """The clock of all leases of this process, and the workers that ask their engines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # (due, number, lease or the arguments of a release to try again)
        self._heap: list[tuple[float, int, weakref.ref[Lease] | tuple[Any, ...]]] = []
        self._stale = 0  # entries in the heap of leases that have ended or moved on
        self._numbers = itertools.count()
        self._wakes_at = float("inf")
        # SimpleQueue.put may be called from a finalizer, in whatever the thread was doing.
        self._inbox: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._running = False
        self._workers: dict[BaseLockBackend, Worker] = {}
        self._callbacks = Worker("distlock-callbacks", _run_callbacks)

    def watch(self, lease: Lease) -> None:
        """Keep `lease` renewed, and tell when it is lost, until it has ended."""
        self._schedule(lease, self._next_look(lease, lease.trusted_until - lease.ttl))

    def unwatch(self, lease: Lease) -> None:
        """Forget `lease`, which has ended."""
        lease.end()
        with self._lock:
            if lease.due is not None:
                lease.due = None
                self._note_stale()

    def release_later(self, lease: Lease) -> None:
        """Release `lease` on a worker thread, trying until it ends by itself; never blocks.

        Safe in a finalizer.
        """
        self._inbox.put(lease)

    def give_back(self, backend: BaseLockBackend, grant: Grant) -> None:
        """Release what may have been granted, on a worker thread, for one ttl at most."""
        self._worker(backend).put(("release", grant, monotonic() + grant.claim.ttl))

    def lose(self, lease: Lease, reason: str, *, at_release: bool = False) -> None:
        """Tell that `lease` is lost: signal and callbacks run on a thread of their own."""
        callbacks = lease.lose(reason, at_release=at_release)
        if callbacks is not None and (callbacks or lock_lost.receivers):
            self._callbacks.put((lease_facts(lease), reason, callbacks))

    def _schedule(self, lease: Lease, due: float) -> None:
        with self._lock:
            if lease.ended:
                return
            if lease.due is not None:
                self._note_stale()
            lease.due = due
            self._push(due, weakref.ref(lease))

    def _push(self, due: float, what: weakref.ref[Lease] | tuple[Any, ...]) -> None:
        heapq.heappush(self._heap, (due, next(self._numbers), what))
        if not self._running:
            self._running = True
            threading.Thread(target=self._run, name="distlock-renewer", daemon=True).start()
        elif due < self._wakes_at:
            self._wakes_at = due
            self._inbox.put(None)

    def _note_stale(self) -> None:
        self._stale += 1
        if self._stale > 1000 and self._stale * 2 > len(self._heap):
            self._heap = [
                (due, number, what)
                for due, number, what in self._heap
                if isinstance(what, tuple) or ((x := what()) is not None and x.due == due)
            ]
            heapq.heapify(self._heap)
            self._stale = 0

    def _run(self) -> None:
        while True:
            try:
                self._turn()
            except Exception:
                logger.exception("the lock renewer failed and goes on")

    def _turn(self) -> None:
        found, pause = self._due()
        for what in found:
            if isinstance(what, Lease):
                self._look_at(what)
            else:
                self._worker(what[0]).put(("release", *what[1:]))
        if found:
            return
        try:
            late = self._inbox.get(timeout=pause)
        except queue.Empty:
            return
        if late is not None and not late.foreign:
            self._worker(late.backend).put(("release", late, late.trusted_until))

    def _due(self) -> tuple[list[Lease | tuple[Any, ...]], float]:
        now = monotonic()
        found: list[Lease | tuple[Any, ...]] = []
        with self._lock:
            while self._heap and self._heap[0][0] <= now:
                due, _, what = heapq.heappop(self._heap)
                if isinstance(what, tuple):
                    found.append(what)
                    continue
                lease = what()
                if lease is None or lease.due != due:
                    self._stale = max(0, self._stale - 1)
                else:
                    lease.due = None
                    found.append(lease)
            self._wakes_at = self._heap[0][0] if self._heap else float("inf")
            # An idle process sleeps in long slices: some platforms limit a timed wait.
            return found, min(self._wakes_at - now, 3600.0)

    def _next_look(self, lease: Lease, asked_at: float) -> float:
        if lease.renew_until is None:
            return lease.trusted_until
        return min(lease.trusted_until, asked_at + lease.ttl * RENEW_AT)

    def _look_at(self, lease: Lease) -> None:
        now = monotonic()
        if lease.ended or lease.foreign:
            return
        if now >= lease.trusted_until:
            over = lease.renew_until is None or now >= lease.renew_until - lease.ttl * RENEW_AT
            self.lose(lease, "its time was up" if over else "the engine did not renew it in time")
            return
        self._schedule(lease, lease.trusted_until)
        if lease.renew_until is not None and lease.renew_until - now > lease.ttl * RENEW_AT:
            self._worker(lease.backend).put(("extend", weakref.ref(lease), None))

    def _worker(self, backend: BaseLockBackend) -> Worker:
        with self._lock:
            worker = self._workers.get(backend)
            if worker is None:
                name = f"distlock-worker-{backend.alias}"
                worker = Worker(name, lambda jobs: self._work(backend, jobs))
                self._workers[backend] = worker
            return worker

    def _work(self, backend: BaseLockBackend, jobs: list[Any]) -> None:
        leases = []
        for verb, what, until in jobs:
            if verb == "release":
                self._release(backend, what, until)
            elif (lease := what()) is not None and not lease.ended:
                leases.append(lease)
        if leases:
            self._extend(backend, leases)

    def _extend(self, backend: BaseLockBackend, leases: list[Lease]) -> None:
        asked_at = monotonic()
        ttls = [lease.capped(lease.ttl) for lease in leases]
        answers = backend.extend_many([(x.grant, t) for x, t in zip(leases, ttls, strict=True)])
        for lease, ttl, answer in zip(leases, ttls, answers, strict=True):
            if lease.ended:
                continue
            if answer is True:
                lease.extended(ttl, asked_at=asked_at)
                self._schedule(lease, self._next_look(lease, asked_at))
            elif answer is False:
                self.lose(lease, GONE)
            else:
                self._retry(lease, answer)

    def _retry(self, lease: Lease, error: Any) -> None:
        name = lease.grant.claim.name[:200]
        logger.warning("cannot renew the lock %r (alias %r): %s", name, lease.alias, error)
        left = lease.trusted_until - monotonic()
        pause = min(max(left / RETRIES_LEFT, RETRY_MIN), RETRY_MAX)
        self._schedule(lease, min(lease.trusted_until, monotonic() + pause))

    def _release(self, backend: BaseLockBackend, what: Lease | Grant, until: float) -> None:
        grant = what.grant if isinstance(what, Lease) else what
        if isinstance(what, Lease):
            self.unwatch(what)
        try:
            backend.release(grant)
        except Exception as error:
            if monotonic() >= until:
                logger.warning("gave up releasing a lock (alias %r): %s", backend.alias, error)
                return
            with self._lock:
                self._push(monotonic() + RETRY_MAX / 4, (backend, grant, until))


def lease_facts(lease: Lease) -> dict[str, Any]:
    """Return what the signals of its end say of `lease`."""
    return {
        "sender": type(lease.backend),
        "alias": lease.alias,
        "name": lease.grant.claim.name,
        "held": monotonic() - lease.since,
    }


def _run_callbacks(jobs: list[Any]) -> None:
    for facts, reason, callbacks in jobs:
        lock_lost.send_robust(reason=reason, **facts)
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a callback of on_lost failed")


renewer = Renewer()
os.register_at_fork(after_in_child=renewer.__init__)  # type: ignore[misc]
