"""The command `python -m tests.model`: explore the models, and those that are broken on purpose."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from typing import Any

from tests.model.explore import Model, Result, explore
from tests.model.lock_table import LockTable
from tests.model.redis_handover import RedisHandover

PROTOCOLS: dict[str, Any] = {
    "lock table on PostgreSQL": LockTable,
    "lock table on MySQL": partial(LockTable, mysql=True),
    "Redis": RedisHandover,
}
# Without time no lease ends, and no waiter looks by itself: every wake-up must arrive.
CASES: list[dict[str, int]] = [
    {"processes": 3, "faults": 2},
    {"processes": 3, "ttl": 2},
    {"processes": 3, "ttl": 1, "faults": 1},
    {"processes": 2, "ttl": 2, "faults": 2},
]
# A broken model is caught in one of these.
BROKEN_CASES: list[dict[str, int]] = [
    {"processes": 3, "faults": 1},
    {"processes": 2, "ttl": 2, "faults": 1},
]


def broken(protocol: type[Model], defect: str) -> Result:
    """Return how a model with this defect is caught; the last result if it is not."""
    for case in BROKEN_CASES:
        result = explore(protocol(defect=defect, **case))
        if result.broken:
            break
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--trace", metavar="DEFECT", help="show how this one breaks its promise")
    trace = parser.parse_args().trace
    if trace is not None:
        found = [p for p in (LockTable, RedisHandover) if trace in p.DEFECTS]
        for protocol in found:
            print(f"{protocol.__name__}: {protocol.DEFECTS[trace]}\n{broken(protocol, trace)}\n")
        return 0 if found else parser.error("DEFECT is one of the names in the second table")
    print("| Protocol | Processes | Lease, ticks | Faults | States | Steps | Found |")
    print("|---|--:|--:|--:|--:|--:|---|")
    failed = 0
    for name, protocol in PROTOCOLS.items():
        for case in CASES:
            began = time.monotonic()
            result = explore(protocol(**case))
            figures = [case["processes"], case.get("ttl", "-"), case.get("faults", 0)]
            counts = f"{result.states:,} | {result.steps:,} | {result.broken or 'nothing'}"
            print(f"| {name} | {' | '.join(map(str, figures))} | {counts} |", flush=True)
            print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)
            failed += bool(result.broken)
    print("\n| Name | Broken on purpose | Promise broken | Steps |\n|---|---|---|--:|")
    for protocol in (LockTable, RedisHandover):
        for defect, text in protocol.DEFECTS.items():
            result = broken(protocol, defect)
            steps = len(result.trace) - 1
            print(f"| {defect} | {text} | {result.broken or 'NONE'} | {steps} |", flush=True)
            failed += not result.broken
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
