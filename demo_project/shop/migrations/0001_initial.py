"""The tables of the shop."""

import django.core.validators
import django.db.models.deletion
from django.db import migrations, models

import distlock_app.optimistic


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "quantity",
                    models.PositiveIntegerField(
                        default=1,
                        validators=[
                            django.core.validators.MinValueValidator(1),
                            django.core.validators.MaxValueValidator(9),
                        ],
                        verbose_name="quantity",
                    ),
                ),
                ("amount", models.PositiveIntegerField(help_text="Cents.", verbose_name="amount")),
                ("buyer", models.CharField(db_index=True, max_length=40, verbose_name="buyer")),
                (
                    "form",
                    models.CharField(
                        db_index=True,
                        help_text="Which page the Buy button was on: one page, one order.",
                        max_length=32,
                        verbose_name="form",
                    ),
                ),
                (
                    "status",
                    models.CharField(
                        choices=[("open", "to be paid"), ("paid", "paid"), ("settled", "settled")],
                        default="open",
                        max_length=10,
                        verbose_name="status",
                    ),
                ),
                ("created", models.DateTimeField(auto_now_add=True, verbose_name="created")),
            ],
            options={
                "ordering": ["-pk"],
                "verbose_name": "order",
                "verbose_name_plural": "orders",
            },
        ),
        migrations.CreateModel(
            name="Product",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("version", distlock_app.optimistic.VersionField(verbose_name="version")),
                ("slug", models.SlugField(unique=True, verbose_name="slug")),
                ("name", models.CharField(max_length=80, verbose_name="name")),
                (
                    "category",
                    models.CharField(
                        choices=[
                            ("Kitchen", "Kitchen"),
                            ("Study", "Study"),
                            ("Home", "Home"),
                            ("Garden", "Garden"),
                            ("Tickets", "Tickets"),
                            ("Race", "Race"),
                        ],
                        max_length=40,
                        verbose_name="category",
                    ),
                ),
                ("description", models.CharField(max_length=200, verbose_name="description")),
                ("price", models.PositiveIntegerField(help_text="Cents.", verbose_name="price")),
                ("stock", models.IntegerField(default=0, verbose_name="stock")),
            ],
            options={
                "ordering": ["category", "name"],
                "verbose_name": "product",
                "verbose_name_plural": "products",
            },
        ),
        migrations.CreateModel(
            name="Payment",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("amount", models.PositiveIntegerField(help_text="Cents.", verbose_name="amount")),
                ("created", models.DateTimeField(auto_now_add=True, verbose_name="created")),
                (
                    "order",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="payments",
                        to="shop.order",
                        verbose_name="order",
                    ),
                ),
            ],
            options={
                "ordering": ["-pk"],
                "verbose_name": "payment",
                "verbose_name_plural": "payments",
            },
        ),
        migrations.AddField(
            model_name="order",
            name="product",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT,
                related_name="orders",
                to="shop.product",
                verbose_name="product",
            ),
        ),
        migrations.CreateModel(
            name="Settlement",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("amount", models.PositiveIntegerField(help_text="Cents.", verbose_name="amount")),
                ("created", models.DateTimeField(auto_now_add=True, verbose_name="created")),
                (
                    "order",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="settlements",
                        to="shop.order",
                        verbose_name="order",
                    ),
                ),
            ],
            options={
                "ordering": ["-pk"],
                "verbose_name": "settlement",
                "verbose_name_plural": "settlements",
            },
        ),
    ]
