"""One granted claim in this process: how long it is trusted, and whether it was lost."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from .backends.base import BaseLockBackend
from .claims import Grant
from .timing import drift

logger = logging.getLogger("distlock_app")

# Changes in a forked child: what the parent holds is not the child's.
_process = object()


def _after_fork() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_after_fork)


class Lease:
    """The claim behind one or several holds of the same runner.

    It is *trusted* while the engine cannot have given the claim to anybody else, by this
    process's monotonic clock. It ends by release or by loss, once.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_lock",
        "_process",
        "alias",
        "backend",
        "due",
        "ended",
        "grant",
        "handles",
        "lost_because",
        "renew_until",
        "runner",
        "since",
        "trusted_until",
        "ttl",
        "unended_blocks",
    )

    def __init__(
        self,
        alias: str,
        backend: BaseLockBackend,
        grant: Grant,
        *,
        asked_at: float,
        renew: bool,
        max_hold: float | None,
    ) -> None:
        ttl = grant.claim.ttl
        self.alias = alias
        self.backend = backend
        self.grant = grant
        self.ttl = ttl
        self.since = monotonic()
        self.trusted_until = asked_at + ttl - drift(ttl)
        # Renewals let the claim end no later than this; None: it is never renewed.
        self.renew_until = (
            None if not renew else float("inf") if max_hold is None else self.since + max_hold
        )
        self.due: float | None = None  # when the renewer looks at it next
        self.handles = 1  # holds that need it
        self.unended_blocks = 0  # transactions whose end the release waits for
        self.ended = False  # released or given up: nothing more to renew
        self.lost_because: str | None = None
        self.runner: Any = None
        self._process = _process
        self._callbacks: list[Callable[[], None]] | None = []
        self._lock = threading.Lock()

    @property
    def foreign(self) -> bool:
        """Whether a parent process took it: then it is not ours to renew or release."""
        return self._process is not _process

    @property
    def lost(self) -> bool:
        """Whether the claim may belong to somebody else by now."""
        return (
            self.lost_because is not None or self.foreign or monotonic() >= self.trusted_until
        )

    def extended(self, ttl: float, *, asked_at: float) -> None:
        """Trust it for `ttl` seconds from `asked_at`: engines never shorten a claim."""
        with self._lock:
            self.trusted_until = max(self.trusted_until, asked_at + ttl - drift(ttl))

    def capped(self, ttl: float) -> float:
        """Return `ttl`, or what `max_hold` leaves of it."""
        if self.renew_until is None:
            return ttl
        return max(0.001, min(ttl, self.renew_until - monotonic()))

    def lose(self, reason: str, *, at_release: bool = False) -> list[Callable[[], None]] | None:
        """Note the loss, once; return the callbacks to run, None if there is nothing to tell."""
        with self._lock:
            if self.lost_because is not None or (self.ended and not at_release):
                return None
            self.lost_because = reason
            callbacks, self._callbacks = self._callbacks or [], None
        logger.warning(
            "lost the lock %r (alias %r) after %.3f s: %s",
            self.grant.claim.name[:200],
            self.alias,
            monotonic() - self.since,
            reason,
        )
        return callbacks

    def end(self) -> None:
        """Stop renewing it and telling of its loss."""
        with self._lock:
            self.ended = True

    def join(self) -> bool:
        """Add a hold, unless the lease has ended or is just being released."""
        with self._lock:
            if self.ended or (self.handles == 0 and not self.unended_blocks):
                return False
            self.handles += 1
            return True

    def part(self) -> bool:
        """Take a hold away; return whether it was the last, and no transaction has to end."""
        with self._lock:
            self.handles -= 1
            return self.handles == 0 and not self.unended_blocks

    def blocks_ended(self) -> bool:
        """Note that no transaction has to end any more; return whether no hold is left."""
        with self._lock:
            self.unended_blocks = 0
            self.ended = self.ended or self.handles == 0
            return self.handles == 0

    def call_when_lost(self, callback: Callable[[], None]) -> bool:
        """Keep `callback` for the loss; False: it is lost already."""
        with self._lock:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            return True
