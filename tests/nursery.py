"""A process that has loaded Django and forks the workers of tests: each costs 10 ms, not 600.

It has one thread and no connection, so a worker gets nothing by the fork that a new process
would not have. The module of the worker's function is loaded once, before the first fork.

There is a nursery for each environment, as settings depend on that. It is a fork, too: of their
mother, which has loaded what depends on no settings. Workers who need nurseries ask the same one.

A management command is run as `python -m django` runs it, in a process group of its own:

    process = command("distlock_app", "distlock", "run", "a", "--", "true", env={})
    out, err = process.communicate()
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from tests.launching import ROOT, at_exit, die_with_parent, launch, mortal, scratch_directory

LONGEST = 1 << 16  # bytes of a message
MOTHER = "DISTLOCK_TEST_MOTHER"  # where workers find theirs
# What Python and its libraries read when they start: for others than hers, she is of no use.
AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_")
DEADLINE = 60.0  # of a command


class Child:
    """A forked worker; what tests need of a `subprocess.Popen`."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended  # where the nursery writes the exit code

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float = DEADLINE) -> int:
        """Return the exit code, negative for a signal; raise TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            self.returncode = int(os.read(self._ended, 20))
            os.close(self._ended)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the worker has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended, and the nursery says it soon
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Worker(Child):
    """One that the test talks to."""

    def __init__(self, pid: int, ended: int, stdin: int, stdout: int) -> None:
        super().__init__(pid, ended)
        self.stdin: IO[str] = os.fdopen(stdin, "w")
        self.stdout: IO[str] = os.fdopen(stdout)


class Command(Child):
    """A management command that writes into pipes."""

    def __init__(self, pid: int, ended: int, stdout: int, stderr: int) -> None:
        super().__init__(pid, ended)
        self.stdout: IO[str] = os.fdopen(stdout)
        self.stderr: IO[str] = os.fdopen(stderr)

    def communicate(self, timeout: float = DEADLINE) -> tuple[str, str]:
        """Wait for its end and return what it, and what it has started, wrote until theirs."""
        pool = ThreadPoolExecutor(2)
        reads = [pool.submit(_read_all, stream) for stream in (self.stdout, self.stderr)]
        pool.shutdown(wait=False)
        self.wait(timeout)
        out, err = (read.result(timeout) for read in reads)
        return out, err


def _read_all(stream: IO[str]) -> str:
    if stream.closed:
        return ""
    with stream:
        return stream.read()


def fork(env: dict[str, str], job: list[str], *, stderr: int) -> Worker:
    """Start a worker that calls `main(*job)` of tests/processes.py, in this environment."""
    (in_, stdin), (stdout, out) = os.pipe(), os.pipe()
    pid, ended = _nursery_in(env).fork(job, in_, out, stderr)
    os.close(in_)
    os.close(out)
    return Worker(pid, ended, stdin, stdout)


def command(app: str, name: str, *arguments: str, env: dict[str, str]) -> Command:
    """Run a command of `app` in the environment of this process and `env`."""
    job = [f"{app}.management.commands.{name}:Command", name, *arguments]
    (stdout, out), (stderr, err), in_ = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDONLY)
    settings = {"DJANGO_SETTINGS_MODULE": "tests.settings"}
    pid, ended = _nursery_in({**os.environ, **settings, **env}).fork(job, in_, out, err)
    for theirs in in_, out, err:
        os.close(theirs)
    return Command(pid, ended, stdout, stderr)


def _nursery_in(environment: dict[str, str]) -> Nursery:
    lasting = {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}
    return _nursery(frozenset(lasting.items()))


@functools.cache
def _nursery(environment: frozenset[tuple[str, str]]) -> Nursery:
    return Nursery(dict(environment))


class Nursery:
    """The test's end of a nursery; there is one for each environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        started_with = _started_with(environment)
        mother = os.environ.get(MOTHER, "")
        if not mother or started_with != _started_with(os.environ):
            mother = _mother(started_with)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(mother)
        self._socket.send(json.dumps({**environment, MOTHER: mother}).encode())
        at_exit(self._end)

    def _end(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)
        self._socket.settimeout(DEADLINE)
        with contextlib.suppress(OSError):
            self._socket.recv(1)  # until it has ended
        self._socket.close()

    def fork(self, job: list[str], *streams: int) -> tuple[int, int]:
        """Start a process with these streams; return its pid, and where its end is told."""
        ended, ending = os.pipe()
        message = json.dumps(job).encode()
        socket.send_fds(self._socket, [message], [*streams, ending])
        os.close(ending)
        pid = self._socket.recv(20)
        assert pid, "the nursery has died"
        return int(pid), ended


