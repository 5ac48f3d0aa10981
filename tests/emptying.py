"""Empties the tables that have rows: between tests, most of them have none."""

from __future__ import annotations

from functools import cache

from django.apps import apps
from django.core.management.color import no_style
from django.db import connections, models
from django.test import TransactionTestCase

# What `migrate` has written. As it stays, the signal after it need not be sent again.
KEPT = {"django_content_type", "auth_permission"}


def empty_the_databases(case: TransactionTestCase) -> None:
    """Take the place of Django's end of a transactional test.

    That calls the command `flush`, whose arguments alone take as long to parse as all of this.
    """
    for alias in connections:
        if alias in case.databases:
            _empty(alias)


def _empty(alias: str) -> None:
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(_full_tables(alias, tuple(apps.get_models(include_auto_created=True))))
        full = [table for (table,) in cursor.fetchall()]
    if not full:
        return
    sql = connection.ops.sql_flush(no_style(), full, allow_cascade=True)
    if connection.vendor == "postgresql":
        # A TRUNCATE makes new files: for the few rows of a test it takes ten times as long.
        # Foreign keys are checked at the commit, so the order is free.
        sql = [f"DELETE FROM {connection.ops.quote_name(table)}" for table in full]
    connection.ops.execute_sql_flush(sql)


@cache
def _full_tables(alias: str, of: tuple[type[models.Model], ...]) -> str:
    """Return the statement that names the tables with rows, of these models."""
    connection = connections[alias]
    tables = set(connection.introspection.django_table_names()) - KEPT
    return " UNION ALL ".join(
        f"SELECT '{table}' WHERE EXISTS (SELECT 1 FROM {connection.ops.quote_name(table)})"
        for table in sorted(tables)
    )
