"""Functions that users pass: what to call them, and whether their work is done."""

from __future__ import annotations

from contextlib import AsyncContextDecorator, ContextDecorator
from functools import partial
from types import AsyncGeneratorType, GeneratorType
from typing import Any

from asgiref.sync import iscoroutinefunction

# The last two: of functions under @contextmanager and @asynccontextmanager.
_UNDONE = (GeneratorType, AsyncGeneratorType, ContextDecorator, AsyncContextDecorator)

UNLOCKED = (
    "would run without the lock: do the work before it returns, or use the async or generator "
    "function itself"
)


def path_of(function: Any) -> str:
    """Return the dotted path of a function or class."""
    beneath = function
    while isinstance(beneath, partial):
        beneath = beneath.func
    where = getattr(beneath, "__module__", "")
    return f"{where}.{getattr(beneath, '__qualname__', type(beneath).__qualname__)}"


def is_async(function: Any) -> bool:
    """Whether its result is awaited: a coroutine function, or an object whose `__call__` is one."""
    return iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)


def refuse_undone(result: Any, function: Any, why: str = UNLOCKED) -> Any:
    """Return `result`; raise TypeError if its work is still to be done."""
    if not (isinstance(result, _UNDONE) or hasattr(type(result), "__await__")):
        return result
    for end in ("close", "cancel"):  # of a coroutine or generator, a task or future
        if hasattr(result, end):
            getattr(result, end)()
    raise TypeError(f"{path_of(function)} returned a {type(result).__name__}, which {why}")
