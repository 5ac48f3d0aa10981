"""What the processes of test_fencing.py do."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

from django.db import transaction

from distlock_app import Hold, Lock, LockLost
from tests.app.guarded_models import Shelf
from tests.processes import hear, say


def write_late(pks: list[int], ttl: float) -> dict[str, int]:
    """Hold the lock of each shelf, be stopped, write; count what was refused, and by whom."""
    work = [
        (Shelf.objects.get(pk=pk), Lock(f"shelf:{pk}", ttl=ttl, renew=False).acquire(wait=30))
        for pk in pks
    ]
    say("holding")
    hear()
    refused: Counter[str] = Counter()
    for shelf, hold in work:
        shelf.stock = -1
        fenced = Shelf.objects.fenced(hold.fence).filter(pk=shelf.pk)
        ways = {
            "save": lambda: shelf.save(fence=hold),  # noqa: B023
            "delete": lambda: shelf.delete(fence=hold),  # noqa: B023
            "update": lambda: fenced.update(stock=-1),  # noqa: B023
            "pin": lambda: pin_and_save(shelf, hold),  # noqa: B023
        }
        for name, way in ways.items():
            # The clock of this process knows, and says so.
            refused[f"{name} by clock"] += name != "update" and is_refused(way)
            # As if it had been asked just before the process was stopped.
            with patch.object(Hold, "check"):
                refused[name] += is_refused(way)
        hold.abandon()
    return refused


def is_refused(way: object) -> bool:
    try:
        way()  # type: ignore[operator]
    except LockLost:
        return True
    return False


def pin_and_save(shelf: Shelf, hold: Hold) -> None:
    with transaction.atomic():
        hold.pin()
        shelf.save()


def save_pinned(pk: int, ttl: float) -> str:
    """Save a shelf in a transaction that pins the lock; be stopped before the commit."""
    with Lock(f"shelf:{pk}", ttl=ttl).acquire(wait=30) as hold:
        with transaction.atomic():
            hold.pin()
            Shelf.objects.filter(pk=pk).update(stock=1)
            say("pinned")
            hear()
            hold.check()
    return "committed"
