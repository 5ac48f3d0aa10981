"""Versions in HTTP: `ETag` and `If-Match`, 412 and 428."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, TypeVar

from asgiref.sync import iscoroutinefunction
from django.db import connections
from django.http import HttpResponse, JsonResponse
from django.utils.http import parse_etags
from django.utils.translation import gettext

from ...errors import StaleObjectError
from ...primitives.transactions import own_blocks

Answer = TypeVar("Answer")


class PreconditionFailed(StaleObjectError):
    """The client named a version other than the current one."""


class PreconditionRequired(Exception):
    """The client must name the version that it changes, with `If-Match`."""


def etag_of(obj: Any) -> str:
    """Return the version of an object as an entity tag, including quotes.

    It identifies a state of the row. A page that depends on more needs another tag.
    """
    return f'"{obj._version_field.text_of(obj)}"'


def with_etag(response: Answer, obj: Any) -> Answer:
    """Set the `ETag` of a response that shows this object; return the response."""
    response["ETag"] = etag_of(obj)  # type: ignore[index]
    return response


def require_match(request: Any, obj: Any, *, required: bool = True) -> None:
    """Raise PreconditionFailed unless `If-Match` names the version that `obj` was read with.

    Without the header, raise PreconditionRequired if it is `required`. Change and save this same
    `obj`: its save then detects changes by other requests after this check.
    """
    header = request.headers.get("If-Match")
    if header is None:
        if required:
            raise PreconditionRequired(PreconditionRequired.__doc__)
        return
    # Proxies and GZipMiddleware weaken tags because the bytes differ; the version is the same.
    named = [tag.removeprefix("W/") for tag in parse_etags(header)]
    if "*" not in named and etag_of(obj) not in named:
        found = getattr(obj, obj._version_field.attname)
        text = f"{obj._meta.label} {obj.pk!r} has ETag {etag_of(obj)}, not {header}"
        raise PreconditionFailed(text, obj=obj, found=found)


def guarded_view(view: Callable[..., Any]) -> Any:
    """Turn the errors of this module and of stale saves into 412, 428 or 409 responses.

    409 is for a stale save if the client named no version. For function views, sync and async, and
    the result of `as_view()`; `method_decorator(guarded_view, name="dispatch")` for classes.
    """

    @functools.wraps(view)
    def call(request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = view(request, *args, **kwargs)
        except (StaleObjectError, PreconditionRequired) as error:
            return _refusal(request, error)
        # The `dispatch` of an async class is a plain function.
        return _awaited(request, answer) if isawaitable(answer) else answer

    @functools.wraps(view)
    async def acall(request: Any, *args: Any, **kwargs: Any) -> Any:
        answer = call(request, *args, **kwargs)
        return await answer if isawaitable(answer) else answer

    return acall if iscoroutinefunction(view) else call


async def _awaited(request: Any, answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except (StaleObjectError, PreconditionRequired) as error:
        return _refusal(request, error)


def _refusal(request: Any, error: Exception) -> HttpResponse:
    # Roll back the innermost transactions around the view, which see no exception.
    for connection in connections.all(initialized_only=True):
        if own_blocks(connection):
            connection.set_rollback(True)
    if isinstance(error, PreconditionRequired):
        status, text = 428, gettext("Say which version you are changing, in the If-Match header.")
    else:
        status = 412 if "If-Match" in request.headers else 409
        text = gettext("Another user changed this meanwhile. Read it again before you change it.")
    wanted = request.get_preferred_type(["text/plain", "text/html", "application/json"])
    if wanted == "application/json":
        response: HttpResponse = JsonResponse({"detail": text}, status=status)
    else:
        response = HttpResponse(text, content_type="text/plain; charset=utf-8", status=status)
    response.headers["Cache-Control"] = "no-store"
    return response
