"""What people read of locks on Redlock: what a majority of the nodes holds."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from ...claims import Holding
from ..base import BaseLockBackend
from ..redis.people import holding_of
from .nodes import QuorumRequest
from .quorum import Quorum
from .scripts import LIST

# Parts of the index at each node, each with a counter of fences. Names that share one only make
# each other's fences grow; taken at the same moment, they may cost one more request.
PARTS = 256
# Requests in one round trip: more might not fit the buffer of a socket.
BATCH = 32


class ForPeople(BaseLockBackend):
    """Lists the index of each node, and believes what most of them say."""

    _quorum: Quorum
    _prefix: str

    def holders(self, key: str | None = None) -> Iterator[Holding]:
        if key is not None:
            yield from self._held([0], key).values()
            return
        for start in range(0, PARTS, BATCH):
            yield from self._held(range(start, start + BATCH)).values()

    def _part(self, number: int) -> bytes:
        return f"{self._prefix}part:{number}".encode()

    def _held(self, parts: Iterable[int], key: str = "") -> dict[str, Holding]:
        """Return by owner what most nodes hold, or may hold: some may be down."""
        size = len(self._quorum.nodes)
        words = self._prefix.encode(), key.encode()
        requests = [
            QuorumRequest(size, LIST, LIST.head(self._part(number), *words)) for number in parts
        ]
        self._quorum.ask(requests)
        holdings = {}
        for request in requests:
            if len(request.yes) < self._quorum.majority:
                raise self._quorum.failure(request)
            found = defaultdict(list)
            for line in request.yes.values():
                _, now, listed = line.decode().split(" ", 2)
                for key, held, left, waiters in json.loads(listed):
                    if left > 0:
                        owner, fence, _, about = held.split(" ", 3)
                        found[key, owner].append((left, int(fence), waiters, about, int(now)))
            for (key, owner), at in found.items():
                if len(at) + size - len(request.yes) >= self._quorum.majority:
                    holdings[owner] = self._holding(key, at)
        return holdings

    def _holding(self, key: str, at: list[tuple[int, int, int, str, int]]) -> Holding:
        left, _, _, about, now = sorted(at)[-min(len(at), self._quorum.majority)]
        fence, _ = Counter(node[1] for node in at).most_common(1)[0]
        waiters = max(node[2] for node in at)
        return holding_of(self.alias, key, f"{fence} 1 {about}".encode(), left, waiters, now)
