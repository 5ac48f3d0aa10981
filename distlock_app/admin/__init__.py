"""The admin: live locks of every backend, and the rows of the lock table."""

from __future__ import annotations

from .pages import LiveLockAdmin, LiveLockAdminMixin
from .table import DistLockAdmin

__all__ = ["DistLockAdmin", "LiveLockAdmin", "LiveLockAdminMixin"]
