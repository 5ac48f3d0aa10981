"""The lock table and the locks of MariaDB and PostgreSQL, etcd, ZooKeeper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

from tests.faults.base import BACKENDS, Act, Served
from tests.launching import Server
from tests.servers import EtcdServer, MariaDBServer, PostgreSQLServer, ZooKeeperServer


class Etcd(Served):
    """One etcd."""

    name = "etcd"
    kind = EtcdServer
    backend = f"{BACKENDS}.etcd.EtcdBackend"
    ttl = 2.0

    @property
    def locks(self) -> dict[str, Any]:
        return {**super().locks, "LOCATION": f"http://127.0.0.1:{self.proxies[0].port}"}


class ZooKeeper(Served):
    """One ZooKeeper, with sessions as long as the ttl."""

    name = "zookeeper"
    kind = ZooKeeperServer
    backend = f"{BACKENDS}.zookeeper.ZooKeeperBackend"
    ttl = 2.0

    @property
    def locks(self) -> dict[str, Any]:
        here = f"127.0.0.1:{self.proxies[0].port}"
        return {**super().locks, "LOCATION": here, "OPTIONS": {"SESSION": self.ttl}}


class MariaDB(Served):
    """The lock table on MariaDB."""

    name = "mysql"
    kind: type[Server] = MariaDBServer
    migrate = True
    database = "mysql://root@127.0.0.1:{}/distlock"

    def start(self) -> None:
        super().start()
        self._tell("CREATE DATABASE distlock CHARACTER SET utf8mb4")

    @property
    def env(self) -> dict[str, str]:
        kind = self.database.partition(":")[0]
        url = self.database.format(self.proxies[0].port)
        chosen = {"DISTLOCK_TEST_DATABASE": kind, f"DISTLOCK_TEST_{kind.upper()}_URL": url}
        return {**super().env, **chosen}

    def faults(self) -> dict[str, Act]:
        return {**super().faults(), "killed connections": self.kill_sessions}

    @contextmanager
    def kill_sessions(self, chance: Random) -> Iterator[None]:
        """End every session, as an operator would."""
        mine = "id <> CONNECTION_ID() AND user = 'root'"
        for (one,) in self._tell(f"SELECT id FROM information_schema.processlist WHERE {mine}"):
            with suppress(Exception):  # it ended by itself meanwhile
                self._tell(f"KILL CONNECTION {one}")
        yield

    def _tell(self, statement: str) -> Any:
        import MySQLdb

        connection = MySQLdb.connect(host="127.0.0.1", port=self.servers[0].port, user="root")
        try:
            cursor = connection.cursor()
            cursor.execute(statement)
            return cursor.fetchall()
        finally:
            connection.close()


class PostgreSQL(MariaDB):
    """The lock table on PostgreSQL."""

    name = "postgresql"
    kind = PostgreSQLServer
    database = "postgresql://postgres@127.0.0.1:{}/postgres"

    def start(self) -> None:
        Served.start(self)

    def faults(self) -> dict[str, Act]:
        kinds = super().faults()
        # The proxy acknowledges what it swallows, so that nothing but the caller's own patience
        # ends the wait: psycopg has none. A path that is dead acknowledges nothing.
        del kinds["silence"]
        return kinds

    @contextmanager
    def kill_sessions(self, chance: Random) -> Iterator[None]:
        """End every session, as an operator would."""
        mine = "pid <> pg_backend_pid() AND backend_type = 'client backend'"
        self._tell(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {mine}")
        yield

    def _tell(self, statement: str) -> Any:
        import psycopg

        with psycopg.connect(self.servers[0].url, autocommit=True) as connection:
            return connection.execute(statement).fetchall()


# A lock of a session is gone with its connection, whoever ended that.
SESSIONS_END = frozenset({"cut", "silence", "lost replies", "crash", "killed connections"})


class Named(MariaDB):
    """GET_LOCK on MariaDB."""

    name = "named"
    backend = f"{BACKENDS}.mysql.NamedLockBackend"
    ttl = 2.0
    migrate = False
    forgetful = SESSIONS_END


class Advisory(PostgreSQL):
    """Advisory locks on PostgreSQL."""

    name = "advisory"
    backend = f"{BACKENDS}.postgresql.AdvisoryLockBackend"
    ttl = 2.0
    migrate = False
    forgetful = SESSIONS_END

    def faults(self) -> dict[str, Act]:
        return {**super().faults(), "silence": self.silence}  # it is patient for 5 s only
