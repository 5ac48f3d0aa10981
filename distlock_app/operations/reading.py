"""Ask all backends at once what they hold and how they are: two seconds for each question."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.translation import gettext

from ..backends.base import BaseLockBackend
from ..claims import Holding
from ..core.registry import registry
from ..errors import BackendError
from ..primitives.logs import fields, logger
from ..primitives.timing import Deadline, monotonic

# Seconds that a page waits for a backend: drivers give up after 5 at the earliest.
ANSWER_WITHIN = 2.0

# How many locks of one alias can surely be read in that time.
MOST = 1_000

# Seconds in which a list of more locks reads as many as it can.
READ_FOR = 1.2


# States of a backend that was asked: it answered; it answered, but cannot list its locks; it
# answers, but not this question in time; it failed, or said nothing in time.
ANSWERED, UNLISTED, SLOW, DOWN = "answered", "unlisted", "slow", "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How one backend answered."""

    alias: str
    state: str = DOWN
    ping_ms: float | None = None  # one round trip; None if it is down
    error: BaseException | None = None  # why it is down; None: it said nothing in time
    total: int | None = None  # locks that it holds; None: not known
    looked: int = 0  # how many of them were read

    @property
    def up(self) -> bool:
        return self.state != DOWN

    @property
    def known(self) -> bool:
        """Whether its locks are known."""
        return self.state == ANSWERED

    @property
    def truncated(self) -> bool:
        """Whether it holds more locks than were read."""
        return self.known and (self.total is None or self.total > self.looked)

    @property
    def reason(self) -> str:
        """Why its locks are not known."""
        if self.known:
            return ""
        return gettext("cannot list its locks") if self.state == UNLISTED else worded(self.error)

    def facts(self) -> dict[str, Any]:
        """Return what programs get as JSON."""
        return {"alias": self.alias, "up": self.up, "ping_ms": self.ping_ms, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read at one time."""

    holdings: list[Holding] = field(default_factory=list)
    backends: list[Health] = field(default_factory=list)


def worded(error: BaseException | None) -> str:
    """Say why a backend is down, without the driver's message: it may have addresses.

    None: it said nothing in time.
    """
    if error is None:
        return gettext("no answer within %(seconds)g s") % {"seconds": ANSWER_WITHIN}
    if isinstance(error, ImproperlyConfigured):
        return gettext("wrong settings, see the system checks")
    kind = type(error.__cause__ or error).__name__
    return gettext("cannot be used (%(error)s)") % {"error": kind}


def read(keys: Mapping[str, Iterable[str]]) -> Reading:
    """Ask the backends of these aliases who holds these keys."""
    return _read("keys", {alias: partial(_of, keys[alias]) for alias in keys})


def read_all(aliases: Collection[str]) -> Reading:
    """Ask the backends of these aliases for as much as two questions can tell in time."""
    reading = read_pages(dict.fromkeys(aliases, (0, MOST)))
    return read_more(reading, [b for b in reading.backends if b.truncated], READ_FOR)


def read_pages(ranges: Mapping[str, tuple[int, int]]) -> Reading:
    """Ask for a number of locks (start, count) of each alias, in the backend's own order."""
    return _read("page", {alias: partial(_page, *pair) for alias, pair in ranges.items()})


def read_more(reading: Reading, cut: Iterable[Health], seconds: float) -> Reading:
    """Return `reading` with as many locks of these backends as can be read in so many seconds.

    One that does not answer now, or tells no more, keeps what `reading` has of it.
    """
    before = {backend.alias: backend for backend in cut}
    more = _read("more", dict.fromkeys(before, partial(_within, seconds)))
    better = {}
    for now in more.backends:
        if now.known and (not now.truncated or now.looked > before[now.alias].looked):
            total = before[now.alias].total if now.total is None else now.total  # cut short again
            better[now.alias] = replace(now, total=total)
    kept = [held for held in reading.holdings if held.alias not in better]
    found = [held for held in more.holdings if held.alias in better]
    return Reading([*kept, *found], [better.get(b.alias, b) for b in reading.backends])


@dataclass(frozen=True, slots=True)
class Part:
    """What was read of one backend: `looked` locks of `total`."""

    holdings: Sequence[Holding]
    looked: int
    total: int | None  # None: not known


T = TypeVar("T")
Question = Callable[[BaseLockBackend], T]


def _page(start: int, count: int, backend: BaseLockBackend) -> Part:
    holdings, total = backend.page(start, count)
    return Part(holdings, count if total is None else min(total, start + count), total)


def _of(keys: Iterable[str], backend: BaseLockBackend) -> Part:
    return _all([holding for key in keys for holding in backend.holders(key)])


def _within(seconds: float, backend: BaseLockBackend) -> Part:
    deadline, holdings = Deadline(seconds), []
    for holding in backend.holders():
        holdings.append(holding)
        if deadline.remaining() == 0:
            return replace(_all(holdings), total=None)
    return _all(holdings)


def _all(holdings: Sequence[Holding]) -> Part:
    locks = len({holding.key for holding in holdings})  # several may hold one
    return Part(holdings, locks, locks)


def _if_listed(question: Question[Part], backend: BaseLockBackend) -> Part | None:
    return question(backend) if backend.lists else None


def _read(about: str, wanted: Mapping[str, Question[Part]]) -> Reading:
    reading = Reading()
    questions = {alias: partial(_if_listed, wanted[alias]) for alias in wanted}
    for health, part in ask(about, questions):
        if part is not None:
            health = replace(health, looked=part.looked, total=part.total)
            reading.holdings.extend(part.holdings)
        reading.backends.append(health)
    return reading


def round_trip_ms(backend: BaseLockBackend) -> float:
    """Return how long the server takes to answer on an open connection, in milliseconds."""
    backend.ping()  # it may have to connect
    started = monotonic()
    backend.ping()
    return (monotonic() - started) * 1000


def queue_of(alias: str, key: str) -> list[Mapping[str, Any]]:
    """Return the waiters for a lock, in order of arrival; none if they are not known."""
    [(_health, waiters)] = ask("queue", {alias: lambda backend: backend.queue(key)})
    return waiters or []


def ask(about: str, questions: Mapping[str, Question[T]]) -> list[tuple[Health, T | None]]:
    """Ask the backends of these aliases, all at once; None where no answer came in time.

    Return within `ANSWER_WITHIN` seconds. A backend that still owes an earlier answer `about` the
    same is not asked again: threads must not pile up behind it.
    """
    deadline = Deadline(ANSWER_WITHIN)
    asked = [_asked(alias, about, question) for alias, question in questions.items()]
    return [backend.answer(deadline) for backend in asked]


def _asked(alias: str, about: str, question: Question[T]) -> _Asked[T]:
    """Ask one backend, unless it is overdue."""
    overdue = _overdue.get((alias, about))
    if overdue is not None and overdue.is_alive():
        return overdue
    asked = _Asked(alias, about, question)
    with suppress(RuntimeError):  # the process can start no thread: there will be no answer
        asked.start()
    return asked


class _Asked(threading.Thread, Generic[T]):
    """One backend asked on a thread of its own; a daemon, for it may never end."""

    def __init__(self, alias: str, about: str, question: Question[T]) -> None:
        super().__init__(name=f"distlock-read-{alias}", daemon=True)
        self._alias = alias
        self._about = about
        self._question = question
        self._unanswered = Health(alias=alias)  # what to say of it while there is no answer
        self._answer: tuple[Health, T | None] = (self._unanswered, None)
        self._answered = threading.Event()
        self._is_overdue = False

    def run(self) -> None:
        try:
            backend = registry[self._alias].backend
            slow = Health(alias=self._alias, state=SLOW, ping_ms=round_trip_ms(backend))
            self._unanswered = slow
            answer = self._question(backend)
            self._answer = replace(slow, state=ANSWERED if backend.lists else UNLISTED), answer
        except Exception as error:  # whatever it is: it must not break a page
            if not isinstance(error, (BackendError, ImproperlyConfigured)):
                logger.exception(
                    "cannot read the locks of alias %r",
                    self._alias,
                    extra=fields("not_listed", self._alias),
                )
            self._answer = Health(alias=self._alias, error=error), None
        finally:
            self._answered.set()
            connections.close_all()  # those of this thread, which a backend may have opened

    def answer(self, deadline: Deadline) -> tuple[Health, T | None]:
        """Wait for the answer until `deadline`; not for one that is overdue.

        That one would answer an earlier question, about other locks.
        """
        if not self._is_overdue and self._answered.wait(deadline.remaining()):
            return self._answer
        self._is_overdue = True
        _overdue[self._alias, self._about] = self
        return self._unanswered, None


# Weak: one that has ended is forgotten, with all that it found.
_overdue: WeakValueDictionary[tuple[str, str], _Asked[Any]] = WeakValueDictionary()
