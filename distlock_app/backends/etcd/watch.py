"""`Watch`: tells the waiters of this process which keys were deleted."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing, suppress
from typing import Any

from ...primitives.threads import Worker
from ...primitives.timing import monotonic
from .entries import Waiters
from .gateway import Gateway, decoded, unwrapped
from .http import Link

# A stream that said nothing for so long may be dead, and is replaced; or it is not needed.
QUIET_SECONDS = 10.0
RETRY_SECONDS = 1.0  # after a stream that did not begin


class Watch:
    """Wakes waiters when keys are deleted: one stream for all, on a thread of its own.

    The stream ends some time after the last waiter.
    """

    def __init__(self, gateway: Gateway, keys: Any, waiters: Waiters, name: str) -> None:
        self._gateway = gateway
        # Not from a given revision on: where there are newer ones, etcd looks at such a watch
        # only ten times a second.
        self._body = {"create_request": {**keys, "filters": ["NOPUT"]}}
        self._waiters = waiters
        self._worker = Worker(name, self._run)
        self._link: Link | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Have a stream begin soon, for a waiter."""
        if self._link is None:
            self._worker.put(None)

    def end(self) -> None:
        """End the stream for good."""
        self._ended.set()
        if (link := self._link) is not None:
            with suppress(OSError):  # it has ended
                link.socket.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close the copy of the stream in a child of fork(), where its thread is not."""
        if (link := self._link) is not None and (copy := link.socket.detach()) >= 0:
            os.close(copy)

    def _run(self, _: list[Any]) -> None:
        # The link goes first: then start() sees that it has, or this loop sees its waiter.
        while self._waiters.any_left() and not self._ended.is_set():
            try:
                began = self._follow()
            finally:
                self._link = None
            if not began:
                self._ended.wait(RETRY_SECONDS)

    def _follow(self) -> bool:
        """Pass on what one stream says, until it ends; return whether it had begun."""
        began = False
        with (
            suppress(OSError, ValueError),
            closing(self._gateway.stream("/v3/watch", self._body)) as link,
        ):
            self._link = link
            needed_at = monotonic()
            for message in link.messages():
                answer = unwrapped(message)
                if "canceled" in answer or "error" in answer or self._ended.is_set():
                    return False
                if "created" in answer:
                    began = True
                    link.socket.settimeout(QUIET_SECONDS)
                    self._waiters.wake_all()
                for event in answer.get("events", ()):
                    self._waiters.wake_for(decoded(event["kv"]["key"]))
                if self._waiters.any_left():
                    needed_at = monotonic()
                elif monotonic() - needed_at > QUIET_SECONDS:
                    break
        return began
