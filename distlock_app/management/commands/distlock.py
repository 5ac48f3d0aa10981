"""`manage.py distlock`: its options, and the actions `doctor`, `clear`, `purge`, `run`, `lead`.

Exit codes: 0 done; 1 `show`, `clear`: it is free, or has another version; 2 usage; 69 a backend is
down or cannot be used, or cannot list its locks (`show`, `clear`); 75 `run`: another owner
holds it; 76 `run`: the lock was lost, the program terminated; 141 nobody reads its output; else
the program's own. It works while a database is down: it uses no model and no system check.
"""

from __future__ import annotations

import getpass
import io
import os
import sys
from argparse import PARSER
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser, OutputWrapper

from distlock_app.backends.base import Purgeable
from distlock_app.claims import Holding
from distlock_app.core.limits import UNSET
from distlock_app.core.lock import Lock
from distlock_app.core.operators import clear
from distlock_app.core.registry import aliases_of, registry, using_in
from distlock_app.decorators.commands import (
    EX_TEMPFAIL,
    EX_UNAVAILABLE,
    end_stream,
    held_by,
    keep_exit_code,
    unavailable,
)
from distlock_app.errors import BackendError, LockBusy, LockLost
from distlock_app.management.looking import Looking
from distlock_app.operations import doctor
from distlock_app.operations.holdings import facts_of, has_version
from distlock_app.operations.tables import SORTS
from distlock_app.operations.tethered import EX_NOT_EXECUTABLE, EX_NOT_FOUND
from distlock_app.primitives import identity

# A fence goes on from the server's clock, which is never set back by so much.
PURGED_AFTER = 7 * 24 * 3600.0
EX_USAGE = 2  # that of argparse
EX_LOST = 76  # next to 75 (busy) in sysexits.h; no shell uses it
EX_NO_READER = 141  # as of a program that SIGPIPE ended
NOT_STARTED = {EX_NOT_FOUND: "not found", EX_NOT_EXECUTABLE: "cannot be run"}
STUCK_AFTER = 60.0  # seconds; no request takes so long
OLDEST = 100 * 365 * 24 * 3600.0


