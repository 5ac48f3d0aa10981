"""What `manage.py distlock` shows: `list`, `stuck`, `watch` and `show`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from shutil import get_terminal_size
from time import sleep
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from ..claims import Holding
from ..core.registry import registry
from ..decorators.commands import EX_UNAVAILABLE
from ..operations.people import CONTENDED, EXPIRING, HELD, ORPHANED, state_of
from ..operations.reading import Health, queue_of, read, read_all
from ..operations.tables import SORTS, card, table
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
        if using is not None:
            registry[using]  # a wrong alias is the caller's mistake, not a backend that is down
        reading = read_all(None if using is None else [using])
        found = [
            held
            for held in sorted(reading.holdings, key=lambda held: (held.alias, held.name))
            if fnmatchcase(held.name, match)
            and ((held.held_for or 0.0) >= held_for or stuck and state_of(held) != HELD)
        ]
        none = f"nothing {'is stuck' if stuck else 'matches'} (locks held: {len(reading.holdings)})"
        if not reading.holdings:
            none = "nothing is held" if all(backend.known for backend in reading.backends) else ""
        self._write(sorted(found, key=SORTS[sort]), as_json, reading.backends, none)
        for backend in reading.backends:
            if backend.truncated:
                of = "" if backend.total is None else f" of {backend.total}"
                self.stderr.write(f"{backend.alias}: the first {backend.looked}{of} locks")
        return self._report_unknown(reading.backends)

    def _stuck(self, **options: Any) -> int:
        return self._list(stuck=True, **options)

    def _watch(self, *, interval: float, times: int | None, as_json: bool, **options: Any) -> int:
        if not 0.1 <= interval <= 3600:
            raise CommandError("--interval must be 0.1 to 3600 seconds")
        clear_screen = "\x1b[H\x1b[2J" if self.stdout.isatty() and not as_json else ""
        with suppress(KeyboardInterrupt):
            while True:
                self.stdout.write(clear_screen, ending="")
                self._list(as_json=as_json, **options)
                self.stdout.flush()
                if times is not None and (times := times - 1) <= 0:
                    break
                sleep(interval)
        return 0

    def _show(self, *, name: str, using: str | None, as_json: bool, **options: Any) -> int:
        held = self._held(name, using)
        if as_json or not held:
            aliases = ", ".join(registry if using is None else [using])
            none = f"nobody holds {names.shown(name)!r} (asked: {aliases})"
            self._write(held, as_json, none=none)
            return 0 if held else 1
        for number, holding in enumerate(held):
            self.stdout.write("\n" if number else "", ending="")
            for label, text in card(holding, queue_of(holding.alias, holding.key)):
                style = self._style_of(text) if label == "state" else str
                self.stdout.write(f"{label:15}{style(text)}")
        return 0

    def _held(self, name: str, using: str | None) -> list[Holding]:
        """Return the holders of the lock; exit with 69 if it is not known whether it is held."""
        try:
            key = names.key_of(names.checked(name))
        except ValueError as error:
            raise CommandError(str(error)) from error
        if using is not None:
            registry[using]  # as above
        reading = read(dict.fromkeys(registry if using is None else [using], [key]))
        self._report_unknown(reading.backends)
        if not reading.holdings and not all(backend.known for backend in reading.backends):
            sys.exit(EX_UNAVAILABLE)
        return reading.holdings

    def _report_unknown(self, backends: Collection[Health]) -> int:
        """Name the backends whose locks are not known; return the code if one is down."""
        for backend in backends:
            if not backend.lists:
                self.stderr.write(f"{backend.alias} cannot list its locks")
        down = [backend for backend in backends if not backend.up]
        for backend in down:
            wrong = isinstance(backend.error, ImproperlyConfigured)
            # A user with a shell here may read what the driver says.
            why = backend.error or backend.reason
            self.stderr.write(f"{backend.alias} {'cannot be used' if wrong else 'is down'}: {why}")
        return EX_UNAVAILABLE if down else 0

    def _write(
        self,
        held: Sequence[Holding],
        as_json: bool,
        backends: Iterable[Health] | None = None,
        none: str = "",
    ) -> None:
        if not as_json:
            # That of COLUMNS or of the terminal; neither of them: nothing is cut.
            for line, state in table(held, get_terminal_size((0, 0)).columns):
                self.stdout.write(self._style_of(state)(line))
            if none and not held:
                self.stdout.write(none)
            return
        answer: dict[str, Any] = {"locks": [{**asdict(h), "state": state_of(h)} for h in held]}
        if backends is not None:
            answer["backends"] = [
                {"alias": e.alias, "up": e.up, "ping_ms": e.ping_ms, "reason": e.reason}
                for e in backends
            ]
        self.stdout.write(json_of(answer))

    def _style_of(self, state: str) -> Callable[[str], str]:
        """Return how to colour a state; on a terminal alone, says Django."""
        styles = {CONTENDED: "WARNING", EXPIRING: "ERROR", ORPHANED: "ERROR"}
        found: Callable[[str], str] = getattr(self.style, styles.get(state, ""), str)
        return found


def json_of(value: Any) -> str:
    """Return JSON for programs and people: letters as they are, what cannot be printed escaped."""
    text = json.dumps(value, indent=2, default=str, ensure_ascii=False)
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
