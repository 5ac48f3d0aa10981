"""Measure distlock_app beside the least that can be sent, and beside the locks of others.

    pip install -r requirements.txt -r benchmarks/requirements.txt
    python -m benchmarks                               # everything, 16 to 18 minutes
    python -m benchmarks --only=contended --only=guards
    python -m benchmarks --out docs/explanation        # renews the tables and plots there

Starts servers of its own (tests/servers.py), and stops them. What is missing or fails is named,
and the rest goes on. Prints tables in Markdown on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import page
from .running import PARTS, jobs, machine, measure, servers_for


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; repeatable")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tiny round without peers, on SQLite and Redis: does it still run?",
    )
    keeps = "write the figures to FILE; with --only, those of the other parts stay there"
    parser.add_argument("--json", type=Path, metavar="FILE", help=keeps)
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"renew {page.PAGE} in DIR")
    arguments = parser.parse_args()
    work = [job for job in jobs(quick=arguments.quick) if job.part in (arguments.only or PARTS)]
    about = machine()
    results = {}
    if arguments.only and arguments.json and arguments.json.exists():
        results = json.loads(arguments.json.read_text())
    with servers_for(work) as servers:
        results.update(measure(work, servers))
    before = results.get("machine", {"servers": {}, "loads": {}})
    about["servers"] = {**before["servers"], **servers.versions}
    about["loads"] = {**before["loads"], **{job.part: about["load"] for job in work}}
    results["machine"] = about
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    for title, text in page.sections(results).items():
        print(f"## {title}\n\n{text}")
    if arguments.out:
        page.write(results, arguments.out)
    failures = page.failures(results)
    for line in failures:
        print(line, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
