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
from ..base import check_seconds, result_of
from ..connecting import check_security, tls_context
from .inspection import Inspection
from .nodes import ClaimNode, DeletionWatch, Node, in_line, in_the_way_of
from .session import Gone, Session, unsigned

# A waiter looks at the queue again after so many seconds, even if its watch says nothing.
LOOK_AGAIN = 10.0
# A waiter that looks at the queue first proves that its session lives, unless that was proved less
# than this part of its ttl ago.
PROVED_BEFORE = 0.1


class ZooKeeperBackend(Inspection):
    """Locks that live as long as the session of their process; LOCATION lists hosts.

    A claim is an ephemeral node with a number. The lowest node of a lock holds it, and each of
    the others watches the node that is in its way, so that a release wakes one waiter.
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
            raise ImproperlyConfigured("LOCATION must be text like 'zk1:2181,zk2:2181/chroot'.")
        if not isinstance(prefix, str) or prefix in ("", ".", "..") or "/" in prefix:
            raise ImproperlyConfigured("PREFIX must be the name of a node.")
        check_seconds(timeout=timeout, session=session)
        check_security(user, password, (ca, cert, key), "" if tls else "TLS: True")
        self._root = f"/{prefix}"
        self._session = Session(
            alias,
            location,
            self._root,
            login=(user, password) if user else None,
            tls=tls_context(ca, cert, key) if tls else None,
            timeout=timeout,
            seconds=session,
        )
        self._start()

    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy | None:
        """Enter the queue, and take the lock if no claim is in the way."""
        session = self._session.id()
        own = self._nodes.get(claim.owner)
        if own is not None and not own.is_in(session):
            self._unwatch(own)
            own = None  # it ended with its session, or the answer to its creation was lost
        if own is not None and wait != 0:
            if monotonic() < own.look_again_at:
                return Busy()
            # One node, however long the queue.
            if own.behind is not None and self._watch(claim, own, own.behind):
                return Busy()
        # It may be trusted no longer than its session, whatever the claim asks for.
        ttl = min(claim.ttl, self._session.trusted)
        proved_since = monotonic() - ttl * PROVED_BEFORE
        if own is None:
            own, names = self._enter(claim, session)
        else:
            names = self._look(claim, proved_since)
        while ahead := self._ahead(claim, own, names):
            if wait == 0:
                self.release(Grant(claim))
                return Busy()
            if self._watch(claim, own, ahead[-1]):
                return Busy()
            names = self._look(claim, proved_since)
        if ahead is None:  # taken away
            self._forget(claim, own)
            return Busy()
        return self._granted(replace(claim, ttl=ttl), own)

    def extend(self, grant: Grant, ttl: float) -> bool:
        [result] = self.extend_many([(grant, ttl)])
        return result_of(result)

    def extend_many(self, work: Sequence[tuple[Grant, float]]) -> list[bool | BackendError]:
        self._session.prove()  # once for all
        owns = [self._nodes.get(grant.claim.owner, ClaimNode(0)) for grant, _ in work]
        paths = [own.path for own in owns if own.path]
        stats = self._ask_all("exists", paths)  # one server, which may be cut off: see prove()
        there = {path for path, stat in zip(paths, stats, strict=True) if stat is not None}
        session, trusted = self._session.id(), self._session.trusted
        too_long = BackendError(
            f"ZooKeeper {self.alias!r}: a session guarantees at most {trusted:.1f} seconds "
            "(OPTIONS: SESSION)."
        )
        results: list[bool | BackendError] = []
        for own, (_, ttl) in zip(owns, work, strict=True):
            # Not one of the session before: it may be there yet, and goes any moment.
            ours = own.is_in(session) and own.path in there
            results.append(too_long if ours and ttl > trusted else ours)
        return results

    def release(self, grant: Grant) -> bool:
        claim = grant.claim
        own = self._nodes.get(claim.owner)
        if own is None:  # nothing was sent, or it was released
            return False
        # A session that we closed takes its nodes along.
        deleted = not self._session.closed(own.session) and self._remove(claim, own)
        self._forget(claim, own)  # only now: what failed is tried again
        return deleted

    def ping(self) -> None:
        self._session.read_epoch()  # makes the directory
        self._session.try_write()

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
        # Before it is sent: so release() knows that there may be a node.
        own = self._nodes[claim.owner] = ClaimNode(session)
        try:
            return own, self._create(claim, own)
        except Gone:
            self._session.ask("ensure_path", self._shard(claim.key))
        return own, self._create(claim, own)

    def _create(self, claim: Claim, own: ClaimNode) -> list[str]:
        shard = self._shard(claim.key)
        kind = "r" if claim.shared else "w"
        path = f"{shard}/{claim.key}-{own.session:016x}-{kind}{claim.owner}-"
        about = json.dumps({"name": shown(claim.name), "holder": claim.holder}).encode()
        options = {"ephemeral": True, "sequence": True, "include_data": True}
        sent_at = monotonic()
        made = self._session.send("create", path, about, **options)
        listed = self._session.send("get_children", shard, include_data=True)
        names: list[str]
        names, directory = self._session.answer(listed)  # the later of the two
        name, stat = self._session.answer(made)
        if unsigned(stat.ephemeralOwner) != own.session:
            self._delete(name)
            raise BackendError(f"ZooKeeper {self.alias!r}: another session began meanwhile.")
        own.path, own.czxid, own.shard_czxid = name, stat.czxid, directory.czxid
        self._session.proved_at = max(self._session.proved_at, sent_at)
        return names

    def _look(self, claim: Claim, proved_since: float) -> list[str]:
        """Return what is in the directory, once a write has proved that the session lives."""
        if self._session.proved_at < proved_since:
            self._session.prove()
        return self._list(self._shard(claim.key))

    def _ahead(self, claim: Claim, own: ClaimNode, names: list[str]) -> list[Node] | None:
        """Return the nodes in the way, in order; None: our node is not there."""
        queue = in_line([Node.of(name) for name in names if name.startswith(claim.key)])
        mine = {node.name: node for node in queue if node.owner == claim.owner}
        if (ours := mine.pop(own.name, None)) is None:
            return None
        for name in mine:  # made by an earlier try whose answer was lost
            self._delete(f"{self._shard(claim.key)}/{name}")
        return in_the_way_of(ours, queue)

    def _remove(self, claim: Claim, own: ClaimNode) -> bool:
        """Delete the node of a claim; return whether it was there."""
        if own.path:
            return self._delete(own.path)
        # The answer to its creation was lost.
        self._session.prove()  # by then this server knows what another one did
        shard = self._shard(claim.key)
        ours = [name for name in self._list(shard) if Node.of(name).owner == claim.owner]
        return sum(self._delete(f"{shard}/{name}") for name in ours) > 0

    def _granted(self, claim: Claim, own: ClaimNode) -> Grant | Busy:
        proved_at = self._session.proved_at
        fence = self._session.epoch(own.shard_czxid) + own.czxid
        if self._session.id() != own.session:  # what was proved may be of the next one
            self._forget(claim, own)
            return Busy()
        return Grant(claim, fence, proved_at)

    def _watch(self, claim: Claim, own: ClaimNode, node: Node) -> bool:
        """Have the claim woken when `node` goes; False: it has gone."""
        path = f"{self._shard(claim.key)}/{node.name}"
        self._unwatch(own)
        own.look_again_at, own.behind = monotonic() + LOOK_AGAIN, node
        forget = partial(self._deletions.pop, path, None)
        own.awaits = self._deletions.setdefault(path, DeletionWatch(forget))
        own.awaits.wakes[own] = claim.wake
        try:
            # Not exists(): that would leave a watch for a node that never comes.
            self._session.ask("get", path, watch=own.awaits)
        except BaseException as error:
            forget()  # kazoo may never call it
            self._unwatch(own)
            own.look_again_at, own.behind = 0.0, None
            if isinstance(error, Gone):
                return False
            raise
        return True

    def _unwatch(self, own: ClaimNode) -> None:
        if own.awaits is not None:
            own.awaits.wakes.pop(own, None)
            own.awaits = None

    def _forget(self, claim: Claim, own: ClaimNode) -> None:
        self._unwatch(own)
        self._nodes.pop(claim.owner, None)
