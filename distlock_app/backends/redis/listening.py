"""The pub/sub thread that wakes waiters of the Redis backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ...claims import Claim, Grant
from ...primitives.logs import fields, logger
from ...primitives.timing import monotonic
from .link import Link

# A connection that is silent for so long is asked for a sign of life, and given up if it shows
# none for twice as long again.
HEARTBEAT = 0.5
# Without waiters for so long, thread and connection go; the next waiter brings them back.
IDLE_SECONDS = 60.0
# First and longest pause between two attempts to connect.
RETRY_MIN, RETRY_MAX = 0.05, 1.0
# What the clocks of two hosts may differ in rate (as in `timing.drift`).
RATE_DRIFT = 0.01
# Seconds to look once more whether there is something to read.
AGAIN = 0.001


class Message(NamedTuple):
    """What a hand-over says: a lease began at a server's time, and lasts so many seconds."""

    fence: int
    began: int
    ttl: float
    heard: float


class Waiter:
    """What is known about one claim that waits, from its first try to its grant."""

    __slots__ = ("again", "armed", "arrived", "asked", "claim", "given", "server")

    def __init__(self, claim: Claim, asked: float) -> None:
        self.claim = claim
        self.arrived = 0  # place in the queue: server time of arrival, 0 before the first answer
        # When a try was sent that found the lock taken, and the server's time when it ran.
        self.asked = asked
        self.server: int | None = None
        self.armed = False  # the caller pauses: its wake may be called
        self.given: Message | None = None  # that overtook the answer
        self.again = False  # messages may have been lost while the try was under way

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
            asked_at += (message.began - self.server) / 1e6 * (1 - RATE_DRIFT)
        asked_at = min(asked_at, message.heard)
        return Grant(self.claim, fence=message.fence, asked_at=asked_at, ttl=message.ttl or None)


class _Server(Protocol):
    demoted: int  # grows when it turns out to be a replica

    def connect(self) -> Link: ...


class _HasClaim(Protocol):
    claim: Claim


AnyWaiter = TypeVar("AnyWaiter", bound=_HasClaim)


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

    def drop(self, claim: Claim) -> None:
        """Forget the one of this very claim, if there is one."""
        name = claim.owner, claim.key
        others = [waiter for waiter in self.get(name, ()) if waiter.claim is not claim]
        if others:
            self[name] = others
        else:
            self.pop(name, None)


