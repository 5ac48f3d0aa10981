"""Retries: `retry_on_conflict`, its pauses, and which database errors deserve another try."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from inspect import isasyncgenfunction, isgeneratorfunction
from traceback import walk_tb
from typing import Any, Generic, TypeVar, overload

from asgiref.sync import async_to_sync, sync_to_async
from django.db import OperationalError, connections, models, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..errors import RetriesExhausted, StaleObjectError
from ..primitives.calls import is_async, path_of, refuse_undone
from ..primitives.timing import full_jitter
from ..primitives.transactions import in_own_block

F = TypeVar("F", bound=Callable[..., Any])
# Covariant, as in django-stubs.
M = TypeVar("M", bound=models.Model, covariant=True)

# How the message about a change that returned a coroutine or generator ends.
UNMADE = "was not made: pass the async function itself, and no generator function"

ATTEMPTS = 5
LOCK_FROM = 2
# For this many seconds after a row had to be locked, first attempts lock it too: otherwise each
# change of a hot row would waste an attempt. 32 processes on one row, MariaDB and PostgreSQL: 238
# and 226 changes a second without this, 469 and 293 if all lock at once; 339 and 274, but up to
# 1.4 s for one change, if four attempts with pauses come before the one that locks.
HOT_SECONDS = 1.0
HOT_ROWS = 1000  # that a process remembers
# Seconds, doubled after each attempt, unless the next one locks. 8 processes on one row, two cores:
# 55 to 143 successes a second with 0.005, 366 to 405 with 0.05 (110 to 222 without a pause).
PAUSE = 0.05
MAX_PAUSE = 1.0
# The first pause is at least this many times the duration of the attempt: if a query is slow,
# no attempt finishes within 50 ms. 32 processes on a machine under load, PostgreSQL: 2.1 retries
# for each success without, 1.4 with 8; MariaDB 3.0 and 0.9.
PATIENCE = 8

# Error codes for a transaction aborted in favour of another: serialization failure and deadlock,
# as SQLSTATE (PostgreSQL) or number (MySQL, MariaDB; 1020 is MariaDB's for a row that changed
# after the snapshot).
SACRIFICED = frozenset({"40001", "40P01", 1213, 1020})


def code_of(error: BaseException) -> Any:
    """Return the driver's code for a database error."""
    cause = error.__cause__ or error
    # psycopg 3, psycopg 2, MySQLdb and SQLite.
    code = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    return code or (cause.args[0] if cause.args else None)


def was_sacrificed(error: BaseException) -> bool:
    """Whether the database aborted the transaction only because of another one."""
    code = code_of(error)
    # SQLite: another connection wrote, and may go on writing.
    return code in SACRIFICED or str(code).startswith("database is locked")


# Rows that recently had to be locked, and until when first attempts lock them.
_hot: dict[tuple[str, type, str], float] = {}


def _remember(row: tuple[str, type, str]) -> None:
    if len(_hot) >= HOT_ROWS:
        _hot.clear()  # rows that are still hot return after one conflict each
    _hot[row] = time.monotonic() + HOT_SECONDS


