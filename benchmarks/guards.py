"""One hot row: how many changes a second get through each guard, and after how many retries.

    python -m benchmarks.guards                            # prints the table, 5 minutes
    python -m benchmarks.guards --write docs/explanation   # and renews it there, with its plot

Starts a MariaDB and a PostgreSQL of its own (tests/servers.py). K processes read the row, add 1
in Python (except F()) and write it back, each for some seconds; a lost update ends the run. With
`pip install -r benchmarks/requirements.txt` django-concurrency is measured beside.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROCESSES = (1, 2, 8, 32)
TURNS = 4  # in which all are measured, one after the other: what disturbs one disturbs them all
PAGE = "choosing-a-guard.md"
PLOT = "guards.svg"
TITLES = {"mysql": "MariaDB", "postgresql": "PostgreSQL"}
METHODS = {
    "f": "`F()` in one statement",
    "orm": "version, ORM loop by hand, at once",
    "concurrency": "django-concurrency, loop by hand, at once",
    "retrying": "`objects.retrying()`",
    "for_update": "`objects.for_update()`",
    "lock": "`Lock(..., atomic=True)`, lock table",
    "fenced": "`Lock` and `save(fence=hold)`",
}
COLOURS = ("#999999", "#d08770", "#8c564b", "#1f6feb", "#2da44e", "#a371f7", "#d4a72c")


# In the processes that work.


def models() -> dict[str, Any]:
    """Define one table for each kind of guard; all have a key, a value and a column more."""
    from django.db import models as m

    from distlock_app.fencing import FencedModel
    from distlock_app.optimistic import VersionedModel
    from distlock_app.pessimistic import LockingManager

    def make(name: str, base: type, **fields: Any) -> Any:
        meta = type("Meta", (), {"app_label": "testapp"})
        body = {"value": m.IntegerField(default=0), "__module__": __name__, "Meta": meta}
        return type(name, (base,), {**body, **fields})

    made = {
        "plain": make(
            "HotPlain", m.Model, version=m.IntegerField(default=0), objects=LockingManager()
        ),
        "versioned": make("HotVersioned", VersionedModel),
        "fenced": make("HotFenced", FencedModel),
    }
    try:
        from concurrency.fields import IntegerVersionField
    except ImportError:
        print("django-concurrency is not installed: left out", file=sys.stderr)
    else:
        made["concurrency"] = make("HotConcurrency", m.Model, version=IntegerVersionField())
    return made


def methods(made: dict[str, Any]) -> dict[str, tuple[Any, Callable[[], int]]]:
    """Return each guard's model and a function that adds 1 and returns its number of retries."""
    from django.db import transaction
    from django.db.models import F

    from distlock_app import Lock

    plain, versioned, fenced = made["plain"], made["versioned"], made["fenced"]

    def by_f() -> int:
        plain.objects.filter(pk=1).update(value=F("value") + 1)
        return 0

    def by_retrying() -> int:
        calls = 0

        def add(row: Any) -> None:
            nonlocal calls
            calls += 1
            row.value += 1

        versioned.objects.retrying(1, add)
        return calls - 1

    def by_for_update() -> int:
        with transaction.atomic():
            row = plain.objects.for_update(1, wait=60)
            row.value += 1
            row.save()
        return 0

    def by_lock() -> int:
        with Lock("hot", wait=60, atomic=True):
            row = plain.objects.get(pk=1)
            row.value += 1
            row.save()
        return 0

    def by_fence() -> int:
        with Lock("hot", wait=60) as hold:
            row = fenced.objects.get(pk=1)
            row.value += 1
            row.save(fence=hold)
        return 0

    found: dict[str, tuple[Any, Callable[[], int]]] = {
        "f": (plain, by_f),
        "orm": (plain, by_orm_loop(plain)),
        "retrying": (versioned, by_retrying),
        "for_update": (plain, by_for_update),
        "lock": (plain, by_lock),
        "fenced": (fenced, by_fence),
    }
    if "concurrency" in made:
        found["concurrency"] = (made["concurrency"], by_concurrency(made["concurrency"]))
    return found


def by_orm_loop(model: Any) -> Callable[[], int]:
    def add() -> int:
        retries = 0
        while True:
            row = model.objects.get(pk=1)
            same = model.objects.filter(pk=1, version=row.version)
            if same.update(value=row.value + 1, version=row.version + 1):
                return retries
            retries += 1

    return add


