"""`Watch`: tells the waiters of this process which keys were deleted."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...primitives.threads import Worker
from ...primitives.timing import monotonic
from .gateway import Gateway, decoded
from .http import Link

# A stream that said nothing for so long may be dead, and is replaced; or it is not needed.
QUIET_SECONDS = 10.0
RETRY_SECONDS = 1.0  # after a stream that did not begin


class Watch:
    """Reports each deleted key: one stream for all waiters, on a thread of its own.

    `notify` is called with the key, and with None when any may have gone unseen; it returns
    whether there are waiters. The stream ends some time after the last one.
    """

    def __init__(
        self, gateway: Gateway, keys: Any, notify: Callable[[str | None], bool], name: str
    ) -> None:
        self._gateway = gateway
        # Not from a given revision on: where there are newer ones, etcd looks at such a watch
        # only ten times a second.
        self._body = {"create_request": {**keys, "filters": ["NOPUT"]}}
        self._notify = notify
        self._worker = Worker(name, self._run)
        self._link: Link | None = None
        self._running = False
        self._ended = threading.Event()

    def start(self) -> None:
        """Have it run soon, for a waiter."""
        if not self._running:
            self._worker.put(None)

    def end(self) -> None:
        """End it for good."""
        self._ended.set()
        if (link := self._link) is not None:
            with suppress(OSError):  # it has ended
                link.socket.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close the copy of the stream in a child of fork(), where its thread is not."""
        if (link := self._link) is not None and (copy := link.socket.detach()) >= 0:
            os.close(copy)

    def _run(self, _: list[Any]) -> None:
        self._running = True
        try:
            while self._notify("") and not self._ended.is_set():
                if not self._follow():
                    self._ended.wait(RETRY_SECONDS)
        finally:
            self._running = False

    def _follow(self) -> bool:
        """Pass on what one stream says, until it ends; return whether it had begun."""
        began = False
        with suppress(OSError, ValueError):
            link = self._link = self._gateway.stream("/v3/watch", self._body)
            try:
                needed_at = monotonic()
                for message in link.messages():
                    answer = message.get("result", {})
                    if "canceled" in answer or "error" in message or self._ended.is_set():
                        return False
                    if "created" in answer:
                        began = True
                        link.socket.settimeout(QUIET_SECONDS)
                        self._notify(None)
                    for event in answer.get("events", ()):
                        self._notify(decoded(event["kv"]["key"]))
                    if self._notify(""):
                        needed_at = monotonic()
                    elif monotonic() - needed_at > QUIET_SECONDS:
                        break
            finally:
                self._link = None
                link.close()
        return began
