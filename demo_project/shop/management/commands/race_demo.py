"""manage.py race_demo: double-click on everything at once, and count what the shop did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from demo_project.shop.models import Payment, Product, Settlement
from demo_project.shop.racing import Visitor, all_at_once, more_than_once, visitors
from distlock_app import Lock, locked_command

STOCK = 10
LABELS = {
    "clicks": "clicks on Buy",
    "orders": "tickets sold",
    "refused": "sold out, or the same order again",
    "ordered_twice": "people who got two orders",
    "left": "tickets left, by the shop's books",
    "pay_clicks": "clicks on Pay",
    "payments": "payments taken",
    "paid_twice": "orders that were paid twice",
}


@dataclass
class Round:
    """What came of one race."""

    clicks: int
    orders: int
    ordered_twice: int
    left: int
    pay_clicks: int
    payments: int
    paid_twice: int

    @property
    def refused(self) -> int:
        return self.clicks - self.orders

    @property
    def right(self) -> bool:
        return (
            self.orders == STOCK
            and self.payments == STOCK
            and not (self.left or self.ordered_twice or self.paid_twice)
        )


@locked_command("race")  # a second race would buy the first one's tickets
class Command(BaseCommand):
    help = "Let many visitors double-click at the same moment on the shop at URL."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("site", metavar="URL", help="for example http://127.0.0.1:8000")
        parser.add_argument("--buyers", type=int, default=STOCK + 2)
        parser.add_argument(
            "--think", type=float, default=0.05, help="Seconds in warehouse and card company."
        )

    def handle(self, *args: Any, site: str, buyers: int, think: float, **options: Any) -> None:
        if buyers < STOCK:
            raise CommandError(f"--buyers: at least {STOCK}, as many as there are tickets")
        try:
            people = visitors(site, buyers, think=think)
            without = self.race(people, "race-naive", "-naive")
            locked = self.race(people, "race-locked", "")
        except OSError as error:
            raise CommandError(f"{site}: {error}") from error
        self.show(buyers, without, locked)
        if not locked.right:
            raise CommandError("The locks did not hold.")

    def race(self, people: list[Visitor], slug: str, suffix: str) -> Round:
        """Sell ten tickets to more people, all of whom double-click, and let them pay."""
        product = Product.objects.get(slug=slug)
        for model in (Payment, Settlement):
            model.objects.filter(order__product=product).delete()
        product.orders.all().delete()
        with Lock(f"product:{product.pk}"):
            Product.objects.filter(pk=product.pk).update(stock=STOCK)

        page = product.get_absolute_url()
        for visitor in people:
            visitor.look(page)
        buys = [(visitor, f"{page}buy{suffix}/") for visitor in people for _ in "12"]
        answers = all_at_once(buys)

        buyers = {
            path: visitor
            for (visitor, _), path in zip(buys, answers, strict=True)
            if path.startswith("/orders/")
        }
        pays = [(visitor, f"{path}pay{suffix}/") for path, visitor in buyers.items() for _ in "12"]
        all_at_once(pays)

        orders = list(product.orders.all())
        payments = Payment.objects.filter(order__product=product)
        return Round(
            clicks=len(buys),
            orders=len(orders),
            ordered_twice=more_than_once([order.form for order in orders]),
            left=Product.objects.get(pk=product.pk).stock,
            pay_clicks=len(pays),
            payments=payments.count(),
            paid_twice=more_than_once(list(payments.values_list("order", flat=True))),
        )

    def show(self, buyers: int, without: Round, locked: Round) -> None:
        """Print both rounds side by side."""
        self.stdout.write(
            f"\n{STOCK} golden tickets, {buyers} people; each double-clicks Buy, then Pay.\n\n"
        )
        right = {
            "orders": STOCK,
            "refused": 2 * buyers - STOCK,
            "ordered_twice": 0,
            "left": 0,
            "payments": STOCK,
            "paid_twice": 0,
        }
        rows: list[tuple[Any, ...]] = [("", "without a lock", "with the lock", "right")]
        for field, label in LABELS.items():
            values = getattr(without, field), getattr(locked, field)
            rows.append((label, *values, right.get(field, "")))
        verdicts = ["right" if result.right else "WRONG" for result in (without, locked)]
        rows.append(("", *verdicts, ""))
        for label, *values in rows:
            first, second, third = map(str, values)
            self.stdout.write(f"  {label:<36}{first:>16}{second:>16}{third:>8}".rstrip())
