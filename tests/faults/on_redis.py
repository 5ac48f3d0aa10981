"""Redis alone, with Sentinel, as a Cluster, and Redlock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import redis

from tests.faults.base import BACKENDS, Act, Engine, Served
from tests.servers import RedisCluster, RedisServer, SentinelServer

FAILOVER_WITHIN = 30.0
KILL = ("CLIENT KILL TYPE normal", "CLIENT KILL TYPE pubsub")


class Redis(Served):
    """One Redis that keeps nothing on disk."""

    name = "redis"
    kind = RedisServer
    backend = f"{BACKENDS}.redis.RedisBackend"
    has_clock = True
    forgetful = frozenset({"crash", "flushall", "server clock"})

    @property
    def locks(self) -> dict[str, Any]:
        return {**super().locks, "LOCATION": "own0"}

    @property
    def caches(self) -> dict[str, Any]:
        return {
            f"own{at}": {
                "BACKEND": "django_redis.cache.RedisCache",
                "LOCATION": f"redis://127.0.0.1:{path.port}/0",
            }
            for at, path in enumerate(self.proxies)
        }

    def faults(self) -> dict[str, Act]:
        return {
            **super().faults(),
            "script flush": self.telling("SCRIPT FLUSH"),
            "flushall": self.telling("FLUSHALL"),
            "killed connections": self.telling(*KILL),
            "sessions exhausted": self.exhaust,
        }

    def telling(self, *commands: str) -> Act:
        """Return the fault of an operator who enters these commands."""

        @contextmanager
        def act(chance: Random) -> Iterator[None]:
            for at in self.some(chance):
                for command in commands:
                    self.servers[at].tell(command)
            yield

        return act

    @contextmanager
    def exhaust(self, chance: Random) -> Iterator[None]:
        """Accept no further client, and end the connection of each."""
        urls = [self.servers[at].url for at in self.some(chance)]
        operators = [redis.Redis.from_url(url, single_connection_client=True) for url in urls]
        for operator in operators:
            operator.config_set("maxclients", 1)
            for command in KILL:
                operator.execute_command(*command.split(), "SKIPME", "yes")
        yield
        for operator in operators:
            operator.config_set("maxclients", 10000)
            operator.close()


class RedisOnDisk(Redis):
    """One Redis that has every lock on disk before it says so."""

    name = "redis-aof"
    config = {"appendonly": "yes", "appendfsync": "always"}
    on_disk = True
    forgetful = frozenset({"flushall", "server clock"})


class Redlock(Redis):
    """Five servers, of which at most two fail at a time; they come back after the ttl."""

    name = "redlock"
    backend = f"{BACKENDS}.redlock.RedlockBackend"
    count = 5
    forgetful = frozenset({"flushall", "server clock"})

    @property
    def locks(self) -> dict[str, Any]:
        return {**super().locks, "LOCATION": list(self.caches)}

    def some(self, chance: Random) -> list[int]:
        return chance.sample(range(5), chance.choice([1, 2, 2]))

    @contextmanager
    def crash(self, chance: Random) -> Iterator[None]:
        """Kill servers, which come back empty, but not before what they knew is over."""
        with super().crash(chance):
            yield
            time.sleep(self.ttl + 0.2)


class Sentinel(Redis):
    """A master with two replicas, and a Sentinel that makes one of them the next master."""

    name = "sentinel"
    forgetful = frozenset({"failover", "flushall", "freeze"})

    def start(self) -> None:
        quick = {"repl-diskless-sync-delay": "0"}
        master = RedisServer(config=quick)
        self.stack.enter_context(master)
        follow = {**quick, "replicaof": f"127.0.0.1 {master.port}"}
        replicas = [self.stack.enter_context(RedisServer(config=follow)) for _ in range(2)]
        self.servers = [master, *replicas]
        self.sentinel = SentinelServer(master)
        self.stack.enter_context(self.sentinel)
        self.proxies = []
        self._until(lambda: b"num-slaves\r\n$1\r\n2" in self.sentinel.tell("SENTINEL masters"))

    @property
    def caches(self) -> dict[str, Any]:
        options = {
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
            "SENTINELS": [("127.0.0.1", self.sentinel.port)],
            "SOCKET_TIMEOUT": 1,
            "SOCKET_CONNECT_TIMEOUT": 1,
        }
        cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://locks/0"}
        return {"own0": {**cache, "OPTIONS": options}}

    def faults(self) -> dict[str, Act]:
        kinds = super().faults()
        told = ("script flush", "flushall", "killed connections")
        own = {"failover": self.failover, "freeze": self.freeze}
        return own | {kind: kinds[kind] for kind in told}

    def some(self, chance: Random) -> list[int]:
        return [self._master()]

    def _master(self) -> int:
        answer = self.sentinel.tell("SENTINEL get-master-addr-by-name locks")
        port = int(answer.split(b"\r\n")[4])
        return next(at for at, server in enumerate(self.servers) if server.port == port)

    @contextmanager
    def failover(self, chance: Random) -> Iterator[None]:
        """Kill the master; it comes back as a replica when another one has its place."""
        old = self._master()
        self.servers[old].kill()
        yield
        self._until(lambda: self._master() != old)
        self.servers[old].start()
        self._until_one_master()

    @contextmanager
    def freeze(self, chance: Random) -> Iterator[None]:
        """Stop the master, which the Sentinel may replace meanwhile, and let it go on."""
        with super().freeze(chance):
            yield
        self._until_one_master()

    def _until_one_master(self) -> None:
        # Until the Sentinel tells it, seconds later, an old master is one for whoever asks it. A
        # failover that has begun goes on, though the old master is back.
        def agreed() -> bool:
            master = self._master()
            calm = b"\r\nflags\r\n$6\r\nmaster\r\n" in self.sentinel.tell("SENTINEL masters")
            said = [server.tell("INFO replication") for server in self.servers]
            return calm and all(
                (b"role:master" in one) == (at == master) for at, one in enumerate(said)
            )

        self._until(agreed)

    @staticmethod
    def _until(condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + FAILOVER_WITHIN
        while True:
            with suppress(OSError):
                if condition():
                    return
            assert time.monotonic() < give_up, "the Sentinel does not agree"
            time.sleep(0.05)


class Cluster(Engine):
    """Three masters with a replica each."""

    name = "cluster"
    backend = f"{BACKENDS}.redis.RedisBackend"
    migrate = False
    server = RedisCluster.name
    forgetful = frozenset({"failover", "freeze"})

    def start(self) -> None:
        self.cluster = RedisCluster()
        self.stack.callback(self.cluster.close)
        self.cluster.start()

    @property
    def locks(self) -> dict[str, Any]:
        nodes = [f"{node.url}?socket_timeout=1" for node in self.cluster.nodes]
        return {"BACKEND": self.backend, "WAIT": 5, "OPTIONS": {"CLUSTER": nodes}}

    def faults(self) -> dict[str, Act]:
        return {"failover": self.failover, "freeze": self.freeze}

    def _a_master(self, chance: Random) -> RedisServer:
        nodes = self.cluster.nodes
        return chance.choice([n for n in nodes if b"role:master" in n.tell("INFO replication")])

    @contextmanager
    def freeze(self, chance: Random) -> Iterator[None]:
        """Stop a master, which its replica may replace meanwhile, and let it go on."""
        master = self._a_master(chance)
        master.pause()
        yield
        master.resume()
        self.cluster.settle(FAILOVER_WITHIN)

    @contextmanager
    def failover(self, chance: Random) -> Iterator[None]:
        """Kill a master; it comes back as the replica of the one that was its own."""
        gone = self._a_master(chance)
        gone.kill()
        yield
        self.cluster.settle(FAILOVER_WITHIN)
        gone.start()
        self.cluster.settle(FAILOVER_WITHIN)
