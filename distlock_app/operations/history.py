"""The history: the last events of every lock in a database table, if settings ask for it.

`DISTLOCK_HISTORY` says how many events of each lock are kept. Receivers of the signals only
append to a list; a thread writes it a moment later, on connections of its own. So nothing joins
the caller's transaction, and a database that is down costs events, never a lock.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter, deque
from functools import partial, update_wrapper
from typing import Any, TypeVar

from django.conf import settings
from django.core.signals import setting_changed
from django.db import DataError, Error, connections, router, transaction
from django.db.models import QuerySet
from django.utils import timezone

from ..core.releasing import releaser
from ..core.reporting import EXIT_PATIENCE, await_reports
from ..models import LockEvent
from ..primitives import identity
from ..primitives.forks import at_exit, in_child
from ..primitives.logs import fields, logger
from ..primitives.names import key_of, shown
from ..primitives.threads import Worker
from ..signals import lock_acquired, lock_busy, lock_cleared, lock_lost, lock_released

T = TypeVar("T")

# Seconds for which events are gathered before they are written.
EVERY = 1.0
# Events of a process that wait to be written; beyond that, the oldest are dropped.
MOST_WAITING = 10_000
# Events of all locks together that are kept.
MOST_KEPT = 100_000


def kept() -> int:
    """Return how many events of each lock are kept; 0: none are, or the setting is wrong."""
    count = getattr(settings, "DISTLOCK_HISTORY", None)
    return 0 if trouble() else count or 0


def trouble() -> str:
    """Return what is wrong with the setting."""
    count = getattr(settings, "DISTLOCK_HISTORY", None)
    if count is None or (type(count) is int and count >= 0):
        return ""
    return f"DISTLOCK_HISTORY must be a number of events, 0 or more, not {count!r}."


def events_of(alias: str, key: str) -> list[LockEvent]:
    """Return the last events of a lock, the newest first, by the clocks of their hosts."""
    events = LockEvent.objects.filter(alias=alias, key=key)
    return _read(events.order_by("-at", "-pk")[: kept()])


def aliases_of(name: str) -> list[str]:
    """Return the aliases under which something is known of a lock."""
    events = LockEvent.objects.filter(key=key_of(name))
    return sorted(_read(events.values_list("alias", flat=True).distinct()))


def _read(found: QuerySet[Any, T]) -> list[T]:
    """Return what is found; nothing if the database is down, or has no table of events."""
    try:
        with transaction.atomic(using=found.db):
            return list(found)
    except Error:
        text = "lock events could not be read"
        logger.warning(text, exc_info=True, extra=fields("not_read", ""))
        return []


_Database = tuple[str, Any]


def _database() -> _Database:
    """Return the alias and the name of the database that an event of now goes to."""
    using = router.db_for_write(LockEvent)
    return using, connections.settings[using]["NAME"]


class _Writer:
    """Writes what happened in this process, on a thread of its own."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[_Database, dict[str, Any]]] = deque(maxlen=MOST_WAITING)
        self._scheduled = False  # the worker will take all that waits
        self._failing = False  # logged only once
        self._hurry = threading.Event()
        self._noted: Counter[tuple[str, str]] = Counter()
        self._worker = Worker("distlock-history", self._work)

    def note(self, **event: Any) -> None:
        """Remember an event."""
        self._waiting.append((_database(), event))
        if not (self._scheduled and self._worker.running):
            self._scheduled = True
            self._worker.put(None)

    def flush(self, within: float = EXIT_PATIENCE) -> None:
        """Wait until everything is written, for `within` seconds at most."""
        self._hurry.set()
        self._worker.finish(within)
        self._hurry.clear()

    def _work(self, _: list[None]) -> None:
        self._hurry.wait(EVERY)
        self._scheduled = False
        try:
            self._write()
        except Exception:  # whatever it is: the next events may be written
            if not self._failing:
                text = "lock events could not be written"
                logger.warning(text, exc_info=True, extra=fields("not_recorded", ""))
            self._failing = True
        finally:
            connections.close_all()  # those of this thread

    def _write(self) -> None:
        here = _database()
        last = self._take(here)
        if not last:
            return
        using, _name = here
        rows = [row for lock in last.values() for row in lock]
        events = LockEvent.objects.using(using)
        try:
            events.bulk_create(rows, batch_size=100)
        except DataError:  # one has a letter that the database cannot keep: all or none are written
            for row in rows:  # escapes may be longer than the column
                row.name, row.detail = _in_ascii(row.name)[:255], _in_ascii(row.detail)
            events.bulk_create(rows, batch_size=100)
        self._noted.update({lock: len(rows) for lock, rows in last.items()})
        self._trim(using, len(rows))
        self._failing = False

    def _take(self, here: _Database) -> dict[tuple[str, str], deque[LockEvent]]:
        """Take what waits; return the last events of each lock, no more than will be kept."""
        last: dict[tuple[str, str], deque[LockEvent]] = {}
        for _ in range(len(self._waiting)):
            database, event = self._waiting.popleft()
            if database != here:  # a test run began or ended
                continue
            row = LockEvent(**event)
            last.setdefault((row.alias, row.key), deque(maxlen=kept() or 1)).append(row)
        return last

    def _trim(self, using: str, written: int) -> None:
        """Delete the oldest events: of the locks that are busy here, and of all together."""
        events = LockEvent.objects.using(using)
        for alias, key in [lock for lock, count in self._noted.items() if count * 2 > kept()]:
            del self._noted[alias, key]
            _keep(events.filter(alias=alias, key=key), kept())
        # At random: a process may end long before it has written many events.
        if secrets.randbelow(MOST_KEPT) < written * 100:
            self._noted.clear()
            _keep(events, MOST_KEPT)


