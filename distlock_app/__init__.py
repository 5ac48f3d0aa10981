"""The public names of distlock_app, each imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.groups import current_hold as current_hold
    from .core.hold import Hold as Hold
    from .core.in_transaction import lock_in_transaction as lock_in_transaction
    from .core.latch import Latch as Latch
    from .core.leader import Leader as Leader
    from .core.lock import Lock as Lock
    from .core.lock import all_of as all_of
    from .decorators.commands import locked_command as locked_command
    from .decorators.functions import assert_locked as assert_locked
    from .decorators.functions import locked as locked
    from .decorators.naming import named as named
    from .decorators.tasks import unique_task as unique_task
    from .decorators.views import locked_view as locked_view
    from .errors import BackendError as BackendError
    from .errors import LockBusy as LockBusy
    from .errors import LockError as LockError
    from .errors import LockLost as LockLost
    from .errors import LockTimeout as LockTimeout
    from .errors import NotHeld as NotHeld
    from .errors import RetriesExhausted as RetriesExhausted
    from .errors import StaleFenceError as StaleFenceError
    from .errors import StaleObjectError as StaleObjectError
    from .guards.retrying import retry_on_conflict as retry_on_conflict
    from .optimistic import TimestampVersionField as TimestampVersionField
    from .optimistic import VersionedManager as VersionedManager
    from .optimistic import VersionedModel as VersionedModel
    from .optimistic import VersionedQuerySet as VersionedQuerySet
    from .optimistic import VersionField as VersionField
    from .pessimistic import for_update as for_update
    from .pessimistic import next_unlocked as next_unlocked
    from .pessimistic import retry_on_deadlock as retry_on_deadlock
    from .primitives.names import bucket as bucket

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
    "unique_task": "decorators.tasks",
}

__all__ = [*_HOMES]


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
