"""The SQL of the lock table, in the dialect of each database."""

from __future__ import annotations

from django.db.backends.base.base import BaseDatabaseWrapper

from .base import Dialect
from .generic import Generic
from .mysql import MySQL
from .postgresql import PostgreSQL
from .sqlite import SQLite

__all__ = ["DIALECTS", "Dialect", "Generic", "dialect_for"]

DIALECTS: dict[str, type[Dialect]] = {"mysql": MySQL, "postgresql": PostgreSQL, "sqlite": SQLite}


def dialect_for(connection: BaseDatabaseWrapper) -> Dialect:
    """Return the statements for one connection's database, filled in once."""
    return DIALECTS.get(connection.vendor, Generic)(connection)
