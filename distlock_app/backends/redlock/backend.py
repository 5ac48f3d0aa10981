"""`RedlockBackend`: locks on a majority of independent Redis or Valkey servers, with fences."""

from __future__ import annotations

import json
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured

from ...claims import Busy, Claim, Grant, Holding
from ...errors import BackendError
from ...primitives.identity import holder_fields
from ...primitives.names import SHOWN_LENGTH, shown
from ...primitives.timing import monotonic
from ..base import BaseLockBackend
from ..redis.alias import recipe, server_of
from ..redis.scripts import fill
from .checks import check_nodes
from .listening import Listener
from .nodes import ANSWER_GRACE, Ballot, Node, Panel, Quorum
from .scripts import (
    ACQUIRE,
    ACQUIRE_OR_WAIT,
    CLEAR,
    END_IN,
    EXTEND,
    LIST,
    RAISE,
    RELEASE,
    RELEASE_AND_WAIT,
    NodeScript,
)

# Parts of the index at each node, each with a counter of fences. Names that share one only make
# each other's fences grow; taken at the same moment, they may cost one more request.
PARTS = 256
# Requests in one round trip: more might not fit the buffer of a socket.
BATCH = 32
# What the clocks of two hosts may differ in rate.
RATE_DRIFT = 0.001
# How often the nodes are asked for it.
LEARN_SECONDS = 1.0
# A clock that went back by so many microseconds was set: what was learned before says nothing.
SET_BY = 50_000


