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
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.launching import (
    STOP_TIMEOUT,
    DidNotStart,
    NotInstalled,
    Server,
    find_program,
    run_quietly,
    scratch_directory,
)


class RedisServer(Server):
    """Redis or Valkey, without persistence unless `config` asks for it."""

    name = "redis"
    defaults = {"save": '""', "appendonly": "no"}

    def prepare(self) -> None:
        find_program("redis-server", "valkey-server")

    def command(self) -> list[str]:
        lines = {**self.fixed(), **self.defaults, **self.config}
        path = self.home / "redis.conf"
        path.write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
        return [find_program("redis-server", "valkey-server"), str(path)]

    def fixed(self) -> dict[str, str]:
        return {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.home)}

    def answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))

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
    # Commits are written but not flushed to the disk: safe when the process is killed.
    settings = {
        "bind-address": "127.0.0.1",
        "skip-name-resolve": "ON",
        "character-set-server": "utf8mb4",
        "max-connections": "500",
        "innodb-buffer-pool-size": "64M",
        "innodb-log-file-size": "16M",
        "innodb-flush-log-at-trx-commit": "2",
    }

    def initialise(self, data: Path) -> None:
        run_quietly(
            [
                find_program("mariadb-install-db"),
                "--no-defaults",
                *(["--user=root"] if os.geteuid() == 0 else []),
                f"--datadir={data}",
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

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"


KINDS: dict[str, type[Server]] = {
    kind.name: kind for kind in (RedisServer, MariaDBServer, PostgreSQLServer)
}


def start_detached(directory: Path, names: list[str]) -> None:
    """Start servers that outlive this command; print one NAME=url line for each."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o711)
    for name in names:
        server = KINDS[name](directory=directory / name, detached=True).start()
        (directory / f"{name}.pid").write_text(str(server.pid))
        print(f"DISTLOCK_TEST_{name.upper()}_URL={server.url}", flush=True)


def stop_detached(directory: Path) -> None:
    """Stop every server that was started in `directory`, by pid."""
    for pidfile in sorted(directory.glob("*.pid")):
        pid, home = int(pidfile.read_text()), directory / pidfile.stem
        for number in (KINDS[pidfile.stem].stop_signal, signal.SIGKILL):
            give_up = time.monotonic() + STOP_TIMEOUT
            if lives_in(pid, home):
                os.kill(pid, number)
            while lives_in(pid, home) and time.monotonic() < give_up:
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
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
