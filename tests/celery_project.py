"""A project with queues: its Celery, the tasks of docs/how-to/tasks.md, and one that counts."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from celery import Celery, shared_task
from celery.contrib.testing.worker import start_worker
from celery.signals import setup_logging, worker_ready
from celery.worker import state

from distlock_app import LockBusy, locked
from tests.processes import say

PAGE = Path(__file__).resolve().parent.parent / "docs/how-to/tasks.md"

# Messages are in memory, for a worker in this process, or in Redis.
app = Celery("tests")
app.conf.update(
    broker_url="memory://",
    broker_transport_options={"polling_interval": 0.02},
    result_backend="cache+memory://",
    broker_connection_retry_on_startup=False,
)
if url := os.environ.get("TESTS_CELERY_REDIS"):
    prefix = {"global_keyprefix": os.environ["TESTS_CELERY_PREFIX"]}
    app.conf.update(
        broker_url=url,
        broker_transport_options=prefix,
        result_backend=url,
        result_backend_transport_options=prefix,
    )
app.set_default()


@setup_logging.connect
def leave_logging_alone(**kwargs: object) -> None:
    """Keep Celery from setting the level of the root logger, for other tests too."""


def documented() -> ModuleType:
    """Make a module of the samples of the page, those for Django Tasks where these are."""
    module = ModuleType("tests.documented_tasks")
    sys.modules[module.__name__] = module
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.S | re.M):
        if "django.tasks" not in block or find_spec("django.tasks"):
            exec(compile(block, str(PAGE), "exec"), module.__dict__)
    return module


@shared_task(autoretry_for=(LockBusy,), default_retry_delay=0.2, max_retries=None)
@locked("count:{name}", wait=0, ttl=2)
def count(name: str) -> int:
    """Raise a counter for longer than the ttl of the lock."""
    from tests.app.models import Counter

    value = Counter.objects.get(name=name).value
    time.sleep(2.2)
    Counter.objects.filter(name=name).update(value=value + 1)
    return os.getpid()


@shared_task
@locked("stuck", wait=0)
def stick() -> None:
    """Hold the lock until the task is ended from outside."""
    time.sleep(100)


@contextmanager
def worker_here() -> Iterator[None]:
    """Let a worker of Celery with one thread run in this process."""
    with start_worker(app, pool="solo", perform_ping_check=False):
        yield
        # It looks after each message and takes one more; without one, it looks after two seconds.
        state.should_terminate = 0
        for _ in range(2):
            app.control.broadcast("ping")


def work() -> None:
    """Be a Celery worker with two child processes, until SIGTERM; say when it is ready."""
    worker_ready.connect(lambda **kwargs: say("ready"), weak=False)
    app.worker_main(["worker", "--pool=prefork", "--concurrency=2", "--loglevel=warning"])


def send(name: str, times: int) -> list[int]:
    """Have the counter raised; return the ids of the processes that did it."""
    results = [count.delay(name) for _ in range(times)]
    return [result.get(timeout=100) for result in results]


def end(**limit: float) -> str:
    """Have a task ended by a time limit; return what Celery says of it."""
    result = stick.apply_async(**limit)
    return type(result.get(timeout=100, propagate=False)).__name__
