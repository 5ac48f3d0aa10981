"""Many processes, one lock that each holds for a millisecond and asks for again at once."""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from .contenders import GROUPS, Contender
from .uncontended import failure

NAME = "contended"
HOLD = 0.001  # seconds
STAT = Path("/proc/stat")
PATIENCE = 30.0  # seconds more than the measurement, for processes to begin and to end


def measure(group: str, seconds: float, counts: list[int], peers: bool) -> dict[str, Any]:
    """Return by contender and number of processes what came of it, or {"error": why not}."""
    results: dict[str, Any] = {}
    requests = requests_of(GROUPS[group].servers[0])
    for count in counts:
        for contender in GROUPS[group].of("contended", peers=peers):
            found = results.setdefault(contender.title, {})
            if "error" in found:
                continue
            try:
                found[str(count)] = _once(contender, count, seconds, requests)
            except BaseException as error:
                found.update(failure(error))
    return results


def _once(
    contender: Contender, count: int, seconds: float, requests: Callable[[], int]
) -> dict[str, float]:
    children = [_Child(contender) for _ in range(count)]
    try:
        end = time.monotonic() + PATIENCE
        for child in children:
            child.answer(end)
        before, busy = requests(), _busy()
        start = time.monotonic() + 0.05
        for child in children:
            child.order.write(f"{start} {start + seconds}\n")
            child.order.close()
        end += seconds
        done = [child.answer(end) for child in children]
        busy = _busy() - busy
    finally:
        for child in children:
            child.kill()
    found = _judged(done, requests() - before, start, seconds)
    turns = sum(len(one["turns"]) for one in done)
    return {**found, "all_cpu_us": busy / turns * 1e6}


def _busy() -> float:
    """Return for how many seconds the processors of this machine have worked, all together."""
    user, nice, system, _, _, irq, softirq = map(int, STAT.read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _judged(
    done: list[dict[str, Any]], sent: int, start: float, seconds: float
) -> dict[str, float]:
    # The first and the last tenth do not count: somebody has just begun, or ends.
    begin, end = start + seconds / 10, start + seconds * 0.9
    turns = sorted((got, free) for one in done for _, got, free in one["turns"])
    counted = [sum(begin < got < end for _, got, _ in one["turns"]) for one in done]
    gaps = [got - free for (_, free), (got, _) in pairwise(turns) if begin < got < end]
    if min(gaps, default=0.0) < 0:
        raise RuntimeError("held by two at a time")
    waits = [got - asked for one in done for asked, got, _ in one["turns"]]
    return {
        "rate": sum(counted) / (end - begin),
        "hand_over_us": statistics.median(gaps) * 1e6,
        "requests": sent / len(turns),
        "spread": max(counted) / max(1, min(counted)),
        "longest_ms": max(waits) * 1000,
        "cpu_us": sum(one["cpu"] for one in done) / len(turns) * 1e6,
    }


class _Child:
    """A forked process that takes turns between two moments, when it is told these."""

    def __init__(self, contender: Contender) -> None:
        theirs, mine = os.pipe()
        self._answers, their_answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(mine)
            _work(contender, theirs, their_answers)
        os.close(theirs)
        os.close(their_answers)
        self.order = os.fdopen(mine, "w")
        self._read = b""

    def answer(self, until: float) -> Any:
        """Return the next line that the child has written; raise what it raised."""
        while b"\n" not in self._read:
            ready = select.select([self._answers], [], [], max(0, until - time.monotonic()))[0]
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("a process does not answer" if not ready else "a process died")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise (ImportError if answer["missing"] else RuntimeError)(answer["error"])
        return answer

    def kill(self) -> None:
        with suppress(OSError):
            self.order.close()
        os.close(self._answers)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _work(contender: Contender, orders: int, answers: int) -> None:
    try:
        with os.fdopen(answers, "w") as answer, os.fdopen(orders) as order:
            try:
                turn = contender.make()
                _connect(turn)
                answer.write("true\n")
                answer.flush()
                start, end = map(float, order.readline().split())
                time.sleep(max(0, start - time.monotonic()))
                json.dump(_take_turns(turn, end), answer)
            except BaseException as error:
                missing = isinstance(error, ImportError)
                text = f"{type(error).__name__}: {error}"
                json.dump({"error": str(error) if missing else text, "missing": missing}, answer)
            answer.write("\n")
    finally:
        os._exit(0)


def _connect(turn: Callable[[str], Any]) -> None:
    """Take a turn, and again if it fails: all connect at once, which some time limits forbid."""
    for tries_left in (2, 1, 0):
        try:
            with turn(NAME):
                return
        except Exception:
            if not tries_left:
                raise
            time.sleep(0.5)


def _take_turns(turn: Callable[[str], Any], end: float) -> dict[str, Any]:
    turns = []
    cpu = time.process_time()
    while (asked := time.monotonic()) < end:
        with turn(NAME):
            got = time.monotonic()
            time.sleep(HOLD)
            free = time.monotonic()
        turns.append((asked, got, free))
    return {"turns": turns, "cpu": time.process_time() - cpu}


def requests_of(kind: str) -> Callable[[], int]:
    """Return what tells how many requests the server has read from its clients so far."""
    urls = os.environ[f"DISTLOCK_TEST_{kind.upper()}_URL"].split(",")
    if kind in ("redis", "redlock"):
        import redis

        clients: list[Any] = [redis.Redis.from_url(url) for url in urls]
        return lambda: sum(one.info("stats")["total_reads_processed"] for one in clients)
    if kind == "etcd":  # the gateway makes a message of each request
        word = "grpc_server_msg_received_total{"
        return lambda: sum(
            int(float(line.split()[-1]))
            for line in urlopen(f"{urls[0]}/metrics", timeout=5).read().decode().splitlines()
            if line.startswith(word)
        )
    if kind == "zookeeper":
        return lambda: _zookeeper_packets(urls[0])
    from .raw import cursor_of

    cursor = cursor_of(kind)

    def asked() -> int:
        if kind == "mysql":
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
        else:  # a statement each, in autocommit; told when a session ends: connecting included
            time.sleep(0.6)
            cursor.execute(
                "SELECT '', xact_commit + xact_rollback FROM pg_stat_database"
                " WHERE datname = current_database()"
            )
        return int(cursor.fetchone()[1])

    return asked


def _zookeeper_packets(url: str) -> int:
    import socket

    at = urlsplit(f"//{url}")
    with socket.create_connection((at.hostname, at.port), timeout=5) as connection:
        connection.sendall(b"mntr")
        text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    lines = dict(line.split("\t", 1) for line in text.splitlines() if "\t" in line)
    return int(lines["zk_packets_received"])
