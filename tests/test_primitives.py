"""What every layer uses: worker threads, gates, deadlines, what a holder says of itself."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref

import pytest
from django.db import connections

from distlock_app.primitives import identity, threads
from distlock_app.primitives.names import shown
from distlock_app.primitives.timing import Deadline, monotonic
from tests.engines import DEADLINE, until

# Worker threads


def test_one_thread_gets_all_jobs_that_wait_at_once():
    lists, go_on = [], threading.Event()

    def work(jobs):
        lists.append(jobs)
        go_on.wait(DEADLINE)

    worker = threads.Worker("test", work)
    assert worker.running is False
    worker.put(1)
    until(lambda: lists)
    assert worker.running is True
    worker.put(2)
    worker.put(3)
    go_on.set()

    until(lambda: len(lists) == 2)
    assert lists == [[1], [2, 3]]


def test_a_slow_job_holds_up_no_other_thread_and_no_more_threads_are_started():
    quick, told = threading.Event(), []

    def work(job):
        if job == "slow":
            told.append(quick.wait(DEADLINE))
        else:
            quick.set()

    worker = threads.Worker("test", work, threads=2)
    for job in ("slow", "quick", "quick"):
        worker.put(job)

    assert len(worker._running) == 2
    until(lambda: told == [True])


@pytest.mark.parametrize("number", [None, 1])
def test_finish_waits_until_all_is_done_that_was_put_before(number):
    jobs, began = [], monotonic()
    worker = threads.Worker("test", jobs.append, threads=number)

    worker.put("job")
    worker.finish(DEADLINE)

    assert jobs == ["job" if number else ["job"]]
    assert monotonic() - began < DEADLINE


def test_a_job_that_fails_is_told_of_and_the_next_one_is_done(caplog):
    done = []

    def work(job):
        if job == "exits":
            raise SystemExit
        done.append(job)

    worker = threads.Worker("test", work, threads=1)
    worker.put("exits")
    worker.put("next")
    worker.finish(DEADLINE)

    assert done == ["next"]
    assert "worker_failed" in [record.lock_event for record in caplog.records]


def test_a_worker_keeps_nothing_of_a_job_that_is_done():
    class Job:
        pass

    job = Job()
    gone = weakref.ref(job)
    worker = threads.Worker("test", lambda jobs: None)

    worker.put(job)
    del job

    until(lambda: gone() is None)
    assert worker.running  # and waits for the next one


@pytest.mark.django_db(transaction=True)
def test_a_worker_that_ends_closes_its_connections(monkeypatch):
    monkeypatch.setattr(threads, "WORKER_IDLE", 0.02)
    opened = []

    def work(jobs):
        connections["default"].ensure_connection()
        opened.append(connections["default"])

    worker = threads.Worker("test", work)
    worker.put("job")

    until(lambda: opened and opened[0].connection is None)


def test_a_call_uses_another_thread_only_where_an_event_loop_runs(monkeypatch):
    call = threads.in_no_event_loop(threading.get_ident)

    async def in_loop():
        return call()

    assert call() == threading.get_ident()
    assert asyncio.run(in_loop()) != threading.get_ident()
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    assert asyncio.run(in_loop()) == threading.get_ident()


def test_a_gate_is_closed_until_it_is_opened_and_behind_who_comes_through():
    gate = threads.Gate()
    for _ in range(2):
        began = monotonic()
        gate.wait(0.02)
        assert monotonic() - began >= 0.019
        gate.open()
        gate.open()
        gate.wait(DEADLINE)
        assert monotonic() - began < DEADLINE


# Deadlines


def test_a_deadline_may_count_from_earlier_or_never_come():
    assert Deadline(1, since=5).at == 6
    assert Deadline(0).cap(5) == 0
    never = Deadline(None)
    assert (never.remaining(), never.cap(5)) == (None, 5)


# What a holder says of itself


def test_what_code_does_is_shown_while_it_does_it():
    def who():
        return identity.holder_fields(identity.holder_text()).get("who")

    before = who()
    with identity.activity("alice " * 100):
        assert who() == ("alice " * 100)[: identity.ACTIVITY_LENGTH]
    assert who() == before


def test_a_machine_that_does_not_say_what_it_is_is_left_out(monkeypatch):
    def fields():
        return json.loads(identity._holder_text.__wrapped__(1, "main", "alice"))

    def no_file(*args, **options):
        raise FileNotFoundError

    assert fields()["machine"] == identity.machine() == identity.machine.__wrapped__()
    assert len(identity.machine()) == 8
    monkeypatch.setattr(identity, "open", no_file, raising=False)
    monkeypatch.setattr(identity, "machine", identity.machine.__wrapped__)
    assert fields().keys() == {"host", "pid", "thread", "who"}


@pytest.mark.parametrize(("at_least", "told"), [(0, {}), (3, {"at_least": 3})])
def test_how_a_lock_is_held_is_told_beside_who_holds_it(at_least, told):
    text = identity.of_lease('{"pid":1}', ttl=5, renew=True, at_least=at_least)

    assert json.loads(text) == {"pid": 1, "ttl": 5, "renew": True, **told}


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("", {}),
        ("[1]", {"who": "[1]"}),
        ("{", {"who": "{"}),
        ('{"a": "x", "b": 1.5}', {"a": "x", "b": 1.5}),
        ('{"c": [1], "d": null, "e": 1e400, "f": NaN, "g": 1e15}', {}),
    ],
)
def test_of_what_others_made_up_texts_and_numbers_are_shown(text, fields):
    assert identity.holder_fields(text) == fields


def test_only_what_cannot_be_printed_is_shown_otherwise():
    assert shown("잠금\n" + "é") == "잠금\\né"
