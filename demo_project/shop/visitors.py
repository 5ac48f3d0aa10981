"""What the session knows of a visitor: the name, and how slowly the shop works for them."""

from __future__ import annotations

import secrets
from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

NAMES = "Ada Barbara Edsger Grace Hedy Jim Katherine Leslie Margaret Nancy Radia Tony".split()
SLOWEST = 30.0
PACES = [(0, _("off")), (3, _("3 s")), (15, _("15 s"))]


def buyer_of(request: HttpRequest) -> str:
    """Return the visitor's name; the first visit gives them one."""
    if "buyer" not in request.session:
        request.session["buyer"] = f"{secrets.choice(NAMES)}-{secrets.token_hex(4)}"
    name: str = request.session["buyer"]
    return name


def think_time(request: HttpRequest) -> float:
    """Return the seconds that warehouse and card company take for this visitor."""
    return float(request.session.get("think", 0))


def set_think_time(request: HttpRequest, seconds: str) -> None:
    """Remember how slowly the shop is to work; what makes no sense means at once."""
    try:
        wanted = float(seconds)
    except ValueError:
        wanted = 0.0
    request.session["think"] = wanted if 0 <= wanted <= SLOWEST else 0.0


def visitor(request: HttpRequest) -> dict[str, Any]:
    """Tell the templates."""
    return {
        "buyer": request.session.get("buyer"),
        "think": think_time(request),
        "paces": PACES,
    }
