"""The servers and worker processes that the other tests build on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes import WorkerFailed, hear, say
from tests.servers import (
    EtcdServer,
    MariaDBServer,
    PostgreSQLServer,
    RedisServer,
    SentinelServer,
    ZooKeeperServer,
)

ROOT = Path(__file__).resolve().parent.parent


def echo(value):
    """Answer what the test says."""
    say(value)
    return hear()


def fail():
    """End as a worker with a mistake does."""
    raise ValueError("the reason")


def ask_redis(server, *words):
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall((" ".join(words) + "\r\n").encode())
        return connection.recv(4096).decode()


def eventually(condition, *, within=20.0):
    give_up = time.monotonic() + within
    while time.monotonic() < give_up:
        with suppress(ConnectionError):  # a Sentinel ends the clients of a server that it promotes
            if condition():
                return True
        time.sleep(0.05)
    return False


def exists(pid):
    """Whether the process is there and no zombie."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:4]
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [RedisServer, MariaDBServer, PostgreSQLServer, EtcdServer, ZooKeeperServer]
)
def test_a_killed_server_starts_again_where_it_was(private_server, kind):
    server = private_server(kind)
    url, pid = server.url, server.pid

    server.kill()
    assert not server.running
    server.start()

    assert server.url == url
    assert server.pid != pid
    server.close()


def test_a_restarted_redis_keeps_what_its_settings_say(private_server):
    server = private_server(RedisServer, config={"appendonly": "yes", "appendfsync": "always"})
    ask_redis(server, "SET", "name", "kept")

    server.kill()
    server.start()

    assert "kept" in ask_redis(server, "GET", "name")
    server.close()


def test_a_paused_server_answers_when_it_is_resumed(own_redis):
    own_redis.pause()

    with socket.create_connection(("127.0.0.1", own_redis.port), timeout=0.3) as connection:
        connection.sendall(b"PING\r\n")
        with pytest.raises(TimeoutError):
            connection.recv(16)
        own_redis.resume()
        connection.settimeout(10)
        assert connection.recv(16) == b"+PONG\r\n"


@pytest.mark.slow
def test_sentinel_makes_the_replica_the_master(private_server):
    master = private_server(RedisServer)
    replica = private_server(RedisServer, config={"replicaof": f"127.0.0.1 {master.port}"})
    sentinel = private_server(SentinelServer, master)
    assert eventually(lambda: "slave0:" in ask_redis(master, "INFO", "replication"))
    assert eventually(lambda: str(replica.port) in ask_redis(sentinel, "SENTINEL REPLICAS locks"))

    master.kill()

    assert eventually(lambda: "role:master" in ask_redis(replica, "INFO", "replication"))
    for server in (sentinel, replica, master):
        server.close()


def test_servers_and_workers_end_with_a_killed_test_process(own_redis):
    code = (
        "import time; from tests.servers import RedisServer; from tests.launching import *;"
        "print(RedisServer().start().pid, launch(mortal(['sleep', '60'])).pid, flush=True);"
        "time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with process:
        pids = [int(word) for word in process.stdout.readline().split()]
        # Until setpriv has become `sleep`, the kernel does not know of the wish to die.
        assert eventually(lambda: Path(f"/proc/{pids[1]}/comm").read_text() == "sleep\n")
        assert exists(pids[0])

        os.kill(process.pid, signal.SIGKILL)

        assert eventually(lambda: not any(exists(pid) for pid in pids))


def test_a_worker_talks_with_the_test(processes):
    worker = processes.start("tests.test_servers:echo", value="hello")

    assert worker.read() == "hello"
    worker.tell({"answer": 1})

    assert worker.result() == {"answer": 1}


def test_a_worker_that_fails_says_why(processes):
    worker = processes.start("tests.test_servers:fail")

    with pytest.raises(WorkerFailed, match="the reason"):
        worker.result()


def test_a_worker_does_not_outlive_its_deadline(processes):
    worker = processes.start("tests.test_servers:echo", value="hello", deadline=1)

    assert worker.wait(within=30) == 1
