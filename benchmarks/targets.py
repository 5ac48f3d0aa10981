"""What we set out to reach, and what the run reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .contenders import ITS_STATEMENTS, OURS, UNDER_LOCK

Results = dict[str, Any]
# What, reached, at most (negative: at least), unit, the same of its raw parts where measured.
Row = tuple[Any, ...]

LOCK, ENGINE = OURS
WORDS = {"requests": "requests", "spread": "max/min acquisitions"}


def targets(results: Results) -> str:
    """Return the table of all targets."""
    return _table(line for line, _ in _judged(results))


def missed(results: Results) -> str:
    """Return how many targets were reached, and the table of the others."""
    judged = list(_judged(results))
    others = [line for line, met in judged if not met]
    return (
        f"{len(judged) - len(others)} of {len(judged)} were reached, all but these:\n\n"
        + _table(others)
    )


def _table(lines: Iterable[str]) -> str:
    head = ["| | target | reached | | its raw parts |", "|---|---:|---:|---|---:|"]
    return "\n".join([*head, *lines]) + "\n"


def _judged(results: Results) -> Iterator[tuple[str, bool]]:
    """Yield the line of each target, and whether it was reached."""
    for rows, cases in TARGETS.items():
        for case in cases:
            try:
                found = list(rows(results, *case))
            except (KeyError, ZeroDivisionError, StopIteration, RuntimeError):
                yield f"| {rows.__name__.strip('_')}, {case[0]} | | not measured | | |", False
                continue
            for what, reached, limit, unit, *parts in found:
                met = reached <= limit if limit >= 0 else reached >= -limit
                bound = f"≤ {limit:g}" if limit >= 0 else f"≥ {-limit:g}"
                word = "yes" if met else "**no**"
                raw = _number(parts[0]) if parts and parts[0] is not None else ""
                line = f"| {what} | {bound}{unit} | {_number(reached)}{unit} | {word} | {raw} |"
                yield line, met


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"


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
    sent = part[group][ITS_STATEMENTS]["us"] / raw if ITS_STATEMENTS in part[group] else None
    engine, lock = (_row(part, group, title)["us"] / raw for title in (ENGINE, LOCK))
    yield f"{group}: engine, of the raw pair", engine, limit, "", sent
    under = _row(part, group, UNDER_LOCK)["us"] / raw
    yield f"{group}: `with Lock(...)`, of raw", lock, limit, "", under


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
    has_raw = any(title.startswith("raw") for title in part[group])
    raw = _row(part, group, "raw") if has_raw else {}
    for title, limit in (("requests", requests), ("spread", spread)):
        if limit:
            worst, least = (
                max((x[title] for x in row.values()), default=None) for row in (ours, raw)
            )
            yield f"{group}, wanted by many: {WORDS[title]}", worst, limit, "", least
    if rate:
        under = _row(part, group, UNDER_LOCK)
        worst, least = (
            min(cell["rate"] / raw[count]["rate"] for count, cell in row.items())
            for row in (ours, under)
        )
        yield f"{group}, wanted by many: acquisitions/s, of raw", worst, -rate, "", least
    if group.endswith("table"):
        worst, least = (row["32"]["rate"] / row["2"]["rate"] for row in (ours, raw))
        yield f"{group}, wanted by many: rate of 32, of the rate of 2", worst, -0.9, "", least
    if group == "redis":
        for count in ours:
            worst, least = (
                row[count]["longest_ms"] / (int(count) * 1000 / row[count]["rate"])
                for row in (ours, raw)
            )
            what = f"redis, {count} processes: longest wait, of a round of all"
            yield what, worst, 1.5, "", least


def _threads(results: Results, group: str, limit: float) -> Iterator[Row]:
    part = results["threads"]
    other = "redis-py `Lock`" if group == "redis" else "raw"
    ours, theirs, under = (_row(part, group, title) for title in (LOCK, other, UNDER_LOCK))
    most = max(ours, key=int)
    parts = under[most] / theirs[most]
    yield f"{group}, {most} threads, of {other}", ours[most] / theirs[most], -limit, "", parts


def _scale(results: Results, kind: str) -> Iterator[Row]:
    held, renewed = results["held"][kind], results["renewal"][kind]
    ratio, raw = held["full"] / held["empty"], held["raw full"] / held["raw empty"]
    yield f"{kind}: p50 with {held['count']:,} held locks, of empty", ratio, 1.1, "", raw
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
    ours, loop, locked = (_row(part, kind, title) for title in ("retrying", "orm", "for_update"))
    for count, limit in (("1", 0.95), ("8", 2.5), ("32", 2)):
        ratio, parts = (row[count][0] / loop[count][0] for row in (ours, locked))
        yield f"{kind}, `retrying()`, {count}: of the loop by hand", ratio, -limit, "", parts
    yield f"{kind}, `retrying()`: retries, at most", max(x[1] for x in ours.values()), 3, ""
    theirs = _row(part, kind, "concurrency")["8"][0]
    ratio, parts = (row["8"][0] / theirs for row in (ours, locked))
    yield f"{kind}, `retrying()`, 8: of django-concurrency", ratio, -4, "", parts


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
