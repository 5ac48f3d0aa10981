"""A simple lock on Redis, and five ways to break it, which the checker has to find."""

from __future__ import annotations

from typing import Any

import redis

from distlock_app.backends.base import BaseLockBackend
from distlock_app.claims import Busy, Claim, Grant
from distlock_app.errors import BackendError
from tests.faults.base import Act
from tests.faults.on_redis import Redis


class SimpleLock(BaseLockBackend):
    """SET NX PX, compare and delete, and a fence of the server's clock. LOCATION is a URL."""

    fences = True

    # KEYS: the lock, its last fence. ARGV: the owner, the ttl in milliseconds.
    grant = """
    local owner = redis.call('GET', KEYS[1])
    if owner and owner ~= ARGV[1] then return false end
    if owner then return redis.call('GET', KEYS[2]) end
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
    local now = redis.call('TIME')
    local fence = now[1] * 1000000 + now[2]
    local last = tonumber(redis.call('GET', KEYS[2]) or 0)
    if fence <= last then fence = last + 1 end
    fence = string.format('%.0f', fence)
    redis.call('SET', KEYS[2], fence)
    return fence
    """
    extension = """
    if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
    return redis.call('PEXPIRE', KEYS[1], ARGV[2])
    """
    end = """
    if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
    return redis.call('DEL', KEYS[1])
    """

    def acquire(self, claim: Claim, wait: float | None) -> Grant | Busy | None:
        fence = self._ask(self.grant, claim, claim.ttl)
        return Busy() if fence is None else Grant(claim, int(fence))

    def extend(self, grant: Grant, ttl: float) -> bool:
        return bool(self._ask(self.extension, grant.claim, ttl))

    def release(self, grant: Grant) -> bool:
        return bool(self._ask(self.end, grant.claim, 0))

    def _ask(self, script: str, claim: Claim, ttl: float) -> Any:
        if not hasattr(self, "_client"):
            self._client = redis.Redis.from_url(self.location, decode_responses=True)
        keys = [f"{claim.key}:lock", f"{claim.key}:fence"]
        try:
            return self._client.eval(script, 2, *keys, claim.owner, int(ttl * 1000))
        except redis.RedisError as error:
            raise BackendError(str(error)) from error

    def close(self) -> None:
        self.__dict__.pop("_client", None)


class DeletesWithoutComparing(SimpleLock):
    """Whoever releases takes the lock from whoever has it."""

    end = "return redis.call('DEL', KEYS[1])"


class NeverExpires(SimpleLock):
    """A dead owner has it for ever."""

    grant = SimpleLock.grant.replace(", 'PX', ARGV[2]", "")
    extension = SimpleLock.extension.replace("redis.call('PEXPIRE', KEYS[1], ARGV[2])", "1")


class RepeatsFences(SimpleLock):
    """A counter that is lost with the lock."""

    grant = SimpleLock.grant.replace("string.format('%.0f', fence)", "'1'")


class LetsTwoIn(SimpleLock):
    """Each name is two locks, and the owner's token decides which one it is."""

    def _ask(self, script: str, claim: Claim, ttl: float) -> Any:
        half = int(claim.owner[0], 16) % 2
        return super()._ask(script.replace("KEYS[1]", f"KEYS[1] .. {half}"), claim, ttl)


class LosesWakeUps(SimpleLock):
    """It promises to call its waiters, and never does."""

    pushes = True
    poll_max = 60.0


class Simple(Redis):
    """The simple lock, on one Redis; only its workers are hurt, half of them at a time."""

    name = "simple"
    backend = f"{__name__}.SimpleLock"
    forgetful = frozenset()
    share = 0.5
    plan = {"names": ["a"], "long": 0.3, "overstays": 0.3, "odd": 0.0, "waits": [3.0, 12.0]}

    @property
    def locks(self) -> dict[str, Any]:
        url = f"redis://127.0.0.1:{self.proxies[0].port}/0"
        return {"BACKEND": self.backend, "LOCATION": url}

    @property
    def caches(self) -> dict[str, Any]:
        return {}

    def faults(self) -> dict[str, Act]:
        return {}


# What the checker has to find for each; an engine of that name may be given to run().
BROKEN = {
    "DeletesWithoutComparing": "one at a time",
    "NeverExpires": "free again",
    "RepeatsFences": "fences grow",
    "LetsTwoIn": "one at a time",
    "LosesWakeUps": "starves nobody",
}
SIMPLE: dict[str, type[Simple]] = {
    lock: type(lock, (Simple,), {"backend": f"{__name__}.{lock}"})
    for lock in ("SimpleLock", *BROKEN)
}
SIMPLE["NeverExpires"].share = 1.0  # so that its owner is among those who die
SIMPLE["LosesWakeUps"].plan = {**Simple.plan, "waits": [12.0]}  # long enough to starve
