"""What the processes of test_in_transaction.py do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from django.db import OperationalError, connection, connections, transaction

from distlock_app import Lock, LockBusy, lock_in_transaction
from distlock_app.backends.database import sql
from distlock_app.pessimistic import retry_on_deadlock
from tests.app.models import Counter
from tests.processes import hear, say


def retried_on_mariadb(function: Callable[[], None]) -> Callable[[], None]:
    """Where a Lock that takes the name at the same moment may end a transaction."""
    mariadb = getattr(connection, "mysql_is_mariadb", False)
    return retry_on_deadlock(function) if mariadb else function


def count(name: str, times: int, threads: int, generic: bool = False) -> list[str]:
    """Add to an unprotected counter, each second time under a `Lock`; return the errors."""
    errors: list[str] = []
    if generic:
        sql.DIALECTS.clear()

    def add_one() -> None:
        counter = Counter.objects.get(name=name)
        counter.value += 1
        counter.save()

    @retried_on_mariadb
    def add_in_transaction() -> None:
        with transaction.atomic():
            lock_in_transaction(name, wait=100)
            add_one()

    def work() -> None:
        try:
            for number in range(times):
                # On SQLite any write of another one would end a transaction that has read.
                if number % 2 and connection.vendor != "sqlite":
                    with Lock(name, wait=100, atomic=True):
                        add_one()
                else:
                    add_in_transaction()
        except BaseException as error:
            errors.append(repr(error))
        finally:
            connections.close_all()

    pool = [threading.Thread(target=work) for _ in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    return errors


def hold(name: str) -> Any:
    """Hold the name in a transaction until told to go on."""
    with transaction.atomic():
        say(lock_in_transaction(name, wait=10))
        hear()
    return time.monotonic()


def cross(first: str, second: str) -> str:
    """Lock two names, one after the other; return what came of it."""
    try:
        with transaction.atomic():
            lock_in_transaction(first, wait=10)
            say("has one")
            hear()
            lock_in_transaction(second, wait=3)
    except (LockBusy, OperationalError) as error:
        return type(error).__name__
    return "both"
