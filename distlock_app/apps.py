"""The app's configuration: registers system checks, and starts the history if settings ask."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DistlockConfig(AppConfig):
    name = "distlock_app"
    verbose_name = _("Distributed locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks
        from .operations import history

        checks.register()
        history.listen()