@dataclass
class Retrying(Generic[M]):
    """One change to one row, retried until it is saved.

    `read(lock)` returns the fresh object, with `lock` locked until the end of the transaction.
    """

    read: Callable[[bool], M]
    change: Callable[[M], Any]
    _: KW_ONLY
    using: str
    model: type
    pk: Any
    attempts: int = ATTEMPTS
    lock_from: int | None = LOCK_FROM  # negative: counted from the end; None: never
    pause: float = PAUSE
    max_pause: float = MAX_PAUSE

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError("attempts must be at least 1")
        if is_async(self.change):
            self.change = async_to_sync(self.change)
        self._row = self.using, self.model, str(self.pk)  # a composite key may come as a list
        if self.lock_from is None:
            return
        if _hot.get(self._row, 0.0) > time.monotonic():
            self.lock_from = 1
        elif self.lock_from < 0:
            self.lock_from += self.attempts + 1

    def run(self) -> M:
        """Return the saved object, or raise RetriesExhausted."""
        for attempt in range(1, self.attempts + 1):
            obj, conflict, pause = self._once(attempt)
            if conflict is None:
                return obj
            time.sleep(pause)
        raise _exhausted(self.attempts, conflict) from conflict

    async def arun(self) -> M:
        """Like `run`; queries and the change use a thread, pauses do not."""
        for attempt in range(1, self.attempts + 1):
            obj, conflict, pause = await sync_to_async(self._once)(attempt)
            if conflict is None:
                return obj
            await asyncio.sleep(pause)
        raise _exhausted(self.attempts, conflict) from conflict

    def _once(self, attempt: int) -> tuple[M, Exception | None, float]:
        """Try once; return the object, the error if it failed, and how long to pause."""
        started = time.monotonic()
        inside = connections[self.using].in_atomic_block
        lock = self._locks(attempt, inside=inside)
        obj, failure = self._try(attempt, lock=lock, inside=inside)
        if failure is None or attempt == self.attempts:
            return obj, failure, 0.0
        if self._locks(attempt + 1, inside=inside):
            if not lock:
                _remember(self._row)
            return obj, failure, 0.0  # the wait for the row is in the database
        base = max(self.pause, PATIENCE * (time.monotonic() - started))
        return obj, failure, full_jitter(attempt - 1, base=base, cap=self.max_pause)

    def _try(self, attempt: int, *, lock: bool, inside: bool) -> tuple[M, Exception | None]:
        """Read, change and save the object; return it, and the error if this may be repeated."""
        obj: Any = None
        seen: Any = None
        try:
            with _locking_transaction(self.using) if lock and not inside else nullcontext():
                obj = self.read(lock)
                seen = _version_of(obj)
                obj._state.attempt = attempt
                refuse_undone(self.change(obj), self.change, UNMADE)
                obj.save(using=self.using)
            return obj, None
        except StopIteration as error:  # a future of asyncio refuses it, and would never be done
            raise RuntimeError("the change raised StopIteration") from error
        except (StaleObjectError, OperationalError) as error:
            # A rollback restores the version, or removes it.
            saved = obj is not None and _version_of(obj) not in (seen, None)
            if saved or not _may_repeat(error, obj, inside=inside):
                raise
            return obj, error
        finally:
            if obj is not None:
                obj._state.__dict__.pop("attempt", None)

    def _locks(self, attempt: int, *, inside: bool) -> bool:
        if inside and attempt > 1:
            # Under REPEATABLE READ a plain read would always show the old snapshot; a locking read
            # shows the current row. Without locking reads (SQLite), the UPDATE that matched no
            # row has made this transaction the only writer, on a current snapshot.
            return bool(connections[self.using].features.has_select_for_update)
        return self.lock_from is not None and attempt >= self.lock_from


def _version_of(obj: Any) -> Any:
    return obj.__dict__.get(obj._version_field.attname)


def _may_repeat(error: Exception, obj: Any, *, inside: bool) -> bool:
    """Whether another writer of the same row was in the way, and the change can be repeated."""
    if isinstance(error, StaleObjectError):
        return error.obj is obj and _may_pass(error) and not isinstance(error, RetriesExhausted)
    # The whole transaction was aborted: only its outermost block can be restarted.
    return not inside and was_sacrificed(error)


@contextmanager
def _locking_transaction(using: str) -> Iterator[None]:
    """Open a transaction whose locking read waits for the row, and then sees its current state."""
    with transaction.atomic(using=using):
        connection = connections[using]
        if connection.vendor == "postgresql":
            # At a higher level the read that has waited fails with 40001: with 16 processes on
            # one row, some failed 5 times in a row.
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        yield


