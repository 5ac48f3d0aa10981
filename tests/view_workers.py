"""Views of the tests, the URLs that lead to them, and processes that post to them."""

from __future__ import annotations

import time
from typing import Any

from django.db import connection, connections, transaction
from django.http import HttpResponse
from django.test import Client, override_settings
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from distlock_app import Lock, locked_view
from tests.app.models import Counter


def bump(name: str) -> None:
    """Add 1 to a counter, as unprotected as can be."""
    counter = Counter.objects.get(name=name)
    time.sleep(0.001)  # where an update would be lost
    counter.value += 1
    counter.save()


@csrf_exempt
@locked_view("bump:{name}", wait=60)
def under_lock(request, name):
    bump(name)
    return HttpResponse("in a transaction" if connection.in_atomic_block else "alone")


@csrf_exempt
def released_too_early(request, name):
    with Lock(f"early:{name}", wait=60, release="now"):
        bump(name)
    time.sleep(0.05)  # the rest of a request: time for the next one to read what is there
    return HttpResponse()


urlpatterns = [
    path("locked/<name>", under_lock),
    path("early/<name>", released_too_early),
]


def use_atomic_requests() -> None:
    """Let each request be a transaction on the default database."""
    connections.settings["default"]["ATOMIC_REQUESTS"] = True


# On SQLite a lock in the file of the data would break the transactions of others.
LOCKS_APART = {
    "default": {"BACKEND": "distlock_app.backends.database.DatabaseBackend", "LOCATION": "locks"}
}


def post(*, url: str, times: int) -> list[Any]:
    """Post to `url`, through every middleware, and return what was answered."""
    use_atomic_requests()
    with override_settings(ROOT_URLCONF="tests.view_workers", DISTLOCK=LOCKS_APART):
        answers = [Client().post(url) for _ in range(times)]
    return sorted({(answer.status_code, answer.content.decode()) for answer in answers})


def bump_in_transactions(*, name: str, times: int, roll_back: bool) -> int:
    """Add to the counter under a plain lock inside `atomic()`; return how often it was kept."""
    kept = 0
    with override_settings(DISTLOCK=LOCKS_APART):
        for number in range(times):
            with transaction.atomic():
                with Lock(f"plain:{name}", wait=100):
                    bump(name)
                if roll_back and number % 2:
                    time.sleep(0.002)  # the lock must last until the transaction has ended
                    transaction.set_rollback(True)
                else:
                    kept += 1
    return kept
