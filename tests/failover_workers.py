"""What worker processes do to one lock while its servers fail."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from django.conf import settings
from django.test import override_settings

from distlock_app import Lock
from distlock_app.errors import BackendError, LockBusy, LockLost
from tests.processes import say

WAIT = 5.0


def hold_in_turns(
    *, caches: dict[str, Any], params: dict[str, Any], name: str, seconds: float, stop: str
) -> dict[str, Any]:
    """Hold the lock again and again until the file `stop` is there; tell when it was trusted.

    `turns` are [began, last known to be ours, fence, lost], by the clock that all processes of
    this machine share; `longest` is the longest time that a call took.
    """
    turns: list[Any] = []
    errors: dict[str, int] = {}
    longest = 0.0
    with override_settings(CACHES={**settings.CACHES, **caches}, DISTLOCK={"default": params}):
        while not Path(stop).exists():
            asked = time.monotonic()
            try:
                hold = Lock(name, ttl=1.5, wait=WAIT).acquire()
            except (BackendError, LockBusy) as error:
                errors[type(error).__name__] = errors.get(type(error).__name__, 0) + 1
                longest = max(longest, time.monotonic() - asked)
                time.sleep(0.02)
                continue
            began = last = time.monotonic()
            longest = max(longest, began - asked)
            say(hold.fence)
            while last < began + seconds:
                now = time.monotonic()
                if hold.lost:
                    break
                last = now
                time.sleep(0.002)
            turns.append([began, last, hold.fence, hold.lost])
            asked = time.monotonic()
            try:
                hold.release()
            except (BackendError, LockLost) as error:
                errors[f"release {type(error).__name__}"] = 1
            longest = max(longest, time.monotonic() - asked)
    return {"turns": turns, "errors": errors, "longest": longest}
