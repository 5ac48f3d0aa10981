"""The live locks as JSON for dashboards: `/livelock/data/`, by session or bearer token."""

from __future__ import annotations

import re
from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, JsonResponse
from django.utils import timezone
from django.utils.crypto import constant_time_compare
from django.utils.translation import gettext_lazy
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from ..decorators.atomic_requests import mark
from ..operations.holdings import facts_of

MOST_LISTED = 1_000
NUMBER = re.compile("[0-9]{1,9}")

# Characters of a list's query string, which each link on its page repeats.
MOST_ASKED = 4_000
TOO_LONG = gettext_lazy("Search and filters are too long: shorten them.")


def data_view(admin: Any) -> Any:
    """Return the view; it takes the parameters of the list, `start` and `limit`."""

    @login_not_required
    @never_cache
    @require_safe
    def view(request: HttpRequest) -> JsonResponse:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":  # any other kind is for a proxy in front of us
            if not _is_token(token):
                headers = {"WWW-Authenticate": "Bearer"}
                return JsonResponse({"error": "wrong token"}, status=401, headers=headers)
        elif not (admin.admin_site.has_permission(request) and admin.has_view_permission(request)):
            return JsonResponse({"error": "not allowed"}, status=403)
        if too_long(request):
            return JsonResponse({"error": TOO_LONG}, status=400)
        start, limit = request.GET.get("start") or "0", request.GET.get("limit") or "100"
        if not (NUMBER.fullmatch(start) and NUMBER.fullmatch(limit)):
            error = "start and limit are numbers from 0 to 999999999"
            return JsonResponse({"error": error}, status=400)
        return JsonResponse(_locks(admin, request, int(start), min(int(limit), MOST_LISTED)))

    mark(view, view)  # no ATOMIC_REQUESTS: that database may be down, or keep no locks
    return view


def too_long(request: HttpRequest) -> bool:
    """Return whether the query is longer than a person would type."""
    return len(request.META.get("QUERY_STRING", "")) > MOST_ASKED


def _is_token(given: str) -> bool:
    token = getattr(settings, "DISTLOCK_DASHBOARD_TOKEN", "")
    return bool(token) and constant_time_compare(given, token)


def _locks(admin: Any, request: HttpRequest, start: int, limit: int) -> dict[str, Any]:
    found = admin.get_queryset(request)
    for kind in admin.list_filter:
        if wanted := request.GET.get(kind.parameter_name):
            found = kind.chosen(found, wanted)
    found, _ = admin.get_search_results(request, found, request.GET.get("q", ""))
    rows = found.order_by("name")[start : start + limit]
    return {
        "read_at": timezone.now(),
        "backends": [
            {**backend.facts(), "locks": backend.total, "looked_at": backend.looked}
            for backend in admin.reading(request).backends
        ],
        "count": found.count(),
        "locks": [facts_of(row.holding) for row in rows],
    }
