"""Values that cross the floors: `Claim`, `Grant`, `Busy`, `Holding`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# No code changes a claim or a grant, and both may be keys of a dict. They are not frozen because to
# make them would take four times as long, a tenth of what a lock costs.


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Claim:
    """What a caller asks a backend for; the same `owner` again is the same claim."""

    name: str
    key: str  # names.key_of(name): what backends use; `name` is for people
    owner: str  # secret token, 32 hex digits; never shown, never logged
    ttl: float
    holder: str  # ASCII JSON object for people: host, pid, thread, who
    shared: bool = False
    fair: bool = False
    limit: int = 1
    # Holds nothing: granted as soon as `limit` owners have counted down (see Latch).
    latch: bool = False
    stable: bool = False  # the owner is no secret of one acquisition: other claims may have it
    renew: bool = True  # the core extends what was granted; False: it has to last for the ttl
    # A backend that can wake a waiter calls this, from any thread and at most once for each
    # try that returned no grant, to end the caller's pause: with a Grant if it has one (the
    # claim is then held), with None for "try again now".
    wake: Callable[[Grant | None], None] | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True, unsafe_hash=True)
class Grant:
    """What a backend gave: the claim is held from now on."""

    claim: Claim
    fence: int | None = None
    # A monotonic time at which the lease cannot have begun yet. None: the backend only tried,
    # and the core takes the moment at which it asked.
    asked_at: float | None = None
    # Whatever the backend wants back at extend and release, such as a session. Hold.dump() hands
    # a number or a text to the next process; anything else stays behind.
    session: Any = None
    # Seconds that the backend gave for a start, None: the claim's ttl. The core extends it in time.
    ttl: float | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """Another owner has it. Falsy, as the None that a backend may return instead."""

    # Seconds until the claim in the way ends unless it is renewed; None: not known.
    free_in: float | None = None
    # A file descriptor that is readable as soon as another try is worth it.
    wake_fd: int | None = None
    # Kept by the core as long as the caller waits; to drop it is to give up a place in a queue.
    ticket: Any = None
    will_wake: bool = False  # claim.wake will be called when another try is worth it

    def __bool__(self) -> Literal[False]:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One claim that a backend holds, for people: no secret in it."""

    name: str  # names.shown()
    key: str
    alias: str
    version: str  # changes with the owner: what clear(if_version=) compares
    kind: str = "exclusive"  # "exclusive", "shared" or "permit"
    fence: int | None = None
    expires_in: float | None = None  # seconds; None: lives as long as its session
    held_for: float | None = None  # seconds
    waiters: int | None = None  # None: not known
    holder: Mapping[str, Any] = field(default_factory=dict)
