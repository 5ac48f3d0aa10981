"""Inspection of locks on etcd: the first key of each queue."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ...claims import Holding
from ...primitives.identity import holder_fields
from ..base import BaseLockBackend
from .entries import Entry, entry_of, range_of
from .gateway import Gateway, decoded, encoded
from .leases import Leases

PAGE = 1000  # keys in one answer of a listing


class Inspection(BaseLockBackend):
    """Lists the queues of all locks, which are keys with one beginning."""

    _gateway: Gateway
    _leases: Leases
    _prefix: str
    _read_epoch: dict[str, Any]  # the request that reads the epoch

    def holders(self, key: str | None = None) -> Iterator[Holding]:
        start = f"{self._prefix}/" if key is None else self._queue_of(key)
        epoch = self._epoch()
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

    def _epoch(self, found: Sequence[Any] | None = None) -> int:
        """Return a number that is noted once for each data directory; `found`: as it was read.

        Revisions start at 1 when the data is lost. So fences are counted from the time, in
        microseconds, at which the first lock was taken: etcd makes no million revisions a second,
        and so later data has greater fences. Nothing else relies on that clock.
        """
        read = self._read_epoch
        if found is None:
            found = self._gateway.ask("/v3/kv/range", read["request_range"]).get("kvs")
        if not found:
            key = read["request_range"]["key"]
            begin = {"request_put": {"key": key, "value": encoded(str(time.time_ns() // 1000))}}
            missing = {"key": key, "target": "VERSION", "version": 0}
            answer = self._gateway.txn([missing], [begin, read], [read])
            found = answer["responses"][-1]["response_range"]["kvs"]
        return int(decoded(found[0]["value"]))

    def _queue_of(self, key: str) -> str:
        return f"{self._prefix}/{key}/"
