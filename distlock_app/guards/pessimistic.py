"""Row locks: `for_update` and `next_unlocked` with bounded waits."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.db import OperationalError, connections, models, transaction
from django.db.transaction import TransactionManagementError

from ..errors import LockBusy, LockTimeout
from ..primitives.drivers import FILE_LOCKED, LONGEST_MS, code_of, waiting_for_file
from ..primitives.timing import Deadline, full_jitter
from .retrying import M

WAIT = 3.0
# Pauses between tries, in seconds, where the timeouts of the server are whole seconds.
POLL, MAX_POLL = 0.002, 0.05
# The number of locked rows that `next_unlocked` skips on MySQL and MariaDB.
SPARE = 100
# The shortest wait in seconds: to a server, 0 means forever.
SHORTEST = 0.001
# Error codes for a row that was not available. PostgreSQL: NOWAIT; statement timeout. MySQL and
# MariaDB: lock timeout or NOWAIT; NOWAIT; statement timeout. SQLite: its one lock.
REFUSED = frozenset({"55P03", "57014", 1205, 3572, 1969, FILE_LOCKED})


def for_update(rows: models.QuerySet[M], *, wait: float | None = WAIT) -> list[M]:
    """Lock rows until the transaction ends; return them freshly read, ordered by primary key.

    They are locked in that order too, so that two callers do not deadlock. `wait`: seconds for
    all of them; 0 does not wait, None waits as long as the database allows. On SQLite, which
    has no row locks, the whole file is locked for writing.

    Raise LockBusy (wait=0) or LockTimeout: the transaction can continue, but on MySQL and
    MariaDB it keeps the rows locked so far. Raise TransactionManagementError outside
    `atomic()`, and the database's OperationalError if the transaction was aborted: after a
    deadlock, or if rows changed since its snapshot (see `retry_on_deadlock`).
    """
    rows = _queryset(rows).order_by("pk").select_related(None)
    locking = _locking(rows)
    connection = _connection_in_atomic(locking.db)
    if connection.vendor != "mysql" or connection.isolation_level != "read committed":
        return _read_within(locking, wait)
    # InnoDB locks in the order of the index that it reads. So the rows are locked by key, and the
    # conditions are checked again under the lock. (At a higher isolation level the first read
    # would fix the snapshot of the later ones.)
    rows = rows.using(locking.db)
    keys = list(rows.values_list("pk", flat=True))
    by_key = _all_rows(locking).filter(pk__in=keys)
    _read_within(_locking(by_key.order_by("pk")), wait)
    return list(rows.filter(pk__in=keys))


def next_unlocked(rows: models.QuerySet[M], n: int = 1) -> list[M]:
    """Lock the next `n` rows, in the order of `rows`, that are not locked; never wait.

    For queues: take rows, process them, mark them as done, commit. Return fewer, or none, if
    there are no more. Raise TransactionManagementError outside `atomic()`, LockTimeout on
    SQLite, where one transaction at a time can write.
    """
    rows = _queryset(rows)
    rows = rows if rows.ordered else rows.order_by("pk")
    rows = rows.select_related(None)
    locking = _locking(rows)
    connection = _connection_in_atomic(locking.db)
    if not connection.features.has_select_for_update_skip_locked:
        return _read_within(locking[:n], WAIT)
    locking = _locking(rows, skip_locked=True)
    if connection.vendor != "mysql":
        return list(locking[:n])
    # InnoDB locks all rows that it sorts, even those beyond LIMIT: one worker would lock the whole
    # queue. So lock one by one, by key.
    found: list[M] = []
    rows = rows.using(locking.db)
    by_key = _locking(_all_rows(locking), skip_locked=True)
    joined = _locks_joined(locking)
    for key in rows.values_list("pk", flat=True)[: n + SPARE]:
        if len(found) >= n:
            break
        if not joined:
            found += locking.order_by().filter(pk=key)
        elif by_key.filter(pk=key):
            found += rows.filter(pk=key)
    return found


class LockingQuerySet(models.QuerySet[M]):
    """Adds `for_update(pk)` and `next_unlocked(n)`."""

    def for_update(self, pk: Any, *, wait: float | None = WAIT) -> M:
        """Lock one row until the transaction ends; return it freshly read.

        Raise the model's DoesNotExist, and what the function `for_update` raises.
        """
        wait = _bounded(wait)
        row = self.filter(pk=pk).order_by().select_related(None)
        locking = _locking(row)
        skips = _connection_in_atomic(locking.db).features.has_select_for_update_skip_locked
        if _locks_joined(locking):
            found = for_update(row, wait=wait)
        else:
            # One query instead of up to five, if the row is not locked.
            free = list(_locking(row, skip_locked=True)) if skips and wait is not None else []
            found = free or _read_within(locking, wait)
        if not found:
            model: Any = self.model
            raise model.DoesNotExist(f"there is no {self.model._meta.label} {pk!r}")
        return found[0]

    def next_unlocked(self, n: int = 1) -> list[M]:
        """Like the function `next_unlocked`."""
        return next_unlocked(self, n)


if TYPE_CHECKING:
    # Checkers do not see how a manager gets the methods of its queryset.
    class LockingManager(LockingQuerySet[M], models.Manager[M]): ...  # type: ignore[misc]

else:

    class LockingManager(models.Manager.from_queryset(LockingQuerySet)):
        """The manager with these methods."""


def _queryset(rows: Any) -> models.QuerySet[Any]:
    """Return a queryset, also of a manager; raise TypeError for anything else."""
    if not isinstance(rows, (models.QuerySet, models.manager.BaseManager)):
        raise TypeError(f"rows must be a queryset, as in Order.objects.all(), not {rows!r}")
    return rows.all()


def _all_rows(rows: models.QuerySet[M]) -> models.QuerySet[M]:
    """Return the rows of the model, of its table alone: a manager may hide some, or join others."""
    return models.QuerySet(rows.model, using=rows.db)


def _locking(rows: models.QuerySet[M], **how: Any) -> models.QuerySet[M]:
    """Return a locking queryset: of the model's rows, but not of joined ones, if possible."""
    locking = rows.select_for_update(**how)
    if connections[locking.db].features.has_select_for_update_of:
        locking = rows.select_for_update(of=tuple(_tables(rows.model)), **how)
    return locking


