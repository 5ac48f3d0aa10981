"""A change is done again on a fresh row until it is saved, and never over somebody else's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial, wraps
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import OperationalError, connection, connections, transaction
from django.db.models import Count, F, Q
from django.db.models.signals import post_save
from django.db.transaction import TransactionManagementError
from django.http import HttpRequest
from django.test import RequestFactory, TestCase

from distlock_app.errors import RetriesExhausted, StaleObjectError
from distlock_app.etags import PreconditionFailed, require_match
from distlock_app.guards.optimistic import repeating
from distlock_app.optimistic import retry_on_conflict
from distlock_app.pessimistic import retry_on_deadlock
from distlock_app.primitives.drivers import code_of
from distlock_app.signals import version_conflict
from tests.app.versioned_models import Account, GuardedNamed, SavingsAccount
from tests.processes import Processes
from tests.test_optimistic import Undone, elsewhere, other_saves, repeatable_read, version_of

pytestmark = pytest.mark.django_db(transaction=True)

QUICK: dict[str, Any] = {"pause": 0.0001, "max_pause": 0.001}


@pytest.fixture(autouse=True)
def no_row_is_hot() -> Iterator[None]:
    yield
    repeating._hot.clear()


@pytest.fixture
def account() -> Account:
    return Account.objects.create(owner="Ann", balance=100)


class Interrupted:
    """Add 10 to the balance; let somebody else save in between, the first `times`."""

    def __init__(self, times: int, amount: int = 1) -> None:
        self.times = times
        self.amount = amount
        self.applied: list[Any] = []

    def __call__(self, account: Any) -> None:
        self.applied.append(account)
        if len(self.applied) <= self.times:
            row = type(account).objects.get(pk=account.pk)
            other_saves(row, balance=row.balance + self.amount)
        account.balance += 10


@pytest.fixture
def conflicts() -> Any:
    seen: list[tuple[Any, ...]] = []

    def receiver(sender: Any, **facts: Any) -> None:
        seen.append(tuple(facts[name] for name in ("attempt", "expected", "found")))

    version_conflict.connect(receiver)
    yield seen
    version_conflict.disconnect(receiver)


# One process


def test_without_a_conflict_it_costs_one_read_and_one_write(
    account: Account, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(2):
        saved = Account.objects.retrying(account.pk, Interrupted(0))
    with django_assert_num_queries(2):
        assert account.save_retrying(Interrupted(0)) is account

    assert (saved.balance, saved.version) == (110, 2)
    assert (account.balance, account.version) == (120, 3)


def test_the_change_is_applied_again_to_a_fresh_row(account: Account, conflicts: list[Any]) -> None:
    change = Interrupted(2)

    saved = Account.objects.retrying(account.pk, change, lock_from=None, **QUICK)

    assert saved.balance == Account.objects.get().balance == 100 + 2 * 1 + 10
    assert saved.version == version_of(account) == 4
    assert len({id(obj) for obj in change.applied}) == 3
    assert conflicts == [(1, 1, 2), (2, 2, 3)]


@pytest.mark.parametrize("times", [0, 1])
def test_a_change_may_delete_the_row(account: Account, times: int) -> None:
    class Delete(Interrupted):
        def __call__(self, account: Any) -> None:
            super().__call__(account)
            account.delete()

    other = Account.objects.create(owner="Bob")

    gone = Account.objects.retrying(account.pk, Delete(times), **QUICK)
    other.save_retrying(Delete(times), **QUICK)

    assert gone.pk is None and other.pk is None
    assert not Account.objects.exists()


def test_save_retrying_drops_unsaved_values_with_and_without_a_conflict(account: Account) -> None:
    for times in (0, 1):
        account.owner, account.balance = "unsaved", 0

        account.save_retrying(Interrupted(times), **QUICK)

        row = Account.objects.get()
        assert (account.owner, account.version) == ("Ann", row.version)
        assert account.balance == row.balance
    assert row.balance == 100 + 10 + 1 + 10


def test_it_gives_up_after_so_many_attempts(account: Account, conflicts: list[Any]) -> None:
    change = Interrupted(99)

    with pytest.raises(RetriesExhausted) as end:
        Account.objects.retrying(account.pk, change, attempts=3, lock_from=None, **QUICK)

    assert len(change.applied) == len(conflicts) == 3
    assert (end.value.expected, end.value.found) == (3, 4)
    assert isinstance(end.value.__cause__, StaleObjectError)
    assert Account.objects.get().balance == 103
    with pytest.raises(ValueError):
        Account.objects.retrying(account.pk, change, attempts=0)


def test_a_version_that_the_client_named_is_not_tried_again(account: Account) -> None:
    request, changed = RequestFactory().put("/", headers={"If-Match": '"7"'}), []

    def change(fresh: Account) -> None:
        changed.append(fresh.version)
        require_match(request, fresh)

    with pytest.raises(PreconditionFailed):
        Account.objects.retrying(account.pk, change)

    assert changed == [1]


def test_pauses_grow_with_the_attempts(account: Account, monkeypatch: Any) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    monkeypatch.setattr(time, "sleep", pauses.append)

    with pytest.raises(RetriesExhausted):
        Account.objects.retrying(
            account.pk, Interrupted(9), attempts=5, lock_from=None, pause=100, max_pause=300
        )

    assert pauses == [100, 200, 300, 300]


def test_tasks_pause_as_threads_do(account: Account, monkeypatch: Any) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("random.uniform", lambda low, high: high)
    monkeypatch.setattr("distlock_app.guards.optimistic.repeating.asyncio.sleep", pause)

    async def run() -> None:
        await Account.objects.aretrying(account.pk, Interrupted(2), lock_from=None, pause=100)
        await sync_to_async(connections.close_all)()

    asyncio.run(run())

    assert pauses == [1, 1]  # max_pause


@pytest.mark.parametrize("level", ["", "repeatable read"])
@pytest.mark.parametrize(
    "rows",
    [
        Account.objects.annotate(above=F("parent__owner")),
        Account.objects.annotate(below=Count("children")),
        Account.objects.filter(Q(parent=None) | Q(parent__owner="Bob")),
        Account.objects.select_related("parent").distinct(),
        SavingsAccount.objects.annotate(above=F("parent__owner")),
    ],
    ids=["join", "count", "condition", "distinct", "child"],
)
def test_a_queryset_that_joins_or_counts_locks_the_row(rows: Any, level: str) -> None:
    """PostgreSQL locks no groups, and no row that an outer join may not have."""
    account = rows.model.objects.create(owner="Ann", balance=100)
    applied = []

    def change(obj: Any) -> None:
        applied.append(obj)
        if len(applied) == 1:
            elsewhere(lambda: other_saves(account, balance=1000))
        obj.balance += 10

    # PostgreSQL and SQLite end a transaction that would write on an old snapshot.
    with suppress(OperationalError), repeatable_read() if level else nullcontext():
        saved = rows.retrying(account.pk, change)
        assert (saved.balance, saved.version) == (1010, 3)
        assert applied[1].__dict__.keys() == applied[0].__dict__.keys()  # what was annotated

    assert len(applied) == 2 or level


def test_a_slow_attempt_is_followed_by_a_longer_pause(account: Account, monkeypatch: Any) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    nap = time.sleep
    monkeypatch.setattr(time, "sleep", pauses.append)

    def change(obj: Account) -> None:
        nap(0.05)
        Interrupted(9)(obj)

    with pytest.raises(RetriesExhausted):
        Account.objects.retrying(
            account.pk, change, attempts=2, lock_from=None, pause=0.001, max_pause=60
        )

    assert pauses[0] >= 0.4


def test_the_row_is_locked_from_the_nth_attempt_on(account: Account) -> None:
    in_transaction: list[bool] = []

    def change(obj: Account) -> None:
        in_transaction.append(connection.in_atomic_block)
        if len(in_transaction) < 3:
            other_saves(obj)

    Account.objects.retrying(account.pk, change, lock_from=3, **QUICK)

    assert in_transaction == [False, False, True]


class Locked:
    """Say of each attempt whether it locks; let somebody else save in between, `times` times."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, obj: Account) -> None:
        self.seen.append(connection.in_atomic_block)
        if len(self.seen) <= self.times:
            other_saves(obj)

    def of(self, account: Account, times: int, **options: Any) -> list[bool]:
        self.seen: list[bool] = []
        self.times = times
        account.save_retrying(self, **options, **QUICK)
        return self.seen


