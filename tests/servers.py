"""Private servers for tests: on a free port, in a directory of their own, stopped by pid.

In a test, where they end with the test process whatever happens to it:

    with RedisServer(config={"appendonly": "yes"}) as server:
        server.url; server.kill(); server.start(); server.pause(); server.resume()

From a shell, where they run until they are stopped:

    python3 -m tests.servers start --dir D redis mysql postgresql   # prints NAME=url
    python3 -m tests.servers stop --dir D
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.launching import (
    START_TIMEOUT,
    STOP_TIMEOUT,
    DidNotStart,
    NotInstalled,
    Server,
    find_program,
    free_port,
    run_quietly,
    scratch_directory,
)
from tests.newer_debian import started_by_own_loader, unpacked
from tests.proxy import Proxy


class RedisServer(Server):
    """Redis or Valkey, without persistence unless `config` asks for it."""

    name = "redis"
    defaults = {"save": '""', "appendonly": "no"}
    # Of one that serves a whole run: without work it wakes up once a second, not ten times. What
    # goes by this clock (the end of BLPOP or of a pause, its own end) comes up to a second late.
    calm = {"hz": "1"}

    def prepare(self) -> None:
        find_program("redis-server", "valkey-server")

    def command(self) -> list[str]:
        calm = self.calm if self.detached else {}
        lines = {**self.fixed(), **self.defaults, **calm, **self.config}
        path = self.home / "redis.conf"
        path.write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
        return [find_program("redis-server", "valkey-server"), str(path)]

    def fixed(self) -> dict[str, str]:
        return {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.home)}

    def answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))

    def tell(self, command: str) -> bytes:
        """Send a command without quotes in it; return the beginning of the answer as it comes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(command.encode() + b"\r\n")
            return connection.recv(65536)

    @property
    def url(self) -> str:
        password = self.config.get("requirepass")
        return f"redis://{f':{password}@' if password else ''}127.0.0.1:{self.port}/0"


class SentinelServer(RedisServer):
    """A Redis Sentinel that watches `master` and makes a replica the master when it is gone.

    A replica is `RedisServer(config={"replicaof": f"127.0.0.1 {master.port}"})`.
    """

    name = "sentinel"
    defaults: dict[str, str] = {}

    def __init__(
        self, master: Server, *, service: str = "locks", quorum: int = 1, **options: Any
    ) -> None:
        super().__init__(**options)
        self.master = master
        self.service = service
        self.quorum = quorum

    def command(self) -> list[str]:
        path = self.home / "redis.conf"
        if path.exists():  # Sentinel keeps what it knows in its own configuration file.
            return [find_program("redis-server", "valkey-server"), str(path), "--sentinel"]
        program, written = super().command()
        watch = [
            f"monitor {self.service} 127.0.0.1 {self.master.port} {self.quorum}",
            f"down-after-milliseconds {self.service} 1000",
            f"failover-timeout {self.service} 5000",
        ]
        with path.open("a") as file:
            file.writelines(f"sentinel {line}\n" for line in watch)
        return [program, written, "--sentinel"]


class RedisCluster:
    """Three masters and a replica of each, which replaces it about two seconds after its end."""

    name = "redis_cluster"
    stop_signal = RedisServer.stop_signal
    settings = {
        "cluster-enabled": "yes",
        "cluster-node-timeout": "1000",
        "repl-diskless-sync-delay": "0",
    }
    # Of one that serves a whole run, where no test kills a node: they seldom ask each other.
    calm = {"cluster-node-timeout": "15000"}

    def __init__(self, *, directory: Path | None = None, detached: bool = False) -> None:
        self.directory = directory or scratch_directory()
        self.detached = detached
        self.nodes: list[RedisServer] = []

    def start(self) -> RedisCluster:
        """Start, and return when the cluster has found itself: Redis takes two seconds for it."""
        for attempt in range(3):
            try:
                self._start()
                self.settle()
                return self
            except DidNotStart:  # somebody took one of the ports meanwhile
                self.close()
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def _start(self) -> None:
        ports = [(free_port(), free_port()) for _ in range(6)]
        names = [secrets.token_hex(20) for _ in ports]
        for me, (port, bus) in enumerate(ports):
            home = self.directory / str(me)
            home.mkdir(parents=True)
            # What every node knows of all of them: "name address flags master ... slots".
            lines = ["vars currentEpoch 3 lastVoteEpoch 0"]
            for at, (name, (its_port, its_bus)) in enumerate(zip(names, ports, strict=True)):
                of = at % 3  # 0 to 2 are the masters, with their thirds of the slots
                role = "master - 0 0" if at < 3 else f"slave {names[of]} 0 0"
                slots = "0-5460 5461-10922 10923-16383".split()[of] if at < 3 else ""
                lines.append(
                    f"{name} 127.0.0.1:{its_port}@{its_bus} {'myself,' if at == me else ''}"
                    f"{role} {of + 1} connected {slots}"
                )
            (home / "nodes.conf").write_text("".join(line.rstrip() + "\n" for line in lines))
            calm = self.calm if self.detached else {}
            config = {**self.settings, **calm, "cluster-port": str(bus)}
            node = RedisServer(directory=home, port=port, config=config, detached=self.detached)
            self.nodes.append(node)
            node.start()

    def settle(self, within: float = START_TIMEOUT) -> None:
        """Wait until every node that runs says that all is well, and replicas are up to date."""
        give_up = time.monotonic() + within
        while not all(self._is_well(node) for node in self.nodes if node.running):
            if time.monotonic() > give_up:
                raise DidNotStart("the Redis Cluster did not find itself")
            time.sleep(0.05)

    @staticmethod
    def _is_well(node: RedisServer) -> bool:
        cluster, replication = node.tell("CLUSTER INFO"), node.tell("INFO replication")
        return b"cluster_state:ok" in cluster and b"master_link_status:down" not in replication

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def close(self) -> None:
        """End the nodes and remove their directories."""
        while self.nodes:
            self.nodes.pop().close()

    @property
    def pids(self) -> list[int]:
        return [node.pid for node in self.nodes]

    @property
    def url(self) -> str:
        """Where the nodes are, with a comma between two."""
        return ",".join(node.url for node in self.nodes)


