"""Inspection of locks on Redlock: what a majority of the nodes holds."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ...claims import Holding
from ..base import BaseLockBackend
from ..redis.inspection import holding_of
from .nodes import QuorumRequest
from .quorum import Quorum
from .scripts import LIST

# Parts of the index at each node, each with a counter of fences. Names that share one only make
# each other's fences grow; taken at the same moment, they may cost one more request.
PARTS = 256
# Requests in one round trip: more might not fit the buffer of a socket.
BATCH = 32


class Copy(NamedTuple):
    """A lock as one node holds it; of several, the one that ends first sorts first."""

    left: int  # milliseconds
    fence: int
    waiters: int
    about: str
    now: int


class Inspection(BaseLockBackend):
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

    def _held(self, parts: Iterable[int], key: str = "") -> dict[tuple[str, str], Holding]:
        """Return by key and owner what most nodes hold, or may hold: some may be down."""
        size, majority = len(self._quorum.nodes), self._quorum.majority
        words = self._prefix.encode(), key.encode()
        requests = [QuorumRequest(size, LIST.head(self._part(number), *words)) for number in parts]
        self._quorum.ask(requests)
        holdings = {}
        for request in requests:
            answers = len(request.yes)
            if answers < majority:
                raise self._quorum.failure(request)
            for (lock, owner), copies in _copies(request.yes.values()).items():
                if len(copies) + size - answers >= majority:
                    holdings[lock, owner] = self._holding(lock, copies)
        return holdings

    def _holding(self, key: str, copies: list[Copy]) -> Holding:
        one = sorted(copies)[-min(len(copies), self._quorum.majority)]
        # Of those that are as frequent the first: a node that was asked late gave a later one.
        fence, _ = Counter(sorted(copy.fence for copy in copies)).most_common(1)[0]
        waiters = max(copy.waiters for copy in copies)
        held = f"{fence} 1 {one.about}".encode()
        return holding_of(self.alias, key, held, one.left, waiters, one.now)


def _copies(answers: Iterable[bytes]) -> dict[tuple[str, str], list[Copy]]:
    """Return what nodes list (see list.lua), by key and owner."""
    copies = defaultdict(list)
    for answer in answers:
        _, now, locks = answer.decode().split(" ", 2)
        for key, held, left, waiters in json.loads(locks):
            if left > 0:
                owner, fence, _, about = held.split(" ", 3)
                copies[key, owner].append(Copy(left, int(fence), waiters, about, int(now)))
    return copies
