"""`EtcdBackend`: a queue of leased keys for each lock, first come first served."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ...claims import Busy, Claim, Grant
from ...errors import BackendError
from ...primitives.names import shown
from ...primitives.timing import monotonic
from ..base import ConnectionLost, check_seconds
from ..connecting import check_security, tls_context
from .entries import Entry, View, Waiter, Waiters, delete, endpoints, entry_of, put, range_of
from .gateway import NOT_FOUND, Doubt, Gateway, Refused, decoded, encoded
from .inspection import Inspection
from .leases import Lease, Leases
from .watch import Watch


class EtcdBackend(Inspection):
    """Leases in etcd. LOCATION is a URL, several with commas between, or a list of them.

    A claim is a key with a lease. The oldest key of a lock holds it, and each other key waits for
    the end of the one before it, so that a release wakes one waiter. Only revisions decide.
    """

    check_id = "distlock_app.E015"
    fences = True
    queues = True
    pushes = True
    # A waiter looks by itself so often: the connection of the watch may die without a sign.
    poll_max = 1.0

    def __init__(
        self,
        *,
        alias: str,
        location: Any = None,
        prefix: str = "distlock",
        user: str = "",
        password: str = "",
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        timeout: float = 3.0,
    ) -> None:
        """`prefix` begins every key; `ca`, `cert`, `key` are files; `timeout` is for an answer."""
        super().__init__(alias=alias, location=location)
        if not isinstance(prefix, str) or not prefix:
            raise ImproperlyConfigured("PREFIX must be text.")
        check_seconds(timeout=timeout)
        self._prefix = prefix
        self._read_epoch = {"request_range": {"key": encoded(f"{prefix}.epoch")}}
        urls, files = endpoints(location), (ca, cert, key)
        encrypted = any(url.lower().startswith("https:") for url in urls)
        lacks = "" if encrypted else "a LOCATION that begins with https:"
        check_security(user, password, files, lacks)
        tls = tls_context(*files) if encrypted else None
        login = {"name": user, "password": password} if user else None
        self._new_gateway = partial(Gateway, alias, urls, timeout=timeout, tls=tls, login=login)
        self._start()

    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy | None:
        """Take the lock in one request if it is free, or enter its queue."""
        waiter = self._waiters.get((claim.owner, claim.key))
        if waiter is None:
            waiter = Waiter(self._leases.take(claim.ttl))
        elif waiter.lease.is_due:
            self._leases.renew(waiter.lease)
        if wait != 0:
            # Whatever leaves the queue wakes us, until we know the key before ours.
            waiter.awaits, waiter.wake = self._queue_of(claim.key), claim.wake
            self._waiters[claim.owner, claim.key] = waiter
        view = self._enter(claim, waiter, stay=wait != 0)
        at = view.position_of(self._key(claim))
        if at == 0:
            return self._granted(claim, view, waiter.lease)
        if at is not None:
            waiter.lease = self._lease_of(view.queue[at], waiter.lease)
        if wait == 0 or at is None:
            return self._leave(claim, view, waiter.lease)
        waiter.awaits, waiter.created = view.queue[at - 1].key, view.queue[at - 1].created
        self._watch.start()
        return Busy()

    def look(self, claim: Claim) -> Busy | None:
        """See whether the key before ours is still there: one key, however long the queue."""
        waiter = self._waiters.get((claim.owner, claim.key))
        if waiter is None or not waiter.awaits:
            return None
        if waiter.lease.is_due and not self._leases.renew(waiter.lease):
            return None
        ahead = self._entry(waiter.awaits)
        return Busy() if ahead is not None and ahead.created == waiter.created else None

    def extend(self, grant: Grant, ttl: float) -> bool:
        entry = self._entry(self._key(grant.claim))
        if entry is None:
            return False
        lease = self._leases.of(entry.lease)
        if not self._leases.renew(lease):
            return False  # it has gone, and its key with it
        return lease.seconds >= ttl or self._give_lease(entry, ttl)

    def end_in(self, grant: Grant, ttl: float) -> bool:
        entry = self._entry(self._key(grant.claim))
        return entry is not None and self._give_lease(entry, ttl)

    def release(self, grant: Grant) -> bool:
        claim = grant.claim
        self._forget(claim)
        deleted = self._delete(self._key(claim))
        if deleted is not None:
            self._leases.give_back(deleted.lease)
        return deleted is not None

    def withdraw(self, claim: Claim) -> None:
        waiter = self._waiters.get((claim.owner, claim.key))
        # Else another claim of this owner has asked since.
        if waiter is not None and waiter.wake == claim.wake:
            view = self._look(claim.key)
            if view.position_of(self._key(claim)):
                self._leave(claim, view, waiter.lease)
            self._forget(claim)

    def clear(self, key: str, if_version: str | None = None) -> int:
        view = self._look(key)
        first = view.queue[0] if view.queue else None
        if first is None or if_version not in (None, str(view.epoch + first.created)):
            return 0
        # Not repeated: the second answer would be that it was not there.
        return int(self._if_there(first, delete(first.key), repeat=False))

    def ping(self) -> None:
        # Deletes nothing, but is refused to a user that may only read.
        self._gateway.ask("/v3/kv/deleterange", {"key": encoded(f"{self._prefix}/ping")})

    def close(self) -> None:
        self._watch.end()
        self._gateway.close()
        self._start()

    def after_fork(self) -> None:
        self._watch.forget()
        self._gateway.close()  # copies: the parent's connections live on
        self._start()

    def _start(self) -> None:
        self._gateway = self._new_gateway()
        self._leases = Leases(self._gateway)
        self._waiters = Waiters()
        self._watch = Watch(
            self._gateway,
            range_of(f"{self._prefix}/"),
            self._waiters,
            f"distlock-watch-{self.alias}",
        )

    def _enter(self, claim: Claim, waiter: Waiter, *, stay: bool) -> View:
        """Take the lock if its queue is empty; else join the end of it, if we `stay`.

        Both may be repeated: a key that is there keeps its position and its lease.
        """
        try:
            return self._put(claim, waiter.lease, stay)
        except Refused as error:
            if error.code != NOT_FOUND:
                raise
        # The lease has gone, and its key with it: lost by the server, or revoked.
        waiter.lease = self._leases.new(claim.ttl)
        return self._put(claim, waiter.lease, stay)

    def _put(self, claim: Claim, lease: Lease, stay: bool) -> View:
        about = json.dumps({"name": shown(claim.name), "holder": claim.holder})
        write = put(self._key(claim), about, lease)
        read = [self._read_queue(claim.key), self._read_epoch]
        # etcd compares with each key of the range: there must be none.
        keys = {"key": encoded(self._key(claim))} if stay else range_of(self._queue_of(claim.key))
        none_exists = {**keys, "target": "CREATE", "create_revision": 0}
        return self._view([none_exists], [write, *read], read, doubt=lease.doubt)

    def _leave(self, claim: Claim, view: View, lease: Lease) -> Grant | Busy:
        """Leave the queue, unless our key is its first by now.

        Then another thread or process with the same owner may hold the lock.
        """
        key = self._key(claim)
        while at := view.position_of(key):
            if self._if_there(view.queue[0], delete(key)):
                break
            view = self._look(claim.key)
        if at == 0:
            return self._granted(claim, view, lease)
        self._forget(claim)
        self._leases.give_back(lease.id)
        return Busy()

    def _give_lease(self, entry: Entry, ttl: float) -> bool:
        """Give a key another lease; return whether it was still there."""
        lease = self._leases.new(ttl)
        write = put(entry.key, decoded(entry.value), lease)
        there = self._if_there(entry, write, doubt=lease.doubt)
        self._leases.give_back(entry.lease if there else lease.id)
        return there

    def _if_there(self, entry: Entry, request: dict[str, Any], **how: Any) -> bool:
        """Carry out the request if an entry is still there; return whether it was."""
        answer = self._gateway.txn([entry.condition], [request], [], **how)
        return bool(answer.get("succeeded"))

    def _forget(self, claim: Claim) -> None:
        self._waiters.pop((claim.owner, claim.key), None)

    def _granted(self, claim: Claim, view: View, lease: Lease) -> Grant | Busy:
        first, asked_at = view.queue[0], view.asked_at
        lease = self._lease_of(first, lease)
        grant = Grant(claim, view.epoch + first.created, asked_at)
        if not lease.covers(claim.ttl, asked_at):
            grant = replace(grant, asked_at=monotonic())
            if not self.extend(grant, claim.ttl):
                return Busy()
        self._forget(claim)
        return grant

    def _lease_of(self, entry: Entry, lease: Lease) -> Lease:
        """Return the lease of a key of ours: another if an answer was lost, or an owner shared."""
        if entry.lease == lease.id:
            return lease
        self._leases.give_back(lease.id)
        return self._leases.of(entry.lease)

    def _delete(self, key: str) -> Entry | None:
        """Delete a key; return what it was."""
        request = {"key": encoded(key), "prev_kv": True}
        try:
            answer = self._gateway.ask("/v3/kv/deleterange", request, repeat=False)
        except ConnectionLost as error:
            answer = self._gateway.ask("/v3/kv/deleterange", request)
            if "prev_kvs" not in answer:
                raise BackendError(
                    f"etcd {self.alias!r} lost the answer to a release: the lock is no longer "
                    "ours, but may have been lost before."
                ) from error
        return entry_of(answer["prev_kvs"][0]) if "prev_kvs" in answer else None

    def _key(self, claim: Claim) -> str:
        return self._queue_of(claim.key) + claim.owner

    def _read_queue(self, key: str) -> dict[str, Any]:
        order = {"sort_order": "ASCEND", "sort_target": "CREATE", "keys_only": True}
        return {"request_range": {**range_of(self._queue_of(key)), **order}}

    def _look(self, key: str) -> View:
        return self._view([], [self._read_queue(key), self._read_epoch], [])

    def _view(self, *txn: list[dict[str, Any]], doubt: Doubt | None = None) -> View:
        """Run a transaction that reads the queue and the epoch last."""
        asked_at = monotonic()
        answer = self._gateway.txn(*txn, doubt=doubt)
        queue, epoch = (
            response["response_range"].get("kvs", []) for response in answer["responses"][-2:]
        )
        return View(asked_at, [entry_of(kv) for kv in queue], self._epoch(epoch))

    def _entry(self, key: str) -> Entry | None:
        found = self._gateway.ask("/v3/kv/range", {"key": encoded(key)})
        return entry_of(found["kvs"][0]) if "kvs" in found else None
