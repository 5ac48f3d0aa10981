"""`ZooKeeperBackend`: a queue of ephemeral nodes for each lock, first come first served."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ...claims import Busy, Claim, Grant
from ...errors import BackendError
from ...primitives.names import shown
from ...primitives.timing import monotonic
from .nodes import ClaimNode, DeletionWatch, Node, in_line
from .people import BATCH, ForPeople
from .session import Gone, Session

# A waiter looks at the queue again after so many seconds, even if its watch says nothing.
LOOK_AGAIN = 10.0
# A waiter that looks at the queue proves that its session lives, unless that was proved so little
# of the ttl before.
PROVED_BEFORE = 0.1


class ZooKeeperBackend(ForPeople):
    """Locks that live as long as the session of their process; LOCATION lists hosts.

    A claim is an ephemeral node with a number. The lowest of a lock has it, and each of the
    others watches the one that is in its way, so that a release wakes one waiter.
    """

    check_id = "distlock_app.E016"
    expires = False
    fences = True
    shares = True
    queues = True
    pushes = True
    poll_max = 1.0

    def __init__(
        self,
        *,
        alias: str,
        location: Any = None,
        prefix: str = "distlock",
        user: str = "",
        password: str = "",
        tls: bool = False,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        timeout: float = 3.0,
        session: float = 30.0,
    ) -> None:
        """`timeout` of an answer and length of a `session`, in seconds; files for `tls`."""
        super().__init__(alias=alias, location=location)
        if not isinstance(location, str) or not location.strip():
            raise ImproperlyConfigured(
                f"DISTLOCK[{alias!r}]: LOCATION must be text like 'zk1:2181,zk2:2181/chroot'."
            )
        if not isinstance(prefix, str) or not prefix or "/" in prefix:
            raise ImproperlyConfigured(f"DISTLOCK[{alias!r}]: PREFIX must be text without '/'.")
        self._root = f"/{prefix}"
        self._session = Session(
            alias,
            location,
            login=(user, password) if user else None,
            tls={"ca": ca, "certfile": cert, "keyfile": key} if tls else None,
            timeout=timeout,
            seconds=session,
        )
        self._start()

    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy | None:
        """Enter the queue, and take the lock if no claim is in the way."""
        session = self._session.id()
        own = self._nodes.get(claim.owner)
        if own is not None and (own.session != session or not own.path):
            own = None  # it ended with that session, or the answer to its creation was lost
        if own is not None and monotonic() < own.look_again_at and wait != 0:
            return Busy()
        # It may be trusted no longer than its session, whatever the claim asks for.
        ttl = min(claim.ttl, self._session.trusted)
        proved_since = monotonic() - ttl * PROVED_BEFORE
        while True:
            if own is None:
                own, names = self._enter(claim, session)
            else:
                if self._session.proved_at < proved_since:
                    self._session.prove(self._root)
                names = self._list(self._shard(claim.key))
            ahead = self._ahead(claim, own, names)
            if ahead is None:  # taken away
                self._nodes.pop(claim.owner, None)
                return Busy()
            if not ahead:
                return self._granted(replace(claim, ttl=ttl), own)
            if wait == 0:
                self.release(Grant(claim))
                return Busy()
            if self._watch(claim, own, ahead[-1]):
                return Busy()

    def extend(self, grant: Grant, ttl: float) -> bool:
        self._session.prove(self._root)
        return self._outcome(self._extend(grant, ttl))

    def extend_many(self, work: Sequence[tuple[Grant, float]]) -> list[Any]:
        results: list[Any] = []
        self._session.prove(self._root)  # once for all
        for start in range(0, len(work), BATCH):
            sent: list[Any] = []
            for item in work[start : start + BATCH]:
                try:
                    sent.append(self._extend(*item))
                except BackendError as error:
                    sent.append(error)
            for one in sent:
                try:
                    results.append(self._outcome(one))
                except BackendError as error:
                    results.append(error)
        return results

    def release(self, grant: Grant) -> bool:
        claim = grant.claim
        own = self._nodes.get(claim.owner) or grant.session
        if own is None or self._session.closed(own.session):
            deleted = False  # nothing was sent, or it ended with that session
        elif own.path:
            deleted = self._delete(own.path)
        else:  # The answer to its creation was lost.
            self._session.prove(self._root)  # by then this server knows what another one did
            shard = self._shard(claim.key)
            ours = [name for name in self._list(shard) if Node.of(name).owner == claim.owner]
            deleted = sum(self._delete(f"{shard}/{name}") for name in ours) > 0
        if own is not None:
            self._unwatch(own)
        self._nodes.pop(claim.owner, None)  # only now: what failed is tried again
        return deleted

    def ping(self) -> None:
        self._session.ask("exists", self._root)

    def close(self) -> None:
        self._session.close()
        self._start()

    def after_fork(self) -> None:
        self._session.forget()
        self._start()

    def _start(self) -> None:
        self._nodes: dict[str, ClaimNode] = {}  # of the claims that wait or hold, by owner
        self._deletions: dict[str, DeletionWatch] = {}  # of nodes that are waited for, by path

    def _enter(self, claim: Claim, session: int) -> tuple[ClaimNode, list[str]]:
        """Make the claim's node; return it, and what is in the directory then.

        Both in one round trip: ZooKeeper answers requests in the order in which they came.
        """
        shard = self._shard(claim.key)
        kind = "r" if claim.shared else "w"
        path = f"{shard}/{claim.key}-{session:016x}-{kind}{claim.owner}-"
        about = json.dumps({"name": shown(claim.name), "holder": claim.holder}).encode()
        options = {"ephemeral": True, "sequence": True, "include_data": True}
        sent_at = monotonic()
        # Before it is sent: so release() knows that there may be a node.
        own = self._nodes[claim.owner] = ClaimNode("", 0, session)
        for first in (True, False):
            made = self._session.send("create", path, about, **options)
            listed = self._session.send("get_children", shard, include_data=True)
            try:
                names, directory = self._session.answer(listed)  # the later of the two
                name, stat = self._session.answer(made)
            except Gone:
                if not first:
                    raise BackendError(f"ZooKeeper {self.alias!r} has lost {shard}.") from None
                self._session.ask("ensure_path", shard)
                continue
            if stat.ephemeralOwner & (1 << 64) - 1 != session:
                self._delete(name)
                raise BackendError(f"ZooKeeper {self.alias!r}: another session began meanwhile.")
            own.path, own.czxid, own.shard_czxid = name, stat.czxid, directory.czxid
            self._session.proved_at = max(self._session.proved_at, sent_at)
            return own, names
        raise AssertionError("unreachable")

    def _ahead(self, claim: Claim, own: ClaimNode, names: list[str]) -> list[Node] | None:
        """Return the nodes in the way, in order; None: our node is not there."""
        queue = in_line([Node.of(name) for name in names if name.startswith(claim.key)])
        ours = own.path.rpartition("/")[2]
        at = next((at for at, node in enumerate(queue) if node.name == ours), None)
        if at is None:
            return None
        for node in queue:  # made by an earlier try whose answer was lost
            if node.owner == claim.owner and node.name != ours:
                self._delete(f"{self._shard(claim.key)}/{node.name}")
        before = [node for node in queue[:at] if node.owner != claim.owner]
        return [node for node in before if node.kind == "w"] if claim.shared else before

    def _granted(self, claim: Claim, own: ClaimNode) -> Grant | Busy:
        proved_at = self._session.proved_at
        fence = self._session.epoch(self._root, own.shard_czxid) + own.czxid
        if self._session.id() != own.session:  # what was proved may be of the next one
            return Busy()
        return Grant(claim, fence, proved_at, own)

    def _watch(self, claim: Claim, own: ClaimNode, node: Node) -> bool:
        """Have the claim woken when `node` goes; False: it has gone."""
        path = f"{self._shard(claim.key)}/{node.name}"
        self._unwatch(own)
        own.look_again_at = monotonic() + LOOK_AGAIN
        forget = partial(self._deletions.pop, path, None)
        own.awaits = self._deletions.setdefault(path, DeletionWatch(forget))
        own.awaits.wakes[own] = claim.wake
        try:
            # Not exists(): that would leave a watch for a node that never comes.
            self._session.ask("get", path, watch=own.awaits)
        except BaseException as error:
            forget()  # kazoo may never call it
            self._unwatch(own)
            own.look_again_at = 0.0
            if isinstance(error, Gone):
                return False
            raise
        return True

    def _unwatch(self, own: ClaimNode) -> None:
        if own.awaits is not None:
            own.awaits.wakes.pop(own, None)
            own.awaits = None

    def _extend(self, grant: Grant, ttl: float) -> tuple[Any, Any]:
        own = grant.session or self._nodes.get(grant.claim.owner)
        if own is None or own.session != self._session.id():
            return None, None
        if ttl > self._session.trusted:
            raise BackendError(
                f"ZooKeeper {self.alias!r}: a session guarantees at most "
                f"{self._session.trusted:.1f} seconds (OPTIONS: SESSION)."
            )
        return own, self._session.send("exists", own.path)

    def _outcome(self, sent: Any) -> bool:
        if isinstance(sent, BackendError):
            raise sent
        own, result = sent
        if own is None:
            return False
        stat = self._session.answer(result)  # by one server, which may be cut off: see prove()
        # Not the session of before: its node may be there yet, and goes any moment.
        return stat is not None and stat.ephemeralOwner & (1 << 64) - 1 == self._session.id()
