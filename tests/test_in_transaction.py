"""Locks that are rows of the lock table, locked until the end of a transaction."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any
from unittest.mock import patch

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.db import DatabaseError, OperationalError, connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.http import HttpResponse
from django.test import RequestFactory, TestCase

from distlock_app import (
    BackendError,
    Latch,
    Lock,
    LockBusy,
    LockError,
    LockLost,
    LockTimeout,
    NotHeld,
    assert_locked,
    current_hold,
    lock_in_transaction,
    locked,
    locked_view,
)
from distlock_app.backends.database import DatabaseBackend
from distlock_app.backends.database.connections import Sessions
from distlock_app.backends.database.sql.mysql import MySQL
from distlock_app.backends.database.sql.postgresql import PostgreSQL
from distlock_app.claims import Busy
from distlock_app.core import in_transaction
from distlock_app.core.registry import registry
from distlock_app.guards.retrying import was_sacrificed
from distlock_app.models import DistLock
from distlock_app.primitives import timing
from distlock_app.primitives.timing import Deadline
from distlock_app.testing import held_elsewhere
from distlock_app.testing.claims import a_claim
from tests.app.models import Counter
from tests.engines import until
from tests.launching import Server
from tests.processes import Processes

pytestmark = pytest.mark.django_db(transaction=True)

DEADLINE = 30
ON_SQLITE = connection.vendor == "sqlite"


@pytest.fixture(autouse=True)
def read_committed_but_where_it_says_so(request: pytest.FixtureRequest) -> None:
    """Leave higher levels to the tests that are about them."""
    if request.cls is None:
        request.getfixturevalue("read_committed")


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Any]]:
    """Call a function in another thread, with connections of its own."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(DEADLINE)
        pool.submit(connections.close_all).result(DEADLINE)


def in_own_transaction(name: str, wait: float | None = 0) -> int:
    with transaction.atomic():
        return lock_in_transaction(name, wait=wait)


