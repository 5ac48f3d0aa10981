"""The rows of the lock table by Django's ORM, on a connection that `connections` does not know."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial, wraps
from time import sleep
from typing import Any, TypeVar

from django.apps import apps
from django.conf import settings
from django.db import Error, InterfaceError, OperationalError
from django.db.models import Count, QuerySet
from django.db.models.functions import Now
from django.db.models.sql import DeleteQuery, InsertQuery, Query, UpdateQuery

from ....primitives.threads import in_no_event_loop
from ....primitives.timing import Deadline, full_jitter
from .base import ROW_WAIT, LockRow

T = TypeVar("T")


class RowConflict(OperationalError):
    """Others have the row locked, or were faster."""


class Rows:
    """The lock table in a transaction; `which` are keyword arguments of `filter()`."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._epoch = datetime(1970, 1, 1, tzinfo=timezone.utc if settings.USE_TZ else None)
        self._model: Any = apps.get_model("distlock_app", "DistLock")

    def now(self) -> datetime:
        """Ask for the server's time."""
        query: Any = Query(None, alias_cols=False)
        query.add_annotation(Now(), "now")
        ((now,),) = self._answers(query)
        return now  # type: ignore[no-any-return]

    def read(self, *, start: int = 0, count: int | None = None, **which: Any) -> list[LockRow]:
        """Read rows in the order of their keys, from number `start`, at most `count`."""
        stop = None if count is None else start + count
        return self._read(self._rows(**which).order_by("key")[start:stop])

    def lock(self, **which: Any) -> list[LockRow]:
        """Read rows and lock them. One that another transaction has locked is an error at once.

        Not so in the caller's transaction, which an error would end: that one waits.
        """
        can_refuse = self._connection.features.has_select_for_update_nowait
        of_caller = self._connection.in_atomic_block
        rows = self._rows(**which).order_by("key")
        try:
            return self._read(rows.select_for_update(nowait=can_refuse and not of_caller))
        except OperationalError as error:
            if of_caller:
                raise
            raise RowConflict(str(error)) from error

    def conflicts(self, error: OperationalError) -> bool:
        """Tell whether an error that came again and again is the row's, and not the server's.

        Drivers name deadlocks, locked rows and missing rights alike. It is the row's if it came
        when it was to be locked, or where nothing is locked, and others can be locked.
        """
        connection = self._connection
        if connection.features.has_select_for_update and not isinstance(error, RowConflict):
            return False
        try:
            connection.set_autocommit(False, True)
            self._read(self._rows(key="").select_for_update())
        except Error:
            return False
        finally:
            _rolled_back(connection)
        return True

    def count(self, **which: Any) -> int:
        query: Any = self._rows(**which).query
        query.default_cols = False
        query.add_annotation(Count("*"), "count")
        ((count,),) = self._answers(query)
        return int(count)

    def change(self, row: LockRow, **changes: Any) -> None:
        """Change a row that is still as it was read; raise RowConflict."""
        new = row._replace(**changes)
        same = self._rows(key=row.key, fence=row.fence, expiry=self._time(row.expiry_us))
        query: Any = same.query.chain(UpdateQuery)
        query.add_update_values(
            {
                "owner": new.owner,
                "name": new.name,
                "holder": new.holder,
                "fence": new.fence,
                "acquired_at": self._time(new.acquired_us),
                "expiry": self._time(new.expiry_us),
            }
        )
        if self._execute(query) != 1:
            raise RowConflict("the row was changed since it was read")

    def add(self, **values: Any) -> None:
        """Make a row that ended long ago, by any clock; raise IntegrityError if there is one."""
        query = InsertQuery(self._model)
        row = self._model(expiry=self._epoch, **values)
        query.insert_values(self._model._meta.fields, [row])
        self._execute(query)

    def delete(self, **which: Any) -> int:
        """Delete rows, by one statement; return how many."""
        return self._execute(self._rows(**which).query.chain(DeleteQuery))

    def _rows(self, **which: Any) -> QuerySet[Any]:
        return QuerySet(self._model).filter(**which)

    def _read(self, rows: QuerySet[Any]) -> list[LockRow]:
        columns = ("key", "owner", "fence", "name", "holder", "acquired_at", "expiry", "now")
        answers = self._answers(rows.annotate(now=Now()).values_list(*columns).query)
        return [LockRow(*row[:5], *map(self._microseconds, row[5:])) for row in answers]

    def _microseconds(self, time: datetime | None) -> int | None:
        return None if time is None else (time - self._epoch) // timedelta(microseconds=1)

    def _time(self, microseconds: int | None) -> datetime | None:
        if microseconds is None:
            return None
        return self._epoch + timedelta(microseconds=microseconds)

    def _answers(self, query: Any) -> list[Any]:
        return list(query.get_compiler(connection=self._connection).results_iter())

    def _execute(self, query: Any) -> int:
        statements = query.get_compiler(connection=self._connection).as_sql()
        with self._connection.cursor() as cursor:
            for statement, values in statements if type(statements) is list else [statements]:
                cursor.execute(statement, values)
            return int(cursor.rowcount)


def in_transaction(verb: Callable[..., T], *, writes: bool = True) -> Callable[..., T]:
    """Run a verb in a transaction on the connection of its cursor; give it the `Rows` there.

    Again, if others were in the way: a locked row, a deadlock, a snapshot that is too old. The
    caller's own transaction, on the caller's connection, is the caller's to begin and end.
    """

    @in_no_event_loop
    @wraps(verb)
    def run(self: Any, cursor: Any, *asked: Any, **options: Any) -> T:
        connection = cursor.db
        rows = Rows(connection)
        if connection.in_atomic_block:
            return verb(self, rows, *asked, **options)
        deadline, attempt = Deadline(ROW_WAIT), 0
        while True:
            try:
                if not writes:
                    return verb(self, rows, *asked, **options)
                # As atomic() does it; but code that looks for open blocks would see that.
                connection.set_autocommit(False, True)
                answer = verb(self, rows, *asked, **options)
                connection.commit()
                connection.set_autocommit(True)
                return answer
            except Error as error:
                if not _rolled_back(connection):
                    raise InterfaceError(str(error)) from error
                if not isinstance(error, OperationalError):
                    raise
                if attempt and not deadline.remaining():
                    kind = RowConflict if rows.conflicts(error) else OperationalError
                    raise kind(str(error)) from error
            sleep(full_jitter(attempt, base=0.005, cap=0.1))
            attempt += 1

    return run


# Not in a transaction: one that is serializable would lock what it reads, on InnoDB, and many that
# look at a row could keep its owner from it.
reading = partial(in_transaction, writes=False)


def _rolled_back(connection: Any) -> bool:
    """End a transaction that failed; return whether the connection is good for another one."""
    try:
        connection.rollback()
        connection.set_autocommit(True)
        return connection.connection is not None and bool(connection.is_usable())
    except Error:
        return False
