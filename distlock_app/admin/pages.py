"""The admin's pages of live locks (`LiveLockAdminMixin`): list, detail, events, history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.utils import quote, unquote
from django.contrib.admin.views.main import ChangeList
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.html import format_html
from django.utils.text import Truncator
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..claims import Holding
from ..core.registry import registry
from ..models import LiveLock
from ..operations import history
from ..operations.holdings import activity_of, origin_of, who
from ..operations.reading import SLOW, Health, Reading, queue_of, read, read_more, read_pages
from ..primitives.names import key_of, shown
from . import clearing
from . import past as past_events
from .actions import LiveActions
from .columns import FACTS, UNKNOWN, AliasFilter, GroupFilter, HostFilter, KindFilter, StateFilter
from .json import TOO_LONG, data_view, too_long
from .readonly import ReadOnly
from .rows import LiveLocks, PagedLocks, id_of, parts_of, row_of

# Locks of one alias that are read, sorted and filtered for every page.
MOST_SORTED = 1_000

# Seconds in which more of them are looked through where that is asked for.
LOOKED_FOR = 0.4


class _LockList(ChangeList):
    """Its links contain the name, which the page of a lock that is free by now can show."""

    def url_for_result(self, result: Any) -> str:
        return f"{super().url_for_result(result)}?{urlencode({'name': result.name})}"


class LiveLockAdminMixin(ReadOnly, LiveActions):
    """All of the pages; put it before the ModelAdmin of your theme."""

    list_display = ("name", *FACTS)
    list_filter = (AliasFilter, StateFilter, GroupFilter, KindFilter, HostFilter)
    search_fields = ("name",)
    search_help_text = _("Words of the name or the holder")
    show_facets = admin.ShowFacets.NEVER
    fields = (
        "name",
        ("state", "held_for", "since", "waiters"),
        ("who", "place", "thread"),
        ("time_left", "kind", "alias", "fence"),
    )
    readonly_fields = ("name", *FACTS, "since", "thread", "kind", "fence")
    actions = ("force_release",)

    class Media:
        css = {"all": ["distlock_app/locks.css"]}
        js = ["distlock_app/countdown.js", "distlock_app/refresh.js"]

    # Where the rows come from.

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return _LockList

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        return ("urgency", "name")

    def get_queryset(self, request: HttpRequest) -> Any:
        reading = self.reading(request)
        if _looks_through(request) or not _cut(request, reading):
            return LiveLocks(reading.holdings)
        return PagedLocks(_chosen(request, reading))

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        """Keep the locks whose name or holder contains every word."""
        words = search_term.casefold().split()
        if not words:
            return queryset, False

        def wanted(held: Holding) -> bool:
            parts = (shown(held.name), origin_of(held.holder), activity_of(held.holder))
            text = " ".join(parts).casefold()
            return all(word in text for word in words)

        found = queryset.where(wanted)
        backends = _chosen(request, self.reading(request))
        if unseen := [b.alias for b in backends if b.truncated or b.state == SLOW]:
            # A lock that was not read is found by its whole name.
            key = key_of(search_term)
            found = found.with_these(read(dict.fromkeys(unseen, [key])).holdings)
        return found, False

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> LiveLock | None:
        """Return what the view has read: a second reading might differ."""
        row: LiveLock | None = getattr(request, "distlock_row", None)
        return row

    def reading(self, request: Any) -> Reading:
        """Ask the backends, once per request; for longer if the list is filtered or sorted."""
        if not hasattr(request, "distlock_reading"):
            reading = read_pages(dict.fromkeys(registry, (0, MOST_SORTED)))
            if _looks_through(request):
                reading = read_more(reading, _cut(request, reading), LOOKED_FOR)
            request.distlock_reading = reading
        found: Reading = request.distlock_reading
        return found

    # The pages.

    def get_urls(self) -> list[URLPattern]:
        admin_view = self.admin_site.admin_view
        views = {
            "data": data_view(self),
            "events": admin_view(self.events_view),
            "clear": admin_view(self.clear_view),
            "extend": admin_view(self.extend_view),
            "leftover": admin_view(self.leftover_view),
        }
        pages = [
            path(f"{page}/", view, name=f"distlock_app_livelock_{page}")
            for page, view in views.items()
        ]
        return [*pages, *super().get_urls()]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        self._require(self.has_view_permission(request))
        if too_long(request):
            return self._back(request, str(TOO_LONG))
        reading = self.reading(request)
        cut = _cut(request, reading)
        looks = _looks_through(request)
        more = {
            "title": _("Live locks"),
            "backends": reading.backends,
            "unknown": [backend for backend in _chosen(request, reading) if not backend.known],
            "looked_through": cut if looks else [],
            "paged": cut and not looks,
            "read_at": timezone.now(),
            "pasts": self._pasts(request.GET.get("q", "")),
            "leftover_url": self._url("leftover"),
            "may_clear_up": self.has_clear_permission(request) and clearing.tables(),
        }
        return super().changelist_view(request, {**more, **(extra_context or {})})

    def change_view(
        self,
        request: Any,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show one holding, or say that the lock is free or changed hands."""
        self._require(self.has_view_permission(request))
        if (parts := parts_of(unquote(object_id))) is None:
            return self._back(request, gettext("There is no such lock."))
        alias, key, _version = parts
        found = clearing.rows_of([unquote(object_id)])
        if not found.rows:
            problems = [self._free(request, alias, key)] if found.free else found.problems
            self._warn(request, *problems)
            return HttpResponseRedirect(self._events(alias, key) or self._list())
        row = request.distlock_row = found.rows[0]
        more = {
            "title": _("Live lock"),
            "subtitle": _brief(row.name),
            "list_url": self._list(),
            "clear_url": f"{self._url('clear')}?{urlencode({'lock': row.pk})}",
            "may_clear": self.has_clear_permission(request),
            "extend_url": self._url("extend"),
            "extend_form": clearing.ExtendForm(),
            "may_extend": self.has_extend_permission(request) and clearing.may_extend(row),
            "row": row,
            **self._facts(alias, key, found.holdings),
        }
        return super().change_view(
            request, quote(row.pk), form_url, {**more, **(extra_context or {})}
        )

    def events_view(self, request: HttpRequest) -> HttpResponse:
        """Show what happened to a lock lately, with any holder, also when it is free."""
        self._require(self.has_view_permission(request))
        parts = parts_of(request.GET.get("lock", ""))
        if parts is None or not history.kept():
            return self._back(request)
        alias, key, _version = parts
        reading = read({alias: [key]})
        [backend] = reading.backends
        holdings = reading.holdings if backend.known else None
        facts = {
            **self._facts(alias, key, holdings),
            "alias": shown(alias),
            "not_known": backend.reason,
        }
        facts["name"] = facts["past"].name or shown(holdings[0].name if holdings else key)
        return self._page(request, "events", _("Events of a lock"), facts)

    def _facts(self, alias: str, key: str, holdings: list[Holding] | None) -> dict[str, Any]:
        """Return what both pages of a lock show of its holders, its waiters and its past."""
        rows = [row_of(held) for held in holdings or ()]
        return {
            "holders": [(_who(row.holding.holder), self._url("change", row.pk)) for row in rows],
            "queue": [_who(waiter) for waiter in queue_of(alias, key)],
            "past": past_events.past_of(alias, key, holdings),
            "history_url": self._url("history", id_of(alias, key)),
        }

    def _free(self, request: HttpRequest, alias: str, key: str) -> str:
        """Return the message for a link to a lock that is free by now."""
        facts = {"name": clearing.name_of(alias, key, request.GET.get("name", ""))}
        said = gettext("“%(name)s” is free now.") % facts
        url = self._url("history", id_of(alias, key))
        return format_html('{} <a href="{}">{}</a>', said, url, gettext("Change history"))

    def _events(self, alias: str, key: str) -> str:
        """Return the address of a lock's events; an empty text without a history."""
        query = urlencode({"lock": id_of(alias, key)})
        return f"{self._url('events')}?{query}" if history.kept() else ""

    def _pasts(self, name: str) -> list[tuple[str, str, str]]:
        """Return name, alias and address of events for each alias that has events of the lock."""
        aliases = history.aliases_of(name) if name and history.kept() else []
        lock = format_html("<bdi>{}</bdi>", shown(name))
        return [(lock, alias, self._events(alias, key_of(name))) for alias in aliases]

    def history_view(
        self, request: Any, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the forced releases of this lock, from any holder, also when it is free."""
        self._require(self.has_view_permission(request))
        if (parts := parts_of(unquote(object_id))) is None:
            return self._back(request)
        alias, key, _version = parts
        lock_id = id_of(alias, key)
        request.distlock_row = LiveLock(id=lock_id, name=_brief(clearing.name_of(alias, key)))
        more = {"list_url": self._list(), "media": self.media, **(extra_context or {})}
        return super().history_view(request, quote(lock_id), more)


@admin.register(LiveLock)
class LiveLockAdmin(LiveLockAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    """Live locks in Django's own theme."""


def _who(holder: Mapping[str, Any]) -> str:
    return who(holder) or str(UNKNOWN)


def _brief(name: str) -> str:
    """Return as much of a name as fits a title on a phone."""
    return Truncator(name).chars(80)


def _looks_through(request: HttpRequest) -> bool:
    """Return whether the list is filtered or sorted, so that every lock has to be read."""
    return any(request.GET.get(name) for name in ("q", "o", "state", "group", "kind", "host"))


def _chosen(request: HttpRequest, reading: Reading) -> list[Health]:
    """Return the backends whose locks are listed: all, or that of one alias."""
    alias = request.GET.get("alias")
    return [backend for backend in reading.backends if alias in (None, "", backend.alias)]


def _cut(request: HttpRequest, reading: Reading) -> list[Health]:
    """Return those of them that hold more locks than were read."""
    return [backend for backend in _chosen(request, reading) if backend.truncated]
