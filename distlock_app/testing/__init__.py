"""Helpers for the tests of projects that use locks, and the suite that every backend must pass.

`override_locks()` keeps a project's tests away from servers; `held_elsewhere()` and `lose()`
make happen what is hard to wait for. `LockBackendContract` is the suite.
"""

from __future__ import annotations

from .contract import NASTY_NAMES, LockBackendContract
from .fixtures import LOCMEM, held_elsewhere, lose, override_locks

__all__ = [
    "LOCMEM",
    "LockBackendContract",
    "NASTY_NAMES",
    "held_elsewhere",
    "lose",
    "override_locks",
]
