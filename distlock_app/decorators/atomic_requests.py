"""Transactions under a lock, ATOMIC_REQUESTS too: they begin inside the lock, not around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections, transaction

from ..errors import LockError
from ..primitives.transactions import own_blocks


class OutOfAtomicRequests(set[str]):
    """The `_non_atomic_requests` of a view that is exempt from ATOMIC_REQUESTS on every alias.

    Django asks only whether an alias is in it. It holds the aliases that the view named itself.
    """

    def __contains__(self, alias: object) -> bool:
        return True

    def aliases(self, own: tuple[str, ...]) -> tuple[str, ...]:
        """Return the databases of the view's transactions, the outermost first.

        `own`: those that the view opens in any case. Theirs commit last, because the lock of the
        view may end with the commit.
        """
        settings = connections.settings
        exempt = {*iter(self), *own}
        asked = [a for a in settings if settings[a]["ATOMIC_REQUESTS"] and a not in exempt]
        return (*own, *reversed(asked))


def mark(wrapper: Any, view: Any) -> OutOfAtomicRequests:
    """Take `wrapper`, a wrapped `view`, out of ATOMIC_REQUESTS; return what it carries for that."""
    exempt = OutOfAtomicRequests(getattr(view, "_non_atomic_requests", ()))
    wrapper._non_atomic_requests = exempt
    return exempt


def databases_in(atomic: bool | str) -> tuple[str, ...]:
    """Return the databases that the option `atomic=` names: none or one."""
    if not atomic:
        return ()
    return (DEFAULT_DB_ALIAS if atomic is True else atomic,)


@contextmanager
def in_transactions(aliases: tuple[str, ...]) -> Iterator[None]:
    """Open `atomic()` on each alias, as ATOMIC_REQUESTS would; commit or roll back all."""
    with ExitStack() as blocks:
        for alias in aliases:
            blocks.enter_context(transaction.atomic(using=alias, durable=True))
        yield


def refuse_open(aliases: tuple[str, ...]) -> None:
    """Raise LockError if a transaction that began before the lock is still open."""
    for alias in aliases:
        if own_blocks(connections[alias]):
            raise LockError(
                f"locked_view was called inside a transaction of {alias!r}, which began before "
                "the lock and would end after it. Under ATOMIC_REQUESTS a decorator outside of "
                "it hides from Django that it brings its own transaction: put locked_view "
                "outermost (on the class, not on one of its methods), or "
                "@transaction.non_atomic_requests outside of both."
            )
