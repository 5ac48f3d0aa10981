"""The backend contract: `BaseLockBackend` and its defaults (pauses, flags), and optional parts."""

from __future__ import annotations

# Otherwise the first connection imports these two, and a fork meanwhile leaves the child with half.
import encodings.ascii
import encodings.idna  # noqa: F401
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, TypeVar

from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured

from ..claims import Busy, Claim, Grant, Holding
from ..errors import BackendError, LockError
from ..primitives.logs import fields, logger
from ..primitives.names import checked_key

# Methods for the admin and the command, which identify a lock by its key.
KEYED_METHODS = ("holders", "queue", "clear", "prolong", "counted")

Item = TypeVar("Item")


class ConnectionLost(BackendError):
    """The connection broke under a request, which may have been carried out."""


class BaseLockBackend(ABC):
    """One backend under one alias: created once per process, shared by all of its threads.

    Nothing connects in `__init__`. Server errors are raised as `BackendError` (chained), never
    returned as busy or free. The core handles waiting, validity, renewal, re-entrancy,
    signals and logging.
    """

    blocks = False  # acquire() itself waits on the server; the core does not sleep
    expires = True  # a claim ends after its ttl. False: it lives as long as its session
    # How often the core checks that such a session is still alive, in seconds, however long the
    # ttl: `extend_many` may answer None, "seems fine", without a request.
    heartbeat: float | None = None
    check_id = "distlock_app.E017"  # of check() if the server does not answer
    local = False  # does not exclude other processes
    fences = False  # grants have a fencing token
    shares = False  # shared claims (readers / writer)
    queues = False  # grants in order of arrival
    limits = False  # counting semaphore: claims with a limit above 1
    latches = False  # claims with `latch`, and count_down()
    prolongs = False  # prolong()
    lists = True  # has holders() and clear(). False: the admin and the command say so

    # First and longest pause between two tries of a waiter, in seconds. A backend that calls
    # `claim.wake` is polled only every `poll_max`, in case a message was lost.
    poll_min = 0.005
    poll_max = 0.1
    pushes = False  # a waiter's claim.wake is called when its turn comes

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the KEYED_METHODS reject a malformed key: it may come from a URL."""
        super().__init_subclass__(**kwargs)
        for verb in KEYED_METHODS:
            if verb in vars(cls):
                setattr(cls, verb, _for_keys(vars(cls)[verb]))

    def __init__(self, *, alias: str, location: Any = None) -> None:
        """Keep the settings; keyword arguments beyond these are the keys allowed in OPTIONS.

        Raise ImproperlyConfigured for wrong ones, in words that follow the name of the alias.
        """
        self.alias = alias
        self.location = location

    # Required.

    @abstractmethod
    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy | None:
        """Try to take `claim`; return a grant, or Busy / None if another owner has it.

        `wait` is how long the caller will keep trying, in seconds (None: forever): a blocking
        backend waits that long, a queueing one stays in its queue. 0 is the only or the last
        try and leaves nothing behind: no waiter in a queue, no wake-up. If the same owner asks
        again, it is granted again, so a lost answer does no harm.
        """

    @abstractmethod
    def extend(self, grant: Grant, ttl: float) -> bool:
        """Let the claim end no sooner than `ttl` seconds from now; never shorten it.

        False: it is certainly no longer ours.
        """

    @abstractmethod
    def release(self, grant: Grant) -> bool:
        """End the claim, or leave the queue; return whether it was still ours.

        Safe to repeat, and for a claim that may never have been granted: the core calls it
        after a failure, with a grant built from the claim (but see withdraw()). A backend that
        `blocks` also ends a wait for the claim in another thread.
        """

    # Optional: backends may improve on these defaults.

    def acquire_all(self, claims: Sequence[Claim]) -> list[Grant] | None:
        """Take these claims, of different keys, in one step if all locks are free.

        None: some are held, or this backend cannot; nothing was taken, and the core takes them
        one after the other.
        """
        return None

    def withdraw(self, claim: Claim) -> None:
        """Let the claim leave the queue, if it waits; never release it.

        Called when a wait ends without a last try. For a `stable` claim it is also called after a
        failure, instead of release(): other claims of its owner may hold the lock, or wait for it,
        and must keep what they have.
        """

    def look(self, claim: Claim) -> Busy | None:
        """Return None if another try is worthwhile, else Busy; a cheap check between tries."""
        return None

    def extend_many(self, work: Sequence[tuple[Grant, float]]) -> list[Any]:
        """Extend several claims for the renewer, in one request if the backend can.

        Return True, False or an exception for each claim; None: see `heartbeat`.
        """
        results: list[bool | Exception] = []
        for grant, ttl in work:
            try:
                results.append(self.extend(grant, ttl))
            except Exception as error:
                results.append(error)
        return results

    def server_of(self, key: str) -> object:
        """Return an object for the server of this lock, without a request.

        The renewals of one server do not wait for those of another.
        """
        return self

    def end_in(self, grant: Grant, ttl: float) -> bool:
        """Like extend(), but let the claim end after `ttl` seconds even if that is sooner.

        This default may keep it for longer.
        """
        return self.extend(grant, ttl)

    def holders(self, key: str | None = None) -> Iterable[Holding]:
        """Yield the current claims, of one key or of all; those of a key one after the other."""
        raise LockError(f"{type(self).__name__} (alias {self.alias!r}) cannot list its locks")

    def clear(self, key: str, if_version: str | None = None) -> int:
        """Take away the claims on `key`; return how many. The next fencing token is greater.

        With `if_version` (of a Holding) only that claim: 0 if the lock changed hands meanwhile.
        """
        raise LockError(f"{type(self).__name__} (alias {self.alias!r}) cannot clear a lock")

    def page(self, start: int, count: int) -> tuple[list[Holding], int | None]:
        """Return the holdings of `count` locks from index `start`, and the number of locks.

        In the backend's own order. None: there are more, but the number is unknown.
        """
        locks = groupby(self.holders(), attrgetter("key"))
        found = [list(holdings) for _, holdings in islice(locks, start + count + 1)]
        listed = [holding for holdings in found[start : start + count] for holding in holdings]
        return listed, None if len(found) > start + count else len(found)

    def same_version(self, one: str, other: str) -> bool:
        """Return whether these versions of two holdings of a lock may be of the same one."""
        return one == other

    def queue(self, key: str) -> list[Mapping[str, Any]] | None:
        """Return the waiters for `key` in order of arrival, each like `Holding.holder`.

        None: unknown. Of a long queue, only the beginning.
        """
        return None

    def check(self, *, ask: bool = False) -> list[CheckMessage]:
        """Return system check messages; `ask` allows requests to the server."""
        if ask:
            try:
                self.ping()
            except BackendError as error:
                return [no_answer(self.alias, error, self.check_id)]
        return []

    def ping(self) -> None:
        """Raise BackendError if the server does not answer."""

    def close(self) -> None:
        """Drop connections; the backend may be used again."""

    def after_fork(self) -> None:
        """In the child, forget all connections without closing them: the parent uses them."""

    # Required by flags.

    def count_down(self, claim: Claim) -> int:
        """Count `claim.owner` for the latch `claim.key`, once; return how many are counted.

        The last of `claim.limit` grants all waiters. The count is deleted `claim.ttl` seconds
        after the last one.
        """
        raise NotImplementedError

    def counted(self, key: str) -> int:
        """Return the count of the latch `key`."""
        raise NotImplementedError

    def prolong(self, key: str, version: str, ttl: float) -> bool:
        """Like extend(), for the claim with this `version` (see Holding), whoever owns it."""
        raise NotImplementedError


# Backends derive from these as well, and the core checks isinstance(). They are not Protocols,
# because isinstance() of a Protocol takes as long as a lock.


class InTransaction:
    """Claims are rows of the database `using`: `Hold.pin()` and `lock_in_transaction()`.

    These methods use the caller's connection, in its open transaction, and raise Django's errors.
    """

    using: str

    def pin(self, grant: Grant, ttl: float) -> bool:
        """Extend the claim, and lock its row until the end of the caller's transaction."""
        raise NotImplementedError

    def release_at_commit(self, grant: Grant) -> bool:
        """Release in the transaction, which keeps the row locked until its end."""
        raise NotImplementedError

    def lock_row(self, key: str, name: str, wait: float | None) -> int | Busy | None:
        """Lock the row, advance its fencing token and return it.

        Busy: other transactions had it for `wait` seconds. None: this cannot tell, so `acquire`
        is called.
        """
        raise NotImplementedError


