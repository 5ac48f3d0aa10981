"""The shop in the admin; the locks have their own list there."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from distlock_app.versioned_admin import VersionedAdmin

from .models import Order, Payment, Product, Settlement


@admin.register(Product)
class ProductAdmin(VersionedAdmin):
    """Two people who edit one product are told of each other; a purchase is in nobody's way."""

    list_display = ["__str__", "category", "price_text", "stock", "version"]
    list_filter = ["category"]
    search_fields = ["name"]
    readonly_fields = ["stock"]  # only under the lock of the product


class Kept(admin.ModelAdmin):
    """Books: to be read, not to be written in."""

    date_hierarchy = "created"

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission


@admin.register(Order)
class OrderAdmin(Kept):
    list_display = ["__str__", "product", "quantity", "amount_text", "buyer", "status", "created"]
    list_filter = ["status"]
    list_select_related = ["product"]


@admin.register(Payment, Settlement)
class MoneyAdmin(Kept):
    list_display = ["__str__", "created"]
    list_select_related = ["order"]