def _in_ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


def _keep(events: Any, most: int) -> None:
    """Delete all but the latest `most` of these events."""
    for pk in events.order_by("-pk").values_list("pk", flat=True)[most : most + 1]:
        events.filter(pk__lte=pk).delete()


writer = _Writer()
in_child(writer.__init__)  # type: ignore[misc]


def _write_all() -> None:
    """Write everything, also what is only now released in the background."""
    if kept():
        releaser.drain()
        await_reports()
        writer.flush()


at_exit(writer, _write_all)


def _note(event: str, alias: str, name: str, **facts: Any) -> None:
    detail, fence = "", facts.get("fence")
    if event in LockEvent.WAITS:
        detail = identity.holder_text()
    elif event == LockEvent.CLEARED:
        detail = shown(": ".join(filter(None, (facts["user"], facts["reason"]))))
        fence = int(facts["version"]) if (facts["version"] or "").isdecimal() else None
    elif event == LockEvent.LOST:
        detail = shown(facts["reason"])
    writer.note(
        at=timezone.now(),
        event=event,
        alias=alias,
        name=shown(name),  # as short as it is stored: events may wait for a database that is down
        key=facts.get("key") or key_of(name),  # of a cleared one, `name` may be what a page shows
        seconds=facts.get("waited", facts.get("held")),
        fence=fence,
        detail=detail,
    )


_EVENT_OF = {
    lock_acquired: LockEvent.ACQUIRED,
    lock_busy: LockEvent.BUSY,
    lock_released: LockEvent.RELEASED,
    lock_lost: LockEvent.LOST,
    lock_cleared: LockEvent.CLEARED,
}
# With a name each: Django logs it if one raises, and without it calls none of the others.
_RECEIVERS = {of: update_wrapper(partial(_note, event), _note) for of, event in _EVENT_OF.items()}


def listen() -> None:
    """Listen to the signals if settings ask for a history, else not."""
    for signal, receiver in _RECEIVERS.items():
        signal.disconnect(receiver)
        if kept():
            signal.connect(receiver, weak=False)


def _on_setting_changed(*, setting: str, **kwargs: Any) -> None:
    if setting == "DISTLOCK_HISTORY":
        listen()


setting_changed.connect(_on_setting_changed)