def by_concurrency(model: Any) -> Callable[[], int]:
    from concurrency.exceptions import RecordModifiedError

    def add() -> int:
        retries = 0
        while True:
            row = model.objects.get(pk=1)
            row.value += 1
            try:
                row.save()
            except RecordModifiedError:
                retries += 1
            else:
                return retries

    return add


def work(pipe: Any, found: dict[str, tuple[Any, Callable[[], int]]]) -> None:
    """Do what the pipe says, until it says nothing more: (method, seconds)."""
    while (order := pipe.recv()) is not None:
        method, seconds = order
        add = found[method][1]
        done = retries = 0
        started = time.monotonic()
        while time.monotonic() - started < seconds or not done:
            retries += add()
            done += 1
        pipe.send((done, retries, time.monotonic() - started))


def make_tables(made: dict[str, Any]) -> None:
    """Make the lock table and each model's, with its row; leave no connection to a child."""
    from django.core.management import call_command
    from django.db import connection, connections

    from distlock_app.registry import registry

    call_command("migrate", verbosity=0)
    with connection.schema_editor() as editor:
        for model in made.values():
            editor.create_model(model)
    for model in made.values():
        model().save()
    connections.close_all()
    registry.reset()


def started(count: int, found: dict[str, Any]) -> list[Any]:
    """Start the processes; return the pipe to each."""
    fork = multiprocessing.get_context("fork")
    pipes = []
    for _ in range(count):
        ours, theirs = fork.Pipe()
        fork.Process(target=work, args=(theirs, found), daemon=True).start()
        pipes.append(ours)
    return pipes


def measure(seconds: float, processes: tuple[int, ...]) -> dict[str, Any]:
    """Measure all on the one database of this process's settings."""
    import django

    django.setup()
    made = models()
    found = methods(made)
    make_tables(made)
    pipes = started(max(processes), found)

    def all_do(count: int, method: str, seconds: float) -> list[Any]:
        for pipe in pipes[:count]:
            pipe.send((method, seconds))
        return [pipe.recv() for pipe in pipes[:count]]

    cells = [(method, count) for method in METHODS if method in found for count in processes]
    totals = {cell: [0, 0, 0.0] for cell in cells}
    for turn, (method, count) in [(turn, cell) for turn in range(TURNS) for cell in cells]:
        rows = found[method][0].objects.filter(pk=1).values_list("value", flat=True)
        if turn == 0:
            all_do(count, method, 0)  # connects
        before = rows.get()
        answers = all_do(count, method, seconds / TURNS)
        done = sum(answer[0] for answer in answers)
        if rows.get() - before != done:
            raise SystemExit(f"{method}, {count} processes: {done} changes, some are lost")
        total = totals[method, count]
        total[0] += done
        total[1] += sum(answer[1] for answer in answers)
        total[2] += max(answer[2] for answer in answers)
    results: dict[str, Any] = {}
    for (method, count), (done, retries, took) in totals.items():
        results.setdefault(method, {})[count] = [done / took, retries / done]
        print(f"{method:12} {count:3} {done / took:8.0f}/s {retries / done:6.2f}", file=sys.stderr)
    for pipe in pipes:
        pipe.send(None)
    return results


# In the process that compares.


def measured_on(kind: str, arguments: Any) -> dict[str, Any]:
    """Start a server of this kind, measure on it in a process with its settings."""
    from tests.servers import KINDS

    with KINDS[kind]() as server:
        print(TITLES[kind], file=sys.stderr)
        if kind == "mysql":
            make_schema(server.port)
        command = [sys.executable, "-m", "benchmarks.guards", "--on", kind]
        command += [
            "--seconds",
            str(arguments.seconds),
            "--processes",
            *map(str, arguments.processes),
        ]
        variables = {
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "DISTLOCK_TEST_DATABASE": kind,
            f"DISTLOCK_TEST_{kind.upper()}_URL": server.url,
        }
        done = subprocess.run(
            command, env={**os.environ, **variables}, stdout=subprocess.PIPE, check=True
        )
    return dict(json.loads(done.stdout))


def make_schema(port: int) -> None:
    import MySQLdb

    connection = MySQLdb.connect(host="127.0.0.1", port=port, user="root")
    connection.cursor().execute("CREATE DATABASE distlock CHARACTER SET utf8mb4")
    connection.close()


