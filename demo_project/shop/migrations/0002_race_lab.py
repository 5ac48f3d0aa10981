"""The tables of the race lab."""

import django.db.models.deletion
from django.db import migrations, models

import distlock_app.optimistic


class Migration(migrations.Migration):
    dependencies = [
        ("shop", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="Race",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("created", models.DateTimeField(auto_now_add=True)),
                ("started_by", models.CharField(max_length=150)),
                ("terms", models.JSONField()),
                ("strategies", models.JSONField(default=list)),
                ("results", models.JSONField(default=list)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("running", "running"),
                            ("stopping", "being stopped"),
                            ("done", "finished"),
                            ("cancelled", "cancelled"),
                            ("failed", "failed"),
                        ],
                        default="running",
                        max_length=10,
                    ),
                ),
                ("trouble", models.TextField(blank=True)),
            ],
            options={
                "ordering": ["-pk"],
                "verbose_name": "race",
                "verbose_name_plural": "races",
            },
        ),
        migrations.CreateModel(
            name="RaceItem",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("version", distlock_app.optimistic.VersionField()),
                ("strategy", models.CharField(max_length=50)),
                ("name", models.CharField(max_length=20)),
                ("initial", models.IntegerField()),
                ("stock", models.IntegerField()),
                (
                    "race",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="items",
                        to="shop.race",
                    ),
                ),
            ],
            options={
                "abstract": False,
            },
        ),
        migrations.CreateModel(
            name="RaceOrder",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("buyer", models.PositiveSmallIntegerField()),
                (
                    "item",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="orders",
                        to="shop.raceitem",
                    ),
                ),
            ],
        ),
    ]
