"""The shop's pages; look at `buy` and `pay` first, and at their naive twins."""

from __future__ import annotations

import secrets
from itertools import groupby

from django.contrib import messages
from django.contrib.auth.decorators import permission_required
from django.db.models import F, Sum
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST

from distlock_app import Lock, locked_view

from . import trade
from .models import Order, Product
from .visitors import buyer_of, set_think_time, think_time

QUANTITIES = list("123456789")
FORM_LENGTH = 32


@require_POST
@locked_view("product:{pk}", wait=20)
def buy(request: HttpRequest, pk: int) -> HttpResponse:
    """Sell to one visitor after the other."""
    return _sell(request, pk, lock=f"product:{pk}")


@require_POST
def buy_naive(request: HttpRequest, pk: int) -> HttpResponse:
    """Do exactly the same without the lock: sells more than there is."""
    return _sell(request, pk)


@require_POST
@locked_view("order:{pk}")
def pay(request: HttpRequest, pk: int) -> HttpResponse:
    """Take the money once, however often the button is clicked."""
    return _take_money(request, pk, lock=f"order:{pk}")


@require_POST
def pay_naive(request: HttpRequest, pk: int) -> HttpResponse:
    """Do exactly the same without the lock: a double click pays twice."""
    return _take_money(request, pk)


def _sell(request: HttpRequest, pk: int, *, lock: str = "") -> HttpResponse:
    product = get_object_or_404(Product, pk=pk)
    quantity = request.POST.get("quantity", "1")
    form = request.POST.get("form", "")
    if quantity not in QUANTITIES or len(form) != FORM_LENGTH:
        return HttpResponseBadRequest(_("1 to 9 of them, please, and from the product's page."))
    try:
        order, new = trade.sell(
            pk,
            quantity=int(quantity),
            buyer=buyer_of(request),
            form=form,
            think=think_time(request),
            lock=lock,
        )
    except trade.SoldOut:
        messages.error(request, _("“%(product)s” is sold out.") % {"product": product})
        return redirect(product)
    if lock and not new:
        text = _("The second click was ignored (lock %(lock)s): this is your one order.")
        messages.info(request, text % {"lock": lock})
    return redirect(order)


def _take_money(request: HttpRequest, pk: int, *, lock: str = "") -> HttpResponse:
    order = get_object_or_404(Order, pk=pk, buyer=buyer_of(request))
    if trade.take_money(pk, think=think_time(request), lock=lock):
        messages.success(request, _("Thank you: %(amount)s paid.") % {"amount": order.amount_text})
    else:
        messages.info(request, _("This order is already paid: nothing was charged again."))
    return redirect(order)


@require_POST
@permission_required("shop.change_product")
def restock(request: HttpRequest, pk: int) -> HttpResponse:
    """Put ten more on the shelf, under the lock that buyers take, held until the commit."""
    with Lock(f"product:{pk}", wait=20, atomic=True):
        Product.objects.filter(pk=pk).update(stock=F("stock") + 10)
    return redirect("product", pk)


@require_POST
@permission_required("shop.change_product")
def discount(request: HttpRequest, pk: int) -> HttpResponse:
    """Take 10 % off: of the price as it is when it is saved, whoever changes it meanwhile."""

    def cut(product: Product) -> None:
        product.price = product.price * 9 // 10

    product = Product.objects.retrying(pk, cut)
    text = _("Now %(price)s (version %(version)d).")
    messages.success(request, text % {"price": product.price_text, "version": product.version})
    return redirect(product)


def products(request: HttpRequest) -> HttpResponse:
    """Show everything that the shop has, by category."""
    buyer_of(request)
    shelves = [
        (category, list(group))
        for category, group in groupby(Product.objects.all(), key=lambda p: p.category)
    ]
    return render(request, "shop/products.html", {"shelves": shelves})


def product(request: HttpRequest, pk: int) -> HttpResponse:
    """Show one product, with a Buy button that makes one order."""
    buyer_of(request)
    product = get_object_or_404(Product, pk=pk)
    sold = product.orders.aggregate(sum=Sum("quantity"))["sum"] or 0
    context = {"product": product, "sold": sold, "form": secrets.token_hex(FORM_LENGTH // 2)}
    return render(request, "shop/product.html", context)


def orders(request: HttpRequest) -> HttpResponse:
    """Show what this visitor ordered."""
    mine = Order.objects.filter(buyer=buyer_of(request)).select_related("product")
    return render(request, "shop/orders.html", {"orders": mine})


def order(request: HttpRequest, pk: int) -> HttpResponse:
    """Show one order of this visitor, with its payments and a Pay button."""
    order = get_object_or_404(
        Order.objects.select_related("product"), pk=pk, buyer=buyer_of(request)
    )
    same_form = Order.objects.filter(form=order.form, buyer=order.buyer).order_by("pk")
    context = {
        "order": order,
        "payments": list(order.payments.all()),
        "same_form": [str(pk) for pk in same_form.values_list("pk", flat=True)],
    }
    return render(request, "shop/order.html", context)


@require_POST
def pace(request: HttpRequest) -> HttpResponse:
    """Let warehouse and card company take their time, so that locks can be seen in the admin."""
    set_think_time(request, request.POST.get("seconds", ""))
    return redirect("products")
