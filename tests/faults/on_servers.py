"""The lock table and the locks of MariaDB and PostgreSQL, etcd, ZooKeeper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from random import Random
from typing import Any

from tests.faults.base import BACKENDS, Act, Served
from tests.launching import Server
from tests.servers import EtcdServer, MariaDBServer, PostgreSQLServer, ZooKeeperServer


class Etcd(Served):
    """One etcd."""

    name = "etcd"
    kind = EtcdServer
    on_disk = True
    backend = f"{BACKENDS}.etcd.EtcdBackend"
    ttl = 2.0

    @property
    def locks(self) -> dict[str, Any]:
        return {**super().locks, "LOCATION": f"http://127.0.0.1:{self.proxies[0].port}"}


class ZooKeeper(Served):
    """One ZooKeeper, with sessions as long as the ttl."""

    name = "zookeeper"
    kind = ZooKeeperServer
    on_disk = True
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
    on_disk = True
    has_clock = True
    forgetful = frozenset({"server clock"})
    migrate = True
    database = "mysql://root@127.0.0.1:{}/distlock"

    def start(self) -> None:
        super().start()
        with closing(self._connect()) as operator:
            self._tell("CREATE DATABASE distlock CHARACTER SET utf8mb4", operator)

    @property
    def env(self) -> dict[str, str]:
        kind = self.database.partition(":")[0]
        url = self.database.format(self.proxies[0].port)
        chosen = {"DISTLOCK_TEST_DATABASE": kind, f"DISTLOCK_TEST_{kind.upper()}_URL": url}
        return {**super().env, **chosen}

    def faults(self) -> dict[str, Act]:
        more = {"killed connections": self.kill_sessions, "sessions exhausted": self.exhaust}
        return {**super().faults(), **more}

    @contextmanager
    def kill_sessions(self, chance: Random) -> Iterator[None]:
        """End every session, as an operator would."""
        with closing(self._connect()) as operator:
            self._kill_all_but([operator])
        yield

    @contextmanager
    def exhaust(self, chance: Random) -> Iterator[None]:
        """End every session, and take all that the server has."""
        mine = [self._connect()]
        self._tell("SET GLOBAL max_connections = 10", mine[0])  # the least that it takes
        for _ in range(3):
            self._kill_all_but(mine)
            with suppress(Exception):  # there is no more
                while True:
                    mine.append(self._connect())
        yield
        self._tell("SET GLOBAL max_connections = 500", mine[0])
        for one in mine:
            one.close()

    def _kill_all_but(self, mine: list[Any]) -> None:
        sessions = "SELECT id FROM information_schema.processlist WHERE user = 'root'"
        kept = {one.thread_id() for one in mine}
        for (one,) in self._tell(sessions, mine[0]):
            if one not in kept:
                with suppress(Exception):  # it ended by itself meanwhile
                    self._tell(f"KILL CONNECTION {one}", mine[0])

    def _connect(self) -> Any:
        import MySQLdb

        return MySQLdb.connect(host="127.0.0.1", port=self.servers[0].port, user="root")

    def _tell(self, statement: str, operator: Any) -> Any:
        with closing(operator.cursor()) as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []


class PostgreSQL(MariaDB):
    """The lock table on PostgreSQL."""

    name = "postgresql"
    kind = PostgreSQLServer
    database = "postgresql://app@127.0.0.1:{}/postgres"

    def start(self) -> None:
        Served.start(self)
        with closing(self._connect()) as operator:
            self._tell("CREATE ROLE app LOGIN", operator)
            self._tell("GRANT ALL ON SCHEMA public TO app", operator)

    def faults(self) -> dict[str, Act]:
        kinds = super().faults()
        # The proxy acknowledges what it swallows, so that nothing but the caller's own patience
        # ends the wait: psycopg has none. A path that is dead acknowledges nothing.
        del kinds["silence"]
        return kinds

    @contextmanager
    def exhaust(self, chance: Random) -> Iterator[None]:
        """End every session, and let the workers have no other."""
        with closing(self._connect()) as operator:
            self._tell("ALTER ROLE app CONNECTION LIMIT 0", operator)
            self._kill_all_but([operator])
            yield
            self._tell("ALTER ROLE app CONNECTION LIMIT -1", operator)

    @contextmanager
    def fill(self, chance: Random) -> Iterator[None]:
        """Leave no room on the disk, and need some at once."""
        with super().fill(chance):
            with suppress(Exception), closing(self._connect()) as operator:
                self._tell("SELECT pg_switch_wal()", operator)
            yield

    def _kill_all_but(self, mine: list[Any]) -> None:
        kept = ", ".join(str(one.info.backend_pid) for one in mine)
        others = f"backend_type = 'client backend' AND pid NOT IN ({kept})"
        statement = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"
        self._tell(statement, mine[0])

    def _connect(self) -> Any:
        import psycopg

        return psycopg.connect(self.servers[0].url, autocommit=True)


# A lock of a session is gone with its connection, whoever ended that.
SESSIONS_END = frozenset(
    {"cut", "silence", "lost replies", "crash", "killed connections", "sessions exhausted"}
    | {"disk full"}
)


class Named(MariaDB):
    """GET_LOCK on MariaDB."""

    name = "named"
    backend = f"{BACKENDS}.mysql.NamedLockBackend"
    ttl = 2.0
    migrate = False
    steps_back = False
    forgetful = SESSIONS_END


class Advisory(PostgreSQL):
    """Advisory locks on PostgreSQL."""

    name = "advisory"
    backend = f"{BACKENDS}.postgresql.AdvisoryLockBackend"
    ttl = 2.0
    migrate = False
    steps_back = False
    # PostgreSQL counts idle_session_timeout by the wall clock: set forward, it ends the session.
    forgetful = SESSIONS_END | {"server clock"}

    def faults(self) -> dict[str, Act]:
        return {**super().faults(), "silence": self.silence}  # it is patient for 5 s only
