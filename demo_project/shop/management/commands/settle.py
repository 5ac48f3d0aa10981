"""manage.py settle: pass the money of paid orders on to the suppliers."""

from __future__ import annotations

import time
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from demo_project.shop.models import Order, money
from demo_project.shop.trade import settle
from distlock_app import locked_command


@locked_command("settlement")
class Command(BaseCommand):
    help = "Settle every paid order once. Start it on as many hosts as you like: one does it."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--pause", type=float, default=0.0, metavar="SECONDS", help="Rest after each order."
        )

    def handle(self, *args: Any, pause: float, **options: Any) -> None:
        total = count = 0
        for order in Order.objects.filter(status=Order.Status.PAID).order_by("pk"):
            total += settle(order, lock="settlement").amount
            count += 1
            time.sleep(pause)
        self.stdout.write(f"Settled {count} orders: {money(total)}.")
