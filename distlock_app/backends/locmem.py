"""`LocMemBackend`: locks in this process's memory; does not exclude other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from time import time_ns
from typing import Any, TypeVar

from ..claims import Busy, Claim, Grant, Holding
from ..primitives import identity, names
from ..primitives.rlock import RLock
from ..primitives.timing import monotonic
from .base import BaseLockBackend, woken

# A waiter polls at least every `poll_max`; one that has not for longer has died.
HEARD_LATELY = 3.0
# When a shard has so many more locks, it is worthwhile to look for expired ones.
SWEEP_EVERY = 8

Answer = TypeVar("Answer")


@dataclass(slots=True)
class _Held:
    claim: Claim
    fence: int
    since: float
    until: float


@dataclass(slots=True)
class _Waiter:
    claim: Claim
    heard: float


class _State:
    """One lock, or one latch: its holders or the parties that counted down, and its waiters.

    A change is made to a copy, which lacks what has expired since the last one.
    """

    __slots__ = ("counted", "counted_until", "fences", "granted", "held", "now", "queue")

    def __init__(self, last: _State | None, fences: Iterator[int]) -> None:
        self.fences = fences
        self.now = now = monotonic()
        self.granted: dict[str, Grant] = {}  # by owner: what this change granted to waiters
        self.held: dict[str, _Held] = {}  # by owner
        self.queue: dict[str, _Waiter] = {}  # by owner, in order of arrival
        self.counted: frozenset[str] = frozenset()  # owners
        self.counted_until = 0.0
        if last is None:
            return
        for owner, held in last.held.items():
            if held.until > now:
                self.held[owner] = held
        self.queue.update(last.queue)
        if last.counted_until > now:
            self.counted, self.counted_until = last.counted, last.counted_until

    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy:
        """Take the lock or pass the latch; else stay in the queue, unless this is the last try."""
        if claim.owner in self.held:
            self.extend(claim, claim.ttl)
            return Grant(claim, self.held[claim.owner].fence)
        self.queue[claim.owner] = _Waiter(claim, self.now)
        self.hand_over()
        if claim.owner in self.granted:
            return self.granted.pop(claim.owner)
        if wait == 0:
            del self.queue[claim.owner]
            self.hand_over()  # later waiters may fit
        ends = [held.until for held in self.held.values()]
        return Busy(free_in=min(ends) - self.now if ends else None)

    def extend(self, claim: Claim, ttl: float) -> bool:
        """Let the claim end no sooner than `ttl` seconds from now; return whether it is held."""
        held = self.held.get(claim.owner)
        return held is not None and self.end_in(claim, max(ttl, held.until - self.now))

    def end_in(self, claim: Claim, ttl: float) -> bool:
        """Let the claim end `ttl` seconds from now; return whether it is held."""
        held = self.held.get(claim.owner)
        if held is None:
            return False
        self.held[claim.owner] = replace(held, until=self.now + ttl)
        return True

    def release(self, claim: Claim) -> bool:
        """End the claim, or leave the queue; return whether the claim was held."""
        held = self.held.pop(claim.owner, None)
        self.queue.pop(claim.owner, None)
        if self.queue:  # else a free lock does without the call
            self.hand_over()
        return held is not None

    def withdraw(self, claim: Claim) -> None:
        """Leave the queue, unless another claim of this owner has asked since."""
        waiter = self.queue.get(claim.owner)
        if waiter is not None and waiter.claim is claim:
            del self.queue[claim.owner]
            self.hand_over()

    def clear(self, if_version: str | None) -> int:
        """Take away all claims, or the one of this version; return how many."""
        owners = [o for o, held in self.held.items() if if_version in (None, str(held.fence))]
        for owner in owners:
            del self.held[owner]
        self.hand_over()
        return len(owners)

    def count_down(self, claim: Claim) -> int:
        """Count the owner for the latch; return how many are counted."""
        self.counted |= {claim.owner}
        self.counted_until = max(self.counted_until, self.now + claim.ttl)
        self.hand_over()
        return len(self.counted)

    def hand_over(self) -> None:
        """Grant the lock to as many from the head of the queue as fit, passing over the dead."""
        while self.queue:
            owner, waiter = next(iter(self.queue.items()))
            claim = waiter.claim
            lives = self.now - waiter.heard <= HEARD_LATELY
            if lives and (self.held or claim.latch) and not self.fits(claim):
                return
            del self.queue[owner]
            if lives and claim.latch:
                self.granted[owner] = Grant(claim)
            elif lives:
                fence = next(self.fences)
                self.held[owner] = _Held(claim, fence, self.now, self.now + claim.ttl)
                self.granted[owner] = Grant(claim, fence, asked_at=self.now)

    def fits(self, claim: Claim) -> bool:
        """Return whether the claim can be held beside those that are held now."""
        if claim.latch:
            return len(self.counted) >= claim.limit
        others = [held.claim for held in self.held.values()]
        if claim.shared:
            return all(other.shared for other in others)
        return len(others) < claim.limit and all(other.limit > 1 for other in others)


class _Shard(dict[str, _State]):
    """The locks and latches whose keys begin with the same two digits, without free ones.

    It is never changed: a change makes the next version, and so copies a 256th of all locks.
    """

    next: _Shard | None = None


class LocMemBackend(BaseLockBackend):
    """For tests and single-process development; the model for other backends.

    Readers, writers, semaphore permits and mutexes share one queue in order of arrival, without
    overtaking, so `fair` makes no difference.
    """

    local = True
    fences = True
    shares = True
    queues = True
    limits = True
    latches = True
    prolongs = True
    pushes = True
    poll_max = 1.0

    def __init__(self, *, alias: str, location: Any = None) -> None:
        super().__init__(alias=alias, location=location)
        self._start()

    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy:
        return self._change(claim.key, _State.acquire, claim, wait)

    def extend(self, grant: Grant, ttl: float) -> bool:
        return self._change(grant.claim.key, _State.extend, grant.claim, ttl)

    def end_in(self, grant: Grant, ttl: float) -> bool:
        return self._change(grant.claim.key, _State.end_in, grant.claim, ttl)

    def release(self, grant: Grant) -> bool:
        return self._change(grant.claim.key, _State.release, grant.claim)

    def withdraw(self, claim: Claim) -> None:
        self._change(claim.key, _State.withdraw, claim)

    def clear(self, key: str, if_version: str | None = None) -> int:
        return self._change(key, _State.clear, if_version)

    def count_down(self, claim: Claim) -> int:
        return self._change(claim.key, _State.count_down, claim)

    def counted(self, key: str) -> int:
        return len(self._current(key).counted)

    def prolong(self, key: str, version: str, ttl: float) -> bool:
        held = self._current(key).held.values()
        claims = [one.claim for one in held if str(one.fence) == version]
        return any(self.extend(Grant(claim), ttl) for claim in claims)

    def holders(self, key: str | None = None) -> Iterable[Holding]:
        keys = list(self._states) if key is None else [key]
        states = [self._current(key) for key in keys]
        return [self._holding(held, state) for state in states for held in state.held.values()]

    def queue(self, key: str) -> list[Mapping[str, Any]]:
        waiters = self._current(key).queue.values()
        return [identity.holder_fields(waiter.claim.holder) for waiter in waiters]

    def after_fork(self) -> None:
        self._start()  # empty: what the parent holds is not ours

    def _start(self) -> None:
        self._lock = RLock()
        # A later process begins with a greater one: none grants a million locks a second.
        self._fences = count(time_ns() // 1000)
        self._shards = {f"{number:02x}": _Shard() for number in range(256)}

    @property
    def _states(self) -> dict[str, _State]:
        """All locks and latches that are not free, by key."""
        states: dict[str, _State] = {}
        for digits in self._shards:
            states |= self._shard(digits)
        return states

    def _shard(self, key: str) -> _Shard:
        """Return the latest version of the shard of a key."""
        shard = self._shards[key[:2]]
        while shard.next is not None:
            shard = shard.next
        return shard

    def _current(self, key: str) -> _State:
        """Return a lock without what has expired."""
        return _State(self._shard(key).get(key), self._fences)

    def _change(
        self,
        key: str,
        change: Callable[..., Answer],
        *args: Any,
        granted: list[Grant] | None = None,
    ) -> Answer:
        """Change one lock, and wake the waiters that were granted it; or add those to `granted`.

        One thread at a time changes locks. But a signal handler may interrupt it in the same
        thread, and lock or release, too: then `change` begins again with what the handler left.
        """
        digits = key[:2]
        with self._lock:
            while True:
                shard = self._shards[digits]
                state = _State(shard.get(key), self._fences)
                answer = change(state, *args)
                following = _Shard(shard)
                following[key] = state
                if not (state.held or state.queue or state.counted):
                    del following[key]
                elif len(following) > len(shard) and len(following) % SWEEP_EVERY == 0:
                    self._sweep(following)
                # One step for Python: no handler comes between the comparison and the change.
                successor = vars(shard).setdefault("next", following)
                self._shards[digits] = successor
                if successor is following:
                    break
        if granted is not None:
            granted += state.granted.values()
        elif state.granted:
            self._wake(list(state.granted.values()))
        return answer

    def _sweep(self, shard: _Shard) -> None:
        """Forget what has expired and nobody used again."""
        for key, last in list(shard.items()):
            state = _State(last, self._fences)
            if not (state.held or state.queue or state.counted):
                del shard[key]

    def _wake(self, granted: list[Grant]) -> None:
        """Wake these waiters; one that is gone passes the lock on."""
        while granted:
            grant = granted.pop(0)
            if not woken(grant.claim, grant, self.alias):
                self._change(grant.claim.key, _State.release, grant.claim, granted=granted)

    def _holding(self, held: _Held, state: _State) -> Holding:
        claim = held.claim
        return Holding(
            name=names.shown(claim.name),
            key=claim.key,
            alias=self.alias,
            version=str(held.fence),
            kind="shared" if claim.shared else "permit" if claim.limit > 1 else "exclusive",
            fence=held.fence,
            expires_in=held.until - state.now,
            held_for=state.now - held.since,
            waiters=len(state.queue),
            holder=identity.holder_fields(claim.holder),
        )