def test_the_attempt_after_a_conflict_is_locked_and_the_next_change_at_once(
    account: Account, monkeypatch: Any
) -> None:
    other = Account.objects.create()
    locked = Locked()

    assert locked.of(account, 0) == [False]
    assert locked.of(account, 1) == [False, True]
    assert locked.of(account, 0) == [True]
    assert locked.of(account, 1, lock_from=None) == [False, False]
    assert locked.of(other, 0) == [False]

    over = time.monotonic() + repeating.HOT_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: over)
    assert locked.of(account, 0) == [False]


def test_a_locked_change_that_goes_well_keeps_no_row_hot(account: Account) -> None:
    for lock_from in 0, 1:
        assert Locked().of(account, 0, lock_from=lock_from) == [True]

    assert not repeating._hot


def test_a_process_remembers_few_rows(account: Account, monkeypatch: Any) -> None:
    monkeypatch.setattr(repeating, "HOT_ROWS", 2)

    for _ in range(5):
        Locked().of(Account.objects.create(), 1)

    assert len(repeating._hot) <= 2


def test_it_ends_with_the_last_attempt_also_if_that_is_locked(account: Account) -> None:
    """Here "somebody else" is this very transaction, which no lock keeps out."""
    for options in ({}, {"lock_from": None}, {"lock_from": -1}):
        locked = Locked()
        with pytest.raises(RetriesExhausted):
            locked.of(account, 9, attempts=3, **options)
        assert len(locked.seen) == 3
        repeating._hot.clear()

    assert locked.seen == [False, False, True]


