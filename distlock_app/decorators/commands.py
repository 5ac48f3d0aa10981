"""`locked_command`: management commands that run one at a time on all hosts; exit 75 if busy."""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import threading
from argparse import ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any, TypeVar, overload

from django.apps import apps
from django.core.management.base import BaseCommand, CommandError, CommandParser, OutputWrapper

from ..core.acquiring import held_by_runner, release_half_taken
from ..core.hold import Hold
from ..core.limits import checked_ttl, checked_wait
from ..core.lock import Lock
from ..errors import BackendError, LockBusy, Terminated
from ..primitives import identity
from ..primitives.forks import in_child
from ..primitives.names import Made, shown
from .atomic_requests import databases_in, in_transactions
from .naming import Named, NameTemplate
from .options import cannot_take, check_lock_options, sorted_out

# sysexits.h: "service unavailable", "temporary failure; user is invited to retry".
EX_UNAVAILABLE = 69
EX_TEMPFAIL = 75
# 128 + 15, as shells report a process that SIGTERM ended.
TERMINATED = 143

_OPTIONS = ("lock_wait", "lock_ttl", "no_lock")

CommandT = TypeVar("CommandT", bound=type[BaseCommand])


@overload
def locked_command(command: CommandT, /) -> CommandT: ...
@overload
def locked_command(
    template: str | None = None,
    /,
    *,
    name: Callable[..., str] | None = None,
    wait: float | None = 0,
    busy_exit: int = EX_TEMPFAIL,
    **lock_options: Any,
) -> Callable[[CommandT], CommandT]: ...
def locked_command(
    template: Any = None,
    /,
    *,
    name: Callable[..., str] | None = None,
    wait: float | None = 0,
    busy_exit: int = EX_TEMPFAIL,
    **lock_options: Any,
) -> Any:
    """Run a management command one at a time: a decorator for its class.

    The fields of the template are the command's options: `"settle:{shop}"`. `name=` is a function
    of them (as keyword arguments). Without either, the name is the command's. Adds --lock-wait,
    --lock-ttl and --no-lock. If busy, print the holder and exit with `busy_exit`; 0 exits
    quietly. If the backend is down, exit with 69. `call_command` raises CommandError.
    SIGTERM and Ctrl-C release the lock. Other options are those of Lock, such as `at_least=` for
    jobs that are shorter than the difference between the hosts' clocks; `using=` may be a
    function of the command's options.
    """
    named, command = sorted_out(template, name, bool(lock_options))
    using = lock_options.get("using", "default")
    lock_options["wait"] = wait
    check_lock_options({**lock_options, "using": "default" if callable(using) else using})
    atomic = databases_in(lock_options.pop("atomic", False))
    guard = _Guard(name=named, lock_options=lock_options, atomic=atomic, busy_exit=busy_exit)

    def decorate(command: Any) -> Any:
        if not (isinstance(command, type) and issubclass(command, BaseCommand)):
            raise TypeError(f"locked_command decorates command classes, not {command!r}")
        _wrap(guard, command)
        return command

    return decorate if command is None else decorate(command)


def _wrap(guard: _Guard, command: Any) -> None:
    create_parser = command.create_parser

    @wraps(create_parser)
    def create_parser_and_options(self: Any, *args: Any, **kwargs: Any) -> CommandParser:
        parser: CommandParser = create_parser(self, *args, **kwargs)
        if isinstance(guard.name, NameTemplate):
            known = {action.dest for action in parser._actions} - {"help", "version", *_OPTIONS}
            guard.name.check(known, "options of the command")
        if not hasattr(parser, "lock_options"):  # those of a class that it inherits from
            parser.lock_options = _add_options(parser)  # type: ignore[attr-defined]
        return parser

    def new(cls: type, *args: Any, **options: Any) -> Any:
        self = super(command, cls).__new__(cls)
        # On the instance: a subclass may override `handle`, and call that of `command`.
        self.handle = _under_lock(guard, self, self.handle)
        return self

    command.create_parser, command.__new__ = create_parser_and_options, staticmethod(new)


