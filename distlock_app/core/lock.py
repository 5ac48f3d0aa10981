"""`Lock`, a named lock and its options, and `all_of`: acquire with `with` or `acquire()`."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from copy import copy
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..backends.base import BaseLockBackend
from ..claims import Grant, Holding
from ..errors import BackendError, LockBusy, LockLost
from ..primitives import identity, names, transactions
from ..primitives.names import shown
from ..signals import asend, lock_acquired, lock_busy, lock_failed, send
from .acquiring import Attempt
from .entered import WithBlock
from .groups import AllOf, one_or_all
from .handover import unpacked
from .hold import Hold
from .limits import LONG_TTL, UNSET, check_max_hold, checked_ttl, checked_wait
from .offloading import in_thread
from .operators import clear
from .registry import aliases_of, registry
from .releasing import releaser
from .waiting import acquired, arun
from .wakers import AsyncWaker, Waker

# The options of most locks, which every backend supports; `_check_special` checks all others.
PLAIN = (False, False, 1, None, 0.0, None)


@dataclass(frozen=True, slots=True)
class Lock(WithBlock[Hold]):
    """A named lock: a description, free of I/O, that threads and modules can share.

    `ttl`, `wait`: seconds, by default those of the alias. `wait=None` waits forever, 0 is one
    try. `renew=False` makes it a fixed lease; `max_hold` limits renewal. `atomic` (True, or the
    alias of a database) opens `transaction.atomic(durable=True)` inside the lock, and commits
    only if the lock is still held. `owner` is a stable owner instead of a random one: callers
    with the same `owner` share the lock. `release="now"` does not wait for the end of an open
    transaction. `at_least`: seconds from the acquire for which the lock stays taken, even if it is
    released before, unless Ctrl-C, SIGTERM or a cancellation interrupted the work. `on_lost`: see
    `Hold.on_lost`. `using`: an alias, or several in a tuple: then the lock is taken on all or
    none, and the hold is a `Holds`.

    Raise TypeError, ValueError or ImproperlyConfigured when it is created.
    """

    name: str
    _: KW_ONLY
    ttl: float = UNSET
    wait: float | None = UNSET
    renew: bool = True
    max_hold: float | None = None
    reentrant: bool = True
    shared: bool = False
    fair: bool = False
    limit: int = 1
    owner: str | None = None
    atomic: bool | str = False
    release: Literal["transaction_end", "now"] = "transaction_end"
    at_least: float = 0.0
    on_lost: Callable[[Hold], object] | None = None
    using: str | tuple[str, ...] = "default"

    def __post_init__(self) -> None:
        names.checked(self.name)
        if self.ttl is not UNSET and checked_ttl(self.ttl) > LONG_TTL and self.renew:
            text = f"ttl={self.ttl:g} is in seconds: after a crash the lock stays taken"
            warnings.warn(f"{text} for {self.ttl / 3600:.1f} hours", stacklevel=3)
        if self.wait is not UNSET:
            checked_wait(self.wait)
        if self.max_hold is not None:
            check_max_hold(self.max_hold)
        if type(self.limit) is not int or self.limit < 1:
            raise ValueError(f"limit must be a whole number of 1 or more, not {self.limit!r}")
        if self.release not in ("transaction_end", "now"):
            raise ValueError(f"release must be 'transaction_end' or 'now', not {self.release!r}")
        if isinstance(self.atomic, str) and self.atomic not in list(connections):
            raise ImproperlyConfigured(f"atomic={self.atomic!r} is not an alias of DATABASES")
        asked = (self.shared, self.fair, self.limit, self.owner, self.at_least, self.on_lost)
        if asked != PLAIN or self.using.__class__ is tuple:
            self._check_special()
        else:
            registry[self.using]  # type: ignore[index]

    def _check_special(self) -> None:
        if self.at_least:
            checked_ttl(self.at_least, "at_least")
        if self.max_hold is not None and self.max_hold < self.at_least:
            raise ValueError("at_least= is longer than max_hold=")
        if self.on_lost is not None and not callable(self.on_lost):
            raise TypeError(f"on_lost must be a function of a hold, not {self.on_lost!r}")
        if not self.using:
            raise ValueError("using=() names no alias")
        if self.shared and self.limit > 1:
            raise ValueError("shared=True and limit= cannot be combined")
        if self.owner is not None and not (isinstance(self.owner, str) and self.owner):
            raise ValueError(f"owner must be a name, not {self.owner!r}")
        for alias in aliases_of(self.using):
            self._check_backend(registry[alias].backend)

    def _check_backend(self, backend: BaseLockBackend) -> None:
        for wanted, able, what in (
            (self.shared, backend.shares, "shared=True"),
            (self.fair, backend.queues, "fair=True"),
            (self.limit > 1, backend.limits, "limit above 1"),
            # Another process cannot take over a session.
            (self.owner is not None, backend.expires, "owner="),
            (self.at_least, backend.expires, "at_least="),
        ):
            if wanted and not able:
                kind = type(backend).__name__
                raise ValueError(f"{what} is not possible with {kind} (alias {backend.alias!r})")

    def _acquire(self, wait: float | None = UNSET, *, entered: bool = False) -> Hold:
        if asyncio._get_running_loop() is not None:
            identity.refuse_to_block("`async with`, or `await lock.aacquire()`")
        if self.using.__class__ is tuple:
            return self._on_all()._acquire(wait, entered=entered)  # type: ignore[return-value]
        attempt = Attempt(self, wait, entered)
        hold = attempt.reenter() if attempt.lease_key in attempt.runner.held else None
        if hold is not None:
            return hold
        if not transactions.surely_none():
            transactions.check_before_lock(release_now=self.release == "now")
        waker = Waker()
        claim = attempt.claim(waker)
        try:
            grant, asked_at = acquired(attempt.backend, claim, attempt.wait, waker)
            hold = attempt.hold(grant, asked_at)
            if lock_acquired.receivers:
                send(lock_acquired, attempt.facts(fence=grant.fence))
            return hold
        except LockBusy as error:
            send(lock_busy, attempt.busy(error))
            raise
        except BackendError as error:
            send(lock_failed, attempt.failed(claim, error))
            return attempt.opened(claim, error)
        except BaseException as error:
            if hold is not None:
                hold.leave(error, unused=True)
            else:
                attempt.give_back(claim, at_once=not isinstance(error, Exception))
            raise

    async def _aacquire(self, wait: float | None = UNSET, *, entered: bool = False) -> Hold:
        self._refuse_atomic()
        if self.using.__class__ is tuple:
            holds = await self._on_all()._aacquire(wait, entered=entered)
            return holds  # type: ignore[return-value]
        attempt = Attempt(self, wait, entered)
        await transactions.check_caller(self.name, release_now=self.release == "now")
        if (hold := attempt.reenter()) is not None:
            return hold
        transactions.check_before_lock(release_now=self.release == "now")
        waker = AsyncWaker()
        claim = attempt.claim(waker)
        try:
            grant, asked_at = await arun(attempt.backend, claim, attempt.wait, waker)
            hold = attempt.hold(grant, asked_at)
            if lock_acquired.receivers:
                await asend(lock_acquired, attempt.facts(fence=grant.fence))
            return hold
        except LockBusy as error:
            await asend(lock_busy, attempt.busy(error))
            raise
        except BackendError as error:
            await asend(lock_failed, attempt.failed(claim, error))
            return attempt.opened(claim, error)
        except BaseException as error:
            if hold is not None:  # cancelled meanwhile: do not wait for the backend
                hold.abandon()
            elif isinstance(error, Exception):
                attempt.give_back(claim, at_once=False)
            raise

    @classmethod
    def resume(cls, text: str, *, renew: bool = True, max_hold: float | None = None) -> Hold:
        """Take over the lock that `Hold.dump()` handed over; only once.

        From now on it is kept for its own ttl, not for that of `dump()`, and renewed. A second
        resume is not detected: both would have the lock, with the same fencing token.

        Raise LockLost if it is too late, ValueError for an invalid text, and BackendError if the
        backend does not answer: then try again.
        """
        parts = cls._resuming(text, renew, max_hold)
        return _resumed(parts, [_take_over(attempt, grant) for attempt, grant in parts])

    @classmethod
    async def aresume(cls, text: str, *, renew: bool = True, max_hold: float | None = None) -> Hold:
        """Like `resume`, without blocking the event loop."""
        parts = cls._resuming(text, renew, max_hold)
        for lock in (attempt.lock for attempt, _ in parts):
            await transactions.check_caller(lock.name, release_now=lock.release == "now")
        answers = [
            await in_thread(attempt.backend, _take_over, attempt, grant) for attempt, grant in parts
        ]
        return _resumed(parts, answers)

    @classmethod
    def _not_resumed(cls, text: str, error: BackendError) -> Hold:
        """Release what nobody will resume; raise `error`, or go on without if ON_DOWN says so."""
        parts = cls._resuming(text)
        for attempt, grant in parts:
            releaser.give_back(attempt.backend, grant)
        return one_or_all([attempt.opened(grant.claim, error) for attempt, grant in parts])

    @classmethod
    def _resuming(
        cls, text: str, renew: bool = True, max_hold: float | None = None
    ) -> list[tuple[Attempt, Grant]]:
        """Return an attempt for each alias of the lock, and the grant that it takes over."""
        parts = []
        for alias, known, fence, session in unpacked(text):
            token = {field: known.pop(field) for field in ("owner", "stable")}
            known["at_least"] = min(known.get("at_least", 0.0), max_hold or float("inf"))
            attempt = Attempt(cls(using=alias, renew=renew, max_hold=max_hold, **known), 0)
            lock = attempt.lock
            transactions.check_before_lock(release_now=lock.release == "now")
            claim = replace(attempt.claim(Waker()), **token)
            parts.append((attempt, Grant(claim, fence, session=session)))
        return parts

    def locked(self) -> bool:
        """Ask the backend whether the lock is held."""
        return bool(self.holders())

    def holders(self) -> list[Holding]:
        """Ask the backend for the holders of the lock."""
        key = names.key_of(self.name)
        return [h for alias in aliases_of(self.using) for h in registry[alias].backend.holders(key)]

    def clear(self, *, if_version: str | None = None, user: str = "", reason: str = "") -> int:
        """Take the lock away from its holders; return how many.

        With `if_version` only from the holding with that `version`. The holder's renewal fails,
        and its fencing token is stale at once.
        """
        key = names.key_of(self.name)
        aliases = aliases_of(self.using)
        return sum(clear(alias, key, self.name, if_version, user, reason) for alias in aliases)

    def _on_all(self) -> AllOf:
        """Return what takes it on each of its aliases."""
        locks = []
        for alias in aliases_of(self.using):
            lock = copy(self)  # its options were checked before
            object.__setattr__(lock, "using", alias)
            object.__setattr__(lock, "atomic", False)  # one block, inside all of the locks
            locks.append(lock)
        return AllOf(tuple(locks))


def _take_over(attempt: Attempt, grant: Grant) -> bool:
    """Keep the claim for its ttl: a crash must not leave it for the longer one of `dump()`."""
    backend = attempt.backend
    keep = backend.extend if grant.claim.stable else backend.end_in  # others may have it, too
    return keep(grant, attempt.ttl)


def _resumed(parts: list[tuple[Attempt, Grant]], answers: list[bool]) -> Hold:
    """Return the hold, or the holds, of what was handed over; raise LockLost if any is gone."""
    if not all(answers):
        for (attempt, grant), ours in zip(parts, answers, strict=True):
            if ours:
                releaser.give_back(attempt.backend, grant)
        name = shown(parts[0][0].lock.name)
        raise LockLost(f"the lock {name!r} was not resumed in time, or was already released")
    return one_or_all([attempt.hold(grant, attempt.started) for attempt, grant in parts])


def all_of(*locks: Lock) -> AllOf:
    """Combine locks that are taken all or none: `with all_of(a, b) as (hold_a, hold_b)`."""
    if not locks:
        raise ValueError("all_of() needs at least one lock")
    if wrong := [lock for lock in locks if not isinstance(lock, Lock)]:
        raise TypeError(f"all_of() takes locks, all_of(*locks), not {wrong[0]!r}")
    if any(lock.atomic for lock in locks):
        raise ValueError(
            "all_of() does not take locks with atomic=: open atomic() inside its `with`"
        )
    if any(isinstance(lock.using, tuple) for lock in locks):
        raise ValueError("all_of() takes locks of one alias: name the lock once for each alias")
    return AllOf(locks)
