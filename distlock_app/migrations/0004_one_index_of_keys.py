from django.db import migrations, router


def drop_index_of_patterns(apps, schema_editor):
    """Drop what Django makes for LIKE on PostgreSQL: half of all indexes, and used by nothing."""
    lock = apps.get_model("distlock_app", "DistLock")
    connection = schema_editor.connection
    if connection.vendor != "postgresql" or not router.allow_migrate_model(connection.alias, lock):
        return
    table = lock._meta.db_table
    with connection.cursor() as cursor:
        found = connection.introspection.get_constraints(cursor, table)
    for name, index in found.items():
        if index["columns"] == ["key"] and index["index"] and not index["primary_key"]:
            schema_editor.execute(f"DROP INDEX {schema_editor.quote_name(name)}")


class Migration(migrations.Migration):
    dependencies = [
        ("distlock_app", "0003_history"),
    ]

    operations = [
        migrations.RunPython(drop_index_of_patterns, migrations.RunPython.noop),
    ]
