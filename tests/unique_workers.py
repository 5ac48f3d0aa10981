"""Processes of tests/test_killed_tasks.py: they enqueue tasks, and die running them."""

from __future__ import annotations

import json
import os
import random
import time
from functools import partial
from importlib.util import find_spec

import redis
from celery import shared_task
from celery.signals import worker_ready

from distlock_app import unique_task
from tests.celery_project import app
from tests.engines import until
from tests.processes import say

KEYS = range(100)
TTL = 10
STRIKE = 8  # of so many tasks, one hangs until its worker is killed
BATCH = 25
DEADLINE = 240  # most of it to start processes, on a machine that is busy

app.conf.worker_prefetch_multiplier = 1


class Notes(redis.Redis):
    """What the processes of one test tell each other, in the Redis of the messages."""

    def __init__(self, url, prefix):
        super().__init__(connection_pool=redis.ConnectionPool.from_url(url))
        self.of = prefix.__add__

    def number(self, name):
        return int(self.get(self.of(name)) or 0)

    def now(self):
        seconds, microseconds = self.time()
        return seconds + microseconds / 1e6


if url := os.environ.get("TESTS_CELERY_REDIS"):
    notes = Notes(url, os.environ["TESTS_CELERY_PREFIX"])

    @unique_task("on_redis:{key}", until="start", ttl=TTL, using="redis")
    @shared_task
    def on_redis(key):
        run(key)


def run(key):
    """Note whether another worker runs the same key now; hang if it is this worker's turn."""
    before = notes.set(notes.of(f"runs:{key}"), os.getpid(), get=True)
    if before and os.path.exists(f"/proc/{int(before)}"):
        notes.incr(notes.of("overlaps"))
    if notes.incr(notes.of("runs")) % STRIKE == 0 and not notes.number("calm"):
        notes.rpush(notes.of("hanging"), os.getpid())
        time.sleep(100)
    notes.delete(notes.of(f"runs:{key}"))
    notes.sadd(notes.of("done"), key)


@unique_task("on_table:{key}", until="success", ttl=TTL)
@shared_task
def on_table(key):
    run(key)


def work():
    """Be a Celery worker of one thread; say when it is ready."""
    worker_ready.connect(lambda **kwargs: say("ready"), weak=False)
    app.worker_main(["worker", "--pool=solo", "--loglevel=warning", "--without-mingle"])


def enqueue(task, times):
    """Enqueue keys by chance, a batch after each kill; return how many were, and how many twice."""
    sent, twice = 0, 0
    chance = random.Random(os.getpid())
    for number in range(times):
        if number % BATCH == 0:
            until(partial(_killed, number // BATCH), within=DEADLINE)
        key = chance.choice(KEYS)
        if globals()[task].apply_async((key,), headers={"at": notes.now()}):
            sent += 1
            twice += _queued_twice(key)
    notes.incr(notes.of("finished"))
    return sent, twice


def _killed(times):
    return notes.number("kills") >= times


def _queued_twice(key):
    """Whether the queue has this key twice, apart from a message that waits for longer than TTL."""
    queue = [json.loads(message)["headers"] for message in notes.lrange(notes.of("celery"), 0, -1)]
    now = notes.now()
    ages = sorted(now - headers["at"] for headers in queue if headers["argsrepr"] == f"({key},)")
    return any(age < TTL for age in ages[1:])


def enqueue_all(task):
    """Enqueue every key; return those that were."""
    return [key for key in KEYS if globals()[task].apply_async((key,), headers={"at": 0})]


if find_spec("django.tasks"):
    from django.tasks import task

    @unique_task("nap:{pk}", until="success", ttl=2)
    @task
    def nap(pk):
        say("running")
        time.sleep(100)


def start(args, kwargs):
    """Run the task of Django as a worker does."""
    nap.call(*args, **kwargs)
