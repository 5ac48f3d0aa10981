"""The quorum: what a majority is; asks all nodes at once, until a majority has answered.

A thread that asks has a connection to each node as long as it asks: it sends to all and reads
what comes. A node that stays silent is left out, and threads in the background try to reach it
again: no request waits for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from redis.exceptions import AuthenticationError

from ...errors import BackendError
from ...primitives.rlock import RLock
from ...primitives.threads import started
from ...primitives.timing import monotonic
from ..connecting import Idle
from ..redis.link import reason_of
from .nodes import Link, Node, NodeConnections, QuorumRequest

# How long the last connections are waited for when a majority is there, unless a node is known to
# be down; and the last answers to an extension.
CONNECT_GRACE = 0.25
ANSWER_GRACE = 0.05


class Quorum:
    """All nodes, and the sets of connections of this process: last in, first out."""

    def __init__(self, alias: str, nodes: Sequence[Node]) -> None:
        self.majority = len(nodes) // 2 + 1
        self.alias = alias
        self.nodes = nodes
        self._timeout = max(node.timeout for node in nodes)
        self._idle: Idle[NodeConnections] = Idle()
        weakref.finalize(self, self._idle.close)  # what came back after close()
        # Entered by itself: a Condition stays locked if a signal handler raises as it is entered.
        self._lock = RLock()
        self._opened = threading.Condition(self._lock)

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
            connections.vote(requests, self._timeout, grace=grace)
            # A server had closed its connection, was restarted, or is not connected yet: every
            # script may be repeated.
            if again := [r for r in requests if not r.decided and (r.unsure or r.absent)]:
                self.reconnect(connections, urgent=not all(r.is_try for r in again))
                connections.vote_again(again, self._timeout)
            if after is not None:
                after(connections)
        except BaseException:  # of a signal handler: answers might be taken for those of others
            connections.finish(requests)
            raise
        finally:
            connections.close_vote(requests)
        self._idle.keep(connections)

    def reconnect(self, connections: NodeConnections, *, urgent: bool = False) -> None:
        """Connect to the nodes that can be reached; wait for the others only if it is `urgent`."""
        if connections.fill():
            spare = 0 if urgent else len(self.nodes) - self.majority
            self._reach(connections.fill, spare=spare)

    def link_to(self, at: int) -> Link | None:
        """Return a new connection to one node, or None if it cannot be had soon."""
        node = self.nodes[at]
        self._reach(lambda: [] if node.fresh else [node], spare=1)
        try:
            return node.fresh.pop()
        except IndexError:  # also if another thread was faster
            return None

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
        """Disconnect what is idle; what is in use is kept when it comes back."""
        self._idle.close()
        for node in self.nodes:
            node.fresh.close()

    def _take(self) -> NodeConnections:
        connections = self._idle.take() or NodeConnections(self.nodes)
        connections.drop_silent()
        self.reconnect(connections)
        return connections

    def _reach(self, missed: Callable[[], list[Node]], *, spare: int) -> None:
        """Open connections until `missed` names no node that can be reached.

        While it names more than `spare` nodes, those that are known to be down are tried as well,
        and waited for longer.
        """
        began = monotonic()
        tried: set[Node] = set()
        with self._lock:
            while missing := missed():
                urgent = len(missing) > spare
                for node in missing:
                    # Again if another thread was faster to take what was opened.
                    if node.is_due(urgent) and not (node.failing and node in tried):
                        tried.add(node)
                        self._open(node)
                if not any(node.may_come(urgent) for node in missing):
                    return
                left = began + (self._timeout if urgent else CONNECT_GRACE) - monotonic()
                if left <= 0:
                    break
                self._opened.wait(left)
            for node in missing:
                node.failing = True

    def _open(self, node: Node) -> None:
        """Have a thread connect to a node."""
        try:
            node.opening = True
            if not started(partial(self._connect, node), "distlock-connect"):
                self._connect(node)
        except BaseException:  # Ctrl-C: else nobody would try again
            node.opening = False
            raise

    def _connect(self, node: Node) -> None:
        why = ""
        try:
            node.fresh.append(node.connect())
        except AuthenticationError:
            why = "rejected the credentials"
        except Exception as error:  # whatever it is: threads wait for this one
            why = reason_of(error)
        with self._lock:
            if why:
                node.failed(why)
            else:
                node.failing = False
            node.opening = False
            self._opened.notify_all()
