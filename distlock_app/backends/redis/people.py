"""The keys of locks on Redis, and what people read there: who holds a lock, and who waits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...claims import Holding
from ...primitives.names import shown
from ..base import BaseLockBackend
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


class ForPeople(BaseLockBackend):
    """Lists what the index names, never by a scan over the keys of the server."""

    _pool: Servers
    _prefix: str
    _nodes: Any  # of a Cluster

    def holders(self, key: str | None = None) -> Iterator[Holding]:
        if key is not None:
            yield from self._holdings([key])
            return
        for start in range(0, PARTS, BATCH):
            parts = range(start, min(start + BATCH, PARTS))
            pages = self._pool.ask(
                *[pack(b"ZRANGE", self._index(part), b"0", b"-1") for part in parts]
            )
            keys = [member.decode() for page in pages for member in page]
            for at in range(0, len(keys), BATCH):
                yield from self._holdings(keys[at : at + BATCH])

    def queue(self, key: str) -> list[Mapping[str, Any]]:
        _, queue, claims, *_ = self._keys(key)
        owners = self._pool.ask(pack(b"ZRANGE", queue, b"0", b"%d" % (MOST_QUEUED - 1)))[0]
        if not owners:
            return []
        entries = self._pool.ask(pack(b"HMGET", claims, *owners))[0]
        # "heard ttl channel limit holder name", or of a new member "fence limit holder name".
        words = [entry.decode().split(" ", 4) for entry in entries if entry]
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
        keys = [member.decode() for page in self._ask(ranges) for member in page]
        batches = (keys[at : at + BATCH] for at in range(0, len(keys), BATCH))
        return [h for batch in batches for h in self._holdings(batch)], sum(counts)

    def prolong(self, key: str, version: str, ttl: float) -> bool:
        lock = self._lock(key)
        requests = pack(b"GET", lock), pack(b"ZRANGE", lock + b":m", b"0", b"-1")
        held, owners = self._pool.ask(*requests)
        if held is not None:
            owner, fence, _ = held.split(b" ", 2)
            fences = {fence: owner}
        elif owners:
            entries = self._pool.ask(pack(b"HMGET", lock + b":w", *owners))[0]
            fences = {e.split(b" ", 1)[0]: o for e, o in zip(entries, owners, strict=True) if e}
        else:
            fences = {}
        if (owner := fences.get(version.encode())) is None:
            return False
        request = self._make_head(EXTEND, key) + bulks(owner, milliseconds(ttl))
        return self._pool.run(EXTEND, request) == [1]

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
        batches = (requests[at : at + BATCH] for at in range(0, len(requests), BATCH))
        return [answer for batch in batches for answer in self._pool.ask(*batch)]

    def _holdings(self, keys: Iterable[str]) -> Iterator[Holding]:
        locks = {key: self._lock(key) for key in keys}
        requests = []
        for lock in locks.values():
            requests += [pack(b"GET", lock), pack(b"PTTL", lock), pack(b"ZCARD", lock + b":q")]
            requests.append(pack(b"ZRANGE", lock + b":m", b"0", b"-1", b"WITHSCORES"))
        if not requests:
            return
        seconds, micros = (answers := self._pool.ask(pack(b"TIME"), *requests))[0]
        now = int(seconds) + int(micros) / 1e6
        now_ms = (int(seconds) * 1_000_000 + int(micros)) // 1000  # as the scripts count
        for at, (key, lock) in enumerate(locks.items()):
            held, left, waiters, members = answers[1 + 4 * at : 5 + 4 * at]
            if held is not None and left > 0:
                _, fence, about = held.decode().split(" ", 2)
                yield self._holding(key, "1", fence, about, left / 1000, waiters, now)
            elif members:
                tokens, ends = members[::2], members[1::2]
                entries = self._pool.ask(pack(b"HMGET", lock + b":w", *tokens))[0]
                for entry, end in zip(entries, ends, strict=True):
                    if entry is not None and (left := int(end) - now_ms) >= 0:
                        fence, limit, about = entry.decode().split(" ", 2)
                        yield self._holding(key, limit, fence, about, left / 1000, waiters, now)

    def _holding(
        self, key: str, limit: str, fence: str, about: str, left: float, waiters: int, now: float
    ) -> Holding:
        holder, name = about_of(about)
        return Holding(
            name=name,
            key=key,
            alias=self.alias,
            version=fence,
            kind={"0": "shared", "1": "exclusive"}.get(limit, "permit"),
            fence=int(fence),
            expires_in=left,
            # A fence is the server's time unless its clock was set back.
            held_for=max(0.0, now - int(fence) / 1e6),
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
        holder, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        holder, end = {}, text.find(" ")
    return holder, text[end + 1 :]


def milliseconds(seconds: float) -> bytes:
    """Write a time as scripts want it: at least 1."""
    return b"%d" % max(1, int(seconds * 1000))