def _under_lock(guard: _Guard, command: Any, handle: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(handle)
    def handle_under_lock(*args: Any, **options: Any) -> Any:
        keep_exit_code(command, options)
        given = {option: options.pop(option, None) for option in _OPTIONS}
        passed = given if hasattr(handle, "under_lock") else {}  # to the lock that it inherits
        if given["no_lock"]:
            return handle(*args, **options, **passed)
        asked = {"wait": given["lock_wait"], "ttl": given["lock_ttl"]}
        lock_options = guard.lock_options | {k: v for k, v in asked.items() if v is not None}
        named = {"args": args, **options} if args else options  # as of a LabelCommand
        if callable(using := lock_options.get("using")):
            lock_options["using"] = using(**named)
        lock = Lock(guard.name_of(type(command), named), **lock_options)
        with identity.activity(f"manage.py {_command_name(type(command))}"):
            try:
                return guard.run(lock, lambda: handle(*args, **options, **passed))
            except _Busy as busy:
                return guard.report(command, lock, busy, options)

    handle_under_lock.under_lock = True  # type: ignore[attr-defined]
    return handle_under_lock


def _add_options(parser: CommandParser) -> Any:
    group = parser.add_argument_group("lock")
    group.add_argument(
        "--lock-wait",
        type=_checked(checked_wait),
        metavar="SECONDS",
        help="Wait up to SECONDS if it is running elsewhere; 0 is one try, inf waits forever.",
    )
    group.add_argument(
        "--lock-ttl",
        type=_checked(checked_ttl),
        metavar="SECONDS",
        help="How long the lock stays taken after a crash.",
    )
    group.add_argument(
        "--no-lock",
        action="store_true",
        help="Run without the lock, even if it is running elsewhere.",
    )
    return group


def _checked(check: Callable[[Any], float | None]) -> Callable[[str], float]:
    def seconds(text: str) -> float:
        value = float(text)
        try:
            check(value)
        except ValueError as error:
            raise ArgumentTypeError(error) from None
        return value

    return seconds


class _Busy(Exception):
    """This lock is busy, not one that the command itself takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guard:
    """The arguments of `locked_command`; shared by all runs and never changed."""

    name: Named
    lock_options: dict[str, Any]
    atomic: tuple[str, ...]
    busy_exit: int

    def name_of(self, command: type, options: dict[str, Any]) -> str:
        """Return the name of the lock of this run."""
        if callable(self.name):
            return self.name(**options)
        if self.name is not None:
            return self.name.fill(options)
        app = apps.get_containing_app_config(command.__module__)
        path = f"{app.label}.{_command_name(command)}" if app else command.__module__
        return Made(f"command:{path}", f"command:{path}")

    def run(self, lock: Lock, handle: Callable[[], Any]) -> Any:
        """Call `handle` under the lock, and release the lock in any case."""
        held_before = held_by_runner(lock)
        hold: Hold | None = None
        with _Termination() as termination:
            # Twice, since the signal may arrive on the way into the first `finally`.
            try:
                try:
                    hold = lock.acquire()
                    hold.enter()
                    with in_transactions(self.atomic):
                        result = handle()
                        if self.atomic and not hold.released:
                            hold.check()
                finally:
                    termination.shielded = True
            except BaseException as error:
                termination.shielded = True
                if hold is not None:
                    hold.leave(error)
                elif isinstance(error, LockBusy):
                    raise _Busy from error
                else:
                    release_half_taken(lock, held_before)
                    if isinstance(error, BackendError):
                        raise unavailable(lock, error) from error
                raise
            hold.leave(None)
        return result

    def report(self, command: Any, lock: Lock, busy: _Busy, options: dict[str, Any]) -> None:
        """Say that the command is running elsewhere: by CommandError, unless it may skip."""
        text = f"{_command_name(type(command))} is already running: {held_by(lock)}"
        if self.busy_exit:
            raise CommandError(text, returncode=self.busy_exit) from busy.__cause__
        if options.get("verbosity", 1) > 1:
            command.stdout.write(text)


class _Termination:
    """Turns SIGTERM into an exception while a command runs, so that it can release its lock.

    Only if the signal would end the process: the project's own handlers, and a parent that ignores
    the signal, take precedence. Only in the main thread: others cannot have handlers.
    """

    def __init__(self) -> None:
        self.shielded = False  # the lock is being released: nothing must interrupt that
        self._came = False

    def __enter__(self) -> _Termination:
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *args: Any) -> None:
        # The command may have installed its own handler.
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._came and exc_type is None:
            raise Terminated(TERMINATED)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._came = True
        if not self.shielded:
            raise Terminated(TERMINATED)


def _end_as_others() -> None:
    """Let SIGTERM end a child: the lock is its parent's, and pools catch the exception."""
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), _Termination):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


in_child(_end_as_others)


def keep_exit_code(command: BaseCommand, options: dict[str, Any]) -> None:
    """Let Django exit with the code of a CommandError even if stderr cannot be written.

    It may be closed, by `2>&-`, on a full disk, or read by nobody.
    """
    if options.get("stderr") or "write" in vars(command.stderr):
        return
    if sys.stderr is None:
        command.stderr = OutputWrapper(io.StringIO())
    write = command.stderr.write

    def try_to_write(*args: Any, **kwargs: Any) -> None:
        with suppress(OSError):
            write(*args, **kwargs)

    command.stderr.write = try_to_write  # type: ignore[method-assign]
    atexit.unregister(_end_stderr)
    atexit.register(_end_stderr)


def _end_stderr() -> None:
    end_stream(sys.stderr)


def end_stream(stream: Any) -> None:
    """Flush it, to nowhere if it cannot be written: else Python exits with 120."""
    try:
        stream.flush()
    except (AttributeError, OSError):
        with suppress(AttributeError, OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def held_by(lock: Lock) -> str:
    """Return who holds the lock, for a terminal."""
    try:
        holding = lock.holders()[0]
    except Exception:  # by now it may be free or its backend down: report the rest
        return "another process has its lock"
    facts = {"host": "host {}", "pid": "process {}", "who": "{}"}
    holder = holding.holder
    who = [text.format(holder[fact]) for fact, text in facts.items() if fact in holder]
    since = "" if holding.held_for is None else f", for {holding.held_for:.0f} s"
    if "at_least" in holder:
        since += shown(f", and kept for at least {holder['at_least']} s even if it has ended")
    # Its text may come from a stranger's URL, and goes to a terminal.
    by = shown(", ".join(who)) or "another process"
    return f"the lock {shown(lock.name)!r} is held by {by}{since}"


def unavailable(lock: Lock, error: BackendError) -> CommandError:
    """Return what to raise if the backend of the lock is down."""
    return CommandError(cannot_take(lock.name, lock.using, error), returncode=EX_UNAVAILABLE)


def _command_name(command: type) -> str:
    return command.__module__.rpartition(".")[2]
