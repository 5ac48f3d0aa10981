"""Locks and data integrity for Django code that runs in more than one process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .commands import locked_command
    from .decorators import assert_locked, locked
    from .errors import (
        BackendError,
        LockBusy,
        LockError,
        LockLost,
        LockTimeout,
        NotHeld,
        RetriesExhausted,
        StaleFenceError,
        StaleObjectError,
    )
    from .groups import all_of
    from .holds import Hold
    from .latches import Latch
    from .locks import Lock
    from .names import bucket
    from .optimistic import (
        TimestampVersionField,
        VersionedManager,
        VersionedModel,
        VersionedQuerySet,
        VersionField,
    )
    from .pessimistic import for_update, next_unlocked, retry_on_deadlock
    from .placeholders import named
    from .retrying import retry_on_conflict
    from .views import locked_view

__version__ = "0.1.0"

# Loaded at first use: models cannot be imported while Django loads its apps.
_HOMES = {
    "BackendError": "errors",
    "Hold": "holds",
    "Latch": "latches",
    "Lock": "locks",
    "LockBusy": "errors",
    "LockError": "errors",
    "LockLost": "errors",
    "LockTimeout": "errors",
    "NotHeld": "errors",
    "RetriesExhausted": "errors",
    "StaleFenceError": "errors",
    "StaleObjectError": "errors",
    "TimestampVersionField": "optimistic",
    "VersionField": "optimistic",
    "VersionedManager": "optimistic",
    "VersionedModel": "optimistic",
    "VersionedQuerySet": "optimistic",
    "all_of": "groups",
    "assert_locked": "decorators",
    "bucket": "names",
    "for_update": "pessimistic",
    "locked": "decorators",
    "locked_command": "commands",
    "locked_view": "views",
    "named": "placeholders",
    "next_unlocked": "pessimistic",
    "retry_on_deadlock": "pessimistic",
    "retry_on_conflict": "retrying",
}

__all__ = [
    "BackendError",
    "Hold",
    "Latch",
    "Lock",
    "LockBusy",
    "LockError",
    "LockLost",
    "LockTimeout",
    "NotHeld",
    "RetriesExhausted",
    "StaleFenceError",
    "StaleObjectError",
    "TimestampVersionField",
    "VersionField",
    "VersionedManager",
    "VersionedModel",
    "VersionedQuerySet",
    "all_of",
    "assert_locked",
    "bucket",
    "for_update",
    "locked",
    "locked_command",
    "locked_view",
    "named",
    "next_unlocked",
    "retry_on_deadlock",
    "retry_on_conflict",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
