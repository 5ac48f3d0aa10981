"""What engines have in common whose lock is the server's own and ends with its session."""

from __future__ import annotations

import hashlib
import json
import re
import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from time import monotonic
from typing import Any, ClassVar, Generic, TypeVar

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections
from django.db import Error as DjangoDatabaseError

from ..claims import Claim, Grant, Holding
from ..errors import BackendError
from ..identity import holder_fields
from ..names import shown
from .base import BaseLockBackend
from .lines import ANSWER_WAIT, Line, Lines, Silence, Trouble

T = TypeVar("T")
L = TypeVar("L", bound="LockLine")

# The longest wait on the server in one statement, in seconds: whoever waits for longer loses
# its place. A statement that never ends keeps PostgreSQL from cleaning up behind it.
SLICE = 30.0

# A session is asked whether it still has its lock this often, in seconds, and at least three
# times in a ttl; whether the server has closed it is seen without a question.
ASK_EVERY = 5.0

# Seconds that one heartbeat waits for the answers; late ones are picked up by the next.
BEAT_WAIT = 0.5

# What statements say to people who look at the sessions on the server.
NOTE = re.compile(r"/\* distlock (\w+) (\w+) (\d+) (\"(?:[^\"\\]|\\.)*\") (\{.*?\}) \*/", re.DOTALL)


class Died(BackendError):
    """The session ended before the answer came."""


