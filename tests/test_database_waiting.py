"""Waiting for a row of the lock table in the server's own queue."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import monotonic
from unittest.mock import patch

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connection, connections
from django.db.backends.signals import connection_created
from django.db.models import F
from django.db.transaction import atomic

from distlock_app import BackendError, Lock, LockTimeout
from distlock_app.backends.database import DatabaseBackend, sql
from distlock_app.backends.database import backend as database_backend
from distlock_app.backends.database import connections as database_connections
from distlock_app.backends.database.connections import QueuedConnection
from distlock_app.backends.sessions import link
from distlock_app.backends.sessions.queues import ASKING, WaiterQueues
from distlock_app.claims import Busy, Grant
from distlock_app.core import waiting
from distlock_app.core.registry import registry
from distlock_app.core.releasing import releaser
from distlock_app.models import DistLock
from distlock_app.testing.claims import a_claim
from tests.database_workers import close, grab, parked, stop_waiting
from tests.engines import DEADLINE, alarmed, running, until
from tests.proxy import proxy_to
from tests.test_database_connections import OWN_NUMBER, kill

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "locks"]),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server"),
]

on_mysql = pytest.mark.skipif(connection.vendor != "mysql", reason="about MySQL and MariaDB")
on_postgresql = pytest.mark.skipif(connection.vendor != "postgresql", reason="about PostgreSQL")


@pytest.fixture
def only_told(monkeypatch):
    """Waiters who are told by the server do not look by themselves."""
    monkeypatch.setattr(waiting, "LOOK_EVERY", 10 * DEADLINE)


@pytest.fixture
def long_handover(monkeypatch):
    """Who is called has so much time to come, however busy the machine is."""
    monkeypatch.setattr(sql.statements, "HANDOVER_US", int(DEADLINE * 1e6))


@pytest.fixture
def backend():
    """The lock table as a process has it that holds the locks.

    A session of an earlier test that a slow server has yet to end may have the queue lock of "a",
    and a holder that does without it is waited for by nobody on the server.
    """
    backend = DatabaseBackend(alias="default", location="locks")
    until(lambda: queue_is_free(backend))
    yield backend
    close(backend)


@pytest.fixture
def sessions():
    """The connections that stay with the claims of those who wait by `Lock(using="locks")`."""
    sessions = registry["locks"].backend._sessions
    yield sessions
    stop_waiting(sessions)
    until(lambda: not waiting_in(sessions))


@pytest.fixture
def assumed_role(monkeypatch):
    """The alias assumes a role that may use the tables, but may end no session."""
    role = f"distlock_few_{os.getpid()}"
    with connections["locks"].cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role}; GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
    options = {**connections["locks"].settings_dict["OPTIONS"], "assume_role": role}
    with monkeypatch.context() as context:
        context.setitem(connections["locks"].settings_dict, "OPTIONS", options)
        registry["locks"].backend.close()
        yield
    registry["locks"].backend.close()
    with connections["locks"].cursor() as cursor:
        cursor.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.fixture
def other_schema():
    """A lock table in another schema; a context in which connections find that one."""
    schema, table = f"distlock_other_{os.getpid()}", DistLock._meta.db_table
    with connections["locks"].cursor() as cursor:
        cursor.execute(f"CREATE SCHEMA {schema}")
        cursor.execute(f"CREATE TABLE {schema}.{table} (LIKE {table} INCLUDING ALL)")
    options = {**connections["locks"].settings_dict["OPTIONS"]}
    options["options"] = f"-c search_path={schema}"
    yield patch.dict(connections["locks"].settings_dict, OPTIONS=options)
    with connections["locks"].cursor() as cursor:
        cursor.execute(f"DROP SCHEMA {schema} CASCADE")


class Waiter(threading.Thread):
    """Somebody else who wants the lock; `order` gets its number when it has it."""

    def __init__(self, number=0, order=(), wait=2 * DEADLINE):
        super().__init__(daemon=True)
        self.number, self.order, self.wait = number, order, wait
        self.error = self.got_at = None

    def run(self):
        try:
            with Lock("a", using="locks", wait=self.wait):
                self.got_at = monotonic()
                if self.order != ():
                    self.order.append(self.number)
        except Exception as error:
            self.error = error

    def served(self):
        self.join(DEADLINE)
        assert self.error is None
        return self.got_at is not None


ADVISORY = (
    "SELECT count(*) FROM pg_locks JOIN pg_database ON database = oid"
    " WHERE locktype = 'advisory' AND datname = current_database()"
)


def in_queue(number=1, within=DEADLINE):
    """Wait until so many wait on the server."""
    asked = {
        "mysql": "SELECT count(*) FROM information_schema.processlist"
        " WHERE db = DATABASE() AND state = 'User lock'",
        "postgresql": f"{ADVISORY} AND NOT granted",
    }[connection.vendor]

    waiting = None

    def there():
        nonlocal waiting
        with connections["locks"].cursor() as cursor:
            cursor.execute(asked)
            [waiting] = cursor.fetchone()
        return waiting == number

    try:
        until(there, within)
    except AssertionError:
        raise AssertionError(f"{waiting} wait on the server, not {number}") from None


def queue_is_free(backend):
    """Whether no session has, or waits for, the queue lock of "a" (on PostgreSQL: any)."""
    with connections["locks"].cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(ADVISORY)
            return cursor.fetchone() == (0,)
        if not backend._sessions.dialect.database:  # asked for by its first session
            backend.ping()
        queue = backend._sessions.dialect.queue_of(a_claim("a").key)
        cursor.execute("SELECT IS_FREE_LOCK(%s)", [queue])
        return cursor.fetchone() == (1,)


def in_line(sessions, number):
    """Wait until so many wait in this process, one of them on the server."""
    queues = sessions.queues.by_key
    until(lambda: sum(len(queue.waiters) for queue in list(queues.values())) == number)
    in_queue(min(number, 1))


def in_line_once(sessions, number=1):
    in_line(sessions, number)
    connections.close_all()  # those of this thread


async def wait_until_cancelled(lock):
    """Keep nothing of what was raised, whose traceback would keep the waiter."""
    with contextlib.suppress(asyncio.CancelledError):
        await lock.aacquire()


def waiting_in(sessions):
    return sessions.queues.connections()


def queued_in(sessions):
    """Return the connection that waits for the only queue of this process."""
    [queued] = waiting_in(sessions)
    return queued


def test_a_release_wakes_the_waiter(backend, sessions, only_told):
    held = grab(backend, "a")
    waiter = Waiter()
    waiter.start()
    in_queue()

    assert backend.release(held) is True

    assert waiter.served()
    assert parked(sessions) == 0


def test_a_release_wakes_a_waiting_task_without_a_thread_of_its_own(backend, sessions, only_told):
    held = grab(backend, "a")

    async def wait():
        task = asyncio.create_task(Lock("a", using="locks", wait=2 * DEADLINE).aacquire())
        await asyncio.to_thread(in_line_once, sessions)
        assert not [thread for thread in threading.enumerate() if "wait" in thread.name]
        await asyncio.to_thread(backend.release, held)
        hold = await asyncio.wait_for(task, DEADLINE)
        await hold.arelease()

    asyncio.run(wait())


def test_waiters_are_served_in_order_of_arrival(backend, sessions, only_told):
    held = grab(backend, "a")
    order = []
    waiters = [Waiter(number, order) for number in range(5)]
    for number, waiter in enumerate(waiters):
        waiter.start()
        in_line(sessions, number + 1)
    backend.release(held)

    assert all(waiter.served() for waiter in waiters)
    assert order == [0, 1, 2, 3, 4]


@on_mysql
def test_a_wait_outlasts_the_limit_that_the_server_has_for_statements(backend, short_statements):
    held, wanted = grab(backend, "a"), a_claim("a")

    assert not backend.acquire(wanted, 30)

    assert not queued_in(backend._sessions).called(within=0.5)
    assert backend.release(held) is True
    assert queued_in(backend._sessions).called(within=DEADLINE)
    backend.withdraw(wanted)


def test_a_release_of_a_lock_that_was_held_for_long_calls_the_waiter_after_it(
    backend, sessions, monkeypatch
):
    monkeypatch.setattr(database_connections, "IDLE", 0.0)
    monkeypatch.setattr(database_backend, "RECENT", 0.0)
    held = grab(backend, "a")
    assert not registry["locks"].backend.acquire(a_claim("a"), 30)
    in_queue()
    queued, release, early = queued_in(sessions), sql.base.Dialect.release, []

    def watched(*asked):
        early.append(queued.called(within=1.0))
        return release(*asked)

    monkeypatch.setattr(sql.base.Dialect, "release", watched)
    assert backend.release(held) is True

    assert early == [False]
    assert queued.called(within=DEADLINE)


def test_a_newcomer_at_the_hand_over_does_not_overtake(long_handover, backend, sessions, only_told):
    held = grab(backend, "a")
    waiting_for = a_claim("a")
    assert not registry["locks"].backend.acquire(waiting_for, 30)
    in_queue()
    backend.release(held)

    assert isinstance(backend.acquire(a_claim("a"), 0), Busy)
    assert queued_in(sessions).called(within=DEADLINE)
    assert isinstance(registry["locks"].backend.acquire(waiting_for, 30), Grant)


class Interrupted:
    """A cursor that does something else after it has inserted a row."""

    def __init__(self, cursor, then):
        self._cursor, self._then = cursor, then

    def __getattr__(self, name):
        return getattr(self._cursor, name)

    def execute(self, statement, *asked):
        self._cursor.execute(statement, *asked)
        if "INSERT" in statement:
            self._then()


@on_mysql
def test_a_claim_that_comes_as_a_name_gets_its_row_is_not_called_too_early(
    backend, sessions, monkeypatch
):
    make, answers = sql.mysql.MySQL.make, []

    def come(to):
        answers.append((to, to.acquire(a_claim("a"), 30)))

    def interrupted(dialect, cursor, claim):
        monkeypatch.setattr(sql.mysql.MySQL, "make", make)
        cursor = Interrupted(cursor, lambda: come(registry["locks"].backend))
        return make(dialect, cursor, claim)

    monkeypatch.setattr(sql.mysql.MySQL, "make", interrupted)
    come(backend)

    in_queue()
    [(holder, held)] = [answer for answer in answers if answer[1]]
    [(waits, _)] = [answer for answer in answers if not answer[1]]
    assert holder.release(held) is True
    assert queued_in(waits._sessions).called(within=DEADLINE)


def test_a_lock_that_the_first_in_the_queue_does_not_fetch_is_open_to_all(backend, sessions):
    held = grab(backend, "a")
    assert not registry["locks"].backend.acquire(a_claim("a"), 30)
    in_queue()
    backend.release(held)

    taken = grab(backend, "a")

    assert backend.release(taken) is True


@pytest.mark.skipif(connection.vendor != "postgresql", reason="as on PostgreSQL")
def test_a_wait_that_ended_as_it_was_granted_leaves_no_queue_lock(backend, sessions, monkeypatch):
    held, wanted = grab(backend, "a"), a_claim("a")
    waits = registry["locks"].backend
    assert not waits.acquire(wanted, 30)
    in_queue()
    called = sql.PostgreSQL.called
    monkeypatch.setattr(sql.PostgreSQL, "called", lambda *args: called(*args) and False)
    backend.release(held)
    assert queued_in(sessions).called(within=DEADLINE)

    assert waits.release(waits.acquire(wanted, 30)) is True

    def queue_locks():
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted")
            return cursor.fetchone()[0]

    until(lambda: queue_locks() == 0, within=5)


@pytest.mark.parametrize("end", ["withdraw", "last try", "release"])
def test_a_waiter_that_gives_up_leaves_no_connection(backend, sessions, end):
    held = grab(backend, "a")
    waits = registry["locks"].backend
    wanted = a_claim("a")
    assert not waits.acquire(wanted, 30)
    in_queue()
    assert parked(sessions) == 1

    if end == "last try":
        assert not waits.acquire(wanted, 0)
    elif end == "release":
        assert waits.release(Grant(wanted)) is False
    else:
        waits.withdraw(wanted)

    assert parked(sessions) == 0 and waiting_in(sessions) == []
    backend.release(held)
    assert isinstance(backend.acquire(a_claim("a"), 0), Grant)


def test_a_waiter_that_was_called_and_gives_up_frees_the_queue_at_once(backend, sessions):
    held = grab(backend, "a")
    backend._sessions.free_queue((held.claim.key, held.claim.owner))  # the row stays leased
    waits = registry["locks"].backend
    wanted = a_claim("a")
    assert not waits.acquire(wanted, 30)
    queued = queued_in(sessions)
    session = queued.session
    assert queued.called(within=DEADLINE)

    assert not waits.acquire(wanted, 0)

    assert session in sessions._idle
    assert backend.release(held)
    assert isinstance(backend.acquire(a_claim("a"), 0), Grant)


def test_a_waiter_that_was_interrupted_as_it_left_is_passed_over(backend, sessions):
    held, left, wanted = grab(backend, "a"), a_claim("a"), a_claim("a")
    waits = registry["locks"].backend
    assert not waits.acquire(left, 30)
    sessions.queues.waiter_of((left.key, left.owner)).queue = None
    backend.release(held)

    until(lambda: waits.acquire(wanted, 30))

    assert waits.release(Grant(wanted))


def test_threads_that_share_a_stable_owner_share_no_connection(backend, sessions):
    held = grab(backend, "a")
    one, other = (a_claim("a", owner="f" * 32, stable=True) for _ in range(2))
    waits = registry["locks"].backend

    assert waits.acquire(one, 30).wake_fd is not None
    assert waits.acquire(other, 30).wake_fd is None  # both would poll() it

    for claim in one, other:
        waits.release(Grant(claim))
    assert backend.release(held)


def test_a_waiter_may_look_as_another_thread_with_its_owner_gets_the_lock(
    backend, sessions, monkeypatch
):
    held, wanted = grab(backend, "a"), a_claim("a")
    waits, leads = registry["locks"].backend, sessions.queues.leads
    assert not waits.acquire(wanted, 30)
    in_queue()

    def another_thread_comes_between(waiter):
        answer = leads(waiter)
        monkeypatch.setattr(sessions.queues, "leads", leads)
        assert backend.release(held)
        until(lambda: isinstance(waits.acquire(wanted, 30), Grant))
        return answer

    monkeypatch.setattr(sessions.queues, "leads", another_thread_comes_between)
    assert waits.look(wanted) is None  # it is worthwhile to try

    assert waits.release(Grant(wanted))


def test_waiters_of_closed_event_loops_are_passed_over_however_many(sessions):
    def closed(_):
        raise RuntimeError("Event loop is closed")

    queues = sessions.queues
    head = queues.enqueue(("key", "head"), None)
    for number in range(3000):
        queues.enqueue(("key", str(number)), closed)
    last = queues.enqueue(("key", "last"), None)

    queues.leave(head)

    assert queues.by_key["key"].first() is last
    queues.leave(last)
    assert not queues.by_key


def test_a_wait_that_is_over_or_cancelled_ends_on_the_server(backend, sessions):
    held = grab(backend, "a")
    with pytest.raises(LockTimeout) as timeout:
        Lock("a", using="locks", wait=0.3).acquire()
    assert 20 < timeout.value.free_in + 0.3 <= 30.3

    async def cancel():
        task = asyncio.create_task(Lock("a", using="locks", wait=DEADLINE).aacquire())
        await asyncio.to_thread(in_line_once, sessions)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    until(lambda: parked(sessions) == 0)
    assert backend.release(held) is True


@pytest.mark.parametrize("stable", [False, True])
def test_cancelled_tasks_leave_the_servers_queue_at_once(backend, sessions, stable):
    held = grab(backend, "a")
    locks = [
        Lock("a", using="locks", wait=DEADLINE, owner=f"o{number}" if stable else None)
        for number in range(6)
    ]

    async def cancel():
        tasks = [asyncio.create_task(wait_until_cancelled(lock)) for lock in locks]
        await asyncio.to_thread(in_line_once, sessions, len(tasks))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)

    asyncio.run(cancel())
    in_queue(0, within=20)  # the server would end them after QUEUE_WAIT, 30 seconds
    assert backend.release(held) is True


def test_a_task_cancelled_while_it_lines_up_leaves_the_servers_queue(
    backend, sessions, monkeypatch
):
    held = grab(backend, "a")
    registry["locks"].backend.ping()
    line_up, began, cancelled = sessions.dialect.line_up, threading.Event(), threading.Event()

    def line_up_late(*args):
        began.set()
        assert cancelled.wait(DEADLINE)
        return line_up(*args)

    monkeypatch.setattr(sessions.dialect, "line_up", line_up_late)

    async def cancel():
        lock = Lock("a", using="locks", wait=DEADLINE)
        task = asyncio.create_task(wait_until_cancelled(lock))
        assert await asyncio.to_thread(began.wait, DEADLINE)
        task.cancel()
        await task
        cancelled.set()

    asyncio.run(cancel())

    until(lambda: sessions._idle)
    in_queue(0, within=20)
    assert backend.release(held) is True


def test_a_waiter_whose_connection_was_killed_lines_up_again(backend, sessions, only_told):
    held = grab(backend, "a")
    waiter = Waiter()
    waiter.start()
    in_queue()
    until(lambda: waiting_in(sessions))  # the server knew first
    (queued,) = waiting_in(sessions)
    wrapper = queued.session.wrapper
    first = (
        wrapper.connection.thread_id()
        if connection.vendor == "mysql"
        else wrapper.connection.info.backend_pid
    )
    del queued

    kill(first)
    until(lambda: [one for one in waiting_in(sessions) if one.session.wrapper is not wrapper])
    in_queue()
    backend.release(held)

    assert waiter.served()


def test_the_processes_that_wait_are_counted(backend, sessions, processes):
    held, free = grab(backend, "a"), grab(backend, "b")
    waiters = [Waiter() for _ in range(2)]
    for number, waiter in enumerate(waiters, 1):
        waiter.start()
        in_line(sessions, number)
    options = {"name": "a", "using": "locks", "ttl": 30, "wait": 2 * DEADLINE}
    worker = processes.start("tests.lock_workers:take_once", **options)
    in_queue(2)

    listed = {holding.name: holding.waiters for holding in backend.holders()}
    [of_one] = backend.holders(held.claim.key)

    assert listed == {"a": 2, "b": 0}
    assert of_one.waiters == 2
    assert {holding.name: holding.waiters for holding in backend.page(0, 10)[0]} == listed
    assert backend.release(held)
    assert all(waiter.served() for waiter in waiters)
    worker.result(DEADLINE)
    assert backend.release(free)


@pytest.mark.parametrize("kind", [{"shared": True}, {"limit": 2}], ids=str)
def test_the_first_that_waits_for_readers_or_permits_is_counted(backend, sessions, kind):
    held = backend.acquire(a_claim("a", **kind), 0)
    waiter = Waiter()
    waiter.start()

    until(lambda: [holding.waiters for holding in backend.holders()] == [1])

    assert backend.release(held)
    assert waiter.served()


def test_where_waiters_poll_their_number_is_unknown():
    backend = DatabaseBackend(alias="default", location="locks", queue=0)
    held = grab(backend, "a")

    assert [holding.waiters for holding in backend.holders()] == [None]

    assert backend.release(held)
    backend.close()


def test_dead_waiters_hold_nobody_up(backend, sessions, only_told, processes):
    held = grab(backend, "a")
    options = {"name": "a", "using": "locks", "ttl": 30, "wait": DEADLINE}
    dead = processes.start_many("tests.lock_workers:take_once", count=3, **options)
    in_queue(3)
    waiter = Waiter()
    waiter.start()
    in_queue(4)

    for one in dead:
        one.kill()
    backend.release(held)
    released_at = monotonic()

    assert waiter.served()
    print(f"{(waiter.got_at - released_at) * 1000:.0f} ms")


def test_dead_waiters_leave_the_queue_of_the_server(backend, processes):
    held = grab(backend, "a")
    options = {"name": "a", "using": "locks", "ttl": 30, "wait": DEADLINE}
    dead = processes.start_many("tests.lock_workers:take_once", count=3, **options)
    in_queue(3)

    for one in dead:
        one.kill()

    in_queue(0, within=20)
    assert backend.release(held) is True


@pytest.mark.parametrize("task", [False, True])
def test_ctrl_c_ends_a_wait_on_the_server(backend, processes, task):
    held = grab(backend, "a")
    if task:
        worker = processes.start("tests.database_workers:wait_in_a_task", name="a")
    else:
        options = {"name": "a", "using": "locks", "ttl": 30, "wait": DEADLINE}
        worker = processes.start("tests.lock_workers:take_once", **options)
    in_queue()

    os.kill(worker.pid, signal.SIGINT)

    in_queue(0, within=20)
    assert backend.release(held) is True


def test_ctrl_c_just_after_the_server_was_asked_to_wait_ends_that_wait(
    backend, sessions, monkeypatch
):
    held = grab(backend, "a")
    registry["locks"].backend.ping()
    line_up = sessions.dialect.line_up

    def interrupted(wrapper, key):
        line_up(wrapper, key)
        in_queue()
        raise KeyboardInterrupt

    monkeypatch.setattr(sessions.dialect, "line_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Lock("a", using="locks").acquire()

    in_queue(0, within=20)
    assert backend.release(held) is True


def test_a_holder_whose_connection_was_killed_keeps_the_lock(backend, sessions):
    held = grab(backend, "a")
    backend.close()  # its queue lock is gone with the connection
    waiter = Waiter()
    waiter.start()
    until(lambda: [one for one in waiting_in(sessions) if one.wake_fd is None])  # its turn

    assert waiter.got_at is None
    assert backend.extend(held, 30) is True
    assert backend.release(held) is True
    assert waiter.served()


def test_a_dead_holder_is_waited_for_until_its_row_expires(backend, sessions):
    died_at = monotonic()
    grab(backend, "a", ttl=1.5)
    waiters = [Waiter() for _ in range(3)]
    for waiter in waiters:
        waiter.start()

    assert all(waiter.served() for waiter in waiters)
    assert min(waiter.got_at for waiter in waiters) >= died_at + 1.5 - 0.5


def test_a_holder_that_hangs_with_the_queue_is_waited_for_until_its_row_expires(backend, sessions):
    held = grab(backend, "a")
    waiter = Waiter()
    waiter.start()
    in_line_once(sessions)

    expired_at = monotonic()
    DistLock.objects.using("locks").update(expiry=F("acquired_at"))

    assert waiter.served()
    assert waiter.got_at < expired_at + 20  # before the server ends its wait
    until(lambda: not held.session.fresh)  # the waiter has it ended
    assert backend.release(held) is False


def hangs_with_the_queue_until_ended(backend):
    held = grab(backend, "a")  # it has the queue, too, and is not heard of again
    DistLock.objects.using("locks").update(expiry=F("acquired_at"))
    ours = registry["locks"].backend

    assert ours.release(grab(ours, "a"))  # cannot hand it over

    with pytest.raises(link.ServerError):
        held.session.session.cursor.execute("SELECT 1")


def test_a_release_ends_a_session_that_hangs_with_the_queue(backend):
    hangs_with_the_queue_until_ended(backend)


@on_postgresql
def test_a_release_ends_a_session_that_hangs_also_if_the_alias_assumes_a_role(
    backend, assumed_role
):
    hangs_with_the_queue_until_ended(backend)


@on_postgresql
def test_tables_in_two_schemas_of_a_database_share_no_queue(backend, sessions, other_schema):
    held, waiter = grab(backend, "a"), Waiter()
    waiter.start()
    in_line_once(sessions)

    with other_schema:
        other = DatabaseBackend(alias="default", location="locks")
        held_there, wanted = grab(other, "a"), a_claim("a")
        waiters_there = [holding.waiters for holding in other.holders()]
        assert not other.acquire(wanted, 30)
        assert other.release(held_there) is True

        assert waiters_there == [0]
        assert queued_in(other._sessions).called(within=DEADLINE)
        assert other.release(other.acquire(wanted, 30)) is True
    held.session.session.cursor.execute("SELECT 1")  # nobody has ended it
    assert [holding.waiters for holding in backend.holders()] == [1]
    assert backend.release(held) is True
    assert waiter.served()
    other.close()


def test_forks_with_a_database_each_share_no_queue(backend, long_handover, monkeypatch):
    """As `manage.py test --parallel` has them: the checks asked the parent's database."""
    forked = DatabaseBackend(alias="default", location="locks")
    forked.ping()
    held = grab(backend, "a")

    settings_of_child = connections["locks"].settings_dict
    monkeypatch.setitem(settings_of_child, "NAME", connections["default"].settings_dict["NAME"])
    forked.after_fork()
    held_there = forked.acquire(a_claim("a"), 0)

    assert held_there, "the queue of the other database kept it"
    assert forked.release(held_there) is True
    assert backend.release(held) is True
    forked.close()