class RedlockNodes:
    """Five servers that know nothing of each other."""

    name = "redlock"
    stop_signal = RedisServer.stop_signal

    def __init__(self, *, directory: Path | None = None, detached: bool = False) -> None:
        home = directory or scratch_directory()
        self.nodes = [RedisServer(directory=home / str(at), detached=detached) for at in range(5)]

    def start(self) -> RedlockNodes:
        for node in self.nodes:
            node.start()
        return self

    def close(self) -> None:
        """End the nodes and remove their directories."""
        for node in self.nodes:
            node.close()

    @property
    def pids(self) -> list[int]:
        return [node.pid for node in self.nodes]

    @property
    def url(self) -> str:
        """Where the nodes are, with a comma between two."""
        return ",".join(node.url for node in self.nodes)


class DatabaseServer(Server):
    """A SQL server; its empty data directory is made once per process and then copied."""

    _templates: dict[type, Path] = {}

    def initialise(self, data: Path) -> None:
        """Make an empty data directory in `data`."""
        raise NotImplementedError

    @property
    def data(self) -> Path:
        return self.home / "data"

    def prepare(self) -> None:
        if self.data.exists():
            return
        kind = type(self)
        if kind not in self._templates:
            parent = scratch_directory()
            self.give_to_user(parent)
            self.initialise(parent / "data")
            self._templates[kind] = parent / "data"
        run_quietly(["cp", "-a", str(self._templates[kind]), str(self.data)], self.home)


class MariaDBServer(DatabaseServer):
    """MariaDB with an administrator `root` without password, over TCP on 127.0.0.1."""

    name = "mysql"
    # Nothing is flushed to the disk: safe when the process is killed, not when the machine is.
    settings = {
        "bind-address": "127.0.0.1",
        "skip-name-resolve": "ON",
        "character-set-server": "utf8mb4",
        "max-connections": "500",
        "innodb-buffer-pool-size": "64M",
        "innodb-log-file-size": "16M",
        "innodb-flush-log-at-trx-commit": "2",
        "innodb-flush-method": "nosync",
    }

    def initialise(self, data: Path) -> None:
        run_quietly(
            [
                find_program("mariadb-install-db"),
                "--no-defaults",
                *(["--user=root"] if os.geteuid() == 0 else []),
                f"--datadir={data}",
                f"--tmpdir={data.parent}",  # one that starts removes the temporary tables in it
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                f"--innodb-log-file-size={self.settings['innodb-log-file-size']}",
            ],
            data.parent,
        )

    def command(self) -> list[str]:
        options = {**self.settings, **self.config, "port": str(self.port)}
        return [
            find_program("mariadbd"),
            "--no-defaults",
            *(["--user=root"] if os.geteuid() == 0 else []),
            f"--datadir={self.data}",
            f"--tmpdir={self.home}",
            f"--socket={self.home}/sock",
            *(f"--{key}={value}" for key, value in options.items()),
        ]

    def answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            greeting = connection.recv(5)
            return len(greeting) == 5 and greeting[4] == 10  # the protocol's version

    @property
    def url(self) -> str:
        return f"mysql://root@127.0.0.1:{self.port}/distlock"


