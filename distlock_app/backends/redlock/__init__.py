"""Locks on a majority of independent Redis or Valkey servers: `RedlockBackend`."""

from __future__ import annotations

from .backend import RedlockBackend

__all__ = ["RedlockBackend"]
