"""Locks on a majority of independent Redis or Valkey servers: `RedlockBackend`."""

from __future__ import annotations

# All of `redis` first: a thread that begins with a part of it, while another imports all of it,
# can end that thread's import with an error, for each waits for the other.
from .. import redis  # noqa: F401
from .backend import RedlockBackend

__all__ = ["RedlockBackend"]
