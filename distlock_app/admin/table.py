"""The admin's read-only pages of the lock table's rows (`DistLockAdmin`)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from datetime import timezone as zones
from itertools import islice
from typing import Any

from django.contrib import admin
from django.db import connections
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.utils import formats, timezone
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..backends.database import DatabaseBackend
from ..core.registry import registry
from ..models import DistLock
from ..operations.holdings import activity_of, local, origin_of
from ..primitives.identity import holder_fields
from ..primitives.names import is_key
from .readonly import ReadOnly


class DatabaseFilter(admin.SimpleListFilter):
    """Selects one database; `get_queryset` reads its rows."""

    title = _("database")
    parameter_name = "database"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(database, database) for database in _databases()]

    def has_output(self) -> bool:
        return len(self.lookup_choices) > 1

    def value(self) -> str | None:
        return _database(self.request)

    def choices(self, changelist: Any) -> Iterator[Any]:
        return islice(super().choices(changelist), 1, None)  # without "All"

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset


@admin.register(DistLock)
class DistLockAdmin(ReadOnly, admin.ModelAdmin):  # type: ignore[type-arg]
    """The lock table, read-only, without the owners: they are secret tokens."""

    list_display = ("name", "held", "expires", "acquired", "activity", "origin", "fence")
    fields = ("name", "key", "database", *list_display[1:])
    readonly_fields = fields
    list_filter = (DatabaseFilter,)
    search_fields = ("name", "key")
    ordering = ("name",)
    show_facets = admin.ShowFacets.NEVER

    class Media:
        css = {"all": ["distlock_app/locks.css"]}

    def has_view_permission(self, request: HttpRequest, obj: DistLock | None = None) -> bool:
        """Return whether there is a lock table, and this user may see it."""
        return super().has_view_permission(request, obj) and bool(_databases())

    def get_queryset(self, request: HttpRequest) -> QuerySet[DistLock]:
        """Read the table of the selected database."""
        database = _database(request)
        now = timezone.now()
        if database and _is_in_utc(database):
            now = datetime.now(zones.utc).replace(tzinfo=connections[database].timezone)
        taken = ~Q(owner="") & Q(expiry__gt=now)
        rows: QuerySet[DistLock] = super().get_queryset(request).using(database).defer("owner")
        return rows.annotate(is_held=ExpressionWrapper(taken, output_field=BooleanField()))

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> DistLock | None:
        """Return the row; None for what is no key: PostgreSQL would refuse a NUL."""
        return super().get_object(request, object_id, from_field) if is_key(object_id) else None

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Name the database and its aliases."""
        database = _database(request) or ""
        facts = {"database": database, "aliases": _aliases_of(database)}
        text = gettext("Database “%(database)s”, with the locks of: %(aliases)s")
        more = {"subtitle": text % facts}
        return super().changelist_view(request, {**more, **(extra_context or {})})

    def lookup_allowed(self, lookup: str, value: Any, request: Any = None) -> bool:
        """Refuse ?owner__startswith=..., which would reveal the token digit by digit."""
        return lookup == DatabaseFilter.parameter_name

    @admin.display(description=_("held"), boolean=True)
    def held(self, row: Any) -> bool:
        return bool(row.is_held)

    @admin.display(description=_("expiry"), ordering="expiry")
    def expires(self, row: DistLock) -> str:
        return _local(row, row.expiry)

    @admin.display(description=_("acquired at"), ordering="acquired_at", empty_value="—")
    def acquired(self, row: DistLock) -> str:
        return _local(row, row.acquired_at) if row.acquired_at else ""

    @admin.display(description=_("last holder"), empty_value="—")
    def activity(self, row: DistLock) -> str:
        return activity_of(holder_fields(row.holder))

    @admin.display(description=_("where"), empty_value="—")
    def origin(self, row: DistLock) -> str:
        return origin_of(holder_fields(row.holder))

    @admin.display(description=_("database"))
    def database(self, row: DistLock) -> str:
        database = row._state.db or ""
        return f"{database} ({_aliases_of(database)})"


def _is_in_utc(database: str) -> bool:
    """Return whether times are in UTC there, whatever time zone Django takes them to be in."""
    return connections[database].vendor in ("mysql", "sqlite")


def _local(row: DistLock, at: datetime) -> str:
    """Return a time of this row in the current time zone."""
    if _is_in_utc(row._state.db or ""):
        at = at.replace(tzinfo=zones.utc)
    return format_html('<span class="dl-time">{}</span>', formats.localize(local(at)))


def _databases() -> dict[str, list[str]]:
    """Return the databases that have a lock table, each with the aliases whose locks it keeps."""
    found: dict[str, list[str]] = {}
    for entry in registry.working():
        if isinstance(entry.backend, DatabaseBackend):
            found.setdefault(entry.backend.using, []).append(entry.alias)
    return found


def _database(request: HttpRequest) -> str | None:
    """Return the selected database, also on a page that the list links to."""
    listed = QueryDict(request.GET.get("_changelist_filters", ""))
    wanted = request.GET.get("database", listed.get("database"))
    found = _databases()
    return wanted if wanted in found else next(iter(found), None)


def _aliases_of(database: str) -> str:
    return ", ".join(_databases().get(database, []))
