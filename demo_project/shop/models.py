"""What the shop sells, to whom, and the money that it takes for it."""

from __future__ import annotations

from typing import Any

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from distlock_app.optimistic import VersionedModel

from .race_models import Race, RaceItem, RaceOrder  # noqa: F401


def money(cents: int) -> str:
    """Return an amount as people write it."""
    return f"€ {cents // 100:,}.{cents % 100:02}"


class Product(VersionedModel):
    """Something to buy.

    `stock` is written only under `Lock("product:<pk>")`. Everything else is guarded by the
    version: two people who change a price at once both see their change, or a conflict.
    """

    slug = models.SlugField(unique=True)
    name = models.CharField(max_length=80)
    category = models.CharField(max_length=40)
    description = models.CharField(max_length=200)
    price = models.PositiveIntegerField(help_text="Cents.")
    stock = models.IntegerField(default=0)

    class Meta:
        ordering = ["category", "name"]

    def __str__(self) -> str:
        return self.name

    def get_absolute_url(self) -> str:
        return reverse("product", args=[self.pk])

    @property
    def price_text(self) -> str:
        return money(self.price)


class Order(models.Model):
    """So many of one product, at the price of that moment."""

    class Status(models.TextChoices):
        OPEN = "open", _("to be paid")
        PAID = "paid", _("paid")
        SETTLED = "settled", _("settled")

    product = models.ForeignKey(Product, models.PROTECT, related_name="orders")
    quantity = models.PositiveIntegerField(
        validators=[MinValueValidator(1), MaxValueValidator(9)], default=1
    )
    amount = models.PositiveIntegerField(help_text="Cents.")
    buyer = models.CharField(max_length=40, db_index=True)
    form = models.CharField(
        max_length=32,
        db_index=True,
        help_text="Which page the Buy button was on: one page, one order.",
    )
    status = models.CharField(max_length=10, choices=Status, default=Status.OPEN)
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-pk"]

    def __str__(self) -> str:
        return f"Order {self.pk}"

    def get_absolute_url(self) -> str:
        return reverse("order", args=[self.pk])

    @property
    def amount_text(self) -> str:
        return money(self.amount)


class Payment(models.Model):
    """Money that the card company has taken.

    The order is not unique on purpose. A constraint would not keep a double click from taking
    the money twice: it would only refuse to write the second time down.
    """

    order = models.ForeignKey(Order, models.PROTECT, related_name="payments")
    amount = models.PositiveIntegerField(help_text="Cents.")
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-pk"]

    def __str__(self) -> str:
        return f"{money(self.amount)} for {self.order}"


class Settlement(models.Model):
    """Money passed on to the supplier, less the shop's commission. Not unique either."""

    COMMISSION = 12  # per cent

    order = models.ForeignKey(Order, models.PROTECT, related_name="settlements")
    amount = models.PositiveIntegerField(help_text="Cents.")
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-pk"]

    def __str__(self) -> str:
        return f"{money(self.amount)} for {self.order}"

    @classmethod
    def for_order(cls, order: Order) -> Any:
        """Return the unsaved settlement of a paid order."""
        return cls(order=order, amount=order.amount * (100 - cls.COMMISSION) // 100)