def _tables(model: Any, path: str = "self") -> Iterator[str]:
    """Yield the names of a model's own table and of its parents' tables."""
    yield path
    for parent, link in model._meta.concrete_model._meta.parents.items():
        before = "" if path == "self" else f"{path}__"
        yield from _tables(parent, before + link.name)


def _locks_joined(locking: models.QuerySet[Any]) -> bool:
    """Whether this locking queryset would also lock joined rows, and locking by key avoids that.

    On MariaDB, which locks everything that a query reads. At READ COMMITTED a plain read under the
    row lock sees the current state; at other levels only a locking read does.
    """
    connection: Any = connections[locking.db]
    if connection.vendor != "mysql" or connection.features.has_select_for_update_of:
        return False
    model: Any = locking.model
    own = {base._meta.db_table for base in (model, *model._meta.get_parent_list())}
    tables = [join.table_name for join in locking.query.alias_map.values()]
    joined = len(tables) > len(own.intersection(tables))
    return joined and connection.isolation_level == "read committed"


def _connection_in_atomic(using: str) -> Any:
    connection = connections[using]
    if not connection.in_atomic_block:
        raise TransactionManagementError(
            f"rows are locked until the end of a transaction: open atomic() on {using!r} first"
        )
    return connection


def _read_within(rows: models.QuerySet[M], wait: float | None) -> list[M]:
    """Read a locking queryset; word what the database says if its rows are not free in time."""
    wait = _bounded(wait)
    deadline = Deadline(wait)
    try:
        return _read_limited(rows, wait, deadline)
    except OperationalError as error:
        # PostgreSQL reports a statement that a person cancelled like one that ran out of time.
        code = code_of(error)
        if code not in REFUSED or (code == "57014" and deadline.remaining()):
            raise
        label = rows.model._meta.label
        if wait == 0:
            raise LockBusy(f"rows of {label} are locked by another transaction") from error
        limit = "as long as the database waits" if wait is None else f"within {wait} s"
        raise LockTimeout(f"rows of {label} were not free {limit}") from error