class ListeningThread(Generic[AnyWaiter]):
    """A thread that listens for the claims of this process that wait, as long as there are any."""

    def __init__(self, channel: str, alias: str) -> None:
        self.channel = channel
        self._alias = alias
        # Guards all below and every waiter. Reentrant: a signal handler may lock or release in the
        # middle of any method.
        self._lock = threading.RLock()
        self._waiters: Waiters[AnyWaiter] = Waiters()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._subscribed: bool | None = None  # None: not known yet
        self._changed = threading.Condition()  # is reentrant too, an Event is not

    @property
    def running(self) -> bool:
        """Whether the thread has been started."""
        return self._thread is not None

    def ensure_subscribed(self, timeout: float) -> bool:
        """Start the thread if need be; return whether it subscribes within `timeout` seconds."""
        if self._subscribed:
            return True
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._subscribed = None
                self._thread = threading.Thread(
                    target=self._run, name=f"distlock {self.channel}", daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError:  # no more threads, or the interpreter is ending
                    self._thread = None
                    return False
        with self._changed:
            self._changed.wait_for(lambda: self._subscribed is not None, timeout)
        return bool(self._subscribed)

    def close(self) -> None:
        """End the thread; the waiters ask again by themselves."""
        self._closed.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(2 * HEARTBEAT)

    def _run(self) -> None:
        raise NotImplementedError

    def _notify(self, *, subscribed: bool) -> None:
        with self._changed:
            self._subscribed = subscribed
            self._changed.notify_all()

    def _ends(self, *, idle: float) -> bool:
        """Whether the thread is to end; from then on the next waiter starts another one."""
        with self._lock:
            if self._thread is not threading.current_thread():  # a signal handler was faster
                return True
            if self._closed.is_set() or (idle > IDLE_SECONDS and not self._waiters):
                self._thread = self._subscribed = None
                return True
        return False

    def _wake(self, waiter: AnyWaiter, grant: Grant | None = None) -> bool:
        """Return whether the waiter could be woken."""
        try:
            if waiter.claim.wake is not None:
                waiter.claim.wake(grant)
        except Exception:  # such as that its event loop was closed
            logger.exception(
                "a waiter for a lock could not be woken", extra=fields("not_woken", self._alias)
            )
            return False
        return True


class Listener(ListeningThread[Waiter]):
    """The channel of this process, and the claims that wait for a message on it."""

    def __init__(
        self,
        channel: str,
        server: _Server,
        refused: Callable[[Grant], Any],
        *,
        alias: str = "",
        grants: bool = True,
    ) -> None:
        """`refused` gets a grant that its caller failed to take.

        With `grants=False` a message is not a grant: its claim tries again.
        """
        super().__init__(channel, alias)
        self._grants = grants
        self._server = server
        self._refused = refused
        self._link: Link | None = None

    def close(self) -> None:
        self._closed.set()
        if (link := self._link) is not None:
            link.close()  # its shutdown() ends the thread's recv()
        super().close()

    def register(self, claim: Claim, asked: float) -> Waiter:
        """Add the waiter of `claim`, before its request is sent."""
        with self._lock:
            waiter = self._waiters.find(claim)
            if waiter is None:
                waiter = Waiter(claim, asked)
                self._waiters.add(waiter)
            waiter.armed = False
            waiter.given = None
            waiter.again = False
            return waiter

    def arrival_of(self, claim: Claim) -> int:
        """Return the time of arrival of a registered claim, 0 if it has none."""
        waiter = self._waiters.find(claim)
        return 0 if waiter is None else waiter.arrived

    def arm(self, waiter: Waiter, asked: float, server: int, arrived: int) -> Grant | bool:
        """Let messages wake the claim, whose try has failed.

        Return its grant if the message has come already, or whether to try again at once.
        """
        with self._lock:
            waiter.asked, waiter.server, waiter.arrived = asked, server, arrived
            if waiter.given and self._granted(waiter) and not waiter.outdates(waiter.given):
                self._waiters.drop(waiter.claim)
                return waiter.grant(waiter.given)
            waiter.armed = not waiter.again
            return waiter.again

    def rearm(self, waiter: Waiter) -> None:
        """Let messages wake the claim again, after a try with an unknown result."""
        with self._lock:
            waiter.armed = True

    def forget(self, claim: Claim) -> None:
        """Stop expecting messages for the claim."""
        if self._waiters:
            with self._lock:
                self._waiters.drop(claim)

    def _run(self) -> None:
        pause, failing_since = RETRY_MIN, monotonic()
        while True:
            try:
                self._listen()
                return
            except Exception as error:  # whatever it is: without this thread waiting is slow
                if self._subscribed:  # it did work, and will again in a moment
                    self._subscribed = None
                    pause, failing_since = RETRY_MIN, monotonic()
                else:
                    if pause == RETRY_MIN and not self._closed.is_set():
                        logger.warning(
                            "cannot listen for locks: %s",
                            type(error).__name__,
                            extra=fields("not_listening", self._alias),
                        )
                    self._notify(subscribed=False)
                    pause = min(2 * pause, RETRY_MAX)
            self._closed.wait(pause)
            if self._ends(idle=monotonic() - failing_since):
                return

    def _listen(self) -> None:
        """Subscribe and hand out messages; return when there is nothing to do, else raise."""
        demoted, link = self._server.demoted, self._server.connect()
        try:
            self._link = link
            connection = link.for_redis_py()
            connection.send_command("SUBSCRIBE", self.channel, check_health=False)
            connection.read_response(disconnect_on_error=True)
            # What redis-py may have read beyond that answer is lost. Before a new waiter counts on
            # this connection: that one lost nothing.
            self._wake_all()
            self._notify(subscribed=True)
            self._receive(link, demoted)
        finally:
            self._link = None
            link.close()

    def _receive(self, link: Link, demoted: int) -> None:
        needed, pinged = monotonic(), 0.0
        while not self._ends(idle=monotonic() - needed):
            if self._server.demoted != demoted:
                raise ConnectionError("another server may be the master, which counts its own")
            if self._waiters:
                needed = monotonic()
            lines = link.lines(HEARTBEAT)
            if not lines and pinged and monotonic() - pinged > 2 * HEARTBEAT:
                # Looked at again: a process that was stopped finds its time over, not its answer.
                lines = link.lines(AGAIN)
                if not lines:
                    raise ConnectionError("no answer to PING")
            if lines:
                pinged = 0.0
            elif self._waiters and not pinged:
                link.connection.send_command("PING", check_health=False)
                pinged = monotonic()
            for line in lines:
                if b" " in line:  # not those around a message: kind, channel, lengths
                    self._handle(line)

    def _handle(self, message_text: bytes) -> None:
        """Take one message: "token key fence began ttl"."""
        owner, key, fence, began, ttl_ms = message_text.decode().split(" ")
        message = Message(int(fence), int(began), int(ttl_ms) / 1000, monotonic())
        woken = []
        with self._lock:
            # Without a waiter of this token: its last try got the lock as an answer, or its
            # release has passed the lock on or is about to.
            for waiter in self._waiters.get((owner, key), ()):
                if not waiter.armed:
                    waiter.given = message
                    waiter.again = not self._granted(waiter)
                elif not waiter.outdates(message):
                    waiter.armed = False
                    woken.append(waiter)
                    if self._granted(waiter):
                        self._waiters.drop(waiter.claim)
        taken = [self._wake(w, w.grant(message) if self._granted(w) else None) for w in woken]
        if woken and not any(taken):
            self._refused(woken[0].grant(message))

    def _granted(self, waiter: Waiter) -> bool:
        """Whether a message is a grant for it; if not, it tries again."""
        return self._grants and waiter.claim.renew

    def _wake_all(self) -> None:
        """Let all waiters try again: messages to the connection before this one are lost."""
        with self._lock:
            armed = [waiter for waiter in self._waiters.all() if waiter.armed]
            for waiter in self._waiters.all():
                waiter.again = not waiter.armed
                waiter.armed = False
                # It may be another server's now, with another clock.
                waiter.server = None
        for waiter in armed:
            self._wake(waiter, None)