class MySQLServer(MariaDBServer):
    """MySQL itself, from a newer Debian, with an administrator `root` without password."""

    name = "mysql9"
    settings = {
        "bind-address": "127.0.0.1",
        "character-set-server": "utf8mb4",
        "max-connections": "500",
        "innodb-buffer-pool-size": "64M",
        "innodb-redo-log-capacity": "32M",
        "innodb-flush-log-at-trx-commit": "2",
        "innodb-flush-method": "nosync",
        "disable-log-bin": "",
        "mysqlx": "OFF",
    }

    def program(self) -> list[str]:
        root = unpacked("mysql-server-core")
        return [
            *started_by_own_loader(root, "usr/sbin/mysqld"),
            "--no-defaults",
            *(["--user=root"] if os.geteuid() == 0 else []),
            f"--basedir={root}/usr",
            f"--lc-messages-dir={root}/usr/share/mysql",
            f"--plugin-dir={root}/usr/lib/mysql/plugin",
            "--secure-file-priv=NULL",
        ]

    def initialise(self, data: Path) -> None:
        places = [f"--datadir={data}", f"--tmpdir={data.parent}"]
        run_quietly([*self.program(), "--initialize-insecure", *places], data.parent)

    def command(self) -> list[str]:
        options = {**self.settings, **self.config, "port": str(self.port)}
        return [
            *self.program(),
            f"--datadir={self.data}",
            f"--tmpdir={self.home}",
            f"--socket={self.home}/sock",
            *(f"--{key}={value}" if value else f"--{key}" for key, value in options.items()),
        ]


class PostgreSQLServer(DatabaseServer):
    """PostgreSQL with an administrator `postgres` without password; never run as root."""

    name = "postgresql"
    user = "postgres"
    stop_signal = signal.SIGINT  # "fast": does not wait for clients to leave
    orphan_signal = signal.SIGINT
    # Nothing is flushed to the disk: safe when the process is killed, not when the machine is.
    settings = {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "max_connections": "300",
        "fsync": "off",
    }

    def initialise(self, data: Path) -> None:
        initdb = [find_program("initdb"), "--no-sync", "--auth=trust", "--username=postgres"]
        locale = ["--encoding=UTF8", "--locale=C.UTF-8"]
        run_quietly([*self.as_user(), *initdb, *locale, f"--pgdata={data}"], data.parent)

    def command(self) -> list[str]:
        options = {**self.settings, **self.config}
        command = [find_program("postgres"), "-D", str(self.data), "-p", str(self.port)]
        for key, value in options.items():
            command += ["-c", f"{key}={value}"]
        return command

    def answers(self) -> bool:
        ask = [find_program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(ask, timeout=10).returncode == 0

    def _launch(self) -> None:
        give_up = time.monotonic() + STOP_TIMEOUT
        while True:
            try:
                return super()._launch()
            except DidNotStart as error:
                # A session may outlive a server that was killed for a moment.
                if "shared memory block" not in str(error) or time.monotonic() > give_up:
                    raise
            time.sleep(0.05)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"


class EtcdServer(Server):
    """A cluster of one etcd, whose shortest lease is one second."""

    name = "etcd"
    settings = {
        "heartbeat-interval": "50",
        "election-timeout": "500",
        "logger": "zap",
        "bcrypt-cost": "4",  # users of tests log in often
    }

    def command(self) -> list[str]:
        here = f"http://127.0.0.1:{self.port}"
        # Nobody else joins: the port for other members may be any.
        peers = "http://127.0.0.1:0"
        options = {
            **self.settings,
            **self.config,
            "data-dir": str(self.home / "data"),
            "listen-client-urls": here,
            "advertise-client-urls": here,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}",
        }
        return [find_program("etcd"), *(f"--{key}={value}" for key, value in options.items())]

    def answers(self) -> bool:
        with urlopen(f"{self.url}/health", timeout=1) as response:
            return b'"true"' in response.read()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class ZooKeeperServer(Server):
    """One ZooKeeper, with sessions from 0.4 seconds on."""

    name = "zookeeper"
    jars = Path("/usr/share/java")  # where Debian has them
    # What its main class needs, in the order in which it is looked for.
    classes = ("zookeeper", "zookeeper-jute", "slf4j-api", "slf4j-simple", "netty-all")
    # Nothing is flushed to the disk: safe when the process is killed.
    settings = {
        "tickTime": "200",
        "maxClientCnxns": "0",
        "maxSessionTimeout": "60000",
        "admin.enableServer": "false",
        "forceSync": "no",
    }

    def prepare(self) -> None:
        if not (self.jars / "zookeeper.jar").exists():
            raise NotInstalled("zookeeper.jar is not installed")

    def command(self) -> list[str]:
        lines = {
            **self.settings,
            "4lw.commands.whitelist": "*",
            **self.config,
            "clientPort": str(self.port),
            "clientPortAddress": "127.0.0.1",
            "dataDir": str(self.home / "data"),
        }
        config = self.home / "zoo.cfg"
        config.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        jars = [f"{self.jars}/{name}.jar" for name in self.classes]
        jars += [str(jar) for jar in sorted(self.jars.glob("commons-*.jar"))]
        return [
            find_program("java"),
            *("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            *("-cp", ":".join(jars)),
            "org.apache.zookeeper.server.quorum.QuorumPeerMain",
            str(config),
        ]

    def answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"srvr")
            return b"Mode:" in connection.recv(4096)

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"


