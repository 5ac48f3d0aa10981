"""The quorum: asks all nodes at once, until a majority has answered.

A thread that asks has a connection to each node as long as it asks: it sends to all and reads
what comes. A node that stays silent is left out, and threads in the background try to reach it
again: no request waits for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from redis.exceptions import AuthenticationError

from ...errors import BackendError
from ...primitives.timing import monotonic
from .nodes import Link, Node, NodeConnections, QuorumRequest

# How long the last connections are waited for when a majority is there, unless a node is known to
# be down; and the last answers to an extension.
CONNECT_GRACE = 0.25
ANSWER_GRACE = 0.05
# Sets of connections kept after a burst of threads; each is out only for one vote.
KEEP_IDLE = 64
# One that nobody needed for so many seconds is closed after the next vote.
IDLE_SECONDS = 60.0


class Quorum:
    """All nodes, and the sets of connections of this process: last in, first out."""

    def __init__(self, alias: str, nodes: Sequence[Node]) -> None:
        self.majority = len(nodes) // 2 + 1
        self.alias = alias
        self.nodes = nodes
        self._timeout = max(node.timeout for node in nodes)
        self._idle: deque[NodeConnections] = deque()  # its append and pop are atomic: no lock
        self._opened = threading.Condition()
        self._closed = False

    def ask(
        self,
        requests: Sequence[QuorumRequest],
        after: Callable[[NodeConnections], None] | None = None,
        *,
        grace: float = 0.0,
    ) -> None:
        """Collect the votes; `after` may send more over the same connections, so after them."""
        connections = self._take()
        try:
            deadline = monotonic() + self._timeout
            connections.vote(requests, deadline, grace=grace)
            if any(request.unsure and not request.decided for request in requests):
                # A server had closed its connection, or was restarted: every script may be
                # repeated.
                self.reconnect(connections)
                connections.vote(requests, deadline, again=True)
            for request in requests:
                request.over = True
            if after is not None:
                after(connections)
        except BaseException:  # answers might be taken for those of other requests
            connections.close()
            raise
        connections.used = monotonic()
        if len(self._idle) < KEEP_IDLE and not self._closed:
            self._idle.append(connections)
        else:
            connections.close()
        with suppress(IndexError):  # another thread has taken it
            while self._idle[0].used < connections.used - IDLE_SECONDS:
                self._idle.popleft().close()

    def reconnect(self, connections: NodeConnections) -> None:
        """Connect to the nodes that can be reached, without waiting for those that cannot."""
        if not connections.fill():
            return
        began = monotonic()
        tried: set[Node] = set()
        with self._opened:
            while missing := connections.fill():
                short = len(self.nodes) - len(missing) < self.majority
                for node in missing:
                    due = short or monotonic() >= node.rests_until
                    # Again if another thread was faster to take what was opened.
                    if due and not node.opening and not (node.failing and node in tried):
                        tried.add(node)
                        self._open(node)
                left = began + (self._timeout if short else CONNECT_GRACE) - monotonic()
                if not any(node.opening and (short or not node.failing) for node in missing):
                    return
                if left <= 0:
                    for node in missing:
                        node.failing = True
                    return
                self._opened.wait(left)

    def link_to(self, at: int) -> Link | None:
        """Return a new connection to one node, or None if it cannot be had soon."""
        node, began = self.nodes[at], monotonic()
        with self._opened:
            while True:
                with suppress(IndexError):  # another thread may be faster
                    return node.fresh.pop()
                if not node.opening and monotonic() >= node.rests_until:
                    self._open(node)
                left = began + CONNECT_GRACE - monotonic()
                if node.failing or not node.opening:
                    return None
                if left <= 0:
                    node.failing = True
                    return None
                self._opened.wait(left)

    def failure(self, request: QuorumRequest) -> BackendError:
        """Say why a request was not decided; no URL, and no text that may quote what was sent."""
        silent = [
            f"{node.name} ({request.why.get(at) or node.why or 'no answer'})"
            for at, node in enumerate(self.nodes)
            if at not in request.yes and at not in request.no
        ]
        answers = len(request.yes) + len(request.no)
        return BackendError(
            f"Redlock {self.alias!r}: {answers} of {len(self.nodes)} nodes answered"
            + (f", not {', '.join(silent)}." if silent else ", and no majority agreed.")
        )

    def close(self) -> None:
        """Disconnect what is idle; what is in use goes with its last vote."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        for node in self.nodes:
            while node.fresh:
                node.fresh.pop().close()

    def _take(self) -> NodeConnections:
        try:
            connections = self._idle.pop()
            connections.drop_dead()
        except IndexError:
            connections = NodeConnections(self.nodes)
        self.reconnect(connections)
        return connections

    def _open(self, node: Node) -> None:
        node.opening = True
        try:
            threading.Thread(
                target=self._connect, args=(node,), name="distlock-connect", daemon=True
            ).start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            self._connect(node)

    def _connect(self, node: Node) -> None:
        why = ""
        try:
            node.fresh.append(node.connect())
        except AuthenticationError:
            why = "rejected the credentials"
        except Exception as error:  # whatever it is: threads wait for this one
            why = type(error).__name__
        with self._opened:
            if why:
                node.failed(why)
            else:
                node.failing = False
            node.opening = False
            self._opened.notify_all()
