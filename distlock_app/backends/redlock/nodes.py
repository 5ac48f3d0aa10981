"""The nodes of a quorum: one request to all at once, until enough have answered.

A thread that asks has a connection to each node as long as it asks: it sends to all and reads
what comes. The answer of a slow node is still in flight when the vote is over; it is read before
the next one on that connection. A node that stays silent is left out, and threads in the
background try to reach it again: no request waits for it.
"""

from __future__ import annotations

import re
import select
import ssl
import threading
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import AuthenticationError, RedisError, ResponseError

from ...errors import BackendError
from ...primitives.timing import monotonic
from ..redis.scripts import Script
from .scripts import SCRIPTS

# A node that does not answer for so long counts as down; sooner if its SOCKET_TIMEOUT is shorter.
SILENT = 1.0
# How long the last connections are waited for when a majority is there, unless a node is known to
# be down; and the last answers to an extension.
CONNECT_GRACE = 0.25
ANSWER_GRACE = 0.05
# Pause between two attempts to reach a node that is down.
REST = 1.0
# Sets of connections kept after a burst of threads; each is out only for one vote.
KEEP_IDLE = 64
# One that nobody needed for so many seconds is closed after the next vote.
IDLE_SECONDS = 60.0
# A set that was idle for less is used without looking whether nodes closed its connections.
TRUST_SECONDS = 0.5
# Releases kept for a node that is down; the oldest make room.
KEEP_LATE = 1000


class QuorumRequest:
    """One request to all nodes, and their votes: the line of each answer, by node."""

    __slots__ = (
        *("keep", "majority", "no", "once", "over", "packed", "script", "unsure", "waiting"),
        *("why", "yes"),
    )

    def __init__(
        self,
        majority: int,
        script: Script,
        packed: bytes,
        *,
        keep: float = 0.0,
        once: bool = False,
    ) -> None:
        """`keep`: seconds for which a node that is down shall have it late.

        `once`: repeated, it finds its own work done, so that a "no" then tells nothing.
        """
        self.majority = majority
        self.script = script
        self.packed = packed
        self.keep = keep
        self.once = once
        self.yes: dict[int, bytes] = {}
        self.no: dict[int, bytes] = {}
        self.why: dict[int, str] = {}  # what else a node said
        self.unsure: set[int] = set()  # nodes whose connection broke under the request
        self.waiting = 0  # nodes that may still answer
        self.over = False

    @property
    def decided(self) -> bool:
        """Whether a majority said the same."""
        return len(self.yes) >= self.majority or len(self.no) >= self.majority

    def take(self, node: int, line: bytes) -> None:
        """Count one answer."""
        if self.over:
            return
        self.waiting -= 1
        if line.startswith(b"+1"):
            self.yes[node] = line
        elif line.startswith(b"+0"):
            if not (self.once and node in self.unsure):
                self.no[node] = line
        else:
            code = re.match(rb"-([A-Z]+)", line)
            self.why[node] = code[1].decode() if code else "no answer of a Redis"


class Link:
    """A connection to one node: answers come in the order of the requests, a line each."""

    __slots__ = ("_begun", "_connection", "_socket", "fd", "in_flight")

    def __init__(self, connection: Any) -> None:
        """Take a connected Connection of redis-py, with nothing left to read."""
        self._connection = connection
        self._socket = connection._sock
        self._socket.setblocking(False)
        self.fd: int = self._socket.fileno()
        self.in_flight: deque[tuple[QuorumRequest, float]] = deque()  # and when each was sent
        self._begun = b""  # of a line

    def send(self, data: bytes) -> None:
        """Send without waiting; raise OSError."""
        if self._socket.send(data) != len(data):
            raise ConnectionError("it does not read")

    def lines(self) -> list[bytes]:
        """Return the lines that have come; raise OSError."""
        try:
            data: bytes = self._socket.recv(65536)
        except (BlockingIOError, ssl.SSLWantReadError):
            return []
        if not data:
            raise ConnectionError("closed")
        lines = (self._begun + data).split(b"\r\n")
        self._begun = lines.pop()
        return lines

    def close(self) -> None:
        """Disconnect."""
        self._connection.disconnect()


class Node:
    """One of the servers, and what this process knows about it."""

    def __init__(self, name: str, recipe: Any) -> None:
        self.name = name
        self._recipe = recipe
        self.timeout = min(SILENT, recipe.connection_kwargs["socket_timeout"])
        self.fresh: deque[Link] = deque()  # opened, and not in use yet
        self.opening = False
        self.failing = False  # no request waits for it
        self.rests_until = 0.0
        self.why = ""
        self._late: deque[tuple[QuorumRequest, float]] = deque(maxlen=KEEP_LATE)

    def remember(self, request: QuorumRequest) -> None:
        """Keep a release for when the node can be reached again."""
        if request.keep:
            self._late.append((request, monotonic() + request.keep))

    def connect(self) -> Link:
        """Return a new connection, after the releases that are due; raise RedisError, OSError."""
        connection = self._recipe.connection_class(**self._recipe.connection_kwargs)
        connection.connect()
        late = []
        while self._late:
            late.append(self._late.popleft())
        try:
            # A node that does not know the script would run it late, or not at all.
            connection.send_packed_command([script.load for script in SCRIPTS], check_health=False)
            for _ in SCRIPTS:
                with suppress(ResponseError):  # such as NOPERM: it is sent in full when needed
                    connection.read_response(disconnect_on_error=True)
            now = monotonic()
            due = [request for request, until in late if until > now]
            for request in due:
                connection._sock.sendall(request.script.in_full(request.packed))
            link = Link(connection)
        except (RedisError, OSError):
            self._late.extend(late)
            connection.disconnect()
            raise
        link.in_flight.extend((request, now) for request in due)
        return link

    def failed(self, why: str) -> None:
        """Note that it is down: it is tried again in a while."""
        self.why = why
        self.failing = True
        self.rests_until = monotonic() + REST


