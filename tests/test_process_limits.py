"""However many wait, or give up, a process has a bounded number of sessions on the server."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, suppress
from time import monotonic, sleep

import pytest
from django.db import connection, connections

from distlock_app import Lock, LockTimeout
from distlock_app.backends.sessions.backend import WAITING
from distlock_app.backends.sessions.queues import ASKING
from distlock_app.core.registry import registry
from tests import settings
from tests.database_workers import parked
from tests.engines import DEADLINE, until

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "locks"]),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server"),
]

OF_THE_SERVER = settings.SERVER_LOCKS.get(settings.ENGINE, ("", ""))[0]
QUEUE = 8
BOUND = QUEUE + ASKING


class Counting(threading.Thread):
    """Counts the sessions on a database until it is told to end; `most` at a time."""

    ASK = {
        "mysql": "SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE()",
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend'",
    }

    def __init__(self, using):
        super().__init__(daemon=True)
        self.connection = connections[using].copy()
        self.connection.inc_thread_sharing()
        self.end = threading.Event()
        self.most = 0
        self.before = self.count()

    def count(self):
        with self.connection.cursor() as cursor:
            cursor.execute(self.ASK[connection.vendor])
            return cursor.fetchone()[0]

    def run(self):
        while not self.end.wait(0.01):
            self.most = max(self.most, self.count() - self.before)


@contextmanager
def counting(alias):
    """Count the sessions that `alias` opens; it has none before."""
    backend = registry[alias].backend
    backend.close()
    counter = Counting(backend.using)
    counter.start()
    try:
        yield counter
    finally:
        counter.end.set()
        counter.join(DEADLINE)
        counter.connection.close()


def storm(lock, *, tasks, seconds):
    """Let tasks wait for a lock and be cancelled, about 130 times a second."""

    async def wait_and_be_cancelled(end):
        while monotonic() < end:
            task = asyncio.create_task(lock.aacquire())
            await asyncio.sleep(0.06)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def all_of_them():
        end = monotonic() + seconds
        await asyncio.gather(*(wait_and_be_cancelled(end) for _ in range(tasks)))

    asyncio.run(all_of_them())


def test_a_storm_of_cancelled_tasks_keeps_to_the_sessions_of_the_lock_table():
    with counting("locks") as counter, Lock("a", using="locks"):
        storm(Lock("a", using="locks", wait=DEADLINE), tasks=8, seconds=3)

        until(lambda: parked(registry["locks"].backend._sessions) == 1)

    assert counter.most <= BOUND


def wait_in_threads(locks, *, seconds):
    """Let a thread for each lock wait for it; return what they raised."""
    raised = []

    def wait(lock):
        try:
            lock.acquire(wait=seconds).release()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=wait, args=(lock,), daemon=True) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    return raised


@pytest.mark.parametrize("names", [1, 100])
def test_a_hundred_waiting_threads_keep_to_the_sessions_of_the_lock_table(names):
    held = [Lock(f"n{number}", using="locks").acquire() for number in range(names)]
    locks = [Lock(f"n{number % names}", using="locks") for number in range(100)]

    with counting("locks") as counter:
        raised = wait_in_threads(locks, seconds=2)

    assert [type(error) for error in raised] == [LockTimeout] * 100
    assert counter.most <= BOUND
    for hold in held:
        hold.release()


def standing(queues):
    return sum(len(queue.waiters) for queue in list(queues.by_key.values()))


def served_in_order(lock, lined_up, *, count):
    """Let threads line up for a lock one after the other; return the order they got it in."""
    order, waiters = [], []

    def take(number):
        with lock:
            order.append(number)

    with lock:
        for number in range(count):
            waiters.append(threading.Thread(target=take, args=(number,), daemon=True))
            waiters[-1].start()
            while not lined_up(number + 1):
                sleep(0.002)
    for waiter in waiters:
        waiter.join(DEADLINE)
    return order


def test_many_waiters_of_one_process_are_all_served_in_order_of_arrival():
    queues = registry["locks"].backend._sessions.queues

    lock = Lock("a", using="locks", wait=DEADLINE)

    order = served_in_order(lock, lambda count: standing(queues) == count, count=60)

    assert order == list(range(60))


server_locks = pytest.mark.skipif(not OF_THE_SERVER, reason="SQLite has no locks of its own")


@pytest.mark.parametrize("spare", [0, 1])
def test_a_process_without_files_to_open_waits_and_reports_that_it_cannot_connect(spare, processes):
    worker = processes.start("tests.database_workers:lock_without_files", spare=spare)

    new = "fine" if spare and connection.vendor == "mysql" else "BackendError"  # psycopg needs two
    assert worker.result() == ["LockTimeout", "LockTimeout", new, "fine"]


@server_locks
def test_a_storm_of_cancelled_tasks_keeps_to_the_sessions_of_server_locks():
    with counting(OF_THE_SERVER) as counter, Lock("a", using=OF_THE_SERVER):
        storm(Lock("a", using=OF_THE_SERVER, wait=DEADLINE), tasks=8, seconds=3)

    assert counter.most <= 1 + WAITING + ASKING


@server_locks
@pytest.mark.parametrize("names", [1, 50])
def test_a_hundred_waiting_threads_keep_to_the_sessions_of_server_locks(names):
    locks = [Lock(f"n{number % names}", using=OF_THE_SERVER) for number in range(100)]

    with counting(OF_THE_SERVER) as counter:
        held = [Lock(f"n{number}", using=OF_THE_SERVER).acquire() for number in range(names)]
        raised = wait_in_threads(locks, seconds=2)

    assert [type(error) for error in raised] == [LockTimeout] * 100
    assert counter.most <= names + WAITING + ASKING
    for hold in held:
        hold.release()


@server_locks
def test_many_waiters_of_one_process_share_two_sessions_in_order_of_arrival():
    lock = Lock("a", using=OF_THE_SERVER, wait=DEADLINE)
    queues = registry[OF_THE_SERVER].backend._queues

    def lined_up(count):
        waiters = sum(holding.waiters for holding in lock.holders())
        return standing(queues) == count - 1 and waiters == min(count, 2)

    with counting(OF_THE_SERVER) as counter:
        order = served_in_order(lock, lined_up, count=60)

    assert order == list(range(60))
    # Of 60: one holds, two wait, and on a busy machine a few are on their way back.
    assert counter.most <= 8