def _read_limited(rows: models.QuerySet[M], wait: float | None, deadline: Deadline) -> list[M]:
    """Read a locking queryset; limit the wait as the database can."""
    connection: Any = connections[rows.db]
    if wait == 0 and connection.features.has_select_for_update_nowait:
        rows = _locking(rows, nowait=True)
    if connection.vendor == "sqlite":
        _lock_file(connection, rows.model, wait)
    elif connection.vendor == "postgresql" and wait is not None:
        with _postgresql_time(connection, wait):
            return list(rows)
    elif wait and getattr(connection, "mysql_is_mariadb", False):
        with _mariadb_time(connection, wait):
            return list(rows)
    elif wait:
        return _poll(rows, deadline)
    return list(rows)


def _bounded(wait: float | None) -> float | None:
    """Return the seconds that every database accepts."""
    if wait is not None and not wait >= 0:
        raise ValueError(f"wait must be 0 (one try) or more seconds, not {wait!r}")
    return min(max(wait, SHORTEST), LONGEST_MS / 1000) if wait else wait


@contextmanager
def _postgresql_time(connection: Any, wait: float) -> Iterator[None]:
    """Limit the statements of the block, in a savepoint, since a failed one breaks its transaction.

    With statement_timeout, because lock_timeout restarts for each row.
    """
    with transaction.atomic(using=connection.alias):
        if not wait:
            yield
            return
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT current_setting('statement_timeout'),"
                " set_config('statement_timeout', %s, true)",
                [str(math.ceil(wait * 1000))],
            )
            before = cursor.fetchone()[0]
            yield
            # After a failure, the rollback to the savepoint restores it.
            cursor.execute("SELECT set_config('statement_timeout', %s, true)", [before])


@contextmanager
def _mariadb_time(connection: Any, wait: float) -> Iterator[None]:
    """Limit the statements of the block by fractions of a second; lock timeouts are in seconds.

    A statement timeout undoes that statement only (a lock timeout the whole transaction, with
    innodb_rollback_on_timeout).
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SET @distlock_time = @@max_statement_time, max_statement_time = %s,"
            " @distlock_wait = @@innodb_lock_wait_timeout, innodb_lock_wait_timeout = %s",
            [wait, int(wait) + 2],
        )
        try:
            yield
        finally:
            cursor.execute(
                "SET max_statement_time = @distlock_time, innodb_lock_wait_timeout = @distlock_wait"
            )


def _poll(rows: models.QuerySet[M], deadline: Deadline) -> list[M]:
    """Try with NOWAIT until the deadline: MySQL's timeout is in whole seconds, for each row."""
    rows = _locking(rows, nowait=True)
    attempt = 0
    while True:
        last = deadline.remaining() == 0
        try:
            with transaction.atomic(using=rows.db):
                return list(rows.all())
        except OperationalError as error:
            if last or code_of(error) not in REFUSED:
                raise
        time.sleep(deadline.cap(full_jitter(attempt, base=POLL, cap=MAX_POLL)))
        attempt += 1


def _lock_file(connection: Any, model: Any, wait: float | None) -> None:
    """Make this transaction the only writer: SQLite has no other lock."""
    table = connection.ops.quote_name(model._meta.db_table)
    with connection.cursor() as cursor, waiting_for_file(cursor, wait):
        cursor.execute(f"DELETE FROM {table} WHERE 0")
