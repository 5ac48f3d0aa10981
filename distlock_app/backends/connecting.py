"""What clients of servers share: when an idle connection is used, TLS, why connecting failed."""

from __future__ import annotations

import ssl
from collections import deque
from contextlib import suppress
from typing import Any

from django.core.exceptions import ImproperlyConfigured

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


def close_all(idle: deque[Any]) -> None:
    """Close connections that nobody uses; other threads may take some of them meanwhile."""
    with suppress(IndexError):
        while True:
            idle.pop().close()


def close_old(idle: deque[Any], now: float) -> None:
    """Close connections beyond KEEP_IDLE, and those that were idle for too long."""
    with suppress(IndexError):  # another thread has taken it
        while len(idle) > KEEP_IDLE or idle[0].used < now - IDLE_SECONDS:
            idle.popleft().close()
