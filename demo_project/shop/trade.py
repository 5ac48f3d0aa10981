"""Selling, taking money and passing it on: each of these must not happen twice at once.

The views and the command take the lock. `sell` and `take_money` do not look whether somebody
did: the pages "without a lock" show what becomes of that. `settle` refuses.
"""

from __future__ import annotations

import time

from django.db import transaction

from distlock_app import assert_locked

from .models import Order, Payment, Product, Settlement


class SoldOut(Exception):
    """There are fewer left than somebody wants to buy."""


def sell(pk: int, *, quantity: int, buyer: str, form: str, think: float) -> Order:
    """Sell so many of a product; the second click on the same page gets the same order.

    To be called under the lock `product:<pk>`. `think`: seconds that the warehouse takes.
    """
    if order := Order.objects.filter(form=form, buyer=buyer).first():
        return order
    product = Product.objects.get(pk=pk)
    if product.stock < quantity:
        raise SoldOut
    time.sleep(think)
    with transaction.atomic():
        Product.objects.filter(pk=pk).update(stock=product.stock - quantity)
        return Order.objects.create(
            product=product,
            quantity=quantity,
            amount=quantity * product.price,
            buyer=buyer,
            form=form,
        )


def take_money(pk: int, *, think: float) -> bool:
    """Charge for an order; False: it is paid already.

    To be called under the lock `order:<pk>`. `think`: seconds that the card company takes.
    """
    order = Order.objects.get(pk=pk)
    if order.status != Order.Status.OPEN:
        return False
    time.sleep(think)
    with transaction.atomic():
        Payment.objects.create(order=order, amount=order.amount)
        Order.objects.filter(pk=pk).update(status=Order.Status.PAID)
    return True


def settle(order: Order) -> Settlement:
    """Pass the money of a paid order on.

    Raise NotHeld unless called under the lock `settlement`, LockLost if it has ended meanwhile.
    """
    with transaction.atomic():
        settlement = Settlement.for_order(order)
        settlement.save()
        Order.objects.filter(pk=order.pk).update(status=Order.Status.SETTLED)
        assert_locked("settlement")  # before the commit: nobody settles what another host does
    return settlement
