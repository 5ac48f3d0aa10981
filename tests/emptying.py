"""Empties the tables that have rows: between tests, most of them have none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
from django.apps import apps
from django.core.management.color import no_style
from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import TransactionTestCase

# What `migrate` has written. As it stays, the signal after it need not be sent again.
KEPT = {"django_content_type", "auth_permission"}


# On PostgreSQL a new session takes 12 ms until it knows all of the tables: these stay.
_sessions: dict[str, BaseDatabaseWrapper] = {}


@contextmanager
def emptying() -> Iterator[None]:
    """Take the place of Django's end of a transactional test.

    That calls the command `flush`, whose arguments alone take as long to parse as all of this.
    """
    for alias in connections:
        if connections[alias].vendor == "postgresql":
            _sessions[alias] = connections[alias].copy()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TransactionTestCase, "_fixture_teardown", _empty_the_databases)
        yield
    while _sessions:
        _sessions.popitem()[1].close()


def _empty_the_databases(case: TransactionTestCase) -> None:
    for alias in connections:
        if alias in case.databases:
            if alias in _sessions:
                _empty_postgresql(alias)
            else:
                _empty(alias)


def _empty(alias: str) -> None:
    connection = connections[alias]
    if full := _full_tables(connection):
        connection.ops.execute_sql_flush(
            connection.ops.sql_flush(no_style(), full, allow_cascade=True)
        )


def _empty_postgresql(alias: str) -> None:
    connections[alias].close()  # as Django does next; its transaction would be waited for
    session = _sessions[alias]
    if session.connection is not None and not session.is_usable():  # a test has ended it
        session.close()
    if full := _full_tables(session):
        # A TRUNCATE makes new files: for the few rows of a test it takes ten times as long.
        # Foreign keys are checked at the commit, so the order is free.
        with session.cursor() as cursor:
            quoted = map(session.ops.quote_name, full)
            cursor.execute("; ".join(f"DELETE FROM {table}" for table in quoted))


def _full_tables(connection: BaseDatabaseWrapper) -> list[str]:
    with connection.cursor() as cursor:
        of = tuple(apps.get_models(include_auto_created=True))
        cursor.execute(_question(connection.alias, of))
        return [table for (table,) in cursor.fetchall()]


@cache
def _question(alias: str, of: tuple[type[models.Model], ...]) -> str:
    """Return the statement that names the tables with rows, of these models."""
    connection = connections[alias]
    tables = set(connection.introspection.django_table_names()) - KEPT
    return " UNION ALL ".join(
        f"SELECT '{table}' WHERE EXISTS (SELECT 1 FROM {connection.ops.quote_name(table)})"
        for table in sorted(tables)
    )
