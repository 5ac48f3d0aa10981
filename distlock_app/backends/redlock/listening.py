"""The calls that wake waiters of the Redlock backend: a majority of nodes has to call one."""

from __future__ import annotations

from contextlib import suppress

from ...claims import Claim
from ...primitives.timing import monotonic
from ..redis import listening
from ..redis.link import HEARTBEAT, Broken
from ..redis.listening import Waiter
from ..redis.scripts import pack
from .nodes import Links
from .quorum import Quorum

# A call that not even a majority of the nodes sent is taken for one after so long.
CALL_SECONDS = 0.01
# The digits of an owner and of a key.
OWNER, KEY = 32, 40


class Listener(listening.Listener[Waiter]):
    """The channel of this process, and the claims that wait for a call on it.

    A call says that a lock came free and whose turn it is; the waiter then asks for it. So one
    that is lost costs the time until the waiter asks by itself, and nothing else.
    """

    def __init__(self, channel: str, quorum: Quorum) -> None:
        super().__init__(channel, quorum.alias)
        self._quorum = quorum
        # Of waiters that a minority called since they asked: since when, and the nodes.
        self._half_called: dict[Waiter, tuple[float, set[int]]] = {}

    def expect(self, claim: Claim, ticket: int) -> Waiter:
        """Let calls wake the claim, which is about to ask; `ticket`: its place in the queues."""
        with self._lock:
            waiter = self._waiters.find(claim)
            if waiter is None:
                waiter = Waiter(claim, ticket)
                self._waiters.add(waiter)
            self._half_called.pop(waiter, None)
            waiter.armed = True
            self._needs_reader(waiter)
            return waiter

    def called(self, node: int, owner: str, key: str) -> None:
        """Note that a node called the claims of this owner for this key."""
        woken = []
        with self._lock:
            for waiter in self._waiters.get((owner, key), ()):
                _, nodes = self._half_called.setdefault(waiter, (monotonic(), set()))
                nodes.add(node)
                # Not before: at the other nodes the release may still be under way.
                if len(nodes) >= self._quorum.majority:
                    self._half_called.pop(waiter, None)
                    woken.append(waiter)
        self._call(woken)

    def wake_half_called(self) -> float | None:
        """Wake those that a minority called a while ago; return when to look again, in seconds."""
        if not self._half_called:
            return None
        late = monotonic() - CALL_SECONDS
        with self._lock:
            called = [w for w, (since, _) in list(self._half_called.items()) if since < late]
            for waiter in called:
                self._half_called.pop(waiter, None)
            waiting = [waiter for waiter in called if self._waiters.find(waiter.claim) is waiter]
        self._call(waiting)
        return CALL_SECONDS

    def _call(self, waiters: list[Waiter]) -> None:
        for waiter in waiters:
            if waiter.armed:
                waiter.armed = False
                self._wake(waiter)

    def _open(self) -> Subscriptions:
        return Subscriptions(self, self._quorum)


class Subscriptions(Links, listening.Subscription):
    """The subscriptions to one channel at all nodes; those that break are made anew."""

    def __init__(self, listener: Listener, quorum: Quorum) -> None:
        self._listener = listener
        self._quorum = quorum
        super().__init__()
        self._rests_until = [0.0] * len(quorum.nodes)
        self._reconnect()

    def _reconnect(self) -> None:
        """Subscribe where a connection is missing or dead."""
        now = monotonic()
        for at, rests_until in enumerate(self._rests_until):
            if at in self._links:
                if self._links[at].is_dead():
                    self._drop(at)
            elif now >= rests_until:  # not one that is closed again and again
                self._rests_until[at] = now + HEARTBEAT
                self._open(at)

    def receive(self, seconds: float) -> None:
        self._reconnect()
        soon = self._listener.wake_half_called()
        for fd, _ in self._poll.poll(min(seconds, soon or HEARTBEAT) * 1000):
            at = self._at[fd]
            try:
                lines = self._links[at].read()
            except Broken:
                self._drop(at)
                continue
            # Of the lines of a message, one is its text: owner and key, hex digits.
            for line in lines:
                if len(line) == OWNER + KEY and line.isalnum():
                    text = line.decode()
                    self._listener.called(at, text[:OWNER], text[OWNER:])

    def close(self) -> None:
        # No more than that: another thread may be in the middle of receive().
        for link in list(self._links.values()):
            link.close()

    def _open(self, at: int) -> None:
        link = self._quorum.link_to(at)
        if link is not None:
            with suppress(Broken):  # the next to read is told
                link.send(pack(b"SUBSCRIBE", self._listener.channel.encode()))
            self._add(at, link)