def test_who_comes_to_lead_the_queue_at_its_deadline_tries_once_more(backend, sessions):
    held = grab(backend, "a")  # it has the queue, too, and is not heard of again
    ours, (first, last) = registry["locks"].backend, (a_claim("a"), a_claim("a"))
    assert not ours.acquire(first, 30) and not ours.acquire(last, 30)
    DistLock.objects.using("locks").update(expiry=F("acquired_at"))

    assert ours.release(Grant(first)) is False  # it gives up
    assert isinstance(ours.acquire(last, 0), Grant)
    del held


def test_who_comes_to_lead_the_queue_is_told_each_time_what_wakes_it(backend, sessions):
    held = grab(backend, "a")
    ours, (first, last) = registry["locks"].backend, (a_claim("a"), a_claim("a"))
    assert not ours.acquire(first, 30) and not ours.acquire(last, 30)
    told_by = queued_in(sessions).wake_fd

    assert ours.release(Grant(first)) is False

    assert [ours.acquire(last, 30).wake_fd for _ in range(2)] == [told_by] * 2
    assert backend.release(held)


def test_a_reader_that_was_called_calls_the_next_one_while_it_reads(backend, sessions):
    held, reader = grab(backend, "a"), a_claim("a", shared=True)
    first, second = registry["locks"].backend, DatabaseBackend(alias="default", location="locks")
    for number, waits in enumerate([first, second], 1):
        assert not waits.acquire(replace(reader, owner=f"{number}" * 32), 30)
        in_queue(number)
    backend.release(held)

    until(lambda: first.acquire(replace(reader, owner="1" * 32), 30))

    assert queued_in(second._sessions).called(within=DEADLINE)
    close(second)