@pytest.mark.parametrize("model", [Account, SavingsAccount])
def test_nobody_else_saves_a_locked_row(model: Any, processes: Processes) -> None:
    account = model.objects.create()
    worker = processes.start("tests.optimistic_workers:save_once_told", pk=account.pk)
    assert worker.read() == "ready to save"

    def change(obj: Any) -> None:
        worker.tell("save")
        time.sleep(0.5)
        assert connection.in_atomic_block and version_of(account) == 1

    locked = model.objects.retrying(account.pk, change, lock_from=1)

    assert locked.version == 2
    assert worker.result() == 3


def saved_and_then(failure: Callable[[Account], None]) -> Callable[..., None]:
    """Return a receiver of post_save that fails the first time."""
    calls: list[Any] = []

    def receiver(instance: Account, **kwargs: Any) -> None:
        calls.append(instance)
        if len(calls) == 1:
            failure(instance)

    return receiver


def locked(account: Account) -> None:
    raise OperationalError(1213, "database is locked")


def stale_again(account: Account) -> None:
    other_saves(account)
    account.save()


def locked_after_the_commit(account: Account) -> None:
    transaction.on_commit(lambda: locked(account))


@pytest.mark.parametrize("lock_from", [None, 1])
@pytest.mark.parametrize("failure", [locked, stale_again, locked_after_the_commit])
def test_a_change_that_was_saved_is_not_made_again(
    account: Account, lock_from: int | None, failure: Callable[[Account], None]
) -> None:
    if lock_from == 1 and failure is not locked_after_the_commit:
        pytest.skip("rolled back, so it may be repeated")
    receiver = saved_and_then(failure)
    post_save.connect(receiver, sender=Account)
    try:
        with pytest.raises((OperationalError, StaleObjectError)):
            Account.objects.retrying(account.pk, Interrupted(0), lock_from=lock_from, **QUICK)
    finally:
        post_save.disconnect(receiver, sender=Account)

    account.refresh_from_db()
    assert account.balance == 110


