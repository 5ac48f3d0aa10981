"""Rows of the admin's list of live locks, and a list of them that acts as a queryset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, unquote

from django.core.exceptions import FieldError

from ..claims import Holding
from ..models import LiveLock
from ..operations.holdings import activity_of, place_of, state_of, urgency
from ..operations.reading import Health, Reading, read, read_pages
from ..primitives.names import is_key, shown


def id_of(alias: str, key: str, version: str = "") -> str:
    """Return the id of a holding, or without `version` of the lock with any holder."""
    parts = [alias, key, version] if version else [alias, key]
    return ":".join(quote(part, safe="") for part in parts)


def parts_of(row_id: str) -> tuple[str, str, str] | None:
    """Return alias, key and version of an id from `id_of`; None if it was made up by hand."""
    alias, key, version, *_ = (*map(unquote, row_id.split(":")), "", "")
    known = row_id.count(":") <= 2 and alias and "\0" not in alias and is_key(key)
    return (alias, key, version) if known else None


def row_of(holding: Holding) -> LiveLock:
    """Return the row for one holding."""
    row = LiveLock(id=id_of(*_identity(holding)), name=shown(holding.name))
    row.holding = holding
    return row


def _identity(holding: Holding) -> tuple[str, str, str]:
    return holding.alias, holding.key, holding.version


def read_again(ids: Iterable[str]) -> tuple[list[tuple[str, str, str]], Reading]:
    """Return the parts of these ids, and what is held now of these locks, by any owner."""
    asked = [parts for row_id in dict.fromkeys(ids) if (parts := parts_of(row_id))]
    keys: dict[str, dict[str, None]] = {}
    for alias, key, _ in asked:
        keys.setdefault(alias, {})[key] = None
    return asked, read(keys)


# What the list may be sorted by. None sorts last, as "for ever" should.
_SORT_KEYS: dict[str, Callable[[Holding], Any]] = {
    "urgency": urgency,
    "name": lambda held: held.name.casefold(),
    "pk": _identity,
    "alias": lambda held: held.alias,
    "kind": lambda held: held.kind,
    "state": state_of,
    "expires_in": lambda held: _number(held.expires_in),
    "held_for": lambda held: _number(held.held_for),
    "who": lambda held: activity_of(held.holder).casefold(),
    "place": lambda held: place_of(held.holder),
    "waiters": lambda held: _number(held.waiters),
}


def _number(value: float | None) -> float:
    return float("inf") if value is None else value


class LiveLocks:
    """The holdings that were read, with as much of a queryset as the admin's list uses.

    Only those that are shown become rows: creating a row takes longer than reading a holding.
    """

    model = LiveLock
    ordered = True
    totally_ordered = True  # asked for since Django 6.1
    # A row has no relations, and no order but the one that is asked for.
    query = SimpleNamespace(select_related=True, order_by=())

    def __init__(self, holdings: Iterable[Holding]) -> None:
        self._holdings = list(holdings)

    def __len__(self) -> int:
        return self.count()

    def __iter__(self) -> Iterator[LiveLock]:
        return map(row_of, self._holdings)

    def __getitem__(self, index: Any) -> Any:
        found = self._holdings[index]
        return LiveLocks(found) if isinstance(index, slice) else row_of(found)

    def count(self) -> int:
        return len(self._holdings)

    def where(self, wanted: Callable[[Holding], bool]) -> LiveLocks:
        """Return those that `wanted` accepts."""
        return LiveLocks(filter(wanted, self._holdings))

    def with_these(self, holdings: Iterable[Holding]) -> LiveLocks:
        """Return these and the given ones, each once."""
        every = {_identity(held): held for held in (*self._holdings, *holdings)}
        return LiveLocks(every.values())

    def filter(self, *conditions: Any, **lookups: Any) -> LiveLocks:
        """Return the rows with these ids (`pk__in`), the one lookup that the admin needs."""
        ids = lookups.pop("pk__in", None)
        if lookups or any(conditions):
            raise FieldError("live locks have no such field")
        if ids is None:
            return self
        wanted = set(map(str, ids))
        return self.where(lambda held: id_of(*_identity(held)) in wanted)

    def order_by(self, *fields: str) -> LiveLocks:
        """Return them sorted; a leading "-" reverses."""
        found = sorted(self._holdings, key=_SORT_KEYS["pk"])
        for name in reversed(fields):  # sorting is stable: the first field decides
            found.sort(key=_SORT_KEYS[name.lstrip("-")], reverse=name.startswith("-"))
        return LiveLocks(found)

    def _clone(self) -> LiveLocks:
        return self


class PagedLocks(LiveLocks):
    """More locks than can be sorted: one backend after the other, each in its own order.

    A row for each holder of a lock; rows are read when they are shown.
    """

    def __init__(self, backends: Iterable[Health]) -> None:
        super().__init__(())
        self._sizes = {e.alias: e.looked if e.total is None else e.total for e in backends}

    def __iter__(self) -> Iterator[LiveLock]:
        return iter(self[:])

    def __getitem__(self, index: Any) -> Any:
        first, last, _ = index.indices(self.count())
        ranges, skipped = {}, 0
        for alias, size in self._sizes.items():
            begin, end = max(first - skipped, 0), min(last - skipped, size)
            if begin < end:
                ranges[alias] = (begin, end - begin)
            skipped += size
        return LiveLocks(read_pages(ranges).holdings)

    def count(self) -> int:
        return sum(self._sizes.values())

    def where(self, wanted: Callable[[Holding], bool]) -> LiveLocks:
        """Return all: only aliases can be chosen here, and `backends` are the chosen ones."""
        return self

    def filter(self, *conditions: Any, **lookups: Any) -> LiveLocks:
        if "pk__in" not in lookups:
            return super().filter(*conditions, **lookups)  # all, or it refuses
        _, reading = read_again(lookups["pk__in"])
        return LiveLocks(reading.holdings).filter(*conditions, **lookups)

    def order_by(self, *fields: str) -> LiveLocks:
        return self
