"""The pub/sub thread that wakes waiters of the Redlock backend."""

from __future__ import annotations

from ...claims import Claim
from ...primitives.logs import fields, logger
from ...primitives.timing import monotonic
from ..redis.listening import ListeningThread
from ..redis.scripts import pack
from .nodes import Links
from .quorum import Quorum

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


class Listener(ListeningThread[Waiter]):
    """The channel of this process, and the claims that wait for a call on it.

    A call says that a lock came free and whose turn it is; the waiter then asks for it. So one
    that is lost costs the time until the waiter asks by itself, and nothing else.
    """

    def __init__(self, channel: str, quorum: Quorum) -> None:
        super().__init__(channel, quorum.alias)
        self._quorum = quorum
        self._half_called: set[Waiter] = set()

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

    def _run(self) -> None:
        links = Subscriptions(self._quorum, self.channel)
        needed = monotonic()
        try:
            while not self._ends(idle=monotonic() - needed):
                if self._waiters:
                    needed = monotonic()
                links.reconnect(needed=bool(self._waiters))
                if not self._subscribed:
                    self._notify(subscribed=True)
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
            self._notify(subscribed=False)
        finally:
            links.close()

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


class Subscriptions(Links):
    """The subscriptions to one channel at all nodes."""

    def __init__(self, quorum: Quorum, channel: str) -> None:
        self._quorum = quorum
        self._subscribe = pack(b"SUBSCRIBE", channel.encode())
        super().__init__(len(quorum.nodes))
        self._heard = [0.0] * len(quorum.nodes)
        self._pinged = [0.0] * len(quorum.nodes)  # and not heard since; 0: not so

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

    def _open(self, at: int) -> None:
        link = self._quorum.link_to(at)
        if link is not None:
            self._add(at, link)
            self._heard[at], self._pinged[at] = monotonic(), 0.0
            self._send(at, self._subscribe)

    def _send(self, at: int, request: bytes) -> None:
        link = self._links[at]
        assert link is not None
        try:
            link.send(request)
        except OSError:
            self._drop(at)
