"""`health`: a view for monitors that answers 200 if all backends answer, otherwise 503."""

from __future__ import annotations

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from .core.registry import registry
from .decorators.atomic_requests import mark
from .operations.reading import ask


@login_not_required
@never_cache
@require_safe
def health(request: HttpRequest, using: str | None = None) -> HttpResponse:
    """Ask the backend of each alias, or of `using`, for up to two seconds; one line for each.

    It takes no lock, and does not name servers, users or locks.
    """
    aliases = registry if using is None else [using]
    # No question: `ask` sends a ping first, and that is all there is to know.
    found = [one for one, _ in ask("health", dict.fromkeys(aliases, lambda backend: None))]
    lines = [f"{one.alias}: {'ok' if one.up else one.reason}\n" for one in found]
    status = 200 if all(one.up for one in found) else 503
    return HttpResponse(lines, content_type="text/plain; charset=utf-8", status=status)


mark(health, health)  # no ATOMIC_REQUESTS: that database may be down, or keep no locks
