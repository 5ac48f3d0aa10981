"""Break the code on purpose, at random places, and see whether a test notices: by hand.

In a clone of the project, for it changes the sources while it runs, and with the servers that
`python -m tests.servers` starts and `DISTLOCK_TEST_DATABASE=mysql`: SQLite does not run half of it.

    pip install cosmic-ray pytest-cov
    python -m tests.mutation learn
    cosmic-ray init tests/mutation.toml mutation.sqlite
    cr-filter-operators mutation.sqlite tests/mutation.toml
    python -m tests.mutation sample mutation.sqlite --most 200 --seed 1
    cosmic-ray exec tests/mutation.toml mutation.sqlite
    cr-report mutation.sqlite --surviving-only --show-diff

`learn` notes which tests run which line, so that each change is shown to those only that could
notice. A survivor is a change that no test noticed: a missing test, or code that does the same.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import coverage
from cosmic_ray.tools.filters.filter_app import FilterApp
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import WorkerOutcome, WorkItem, WorkResult

PYTEST = [sys.executable, "-W", "error", "-m", "pytest", "-q", "--no-header"]
KNOWN = "mutation.coverage"
CHANGED = re.compile(r"^\+\+\+ b/(?P<file>.*)\n@@ -(?P<line>\d+)", re.MULTILINE)


def learn() -> int:
    # What starts processes is left out: a change is noticed there late, and by hanging.
    chosen = ["-m", "not slow and not crowd", "--ignore-glob=*browser*"]
    data = ["--cov=distlock_app", "--cov-context=test", "--cov-report="]
    status = subprocess.call([*PYTEST, *chosen, *data])
    Path(".coverage").rename(KNOWN)
    return status


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
    chosen = Path("mutation.tests")
    chosen.write_text("\n".join(sorted({test.rpartition("|")[0] for test in tests} - {""})))
    return subprocess.call([*PYTEST, "-x", f"@{chosen}"]) if tests else 0


class Sample(FilterApp):
    """Leaves a random sample of the mutations of a session to do."""

    def description(self) -> str | None:
        return self.__doc__

    def add_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--most", type=int, default=200, help="mutations to do")
        parser.add_argument("--seed", type=int, default=0)

    def filter(self, work_db: WorkDB, args: Namespace) -> None:
        def place(item: WorkItem) -> tuple[object, ...]:
            [one] = item.mutations
            return one.module_path, one.start_pos, one.operator_name, one.occurrence

        items = sorted(work_db.pending_work_items, key=place)
        random.Random(args.seed).shuffle(items)
        print(f"{min(args.most, len(items))} of {len(items)} mutations")
        left_out = WorkResult(worker_outcome=WorkerOutcome.SKIPPED, output="not in the sample")
        for item in items[args.most :]:
            work_db.set_result(item.job_id, left_out)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["learn"]:
            sys.exit(learn())
        case ["check"]:
            sys.exit(check())
        case ["sample", *arguments]:
            sys.exit(Sample().main(arguments))
        case _:
            sys.exit(__doc__)
