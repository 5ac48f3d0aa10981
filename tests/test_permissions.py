"""The database user of docs/explanation/security.md may do what locks need, and no more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.conf import settings
from django.db import DatabaseError, connection, connections

from distlock_app import Lock, LockTimeout
from distlock_app.core.registry import registry
from distlock_app.testing import held_elsewhere

PAGE = Path(__file__).resolve().parent.parent / "docs/explanation/security.md"
PAGE_NAMES = {"postgresql": "PostgreSQL", "mysql": "MySQL and MariaDB"}
USER = f"few{settings.SUFFIX}"

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "locks"]),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no users"),
]


@pytest.fixture
def aliases(settings):
    """Make the user as the page says; the database `locks` is asked as this user from now on."""
    words = PAGE_NAMES[connection.vendor]
    [script] = re.findall(rf"{words}:\n\n```sql\n(.*?)```", PAGE.read_text(), re.S)
    script = re.sub(r"\b(ROLE|USER|TO) locks\b", rf"\1 {USER}", script)
    database = connections["locks"]
    with database.cursor() as cursor:
        for statement in filter(str.strip, script.split(";")):
            cursor.execute(statement)
    database.close()
    administrator = dict(database.settings_dict)
    database.settings_dict.update(USER=USER, PASSWORD="password")
    registry.reset()
    alias, engine = settings.SERVER_LOCKS[connection.vendor]
    settings.DISTLOCK = {
        **settings.DISTLOCK,
        alias: {"BACKEND": engine, "LOCATION": "locks"},
    }
    yield ["locks", alias]
    registry.reset()
    database.close()
    database.settings_dict.update(administrator)
    with database.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(f"DROP OWNED BY {USER}")
        cursor.execute(f"DROP USER {USER}")


def test_the_user_of_the_page_has_all_rights_that_locks_need(aliases):
    for alias in aliases:
        backend = registry[alias].backend
        lock = Lock("a", using=alias)
        with held_elsewhere("a", using=alias) as grant:
            with pytest.raises(LockTimeout):
                lock.acquire(wait=0.3)
            assert [holding.name for holding in lock.holders()] == ["a"]
            assert backend.extend(grant, 60)
            assert lock.clear() == 1
        with lock as hold:
            hold.extend()
        backend.ping()
        assert [message for message in backend.check(ask=True) if message.is_serious()] == []
    registry["locks"].backend.purge(older_than=0)


def test_the_user_of_the_page_may_read_nothing_else(aliases):
    with pytest.raises(DatabaseError), connections["locks"].cursor() as cursor:
        cursor.execute("SELECT * FROM auth_user")