@pytest.mark.parametrize("again", [retry_on_conflict, retry_on_deadlock])
def test_a_function_whose_transaction_was_committed_is_not_called_again(
    account: Account, again: Any
) -> None:
    @again(pause=0.0001)
    @transaction.atomic
    def pay() -> None:
        Account.objects.filter(pk=account.pk).update(balance=F("balance") + 10)
        transaction.on_commit(lambda: locked(account))

    with pytest.raises(OperationalError):
        pay()

    account.refresh_from_db()
    assert account.balance == 110


def test_an_error_of_the_change_passes_through_and_saves_nothing(account: Account) -> None:
    def change(obj: Account) -> None:
        obj.balance = 0
        raise Undone

    for lock_from in (1, None):
        with pytest.raises(Undone):
            Account.objects.retrying(account.pk, change, lock_from=lock_from)

    assert Account.objects.get().balance == 100
    with pytest.raises(Account.DoesNotExist):
        Account.objects.retrying(0, change)


def test_a_conflict_of_another_object_in_the_change_is_not_retried(account: Account) -> None:
    stale = Account.objects.create(owner="Bob")
    other_saves(stale)
    calls = []

    def change(obj: Account) -> None:
        calls.append(obj)
        stale.save()

    with pytest.raises(StaleObjectError) as refusal:
        Account.objects.retrying(account.pk, change)

    assert refusal.value.obj is stale and len(calls) == 1


def test_a_row_that_is_deleted_meanwhile_is_not_made_again(account: Account) -> None:
    def change(obj: Account) -> None:
        Account.objects.filter(pk=obj.pk).delete()

    with pytest.raises(Account.DoesNotExist):
        Account.objects.retrying(account.pk, change, **QUICK)

    assert not Account.objects.exists()


def test_a_filtered_manager_and_a_version_in_the_childs_table_work(account: Account) -> None:
    with pytest.raises(Account.DoesNotExist):
        Account.objects.filter(owner="Bob").retrying(account.pk, Interrupted(0))
    guarded = GuardedNamed.objects.create()

    for lock_from in (1, None):
        guarded.save_retrying(lambda obj: setattr(obj, "points", 1), lock_from=lock_from)

    assert guarded.version == 3


# Transactions


@pytest.fixture
def isolation(request: Any) -> Iterator[str]:
    """Let the transactions of this test have the level of its parameter."""
    level = request.param
    if level and connection.vendor == "sqlite":
        pytest.skip("SQLite has one level")
    options = connection.settings_dict["OPTIONS"]
    before = dict(options)
    if level and connection.vendor == "postgresql":
        from psycopg import IsolationLevel

        options["isolation_level"] = IsolationLevel[level.upper().replace(" ", "_")]
    elif level:
        options["isolation_level"] = level
    connection.close()
    yield level
    options.clear()
    options.update(before)
    connection.close()


LEVELS = ["", "read uncommitted", "read committed", "repeatable read", "serializable"]


@pytest.mark.parametrize("isolation", LEVELS, indirect=True)
def test_inside_a_transaction_the_first_retry_reads_the_row_as_it_is(
    account: Account, processes: Processes, isolation: str
) -> None:
    """Under REPEATABLE READ a plain read would show version 1 for ever."""
    if (connection.vendor, isolation) == ("mysql", "serializable"):
        pytest.skip("there a read locks the row: nobody can save in between")
    worker = processes.start("tests.optimistic_workers:save_once_told", pk=account.pk)
    assert worker.read() == "ready to save"
    applied = []

    def change(obj: Account) -> None:
        applied.append(obj.version)
        obj.balance += 10

    try:
        with transaction.atomic():
            Account.objects.get()  # the snapshot
            worker.tell("save")
            assert worker.result() == 2
            saved = account.save_retrying(change, lock_from=None)
    except OperationalError:
        # The databases that end a transaction whose snapshot is old; only the outermost block
        # may begin again.
        assert connection.vendor in ("postgresql", "sqlite") or _snapshot_isolation()
        assert len(applied) == 1
        saved = account.save_retrying(change)

    assert saved.version == version_of(account) == 3
    assert saved.balance == 110


