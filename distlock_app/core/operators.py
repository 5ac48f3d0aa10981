"""Operators clear or prolong a lock that is not theirs; both are logged and signalled."""

from __future__ import annotations

from ..claims import Holding
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


def prolong(held: Holding, ttl: float, user: str) -> bool:
    """Let its holder keep a lock for `ttl` seconds or more; False: the holder has lost it."""
    done = registry[held.alias].backend.prolong(held.key, held.version, ttl)
    if done:
        name, user = map(shown, (held.name, user))
        logger.warning(
            "%r (alias %r) extended to %g s by %s",
            *(name, held.alias, ttl, user),
            extra=fields("prolonged", held.alias, name=name, key=held.key, user=user, ttl=ttl),
        )
    return done
