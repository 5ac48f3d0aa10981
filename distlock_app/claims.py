"""Values passed between the core and backends: `Claim`, `Grant`, `Busy`, `Holding`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Claims and grants are never changed and may be dict keys. They are not frozen, because creating
# them would take four times as long, a tenth of the cost of a lock.


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Claim:
    """A caller's request to a backend; with the same `owner`, it is the same claim."""

    name: str
    key: str  # names.key_of(name), for backends; `name` is for display
    owner: str = field(repr=False)  # secret token, 32 hex digits; never shown, never logged
    ttl: float
    holder: str  # ASCII JSON object for display: host, pid, thread, who ...
    shared: bool = False
    fair: bool = False
    limit: int = 1
    # Granted as soon as `limit` owners have counted down (see Latch); holds nothing.
    latch: bool = False
    stable: bool = False  # the owner is a name that other claims may share
    renew: bool = True  # the core extends the grant; False: it must last for the ttl
    # A backend that can wake waiters calls this to end the caller's pause, from any thread and at
    # most once for each try that returned no grant: with a Grant if the claim is now held, or
    # with None for "try again now". It raises RuntimeError if nobody is left to take the grant.
    wake: Callable[[Grant | None], None] | None = field(default=None, compare=False, repr=False)
    blocking: bool = False  # a thread waits, which calls Busy.pause instead, if there is one


@dataclass(slots=True, unsafe_hash=True)
class Grant:
    """A backend's answer: the claim is held from now on."""

    claim: Claim
    fence: int | None = None
    # A monotonic time before the lease began. None: the backend only tried, and the core uses
    # the time of its request.
    asked_at: float | None = None
    # Any data that the backend needs in extend and release, such as a session. Hold.dump() passes
    # a number or a text on to the next process, but nothing else.
    session: Any = None
    # Seconds that the backend granted at first; the core extends it in time. None: the claim's ttl.
    ttl: float | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """Another owner has the lock. Falsy, like the None that a backend may return instead."""

    # Seconds until the other claim expires unless it is renewed; None: unknown.
    free_in: float | None = None
    # A file descriptor that becomes readable when another try is worthwhile.
    wake_fd: int | None = None
    # How a thread waits (Claim.blocking) for at most so many seconds: returns what was handed over.
    pause: Callable[[float], Grant | None] | None = None
    will_wake: bool = False  # claim.wake will be called when another try is worthwhile

    def __bool__(self) -> Literal[False]:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A held claim for display, without secrets."""

    name: str  # names.shown()
    key: str
    alias: str
    version: str  # changes with the owner; compared by clear(if_version=); digits are the fence
    kind: str = "exclusive"  # "exclusive", "shared" or "permit"
    fence: int | None = None
    expires_in: float | None = None  # seconds; None: lives as long as its session
    held_for: float | None = None  # seconds
    waiters: int | None = None  # None: unknown
    holder: Mapping[str, Any] = field(default_factory=dict)
