"""What the shop sells, to whom, and the money that it takes for it."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.urls import reverse
from django.utils import translation
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from distlock_app.optimistic import VersionedModel, VersionField

from .race_models import Race, RaceItem, RaceOrder  # noqa: F401


def money(cents: int) -> str:
    """Return an amount as people write it."""
    return f"€ {cents // 100:,}.{cents % 100:02}"


class Product(VersionedModel):
    """Something to buy.

    `stock` is written only under `Lock("product:<pk>")`. Everything else is guarded by the
    version: two people who change a price at once both see their change, or a conflict.
    """

    class Category(models.TextChoices):
        KITCHEN = "Kitchen", _("Kitchen")
        STUDY = "Study", _("Study")
        HOME = "Home", _("Home")
        GARDEN = "Garden", _("Garden")
        TICKETS = "Tickets", _("Tickets")
        RACE = "Race", _("Race")

    slug = models.SlugField(_("slug"), unique=True)
    name = models.CharField(_("name"), max_length=80)
    category = models.CharField(_("category"), max_length=40, choices=Category)
    description = models.CharField(_("description"), max_length=200)
    price = models.PositiveIntegerField(_("price"), help_text=_("Cents."))
    stock = models.IntegerField(_("stock"), default=0)
    version = VersionField(_("version"))

    class Meta:
        ordering = ["category", "name"]
        verbose_name = _("product")
        verbose_name_plural = _("products")

    def __str__(self) -> str:
        return translation.gettext(self.name)  # of what `seed` brings; other names stay

    def get_absolute_url(self) -> str:
        return reverse("product", args=[self.pk])

    @property
    @admin.display(description=_("price"), ordering="price")
    def price_text(self) -> str:
        return money(self.price)


class Order(models.Model):
    """So many of one product, at the price of that moment."""

    class Status(models.TextChoices):
        OPEN = "open", _("to be paid")
        PAID = "paid", _("paid")
        SETTLED = "settled", _("settled")

    product = models.ForeignKey(
        Product, models.PROTECT, verbose_name=_("product"), related_name="orders"
    )
    quantity = models.PositiveIntegerField(
        _("quantity"), validators=[MinValueValidator(1), MaxValueValidator(9)], default=1
    )
    amount = models.PositiveIntegerField(_("amount"), help_text=_("Cents."))
    buyer = models.CharField(_("buyer"), max_length=40, db_index=True)
    form = models.CharField(
        _("form"),
        max_length=32,
        db_index=True,
        help_text=_("Which page the Buy button was on: one page, one order."),
    )
    status = models.CharField(_("status"), max_length=10, choices=Status, default=Status.OPEN)
    created = models.DateTimeField(_("created"), auto_now_add=True)

    class Meta:
        ordering = ["-pk"]
        verbose_name = _("order")
        verbose_name_plural = _("orders")

    def __str__(self) -> str:
        return gettext("Order %(number)s") % {"number": self.pk}

    def get_absolute_url(self) -> str:
        return reverse("order", args=[self.pk])

    @property
    @admin.display(description=_("amount"), ordering="amount")
    def amount_text(self) -> str:
        return money(self.amount)


class Payment(models.Model):
    """Money that the card company has taken.

    The order is not unique on purpose. A constraint would not keep a double click from taking
    the money twice: it would only refuse to write the second time down.
    """

    order = models.ForeignKey(
        Order, models.PROTECT, verbose_name=_("order"), related_name="payments"
    )
    amount = models.PositiveIntegerField(_("amount"), help_text=_("Cents."))
    created = models.DateTimeField(_("created"), auto_now_add=True)

    class Meta:
        ordering = ["-pk"]
        verbose_name = _("payment")
        verbose_name_plural = _("payments")

    def __str__(self) -> str:
        return gettext("%(amount)s for %(order)s") % {
            "amount": money(self.amount),
            "order": self.order,
        }


class Settlement(models.Model):
    """Money passed on to the supplier, less the shop's commission. Not unique either."""

    COMMISSION = 12  # per cent

    order = models.ForeignKey(
        Order, models.PROTECT, verbose_name=_("order"), related_name="settlements"
    )
    amount = models.PositiveIntegerField(_("amount"), help_text=_("Cents."))
    created = models.DateTimeField(_("created"), auto_now_add=True)

    class Meta:
        ordering = ["-pk"]
        verbose_name = _("settlement")
        verbose_name_plural = _("settlements")

    def __str__(self) -> str:
        return gettext("%(amount)s for %(order)s") % {
            "amount": money(self.amount),
            "order": self.order,
        }

    @classmethod
    def for_order(cls, order: Order) -> Any:
        """Return the unsaved settlement of a paid order."""
        return cls(order=order, amount=order.amount * (100 - cls.COMMISSION) // 100)
