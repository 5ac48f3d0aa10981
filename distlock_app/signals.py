"""What happened to locks and versions, for code that wants to know.

Receivers get `alias`, `name` and the arguments named below; durations are seconds. They run
robustly: one that raises is logged by Django and breaks no lock. `sender` is the class of the
backend, or of the model for `version_conflict`.
"""

from django.dispatch import Signal

lock_acquired = Signal()  # waited, fence
lock_busy = Signal()  # waited
lock_released = Signal()  # held
lock_lost = Signal()  # held, reason
lock_cleared = Signal()  # seen, user, reason
version_conflict = Signal()  # instance, attempt, expected, found
