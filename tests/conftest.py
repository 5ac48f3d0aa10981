"""Fixtures of every test: the servers, the worker processes, and what is left behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from pytest_django import DjangoDbBlocker

from tests.launching import NotInstalled, Server, children_of
from tests.processes import Processes
from tests.servers import MariaDBServer, MySQLServer, PostgreSQLServer, RedisServer

# A shell starts what it puts into the background with Ctrl-C and Ctrl-\ ignored, nohup with SIGHUP
# ignored, and the programs that the tests start would inherit that.
HANDLERS = {signal.SIGINT: signal.default_int_handler}
for number in signal.SIGINT, signal.SIGQUIT, signal.SIGHUP:
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, HANDLERS.get(number, signal.SIG_DFL))


def missing(server: str, reason: str) -> None:
    """Skip the test for want of a server, or fail it where DISTLOCK_TEST_REQUIRE names it.

    `sh tests/run.sh` requires all that it starts: a suite without its servers proves nothing.
    """
    required = os.environ.get("DISTLOCK_TEST_REQUIRE", "").replace(",", " ").split()
    if server in required or "1" in required:
        pytest.fail(f"{server} is required: {reason}", pytrace=False)
    pytest.skip(reason)


def certified(directory):
    """Return a self-signed certificate for this host, and its key."""
    if shutil.which("openssl") is None:
        missing("openssl", "it makes the certificate of a server")
    files = directory / "certificate.pem", directory / "key.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext"
    out = ["subjectAltName=IP:127.0.0.1", "-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run([*words.split(), *out], check=True, capture_output=True)
    return files


# Files (how their names begin after "test_") whose tests do the same whatever `default` is:
# tests/run.sh runs them beside SQLite only.
ONCE = tuple(
    f"test_{name}"
    for name in """
    benchmarks browser contention contract_proof core_async core_clock core_cost core_fork
    core_holds core_reentrancy core_renewal core_sessions core_settings core_waiting demo docs
    etags etcd_ faults_history fuzz gevent health history integrations lanes locmem log_records
    metrics model_checking override_locks packaging permission_matrix polling primitives
    private_parts proxy race readability redis_ redlock servers statements translations
    unique_tasks
    """.split()
)
OTHER_SERVERS = {"redis_server", "cluster_urls", "etcd_url", "zookeeper_url", "redlock_urls"}
# The aliases whose locks are in the database of the run.
OF_THE_DATABASE = frozenset(["default", "locks", "other", "named", "advisory"])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what `-m "... and not once"` or `-m "slow and ..."` leaves out anyway."""
    marks = config.option.markexpr
    left_out = "not once" in marks and collection_path.stem.startswith(ONCE)
    if marks.startswith("slow and") and collection_path.suffix == ".py":
        left_out |= "mark.slow" not in collection_path.read_text("utf-8")
    return left_out or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what does not depend on the database of this run, and what starts processes."""
    warned = os.environ.get("DISTLOCK_TEST_ISOLATION", "").startswith(("repeatable", "serial"))
    for item in items:
        if warned:  # of locks taken inside of atomic(); other tests are about that warning
            item.add_marker(pytest.mark.filterwarnings("ignore:.*REPEATABLE READ:RuntimeWarning"))
        case = getattr(item, "callspec", None)
        asked = case.params if case is not None else {}
        elsewhere = not OF_THE_DATABASE.issuperset(
            asked[name] for name in ("using", "bystander") if isinstance(asked.get(name), str)
        )
        fixtures = set(getattr(item, "fixturenames", ()))
        # All aliases are in memory; pytest-django lets no test without these into a database.
        asks_for_one = "transactional_db" in fixtures or item.get_closest_marker("django_db")
        elsewhere |= "memory" in fixtures and not asks_for_one
        if elsewhere or fixtures & OTHER_SERVERS or item.path.stem.startswith(ONCE):
            item.add_marker("once")
        if fixtures & {"processes", "shells", "started"}:
            item.add_marker("crowd")


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what stays until the end: the app, and the tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Fail a test that ends the tracing of what measures coverage: it would see no more of them."""
    before = sys.gettrace()
    yield
    assert sys.gettrace() is before


