"""A site for gunicorn's gevent workers: one view that takes its time under a lock."""

from __future__ import annotations

import time

from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse
from django.urls import path

from distlock_app import current_hold, locked_view


@locked_view("slow", methods=["GET"], ttl=1, using="redis")
def slow(request):
    """Pause for longer than the ttl."""
    hold = current_hold()
    time.sleep(2.5)
    return HttpResponse("lost" if hold.lost else "held")


urlpatterns = [path("slow", slow), path("fast", lambda request: HttpResponse("fast"))]
application = get_wsgi_application()