def test_a_waiter_that_hung_is_waked_again_and_leaves_no_connection():
    woken, emptied = [], []
    queues = WaiterQueues(emptied.append, hangs=0.0)
    hung, other = (queues.enqueue(("key", owner), woken.append) for owner in ("hung", "other"))
    hung.asked = True
    queues.attach(hung, "the queue's")

    assert queues.leads(other)

    assert queues.connection_of(hung) is queues.connection_of(other) is None
    assert queues.leads(other) and emptied == []
    queues.detach(hung, "the queue's")  # it used it up
    queues.attach(hung, "its own")
    assert (queues.connections(), hung.connection) == ([], "its own")
    queues.leave(other)
    assert woken == [None]
    assert queues.leads(hung) and emptied == ["its own"]


def test_a_cleared_lock_goes_on_although_its_holder_knows_nothing(backend, sessions):
    held = grab(backend, "a")
    waiter = Waiter()
    waiter.start()
    in_queue()

    assert registry["locks"].backend.clear(held.claim.key) == 1

    assert waiter.served()
    until(lambda: not held.session.fresh)  # the waiter has it ended
    assert backend.release(held) is False


def test_a_clear_in_the_process_of_the_holder_frees_the_queue_of_what_it_took(backend):
    held = grab(backend, "a")

    assert backend.clear(held.claim.key, str(held.fence + 1)) == 0
    assert parked(backend._sessions) == 1

    assert backend.clear(held.claim.key, str(held.fence)) == 1
    assert parked(backend._sessions) == 0


