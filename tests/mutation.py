"""Break the code on purpose, at random places, and see whether a test notices: by hand.

In a clone of the project, for it changes the sources while it runs, and with the servers that
`python -m tests.servers` starts and `DISTLOCK_TEST_DATABASE=mysql`: SQLite does not run half of it.

    pip install cosmic-ray pytest-cov
    python -m tests.mutation learn
    cosmic-ray init tests/mutation.toml mutation.sqlite
    cr-filter-operators mutation.sqlite tests/mutation.toml
    python -m tests.mutation sample mutation.sqlite --most 500 --seed 1 \
        --under core guards claims.py backends/database backends/sessions backends/redis
    cosmic-ray exec tests/mutation.toml mutation.sqlite
    cr-report mutation.sqlite --surviving-only --show-diff

    python -m tests.mutation table mutation.sqlite

Two clones, with servers of their own and another seed each, take half the time: `table` takes the
files of both. `learn` leaves the database of the tests in place, which the other runs use again.

`learn` notes which tests run which line, so that each change is shown to those only that could
notice, the fastest first, for at most a minute. A test notices a change if it fails twice with it
and passes without. A survivor is a change that none noticed: a missing test, code that does the
same, or one for the tests that the minute left out.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import coverage
import pytest
from cosmic_ray.tools.filters.filter_app import FilterApp
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult

PYTEST = [sys.executable, "-W", "error", "-m", "pytest", "-q", "--no-header", "--reuse-db"]
KNOWN = "mutation.coverage"
SECONDS = Path("mutation.seconds")
seconds: dict[str, float] = defaultdict(float)  # of each test
ENOUGH = 60.0  # seconds of tests for one change
CHANGED = re.compile(r"^\+\+\+ b/(?P<file>.*)\n@@ -(?P<line>\d+)", re.MULTILINE)


def learn() -> int:
    # What starts processes is left out: a change is noticed there late, and by hanging.
    chosen = ["-m", "not slow and not crowd", "--ignore-glob=*browser*"]
    data = ["--cov=distlock_app", "--cov-context=test", "--cov-report=", "-p", "tests.mutation"]
    status = subprocess.call([*PYTEST, *chosen, *data])
    Path(".coverage").rename(KNOWN)
    return status


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    seconds[report.nodeid] += report.duration


def pytest_sessionfinish() -> None:
    SECONDS.write_text(json.dumps(seconds))


def check() -> int:
    """Run the tests that run the line which git sees changed, until one notices."""
    diff = subprocess.check_output(["git", "diff", "-U0", "--", "distlock_app"], text=True)
    change = CHANGED.search(diff)
    known = coverage.CoverageData(KNOWN)
    known.read()
    if change is None:
        tests = known.measured_contexts()
    else:
        lines = known.contexts_by_lineno(str(Path(change["file"]).absolute()))
        # A statement of several lines is known by the first of each of its expressions.
        line = max((line for line in lines if line <= int(change["line"])), default=0)
        tests = set(lines.get(line, ()))
        if "" in tests:  # it runs at the import, and may matter to all of the module
            tests = set().union(*lines.values())
    names = {test.rpartition("|")[0] for test in tests} - {""}
    took = json.loads(SECONDS.read_text())
    fastest = sorted(names, key=lambda name: took.get(name, 0.0))
    until = accumulate(took.get(name, 0.0) for name in fastest)
    return show([name for name, end in zip(fastest, until, strict=True) if end <= ENOUGH])


def show(tests: list[str]) -> int:
    """Run the tests until one fails, again and again, that does not without the change."""
    chosen = Path("mutation.tests")
    run = [*PYTEST, f"@{chosen}"]
    failed = Path(".pytest_cache/v/cache/lastfailed")
    while tests:
        chosen.write_text("\n".join(tests))
        failed.unlink(missing_ok=True)
        status = subprocess.call([*run, "-x"])
        if status == 0 or not failed.exists():
            return status
        culprits = json.loads(failed.read_text())
        chosen.write_text("\n".join(culprits))
        if subprocess.call(run) != 0:
            with unchanged():
                if subprocess.call(run) == 0:
                    return status
        tests = [test for test in tests if test not in culprits]
    return 0


@contextmanager
def unchanged() -> Iterator[None]:
    """Undo the change for a while."""
    change = subprocess.check_output(["git", "diff", "--", "distlock_app"])
    subprocess.check_call(["git", "checkout", "-q", "--", "distlock_app"])
    try:
        yield
    finally:
        subprocess.run(["git", "apply"], input=change, check=True)


class Sample(FilterApp):
    """Leaves a random sample of the mutations of a session to do."""

    def description(self) -> str | None:
        return self.__doc__

    def add_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--most", type=int, default=200, help="mutations to do")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--under", nargs="*", default=[""], help="parts of distlock_app/")

    def filter(self, work_db: WorkDB, args: Namespace) -> None:
        roots = tuple(f"distlock_app/{part}" for part in args.under)
        pending = sorted(work_db.pending_work_items, key=place)
        items = [item for item in pending if module_of(item).startswith(roots)]
        random.Random(args.seed).shuffle(items)
        print(f"{min(args.most, len(items))} of {len(items)} mutations")
        sample = {item.job_id for item in items[: args.most]}
        left_out = WorkResult(worker_outcome=WorkerOutcome.SKIPPED, output="not in the sample")
        for item in pending:
            if item.job_id not in sample:
                work_db.set_result(item.job_id, left_out)


def place(item: WorkItem) -> tuple[object, ...]:
    """Which mutation it is, whatever session knows it."""
    [one] = item.mutations
    return module_of(item), one.start_pos, one.operator_name, one.occurrence


def module_of(item: WorkItem) -> str:
    return item.mutations[0].module_path.as_posix()


def table(paths: list[str]) -> int:
    """Print, as Markdown, how many changes of each package were noticed."""
    noticed: dict[tuple[object, ...], bool] = {}
    for path in paths:
        with use_db(path, WorkDB.Mode.open) as work_db:
            results = dict(work_db.results)
            for item in work_db.work_items:
                result = results.get(item.job_id)
                if result is not None and result.worker_outcome is not WorkerOutcome.SKIPPED:
                    noticed[place(item)] = result.test_outcome is not TestOutcome.SURVIVED
    shares: dict[str, list[bool]] = defaultdict(list)
    for (module, *_), was_noticed in noticed.items():
        package = str(Path(str(module)).parent.relative_to("distlock_app"))
        for one in package, "all":
            shares[one].append(was_noticed)
    print("| package | changes | noticed | |\n|---|---:|---:|---:|")
    for one in sorted(shares, key=lambda one: (one == "all", one)):
        seen, done = sum(shares[one]), len(shares[one])
        print(f"| {one} | {done} | {seen} | {seen / done:.0%} |")
    return 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["learn"]:
            sys.exit(learn())
        case ["check"]:
            sys.exit(check())
        case ["sample", *arguments]:
            sys.exit(Sample().main(arguments))
        case ["table", *paths] if paths:
            sys.exit(table(paths))
        case _:
            sys.exit(__doc__)
