"""Inspection of locks on ZooKeeper, and the nodes they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from ...claims import Holding
from ...primitives.identity import holder_fields
from ..base import BaseLockBackend, batches
from .nodes import Node, holding_of, in_line
from .session import Gone, Session

# Directories of nodes. One for each lock would be left behind by every name ever used: only
# servers that are configured for it remove empty directories by themselves.
SHARDS = 1024
BATCH = 500  # requests on their way at the same time


class Inspection(BaseLockBackend):
    """Lists the nodes of all directories."""

    _session: Session
    _root: str

    def holders(self, key: str | None = None) -> Iterator[Holding]:
        if key is None:
            shards = [f"{self._root}/{name}" for name in self._list(self._root)]
        else:
            shards = [self._shard(key)]
        epoch = self._session.read_epoch()
        for names in self._ask_all("get_children", shards):
            nodes = sorted(map(Node.of, names or ()), key=lambda node: node.key)
            for found, queue in groupby(nodes, lambda node: node.key):
                if key in (None, found):
                    yield from self._holdings(in_line(list(queue)), epoch)

    def clear(self, key: str, if_version: str | None = None) -> int:
        shard, epoch = self._shard(key), self._session.read_epoch()
        nodes = [node for node in map(Node.of, self._list(shard)) if node.key == key]
        paths = [f"{shard}/{node.name}" for node in holding_of(in_line(nodes))]
        stats = self._ask_all("exists", paths)
        return sum(
            self._delete(path)
            for path, stat in zip(paths, stats, strict=True)
            if stat is not None and if_version in (None, str(epoch + stat.czxid))
        )

    def _list(self, path: str) -> list[str]:
        [names] = self._ask_all("get_children", [path])
        return names or []

    def _ask_all(self, method: str, paths: list[str]) -> Iterator[Any]:
        """Yield an answer for each path, None for one that has gone."""
        for batch in batches(paths, BATCH):
            sent = [self._session.send(method, path) for path in batch]
            for one in sent:
                try:
                    yield self._session.answer(one)
                except Gone:
                    yield None

    def _holdings(self, queue: list[Node], epoch: int) -> Iterator[Holding]:
        holding = holding_of(queue)
        paths = [f"{self._shard(node.key)}/{node.name}" for node in holding]
        for node, found in zip(holding, self._ask_all("get", paths), strict=True):
            if found is None:
                continue
            about = json.loads(found[0])
            fence = epoch + found[1].czxid
            yield Holding(
                name=about["name"],
                key=node.key,
                alias=self.alias,
                version=str(fence),
                kind="shared" if node.kind == "r" else "exclusive",
                fence=fence,
                waiters=len(queue) - len(holding),
                holder=holder_fields(about["holder"]),
            )

    def _shard(self, key: str) -> str:
        return f"{self._root}/{int(key[:4], 16) % SHARDS:03x}"

    def _delete(self, path: str) -> bool:
        try:
            self._session.ask("delete", path)
        except Gone:
            return False
        return True