@overload
def retry_on_conflict(
    function: F, *, attempts: int = ..., pause: float = ..., max_pause: float = ...
) -> F: ...
@overload
def retry_on_conflict(
    function: None = None, *, attempts: int = ..., pause: float = ..., max_pause: float = ...
) -> Callable[[F], F]: ...
def retry_on_conflict(
    function: Any = None,
    *,
    attempts: int = ATTEMPTS,
    pause: float = PAUSE,
    max_pause: float = MAX_PAUSE,
) -> Any:
    """Call the function again after a conflict, or when the database aborted its transaction.

    The function must read the rows that it changes. Inside an open transaction it is called
    once, because reading again may return the same old rows. Works on `async def` too.
    """
    options: dict[str, Any] = {"attempts": attempts, "pause": pause, "max_pause": max_pause}
    if function is None:
        return functools.partial(retry_on_conflict, **options)
    raise_final = functools.partial(_raise_final, attempts)
    return calling_again(function, (StaleObjectError, OperationalError), raise_final, **options)


def calling_again(
    function: Any,
    errors: Any,
    raise_final: Callable[[Exception, int], None],
    *,
    attempts: int,
    pause: float,
    max_pause: float,
    begin: Callable[[], None] = lambda: None,
) -> Any:
    """Wrap a function or coroutine function so that it is called again after `errors`.

    `begin()` is called first. `raise_final(error, attempt)` raises if the caller is to get an
    error. Between the calls full-jitter pauses, in seconds, double from `pause` to `max_pause`.
    """
    if attempts < 1:
        raise ValueError("attempts must be at least 1")
    if isgeneratorfunction(function) or isasyncgenfunction(function):
        raise TypeError(f"{path_of(function)}() is a generator, which cannot be retried")

    def seconds_after(error: Exception, attempt: int) -> float:
        _refuse_after_commit(error)
        raise_final(error, attempt)
        return full_jitter(attempt - 1, base=pause, cap=max_pause)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin()
        for attempt in range(1, attempts + 1):
            try:
                return function(*args, **kwargs)
            except errors as error:
                seconds = seconds_after(error, attempt)
            time.sleep(seconds)

    @functools.wraps(function)
    async def acall(*args: Any, **kwargs: Any) -> Any:
        # Where a block would be open: in the thread that waits for this task, or runs its queries.
        await sync_to_async(begin)()
        for attempt in range(1, attempts + 1):
            try:
                return await function(*args, **kwargs)
            except errors as error:
                seconds = await sync_to_async(seconds_after)(error, attempt)
            await asyncio.sleep(seconds)

    return acall if is_async(function) else call


def _refuse_after_commit(error: Exception) -> None:
    """Raise an error of an `on_commit` hook: what the function wrote is committed."""
    hooks = BaseDatabaseWrapper.run_and_clear_commit_hooks.__code__
    if any(frame.f_code is hooks for frame, _ in walk_tb(error.__traceback__)):
        raise error


def _raise_final(attempts: int, error: Exception, attempt: int) -> None:
    """Raise what the caller is to get, unless another attempt may succeed."""
    final = isinstance(error, RetriesExhausted) or in_transaction()
    if final or not (_may_pass(error) or was_sacrificed(error)):
        raise error
    if attempt == attempts:
        raise _exhausted(attempts, error) from error


def _may_pass(error: Exception) -> bool:
    """Whether it is a conflict that a retry can resolve.

    It cannot if the object was read without its version, or if a client named another one.
    """
    if not isinstance(error, StaleObjectError):
        return False
    return error.obj is None or error.expected is not None


def _exhausted(attempts: int, failure: Exception | None) -> RetriesExhausted:
    return RetriesExhausted(
        f"each of {attempts} attempts had a conflict with another writer",
        obj=getattr(failure, "obj", None),
        expected=getattr(failure, "expected", None),
        found=getattr(failure, "found", None),
    )


def in_transaction() -> bool:
    """Whether this thread is in an `atomic()` block; those of a TestCase do not count."""
    return any(map(in_own_block, connections.all(initialized_only=True)))
