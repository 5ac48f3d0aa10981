"""`unique_task`: tasks of Celery and Django that are queued once for each key."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial, wraps
from types import FunctionType, NoneType
from typing import Any, Literal, TypeVar, overload

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.utils import timezone
from django.utils.module_loading import import_string

from ..core.groups import current_hold
from ..core.handover import unpacked
from ..core.hold import Hold
from ..core.limits import checked_ttl
from ..core.lock import Lock
from ..core.registry import aliases_of, registry
from ..errors import BackendError, LockBusy, LockError, LockLost, NotHeld
from ..primitives import transactions
from ..primitives.calls import is_async
from ..primitives.logs import fields as log_fields
from ..primitives.logs import logger
from ..primitives.names import shown
from .naming import Named, NameOf, name_of_calls
from .options import answer_busy, check_lock_options, sorted_out

TaskT = TypeVar("TaskT")
Call = tuple[Any, Any]  # the arguments of a task, and those by keyword
Publish = Callable[[str], Any]  # sends the message, with the lock as text

# The header of Celery's message, or the argument of Django's task, that carries the lock.
CARRIER = "distlock_unique"


@overload
def unique_task(
    template: str | None = None,
    /,
    *,
    name: Callable[..., str] | None = None,
    until: Literal["start", "success"] = "start",
    on_duplicate: Literal["drop", "raise"] | Callable[..., Any] = "drop",
    ttl: float = 3600.0,
    using: str | tuple[str, ...] = "default",
) -> Callable[[TaskT], TaskT]: ...
@overload
def unique_task(task: TaskT, /) -> TaskT: ...
def unique_task(
    template: Any = None,
    /,
    *,
    name: Callable[..., str] | None = None,
    until: Literal["start", "success"] = "start",
    on_duplicate: Literal["drop", "raise"] | Callable[..., Any] = "drop",
    ttl: float = 3600.0,
    using: str | tuple[str, ...] = "default",
) -> Any:
    """Queue a task once for each key: `@unique_task("sync:{pk}")`, above the queue's decorator.

    Enqueuing takes the lock, and the message carries it. The worker releases it before it calls
    the function (`until="start"`), or when that has ended, even by an error ("success"): a retry
    keeps it. `on_duplicate` is "drop" (enqueuing returns None), "raise" (LockBusy), or a plain
    function that receives the LockBusy and the task's arguments and returns the result. `ttl`:
    seconds for which the lock waits for a worker, from when the task is due; then it is renewed,
    with the TTL of its alias. `name=` is a function of the arguments that returns the name; without
    it and the template, the name is the task's.

    Enqueuing raises LockError inside `atomic()`, and BackendError if the backend is down.
    """
    if until not in ("start", "success"):
        raise ValueError(f"until must be 'start' or 'success', not {until!r}")
    # A coroutine function is awaited by nobody who enqueues.
    if is_async(on_duplicate) or not (callable(on_duplicate) or on_duplicate in ("drop", "raise")):
        raise ValueError(f"on_duplicate: 'drop', 'raise' or a plain function, not {on_duplicate!r}")
    check_lock_options({"using": using})
    # Of what Celery makes later, nothing but the type may be looked at.
    bare = not issubclass(type(template), (str, FunctionType, NoneType))
    named, function = sorted_out(None if bare else template, name, False)
    unique = Unique(named, until == "start", on_duplicate, checked_ttl(ttl), using)

    def decorate(task: Any) -> Any:
        if type(task).__module__ == "celery.local":
            _when_made(task, partial(_in_celery, unique))
        elif hasattr(task, "apply_async"):
            _in_celery(unique, task)
        elif hasattr(task, "takes_context"):  # not a function that RQ gave an enqueue()
            return _in_django(unique, task)
        else:
            raise TypeError(f"unique_task goes above a task's decorator, or takes name=: {task!r}")
        return task

    return decorate(template) if bare or function else decorate


@dataclass(frozen=True, slots=True)
class Unique:
    """The arguments of `unique_task`: what it does when a task is enqueued, and when it runs."""

    name: Named
    until_start: bool
    on_duplicate: str | Callable[..., Any]
    ttl: float
    using: str | tuple[str, ...]

    def enqueue(
        self, publish: Publish, name: str, call: Call, delay: float, retry: str | None = None
    ) -> Any:
        """Call `publish` with the lock as text, unless the task is a duplicate.

        `delay`: seconds until it is due. `retry`: what the task that runs here carried, if it is
        its retry.
        """
        if retry is None and transactions.open_blocks():
            # A duplicate is dropped, but the task queued before it may start before this commit.
            raise LockError(
                f"the task {shown(name)!r} is unique: enqueue it after the commit, by "
                "transaction.on_commit()"
            )
        try:
            text = self._text(name, max(delay, 0.0) + self.ttl, retry is not None)
        except LockBusy as busy:
            return answer_busy(self.on_duplicate, busy, *call)
        except BackendError:
            if retry is None:
                raise
            text = retry  # an error would lose the retry, which takes the lock when it starts
        try:
            return publish(text)
        except BaseException:
            if text:
                discard(text)
            raise

    def run(self, function: Callable[..., Any], call: Call, text: str | None) -> Any:
        """Call the function of a task that carried `text`, unless it is late and a duplicate."""
        if not text:  # not enqueued here: called, or sent by its name
            return function(*call[0], **call[1])
        try:
            try:
                hold = _resumed(text)
            except LockLost as late:
                hold = self._late(text, late).acquire(wait=0)
        except LockBusy as busy:
            return answer_busy(self.on_duplicate, busy, *call)
        with hold:
            if self.until_start:
                hold.leave(None)
            return function(*call[0], **call[1])

    async def arun(self, function: Callable[..., Any], call: Call, text: str | None) -> Any:
        """Like `run`, for a coroutine function."""
        if not text:
            return await function(*call[0], **call[1])
        try:
            try:
                hold = await Lock.aresume(text)
            except LockLost as late:
                hold = await self._late(text, late).aacquire(wait=0)
            except BackendError as error:
                hold = Lock._not_resumed(text, error)
        except LockBusy as busy:
            return answer_busy(self.on_duplicate, busy, *call)
        async with hold:
            if self.until_start:
                await hold.aleave(None)
            return await function(*call[0], **call[1])

    def _text(self, name: str, seconds: float, retry: bool) -> str:
        """Take the lock for `seconds`, or pass on that of the task that runs here."""
        if retry:
            with suppress(NotHeld, LockLost):
                hold = current_hold(name, using=self.using)
                try:
                    return hold.dump(seconds)
                except BackendError:
                    return hold._dumped()  # for as long as it was renewed
        with self._lock(name).acquire(wait=0) as hold:
            return hold.dump(seconds)

    def _late(self, text: str, late: LockLost) -> Lock:
        alias, name = _carried_lock(text)
        extra = log_fields("started_late", alias, name=shown(name))
        logger.info("a unique task started late: %s", late, extra=extra)
        return self._lock(name)

    def _lock(self, name: str) -> Lock:
        ttl = min(self.ttl, *(registry[alias].ttl for alias in aliases_of(self.using)))
        return Lock(name, ttl=ttl, using=self.using, reentrant=False, release="now")


def _carried_lock(text: str) -> tuple[str, str]:
    """Return the alias (the first of several) and the name of the lock that a task carries."""
    alias, claim, *_ = unpacked(text)[0]
    return alias, claim["name"]


def _resumed(text: str) -> Hold:
    """Take over the lock that a task carries; if its backend is down, do as ON_DOWN says."""
    try:
        return Lock.resume(text)
    except BackendError as error:
        return Lock._not_resumed(text, error)


def discard(text: str, *, ending: bool = False) -> None:
    """Release the lock of a task that will not run; if the backend is down, when it is back.

    `ending`: the task may still run until it is killed, so leave its lock for the TTL instead.
    """
    with suppress(LockError):
        hold = _resumed(text)
        hold._dumped() if ending else hold.leave(None)


# Celery


def _when_made(proxy: Any, attach: Callable[[Any], None]) -> None:
    """Call `attach` with the task behind `proxy`, once Celery has made it, in each of its apps.

    Asking the proxy for it would finalize the app now, before the other modules are imported.
    """
    from celery import _state

    if hasattr(type(proxy), "__then__"):  # of app.task
        proxy.__then__(lambda: attach(proxy._get_current_object()))
        return

    # shared_task: each app makes its own task when it is finalized, perhaps already.
    def made(sender: Any, **_: Any) -> None:
        attach(sender.tasks[proxy.name])

    _state.connect_on_app_finalize(lambda app: app.on_after_finalize.connect(made, weak=False))
    for app in list(_state._get_active_apps()):
        if app.finalized:
            made(app)


def _in_celery(unique: Unique, task: Any) -> None:
    from celery.signals import task_revoked
    from celery.utils.time import maybe_iso8601, maybe_make_aware

    apply_async, function = task.apply_async, task.run
    if hasattr(apply_async, CARRIER):  # its module was imported again
        return
    # Not that of `function`: autoretry_for= hides which arguments a bound task gets.
    written = getattr(task, "__wrapped__", function)
    naming = cache(lambda: name_of_calls(unique.name, task.name, inspect.signature(written)))

    @wraps(apply_async)
    def enqueue(
        args: Any = None, kwargs: Any = None, task_id: Any = None, *more: Any, **options: Any
    ) -> Any:
        def publish(text: str) -> Any:
            headers = {**(options.pop("headers", None) or {}), CARRIER: text}
            return apply_async(args, kwargs, task_id, *more, headers=headers, **options)

        delay = options.get("countdown") or 0.0
        if not delay and (eta := maybe_iso8601(options.get("eta"))):
            delay = (maybe_make_aware(eta, task.app.timezone) - task.app.now()).total_seconds()
        call = args or (), kwargs or {}
        of_itself = task_id is not None and task_id == task.request.id
        retry = carried(task.request) or "" if of_itself else None
        if retry:
            name, retry = _retried(naming(), task.request, call, retry)
        else:
            name = naming()(*call)
        return unique.enqueue(publish, name, call, delay, retry)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return unique.run(function, (args, kwargs), carried(task.request))

    def carried(request: Any) -> Any:
        return request.get(CARRIER) or (request.headers or {}).get(CARRIER)

    def revoked(request: Any, terminated: bool, **_: Any) -> None:
        if text := carried(request):
            discard(text, ending=terminated and not unique.until_start)

    setattr(enqueue, CARRIER, unique)
    task.apply_async, task.run = enqueue, run
    task_revoked.connect(revoked, sender=task, weak=False)


def _retried(naming: NameOf, request: Any, call: Call, carried: str) -> tuple[str, str | None]:
    """Return the name of a retry's lock, and `carried`; None if it has another key by now.

    The arguments of a retry are those of its message: a tuple is a list by now, and its name
    may be another one, or none.
    """
    name = _carried_lock(carried)[1]
    try:
        renamed = naming(*call)
    except Exception:
        return name, carried
    with suppress(Exception):
        if renamed == naming(request.args or (), request.kwargs or {}):
            return name, carried
    return renamed, carried if renamed == name else None


# Django


class _UniqueTask:
    """Makes the class of a Django task enqueue through `unique_task`."""

    __slots__ = ()

    def enqueue(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.func.enqueue(self, super().enqueue, args, kwargs)  # type: ignore[misc]

    async def aenqueue(self, *args: Any, **kwargs: Any) -> Any:
        return await sync_to_async(self.enqueue)(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _unpickled, super().__reduce__()[1]


def _unpickled(state: dict[str, Any]) -> Any:
    return replace(import_string(state.pop("func")), **state)


def _in_django(unique: Unique, task: Any) -> Any:
    function, first = task.func, int(task.takes_context)
    arguments = list(inspect.signature(function).parameters.values())[first:]
    naming = name_of_calls(unique.name, task.module_path, inspect.Signature(arguments))

    def enqueue(task: Any, publish: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        delay = (task.run_after - timezone.now()).total_seconds() if task.run_after else 0.0

        def publish_with(text: str) -> Any:
            return publish(*args, **kwargs, **{CARRIER: text})

        return unique.enqueue(publish_with, naming(args, kwargs), (args, kwargs), delay)

    def parts(args: Any, kwargs: Any) -> tuple[Callable[..., Any], Call, str | None]:
        text = kwargs.pop(CARRIER, None)
        return partial(function, *args[:first]), (args[first:], kwargs), text

    @wraps(function)
    async def arun(*args: Any, **kwargs: Any) -> Any:
        return await unique.arun(*parts(args, kwargs))

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return unique.run(*parts(args, kwargs))

    made: Any = arun if iscoroutinefunction(function) else run
    made.enqueue = enqueue
    kind = type(type(task).__name__, (_UniqueTask, type(task)), {"__slots__": ()})
    return kind(**{f.name: getattr(task, f.name) for f in fields(task)} | {"func": made})
