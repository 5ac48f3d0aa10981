"""Engines that fail as real ones do, for the pages and commands that have to live with it."""

from __future__ import annotations

import threading

from distlock_app.backends.base import BaseLockBackend, Purgeable
from distlock_app.backends.locmem import LocMemBackend
from distlock_app.errors import BackendError


class DownBackend(LocMemBackend):
    """Cannot be reached; its driver quotes a password in the error."""

    def ping(self):
        raise BackendError("no route to db7") from OSError("postgresql://me:hunter2@db7/shop")


class BrokenBackend(LocMemBackend):
    """Has a bug."""

    def ping(self):
        return 1 / 0


class UnreachedBackend(LocMemBackend):
    """Grants nothing, for it cannot be asked."""

    def acquire(self, claim, wait):
        raise BackendError("no route to db7")


class HangingBackend(LocMemBackend):
    """Accepts the question and says nothing until the test lets it."""

    answers = threading.Event()
    asked = 0

    def ping(self):
        type(self).asked += 1
        self.answers.wait(30)


class CrowdedBackend(LocMemBackend):
    """Answers at once, but holds more locks than it can list before the test lets it."""

    answers = threading.Event()

    def page(self, start, count):
        self.answers.wait(30)
        return super().page(start, count)


class TiringBackend(LocMemBackend):
    """Answers for a page of its locks, and no more for all of them."""

    def page(self, start, count):
        held = list(super().holders())
        return held[start : start + count], len(held)

    def holders(self, key=None):
        raise BackendError("no route to db7")


class StubbornBackend(LocMemBackend, Purgeable):
    """Goes down between the look at a lock, or at what is left over, and what is done then."""

    def clear(self, *args, **options):
        raise BackendError("no route to db7") from OSError("postgresql://me:hunter2@db7/shop")

    prolong = clear_expired = purge = clear

    def left_over(self, older_than):
        return 3, 4


class UnlistedBackend(LocMemBackend):
    """Takes and releases locks, and cannot say which."""

    lists = False
    holders = BaseLockBackend.holders
    clear = BaseLockBackend.clear


class HoardingBackend(LocMemBackend, Purgeable):
    """Keeps data of free locks, but in no table."""

    def left_over(self, older_than):
        return 7, 0


class DullBackend(LocMemBackend):
    """Has nothing that an engine need not have."""

    prolongs = False