def outcome(function: Callable[..., Any], *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__
    return "done"


def take(name: str, wait: float = 0) -> None:
    Lock(name, wait=wait).acquire().release()


# Who keeps out whom


def test_it_keeps_out_other_transactions_and_locks_until_the_commit(
    elsewhere: Callable[..., Any],
) -> None:
    with transaction.atomic():
        lock_in_transaction("invoice:1")

        assert elsewhere(outcome, in_own_transaction, "invoice:1") == "LockBusy"
        assert elsewhere(outcome, in_own_transaction, "invoice:1", 0.2) == "LockTimeout"
        assert elsewhere(outcome, take, "invoice:1", 0.2) == "LockTimeout"

    assert elsewhere(outcome, in_own_transaction, "invoice:1") == "done"
    assert elsewhere(outcome, take, "invoice:1") == "done"


def test_a_rollback_frees_it_and_so_does_the_end_of_the_connection(
    elsewhere: Callable[..., Any],
) -> None:
    for end in (lambda: transaction.set_rollback(True), connection.close):
        with transaction.atomic():
            lock_in_transaction("invoice:2")
            end()

        assert elsewhere(outcome, take, "invoice:2", 5) == "done"


def test_a_live_lock_keeps_transactions_out_and_its_release_lets_them_in(
    elsewhere: Callable[..., Any],
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with Lock("invoice:3") as hold:
            assert elsewhere(outcome, in_own_transaction, "invoice:3") == "LockBusy"
            assert elsewhere(outcome, in_own_transaction, "invoice:3", 0.2) == "LockTimeout"
            waiting = pool.submit(in_own_transaction, "invoice:3", DEADLINE)
            hold.extend()  # nobody who waits keeps the row from its holder

        assert waiting.result(DEADLINE) > (hold.fence or 0)
        pool.submit(connections.close_all).result(DEADLINE)


def test_an_expired_lock_is_taken_over_for_good() -> None:
    hold = Lock("invoice:4", ttl=0.1, renew=False).acquire()
    while not hold.lost:
        pass

    assert in_own_transaction("invoice:4", 1) > (hold.fence or 0)
    with pytest.raises(LockLost):
        hold.release()


def test_the_error_tells_how_long_it_was_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def after_a_slow_first_try(wait: float) -> Deadline:
        return Deadline(wait, since=timing.monotonic() - 0.1)

    monkeypatch.setattr(in_transaction, "Deadline", after_a_slow_first_try)
    with transaction.atomic(), held_elsewhere("invoice:7"):
        with pytest.raises(LockTimeout, match=r"not free within 0\.200 s"):
            lock_in_transaction("invoice:7", wait=0.2)


def test_the_fence_grows_with_each_owner_and_stays_within_a_transaction() -> None:
    fences = []
    for _ in range(3):
        with transaction.atomic():
            fences.append(lock_in_transaction("invoice:5"))
            with transaction.atomic():
                assert lock_in_transaction("invoice:5") == fences[-1]
        with Lock("invoice:5") as hold:
            fences.append(hold.fence or 0)

    assert fences == sorted(set(fences))


def test_after_a_wait_for_a_lock_nothing_is_left_behind(elsewhere: Callable[..., Any]) -> None:
    with transaction.atomic():
        lock_in_transaction("never:locked:before")

    assert Lock("never:locked:before").holders() == []
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        lock_in_transaction("nor:this")
        raise ZeroDivisionError

    assert elsewhere(outcome, in_own_transaction, "nor:this", 5) == "done"


LOGGING = {
    "mysql": {"general-log": "on", "log-output": "TABLE"},
    "postgresql": {"log_statement": "all", "log_line_prefix": "<%p>"},
}


def statements_of(server: Server, session: int) -> str:
    """Return what a session sent, from the log of the server."""
    if connection.vendor == "postgresql":
        _, *said = re.split(r"<(\d+)>", (server.home / "log").read_text())
        lines = zip(said[::2], said[1::2], strict=True)
        return "\n".join(line for pid, line in lines if int(pid) == session)
    with connections["own"].cursor() as cursor:
        cursor.execute("SELECT argument FROM mysql.general_log WHERE thread_id = %s", [session])
        return "\n".join(str(argument) for (argument,) in cursor.fetchall())


@pytest.mark.slow
@pytest.mark.parametrize("own_server", [LOGGING.get(connection.vendor)], indirect=True)
def test_the_row_is_locked_by_select_for_update(
    own_server: Server, elsewhere: Callable[..., Any], settings: Any
) -> None:
    path = "distlock_app.backends.database.DatabaseBackend"
    settings.DISTLOCK = {"default": {"BACKEND": path, "LOCATION": "own"}}
    own_id = {"mysql": "CONNECTION_ID()", "postgresql": "pg_backend_pid()"}[connection.vendor]
    sessions = []
    for name in "new", "new", "leased":
        if name == "leased":
            lost = elsewhere(Lock(name, ttl=0.2, renew=False).acquire)
        with transaction.atomic("own"), connections["own"].cursor() as cursor:
            cursor.execute(f"SELECT {own_id}")
            sessions.append(cursor.fetchone()[0])
            lock_in_transaction(name, wait=5)
        connections["own"].close()

    with pytest.raises(LockLost):
        elsewhere(lost.release)
    assert len(set(sessions)) == 3
    for session in sessions:
        said = statements_of(own_server, session)
        assert re.search(r"SELECT[^;]+distlock_app_distlock[^;]+ FOR UPDATE", said), said


def test_a_row_that_exists_costs_one_request_of_the_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if ON_SQLITE:
        pytest.skip("SQLite has no requests")
    in_own_transaction("invoice:6", 5)
    monkeypatch.setattr(Sessions, "ask", None)  # all requests of our own connections

    with transaction.atomic():
        lock_in_transaction("invoice:6")


@pytest.mark.skipif(connection.vendor != "mysql", reason="a race of MariaDB's SKIP LOCKED")
def test_a_leased_row_that_mariadb_left_locked_ends_the_transaction_as_a_deadlock_does(
    elsewhere: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not getattr(connection, "mysql_is_mariadb", False):
        pytest.skip("MySQL leaves none")
    # Found by a constant, a row stays locked as it does in the race.
    keeps = MySQL.LOCK_ROW.replace(", '')", ")")
    monkeypatch.setattr(MySQL, "LOCK_ROW", keeps)
    registry.reset()
    hold = elsewhere(Lock("invoice:6").acquire)

    with transaction.atomic():
        Counter.objects.create(name="a")
        with pytest.raises(OperationalError) as refused, transaction.atomic():
            lock_in_transaction("invoice:6", wait=0)
        elsewhere(hold.extend)  # its row is free already
        with pytest.raises(TransactionManagementError):
            Counter.objects.count()

    assert was_sacrificed(refused.value)  # so that retry_on_deadlock() repeats it
    assert not Counter.objects.exists()
    elsewhere(hold.release)
    registry.reset()


@pytest.mark.skipif(connection.vendor != "mysql", reason="it was there before MariaDB 10.6")
def test_a_server_without_skip_locked_takes_a_lease_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.features, "has_select_for_update_skip_locked", False)
    monkeypatch.setattr(MySQL, "LOCK_ROW", "SELECT 1 FOR UPDATE SKIP WHATEVER")
    registry.reset()

    assert in_own_transaction("invoice:6") < in_own_transaction("invoice:6")
    registry.reset()


@pytest.mark.skipif(connection.vendor != "mysql", reason="see above")
def test_a_row_that_another_transaction_has_locked_is_busy_and_no_deadlock(
    elsewhere: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MySQL, "may_have_kept", lambda *_: True)

    with transaction.atomic():
        lock_in_transaction("invoice:6")

        assert elsewhere(outcome, in_own_transaction, "invoice:6") == "LockBusy"


@pytest.mark.skipif(connection.vendor != "mysql", reason="others take several statements")
def test_a_connection_that_takes_one_statement_at_a_time_takes_names() -> None:
    connection.close()
    with patch.dict(connection.settings_dict["OPTIONS"], multi_statements=False):
        assert in_own_transaction("invoice:6") < in_own_transaction("invoice:6")
        connection.close()
    registry.reset()


# What becomes of the transaction


@pytest.mark.skipif(ON_SQLITE, reason="SQLite needs no pooler")
def test_behind_a_pooler_a_rollback_undoes_what_was_written_under_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(connection.settings_dict, "DISABLE_SERVER_SIDE_CURSORS", True)
    registry.reset()
    for lock in lock_in_transaction, pinned:
        with transaction.atomic():
            Counter.objects.create(name="a")
            lock("invoice:6")
            Counter.objects.create(name="b")
            transaction.set_rollback(True)

        assert not Counter.objects.exists()
    registry.reset()


def pinned(name: str) -> None:
    hold = Lock(name).acquire()
    hold.pin()
    hold.release()


@pytest.mark.skipif(connection.vendor != "postgresql", reason="Pgpool is for PostgreSQL")
def test_pgpool_sends_all_about_the_savepoint_to_the_primary(
    elsewhere: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Counter.objects.create(name="a", value=1)
    requests: list[str] = []
    new_cursor = PostgreSQL.cursor
    monkeypatch.setattr(PostgreSQL, "cursor", lambda *args: Noting(new_cursor(*args), requests))
    with Lock("invoice:7"):
        for wait in (0, 0.2):
            elsewhere(refused_then_saving, wait)

    assert len(requests) == 4
    assert all(";" in request for request in requests)  # so they are several statements


class Noting:
    """A cursor that notes what it executes."""

    def __init__(self, cursor: Any, requests: list[str]) -> None:
        self._cursor, self._requests = cursor, requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)

    def execute(self, request: str) -> None:
        self._requests.append(request)
        self._cursor.execute(request)


@pytest.mark.parametrize("by", ["lock", "transaction"])
def test_the_transaction_goes_on_after_a_refusal(elsewhere: Callable[..., Any], by: str) -> None:
    if ON_SQLITE and by == "transaction":
        pytest.skip("its file is locked")
    Counter.objects.create(name="a", value=1)
    with Lock("invoice:7") if by == "lock" else transaction.atomic():
        if by == "transaction":
            lock_in_transaction("invoice:7")
        for wait in (0, 0.2):
            elsewhere(refused_then_saving, wait)

    assert Counter.objects.get(name="a").value == 3


def test_a_transaction_that_waits_leaves_the_row_to_its_holder() -> None:
    backend: Any = registry["default"].backend
    held = backend.acquire(a_claim("invoice:7"), 0)

    with transaction.atomic():
        assert not isinstance(backend.lock_row(held.claim.key, "invoice:7", 0), int)

        assert backend.extend(held, 30) is True
        assert backend.release(held) is True


@pytest.mark.skipif(not ON_SQLITE, reason="a server locks the row as it looks at it")
def test_a_lock_that_is_taken_just_before_the_file_is_locked_is_respected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend: Any = registry["default"].backend
    held = backend.acquire(a_claim("invoice:7"), 0)
    monkeypatch.setattr(backend, "holders", lambda key: iter(()))

    with transaction.atomic():
        assert isinstance(backend.lock_row(held.claim.key, "invoice:7", 0), Busy)

    assert backend.release(held) is True


@pytest.mark.skipif(connection.vendor == "mysql", reason="it may take one statement at a time")
def test_an_error_of_the_database_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = registry["default"].backend
    statements = "nonsense" if ON_SQLITE else "SAVEPOINT distlock; nonsense"
    monkeypatch.setattr(backend._sessions.dialect, "LOCK_ROW", statements)

    with pytest.raises(DatabaseError, match="nonsense"):
        in_own_transaction("invoice:7", 0)


def refused_then_saving(wait: float) -> None:
    with transaction.atomic():
        with pytest.raises(LockBusy) as caught:
            lock_in_transaction("invoice:7", wait=wait)
        assert isinstance(caught.value, LockTimeout) == (wait > 0)
        counter = Counter.objects.get(name="a")
        counter.value += 1
        counter.save()


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite and MySQL end no such wait")
def test_a_wait_without_an_end_is_ended_by_the_server_only_with_its_own_error(
    elsewhere: Callable[..., Any],
) -> None:
    def cancel() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_cancel_backend(pid) FROM pg_locks WHERE NOT granted")

    with transaction.atomic(), ThreadPoolExecutor(1) as pool:
        lock_in_transaction("invoice:6")
        waiting = pool.submit(outcome, in_own_transaction, "invoice:6", None)
        until(lambda: elsewhere(cancel) or waiting.done())

        assert waiting.result(DEADLINE) == "OperationalError"
        pool.submit(connections.close_all).result(DEADLINE)


def test_refusals_come_in_time(elsewhere: Callable[..., Any]) -> None:
    with transaction.atomic():
        lock_in_transaction("invoice:8")
        asked_at = monotonic()
        assert elsewhere(outcome, in_own_transaction, "invoice:8", 0.3) == "LockTimeout"
        assert 0.3 <= monotonic() - asked_at < 0.3 + 1 + 5  # a second, and a busy machine


def test_what_an_inner_block_locked_is_locked_until_the_outermost_ends() -> None:
    with transaction.atomic():
        with transaction.atomic():
            fence = lock_in_transaction("invoice:9")

        assert_locked("invoice:9")
        assert lock_in_transaction("invoice:9") == fence


def test_after_a_rollback_to_a_savepoint_it_is_asked_for_again() -> None:
    in_own_transaction("invoice:9", 5)
    with transaction.atomic():
        Counter.objects.create(name="b", value=1)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            before = lock_in_transaction("invoice:9")
            raise ZeroDivisionError
        with pytest.raises(NotHeld):
            assert_locked("invoice:9")

        if connection.vendor == "postgresql":
            assert lock_in_transaction("invoice:9") > before


def test_settings_of_the_session_are_as_before() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("no other database is told a time")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL statement_timeout = 54321; SET LOCAL lock_timeout = 54322")
        lock_in_transaction("invoice:10")
        for limit, kept in (("statement_timeout", "54321ms"), ("lock_timeout", "54322ms")):
            cursor.execute(f"SHOW {limit}")
            assert cursor.fetchone() == (kept,)


@pytest.mark.skipif(connection.vendor != "postgresql", reason="a setting of PostgreSQL")
def test_a_limit_of_the_role_does_not_end_a_wait(elsewhere: Callable[..., Any]) -> None:
    def wait_with_a_limit() -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = 50")
            lock_in_transaction("invoice:12", wait=0.5)

    with transaction.atomic():
        lock_in_transaction("invoice:12")
        asked_at = monotonic()
        assert elsewhere(outcome, wait_with_a_limit) == "LockTimeout"
        assert monotonic() - asked_at >= 0.5


def test_a_lease_that_ended_too_soon_ends_the_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DatabaseBackend, "lock_row", lambda *args: None)
    monkeypatch.setattr(DatabaseBackend, "release_at_commit", lambda *args: False)
    with transaction.atomic():
        with pytest.raises(LockLost, match="restart the transaction"):
            lock_in_transaction("invoice:11")
        with pytest.raises(DatabaseError):
            Counter.objects.count()
        assert transaction.get_rollback()


# Where it is refused


def test_outside_of_its_database_s_transaction_it_says_so() -> None:
    with pytest.raises(TransactionManagementError, match="open atomic\\(\\) on 'default' first"):
        lock_in_transaction("a")
    with transaction.atomic("default"):
        with pytest.raises(TransactionManagementError, match="transaction is on 'default'"):
            lock_in_transaction("a", using="locks")


def test_only_a_lock_table_can(settings: Any) -> None:
    engine = "distlock_app.backends.etcd.EtcdBackend"  # it is not asked
    another = {"BACKEND": engine, "LOCATION": "http://127.0.0.1"}
    settings.DISTLOCK = {**settings.DISTLOCK, "another": another}
    with transaction.atomic(), pytest.raises(LockError, match="only a lock table"):
        lock_in_transaction("a", using="another")


def test_names_and_waits_are_checked_as_those_of_a_lock() -> None:
    with transaction.atomic():
        with pytest.raises(ValueError, match="must not be empty"):
            lock_in_transaction("")
        with pytest.raises(TypeError):
            lock_in_transaction(42)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="wait"):
            lock_in_transaction("a", wait=-1)


