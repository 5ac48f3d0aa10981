"""A process that has loaded Django and forks the workers of tests: each costs 10 ms, not 600.

It has one thread and no connection, so a worker gets nothing by the fork that a new process
would not have. The module of the worker's function is loaded once, before the first fork.
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
from typing import IO

from tests.launching import ROOT, at_exit, die_with_parent, launch, mortal

LONGEST = 1 << 16  # bytes of a message


class Child:
    """A forked worker; what tests need of a `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str], ended: int) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._ended = ended  # where the nursery writes the exit code

    def wait(self, timeout: float) -> int:
        """Return the exit code, negative for a signal; raise TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            self.returncode = int(os.read(self._ended, 20))
            os.close(self._ended)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the worker has ended."""
        try:
            self.wait(0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):  # it ended, and the nursery says it soon
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def fork(env: dict[str, str], job: list[str], *, stderr: int) -> Child:
    """Start a worker that calls `main(*job)` of tests/processes.py, in this environment."""
    lasting = {name: value for name, value in env.items() if name != "PYTEST_CURRENT_TEST"}
    return _nursery(frozenset(lasting.items())).fork(job, stderr)


@functools.cache
def _nursery(environment: frozenset[tuple[str, str]]) -> Nursery:
    return Nursery(dict(environment))


class Nursery:
    """The test's end of a nursery; there is one for each environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = launch(
                mortal([sys.executable, "-m", "tests.nursery", str(theirs.fileno())]),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        at_exit(process.wait)
        at_exit(self._socket.close)  # which ends it

    def fork(self, job: list[str], stderr: int) -> Child:
        """Start a worker."""
        (in_, stdin), (stdout, out), (ended, ending) = os.pipe(), os.pipe(), os.pipe()
        message = json.dumps(job).encode()
        socket.send_fds(self._socket, [message], [in_, out, stderr, ending])
        for theirs in in_, out, ending:
            os.close(theirs)
        pid = self._socket.recv(20)
        assert pid, "the nursery has died"
        return Child(int(pid), os.fdopen(stdin, "w"), os.fdopen(stdout), ended)


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
        with contextlib.suppress(Exception):  # the worker will say it
            importlib.import_module(json.loads(message)[0].partition(":")[0])
        gc.freeze()  # or each worker copies all of it when it ends: 0.3 s of CPU
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            for number, stream in enumerate(streams[:3]):
                os.dup2(stream, number)
            connection.close()
            for fd in [*streams, *workers, *(ending for _, ending in workers.values())]:
                os.close(fd)
            job: list[str] = json.loads(message)
            return job
        *theirs, ending = streams
        for stream in theirs:
            os.close(stream)
        workers[os.pidfd_open(pid)] = pid, ending
        connection.send(b"%d" % pid)


def main() -> None:
    """Load Django, then serve; a worker does its job instead of the rest."""
    import django
    import django_redis.client  # noqa: F401  takes 170 ms with its driver

    django.setup()
    from tests import processes

    if job := serve(socket.socket(fileno=int(sys.argv[1]))):
        processes.main(*job)


if __name__ == "__main__":
    main()
