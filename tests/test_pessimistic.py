"""Rows that are locked: by whom, for how long others wait, and what becomes of deadlocks."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import TestCase

from distlock_app import LockBusy, LockTimeout
from distlock_app.guards import pessimistic
from distlock_app.pessimistic import for_update, next_unlocked, retry_on_deadlock
from tests.app.guarded_models import ColdShelf, Crate, Job, Shelf
from tests.app.versioned_models import SavingsAccount
from tests.test_optimistic import use_base_manager

pytestmark = pytest.mark.django_db(transaction=True)

DEADLINE = 30


@pytest.fixture
def jobs() -> list[Job]:
    return [Job.objects.create(rank=10 - number) for number in range(6)]


@pytest.mark.parametrize("lock", [for_update, next_unlocked])
def test_what_is_no_queryset_is_refused_and_a_manager_is_one(jobs, lock):
    with transaction.atomic():
        assert set(lock(Job.objects)) <= set(jobs)
        with pytest.raises(TypeError, match="rows must be a queryset"):
            lock(Job)


@contextmanager
def locked_elsewhere(*pks: int, model: Any = Job) -> Iterator[Callable[[], None]]:
    """Keep rows locked in another thread until the end of the block, or until it is called."""
    locked, end = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with transaction.atomic():
                for_update(model.objects.filter(pk__in=pks), wait=None)
                locked.set()
                assert end.wait(DEADLINE)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(hold)
        try:
            assert locked.wait(DEADLINE)
            yield end.set
        finally:
            end.set()
            future.result(DEADLINE)


def settings_of_session() -> list[Any]:
    """Return what bounds waits in this session."""
    asked = {
        "postgresql": "SELECT current_setting('statement_timeout')",
        "mysql": "SELECT @@innodb_lock_wait_timeout /*M! , @@max_statement_time */",
        "sqlite": "PRAGMA busy_timeout",
    }
    with connection.cursor() as cursor:
        cursor.execute(asked[connection.vendor])
        return list(cursor.fetchone())


# One row, many rows


def test_it_returns_rows_by_key_as_they_are(jobs: list[Job]) -> None:
    with transaction.atomic():
        found = for_update(Job.objects.filter(state="new").order_by("rank"))
        one = Job.objects.for_update(jobs[2].pk)

    assert found == sorted(found, key=lambda job: job.pk) == jobs
    assert one == jobs[2]


def test_a_row_that_is_not_there_is_not_found(jobs: list[Job]) -> None:
    with transaction.atomic():
        with pytest.raises(Job.DoesNotExist):
            Job.objects.for_update(0)
        with pytest.raises(Job.DoesNotExist):
            Job.objects.filter(state="done").for_update(jobs[0].pk)
        assert for_update(Job.objects.filter(pk=0)) == []


def test_outside_of_a_transaction_it_says_so(jobs: list[Job]) -> None:
    for lock in (
        lambda: for_update(Job.objects.all()),
        lambda: Job.objects.for_update(jobs[0].pk),
        lambda: Job.objects.next_unlocked(),
    ):
        with pytest.raises(TransactionManagementError, match="atomic"):
            lock()


def test_one_free_row_costs_one_query(jobs: list[Job], django_assert_num_queries: Any) -> None:
    with transaction.atomic(), django_assert_num_queries(5 if connection.vendor == "sqlite" else 1):
        Job.objects.for_update(jobs[0].pk)


def test_a_row_with_a_parent_and_a_nullable_relation_can_be_locked(jobs: list[Job]) -> None:
    account = SavingsAccount.objects.create()

    with transaction.atomic():
        assert for_update(SavingsAccount.objects.select_related("parent")) == [account]
        assert for_update(Job.objects.select_related("after")) == jobs


# Waiting


@pytest.mark.parametrize("wait", [0, 0.3])
def test_the_wait_for_a_locked_row_is_bounded_and_the_transaction_goes_on(
    jobs: list[Job], wait: float
) -> None:
    before = settings_of_session()

    with locked_elsewhere(jobs[1].pk):
        with transaction.atomic():
            if connection.vendor != "sqlite":
                Job.objects.filter(pk=jobs[5].pk).update(state="mine")
            for lock in (
                lambda: Job.objects.for_update(jobs[1].pk, wait=wait),
                lambda: for_update(Job.objects.all(), wait=wait),
            ):
                started = time.monotonic()
                with pytest.raises(LockBusy) as refusal:
                    lock()
                assert wait <= time.monotonic() - started < DEADLINE
                assert isinstance(refusal.value, LockTimeout) is (wait > 0)
            assert settings_of_session() == before
            assert Job.objects.count() == 6

    assert settings_of_session() == before
    assert Job.objects.filter(state="mine").exists() is (connection.vendor != "sqlite")


def test_a_wait_that_only_the_database_bounds_is_said_to_be_so(jobs: list[Job]) -> None:
    if connection.vendor == "sqlite":
        pytest.skip("nothing but `wait` bounds it")
    mysql = connection.vendor == "mysql"

    with locked_elsewhere(jobs[1].pk), transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"SET {'innodb_lock_wait_timeout = 1' if mysql else 'lock_timeout = 1'}")
        with pytest.raises(LockTimeout, match="as long as the database waits"):
            Job.objects.for_update(jobs[1].pk, wait=None)
    connection.close()


@pytest.mark.usefixtures("read_committed")
@pytest.mark.parametrize("wait", [DEADLINE, None])
def test_who_waits_gets_the_row_as_the_other_left_it(jobs: list[Job], wait: float | None) -> None:
    changed = threading.Event()

    def change() -> None:
        try:
            with transaction.atomic():
                job = Job.objects.for_update(jobs[0].pk)
                changed.set()
                time.sleep(0.3)
                job.state = "changed"
                job.save()
        finally:
            connections.close_all()

    for lock in (
        lambda: Job.objects.for_update(jobs[0].pk, wait=wait),
        lambda: for_update(Job.objects.filter(pk=jobs[0].pk), wait=wait)[0],
    ):
        changed.clear()
        Job.objects.update(state="new")
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(change)
            assert changed.wait(DEADLINE)
            with transaction.atomic():
                assert lock().state == "changed"
            future.result(DEADLINE)


@pytest.mark.usefixtures("read_committed")
def test_a_row_that_does_not_fit_any_more_is_left_out(jobs: list[Job]) -> None:
    taken = threading.Event()

    def finish() -> None:
        try:
            with transaction.atomic():
                Job.objects.filter(pk=jobs[0].pk).update(state="done")
                taken.set()
                time.sleep(0.3)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(finish)
        assert taken.wait(DEADLINE)
        with transaction.atomic():
            assert for_update(Job.objects.filter(state="new"), wait=DEADLINE) == jobs[1:]
        future.result(DEADLINE)


@pytest.mark.parametrize("wait", [1e-7, 0.0005, 0.0014])
def test_the_shortest_wait_ends_at_once(jobs: list[Job], wait: float) -> None:
    with locked_elsewhere(jobs[1].pk), transaction.atomic():
        started = time.monotonic()
        for lock in (
            lambda: Job.objects.for_update(jobs[1].pk, wait=wait),
            lambda: for_update(Job.objects.all(), wait=wait),
        ):
            with pytest.raises(LockTimeout):
                lock()
        assert time.monotonic() - started < 1.9  # a server of whole seconds would need 2


@pytest.mark.parametrize("wait", [math.inf, 1e300])
def test_the_longest_wait_gets_what_is_free(jobs: list[Job], wait: float) -> None:
    with transaction.atomic():
        assert for_update(Job.objects.all(), wait=wait) == jobs
        for wrong in (-1, math.nan):
            with pytest.raises(ValueError, match="wait must be"):
                for_update(Job.objects.all(), wait=wrong)


@pytest.mark.parametrize("wrong", [-1, math.nan])
def test_a_wrong_wait_is_refused_although_the_row_is_free(jobs: list[Job], wrong: float) -> None:
    with transaction.atomic(), pytest.raises(ValueError, match="wait must be"):
        Job.objects.for_update(jobs[0].pk, wait=wrong)


def test_a_server_of_whole_seconds_is_asked_again(jobs: list[Job], monkeypatch: Any) -> None:
    """As on MySQL, and wherever nobody knows better."""
    if connection.vendor != "mysql":
        pytest.skip("stands for MySQL")
    monkeypatch.setattr(connection, "mysql_is_mariadb", False)
    before = settings_of_session()

    with locked_elsewhere(jobs[1].pk) as let_go, transaction.atomic():
        started = time.monotonic()
        with pytest.raises(LockTimeout):
            Job.objects.for_update(jobs[1].pk, wait=0.3)
        assert time.monotonic() - started >= 0.3
        threading.Timer(0.2, let_go).start()
        assert Job.objects.for_update(jobs[1].pk, wait=DEADLINE) == jobs[1]

    assert settings_of_session() == before


def test_a_statement_that_somebody_cancels_is_no_timeout(jobs: list[Job]) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL says the same of both")
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        pid = cursor.fetchone()[0]

    def cancel() -> None:
        try:
            with connection.cursor() as cursor:
                waits = (
                    "SELECT pg_cancel_backend(pid) FROM pg_stat_activity"
                    " WHERE pid = %s AND wait_event_type = 'Lock'"
                )
                give_up = time.monotonic() + DEADLINE
                while cursor.execute(waits, [pid]) and not cursor.fetchall():
                    assert time.monotonic() < give_up
                    time.sleep(0.01)
        finally:
            connections.close_all()

    with locked_elsewhere(jobs[0].pk), ThreadPoolExecutor(1) as pool:
        future = pool.submit(cancel)
        with transaction.atomic(), pytest.raises(OperationalError, match="user request"):
            Job.objects.for_update(jobs[0].pk, wait=DEADLINE)
        future.result(DEADLINE)


def test_on_sqlite_a_transaction_that_read_too_early_has_to_begin_again(jobs: list[Job]) -> None:
    if connection.vendor != "sqlite":
        pytest.skip("where rows are locked, they are read as they are")
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 does not tell what SQLite says: it is a LockTimeout there")

    with pytest.raises(OperationalError, match="locked"), transaction.atomic():
        Job.objects.count()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(in_thread(lambda: Job.objects.update(state="done"))).result(DEADLINE)
        for_update(Job.objects.all(), wait=DEADLINE)


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        try:
            return work()
        finally:
            connections.close_all()

    return run


# The order


@pytest.mark.usefixtures("read_committed")
def test_rows_are_locked_by_key_whatever_the_condition(jobs: list[Job]) -> None:
    """Both ways find the same rows by other indexes, in opposite order; nobody may deadlock."""
    states = [f"s{9 - number}" for number in range(6)]
    by_key = Job.objects.filter(pk__in=[job.pk for job in jobs])
    ways = (
        lambda: for_update(Job.objects.filter(state__in=states), wait=DEADLINE),
        lambda: for_update(by_key.order_by("-pk"), wait=DEADLINE),
    )
    for number, job in enumerate(jobs):
        Job.objects.filter(pk=job.pk).update(state=states[number])
    Job.objects.bulk_create(Job(state="other") for _ in range(300))  # an index is worth it
    if connection.vendor == "mysql":
        with connection.cursor() as cursor:
            cursor.execute(f"ANALYZE TABLE {Job._meta.db_table}")
            cursor.fetchall()
    begin = threading.Barrier(4)

    def lock_often(way: Callable[[], list[Job]]) -> None:
        begin.wait(DEADLINE)
        for _ in range(25):
            with transaction.atomic():
                assert way() == jobs

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(in_thread(partial(lock_often, way))) for way in ways * 2]
        for future in running:
            future.result(DEADLINE)


# The queue


@pytest.fixture
def chain(jobs: list[Job]) -> Any:
    """Jobs that come after one and the same: a condition on that one joins its row."""
    Job.objects.exclude(pk=jobs[0].pk).update(after=jobs[0])
    return Job.objects.filter(after__state="new").order_by("after__rank", "rank")


@pytest.mark.usefixtures("read_committed")
def test_a_queue_with_a_condition_on_another_row_serves_many_workers(
    jobs: list[Job], chain: Any
) -> None:
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("one transaction at a time")

    with locked_elsewhere(jobs[0].pk, jobs[5].pk), transaction.atomic():
        assert next_unlocked(chain, 2) == [jobs[4], jobs[3]]


@pytest.mark.usefixtures("read_committed")
def test_a_row_is_locked_without_those_of_its_conditions(jobs: list[Job], chain: Any) -> None:
    if not connection.features.has_select_for_update:
        pytest.skip("one transaction at a time")

    with locked_elsewhere(jobs[0].pk), transaction.atomic():
        assert chain.for_update(jobs[2].pk, wait=0) == jobs[2]
        assert for_update(chain.filter(pk=jobs[3].pk), wait=0) == [jobs[3]]
        with pytest.raises(LockBusy):
            for_update(Job.objects.filter(pk=jobs[0].pk), wait=0)


def test_a_row_that_the_base_manager_hides_is_locked(jobs: list[Job], monkeypatch: Any) -> None:
    use_base_manager(monkeypatch, Job, lambda rows: rows.filter(state="shown"))

    keys = [job.pk for job in jobs]
    with locked_elsewhere(*keys), transaction.atomic(), pytest.raises(LockBusy):
        Job.objects.for_update(jobs[0].pk, wait=0)


def test_a_row_is_locked_with_the_table_that_it_inherits_from() -> None:
    if not connection.features.has_select_for_update:
        pytest.skip("one transaction at a time")
    shelf = ColdShelf.objects.create()

    with locked_elsewhere(shelf.pk, model=ColdShelf), transaction.atomic():
        with pytest.raises(LockBusy):
            for_update(Shelf.objects.filter(pk=shelf.pk), wait=0)


def test_the_next_rows_are_those_that_nobody_has(jobs: list[Job]) -> None:
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("one transaction at a time")
    queue = Job.objects.filter(state="new").order_by("rank")  # the last is first

    with transaction.atomic():
        mine = next_unlocked(queue, 2)
        with ThreadPoolExecutor(1) as pool:

            def take() -> list[list[Job]]:
                with transaction.atomic():
                    return [queue.next_unlocked(), queue.next_unlocked(9)]

            theirs = pool.submit(in_thread(take)).result(DEADLINE)

    assert mine == [jobs[5], jobs[4]]
    # A transaction gets its own rows again: they are marked before the next are taken.
    assert theirs == [[jobs[3]], [jobs[3], jobs[2], jobs[1], jobs[0]]]


@pytest.mark.usefixtures("jobs")
def test_the_next_no_rows_are_none_and_none_is_locked() -> None:
    with transaction.atomic():
        assert next_unlocked(Job.objects.all(), 0) == []


def test_a_row_whose_first_column_is_computed_can_be_locked() -> None:
    crate = Crate.objects.create(code="a", side=3)

    with transaction.atomic():
        assert for_update(Crate.objects.filter(volume=27)) == [crate]


def test_four_workers_do_each_job_once(jobs: list[Job]) -> None:
    Job.objects.bulk_create(Job(rank=number % 7) for number in range(40))
    begin = threading.Barrier(4)

    def work() -> list[int]:
        done: list[int] = []
        begin.wait(DEADLINE)
        while True:
            with transaction.atomic():
                batch = next_unlocked(Job.objects.filter(state="new").order_by("rank"), 3)
                for job in batch:
                    job.state = "done"
                    job.save()
            done += [job.pk for job in batch]
            if not batch and not Job.objects.filter(state="new").exists():
                return done

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(in_thread(work)) for _ in range(4)]
        done = [pk for future in running for pk in future.result(DEADLINE)]

    assert len(done) == len(set(done)) == 46


# Deadlocks


def test_a_deadlocked_function_is_called_again(jobs: list[Job]) -> None:
    meeting = threading.Barrier(2)
    calls = []

    def crossing(first: int, second: int) -> Callable[[], None]:
        met: list[bool] = []

        @retry_on_deadlock(pause=0.01)
        @transaction.atomic
        def cross() -> None:
            calls.append(first)
            list(Job.objects.all())
            if connection.vendor != "sqlite":
                Job.objects.filter(pk=jobs[first].pk).update(rank=first)
            if not met:
                met.append(True)
                meeting.wait(DEADLINE)
            Job.objects.filter(pk=jobs[second].pk).update(rank=second)

        return cross

    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(in_thread(crossing(first, second))) for first, second in [(0, 1), (1, 0)]
        ]
        for future in running:
            future.result(DEADLINE)

    assert len(calls) > 2


class Sacrificed(OperationalError):
    def __init__(self) -> None:
        super().__init__(1213, "Deadlock found")


def test_it_gives_up_with_the_databases_error_and_passes_others_on() -> None:
    calls: list[int] = []

    @retry_on_deadlock(attempts=3, pause=0.001)
    def fail(error: Exception) -> None:
        calls.append(1)
        raise error

    for error, times in (
        (Sacrificed(), 3),
        (OperationalError(1205, "Lock wait timeout"), 1),
        (LockTimeout(), 1),
    ):
        calls.clear()
        with pytest.raises(type(error)):
            fail(error)
        assert len(calls) == times
    with pytest.raises(ValueError):
        retry_on_deadlock(fail, attempts=0)


def test_it_refuses_to_begin_inside_a_transaction() -> None:
    calls: list[int] = []

    def work(item: int) -> None:
        calls.append(item)

    with transaction.atomic(), pytest.raises(TransactionManagementError, match="outermost"):
        retry_on_deadlock(partial(work, 1))()

    assert calls == []


def test_a_coroutine_function_is_called_again() -> None:
    calls: list[int] = []

    @retry_on_deadlock(pause=0.001)
    async def work() -> int:
        calls.append(1)
        if len(calls) < 3:
            raise Sacrificed
        return len(calls)

    assert asyncio.run(work()) == 3


class InTestCase(TestCase):
    def test_the_transaction_of_a_test_case_is_none(self) -> None:
        self.assertEqual(retry_on_deadlock(lambda: 1)(), 1)

    def test_rows_can_be_locked(self) -> None:
        job = Job.objects.create()

        self.assertEqual(Job.objects.for_update(job.pk), job)
        self.assertEqual(pessimistic.next_unlocked(Job.objects.all()), [job])
