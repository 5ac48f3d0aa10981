"""`LockSession`: what the session of one lock has to do, on any server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from ...claims import Claim
from .link import Values
from .notes import note
from .pool import ServerSession

# Why a session is refused: another process may ask the primary, and get the same lock.
REPLICA = "the server is a read-only replica: its locks do not exclude callers on the primary"


class LockSession(ServerSession):
    """A session that holds one lock, or waits for it."""

    @abstractmethod
    def take(self, claim: Claim, wait: float) -> tuple[int | None, float] | None:
        """Lock; return the fence and a time before the lock was ours, or None: it is busy."""

    @abstractmethod
    def question(self, claim: Claim) -> tuple[str, Values]:
        """Return what asks whether the lock is still this session's: a statement, its values."""

    @abstractmethod
    def unlock(self, claim: Claim) -> bool:
        """Unlock; return whether it was locked."""

    def note(self) -> str:
        """Return the note of the claim for its statements, which says whose session it is."""
        return note(self.claim, self.fence) if self.claim else ""

    @abstractmethod
    def keep(self, ttl: float) -> None:
        """Let the server keep this session for `ttl` seconds without a question."""

    @abstractmethod
    def locks(self, key: str | None, ours: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yield what the server shows of locks: fields of a Holding, and

        `number` (of the session), `now_us` (its clock), `since_us`, `note` (what the session said
        last), `named` (what a waiter said). `ours`: keys to ask for, if it shows no others.
        """

    @abstractmethod
    def stop(self, number: int) -> None:
        """End a session that waits: the server notices late that its client is gone, or never."""

    @abstractmethod
    def kill(self, key: str, number: int) -> bool:
        """End the session if it holds the lock, and wait until the lock is free."""
