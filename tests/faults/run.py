"""One run: an engine on its servers, workers, the nemesis, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from tests.engines import until
from tests.faults.base import Engine
from tests.faults.broken import SIMPLE
from tests.faults.checker import HANGS, Verdict, judge
from tests.faults.engines import ENGINES
from tests.faults.history import read
from tests.faults.nemesis import Crew, Nemesis, Round, schedule
from tests.faults.store import FencedStore
from tests.launching import NotInstalled, scratch_directory
from tests.processes import Processes, say
from tests.servers import RedisServer

LONGEST_WAIT = 12.0


def run(
    *,
    engine: str,
    seconds: float,
    processes: int,
    seed: int,
    work: float = 0.01,
    names: int = 0,
    step_clocks: bool = False,
    keep: str = "",
    kinds: Sequence[str] = (),
    without: Sequence[str] = (),
) -> dict[str, Any]:
    """Run an engine in this process; return the verdict as JSON can carry it.

    Goes on for so many seconds, and until every kind of fault came once.
    """
    with ExitStack() as stack:
        directory = Path(keep) / f"{engine}-{seed}" if keep else scratch_directory() / "run"
        directory.mkdir(parents=True)
        subject = {**ENGINES, **SIMPLE}[engine]()
        stack.callback(subject.close)
        try:
            if step_clocks:
                subject.let_clocks_step()
            subject.start()
        except NotInstalled as error:
            return {"missing": subject.server, "why": str(error)}
        store = stack.enter_context(RedisServer())
        group = Processes()
        stack.callback(group.close)
        # As many long ones in each second, however short the others are.
        plan: dict[str, Any] = {
            "work": work,
            "long": work / 2,
            "overstays": work * 0.3,
            "odd": 0.01,
        }
        plan |= subject.plan | ({"names": [f"name {n}" for n in range(names)]} if names else {})
        nest = _nest(group, subject, directory, store.url, seed, plan)
        crew = Crew(nest, processes)
        nemesis = Nemesis(subject, crew, directory)
        kinds = [kind for kind in kinds or nemesis.acts if kind not in without]
        # Who is hurt before anybody had a lock shows nothing.
        events = partial(directory.glob, "*.events")
        until(lambda: any('"got"' in one.read_text() for one in events()), within=60)
        _rounds(nemesis, schedule(seed, kinds, ttl=subject.ttl), seconds, len(kinds))
        (directory / "stop").touch()
        problems = _finish(crew, subject)
        verdict = _judge(directory, store.url, subject, plan["names"], problems)
        nest.tell(None)
    return as_json(verdict)


def _nest(
    group: Processes,
    subject: Engine,
    directory: Path,
    store: str,
    seed: int,
    plan: dict[str, Any],
) -> Any:
    nest = group.start(
        "tests.faults.workers:nest",
        env=subject.env,
        directory=str(directory),
        store=store,
        seed=seed,
        locks=subject.locks,
        caches=subject.caches,
        migrate=subject.migrate,
        ttl=subject.ttl,
        **plan,
    )
    assert nest.read(60) == "ready"
    return nest


def _rounds(nemesis: Nemesis, rounds: Iterator[Round], seconds: float, at_least: int) -> None:
    told, until = monotonic(), monotonic() + seconds
    for number, one in enumerate(rounds):
        if monotonic() >= until and number >= at_least:
            break
        if monotonic() > told + 5:
            told = monotonic()
            say({"faults": number, "left": max(0.0, until - told)})
        nemesis.play(one)


def _finish(crew: Crew, subject: Engine) -> list[str]:
    """Wait for the workers, then see whether every lock comes free; return what hangs."""
    hanging = [who for who in crew.pids if crew.reap(who, LONGEST_WAIT + HANGS)]
    problems = [f"the worker {who} did not end" for who in hanging]
    if crew.take_each(within=subject.ttl + 10.0):
        problems.append("the last worker did not end")
    return problems


def _judge(
    directory: Path, store: str, subject: Engine, names: list[str], problems: list[str]
) -> Verdict:
    log = FencedStore(store)
    history = read(directory, ttl=subject.ttl)
    history.writes = [(name, writer) for name in names for writer in log.accepted(name)]
    history.surprises += problems
    log.client.close()
    return judge(history)


def as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "rows": {kind: asdict(row) for kind, row in verdict.rows.items()},
        "accusations": [
            f"{one.promise} ({one.fault}, at {one.at:.3f}): {one.text}"
            for one in verdict.accusations
        ],
    }
