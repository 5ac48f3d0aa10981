"""Versions in memory, restored when what changed them fails, or its transaction is rolled back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.exceptions import ValidationError
from django.db import connections

from ...primitives.transactions import OpenSavepoints, add_hook, in_testcase, own_blocks

MISSING: Any = object()  # in place of a value: the field is deferred


class Undo:
    """What one transaction, or the part after a savepoint, changed of the versions in memory.

    Like the end of `call_at_end`, it lives only in the connection's list of hooks.
    """

    __slots__ = ("__weakref__", "changes", "earlier", "limit", "moved", "undone_with", "using")

    # Of all threads, so that a read outside such transactions costs nothing.
    living: set[int] = set()

    def __init__(self, connection: Any, earlier: Undo | None) -> None:
        self.using = connection.alias
        self.earlier = earlier  # kept, so that it restores its versions last
        self.undone_with = OpenSavepoints(connection)
        # For each row (model and key; without a key, any row of the model) the Undos of the
        # transaction that changed it, the latest last.
        self.moved: dict[Any, list[weakref.ref[Undo]]] = {} if earlier is None else earlier.moved
        # Objects, their previous versions, and the databases that they were read from.
        self.changes: list[tuple[weakref.ref[Any], Any, Any]] = []
        self.limit = 1000
        self.living.add(id(self))

    def note(self, obj: Any, before: Any) -> None:
        if len(self.changes) >= self.limit:
            self.changes = [change for change in self.changes if change[0]() is not None]
            self.limit = 2 * len(self.changes) + 1000
        self.changes.append((weakref.ref(obj), before, obj._state.db))

    def note_move(self, model: Any, key: str | None) -> None:
        movers = self.moved.setdefault((model, key), [])
        if not movers or movers[-1]() is not self:
            movers.append(weakref.ref(self))

    def __call__(self) -> None:
        self.changes.clear()

    def __del__(self) -> None:
        self.living.discard(id(self))
        for reference, before, read_from in reversed(self.changes):
            obj = reference()
            if obj is not None and obj._state.db in (self.using, read_from):
                _restore(obj, before)


def put(obj: Any, name: str, value: Any) -> None:
    """Set the field in memory; if the value is MISSING, defer the field."""
    if value is MISSING:
        obj.__dict__.pop(name, None)
    else:
        obj.__dict__[name] = value


@contextmanager
def restored_on_error(name: str, *objs: Any) -> Iterator[None]:
    """Let the field be what it was before if the block raises."""
    before = [(obj, obj.__dict__.get(name, MISSING)) for obj in objs]
    try:
        yield
    except BaseException:
        for obj, value in before:
            put(obj, name, value)
        raise


def _restore(obj: Any, before: Any) -> None:
    name = obj._version_field.attname
    now = obj.__dict__.get(name, MISSING)
    # A higher version comes from the transaction, which had locked the row; None from a delete().
    if now is not MISSING and (now is None or before in (None, MISSING) or now > before):
        put(obj, name, before)


def watch(obj: Any, before: Any, using: str) -> None:
    """Restore the version `before` of `obj` if the open transaction is rolled back.

    Otherwise an object could be ahead of its row, and overwrite another writer's change with the
    same number. The blocks of a TestCase do not count.
    """
    undo = _undo(using)
    if undo is not None:
        undo.note(obj, before)
        undo.note_move(*_key_of(obj))


def watch_rows(model: Any, using: str) -> None:
    """Record that the open transaction changed versions of unknown rows of the model."""
    undo = _undo(using)
    if undo is not None:
        undo.note_move(model._version_field.model, None)


def watch_read(obj: Any, using: str) -> None:
    """Forget the version that was read if the open transaction wrote it and is rolled back."""
    if not Undo.living or obj._version_field.attname not in obj.__dict__:
        return
    latest = _latest(connections[using])
    if latest is None:
        return
    model, key = _key_of(obj)
    for row in (model, key), (model, None):
        movers = latest.moved.get(row, [])
        while movers:
            if (undo := movers[-1]()) is not None:
                undo.note(obj, MISSING)  # what the row has after a rollback is not known
                break
            movers.pop()  # rolled back since


def _key_of(obj: Any) -> tuple[Any, str]:
    owner = obj._version_field.model
    return owner, str(key_in(owner, obj))


def key_in(model: Any, obj: Any) -> Any:
    """Return the key of the object's row as the database returns it: 77 where it is "77"."""
    meta = model._meta
    try:
        if not meta.is_composite_pk:
            return meta.pk.to_python(obj._get_pk_val(meta))
        return tuple(field.to_python(getattr(obj, field.attname)) for field in meta.pk_fields)
    except ValidationError:  # an expression
        return obj._get_pk_val(meta)


def _latest(connection: Any) -> Undo | None:
    hooks = connection.run_on_commit
    if in_testcase(connection):
        hooks = reversed(hooks)
    return next((hook for _, hook, _ in hooks if isinstance(hook, Undo)), None)


def _undo(using: str) -> Undo | None:
    """Return the object that observes a rollback; None if no transaction is open."""
    connection: Any = connections[using]
    if not own_blocks(connection):
        return None
    # One for all saves between two savepoints: Django pops callbacks from the front of a list,
    # which takes quadratic time.
    latest = _latest(connection)
    if latest is not None and latest.undone_with.last == connection.savepoint_state:
        return latest
    undo = Undo(connection, latest)
    add_hook(connection, undo, undo.undone_with)
    return undo