@pytest.mark.parametrize("isolation", LEVELS, indirect=True)
def test_in_a_transaction_of_any_level_nothing_is_in_the_way(
    account: Account, isolation: str
) -> None:
    with transaction.atomic():
        Account.objects.get()
        for _ in range(2):
            Account.objects.retrying(account.pk, Interrupted(0))
        account.save_retrying(Interrupted(0), lock_from=1)

    account.refresh_from_db()
    assert (account.version, account.balance) == (4, 130)


def _snapshot_isolation() -> bool:
    """Whether MariaDB refuses to write on an old snapshot (error 1020), its default since 11.6."""
    with connection.cursor() as cursor:
        cursor.execute("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'")
        row = cursor.fetchone()
    return row is not None and row[1] == "ON"


def test_the_callers_transaction_undoes_the_saved_change(account: Account) -> None:
    with pytest.raises(Undone):
        with transaction.atomic():
            account.save_retrying(Interrupted(0))
            raise Undone

    assert Account.objects.get().balance == 100
    assert account.version == 1


def test_a_sacrificed_transaction_of_our_own_is_begun_again(
    account: Account, monkeypatch: Any
) -> None:
    failures = iter([1213, 1020])

    def change(obj: Account) -> None:
        obj.balance += 10
        for code in failures:
            raise OperationalError(code, "somebody else goes first")

    Account.objects.retrying(account.pk, change, **QUICK)
    assert Account.objects.get().balance == 110

    failures = iter([1213])
    with transaction.atomic(), pytest.raises(OperationalError):
        Account.objects.retrying(account.pk, change, **QUICK)
    failures = iter([2006])
    with pytest.raises(OperationalError):
        Account.objects.retrying(account.pk, change, **QUICK)


# Many processes


@pytest.mark.parametrize(
    "options", [{}, {"lock_from": 1}, {"lock_from": None, "attempts": 200}], ids=str
)
def test_16_processes_add_to_one_balance_and_nothing_is_lost(
    processes: Processes, options: dict[str, Any]
) -> None:
    account = Account.objects.create()

    applied = processes.run(
        "tests.optimistic_workers:add", count=16, pk=account.pk, times=6, **options
    )

    account.refresh_from_db()
    assert account.balance == 16 * 6
    assert account.version == 16 * 6 + 1
    assert sum(applied) >= 16 * 6


def test_nothing_is_lost_inside_transactions_that_have_read_before(processes: Processes) -> None:
    account = Account.objects.create()

    processes.run("tests.optimistic_workers:add_in_transactions", count=8, pk=account.pk, times=10)

    account.refresh_from_db()
    assert account.balance == 80


def test_a_function_that_gave_up_is_not_called_again() -> None:
    calls = []

    @retry_on_conflict(pause=0.001)
    def save() -> None:
        calls.append(1)
        raise RetriesExhausted("each attempt failed") from OperationalError("database is locked")

    with pytest.raises(RetriesExhausted):
        save()

    assert len(calls) == 1


# async


