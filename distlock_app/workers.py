"""Daemon threads that are handed jobs, and survive whatever these do."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from django.db import connections

from .records import fields, logger

WORKER_IDLE = 20.0  # seconds after which a worker ends, and with it its connections


def started(work: Callable[[], None], name: str) -> bool:
    """Start a daemon thread; return False if the process cannot."""
    if sys.is_finalizing():  # before Python 3.12, start() would wait for the thread for ever
        return False
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:  # too many threads, or the interpreter shuts down
        logger.error("locks: %s", error, extra=fields("no_thread", "", error=str(error)))
        return False
    return True


class Worker:
    """A daemon thread that is handed jobs: started on demand, gone when idle."""

    def __init__(self, name: str, work: Callable[[list[Any]], None]) -> None:
        self._name = name
        self._work = work
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Reentrant: a signal handler that releases may interrupt put().
        self._lock = threading.RLock()
        self._running = False

    def put(self, job: Any) -> None:
        """Have `job` done soon, with whatever else waits."""
        self._jobs.put(job)
        with self._lock:
            if not self._running:
                # In this order: whatever interrupts it, no job is left without a thread.
                self._running = started(self._run, self._name)

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
            try:
                while True:
                    jobs.append(self._jobs.get_nowait())
            except queue.Empty:
                pass
            try:
                self._work(jobs)
            except BaseException:  # also SystemExit: whoever is next relies on this thread
                logger.exception(
                    "%s failed and goes on", self._name, extra=fields("worker_failed", "")
                )
            del jobs  # a lease must not live on in this frame
        connections.close_all()  # those of this thread, which receivers may have opened
