"""`locked_view`: one request at a time; others get 423 Locked."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, overload

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.db import transaction
from django.views.generic import View

from ..core.in_transaction import begun_under_lock, database_of
from ..core.lock import Lock
from ..errors import BackendError, LockBusy
from ..primitives import identity
from ..primitives.calls import path_of, refuse_undone
from ..primitives.names import Made
from .atomic_requests import databases_in, in_transactions, mark, refuse_open
from .busy import LOCKED, answer, log_unavailable
from .drf import as_the_view_sees_it
from .naming import (
    Named,
    NameTemplate,
    arguments,
    is_known,
    parameters_of,
    quoted,
    signature_of,
    text_of,
    visitor,
)
from .options import F, check_is_function, check_lock_options, sorted_out
from .streams import kept_while_streaming

# Those of HTTP. Not Django's http_method_names: a project may add to that list.
METHODS = frozenset("GET HEAD OPTIONS TRACE POST PUT PATCH DELETE".split())


@overload
def locked_view(view: F, /) -> F: ...
@overload
def locked_view(
    template: str | None = None,
    /,
    *,
    name: Callable[..., str] | None = None,
    methods: Collection[str] = ...,
    wait: float | None = 0,
    status: int = LOCKED,
    busy_response: Callable[..., Any] | None = None,
    in_transaction: bool = False,
    **lock_options: Any,
) -> Callable[[F], F]: ...
def locked_view(
    template: Any = None,
    /,
    *,
    name: Callable[..., str] | None = None,
    methods: Collection[str] = ("POST", "PUT", "PATCH", "DELETE"),
    wait: float | None = 0,
    status: int = LOCKED,
    busy_response: Callable[..., Any] | None = None,
    in_transaction: bool = False,
    **lock_options: Any,
) -> Any:
    """Let one request at a time into a view, function or class, sync or async.

    The fields of the template are the request and what the URL captured: `"pay:{order_id}"`,
    `"cart:{request.user.pk}"`. `name=` is a function of the same arguments. Without either
    the name is the view, what the URL captured, and the visitor (user, session or
    address): that stops double clicks, not two users.
    Busy: `status` with Retry-After, as a page (`distlock_app/busy.html`), JSON or text, as the
    client prefers, or what `busy_response(request, busy)` returns; with the backend down 503. By
    default nobody waits: a worker that waits serves nobody else. Further options are those of Lock.
    The view leaves ATOMIC_REQUESTS, and runs in the same transactions inside the lock; they
    commit only if the lock is still held. A streaming response keeps it until it is closed.
    With `in_transaction=True` the lock is lock_in_transaction(), in the transaction of the view,
    and ends with it; its options are `wait` and `using`.
    """
    named, view = sorted_out(template, name, bool(lock_options or in_transaction))
    if not isinstance(status, int) or not 100 <= status <= 599:
        raise ValueError(f"status must be a status of HTTP, not {status!r}")
    lock_options["wait"] = wait
    check_lock_options(lock_options, in_transaction=in_transaction)
    atomic = databases_in(lock_options.pop("atomic", False))
    guard = _Guard(
        name=named,
        unlocked=_unlocked(methods),
        lock_options=lock_options,
        atomic=atomic,
        status=status,
        busy_response=busy_response,
        in_transaction=in_transaction,
    )

    def decorate(view: Any) -> Any:
        if (atomic or in_transaction) and _is_async(view):
            option = "in_transaction" if in_transaction else "atomic"
            raise TypeError(
                f"locked_view({option}=) on {path_of(view)}: an async view has no atomic()"
            )
        if isinstance(view, type) and issubclass(view, View):
            view.dispatch = _around_dispatch(guard, view.dispatch)  # type: ignore[method-assign]
            return view
        check_is_function(view)
        return _around_function(guard, view)

    return decorate if view is None else decorate(view)


class _Call:
    """One request on its way into the view."""

    def __init__(
        self, view: partial[Any], *, owner: Any, signature: Any, aliases: tuple[str, ...]
    ) -> None:
        # The arguments are what the URL captured.
        self.request, self.args, self.kwargs = _split(view.args, view.keywords)
        self.view = view
        self.owner = owner  # the instance of the class, or the function
        self.aliases = aliases  # databases on which the view runs in a transaction
        self.fields = partial(arguments, signature, view.args, view.keywords)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guard:
    """The arguments of `locked_view`; shared by all requests, and never changed."""

    name: Named
    unlocked: frozenset[str]
    lock_options: dict[str, Any]
    atomic: tuple[str, ...]
    status: int
    busy_response: Callable[..., Any] | None
    in_transaction: bool

    @property
    def databases(self) -> tuple[str, ...]:
        """Those on which the view runs in a transaction because of its options: none or one."""
        if self.in_transaction:
            return (database_of(self.lock_options.get("using", "default")),)
        return self.atomic

    def run(self, call: _Call) -> Any:
        """Answer the request of a sync view."""
        refuse_open(call.aliases)
        if call.request.method in self.unlocked:
            with in_transactions(call.aliases):
                return _response(call)
        name, who = self._about(call)
        if self.in_transaction:
            return self._run_in_transaction(call, name)
        with identity.activity(who):
            try:
                hold = Lock(name, **self.lock_options).acquire().enter()
            except (LockBusy, BackendError) as error:
                return self._refused(call, name, error)
            try:
                with in_transactions(call.aliases):
                    response = _response(call)
                    if not hold.released:  # handed over, or ended by the view
                        hold.check()
            except BaseException as error:
                hold.leave(error)
                raise
            if not kept_while_streaming(response, hold):
                hold.leave(None)
            return response

    def _run_in_transaction(self, call: _Call, name: str) -> Any:
        with in_transactions(call.aliases):
            try:
                begun_under_lock(name, **self.lock_options)
            except (LockBusy, BackendError) as error:
                return self._refused(call, name, error)
            return _response(call)

    async def arun(self, call: _Call) -> Any:
        """Answer the request of an async view."""
        if call.aliases:  # Django would say the same, if our mark had not exempted the view
            raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")
        if call.request.method in self.unlocked:
            return await call.view()
        # The user may have to be read from the database.
        name, who = await sync_to_async(self._about)(call)
        with identity.activity(who):
            try:
                hold = (await Lock(name, **self.lock_options).aacquire()).enter()
            except (LockBusy, BackendError) as error:
                # The response or page of a project may read the database.
                response = await sync_to_async(self._refused)(call, name, error)
                return await response if hasattr(response, "__await__") else response
            try:
                response = await call.view()
                if not hold.released:
                    hold.check()
            except BaseException as error:
                await hold.aleave(error)
                raise
            if not kept_while_streaming(response, hold):
                await hold.aleave(None)
            return response

    def _about(self, call: _Call) -> tuple[str, str]:
        """Return the name of the lock, and what to show of its holder."""
        request = as_the_view_sees_it(call.request, call.owner, *call.args, **call.kwargs)
        return self._name(call, request), f"{_user_of(request)} {request.path}"

    def _name(self, call: _Call, request: Any) -> str:
        if callable(self.name):
            return self.name(request, *call.args, **call.kwargs)
        if self.name is None:
            return _default_name(call, request)

        def absent(field: str) -> str | None:
            # An anonymous user has few attributes. The view may refuse the request, but only later.
            of_user = f"{field}.".startswith("request.user.")
            return visitor(request) if of_user and not is_known(request) else None

        return self.name.fill({**call.fields(), "request": request}, absent=absent)

    def _refused(self, call: _Call, name: str, error: LockBusy | BackendError) -> Any:
        if isinstance(error, BackendError):
            log_unavailable(name, self.lock_options.get("using", "default"), error)
        elif self.busy_response is not None:
            return self.busy_response(call.request, error)
        return answer(call.request, error, unlocked=self.unlocked, status=self.status)


def _user_of(request: Any) -> str:
    if not is_known(request):
        return "anonymous"
    # Not every user has get_username(): authenticators of REST framework create their own.
    return str(getattr(request.user, "get_username", request.user.__str__)())


def _response(call: _Call) -> Any:
    """Call the view inside its transactions; let them roll back if the response is an error."""
    response = refuse_undone(call.view(), call.view)
    if getattr(response, "exception", False):  # REST framework answered an error
        for alias in call.aliases:
            transaction.set_rollback(True, using=alias)
    return response


def _default_name(call: _Call, request: Any) -> str:
    match = getattr(call.request, "resolver_match", None)
    path, captured = path_of(call.owner), call.kwargs
    if match is not None:
        # A class is named by itself: its `dispatch` may be that of View.
        path = path_of(getattr(match.func, "view_class", match.func))
        captured = match.captured_kwargs or {}
    parts = [f"{key}={quoted(text_of(captured[key]), '%:')}" for key in sorted(captured)]
    # None is a group that captured nothing; the others keep their places.
    parts += ["" if value is None else quoted(text_of(value), "%:") for value in call.args]
    return Made(":".join([path, *parts, quoted(visitor(request), "%:")]), path)


def _around_function(guard: _Guard, view: Any) -> Any:
    # as_view() returns a function that poses as the `dispatch` it wraps, with other arguments.
    of_class = hasattr(view, "view_class") or hasattr(view, "cls")  # REST framework's name for it
    signature = None if of_class else signature_of(view)
    if isinstance(guard.name, NameTemplate):
        known = parameters_of(signature)
        known = None if known is None else {*known, "request"}
        guard.name.check(known, f"arguments of {path_of(view)}()")

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        aliases = exempt.aliases(guard.databases)
        made = partial(view, *args, **kwargs)
        return _Call(made, owner=view, signature=signature, aliases=aliases)

    if _is_async(view):

        @wraps(view)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await guard.arun(call(args, kwargs))
    else:

        @wraps(view)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return guard.run(call(args, kwargs))

    exempt = mark(wrapper, view)
    return wrapper


def _around_dispatch(guard: _Guard, inner: Any) -> Any:
    @wraps(inner)
    def dispatch(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        run = guard.arun if self.view_is_async else guard.run
        view = partial(inner, self, request, *args, **kwargs)
        aliases = exempt.aliases(guard.databases)
        return run(_Call(view, owner=self, signature=None, aliases=aliases))

    exempt = mark(dispatch, inner)
    return dispatch


def _split(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the request, which may come after `self` or by keyword, and the other arguments."""
    for at, value in enumerate(args[:2]):
        if hasattr(value, "META") and hasattr(value, "method"):
            return value, args[at + 1 :], kwargs
    if "request" in kwargs:
        others = dict(kwargs)
        return others.pop("request"), args, others
    raise TypeError("a view under locked_view must get the request as its first argument")


def _unlocked(methods: Collection[str]) -> frozenset[str]:
    """Return the methods of HTTP that are not among these: one that is made up is locked, too."""
    if isinstance(methods, str):
        raise TypeError(f"methods must be a list of names, not {methods!r}")
    names = {method.upper() for method in methods}
    if "GET" in names:
        names.add("HEAD")  # runs the GET of a class
    return METHODS - names


def _is_async(view: Any) -> bool:
    # method_decorator(..., name="dispatch") presents a bound method, in a partial.
    owner = getattr(getattr(view, "func", view), "__self__", None)
    return iscoroutinefunction(view) or bool(getattr(owner or view, "view_is_async", False))
