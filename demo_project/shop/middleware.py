"""What a visitor sees whose lock was taken away in the admin, and what pages may load."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from distlock_app import LockLost


class LostLocks:
    """Answers with a page where a view ended with LockLost."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self.get_response(request)

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        if isinstance(exception, LockLost):
            return render(request, "shop/lost.html", status=503)
        return None


class StrictPolicy:
    """Allows pages no inline scripts and styles, and nothing from elsewhere: none needs them."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        response.headers["Content-Security-Policy"] = "default-src 'self'"
        return response
