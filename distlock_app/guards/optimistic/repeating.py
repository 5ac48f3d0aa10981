"""`Retrying`: repeat a change on a fresh row after a conflict, at last on a locked one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic

from asgiref.sync import async_to_sync, sync_to_async
from django.db import OperationalError, connections, transaction

from ...errors import StaleObjectError
from ...primitives.calls import is_async, refuse_undone
from ...primitives.timing import full_jitter
from ..retrying import ATTEMPTS, MAX_PAUSE, PAUSE, M, exhausted, may_pass

# How the message about a change that returned a coroutine or generator ends.
UNMADE = "was not made: pass the async function itself, and no generator function"

LOCK_FROM = 2
# For this many seconds after a row had to be locked, first attempts lock it too: otherwise each
# change of a hot row would waste an attempt. 32 processes on one row, MariaDB and PostgreSQL: 238
# and 226 changes a second without this, 469 and 293 if all lock at once; 339 and 274, but up to
# 1.4 s for one change, if four attempts with pauses come before the one that locks.
HOT_SECONDS = 1.0
HOT_ROWS = 1000  # that a process remembers
# The first pause is at least this many times the duration of the attempt: if a query is slow,
# no attempt finishes within 50 ms. 32 processes on a machine under load, PostgreSQL: 2.1 retries
# for each success without, 1.4 with 8; MariaDB 3.0 and 0.9.
PATIENCE = 8

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
        self._attempt = 0
        if self.lock_from is None:
            return
        if _hot.get(self._row, 0.0) > time.monotonic():
            self.lock_from = 1
        elif self.lock_from < 0:
            self.lock_from += self.attempts + 1

    def run(self) -> M:
        """Return the saved object, or raise RetriesExhausted."""
        while (pause := self._once()) is not None:
            time.sleep(pause)
        return self._obj

    async def arun(self) -> M:
        """Like `run`; queries and the change use a thread, pauses do not."""
        while (pause := await sync_to_async(self._once)()) is not None:
            await asyncio.sleep(pause)
        return self._obj

    def _once(self) -> float | None:
        """Try once more; return the pause before the next attempt, or None: the object is saved."""
        self._attempt += 1
        started = time.monotonic()
        inside = connections[self.using].in_atomic_block
        lock = self._locks(self._attempt, inside=inside)
        self._obj, failure = self._try(lock=lock, inside=inside)
        if failure is None:
            return None
        if self._attempt == self.attempts:
            raise exhausted(self.attempts, failure) from failure
        if self._locks(self._attempt + 1, inside=inside):
            if not lock:
                _remember(self._row)
            return 0.0  # the wait for the row is in the database
        base = max(self.pause, PATIENCE * (time.monotonic() - started))
        return full_jitter(self._attempt - 1, base=base, cap=self.max_pause)

    def _try(self, *, lock: bool, inside: bool) -> tuple[M, Exception | None]:
        """Read, change and save the object; return it, and the error if this may be repeated."""
        obj: Any = None
        seen: Any = None
        try:
            with _locking_transaction(self.using) if lock and not inside else nullcontext():
                obj = self.read(lock)
                seen = _version_of(obj)
                obj._state.attempt = self._attempt
                refuse_undone(self.change(obj), self.change, UNMADE)
                if obj.pk is not None:  # the change may have deleted it
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
        return error.obj is obj and may_pass(error)
    # The whole transaction was aborted: only its outermost block can be restarted.
    return not inside and may_pass(error)


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