def test_a_release_in_a_transaction_frees_the_queue_before_the_commit(backend):
    held = grab(backend, "a")

    with atomic(using="locks"):
        assert backend.release_at_commit(held) is True
        assert parked(backend._sessions) == 0


def test_an_interrupt_as_its_turn_comes_is_raised_and_leaves_the_queue(
    backend, sessions, monkeypatch
):
    held, wanted, waits = grab(backend, "a"), a_claim("a"), registry["locks"].backend
    assert not waits.acquire(wanted, 30)
    in_queue()
    backend.release(held)
    assert queued_in(sessions).called(within=DEADLINE)

    acquire = sessions.dialect.acquire

    def interrupted(*_, **how):
        monkeypatch.setattr(sessions.dialect, "acquire", acquire)
        raise KeyboardInterrupt

    monkeypatch.setattr(sessions.dialect, "acquire", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:  # its traceback keeps the connection
        waits.acquire(wanted, 30)

    assert (waiting_in(sessions), parked(sessions)) == ([], 0), caught
    waits.withdraw(wanted)
    assert waits.release(grab(waits, "a"))


def test_beyond_its_connections_a_process_polls(backend, sessions, monkeypatch):
    monkeypatch.setattr(sessions, "slots", deque([None]))
    monkeypatch.setattr(sessions, "_queue", 1)
    held = grab(backend, "a")
    waiters = [Waiter() for _ in range(3)]
    for waiter in waiters:
        waiter.start()
        in_queue()

    backend.release(held)

    assert all(waiter.served() for waiter in waiters)
    assert parked(sessions) == 0


def test_a_server_without_connections_to_spare_gets_back_those_of_the_queue(backend, monkeypatch):
    held = grab(backend, "a")
    sessions = backend._sessions
    real, refused = sessions._new, []

    def full(wrapper):
        if parked(sessions):
            refused.append(True)
            raise OperationalError("too many connections")
        return real(wrapper)

    monkeypatch.setattr(sessions, "_new", full)

    assert backend.extend(held, 30) is True

    assert refused
    assert grab(backend, "b").session is None
    assert backend.release(held) is True


def test_with_queue_0_nothing_stays_with_claims():
    backend = DatabaseBackend(alias="default", location="locks", queue=0)
    held = grab(backend, "a")

    refused = backend.acquire(a_claim("a"), 30)

    assert held.session is None
    assert not refused and not backend._sessions.queues.by_key
    assert backend.release(held) is True
    if connection.vendor == "postgresql":  # a pooler may lend this session to others
        [session] = backend._sessions._idle
        with session.wrapper.cursor() as cursor:  # not in a transaction, as ours would be
            cursor.execute(
                "SELECT name FROM pg_settings WHERE source = 'session' AND name LIKE ANY (%s)",
                [["lock_timeout", "statement_timeout", "default_transaction%", "tcp_keep%"]],
            )
            assert cursor.fetchall() == []
    backend.close()


@pytest.mark.parametrize("queue", [-1, "8", None])
def test_a_number_of_connections_that_is_none_is_refused(queue):
    with pytest.raises(ImproperlyConfigured, match="^QUEUE"):
        DatabaseBackend(alias="x", queue=queue)


def test_waiters_poll_as_often_as_the_options_say():
    options = {"queue": 0, "poll_min": 0.2, "poll_max": 0.4}
    backend = DatabaseBackend(alias="default", location="locks", **options)
    held = grab(backend, "a")

    class Impatient(waiting.InThread):
        async def pause(self, seconds, busy):
            pauses.append(seconds)
            if len(pauses) == 30:
                raise TimeoutError

    pauses = []
    with pytest.raises(TimeoutError):
        Impatient(backend, a_claim("a"), None).acquired(60)

    assert 0.1 < max(pauses) <= 0.4
    assert backend.release(held)
    backend.close()


@pytest.mark.parametrize(
    "poll", [{"poll_min": 0}, {"poll_min": "0.1"}, {"poll_max": 0.001}, {"poll_max": math.inf}]
)
def test_pauses_that_are_none_are_refused(poll):
    with pytest.raises(ImproperlyConfigured, match="^POLL_M"):
        DatabaseBackend(alias="x", **poll)
    DatabaseBackend(alias="x", poll_min=0.2, poll_max=0.2)


def test_a_server_that_cannot_queue_is_polled(backend, sessions, monkeypatch):
    held = grab(backend, "a")
    registry["locks"].backend.ping()
    dialect = sessions.dialect
    monkeypatch.setattr(type(dialect), "can_queue", lambda *args: False)
    registry["locks"].backend.close()
    waiter = Waiter()
    waiter.start()
    until(lambda: sessions._idle)

    backend.release(held)

    assert waiter.served()
    assert parked(sessions) == 0
    registry["locks"].backend.close()  # whose connections would not queue in other tests either


@pytest.mark.parametrize("leave", ["dump", "leave_for"])
def test_a_lock_that_is_left_to_itself_keeps_no_connection(sessions, leave):
    lock = Lock("a", using="locks", ttl=DEADLINE)
    hold = lock.acquire()
    assert parked(sessions) == 1

    getattr(hold, leave)(DEADLINE)

    assert parked(sessions) == 0
    assert lock.clear() == 1
    lock.acquire(wait=0).release()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("verb", ["extend", "extend_many"])
def test_a_renewal_goes_before_callers_that_wait_for_a_connection(backend, verb, shared):
    grant = backend.acquire(a_claim("a", shared=shared), 0)
    semaphore = backend._sessions.semaphore
    assert all(semaphore.acquire(0) for _ in range(ASKING))
    with ThreadPoolExecutor(2) as threads:
        others = threads.submit(semaphore.acquire, 60)  # and keeps it
        until(lambda: len(semaphore._queue) == 1)
        work = ([(grant, 10.0)],) if verb == "extend_many" else (grant, 10.0)
        renewal = threads.submit(getattr(backend, verb), *work)
        until(lambda: len(semaphore._queue) == 2)

        semaphore.release()

        assert renewal.result() in (True, [True])
        assert others.result()


def test_a_lock_keeps_its_connection_until_a_renewal_finds_it_lost(backend):
    grant = backend.acquire(a_claim("a", ttl=DEADLINE), 0)

    assert backend.extend(grant, DEADLINE)
    assert parked(backend._sessions) == 1

    with contextlib.closing(DatabaseBackend(alias="default", location="locks")) as other:
        assert other.clear(grant.claim.key) == 1
    assert parked(backend._sessions) == 1
    assert not backend.extend(grant, DEADLINE)
    assert parked(backend._sessions) == 0


def test_a_waiter_gets_a_lock_that_was_left_as_soon_as_it_ends(sessions):
    hold = Lock("a", using="locks", ttl=10 * DEADLINE).acquire()
    waiter = Waiter()
    waiter.start()
    in_queue()
    left_at = monotonic()

    hold.leave_for(0.5)

    assert waiter.served()
    assert waiter.got_at - left_at >= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("using", ["default", *settings.SERVER_LOCKS.get(settings.ENGINE, ())[:1]])
def test_cancelled_waiters_leave_unrelated_locks_their_time(using):
    left, end = [], monotonic() + 8  # a few renewals

    async def give_up(number):
        while monotonic() < end:
            task = asyncio.ensure_future(Lock("pinned", using=using).aacquire(wait=None))
            await asyncio.wait([task], timeout=0.05 * number)
            task.cancel()

    async def look(hold):
        while monotonic() < end:
            left.append(hold.expires_in)
            await asyncio.sleep(0.01)

    async def storm(hold):
        await asyncio.gather(look(hold), *(give_up(1 + number % 4) for number in range(20)))

    with Lock("unrelated", using=using, ttl=6) as unrelated, atomic():
        with Lock("pinned", using=using, release="now") as pinned:
            if using == "default":
                pinned.pin()
            with running(lambda: asyncio.run(storm(unrelated))):
                pass

    assert min(left) > 1


def tries(backend, times):
    """Try to take a lock and release it, so many times; return which of them were refused."""
    refused = []
    for number in range(times):
        grant = backend.acquire(a_claim("a"), 0)
        if isinstance(grant, Grant):
            backend.release(grant)
        else:
            refused.append(number)
    return refused


def test_a_former_holder_who_hangs_keeps_no_free_lock_from_others(backend):
    hangs = DatabaseBackend(alias="default", location="locks")
    held = grab(hangs, "a", ttl=0.1)
    until(lambda: backend.look(a_claim("a")) is None)

    until(lambda: not tries(backend, 5))  # until the server has ended its session

    assert tries(backend, 20) == []
    assert hangs.extend(held, 30) is False
    assert hangs.release(grab(hangs, "a")) is True
    hangs.close()


def test_a_first_waiter_that_hangs_is_passed_over_once(backend, sessions):
    held = grab(backend, "a")
    assert not registry["locks"].backend.acquire(a_claim("a"), 30)
    in_queue()
    backend.release(held)
    backend.release(grab(backend, "a"))

    until(lambda: not tries(backend, 5))

    assert tries(backend, 20) == []


def test_a_waiter_that_hung_shares_no_connection_with_the_one_that_took_its_place(
    backend, sessions, monkeypatch
):
    locks, hung, next_one = registry["locks"].backend, a_claim("a"), a_claim("a")
    held = grab(backend, "a")
    waits = [locks.acquire(hung, 30), locks.acquire(next_one, 30)]
    with monkeypatch.context() as at_once:
        at_once.setattr(sessions.queues, "_hangs", 0.0)
        waits[1] = locks.acquire(next_one, 30)

    backend.release(held)

    assert waits[0].wake_fd != waits[1].wake_fd
    assert locks.look(hung) is None  # it asks again, and is told what to wait for
    assert locks.acquire(hung, 30).will_wake
    until(lambda: (grant := locks.acquire(next_one, 30)) and locks.release(grant))
    until(lambda: (grant := locks.acquire(hung, 30)) and locks.release(grant))


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("wait", [0, 0.1])
def test_a_row_in_somebodys_transaction_is_busy_in_time(pooled, wait, monkeypatch):
    monkeypatch.setitem(connections["locks"].settings_dict, "DISABLE_SERVER_SIDE_CURSORS", pooled)
    backend = DatabaseBackend(alias="default", location="locks")
    held, took = grab(backend, "a"), []
    with atomic(using="locks"):
        assert backend.pin(held, 30)
        for _ in range(3):
            began = monotonic()

            answer = backend.acquire(a_claim("a"), wait)

            took.append(monotonic() - began)
            assert isinstance(answer, Busy)
        # The row is asked for itself, and another transaction than the lock's own is no error.
        assert isinstance(backend.acquire(a_claim("a"), 2), Busy)
    assert min(took) < 0.8  # a server waits for a row for a second
    assert backend.release(held) is True
    close(backend)


def test_a_free_row_in_somebodys_transaction_is_waited_for_once(backend):
    claim, took = grab(backend, "a").claim, []
    backend.release(Grant(claim))
    with atomic(using="locks"):
        DistLock.objects.using("locks").select_for_update().get(key=claim.key)
        for _ in range(4):
            began = monotonic()
            assert isinstance(backend.acquire(a_claim("a"), 2), Busy)
            took.append(monotonic() - began)

    assert min(took[1:]) < 0.8  # meanwhile the connection serves other locks
    assert backend.acquire(a_claim("a"), 2)


def test_the_last_try_of_a_waiter_does_not_wait_for_the_row(backend, sessions):
    held, took = grab(backend, "a"), []
    waits = registry["locks"].backend
    for _ in range(3):
        wanted = a_claim("a")
        assert not waits.acquire(wanted, 30)
        in_queue()
        with atomic(using="locks"):
            assert backend.pin(held, 30)
            began = monotonic()

            answer = waits.acquire(wanted, 0)

            took.append(monotonic() - began)
        assert isinstance(answer, Busy)
    assert min(took) < 0.8


@pytest.mark.parametrize("queue", [8, 0])
def test_a_server_that_is_frozen_is_an_error_in_time(queue, monkeypatch):
    backend = DatabaseBackend(alias="default", location="locks", queue=queue)
    with proxy_to(int(connections["locks"].settings_dict["PORT"])) as proxy:
        frozen = {**connections["locks"].settings_dict, "HOST": "127.0.0.1", "PORT": proxy.port}
        monkeypatch.setattr(connections["locks"], "settings_dict", frozen)
        backend.ping()
        monkeypatch.setattr(link, "ANSWER_WAIT", 0.5)
        proxy.silent = True

        with pytest.raises(BackendError, match=r"no answer within 0\.5 s"):
            backend.acquire(a_claim("a"), 0)
    backend.close()


@pytest.mark.parametrize("queue", [8, 0])
def test_a_pooler_that_has_no_server_for_a_new_connection_is_an_error_in_time(queue, monkeypatch):
    """PgBouncer lets a client in by itself; its first statement waits up to two minutes."""
    if connection.vendor != "postgresql":
        pytest.skip("PgBouncer speaks for PostgreSQL")
    wrapper = type(connections["locks"])
    backend = DatabaseBackend(alias="default", location="locks", queue=queue)
    with proxy_to(int(connections["locks"].settings_dict["PORT"])) as proxy:
        pooler = {
            **connections["locks"].settings_dict,
            "HOST": "127.0.0.1",
            "PORT": proxy.port,
            "TIME_ZONE": "Asia/Seoul",  # not the server's, so that Django would set it
        }
        monkeypatch.setattr(connections["locks"], "settings_dict", pooler)
        monkeypatch.setattr(link, "ANSWER_WAIT", 0.5)
        connect = wrapper.get_new_connection
        hangs = threading.Timer(5, proxy.cut)

        def let_in(self, params):
            connected = connect(self, params)
            proxy.silent = True
            hangs.start()
            return connected

        monkeypatch.setattr(wrapper, "get_new_connection", let_in)
        with pytest.raises(BackendError, match=r"no answer within 0\.5 s"):
            backend.ping()
        hangs.cancel()
    backend.close()


def test_a_frozen_server_does_not_freeze_who_stops_waiting(backend, processes):
    """psycopg's cancel() kept the interpreter to itself until the server answered."""
    held = grab(backend, "a")
    with proxy_to(int(connections["locks"].settings_dict["PORT"])) as proxy:
        waits = "tests.database_workers:give_up_a_wait"
        waiter = processes.start(waits, name="a", port=proxy.port)
        assert waiter.read() == "waits"
        proxy.silent = True
        waiter.tell("give up")

        assert waiter.result(within=20) is None
    assert backend.release(held) is True


SLOW_INSERTS = {
    "mysql": [
        "CREATE TRIGGER nap BEFORE INSERT ON distlock_app_distlock"
        " FOR EACH ROW SET @slept = SLEEP(1)",
    ],
    "postgresql": [
        "CREATE FUNCTION nap() RETURNS trigger LANGUAGE plpgsql"
        " AS 'BEGIN PERFORM pg_sleep(1); RETURN NEW; END'",
        "CREATE TRIGGER nap BEFORE INSERT ON distlock_app_distlock"
        " FOR EACH ROW EXECUTE FUNCTION nap()",
    ],
}
FAST_INSERTS = {"mysql": "DROP TRIGGER nap", "postgresql": "DROP FUNCTION nap() CASCADE"}


@pytest.fixture
def slow_inserts():
    """Let the server take its time to write a new row, as a busy disk does."""
    with connections["locks"].cursor() as cursor:
        for statement in SLOW_INSERTS[connection.vendor]:
            cursor.execute(statement)
        yield
        cursor.execute(FAST_INSERTS[connection.vendor])


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
def test_a_release_does_not_overtake_a_request_that_a_signal_ended(backend, slow_inserts, raised):
    def interrupt(*_):
        raise raised

    inserting = {
        "mysql": "SELECT count(*) FROM information_schema.processlist WHERE state = 'User sleep'",
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'",
    }[connection.vendor]

    def inserts():
        with connections["locks"].cursor() as cursor:
            cursor.execute(inserting)
            [found] = cursor.fetchone()
        if found:
            connections.close_all()  # those of this thread
        return found

    with pytest.raises(raised), alarmed(inserts, interrupt):
        Lock("a", using="locks").acquire()

    rows = DistLock.objects.using("locks")
    until(lambda: rows.filter(name="a").exists())
    releaser.drain()
    assert not list(registry["locks"].backend.holders())


def test_an_owner_that_asks_again_closes_no_connection(backend):
    # Until the server noticed, it would keep the queue lock, and the free lock from others.
    ours = a_claim("mine")
    grants = [backend.acquire(ours, 0)]
    opened = []
    connection_created.connect(receiver := lambda **_: opened.append(1))

    grants += [backend.acquire(ours, 0) for _ in range(3)]

    connection_created.disconnect(receiver)
    assert all(grants)
    assert not opened


def test_an_owner_whose_connection_was_killed_asks_again(backend):
    ours = a_claim("mine")
    grant = backend.acquire(ours, 0)
    kill(grant.session.session.cursor.execute(f"SELECT {OWN_NUMBER}").fetchone()[0])

    assert backend.acquire(ours, 0).fence == grant.fence

    assert backend.release(grant) is True


def test_a_claim_that_is_interrupted_just_as_it_is_kept_is_released(backend, monkeypatch):
    asked, keep = a_claim("kept"), QueuedConnection.keep  # the queue lock of "a" may be taken

    def interrupted(queued, session):
        keep(queued, session)
        backend._sessions.queued[asked.key, asked.owner] = queued
        raise KeyboardInterrupt

    monkeypatch.setattr(QueuedConnection, "keep", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:  # its traceback keeps the connection
        backend.acquire(asked, 5)

    assert backend.release(Grant(asked)) is True, caught
    assert list(backend.holders(asked.key)) == []
