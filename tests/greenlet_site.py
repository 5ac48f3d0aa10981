"""A site for gunicorn's gevent workers: one view that takes its time under a lock."""

from __future__ import annotations

import threading

from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse
from django.urls import path

from distlock_app import current_hold, locked_view
from tests.engines import renewed

may_end = threading.Event()


@locked_view("slow", methods=["GET"], ttl=3, using="redis")
def slow(request):
    """Pause until the lock was renewed and `/end` was asked for."""
    hold = current_hold()
    renewed(hold)
    may_end.wait(60)
    return HttpResponse("lost" if hold.lost else "held")


def end(request):
    """Let the slow one end."""
    may_end.set()
    return HttpResponse()


fast = path("fast", lambda request: HttpResponse("fast"))
urlpatterns = [path("slow", slow), path("end", end), fast]
application = get_wsgi_application()