def test_an_event_loop_is_not_blocked() -> None:
    async def call() -> None:
        lock_in_transaction("a")

    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(call())


def test_nobody_waits_for_itself() -> None:
    with Lock("invoice:12"), transaction.atomic():
        with pytest.raises(LockBusy, match=r"hold.pin\(\)"):
            lock_in_transaction("invoice:12")
    with transaction.atomic():
        lock_in_transaction("invoice:13")
        with pytest.raises(BackendError, match="would wait for itself"):
            Lock("invoice:13", wait=DEADLINE).acquire()


def test_a_lock_that_a_rollback_has_ended_keeps_nobody_out_of_the_next_transaction() -> None:
    for _ in range(3):
        with transaction.atomic():
            Lock("invoice:14").acquire().release()
            transaction.set_rollback(True)

        assert in_own_transaction("invoice:14")


@pytest.fixture
def repeatable_read() -> Iterator[None]:
    """The transactions of `default` read a snapshot."""
    if ON_SQLITE:
        pytest.skip("no isolation levels")
    level = "repeatable read"
    if connection.vendor == "postgresql":
        from psycopg import IsolationLevel

        level = IsolationLevel.REPEATABLE_READ  # type: ignore[assignment]
    options = connection.settings_dict["OPTIONS"]
    connection.close()
    options["isolation_level"] = level
    yield
    options.pop("isolation_level")
    connection.close()