class LockLine(Line):
    """A session that holds one lock, or waits for it."""

    @abstractmethod
    def take(self, claim: Claim, wait: float) -> tuple[int | None, float] | None:
        """Lock; return the fence and a time before the lock was ours, or None: it is busy."""

    @abstractmethod
    def question(self, claim: Claim) -> str:
        """Return the statement that asks whether the lock is still this session's."""

    @abstractmethod
    def unlock(self, claim: Claim) -> bool:
        """Unlock; return whether it was locked."""

    @abstractmethod
    def keep(self, ttl: float) -> None:
        """Let the server keep this session for `ttl` seconds without a question."""

    @abstractmethod
    def locks(self, key: str | None, ours: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yield what the server tells of locks: fields of a Holding, and

        `session`, `now_us` (its clock), `since_us`, `note` (what the session said last), `named`
        (what somebody said who waits). `ours`: keys to ask for, if it tells of no others.
        """

    def stop(self, session: int) -> None:
        """End a session that waits, unless the server itself notices that its client is gone."""

    @abstractmethod
    def kill(self, key: str, session: int) -> bool:
        """End the session if it holds the lock, and wait until the lock is free."""


class HeldLinesBackend(BaseLockBackend, ABC, Generic[L]):
    """LOCATION is an alias of DATABASES; each lock has a session of its own while it is held.

    The server ends a session that says nothing for the ttl of its lock, and the lock with it:
    so the core's trust is as sound as with a lease. Nothing here joins the caller's
    transaction, nor stays behind on a connection of Django's.
    """

    blocks = True
    expires = False
    fences = True  # the server's time in microseconds, read when the lock is granted
    heartbeat = 0.3

    vendor: ClassVar[str]
    line: ClassVar[type[Any]]

    def __init__(self, *, alias: str, location: Any = None) -> None:
        super().__init__(alias=alias, location=location)
        self.using = DEFAULT_DB_ALIAS if location is None else location
        if self.using not in list(connections):
            raise ImproperlyConfigured(
                f"DISTLOCK[{alias!r}]: LOCATION {self.using!r} is no alias of DATABASES"
            )
        if connections[self.using].vendor != self.vendor:
            raise ImproperlyConfigured(
                f"DISTLOCK[{alias!r}]: {type(self).__name__} is for {self.vendor}, and the "
                f"database {self.using!r} is {connections[self.using].vendor}"
            )
        self._pool = Lines(self.using, self.line)
        self._begin()

    def _begin(self) -> None:
        # Reentrant: a signal handler may lock or release in the middle of our own call.
        self._mutex = threading.RLock()
        self._taken: dict[tuple[str, str], L] = {}  # by owner and key: held, or waited for

    def acquire(self, claim: Claim, wait: float | None) -> Grant | None:
        line = self._taken.get((claim.owner, claim.key))
        if line is not None:
            if self._ask(line, claim.ttl):
                return Grant(claim, line.fence, session=line)
            self._drop(line)
        timeout = SLICE if wait is None else min(wait, SLICE)
        while True:
            line = self._lend()
            try:
                return self._take(line, claim, timeout)
            except Died:
                if not line.kept:
                    raise

    def extend(self, grant: Grant, ttl: float) -> bool:
        line = self._line_of(grant)
        return line is not None and self._ask(line, ttl)

    def extend_many(self, work: Sequence[tuple[Grant, float]]) -> list[Any]:
        """Look at the sessions; ask those that are due or that have something to say.

        All questions are sent before the first answer is awaited, so that one session which
        is cut off delays the others for `BEAT_WAIT` at most.
        """
        answers: list[Any] = [False] * len(work)
        asked: dict[int, tuple[int, L]] = {}
        poll = select.poll()
        now = monotonic()
        for place, (grant, _) in enumerate(work):
            line = self._line_of(grant)
            if line is None:
                continue
            answers[place] = None
            if line.mutex.acquire(blocking=False):  # else somebody is just asking it
                answers[place] = self._begin_beat(line, grant.claim, now)
                if answers[place] is True:
                    asked[line.fd] = place, line
                    poll.register(line.fd, select.POLLIN)
                else:
                    line.mutex.release()
        end = now + BEAT_WAIT
        while asked and (heard := poll.poll(max(0.0, end - monotonic()) * 1000)):
            for fd, _ in heard:
                poll.unregister(fd)
                place, line = asked.pop(fd)
                answers[place] = self._finish_beat(line, now)
                line.mutex.release()
        for place, line in asked.values():
            answers[place] = BackendError(self._says("no answer"))
            line.mutex.release()
        return answers

    def release(self, grant: Grant) -> bool:
        with self._mutex:
            line = self._line_of(grant)
            if line is None:
                return False
            del self._taken[grant.claim.owner, grant.claim.key]
            waits = line.waits
            if waits:
                line.hang_up()  # whoever waits on it closes it
        if waits:
            self._stop(line)
            return False
        try:
            with _turn(line):
                was_ours = line.unlock(grant.claim)
        except BaseException as error:
            self._pool.drop(line)
            if isinstance(error, Trouble):
                return False  # a session that is gone took its lock with it
            if isinstance(error, Silence):
                raise BackendError(self._says(error)) from error
            raise
        if was_ours:
            self._pool.give_back(line)
        else:
            self._pool.drop(line)
        return was_ours

    def holders(self, key: str | None = None) -> Iterator[Holding]:
        ours = {line.number: line for line in list(self._taken.values()) if not line.waits}
        keys = [line.claim.key for line in ours.values() if line.claim]
        for fields in self._question(lambda line: list(line.locks(key, keys))):
            session, now_us = fields.pop("session"), fields.pop("now_us")
            since_us, named = fields.pop("since_us", None), fields.pop("named", None)
            line = ours.get(session)
            claim = line.claim if line else None
            # What we know ourselves, or else what the session's last statement said.
            if line and claim and claim.key.startswith(fields["key"]):
                text = note(claim, line.fence)
                fields.pop("note", None)
            else:
                text = fields.pop("note", None) or ""
            fields |= _from_note(text)
            fields.setdefault("name", _from_note(named).get("name", f"({fields['key']})"))
            if (began_us := fields.get("fence") or since_us) is not None:
                fields["held_for"] = max(0.0, (now_us - began_us) / 1e6)
            yield Holding(alias=self.alias, seen=f"{session}-{fields.pop('tag', '')}", **fields)

    def clear(self, key: str, seen: str | None = None) -> int:
        found = [one.seen for one in self.holders(key) if seen is None or _same(one.seen, seen)]
        sessions = [int(one.partition("-")[0]) for one in found]
        return self._question(lambda line: sum(line.kill(key, session) for session in sessions))

    def ping(self) -> None:
        self._question(lambda line: line.ask("SELECT 1"))

    def check(self, *, ask: bool = False) -> list[checks.CheckMessage]:
        if not ask:
            return []
        try:
            return self._question(lambda line: list(self.look_around(line)))
        except BackendError as error:
            return [checks.Error(f"DISTLOCK[{self.alias!r}]: {error}", id="distlock_app.E031")]

    @abstractmethod
    def look_around(self, line: L) -> Iterator[checks.CheckMessage]:
        """Yield what makes these locks unreliable on this server."""

    def close(self) -> None:
        self._pool.close()

    def after_fork(self) -> None:
        self._pool.forget()
        self._begin()

    def _take(self, line: L, claim: Claim, timeout: float) -> Grant | None:
        place = (claim.owner, claim.key)
        line.claim, line.waits = claim, True
        self._taken[place] = line  # before it is asked: so release() finds it at any time
        try:
            granted = line.take(claim, timeout)
            with self._mutex:
                line.waits = False
                given_up = self._taken.get(place) is not line
                if granted is None and not given_up:
                    del self._taken[place]
        except BaseException as error:
            self._drop(line)
            if isinstance(error, Trouble):
                raise Died(self._says(error)) from error
            self._stop(line)
            if isinstance(error, Silence):
                raise BackendError(self._says(error)) from error
            raise
        if given_up:
            self._pool.drop(line)
            raise BackendError(self._says("the wait was given up"))
        if granted is None:
            self._pool.give_back(line)
            return None
        line.fence, began = granted
        return Grant(claim, line.fence, asked_at=began, session=line)

    def _line_of(self, grant: Grant) -> L | None:
        line = self._taken.get((grant.claim.owner, grant.claim.key))
        return line if grant.session in (None, line) else None

    def _ask(self, line: L, ttl: float) -> bool:
        """Ask whether the lock is still the session's; raise BackendError if nobody answers."""
        claim: Any = line.claim
        try:
            with _turn(line):
                if ttl > line.ttl:
                    line.keep(ttl)
                rows = line.ask(line.question(claim))
        except Silence as error:
            raise BackendError(self._says(error)) from error
        except BaseException as error:
            self._drop(line)
            if isinstance(error, Trouble):
                return False
            raise
        return self._believed(line, rows)

    def _begin_beat(self, line: L, claim: Claim, now: float) -> bool | BackendError | None:
        """Ask if it is time to; return True, or else the answer to the core."""
        try:
            if not line.owes and not line.heard(0):
                if now < line.asked_at + min(claim.ttl / 3, ASK_EVERY):
                    return None
            line.begin_to_ask(line.question(claim))
        except Silence as error:
            return BackendError(self._says(error))
        except Trouble:
            self._drop(line)
            return False
        return True

    def _finish_beat(self, line: L, asked_at: float) -> bool:
        try:
            rows = line.finish_asking(asked_at)
        except Trouble:
            self._drop(line)
            return False
        return self._believed(line, rows)

    def _believed(self, line: L, rows: Any) -> bool:
        if bool(rows) and rows[0][0] in (1, "t"):
            return True
        self._drop(line)
        return False

    def _stop(self, line: L) -> None:
        """Take a session out of the server's queue; it may get the lock for a moment."""
        with suppress(BackendError):
            self._question(lambda other: other.stop(line.number))

    def _drop(self, line: L) -> None:
        """Close a session, and forget what it held."""
        claim = line.claim
        with self._mutex:
            if claim and self._taken.get((claim.owner, claim.key)) is line:
                del self._taken[claim.owner, claim.key]
        self._pool.drop(line)

    def _lend(self) -> L:
        try:
            return self._pool.lend()  # type: ignore[return-value]
        except (DjangoDatabaseError, Trouble, Silence) as error:
            raise BackendError(self._says(error)) from error

    def _question(self, work: Callable[[L], T]) -> T:
        """Do `work` on a session that holds nothing."""
        while True:
            line = self._lend()
            try:
                answer = work(line)
            except BaseException as error:
                self._pool.drop(line)
                if not isinstance(error, (Trouble, Silence)):
                    raise
                if not line.kept:
                    raise BackendError(self._says(error)) from error
            else:
                self._pool.give_back(line)
                return answer

    def _says(self, error: Any) -> str:
        return f"{type(self).__name__} on {self.using!r}: {error}"


class _turn:
    """The right to ask a session, which a heartbeat may have; raises Silence."""

    __slots__ = ("_line",)

    def __init__(self, line: Line) -> None:
        self._line = line

    def __enter__(self) -> None:
        if not self._line.mutex.acquire(timeout=ANSWER_WAIT):
            raise Silence("the session is busy")

    def __exit__(self, *exc_info: object) -> None:
        self._line.mutex.release()


def tag_of(claim: Claim) -> str:
    """Return what tells one acquisition from the next, and nothing of its token."""
    return hashlib.sha256(claim.owner.encode()).hexdigest()[:8]


def note(claim: Claim, fence: int | None = None) -> str:
    """Return a comment for the statements of `claim`: people see it beside the session."""
    name = _quoted(claim.name)
    # ASCII JSON without an asterisk cannot end the comment.
    text = f"{name} {claim.holder}".replace("*", "\\u002a")
    return f"/* distlock {tag_of(claim)} {claim.key} {fence or 0} {text} */"


@lru_cache(maxsize=1024)
def _quoted(name: str) -> str:
    return json.dumps(shown(name))


def _from_note(statement: str | None) -> dict[str, Any]:
    found = NOTE.search(statement or "")
    if found is None:
        return {}
    tag, key, fence, name, holder = found.groups()
    return {
        "tag": tag,
        "key": key,
        "fence": int(fence) or None,
        "name": json.loads(name),
        "holder": holder_fields(holder),
    }


def _same(one: str, other: str) -> bool:
    """Compare session and tag; a server that does not tell the tag leaves it empty."""
    (session, _, tag), (session2, _, tag2) = one.partition("-"), other.partition("-")
    return session == session2 and (not tag or not tag2 or tag == tag2)
