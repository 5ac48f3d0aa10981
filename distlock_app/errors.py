"""Every exception that this app raises."""

from __future__ import annotations

from typing import Any


class LockError(Exception):
    """The lock could not be used as asked."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or type(self).__doc__)


class LockBusy(LockError):
    """Another owner holds the lock, and the caller did not want to wait."""

    def __init__(self, message: str | None = None, *, free_in: float | None = None) -> None:
        super().__init__(message)
        # Seconds until the claim in the way ends unless its holder renews it; None: not known.
        self.free_in = free_in

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args[0], {"free_in": self.free_in}))


class LockTimeout(LockBusy):
    """Another owner held the lock for as long as the caller was ready to wait."""


class LockLost(LockError):
    """The lock may already belong to another owner: undo what was done under it, or do it again."""


class NotHeld(LockError):
    """This hold was released before, or belongs to another process."""


class BackendError(LockError):
    """The lock backend could not be reached, or refused: it is not known who holds the lock."""


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
        # The version that the save relied on, and the one in the database (None: the row is gone).
        self.expected = expected
        self.found = found

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"obj": self.obj, "expected": self.expected, "found": self.found}
        return (_rebuild, (type(self), self.args[0], state))


class StaleFenceError(LockLost):
    """A later holder of the lock has written the row: nothing was written."""

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
        # The fence of the writer, and the one of the row (None: the row is gone).
        self.fence = fence
        self.found = found

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"obj": self.obj, "fence": self.fence, "found": self.found}
        return (_rebuild, (type(self), self.args[0], state))


class RetriesExhausted(StaleObjectError):
    """Every attempt of a retrying save met a change by another writer."""


def _rebuild(cls: type[Exception], message: str, state: dict[str, Any]) -> Exception:
    return cls(message, **state)
