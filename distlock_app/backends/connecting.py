"""What clients of servers share: when an idle connection is used, TLS, why connecting failed."""

from __future__ import annotations

import ssl
from collections import deque
from contextlib import suppress
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured

from ..primitives.timing import monotonic

# Seconds to wait for the answer to a request that a signal ended: the release sent after it, over
# another connection, must not overtake it.
FINISH_WITHIN = 0.5

# Connections kept after a burst of threads; each is out only for one round trip.
KEEP_IDLE = 64
# One that nobody needed for so many seconds is not used again: a firewall may have forgotten it,
# and would drop in silence what is sent.
IDLE_SECONDS = 60.0
# One that was idle for less is used without looking whether it was closed meanwhile.
TRUST_SECONDS = 0.5

Kept = TypeVar("Kept", bound=Any)


class Idle(deque[Kept]):
    """Connections that nobody uses: last in, first out. No lock: append and pop are atomic.

    Each has `used`, when it was last used, and `usable()`: whether it is as it was then.
    """

    sweep_at = 0.0  # when those that are not needed are closed

    def take(self) -> Kept | None:
        """Return the one that was used last and is usable; None: there is none."""
        while True:
            try:
                one = self.pop()
            except IndexError:
                return None
            idle = monotonic() - one.used
            if idle < TRUST_SECONDS or (idle < IDLE_SECONDS and one.usable()):
                return one
            one.close()

    def keep(self, one: Kept) -> None:
        """Keep one for the next request."""
        one.used = now = monotonic()
        self.append(one)
        if now > self.sweep_at or len(self) > KEEP_IDLE:
            self.sweep(now)

    def sweep(self, now: float) -> None:
        """Close those beyond KEEP_IDLE, and those that were idle for too long."""
        self.sweep_at = now + IDLE_SECONDS
        with suppress(IndexError):  # another thread has taken it
            while len(self) > KEEP_IDLE or self[0].used < now - IDLE_SECONDS:
                self.popleft().close()

    def close(self) -> None:
        """Close them all; other threads may take some meanwhile."""
        with suppress(IndexError):
            while True:
                self.pop().close()


def check_security(user: Any, password: Any, files: Any, lacks: str) -> None:
    """Raise ImproperlyConfigured for a password or files of TLS that would go unused.

    `lacks`: the setting without which there is no TLS; empty if it is there.
    """
    _, cert, key = files
    if password and not user:
        raise ImproperlyConfigured("PASSWORD needs a USER.")
    if lacks and any(files):
        raise ImproperlyConfigured(f"CA, CERT and KEY need {lacks}.")
    if key and not cert:
        raise ImproperlyConfigured("KEY needs a CERT.")


def tls_context(ca: Any, cert: Any, key: Any) -> ssl.SSLContext:
    """Return how to connect with these files; raise ImproperlyConfigured if one is of no use."""
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, TypeError) as error:  # an SSLError is an OSError, and names no file
        raise ImproperlyConfigured(
            f"CA, CERT or KEY is no file that can be used: {error}"
        ) from error
    return context


def system_text(error: Exception | None) -> str:
    """Say why a connection failed: by the system's text, as a client's may quote what was sent."""
    for raised in error, getattr(error, "__context__", None):
        if isinstance(raised, OSError) and raised.strerror:
            return raised.strerror
    return type(error).__name__
