"""The logger, and the fields that its records have in common."""

from __future__ import annotations

import logging
from typing import Any

from ..claims import Grant
from .identity import holder_fields
from .names import shown

logger = logging.getLogger("distlock_app")

# Seconds; a longer wait is worth a line.
SLOW_WAIT = 1.0


def fields(event: str, alias: str, grant: Grant | None = None, **more: Any) -> dict[str, Any]:
    """Return the `extra` of a record: `lock_event`, `lock_alias`, and what else is known.

    Durations are seconds. The owner token is never included.
    """
    known: dict[str, Any] = {"event": event, "alias": alias}
    if grant is not None:
        claim = grant.claim
        known |= {"name": shown(claim.name), "key": claim.key, "fence": grant.fence}
        known["holder"] = holder_fields(claim.holder)
    return {f"lock_{field}": value for field, value in {**known, **more}.items()}
