"""Buttons of the admin's live locks: force a release, extend a lock, clear up lock tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..models import LiveLock
from . import clearing
from .columns import FACTS, LiveColumns
from .rows import id_of

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[LiveLock]
else:
    _Base = object

# Nobody reads a longer confirmation, and a form may have no more than 1,000 fields.
MOST_CLEARED = 200

DAY = 24 * 3600
# Days; the rows of locks that have been free for as long are counted at first.
FREE_FOR = 7


class LiveActions(LiveColumns, _Base):
    """The actions; each needs POST and its own permission, and is in the change history."""

    def has_clear_permission(self, request: HttpRequest) -> bool:
        """Return whether this user may force releases; seeing locks is not enough."""
        allowed = request.user.has_perm("distlock_app.clear_lock")
        return allowed and self.has_view_permission(request)

    def has_extend_permission(self, request: HttpRequest) -> bool:
        """Return whether this user may extend locks."""
        allowed = request.user.has_perm("distlock_app.extend_lock")
        return allowed and self.has_view_permission(request)

    @admin.action(permissions=["clear"], description=_("Force release of selected locks"))
    def force_release(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        """Ask for confirmation, without locks that changed hands since the list was shown."""
        if request.POST.get("select_across", "0") == "0":
            found = clearing.rows_of(request.POST.getlist(ACTION_CHECKBOX_NAME))
            self._warn(request, *found.problems)
            rows = found.rows
        else:
            rows = list(queryset[: MOST_CLEARED + 1])
        return self._confirm(request, rows, clearing.ReasonForm()) if rows else None

    def clear_view(self, request: HttpRequest) -> HttpResponse:
        """Show the confirmation; on POST, release the locks."""
        self._require(self.has_clear_permission(request))
        posted = request.method == "POST"
        form = clearing.ReasonForm(request.POST if posted else None)
        asked = (request.POST if posted else request.GET).getlist("lock")
        found = clearing.rows_of(asked[: MOST_CLEARED + 1])
        if not found.rows:
            # Nothing was asked for if a login on the way, say, has lost the form.
            nothing = gettext("Nothing was released. Please try again.")
            return self._back(request, *(found.problems or [nothing]))
        self._warn(request, *found.problems)
        if len(found.rows) > MOST_CLEARED or not form.is_valid():
            return self._confirm(request, found.rows, form)
        for row in found.rows:
            self._clear(request, row, form.cleaned_data["reason"])
        return self._back(request)

    def extend_view(self, request: HttpRequest) -> HttpResponse:
        """Extend a lock to this many seconds from now or more; POST only."""
        self._require(self.has_extend_permission(request))
        if request.method != "POST":  # a login on the way, say, has lost the form
            return self._back(request, gettext("Nothing was extended. Please try again."))
        form = clearing.ExtendForm(request.POST)
        found = clearing.rows_of([request.POST.get("lock", "")])
        problems = [*found.problems, *(str(e) for errors in form.errors.values() for e in errors)]
        if not found.rows:
            return self._back(request, *(problems or [gettext("There is no such lock.")]))
        row = found.rows[0]
        if problems:
            self._warn(request, *problems)
        else:
            self._extend(request, row, form.cleaned_data["seconds"])
        return HttpResponseRedirect(self._url("change", row.pk))

    def leftover_view(self, request: HttpRequest) -> HttpResponse:
        """Count expired claims and old rows in lock tables; on POST, clear or purge them."""
        self._require(self.has_clear_permission(request))
        posted = request.method == "POST"
        form: clearing.CountForm = (
            clearing.LeftoverForm(request.POST)
            if posted
            else clearing.CountForm({"days": FREE_FOR, **request.GET.dict()})
        )
        if form.is_valid() and posted:
            self._clear_up(request, **form.cleaned_data)
            return HttpResponseRedirect(f"{self._url('leftover')}?days={form.cleaned_data['days']}")
        days = form.cleaned_data.get("days", FREE_FOR)
        facts = {"days": days, "form": form, "tables": clearing.leftovers(days * DAY)}
        return self._page(request, "leftover", _("Clear up lock tables"), facts)

    def _extend(self, request: Any, row: LiveLock, seconds: int) -> None:
        facts = {"name": row.name, "holder": clearing.holder_of(row), "seconds": seconds}
        problem = clearing.extend(row, seconds, str(request.user.get_username()))
        entry = gettext("Extended for %(holder)s: at least %(seconds)d seconds left")
        done = gettext("“%(name)s” now lasts at least %(seconds)d more seconds.")
        self._report(request, _lock_of(row), problem, entry % facts, done % facts)

    def _clear_up(self, request: Any, *, alias: str, action: str, days: int) -> None:
        problem, count = clearing.clear_up(alias, action, days * DAY)
        if action == clearing.PURGE:
            text = ngettext("%(count)d row deleted.", "%(count)d rows deleted.", count)
        else:
            text = ngettext("%(count)d lock cleared.", "%(count)d locks cleared.", count)
        done = text % {"count": count}
        self._report(request, LiveLock(id=alias, name=alias), problem, done, done)

    def _clear(self, request: Any, row: LiveLock, reason: str) -> None:
        facts = {"name": row.name, "holder": clearing.holder_of(row), "reason": reason}
        problem = clearing.clear(row, str(request.user.get_username()), reason)
        entry = gettext("Forced release from %(holder)s: %(reason)s")
        done = gettext("“%(name)s” was released; %(holder)s held it.")
        self._report(request, _lock_of(row), problem, entry % facts, done % facts)

    def _report(self, request: Any, lock: LiveLock, problem: str, entry: str, done: str) -> None:
        """Show the problem; without one, log what was done and show that."""
        if problem:
            self._warn(request, problem)
            return
        self.log_change(request, lock, entry)
        self.message_user(request, done, messages.SUCCESS)

    def _confirm(
        self, request: Any, rows: Sequence[LiveLock], form: clearing.ReasonForm
    ) -> HttpResponse:
        if len(rows) > MOST_CLEARED:
            text = gettext("Select at most %(most)d locks at a time.") % {"most": MOST_CLEARED}
            return self._back(request, text)
        title = ngettext("Force release of a lock", "Force release of locks", len(rows))
        facts = [getattr(self, fact) for fact in FACTS]
        context = {
            "headings": [fact.short_description for fact in facts],
            "rows": [
                (row, [(fact.short_description, fact(row)) for fact in facts]) for row in rows
            ],
            "form": form,
            "clear_url": self._url("clear"),
        }
        return self._page(request, "clear", title, context)

    def _require(self, allowed: bool) -> None:
        if not allowed:
            raise PermissionDenied

    def _warn(self, request: HttpRequest, *problems: str) -> None:
        for problem in problems:
            self.message_user(request, problem, messages.WARNING)

    def _back(self, request: HttpRequest, *problems: str) -> HttpResponseRedirect:
        """Go to the list, and show the problems there."""
        self._warn(request, *problems)
        return HttpResponseRedirect(self._list())

    def _page(self, request: Any, name: str, title: Any, facts: dict[str, Any]) -> HttpResponse:
        """Return a page of our own with these facts."""
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": title,
            "opts": self.opts,
            "media": self.media,
            "list_url": self._list(),
            **facts,
        }
        return TemplateResponse(request, f"admin/distlock_app/livelock/{name}.html", context)

    def _list(self) -> str:
        return self._url("changelist")

    def _url(self, page: str, *ids: str) -> str:
        name = f"admin:distlock_app_livelock_{page}"
        return reverse(name, args=[*map(quote, ids)], current_app=self.admin_site.name)


def _lock_of(row: LiveLock) -> LiveLock:
    """Return what the change history is about: the lock, with any holder."""
    return LiveLock(id=id_of(row.holding.alias, row.holding.key), name=row.name)
