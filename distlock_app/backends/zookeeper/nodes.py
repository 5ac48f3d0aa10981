"""Nodes of the queues in ZooKeeper: their names, their order, and the watches for their end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...claims import Grant


@dataclass(frozen=True, slots=True)
class Node:
    """A node's name has everything: `key-session-kind owner-number`."""

    name: str
    key: str
    kind: str  # "w" alone, "r" shared
    owner: str
    number: int  # given by the server, in order of arrival

    @classmethod
    def of(cls, name: str) -> Node:
        """Read a name."""
        return cls(name, name[:40], name[58], name[59:91], int(name[92:]))


@dataclass(slots=True, eq=False)
class ClaimNode:
    """The node of one claim that waits or holds."""

    session: int
    path: str = ""  # as long as it is not known whether it was created
    czxid: int = 0
    shard_czxid: int = 0  # of its directory
    look_again_at: float = 0.0  # a monotonic time: by then it looks at the queue again
    behind: Node | None = None  # what it waits for, until that is known to have gone
    awaits: DeletionWatch | None = None

    def is_in(self, session: int) -> bool:
        """Return whether this session is known to have created it."""
        return self.path != "" and self.session == session

    @property
    def name(self) -> str:
        """The end of the path, as in a list of its directory."""
        return self.path.rpartition("/")[2]


class DeletionWatch:
    """Wakes the waiters for the end of a node: one watch for all, kept by kazoo until then."""

    __slots__ = ("_forget", "wakes")

    def __init__(self, forget: Callable[[], object]) -> None:
        self._forget = forget
        self.wakes: dict[ClaimNode, Callable[[Grant | None], None] | None] = {}

    def __call__(self, event: Any) -> None:
        self._forget()
        while self.wakes:
            try:
                own, wake = self.wakes.popitem()
            except KeyError:  # the last one has just left
                return
            own.look_again_at, own.behind = 0.0, None
            if wake is not None:
                with suppress(RuntimeError):  # its event loop was closed: the core releases it
                    wake(None)


def in_line(queue: list[Node]) -> list[Node]:
    """Sort by arrival. The numbers have 32 bits: after 2147483647 comes -2147483648."""
    if not queue:
        return queue
    first = queue[0].number
    return sorted(queue, key=lambda node: (node.number - first + 2**31) % 2**32)


def in_the_way_of(ours: Node, queue: list[Node]) -> list[Node]:
    """Return the nodes of other owners that have to go before ours has the lock, in order."""
    before = [node for node in queue[: queue.index(ours)] if node.owner != ours.owner]
    return before if ours.kind == "w" else [node for node in before if node.kind == "w"]


def holding_of(queue: list[Node]) -> list[Node]:
    """Return the nodes that have the lock: one, or the readers before a writer."""
    readers = next((at for at, node in enumerate(queue) if node.kind == "w"), len(queue))
    return queue[: max(1, readers)]
