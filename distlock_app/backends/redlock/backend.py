"""`RedlockBackend`: locks on a majority of independent Redis or Valkey servers, with fences."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

from django.core.checks import CheckMessage

from ...claims import Busy, Claim, Grant
from ...errors import BackendError
from ...primitives.timing import monotonic
from ..base import batches, result_of
from ..redis.checks import refuse_wrong_prefix
from ..redis.inspection import about, milliseconds
from ..redis.scripts import Script, bulks
from . import scripts
from .checks import check_nodes, checked_location
from .clock import ServerClock, times_in
from .inspection import BATCH, PARTS, Inspection
from .listening import Listener
from .nodes import Node, NodeConnections, QuorumRequest
from .quorum import ANSWER_GRACE, Quorum

# Of the latest releases: a renewal that crosses one must not bring its lock back.
KEEP_RELEASED = 1000

# As the stamp of a release: before all tries, so a lock that is held is kept.
KEEP = 0
# A node says so to an owner that had the lock before this try.
HAD_IT = b" again"


class RedlockBackend(Inspection):
    """Leases on most of several servers. LOCATION is a list of aliases of CACHES, one each."""

    fences = True
    pushes = True
    # The scripts take a waiter for dead that did not ask again for three seconds.
    poll_max = 1.0

    def __init__(self, *, alias: str, location: Any = None, prefix: str = "distlock") -> None:
        """`prefix` begins every key and channel; the caches' own KEY_PREFIX is not used."""
        super().__init__(alias=alias, location=location)
        self._nodes = checked_location(location)
        refuse_wrong_prefix(prefix)
        self._prefix = f"{prefix}:redlock:"
        self._head = lru_cache(maxsize=4096)(self._make_head)
        self._start()

    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy:
        """Take the lock at a majority, or nowhere; a waiter is in the queue of each node."""
        listener = self._listener
        if wait == 0:
            listener.forget(claim)
            return self._try(claim)
        if claim.wake is None:
            return self._try(claim, b"-", b"0")
        # Most locks are free: a process that never waits needs no subscription.
        if not listener.subscribed and (grant := self._try(claim)):
            return grant
        listener.ensure_subscribed()
        waiter = listener.expect(claim, self._clock.stamp())
        result = self._try(claim, listener.channel.encode(), b"%d" % waiter.arrived)
        if isinstance(result, Grant):
            listener.forget(claim)
            return result
        if claim.blocking:
            return Busy(free_in=result.free_in, pause=partial(listener.pause, waiter))
        return result

    def _try(self, claim: Claim, *waiting: bytes) -> Grant | Busy:
        """Try once; `waiting` is the channel and the ticket of a waiter."""
        asked = monotonic()
        stamp = self._clock.stamp(asked)
        ask_time = (b"", b"") if self._clock.due(asked) else ()
        request = self._taking(claim, claim.ttl, stamp, *(waiting or ask_time))
        self._ask_or_undo(request, claim, stamp, *waiting)
        yes = [line.split() for line in request.yes.values()]
        no = [line.split() for line in request.no.values()]
        self._clock.learn(monotonic(), times_in(yes + no))
        if request.won:
            fence = self._agree(claim, stamp, [int(words[1]) for words in yes])
            # Another process of a stable owner may have guessed a later time.
            stamps = [int(words[4]) for words in yes if words[4:]]
            return Grant(claim, fence=fence, asked_at=asked, session=max([stamp, *stamps]))
        if len(yes) + len(no) < request.majority:
            raise self._quorum.failure(request)
        return Busy(free_in=_free_in(no, request.majority - len(yes)))

    def _taking(self, claim: Claim, ttl: float, stamp: int, *waiting: bytes) -> QuorumRequest:
        """Make the request of one try; `waiting` as in acquire.lua."""
        script = scripts.ACQUIRE_OR_WAIT if waiting else scripts.ACQUIRE
        words = milliseconds(ttl), about(claim.holder, claim.name), b"%d" % stamp
        return self._request(script, claim, *words, *waiting, is_try=True)

    def _agree(self, claim: Claim, stamp: int, fences: list[int]) -> int:
        """Return a fence that a majority knows, and that is greater than all before.

        Each owner before left its fence at a majority, so at least one node of this majority
        knows it and answered a greater number. If all answered the same, a majority knows that
        fence; else the greatest is sent to all.
        """
        fence = max(fences)
        if fences.count(fence) >= self._quorum.majority:
            return fence
        request = self._raising(claim, fence)
        self._ask_or_undo(request, claim, KEEP if claim.stable else stamp)
        if not request.won:
            raise self._quorum.failure(request)
        return fence

    def _raising(self, claim: Claim, fence: int) -> QuorumRequest:
        return self._request(scripts.RAISE, claim, b"%d" % fence)

    def _ask_or_undo(
        self, request: QuorumRequest, claim: Claim, stamp: int, *waiting: bytes
    ) -> None:
        """Ask the nodes; unless a majority says yes, give up the claim at the others, too.

        A stable owner may have had the lock before, and keeps it at nodes that say so or nothing.
        """

        def undo_unless_won(connections: NodeConnections) -> None:
            if request.won:
                return
            every = set(range(len(self._nodes)))
            those, place = every - set(request.no), waiting
            if len(request.yes) + len(request.no) < request.majority:
                # Out of reach of a majority it leaves the queues, or keeps out who is not.
                those, place = every, ()
            if claim.stable:
                fresh = {at for at, line in request.yes.items() if not line.endswith(HAD_IT)}
                connections.broadcast(self._releasing(claim, KEEP, *place), those - fresh)
                those = fresh
            connections.broadcast(self._releasing(claim, stamp, *place), those)

        grace = ANSWER_GRACE if claim.stable else 0
        self._quorum.ask([request], undo_unless_won, grace=grace)

    def _releasing(self, claim: Claim, stamp: int, *waiting: bytes) -> QuorumRequest:
        """Make the request that ends what tries up to this stamp were granted, or may yet be.

        `waiting`: the channel and the ticket of a waiter that stays; or b"", if no try follows.
        """
        script = (scripts.RELEASE, scripts.RELEASE_FOR_GOOD, scripts.RELEASE_AND_WAIT)[len(waiting)]
        # A waiter that stays sends another one in the end: one that a node has even later would put
        # it into the queue again.
        keep = 0.0 if script is scripts.RELEASE_AND_WAIT else claim.ttl
        return self._request(script, claim, b"%d" % stamp, *waiting, keep=keep)

    def extend(self, grant: Grant, ttl: float) -> bool:
        [answer] = self.extend_many([(grant, ttl)])
        return result_of(answer)

    def end_in(self, grant: Grant, ttl: float) -> bool:
        words = milliseconds(ttl), b"exactly"
        return self._answer(self._request(scripts.END_IN, grant.claim, *words))

    def extend_many(self, work: Sequence[tuple[Grant, float]]) -> list[bool | Exception]:
        return [result for batch in batches(work, BATCH) for result in self._extend(batch)]

    def _extend(self, work: Sequence[tuple[Grant, float]]) -> list[bool | Exception]:
        requests = [
            self._request(scripts.EXTEND, grant.claim, milliseconds(ttl)) for grant, ttl in work
        ]

        def heal(connections: NodeConnections) -> None:
            # A node that lost the lock, in a restart for instance, may have it again: the majority
            # that never lost it proves that no other owner can have had it meanwhile.
            for request, (grant, ttl) in zip(requests, work, strict=True):
                if request.no and request.won:
                    forgot = set(request.no)
                    # That of the grant: a process that resumes the hold has no greater one to
                    # release it.
                    stamp = grant.session or self._clock.stamp()
                    again = self._taking(grant.claim, ttl, stamp, b"", b"again")
                    connections.broadcast(again, forgot)
                    connections.broadcast(self._raising(grant.claim, grant.fence or 0), forgot)
                    if _acquisition(grant) in self._released:  # it crossed the release
                        connections.broadcast(self._releasing(grant.claim, grant.session or 0))

        self._quorum.ask(requests, heal, grace=ANSWER_GRACE)
        return [self._outcome(request) for request in requests]

    def release(self, grant: Grant) -> bool:
        """Release it everywhere, also where it may not have been granted."""
        claim = grant.claim
        self._listener.forget(claim)
        self._released.append(_acquisition(grant))
        # A hold may end in another process than it began, where the guess is another.
        stamp = max(self._clock.stamp(), grant.session or 0)
        # A node may get it before tries that this process sent over other connections.
        gone = () if claim.stable else (b"",)
        return self._answer(self._releasing(claim, stamp, *gone))

    def withdraw(self, claim: Claim) -> None:
        if not self._listener.forget(claim):
            self._answer(self._releasing(claim, KEEP))

    def _answer(self, request: QuorumRequest) -> bool:
        self._quorum.ask([request])
        return result_of(self._outcome(request))

    def _outcome(self, request: QuorumRequest) -> bool | BackendError:
        if request.decided:
            return request.won
        return self._quorum.failure(request)

    def clear(self, key: str, if_version: str | None = None) -> int:
        held = self._held([0], key).items()
        owners = [owner for (_, owner), h in held if if_version in (None, h.version)]
        if owners or if_version is None:
            # Without a version of any owner: also what a minority of nodes holds.
            owner = "" if if_version is None else owners[0]
            packed = self._head(scripts.CLEAR, key) + bulks(owner.encode())
            self._answer(QuorumRequest(self._quorum.majority, packed))
        return len(owners)

    def check(self, *, ask: bool = False) -> list[CheckMessage]:
        return [*check_nodes(self.alias, self.location, ask=ask)]

    def ping(self) -> None:
        self._held([0])

    def close(self) -> None:
        self._listener.close()
        self._quorum.close()
        self._start()

    def after_fork(self) -> None:
        # redis-py shuts no socket down in another process than its own (Connection.pid): the
        # child only loses its copies. Its locks are new too: a thread of the parent may have
        # held the old ones.
        self._start()

    def _start(self) -> None:
        nodes = [Node(name, recipe) for name, recipe in self._nodes]
        self._quorum = Quorum(self.alias, nodes)
        self._listener = Listener(f"{self._prefix}wake:{secrets.token_hex(8)}", self._quorum)
        self._clock = ServerClock()
        self._released: deque[Any] = deque(maxlen=KEEP_RELEASED)

    def _make_head(self, script: Script, key: str) -> bytes:
        lock = f"{self._prefix}{key}".encode()
        return script.head(lock, self._part(int(key[:4], 16) % PARTS))

    def _request(self, script: Script, claim: Claim, *words: bytes, **more: Any) -> QuorumRequest:
        packed = self._head(script, claim.key) + bulks(claim.owner.encode(), *words)
        return QuorumRequest(self._quorum.majority, packed, **more)


def _acquisition(grant: Grant) -> tuple[Any, ...]:
    """Tell an acquisition from others, also of the same owner."""
    return grant.claim.key, grant.claim.owner, grant.session


def _free_in(refusals: Iterable[list[bytes]], wanted: int) -> float | None:
    """Return the seconds until so many more nodes may grant the lock; None: unknown."""
    lefts = sorted(int(words[1]) for words in refusals)
    left = lefts[min(wanted, len(lefts)) - 1]
    return left / 1000 if left >= 0 else None
