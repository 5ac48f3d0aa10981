"""The contract of a backend: what it must do, what it may do (`BaseLockBackend`), what few do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import islice
from typing import Any

from django.core.checks import CheckMessage, Error

from ..claims import Busy, Claim, Grant, Holding
from ..errors import BackendError, LockError
from ..primitives.names import checked_key

# The verbs of the admin and the command, which name a lock by its key.
FOR_PEOPLE = ("holders", "queue", "clear", "prolong", "counted")


class BaseLockBackend:
    """One backend under one alias: made once per process, used by all of its threads.

    Nothing connects in `__init__`. Whatever goes wrong at the server is raised as
    `BackendError` (chained), never returned as busy or free. Waiting, trust, renewal,
    re-entrancy, signals and logging are the core's.
    """

    blocks = False  # acquire() itself waits on the server; the core does not sleep
    expires = True  # a claim ends after its ttl. False: it lives as long as its session
    # How often the core looks whether such a session still lives, in seconds, however long the
    # ttl: `extend_many` may answer None, "nothing speaks against it", without a request.
    heartbeat: float | None = None
    check_id = "distlock_app.E017"  # of what check() reports if the server does not answer
    local = False  # other processes are not excluded
    fences = False  # grants carry a fence
    shares = False  # shared claims (readers / writer)
    queues = False  # order of arrival
    limits = False  # counting semaphore: claims with a limit above 1
    latches = False  # claims with `latch`, and count_down()
    prolongs = False  # prolong()
    lists = True  # holders() and clear(). False: pages and commands say that it cannot list

    # First and longest pause between two tries of a waiter, in seconds. A backend that calls
    # `claim.wake` is asked again only after `poll_max`, in case a message was lost.
    poll_min = 0.005
    poll_max = 0.1
    pushes = False  # a waiter's claim.wake is called when its turn comes

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let no backend be asked for anything but a key: it came from a page or a command."""
        super().__init_subclass__(**kwargs)
        for verb in FOR_PEOPLE:
            if verb in vars(cls):
                setattr(cls, verb, _for_keys(vars(cls)[verb]))

    def __init__(self, *, alias: str, location: Any = None) -> None:
        """Keep the settings; keyword arguments beyond these are the keys allowed in OPTIONS."""
        self.alias = alias
        self.location = location

    # What a backend must do.

    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy | None:
        """Try to take `claim`; return a grant, or Busy / None if another owner has it.

        `wait` is how long the caller will go on trying, in seconds (None: for ever): a
        blocking backend waits that long, a queueing one stays in its queue. 0 is the only or
        the last try and leaves nothing behind: no waiter in a queue, no wake-up. The same owner
        again is granted again, so that a lost answer does no harm.
        """
        raise NotImplementedError

    def extend(self, grant: Grant, ttl: float) -> bool:
        """Let the claim end no earlier than `ttl` seconds from now: it is never shortened.

        False: it is certainly not ours any more.
        """
        raise NotImplementedError

    def release(self, grant: Grant) -> bool:
        """Give up the claim, or leave the queue; return whether it was still ours.

        Safe to repeat, and for a claim that may never have been granted: the core calls it
        after every failure, with a grant that it made up from the claim. A backend that
        `blocks` also ends a wait for the claim that is under way in another thread.
        """
        raise NotImplementedError

    # What it may do better than this.

    def acquire_all(self, claims: Sequence[Claim]) -> list[Grant] | None:
        """Take these claims, of different keys, in one step if every one is free at once.

        None: not so, or this backend cannot; nothing was taken, and the core takes them one
        after the other.
        """
        return None

    def look(self, claim: Claim) -> Busy | None:
        """Say cheaply whether another try is worth it (None) or not; asked between tries."""
        return None

    def extend_many(self, work: Sequence[tuple[Grant, float]]) -> list[Any]:
        """Extend several claims, in one request where the backend can; the core's renewer asks.

        Return True, False or an exception for each; None: see `heartbeat`.
        """
        results: list[bool | Exception] = []
        for grant, ttl in work:
            try:
                results.append(self.extend(grant, ttl))
            except Exception as error:
                results.append(error)
        return results

    def end_in(self, grant: Grant, ttl: float) -> bool:
        """Let the claim end `ttl` seconds from now, also sooner than it would; else as extend().

        A backend that leaves this out keeps it for longer.
        """
        return self.extend(grant, ttl)

    def holders(self, key: str | None = None) -> Iterable[Holding]:
        """Yield what is held now, of one key or of all."""
        raise LockError(f"{type(self).__name__} (alias {self.alias!r}) cannot list its locks")

    def clear(self, key: str, if_version: str | None = None) -> int:
        """Take away the claims on `key`; return how many. Their fences stay behind the next.

        With `if_version` (of a Holding) only that claim: 0 if the lock changed hands meanwhile.
        """
        raise LockError(f"{type(self).__name__} (alias {self.alias!r}) cannot clear a lock")

    def page(self, start: int, count: int) -> tuple[list[Holding], int | None]:
        """Return what is held of `count` locks from index `start`, and how many locks are.

        In an order of the backend's own. None: more than those, it is not known how many.
        """
        held = list(islice(self.holders(), start + count + 1))
        more = len(held) > start + count
        return held[start : start + count], None if more else len(held)

    def queue(self, key: str) -> list[Mapping[str, Any]] | None:
        """Return the waiters for `key`, as `Holding.holder` shows them, in order of arrival.

        None: the backend does not know. Of a long queue only its beginning.
        """
        return None

    def check(self, *, ask: bool = False) -> list[CheckMessage]:
        """Return system check messages; `ask` allows questions to the server."""
        if ask:
            try:
                self.ping()
            except BackendError as error:
                return [no_answer(self.alias, error, self.check_id)]
        return []

    def ping(self) -> None:
        """Ask the server for a sign of life; raise BackendError."""

    def close(self) -> None:
        """Drop connections; the backend may be used again."""

    def after_fork(self) -> None:
        """Forget, in the child, every connection without closing it: the parent uses them."""

    # What its flags say that it does.

    def count_down(self, claim: Claim) -> int:
        """Count `claim.owner` for the latch `claim.key`, once; return how many are counted.

        With the last of `claim.limit` all waiters there are granted. What was counted
        is forgotten `claim.ttl` seconds after the last one.
        """
        raise NotImplementedError

    def counted(self, key: str) -> int:
        """Return how many were counted for the latch `key`."""
        raise NotImplementedError

    def prolong(self, key: str, version: str, ttl: float) -> bool:
        """Do as extend() with the claim of this `version` (see Holding), of any owner."""
        raise NotImplementedError


