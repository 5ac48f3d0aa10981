"""The rows of the admin's list of live locks, and a list of them that answers as a queryset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, unquote

from django.core.exceptions import FieldError

from .claims import Holding
from .live import activity_of, place_of, state_of
from .models import LiveLock
from .names import shown


def id_of(alias: str, key: str, seen: str = "") -> str:
    """Return the id of a holding, or without `seen` of the lock whoever holds it."""
    parts = [alias, key, seen] if seen else [alias, key]
    return ":".join(quote(part, safe="") for part in parts)


def parts_of(row_id: str) -> tuple[str, str, str]:
    """Return alias, key and seen of an id from `id_of`; raise ValueError if it is none."""
    alias, key, *seen = (unquote(part) for part in row_id.split(":"))
    if len(seen) > 1 or not alias or not key:
        raise ValueError(f"not the id of a live lock: {row_id!r}")
    return alias, key, "".join(seen)


def row_of(holding: Holding) -> LiveLock:
    """Return the row for one holding."""
    row = LiveLock(
        id=id_of(holding.alias, holding.key, holding.seen),
        name=shown(holding.name),
    )
    row.holding = holding
    row.state = state_of(holding)
    row.place = place_of(holding.holder)
    row.activity = activity_of(holding.holder)
    return row


# What the list may be sorted by. None sorts last, as "for ever" should.
_SORT_KEYS: dict[str, Callable[[LiveLock], Any]] = {
    "name": lambda row: row.name.casefold(),
    "pk": lambda row: row.pk,
    "alias": lambda row: row.holding.alias,
    "kind": lambda row: row.holding.kind,
    "state": lambda row: row.state,
    "expires_in": lambda row: _number(row.holding.expires_in),
    "held_for": lambda row: _number(row.holding.held_for),
    "place": lambda row: (row.place, row.activity),
    "waiters": lambda row: _number(row.holding.waiters),
    "fence": lambda row: _number(row.holding.fence),
}


def _number(value: float | None) -> float:
    return float("inf") if value is None else value


class LiveLocks:
    """A list of rows with what the admin's change list asks of a queryset, and no more."""

    model = LiveLock
    ordered = True
    totally_ordered = True  # asked for since Django 6.1
    # A row has no relations, and no order but the one that is asked for.
    query = SimpleNamespace(select_related=True, order_by=())

    def __init__(self, rows: Iterable[LiveLock]) -> None:
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[LiveLock]:
        return iter(self._rows)

    def __getitem__(self, place: Any) -> Any:
        found = self._rows[place]
        return LiveLocks(found) if isinstance(place, slice) else found

    def count(self) -> int:
        return len(self._rows)

    def where(self, wanted: Callable[[LiveLock], bool]) -> LiveLocks:
        """Return the rows for which `wanted` says so."""
        return LiveLocks(row for row in self._rows if wanted(row))

    def filter(self, *conditions: Any, **lookups: Any) -> LiveLocks:
        """Return the rows with these ids (`pk__in`), the one lookup that the admin needs."""
        ids = lookups.pop("pk__in", None)
        if lookups or any(conditions):
            raise FieldError("live locks have no such field")
        if ids is None:
            return self
        wanted = set(map(str, ids))
        return self.where(lambda row: row.pk in wanted)

    def order_by(self, *fields: str) -> LiveLocks:
        """Return the rows in this order; a leading "-" turns it round."""
        rows = sorted(self._rows, key=_SORT_KEYS["pk"])
        for name in reversed(fields):  # sorting is stable: the first field decides
            rows.sort(key=_SORT_KEYS[name.lstrip("-")], reverse=name.startswith("-"))
        return LiveLocks(rows)

    def distinct(self) -> LiveLocks:
        return self

    def _clone(self) -> LiveLocks:
        return self
