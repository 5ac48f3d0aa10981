"""Run the whole test suite on every database, with each pair of Python and Django.

Installs what is missing (Debian's apt, with sudo when not root), makes its own virtual
environments in .venv-tests/, starts MariaDB, PostgreSQL, Redis, etcd and ZooKeeper privately on
free ports and stops them at the end. A run is a list of lanes (the slow tests on SQLite, say), of
which some run at the same time, each on servers of its own. MySQL comes from a newer Debian than
this machine's, unpacked into .venv-tests/; where it cannot be had, it is skipped.

A server that already runs is used instead, with an account that may create databases:

  DISTLOCK_TEST_MYSQL_URL=mysql://user:password@host:3306/name  (MariaDB)
  DISTLOCK_TEST_MYSQL9_URL=mysql://user:password@host:3306/name
  DISTLOCK_TEST_POSTGRESQL_URL=postgresql://user:password@host:5432/name
  DISTLOCK_TEST_REDIS_URL=redis://:password@host:6379/0
  DISTLOCK_TEST_REDIS_CLUSTER_URL=redis://host:6379,redis://other:6379
  DISTLOCK_TEST_ETCD_URL=http://host:2379
  DISTLOCK_TEST_ZOOKEEPER_URL=host:2181
  DISTLOCK_TEST_REDLOCK_URL=redis://host:6379,redis://other:6379,redis://third:6379
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import IO, Any

from tests.lanes import DATABASES, SERVERS, Choice, Lane, plan
from tests.launching import ROOT
from tests.machine import PIP, Environments, Pair, find_python, has, install, missing_packages

# Percent of the app's lines and branches that the tests have to run.
COVERED = 95


class Stopped(Exception):
    """The run is over: nothing else is started."""


class Run:
    """One run of a plan: its directory, its processes, its table."""

    def __init__(self, choice: Choice, work: Path) -> None:
        self.choice = choice
        self.work = work
        self.failed: list[str] = []
        self.skipped: list[str] = []
        self.table: list[str] = []
        self.failures: list[str] = []
        self.environments = Environments(self.run, compiler="mysql" in choice.databases)
        self.children: set[subprocess.Popen[bytes]] = set()
        self._changing = threading.Lock()
        self._printing = threading.Lock()
        self._stopping = False
        # A server that somebody gave us: lanes would meet there.
        given = [name for name in os.environ if re.match("DISTLOCK_TEST_.*_URL", name)]
        # More at once than there are processors: two thirds of the time tests wait for a ttl, a
        # server, a process.
        one = given or choice.quick
        self.at_once = 1 if one else 3 * len(os.sched_getaffinity(0))

    def run(
        self,
        *command: Any,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        out: IO[str] | None = None,
    ) -> bool:
        """Run a command to its end; return whether it succeeded."""
        return self.exit_code(*command, env=env, cwd=cwd, out=out) == 0

    def exit_code(
        self,
        *command: Any,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        out: IO[str] | None = None,
    ) -> int:
        """Run a command to its end; return its exit code."""
        with self._changing:
            if self._stopping:
                raise Stopped
            child = subprocess.Popen(command, env=env, cwd=cwd, stdout=out, stderr=out)
            self.children.add(child)
        code = child.wait()
        self.children.discard(child)
        return code

    def stop(self) -> None:
        """End the processes that run, and start no more."""
        with self._changing:
            self._stopping = True
        for child in list(self.children):
            child.terminate()

    def fail(self, what: str) -> None:
        """Note why the run fails."""
        print(f"FAILED: {what}", file=sys.stderr, flush=True)
        self.failed.append(what)

    def record(self, pair: Pair, what: str, result: str, began: float, totals: str = "") -> None:
        """Add a line to the table."""
        seconds = monotonic() - began
        self.table.append(f"{pair!s:10} {what:20} {result:8} {seconds:6.0f} s  {totals}")
        if result == "FAILED":
            self.failed.append(f"{what} on {pair}")

    def report_coverage(self, pair: Pair) -> None:
        """Fail the run if its lanes did not cover enough of the app."""
        began, here = monotonic(), self.work / "coverage"
        coverage = [str(pair.bin / "python"), "-m", "coverage"]
        data = f"--data-file={here}/data"
        # Not by run(): the lanes have ended, and it starts nothing after them.
        subprocess.run([*coverage, "combine", "-q", data, str(here)], cwd=ROOT)
        report = [*coverage, "report", data, "--precision=2", f"--fail-under={COVERED}"]
        passed = subprocess.run(report, cwd=ROOT).returncode == 0
        self.record(pair, "branch coverage", "ok" if passed else "FAILED", began)

    def work_off(self, lanes: Sequence[Lane]) -> None:
        """Run the lanes, the first ones first, `at_once` at a time."""
        left = list(reversed(lanes))
        workers = [
            threading.Thread(target=self._work, args=(left,))
            for _ in range(min(self.at_once, len(lanes)))
        ]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        finally:
            self.stop()
            for worker in workers:
                worker.join()

    def _work(self, left: list[Lane]) -> None:
        while True:
            try:
                lane = left.pop()
            except IndexError:
                return
            print(f"Begun: {lane.name}", flush=True)
            home = self.work / lane.name
            home.mkdir(mode=0o711)
            log = home / "log"
            try:
                if self.at_once == 1:
                    LaneRun(self, lane, home, None).run()
                    continue
                with log.open("w") as out:
                    LaneRun(self, lane, home, out).run()
            except Stopped:
                return
            except Exception as error:
                self.fail(f"{lane.name}: {type(error).__name__}: {error}")
            with self._printing:
                print(log.read_text(errors="replace"), flush=True)


class LaneRun:
    """A lane that runs: its servers, its environment variables, its log."""

    def __init__(self, run: Run, lane: Lane, home: Path, out: IO[str] | None) -> None:
        self._run = run
        self._lane = lane
        self._home = home
        self._out = out
        for name in ("servers", "tmp"):
            (home / name).mkdir(mode=0o711)
        self._env = dict(os.environ)
        # It would double what collecting the tests costs, in each lane.
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)
        self._env["TMPDIR"] = str(home / "tmp")
        self._env["DISTLOCK_TEST_VAR"] = str(home / "var")

    def run(self) -> None:
        """Run its tests, on servers that are stopped afterwards."""
        lane, chosen = self._lane, self._run.choice.pytest
        if lane.kind == "checks":
            self._check()
            return
        if not self._run.environments.make(lane.pair, self._out):
            self._run.record(lane.pair, f"{lane.name} install", "FAILED", monotonic())
            return
        kept = lane.name == self._run.choice.kept
        try:
            if not self._start_servers():
                return
            if lane.kind == "wheel":
                self._test_wheel(chosen)
            elif lane.kind == "contract":
                files = chosen or ("tests/test_contract.py",)
                self._test(*files, "-m", lane.marks, "-k", "contract")
            elif self._run.choice.only == "redis":
                self._test(*chosen, "-m", lane.marks, "-k", "redis or redlock")
            else:
                self._test(*chosen, "-m", lane.marks)
        finally:
            if not kept:
                stop_servers(self._home)

    def _start_servers(self) -> bool:
        """Start what the lane needs; return False if it is to be skipped."""
        choice, lane = self._run.choice, self._lane
        needed = {"redis", lane.database}
        # What runs beside SQLite only may need any of them.
        if "not once" not in lane.marks:
            needed |= {"redis_cluster", *choice.stores, *choice.databases}
        required = [server for server in SERVERS if server in needed]
        for server in required:
            variable = f"DISTLOCK_TEST_{server.upper()}_URL"
            if self._env.get(variable):
                self._say(f"{server}: the one of {variable}")
                continue
            started = self._home / f"{server}.env"
            with started.open("w") as file:
                command = ["-m", "tests.servers", "start", "--dir", self._home / "servers", server]
                code = self._run.exit_code(sys.executable, *command, out=file)
            said = started.read_text()
            self._say(said.strip())
            if found := re.search(f"^{variable}=(.+)$", said, re.MULTILINE):
                self._env[variable] = found[1]
            elif code == os.EX_UNAVAILABLE and server == "mysql9":
                self._run.skipped.append("MySQL: it cannot be had here")
                return False
            else:
                self._run.fail(f"the server {server}")
        if "chromium" in choice.programs:
            required.append("chromium")
        self._env["DISTLOCK_TEST_REQUIRE"] = " ".join(required)
        return True

    def _test(self, *arguments: str, cwd: Path = ROOT) -> None:
        lane, totals = self._lane, self._home / "totals"
        database = lane.database
        env = {**self._env, "DISTLOCK_TEST_TOTALS": str(totals)}
        if database == "mysql9":
            # InnoDB's own default: MariaDB is tested at Django's, READ COMMITTED.
            env.setdefault("DISTLOCK_TEST_ISOLATION", "repeatable read")
            env["DISTLOCK_TEST_MYSQL_URL"] = env["DISTLOCK_TEST_MYSQL9_URL"]
            database = "mysql"
        env["DISTLOCK_TEST_DATABASE"] = database
        pair = lane.pair
        self._say(f"\n=== Python {pair.version}, Django {pair.django}, {lane.database}")
        began, python = monotonic(), pair.bin / "python"
        if lane.kind == "upstream":
            self._run.run(python, "-m", "pip", "freeze", out=self._out)
        pytest = [python, "-W", "error", "-m", "pytest", "-q", "-rs", *arguments]
        if lane.kind == "coverage":
            pytest[1:3] = ["-m", "coverage", "run"]
            env["COVERAGE_FILE"] = str(self._run.work / "coverage/data")
        code = self._run.exit_code(*pytest, env=env, cwd=cwd, out=self._out)
        result = "ok" if code == 0 else "FAILED"
        if code == 5 and self._run.choice.pytest:
            result = "none"  # of those that were asked for
        found = totals.read_text() if totals.exists() else ""
        self._run.record(pair, lane.name, result, began, found)
        failures = Path(f"{totals}.failed")
        text = failures.read_text() if failures.exists() else self._last_words()
        if text:
            self._run.failures.append(f"\n=== {lane.name} on {pair}{text}")

    def _test_wheel(self, chosen: Sequence[str]) -> None:
        """Test what users install, in a copy of the project that has lost its sources."""
        python, project = self._lane.pair.bin / "python", self._home / "project"
        ignored = shutil.ignore_patterns(".*")
        shutil.copytree(ROOT, project, ignore=ignored, symlinks=True)
        build = [python, "-m", "build", "--wheel", "--outdir", self._home / "dist"]
        with (self._home / "build.log").open("w") as log:
            built = self._run.run(*build, cwd=project, out=log)
        pip = [python, "-m", "pip", *PIP]
        wheels = [*(self._home / "dist").glob("*.whl")]
        if not built or not self._run.run(
            *pip, "install", "--no-deps", "--force-reinstall", *wheels, out=self._out
        ):
            self._say((self._home / "build.log").read_text()[-4000:])
            self._run.fail("the wheel")
            return
        shutil.rmtree(project / "build", ignore_errors=True)
        shutil.rmtree(project / "distlock_app")
        try:
            self._test(*chosen, "-m", self._lane.marks, cwd=project)
        finally:
            self._run.run(*pip, "uninstall", "--yes", "distlock_app", out=self._out)

    def _check(self) -> None:
        pair, programs = self._lane.pair, self._lane.pair.bin
        self._say(f"\n=== Linter, types, imports, migrations ({pair})")
        checks: dict[str, list[Any]] = {
            "ruff": [programs / "ruff", "check", "--no-cache", "."],
            "format": [programs / "ruff", "format", "--no-cache", "--check", "."],
            # Kept from run to run, beside its mypy: it checks again what has changed.
            "types": [programs / "mypy", f"--cache-dir={programs.parent / 'mypy'}"],
            "pyright": [programs / "pyright", "--pythonpath", programs / "python"],
            "imports": [programs / "lint-imports", "--no-cache"],
            "migrations": [
                *(programs / "python", "-m", "django", "makemigrations", "--check", "--dry-run"),
                "--settings=tests.settings",
            ],
        }
        if pair.version == "3.10":
            self._run.skipped.append("types and import layers: their checkers need Python 3.11")
            del checks["types"], checks["pyright"], checks["imports"]
        elif not has(str(programs / "pyright")) or not self._run.run(
            programs / "pyright", "--version", out=self._out
        ):
            # Older Pythons do without, and what it runs is a package of npm.
            self._run.skipped.append("pyright: it cannot be had here")
            del checks["pyright"]
        for name, command in checks.items():
            began = monotonic()
            passed = self._run.run(*command, env=self._env, out=self._out)
            self._run.record(pair, name, "ok" if passed else "FAILED", began)

    def _last_words(self) -> str:
        """Return where a process stood that ended in the middle of a test, as one that hangs does.

        The lines of our own files, from what faulthandler wrote; the main thread's are the last.
        """
        log = (self._home / "log").read_text(errors="replace") if self._out else ""
        lines = re.findall('^  File ".*/((?:tests|distlock_app)/.*)', log, re.MULTILINE)
        return "\n".join(["", *lines[-20:]]) if lines else ""

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def stop_servers(home: Path) -> None:
    """Stop the servers of a lane, by their process ids."""
    if (home / "servers").is_dir():
        command = (sys.executable, "-m", "tests.servers", "stop", "--dir", home / "servers")
        subprocess.run(command, cwd=ROOT)


def parsed(arguments: Sequence[str]) -> Choice:
    """Return what the command line asks for."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    ours, pytest = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="sh tests/run.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="What follows -- is for pytest.",
    )
    what = parser.add_mutually_exclusive_group()
    quick = "one Python, SQLite and Redis, without the tests marked slow"
    what.add_argument("--quick", action="store_true", help=quick)
    coverage = "which lines and branches the tests run; 95 percent are required"
    what.add_argument("--coverage", action="store_true", help=coverage)
    upstream = "on every database with the newest pre-releases of Django and the clients"
    what.add_argument("--upstream", action="store_true", help=upstream)
    only = "only on this database; redis: only what is about Redis"
    what.add_argument("--only", choices=[*DATABASES, "redis"], default="", help=only)
    keep = "leave the servers running afterwards, and say how to use and stop them"
    parser.add_argument("--keep", action="store_true", help=keep)
    return Choice(**vars(parser.parse_args(ours)), pytest=tuple(pytest))


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    choice = parsed(arguments)
    os.umask(0o022)
    work = Path(tempfile.mkdtemp(prefix="distlock-tests."))
    work.chmod(0o711)  # the user postgres passes through
    run = Run(choice, work)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    # A shell makes what it starts in the background deaf to it, and tests would inherit that.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    try:
        packages = list(missing_packages(choice.programs))
        if packages:
            print("\n=== Installing", *packages, flush=True)
            if not install(packages, work / "apt.log"):
                run.fail(f"apt-get install {' '.join(packages)}")
        versions = [v for v in ("3.10", "3.11", "3.12", "3.13", "3.14") if find_python(v)]
        lanes, run.skipped = plan(choice, versions)
        if not lanes:
            print("No Python 3.10 or later with venv was found.", file=sys.stderr)
            return 1
        if not run.environments.make(lanes[-1].pair):
            return 1
        run.work_off(lanes)
        if choice.coverage:
            run.report_coverage(lanes[0].pair)
        return _summary(run)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        run.stop()
        _clean_up(run)


def _end(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _summary(run: Run) -> int:
    print("\n=== Summary", *run.table, sep="\n")
    if run.skipped:
        print("Skipped:", *[f"  - {what}" for what in run.skipped], sep="\n")
    if run.failures:  # last: it is what a log that shows only its end has to show
        print(*run.failures, sep="\n")
    print(f"FAILED: {', '.join(run.failed)}" if run.failed else "All passed.", flush=True)
    return 1 if run.failed else 0


def _clean_up(run: Run) -> None:
    kept = run.work / run.choice.kept
    if run.choice.keep and (kept / "servers").is_dir():
        lines = [file.read_text() for file in kept.glob("*.env")]
        (kept / "env").write_text("".join(lines))
        print(
            f"\n=== The servers run on. Use them:  set -a; . {kept}/env; python -m pytest\n"
            f"Stop them:  {sys.executable} -m tests.servers stop --dir {kept}/servers "
            f"&& rm -rf {run.work}"
        )
        return
    for home in run.work.iterdir():
        stop_servers(home)
    shutil.rmtree(run.work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
