"""Empty the tables that have rows: between tests, most of them have none."""

from django.core.management.base import BaseCommand
from django.core.management.color import no_style
from django.db import connections

# What `migrate` has written. As it stays, the signal after it need not be sent again.
KEPT = {"django_content_type", "auth_permission"}


class Command(BaseCommand):
    """Takes the place of Django's own, which the end of a transactional test calls."""

    stealth_options = ("interactive", "reset_sequences", "allow_cascade", "inhibit_post_migrate")

    def add_arguments(self, parser):
        parser.add_argument("--database", required=True)

    def handle(self, *, database, **options):
        connection = connections[database]
        tables = set(connection.introspection.django_table_names()) - KEPT
        quoted = [(table, connection.ops.quote_name(table)) for table in sorted(tables)]
        has_rows = " UNION ALL ".join(
            f"SELECT '{table}' WHERE EXISTS (SELECT 1 FROM {name})" for table, name in quoted
        )
        with connection.cursor() as cursor:
            cursor.execute(has_rows)
            full = [table for (table,) in cursor.fetchall()]
        if not full:
            return
        sql = connection.ops.sql_flush(no_style(), full, allow_cascade=True)
        if connection.vendor == "postgresql":
            # A TRUNCATE makes new files: for the few rows of a test it takes ten times as long.
            # Foreign keys are checked at the commit, so the order is free.
            sql = [f"DELETE FROM {connection.ops.quote_name(table)}" for table in full]
        connection.ops.execute_sql_flush(sql)
