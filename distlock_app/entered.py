"""The open `with` statements of locks: a Lock is shared by all, and keeps no state of its own."""

from __future__ import annotations

import os
import threading
from types import FrameType
from typing import Any, NamedTuple

from . import identity
from .errors import NotHeld


class Entry(NamedTuple):
    """One `with` that was entered and not left yet."""

    frame: FrameType | None
    runner: Any
    hold: Any
    block: Any  # the atomic() block inside, or None
    lock: Any  # so that its id() is not used again


# By id(lock): two equal locks are two.
_entries: dict[int, list[Entry]] = {}
_guard = threading.RLock()  # reentrant: a finalizer may close a generator in the middle of it


def enter(lock: Any, hold: Any, block: Any, frame: FrameType | None) -> None:
    """Note that the `with` of `lock` in `frame` was entered."""
    entry = Entry(frame, identity.current_runner(), hold, block, lock)
    with _guard:
        _entries.setdefault(id(lock), []).append(entry)


def entered(lock: Any, frame: FrameType | None) -> Entry:
    """Return the `with` of `lock` that ends in `frame`."""
    with _guard:
        entry = _find(lock, frame)
    if entry is None:
        raise NotHeld("cannot tell which `with` ends here: use hold = lock.acquire() instead")
    return entry


def forget(lock: Any, frame: FrameType | None) -> None:
    """Note that the `with` of `lock` in `frame` has ended, if there is one."""
    with _guard:
        gone = _find(lock, frame)
        left = [entry for entry in _entries.pop(id(lock), ()) if entry is not gone]
        if left:
            _entries[id(lock)] = left


def _find(lock: Any, frame: FrameType | None) -> Entry | None:
    entries = _entries.get(id(lock), [])
    found = [entry for entry in entries if entry.frame is frame]
    if not found:
        # An ExitStack enters and leaves it in frames of its own: what this runner entered last.
        runner = identity.current_runner()
        found = [entry for entry in entries if entry.runner is runner]
    if not found and len(entries) == 1:
        found = entries
    return found[-1] if found else None


def _after_fork() -> None:
    global _guard
    _guard = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