@pytest.fixture(autouse=True)
def nothing_held_in_memory() -> None:
    """Forget what an earlier test holds in this process: a lock lives as long as its ttl."""
    from distlock_app.core.registry import registry

    if "locmem" in registry:
        backend = registry["locmem"].backend
        for holding in list(backend.holders()):
            backend.clear(holding.key)


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a lock in memory stays that, however slow the machine is."""
    from distlock_app.primitives.timing import monotonic

    now = monotonic()
    monkeypatch.setattr("distlock_app.backends.locmem.monotonic", lambda: now)


# Fixtures of a whole module that start threads in the middle of a test.
RUNNING_ON = {"runs", "ensemble"}


@pytest.fixture(autouse=True)
def nothing_runs_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test whose own threads or processes outlive it: the next one would suffer."""
    if RUNNING_ON & set(request.fixturenames):
        yield
        return
    threads, processes = set(threading.enumerate()), set(children_of(os.getpid()))
    yield
    give_up = monotonic() + 5
    while running := [
        thread
        for thread in set(threading.enumerate()) - threads
        if getattr(getattr(thread, "_target", None), "__module__", "").startswith("tests.")
    ]:
        assert monotonic() < give_up, f"it left threads behind: {running}"
        sleep(0.01)  # join() refuses one that is just being started
    outliving = set(children_of(os.getpid())) - processes
    assert not outliving, f"it left processes behind: {outliving}"


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None) -> Iterator[None]:
    """Let the processes that a test starts use the test databases, as soon as they exist."""
    from django.conf import settings

    from distlock_app.core.registry import registry
    from tests.emptying import emptying

    os.environ["DISTLOCK_TEST_DB_NAME"] = str(settings.DATABASES["default"]["NAME"])
    with emptying():
        yield
    del os.environ["DISTLOCK_TEST_DB_NAME"]
    registry.reset()  # PostgreSQL does not drop a database to which somebody is connected.


@pytest.fixture
def atomic_requests() -> Iterator[None]:
    """Let each request be a transaction on the default database."""
    from django.db import connections

    settings = connections.settings["default"]
    settings["ATOMIC_REQUESTS"] = True
    yield
    settings["ATOMIC_REQUESTS"] = False


@pytest.fixture
def read_committed() -> Iterator[None]:
    """Let transactions on `default` be READ COMMITTED, Django's own level, in every run."""
    from django.db import connection

    options = connection.settings_dict["OPTIONS"]
    before = dict(options)
    connection.close()
    options.pop("isolation_level", None)
    yield
    connection.close()
    options.update(before)


@pytest.fixture
def short_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    """New sessions on MySQL or MariaDB end statements after 50 ms, as a server may by default."""
    from django.db import connections

    limit = "/*M! , max_statement_time = 0.05 */ /*!50708 , max_execution_time = 50 */"
    for alias in connections:
        options = connections[alias].settings_dict["OPTIONS"]
        monkeypatch.setitem(options, "init_command", f"SET SESSION wait_timeout = 600 {limit}")


@pytest.fixture
def generic_dialect() -> Iterator[None]:
    """Let the database of this run stand in for one whose SQL the lock table does not know."""
    from distlock_app.backends.database import sql
    from distlock_app.core.registry import registry

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sql, "DIALECTS", {})
        registry.reset()
        yield
    registry.reset()


def url_of(server: str) -> str:
    """Return where a server of the suite is; a test that kills one starts its own."""
    from django.conf import settings

    url: str = getattr(settings, f"{server.upper()}_URL")
    if not url:
        missing(server, f"DISTLOCK_TEST_{server.upper()}_URL is not set")
    return url


@pytest.fixture(scope="session")
def redis_url() -> str:
    """Where the suite's Redis is."""
    return url_of("redis")


@pytest.fixture(scope="session")
def cluster_urls() -> list[str]:
    """Where the nodes of the suite's Redis Cluster are."""
    return url_of("redis_cluster").split(",")


@pytest.fixture(scope="session")
def etcd_url() -> str:
    """Where the suite's etcd is."""
    return url_of("etcd")


@pytest.fixture(scope="session")
def zookeeper_url() -> str:
    """Where the suite's ZooKeeper is."""
    return url_of("zookeeper")


