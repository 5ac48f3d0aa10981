"""Import path for `guards/optimistic`: versioned models, their managers and version fields."""

from __future__ import annotations

from .errors import RetriesExhausted, StaleObjectError
from .guards.optimistic.fields import TimestampVersionField, VersionField
from .guards.optimistic.models import VersionedModel
from .guards.optimistic.querysets import VersionedManager, VersionedQuerySet
from .guards.retrying import retry_on_conflict

__all__ = [
    "RetriesExhausted",
    "StaleObjectError",
    "TimestampVersionField",
    "VersionField",
    "VersionedManager",
    "VersionedModel",
    "VersionedQuerySet",
    "retry_on_conflict",
]