def _started_with(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(item for item in environment.items() if item[0].startswith(AT_START))


@functools.cache
def _mother(started_with: frozenset[tuple[str, str]]) -> str:
    """Start a mother; return where she listens."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(AT_START)}
    path = str(scratch_directory() / "mother")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(100)
        process = launch(
            mortal([sys.executable, "-m", "tests.nursery", str(listener.fileno())]),
            cwd=ROOT,
            env=others | dict(started_with),
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )
    at_exit(process.wait)
    at_exit(process.kill)
    return path


def bear(listener: socket.socket) -> socket.socket:
    """Fork nurseries for ever; return in each of them, in its environment, what it serves."""
    while True:
        connection = listener.accept()[0]
        message = connection.recv(1 << 20)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if message and os.fork() == 0:
            die_with_parent()
            listener.close()
            os.environ.clear()
            os.environ.update(json.loads(message))
            time.tzset()
            return connection
        connection.close()


def serve(connection: socket.socket) -> list[str] | None:
    """Fork workers until the test has gone: return None then, and the job in each of them."""
    workers: dict[int, tuple[int, int]] = {}  # by pidfd: the pid, and where its end is told
    while True:
        readable = set(select.select([connection.fileno(), *workers], [], [])[0])
        for pidfd in workers.keys() & readable:
            pid, ending = workers.pop(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):  # nobody wants to know
                os.write(ending, b"%d" % code)
            os.close(pidfd)
            os.close(ending)
        if connection.fileno() not in readable:
            continue
        message, streams, _, _ = socket.recv_fds(connection, LONGEST, 4)
        if not message:
            return None
        job: list[str] = json.loads(message)
        module, _, kind = job[0].partition(":")
        with contextlib.suppress(Exception):  # the worker will say it
            importlib.import_module(module)
        gc.freeze()  # or each worker copies all of it when it ends: 0.3 s of CPU
        pid = os.fork()
        if kind == "Command":
            with contextlib.suppress(OSError):  # the child does it, too: whoever comes first
                os.setpgid(pid, pid)
        if pid == 0:
            die_with_parent()
            for number, stream in enumerate(streams[:3]):
                os.dup2(stream, number)
            connection.close()
            for fd in [*streams, *workers, *(ending for _, ending in workers.values())]:
                os.close(fd)
            return job
        *theirs, ending = streams
        for stream in theirs:
            os.close(stream)
        workers[os.pidfd_open(pid)] = pid, ending
        connection.send(b"%d" % pid)


def main() -> None:
    """Load Django; then be a mother, a nursery, or a worker who does its job."""
    import django
    import django.db.models
    import django.views.debug
    import django_redis.client  # noqa: F401  takes 170 ms with its driver
    from django.core import management

    from tests import processes

    gc.freeze()
    connection = bear(socket.socket(fileno=int(sys.argv[1])))
    django.setup()
    job = serve(connection)
    if job and job[0].endswith(":Command"):
        sys.argv = [str(Path(django.__file__).parent / "__main__.py"), *job[1:]]
        # As Python makes them for a new process; those here are for other files.
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        management.execute_from_command_line(sys.argv)
    elif job:
        processes.main(*job)


if __name__ == "__main__":
    main()
