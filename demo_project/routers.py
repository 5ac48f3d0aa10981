"""Keeps the lock table in the database `locks`, and everything else out of it."""

from __future__ import annotations

from typing import Any


class LocksApart:
    """Routes the tables of distlock_app, and only those, to `locks`."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "locks" if model._meta.app_label == "distlock_app" else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return (db == "locks") == (app_label == "distlock_app")
