"""`distlock run` and `lead`: a program under a lock; signals and exit codes pass through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from time import sleep
from types import FrameType
from typing import Any

from ..core.acquiring import held_by_runner, release_half_taken
from ..core.hold import Hold
from ..core.lock import Lock
from ..errors import BackendError, LockBusy, LockLost
from ..primitives.timing import full_jitter
from . import tethered

# Signals that ask a program to end.
ENDS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
# Those, and the ones that programs take for commands.
PASSED_ON = ENDS | {signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM}
# A terminal sends them to the whole group: the program has them already.
OF_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT})
# Those that end this process even if the program goes on; the others may be commands to it.
FINAL = frozenset({signal.SIGTERM, signal.SIGINT})

# A program that was asked to stop, because its lock is lost, is killed after so many seconds.
GRACE = 10.0

# Seconds until a candidate asks a backend again that does not answer: the first, and the longest.
RETRY_MIN, RETRY_MAX = 0.1, 5.0


def run(lock: Lock, program: Sequence[str]) -> int:
    """Hold `lock` while `program` runs; return its exit code, 128 + n if signal n ended it.

    The program is killed if this process is. Raise LockBusy, LockTimeout or BackendError if it was
    not started, and LockLost if the lock was lost meanwhile: the program was terminated then, if
    it was still running.
    """
    with _Signals() as signals:
        return _run(lock, program, signals)


def lead(lock: Lock, program: Sequence[str], report: Callable[[Exception], None]) -> int:
    """Like `run`, but repeat after each loss, until the program exits or a signal ends it.

    `report` gets the LockLost, or the BackendError of a backend that answered before: then it is
    asked until it answers. Raise BackendError if it does not answer the first time.
    """
    failures = 1
    attempt = replace(lock, wait=0)  # the first: a long wait may end with a backend that answered
    with _Signals() as signals:
        while True:
            try:
                return _run(attempt, program, signals)
            except (LockBusy, LockLost, BackendError) as error:
                signals.begin()
                if attempt is not lock and isinstance(error, BackendError):
                    raise
                attempt = lock
                if isinstance(error, LockBusy):
                    continue
                failures = 1 if isinstance(error, LockLost) else failures + 1
                report(error)
            sleep(full_jitter(failures, base=RETRY_MIN, cap=RETRY_MAX))


def _run(lock: Lock, program: Sequence[str], signals: _Signals) -> int:
    hold = _acquire(lock, signals)
    if signals.came is not None:
        hold.leave(None)
        return 128 + signals.came
    with ExitStack() as stack:
        try:
            process = stack.enter_context(_started(program))
        except BaseException as error:  # the system has no process or file left
            hold.leave(error)
            raise
        signals.pass_on_to(process)
        hold.on_lost(lambda _: _stop(process))
        code = _ended(process)
    if signals.came not in {*FINAL, -code}:  # the program went on, as after a reload
        signals.came = None
    code = code if code >= 0 else 128 - code
    try:
        hold.leave(None)
    except LockLost as error:
        raise LockLost(f"{error}; the program ended with {code}") from error
    return code


@contextmanager
def _started(program: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the program so that it is killed when this process dies."""
    reading, writing = os.pipe()
    with open(writing, "wb"):  # closed by our end, whatever it is
        with open(reading, "rb"):
            script = [sys.executable, "-I", "-S", tethered.__file__]
            command = [*script, str(os.getpid()), str(reading), *program]
            process = subprocess.Popen(command, pass_fds=[reading])
        yield process


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of the program, and handle signals meanwhile; return its exit code.

    A second at a time: Python handles a signal that arrives just before wait(), or in another
    thread, only when wait() returns.
    """
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)


def _acquire(lock: Lock, signals: _Signals) -> Hold:
    """Take the lock; a signal ends the waiting, but no longer once it is ours."""
    _occupy_standard_streams()
    held_before = held_by_runner(lock)
    try:
        hold = lock.acquire()
        signals.ends_us = False
        return hold
    except BaseException as error:
        signals.ends_us = False
        if not isinstance(error, LockBusy):
            release_half_taken(lock, held_before)
        raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    _send(process, signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        _send(process, signal.SIGKILL)


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    """Send the program a signal, unless it has become another user, as sudo does."""
    try:
        process.send_signal(number)
    except PermissionError as error:
        what = f"cannot send {signal.Signals(number).name} to the program: {error.strerror}"
        with suppress(AttributeError, OSError):  # it is closed, on a full disk, or nobody reads it
            sys.stderr.write(f"{what}; waiting for its end\n")


class _Signals:
    """Signals that reach this process while it waits for a lock or runs a program under it.

    One that the parent ignores (nohup) stays ignored, here and in the program; but for SIGCHLD.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self.came: int | None = None
        self.begin()

    def begin(self) -> None:
        """Wait for the lock: any signal ends this process, also one that came before."""
        self._process: subprocess.Popen[bytes] | None = None
        self.ends_us = True
        if self.came in ENDS:
            raise SystemExit(128 + self.came)
        self.came = None

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in PASSED_ON:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
            # If it is ignored, the kernel forgets the program's exit code, and Popen says 0.
            if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
                self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *args: Any) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None: not installed by Python, which cannot restore it
                signal.signal(number, handler)

    def pass_on_to(self, process: subprocess.Popen[bytes]) -> None:
        """Send `process` the signal that came while it was started, and those to come."""
        self._process = process
        if self.came is not None:
            _send(process, self.came)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.came not in FINAL:
            self.came = number
        if self._process is not None:
            if number not in OF_TERMINAL or not _in_front():
                _send(self._process, number)
        elif self.ends_us:
            raise SystemExit(128 + number)


def _occupy_standard_streams() -> None:
    """Let no connection get the number of a closed stream (`<&-`): the program would inherit it."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # stays open here; the program finds the stream closed, as before
    os.close(fd)


def _in_front() -> bool:
    """Return whether this process is in the foreground of its terminal."""
    try:
        with open(os.ctermid(), "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
