"""What we set out to reach, and what the run reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .contenders import OURS

Results = dict[str, Any]
Row = tuple[str, float, float, str]  # what, reached, at most (negative: at least), unit

LOCK, ENGINE = OURS


def targets(results: Results) -> str:
    """Return the table of all targets."""
    lines = ["| | target | reached | |", "|---|---:|---:|---|"]
    for rows, cases in TARGETS.items():
        for case in cases:
            try:
                found = list(rows(results, *case))
            except (KeyError, ZeroDivisionError, StopIteration, RuntimeError):
                lines.append(f"| {rows.__name__.strip('_')}, {case[0]} | | not measured | |")
                continue
            for what, reached, limit, unit in found:
                met = reached <= limit if limit >= 0 else reached >= -limit
                bound = f"≤ {limit:g}" if limit >= 0 else f"≥ {-limit:g}"
                number = f"{reached:.2f}" if abs(reached) < 10 else f"{reached:.0f}"
                word = "yes" if met else "**no**"
                lines.append(f"| {what} | {bound}{unit} | {number}{unit} | {word} |")
    return "\n".join(lines) + "\n"


def _row(part: dict[str, Any], group: str, title: str) -> dict[str, Any]:
    """Return what was measured of a contender; the title of a raw limit begins with "raw"."""
    rows = part[group].items()
    row = next(row for name, row in rows if name == title or title == "raw" == name[:3])
    if "error" in row:
        raise KeyError(title)
    return dict(row)


def _free(results: Results, group: str, limit: float) -> Iterator[Row]:
    part = results["uncontended"]
    raw = _row(part, group, "raw")["us"]
    yield f"{group}: engine, of the raw pair", _row(part, group, ENGINE)["us"] / raw, limit, ""
    yield f"{group}: `with Lock(...)`, of raw", _row(part, group, LOCK)["us"] / raw, limit, ""


def _core(results: Results, group: str) -> Iterator[Row]:
    part = results["uncontended"]
    core = _row(part, group, LOCK)["us"] - _row(part, group, ENGINE)["us"]
    yield "what `Lock` adds to an engine, on LocMem", core, 15, " µs"


def _frozen(results: Results, group: str) -> Iterator[Row]:
    yield "redlock: a node frozen, of all running", results["uncontended"][group]["ratio"], 1.3, ""


def _wanted(
    results: Results, group: str, requests: float, rate: float, spread: float
) -> Iterator[Row]:
    part = results["contended"]
    ours = _row(part, group, LOCK)
    if requests:
        worst = max(cell["requests"] for cell in ours.values())
        yield f"{group}, wanted by many: requests", worst, requests, ""
    if rate:
        raw = _row(part, group, "raw")
        worst = min(cell["rate"] / raw[count]["rate"] for count, cell in ours.items())
        yield f"{group}, wanted by many: acquisitions/s, of raw", worst, -rate, ""
    if spread:
        worst = max(cell["spread"] for cell in ours.values())
        yield f"{group}, wanted by many: max/min acquisitions", worst, spread, ""
    if group.endswith("table"):
        worst = ours["32"]["rate"] / ours["2"]["rate"]
        yield f"{group}, wanted by many: rate of 32, of the rate of 2", worst, -0.9, ""
    if group == "redis":
        for count, cell in ours.items():
            worst = cell["longest_ms"] / (int(count) * 1000 / cell["rate"])
            yield f"redis, {count} processes: longest wait, of a round of all", worst, 1.5, ""


def _threads(results: Results, group: str, limit: float) -> Iterator[Row]:
    part = results["threads"]
    other = "redis-py `Lock`" if group == "redis" else "raw"
    ours, theirs = _row(part, group, LOCK), _row(part, group, other)
    most = max(ours, key=int)
    yield f"{group}, {most} threads, of {other}", ours[most] / theirs[most], -limit, ""


def _scale(results: Results, kind: str) -> Iterator[Row]:
    held, renewed = results["held"][kind], results["renewal"][kind]
    ratio = held["full"] / held["empty"]
    yield f"{kind}: p50 with {held['count']:,} held locks, of empty", ratio, 1.1, ""
    if kind == "redis":
        yield "redis: a held lock", held["bytes"], 400, " bytes"
    what = f"{kind}: renewal of {renewed['count']:,} holds, of a core"
    yield what, renewed["cpu"] * 100, 5, " %"


def _tasks(results: Results, kind: str) -> Iterator[Row]:
    found = results["tasks"][kind]
    yield f"{found['count']:,} waiting tasks: connections", found["connections"], 19, ""
    yield f"{found['count']:,} waiting tasks: memory", found["memory_mib"], 200, " MiB"


def _saving(results: Results, kind: str) -> Iterator[Row]:
    found = results["saving"][kind]
    ratio = found["versioned"] / found["plain"]
    yield f"{kind}: `VersionedModel.save()`, of `save()`", ratio, 1.1, ""
    if "for_update" in found:
        ratio = found["in_transaction"] / found["for_update"]
        yield f"{kind}: `lock_in_transaction()`, of `select_for_update()`", ratio, 1.15, ""


def _guards(results: Results, kind: str) -> Iterator[Row]:
    part = results["guards"]
    ours, loop = _row(part, kind, "retrying"), _row(part, kind, "orm")
    for count, limit in (("1", 0.95), ("8", 2.5), ("32", 2)):
        ratio = ours[count][0] / loop[count][0]
        yield f"{kind}, `retrying()`, {count}: of the loop by hand", ratio, -limit, ""
    yield f"{kind}, `retrying()`: retries, at most", max(x[1] for x in ours.values()), 3, ""
    ratio = ours["8"][0] / _row(part, kind, "concurrency")["8"][0]
    yield f"{kind}, `retrying()`, 8: of django-concurrency", ratio, -4, ""


DATABASES = ("mysql", "postgresql")
TABLES = ("mysql table", "postgresql table")
TARGETS: dict[Callable[..., Iterator[Row]], list[tuple[Any, ...]]] = {
    _free: [
        *(("redis", 1.15), ("redlock", 1.1), *((table, 1.15) for table in TABLES)),
        *(("named", 1.3), ("advisory", 1.3), ("zookeeper", 1.2), ("etcd", 1.2)),
    ],
    _core: [("locmem",)],
    _frozen: [("redlock, a node frozen",)],
    # requests, acquisitions/s of raw, max/min; 0: no target
    _wanted: [
        ("redis", 2.2, 0.95, 1.05),
        *((table, 5, 0, 1.1) for table in TABLES),
        *((group, 2.1, 0.95, 0) for group in ("named", "advisory")),
        *(("zookeeper", 5, 0, 0), ("etcd", 6, 0, 0), ("redlock", 0, 0, 2)),
    ],
    _threads: [("redis", 2), *((group, 0.9) for group in (*TABLES, "named", "advisory"))],
    _scale: [(kind,) for kind in ("redis", *DATABASES)],
    _tasks: [("redis",)],
    _saving: [(kind,) for kind in ("sqlite", "plain sqlite", *DATABASES)],
    _guards: [(kind,) for kind in DATABASES],
}