class Command(Looking):
    help = "Looks at locks and their backends, takes one away, or runs a program under one."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

        def action(name: str, text: str, using: str | None = None) -> Any:
            added = actions.add_parser(name, help=text, description=text)
            which = f"aliases of DISTLOCK, separated by commas (default: {using or 'all'})"
            added.add_argument("--using", default=using, metavar="ALIAS", help=which)
            return added

        listing = action("list", "List the locks that are held.")
        showing = action("show", "Show the holders of a lock; exit 1 if it is free.")
        clearing = action("clear", "Take a lock away from its holder.")
        watching = action("watch", "Refresh the list until Ctrl-C.")
        stuck = action("stuck", "List locks that are contended, not renewed, or held for long.")
        examining = action("doctor", "Try each backend, and say what is wrong with it.")
        purging = action("purge", "Delete rows of locks that have long been free.", "default")
        running = action("run", "Run a program under a lock; exit 75 if it is busy.", "default")
        leading = action("lead", "Wait for a lock, run a program; repeat after a loss.", "default")
        for added in (showing, clearing, running, leading):
            added.add_argument("name", metavar="NAME", help="put it after -- if it begins with -")
        for added in (listing, showing, watching, stuck, examining, clearing, purging):
            added.add_argument("--json", action="store_true", dest="as_json", help="write JSON")
        for added in (listing, watching, stuck):
            added.add_argument("--sort", choices=SORTS, default="urgency")
            added.add_argument("--match", default="*", metavar="PATTERN", help="such as 'order:*'")
            long = STUCK_AFTER if added is stuck else 0.0
            added.add_argument("--held-for", type=float, default=long, metavar="SECONDS")
        clearing.add_argument("--if-version", help="only this `version` of `show --json`")
        clearing.add_argument("--reason", default="", help="for the log")
        clearing.add_argument("--yes", action="store_true", help="do not ask")
        watching.add_argument("--interval", type=float, default=1.0, metavar="SECONDS")
        watching.add_argument("--times", type=int, metavar="N", help="stop after N lists")
        purging.add_argument("--older-than", type=float, default=PURGED_AFTER, metavar="SECONDS")
        purging.add_argument("--dry-run", action="store_true", help="only count them")
        running.add_argument("--wait", type=float, metavar="SECONDS", help="0 is one try")
        for added in (running, leading):
            added.add_argument("--ttl", type=float, metavar="SECONDS")
            added.add_argument("program", nargs=PARSER, metavar="-- CMD")

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        if sys.stdout is None and not options.get("stdout"):  # closed, by `>&-`
            self.stdout = OutputWrapper(io.StringIO())
        keep_exit_code(self, options)
        # No name fails an action because the encoding of the output lacks its letters.
        if reconfigure := getattr(self.stdout, "reconfigure", None):  # that of a TextIOWrapper
            reconfigure(errors="backslashreplace")
        try:
            code = getattr(self, f"_{action}")(action=action, **options)
            self.stdout.flush()
        except BrokenPipeError:  # `| head` has read enough
            end_stream(sys.stdout)
            sys.exit(EX_NO_READER)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        except BackendError as error:
            raise CommandError(str(error), returncode=EX_UNAVAILABLE) from error
        except OSError as error:  # stdout is on a full disk, or the system has no file left
            end_stream(sys.stdout)
            raise CommandError(str(error)) from error
        if code:
            sys.exit(code)

    def _doctor(self, *, using: str | None, as_json: bool, **options: Any) -> int:
        aliases = registry if using is None else dict.fromkeys(aliases_of(using_in(using)))
        found = [doctor.examine(alias) for alias in aliases]
        if as_json:
            self._write_json({"backends": [backend.facts() for backend in found]})
        else:
            for backend in found:
                self._write_finding(backend)
        return 0 if all(backend.works for backend in found) else EX_UNAVAILABLE

    def _write_finding(self, backend: doctor.Finding) -> None:
        verdict = f"{backend.backend or 'not usable'}: {backend.trouble}"
        if backend.works:
            verdict = (
                f"{backend.backend} works; one round trip took {backend.ping_ms:.1f} ms, "
                f"a lock and its release {backend.pair_ms:.1f} ms"
            )
        self.stdout.write(f"{backend.alias}: {verdict}")
        for message in backend.messages:
            self.stdout.write(f"  {message['id']}: {message['text']}")
            if message["hint"]:
                self.stdout.write(f"    {message['hint']}")

    def _clear(
        self,
        *,
        name: str,
        using: str | None,
        if_version: str | None,
        reason: str,
        yes: bool,
        as_json: bool,
        **options: Any,
    ) -> int:
        found, code = self._held(name, using)
        held = [h for h in found if has_version(h, if_version)]
        if using is None and len(aliases := sorted({h.alias for h in held})) > 1:
            raise CommandError(f"held under {' and '.join(aliases)}: choose with --using")
        if held and not yes:
            self._confirm(held)
        # What was shown is compared: a lock that changed hands since then is left alone.
        user = f"{_user()} (command line)"
        cleared = [h for h in held if clear(h.alias, h.key, h.name, h.version, user, reason)]
        if as_json:
            self._write_json({"locks": list(map(facts_of, cleared))})
        else:
            self.stdout.write(f"{len(cleared)} cleared")
            if not found:
                self.stderr.write(self._nobody_holds(name, using))
            elif not held:
                self.stderr.write("it is held with another version: see `show --json`")
        if using is not None and code:  # it may still be held there
            return code
        return 0 if cleared else 1

    def _purge(
        self, *, using: str, older_than: float, dry_run: bool, as_json: bool, **options: Any
    ) -> None:
        if not 0 <= older_than <= OLDEST:
            raise CommandError(f"--older-than must be 0 to {OLDEST:.0f} seconds")
        count = 0
        for alias in self._aliases(using):
            if isinstance(backend := registry[alias].backend, Purgeable):
                count += backend.left_over(older_than)[1] if dry_run else backend.purge(older_than)
        if as_json:
            self._write_json({"to_purge" if dry_run else "purged": count})
        else:
            self.stdout.write(f"{count} {'to delete' if dry_run else 'deleted'}")

    def _run(self, *, wait: float | None, **options: Any) -> int:
        return self._under_lock(_running().run, wait=UNSET if wait is None else wait, **options)

    def _lead(self, **options: Any) -> int:
        def report(error: Exception) -> None:
            self.stderr.write(f"{error}; waiting for the next turn")

        return self._under_lock(partial(_running().lead, report=report), wait=None, **options)

    def _under_lock(
        self,
        run_or_lead: Callable[[Lock, list[str]], int],
        *,
        action: str,
        name: str,
        using: str,
        wait: float | None,
        ttl: float | None,
        program: list[str],
        **options: Any,
    ) -> int:
        if program[0] == "--":  # argparse keeps it behind options, and behind a name like "-x"
            program = program[1:]
        if not program:
            raise CommandError("name the program to run after --", returncode=EX_USAGE)
        aliases = using_in(using)
        self._warn_of_local(aliases)
        try:
            lock = Lock(name, using=aliases, wait=wait, ttl=UNSET if ttl is None else ttl)
        except ValueError as error:
            raise CommandError(str(error)) from error
        # Not the arguments: there may be a password among them.
        with identity.activity(f"distlock {action} {program[0]}"):
            try:
                code = run_or_lead(lock, program)
            except LockBusy as error:
                raise CommandError(f"busy: {held_by(lock)}", returncode=EX_TEMPFAIL) from error
            except LockLost as error:
                raise CommandError(str(error), returncode=EX_LOST) from error
            except BackendError as error:
                raise unavailable(lock, error) from error
        if why := NOT_STARTED.get(code):
            self.stderr.write(f"{program[0]}: {why}, or it ended with {code}")
        return code

    def _warn_of_local(self, using: str | tuple[str, ...]) -> None:
        for alias in aliases_of(using):
            if (backend := registry[alias].backend).local:
                kind = type(backend).__name__
                self.stderr.write(f"{alias}: {kind} does not exclude other processes")

    def _confirm(self, held: Sequence[Holding]) -> None:
        if sys.stdin is None or not sys.stdin.isatty():
            raise CommandError("nobody to ask: repeat it with --yes")
        self._write_table(held)
        self.stdout.write(
            "Clearing does not stop its holder; another process may get the lock at once."
        )
        try:
            answer = input("Clear it? [y/N] ")
        except EOFError:  # Ctrl-D
            answer = ""
        if answer.strip().lower() not in {"y", "yes"}:
            raise CommandError("nothing was cleared")


def _running() -> Any:
    """Return the module that runs programs, which cannot be loaded everywhere."""
    if not hasattr(os, "fork"):
        raise CommandError("run and lead need fork() and POSIX signals, which this system lacks")
    from distlock_app.operations import run

    return run


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user without a name; Windows
        return "unknown"
