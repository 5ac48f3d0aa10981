"""`lock_in_transaction`: a locked row of the lock table, until the transaction ends.

`Lock` writes an owner and an expiry into the row (a lease). Here the row itself is locked in the
caller's transaction, and the server unlocks it with the commit, the rollback, or the end of the
connection. A leased row excludes transactions, a locked row excludes `Lock`.

1. SELECT ... FOR UPDATE of the row, unless it is leased, and advance its fencing token: one
   request.
2. If it is leased or missing, take a lease as `Lock` does, on another connection and in turn with
   all other callers. Then lock the row and release the lease in the caller's transaction: the
   release is invisible before the commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.transaction import TransactionManagementError

from ..backends.base import InTransaction
from ..backends.dummy import DummyBackend
from ..backends.locmem import LocMemBackend
from ..claims import Busy, Grant
from ..errors import LockBusy, LockError, LockLost
from ..primitives import identity, transactions
from ..primitives.names import key_of, shown
from ..primitives.timing import Deadline
from .acquiring import Attempt
from .limits import UNSET
from .lock import Lock
from .registry import registry
from .releasing import releaser
from .waiting import acquired, busy_error
from .wakers import Waker

# Seconds of the lease in step 2; after a crash just then, the lock stays taken for the rest of it.
LEASE = 1.0

# The backends in memory are for tests.
IN_DATABASE_OR_MEMORY = (InTransaction, LocMemBackend, DummyBackend)


def lock_in_transaction(name: str, *, wait: float | None = UNSET, using: str = "default") -> int:
    """Lock `name` until the open transaction ends, as a row of the lock table; return its token.

    It and `Lock` of the same name exclude each other. There is no ttl, no renewal and nothing
    to release. `using`: an alias whose lock table is in the database of the transaction. It may
    be called again in the same transaction.

    Raise LockBusy (wait=0) or LockTimeout: the transaction can continue. Raise
    TransactionManagementError outside `atomic()`, LockError for an alias without a lock table,
    LockLost if the transaction must be rolled back, and the database's OperationalError after a
    deadlock (see `retry_on_deadlock`).
    """
    return begun_under_lock(name, wait=wait, using=using, warn=True)


def begun_under_lock(
    name: str, *, wait: float | None = UNSET, using: str = "default", warn: bool = False
) -> int:
    """Like `lock_in_transaction`, by default at the beginning of a transaction: no warning."""
    if asyncio._get_running_loop() is not None:
        identity.refuse_to_block("a synchronous function that opens atomic()")
    lock = Lock(name, ttl=LEASE, wait=wait, renew=False, using=using)
    database = database_of(using)
    connection: Any = connections[database]
    blocks = transactions.own_blocks(connection)
    if not blocks:
        raise TransactionManagementError(
            f"open atomic() on {database!r} first, where alias {using!r} has its lock table"
            + transactions.elsewhere()
        )
    connection.validate_no_broken_transaction()
    attempt = Attempt(lock, UNSET)
    if (fence := transactions.fence_of(connection, using, attempt.key)) is not None:
        return fence
    _end_own_lease(attempt)
    held, locked = transactions.held_in(connection), (using, attempt.key)
    backend = attempt.backend
    if isinstance(backend, InTransaction) and transactions.is_open(connection):
        if warn:
            transactions.check_before_lock(release_now=True)
        fence = _lock(attempt, backend, connection)
    else:  # in tests: a lock in memory, or a TestCase, which would keep the row until its end
        hold = Lock(name, wait=attempt.wait, using=using).acquire()
        hold.release()  # at the end of the transaction, but not in a TestCase
        fence = hold.fence or 0
    if transactions.is_open(connection):
        # A rollback to a savepoint unlocks the row, but ends no lock in memory.
        forget, in_table = partial(held.pop, locked, None), isinstance(backend, InTransaction)
        transactions.call_at_end(connection, committed=forget, dropped=forget, savepoints=in_table)
    held[locked] = fence, transactions.entries(connection)[-len(blocks)]
    return fence


def _end_own_lease(attempt: Attempt) -> None:
    """Wait until what a rollback ended is released; raise LockBusy if this thread has the lock."""
    if (lease := attempt.lease()) is None:
        return
    if not lease.ended and (lease.holds or lease.open_transactions):
        raise LockBusy(
            f"this thread already holds {shown(attempt.lock.name)!r} as a Lock: hold.pin() keeps"
            " its row locked until the end of the transaction"
        )
    releaser.drain(lease)


def _lock(attempt: Attempt, backend: InTransaction, connection: Any) -> int:
    """Lock the row, in one request if it is not leased."""
    deadline = Deadline(attempt.wait)
    # Not on a snapshot: there InnoDB keeps a row locked that turns out to be leased, and PostgreSQL
    # refuses a row that changed while we waited for it.
    if not transactions.keeps_snapshot(connection):
        answer = backend.lock_row(attempt.key, attempt.lock.name, attempt.wait)
        if isinstance(answer, Busy):
            attempt.note_wait("timeout")
            raise busy_error(attempt.lock.name, attempt.wait, answer.free_in)
        if answer is not None:
            return answer
    left = deadline.remaining()
    if attempt.wait and left is not None:
        left = max(left, 0.001)  # 0 would mean a single try, not the end of a wait
    return _lease(attempt, left, backend, connection)


def _lease(attempt: Attempt, wait: float | None, backend: InTransaction, connection: Any) -> int:
    """Wait for the name in turn with every `Lock`, take a lease, and release it at the commit.

    Until the commit, the UPDATE of that release keeps the row locked.
    """
    waker = Waker()
    claim = attempt.claim(waker)
    try:
        grant, _ = acquired(attempt.backend, claim, wait, waker)
        dropped = partial(releaser.give_back, attempt.backend, grant)
        transactions.call_at_end(
            connection, committed=lambda: None, dropped=dropped, savepoints=True
        )
        if not backend.release_at_commit(grant):
            connection.set_rollback(True)  # the row has another owner by now, and may be locked
            raise LockLost(
                f"this process was stopped just after it got {shown(claim.name)!r}, whose lease has"
                " ended: restart the transaction"
            )
        assert grant.fence is not None
        return grant.fence
    except LockBusy as busy:  # of what was left of the wait
        attempt.note_wait("timeout")
        raise busy_error(claim.name, attempt.wait, busy.free_in) from None
    except BaseException:
        releaser.give_back(attempt.backend, Grant(claim))
        raise


@contextmanager
def transaction_under_lock(
    name: str, *, wait: float | None = UNSET, using: str = "default"
) -> Iterator[int]:
    """Open `atomic()` on the database of the lock table, and lock `name` in it first."""
    database = database_of(using)
    begun = connections[database].in_atomic_block
    with transaction.atomic(database):
        yield begun_under_lock(name, wait=wait, using=using, warn=begun)


def held_in_transaction(name: str, using: str) -> bool:
    """Whether the open transaction of this thread has locked `name`."""
    backend = registry[using].backend
    if not isinstance(backend, IN_DATABASE_OR_MEMORY):
        return False
    return transactions.fence_of(connections[database_of(using)], using, key_of(name)) is not None


def database_of(using: str) -> str:
    """Return the database of an alias's lock table; raise LockError if it has none."""
    backend = registry[using].backend
    if not isinstance(backend, IN_DATABASE_OR_MEMORY):
        raise LockError(
            f"only a lock table can lock in a transaction, not the backend of alias {using!r}"
        )
    return backend.using if isinstance(backend, InTransaction) else DEFAULT_DB_ALIAS
