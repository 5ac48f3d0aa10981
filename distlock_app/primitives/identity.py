"""The runner that holds a lock: the thread or asyncio task, and its description for people."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from asgiref.sync import SyncToAsync
from django.core.exceptions import SynchronousOnlyOperation

# What the running code does ("alice /pay/7", "manage.py settle"), shown beside its locks.
_activity: ContextVar[str] = ContextVar("distlock_activity", default="")

ACTIVITY_LENGTH = 120


_APP = __name__.partition(".")[0] + "."

# The frame of this code is one call of sync_to_async().
_IN_THREAD = SyncToAsync.thread_handler.__code__


def current_runner() -> Any:
    """Return the running asyncio task, or else the thread: the owner of what is taken now.

    A child task that inherited the context is another runner. So is each call that
    `sync_to_async` runs in a thread, for tasks share that thread: its frame stands for it.
    """
    loop = asyncio._get_running_loop()
    task = asyncio.current_task(loop) if loop is not None else None
    if task is not None:
        return task
    # Not hasattr(), which would make an exception each time.
    if "main_event_loop" in SyncToAsync.threadlocal.__dict__:
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _IN_THREAD:
                return frame
            frame = frame.f_back  # type: ignore[assignment]
    return threading.current_thread()


_tokens: list[str] = []


def new_token() -> str:
    """Return 32 random hex digits of the system's generator, which is asked for many at a time."""
    try:
        return _tokens.pop()
    except IndexError:
        digits = os.urandom(16 * 100).hex()
        first, *others = (digits[at : at + 32] for at in range(0, len(digits), 32))
        _tokens.extend(others)
        return first


os.register_at_fork(after_in_child=_tokens.clear)


def refuse_to_block(instead: str) -> None:
    """Raise what Django raises for a query in an event loop, unless it is told not to."""
    if not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        raise SynchronousOnlyOperation(
            f"An event loop runs in this thread, and a lock would block it: use {instead}, or call"
            " the function by sync_to_async()."
        )


def frame_of_caller() -> FrameType:
    """Return the innermost frame that is not of this app, nor of an ExitStack that it uses."""
    frame = sys._getframe(1)
    while (name := frame.f_globals.get("__name__", "")).startswith(_APP) or name == "contextlib":
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame


def caller_location() -> tuple[CodeType, int]:
    """Return where this app was called: the code, and the line in its file."""
    frame = frame_of_caller()
    return frame.f_code, frame.f_lineno


def reference(runner: Any) -> Callable[[], Any]:
    """Return what refers to `runner` without keeping a task or a thread alive."""
    if isinstance(runner, FrameType):  # it has no weak references, and refers to no hold
        return lambda: runner
    return weakref.ref(runner)


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
