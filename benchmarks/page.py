"""What the figures become: tables in Markdown, plots, and the pages in docs that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import charts
from .contenders import GROUPS, IN_STEPS, ITS_STATEMENTS, OURS, UNDER_LOCK
from .guards import METHODS
from .targets import missed, targets

PAGE = "benchmarks.md"
PAGES = (PAGE, "choosing-a-guard.md")
TITLES = {"redis": "Redis", "mysql": "MariaDB", "postgresql": "PostgreSQL", "sqlite": "SQLite"}
TITLES["plain sqlite"] = "SQLite, each commit on the disk"
END = "<!-- end -->"
# Parts of ours: printed, but neither on the page nor in the plots.
PARTS_OF_OURS = {UNDER_LOCK, IN_STEPS, ITS_STATEMENTS}

Results = dict[str, Any]


def sections(results: Results) -> dict[str, str]:
    """Return the text of each section whose part was measured, by its name.

    Those whose name begins with "all" are printed; the page has a shorter one instead.
    """
    writers = (uncontended, contended, threads, held, renewal, tasks, saving, guards)
    made = {write_it.__name__: write_it for write_it in writers}  # named as their parts
    found = {"machine": machine(results["machine"])}
    # With one part alone, most targets cannot be judged: the page keeps its table.
    if set(made) <= set(results):
        found["all targets"] = targets(results)
        found["targets"] = missed(results)
    if {"uncontended", "contended"} <= set(results):
        found["summary"] = summary(results)
    for part, write_it in made.items():
        if part in results:
            about = {**results["machine"], "load": results["machine"]["loads"][part]}
            shown = results[part]
            if part in WITH_PARTS:
                found[f"all {part}"] = WITH_PARTS[part](shown)
                shown = {name: _plotted(rows) for name, rows in shown.items()}
            found[part] = write_it(shown) + "\n" + _load(about)
    if bad := failures(results):
        found["failures"] = "".join(f"- {line}\n" for line in bad)
    elif "targets" in found:
        found["failures"] = "None.\n"
    return found


def plots(results: Results) -> Iterator[tuple[str, str]]:
    """Yield the file name and the SVG of each plot whose part was measured."""
    if "uncontended" in results:
        groups = {
            GROUPS[name].title: _plotted(_ratios(found))
            for name, found in results["uncontended"].items()
            if name in GROUPS and name not in ("locmem", "sqlite table") and _ratios(found)
        }
        label = "Acquire and release, p50, as a multiple of the raw pair (logarithmic)"
        yield "uncontended.svg", charts.bars(groups, label=label)
    for file, part, figure, what in (
        ("contended", "contended", "rate", "Processes that want one lock; acquisitions a second"),
        ("waits", "contended", "longest_ms", "Processes that want one lock; longest wait, ms"),
        ("threads", "threads", "", "Threads, each with its own lock; acquisitions a second"),
    ):
        panels, positions = _panels(results.get(part, {}), figure)
        if panels:
            yield f"{file}.svg", charts.lines(panels, positions, label=what)
    if "guards" in results:
        found = {
            TITLES[kind]: {
                METHODS[method]: [cell[0] for cell in cells.values()]
                for method, cells in rows.items()
                if "error" not in cells
            }
            for kind, rows in results["guards"].items()
            if "error" not in rows
        }
        if found:
            counts = next(list(rows["f"]) for rows in results["guards"].values() if "f" in rows)
            label = "Processes on one row; changes a second"
            yield "guards.svg", charts.lines(found, counts, label=label)


def write(results: Results, directory: Path) -> None:
    """Renew the sections in the pages of `directory`, and the plots beside them."""
    found = sections(results)
    for name in PAGES:
        path = directory / name
        text = path.read_text()
        for section, content in found.items():
            begin = f"<!-- {section}: written by python -m benchmarks -->\n"
            head, mark, rest = text.partition(begin)
            if mark:
                text = head + begin + content.rstrip("\n") + "\n" + END + rest.partition(END)[2]
        path.write_text(text)
    for name, svg in plots(results):
        (directory / name).write_text(svg)


def failures(results: Results) -> list[str]:
    """Return a line for everything that was not measured, with the reason."""
    lines = []
    for part, groups in results.items():
        if part == "machine":
            continue
        for group, found in groups.items():
            if "error" in found:
                lines.append(f"{part}, {group}: {found['error']}")
                continue
            for title, row in found.items():
                if isinstance(row, dict) and "error" in row:
                    lines.append(f"{part}, {group}, {title}: {row['error']}")
    return lines


def machine(about: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    servers = ", ".join(f"{TITLES.get(k, k)} {v}" for k, v in about["servers"].items())
    return (
        f"{about['cores']} cores ({about['cpu']}), clients and servers on the same ones;"
        f" Python {about['python']}, {packages}; servers: {servers}. {_load(about)}"
    )


def _load(about: dict[str, Any]) -> str:
    text = f"{about['cores']} cores, load before the run: {about['load']:.1f}.\n"
    if about["load"] > 1:  # who pauses loses its share of the processor to the others
        text += "**Other work was using the machine: run it again before you compare.**\n"
    return text


def _table(head: list[str], rows: list[list[str]], words: int = 1) -> str:
    """Return a table whose first `words` columns are words, and the others numbers."""
    marks = "|" + "---|" * words + "---:|" * (len(head) - words)
    first, *others = (f"| {' | '.join(cells)} |" for cells in [head, *rows])
    return "\n".join([first, marks, *others]) + "\n"


def _measured(found: dict[str, Any]) -> dict[str, Any]:
    if "error" in found:
        return {}
    return {title: row for title, row in found.items() if "error" not in row}


def _plotted(rows: dict[str, Any]) -> dict[str, Any]:
    return {title: row for title, row in rows.items() if title not in PARTS_OF_OURS}


def _ratios(found: dict[str, Any]) -> dict[str, float]:
    rows = _measured(found)
    raw = next((row["us"] for title, row in rows.items() if title.startswith("raw")), None)
    return {title: row["us"] / raw for title, row in rows.items()} if raw else {}


def summary(results: Results) -> str:
    """Return a row for each backend, beside the fastest other library for its server."""
    free, wanted = results["uncontended"], results["contended"]
    most = str(max(_counts(wanted), default=""))
    rows = []
    for name, found in free.items():
        if name not in GROUPS or OURS[0] not in (alone := _measured(found)):
            continue
        ratio = _ratios(found).get(OURS[0])
        peer = min(_peers(alone), key=lambda title: alone[title]["us"], default="")
        many = {t: row[most] for t, row in _measured(wanted.get(name, {})).items() if most in row}
        ours = many.get(OURS[0])
        rival = max(_peers(many), key=lambda title: many[title]["rate"], default="")
        rows.append(
            [
                *(GROUPS[name].title, f"{alone[OURS[0]]['us']:.0f}"),
                f"{ratio:.2f}" if ratio else "",
                f"{alone[peer]['us']:.0f}: {peer}" if peer else "",
                f"{ours['rate']:.0f}, {ours['longest_ms']:.0f} ms" if ours else "",
                f"{many[rival]['rate']:.0f}, {many[rival]['longest_ms']:.0f} ms: {rival}"
                if rival
                else "",
            ]
        )
    head = ["", "a free lock: p50, µs", "of raw", "fastest other library"]
    head += [f"{most} processes: locks/s, longest wait", "fastest other library"]
    return _table(head, rows)


def _peers(rows: dict[str, Any]) -> list[str]:
    return [title for title in rows if title not in OURS and not title.startswith("raw")]


def uncontended(groups: dict[str, Any]) -> str:
    rows = []
    for name, found in groups.items():
        if name in GROUPS:
            ratios = _ratios(found)
            for title, row in _measured(found).items():
                ratio = f"{ratios[title]:.2f}" if title in ratios else ""
                rows.append([GROUPS[name].title, title, f"{row['us']:.0f}", ratio])
    text = _table(["", "", "p50, µs", "of raw"], rows, 2)
    frozen = groups.get("redlock, a node frozen", {})
    if "ratio" in frozen:
        text += (
            f"\nRedlock with one of five nodes stopped (SIGSTOP): {frozen['frozen']:.0f} µs against"
            f" {frozen['whole']:.0f} µs, ratio {frozen['ratio']:.2f}; the first acquisition after"
            f" the stop took {frozen['first_ms']:.1f} ms.\n"
        )
    return text


COSTS = [
    "hand-over, µs",
    "requests",
    "max/min",
    "longest wait, ms",
    "client CPU, µs",
    "all CPU, µs",
]


def _costs(cell: dict[str, float]) -> list[str]:
    return [
        *(f"{cell['hand_over_us']:.0f}", f"{cell['requests']:.1f}", f"{cell['spread']:.2f}"),
        *(f"{cell['longest_ms']:.0f}", f"{cell['cpu_us']:.0f}", f"{cell['all_cpu_us']:.0f}"),
    ]


def contended(groups: dict[str, Any]) -> str:
    """Return one table: the rate with any number of processes, the rest with the most."""
    counts = [str(count) for count in _counts(groups)]
    most = counts[-1] if counts else ""
    rows = []
    for name, found in groups.items():
        for title, row in _measured(found).items():
            if cell := row.get(most):
                rates = [f"{row[n]['rate'] if n in row else 0:.0f}" for n in counts]
                rows.append([GROUPS[name].title, title, *rates, *_costs(cell)])
    costs = [f"with {most}: {COSTS[0]}", *COSTS[1:]]
    return _table(["Acquisitions/s by processes", "", *counts, *costs], rows, 2)


def contended_by_count(groups: dict[str, Any]) -> str:
    text = ""
    for count in map(str, _counts(groups)):
        rows = []
        for name, found in groups.items():
            cells = {t: row[count] for t, row in _measured(found).items() if count in row}
            raw = next((cell["rate"] for t, cell in cells.items() if t.startswith("raw")), None)
            for title, cell in cells.items():
                of_raw = f"{cell['rate'] / raw:.2f}" if raw else ""
                rate = f"{cell['rate']:.0f}"
                rows.append([GROUPS[name].title, title, rate, of_raw, *_costs(cell)])
        head = ["", "", "acquisitions/s", "of raw", *COSTS]
        text += f"{count} processes:\n\n{_table(head, rows, 2)}\n"
    return text


def threads(groups: dict[str, Any]) -> str:
    counts = _counts(groups)
    rows = [
        [GROUPS[name].title, title, *(f"{row.get(str(n), 0):,.0f}" for n in counts)]
        for name, found in groups.items()
        for title, row in _measured(found).items()
    ]
    return _table(["Acquisitions/s by threads", "", *map(str, counts)], rows, 2)


WITH_PARTS = {"uncontended": uncontended, "contended": contended_by_count, "threads": threads}


def held(kinds: dict[str, Any]) -> str:
    rows = [
        [
            *(TITLES[kind], f"{x['count']:,}", f"{x['bytes']:.0f}", f"{x['empty']:.0f}"),
            *(f"{x['full']:.0f}", f"{x['full'] / x['empty']:.2f}"),
            f"{x['raw full'] / x['raw empty']:.2f}",
        ]
        for kind, x in kinds.items()
        if "error" not in x
    ]
    head = ["", "held", "bytes each", "p50 empty, µs", "p50 full, µs", "ratio", "raw"]
    return _table(head, rows)


def renewal(kinds: dict[str, Any]) -> str:
    rows = [
        [
            *(TITLES[kind], f"{x['count']:,}", str(x["threads"]), f"{x['cpu']:.1%}"),
            *(f"{x['requests']:.1f}", str(x["lost"]), f"{x['least_left']:.0f}"),
        ]
        for kind, x in kinds.items()
        if "error" not in x
    ]
    head = ["", "holds", "threads", "of a core", "requests/s", "lost", "least time left, s"]
    return _table(head, rows)


def tasks(kinds: dict[str, Any]) -> str:
    x = kinds["redis"]
    if "error" in x:
        return "Not measured.\n"
    return (
        f"{x['count']:,} tasks wait: {x['connections']} connections, {x['threads']} threads,"
        f" {x['memory_mib']:.0f} MiB in all, {x['more_mib']:.0f} MiB more than before they began."
        f" When the locks were given up, all had theirs after {x['handed_over_s']:.2f} s.\n"
    )


def saving(kinds: dict[str, Any]) -> str:
    head = ["", "`save()`, µs", "`VersionedModel.save()`, µs", "ratio"]
    text = _table(head, _compared(kinds, "plain", "versioned"))
    if locked := _compared(kinds, "for_update", "in_transaction"):
        head = ["", "`select_for_update()`, µs", "`lock_in_transaction()`, µs", "ratio"]
        text += "\nA transaction that locks one row:\n\n" + _table(head, locked)
    return text


def _compared(kinds: dict[str, Any], theirs: str, ours: str) -> list[list[str]]:
    return [
        [TITLES[kind], f"{x[theirs]:.0f}", f"{x[ours]:.0f}", f"{x[ours] / x[theirs]:.2f}"]
        for kind, x in kinds.items()
        if theirs in x
    ]


def guards(kinds: dict[str, Any]) -> str:
    text = ""
    for kind, found in kinds.items():
        rows = _measured(found)
        counts = list(next(iter(rows.values()), {}))
        lines = [
            [METHODS[method]]
            + [f"{a:,.0f}" + (f" ({b:.1f})" if b >= 0.05 else "") for a, b in row.values()]
            for method, row in rows.items()
        ]
        text += _table([f"{TITLES[kind]}, processes", *counts], lines) + "\n"
    return text


def _counts(groups: dict[str, Any]) -> list[int]:
    rows = (row for found in groups.values() for row in _measured(found).values())
    return sorted({int(count) for row in rows for count in row})


def _panels(groups: dict[str, Any], figure: str) -> tuple[dict[str, charts.Panel], list[int]]:
    counts = _counts(groups)
    panels = {}
    for name, found in groups.items():
        if rows := _plotted(_measured(found)):
            cells = {t: [row.get(str(count)) for count in counts] for t, row in rows.items()}
            panels[GROUPS[name].title] = {
                title: [x[figure] if x and figure else x for x in line]
                for title, line in cells.items()
            }
    return panels, counts
