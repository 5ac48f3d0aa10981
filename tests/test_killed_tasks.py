"""`unique_task` while its workers are killed: every key once in the queue, and none for ever."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from distlock_app import Lock
from tests import unique_workers
from tests.engines import until
from tests.unique_workers import DEADLINE, KEYS, TTL, Notes

# A worker of Celery checks the models on every database.
pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True, databases="__all__")]


def held(task, using):
    """Return the holders of the locks of all keys."""
    return [h for key in KEYS for h in Lock(f"{task}:{key}", using=using).holders()]


@pytest.mark.parametrize("task, using", [("on_redis", "redis"), ("on_table", "default")])
def test_a_thousand_tasks_of_a_hundred_keys(task, using, processes, redis_url):
    prefix = f"unique-{os.getpid()}-{task}:"
    notes = Notes(redis_url, prefix)
    env = {"TESTS_CELERY_REDIS": redis_url, "TESTS_CELERY_PREFIX": prefix}

    def start():
        worker = processes.start("tests.unique_workers:work", env=env, deadline=DEADLINE)
        assert worker.read(DEADLINE) == "ready"
        workers[worker.pid] = worker

    def kill_what_hangs():
        """Kill the worker that hangs, if one does, and start the next; whether all was sent."""
        if hanging := notes.blpop(notes.of("hanging"), timeout=1):
            workers.pop(int(hanging[1])).kill()
            notes.incr(notes.of("kills"))
            start()
        return notes.number("finished") == len(senders)

    workers = {}
    senders = processes.start_many(
        "tests.unique_workers:enqueue", count=8, env=env, task=task, times=125, deadline=DEADLINE
    )
    start()
    start()
    until(kill_what_hangs, within=DEADLINE)
    for worker in workers.values():
        worker.kill()

    # Each key was in the queue once at most, and until success it ran once at a time.
    sent, twice = map(sum, zip(*(sender.result() for sender in senders), strict=True))
    assert 0 < sent < 1000
    assert twice == 0
    assert notes.number("kills") >= 4
    assert task == "on_redis" or notes.number("overlaps") == 0

    # What the killed workers left behind ends by itself, and all keys can be queued again.
    assert all(holding.expires_in <= TTL for holding in held(task, using))
    until(lambda: not held(task, using), within=DEADLINE)
    notes.set(notes.of("calm"), 1)
    notes.delete(notes.of("done"))
    again = processes.run("tests.unique_workers:enqueue_all", count=1, env=env, task=task)
    assert again == [list(KEYS)]
    start()
    until(lambda: notes.scard(notes.of("done")) == len(KEYS), within=DEADLINE)
    until(lambda: not held(task, using))


@pytest.mark.skipif(not find_spec("django.tasks"), reason="django.tasks came with Django 6.0")
def test_a_worker_of_django_that_is_killed_frees_the_lock_after_its_ttl(processes, settings):
    settings.TASKS = {"default": {"BACKEND": "django.tasks.backends.dummy.DummyBackend"}}
    result = unique_workers.nap.enqueue(1)
    worker = processes.start("tests.unique_workers:start", args=result.args, kwargs=result.kwargs)
    assert worker.read() == "running"
    assert unique_workers.nap.enqueue(1) is None

    worker.kill()

    until(lambda: unique_workers.nap.enqueue(1) is not None)
