"""What a child process begins anew, also under uWSGI, and what every process does at its end."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from multiprocessing.process import parent_process
from multiprocessing.util import Finalize, register_after_fork

_calls: list[Callable[[], object]] = []
_made_in = os.getpid()  # the child in which they were made last; at first the parent


def in_child(call: Callable[[], object]) -> None:
    """Make this call in each child of fork()."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=call)
    _calls.append(call)


def at_exit(owner: object, call: Callable[[], object]) -> None:
    """Make this call when the process ends, also a child of it, as long as `owner` lives."""
    atexit.register(call)

    def in_child_of_multiprocessing(owner: object) -> None:  # which may end without atexit
        Finalize(None, call, exitpriority=0)

    register_after_fork(owner, in_child_of_multiprocessing)
    if parent_process() is not None:  # loaded only here
        in_child_of_multiprocessing(owner)


def _note() -> None:
    global _made_in
    _made_in = os.getpid()


in_child(_note)


def hook_into_uwsgi() -> None:
    """Have the workers of uWSGI make the calls, if Python did not (py-call-uwsgi-fork-hooks)."""
    uwsgi = sys.modules.get("uwsgi")  # is there from the start, if this is uWSGI
    earlier = getattr(uwsgi, "post_fork_hook", None)

    def hook() -> None:
        if _made_in != os.getpid():
            for call in _calls:
                call()
        if earlier is not None:
            earlier()

    if uwsgi is not None:
        uwsgi.post_fork_hook = hook  # type: ignore[attr-defined]
