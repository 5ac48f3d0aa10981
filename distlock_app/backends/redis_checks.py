"""System checks of the Redis engine: what would make locks vanish."""

from __future__ import annotations

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning

from ..errors import BackendError
from .redis_alias import place
from .redis_pool import Pool
from .redis_scripts import pack


def check_sharing(alias: str, location: str) -> list[CheckMessage]:
    """Warn if a cache lives in the database of the locks: its clear() is a FLUSHDB."""
    here = place(location)
    others = [other for other in settings.CACHES if other != location and place(other) == here]
    if here is None or (location != "default" and not others):
        return []
    return [
        Warning(
            f"The locks of DISTLOCK[{alias!r}] are in the Redis database of the cache "
            f"{(others or [location])[0]!r}: clearing that cache drops them all.",
            hint="Give the locks an alias of their own in CACHES, with another database number "
            "or another server, and never clear it.",
            id="distlock_app.W013",
        )
    ]


def check_server(alias: str, pool: Pool) -> list[CheckMessage]:
    """Ask the server whether it is there, and whether it may throw locks away."""
    try:
        [memory] = pool.ask(pack(b"INFO", b"memory"))
    except BackendError as error:
        return [Error(f"DISTLOCK[{alias!r}]: {error}", id="distlock_app.E013")]
    facts = dict(line.split(b":", 1) for line in memory.splitlines() if b":" in line)
    policy = facts.get(b"maxmemory_policy", b"noeviction").decode()
    if policy == "noeviction":
        return []
    return [
        Warning(
            f"The Redis of DISTLOCK[{alias!r}] throws locks away when its memory is full "
            f"(maxmemory-policy {policy}).",
            hint="Set maxmemory-policy to noeviction, or give the locks a server of their own.",
            id="distlock_app.W014",
        )
    ]
