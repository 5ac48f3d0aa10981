"""The exceptions of locks, fences and version conflicts; who raises one writes its text."""

from __future__ import annotations

from typing import Any


class LockError(Exception):
    """The lock cannot be used in this way."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or type(self).__doc__)


class LockBusy(LockError):
    """Another owner holds the lock, and the caller did not wait."""

    def __init__(self, message: str | None = None, *, free_in: float | None = None) -> None:
        super().__init__(message)
        # Seconds until the other claim expires unless its holder renews it; None: unknown.
        self.free_in = free_in


class LockTimeout(LockBusy):
    """The lock was not free within the time that the caller waited."""


class LockLost(LockError):
    """Another owner may already have the lock: undo the work done under it, or do it again."""


class NotHeld(LockError):
    """The hold was already released, or belongs to another process."""


class BackendError(LockError):
    """The backend could not be reached or refused the request, so the lock's state is unknown."""


class Terminated(SystemExit):
    """SIGTERM came while a command ran under its lock."""


class StaleObjectError(Exception):
    """Another writer changed or deleted the row since it was read."""

    def __init__(
        self,
        message: str | None = None,
        *,
        obj: Any = None,
        expected: Any = None,
        found: Any = None,
    ) -> None:
        super().__init__(message or type(self).__doc__)
        self.obj = obj
        # The version that was read, and the one in the database (None: the row is gone).
        self.expected = expected
        self.found = found


class StaleFenceError(LockLost):
    """A later holder of the lock has written the row, so this write was refused."""

    def __init__(
        self,
        message: str | None = None,
        *,
        obj: Any = None,
        fence: int | None = None,
        found: int | None = None,
    ) -> None:
        super().__init__(message)
        self.obj = obj
        # The fencing token of the writer, and that of the row (None: the row is gone).
        self.fence = fence
        self.found = found


class RetriesExhausted(StaleObjectError):
    """Every attempt of a retrying save had a conflict with another writer."""
