"""Background daemon threads with a job queue; they survive jobs that raise."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from .logs import fields, logger
from .rlock import RLock

WORKER_IDLE = 20.0  # seconds after which a worker ends, and with it its connections
_local = threading.local  # that of the threads for which this app was imported

P = ParamSpec("P")
R = TypeVar("R")


def started(work: Callable[[], None], name: str) -> bool:
    """Start a daemon thread; return False if the process cannot."""
    if sys.is_finalizing():  # before Python 3.12, start() would wait for the thread forever
        return False
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:  # too many threads, or the interpreter shuts down
        # Not at the end of the process, where Python 3.12 starts none: drain() does without.
        if any(not thread.daemon and thread.is_alive() for thread in threading.enumerate()):
            logger.error("locks: %s", error, extra=fields("no_thread", "", error=str(error)))
        return False
    return True


def in_no_event_loop(call: Callable[P, R]) -> Callable[P, R]:
    """Let `call` use another thread if Django would refuse it here, where an event loop runs.

    The loop is blocked meanwhile, as by any request.
    """

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if asyncio._get_running_loop() is None or os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
            return call(*args, **kwargs)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(call, *args, **kwargs).result()

    return called


def threads_are_greenlets() -> bool:
    """Whether gevent has replaced threads, which then run until they yield."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and monkey.is_module_patched("threading")


def refuse_late_greenlets() -> None:
    """Raise ImproperlyConfigured if gevent came after the import of this app.

    All greenlets would be one owner, and the first wait of a background thread would stop them all.
    """
    if threading.local is not _local:
        raise ImproperlyConfigured(
            "threads were patched after distlock_app had been imported: call"
            " gevent.monkey.patch_all() first, with `gunicorn --preload` in gunicorn.conf.py"
        )


class Gate:
    """Lets a waiting thread through; may be opened from anywhere, also in a finalizer.

    Not a SimpleQueue: before Python 3.13 its get(timeout) waits forever if a short timeout is over
    before it sleeps.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let one thread through, now or when it comes."""
        with suppress(RuntimeError):  # open already
            self._lock.release()

    def wait(self, seconds: float) -> None:
        """Wait until it is open, at most `seconds`; it closes behind the thread."""
        self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))


class Worker:
    """Daemon threads that are handed jobs: started on demand, gone when idle.

    One thread gets all jobs that wait, in a list. With a number of `threads` each gets one job at
    a time, so that a slow job holds up no other.
    """

    def __init__(
        self, name: str, work: Callable[[Any], object], *, threads: int | None = None
    ) -> None:
        self._name = name
        self._work = work
        self._gets_all = threads is None
        self._threads = threads or 1
        self.forget()

    def forget(self) -> None:
        """Begin anew: in the child of a fork, where none of the threads is."""
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Reentrant: a signal handler that releases may interrupt put().
        self._lock = RLock()
        self._running: set[object] = set()

    @property
    def running(self) -> bool:
        """Whether a thread is there, busy or idle."""
        return bool(self._running)

    def put(self, job: Any) -> None:
        """Have `job` done soon."""
        self._jobs.put(job)
        with self._lock:
            if len(self._running) < self._threads:
                token = object()
                # In this order: whatever interrupts it, no job is left without a thread.
                if started(partial(self._run, token), self._name):
                    self._running.add(token)

    def finish(self, within: float) -> None:
        """Wait until the only thread has done what was put before, so many seconds at most."""
        self.do_without_thread()
        if self._running:
            done = threading.Event()
            self.put(done)
            done.wait(within)

    def do_without_thread(self) -> None:
        """Do here what waits, if no thread could be started: on Python 3.12 none can at exit."""
        with suppress(queue.Empty):
            while not self._running:
                self._do([self._jobs.get_nowait()])

    def _run(self, token: object) -> None:
        while True:
            try:
                jobs = [self._jobs.get(timeout=WORKER_IDLE)]
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._running.discard(token)
                        break
                continue
            with suppress(queue.Empty):
                while self._gets_all:
                    jobs.append(self._jobs.get_nowait())
            self._do(jobs)
            del jobs  # a lease must not live on in this frame
        connections.close_all()  # those of this thread, which receivers may have opened

    def _do(self, jobs: list[Any]) -> None:
        work = [job for job in jobs if not isinstance(job, threading.Event)]
        try:
            if work:
                self._work(work if self._gets_all else work[0])
        except BaseException:  # also SystemExit: the next job relies on this thread
            logger.exception(
                "%s failed and continues", self._name, extra=fields("worker_failed", "")
            )
        for job in jobs:
            if isinstance(job, threading.Event):  # of finish()
                job.set()
