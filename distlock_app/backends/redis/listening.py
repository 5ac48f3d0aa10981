"""The subscription that wakes waiters of Redis and Redlock, read by one of the waiting threads.

That thread *leads*. The others *follow*: they sleep until the leader has a message for them, or
leaves and lets one of them lead. So a process that waits for one lock needs no other thread, and
none has to be switched to. A task cannot read: for tasks, a thread of the listener leads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from redis.exceptions import RedisError

from ...claims import Claim, Grant
from ...primitives.logs import fields, logger
from ...primitives.rlock import RLock
from ...primitives.threads import Gate, started
from ...primitives.timing import monotonic
from ..base import woken
from .link import HEARTBEAT, Broken, reason_of

# A leader that has not looked for so long is stopped, or in a signal handler: another one leads.
ABSENT = 4 * HEARTBEAT
# Without waiters for so long, thread and subscription go; the next waiter brings them back.
IDLE_SECONDS = 60.0
# First and longest pause between two attempts to subscribe.
RETRY_MIN, RETRY_MAX = 0.05, 1.0
# Longest step on the way to a subscription: a waiter can do without.
SUBSCRIBE_SECONDS = 1.0


class Waiter:
    """A claim that waits."""

    __slots__ = ("armed", "arrived", "claim", "gate")

    def __init__(self, claim: Claim, arrived: int = 0) -> None:
        self.claim = claim
        self.arrived = arrived  # its place in the queue: a time of the servers; 0: not known yet
        self.armed = False  # it pauses: a message may wake it
        self.gate: Gate | None = None  # where its thread sleeps while another one leads


AnyWaiter = TypeVar("AnyWaiter", bound=Waiter)


class Waiters(dict[tuple[str, str], list[AnyWaiter]]):
    """The waiters of this process, by owner and key: what a message names.

    Several of a kind when threads share a stable owner. A signal handler may wait and stop
    waiting in the middle of any method: so a list is replaced, never changed.
    """

    def all(self) -> Iterator[AnyWaiter]:
        """Return every waiter."""
        return (waiter for waiters in list(self.values()) for waiter in waiters)

    def find(self, claim: Claim) -> AnyWaiter | None:
        """Return the one of this very claim."""
        for waiter in self.get((claim.owner, claim.key), ()):
            if waiter.claim is claim:
                return waiter
        return None

    def add(self, waiter: AnyWaiter) -> None:
        """Add the waiter of a claim that has none yet."""
        name = waiter.claim.owner, waiter.claim.key
        self[name] = [*self.get(name, ()), waiter]

    def drop(self, claim: Claim) -> bool:
        """Forget the one of this very claim; return whether its owner has another one."""
        name = claim.owner, claim.key
        others = [waiter for waiter in self.get(name, ()) if waiter.claim is not claim]
        if others:
            self[name] = others
        else:
            self.pop(name, None)
        return bool(others)


class Subscription:
    """An open subscription; `receive` and `close` are those of the backend."""

    def receive(self, seconds: float) -> None:
        """Hand out the messages that come within so many seconds; raise Broken if it is."""
        raise NotImplementedError

    def close(self) -> None:
        """Disconnect; ends a `receive` of another thread."""
        raise NotImplementedError


class Listener(Generic[AnyWaiter]):
    """The channel of this process, and the claims that wait for a message on it."""

    def __init__(self, channel: str, alias: str) -> None:
        self.channel = channel
        self.losses = 0  # how often messages may have been lost
        self._alias = alias
        # Guards all below and every waiter. Reentrant: a signal handler may lock or release in the
        # middle of any method.
        self._lock = RLock()
        self._waiters: Waiters[AnyWaiter] = Waiters()
        self._subscription: Subscription | None = None
        self._leader: object = None
        self._looked = 0.0  # when the leader last did
        self._followers: dict[Waiter, None] = {}  # in order of arrival
        self._for_tasks = False  # whether the thread that leads for them runs
        self._needed = 0.0  # when a waiter last armed itself
        self._closed = False
        self._opening = RLock()  # one thread subscribes
        self._opens = False  # it does
        self._retry_at, self._retry_pause = 0.0, RETRY_MIN

    @property
    def subscribed(self) -> bool:
        """Whether there is a subscription, as far as is known."""
        return self._subscription is not None

    def ensure_subscribed(self) -> bool:
        """Subscribe if need be; return whether that worked."""
        if self._subscription is not None:
            return True
        if self._opens and self._retry_pause > RETRY_MIN:  # and failed before
            return False
        with self._opening:
            pause = self._retry_at - monotonic()
            if self._subscription is not None:
                return True
            if self._closed or pause > RETRY_MIN:
                return False
            time.sleep(max(0.0, pause))
            opened: Subscription | None = None
            try:
                self._opens = True
                opened = self._open()
            except (RedisError, OSError) as error:
                self._not_subscribed(error)
                return False
            finally:
                self._opens = False
            self._retry_pause = RETRY_MIN
            self._wake_all()  # messages to the subscription before this one are lost
            with self._lock:  # a signal handler may have been faster, or have closed all
                if self._subscription is None and not self._closed:
                    self._subscription, opened = opened, None
                    self._needed = monotonic()
            if opened is not None:
                opened.close()
            return self._subscription is not None

    def pause(self, waiter: Waiter, seconds: float) -> None:
        """Sleep until a message wakes `waiter`, at most so many seconds, leading or following."""
        end = monotonic() + seconds
        try:
            while waiter.armed and (left := end - monotonic()) > 0:
                if self._leads(waiter):
                    self._read(waiter, end)
                else:
                    self._follow(waiter, left)
        finally:
            self._leave(waiter)

    def forget(self, claim: Claim) -> bool:
        """Stop expecting messages for the claim; unsubscribe if nobody has waited for long.

        Return whether another waiter has its owner.
        """
        if self._waiters:
            with self._lock:
                return self._waiters.drop(claim)
        if self._subscription is not None and monotonic() - self._needed > IDLE_SECONDS:
            self._close_if_idle()
        return False

    def close(self) -> None:
        """Unsubscribe for good; the waiters ask again by themselves."""
        self._closed = True
        self._lose(self._subscription)

    def _close_if_idle(self) -> None:
        with self._lock:
            if self._leader is None and not self._waiters:
                self._lose(self._subscription)

    def _open(self) -> Subscription:
        raise NotImplementedError

    def _not_subscribed(self, error: Exception) -> None:
        if self._retry_pause == RETRY_MIN:
            logger.warning(
                "cannot listen for locks: %s",
                reason_of(error),
                extra=fields("not_listening", self._alias),
            )
        self._retry_pause = min(2 * self._retry_pause, RETRY_MAX)
        self._retry_at = monotonic() + self._retry_pause

    def _lose(self, lost: Subscription | None) -> None:
        """Close a subscription, and let all who count on it try again."""
        with self._lock:
            if lost is None or self._subscription is not lost:
                return
            self._subscription = self._leader = None
            self._retry_at = monotonic() + RETRY_MIN  # it may be closed again and again
        lost.close()
        self._wake_all()

    def _leads(self, waiter: object) -> bool:
        """Return whether this waiter leads, because no other one does."""
        with self._lock:
            now = monotonic()
            if self._leader is not None and now - self._looked > ABSENT:
                # It may have read half of a message, and may go on reading: end its connection.
                self._lose(self._subscription)
            if self._leader is None and self._subscription is not None:
                self._leader, self._looked = waiter, now
            return self._leader is waiter

    def _read(self, waiter: Waiter, end: float) -> None:
        """Hand out messages until one wakes `waiter`."""
        subscription = self._subscription
        try:
            while subscription is not None and subscription is self._subscription:
                left = end - monotonic()
                if not waiter.armed or left <= 0 or self._leader is not waiter:
                    return
                subscription.receive(min(left, HEARTBEAT))
                self._looked = monotonic()
        except BaseException as error:
            # What it has read may be lost. Errors other than Broken come from signal handlers.
            self._lose(subscription)
            if not isinstance(error, Broken):
                raise

    def _follow(self, waiter: Waiter, seconds: float) -> None:
        """Sleep until the leader wakes `waiter`, or lets it lead."""
        with self._lock:
            gate = waiter.gate = waiter.gate or Gate()
            self._followers[waiter] = None
            if not waiter.armed or (self._leader is None and self._subscription is not None):
                return
        gate.wait(seconds)

    def _leave(self, waiter: Waiter) -> None:
        """Lead and follow no longer; without a leader, the next one may lead."""
        with self._lock:
            self._followers.pop(waiter, None)
            if self._leader is waiter:
                self._leader = None
            if self._leader is None:
                for follower in self._followers:
                    assert follower.gate is not None
                    follower.gate.open()
                    break

    def _wake(self, waiter: AnyWaiter) -> bool:
        """Return whether the waiter could be woken."""
        claim = waiter.claim
        if claim.blocking:
            if waiter.gate is not None:
                waiter.gate.open()
            return True
        return woken(claim, self._grant_of(waiter), self._alias)

    def _grant_of(self, waiter: AnyWaiter) -> Grant | None:
        """Return what the message that wakes a waiter grants; None: it tries again."""
        return None

    def _wake_all(self) -> None:
        """Let all waiters try again: messages may have been lost."""
        with self._lock:
            self.losses += 1
            armed = [waiter for waiter in self._waiters.all() if waiter.armed]
            for waiter in self._waiters.all():
                self._messages_lost(waiter)
                waiter.armed = False
        for waiter in armed:
            self._wake(waiter)

    def _messages_lost(self, waiter: AnyWaiter) -> None:
        """Note for one waiter that messages may have been lost."""

    def _needs_reader(self, waiter: AnyWaiter) -> None:
        """Have somebody read for a waiter that is armed now."""
        self._needed = monotonic()
        if not waiter.claim.blocking and not self._for_tasks:
            self._for_tasks = True
            if not started(self._lead_for_tasks, f"distlock {self.channel}"):
                self._for_tasks = False

    def _lead_for_tasks(self) -> None:
        # It leads or follows like a waiter, but has no claim: no message names it, and no loss.
        stands_in: Any = Waiter.__new__(Waiter)
        stands_in.armed, stands_in.gate = True, None
        needed = monotonic()
        while not self._thread_ends(idle=monotonic() - needed):
            if self._tasks_wait():
                needed = monotonic()
            try:
                self.ensure_subscribed()
                self.pause(stands_in, HEARTBEAT)
            except Exception:  # whatever it is: without this thread waiting is slow
                logger.exception("listening failed", extra=fields("not_listening", self._alias))
                time.sleep(RETRY_MAX)
        self._close_if_idle()

    def _tasks_wait(self) -> bool:
        return any(not waiter.claim.blocking for waiter in self._waiters.all())

    def _thread_ends(self, *, idle: float) -> bool:
        with self._lock:
            if self._closed or (idle > IDLE_SECONDS and not self._tasks_wait()):
                self._for_tasks = False
            return not self._for_tasks
