"""Leases of etcd: reused; how long a crashed holder's lock lives on, a little more than its ttl."""

from __future__ import annotations

import math
from collections import defaultdict, deque

from ...primitives.timing import DRIFT_FACTOR, monotonic
from .gateway import Gateway

# A lease lasts this much longer than the claim needs, so that the next claims of this process
# can have it too: a lease of its own for each is a third request (1.5 times as long).
SPARE = 0.1
KEEP_FREE = 64  # free leases of one length; each expires


class Lease:
    """One lease: the server ends it `seconds` after `began`, or later."""

    __slots__ = ("asked", "began", "id", "in_doubt", "seconds")

    def __init__(self, id: int, seconds: int = 0, began: float = 0.0, asked: int = 0) -> None:
        self.id = id
        self.asked = asked  # seconds; the server may have given more
        self.seconds = seconds  # whole ones, as etcd counts; 0: not known yet
        self.began = began  # when it was asked for, or to be renewed
        self.in_doubt = False

    def covers(self, ttl: float, at: float) -> bool:
        """Return whether it surely lasts until `ttl` seconds after `at`."""
        return self.began + self.seconds * (1 - DRIFT_FACTOR) >= at + ttl

    def doubt(self) -> None:
        """Keep it from other claims: a key may get it late, when nobody wants that any more."""
        self.in_doubt = True

    @property
    def is_due(self) -> bool:
        """Whether a claim that waits should renew it."""
        return monotonic() >= self.began + self.seconds / 3


class Leases:
    """The leases of one process: those of its claims, and free ones for the next claims."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._free: defaultdict[int, deque[Lease]] = defaultdict(lambda: deque(maxlen=KEEP_FREE))
        self._used: dict[int, Lease] = {}  # by id; what is never given back is swept out
        self._sweep_at = 1000

    def take(self, ttl: float) -> Lease:
        """Return a lease that lasts `ttl` seconds from now, for one claim alone."""
        free = self._free[_seconds(ttl)]
        now = monotonic()
        while True:
            try:
                lease = free.pop()
            except IndexError:
                return self.new(ttl)
            if lease.covers(ttl, now):
                self._used[lease.id] = lease
                return lease

    def new(self, ttl: float) -> Lease:
        """Ask for a lease."""
        began = monotonic()
        asked = _seconds(ttl)
        answer = self._gateway.ask("/v3/lease/grant", {"TTL": asked})
        # The server may give a longer one: it has a minimum.
        lease = Lease(int(answer["ID"]), int(answer["TTL"]), began, asked)
        if len(self._used) > self._sweep_at:
            self._used = {x.id: x for x in list(self._used.values()) if x.covers(0, began)}
            self._sweep_at = 2 * len(self._used) + 1000
        self._used[lease.id] = lease
        return lease

    def of(self, id: int) -> Lease:
        """Return the lease with this id, which may be another process's."""
        return self._used.get(id) or Lease(id)

    def give_back(self, id: int) -> None:
        """Keep a lease of ours for other claims: no key uses it now. One in doubt just ends."""
        if (lease := self._used.pop(id, None)) is not None and not lease.in_doubt:
            self._free[lease.asked].append(lease)

    def renew(self, lease: Lease) -> bool:
        """Let a lease begin again; return False if it has ended."""
        began = monotonic()
        answer = self._gateway.ask("/v3/lease/keepalive", {"ID": lease.id})
        if "TTL" not in answer:
            return False
        lease.seconds, lease.began = int(answer["TTL"]), began
        return True

    def remaining(self, id: int) -> float | None:
        """Return the seconds of a lease that are left to its claim; None: it has ended."""
        answer = self._gateway.ask("/v3/lease/timetolive", {"ID": id})
        left = int(answer.get("TTL", 0))
        granted = int(answer.get("grantedTTL", 0))
        return None if left < 0 or not granted else max(0.0, left - granted * SPARE / (1 + SPARE))


def _seconds(ttl: float) -> int:
    return math.ceil(ttl * (1 + SPARE))
