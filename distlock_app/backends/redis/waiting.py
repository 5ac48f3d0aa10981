"""Waiters of the Redis backend, and the messages by which a lock is handed over to one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from ...claims import Busy, Claim, Grant
from ...errors import BackendError
from ...primitives.timing import DRIFT_FACTOR, monotonic
from . import listening
from .link import Broken
from .pool import Pool

# Seconds to look once more whether there is something to read.
AGAIN = 0.001
# Messages kept that came before their waiters had their answers; more are those of no waiter.
EARLY = 100


class Message(NamedTuple):
    """What a hand-over says: a lease began at a server's time, and lasts so many seconds."""

    fence: int
    began: int
    ttl: float
    heard: float


class Waiter(listening.Waiter):
    """What is known about one claim that waits, from its first try to its grant."""

    __slots__ = ("asked", "given", "granted", "server")

    def __init__(self, claim: Claim, granted: bool) -> None:
        """`granted`: a message grants it the lock; if not, it tries again."""
        super().__init__(claim)
        self.granted = granted
        # When a try was sent that found the lock taken, and the server's time when it ran.
        self.asked = 0.0
        self.server: int | None = None
        self.given: Message | None = None

    def outdates(self, message: Message) -> bool:
        """Return whether another owner took the lock after that lease began."""
        return self.server is not None and message.began < self.server

    def grant(self, message: Message) -> Grant:
        """Return the grant that a message brought.

        The message may be hours old (a stopped process reads it when it goes on). The lease
        cannot have begun before `asked`, since the try that was sent then found the lock
        taken, and it began `began - server` later, by the server's clock.
        """
        asked_at = self.asked
        if self.server is not None:
            asked_at += (message.began - self.server) / 1e6 * (1 - DRIFT_FACTOR)
        asked_at = min(asked_at, message.heard)
        return Grant(self.claim, fence=message.fence, asked_at=asked_at, ttl=message.ttl or None)


class Listener(listening.Listener[Waiter]):
    """The channel of this process at one server, and the claims that wait for a message on it."""

    def __init__(
        self,
        channel: str,
        server: Pool,
        refused: Callable[[Grant], Any],
        *,
        alias: str,
        grants: bool,
    ) -> None:
        """`refused` gets a grant that its caller failed to take.

        With `grants=False` a message is not a grant: its claim tries again.
        """
        super().__init__(channel, alias)
        self._grants = grants
        self._server = server
        self._refused = refused
        self._early: dict[tuple[str, str], Message] = {}

    def disarm(self, claim: Claim) -> Waiter | None:
        """Return the waiter of a claim that asks again; until `arm`, no message wakes it."""
        if not self._waiters:
            return None
        with self._lock:
            waiter = self._waiters.find(claim)
            if waiter is not None:
                waiter.armed, waiter.given = False, None
            return waiter

    def rearm(self, waiter: Waiter | None) -> None:
        """Let messages wake the claim again, after a try with an unknown result."""
        if waiter is not None:
            with self._lock:
                waiter.armed = True

    def arm(
        self, claim: Claim, waiter: Waiter | None, asked: float, answer: Any, losses: int
    ) -> Grant | Busy:
        """Let messages wake the claim, whose try, sent at `asked`, has failed.

        Return its grant if the message has come already. `losses` are those before the try.
        """
        _, free_in_ms, server, arrived = answer
        with self._lock:
            if waiter is None:
                waiter = Waiter(claim, self._grants and claim.renew)
                self._waiters.add(waiter)
            waiter.asked, waiter.server, waiter.arrived = asked, server, arrived
            early = self._early.pop((claim.owner, claim.key), None) if self._early else None
            again = self.losses != losses
            if (given := waiter.given or early) and not waiter.outdates(given):
                if waiter.granted:
                    self._waiters.drop(claim)
                    return waiter.grant(given)
                again = True
            if again:
                return Busy(free_in=0.0)
            waiter.given, waiter.armed = None, True
            self._needs_reader(waiter)
        pause = partial(self.given, waiter) if claim.blocking else None
        return Busy(free_in=max(free_in_ms, 1) / 1000, pause=pause)

    def given(self, waiter: Waiter, seconds: float) -> Grant | None:
        """Sleep until the lock is handed over, at most so many seconds; return the grant."""
        self.pause(waiter, seconds)
        return self._grant_of(waiter)

    def hand_out(self, text: bytes) -> None:
        """Take one message: "token key fence began ttl"."""
        try:
            owner, key, fence, began, ttl_ms = text.decode().split(" ")
            message = Message(int(fence), int(began), int(ttl_ms) / 1000, monotonic())
        except ValueError as error:  # only a part of a message
            raise Broken from error
        woken = []
        with self._lock:
            waiters = self._waiters.get((owner, key))
            # Without a waiter of this token: its first try is under way, or its last try got the
            # lock as an answer, or its release has passed the lock on or is about to.
            if not waiters:
                if len(self._early) >= EARLY:
                    self._early.clear()
                self._early[owner, key] = message
            for waiter in waiters or ():
                if not waiter.armed:
                    waiter.given = message
                elif not waiter.outdates(message):
                    waiter.armed, waiter.given = False, message
                    woken.append(waiter)
                    if waiter.granted:
                        self._waiters.drop(waiter.claim)
        could = [self._wake(waiter) for waiter in woken]
        if woken and not any(could):
            with suppress(BackendError):  # then its lease ends by itself: it is short
                self._refused(woken[0].grant(message))

    def _open(self) -> Subscription:
        return Subscription(self, self._server)

    def _grant_of(self, waiter: Waiter) -> Grant | None:
        return waiter.grant(waiter.given) if waiter.given and waiter.granted else None

    def _messages_lost(self, waiter: Waiter) -> None:
        # It may be another server's now, with another clock.
        waiter.server = None


class Subscription(listening.Subscription):
    """A subscription to the channel of this process at one server."""

    def __init__(self, listener: Listener, server: Pool) -> None:
        self._listener = listener
        self._server = server
        self._demoted = server.demoted
        self._link = server.connect(listening.SUBSCRIBE_SECONDS)
        try:
            self._lines = self._link.subscribe(listener.channel)
        except BaseException:
            self._link.close()
            raise

    def receive(self, seconds: float) -> None:
        if self._server.demoted != self._demoted or self._server.replaced(self._link):
            raise Broken("another server may be the master, which counts its own")
        # Looked at again: a process that was stopped finds its time over, not its answer.
        if not self._heard_in(seconds) and self._lines.is_dead() and not self._heard_in(AGAIN):
            raise Broken("no answer to PING")

    def close(self) -> None:
        self._lines.close()

    def _heard_in(self, seconds: float) -> bool:
        lines = self._lines.read() if self._link.readable(seconds) else []
        for line in lines:
            if b" " in line:  # not those around a message: kind, channel, lengths
                self._listener.hand_out(line)
        return bool(lines)
