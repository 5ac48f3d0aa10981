"""`locked` and `assert_locked`: functions that run only under a lock."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, overload

from django.conf import settings
from django.core.exceptions import AppRegistryNotReady, ImproperlyConfigured

from ..core.acquiring import leases_of_runner
from ..core.in_transaction import held_in_transaction, transaction_under_lock
from ..core.lock import Lock
from ..core.registry import aliases_of, registry
from ..errors import BackendError, LockBusy, LockLost, NotHeld
from ..primitives.calls import is_async, path_of, refuse_undone
from ..primitives.names import Made, shown
from .naming import NameTemplate, arguments, parameters_of, signature_of

F = TypeVar("F", bound=Callable[..., Any])
Many = TypeVar("Many", bound=Callable[..., Iterator[Any] | AsyncIterator[Any]])
P = ParamSpec("P")
R = TypeVar("R")
# The lock of one call, from its arguments.
LockOf = Callable[[tuple[Any, ...], dict[str, Any]], Any]
OnBusy = Literal["raise", "skip"] | Callable[..., Any]

# Methods of the tasks of Django, Celery, RQ, Dramatiq and Huey.
_TASK_METHODS = ("enqueue", "apply_async", "delay", "send_with_options", "call_local")


class Skipping(Protocol):
    """A function with `on_busy="skip"`: a generator yields nothing, others return None."""

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Callable[P, Coroutine[Any, Any, R | None]]: ...
    @overload
    def __call__(self, function: Many, /) -> Many: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Callable[P, R | None]: ...


@overload
def locked(function: F, /) -> F: ...
@overload
def locked(
    template: str | None = None,
    /,
    *,
    name: Callable[..., str] | None = None,
    on_busy: Literal["skip"],
    in_transaction: bool = False,
    **lock_options: Any,
) -> Skipping: ...
@overload
def locked(
    template: str | None = None,
    /,
    *,
    name: Callable[..., str] | None = None,
    on_busy: Literal["raise"] | Callable[..., Any] = "raise",
    in_transaction: bool = False,
    **lock_options: Any,
) -> Callable[[F], F]: ...
def locked(
    template: Any = None,
    /,
    *,
    name: Callable[..., str] | None = None,
    on_busy: OnBusy = "raise",
    in_transaction: bool = False,
    **lock_options: Any,
) -> Any:
    """Run a function, coroutine or generator under a lock: `@locked("invoice:{invoice_id}")`.

    The fields are the call's arguments. Instead, `name=` (or a lambda in place of the template)
    is a function of the arguments that returns the name; without either, the name is the
    function's dotted path. A generator holds the lock until it ends or is closed. `on_busy` is
    "raise" (LockBusy), "skip" (the call returns None), or a function that receives the LockBusy
    and the call's arguments and returns the result. Other options are those of Lock. `atomic=`
    and `in_transaction=True` are for plain functions only; with the latter, the function runs in
    `atomic()` under lock_in_transaction(), with the options `wait` and `using`.
    """
    options = bool(lock_options or in_transaction)
    template, name, function = sorted_out(template, name, options, on_busy)
    if on_busy not in ("raise", "skip") and not callable(on_busy):
        raise ValueError(f"on_busy must be 'raise', 'skip' or a function, not {on_busy!r}")
    probe(lock_options, in_transaction=in_transaction)

    def decorate(function: F) -> F:
        refuse_what_is_no_function(function)
        kind = _kind_of(function)
        if (in_transaction or lock_options.get("atomic")) and kind is not _call:
            option = "in_transaction" if in_transaction else "atomic"
            raise TypeError(
                f"locked({option}=) on {path_of(function)}: only a plain function can run inside a "
                "transaction"
            )
        naming = Naming.of(function, template, name)
        kind_of_lock = transaction_under_lock if in_transaction else Lock

        def lock(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return kind_of_lock(naming(args, kwargs), **lock_options)

        wrapper: F = kind(function, lock, on_busy)
        if naming.signature is not None:
            # Celery checks what is sent to a task against the outermost function.
            wrapper.__signature__ = naming.signature  # type: ignore[attr-defined]
        return wrapper

    return decorate if function is None else decorate(function)


def assert_locked(
    name: str, *, using: str | tuple[str, ...] = "default", shared: bool = False
) -> None:
    """Raise NotHeld unless the current thread or task is inside a `with` of the lock.

    Raise LockLost if the lock was lost. The decorators count as a `with`, a bare acquire() does
    not; a lock of the open transaction, by lock_in_transaction(), counts too. With `shared=True`
    a shared hold is enough. A semaphore permit (`limit=`) does not exclude others and does not
    count. Sends no request.
    """
    for alias in aliases_of(using):
        if held_in_transaction(name, alias):
            continue
        leases = [leases_of_runner(alias, name, shared=mode)[0] for mode in {False, shared}]
        entered = [lease for lease in leases if lease is not None and lease.entered]
        if not entered:
            raise NotHeld(f"this code must run under the lock {shown(name)!r}, which is not held")
        if any(lease.doubtful for lease in entered):
            raise LockLost(f"the lock {shown(name)!r} may belong to another owner by now")


@dataclass(frozen=True, slots=True)
class Naming:
    """How calls of one function name their locks."""

    name: NameTemplate | Callable[..., str] | str
    signature: inspect.Signature | None

    @classmethod
    def of(
        cls, function: Callable[..., Any], template: str | None, name: Callable[..., str] | None
    ) -> Naming:
        """Check the template against the signature of `function`; None: its dotted path."""
        signature = signature_of(function)
        if name is not None:
            return cls(name, signature)
        if template is None:
            return cls(Made(path_of(function), path_of(function)), signature)
        parsed = NameTemplate(template)
        parsed.check(parameters_of(signature), f"arguments of {path_of(function)}()")
        return cls(parsed if parsed.fields else parsed.fill({}), signature)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the name of the lock of this call."""
        if isinstance(self.name, str):
            return self.name
        if isinstance(self.name, NameTemplate):
            return self.name.fill(arguments(self.signature, args, kwargs))
        return self.name(*args, **kwargs)


