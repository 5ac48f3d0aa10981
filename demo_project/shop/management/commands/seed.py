"""manage.py seed: fill the shop with what it sells and who works there."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import Permission, User
from django.core.management.base import BaseCommand, CommandParser
from django.db import transaction

from demo_project.shop.models import Order, Payment, Product
from demo_project.shop.products import ITEMS

PASSWORD = "locked-shop"
YESTERDAY = ["espresso-machine", "desk-lamp", "field-notebook", "wool-blanket", "cast-iron-pan"]


class Command(BaseCommand):
    help = "Load the products, the users admin and clerk, and some orders; again: only what lacks."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--password", default=PASSWORD, help="Of new users: %(default)s")

    @transaction.atomic
    def handle(self, *args: Any, password: str, **options: Any) -> None:
        for item in ITEMS:
            Product.objects.get_or_create(slug=item.slug, defaults=item._asdict())
        self.add_users(password)
        if not Order.objects.exists():
            self.add_orders()
        self.stdout.write(f"{Product.objects.count()} products, users admin and clerk.")

    def add_users(self, password: str) -> None:
        """Add one who may do everything, and one who may look at locks but not release them."""
        if not User.objects.filter(username="admin").exists():
            User.objects.create_superuser("admin", password=password)
        if not User.objects.filter(username="clerk").exists():
            clerk = User.objects.create_user("clerk", password=password, is_staff=True)
            clerk.user_permissions.set(
                Permission.objects.filter(
                    content_type__app_label__in=["distlock_app", "shop"],
                    codename__startswith="view_",
                )
            )

    def add_orders(self) -> None:
        """Add paid orders, so that `settle` has something to do."""
        for number, slug in enumerate(YESTERDAY):
            product = Product.objects.get(slug=slug)
            order = Order.objects.create(
                product=product,
                quantity=1,
                amount=product.price,
                buyer=f"seed-{number}",
                form=f"seed-{number}",
                status=Order.Status.PAID,
            )
            Payment.objects.create(order=order, amount=order.amount)
