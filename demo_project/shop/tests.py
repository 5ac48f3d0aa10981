"""The shop, clicked on by many at once: manage.py test demo_project."""

from __future__ import annotations

import threading
from collections.abc import Callable
from io import StringIO
from typing import Any

from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connections
from django.test import Client, TestCase, TransactionTestCase

from distlock_app import Lock, NotHeld
from distlock_app.signals import lock_acquired

from . import trade
from .models import Order, Payment, Product

DEADLINE = 60.0


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Call every function in a thread of its own, at the same moment; return the results."""
    start = threading.Barrier(len(functions))
    results: list[Any] = [None] * len(functions)

    def run(number: int) -> None:
        try:
            start.wait(DEADLINE)
            results[number] = functions[number]()
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    return results


def visitor(think: float = 0.0) -> Client:
    """Return somebody who has looked at the shop."""
    client = Client()
    client.get("/")
    client.post("/pace/", {"seconds": think})
    return client


def form_on(client: Client, product: Product) -> dict[str, Any]:
    """Return what the Buy button of a freshly loaded page sends."""
    return {"form": client.get(product.get_absolute_url()).context["form"]}


def ordered(client: Client, product: Product) -> Order:
    """Return a new order of this visitor."""
    answer = client.post(f"/products/{product.pk}/buy/", form_on(client, product))
    return Order.objects.get(pk=answer.url.strip("/").split("/")[-1])


class Crowds(TransactionTestCase):
    databases = "__all__"

    def setUp(self) -> None:
        self.product = Product.objects.create(
            slug="ticket", name="Ticket", category="Test", description="-", price=1000, stock=3
        )

    def buy(self, client: Client, form: dict[str, Any], how: str = "buy") -> Callable[[], Any]:
        return lambda: client.post(f"/products/{self.product.pk}/{how}/", form)

    def stock(self) -> int:
        return Product.objects.get(pk=self.product.pk).stock

    def test_a_crowd_gets_what_there_is_and_no_more(self) -> None:
        crowd = [visitor(think=0.02) for _ in range(8)]

        at_once(*(self.buy(client, form_on(client, self.product)) for client in crowd))

        self.assertEqual((Order.objects.count(), self.stock()), (3, 0))

    def test_without_the_lock_more_is_sold_than_there_is(self) -> None:
        crowd = [visitor(think=1) for _ in range(8)]

        at_once(*(self.buy(client, form_on(client, self.product), "buy-naive") for client in crowd))

        self.assertGreater(Order.objects.count(), 3)

    def test_a_double_click_on_buy_is_one_order(self) -> None:
        client = visitor(think=0.05)
        form = form_on(client, self.product)

        answers = at_once(self.buy(client, form), self.buy(client, form))

        self.assertEqual((Order.objects.count(), self.stock()), (1, 2))
        self.assertEqual(answers[0].url, answers[1].url)
        told = f"The second click was ignored (lock product:{self.product.pk})"
        self.assertContains(client.get(answers[0].url), told)

    def test_without_the_lock_it_is_two_orders_and_the_page_says_so(self) -> None:
        client = visitor(think=1)
        form = form_on(client, self.product)

        answers = at_once(*[self.buy(client, form, "buy-naive")] * 2)

        numbers = ", ".join(str(pk) for pk in sorted(Order.objects.values_list("pk", flat=True)))
        self.assertContains(client.get(answers[0].url), f"now have 2 orders ({numbers})")

    def test_many_clicks_on_pay_take_the_money_once(self) -> None:
        client = visitor(think=0.05)
        order = ordered(client, self.product)

        answers = at_once(*[lambda: client.post(f"/orders/{order.pk}/pay/")] * 6)

        self.assertEqual(Payment.objects.filter(order=order).count(), 1)
        self.assertLessEqual({answer.status_code for answer in answers}, {302, 423})

    def test_without_the_lock_they_take_it_again(self) -> None:
        client = visitor()
        order = ordered(client, self.product)
        client.post("/pace/", {"seconds": 1})

        at_once(*[lambda: client.post(f"/orders/{order.pk}/pay-naive/")] * 4)

        self.assertGreater(Payment.objects.filter(order=order).count(), 1)

    def test_a_click_while_another_is_worked_on_is_told_so(self) -> None:
        client = visitor()
        order = ordered(client, self.product)
        client.post("/pace/", {"seconds": 1})

        page = f"http://testserver/orders/{order.pk}/"
        headers = {"accept": "text/html", "referer": page}

        answers = at_once(*[lambda: client.post(f"{page}pay/", headers=headers)] * 2)

        (busy,) = [answer for answer in answers if answer.status_code == 423]
        self.assertContains(busy, "This click did nothing", status_code=423)
        self.assertContains(busy, f"3; url={page}", status_code=423)

    def test_who_loses_the_lock_meanwhile_is_told_so(self) -> None:
        client = visitor()
        form = form_on(client, self.product)
        lock = Lock(f"product:{self.product.pk}")

        def take_it_away(**_: Any) -> None:
            lock.clear(reason="test")

        lock_acquired.connect(take_it_away)
        self.addCleanup(lock_acquired.disconnect, take_it_away)
        with self.assertLogs("distlock_app", "WARNING"):
            answer = self.buy(client, form)()

        self.assertContains(answer, "Somebody took the lock away", status_code=503)

    def test_discounts_given_at_once_all_count(self) -> None:
        User.objects.create_superuser("boss", password="-")
        clients = [Client() for _ in range(4)]
        for client in clients:
            client.force_login(User.objects.get())

        at_once(
            *(lambda c=c: c.post(f"/products/{self.product.pk}/discount/") for c in clients)  # type: ignore[misc]
        )

        self.assertEqual(Product.objects.get().price, 656)  # 0.9 ** 4

    def test_nothing_is_lost_between_buyers_and_restocking(self) -> None:
        boss = Client()
        boss.force_login(User.objects.create_superuser("boss", password="-"))
        crowd = [visitor(think=0.05) for _ in range(3)]

        at_once(
            *(self.buy(client, form_on(client, self.product)) for client in crowd),
            lambda: boss.post(f"/products/{self.product.pk}/restock/"),
        )

        self.assertEqual((Order.objects.count(), self.stock()), (3, 10))


class Pages(TestCase):
    databases = "__all__"

    @classmethod
    def setUpTestData(cls) -> None:
        call_command("seed", stdout=StringIO())

    def setUp(self) -> None:
        self.client = visitor()
        self.product = Product.objects.get(slug="globe")

    def test_the_products_are_shown_with_price_and_stock(self) -> None:
        self.assertContains(self.client.get("/"), "€ 139.00")
        self.assertContains(self.client.get(self.product.get_absolute_url()), "5 left")

    def test_the_shop_speaks_korean_of_what_it_sells(self) -> None:
        self.client.cookies["django_language"] = "ko"

        self.assertContains(self.client.get("/"), "<strong>입체 지구본 30cm</strong>", html=True)
        self.assertContains(self.client.get("/"), "<h2>서재</h2>", html=True)

    def test_what_was_bought_is_among_my_orders(self) -> None:
        order = ordered(self.client, self.product)

        self.assertContains(self.client.get("/orders/"), order.get_absolute_url())
        self.assertContains(self.client.get(order.get_absolute_url()), "Pay € 139.00")

    def test_nobody_sees_or_pays_the_order_of_somebody_else(self) -> None:
        order = ordered(self.client, self.product)
        other = visitor()

        self.assertEqual(other.get(order.get_absolute_url()).status_code, 404)
        self.assertEqual(other.post(f"/orders/{order.pk}/pay/").status_code, 404)
        self.assertFalse(order.payments.exists())

    def test_what_is_sold_out_is_not_sold(self) -> None:
        form = form_on(self.client, self.product) | {"quantity": 6}

        answer = self.client.post(f"/products/{self.product.pk}/buy/", form, follow=True)

        self.assertContains(answer, "is sold out")
        self.assertFalse(Order.objects.filter(product=self.product).exists())

    def test_only_a_form_of_ours_buys(self) -> None:
        address = f"/products/{self.product.pk}/buy/"
        form = form_on(self.client, self.product)

        self.assertEqual(self.client.get(address).status_code, 405)
        self.assertEqual(self.client.post(address).status_code, 400)
        for quantity in ("0", "-1", "10", "x", ""):
            answer = self.client.post(address, form | {"quantity": quantity})
            self.assertEqual(answer.status_code, 400, quantity)
        self.assertEqual(self.client.post("/products/0/buy/", form).status_code, 404)
        strict = Client(enforce_csrf_checks=True)
        self.assertEqual(strict.post(address, form).status_code, 403)

    def test_odd_paces_mean_at_once(self) -> None:
        for seconds in ("nan", "inf", "-1", "1e9", "x", ""):
            self.client.post("/pace/", {"seconds": seconds})
            self.assertEqual(self.client.session["think"], 0.0, seconds)

    def test_staff_buttons_are_for_staff(self) -> None:
        for action in ("restock", "discount"):
            answer = self.client.post(f"/products/{self.product.pk}/{action}/")
            self.assertIn("/admin/login/", answer.url)

    def test_seeding_again_adds_nothing(self) -> None:
        before = Product.objects.count(), User.objects.count(), Order.objects.count()
        Product.objects.filter(pk=self.product.pk).update(stock=1)

        call_command("seed", stdout=StringIO())

        after = Product.objects.count(), User.objects.count(), Order.objects.count()
        self.assertEqual(after, before)
        self.assertEqual(Product.objects.get(pk=self.product.pk).stock, 1)

    def test_the_clerk_may_look_at_locks_and_not_release_them(self) -> None:
        clerk = User.objects.get(username="clerk")

        self.assertTrue(clerk.has_perm("distlock_app.view_livelock"))
        self.assertFalse(clerk.has_perm("distlock_app.clear_lock"))

    def test_nothing_is_settled_without_the_lock(self) -> None:
        order = Order.objects.filter(status=Order.Status.PAID)[0]

        with self.assertRaises(NotHeld):
            trade.settle(order, lock="settlement")

        self.assertFalse(order.settlements.exists())

    def test_the_admin_shows_the_books(self) -> None:
        self.client.force_login(User.objects.get(username="admin"))

        for model in ("product", "order", "payment", "settlement"):
            self.assertEqual(self.client.get(f"/admin/shop/{model}/").status_code, 200, model)

    def test_the_admin_has_korean_names_for_the_books(self) -> None:
        self.client.force_login(User.objects.get(username="admin"))
        self.client.cookies["django_language"] = "ko"

        page = self.client.get("/admin/shop/order/")

        for name in ("쇼핑몰", "주문", "수량", "금액", "구매자", "생성 시각", "무쇠 프라이팬 28cm"):
            self.assertContains(page, name)
        for english in ("Product", "Quantity", "Amount", "Buyer", "Created", ">Order "):
            self.assertNotContains(page, english)
