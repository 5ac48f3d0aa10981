"""`locked` and `assert_locked`: functions that run only under a lock."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AsyncExitStack
from functools import wraps
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, overload

from ..core.acquiring import leases_of_runner
from ..core.in_transaction import held_in_transaction, transaction_under_lock
from ..core.lock import Lock
from ..core.registry import aliases_of
from ..errors import LockBusy, LockLost, NotHeld
from ..primitives.calls import is_async, path_of, refuse_undone
from ..primitives.names import shown
from .naming import name_of_calls, signature_of
from .options import F, answer_busy, check_is_function, check_lock_options, sorted_out

Many = TypeVar("Many", bound=Callable[..., Iterator[Any] | AsyncIterator[Any]])
P = ParamSpec("P")
R = TypeVar("R")
# The lock of one call, from its arguments.
LockOf = Callable[[tuple[Any, ...], dict[str, Any]], Any]
OnBusy = Literal["raise", "skip"] | Callable[..., Any]


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
    options = bool(lock_options or in_transaction or on_busy != "raise")
    named, function = sorted_out(template, name, options)
    if on_busy not in ("raise", "skip") and not callable(on_busy):
        raise ValueError(f"on_busy must be 'raise', 'skip' or a function, not {on_busy!r}")
    check_lock_options(lock_options, in_transaction=in_transaction)

    def decorate(function: F) -> F:
        check_is_function(function)
        kind = _kind_of(function)
        if (in_transaction or lock_options.get("atomic")) and kind is not _call:
            option = "in_transaction" if in_transaction else "atomic"
            raise TypeError(
                f"locked({option}=) on {path_of(function)}: only a plain function can run inside a "
                "transaction"
            )
        if is_async(on_busy) and kind is not _coroutine:
            raise TypeError(f"on_busy={path_of(on_busy)} is awaited by coroutine functions only")
        signature = signature_of(function)
        name_of = name_of_calls(named, path_of(function), signature)
        kind_of_lock = transaction_under_lock if in_transaction else Lock

        def lock(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return kind_of_lock(name_of(args, kwargs), **lock_options)

        wrapper: F = kind(function, lock, on_busy)
        if signature is not None:
            # Celery checks what is sent to a task against the outermost function.
            wrapper.__signature__ = signature  # type: ignore[attr-defined]
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
        entered = [lease for lease in leases if lease is not None and lease.entered_holds()]
        if not entered:
            raise NotHeld(f"this code must run under the lock {shown(name)!r}, which is not held")
        if any(lease.doubtful for lease in entered):
            raise LockLost(f"the lock {shown(name)!r} may belong to another owner by now")


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
            return answer_busy(on_busy, busy, args, kwargs)

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
            answer = answer_busy(on_busy, busy, args, kwargs)
            return await answer if inspect.isawaitable(answer) else answer

    return wrapper


def _generator(function: Any, lock: LockOf, on_busy: OnBusy) -> Any:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        entered = False
        try:  # no ExitStack: an interrupt inside of it would leave the lock taken
            with lock(args, kwargs):
                entered = True
                return (yield from function(*args, **kwargs))
        except LockBusy as error:
            if entered:
                raise
            busy = error
        return (yield from answer_busy(on_busy, busy, args, kwargs) or ())

    return wrapper


def _async_generator(function: Any, lock: LockOf, on_busy: OnBusy) -> Any:
    @wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(lock(args, kwargs))
            except LockBusy as busy:
                items = answer_busy(on_busy, busy, args, kwargs)
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
