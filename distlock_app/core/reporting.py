"""Reports how leases end, by signals, log records and callbacks, on threads of their own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from time import sleep
from typing import Any

from django.db import connections

from ..primitives.forks import at_exit, in_child
from ..primitives.logs import fields, logger
from ..primitives.threads import Worker, started
from ..primitives.timing import monotonic
from ..signals import lock_lost, lock_released, send
from .lease import Callback, Lease

EXIT_PATIENCE = 2.0  # seconds that process exit waits for reports, and for pending releases
CALLS_BACK = "distlock-lost"  # the name of a thread that calls an on_lost() callback


def report_released(lease: Lease) -> None:
    """Send the signal of a release that no caller waited for."""
    if lock_released.receivers:
        _notifier.put(partial(send, lock_released, lease_facts(lease)))


def report_lost(lease: Lease, reason: str, callbacks: tuple[Callback, ...]) -> None:
    """Log the loss, send its signal, and run each callback, which may block, on its own thread."""
    for callback in callbacks:
        work = partial(_call_back, *callback)
        if not started(work, CALLS_BACK):
            _notifier.put(work)
    facts = lease_facts(lease)
    about = fields("lost", lease.alias, lease.grant, held=facts["held"], reason=reason)
    _notifier.put(partial(_notify_lost, facts, reason, about))


def await_reports() -> None:
    """Wait until receivers and callbacks know of all that has ended."""
    end = monotonic() + EXIT_PATIENCE
    _notifier.finish(EXIT_PATIENCE)
    while monotonic() < end and CALLS_BACK in {thread.name for thread in threading.enumerate()}:
        sleep(0.001)  # join() would refuse a thread that is just being started


def lease_facts(lease: Lease) -> dict[str, Any]:
    """Return the arguments of the signals about the end of `lease`."""
    return {
        "sender": type(lease.backend),
        "alias": lease.alias,
        "name": lease.grant.claim.name,
        "held": monotonic() - lease.since,
        "fence": lease.grant.fence,
    }


def _call_back(hold_ref: weakref.ref[Any], callback: Callable[[Any], object]) -> None:
    hold = hold_ref()
    if hold is None:  # dropped meanwhile
        return
    try:
        callback(hold)
    except BaseException:  # also SystemExit, which does not end the process here
        logger.exception("an on_lost() callback failed", extra=hold.log_fields("callback_failed"))
    finally:
        connections.close_all()  # those of this thread


def _notify_lost(facts: dict[str, Any], reason: str, about: dict[str, Any]) -> None:
    logger.warning(
        "lost the lock %r (alias %r) after %.3f s: %s",
        *(about["lock_name"], facts["alias"], facts["held"], reason),
        extra=about,
    )
    send(lock_lost, {**facts, "reason": reason})


_notifier = Worker("distlock-notifier", lambda report: report(), threads=1)
in_child(_notifier.forget)
# A thread that still wrote to stderr when the interpreter ends would abort it.
at_exit(_notifier, await_reports)
