"""Requests to a Redis Cluster: sent to the master of the slot, following redirects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import ResponseError

from ...errors import BackendError
from ...primitives.rlock import RLock
from ..base import ConnectionLost
from .pool import Pool, Servers, Unreachable, code_of
from .scripts import Script, pack

# How often a request follows its keys: there is a new map each time.
FOLLOW = 3

# Refusals of a node that does not serve the keys: nothing was carried out. redis-py before 7 has
# no classes for them.
MOVED = {"MOVED", "MovedError"}
ELSEWHERE = {*MOVED, "CLUSTERDOWN", "ClusterDownError", "MASTERDOWN", "MasterDownError"}
# When a node is asked for a new map: first after MOVED, last if it failed otherwise.
FIRST, BETWEEN, LAST = range(3)

Address = tuple[str, int]
Slots = list[Pool | None]


class Cluster(Servers):
    """The masters of a Cluster, and which of them has which slots.

    Not redis-py's RedisCluster: that one connects when it is made and repeats requests by
    itself. The map is asked for at first, and again when a master refuses or is gone.

    An ASK is not followed: its slot is being moved, and as long as it is, scripts with several
    keys are refused by both sides (TRYAGAIN). That is an error, for a moment.
    """

    def __init__(
        self, name: str, recipe: Any, first: Sequence[Address], make: Callable[[str, Any], Pool]
    ) -> None:
        """`first` are the nodes to ask first; `make` makes the pool of one."""
        super().__init__(name)
        self._recipe = recipe
        self._make = make
        self._first = self._known = list(first)
        self._pools: dict[Address, Pool] = {}
        self._map: Slots = []
        # One thread asks for the map; guards the three above. Reentrant: a signal handler may lock
        # or release in the middle of it.
        self._lock = RLock()

    def node(self, request: bytes) -> Pool:
        return self._node(self._map or self._learn([]), request)

    def serving(self, request: bytes) -> Servers:
        return (self._map and self._map[key_slot(request)]) or self

    def nodes(self) -> list[Pool]:
        # Not those of an old map: one of them may be gone, and all be well.
        return [pool for pool in dict.fromkeys(self._learn(self._map)) if pool]

    def close(self) -> None:
        for pool in list(self._pools.values()):
            pool.close()

    def exchange(
        self, script: Script | None, requests: Sequence[bytes], repeat: bool = True
    ) -> list[Any]:
        """Ask every master for its part; see Servers. Raise BackendError if nobody has a map."""
        gone = (Unreachable, ConnectionLost) if repeat else Unreachable
        answers: list[Any] = [None] * len(requests)
        left: Sequence[int] = range(len(requests))
        for _ in range(FOLLOW):
            slots = self._map or self._learn([])
            groups: dict[Pool, list[int]] = {}
            for at in left:
                groups.setdefault(self._node(slots, requests[at]), []).append(at)
            left, order = [], {}
            for pool, group in groups.items():
                try:
                    got = pool.exchange(script, [requests[at] for at in group], repeat)
                except BackendError as error:
                    got, order[pool] = [error] * len(group), LAST
                for at, answer in zip(group, got, strict=True):
                    answers[at] = answer
                    code = code_of(answer) if isinstance(answer, ResponseError) else ""
                    if code in ELSEWHERE or isinstance(answer, gone):
                        order[pool] = FIRST if code in MOVED else LAST
                        left.append(at)
            if not order:
                break
            try:
                new = self._learn(slots, order)
            except BackendError:
                break
            # After MOVED, a map that does not say so is an older one of another thread.
            left = [
                at
                for at in left
                if (asked := self._node(slots, requests[at])) is not self._node(new, requests[at])
                or order[asked] == FIRST
            ]
        return answers

    def _node(self, slots: Slots, request: bytes) -> Pool:
        # The first tag in it is that of its first key. Without keys, any server will do.
        pool = slots[key_slot(request)]
        if pool is None:
            raise Unreachable(f"Redis {self.name!r} has no server for these keys.")
        return pool

    def _learn(self, old: Slots, order: Mapping[Pool, int] | None = None) -> Slots:
        """Return a newer map than `old`: of another thread, or of the first node that answers."""
        with self._lock:
            if self._map and self._map is not old:  # another thread was faster
                return self._map
            order = order or {}
            nodes = {address: self._pool(address) for address in self._known}
            error: BackendError | None = None
            for address in sorted(nodes, key=lambda address: order.get(nodes[address], BETWEEN)):
                try:
                    [parts] = nodes[address].ask(pack(b"CLUSTER", b"SLOTS"))
                except BackendError as failed:
                    error = error or failed
                    continue
                self._read(parts, address)
                return self._map
            raise error or Unreachable(f"Redis {self.name!r} has no nodes.")

    def _read(self, parts: Any, asked: Address) -> None:
        """Take the answer to CLUSTER SLOTS: [first slot, last, master, replica...] each."""
        slots: Slots = [None] * REDIS_CLUSTER_HASH_SLOTS
        known = [asked]
        for first, last, *nodes in parts:
            # A node may not know its own name: then it is the one we used.
            found = [(_host_of(node) or asked[0], node[1]) for node in nodes]
            slots[first : last + 1] = [self._pool(found[0])] * (last + 1 - first)
            known += found
        self._known = list(dict.fromkeys([*known, *self._first]))
        self._map = slots

    def _pool(self, address: Address) -> Pool:
        pool = self._pools.get(address)
        if pool is None:
            host, port = address
            kwargs = {**self._recipe.connection_kwargs, "host": host, "port": port}
            recipe = SimpleNamespace(
                connection_class=self._recipe.connection_class, connection_kwargs=kwargs
            )
            name = f"{self.name} ({host}:{port})"
            pool = self._pools.setdefault(address, self._make(name, recipe))
        return pool


def _host_of(node: Sequence[Any]) -> str:
    """Return where CLUSTER SLOTS says that a node is; empty: it does not."""
    host = node[0]
    if host == b"?":  # its hostname is not known, but there is more about it
        more = node[3]
        host = dict(zip(more[::2], more[1::2], strict=False)).get(b"ip")
    return host.decode() if host else ""
