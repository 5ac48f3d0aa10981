"""`ReadOnly`: pages of the admin on which nobody adds, changes or deletes a row."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest


class ReadOnly:
    """Refuses all three, even to superusers; put it before ModelAdmin."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission
