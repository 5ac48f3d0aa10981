"""`Epoch`: where the fences of this data directory begin."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from .gateway import Gateway, decoded, encoded


class Epoch:
    """A number that is noted once for each data directory.

    Revisions start at 1 when the data is lost. So fences are counted from the time, in
    microseconds, at which the first lock was taken: etcd makes no million revisions a second,
    and so later data has greater fences. Nothing else relies on that clock.
    """

    def __init__(self, gateway: Gateway, key: str) -> None:
        self._gateway = gateway
        self._key = encoded(key)
        self.request = {"request_range": {"key": self._key}}  # for a transaction that reads it too

    def read(self) -> int:
        """Ask etcd for the number; raise BackendError."""
        answer = self._gateway.ask("/v3/kv/range", self.request["request_range"])
        return self.of(answer.get("kvs", ()))

    def of(self, found: Sequence[Any]) -> int:
        """Return the number that was found; note one if there is none."""
        if not found:
            begin = {
                "request_put": {"key": self._key, "value": encoded(str(time.time_ns() // 1000))}
            }
            missing = {"key": self._key, "target": "VERSION", "version": 0}
            answer = self._gateway.txn([missing], [begin, self.request], [self.request])
            found = answer["responses"][-1]["response_range"]["kvs"]
        return int(decoded(found[0]["value"]))
