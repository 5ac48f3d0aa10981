"""What happened to locks and versions, for code that wants to know.

Receivers get `alias`, `name` and the arguments named below; durations are seconds. They run
robustly: one that raises is logged by Django and breaks no lock. `sender` is the class of the
backend, or of the model for `version_conflict`.
"""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

logger = logging.getLogger("distlock_app")

lock_acquired = Signal()  # waited, fence
lock_busy = Signal()  # waited
lock_released = Signal()  # held
lock_lost = Signal()  # held, reason
lock_cleared = Signal()  # seen, user, reason
version_conflict = Signal()  # instance, attempt, expected, found


def tell(signal: Signal, facts: dict[str, Any]) -> None:
    """Send `signal`; whatever goes wrong there is logged."""
    try:
        signal.send_robust(**facts)
    except Exception:  # such as an async receiver in a thread that runs an event loop
        logger.exception("a signal of locks could not be sent")


async def atell(signal: Signal, facts: dict[str, Any]) -> None:
    """Do as `tell`, in an event loop."""
    try:
        await signal.asend_robust(**facts)
    except Exception:
        logger.exception("a signal of locks could not be sent")
