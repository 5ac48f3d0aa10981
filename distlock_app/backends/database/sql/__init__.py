"""The SQL of the lock table, in the dialect of each database."""

from __future__ import annotations

from .base import Dialect
from .generic import Generic
from .mysql import MySQL
from .postgresql import PostgreSQL
from .sqlite import SQLite

__all__ = ["DIALECTS", "Dialect", "Generic"]

DIALECTS: dict[str, type[Dialect]] = {"mysql": MySQL, "postgresql": PostgreSQL, "sqlite": SQLite}