def test_a_snapshot_that_may_be_older_is_warned_of(repeatable_read: None) -> None:
    with transaction.atomic(), pytest.warns(RuntimeWarning, match="may be older"):
        assert lock_in_transaction("invoice:14", wait=5)
        assert Counter.objects.count() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert count_counters() == 0  # its transaction has begun under the lock


@pytest.mark.skipif(connection.vendor != "postgresql", reason="the others go on")
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.filterwarnings("ignore:.*may be older")
def test_a_row_that_is_newer_than_the_snapshot_is_an_error_of_the_database(
    repeatable_read: None, known: bool
) -> None:
    name = f"invoice:{18 + known}"
    if known:
        with transaction.atomic():
            lock_in_transaction(name)
    with pytest.raises(OperationalError, match="could not serialize"), transaction.atomic():
        assert Counter.objects.count() == 0
        lock_in_transaction(name)
    with transaction.atomic():
        assert lock_in_transaction(name)


def test_in_memory_it_is_a_lock_until_the_commit(elsewhere: Callable[..., Any]) -> None:
    lock = Lock("a", using="locmem")
    with transaction.atomic():
        fence = lock_in_transaction("a", using="locmem")
        assert lock_in_transaction("a", using="locmem") == fence
        assert_locked("a", using="locmem")
        assert elsewhere(lock.try_acquire) is None
    assert not lock.locked()


