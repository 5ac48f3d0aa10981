"""Entries of the queues in etcd, the requests about them, and the waiters that they wake."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured

from ...claims import Grant
from ...primitives.timing import monotonic
from .gateway import decoded, encoded
from .leases import Lease


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a queue: the first one holds the lock, the others wait."""

    key: str
    created: int  # the revision that made it: the order of the queue
    lease: int
    value: str  # empty in a list of keys

    @property
    def condition(self) -> dict[str, Any]:
        """The condition of a transaction that it is still there."""
        return {"key": encoded(self.key), "target": "CREATE", "create_revision": self.created}


@dataclass(frozen=True, slots=True)
class View:
    """The queue of one lock as it was at one revision."""

    asked_at: float
    queue: list[Entry]
    epoch: int

    def position_of(self, key: str) -> int | None:
        """Return how many keys are before `key`; None: it is not in the queue."""
        return next((at for at, entry in enumerate(self.queue) if entry.key == key), None)


@dataclass(slots=True)
class Waiter:
    """A claim that waits."""

    lease: Lease
    # The key whose end wakes it, or what that begins with; "" if the claim is to try again anyway.
    awaits: str = ""
    created: int = 0  # the revision that made that key: its owner may have made it anew, behind us
    wake: Callable[[Grant | None], None] | None = None

    def wake_up(self) -> None:
        """Have the claim look or try again."""
        if self.wake is not None:
            with suppress(RuntimeError):  # its event loop was closed: the core releases it
                self.wake(None)


class Waiters(dict[tuple[str, str], Waiter]):
    """The claims of this process that wait, by owner and key."""

    def wake_for(self, gone: str) -> None:
        """Wake those that wait for the end of this key."""
        for waiter in list(self.values()):
            if waiter.awaits and gone.startswith(waiter.awaits):
                waiter.awaits = ""
                waiter.wake_up()

    def wake_all(self) -> None:
        """Let all look: any key may have gone unseen."""
        for waiter in list(self.values()):
            waiter.wake_up()

    def any_left(self) -> bool:
        """Return whether there are any, without those that stopped renewing their lease."""
        now = monotonic()
        for claim, waiter in list(self.items()):
            if waiter.lease.seconds and not waiter.lease.covers(0, now):
                self.pop(claim, None)
        return bool(self)


def endpoints(location: Any) -> list[str]:
    """Return the URLs of LOCATION; raise ImproperlyConfigured."""
    urls = location.split(",") if isinstance(location, str) else list(location or ())
    urls = [str(url).strip().rstrip("/") for url in urls]
    if not urls or not all(_is_url(url) for url in urls):
        raise ImproperlyConfigured(
            "LOCATION must be a URL such as http://etcd.example:2379, or several."
        )
    if any("@" in url for url in urls):
        raise ImproperlyConfigured("USER and PASSWORD belong in OPTIONS.")
    return urls


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # whose message quotes what may be a password
        return False


def range_of(prefix: str) -> dict[str, Any]:
    """Return the keys that begin with `prefix`, which ends with "/"."""
    return {"key": encoded(prefix), "range_end": encoded(prefix[:-1] + "0")}


def put(key: str, value: str, lease: Lease) -> dict[str, Any]:
    """Return the request that writes a key with a lease."""
    return {"request_put": {"key": encoded(key), "value": encoded(value), "lease": lease.id}}


def delete(key: str) -> dict[str, Any]:
    """Return the request that deletes a key."""
    return {"request_delete_range": {"key": encoded(key)}}


def entry_of(kv: dict[str, Any]) -> Entry:
    """Read an entry of an answer."""
    return Entry(
        decoded(kv["key"]),
        int(kv["create_revision"]),
        int(kv.get("lease", 0)),
        kv.get("value", ""),
    )
