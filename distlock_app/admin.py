"""What the admin shows: live locks of every engine, and the rows of the lock table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.exceptions import ImproperlyConfigured
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from . import live
from .backends.database import DatabaseBackend
from .identity import holder_fields
from .live_admin import LiveLockAdminMixin
from .models import DistLock, LiveLock
from .registry import registry

if TYPE_CHECKING:
    _LiveAdmin = admin.ModelAdmin[LiveLock]
    _TableAdmin = admin.ModelAdmin[DistLock]
else:
    _LiveAdmin = _TableAdmin = admin.ModelAdmin


@admin.register(LiveLock)
class LiveLockAdmin(LiveLockAdminMixin, _LiveAdmin):
    """Live locks in Django's own theme."""


@admin.register(DistLock)
class DistLockAdmin(_TableAdmin):
    """The lock table, to look at; never the owners, who are known by that token alone."""

    list_display = ("name", "held", "expiry", "acquired_at", "place", "fence")
    fields = ("name", "key", "held", "expiry", "acquired_at", "place", "activity", "fence")
    readonly_fields = fields
    search_fields = ("name", "key")
    ordering = ("name",)
    show_facets = admin.ShowFacets.NEVER

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: DistLock | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: DistLock | None = None) -> bool:
        return False

    def has_view_permission(self, request: HttpRequest, obj: DistLock | None = None) -> bool:
        """Tell whether there is a table to see, and this user may."""
        return super().has_view_permission(request, obj) and self._database() is not None

    def get_queryset(self, request: HttpRequest) -> QuerySet[DistLock]:
        """Read the table where the locks are, which need not be the default database."""
        taken = ~Q(owner="") & Q(expiry__gt=timezone.now())
        rows = super().get_queryset(request).using(self._database()).defer("owner")
        return rows.annotate(is_held=ExpressionWrapper(taken, output_field=BooleanField()))

    def lookup_allowed(self, lookup: str, value: Any, request: Any = None) -> bool:
        """Refuse ?owner__startswith=... in the address: it would tell the token by its digits."""
        return False

    @admin.display(description=_("held"), boolean=True)
    def held(self, row: Any) -> bool:
        held: bool = row.is_held
        return held

    @admin.display(description=_("last holder"), empty_value="—")
    def place(self, row: DistLock) -> str:
        return live.place_of(holder_fields(row.holder))

    @admin.display(description=_("doing"), empty_value="—")
    def activity(self, row: DistLock) -> str:
        return live.activity_of(holder_fields(row.holder))

    def _database(self) -> str | None:
        for alias in registry:
            try:
                backend = registry[alias].backend
            except ImproperlyConfigured:
                continue  # said by the system checks
            if isinstance(backend, DatabaseBackend):
                return backend.using
        return None
