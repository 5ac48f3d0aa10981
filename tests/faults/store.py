"""A store that takes no write with a smaller fence than the last, apart from every fault."""

from __future__ import annotations

import redis

# KEYS: the last fence, the log of accepted writes. ARGV: the fence as 20 digits, who writes.
WRITE = """
local last = redis.call('GET', KEYS[1])
if last and ARGV[1] < last then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
return redis.call('RPUSH', KEYS[2], ARGV[2])
"""


class FencedStore:
    """Keeps, for each name, the last fence and who wrote, in order."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url, decode_responses=True)
        # Without what a client does around each command: workers write for much of their time.
        self._connection = self.client.connection_pool.get_connection()
        self._sha = self.client.script_load(WRITE)

    def write(self, name: str, fence: int | None, writer: str) -> bool:
        """Write, or refuse a smaller fence; an owner without a fence always writes."""
        number = "9" * 20 if fence is None else f"{fence:020d}"
        keys = (f"{name}:last", f"{name}:log")
        self._connection.send_command("EVALSHA", self._sha, 2, *keys, number, writer)
        return bool(self._connection.read_response())

    def accepted(self, name: str) -> list[str]:
        """Return who wrote, in order."""
        writers: list[str] = self.client.lrange(f"{name}:log", 0, -1)  # type: ignore[assignment]
        return writers
