"""Break the code on purpose, at random places, and see whether a test notices: by hand.

In a copy of the project, for it changes the sources while it runs:

    pip install cosmic-ray
    cosmic-ray init tests/mutation.toml mutation.sqlite
    cr-filter-operators mutation.sqlite tests/mutation.toml
    python -m tests.mutation mutation.sqlite --most 200 --seed 1
    cosmic-ray exec tests/mutation.toml mutation.sqlite
    cr-report mutation.sqlite --surviving-only --show-diff

A survivor is a change that no test noticed: a missing test, or code that does the same.
"""

from __future__ import annotations

import random
import sys
from argparse import ArgumentParser, Namespace

from cosmic_ray.tools.filters.filter_app import FilterApp
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import WorkerOutcome, WorkItem, WorkResult


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
    sys.exit(Sample().main())
