"""Inspection of locks on Redis, and their keys: who holds a lock, and who waits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...claims import Holding
from ...primitives.identity import holder_fields
from ...primitives.names import shown
from ..base import BaseLockBackend, batches
from .pool import Servers
from .scripts import EXTEND, Script, bulks, pack

# Requests in one round trip: their answers fit any socket buffer, and others get a turn.
BATCH = 500
# Parts of the index: Redis keeps a ZSET of up to 128 members without pointers, which takes 60
# bytes for a held lock instead of 170, up to about 100,000 of them. In a Cluster each part has a
# hash slot of its own, with the locks in it; a single server has them all in one.
PARTS = 1024
# So many waiters are listed.
MOST_QUEUED = 50


class Inspection(BaseLockBackend):
    """Lists what the index names, never by a scan over the keys of the server."""

    _pool: Servers
    _prefix: str
    _nodes: Any  # of a Cluster

    def holders(self, key: str | None = None) -> Iterator[Holding]:
        if key is None:
            parts = map(self._index, range(PARTS))
            keys = self._listed([pack(b"ZRANGE", part, b"0", b"-1") for part in parts])
        else:
            keys = [key]
        yield from (holding for _, holding in self._held(keys))

    def queue(self, key: str) -> list[Mapping[str, Any]]:
        queue = self._keys(key)[1]
        owners = self._pool.ask(pack(b"ZRANGE", queue, b"0", b"%d" % (MOST_QUEUED - 1)))[0]
        # "heard ttl channel limit holder name", or of a new member "fence limit holder name".
        words = [entry.decode().split(" ", 4) for entry in self._entries(key, owners) if entry]
        return [about_of(w[4])[0] for w in words if len(w) == 5 and not w[2].startswith("{")]

    def page(self, start: int, count: int) -> tuple[list[Holding], int]:
        seconds, micros = self._pool.ask(pack(b"TIME"))[0]
        now_ms = b"%d" % ((int(seconds) * 1_000_000 + int(micros)) // 1000)
        live = (now_ms, b"+inf")
        counts = self._ask([pack(b"ZCOUNT", self._index(part), *live) for part in range(PARTS)])
        ranges, skipped = [], 0
        for part, size in enumerate(counts):
            first = max(start - skipped, 0)
            last = min(start + count - skipped, size)
            if first < last:
                window = (b"LIMIT", b"%d" % first, b"%d" % (last - first))
                ranges.append(pack(b"ZRANGEBYSCORE", self._index(part), *live, *window))
            skipped += size
        return [holding for _, holding in self._held(self._listed(ranges))], sum(counts)

    def prolong(self, key: str, version: str, ttl: float) -> bool:
        for owner, holding in self._held([key]):
            if holding.version == version:
                request = self._make_head(EXTEND, key) + bulks(owner, milliseconds(ttl))
                return self._pool.run(EXTEND, request) == [1]
        return False

    def _base(self, part: int) -> str:
        """Return how the keys of this part begin: with their hash tag."""
        return f"{self._prefix}:{{{part if self._nodes else 0}}}:"

    def _lock(self, key: str) -> bytes:
        return f"{self._base(part_of(key))}{key}".encode()

    def _index(self, part: int) -> bytes:
        return f"{self._base(part)}held:{part}".encode()

    def _keys(self, key: str) -> list[bytes]:
        lock, part = self._lock(key), part_of(key)
        counter = f"{self._base(part)}fence".encode()
        return [lock, lock + b":q", lock + b":w", self._index(part), counter, lock + b":m"]

    def _make_head(self, script: Script, key: str) -> bytes:
        return script.head(*self._keys(key), key.encode())

    def _ask(self, requests: Sequence[bytes]) -> list[Any]:
        """Like the pool's `ask`, in round trips of a fair size."""
        return [answer for batch in batches(requests, BATCH) for answer in self._pool.ask(*batch)]

    def _listed(self, requests: Sequence[bytes]) -> list[str]:
        """Return the keys that these requests find in the index."""
        return [member.decode() for page in self._ask(requests) for member in page]

    def _held(self, keys: Sequence[str]) -> Iterator[tuple[bytes, Holding]]:
        """Yield each claim on these keys, with its owner."""
        for batch in batches(keys, BATCH):
            requests = []
            for lock in map(self._lock, batch):
                requests += [pack(b"GET", lock), pack(b"PTTL", lock), pack(b"ZCARD", lock + b":q")]
                requests.append(pack(b"ZRANGE", lock + b":m", b"0", b"-1", b"WITHSCORES"))
            (seconds, micros), *answers = self._pool.ask(pack(b"TIME"), *requests)
            now_us = int(seconds) * 1_000_000 + int(micros)
            for at, key in enumerate(batch):
                mutex, left, waiters, members = answers[4 * at : 4 * at + 4]
                if mutex is None:
                    claims = self._members(key, members, now_us)
                else:
                    owner, fence, about = mutex.split(b" ", 2)
                    claims = [(owner, b"%b 1 %b" % (fence, about), left)]
                for owner, entry, left in claims:
                    if left >= 0:
                        yield owner, holding_of(self.alias, key, entry, left, waiters, now_us)

    def _entries(self, key: str, owners: Sequence[bytes]) -> list[bytes | None]:
        """Return what is noted of each of these waiters or members of a lock."""
        if not owners:
            return []
        entries: list[bytes | None]
        [entries] = self._pool.ask(pack(b"HMGET", self._keys(key)[2], *owners))
        return entries

    def _members(
        self, key: str, members: Sequence[bytes], now_us: int
    ) -> list[tuple[bytes, bytes, int]]:
        """Return the owner, the entry, and the milliseconds left of each member of a lock."""
        owners, ends = members[::2], members[1::2]
        entries = self._entries(key, owners)
        now_ms = now_us // 1000  # as the scripts count
        found = zip(owners, entries, ends, strict=True)
        return [(owner, entry, int(end) - now_ms) for owner, entry, end in found if entry]


def holding_of(alias: str, key: str, entry: bytes, left: int, waiters: int, now_us: int) -> Holding:
    """Return what is shown of a claim: its `entry` is "fence limit holder name", as a member's.

    It has `left` milliseconds, at the server's time `now_us`.
    """
    fence, limit, about = entry.decode().split(" ", 2)
    holder, name = about_of(about)
    return Holding(
        name=name,
        key=key,
        alias=alias,
        version=fence,
        kind={"0": "shared", "1": "exclusive"}.get(limit, "permit"),
        fence=int(fence),
        expires_in=left / 1000,
        # A fence is the server's time unless its clock was set back.
        held_for=max(0.0, (now_us - int(fence)) / 1e6),
        waiters=waiters,
        holder=holder,
    )


def part_of(key: str) -> int:
    """Return the part of the index in which a key is."""
    return int(key[:4], 16) % PARTS


def about(holder: str, name: str) -> bytes:
    """Return what is shown of a claim: its holder and name."""
    return f"{holder} {shown(name)}".encode()


def about_of(text: str) -> tuple[Mapping[str, Any], str]:
    """Return holder and name of what `about` wrote."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        end = text.find(" ")
    return holder_fields(text[: max(end, 0)]), text[end + 1 :]


def milliseconds(seconds: float) -> bytes:
    """Write a time as scripts want it: at least 1."""
    return b"%d" % max(1, int(seconds * 1000))
