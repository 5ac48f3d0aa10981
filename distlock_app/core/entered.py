"""The open `with` blocks of locks: which hold belongs to which block."""

from __future__ import annotations

from types import FrameType
from typing import Any, NamedTuple

from ..errors import NotHeld
from ..primitives import identity


class Entry(NamedTuple):
    """One `with` that was entered and not left yet."""

    frame: FrameType | None
    runner: Any
    hold: Any
    block: Any  # the atomic() block inside, or None
    lock: Any  # so that its id() is not used again


# By id(lock), for two equal locks are two, and id(frame), in which one thread runs at a time: so
# nothing here needs a guard. And by id(runner), for an ExitStack enters and leaves in frames of
# its own.
_entries: dict[tuple[int, int], list[Entry]] = {}


def enter(lock: Any, hold: Any, block: Any, frame: FrameType | None) -> None:
    """Note that the `with` of `lock` in `frame` was entered."""
    entry = Entry(frame, identity.current_runner(), hold, block, lock)
    _entries.setdefault((id(lock), id(frame)), []).append(entry)
    _entries.setdefault((id(lock), id(entry.runner)), []).append(entry)


def entered(lock: Any, frame: FrameType | None) -> Entry:
    """Return the `with` of `lock` that ends in `frame`."""
    entry = _find(lock, frame)
    if entry is None:
        raise NotHeld("it is not known which `with` ends here: use hold = lock.acquire() instead")
    return entry


def forget(lock: Any, frame: FrameType | None, hold: Any = None) -> None:
    """Note that the `with` of `lock` in `frame` has ended, if there is one (of this `hold`)."""
    entry = _find(lock, frame)
    if entry is not None and hold in (None, entry.hold):
        for key in (id(lock), id(entry.frame)), (id(lock), id(entry.runner)):
            here = _entries.pop(key, ())
            if len(here) > 1:
                _entries[key] = [other for other in here if other is not entry]


def _find(lock: Any, frame: FrameType | None) -> Entry | None:
    if here := _entries.get((id(lock), id(frame))):
        return here[-1]
    runner = identity.current_runner()
    if here := _entries.get((id(lock), id(runner))):
        return here[-1]
    # A generator that another thread or task finishes.
    found = [entry for here in list(_entries.values()) for entry in here if entry.lock is lock]
    ours = [entry for entry in found if entry.runner is runner]
    if not ours and len({id(entry) for entry in found}) == 1:
        ours = found
    return ours[-1] if ours else None
