"""manage.py race: let processes buy the same stock under each guard, and count what came of it."""

from __future__ import annotations

import argparse
import getpass
import json
import signal
import sys
from dataclasses import asdict, fields
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError, CommandParser

from demo_project.shop import race
from demo_project.shop.race_models import Race
from demo_project.shop.race_results import Result
from demo_project.shop.race_strategies import Strategy, missing, strategies
from demo_project.shop.race_terms import TERMS, Terms
from distlock_app import LockBusy, LockError

EX_TEMPFAIL = 75
WIDTH = 30
COLUMNS = {
    "sold": lambda r: r.sold,
    "left": lambda r: r.left,
    "oversold": lambda r: r.oversold,
    "lost": lambda r: r.lost,
    "conflicts": lambda r: r.conflicts,
    "retries": lambda r: r.retries,
    "gave up": lambda r: r.gave_up,
    "sold/s": lambda r: f"{r.throughput:.0f}",
    "p50 ms": lambda r: milliseconds(r.p50_ms),
    "p99 ms": lambda r: milliseconds(r.p99_ms),
    "max/min": lambda r: "∞" if r.fairness is None else f"{r.fairness:.1f}",
}


def milliseconds(wait: float | None) -> str:
    return "" if wait is None else f"{wait:.1f}"


def in_column(title: str, cell: Any) -> str:
    return f"{cell:>{max(5, len(title)) + 2}}"


class Command(BaseCommand):
    help = (
        "Let buyers, each a process, fight for the same stock under each guard in turn. Exit code "
        "1: a guard oversold or lost a sale; 75: a race is already running."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        for field in fields(Terms):
            _label, text, low, high, _step = TERMS[field.name]
            parser.add_argument(
                f"--{field.name}",
                type=type(field.default),
                default=field.default,
                help=f"{text} ({low:g} to {high:g}, default {field.default:g})",
            )
        parser.add_argument("--only", nargs="+", metavar="STRATEGY", help="Only these; see --list.")
        parser.add_argument("--list", action="store_true", help="List the strategies, and stop.")
        parser.add_argument("--json", action="store_true", help="Print the results as JSON.")
        # Of the page: conduct the race with this key, under the lock that stdin hands over.
        parser.add_argument("--conduct", type=int, help=argparse.SUPPRESS)

    def handle(self, *args: Any, **options: Any) -> None:
        if options["list"]:
            self.show_strategies()
            return
        for number in (signal.SIGTERM, signal.SIGINT):  # so that the buyers end, and the lock
            signal.signal(number, ended)
        if options["conduct"]:
            self.conduct(options["conduct"])
            return
        found = self.race(options)
        if options["json"]:
            self.stdout.write(json.dumps([as_json(result) for result in found], indent=1))
        else:
            self.show(found, {} if options["only"] else missing())
        if wrong := [result.title for result in found if result.broke_promise]:
            raise CommandError(f"Sold what was not there: {', '.join(wrong)}")

    def conduct(self, pk: int) -> None:
        """Run a race that the page announced."""
        with race.Lock.resume(sys.stdin.read(), max_hold=race.LOCK.max_hold) as hold:
            race.conduct(Race.objects.get(pk=pk), hold)

    def race(self, options: dict[str, Any]) -> list[Result]:
        """Announce a race and run it."""
        known = strategies()
        keys = options["only"] or list(known)
        if unknown := set(keys) - set(known):
            raise CommandError(f"--only: no {', '.join(sorted(unknown))} here; see --list")
        try:
            terms = Terms(**{field.name: options[field.name] for field in fields(Terms)})
        except ValueError as error:
            raise CommandError(str(error)) from error
        try:
            with race.LOCK.acquire() as hold:
                announced = race.announce(terms, keys, by=getpass.getuser())
                found = race.conduct(announced, hold, self.progress)
        except LockBusy as error:
            raise CommandError("a race is already running", returncode=EX_TEMPFAIL) from error
        except LockError as error:
            raise CommandError(str(error)) from error
        if announced.state != Race.State.DONE:
            raise CommandError(f"the race was {announced.state} {announced.trouble}".strip())
        return found

    def progress(self, strategy: Strategy, tried: int, total: int) -> None:
        """Draw a bar, for a person."""
        if self.stderr.isatty():
            bar = "█" * (WIDTH * tried // total)
            text = f"\r{str(strategy.title):32}{bar:░<{WIDTH}} {tried:>5}/{total}"
            self.stderr.write(text + ("\r\033[K" if tried == total else ""), ending="")
            self.stderr.flush()

    def show_strategies(self) -> None:
        for key, strategy in strategies().items():
            self.stdout.write(f"{key:14}{strategy.title}")
        for key, (title, reason) in missing().items():
            self.stdout.write(f"{key:14}{title}: skipped, {reason}")

    def show(self, found: list[Result], missing: dict[str, tuple[Any, Any]]) -> None:
        """Print the table, and what is not in it."""
        self.stdout.write(f"{'':30}" + "".join(map(in_column, COLUMNS, COLUMNS)))
        for result in found:
            if not result.skipped:
                cells = "".join(in_column(title, COLUMNS[title](result)) for title in COLUMNS)
                mark = "" if result.right else "  WRONG"
                self.stdout.write(f"{result.title:30}{cells}{mark}".rstrip())
        left_out = [*missing.values()]
        left_out += [(result.title, result.skipped) for result in found if result.skipped]
        for title, reason in left_out:
            self.stdout.write(f"{str(title):30}  skipped: {reason}")
        for result in found:
            if result.note:
                self.stdout.write(f"{result.title:30}  {result.note}")


def as_json(result: Result) -> dict[str, Any]:
    derived = ("right", "throughput", "fairness")
    return asdict(result) | {name: getattr(result, name) for name in derived}


def ended(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)