class RedlockBackend(BaseLockBackend):
    """Leases on most of several servers. LOCATION is a list of aliases of CACHES, one each."""

    fences = True
    pushes = True
    # The scripts take a waiter for dead that did not ask again for three seconds.
    poll_max = 1.0

    def __init__(self, *, alias: str, location: Any = None, prefix: str = "distlock") -> None:
        """`prefix` begins every key and channel; the caches' own KEY_PREFIX is not used."""
        super().__init__(alias=alias, location=location)
        where = f"DISTLOCK[{alias!r}]"
        self._nodes = _checked(where, location)
        if not isinstance(prefix, str) or not prefix or set(prefix) & set("{} \n"):
            raise ImproperlyConfigured(f"{where}: PREFIX must be text without braces and blanks.")
        self._prefix = f"{prefix}:redlock:"
        self._template = lru_cache(maxsize=4096)(self._make_template)
        self._start()

    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy:
        """Take the lock at a majority, or nowhere; who waits has a place in each node's queue."""
        listener = self._listener
        if wait == 0:
            listener.forget(claim)
            return self._try(claim)
        if claim.wake is None:
            return self._try(claim, b"-", b"0")
        if not listener.running:
            # Most locks are free: a process that never waits needs no thread.
            grant = self._try(claim)
            if grant:
                return grant
        listener.start()
        ticket = listener.expect(claim, self._clock.stamp())
        result = self._try(claim, listener.channel, b"%d" % ticket)
        if result:
            listener.forget(claim)
        return result

    def _try(self, claim: Claim, *place: bytes) -> Grant | Busy:
        """Try once; `place` is the channel and the ticket of one who waits."""
        asked = monotonic()
        name = claim.name
        if len(name) > SHOWN_LENGTH or not name.isprintable():
            name = shown(name)
        stamp = self._clock.stamp(asked)
        tell_time = (b"", b"") if self._clock.due(asked) else ()
        ballot = self._ballot(
            ACQUIRE_OR_WAIT if place or tell_time else ACQUIRE,
            claim.key,
            claim.owner.encode(),
            _milliseconds(claim.ttl),
            f"{claim.holder} {name}".encode(),
            b"%d" % stamp,
            *(place or tell_time),
        )

        def undo_unless_won(panel: Panel) -> None:
            if len(ballot.yes) < ballot.majority:
                self._give_up(panel, claim, stamp, *place, but=ballot.no)

        self._quorum.ask([ballot], undo_unless_won)
        yes = [line.split() for line in ballot.yes.values()]
        no = [line.split() for line in ballot.no.values()]
        times = [int(words[2]) * 1_000_000 + int(words[3]) for words in yes + no if words[3:]]
        self._clock.learn(monotonic(), times)
        if len(yes) >= ballot.majority:
            fence = self._agree(claim, stamp, [int(words[1]) for words in yes])
            return Grant(claim, fence=fence, asked_at=asked, session=stamp)
        if len(yes) + len(no) < ballot.majority:
            raise self._quorum.failure(ballot)
        # Free enough when so many more are.
        lefts = sorted(int(words[1]) for words in no)
        left = lefts[min(ballot.majority - len(yes), len(lefts)) - 1]
        return Busy(free_in=left / 1000 if left >= 0 else None)

    def _agree(self, claim: Claim, stamp: int, fences: list[int]) -> int:
        """Return a fence that a majority knows, and that is greater than all before.

        Whoever was granted before left his fence at a majority, so at least one node of this one
        knows it and answered a greater number. If all gave the same, a majority knows that; else
        the greatest is made known.
        """
        fence = max(fences)
        if fences.count(fence) > len(self._nodes) // 2:
            return fence
        ballot = self._ballot(RAISE, claim.key, claim.owner.encode(), b"%d" % fence)

        def undo_unless_known(panel: Panel) -> None:
            if len(ballot.yes) < ballot.majority:
                self._give_up(panel, claim, stamp)

        self._quorum.ask([ballot], undo_unless_known)
        if len(ballot.yes) < ballot.majority:
            raise self._quorum.failure(ballot)
        return fence

    def _give_up(
        self,
        panel: Panel,
        claim: Claim,
        stamp: int,
        *place: bytes,
        but: Iterable[int] = (),
    ) -> None:
        """Release what was granted, or may yet be, over the connections that asked for it."""
        script = RELEASE_AND_WAIT if place else RELEASE
        words = claim.owner.encode(), b"%d" % stamp, *place
        ballot = self._ballot(script, claim.key, *words, keep=claim.ttl)
        panel.post(ballot, but=set(but))

    def extend(self, grant: Grant, ttl: float) -> bool:
        [result] = self.extend_many([(grant, ttl)])
        if isinstance(result, Exception):
            raise result
        return result

    def end_in(self, grant: Grant, ttl: float) -> bool:
        words = grant.claim.owner.encode(), _milliseconds(ttl), b"exactly"
        return self._answer(self._ballot(END_IN, grant.claim.key, *words))

    def extend_many(self, work: Sequence[tuple[Grant, float]]) -> list[bool | Exception]:
        results: list[bool | Exception] = []
        for start in range(0, len(work), BATCH):
            batch = work[start : start + BATCH]
            try:
                results += self._extend(batch)
            except BackendError as error:
                results += [error] * len(batch)
        return results

    def _extend(self, work: Sequence[tuple[Grant, float]]) -> list[bool | Exception]:
        ballots = [
            self._ballot(EXTEND, grant.claim.key, grant.claim.owner.encode(), _milliseconds(ttl))
            for grant, ttl in work
        ]

        def heal(panel: Panel) -> None:
            # A node that lost the lock, in a restart for instance, may have it again: the majority
            # that never lost it says that nobody else can have had it meanwhile.
            for ballot, (grant, ttl) in zip(ballots, work, strict=True):
                if ballot.no and len(ballot.yes) >= ballot.majority:
                    have = set(range(len(self._nodes))) - set(ballot.no)
                    panel.post(self._take_again(grant, ttl), but=have)

        self._quorum.ask(ballots, heal, grace=ANSWER_GRACE)
        return [self._outcome(ballot) for ballot in ballots]

    def _take_again(self, grant: Grant, ttl: float) -> Ballot:
        claim = grant.claim
        about = f"{claim.holder} {shown(claim.name)}".encode()
        # That of the grant: a process that resumes the hold has no greater one to release it.
        stamp = grant.session or self._clock.stamp()
        words = claim.owner.encode(), _milliseconds(ttl), about, b"%d" % stamp
        return self._ballot(ACQUIRE, claim.key, *words)

    def release(self, grant: Grant) -> bool:
        """Release it everywhere, also where nobody knows whether it was granted."""
        claim = grant.claim
        self._listener.forget(claim)
        # A hold may end in another process than it began, where the guess is another.
        stamp = max(self._clock.stamp(), grant.session or 0)
        words = claim.owner.encode(), b"%d" % stamp
        return self._answer(self._ballot(RELEASE, claim.key, *words, keep=claim.ttl, once=True))

    def _answer(self, ballot: Ballot) -> bool:
        self._quorum.ask([ballot])
        outcome = self._outcome(ballot)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _outcome(self, ballot: Ballot) -> bool | BackendError:
        if ballot.decided:
            return len(ballot.yes) >= ballot.majority
        return self._quorum.failure(ballot)

    def holders(self, key: str | None = None) -> Iterator[Holding]:
        if key is not None:
            yield from self._held([0], key).values()
            return
        for start in range(0, PARTS, BATCH):
            yield from self._held(range(start, start + BATCH)).values()

    def clear(self, key: str, if_version: str | None = None) -> int:
        held = self._held([0], key).items()
        owners = [owner for owner, h in held if if_version in (None, h.version)]
        if if_version is not None and not owners:
            return 0
        # Without `if_version`, also what a few nodes hold for nobody.
        ballot = self._ballot(CLEAR, key, owners[0].encode() if if_version is not None else b"")
        self._quorum.ask([ballot])
        if not ballot.decided:
            raise self._quorum.failure(ballot)
        return len(owners)

    def check(self, *, ask: bool = False) -> list[CheckMessage]:
        return check_nodes(self.alias, self.location, ask=ask)

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
        self._listener = Listener(
            f"{self._prefix}wake:{secrets.token_hex(8)}".encode(), self._quorum
        )
        self._clock = ServerClock()

    def _part(self, number: int) -> bytes:
        return f"{self._prefix}part:{number}".encode()

    def _make_template(self, script: NodeScript, key: str) -> bytes:
        lock = f"{self._prefix}{key}".encode()
        return script.template(lock, self._part(int(key[:4], 16) % PARTS))

    def _ballot(
        self, script: NodeScript, key: str, *words: bytes, keep: float = 0.0, once: bool = False
    ) -> Ballot:
        request = fill(self._template(script, key), *words)
        return Ballot(self._quorum.majority, script, request, keep=keep, once=once)

    def _held(self, parts: Iterable[int], key: str = "") -> dict[str, Holding]:
        """Return by owner what most nodes hold, or may hold: some may be down."""
        size = len(self._nodes)
        words = self._prefix.encode(), key.encode()
        ballots = [
            Ballot(size, LIST, LIST.template(self._part(number), *words)) for number in parts
        ]
        self._quorum.ask(ballots)
        holdings = {}
        for ballot in ballots:
            if len(ballot.yes) < self._quorum.majority:
                raise self._quorum.failure(ballot)
            found = defaultdict(list)
            for line in ballot.yes.values():
                _, now, listed = line.decode().split(" ", 2)
                for key, held, left, waiters in json.loads(listed):
                    if left > 0:
                        owner, fence, _, about = held.split(" ", 3)
                        found[key, owner].append((left, int(fence), waiters, about, int(now)))
            for (key, owner), at in found.items():
                if len(at) + size - len(ballot.yes) >= self._quorum.majority:
                    holdings[owner] = self._holding(key, at)
        return holdings

    def _holding(self, key: str, at: list[tuple[int, int, int, str, int]]) -> Holding:
        left, _, _, about, now = sorted(at)[-min(len(at), self._quorum.majority)]
        fence, _ = Counter(node[1] for node in at).most_common(1)[0]
        try:
            _, end = json.JSONDecoder().raw_decode(about)
        except ValueError:
            end = about.find(" ")
        return Holding(
            name=about[end + 1 :],
            key=key,
            alias=self.alias,
            version=str(fence),
            fence=fence,
            expires_in=left / 1000,
            # A fence is the servers' time unless a clock was set back.
            held_for=max(0.0, (now - fence) / 1e6),
            waiters=max(node[2] for node in at),
            holder=holder_fields(about[:end]),
        )


