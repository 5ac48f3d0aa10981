"""Every engine keeps the contract, on its real server."""

from __future__ import annotations

import inspect
import pkgutil
import time

import pytest
import redis
from django.conf import settings
from django.db import connections

from distlock_app import backends
from distlock_app.backends.base import BaseLockBackend
from distlock_app.backends.database.sql import rows
from distlock_app.backends.etcd import EtcdBackend
from distlock_app.backends.redis import RedisBackend
from distlock_app.backends.zookeeper import ZooKeeperBackend
from distlock_app.models import DistLock
from distlock_app.testing import LockBackendContract
from tests.conftest import missing
from tests.redlock_workers import caches_of, quorum_at

# The engine that excludes nobody, by design.
BREAKS_IT = {"distlock_app.backends.dummy"}


# Nothing listens there.
NOWHERE = "127.0.0.1:1"


class OnDatabase:
    """For engines in a database: another one, whose server does not answer."""

    def broken(self):
        place = ("NAME", "/nowhere/db.sqlite3") if settings.ENGINE == "sqlite" else ("PORT", 1)
        self.patch = pytest.MonkeyPatch()
        self.patch.setitem(connections.settings[self.backend.using], *place)
        return type(self.backend)(alias="broken", location=self.backend.using)

    def test_a_fork_amid_the_requests_of_other_threads_harms_neither_process(self):
        if settings.ENGINE == "sqlite":
            pytest.skip("SQLite itself does not survive it: its mutexes are copied as they are")
        super().test_a_fork_amid_the_requests_of_other_threads_harms_neither_process()

    def teardown_method(self):
        if hasattr(self, "patch"):
            self.patch.undo()
        super().teardown_method()


class LockTable(OnDatabase):
    """What the contract asks of the lock table in every database."""

    def lose_data(self):
        DistLock.objects.using(self.backend.using).all().delete()
        time.sleep(0.002)  # no crash is over before SQLite's clock, of milliseconds, moves on


@pytest.mark.once
class TestLocMem(LockBackendContract):
    alias = "locmem"

    def lose_data(self):
        self.backend.__init__(alias=self.alias)


@pytest.mark.django_db(transaction=True)
class TestDatabase(LockTable, LockBackendContract):
    alias = "default"


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
class TestAnotherDatabase(LockTable, LockBackendContract):
    alias = "locks"


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("generic_dialect")
class TestGenericSQL(LockTable, LockBackendContract):
    alias = "default"

    @pytest.fixture(autouse=True)
    def patient(self, monkeypatch):
        """SQLite lets writers in by chance: on a busy machine one was left out for a second."""
        if settings.ENGINE == "sqlite":
            monkeypatch.setattr(rows, "ROW_WAIT", 10)


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(settings.ENGINE != "mysql", reason="the run on MySQL has it")
class TestNamedLocks(OnDatabase, LockBackendContract):
    alias = "named"


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(settings.ENGINE != "postgresql", reason="the run on PostgreSQL has it")
class TestAdvisoryLocks(OnDatabase, LockBackendContract):
    alias = "advisory"


@pytest.mark.once
class TestRedis(LockBackendContract):
    alias = "redis"

    @pytest.fixture(autouse=True)
    def server(self, redis_url):
        """Let a missing server be named."""

    def broken(self):
        with caches_of([f"redis://{NOWHERE}/0"]) as (alias,):
            return RedisBackend(alias="broken", location=alias)

    def lose_data(self):
        forget_keys(redis.Redis.from_url(settings.REDIS_URL))


class TestRedisCluster(LockBackendContract):
    alias = "cluster"

    @pytest.fixture(autouse=True)
    def servers(self, cluster_urls):
        """Let a missing Cluster be named."""

    def broken(self):
        return RedisBackend(alias="broken", cluster=[f"redis://{NOWHERE}"])

    def lose_data(self):
        forget_keys(redis.RedisCluster.from_url(settings.REDIS_CLUSTER_URL.split(",")[0]))


class TestRedlock(LockBackendContract):
    alias = "quorum"

    @pytest.fixture(autouse=True)
    def servers(self, redlock_urls):
        """Let missing servers be named."""

    def broken(self):
        return quorum_at([f"redis://127.0.0.1:{port}/0" for port in (1, 2, 3)])


class TestEtcd(LockBackendContract):
    alias = "etcd"

    @pytest.fixture(autouse=True)
    def server(self, etcd_url):
        """Let a missing server be named."""

    def broken(self):
        return EtcdBackend(alias="broken", location=f"http://{NOWHERE}")


class TestZooKeeper(LockBackendContract):
    alias = "zookeeper"

    @pytest.fixture(autouse=True)
    def server(self, zookeeper_url):
        """Let a missing server be named."""

    def broken(self):
        return ZooKeeperBackend(alias="broken", location=NOWHERE, timeout=0.2)


def forget_keys(client):
    """Delete what this run has on a server that others use, too."""
    with client:
        for key in client.scan_iter(f"distlock{settings.SUFFIX}:*", count=1000):
            client.delete(key)


@pytest.mark.once
def test_every_engine_is_under_test():
    for server in ("redis", "redis_cluster", "redlock", "etcd", "zookeeper"):
        if not getattr(settings, f"{server.upper()}_URL"):
            missing(server, f"DISTLOCK_TEST_{server.upper()}_URL is not set")
    engines = {
        f"{backends.__name__}.{module.name}"
        for module in pkgutil.iter_modules(backends.__path__)
        if _has_engine(f"{backends.__name__}.{module.name}")
    }
    configured = dict(settings.SERVER_LOCKS.values())  # those of runs on other databases, too
    configured |= {alias: params["BACKEND"] for alias, params in settings.DISTLOCK.items()}
    tested = {
        configured[cls.alias].rpartition(".")[0]
        for cls in LockBackendContract.__subclasses__()
        if cls.__module__ == __name__
    }

    assert engines == {path.rpartition(".")[0] for path in configured.values()}
    assert tested == engines - BREAKS_IT


def _has_engine(module: str) -> bool:
    found = vars(__import__(module, fromlist=["*"])).values()
    return any(
        BaseLockBackend in getattr(value, "__mro__", ())
        and f"{value.__module__}.".startswith(f"{module}.")
        and not inspect.isabstract(value)
        for value in found
    )