def test_the_async_twins_retry_too(account: Account) -> None:
    async def slow(obj: Account) -> None:
        await asyncio.sleep(0)
        await sync_to_async(change)(obj)

    async def run() -> None:
        nonlocal account
        saved = await Account.objects.aretrying(account.pk, change, **QUICK)
        assert (saved.balance, saved.version) == (111, 3)
        assert await account.asave_retrying(slow, **QUICK) is account
        await account.asave()
        with pytest.raises(RetriesExhausted):
            await account.asave_retrying(Interrupted(9), attempts=2, lock_from=None, **QUICK)
        await sync_to_async(connections.close_all)()

    change = Interrupted(1)
    asyncio.run(run())

    assert Account.objects.get().balance == 123


def test_the_pauses_of_a_decorated_function_grow_too(monkeypatch: Any) -> None:
    pauses: list[float] = []
    again = retry_on_conflict(attempts=4, pause=100, max_pause=300)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    def fail() -> None:
        raise StaleObjectError

    async def afail() -> None:
        fail()

    monkeypatch.setattr("random.uniform", lambda low, high: high)
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(asyncio, "sleep", pause)
    for call in again(fail), async_to_sync(again(afail)):
        with pytest.raises(RetriesExhausted):
            call()

    assert pauses == [100, 200, 300] * 2


def test_a_pausing_task_occupies_no_thread(account: Account) -> None:
    async def run() -> float:
        started = time.monotonic()
        task = asyncio.create_task(
            Account.objects.aretrying(
                account.pk, Interrupted(1), pause=60, max_pause=60, lock_from=None
            )
        )
        await asyncio.sleep(0.2)
        assert await Account.objects.acount() == 1
        elapsed = time.monotonic() - started
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await sync_to_async(connections.close_all)()
        return elapsed

    assert asyncio.run(run()) < 30


# The decorator


def test_a_decorated_function_is_called_again(account: Account) -> None:
    calls = []

    @retry_on_conflict(**QUICK)
    def pay(amount: int) -> int:
        row = Account.objects.get(pk=account.pk)
        calls.append(row)
        if len(calls) < 3:
            other_saves(row)
        row.balance -= amount
        row.save()
        return row.balance

    assert pay(amount=10) == 90
    assert len(calls) == 3
    assert pay.__name__ == "pay"


def test_a_decorated_function_gives_up(account: Account) -> None:
    calls = []

    @retry_on_conflict(attempts=2, **QUICK)
    def pay() -> None:
        row = Account.objects.get(pk=account.pk)
        calls.append(row)
        other_saves(row)
        row.save()

    with pytest.raises(RetriesExhausted):
        pay()
    assert len(calls) == 2

    with transaction.atomic(), pytest.raises(StaleObjectError):
        pay()
    assert len(calls) == 3


def test_what_no_retry_can_mend_is_raised_at_once(account: Account) -> None:
    calls = []

    @retry_on_conflict
    def put(request: HttpRequest) -> None:
        row = Account.objects.get(pk=account.pk)
        calls.append(row)
        require_match(request, row)

    with pytest.raises(PreconditionFailed):
        put(RequestFactory().put("/", headers={"If-Match": '"77"'}))
    assert len(calls) == 1


@pytest.mark.parametrize("attribute", ["sqlstate", "pgcode"])  # psycopg 3 and 2
def test_every_driver_of_postgresql_tells_of_a_deadlock(attribute: str) -> None:
    class DeadlockDetected(Exception):
        pass

    cause = DeadlockDetected("deadlock detected")
    setattr(cause, attribute, "40P01")
    calls = []

    @retry_on_conflict(**QUICK)
    def pay() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise OperationalError(str(cause)) from cause
        return "paid"

    assert pay() == "paid"


def test_a_number_of_mysql_counts_before_the_sqlstate_that_pymysql_adds() -> None:
    error = OperationalError(1205, "Lock wait timeout exceeded")
    error.sqlstate = "HY000"  # type: ignore[attr-defined]

    assert code_of(error) == 1205


@pytest.mark.parametrize("decorator", [retry_on_conflict, retry_on_deadlock])
def test_how_often_a_function_is_called_is_said_by_name(decorator: Any) -> None:
    with pytest.raises(TypeError, match="positional"):
        decorator(None, 3)


