"""The admin in the theme of django-unfold, as docs/reference/admin.md says; and a server for it."""

from __future__ import annotations

import threading

from django.contrib import admin
from django.urls import path
from unfold.admin import ModelAdmin

from distlock_app import Lock
from distlock_app.admin import LiveLockAdminMixin
from distlock_app.models import LiveLock
from tests.processes import hear, say


class LockAdmin(LiveLockAdminMixin, ModelAdmin):
    """Live locks, by the mixin and the ModelAdmin of the theme."""


admin.site.unregister(LiveLock)
admin.site.register(LiveLock, LockAdmin)

urlpatterns = [path("admin/", admin.site.urls)]


def serve() -> None:
    """Serve the admin with a lock in it; say the port, and then whether locks are held."""
    from django.contrib.auth.models import User
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.core.management import call_command
    from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
    from django.core.wsgi import get_wsgi_application

    call_command("migrate", verbosity=0)
    User.objects.create_superuser("ann", password="x")
    holds = [Lock("invoice:42").acquire(), Lock("nightly").acquire()]
    server = ThreadedWSGIServer(("127.0.0.1", 0), WSGIRequestHandler)
    server.set_app(StaticFilesHandler(get_wsgi_application()))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(server.server_port)
    while name := hear():
        say(Lock(name).locked())
    for hold in holds:
        hold.leave_for(1)
