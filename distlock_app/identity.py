"""Who is running: the thread or asyncio task that owns a hold, and its description for people."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

# What the running code does ("alice /pay/7", "manage.py settle"), shown beside its locks.
_activity: ContextVar[str] = ContextVar("distlock_activity", default="")

ACTIVITY_LENGTH = 120


def current_runner() -> Any:
    """Return the running asyncio task, or else the thread: the owner of what is taken now.

    A child task that inherited the context is another runner, as is code that
    `sync_to_async` runs in a thread.
    """
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:  # no event loop runs in this thread
        return threading.current_thread()


@contextmanager
def activity(text: str) -> Iterator[None]:
    """Show `text` as what the holder does, for locks taken inside the block."""
    token = _activity.set(text[:ACTIVITY_LENGTH])
    try:
        yield
    finally:
        _activity.reset(token)


def holder_text() -> str:
    """Return the description of this runner as ASCII JSON: host, pid, thread, who."""
    return _holder_text(os.getpid(), threading.current_thread().name, _activity.get())


@lru_cache(maxsize=256)
def _holder_text(pid: int, thread: str, who: str) -> str:
    fields: dict[str, Any] = {"host": socket.gethostname(), "pid": pid, "thread": thread[:60]}
    if who:
        fields["who"] = who
    return json.dumps(fields, separators=(",", ":"))


def holder_fields(text: str) -> dict[str, Any]:
    """Return what `holder_text` described; anything unreadable is shown as it is."""
    try:
        fields = json.loads(text) if text else {}
    except ValueError:
        fields = None
    return fields if isinstance(fields, dict) else {"who": text[:ACTIVITY_LENGTH]}