class ServerClock:
    """A guess of the nodes' time that is never later than the slowest of them."""

    def __init__(self) -> None:
        self._ahead: float | None = None  # of our monotonic clock, in microseconds, at least
        self._learned = 0.0
        self._last = 0

    def stamp(self, at: float | None = None) -> int:
        """Return the nodes' time in microseconds (now, or at our monotonic time `at`).

        Greater each time, and a small number as long as nothing is known.
        """
        if self._ahead is None:
            guess = 0
        else:
            guess = int((monotonic() if at is None else at) * 1e6 + self._ahead)
        self._last = max(guess, self._last + 1)
        return self._last

    def due(self, at: float) -> bool:
        """Tell whether the nodes should be asked for the time again."""
        return self._ahead is None or at - self._learned > LEARN_SECONDS

    def learn(self, heard: float, times: Sequence[int]) -> None:
        """Take what nodes said in answers that had come at our time `heard`.

        An answer that took long makes their clocks look slow, so that the greatest guess is next
        to the truth; it is given up slowly, as clocks may run at rates that differ, and at once
        when a clock was set back.
        """
        if not times:
            return
        ahead = min(times) - heard * 1e6
        if self._ahead is not None and ahead > self._ahead - SET_BY:
            ahead = max(ahead, self._ahead - (heard - self._learned) * 1e6 * RATE_DRIFT)
        self._ahead, self._learned = ahead, heard


def _checked(where: str, location: Any) -> list[tuple[str, Any]]:
    """Return the aliases of a LOCATION and how to connect to each, or say what is wrong."""
    if not isinstance(location, (list, tuple)) or not all(isinstance(a, str) for a in location):
        raise ImproperlyConfigured(
            f"{where}: LOCATION must be a list of aliases in CACHES, a server each."
        )
    if len(location) < 3 or len(location) % 2 == 0:
        raise ImproperlyConfigured(
            f"{where}: LOCATION names {len(location)} servers; a majority needs an odd number, at "
            "least 3: add one or take one away. For a single server use RedisBackend."
        )
    recipes = [(alias, recipe(alias)) for alias in location]
    names: dict[Any, str] = {}
    for alias in location:
        server = (server_of(alias) or (alias,))[0]
        if server in names:
            raise ImproperlyConfigured(
                f"{where}: LOCATION names the same server twice, as {names[server]!r} and "
                f"{alias!r}: a majority is one of independent servers, so name another."
            )
        names[server] = alias
    return recipes


def _milliseconds(seconds: float) -> bytes:
    return b"%d" % max(1, int(seconds * 1000))
