"""Django signals: what became of a lock, or of the attempt to take it; a version conflict.

Receivers get `alias`, `name` and the arguments named below; durations are seconds. They run
robustly: one that raises is logged by Django and breaks no lock. `sender` is the class of the
backend, or of the model for `version_conflict`.
"""

from __future__ import annotations

from typing import Any

from django.dispatch import Signal

from .primitives.logs import fields, logger

lock_acquired = Signal()  # waited, fence
lock_busy = Signal()  # waited
lock_failed = Signal()  # waited, error, opened
lock_released = Signal()  # held, fence
lock_lost = Signal()  # held, fence, reason
lock_cleared = Signal()  # key, version, user, reason
version_conflict = Signal()  # instance, attempt, expected, found


def send(signal: Signal, facts: dict[str, Any]) -> None:
    """Send `signal`; whatever goes wrong there is logged."""
    try:
        signal.send_robust(**facts)
    except Exception:  # such as an async receiver in a thread that runs an event loop
        _log(facts)


def _log(facts: dict[str, Any]) -> None:
    about = fields("signal_failed", facts.get("alias", ""))
    logger.exception("a lock signal could not be sent", extra=about)


async def asend(signal: Signal, facts: dict[str, Any]) -> None:
    """Like `send`, in an event loop."""
    try:
        await signal.asend_robust(**facts)
    except Exception:
        _log(facts)
