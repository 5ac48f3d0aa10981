"""What the admin's actions do: compare with what the page showed, act, or explain why not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from django import forms
from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..backends.base import Purgeable
from ..claims import Holding
from ..core import operators
from ..core.limits import MAX_TTL
from ..core.registry import registry
from ..errors import BackendError
from ..models import LiveLock
from ..operations import history
from ..operations.holdings import has_version, who
from ..operations.reading import SLOW, Health, ask, worded
from ..primitives.names import SHOWN_LENGTH, key_of, shown
from .rows import id_of, read_again, row_of


class ReasonForm(forms.Form):
    """Why a lock is taken away from its holder: kept in the log and in the admin's history."""

    reason = forms.CharField(
        label=_("Reason"),
        max_length=SHOWN_LENGTH,
        widget=forms.TextInput(attrs={"class": "vTextField dl-reason", "autofocus": True}),
    )

    def clean_reason(self) -> str:
        """Return one printable line: it goes into logs."""
        return shown(" ".join(self.cleaned_data["reason"].split()))


class ExtendForm(forms.Form):
    """How long a lock is to last at least."""

    seconds = forms.IntegerField(
        label=_("Seconds"),
        min_value=1,
        max_value=int(MAX_TTL),
        initial=60,
        # The page shows it inside another form.
        widget=forms.NumberInput(attrs={"class": "dl-number", "form": "dl-extend"}),
    )


class CountForm(forms.Form):
    """How long the rows to count have been free.

    At least a day: fences continue from the server's clock, which may be set back a little.
    """

    days = forms.IntegerField(
        label=_("Days"),
        min_value=1,
        max_value=36_500,
        widget=forms.NumberInput(attrs={"class": "dl-number"}),
    )


CLEAR_EXPIRED, PURGE = "clear-expired", "purge"


class LeftoverForm(CountForm):
    """What to delete from a lock table; `days` is for PURGE."""

    alias = forms.ChoiceField(choices=lambda: [(a, a) for a in tables()])
    action = forms.ChoiceField(choices=[(CLEAR_EXPIRED, ""), (PURGE, "")])


@dataclass(frozen=True, slots=True)
class Found:
    """The locks asked for that are still held as shown, and what to say of the others."""

    rows: list[LiveLock]
    problems: list[str]  # for the user who asked
    holdings: list[Holding]  # of these locks, by any owner
    free: int  # how many of these locks are


def rows_of(ids: Iterable[str]) -> Found:
    """Read these holdings again from their backends (ids: see `rows.id_of`)."""
    asked, reading = read_again(ids)
    unknown = {backend.alias: backend.reason for backend in reading.backends if not backend.known}
    problems = [_problem(shown(alias), reason) for alias, reason in unknown.items()]
    rows: dict[str, LiveLock] = {}
    free = 0
    for alias, key, version in asked:
        same = [h for h in reading.holdings if (h.alias, h.key) == (alias, key)]
        # In an id none stands for any.
        matching = [row_of(h) for h in same if has_version(h, version or None)]
        if matching:
            rows[matching[0].pk] = matching[0]
        elif same:
            problems.append(_changed_hands(row_of(same[0])))
        elif alias not in unknown:
            free += 1
    if free:
        problems.append(
            ngettext("The lock is free now.", "%(count)d locks are free now.", free)
            % {"count": free}
        )
    return Found(list(rows.values()), problems, reading.holdings, free)


def name_of(alias: str, key: str, linked: str = "") -> str:
    """Return the name of a lock, held or free; its key if the name is not known.

    `linked`: the name in the link that was followed. It cannot lie: the key is the hash of a name.
    """
    if key_of(linked) == key:
        return shown(linked)
    lock_id = id_of(alias, key)
    kind = get_content_type_for_model(LiveLock)
    entries = LogEntry.objects.filter(content_type=kind, object_id=lock_id)
    if entry := entries.order_by("pk").last():
        return entry.object_repr
    known = [row.name for row in rows_of([lock_id]).rows]
    known += [event.name for event in history.events_of(alias, key)]
    return known[0] if known else key


def clear(row: LiveLock, user: str, reason: str) -> str:
    """Take the lock from the holder in `row`; return the problem, or an empty text."""
    held = row.holding
    try:
        if operators.clear(held.alias, held.key, row.name, held.version, user, reason):
            return ""
    except BackendError as error:
        text = gettext("“%(name)s” may still be held: “%(alias)s” %(reason)s.")
        return text % {"name": row.name, "alias": held.alias, "reason": worded(error)}
    return _why_not(row)


def extend(row: LiveLock, seconds: float, user: str) -> str:
    """Extend the lock to this many seconds from now or more; return the problem, if any."""
    held = row.holding
    if not may_extend(row):
        return gettext("Locks of “%(alias)s” cannot be extended here.") % {"alias": held.alias}
    try:
        if operators.prolong(held, seconds, user):
            return ""
    except BackendError as error:
        return _problem(held.alias, worded(error))
    return _why_not(row)


def may_extend(row: LiveLock) -> bool:
    """Return whether the backend can extend this lock."""
    return row.holding.expires_in is not None and registry[row.holding.alias].backend.prolongs


def tables() -> list[str]:
    """Return the aliases whose backend keeps data of free locks."""
    return [entry.alias for entry in registry.working() if isinstance(entry.backend, Purgeable)]


def leftovers(older_than: float) -> list[tuple[Health, tuple[int | None, int | None] | None]]:
    """Count for each table what CLEAR_EXPIRED and PURGE would find; None: too much to count."""
    found = ask("left over", dict.fromkeys(tables(), methodcaller("left_over", older_than)))
    return [(health, (None, None) if health.state == SLOW else counts) for health, counts in found]


def clear_up(alias: str, action: str, older_than: float) -> tuple[str, int]:
    """Do CLEAR_EXPIRED or PURGE; return the problem, or an empty text, and the number of rows."""
    backend: Any = registry[alias].backend
    try:
        count = backend.clear_expired() if action == CLEAR_EXPIRED else backend.purge(older_than)
    except BackendError as error:
        return _problem(alias, worded(error)), 0
    return "", int(count)


def holder_of(row: LiveLock) -> str:
    """Return the holder of the lock, for a sentence."""
    return who(row.holding.holder) or gettext("an unnamed holder")


def _why_not(row: LiveLock) -> str:
    """Read the lock again; return why nothing was done."""
    found = rows_of([row.pk])
    return found.problems[0] if found.problems else _changed_hands(row)


def _problem(alias: str, reason: str) -> str:
    return gettext("“%(alias)s”: %(reason)s.") % {"alias": alias, "reason": reason}


def _changed_hands(row: LiveLock) -> str:
    text = gettext(
        "“%(name)s” changed hands meanwhile and was left alone: %(holder)s holds it now."
    )
    return text % {"name": row.name, "holder": holder_of(row)}
