"""The demo shop: its own tests, its nightly job on two hosts, and the command of the README."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.launching import launch

ROOT = Path(__file__).resolve().parent.parent
# What a checkout has that the shop needs.
PARTS = ["distlock_app", "demo_project", "manage.py", "setup.cfg", "pyproject.toml"]
PARTS += ["README.md", "LICENSE"]


def environment(**variables: str) -> dict[str, str]:
    """Return ours without what says how these tests run."""
    own = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("DEMO_", "DISTLOCK_", "DJANGO_", "PORT"))
    }
    return own | {"DJANGO_SETTINGS_MODULE": "demo_project.settings"} | variables


class Shop:
    """A shop with files of its own."""

    def __init__(self, var: Path, **variables: str) -> None:
        self.var = var
        self.variables = {"DEMO_VAR": str(var), **variables}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command of manage.py."""
        process = launch(
            [sys.executable, "-W", "error", "manage.py", *arguments],
            cwd=ROOT,
            env=environment(**self.variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str) -> str:
        """Run a command that has to succeed; return what it says."""
        process = self.start(*arguments)
        said, _ = process.communicate(timeout=180)
        assert process.returncode == 0, said
        return said

    def ask(self, sql: str, database_name: str = "shop") -> list[Any]:
        """Ask one of its databases."""
        with closing(sqlite3.connect(self.var / f"{database_name}.sqlite3")) as database:
            return database.execute(sql).fetchall()

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """A shop with nothing in it."""
    shop = Shop(tmp_path)
    yield shop
    shop.close()


def open_up(shop: Shop) -> None:
    shop.run("migrate", "--verbosity=0")
    shop.run("migrate", "--verbosity=0", "--database=locks")
    shop.run("seed")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """One that is migrated and seeded, which no test changes."""
    shop = Shop(tmp_path_factory.mktemp("opened"))
    open_up(shop)
    yield shop
    shop.close()


@pytest.mark.crowd
def test_the_shop_passes_its_own_tests(shop):
    said = shop.run("test", "demo_project")

    assert re.search(r"Ran \d\d tests", said)


def test_the_settings_are_sound_and_the_migrations_complete(shop):
    assert "no issues" in shop.run("check")
    shop.run("check", "--deploy", "--fail-level=ERROR")
    assert "No changes" in shop.run("makemigrations", "--check", "--dry-run")


@pytest.mark.crowd
def test_locks_have_a_file_of_their_own(opened):
    table = "SELECT COUNT(*) FROM sqlite_master WHERE name = 'distlock_app_distlock'"
    orders = "SELECT COUNT(*) FROM sqlite_master WHERE name = 'shop_order'"
    assert (opened.ask(table), opened.ask(orders)) == ([(0,)], [(1,)])
    assert (opened.ask(table, "locks"), opened.ask(orders, "locks")) == ([(1,)], [(0,)])


@pytest.mark.crowd
def test_settling_on_two_hosts_at_once_settles_each_order_once(shop, opened):
    shutil.copytree(opened.var, shop.var, dirs_exist_ok=True)

    jobs = [shop.start("settle", "--pause=1") for _ in range(2)]
    said = [job.communicate(timeout=120)[0] for job in jobs]

    assert sorted(job.returncode for job in jobs) == [0, 75], said
    (refused,) = [text for job, text in zip(jobs, said, strict=True) if job.returncode]
    assert "settle is already running" in refused
    assert shop.ask("SELECT COUNT(*), COUNT(DISTINCT order_id) FROM shop_settlement") == [(5, 5)]
    assert shop.ask("SELECT DISTINCT status FROM shop_order") == [("settled",)]


def test_an_engine_that_the_shop_does_not_know_is_named(shop):
    process = launch(
        [sys.executable, "manage.py", "check"],
        cwd=ROOT,
        env=environment(DEMO_VAR=str(shop.var), DEMO_ENGINE="paper"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    shop.started.append(process)

    said, _ = process.communicate(timeout=60)

    assert process.returncode != 0
    assert "DEMO_ENGINE is database or redis, not 'paper'" in said


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is in the checkout, without what was made there."""
    copy = tmp_path_factory.mktemp("demo") / "a checkout"
    copy.mkdir()
    made = shutil.ignore_patterns(".venv", "var", "__pycache__", "*.egg-info")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=made)
        elif (ROOT / part).exists():
            shutil.copy(ROOT / part, copy / part)
    return copy


def run_sh(checkout: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start the command of the README, as a shell would."""
    # Only what a new user has; our own virtual environment is not on the path.
    path = os.pathsep.join(
        part for part in os.environ["PATH"].split(os.pathsep) if ".venv" not in part
    )
    # pip compiles all of Django, of which the shop imports a part: 0 is how pip is told not to.
    env = environment(PATH=path, PIP_NO_COMPILE="0", **variables)
    del env["DJANGO_SETTINGS_MODULE"]
    return launch(
        ["sh", "demo_project/run.sh", *arguments],
        cwd=checkout,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def port_of(said: str) -> int:
    found = re.search(r"http://127\.0\.0\.1:(\d+)/", said)
    assert found, said
    return int(found[1])


def somebody_listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["database", "redis"])
def test_run_sh_shows_that_the_locks_hold_and_stops_what_it_started(checkout, engine):
    demo = run_sh(checkout, "--once", DEMO_ENGINE=engine)
    try:
        said, _ = demo.communicate(timeout=280)
    finally:
        kill_group(demo)

    assert demo.returncode == 0, said
    assert re.search(r"tickets sold +\d+ +10 +10\n", said), said
    assert re.search(r"WRONG +right\n", said), said
    assert port_of(said) < 32768
    assert not somebody_listens(port_of(said))


@pytest.mark.slow
def test_run_sh_serves_until_it_is_told_to_stop(checkout):
    demo = run_sh(checkout)
    said = ""
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            said += line
            if "until Ctrl-C" in line:
                break
        listened = somebody_listens(port_of(said))
        began = time.monotonic()
        demo.send_signal(signal.SIGTERM)
        demo.communicate(timeout=60)
    finally:
        kill_group(demo)

    assert listened
    assert demo.returncode == 143
    assert time.monotonic() - began < 30
    assert not somebody_listens(port_of(said))


def kill_group(demo: subprocess.Popen[str]) -> None:
    """End what is left of it, even if the test failed."""
    try:
        os.killpg(demo.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    demo.communicate()
