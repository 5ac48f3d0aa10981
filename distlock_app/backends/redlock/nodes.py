"""The nodes of a quorum and their connections: one request to all at once, its votes counted.

The answer of a slow node is still in flight when the vote is over; it is read before the next
one on that connection.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ...primitives.polling import POLLIN, new_poll
from ...primitives.timing import monotonic
from ..connecting import FINISH_WITHIN, Idle
from ..redis.link import DENIED, Broken, Lines
from .scripts import SCRIPTS

# A node that does not answer for so long counts as down; sooner if its SOCKET_TIMEOUT is shorter.
SILENT = 1.0
# Pause between two attempts to reach a node that is down.
REST = 1.0
# Releases kept for a node that is down; the oldest make room.
KEEP_LATE = 1000


@dataclass(slots=True, eq=False)
class QuorumRequest:
    """One request to all nodes, and their votes."""

    majority: int
    packed: bytes
    # Without a majority a try is refused. Of other requests it must be known what was decided: they
    # wait for each node that can still be connected.
    is_try: bool = False
    # Of a release: seconds for which a node that is down shall have it late. Repeated, it finds its
    # own work done, so that a "no" then tells nothing.
    keep: float = 0.0
    # The line of each answer, by node, and what else a node said.
    yes: dict[int, bytes] = field(default_factory=dict)
    no: dict[int, bytes] = field(default_factory=dict)
    why: dict[int, str] = field(default_factory=dict)
    unsure: set[int] = field(default_factory=set)  # nodes whose connection broke under the request
    absent: set[int] = field(default_factory=set)  # nodes to which there was no connection
    waiting: int = 0  # nodes that may still answer
    over: bool = False

    @property
    def won(self) -> bool:
        """Whether a majority said yes."""
        return len(self.yes) >= self.majority

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
            if not (self.keep and node in self.unsure):
                self.no[node] = line
        else:
            code = re.match(rb"-([A-Z]+)", line)
            self.why[node] = code[1].decode() if code else "not a Redis response"
            if DENIED.search(line.decode(errors="replace")):
                self.why[node] = "NOPERM"


class Link(Lines):
    """A connection to one node: answers come in the order of the requests, a line each."""

    __slots__ = ("in_flight",)

    def __init__(self, connection: Any) -> None:
        """See Lines."""
        super().__init__(connection)
        self.in_flight: deque[tuple[QuorumRequest, float]] = deque()  # and when each was sent


class Node:
    """One of the servers, and what this process knows about it."""

    def __init__(self, name: str, recipe: Any) -> None:
        self.name = name
        self._recipe = recipe
        self.timeout: float = min(SILENT, recipe.connection_kwargs["socket_timeout"])
        self.fresh: Idle[Link] = Idle()  # opened, and not in use yet
        self.opening = False
        self.failing = False  # no request waits for it
        self.rests_until = 0.0
        self.why = ""
        self._late: deque[tuple[QuorumRequest, float]] = deque(maxlen=KEEP_LATE)

    def is_due(self, urgent: bool) -> bool:
        """Return whether to connect to it now: not while it rests, unless it is `urgent`."""
        return not self.opening and (urgent or monotonic() >= self.rests_until)

    def may_come(self, urgent: bool) -> bool:
        """Return whether to wait for its connection: not if it is down, unless it is `urgent`."""
        return self.opening and (urgent or not self.failing)

    def remember(self, request: QuorumRequest) -> None:
        """Keep a release for when the node can be reached again."""
        if request.keep:
            self._late.append((request, monotonic() + request.keep))

    def connect(self) -> Link:
        """Return a new connection, after the releases that are due; raise RedisError, OSError."""
        connection = self._recipe.connection_class(**self._recipe.connection_kwargs)
        connection.connect()
        late = []
        try:
            # Here and nowhere else: a request that the node cannot run would be repeated too late.
            connection.send_packed_command([script.load for script in SCRIPTS], check_health=False)
            for _ in SCRIPTS:
                connection.read_response(disconnect_on_error=True)
            late = self.take_late()
            due = [request.packed for request, _ in late]
            connection.send_packed_command(due, check_health=False)
            link = Link(connection)
        except BaseException:
            self._late.extend(late)
            connection.disconnect()
            raise
        link.in_flight.extend((request, monotonic()) for request, _ in late)
        return link

    def take_late(self) -> list[tuple[QuorumRequest, float]]:
        """Return the releases that are due, and until when they are; they are kept no longer."""
        late = []
        with suppress(IndexError):
            while True:
                late.append(self._late.popleft())
        now = monotonic()
        return [(request, until) for request, until in late if until > now]

    def failed(self, why: str) -> None:
        """Note that it is down: it is tried again in a while."""
        self.why = why
        self.failing = True
        self.rests_until = monotonic() + REST


class Links:
    """A connection to each node that can be reached, and one poll() for all of them."""

    def __init__(self) -> None:
        self._links: dict[int, Link] = {}  # by node
        self._at: dict[int, int] = {}  # node by file descriptor
        self._poll = new_poll()

    def close(self) -> None:
        """Drop every connection."""
        for at in list(self._links):
            self._drop(at)

    def _add(self, at: int, link: Link) -> None:
        self._at[link.fd] = at
        self._poll.register(link.fd, POLLIN)
        self._links[at] = link  # last: an interrupted call leaves nothing to drop

    def _drop(self, at: int) -> None:
        link = self._links.pop(at)
        self._poll.unregister(link.fd)
        del self._at[link.fd]
        link.close()


class NodeConnections(Links):
    """A connection to each node that can be reached; one thread at a time has it."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        super().__init__()
        self._nodes = nodes
        self.used = monotonic()

    def fill(self) -> list[Node]:
        """Take connections that were opened; return the nodes to which there is none."""
        missing = []
        for at, node in enumerate(self._nodes):
            if at not in self._links:
                try:
                    link = node.fresh.pop()
                except IndexError:
                    missing.append(node)
                else:
                    self._add(at, link)
                    if late := node.take_late():  # of a vote that began before it was opened
                        self._send([request for request, _ in late], [at])
        return missing

    def read(self) -> None:
        """Read the answers that have come, and drop the connections that a node closed."""
        for fd, _ in self._poll.poll(0):
            self._read(self._at[fd])

    def usable(self) -> bool:
        """Return True: what is left of them after a look."""
        self.read()
        return True

    def drop_silent(self) -> None:
        """Drop connections on which a node is silent for too long."""
        now = monotonic()
        if self._silent(now):
            self.read()  # perhaps the answers were only not read yet
            for at in self._silent(now):
                self._drop(at, "silent")

    def _silent(self, now: float) -> list[int]:
        """Return the nodes that are late with an answer."""
        return [
            at
            for at, link in self._links.items()
            if link.in_flight and now - link.in_flight[0][1] > self._nodes[at].timeout
        ]

    def vote(self, requests: Sequence[QuorumRequest], within: float, *, grace: float = 0.0) -> None:
        """Ask each node, until all requests are decided, at most `within` seconds.

        The answers of the other nodes are waited for `grace` seconds more.
        """
        self._send(requests, range(len(self._nodes)))
        deadline = monotonic() + within  # not of before: the process may have been stopped
        self._collect(requests, deadline)
        if grace:
            self._collect(requests, min(deadline, monotonic() + grace), from_all=True)

    def vote_again(self, requests: Sequence[QuorumRequest], within: float) -> None:
        """Ask each node what it may not have been asked yet."""
        for at in range(len(self._nodes)):
            again = [r for r in requests if at in r.absent or (at in r.unsure and at not in r.yes)]
            for request in again:
                request.absent.discard(at)
            if again:
                self._send(again, [at])
        self._collect(requests, monotonic() + within)

    def finish(self, requests: Sequence[QuorumRequest]) -> None:
        """Close all when the nodes have answered: no release by others may overtake a request."""
        try:
            with suppress(KeyError):  # interrupted as it dropped one
                self._collect(requests, monotonic() + FINISH_WITHIN, from_all=True)
        finally:
            self.close()

    def close_vote(self, requests: Sequence[QuorumRequest]) -> None:
        """Count no more answers; keep what nodes without a connection shall have late."""
        for request in requests:
            request.over = True
            for at in request.absent:
                self._nodes[at].remember(request)

    def broadcast(self, request: QuorumRequest, to: Iterable[int] | None = None) -> None:
        """Send a request to these nodes, or to all, whatever they answer."""
        self._send([request], range(len(self._nodes)) if to is None else to)
        self.close_vote([request])

    def _send(self, requests: Sequence[QuorumRequest], nodes: Iterable[int]) -> None:
        data = b"".join([request.packed for request in requests])
        now = monotonic()
        for at in nodes:
            link = self._links.get(at)
            if link is None:
                for request in requests:
                    request.absent.add(at)
                continue
            for request in requests:
                request.waiting += 1
                link.in_flight.append((request, now))
            try:
                link.send(data)
            except Broken:
                self._drop(at)

    def _collect(
        self, requests: Sequence[QuorumRequest], deadline: float, *, from_all: bool = False
    ) -> None:
        while [r for r in requests if r.waiting and (from_all or not r.decided)]:
            left = deadline - monotonic()
            # Also when that is over: a process that was stopped finds answers that came meanwhile.
            answered = self._poll.poll(max(0.0, left) * 1000)
            if left <= 0 and not answered:
                return
            for fd, _ in answered:
                self._read(self._at[fd])

    def _read(self, at: int) -> None:
        link = self._links[at]
        try:
            for line in link.read():
                if line.startswith(b"-NOSCRIPT"):
                    self._nodes[at].fresh.close()  # they loaded them before that
                    raise Broken("a new connection loads the scripts again")
                request, _ = link.in_flight.popleft()
                request.take(at, line)
                if line.startswith(b"-") and not line.startswith(b"-OOM"):
                    # Such as READONLY: a new connection may find a new master.
                    self._nodes[at].remember(request)
                    self._drop(at, request.why.get(at, "refused"))
                    return
        except (Broken, IndexError):
            self._drop(at)

    def _drop(self, at: int, why: str = "") -> None:
        node, link = self._nodes[at], self._links[at]
        super()._drop(at)
        for request, _ in link.in_flight:
            node.remember(request)
            request.waiting -= 1
            request.unsure.add(at)
        if why:
            node.failed(why)