class GuardedWrites:
    """Its store can hold other data too: `Hold.guarded_set()`, `Hold.guarded_script()`."""

    def guarded_set(
        self,
        grant: Grant,
        key: str,
        value: str | bytes | int | float,
        *,
        release: bool = False,
        ttl: float | None = None,
    ) -> bool:
        """Write `value` under `key` for `ttl` seconds, only if the claim is still ours.

        Return whether it was. With `release` the same request ends the claim.
        """
        raise NotImplementedError

    def guarded_script(
        self, grant: Grant, script: str, keys: Sequence[str], args: Sequence[str | bytes | float]
    ) -> int | None:
        """Run `script` in the store, at most once, only if the claim is still ours.

        Return its number, or None: the claim was not ours, so it was not run.
        """
        raise NotImplementedError


class Purgeable:
    """It keeps data of free locks: `distlock purge`, "Clear up" in the admin."""

    def left_over(self, older_than: float) -> tuple[int, int]:
        """Count what `clear_expired()` and `purge()` would find."""
        raise NotImplementedError

    def clear_expired(self) -> int:
        """Free expired claims, so that their holders can no longer renew them; return how many."""
        raise NotImplementedError

    def purge(self, older_than: float) -> int:
        """Delete locks that have been free for `older_than` seconds; return how many."""
        raise NotImplementedError


def check_seconds(**options: float) -> None:
    """Raise ImproperlyConfigured for an option that is no number of seconds above 0."""
    for option, seconds in options.items():
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not (number and 0 < seconds < math.inf):
            raise ImproperlyConfigured(
                f"{option.upper()} must be a number of seconds above 0, not {seconds!r}."
            )


def woken(claim: Claim, grant: Grant | None, alias: str) -> bool:
    """Wake the waiter for a claim; return False if it is gone: its event loop was closed."""
    try:
        if claim.wake is not None:
            claim.wake(grant)
    except RuntimeError:
        logger.exception("a waiter for a lock could not be woken", extra=fields("not_woken", alias))
        return False
    return True


def result_of(answer: Item | Exception) -> Item:
    """Return an answer, or raise it if it is an error."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Yield the items in groups of at most `size`."""
    return (items[at : at + size] for at in range(0, len(items), size))


def no_answer(alias: str, error: Exception, id: str) -> Error:
    """Return the check message for a server that does not answer."""
    return Error(f"DISTLOCK[{alias!r}]: {error}", id=id)


def _for_keys(verb: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(verb)
    def checked(self: Any, key: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if key is not None:
            checked_key(key)
        return verb(self, key, *args, **kwargs)

    return checked
