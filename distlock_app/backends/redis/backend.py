"""`RedisBackend`: locks on Redis or Valkey (6.0+) by Lua scripts, waiters in order of arrival.

On one server, on the master that a Sentinel names, or on the masters of a Cluster.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from redis.crc import key_slot

from ...claims import Busy, Claim, Grant
from ...errors import BackendError
from ...primitives.timing import monotonic
from ..base import GuardedWrites, batches, check_seconds
from . import scripts
from .alias import where
from .checks import check_server, check_sharing, refuse_wrong_prefix
from .cluster import Cluster
from .inspection import BATCH, Inspection, about, milliseconds, part_of
from .pool import Pool, Servers
from .scripts import REQUEST, Script, bulks, pack
from .waiting import Listener


class RedisBackend(Inspection, GuardedWrites):
    """Leases in Redis. LOCATION is an alias of CACHES; only its server and options are used."""

    fences = True
    shares = True
    queues = True
    limits = True
    latches = True
    prolongs = True
    pushes = True
    # Waiters ask at least so often: the scripts skip one that has not asked for three seconds.
    poll_max = 1.0

    def __init__(
        self,
        *,
        alias: str,
        location: Any = None,
        prefix: str = "distlock",
        cluster: Sequence[str] = (),
        replicas: int = 0,
        replicas_timeout: float = 0.5,
    ) -> None:
        """Keep the settings.

        `prefix` begins every key and channel; the cache's own KEY_PREFIX is not used. `cluster`
        are URLs of nodes, instead of LOCATION. A lock that `replicas` did not confirm within
        `replicas_timeout` seconds is not granted.
        """
        super().__init__(alias=alias, location=location)
        refuse_wrong_prefix(prefix)
        check_seconds(replicas_timeout=replicas_timeout)
        self._prefix = prefix
        self._channels = f"{prefix}:wake:"
        if type(replicas) is not int or replicas < 0:
            raise ImproperlyConfigured("REPLICAS must be a whole number.")
        self._recipe, self._nodes = where(location, cluster)
        longest = self._recipe.connection_kwargs["socket_timeout"]
        if replicas and not replicas_timeout < longest:
            raise ImproperlyConfigured(
                f"REPLICAS_TIMEOUT must be less than the socket timeout of {longest} s."
            )
        self._replicas, self._within = replicas, replicas_timeout
        self._head = lru_cache(maxsize=4096)(self._make_head)
        self._start()

    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy | None:
        """Take the lock or enter its queue; a woken caller has the lock already."""
        asked = monotonic()
        listener, channel = None, "-"
        if wait == 0:
            channel = ""
            self._forget(claim)
        elif self._listeners and claim.wake is not None:
            listener = self._listener(claim.key)
        if listener is None or not listener.subscribed:
            # Most locks are free: a process that never waits needs no subscription. This try enters
            # the queue ("-"): one that does not ("") takes a waiting claim out of it.
            answer = self._try(claim, channel, self._arrived(claim) if listener else 0)
            if answer[0]:
                return Grant(claim, answer[1], asked)
            if wait == 0 or claim.wake is None:
                return Busy(free_in=max(answer[1], 1) / 1000)
            listener = listener or self._listener(claim.key)
        channel = listener.channel if listener.ensure_subscribed() else "-"
        # In this order: what is lost from now on is seen in arm().
        losses, waiter, asked = listener.losses, listener.disarm(claim), monotonic()
        arrived = waiter.arrived if waiter else 0
        if waiter is None and len(self._listeners) > 1:  # perhaps it waits at another one
            arrived = self._arrived(claim)
        try:
            answer = self._try(claim, channel, arrived)
        except BaseException:
            listener.rearm(waiter)
            raise
        if not answer[0]:
            return listener.arm(claim, waiter, asked, answer, losses)
        if waiter is not None:
            listener.forget(claim)
        return Grant(claim, answer[1], asked)

    def acquire_all(self, claims: Sequence[Claim]) -> list[Grant] | None:
        mutexes = not any(claim.shared or claim.limit > 1 for claim in claims)
        # In a Cluster a script sees the keys of one hash slot only.
        if not mutexes or len({self._base(part_of(claim.key)) for claim in claims}) > 1:
            return None
        asked = monotonic()
        script = scripts.acquire_all(len(claims))
        keys = [key for claim in claims for key in self._keys(claim.key)]
        words: list[bytes] = []
        for claim in claims:
            words += [claim.key.encode(), claim.owner.encode()]
            words += [milliseconds(claim.ttl), about(claim.holder, claim.name)]
        granted, *fences = self._pool.run(script, script.head(*keys) + bulks(*words))
        if not granted:
            return None
        pairs = zip(claims, fences, strict=True)
        return [Grant(claim, fence=fence, asked_at=asked) for claim, fence in pairs]

    def _try(self, claim: Claim, channel: str, arrived: int) -> list[int]:
        """Try once; return 1 and the fence, or the rest of what the script answers."""
        script = scripts.PASS if claim.latch else scripts.ACQUIRE
        limit = 0 if claim.shared else claim.limit
        owner = claim.owner.encode()
        tail = _tail(arrived, claim.ttl, claim.holder, claim.name, channel, limit)
        request = REQUEST % (self._head(script, claim.key), len(owner), owner, tail)
        return self._pool.run(script, request)

    def extend(self, grant: Grant, ttl: float) -> bool:
        return self._run(scripts.EXTEND, grant.claim, milliseconds(ttl)) == [1]

    def server_of(self, key: str) -> object:
        return self._pool.serving(self._head(scripts.EXTEND, key))

    def end_in(self, grant: Grant, ttl: float) -> bool:
        return self._run(scripts.END_IN, grant.claim, milliseconds(ttl), b"exactly") == [1]

    def extend_many(self, work: Sequence[tuple[Grant, float]]) -> list[bool | Exception]:
        results: list[bool | Exception] = []
        requests = [
            self._request(scripts.EXTEND, grant.claim, milliseconds(ttl)) for grant, ttl in work
        ]
        for batch in batches(requests, BATCH):
            try:
                answers = self._pool.run_all(scripts.EXTEND, batch)
            except BackendError as error:
                results += [error] * len(batch)
            else:
                results += [a if isinstance(a, Exception) else a == [1] for a in answers]
        return results

    def release(self, grant: Grant) -> bool:
        """Give the lock to the next in the queue, or leave the queue."""
        claim = grant.claim
        if self._listeners:
            self._forget(claim)
        if claim.latch:  # of which nothing is held: the last try leaves its waiters
            self._try(claim, "", 0)
            return False
        owner = claim.owner.encode()
        request = REQUEST % (self._head(scripts.RELEASE, claim.key), len(owner), owner, b"")
        return self._pool.run(scripts.RELEASE, request, ends=True) == [1]

    def withdraw(self, claim: Claim) -> None:
        if not self._forget(claim):
            self._run(scripts.WITHDRAW, claim, b"1")

    def count_down(self, claim: Claim) -> int:
        words = milliseconds(claim.ttl), b"%d" % claim.limit
        return self._run(scripts.COUNT_DOWN, claim, *words)[0]

    def counted(self, key: str) -> int:
        return int(self._pool.ask(pack(b"ZCARD", self._keys(key)[5]))[0])

    def guarded_set(
        self,
        grant: Grant,
        key: str,
        value: str | bytes | int | float,
        *,
        release: bool = False,
        ttl: float | None = None,
    ) -> bool:
        """Write `value` to the Redis key `key` only if the lock is still ours; return whether.

        In the lock's database, under that very key, without a cache's prefix or serializer;
        it expires after `ttl` seconds. `release` gives the lock up in the same step. In a
        Cluster a key in another hash slot than the lock is a ValueError, which says what to do.
        """
        claim = grant.claim
        self._check_slot(claim, key)
        data = value if isinstance(value, bytes) else str(value).encode()
        head = scripts.GUARDED_SET.head(*self._keys(claim.key), key.encode(), claim.key.encode())
        until = b"0" if ttl is None else milliseconds(ttl)
        request = head + bulks(claim.owner.encode(), data, until, b"1" if release else b"0")
        return self._pool.run(scripts.GUARDED_SET, request, ends=release) == [1]

    def guarded_script(
        self, grant: Grant, script: str, keys: Sequence[str], args: Sequence[str | bytes | float]
    ) -> int | None:
        """Run a Lua script in the lock's database if the lock is still ours; see guarded_set().

        Return the number it returns, or None: not run. It is never sent twice, so a BackendError
        may come after it ran. A mistake in it is a LockError.
        """
        claim = grant.claim
        for key in keys:
            self._check_slot(claim, key)
        wrapped = scripts.guarded_script(script, len(keys), len(args))
        words = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in args]
        head = wrapped.head(*self._keys(claim.key), *(key.encode() for key in keys))
        request = head + bulks(claim.key.encode(), claim.owner.encode(), *words)
        ours, *number = self._pool.run_once(wrapped, request)
        return number[0] if ours else None

    def clear(self, key: str, if_version: str | None = None) -> int:
        # To the script an empty one is any; from a caller it is nobody's.
        version = "" if if_version is None else if_version or "none"
        request = self._head(scripts.CLEAR, key) + bulks(version.encode())
        return self._pool.run(scripts.CLEAR, request)[0]

    def check(self, *, ask: bool = False) -> list[CheckMessage]:
        messages = [*check_sharing(self.alias, self.location)]
        if ask:
            messages += check_server(self.alias, self._pool, self._replicas)[0]
        return messages

    def ping(self) -> None:
        for node in self._pool.nodes():
            node.ask(pack(b"PING"))

    def close(self) -> None:
        for listener in list(self._listeners.values()):
            listener.close()
        self._pool.close()
        self._start()

    def after_fork(self) -> None:
        # redis-py shuts no socket down in another process than its own (Connection.pid): the
        # child only loses its copies. Its locks are new too: a thread of the parent may have
        # held the old ones.
        self._start()

    def _start(self) -> None:
        make = partial(Pool, replicas=self._replicas, within=self._within)
        self._pool: Servers = (
            Cluster(self.alias, self._recipe, self._nodes, make)
            if self._nodes
            else make(self.alias, self._recipe)
        )
        self._listeners: dict[Pool, Listener] = {}

    def _listener(self, key: str) -> Listener:
        """Return the listener at the server of this lock.

        A script knows the subscribers of the server where it runs, so each server has a listener
        of its own, and what holds for one server holds in a Cluster.
        """
        node = self._pool.node(self._head(scripts.ACQUIRE, key))
        listener = self._listeners.get(node)
        if listener is None:
            channel = self._channels + secrets.token_hex(8)
            # A lock that a release hands over may not have reached the replicas: with REPLICAS the
            # waiter is told to try again, and that try asks them.
            grants = not self._replicas
            made = Listener(channel, node, self.release, alias=self.alias, grants=grants)
            listener = self._listeners.setdefault(node, made)
        return listener

    def _arrived(self, claim: Claim) -> int:
        """Return when a claim that asks again arrived, 0 for a new one; asks every listener.

        Its keys may have moved to another server meanwhile. No listener wakes it until it is armed.
        """
        waiters = [listener.disarm(claim) for listener in list(self._listeners.values())]
        return max((waiter.arrived for waiter in waiters if waiter), default=0)

    def _forget(self, claim: Claim) -> bool:
        # At every listener: keys may have moved to another server while their claim waited.
        shared = [listener.forget(claim) for listener in list(self._listeners.values())]
        return True in shared

    def _check_slot(self, claim: Claim, key: str) -> None:
        if self._nodes and key_slot(key.encode()) != key_slot(self._lock(claim.key)):
            raise ValueError(
                "In a Redis Cluster the key must be in the hash slot of its lock: it must contain "
                f"'{{{part_of(claim.key)}}}', with no other braces before it."
            )

    def _request(self, script: Script, claim: Claim, *words: bytes) -> bytes:
        return self._head(script, claim.key) + bulks(claim.owner.encode(), *words)

    def _run(self, script: Script, claim: Claim, *words: bytes) -> list[int]:
        return self._pool.run(script, self._request(script, claim, *words))


@lru_cache(maxsize=1024)
def _tail(arrived: int, ttl: float, holder: str, name: str, channel: str, limit: int) -> bytes:
    """Return the tail of an acquire request, which a thread sends again and again."""
    return bulks(
        b"%d" % arrived, milliseconds(ttl), about(holder, name), channel.encode(), b"%d" % limit
    )