def table(results: dict[str, Any], processes: list[int]) -> str:
    """Return the table in Markdown: successes a second, and retries for each in brackets."""
    lines = []
    for kind, found in results.items():
        lines += [
            f"| {TITLES[kind]}, processes | {' | '.join(map(str, processes))} |",
            f"|---|{'---:|' * len(processes)}",
        ]
        for method, title in METHODS.items():
            if method in found:
                cells = [found[method][str(count)] for count in processes]
                texts = [f"{a:,.0f}" + (f" ({b:.1f})" if b >= 0.05 else "") for a, b in cells]
                lines.append(f"| {title} | {' | '.join(texts)} |")
        lines.append("")
    return "\n".join(lines)


def plot(results: dict[str, Any], processes: list[int]) -> str:
    """Return the curves as SVG: one panel for each server, both axes logarithmic in effect."""
    from math import ceil, floor, log10

    rates = [
        cell[0] for found in results.values() for row in found.values() for cell in row.values()
    ]
    low, high = floor(log10(min(rates))), ceil(log10(max(rates)))
    width, height, left, top = 300, 260, 60, 40
    parts = []
    for panel, (kind, found) in enumerate(results.items()):
        x0 = left + panel * (width + 70)

        def x(position: int, x0: int = x0) -> float:
            return x0 + position * width / max(1, len(processes) - 1)

        def y(rate: float) -> float:
            return top + height * (high - log10(rate)) / (high - low)

        parts.append(f'<text x="{x0}" y="{top - 16}" font-weight="bold">{TITLES[kind]}</text>')
        for step in [n * 10**power for power in range(low, high) for n in (1, 2, 5)] + [10**high]:
            parts.append(
                f'<path d="M{x0} {y(step):.1f}h{width}" stroke="#ddd"/>'
                f'<text x="{x0 - 6}" y="{y(step) + 4:.1f}" text-anchor="end">{step:,}</text>'
            )
        for position, count in enumerate(processes):
            parts.append(
                f'<text x="{x(position):.1f}" y="{top + height + 18}" text-anchor="middle">'
                f"{count}</text>"
            )
        for colour, method in zip(COLOURS, METHODS, strict=True):
            if method in found:
                spots = [
                    (x(position), y(found[method][str(count)][0]))
                    for position, count in enumerate(processes)
                ]
                line = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
                parts.append(
                    f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
                )
                parts += [
                    f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in spots
                ]
    bottom = top + height + 44
    parts.append(f'<text x="{left}" y="{bottom}">Processes on one row; changes a second</text>')
    shown = [
        item
        for item in zip(COLOURS, METHODS.items(), strict=True)
        if any(item[1][0] in f for f in results.values())
    ]
    for number, (colour, (_, title)) in enumerate(shown):
        a, b = left + number % 2 * 370, bottom + 24 + number // 2 * 20
        title = title.replace("`", "")
        parts.append(
            f'<path d="M{a} {b - 4}h24" stroke="{colour}" stroke-width="3"/>'
            f'<text x="{a + 32}" y="{b}">{title}</text>'
        )
    full = bottom + 24 + (len(shown) + 1) // 2 * 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 770 {full}"'
        f' width="770" height="{full}" font-family="sans-serif" font-size="12" role="img"'
        ' aria-label="Changes a second by guard and number of processes">\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help=f"directory of {PAGE}, which gets the table")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--processes", type=int, nargs="+", default=list(PROCESSES))
    parser.add_argument("--on", choices=list(TITLES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on:
        print(json.dumps(measure(arguments.seconds, tuple(arguments.processes))))
        return
    load = os.getloadavg()[0]
    machine = f"{os.cpu_count()} cores, load before the run: {load:.1f}."
    if load > 1:  # who pauses loses its share of the processor to the others
        machine += " **Other work was using the machine: run it again before you compare.**"
    results = {kind: measured_on(kind, arguments) for kind in TITLES}
    text = f"{machine}\n\n{table(results, arguments.processes)}"
    print(text)
    if arguments.write:
        page = arguments.write / PAGE
        begin, end = "<!-- written by benchmarks.guards -->\n", "<!-- end -->"
        head, _, rest = page.read_text().partition(begin)
        page.write_text(f"{head}{begin}{text}{end}{rest.partition(end)[2]}")
        (arguments.write / PLOT).write_text(plot(results, arguments.processes))


if __name__ == "__main__":
    main()