@transaction.atomic
def taken_again(using: str = "default") -> int:
    return lock_in_transaction("again", wait=0, using=using)


@pytest.mark.parametrize("using", ["default", "locmem"])
def test_each_call_of_an_atomic_function_takes_it(using: str) -> None:
    taken_again(using)

    with held_elsewhere("again", using=using), pytest.raises(LockBusy):
        taken_again(using)


class InATestCase(TestCase):
    """Whose transaction lasts for the whole test."""

    def test_it_needs_a_block_of_its_own_and_ends_at_once(self) -> None:
        with pytest.raises(TransactionManagementError):
            lock_in_transaction("in:a:test")
        with transaction.atomic():
            fence = lock_in_transaction("in:a:test")
            assert_locked("in:a:test")
            assert lock_in_transaction("in:a:test") == fence
        take("in:a:test")
        with transaction.atomic():
            assert lock_in_transaction("in:a:test") > fence

    def test_each_call_of_an_atomic_function_takes_it(self) -> None:
        taken_again()

        with held_elsewhere("again"), pytest.raises(LockBusy):
            taken_again()


# Functions and views


@locked("counted", in_transaction=True, wait=5)
def count_counters() -> int:
    assert_locked("counted")
    assert connection.in_atomic_block
    return Counter.objects.count()