class ZooKeeperEnsemble:
    """Three ZooKeepers. The first follows, and hears of its leader only by `proxies`."""

    name = "zookeeper"
    # A server that is cut off goes on for ten seconds: longer than sessions of four live.
    settings = {"initLimit": "50", "syncLimit": "50"}

    def __init__(self) -> None:
        self.proxies: list[Proxy] = []
        self.nodes: list[ZooKeeperServer] = []

    def start(self) -> ZooKeeperEnsemble:
        ports = [(free_port(), free_port()) for _ in range(3)]
        self.proxies = [Proxy(port) for port, _ in ports[1:]]
        for me in (1, 2, 3):
            directory = scratch_directory()
            (directory / "data").mkdir()
            (directory / "data" / "myid").write_text(str(me))
            seen = [port for port, _ in ports]
            if me == 1:
                seen[1:] = [proxy.port for proxy in self.proxies]
            config = {
                f"server.{at}": f"127.0.0.1:{port}:{election}"
                for at, (port, (_, election)) in enumerate(zip(seen, ports, strict=True), 1)
            }
            self.nodes.append(ZooKeeperServer(directory=directory, config=config | self.settings))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ZooKeeperServer.start, self.nodes[1:]))  # one of them leads
        self.nodes[0].start()
        return self

    def cut_off(self) -> None:
        """Let the first server hear nothing of the others any more, nor be heard."""
        for proxy in self.proxies:
            proxy.silent = True

    def heal(self) -> None:
        """Let the first server join the others again."""
        for proxy in self.proxies:
            proxy.silent = False
            proxy.cut()

    def close(self) -> None:
        """End the servers and the proxies."""
        for node in self.nodes:
            node.close()
        for proxy in self.proxies:
            proxy.close()


KINDS: dict[str, type[Server] | type[RedisCluster] | type[RedlockNodes]] = {
    kind.name: kind
    for kind in (
        *(RedisServer, RedisCluster, RedlockNodes, MariaDBServer, MySQLServer),
        *(PostgreSQLServer, EtcdServer, ZooKeeperServer),
    )
}


def start_detached(directory: Path, names: list[str]) -> None:
    """Start servers that outlive this command; print one NAME=url line for each."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o711)
    for name in names:
        server = KINDS[name](directory=directory / name, detached=True).start()
        (directory / f"{name}.pid").write_text(" ".join(map(str, server.pids)))
        print(f"DISTLOCK_TEST_{name.upper()}_URL={server.url}", flush=True)


def stop_detached(directory: Path) -> None:
    """Stop every server that was started in `directory`, by pid."""
    for pidfile in sorted(directory.glob("*.pid")):
        pids, home = map(int, pidfile.read_text().split()), directory / pidfile.stem
        for number in (KINDS[pidfile.stem].stop_signal, signal.SIGKILL):
            give_up = time.monotonic() + STOP_TIMEOUT
            for pid in (pid for pid in pids if lives_in(pid, home)):
                os.kill(pid, number)
            while any(lives_in(pid, home) for pid in pids) and time.monotonic() < give_up:
                time.sleep(0.02)
        pidfile.unlink()


def lives_in(pid: int, directory: Path) -> bool:
    """Return whether the process works in `directory`: its number may be somebody else's now."""
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(directory)
    except OSError:
        return False


def main() -> int:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Start and stop private servers for tests.")
    parser.add_argument("action", choices=["start", "stop"])
    parser.add_argument("names", nargs="*", metavar="SERVER", help=", ".join(KINDS))
    parser.add_argument("--dir", type=Path, required=True, help="where their data is kept")
    arguments = parser.parse_intermixed_args()
    directory = arguments.dir.resolve()
    if arguments.action == "stop":
        stop_detached(directory)
        return 0
    if unknown := set(arguments.names) - set(KINDS):
        parser.error(f"unknown server: {', '.join(sorted(unknown))}")
    try:
        start_detached(directory, arguments.names)
    except (NotInstalled, DidNotStart) as error:
        print(error, file=sys.stderr)
        return os.EX_UNAVAILABLE if isinstance(error, NotInstalled) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
