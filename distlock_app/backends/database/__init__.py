"""The lock table: `DatabaseBackend`, for any database that Django knows."""

from __future__ import annotations

from .backend import DatabaseBackend

__all__ = ["DatabaseBackend"]