def test_a_function_runs_in_a_transaction_under_it(elsewhere: Callable[..., Any]) -> None:
    @locked("count:{name}", in_transaction=True, wait=0, on_busy="skip")
    def count(name: str, *, fail: bool = False) -> str:
        Counter.objects.create(name=name, value=1)
        if fail:
            raise ZeroDivisionError
        assert elsewhere(count, name) is None
        return "done"

    assert count("a") == "done"
    with pytest.raises(ZeroDivisionError):
        count("b", fail=True)
    assert list(Counter.objects.values_list("name", flat=True)) == ["a"]


def test_the_decorators_refuse_what_has_no_meaning() -> None:
    with pytest.raises(TypeError, match="not ttl="):
        locked("a", in_transaction=True, ttl=3)

    with pytest.raises(TypeError, match="only a plain function"):

        @locked("a", in_transaction=True)
        async def function() -> None: ...

    with pytest.raises(TypeError, match="an async view"):

        @locked_view("a", in_transaction=True)
        async def view(request: Any) -> None: ...


@pytest.mark.parametrize("all_requests", [False, True])
def test_a_view_runs_in_its_transaction_under_it(
    elsewhere: Callable[..., Any], request: pytest.FixtureRequest, all_requests: bool
) -> None:
    if all_requests:
        request.getfixturevalue("atomic_requests")

    @locked_view("pay:{pk}", in_transaction=True)
    def pay(request: Any, pk: int) -> HttpResponse:
        assert connection.in_atomic_block
        assert_locked(f"pay:{pk}")
        with pytest.raises(NotHeld):  # but by the transaction
            current_hold(f"pay:{pk}")
        if "again" in request.POST:
            return HttpResponse(elsewhere(pay, RequestFactory().post("/"), pk).status_code)
        Counter.objects.create(name="paid", value=pk)
        return HttpResponse("paid")

    assert pay(RequestFactory().post("/"), 1).content == b"paid"
    assert pay(RequestFactory().post("/", {"again": 1}), 1).content == b"423"
    assert Counter.objects.get().value == 1


# Processes


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_no_increment_is_lost_beside_locks(isolation: str, processes: Processes) -> None:
    if ON_SQLITE and isolation != "read committed":
        pytest.skip("no isolation levels")
    Counter.objects.create(name="mixed", value=0)
    count, threads, times = 8, 4, 4

    errors = processes.run(
        "tests.in_transaction_workers:count",
        count=count,
        name="mixed",
        times=times,
        threads=threads,
        env={"DISTLOCK_TEST_ISOLATION": isolation, "PYTHONWARNINGS": "ignore::RuntimeWarning"},
    )

    assert errors == [[]] * count
    assert Counter.objects.get(name="mixed").value == count * threads * times


def test_a_killed_process_frees_it_at_once(processes: Processes) -> None:
    in_own_transaction("killed", 5)
    for _ in range(3):
        holder = processes.start("tests.in_transaction_workers:hold", name="killed")
        before = holder.read()
        holder.kill()
        asked_at = monotonic()

        assert in_own_transaction("killed", DEADLINE) > before
        assert monotonic() - asked_at < in_transaction.LEASE + 4  # no ttl of 30 s, nor a wait


def test_of_two_names_taken_crosswise_one_is_refused(processes: Processes) -> None:
    if ON_SQLITE:
        pytest.skip("the second process would not get its first name")
    for name in "ab":
        in_own_transaction(name, 5)
    pair = [
        processes.start("tests.in_transaction_workers:cross", first=one, second=two)
        for one, two in (("a", "b"), ("b", "a"))
    ]
    for worker in pair:
        assert worker.read() == "has one"
    for worker in pair:
        worker.tell("go on")

    results = [worker.result() for worker in pair]

    assert set(results) <= {"both", "LockTimeout", "OperationalError"}
    assert results != ["both", "both"]


def test_nothing_but_a_key_finds_a_row() -> None:
    backend: Any = registry["default"].backend

    with transaction.atomic(), pytest.raises(ValueError, match="not the key of a lock"):
        backend.lock_row("' OR owner <> '", "a", 0)


@pytest.mark.parametrize("make", [lock_in_transaction, lambda name: Latch(name, 2).count_down()])
def test_a_row_that_it_or_a_latch_made_has_its_name(make: Callable[[str], Any]) -> None:
    with transaction.atomic():
        make("new")

    assert DistLock.objects.get().name == "new"
