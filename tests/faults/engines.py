"""The engines under test, by name."""

from __future__ import annotations

from tests.faults import on_redis, on_servers
from tests.faults.base import Engine

ENGINES: dict[str, type[Engine]] = {
    kind.name: kind
    for kind in (
        *(on_redis.Redis, on_redis.RedisOnDisk, on_redis.Sentinel, on_redis.Cluster),
        *(on_redis.Redlock, Engine, on_servers.MariaDB, on_servers.PostgreSQL),
        *(on_servers.Named, on_servers.Advisory, on_servers.Etcd, on_servers.ZooKeeper),
    )
}
