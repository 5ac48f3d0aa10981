"""Renews leases at a third of their ttl, in batches, a thread per server; tells which are late.

One thread per server sends the requests: a server that hangs does not delay the others or the
timer, so losses are reported on time.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import BackendError
from ..primitives.forks import in_child
from ..primitives.logs import fields, logger
from ..primitives.names import shown
from ..primitives.threads import Worker
from ..primitives.timing import monotonic
from .lease import GONE, LATE, Lease
from .releasing import releaser
from .timer import timer

RENEW_AT = 1 / 3  # of the ttl
# As a part of the ttl. Renewals start at multiples of this, so those of many holds coincide.
RENEW_STEP = 1 / 100
# Leases with less than this part of the ttl left go onto the timer's heap.
YOUNG_UNTIL = 1 - RENEW_AT + RENEW_STEP
# After an error: the number of retries in the time left, with pauses within these bounds.
RETRIES_LEFT = 8
RETRY_MIN = 0.02
RETRY_MAX = 1.0


class Renewer:
    """Checks each lease when it is due, and has its backend extend it."""

    def __init__(self) -> None:
        # By server, weakly: otherwise the workers would keep the server and its backend alive.
        self._workers: WeakKeyDictionary[object, Worker] = WeakKeyDictionary()

    def watch(self, lease: Lease) -> None:
        """Keep `lease` renewed, and report its loss, until it ends."""
        timer.young[lease] = self._schedule_first
        first_look = lease.trusted_until - lease.term * YOUNG_UNTIL
        if lease.backend.heartbeat is not None:
            first_look = min(first_look, self._next_look(lease))
        if first_look < timer.wakes_at:
            timer.wake_at(first_look)

    def held(self) -> list[Lease]:
        """Return the leases that this process holds now."""
        # An extended one is scheduled twice for a moment.
        known = [what for what in dict.fromkeys(timer.scheduled()) if isinstance(what, Lease)]
        return [lease for lease in known if not (lease.ended or lease.lost)]

    def await_renewal(self, lease: Lease) -> None:
        """Wait for a renewal of `lease`, which has ended, if one is in flight."""
        if (worker := self._workers.get(_server_of(lease))) is not None:
            worker.finish(max(0.0, lease.trusted_until - monotonic()))

    def unpin(self, lease: Lease, ttl: float, asked_at: float) -> None:
        """Resume renewal after the commit of a pinned transaction, which extended the lease."""
        if not (lease.ended or lease.foreign):
            lease.extended(ttl, asked_at=asked_at)
            if lease.renews and lease.trusted_until - monotonic() < lease.ttl * RENEW_AT:
                # It took long: others may have been waiting for the commit.
                asked_at, ttl = monotonic(), lease.capped(lease.ttl)
                with suppress(BackendError):  # unknown: trusted as long as before
                    if lease.backend.extend(lease.grant, ttl):
                        lease.extended(ttl, asked_at=asked_at)
                    else:
                        reason = "another owner took it after the commit of a pinned transaction"
                        releaser.lose(lease, reason)
        lease.unpin()
        if not (lease.ended or lease.foreign):
            self.watch(lease)

    def _schedule(self, lease: Lease, due: float) -> None:
        if not lease.ended:
            timer.at(due, lease, self._look_at)

    def _schedule_first(self, lease: Lease) -> None:
        self._schedule(lease, self._next_look(lease))

    def _next_look(self, lease: Lease, asked_at: float | None = None) -> float:
        beat = lease.backend.heartbeat
        if beat is not None:  # the same beat for all, so that the backend checks them together
            beat = min(beat, lease.term * RENEW_AT)
            return min(lease.trusted_until, (monotonic() // beat + 1) * beat)
        if not lease.renews:
            return lease.trusted_until
        if asked_at is None:
            asked_at = lease.trusted_until - lease.term
        due, step = asked_at + lease.term * RENEW_AT, lease.term * RENEW_STEP
        return min(lease.trusted_until, due - due % step)

    def _look_at(self, lease: Lease) -> None:
        now = monotonic()
        if lease.ended or lease.foreign:
            return
        if lease.pins:  # no other owner can have it, and we could not lock the row either
            self._schedule(lease, now + lease.ttl * RENEW_AT / 4)
            return
        renews = _renews(lease, now)
        if now >= lease.trusted_until:
            releaser.lose(lease, LATE if renews else "its time is over")
            return
        self._schedule(lease, lease.trusted_until)
        if renews or lease.backend.heartbeat is not None:
            self._put_extend(lease)

    def _put_extend(self, lease: Lease) -> None:
        server = _server_of(lease)
        worker = self._workers.get(server) or self._workers.setdefault(
            server, Worker(f"distlock-worker-{lease.alias}", self._extend)
        )
        worker.put(lease)

    def _extend(self, asked: list[Lease]) -> None:
        leases = [lease for lease in asked if not (lease.ended or lease.pins or lease.lost_because)]
        if not leases:
            return
        asked_at = monotonic()
        ttls = [lease.capped(lease.ttl) for lease in leases]
        work = [(lease.grant, ttl) for lease, ttl in zip(leases, ttls, strict=True)]
        answers: list[Any]
        try:
            answers = list(leases[0].backend.extend_many(work))
        except BaseException as error:
            answers = [error] * len(work)
        for lease, ttl, answer in zip(leases, ttls, answers, strict=True):
            if lease.ended or lease.lost_because is not None:
                continue
            if answer is True or answer is None:  # None: the backend needed no request
                lease.renewal_error = ""
                if answer and _renews(lease, asked_at):
                    lease.extended(ttl, asked_at=asked_at)
                self._schedule(lease, self._next_look(lease, asked_at))
            elif answer is False:
                releaser.lose(lease, GONE)
            else:
                self._retry(lease, answer)

    def _retry(self, lease: Lease, error: Any) -> None:
        if lease.pins:
            return  # `_look_at` watches it
        left = lease.trusted_until - monotonic()
        text = str(error)
        if lease.renewal_error != text:  # not at each retry: there may be many locks
            lease.renewal_error = text
            logger.warning(
                "cannot renew the lock %r (alias %r): %s",
                *(shown(lease.grant.claim.name), lease.alias, text),
                extra=fields("not_renewed", lease.alias, lease.grant, left=left, error=text),
            )
        pause = min(max(left / RETRIES_LEFT, RETRY_MIN), RETRY_MAX)
        self._schedule(lease, min(lease.trusted_until, monotonic() + pause))


def _server_of(lease: Lease) -> object:
    return lease.backend.server_of(lease.grant.claim.key)


def _renews(lease: Lease, now: float) -> bool:
    return lease.renews and lease.ends_by - now > lease.ttl * RENEW_AT


renewer = Renewer()
in_child(renewer.__init__)  # type: ignore[misc]
