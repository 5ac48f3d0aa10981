"""What a child process begins anew, also under uWSGI, which forks without telling Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

_calls: list[Callable[[], object]] = []
_told = os.getpid()  # the process for which they were made, or need not be


def in_child(call: Callable[[], object]) -> None:
    """Make this call in each child of fork()."""
    os.register_at_fork(after_in_child=call)
    _calls.append(call)


def _note() -> None:
    global _told
    _told = os.getpid()


in_child(_note)


def tell_uwsgi() -> None:
    """Have the workers of uWSGI make the calls, if Python did not (py-call-uwsgi-fork-hooks)."""
    uwsgi = sys.modules.get("uwsgi")  # is there from the start, if this is uWSGI
    earlier = getattr(uwsgi, "post_fork_hook", None)

    def hook() -> None:
        if _told != os.getpid():
            for call in _calls:
                call()
        if earlier is not None:
            earlier()

    if uwsgi is not None:
        uwsgi.post_fork_hook = hook  # type: ignore[attr-defined]
