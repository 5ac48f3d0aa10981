"""What came of a strategy: counted from the books, and timed by the buyers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Count, F, Sum

from .race_buyers import Report
from .race_models import Race, RaceItem, RaceOrder
from .race_terms import Terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One strategy of a race; times are seconds."""

    strategy: str
    title: str
    promises: bool = True  # that nothing is sold twice
    skipped: str = ""  # why it was not run
    note: str = ""  # the first trouble that a buyer had
    tried: int = 0
    # From the tables.
    stock: int = 0
    sold: int = 0
    oversold: int = 0  # more than there were, product by product
    left: int = 0  # as the column says
    lost: int = 0  # sales that the column does not know of
    per_buyer: list[int] = field(default_factory=list)
    # From the buyers.
    conflicts: int = 0
    retries: int = 0
    gave_up: int = 0
    seconds: float = 0.0
    wait_p50: float | None = None
    wait_p99: float | None = None

    @property
    def right(self) -> bool:
        """Whether nothing was sold that was not there, and every sale is in the stock."""
        return not (self.oversold or self.lost)

    @property
    def broke_promise(self) -> bool:
        return self.promises and not self.right

    @property
    def throughput(self) -> float:
        """Units sold in a second."""
        return self.sold / self.seconds if self.seconds else 0.0

    @property
    def p50_ms(self) -> float | None:
        return None if self.wait_p50 is None else self.wait_p50 * 1000

    @property
    def p99_ms(self) -> float | None:
        return None if self.wait_p99 is None else self.wait_p99 * 1000

    @property
    def fairness(self) -> float | None:
        """What the luckiest buyer got, divided by what the unluckiest got; None: they got none."""
        least = min(self.per_buyer, default=0)
        return max(self.per_buyer) / least if least else None


def stock_up(race: Race, strategy: str, terms: Terms) -> dict[str, int]:
    """Put the goods on the shelf; return the key of each row by its name."""
    hot = round(terms.stock * terms.hot)
    shares = split("hot", hot, terms.buckets)
    if terms.hot < 1:
        shares |= split("cold", terms.stock - hot, 8)
    return {
        name: RaceItem.objects.create(
            race=race, strategy=strategy, name=name, initial=units, stock=units
        ).pk
        for name, units in shares.items()
    }


def split(name: str, units: int, rows: int) -> dict[str, int]:
    """Spread so many units over rows that are named as `bucket()` names them."""
    each, more = divmod(units, rows)
    return {f"{name}:{number}": each + (number < more) for number in range(rows)}


def counted(race: Race, strategy: str, terms: Terms) -> dict[str, Any]:
    """Count what was sold from the orders, whatever the buyers say."""
    items = RaceItem.objects.filter(race=race, strategy=strategy)
    sold_of = items.annotate(sold=Count("orders"))
    buyers = RaceOrder.objects.filter(item__in=items).values_list("buyer")
    by_buyer = dict(buyers.annotate(units=Count("pk")).order_by())
    sold, left = sum(by_buyer.values()), items.aggregate(left=Sum("stock"))["left"]
    return {
        "stock": terms.stock,
        "sold": sold,
        "oversold": sum(i.sold - i.initial for i in sold_of.filter(sold__gt=F("initial"))),
        "left": left,
        "lost": sold - (terms.stock - left),
        "per_buyer": [by_buyer.get(number, 0) for number in range(terms.buyers)],
    }


def timed(reports: Sequence[Report]) -> dict[str, Any]:
    """Sum up what the buyers measured."""
    waits = sorted(seconds for report in reports for seconds in report.waits)
    began = min((report.began for report in reports), default=0.0)
    return {
        "conflicts": sum(report.conflicts for report in reports),
        "retries": sum(report.attempts - report.purchases for report in reports),
        "gave_up": sum(report.gave_up for report in reports),
        "seconds": max((report.ended for report in reports), default=0.0) - began,
        "wait_p50": percentile(waits, 50),
        "wait_p99": percentile(waits, 99),
        "note": next((report.note for report in reports if report.note), ""),
    }


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """Return the value that so many per cent do not exceed (nearest rank); None of nothing."""
    return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else None
