"""What `locked_view` answers without the lock: its status, and a page, JSON or a line of text."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any
from urllib.parse import unquote, urlsplit

from django.http import HttpResponse, JsonResponse
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext

from ..core.registry import aliases_of
from ..errors import BackendError, LockBusy
from ..primitives.logs import fields, logger
from ..primitives.names import shown
from .options import cannot_take

# The backend knows only when the ttl of the claim ends; most claims are released long before.
LONGEST_RETRY_AFTER = 10
# The status while another request has the lock (RFC 4918, 11.3), and while its backend is down.
LOCKED, UNAVAILABLE = 423, 503
# Seconds after which the page goes back. That repeats no request, so it may be soon.
BACK_AFTER = 3


def answer(
    request: Any, error: LockBusy | BackendError, *, unlocked: Collection[str], status: int
) -> HttpResponse:
    """Return a page, JSON or text, as the client prefers; 503 if the backend is down.

    It names neither the lock nor its holder, which would tell one visitor about another, and does
    not say "try again" while the lock is held: the request may be a payment.
    """
    if isinstance(error, BackendError):
        text = gettext("Your request was not processed. Please try again later.")
        status, seconds, back = UNAVAILABLE, LONGEST_RETRY_AFTER, ""
    else:
        text = gettext("Your request is already being processed.")
        seconds = min(max(1, math.ceil(error.free_in or 0)), LONGEST_RETRY_AFTER)
        back = _page_before(request, unlocked)
    wanted = request.get_preferred_type(["text/plain", "text/html", "application/json"])
    if wanted == "application/json":
        response: HttpResponse = JsonResponse({"detail": text, "retry_after": seconds})
    elif wanted == "text/html" and (page := _page(request, text, back)):
        response = HttpResponse(page)
    else:
        response = HttpResponse(f"{text}\n", content_type="text/plain; charset=utf-8")
    response.status_code = status
    response.headers["Retry-After"] = str(seconds)
    response.headers["Cache-Control"] = "no-store"
    return response


def log_unavailable(name: str, using: str | tuple[str, ...], error: BackendError) -> None:
    """Log why the answer is 503."""
    alias = ", ".join(aliases_of(using))
    facts = fields("unavailable", alias, name=shown(name), error=str(error))
    logger.warning("answered 503: %s", cannot_take(name, using, error), extra=facts)


def _page(request: Any, text: str, back: str) -> str:
    """Return the page; nothing for a project that has no templates."""
    context = {"text": text, "back": back, "back_after": BACK_AFTER}
    try:
        return render_to_string("distlock_app/busy.html", context, request)
    except TemplateDoesNotExist:
        return ""


def _page_before(request: Any, unlocked: Collection[str]) -> str:
    """Return the page of this site that the visitor came from, if its GET is harmless.

    Not the view itself if its GET is locked: to go back there would repeat the request.
    """
    before = request.headers.get("Referer", "")
    # Absolute, as browsers send it: a refresh would strip quotes around any other.
    if not before.startswith(("http://", "https://")) or not url_has_allowed_host_and_scheme(
        before, {request.get_host()}, request.is_secure()
    ):
        return ""
    itself = "GET" not in unlocked and unquote(urlsplit(before).path) == request.path
    return "" if itself else before
