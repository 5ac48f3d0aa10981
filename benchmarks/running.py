"""The run: which measurements there are, the servers they need, and a process for each."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.launching import DidNotStart, NotInstalled, children_of, find_program, mortal
from tests.servers import KINDS, RedisServer

from .contenders import GROUPS

PARTS = ("uncontended", "contended", "threads", "held", "renewal", "tasks", "guards", "saving")
OF_ONE_THREAD = {"uncontended", "held", "saving"}
# Processes for each measurement of these parts, spread over the run. Their medians count: where a
# process lies in memory, and how the kernel lets it alternate with its server, stays as it began.
TURNS = {"uncontended": 3, "threads": 3, "saving": 3}
# As many for the locks of these servers, which wait for a disk, fast or slow from second to second.
TURNS |= {"zookeeper": 3, "etcd": 3}
COUNTS = [2, 8, 32]
THREADS = [1, 8, 64]
SPARE = "spare"  # one more Redis
PATIENCE = 60.0  # seconds that a job may take beyond three times what it should


@dataclass(frozen=True)
class Job:
    """One measurement, in a process of its own."""

    part: str
    of: str  # what it is of, within the part
    function: str
    arguments: list[Any]
    seconds: float  # about how long it takes, each time
    servers: tuple[str, ...] = ()
    database: str = "sqlite"


def jobs(*, quick: bool) -> Iterator[Job]:
    """Yield all measurements, or those of a quick round, in the order in which they are made."""
    work = list(_jobs(quick))
    for turn in range(1 if quick else max(TURNS.values())):
        yield from (job for job in work if turn < TURNS.get(job.part, TURNS.get(job.of, 1)))


def _jobs(quick: bool) -> Iterator[Job]:
    for title, group in GROUPS.items():
        if quick and not set(group.servers) <= {"redis"}:
            continue
        where = (group.servers, group.database)
        count = len(group.of("uncontended", peers=True))
        seconds = 0.1 if quick else 0.5 * count
        work = [title, seconds, not quick]
        yield Job("uncontended", title, "uncontended.measure", work, seconds + 2, *where)
        count = len(group.of("contended", peers=True))
        if group.servers:
            seconds, counts = (0.3, [2]) if quick else (3.0, COUNTS)
            work = [title, seconds, counts, not quick]
            about = count * sum(seconds + 0.3 + n / 40 for n in counts)
            yield Job("contended", title, "contended.measure", work, about, *where)
        if group.servers and title not in ("redlock", "zookeeper", "etcd"):
            seconds, counts = (0.1, [2]) if quick else (0.5, THREADS)
            work = [title, seconds, counts, not quick]
            about = len(group.of("threads", peers=True)) * len(counts) * (seconds + 0.3)
            yield Job("threads", title, "threads.measure", work, about, *where)
    yield from _jobs_of_scale(quick)
    if not quick:
        yield Job("saving", "plain sqlite", "guards.saving", [7, True], 3)
    for kind in ("mysql", "postgresql", "sqlite"):
        where = (() if kind == "sqlite" else (kind,), kind)
        rounds = 1 if quick else 20
        if kind == "sqlite" or not quick:
            yield Job("saving", kind, "guards.saving", [rounds, False], 4, *where)
        if where[0] and not quick:
            yield Job("guards", kind, "guards.measure", [2.4, [1, 2, 8, 32]], 80, *where)


def _jobs_of_scale(quick: bool) -> Iterator[Job]:
    many, renewed, tasks = (300, 100, 20) if quick else (100_000, 10_000, 1_000)
    ttl = 1.5 if quick else 30
    for kind in ("redis",) if quick else ("redis", "mysql", "postgresql"):
        database = "sqlite" if kind == "redis" else kind
        spare = (kind, SPARE) if kind == "redis" else (kind,)
        yield Job("held", kind, "scale.held", [kind, many], 20, spare, database)
        yield Job("renewal", kind, "scale.renewal", [kind, renewed, ttl], 25, (kind,), database)
    yield Job("tasks", "redis", "scale.tasks", [tasks], 8, ("redis",))
    if not quick:
        yield Job("uncontended", "redlock, a node frozen", "scale.frozen", [2.0], 5, ("redlock",))


class Servers:
    """Private servers, by name; what could not be started has a reason instead."""

    def __init__(self) -> None:
        self.started: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    def start(self, name: str) -> None:
        server = RedisServer() if name == SPARE else KINDS[name]()
        try:
            server.start()
            if name in ("mysql", "postgresql"):
                _make_databases(name, server.url)
        except (NotInstalled, DidNotStart) as error:
            self.missing[name] = str(error)
            server.close()
            return
        self.started[name] = server
        self.versions |= _version(name)

    def environment(self, job: Job, scratch: str) -> dict[str, str]:
        """Return what the process of `job` finds its servers by."""
        found = {name: server.url for name, server in self.started.items()}
        urls = {f"DISTLOCK_TEST_{name.upper()}_URL": url for name, url in found.items()}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DISTLOCK_TEST_")}
        if "redlock" in self.started:
            urls["DISTLOCK_BENCHMARK_NODE"] = str(self.started["redlock"].pids[-1])
        return {
            **inherited,
            **urls,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "DISTLOCK_TEST_DATABASE": job.database,
            "DISTLOCK_TEST_DB_NAME": "1",
            "DISTLOCK_TEST_VAR": scratch,
        }


def _make_databases(name: str, url: str) -> None:
    """Make the two databases of tests/settings.py, and the one that the URL names."""
    base = urlsplit(url).path[1:]
    made = [f"test_{base}_{alias}" for alias in ("default", "locks")]
    if name == "mysql":
        made.append(base)
        import MySQLdb

        at = urlsplit(url)
        connection: Any = MySQLdb.connect(host="127.0.0.1", port=at.port, user="root")
    else:
        import psycopg

        connection = psycopg.connect(url, autocommit=True)
    cursor = connection.cursor()
    for database in made:
        cursor.execute(f"CREATE DATABASE {database}")
    connection.close()


@contextmanager
def servers_for(work: list[Job]) -> Iterator[Servers]:
    """Run the servers that the jobs need."""
    servers = Servers()
    try:
        for name in dict.fromkeys(name for job in work for name in job.servers):
            servers.start(name)
        yield servers
    finally:
        for server in servers.started.values():
            server.close()


def measure(work: list[Job], servers: Servers) -> dict[str, Any]:
    """Run the jobs, one after the other; return by part and what it is of."""
    found: dict[str, dict[str, list[Any]]] = {}
    bar = Bar(sum(job.seconds for job in work))
    done = 0.0
    with tempfile.TemporaryDirectory(prefix="distlock-benchmarks-") as scratch:
        for job in work:
            lacking = [servers.missing[name] for name in job.servers if name in servers.missing]
            if lacking:
                answer: Any = {"error": f"skipped: {lacking[0]}"}
            else:
                show = partial(_show, bar, job, done)
                with one_core() if job.part in OF_ONE_THREAD else nullcontext():
                    answer = _run(job, servers.environment(job, scratch), show)
            found.setdefault(job.part, {}).setdefault(job.of, []).append(answer)
            done += job.seconds
    bar.end()
    return {
        part: {of: medians(turns) for of, turns in rows.items()} for part, rows in found.items()
    }


def medians(turns: list[Any]) -> Any:
    """Return what was measured several times: of each figure the median, of all else the last."""
    if not isinstance(turns[-1], dict):
        return statistics.median(turns) if isinstance(turns[-1], (int, float)) else turns[-1]
    # Where an error stands beside figures, only it is in the answer.
    if failed := next((turn for turn in turns if "error" in turn), None):
        return failed
    return {key: medians([turn[key] for turn in turns if key in turn]) for key in turns[-1]}


@contextmanager
def one_core() -> Iterator[None]:
    """Keep the servers, and what is started meanwhile, on one core.

    Else a client and its server share one or not as the kernel likes, and to wake another core
    costs more than a lock: the same contender took 500 or 900 µs from one run to the next.
    """
    all_cores = os.sched_getaffinity(0)
    _keep_on({min(all_cores)})
    try:
        yield
    finally:
        _keep_on(all_cores)


def _keep_on(cores: set[int]) -> None:
    family = [os.getpid()]
    for pid in family:
        family += children_of(pid)
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)


def _show(bar: Bar, job: Job, done: float, took: float) -> None:
    bar.show(done + min(took, job.seconds), f"{job.part}, {job.of}")


def _run(job: Job, environment: dict[str, str], tell: Callable[[float], None]) -> Any:
    command = [sys.executable, "-m", "benchmarks.job", job.function]
    command += [json.dumps(argument) for argument in job.arguments]
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            mortal(command), env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            while True:
                took = time.monotonic() - begun
                tell(took)
                try:
                    out, _ = process.communicate(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    if took > 3 * job.seconds + PATIENCE:
                        return {"error": f"not ready after {took:.0f} s"}
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode == 0:
            return json.loads(out.splitlines()[-1])
        errors.seek(0)
        lines = errors.read().splitlines() or [f"exit code {process.returncode}"]
    print("\n".join(["", f"{job.part}, {job.of}:", *lines[-15:]]), file=sys.stderr)
    return {"error": lines[-1][:160]}


class Bar:
    """Shows on stderr how far the run is: on a terminal over itself, else a line for each job."""

    def __init__(self, total: float) -> None:
        self._total = total
        self._begun = time.monotonic()
        self._shown = ""

    def show(self, done: float, what: str) -> None:
        filled = round(30 * done / self._total)
        bar = "#" * filled + "." * (30 - filled)
        took = round(time.monotonic() - self._begun)
        text = f"[{bar}] {took // 60:2}:{took % 60:02}  {what}"
        if sys.stderr.isatty():
            print(f"\r{text:<79.79}", end="", file=sys.stderr, flush=True)
        elif what != self._shown:
            print(text, file=sys.stderr, flush=True)
        self._shown = what

    def end(self) -> None:
        self.show(self._total, "done")
        if sys.stderr.isatty():
            print(file=sys.stderr)


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    cpu = "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = lines[0].partition(": ")[2] if lines else cpu
    packages = {}
    for name in ("Django", "redis", "django-redis", "mysqlclient", "psycopg", "kazoo"):
        try:
            packages[name] = version(name)
        except ImportError:
            packages[name] = "not installed"
    return {
        "cores": os.cpu_count(),
        "cpu": cpu,
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": packages,
    }


def _version(name: str) -> dict[str, str]:
    programs = {"redis": "redis-server", "mysql": "mariadbd", "postgresql": "postgres"}
    programs["etcd"] = "etcd"
    if name not in programs:
        return {}
    ask = [find_program(programs[name]), "--version"]
    text = subprocess.run(ask, capture_output=True, text=True, timeout=10).stdout
    numbers = [word.strip("v=,") for word in text.replace("v=", " ").split()]
    return {name: next((word for word in numbers if word[:1].isdigit()), "?")}
