"""Locks on Redis or Valkey: `RedisBackend`."""

from __future__ import annotations

from .backend import RedisBackend

__all__ = ["RedisBackend"]
