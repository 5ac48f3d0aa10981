"""What people do with a lock that is not theirs: take it away, or let its holder keep it."""

from __future__ import annotations

from ..primitives.logs import fields, logger
from ..primitives.names import shown
from ..signals import lock_cleared, send
from .registry import registry


def clear(alias: str, key: str, name: str, version: str | None, user: str, reason: str) -> int:
    """Take the lock of `key` from its holders; return how many. Logged and signalled."""
    cleared = registry[alias].backend.clear(key, version)
    if cleared:
        facts = {"alias": alias, "name": name, "version": version, "user": user, "reason": reason}
        name, user, reason = map(shown, (name, user, reason))
        logger.warning(
            "%r (alias %r) cleared by %s%s",
            *(name, alias, user or "a program", f": {reason}" if reason else ""),
            extra=fields("cleared", alias, name=name, key=key, user=user, reason=reason),
        )
        send(lock_cleared, {"sender": type(registry[alias].backend), "key": key, **facts})
    return cleared


def prolong(alias: str, key: str, name: str, version: str, ttl: float, user: str) -> bool:
    """Let the holder of `version` keep `key` for `ttl` seconds or more; False: it is gone."""
    done = registry[alias].backend.prolong(key, version, ttl)
    if done:
        name, user = map(shown, (name, user))
        logger.warning(
            "%r (alias %r) extended to %g s by %s",
            *(name, alias, ttl, user),
            extra=fields("prolonged", alias, name=name, key=key, user=user, ttl=ttl),
        )
    return done
