"""The admin's pages of live locks: list, detail, history, forced release."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from . import clearing, live
from .claims import Holding
from .live_columns import AliasFilter, HostFilter, KindFilter, LiveColumns, StateFilter
from .live_list import LiveLocks, PagedLocks, id_of, parts_of
from .models import LiveLock
from .names import key_of, shown

if TYPE_CHECKING:
    _Admin = admin.ModelAdmin[LiveLock]
else:
    _Admin = object

# Nobody reads a longer confirmation, and a form may have no more than 1,000 fields.
MOST_CLEARED = 200

# Locks of one alias that are read, sorted and filtered for every page.
MOST_SORTED = 1_000

# Seconds in which more of them are looked through where that is asked for.
LOOKED_FOR = 0.4

FACTS = ("alias", "state", "time_left", "held_for", "holder", "waiters", "kind", "fence")


class LiveLockAdminMixin(LiveColumns, _Admin):
    """Everything of the pages; put it before the ModelAdmin of the theme that is in use."""

    list_display = ("name", *FACTS)
    list_filter = (AliasFilter, StateFilter, KindFilter, HostFilter)
    search_fields = ("name",)
    search_help_text = _("Words of the name, or of the holder")
    ordering = ("name",)
    show_facets = admin.ShowFacets.NEVER
    fields = ("name", *FACTS)
    readonly_fields = fields
    actions = ("force_release",)

    class Media:
        css = {"all": ["distlock_app/locks.css"]}
        js = ["distlock_app/countdown.js"]

    # Who may do what.

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: LiveLock | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: LiveLock | None = None) -> bool:
        return False

    def has_clear_permission(self, request: HttpRequest) -> bool:
        """Tell whether this user may force a release: not whoever may look at locks."""
        allowed = request.user.has_perm("distlock_app.clear_lock")
        return allowed and self.has_view_permission(request)

    # Where the rows come from.

    def get_queryset(self, request: HttpRequest) -> Any:
        reading = self.reading(request)
        if _looks_through(request) or not _cut(request, reading):
            return LiveLocks(reading.holdings)
        return PagedLocks([e for e in reading.engines if _chosen(request, e.alias)])

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        """Keep those in whose name or holder each of the words is."""
        words = search_term.casefold().split()
        if not words:
            return queryset, False

        def wanted(held: Holding) -> bool:
            parts = (shown(held.name), live.place_of(held.holder), live.activity_of(held.holder))
            text = " ".join(parts).casefold()
            return all(word in text for word in words)

        found = queryset.where(wanted)
        if cut := _cut(request, self.reading(request)):
            # Whatever else was not looked at: a lock is found by its whole name.
            key = key_of(search_term)
            found = found.with_these(live.read(dict.fromkeys(cut, [key])).holdings)
        return found, False

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> LiveLock | None:
        """Return what the view has read before: asking twice might give two answers."""
        row: LiveLock | None = getattr(request, "distlock_row", None)
        return row

    def reading(self, request: Any) -> live.Reading:
        """Ask the engines, once for each request; longer to look through many locks."""
        if not hasattr(request, "distlock_reading"):
            reading = live.read(most=MOST_SORTED)
            if _looks_through(request):
                reading = live.read_more(reading, _cut(request, reading), LOOKED_FOR)
            request.distlock_reading = reading
        found: live.Reading = request.distlock_reading
        return found

    # The pages.

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view(self.clear_view)
        return [path("clear/", view, name="distlock_app_livelock_clear"), *super().get_urls()]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        reading = self.reading(request)
        cut = _cut(request, reading)
        looks = _looks_through(request)
        more = {
            "title": _("Live locks"),
            "engines": reading.engines,
            "looked_through": [e for e in reading.engines if looks and e.alias in cut],
            "paged": cut and not looks,
            "read_at": timezone.now(),
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
        if not self.has_view_permission(request):
            raise PermissionDenied
        found = clearing.rows_of([unquote(object_id)])
        if not found.rows:
            self._warn(request, found.problems or [gettext("There is no such lock.")])
            return HttpResponseRedirect(self._url("changelist"))
        row = request.distlock_row = found.rows[0]
        more = {
            "title": _("Live lock"),
            "clear_url": f"{self._url('clear')}?{clearing.query_of([row])}",
            "may_clear": self.has_clear_permission(request),
        }
        return super().change_view(
            request, quote(row.pk), form_url, {**more, **(extra_context or {})}
        )

    def history_view(
        self, request: Any, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show who forced a release of this lock, whoever held it, also when it is free."""
        try:
            alias, key, _seen = parts_of(unquote(object_id))
        except ValueError:
            return HttpResponseRedirect(self._url("changelist"))
        lock_id = id_of(alias, key)
        entry = LogEntry.objects.filter(object_id=lock_id).order_by("pk").last()
        rows = [] if entry else clearing.rows_of([lock_id]).rows
        name = entry.object_repr if entry else rows[0].name if rows else key
        request.distlock_row = LiveLock(id=lock_id, name=name)
        return super().history_view(request, quote(lock_id), extra_context)

    @admin.action(permissions=["clear"], description=_("Force release of selected locks"))
    def force_release(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        """Ask for confirmation; what changed hands since the list was shown is left out."""
        if request.POST.get("select_across", "0") == "0":
            found = clearing.rows_of(request.POST.getlist(ACTION_CHECKBOX_NAME))
            self._warn(request, found.problems)
            rows = found.rows
        else:
            rows = list(queryset[: MOST_CLEARED + 1])
        return self._confirm(request, rows, clearing.ReasonForm()) if rows else None

    def clear_view(self, request: HttpRequest) -> HttpResponse:
        """Show the confirmation; on POST take the locks away."""
        if not self.has_clear_permission(request):
            raise PermissionDenied
        posted = request.method == "POST"
        form = clearing.ReasonForm(request.POST if posted else None)
        asked = (request.POST if posted else request.GET).getlist("lock")
        found = clearing.rows_of(asked[: MOST_CLEARED + 1])
        self._warn(request, found.problems)
        if not found.rows:
            return HttpResponseRedirect(self._url("changelist"))
        if len(found.rows) > MOST_CLEARED or not form.is_valid():
            return self._confirm(request, found.rows, form)
        for row in found.rows:
            self._clear(request, row, form.cleaned_data["reason"])
        return HttpResponseRedirect(self._url("changelist"))

    def _clear(self, request: Any, row: LiveLock, reason: str) -> None:
        facts = {"name": row.name, "holder": clearing.holder_of(row), "reason": reason}
        problem = clearing.clear(row, request.user.get_username(), reason)
        if problem:
            self._warn(request, [problem])
            return
        # The history is the lock's, whoever held it.
        lock = LiveLock(id=id_of(row.holding.alias, row.holding.key), name=row.name)
        self.log_change(
            request, lock, gettext("Forced release from %(holder)s: %(reason)s") % facts
        )
        done = gettext("“%(name)s” was released; %(holder)s held it.") % facts
        self.message_user(request, done, messages.SUCCESS)

    def _confirm(
        self, request: Any, rows: Sequence[LiveLock], form: clearing.ReasonForm
    ) -> HttpResponse:
        if len(rows) > MOST_CLEARED:
            text = gettext("Select at most %(most)d locks at a time.") % {"most": MOST_CLEARED}
            self._warn(request, [text])
            return HttpResponseRedirect(self._url("changelist"))
        context = {
            **self.admin_site.each_context(request),
            "title": ngettext("Force release of a lock", "Force release of locks", len(rows)),
            "opts": self.opts,
            "rows": [
                (row, self.holder(row), self.held_for(row), self.time_left(row)) for row in rows
            ],
            "form": form,
            "media": self.media,
            "clear_url": self._url("clear"),
            "list_url": self._url("changelist"),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/distlock_app/livelock/clear.html", context)

    def _warn(self, request: HttpRequest, problems: Iterable[str]) -> None:
        for problem in problems:
            self.message_user(request, problem, messages.WARNING)

    def _url(self, page: str) -> str:
        name = f"admin:distlock_app_livelock_{page}"
        return reverse(name, current_app=self.admin_site.name)


def _looks_through(request: HttpRequest) -> bool:
    """Tell whether locks are picked or sorted, so that each has to be looked at."""
    return any(request.GET.get(name) for name in ("q", "o", "state", "kind", "host"))


def _chosen(request: HttpRequest, alias: str) -> bool:
    return request.GET.get("alias") in (None, "", alias)


def _cut(request: HttpRequest, reading: live.Reading) -> list[str]:
    """Return the aliases asked for that hold more than was read."""
    return [e.alias for e in reading.engines if e.truncated and _chosen(request, e.alias)]