@pytest.fixture(scope="session")
def redlock_urls() -> list[str]:
    """Where the suite's five nodes of Redlock are."""
    return url_of("redlock").split(",")


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Worker processes, killed at the end of the test."""
    group = Processes()
    yield group
    group.close()


@pytest.fixture(scope="session")
def private_server() -> Iterator[Callable[..., Any]]:
    """Start servers that a test may kill: `private_server(RedisServer, config={...})`.

    They are stopped at the end of the session; close them earlier with `server.close()`.
    """
    started: list[Server] = []

    def start(kind: type[Server], *args: Any, **options: Any) -> Server:
        server = kind(*args, **options)
        try:
            server.start()
        except NotInstalled as error:
            missing(server.name, str(error))
        started.append(server)
        return server

    yield start
    for server in reversed(started):
        server.close()


@pytest.fixture
def own_redis(private_server: Callable[..., RedisServer]) -> Iterator[RedisServer]:
    """A Redis of this test alone."""
    server = private_server(RedisServer)
    yield server
    server.close()


@pytest.fixture
def own_server(
    request: pytest.FixtureRequest,
    private_server: Callable[..., Any],
    django_db_blocker: DjangoDbBlocker,
) -> Iterator[Server]:
    """A server of this test alone, of the kind under test, as database `own` with a lock table.

    Parametrize it with `indirect=True` to give it settings of the server.
    """
    from django.conf import settings
    from django.db import connections

    from distlock_app.models import DistLock

    if settings.ENGINE == "sqlite":
        pytest.skip("SQLite has no server")
    kind: type[Server] = PostgreSQLServer
    user = name = "postgres"
    if settings.ENGINE == "mysql":
        with django_db_blocker.unblock():
            default: Any = connections["default"]
            kind = MariaDBServer if default.mysql_is_mariadb else MySQLServer
        user, name = "root", "locks"
    server = private_server(kind, config=getattr(request, "param", None))
    place = {"HOST": "127.0.0.1", "PORT": server.port, "USER": user, "NAME": name}
    connections.settings["own"] = {**connections.settings["locks"], **place}
    own = connections["own"]
    with django_db_blocker.unblock():
        if settings.ENGINE == "mysql":
            with own._nodb_cursor() as cursor:
                cursor.execute(f"CREATE DATABASE {name}")
        with own.schema_editor() as editor:
            editor.create_model(DistLock)
        own.close()
        yield server
        own.close()
    del connections["own"]
    del connections.settings["own"]
    server.close()


def print_promises(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which engine kept which promise of the contract, and which it does not make."""
    marks = {"passed": "yes", "skipped": "-", "failed": "FAILED", "error": "FAILED"}
    cells: dict[str, dict[str, str]] = {}
    reasons = set()
    for outcome, mark in marks.items():
        for report in terminalreporter.stats.get(outcome, ()):
            path, _, case = getattr(report, "nodeid", "").partition("::Test")
            engine, _, promise = case.partition("::test_")
            if not path.endswith("test_contract.py") or not promise:
                continue
            cells.setdefault(promise, {})[engine] = mark
            if mark == "-":
                reasons.add(f"{engine}: {report.longrepr[2].removeprefix('Skipped: ')}")
    engines = sorted({engine for row in cells.values() for engine in row})
    if not engines:
        return
    terminalreporter.section("engine x promise")
    width = max(map(len, cells))
    terminalreporter.write_line(" ".join([" " * width, *engines]))
    for promise, row in cells.items():
        columns = [row.get(engine, "").ljust(len(engine)) for engine in engines]
        terminalreporter.write_line(" ".join([promise.replace("_", " ").ljust(width), *columns]))
    for reason in sorted(reasons):
        terminalreporter.write_line(f"- {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the totals and the failures to files, for the end of what tests/run.sh prints."""
    print_promises(terminalreporter)
    path = os.environ.get("DISTLOCK_TEST_TOTALS")
    if path:
        outcomes = ("passed", "failed", "error", "skipped", "xfailed", "deselected")
        totals = {name: len(terminalreporter.stats.get(name, ())) for name in outcomes}
        with open(path, "w") as file:
            file.write(", ".join(f"{number} {name}" for name, number in totals.items() if number))
        with open(f"{path}.failed", "w") as file:
            for outcome in ("failed", "error"):
                for report in terminalreporter.stats.get(outcome, ()):
                    lines = report.longreprtext.splitlines()[-30:]
                    print(f"\n--- {report.nodeid} ({report.when})", *lines, sep="\n", file=file)
