"""Every engine keeps the contract, on its real server."""

from __future__ import annotations

import inspect
import pkgutil

import pytest
from django.conf import settings

from distlock_app import backends
from distlock_app.backends.base import BaseLockBackend
from distlock_app.testing import LockBackendContract
from tests.conftest import missing

# The engine that excludes nobody, by design.
BREAKS_IT = {"distlock_app.backends.dummy"}


class TestLocMem(LockBackendContract):
    alias = "locmem"


@pytest.mark.django_db(transaction=True)
class TestDatabase(LockBackendContract):
    alias = "default"


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
class TestAnotherDatabase(LockBackendContract):
    alias = "locks"


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(settings.ENGINE != "mysql", reason="the run on MySQL has it")
class TestNamedLocks(LockBackendContract):
    alias = "named"


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(settings.ENGINE != "postgresql", reason="the run on PostgreSQL has it")
class TestAdvisoryLocks(LockBackendContract):
    alias = "advisory"


class TestRedis(LockBackendContract):
    alias = "redis"

    @pytest.fixture(autouse=True)
    def server(self, redis_url):
        """Let a missing server be named."""


class TestRedisCluster(LockBackendContract):
    alias = "cluster"

    @pytest.fixture(autouse=True)
    def servers(self, cluster_urls):
        """Let a missing Cluster be named."""


class TestRedlock(LockBackendContract):
    alias = "quorum"

    @pytest.fixture(autouse=True)
    def servers(self, redlock_urls):
        """Let missing servers be named."""


class TestEtcd(LockBackendContract):
    alias = "etcd"

    @pytest.fixture(autouse=True)
    def server(self, etcd_url):
        """Let a missing server be named."""


class TestZooKeeper(LockBackendContract):
    alias = "zookeeper"

    @pytest.fixture(autouse=True)
    def server(self, zookeeper_url):
        """Let a missing server be named."""


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
        configured[cls.alias].rpartition(".")[0] for cls in LockBackendContract.__subclasses__()
    }

    assert engines == {path.rpartition(".")[0] for path in configured.values()}
    assert tested == engines - BREAKS_IT


def _has_engine(module: str) -> bool:
    found = vars(__import__(module, fromlist=["*"])).values()
    return any(
        isinstance(value, type)
        and issubclass(value, BaseLockBackend)
        and f"{value.__module__}.".startswith(f"{module}.")
        and not inspect.isabstract(value)
        and value is not BaseLockBackend
        for value in found
    )
