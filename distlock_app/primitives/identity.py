"""The owner of a lock: its random token, its runner (a thread or task), its name for people."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from asgiref.sync import SyncToAsync
from django.core.exceptions import SynchronousOnlyOperation

from .forks import in_child
from .rlock import RLock

# What the running code does ("alice /pay/7", "manage.py settle"), shown beside its locks.
_activity: ContextVar[str] = ContextVar("distlock_activity", default="")

ACTIVITY_LENGTH = 120


_APP = __name__.partition(".")[0] + "."

# The frame of this code is one call of sync_to_async().
_IN_THREAD = SyncToAsync.thread_handler.__code__


class Runner:
    """A thread, an asyncio task or a call of `sync_to_async`: the owner of what it takes.

    A child task that inherited the context is another runner. So is each call that
    `sync_to_async` runs in a thread, for tasks share that thread.
    """

    __slots__ = ("__weakref__", "_activity", "_text", "call", "held", "in_call", "lock")

    def __init__(self, *, in_call: bool = False) -> None:
        self.held: dict[Any, Any] = {}  # its leases, by backend, key and mode
        self.in_call = in_call  # of sync_to_async()
        self.call: FrameType | None = None  # its frame, while it holds something
        # Reentrant: a finalizer or a signal handler may come in the middle of a change.
        self.lock = RLock()  # of all that it holds
        self._activity: str | None = None

    def text(self) -> str:
        """Return its description as ASCII JSON: host, machine, pid, thread, who."""
        if (who := _activity.get()) != self._activity:
            self._text = _holder_text(os.getpid(), threading.current_thread().name, who)
            self._activity = who
        return self._text


class _Here(threading.local):
    """The runners of one thread: itself, and the calls of sync_to_async that hold something."""

    def __init__(self) -> None:
        self.runner = Runner()
        self.calls: list[Runner] = []


_here = _Here()
_tasks: weakref.WeakKeyDictionary[Any, Runner] = weakref.WeakKeyDictionary()
# A child has its own: what the parent holds is not the child's.
in_child(_tasks.clear)
in_child(_here.__init__)  # type: ignore[misc]


def current_runner() -> Runner:
    """Return the running call of `sync_to_async` or asyncio task, or else the thread."""
    loop = asyncio._get_running_loop()
    task = asyncio.current_task(loop) if loop is not None else None
    if task is not None:
        return _tasks.get(task) or _tasks.setdefault(task, Runner())
    # Not hasattr(), which would make an exception each time.
    if "main_event_loop" in SyncToAsync.threadlocal.__dict__ and (call := _running_call()):
        for runner in _here.calls:
            if runner.call is call:
                return runner
        return Runner(in_call=True)
    return _here.runner


def keep_call(runner: Runner) -> None:
    """Let `current_runner` return `runner` again in this call of sync_to_async."""
    runner.call = _running_call()
    calls = [other for other in _here.calls if other.call is not None and other is not runner]
    _here.calls = [*calls, runner]


def _running_call() -> FrameType | None:
    """Return the frame that stands for the running call of sync_to_async."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _IN_THREAD:
        frame = frame.f_back
    return frame


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


in_child(_tokens.clear)


def refuse_to_block(instead: str) -> None:
    """Raise what Django raises for a query in an event loop, unless it is told not to."""
    if not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        raise SynchronousOnlyOperation(
            f"An event loop runs in this thread, and a lock would block it: use {instead}, or call"
            " the function through sync_to_async()."
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


@contextmanager
def activity(text: str) -> Iterator[None]:
    """Show `text` as what the holder does, for locks taken inside the block."""
    token = _activity.set(text[:ACTIVITY_LENGTH])
    try:
        yield
    finally:
        _activity.reset(token)


def holder_text() -> str:
    """Return the description of this runner."""
    return current_runner().text()


@lru_cache(maxsize=256)
def _holder_text(pid: int, thread: str, who: str) -> str:
    fields: dict[str, Any] = {"host": socket.gethostname(), "pid": pid, "thread": thread[:60]}
    if machine():
        fields["machine"] = machine()
    if who := who or _program():
        fields["who"] = who
    return json.dumps(fields, separators=(",", ":"))


def _program() -> str:
    """Return the program, without its arguments: "gunicorn", "manage.py beat"; empty in a shell."""
    path, *arguments = sys.argv or [""]
    folder, name = os.path.split(path)
    if name == "__main__.py":  # python -m celery
        name = os.path.basename(folder)
    if name in ("manage.py", "django-admin", "django"):
        name = " ".join([name, *arguments[:1]])
    return "" if name == "-c" else name[:ACTIVITY_LENGTH]


@lru_cache(maxsize=1)
def machine() -> str:
    """Return a token of what process ids count in: this boot of a kernel, this namespace.

    Hosts may have one name, and the containers of a host have process ids of their own. Empty where
    it cannot be told.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read()
        text = f"{boot}{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


in_child(machine.cache_clear)


def of_lease(text: str, *, ttl: float, renew: bool, at_least: float) -> str:
    """Return the description of a holder with how it holds this lock, if not as its alias says."""
    how = {"ttl": ttl, "renew": renew} | ({"at_least": at_least} if at_least else {})
    return f"{text[:-1]},{json.dumps(how, separators=(',', ':'))[1:]}"


def holder_fields(text: str) -> dict[str, Any]:
    """Return what `Runner.text` described; anything unreadable is shown as it is.

    Of what others made up, only texts and numbers: pages and commands compute with them.
    """
    try:
        fields = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return {"who": text[:ACTIVITY_LENGTH]}
    return {name: value for name, value in fields.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    # Not infinite, not NaN, and no more than a float holds.
    return isinstance(value, str) or (isinstance(value, (int, float)) and abs(value) < 1e15)