def test_a_change_that_is_not_made_is_refused(account: Account) -> None:
    async def change(row: Account) -> None:
        row.balance = 0

    with pytest.raises(TypeError, match="pass the async function itself"):
        Account.objects.retrying(account.pk, lambda row: change(row))

    def changes(row: Account) -> Iterator[None]:
        yield

    with pytest.raises(TypeError, match="no generator function"):
        Account.objects.retrying(account.pk, changes)
    for function in changes, partial(changes, account):
        with pytest.raises(TypeError, match="is a generator"):
            retry_on_conflict(function)


@pytest.mark.parametrize("decorator", [retry_on_conflict, retry_on_deadlock])
def test_an_option_without_its_name_is_refused_where_it_stands(decorator: Any) -> None:
    with pytest.raises(TypeError, match="3 is not a function: name the option, attempts=3"):
        decorator(3)


@pytest.mark.parametrize("decorator", [retry_on_conflict, retry_on_deadlock])
def test_a_coroutine_that_nobody_would_call_again_is_refused(decorator: Any) -> None:
    async def pay() -> None:
        raise AssertionError

    @decorator
    @wraps(pay)
    def wrapper() -> Any:
        return pay()

    with pytest.raises(TypeError, match=r"pay returned a coroutine, .*the async function itself"):
        wrapper()


def test_a_change_that_runs_out_of_an_iterator_ends_an_async_save(account: Account) -> None:
    def change(row: Account) -> None:
        next(iter(()))

    async def run() -> None:
        try:
            await asyncio.wait_for(Account.objects.aretrying(account.pk, change), 30)
        finally:
            await sync_to_async(connections.close_all)()

    with pytest.raises(RuntimeError, match="the change raised StopIteration"):
        asyncio.run(run())


class Paying:
    calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.calls == 1:
            raise StaleObjectError
        return "paid"


def flaky() -> Callable[[], str]:
    errors = [StaleObjectError()]

    def pay() -> str:
        if errors:
            raise errors.pop()
        return "paid"

    return pay


@pytest.mark.parametrize("make", [Paying, lambda: sync_to_async(flaky())])
def test_a_callable_that_is_awaited_is_called_again(make: Any) -> None:
    pay = retry_on_conflict(make(), **QUICK)

    async def run() -> Any:
        return await pay()

    assert asyncio.run(run()) == "paid"


def test_a_task_inside_a_transaction_is_not_retried() -> None:
    calls = []

    @retry_on_conflict(**QUICK)
    async def pay() -> None:
        calls.append("conflict")
        raise StaleObjectError

    @retry_on_deadlock
    async def move() -> None:
        calls.append("deadlock")

    for function, error in (pay, StaleObjectError), (move, TransactionManagementError):
        with transaction.atomic(), pytest.raises(error) as raised:
            async_to_sync(function)()
        assert raised.type is error

    assert calls == ["conflict"]


def test_a_decorated_coroutine_function_is_called_again(account: Account) -> None:
    calls = []

    @retry_on_conflict
    async def pay() -> int:
        row = await Account.objects.aget(pk=account.pk)
        calls.append(row)
        if len(calls) == 1:
            await sync_to_async(other_saves)(row)
        await row.asave()
        return row.version

    async def run() -> int:
        try:
            return int(await pay())
        finally:
            await sync_to_async(connections.close_all)()

    assert asyncio.run(run()) == 3
    assert len(calls) == 2


class InTestCase(TestCase):
    def test_the_transaction_of_a_test_case_does_not_keep_a_function_from_its_retries(
        self,
    ) -> None:
        account = Account.objects.create()
        calls = []

        @retry_on_conflict
        def pay() -> None:
            row = Account.objects.get(pk=account.pk)
            calls.append(row)
            if len(calls) == 1:
                other_saves(row)
            row.save()

        pay()

        self.assertEqual(len(calls), 2)
