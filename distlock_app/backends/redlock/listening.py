"""The pub/sub thread that wakes waiters of the Redlock backend."""

from __future__ import annotations

import select
import threading

from ...claims import Claim
from ...primitives.logs import fields, logger
from ...primitives.timing import monotonic
from ..redis.listening import Waiters
from ..redis.scripts import pack
from .nodes import Link
from .quorum import Quorum

# Without waiters for so long, thread and connections go; the next waiter brings them back.
IDLE_SECONDS = 60.0
# How long the first waiter of a process waits for the subscriptions.
SUBSCRIBE_SECONDS = 0.25
# A call that not even a majority of the nodes sent is taken for one after so long.
CALL_SECONDS = 0.01
# How often the thread looks whether it is needed, and whether its connections are alive.
LOOK_SECONDS = 0.5
PING = pack(b"PING")
# The digits of an owner and of a key.
OWNER, KEY = 32, 40


class Waiter:
    """A claim that waits, and the nodes that called it since it asked."""

    __slots__ = ("called", "claim", "since", "ticket")

    def __init__(self, claim: Claim, ticket: int) -> None:
        self.claim = claim
        self.ticket = ticket
        self.called: set[int] = set()
        self.since = 0.0  # when the first node called


class Listener:
    """The channel of this process, and the claims that wait for a call on it.

    A call says that a lock came free and whose turn it is; the waiter then asks for it. So one
    that is lost costs the time until the waiter asks by itself, and nothing else.
    """

    def __init__(self, channel: bytes, quorum: Quorum) -> None:
        self.channel = channel
        self._quorum = quorum
        # Guards the three below. Reentrant: a signal handler may lock or release in the middle of
        # any method.
        self._lock = threading.RLock()
        self._waiters: Waiters[Waiter] = Waiters()
        self._half_called: set[Waiter] = set()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._ready = False  # the first attempt to subscribe has ended
        self._changed = threading.Condition()  # is reentrant too, an Event is not

    @property
    def running(self) -> bool:
        """Whether the thread has been started."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread if need be, and wait a moment for its subscriptions.

        Without them waiters are passed over, and ask by themselves.
        """
        with self._lock:
            if self._thread is None and not self._closed:
                self._ready = False
                self._thread = threading.Thread(
                    target=self._run, name=f"distlock {self.channel.decode()}", daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError:  # no more threads, or the interpreter is ending
                    self._thread = None
                    return
        with self._changed:
            self._changed.wait_for(lambda: self._ready, SUBSCRIBE_SECONDS)

    def expect(self, claim: Claim, ticket: int) -> int:
        """Note that `claim` is about to ask and to wait; return the ticket of its first time."""
        with self._lock:
            waiter = self._waiters.find(claim)
            if waiter is None:
                waiter = Waiter(claim, ticket)
                self._waiters.add(waiter)
            self._uncall(waiter)
            return waiter.ticket

    def forget(self, claim: Claim) -> None:
        """Stop expecting calls for the claim."""
        if self._waiters:
            with self._lock:
                waiter = self._waiters.find(claim)
                if waiter is not None:
                    self._uncall(waiter)
                    self._waiters.drop(claim)

    def close(self) -> None:
        """End the thread; the waiters ask again by themselves."""
        self._closed = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(2 * LOOK_SECONDS)

    def _run(self) -> None:
        links = Subscriptions(self._quorum, self.channel)
        needed = monotonic()
        try:
            while not self._ends(idle=monotonic() - needed):
                if self._waiters:
                    needed = monotonic()
                links.reconnect(needed=bool(self._waiters))
                self._mark_ready()
                for node, turn in links.receive(
                    CALL_SECONDS if self._half_called else LOOK_SECONDS
                ):
                    self._called(node, turn[:OWNER], turn[OWNER:])
                self._wake_half_called()
        except Exception:  # whatever it is: without this thread waiting is slow
            logger.exception(
                "cannot listen for locks", extra=fields("not_listening", self._quorum.alias)
            )
            with self._lock:
                self._thread = None
        finally:
            self._mark_ready()
            links.close()

    def _mark_ready(self) -> None:
        if not self._ready:
            with self._changed:
                self._ready = True
                self._changed.notify_all()

    def _ends(self, *, idle: float) -> bool:
        """Whether the thread is to end; from then on the next waiter starts another one."""
        with self._lock:
            if self._thread is not threading.current_thread():  # a signal handler was faster
                return True
            if self._closed or (idle > IDLE_SECONDS and not self._waiters):
                self._thread = None
                return True
        return False

    def _called(self, node: int, owner: str, key: str) -> None:
        woken = []
        with self._lock:
            for waiter in self._waiters.get((owner, key), ()):
                if not waiter.called:
                    waiter.since = monotonic()
                waiter.called.add(node)
                # Not before: at the other nodes the release may still be under way.
                if len(waiter.called) < self._quorum.majority:
                    self._half_called.add(waiter)
                else:
                    self._uncall(waiter)
                    woken.append(waiter)
        for waiter in woken:
            self._wake(waiter)

    def _wake_half_called(self) -> None:
        if not self._half_called:
            return
        late = monotonic() - CALL_SECONDS
        with self._lock:
            waiters = [waiter for waiter in self._half_called if waiter.since < late]
            for waiter in waiters:
                self._uncall(waiter)
        for waiter in waiters:
            self._wake(waiter)

    def _uncall(self, waiter: Waiter) -> None:
        waiter.called.clear()
        self._half_called.discard(waiter)

    def _wake(self, waiter: Waiter) -> None:
        try:
            if waiter.claim.wake is not None:
                waiter.claim.wake(None)
        except Exception:  # such as that its event loop was closed
            logger.exception(
                "a waiter for a lock could not be woken",
                extra=fields("not_woken", self._quorum.alias),
            )


class Subscriptions:
    """The subscriptions to one channel at all nodes."""

    def __init__(self, quorum: Quorum, channel: bytes) -> None:
        self._quorum = quorum
        self._subscribe = pack(b"SUBSCRIBE", channel)
        self._links: list[Link | None] = [None] * len(quorum.nodes)
        self._heard = [0.0] * len(quorum.nodes)
        self._pinged = [0.0] * len(quorum.nodes)  # and not heard since; 0: not so
        self._at: dict[int, int] = {}
        self._poll = select.poll()

    def reconnect(self, *, needed: bool) -> None:
        """Subscribe where a connection is missing or dead."""
        now = monotonic()
        for at, link in enumerate(self._links):
            if link is None:
                self._open(at)
            elif self._pinged[at]:
                if now - self._pinged[at] > 2 * LOOK_SECONDS:
                    self._drop(at)
            elif needed and now - self._heard[at] > LOOK_SECONDS:
                self._pinged[at] = now
                self._send(at, PING)

    def receive(self, seconds: float) -> list[tuple[int, str]]:
        """Return which node called which owner to which key, after at most `seconds`."""
        called = []
        for fd, _ in self._poll.poll(seconds * 1000):
            at = self._at[fd]
            link = self._links[at]
            assert link is not None
            try:
                lines = link.lines()
            except OSError:
                self._drop(at)
                continue
            self._heard[at], self._pinged[at] = monotonic(), 0.0
            # Of the lines of a message, one is its text: owner and key, hex digits.
            texts = [line for line in lines if len(line) == OWNER + KEY and line.isalnum()]
            called += [(at, text.decode()) for text in texts]
        return called

    def close(self) -> None:
        """Unsubscribe."""
        for at, link in enumerate(self._links):
            if link is not None:
                self._drop(at)

    def _open(self, at: int) -> None:
        link = self._quorum.link_to(at)
        if link is not None:
            self._links[at] = link
            self._at[link.fd] = at
            self._poll.register(link.fd, select.POLLIN)
            self._heard[at], self._pinged[at] = monotonic(), 0.0
            self._send(at, self._subscribe)

    def _send(self, at: int, request: bytes) -> None:
        link = self._links[at]
        assert link is not None
        try:
            link.send(request)
        except OSError:
            self._drop(at)

    def _drop(self, at: int) -> None:
        link = self._links[at]
        assert link is not None
        self._links[at] = None
        self._poll.unregister(link.fd)
        del self._at[link.fd]
        link.close()
