"""The public names of distlock_app, each imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.groups import current_hold
    from .core.hold import Hold
    from .core.in_transaction import lock_in_transaction
    from .core.latch import Latch
    from .core.leader import Leader
    from .core.lock import Lock, all_of
    from .decorators.commands import locked_command
    from .decorators.functions import assert_locked, locked
    from .decorators.naming import named
    from .decorators.views import locked_view
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
    from .guards.retrying import retry_on_conflict
    from .optimistic import (
        TimestampVersionField,
        VersionedManager,
        VersionedModel,
        VersionedQuerySet,
        VersionField,
    )
    from .pessimistic import for_update, next_unlocked, retry_on_deadlock
    from .primitives.names import bucket

__version__ = "0.1.0"

# Loaded at first use: models cannot be imported while Django loads its apps.
_HOMES = {
    "BackendError": "errors",
    "Hold": "core.hold",
    "Latch": "core.latch",
    "Leader": "core.leader",
    "Lock": "core.lock",
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
    "all_of": "core.lock",
    "assert_locked": "decorators.functions",
    "bucket": "primitives.names",
    "current_hold": "core.groups",
    "for_update": "pessimistic",
    "lock_in_transaction": "core.in_transaction",
    "locked": "decorators.functions",
    "locked_command": "decorators.commands",
    "locked_view": "decorators.views",
    "named": "decorators.naming",
    "next_unlocked": "pessimistic",
    "retry_on_deadlock": "pessimistic",
    "retry_on_conflict": "guards.retrying",
}

__all__ = [
    "BackendError",
    "Hold",
    "Latch",
    "Leader",
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
    "current_hold",
    "for_update",
    "lock_in_transaction",
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
