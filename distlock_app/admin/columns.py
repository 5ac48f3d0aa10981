"""Columns and filters of the admin's list of live locks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..claims import Holding
from ..core.registry import registry
from ..models import LiveLock
from ..operations.reading import EXPIRING, HELD, WAITED_ON, clock, host_of, state_of, who
from .rows import PagedLocks

STATES = {HELD: _("held"), WAITED_ON: _("waited-on"), EXPIRING: _("expiring")}
KINDS = {"exclusive": _("exclusive"), "shared": _("shared"), "permit": _("permit")}

# The backend does not say. None would be "None" on the page of a lock.
UNKNOWN = "—"

# Choices of the filter by host: more would be longer than the list.
MOST_HOSTS = 40


class _Filter(admin.SimpleListFilter):
    """Choices that cost no question of their own."""

    value_of: Callable[[Holding], str]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        wanted = self.value()
        if wanted is None:
            return queryset
        return queryset.where(lambda held: type(self).value_of(held) == wanted)


class AliasFilter(_Filter):
    title = _("alias")
    parameter_name = "alias"
    value_of = staticmethod(lambda held: held.alias)

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(alias, alias) for alias in registry]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        # Reading has chosen already where there is more than can be read.
        return queryset if isinstance(queryset, PagedLocks) else super().queryset(request, queryset)


class StateFilter(_Filter):
    title = _("state")
    parameter_name = "state"
    value_of = staticmethod(state_of)

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, Any]]:
        return list(STATES.items())


class KindFilter(_Filter):
    title = _("kind")
    parameter_name = "kind"
    value_of = staticmethod(lambda held: held.kind)

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, Any]]:
        return list(KINDS.items())


class HostFilter(_Filter):
    """Hosts of the locks that were read."""

    title = _("host")
    parameter_name = "host"
    value_of = staticmethod(lambda held: host_of(held.holder))

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        holdings = model_admin.reading(request).holdings
        hosts = {host_of(held.holder) for held in holdings} | {request.GET.get("host", "")}
        return [(host, host) for host in sorted(hosts - {""})[:MOST_HOSTS]]


class LiveColumns:
    """Every fact of a row as people read it; countdown.js keeps the times going."""

    @admin.display(description=_("alias"), ordering="alias")
    def alias(self, row: LiveLock) -> str:
        return row.holding.alias

    @admin.display(description=_("kind"), ordering="kind")
    def kind(self, row: LiveLock) -> str:
        return str(KINDS.get(row.holding.kind, row.holding.kind))

    @admin.display(description=_("state"), ordering="state")
    def state(self, row: LiveLock) -> SafeString:
        text = str(STATES[row.state]).upper()
        return format_html('<span class="dl-pill dl-{}">{}</span>', row.state, text)

    @admin.display(description=_("time left"), ordering="expires_in")
    def time_left(self, row: LiveLock) -> str:
        left = row.holding.expires_in
        if left is None:
            return gettext("as long as its session")
        return format_html(
            '<span class="dl-time" data-dl-left="{}" data-dl-over="{}">{}</span>',
            f"{left:.3f}",
            gettext("renewed or over"),
            clock(left),
        )

    @admin.display(description=_("held for"), ordering="held_for")
    def held_for(self, row: LiveLock) -> str:
        held = row.holding.held_for
        if held is None:
            return UNKNOWN
        return format_html(
            '<span class="dl-time" data-dl-since="{}">{}</span>', f"{held:.3f}", clock(held)
        )

    @admin.display(description=_("holder"), ordering="origin")
    def holder(self, row: LiveLock) -> str:
        """Return where it runs, and below that what it does; the list cuts it, not its title."""
        origin = format_html_join(mark_safe(":<wbr>"), "{}", [(p,) for p in row.origin.split(":")])
        lines = [(line,) for line in (origin, row.activity) if line]
        text = format_html_join(mark_safe("<br>"), "{}", lines)
        if not text:
            return UNKNOWN
        full = who(row.holding.holder)
        return format_html('<span class="dl-cut" title="{}">{}</span>', full, text)

    @admin.display(description=_("waiters"), ordering="waiters")
    def waiters(self, row: LiveLock) -> int | str:
        return UNKNOWN if row.holding.waiters is None else row.holding.waiters

    @admin.display(description=_("fence"), ordering="fence")
    def fence(self, row: LiveLock) -> str:
        # Compared and copied, so without thousands separators.
        return UNKNOWN if row.holding.fence is None else str(row.holding.fence)
