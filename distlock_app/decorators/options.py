"""The arguments that all decorators share: what they mean, and mistakes found at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, TypeVar

from asgiref.sync import AsyncToSync
from django.conf import settings
from django.core.exceptions import AppRegistryNotReady, ImproperlyConfigured

from ..core.lock import Lock
from ..core.registry import aliases_of, registry
from ..errors import BackendError, LockBusy
from ..primitives.names import shown
from .naming import Named, NameTemplate

F = TypeVar("F", bound=Callable[..., Any])

# Methods of the tasks of Django, Celery, RQ, Dramatiq, Huey and Procrastinate.
_TASK_METHODS = "enqueue apply_async delay send_with_options call_local defer_async".split()


def sorted_out(first: Any, name: Callable[..., str] | None, options: bool) -> tuple[Named, Any]:
    """Return what names the lock, and the decorated object.

    `first`, the positional argument of a decorator, is a template, a function that names the lock,
    or the decorated object; `options`: whether the decorator got others than `name`.
    """
    if name is not None and not callable(name):
        raise TypeError(f"name= must be a function that returns the name, not {name!r}")
    if first is None:
        return name, None
    if isinstance(first, str):
        if name is not None:
            raise TypeError("pass a template or name=, not both")
        return NameTemplate(first), None
    if name is None and getattr(first, "__name__", "") == "<lambda>":
        return first, None
    if name is not None or options:
        # Ambiguous: it may be the naming function or the decorated one.
        raise TypeError(
            "use name= for the function that returns the name, and add options as "
            "locked(...)(function)"
        )
    return None, first


def check_lock_options(lock_options: dict[str, Any], *, in_transaction: bool = False) -> None:
    """Raise what Lock raises for `lock_options`, without connecting to anything.

    Do nothing without settings. Errors in the alias's settings are left to the system checks,
    which run only if the project's modules can be imported.
    """
    using = lock_options.get("using", "default")
    if in_transaction:
        if others := set(lock_options) - {"wait", "using"}:
            raise TypeError(f"in_transaction=True allows only wait= and using=, not {min(others)}=")
        if isinstance(using, tuple):
            raise TypeError(f"in_transaction=True allows only one alias, not using={using!r}")
    if not settings.configured:
        return
    try:
        Lock("probe", **lock_options)
    except AppRegistryNotReady:
        pass  # decorated in a models.py: the first call reports it
    except ImproperlyConfigured:
        if not any(registry.misconfigured(alias) for alias in aliases_of(using)):
            raise


def check_is_function(function: Any) -> None:
    """Raise TypeError for anything else, with a hint if decorators are in the wrong order."""
    if any(hasattr(function, method) for method in _TASK_METHODS):
        raise TypeError(
            f"{function!r} is a task: a queue would call it without the lock. Swap the "
            "decorators: the lock's goes below the task's, next to the function"
        )
    if isinstance(function, (classmethod, staticmethod)):
        raise TypeError(f"the lock's decorator goes below @{type(function).__name__}")
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"{function!r} is not a function")
    if isinstance(function, AsyncToSync):  # which, unlike sync_to_async(), has no name otherwise
        update_wrapper(function, function.awaitable, updated=())


def answer_busy(on_busy: Any, busy: LockBusy, args: Any, kwargs: Any) -> Any:
    """Do as `on_busy` says instead of a call: "raise", or call it; anything else returns None."""
    if on_busy == "raise":
        raise busy
    return on_busy(busy, *args, **kwargs) if callable(on_busy) else None


def cannot_take(name: str, using: str | tuple[str, ...], error: BackendError) -> str:
    """Return the sentence for a backend that is down, for logs and terminals."""
    return f"cannot take the lock {shown(name)!r} (alias {', '.join(aliases_of(using))!r}): {error}"
