"""The database transactions open in this thread: find them, and call back when one ends.

A lock that is released before the data commits protects nothing: 65 of 400 increments were
lost that way. Django keeps callbacks of `on_commit` in a list, calls them on commit and drops
them on rollback; so an object that lives only in that list sees both.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from asgiref.sync import AsyncToSync, sync_to_async
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from ..errors import LockError
from .identity import frame_of_caller


def surely_none() -> bool:
    """Tell at a glance that no transaction is open in this thread; False: ask exactly."""
    kept = getattr(connections._connections, "_storage", None)  # type: ignore[attr-defined]
    if type(kept) is not threading.local or asyncio._get_running_loop() is not None:  # see _used()
        return False
    for settings in connections.settings.values():
        if not settings.get("AUTOCOMMIT", True):
            return False
    for connection in list(kept.__dict__.values()):
        if getattr(connection, "in_atomic_block", True):
            return False
        if not connection.autocommit and connection.connection is not None:
            return False
    return True


def open_blocks() -> list[Any]:
    """Return the connections of this thread with an open `atomic()` block.

    Not in a `TestCase`: its transaction never commits, nobody else sees the data, and Django
    does not run `on_commit` callbacks there (`durable` ignores these blocks as well). Not
    if the connection was closed inside: that has rolled it back.
    """
    return [connection for connection in _used() if is_open(connection)]


def elsewhere() -> str:
    """Return where a transaction is open, to end the message about one that is not."""
    others = ", ".join(repr(other.alias) for other in open_blocks())
    return f": the open transaction is on {others}" if others else ""


def _used() -> list[Any]:
    """Return what `connections.all(initialized_only=True)` does, in a tenth of the time."""
    ours: Any = connections._connections  # type: ignore[attr-defined]
    # Outside of event loops asgiref keeps them in a plain thread local, if it is still so; to ask
    # it for each alias, used or not, raises two exceptions inside of it.
    kept = getattr(ours, "_storage", None)
    if type(kept) is threading.local and asyncio._get_running_loop() is None:
        return [c for c in list(kept.__dict__.values()) if isinstance(c, BaseDatabaseWrapper)]
    return [c for alias in connections if (c := getattr(ours, alias, None)) is not None]


def is_open(connection: Any) -> bool:
    """Whether the connection is in one of the transactions that `open_blocks` returns."""
    if not connection.in_atomic_block or connection.closed_in_transaction:
        return False
    return not in_testcase(connection)


def in_testcase(connection: Any) -> bool:
    """Whether a `TestCase` has opened a transaction around the test on this connection."""
    return any(getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)


def own_blocks(connection: Any) -> list[Any]:
    """Return the open `atomic()` blocks, without those that a `TestCase` opens around the test."""
    return [b for b in connection.atomic_blocks if not getattr(b, "_from_testcase", False)]


async def check_caller(name: str, *, release_now: bool) -> None:
    """Refuse a lock of a task if the thread that waits for it in `async_to_sync` is in a block.

    What the task writes by `sync_to_async` is in that block, whose end a lock cannot wait for: the
    next call would be another task, for which the lock is held.
    """
    if release_now:
        return
    # Asked only where there is such a thread: that costs a change of threads.
    begun = getattr(AsyncToSync.executors, "current", None)
    if begun is None and asyncio.get_running_loop() not in AsyncToSync.loop_thread_executors:
        return
    try:
        blocks = await sync_to_async(open_blocks)()
    except RuntimeError:  # that thread waits no longer, or it runs this loop: nothing is sent to it
        return
    if blocks:
        raise LockError(
            f"The lock {name[:200]!r} is taken by a task that async_to_sync() began inside "
            f"atomic() on {blocks[0].alias!r}: it would be released before the commit. Take it "
            'around that atomic(), or Lock(..., release="now") for what is not in the database.'
        )


# By connection: the fences of the names that its transaction has locked, and the entry of its first
# block, which a name outlives in a TestCase only. By alias and key.
_held: WeakKeyDictionary[Any, dict[tuple[str, str], tuple[int, Any]]] = WeakKeyDictionary()


def held_in(connection: Any) -> dict[tuple[str, str], tuple[int, Any]]:
    """Return what the transaction of this connection has locked."""
    return _held.setdefault(connection, {})


def fence_of(connection: Any, alias: str, key: str) -> int | None:
    """Return the fence of a name that the open transaction has locked; None: it has not."""
    fence, entry = held_in(connection).get((alias, key), (None, None))
    return fence if entry in entries(connection) else None


def entries(connection: Any) -> list[tuple[Any, str | None]]:
    """Return the open blocks, each with its savepoint: `@atomic` enters the same one in each call.

    The outermost has none, nor has one with savepoint=False.
    """
    return [*zip(connection.atomic_blocks, [None, *connection.savepoint_ids], strict=False)]


class OpenSavepoints:
    """The savepoints that are open now: Django asks it `sid in ...` when it rolls back to one.

    Those of `transaction.savepoint()` too, which are not in `connection.savepoint_ids`: Django
    numbers both, and what was made later than a savepoint is undone with it.
    """

    __slots__ = ("last",)

    def __init__(self, connection: Any) -> None:
        self.last: int = connection.savepoint_state

    def __contains__(self, sid: str) -> bool:
        return int(sid.rpartition("x")[2]) <= self.last


def check_before_lock(*, release_now: bool) -> None:
    """Refuse, or warn of, an open transaction in which the lock would protect nothing."""
    # Those that are in use, and those that will be in manual management once they are.
    manual = (alias for alias, s in connections.settings.items() if not s.get("AUTOCOMMIT", True))
    for connection in {*_used(), *(connections[alias] for alias in manual)}:
        if not release_now and is_manual(connection):
            raise LockError(
                f"The connection {connection.alias!r} is in manual transaction management "
                "(autocommit is off), where the end of the transaction cannot be seen. Use "
                'atomic(), or Lock(..., release="now") and release it after your commit.'
            )
        if is_open(connection) and keeps_snapshot(connection):
            frame = frame_of_caller()
            # Not the name: Python keeps each text in the registry for ever.
            warnings.warn_explicit(
                f"A lock is taken inside a transaction on {connection.alias!r} at isolation level "
                "REPEATABLE READ or above: what it reads may be older than the lock. Take the lock "
                "before the transaction: Lock(..., atomic=True), locked_view() or "
                "locked(..., atomic=True).",
                RuntimeWarning,
                frame.f_code.co_filename,
                frame.f_lineno,
                module=frame.f_globals.get("__name__"),
                registry=frame.f_globals.setdefault("__warningregistry__", {}),
            )


def call_at_end(
    connection: Any,
    *,
    committed: Callable[[], object],
    dropped: Callable[[], object],
    before_commit: Callable[[], None] | None = None,
    savepoints: bool = False,
) -> None:
    """Call one of the first two when the outermost block of the connection has ended.

    `dropped`, possibly in a finalizer, if it was rolled back (with `savepoints`: also to one
    that is open now), its connection was closed, or `committed` raised. If `before_commit` raises,
    it is rolled back.
    """
    # Of no savepoint, an inner block that rolls back must not end the wait.
    undone_with: Any = OpenSavepoints(connection) if savepoints else set()
    add_hook(connection, _End(committed, dropped, before_commit), undone_with)
    own = connection.__dict__.get("commit")
    if before_commit is not None and getattr(own, "func", None) is not _commit:
        connection.commit = partial(_commit, ref(connection), own)


def add_hook(connection: Any, hook: Any, undone_with: Any) -> None:
    """Let the connection alone refer to `hook`: it is called on commit, and dropped by a rollback.

    Also by one to a savepoint that is in `undone_with`.
    """
    # First, not by on_commit(): a hook that raises drops all that come after it, into a traceback
    # that may be kept for long. In a TestCase last: captureOnCommitCallbacks() returns the hooks
    # added after those that it found.
    hooks = connection.run_on_commit
    hooks.insert(len(hooks) if in_testcase(connection) else 0, (undone_with, hook, True))


def _commit(reference: Any, own: Callable[[], None] | None) -> None:
    """Commit, unless a lock was lost that was to be kept until then.

    Of a connection in place of its method, or of what another app put there (`own`): Django has
    no hook before a commit.
    """
    connection = reference()
    _before_commit(connection)
    if own is not None:
        own()
    else:
        type(connection).commit(connection)


def _before_commit(connection: Any) -> None:
    # A frame of its own: the traceback of a commit that fails must not keep a hook, nor a lock.
    try:
        for _, hook, _ in list(connection.run_on_commit):
            if isinstance(hook, _End) and hook.before_commit is not None:
                hook.before_commit()
    except BaseException:
        connection.rollback()  # Atomic does that only after an error of the database
        raise


@dataclass(eq=False, repr=False)
class _End:
    """The callback that only the connection's list refers to."""

    committed: Callable[[], object]
    dropped: Callable[[], object] | None
    before_commit: Callable[[], None] | None

    def __post_init__(self) -> None:
        self.__qualname__ = type(self).__qualname__  # for Django before 6.1, if a call raises

    def __call__(self) -> None:
        self.committed()
        self.dropped = None  # not if it was interrupted

    def __del__(self) -> None:
        dropped, self.dropped = self.dropped, None
        if dropped is not None:
            dropped()


def is_manual(connection: Any) -> bool:
    """Whether autocommit is off on the connection, other than for an `atomic()` block."""
    if connection.connection is None:  # it begins as its settings say
        return not connection.settings_dict["AUTOCOMMIT"]
    if connection.autocommit:
        return False
    # Not an atomic() block that began with autocommit on, and commits at its end.
    return not (connection.in_atomic_block and connection.commit_on_exit)


def keeps_snapshot(connection: Any) -> bool:
    """Whether reads of the open transaction keep to the snapshot of its first query."""
    if connection.vendor == "mysql":
        # None: the server's default, which is REPEATABLE READ.
        level = connection.isolation_level
        return level is None or level.lower() in ("repeatable read", "serializable")
    if connection.vendor == "postgresql":
        # An enum, whose numbers differ between psycopg 2 and 3. Wrappers that pool do not note it.
        options = connection.settings_dict["OPTIONS"]
        level = getattr(connection, "isolation_level", options.get("isolation_level"))
        level = getattr(level, "name", "")
        return level in ("REPEATABLE_READ", "SERIALIZABLE")
    return False
