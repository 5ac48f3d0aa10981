"""`LocMemBackend`: locks in this process's memory; does not exclude other processes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from time import time_ns
from typing import Any, TypeVar, cast

from ..claims import Busy, Claim, Grant, Holding
from ..primitives import identity, names
from ..primitives.logs import fields, logger
from ..primitives.timing import monotonic
from .base import BaseLockBackend

# A waiter polls at least every `poll_max`; one that has not for longer has died.
HEARD_LATELY = 3.0

AnyMethod = TypeVar("AnyMethod", bound=Callable[..., Any])


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


@dataclass(slots=True)
class _State:
    held: dict[str, _Held] = field(default_factory=dict)  # by owner
    queue: dict[str, _Waiter] = field(default_factory=dict)  # by owner, in order of arrival


@dataclass(slots=True)
class _Latch:
    counted: set[str] = field(default_factory=set)  # owners
    waiting: dict[str, Claim] = field(default_factory=dict)  # by owner
    until: float = 0.0


def _alone(method: AnyMethod) -> AnyMethod:
    """Let one thread at a time run the method, but allow a signal handler of that thread.

    The handler finishes before the interrupted method continues, so that method may find changes
    between any two steps. So a waiter leaves the queue only when it holds the lock, and empty
    objects are checked again before they are dropped; a handler drops nothing, because it may
    be in use.
    """

    @wraps(method)
    def alone(self: LocMemBackend, *args: Any, **options: Any) -> Any:
        with self._lock:
            depth = self._depth
            self._depth += 1
            try:
                answer = method(self, *args, **options)
            finally:
                self._depth = depth
        while self._woken and not depth:
            with suppress(IndexError):  # another thread has taken it
                self._wake(self._woken.popleft())
        return answer

    return cast("AnyMethod", alone)


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
        self._lock = threading.RLock()
        self._depth = 0
        self._states: dict[str, _State] = {}
        self._latches: dict[str, _Latch] = {}
        self._fence = 0
        self._woken: deque[Grant] = deque()  # waiters to wake, once no method runs

    def extend(self, grant: Grant, ttl: float) -> bool:
        return self._move_end(grant, ttl, at_least=True)

    def end_in(self, grant: Grant, ttl: float) -> bool:
        return self._move_end(grant, ttl, at_least=False)

    @_alone
    def counted(self, key: str) -> int:
        return len(self._latch(key).counted)

    def holders(self, key: str | None = None) -> Iterable[Holding]:
        with self._lock:
            now = monotonic()
            return [
                self._holding(held, len(state.queue), now)
                for held_key, state in list(self._states.items())
                if key is None or key == held_key
                for held in list(state.held.values())
                if held.until > now
            ]

    def queue(self, key: str) -> list[Mapping[str, Any]]:
        with self._lock:
            state = self._states.get(key)
            waiters = list(state.queue.values()) if state else []
        return [identity.holder_fields(waiter.claim.holder) for waiter in waiters]

    def prolong(self, key: str, version: str, ttl: float) -> bool:
        with self._lock:
            state = self._states.get(key)
            held = list(state.held.values()) if state else []
            claims = [h.claim for h in held if str(h.fence) == version]
        return any(self.extend(Grant(claim), ttl) for claim in claims)

    def after_fork(self) -> None:
        """Start empty: the parent's holds are invisible here, and not ours."""
        self._lock = threading.RLock()
        self._depth = 0
        self._states = {}
        self._latches = {}
        self._woken.clear()

    def _move_end(self, grant: Grant, ttl: float, *, at_least: bool) -> bool:
        with self._lock:
            state = self._states.get(grant.claim.key)
            held = state.held.get(grant.claim.owner) if state else None
            if held is None or held.until <= monotonic():
                return False
            held.until = max(monotonic() + ttl, held.until if at_least else 0.0)
            return True

    @_alone
    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy:
        if claim.latch:
            return self._pass(claim, wait)
        state = self._states.setdefault(claim.key, _State())
        now = monotonic()
        held = state.held.get(claim.owner)
        if held is not None and held.until > now:
            held.until = max(held.until, now + claim.ttl)
            return Grant(claim, held.fence)
        state.queue.setdefault(claim.owner, _Waiter(claim, now)).heard = now
        self._hand_over(claim.key, state, now, but=claim.owner)
        if wait == 0 and state.queue.pop(claim.owner, None) is not None:
            self._hand_over(claim.key, state, now)  # later waiters may fit
        held = state.held.get(claim.owner)
        if held is not None:
            return Grant(claim, held.fence)
        ends = min([h.until for h in list(state.held.values())], default=now)
        return Busy(free_in=max(0.0, ends - now))

    @_alone
    def clear(self, key: str, if_version: str | None = None) -> int:
        state = self._states.get(key)
        if state is None:
            return 0
        now = monotonic()
        live = [(o, str(h.fence)) for o, h in list(state.held.items()) if h.until > now]
        owners = [owner for owner, fence in live if if_version in (None, fence)]
        for owner in owners:
            state.held.pop(owner, None)
        self._hand_over(key, state, now)
        return len(owners)

    @_alone
    def count_down(self, claim: Claim) -> int:
        latch = self._latch(claim.key)
        latch.counted.add(claim.owner)
        latch.until = max(latch.until, monotonic() + claim.ttl)
        if (counted := len(latch.counted)) >= claim.limit:
            latch.waiting, passing = {}, latch.waiting
            self._woken.extend(Grant(waiter) for waiter in passing.values())
        return counted

    def _latch(self, key: str) -> _Latch:
        for old, latch in [] if self._depth > 1 else list(self._latches.items()):
            expired = set(latch.counted)
            if latch.until <= monotonic():
                latch.counted -= expired
                if not (latch.waiting or latch.counted):
                    self._latches.pop(old, None)
                    if latch.waiting or latch.counted:
                        self._latches[old] = latch
        return self._latches.setdefault(key, _Latch())

    def _pass(self, claim: Claim, wait: float | None) -> Grant | Busy:
        latch = self._latch(claim.key)
        latch.waiting.pop(claim.owner, None)
        if len(latch.counted) >= claim.limit:
            return Grant(claim)
        if wait != 0:
            latch.waiting[claim.owner] = claim
        return Busy()

    @_alone
    def release(self, grant: Grant) -> bool:
        claim = grant.claim
        if latch := self._latches.get(claim.key):
            latch.waiting.pop(claim.owner, None)
        state = self._states.get(claim.key)
        if state is None:
            return False
        now = monotonic()
        state.queue.pop(claim.owner, None)
        held = state.held.pop(claim.owner, None)
        self._hand_over(claim.key, state, now)
        return held is not None and held.until > now

    def _hand_over(self, key: str, state: _State, now: float, but: str = "") -> None:
        """Grant the lock to as many from the head of the queue as fit; wake all `but` one."""
        for owner in [o for o, h in list(state.held.items()) if h.until <= now]:
            state.held.pop(owner, None)
        for owner, waiter in list(state.queue.items()):
            claim = waiter.claim
            if now - waiter.heard > HEARD_LATELY:
                state.queue.pop(owner, None)
                continue
            if not self._fits(state, claim):
                break
            held = _Held(claim, 0, now, now + claim.ttl)
            if state.held.setdefault(owner, held) is not held:  # a signal handler gave it
                continue
            held.fence = self._fence = max(self._fence + 1, time_ns() // 1000)
            state.queue.pop(owner, None)
            if owner != but:
                self._woken.append(Grant(claim, held.fence, asked_at=now))
        if not (state.held or state.queue) and self._depth == 1:
            self._states.pop(key, None)
            if state.held or state.queue:
                self._states[key] = state

    @staticmethod
    def _fits(state: _State, claim: Claim) -> bool:
        if not state.held:
            return True
        held = [h.claim for h in list(state.held.values())]
        if claim.shared:
            return all(other.shared for other in held)
        return 1 < claim.limit > len(held) and not any(
            other.shared or other.limit == 1 for other in held
        )

    def _wake(self, grant: Grant) -> None:
        try:
            if grant.claim.wake is not None:
                grant.claim.wake(grant)
        except Exception:  # its event loop was closed, say: pass the grant on
            logger.exception(
                "a waiter for a lock could not be woken", extra=fields("not_woken", self.alias)
            )
            self.release(grant)

    def _holding(self, held: _Held, waiters: int, now: float) -> Holding:
        claim = held.claim
        return Holding(
            name=names.shown(claim.name),
            key=claim.key,
            alias=self.alias,
            version=str(held.fence),
            kind="shared" if claim.shared else "permit" if claim.limit > 1 else "exclusive",
            fence=held.fence,
            expires_in=held.until - now,
            held_for=now - held.since,
            waiters=waiters,
            holder=identity.holder_fields(claim.holder),
        )
