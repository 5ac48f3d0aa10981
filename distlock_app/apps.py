"""The app's configuration: what is done once Django has loaded the models."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DistlockConfig(AppConfig):
    name = "distlock_app"
    verbose_name = _("Distributed locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks
        from .core.registry import registry
        from .operations import history
        from .primitives import forks

        checks.register()
        history.listen()
        forks.hook_into_uwsgi()
        registry.load()
