from django.db import migrations, models, router


def keep_any_text(apps, schema_editor):
    """Make the table fit for any text, compared to the last byte, and for transactions.

    On MySQL and MariaDB all of that depends on the defaults of the server and the database.
    """
    lock = apps.get_model("distlock_app", "DistLock")
    alias = schema_editor.connection.alias
    if schema_editor.connection.vendor == "mysql" and router.allow_migrate_model(alias, lock):
        table = schema_editor.quote_name(lock._meta.db_table)
        schema_editor.execute(
            f"ALTER TABLE {table} ENGINE = InnoDB,"
            " CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        )


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="DistLock",
            fields=[
                (
                    "key",
                    models.CharField(
                        editable=False,
                        max_length=64,
                        primary_key=True,
                        serialize=False,
                        verbose_name="key",
                    ),
                ),
                ("name", models.CharField(editable=False, max_length=255, verbose_name="name")),
                (
                    "owner",
                    models.CharField(
                        blank=True,
                        default="",
                        editable=False,
                        max_length=64,
                        verbose_name="owner",
                    ),
                ),
                ("expiry", models.DateTimeField(editable=False, verbose_name="expiry")),
                (
                    "fence",
                    models.BigIntegerField(default=0, editable=False, verbose_name="fence"),
                ),
                (
                    "acquired_at",
                    models.DateTimeField(editable=False, null=True, verbose_name="acquired at"),
                ),
                (
                    "holder",
                    models.TextField(blank=True, default="", editable=False, verbose_name="holder"),
                ),
            ],
            options={
                "verbose_name": "lock table row",
                "verbose_name_plural": "lock table rows",
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="LiveLock",
            fields=[
                ("id", models.TextField(editable=False, primary_key=True, serialize=False)),
                ("name", models.CharField(editable=False, max_length=255, verbose_name="name")),
            ],
            options={
                "verbose_name": "live lock",
                "verbose_name_plural": "live locks",
                "permissions": [("clear_lock", "Can force the release of locks")],
                "managed": False,
                "base_manager_name": "objects",
                "default_permissions": ("view",),
            },
        ),
        # Not atomic: MySQL cannot undo an ALTER TABLE.
        migrations.RunPython(keep_any_text, migrations.RunPython.noop, atomic=False),
    ]