# What few backends do: they derive from these as well, and the core asks isinstance(). Not from
# protocols, of which that question takes as long as a lock.


class InTransaction:
    """Its claims are rows of the database `using`: `Hold.pin()` and `lock_in_transaction()`.

    These verbs are on the caller's connection, in its open transaction. They raise Django's errors.
    """

    using: str

    def pin(self, grant: Grant, ttl: float) -> bool:
        """Extend the claim, and lock its row until the caller ends the transaction."""
        raise NotImplementedError

    def release_at_commit(self, grant: Grant) -> bool:
        """Release in the transaction, which keeps the row locked until it ends."""
        raise NotImplementedError

    def lock_row(self, key: str, wait: float | None) -> int | Busy | None:
        """Lock the row, and move its fence on: return the fence.

        Busy: other transactions had it for `wait` seconds. None: `acquire` can tell more.
        """
        raise NotImplementedError


class GuardedWrites:
    """Its store keeps other data as well: `Hold.guarded_set()`."""

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

        Return whether it was. With `release` the same request gives the claim up.
        """
        raise NotImplementedError


class Purgeable:
    """It keeps something of each lock that is free: `distlock purge`, "Clear up" in the admin."""

    def left_over(self, older_than: float) -> tuple[int, int]:
        """Count what `clear_expired()` and `purge()` would find."""
        raise NotImplementedError

    def clear_expired(self) -> int:
        """Free what its holder did not renew, and may yet try to; return how many that were."""
        raise NotImplementedError

    def purge(self, older_than: float) -> int:
        """Delete what was free for `older_than` seconds; return how many that were."""
        raise NotImplementedError


def no_answer(alias: str, error: Exception, id: str) -> Error:
    """Return what a check reports if the server does not answer."""
    return Error(f"DISTLOCK[{alias!r}]: {error}", id=id)


def _for_keys(verb: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(verb)
    def checked(self: Any, key: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if key is not None:
            checked_key(key)
        return verb(self, key, *args, **kwargs)

    return checked
