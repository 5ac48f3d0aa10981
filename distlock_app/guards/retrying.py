"""`retry_on_conflict`, `retry_on_deadlock`: pauses, and which database errors deserve a retry."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from inspect import isasyncgenfunction, isgeneratorfunction
from traceback import walk_tb
from typing import Any, TypeVar, overload

from asgiref.sync import sync_to_async
from django.db import OperationalError, connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from ..errors import RetriesExhausted, StaleObjectError
from ..primitives.calls import is_async, path_of, refuse_undone
from ..primitives.drivers import FILE_LOCKED, OLD_SNAPSHOT, code_of
from ..primitives.timing import full_jitter
from ..primitives.transactions import own_blocks

F = TypeVar("F", bound=Callable[..., Any])
# Covariant, as in django-stubs.
M = TypeVar("M", bound=models.Model, covariant=True)

ATTEMPTS = 5
# Seconds, doubled after each attempt. 8 processes on one row, two cores:
# 55 to 143 successes a second with 0.005, 366 to 405 with 0.05 (110 to 222 without a pause).
PAUSE = 0.05
MAX_PAUSE = 1.0
# Error codes for a transaction aborted in favour of another: serialization failure and deadlock,
# as SQLSTATE (PostgreSQL) or number (MySQL, MariaDB; 1020 is MariaDB's for a row that changed
# after the snapshot); on SQLite another connection wrote, and may go on writing.
SACRIFICED = frozenset({"40001", "40P01", 1213, 1020, FILE_LOCKED, OLD_SNAPSHOT})

# How the message about a function that returned a coroutine or generator ends.
UNREPEATED = (
    "would not be called again: do the work before it returns, or decorate the async function "
    "itself"
)


def was_sacrificed(error: BaseException) -> bool:
    """Whether the database aborted the transaction only because of another one."""
    return code_of(error) in SACRIFICED


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

    def raise_final(error: Exception, attempt: int) -> None:
        if _in_transaction() or not may_pass(error):
            raise error
        if attempt == attempts:
            raise exhausted(attempts, error) from error

    return _calling_again(function, (StaleObjectError, OperationalError), raise_final, **options)


@overload
def retry_on_deadlock(
    function: F, *, attempts: int = ..., pause: float = ..., max_pause: float = ...
) -> F: ...
@overload
def retry_on_deadlock(
    function: None = None, *, attempts: int = ..., pause: float = ..., max_pause: float = ...
) -> Callable[[F], F]: ...
def retry_on_deadlock(
    function: Any = None,
    *,
    attempts: int = ATTEMPTS,
    pause: float = PAUSE,
    max_pause: float = MAX_PAUSE,
) -> Any:
    """Call the function again when the database aborted its transaction in favour of another one.

    That is a deadlock or a serialization failure (1213, 1020, SQLSTATE 40P01, 40001), or a
    SQLite file that another connection wrote. Between the calls full-jitter pauses, in seconds,
    double from `pause` to `max_pause`; the last error is raised as it is. A lock timeout (1205,
    LockTimeout) is not retried: the caller has already waited.

    Raise TransactionManagementError if a transaction is open: only its outermost block can
    begin again. Works on `async def` as well.
    """
    options: dict[str, Any] = {"attempts": attempts, "pause": pause, "max_pause": max_pause}
    if function is None:
        return functools.partial(retry_on_deadlock, **options)

    def begin() -> None:
        if _in_transaction():
            raise TransactionManagementError(
                f"{path_of(function)}() is decorated with retry_on_deadlock, and cannot be "
                "retried inside an open transaction: decorate what opens the outermost atomic()"
            )

    def raise_final(error: Exception, attempt: int) -> None:
        if attempt == attempts or not was_sacrificed(error):
            raise error

    return _calling_again(function, OperationalError, raise_final, begin=begin, **options)


def _calling_again(
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
    _check_function(function)
    if attempts < 1:
        raise ValueError("attempts must be at least 1")

    def seconds_after(error: Exception, attempt: int) -> float:
        _refuse_after_commit(error)
        raise_final(error, attempt)
        return full_jitter(attempt - 1, base=pause, cap=max_pause)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin()
        for attempt in range(1, attempts + 1):
            try:
                return refuse_undone(function(*args, **kwargs), function, UNREPEATED)
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


def _check_function(function: Any) -> None:
    if not callable(function):
        raise TypeError(f"{function!r} is not a function: name the option, attempts={function!r}")
    if isgeneratorfunction(function) or isasyncgenfunction(function):
        raise TypeError(f"{path_of(function)}() is a generator, which cannot be retried")


def _refuse_after_commit(error: Exception) -> None:
    """Raise an error of an `on_commit` hook: what the function wrote is committed."""
    hooks = BaseDatabaseWrapper.run_and_clear_commit_hooks.__code__
    if any(frame.f_code is hooks for frame, _ in walk_tb(error.__traceback__)):
        raise error


def may_pass(error: Exception) -> bool:
    """Whether another try may succeed after this conflict or error of the database.

    Not if the conflict was retried already, if the object was read without its version, or if a
    client named the version.
    """
    if not isinstance(error, StaleObjectError):
        return was_sacrificed(error)
    if isinstance(error, RetriesExhausted):
        return False
    return error.obj is None or error.expected is not None


def exhausted(attempts: int, failure: Exception) -> RetriesExhausted:
    """Return the error to raise after the last attempt, with what `failure` says of the row."""
    return RetriesExhausted(
        f"each of {attempts} attempts had a conflict with another writer",
        obj=getattr(failure, "obj", None),
        expected=getattr(failure, "expected", None),
        found=getattr(failure, "found", None),
    )


def _in_transaction() -> bool:
    """Whether this thread is in an `atomic()` block; those of a TestCase do not count."""
    return any(map(own_blocks, connections.all(initialized_only=True)))
