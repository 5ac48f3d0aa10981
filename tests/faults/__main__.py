"""The command `python -m tests.faults`: random faults over engines, and what came of it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from tests.faults.engines import ENGINES
from tests.processes import Processes, Worker

VERDICT = [
    *("engine", "faults", "acquisitions", "overlaps", "unexplained"),
    *("stale writes refused", "accepted", "stuck", "other", "longest gap, s"),
]
STUCK = ("free again", "wakes waiters", "starves nobody", "ends in time")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of faults on each engine")
    known = f"of: default (the lock table of DISTLOCK_TEST_DATABASE), {', '.join(ENGINES)}"
    parser.add_argument("--engines", default="redis,default,redlock", help=known)
    parser.add_argument("--processes", type=int, default=8, help="workers on each engine")
    parser.add_argument("--seed", type=int, default=1, help="the same faults in the same order")
    parser.add_argument("--work", type=float, default=0.01, help="seconds, at most, under a lock")
    parser.add_argument("--names", type=int, default=0, help="locks that they take (4)")
    slower = "also set the clocks of servers"
    parser.add_argument("--step-clocks", action="store_true", help=slower)
    parser.add_argument("--keep", default="", help="directory for the histories")
    found = parser.parse_args()
    default = os.environ.get("DISTLOCK_TEST_DATABASE", "sqlite")
    found.engines = [default if e == "default" else e for e in found.engines.split(",")]
    if unknown := set(found.engines) - set(ENGINES):
        parser.error(f"unknown engine: {', '.join(sorted(unknown))}")
    return found


def start(group: Processes, engine: str, **options: Any) -> Worker:
    """Start the run of an engine in a process of its own, with its servers."""
    deadline = 2 * options["seconds"] + 600
    return group.start("tests.faults.run:run", deadline=deadline, engine=engine, **options)


def tables(results: dict[str, dict[str, Any]]) -> str:
    """Return, as Markdown, what came of each engine, and what it did under each fault."""
    rows = {engine: dict(result["rows"]) for engine, result in results.items()}
    faults = sorted({fault for of_engine in rows.values() for fault in of_engine})
    verdicts, acquisitions = [VERDICT], [["acquisitions under", *faults]]
    for engine, of_engine in rows.items():
        done = total(list(of_engine.values()))
        accused = done["accused"]
        figures = [
            *(done["times"], done["acquisitions"], done["overlaps"]),
            accused.pop("one at a time", 0),
            done["refused"],
            accused.pop("refuses late writers", 0),
            sum(accused.pop(promise, 0) for promise in STUCK),
            sum(accused.values()),
            f"{done['longest_gap']:.1f}",
        ]
        verdicts.append([engine, *map(str, figures)])
        under = [of_engine[one]["acquisitions"] if one in of_engine else "" for one in faults]
        acquisitions.append([engine, *map(str, under)])
    return f"{_markdown(verdicts)}\n\n{_markdown(acquisitions)}"


def _markdown(rows: list[list[str]]) -> str:
    rows.insert(1, ["---"] + ["---:"] * (len(rows[0]) - 1))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of rows; of the gaps the longest."""
    sums = {
        key: sum(row[key] for row in rows)
        for key in ("times", "acquisitions", "overlaps", "refused")
    }
    promises = {promise for row in rows for promise in row["accused"]}
    accused = {one: sum(row["accused"].get(one, 0) for row in rows) for one in promises}
    longest = max((row["longest_gap"] for row in rows), default=0.0)
    return {**sums, "accused": accused, "longest_gap": longest}


def result_of(worker: Worker, engine: str) -> dict[str, Any]:
    """Return the result of a run, telling meanwhile how far it is."""
    while True:
        line = worker._next(600)
        if "result" in line:
            found: dict[str, Any] = line["result"]
            return found
        said = line["said"]
        print(f"{engine}: {said['faults']} faults, {said['left']:.0f} s left", file=sys.stderr)


def main() -> int:
    """Run the command; 1 if a promise was broken."""
    given = arguments()
    options = {key: value for key, value in vars(given).items() if key != "engines"}
    print(f"seed {given.seed}: the same seed plays the same faults again", file=sys.stderr)
    group = Processes()
    try:
        workers = {engine: start(group, engine, **options) for engine in given.engines}
        results = {engine: result_of(worker, engine) for engine, worker in workers.items()}
    finally:
        group.close()
    print(tables(results))
    accusations = [(e, text) for e, result in results.items() for text in result["accusations"]]
    for engine, text in accusations[:50]:
        print(f"{engine}: {text}", file=sys.stderr)
    return 1 if accusations else 0


if __name__ == "__main__":
    sys.exit(main())