class NodeConnections:
    """A connection to each node that can be reached; one thread at a time has it."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._links: list[Link | None] = [None] * len(nodes)
        self._at: dict[int, int] = {}  # node by file descriptor
        self._poll = select.poll()
        self.used = monotonic()

    def fill(self) -> list[Node]:
        """Take connections that were opened; return the nodes to which there is none."""
        missing = []
        for at, node in enumerate(self._nodes):
            if self._links[at] is None:
                try:
                    link = node.fresh.pop()
                except IndexError:
                    missing.append(node)
                else:
                    self._links[at] = link
                    self._at[link.fd] = at
                    self._poll.register(link.fd, select.POLLIN)
        return missing

    def drop_dead(self) -> None:
        """Drop connections that a node closed, or on which it is silent for too long."""
        now = monotonic()
        silent = [
            at
            for at, link in enumerate(self._links)
            if link is not None
            and link.in_flight
            and now - link.in_flight[0][1] > self._nodes[at].timeout
        ]
        if not silent and now - self.used < TRUST_SECONDS:
            return
        for fd, _ in self._poll.poll(0):  # perhaps the answers were only not read yet
            self._read(self._at[fd])
        for at in silent:
            link = self._links[at]
            if (
                link is not None
                and link.in_flight
                and link.in_flight[0][1] < now - self._nodes[at].timeout
            ):
                self._drop(at, "silent")

    def vote(
        self,
        requests: Sequence[QuorumRequest],
        deadline: float,
        *,
        grace: float = 0.0,
        again: bool = False,
    ) -> None:
        """Ask each node, `again` only what it has not answered, until all requests are decided.

        The answers of the other nodes are waited for `grace` seconds more.
        """
        for at in range(len(self._nodes)):
            asked = requests
            if again:
                asked = [b for b in requests if at not in b.yes and at not in b.no]
            for request in asked:
                request.waiting += 1
            self._send(at, asked)
        self._collect(requests, deadline)
        if grace:
            self._collect(requests, min(deadline, monotonic() + grace), from_all=True)

    def broadcast(self, request: QuorumRequest, *, but: Container[int] = ()) -> None:
        """Send a request to all nodes but these, whatever they answer."""
        request.over = True
        for at in range(len(self._nodes)):
            if at not in but:
                self._send(at, [request])

    def close(self) -> None:
        """Drop every connection."""
        for at, link in enumerate(self._links):
            if link is not None:
                self._drop(at)

    def _collect(
        self, requests: Sequence[QuorumRequest], deadline: float, *, from_all: bool = False
    ) -> None:
        while any(b.waiting > 0 and (from_all or not b.decided) for b in requests):
            left = deadline - monotonic()
            if left <= 0:
                return
            for fd, _ in self._poll.poll(left * 1000):
                self._read(self._at[fd])

    def _send(self, at: int, requests: Sequence[QuorumRequest]) -> None:
        link = self._links[at]
        if link is None:
            for request in requests:
                request.waiting -= 1
                self._nodes[at].remember(request)
            return
        now = monotonic()
        link.in_flight.extend([(request, now) for request in requests])
        try:
            link.send(b"".join([request.packed for request in requests]))
        except OSError:
            self._drop(at)

    def _read(self, at: int) -> None:
        link = self._links[at]
        if link is None:
            return
        try:
            for line in link.lines():
                request, _ = link.in_flight.popleft()
                if not line.startswith(b"-") or line.startswith(b"-OOM"):
                    request.take(at, line)
                elif line.startswith(b"-NOSCRIPT"):
                    if request.keep or not request.over:
                        link.in_flight.append((request, monotonic()))
                        link.send(request.script.in_full(request.packed))
                else:
                    # Such as READONLY: a new connection may find a new master.
                    request.take(at, line)
                    self._drop(at, request.why.get(at, "refused"))
                    return
        except (OSError, IndexError):
            self._drop(at)

    def _drop(self, at: int, why: str = "") -> None:
        node, link = self._nodes[at], self._links[at]
        assert link is not None
        self._links[at] = None
        self._poll.unregister(link.fd)
        del self._at[link.fd]
        for request, _ in link.in_flight:
            node.remember(request)
            if not request.over:
                request.waiting -= 1
                request.unsure.add(at)
        link.close()
        if why:
            node.failed(why)


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
            why = "did not let us in"
        except Exception as error:  # whatever it is: threads wait for this one
            why = type(error).__name__
        with self._opened:
            if why:
                node.failed(why)
            else:
                node.failing = False
            node.opening = False
            self._opened.notify_all()
