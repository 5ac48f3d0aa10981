"""What one can choose for a race, within limits that keep a page from starting too much."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from django.utils.translation import gettext_lazy as _


class Term(NamedTuple):
    """One of the terms in a form: its texts, the smallest and the largest value, how it counts."""

    label: Any
    help: Any
    low: float
    high: float
    step: float = 1


TERMS = {
    "buyers": Term(_("Buyers"), _("processes of the operating system"), 1, 16),
    "purchases": Term(_("Purchases"), _("attempts by all buyers together"), 1, 2000),
    "stock": Term(_("In stock"), _("units, before each strategy"), 1, 2000),
    "think": Term(_("Think time"), _("seconds between reading and writing"), 0, 0.5, 0.001),
    "hot": Term(
        _("Hot-spot share"),
        _("share of purchases of the hot product; the others are spread over eight"),
        *(0, 1, 0.05),
    ),
    "buckets": Term(
        _("Buckets"), _("number of rows over which the hot product’s stock is split"), 1, 16
    ),
    "seconds": Term(
        _("Time limit"), _("seconds for each strategy; then its buyers are stopped"), 1, 20
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of a race; raise ValueError if one is out of its limits."""

    buyers: int = 8
    purchases: int = 90
    stock: int = 60
    think: float = 0.005
    hot: float = 1.0
    buckets: int = 1
    seconds: int = 10

    def __post_init__(self) -> None:
        for field in fields(self):
            value, limits = getattr(self, field.name), TERMS[field.name]
            # Not-a-number is in no limits.
            if not limits.low <= value <= limits.high or not math.isfinite(value):
                raise ValueError(f"{field.name} must be {limits.low} to {limits.high}: {value!r}")

    @classmethod
    def typed(cls, values: dict[str, Any]) -> Terms:
        """Return the terms of what somebody typed; raise ValueError."""
        kinds = {field.name: type(field.default) for field in fields(cls)}
        return cls(**{name: kinds[name](value) for name, value in values.items()})
