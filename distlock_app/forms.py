"""Import path for `guards/optimistic/forms`: model forms that refuse stale saves."""

from __future__ import annotations

from .guards.optimistic.forms import VERSION, Change, Conflict, VersionedModelForm

__all__ = ["Change", "Conflict", "VERSION", "VersionedModelForm"]
