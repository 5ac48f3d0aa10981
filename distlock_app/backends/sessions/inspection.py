"""Inspection of locks that end with their session: list them, and end one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from operator import attrgetter

from django.core import checks

from ...claims import Holding
from ...errors import BackendError
from ...primitives.names import key_of
from ..base import no_answer
from .asking import SessionsBackend
from .lock_session import LockSession
from .notes import from_note, note
from .one_server import check_one_server


class Inspection(SessionsBackend):
    """Asks the server for the sessions that have locks of ours, of any process."""

    def holders(self, key: str | None = None) -> Iterator[Holding]:
        held = [session for session in list(self._taken.values()) if not session.waits]
        ours = {s.number: note(claim, s.fence) for s in held if (claim := s.claim)}
        keys = [key for key, _ in list(self._taken)]
        found = self._pool.ask(lambda session: list(session.locks(key, keys)))
        for lock in sorted(found, key=attrgetter("key", "number")):
            # What we know ourselves, or else what the session's last statement said.
            fields = from_note(ours.get(lock.number), lock.key) or from_note(lock.note, lock.key)
            tag = fields.pop("tag", "")
            # Anybody may wait, and say anything. So a name that was shortened is not shown, either.
            named = from_note(lock.named, lock.key).get("name", "")
            fields.setdefault("name", named if key_of(named) == lock.key else f"({lock.key})")
            fields.setdefault("holder", {"host": lock.address, "who": f"session {lock.number}"})
            if (began_us := fields.get("fence") or lock.since_us) is not None:
                fields["held_for"] = max(0.0, (lock.now_us - began_us) / 1e6)
            yield Holding(
                key=lock.key,
                alias=self.alias,
                version=f"{lock.number}-{tag}",
                kind=lock.kind,
                waiters=lock.waiters,
                **fields,
            )

    def clear(self, key: str, if_version: str | None = None) -> int:
        held = [holding.version for holding in self.holders(key)]
        found = [one for one in held if if_version is None or self.same_version(one, if_version)]
        numbers = [int(one.partition("-")[0]) for one in found]
        return self._pool.ask(lambda session: sum(session.kill(key, number) for number in numbers))

    def same_version(self, one: str, other: str) -> bool:
        """Compare session and tag: one of a server that shows no statements has no tag."""
        (number, _, tag), (number2, _, tag2) = one.partition("-"), other.partition("-")
        return number == number2 and (not tag or not tag2 or tag == tag2)

    def ping(self) -> None:
        self._pool.ask(lambda session: session.ask("SELECT 1"))

    def check(self, *, ask: bool = False) -> list[checks.CheckMessage]:
        if not ask:
            return []
        try:
            found = self._pool.ask(lambda session: list(self.look_around(session)))
            return [*found, *check_one_server(self.alias, self.using)]
        except BackendError as error:
            return [no_answer(self.alias, error, "distlock_app.E031")]

    @abstractmethod
    def look_around(self, session: LockSession) -> Iterator[checks.CheckMessage]:
        """Yield what makes these locks unreliable on this server."""