def sorted_out(
    first: Any, name: Callable[..., str] | None, options: bool, on_busy: Any = "raise"
) -> tuple[str | None, Callable[..., str] | None, Any]:
    """Return the template, the naming function and the decorated object from the arguments."""
    if first is None or isinstance(first, str):
        if first is not None and name is not None:
            raise TypeError("pass a template or name=, not both")
        return first, name, None
    if getattr(first, "__name__", "") == "<lambda>" and name is None:
        return None, first, None
    if name is not None or options or on_busy != "raise":
        # Ambiguous: it may be the naming function or the decorated one.
        raise TypeError(
            "use name= for the function that returns the name, and add options as "
            "locked(...)(function)"
        )
    return None, None, first


def probe(lock_options: dict[str, Any], *, in_transaction: bool = False) -> None:
    """Raise what Lock raises for `lock_options`, without connecting to anything.

    Do nothing without settings. Errors in the alias's settings are left to the system checks,
    which run only if the project's modules can be imported.
    """
    if in_transaction and (others := set(lock_options) - {"wait", "using"}):
        raise TypeError(f"in_transaction=True allows only wait= and using=, not {min(others)}=")
    using = lock_options.get("using", "default")
    if in_transaction and isinstance(using, tuple):
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


def cannot_take(name: str, using: str | tuple[str, ...], error: BackendError) -> str:
    """Return the sentence for a backend that is down, for logs and terminals."""
    return f"cannot take the lock {shown(name)!r} (alias {', '.join(aliases_of(using))!r}): {error}"


def refuse_what_is_no_function(function: Any) -> None:
    """Raise TypeError, with a hint if the decorators are in the wrong order."""
    if any(hasattr(function, method) for method in _TASK_METHODS):
        raise TypeError(
            f"{function!r} is a task: a queue would call it without the lock. Swap the "
            "decorators: the lock's goes below the task's, next to the function"
        )
    if isinstance(function, (classmethod, staticmethod)):
        raise TypeError(f"the lock's decorator goes below @{type(function).__name__}")
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"{function!r} is not a function")


def _kind_of(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(function):
        return _async_generator
    if is_async(function):
        return _coroutine
    return _generator if inspect.isgeneratorfunction(function) else _call


# One wrapper per kind of function. Each call creates its own lock, because all threads share the
# decorator. `on_busy` handles only this lock, not one that the function itself finds busy.


def _call(function: Any, lock: LockOf, on_busy: OnBusy) -> Any:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        entered = False
        try:
            with lock(args, kwargs):
                entered = True
                return refuse_undone(function(*args, **kwargs), function)
        except LockBusy as busy:
            if entered:
                raise
            return _answer(on_busy, busy, args, kwargs)

    return wrapper


def _coroutine(function: Any, lock: LockOf, on_busy: OnBusy) -> Any:
    @wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        entered = False
        try:
            async with lock(args, kwargs):
                entered = True
                return await function(*args, **kwargs)
        except LockBusy as busy:
            if entered:
                raise
            answer = _answer(on_busy, busy, args, kwargs)
            return await answer if inspect.isawaitable(answer) else answer

    return wrapper


def _generator(function: Any, lock: LockOf, on_busy: OnBusy) -> Any:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with ExitStack() as stack:
            try:
                stack.enter_context(lock(args, kwargs))
            except LockBusy as busy:
                return (yield from _answer(on_busy, busy, args, kwargs) or ())
            return (yield from function(*args, **kwargs))

    return wrapper


def _async_generator(function: Any, lock: LockOf, on_busy: OnBusy) -> Any:
    @wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(lock(args, kwargs))
            except LockBusy as busy:
                items = _answer(on_busy, busy, args, kwargs)
            else:
                items = function(*args, **kwargs)
                stack.push_async_callback(items.aclose)
            if not hasattr(items, "asend"):
                for item in items or ():
                    yield item
                return
            step, value = items.asend, None
            while True:
                try:
                    item = await step(value)
                except StopAsyncIteration:
                    return
                step = items.asend
                try:
                    value = yield item
                except GeneratorExit:
                    raise
                except BaseException as error:  # athrow(): the generator's to handle
                    step, value = items.athrow, error

    return wrapper


def _answer(on_busy: OnBusy, busy: LockBusy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if on_busy == "raise":
        raise busy
    return None if on_busy == "skip" else on_busy(busy, *args, **kwargs)
