"""Selling, taking money and passing it on: each of these must not happen twice at once.

The views and the command take the lock and name it here, so that nothing is committed after it
was lost. Without a name nobody looks: the pages "without a lock" show what becomes of that.
"""

from __future__ import annotations

import time

from django.db import transaction

from distlock_app import assert_locked

from .models import Order, Payment, Product, Settlement


class SoldOut(Exception):
    """There are fewer left than somebody wants to buy."""


def sell(
    pk: int, *, quantity: int, buyer: str, form: str, think: float, lock: str = ""
) -> tuple[Order, bool]:
    """Sell so many of a product; return the order, and whether it is new.

    The second click on the same page gets the order of the first.

    `think`: seconds that the warehouse takes.
    """
    if order := Order.objects.filter(form=form, buyer=buyer).first():
        return order, False
    product = Product.objects.get(pk=pk)
    if product.stock < quantity:
        raise SoldOut
    time.sleep(think)
    with transaction.atomic():
        Product.objects.filter(pk=pk).update(stock=product.stock - quantity)
        order = Order.objects.create(
            product=product,
            quantity=quantity,
            amount=quantity * product.price,
            buyer=buyer,
            form=form,
        )
        if lock:
            assert_locked(lock)
        return order, True


def take_money(pk: int, *, think: float, lock: str = "") -> bool:
    """Charge for an order; False: it is paid already.

    `think`: seconds that the card company takes.
    """
    order = Order.objects.get(pk=pk)
    if order.status != Order.Status.OPEN:
        return False
    time.sleep(think)
    with transaction.atomic():
        Order.objects.filter(pk=pk).update(status=Order.Status.PAID)
        Payment.objects.create(order=order, amount=order.amount)
        if lock:
            assert_locked(lock)
    return True


def settle(order: Order, *, lock: str) -> Settlement:
    """Pass the money of a paid order on; without the lock, raise NotHeld or LockLost instead."""
    with transaction.atomic():
        Order.objects.filter(pk=order.pk).update(status=Order.Status.SETTLED)
        settlement = Settlement.for_order(order)
        settlement.save()
        assert_locked(lock)
    return settlement
