"""Columns and filters of the admin's list of live locks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
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
from ..operations import holdings
from .rows import LiveLocks

STATES = {
    holdings.HELD: _("held"),
    holdings.CONTENDED: _("contended"),
    holdings.EXPIRING: _("expiring"),
    holdings.ORPHANED: _("orphaned"),
}
KINDS = {"exclusive": _("exclusive"), "shared": _("shared"), "permit": _("permit")}

# The backend does not say. None would be "None" on the page of a lock.
UNKNOWN = _("unknown")

# Columns of a list; first which lock is stuck, and who has it, because a phone shows no more.
FACTS = ("state", "held_for", "waiters", "who", "place", "time_left", "alias")

# Choices of a filter: more would be longer than the list.
MOST_HOSTS = 40
MOST_GROUPS = 20


class _Filter(admin.SimpleListFilter):
    """A filter of what was read: it asks no backend."""

    value_of: Callable[[Holding], str]
    labels: Mapping[str, Any]  # of its choices, if they are always the same

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, Any]]:
        return list(self.labels.items())

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        wanted = self.value()
        return queryset if wanted is None else self.chosen(queryset, wanted)

    @classmethod
    def chosen(cls, rows: LiveLocks, wanted: str) -> LiveLocks:
        """Return the rows with this value."""
        return rows.where(lambda held: cls.value_of(held) == wanted)


class AliasFilter(_Filter):
    title = _("alias")
    parameter_name = "alias"
    value_of = staticmethod(lambda held: held.alias)

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(alias, alias) for alias in registry]


class StateFilter(_Filter):
    title = _("state")
    parameter_name = "state"
    value_of = staticmethod(holdings.state_of)
    labels = STATES


class KindFilter(_Filter):
    title = _("kind")
    parameter_name = "kind"
    value_of = staticmethod(lambda held: held.kind)
    labels = KINDS


class HostFilter(_Filter):
    """Hosts of the locks that were read."""

    title = _("host")
    parameter_name = "host"
    value_of = staticmethod(lambda held: holdings.said(held.holder, "host"))

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        found = model_admin.reading(request).holdings
        hosts = {*map(HostFilter.value_of, found), request.GET.get("host", "")}
        return [(host, host) for host in sorted(hosts - {""})[:MOST_HOSTS]]


class GroupFilter(_Filter):
    """Names up to the first ":", each with the number of locks that were read."""

    title = _("group")
    parameter_name = "group"
    value_of = staticmethod(lambda held: held.name[: held.name.find(":") + 1])

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        groups = Counter(map(GroupFilter.value_of, model_admin.reading(request).holdings))
        chosen = request.GET.get("group", "")
        common = [g for g, n in groups.most_common(MOST_GROUPS) if n > 1 and g != chosen]
        return [(group, f"{group}… ({groups[group]})") for group in [chosen, *common] if group]


class LiveColumns:
    """The columns, for people; countdown.js keeps the times running."""

    @admin.display(description=_("state"), ordering="state")
    def state(self, row: LiveLock) -> SafeString:
        state = holdings.state_of(row.holding)
        text = str(STATES[state]).upper()
        kind = "" if row.holding.kind == "exclusive" else self.kind(row)
        return format_html('<span class="dl-pill dl-{}">{}</span> {}', state, text, kind)

    @admin.display(description=_("held for"), ordering="held_for")
    def held_for(self, row: LiveLock) -> Any:
        held = row.holding.held_for
        if held is None:
            return UNKNOWN
        return format_html(
            '<span class="dl-time" data-dl-since="{}">{}</span>',
            f"{held:.3f}",
            holdings.clock(held),
        )

    @admin.display(description=_("waiters"), ordering="waiters")
    def waiters(self, row: LiveLock) -> Any:
        return UNKNOWN if row.holding.waiters is None else row.holding.waiters

    @admin.display(description=_("who"), ordering="who")
    def who(self, row: LiveLock) -> Any:
        return holdings.activity_of(row.holding.holder) or UNKNOWN

    @admin.display(description=_("where"), ordering="place")
    def place(self, row: LiveLock) -> Any:
        parts = [(part,) for part in holdings.place_of(row.holding.holder).split(":")]
        return format_html_join(mark_safe(":<wbr>"), "{}", parts) or UNKNOWN

    @admin.display(description=_("time left"), ordering="expires_in")
    def time_left(self, row: LiveLock) -> Any:
        left = row.holding.expires_in
        if left is None:
            return gettext("as long as its session")
        renewed = holdings.is_renewed(row.holding)
        return format_html(
            '<span class="dl-time" data-dl-left="{}" data-dl-over="{}">{}</span> {}',
            f"{left:.3f}",
            gettext("renewed or over") if renewed else gettext("over"),
            holdings.clock(left),
            "" if renewed else gettext("not renewed"),
        )

    @admin.display(description=_("kind"), ordering="kind")
    def kind(self, row: LiveLock) -> str:
        return str(KINDS.get(row.holding.kind, row.holding.kind))

    @admin.display(description=_("alias"), ordering="alias")
    def alias(self, row: LiveLock) -> str:
        return row.holding.alias

    # On the page of a lock alone.

    @admin.display(description=_("held since"))
    def since(self, row: LiveLock) -> Any:
        return holdings.since(row.holding) or UNKNOWN

    @admin.display(description=_("thread"))
    def thread(self, row: LiveLock) -> Any:
        return holdings.said(row.holding.holder, "thread") or UNKNOWN

    @admin.display(description=_("fencing token"))
    def fence(self, row: LiveLock) -> Any:
        # Compared and copied, so without thousands separators.
        return UNKNOWN if row.holding.fence is None else str(row.holding.fence)
