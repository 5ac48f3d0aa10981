"""Import path for `guards/optimistic/admin`: the admin of versioned models."""

from __future__ import annotations

from .guards.optimistic.admin import VersionedAdmin, VersionedAdminMixin, VersionedInlineMixin

__all__ = ["VersionedAdmin", "VersionedAdminMixin", "VersionedInlineMixin"]
