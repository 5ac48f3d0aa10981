"""Inspection of locks on etcd: the first key of each queue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby

from ...claims import Holding
from ...primitives.identity import holder_fields
from ..base import BaseLockBackend
from .entries import Entry, entry_of, range_of
from .epoch import Epoch
from .gateway import Gateway, decoded, encoded
from .leases import Leases

PAGE = 1000  # keys in one answer of a listing


class Inspection(BaseLockBackend):
    """Lists the queues of all locks, which are keys with one beginning."""

    _epoch: Epoch
    _gateway: Gateway
    _leases: Leases
    _prefix: str

    def holders(self, key: str | None = None) -> Iterator[Holding]:
        start = f"{self._prefix}/" if key is None else self._queue_of(key)
        epoch = self._epoch.read()
        for _, keys in groupby(self._pages(start), lambda entry: entry.key.rpartition("/")[0]):
            queue = sorted(keys, key=lambda entry: entry.created)
            first = queue[0]
            left = self._leases.remaining(first.lease)
            if left is None:
                continue
            about = json.loads(decoded(first.value))
            fence = epoch + first.created
            yield Holding(
                name=about["name"],
                key=first.key.split("/")[-2],
                alias=self.alias,
                version=str(fence),
                fence=fence,
                expires_in=left,
                waiters=len(queue) - 1,
                holder=holder_fields(about["holder"]),
            )

    def _pages(self, start: str) -> Iterator[Entry]:
        """Yield the keys that begin with `start`, in their own order."""
        request = {**range_of(start), "limit": PAGE}
        while True:
            page = self._gateway.ask("/v3/kv/range", request)
            entries = [entry_of(kv) for kv in page.get("kvs", [])]
            yield from entries
            if not page.get("more"):
                return
            request["key"] = encoded(entries[-1].key + "\0")

    def _queue_of(self, key: str) -> str:
        return f"{self._prefix}/{key}/"
