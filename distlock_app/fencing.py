"""Import path for `guards/fencing`: models that refuse writes with an old fencing token."""

from __future__ import annotations

from .errors import StaleFenceError
from .guards.fencing import (
    FencedManager,
    FencedModel,
    FencedQuerySet,
    FencedVersionedManager,
    FencedVersionedModel,
    FencedVersionedQuerySet,
)

__all__ = [
    "FencedManager",
    "FencedModel",
    "FencedQuerySet",
    "FencedVersionedManager",
    "FencedVersionedModel",
    "FencedVersionedQuerySet",
    "StaleFenceError",
]
