"""What `manage.py distlock` shows: `list`, `stuck`, `watch` and `show`, and what they leave out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import count
from shutil import get_terminal_size
from time import sleep
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from ..claims import Holding
from ..core.registry import aliases_of, registry, using_in
from ..decorators.commands import EX_UNAVAILABLE
from ..operations.holdings import CONTENDED, EXPIRING, HELD, ORPHANED, facts_of, state_of
from ..operations.reading import SLOW, UNLISTED, Health, Reading, queue_of, read, read_all
from ..operations.tables import SORTS, UNKNOWN, card, table
from ..primitives import names


class Looking(BaseCommand):
    """The actions that only look."""

    def _list(
        self,
        *,
        using: str | None,
        as_json: bool,
        sort: str,
        match: str,
        held_for: float,
        stuck: bool = False,
        **options: Any,
    ) -> int:
        if not held_for >= 0:
            raise CommandError("--held-for must be 0 or more seconds")

        def wanted(held: Holding) -> bool:
            held_long = (held.held_for or 0.0) >= held_for
            suspect = stuck and state_of(held) != HELD
            return fnmatchcase(held.name, match) and (held_long or suspect)

        reading = read_all(self._aliases(using))
        found = list(filter(wanted, reading.holdings))
        found.sort(key=lambda held: (SORTS[sort](held), held.alias, held.name))
        if as_json:
            backends = [backend.facts() for backend in reading.backends]
            self._write_json({"locks": list(map(facts_of, found)), "backends": backends})
        elif found:
            self._write_table(found)
        else:
            self._write_why_empty(reading, "is stuck" if stuck else "matches")
        return self._report_incomplete(reading.backends)

    def _stuck(self, **options: Any) -> int:
        return self._list(stuck=True, **options)

    def _watch(self, *, interval: float, times: int | None, as_json: bool, **options: Any) -> int:
        if not 0.1 <= interval <= 3600:
            raise CommandError("--interval must be 0.1 to 3600 seconds")
        if times is not None and times < 1:
            raise CommandError("--times must be 1 or more")
        clear_screen = "\x1b[H\x1b[2J" if self.stdout.isatty() and not as_json else ""
        with suppress(KeyboardInterrupt):
            for number in count() if times is None else range(times):
                if number:
                    sleep(interval)
                self.stdout.write(clear_screen, ending="")
                self._list(as_json=as_json, **options)
                self.stdout.flush()
        return 0

    def _show(self, *, name: str, using: str | None, as_json: bool, **options: Any) -> int:
        held, _ = self._held(name, using)
        if as_json:
            self._write_json({"locks": list(map(facts_of, held))})
        elif not held:
            self.stdout.write(self._nobody_holds(name, using))
        else:
            self._write_cards(held)
        return 0 if held else 1

    def _nobody_holds(self, name: str, using: str | None) -> str:
        aliases = ", ".join(self._aliases(using))
        return f"nobody holds {names.shown(name)!r} (asked: {aliases})"

    def _write_cards(self, held: Sequence[Holding]) -> None:
        for number, holding in enumerate(held):
            self.stdout.write("\n" if number else "", ending="")
            for label, text in card(holding, queue_of(holding.alias, holding.key)):
                style = self._style_of(text) if label == "state" else str
                self.stdout.write(f"{label:15}{style(text or UNKNOWN)}")

    def _held(self, name: str, using: str | None) -> tuple[list[Holding], int]:
        """Return the holders of the lock, and 69 if not all backends answered.

        Exit with 69 if it is not known whether it is held.
        """
        try:
            key = names.key_of(names.checked(name))
        except ValueError as error:
            raise CommandError(str(error)) from error
        reading = read(dict.fromkeys(self._aliases(using), [key]))
        code = self._report_incomplete(reading.backends)
        if not reading.holdings and not all(backend.known for backend in reading.backends):
            sys.exit(EX_UNAVAILABLE)
        return reading.holdings, code

    def _aliases(self, using: str | None) -> list[str]:
        """Return the aliases that were asked for, or all of them."""
        if using is None:
            return list(registry)
        aliases = list(dict.fromkeys(aliases_of(using_in(using))))
        for alias in aliases:
            registry[alias]  # a wrong alias is the caller's mistake, not a backend that is down
        return aliases

    def _report_incomplete(self, backends: Iterable[Health]) -> int:
        """Name the backends whose locks are not all known; return the code if one is down."""
        code = 0
        for backend in backends:
            if backend.truncated:
                of = "" if backend.total is None else f" of {backend.total}"
                self.stderr.write(f"{backend.alias}: the first {backend.looked}{of} locks")
            elif backend.state == UNLISTED:
                self.stderr.write(f"{backend.alias} cannot list its locks")
            elif not backend.known:
                code = EX_UNAVAILABLE
                what = "is slow" if backend.state == SLOW else "is down"
                if isinstance(backend.error, ImproperlyConfigured):
                    what = "cannot be used"
                # A user with a shell here may read what the driver says.
                self.stderr.write(f"{backend.alias} {what}: {backend.error or backend.reason}")
        return code

    def _write_table(self, held: Sequence[Holding]) -> None:
        # The width of COLUMNS or of the terminal; with neither, nothing is cut.
        for line, state in table(held, get_terminal_size((0, 0)).columns):
            self.stdout.write(self._style_of(state)(line))

    def _write_why_empty(self, reading: Reading, what: str) -> None:
        if reading.holdings:
            held = len({(holding.alias, holding.key) for holding in reading.holdings})
            self.stdout.write(f"nothing {what} (locks held: {held})")
        elif all(backend.known for backend in reading.backends):
            self.stdout.write("nothing is held")

    def _write_json(self, answer: Any) -> None:
        """Write JSON for programs and people: letters stay, what cannot be printed is escaped."""
        text = json.dumps(answer, indent=2, default=str, ensure_ascii=False)
        printable = (c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
        self.stdout.write("".join(printable))

    def _style_of(self, state: str) -> Callable[[str], str]:
        """Return the style of a state, which Django applies on a terminal only."""
        styles = {CONTENDED: "WARNING", EXPIRING: "ERROR", ORPHANED: "ERROR"}
        found: Callable[[str], str] = getattr(self.style, styles.get(state, ""), str)
        return found
