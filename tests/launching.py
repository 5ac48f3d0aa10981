"""How a test starts processes: on a free port, with a directory, gone when the test is.

Needs nothing beyond Python's standard library and the programs themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# From 32768 on the kernel hands out ports for outgoing connections, so one that was free when
# it was looked at may be taken when the server binds it.
PORTS = range(20000, 32768)
ROOT = Path(__file__).resolve().parent.parent
PR_SET_PDEATHSIG = 1  # of prctl()
START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0

_launcher = ThreadPoolExecutor(1, "launcher")


class NotInstalled(Exception):
    """A program that is needed to start this server is not on this machine."""


class DidNotStart(Exception):
    """The server ended, or did not answer in time; the message has the end of its log."""


def find_program(*names: str) -> str:
    """Return the path of the first of these programs that is installed."""
    directories = [os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"]
    newest_first = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: -float(path.parent.name)
    )
    search = os.pathsep.join([*directories, *map(str, newest_first)])
    for name in names:
        if path := shutil.which(name, path=search):
            return path
    raise NotInstalled(" or ".join(names) + " is not installed")


def free_port() -> int:
    """Return a port of 127.0.0.1 below 32768 on which nobody listens."""
    for port in random.sample(PORTS, 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port between 20000 and 32767")


def mortal(command: list[str], orphan_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return `command` so that the kernel sends it a signal when the process of `launch` dies.

    Any change of the user clears that wish, so it has to come first: [*as_user, *mortal(...)].
    """
    return [find_program("setpriv"), f"--pdeathsig={orphan_signal.name[3:]}", *command]


def die_with_parent() -> None:
    """Do in a forked child what `mortal` does for a command."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def launch(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process from a thread that lives as long as this process.

    The kernel takes the end of the *thread* that started a child for its parent's death. So a
    test may start and restart things from threads of its own.
    """
    return _launcher.submit(lambda: subprocess.Popen(command, **options)).result()


def at_exit(function: Callable[[], object]) -> None:
    """Call `function` when this process ends, and not when a child of it does."""
    owner = os.getpid()
    atexit.register(lambda: function() if os.getpid() == owner else None)


def scratch_directory() -> Path:
    """Make a temporary directory that other users may pass through, removed at exit."""
    path = Path(tempfile.mkdtemp(prefix="distlock-"))
    path.chmod(0o711)
    at_exit(lambda: shutil.rmtree(path, ignore_errors=True))
    return path


class Server:
    """A server process: the port and the data stay the same from one start to the next."""

    name = ""  # how the command line and the variables call it
    user: str | None = None  # started as this user if we are root
    stop_signal = signal.SIGTERM
    orphan_signal = signal.SIGKILL  # sent by the kernel when the test process dies

    def __init__(
        self,
        *,
        directory: Path | str | None = None,
        port: int | None = None,
        config: dict[str, str] | None = None,
        detached: bool = False,
    ) -> None:
        """`config` holds the server's own settings; `detached` lets it outlive this process."""
        self.config = dict(config or {})
        self.detached = detached
        self.env: dict[str, str] = {}  # what it has beside this process's
        self.directory = Path(directory) if directory else None
        self.process: subprocess.Popen[bytes] | None = None
        self._wanted_port = port
        self._port = port

    # What a kind of server defines.

    def prepare(self) -> None:
        """Write what the first start needs into `self.home`."""

    def command(self) -> list[str]:
        """Return the command line that runs the server in the foreground."""
        raise NotImplementedError

    def answers(self) -> bool:
        """Return whether the server is ready for clients; may raise OSError."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """Where clients find it."""
        raise NotImplementedError

    # What a test uses.

    @property
    def home(self) -> Path:
        """The server's own directory, there after the first start."""
        assert self.directory is not None, "not started yet"
        return self.directory

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1, known after the first start."""
        assert self._port is not None, "not started yet"
        return self._port

    @property
    def pid(self) -> int:
        """The server's process, for tests that send it other signals."""
        assert self.process is not None, "not started yet"
        return self.process.pid

    @property
    def pids(self) -> list[int]:
        """The processes to stop for its end."""
        return [self.pid]

    @property
    def running(self) -> bool:
        """Whether the process exists; it may be paused."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> Server:
        """Start, and return when clients are answered; raise NotInstalled or DidNotStart."""
        if self.running:
            return self
        first = self.process is None
        if first:
            self._make_home()
            self._port = self._wanted_port or free_port()
            self.prepare()
            if not self.detached:
                at_exit(self.close)
        for attempt in range(3):
            if attempt:
                self._port = free_port()
            try:
                self._launch()
                return self
            except DidNotStart:
                # Somebody may have taken the port meanwhile. Later starts keep it: clients know it.
                if not first or self._wanted_port or attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """Ask the server to end and wait for it; the data stays."""
        if not self.running:
            return
        self.resume()
        self._signal(self.stop_signal, with_children=False)
        try:
            self._wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the server as a crash would (SIGKILL), and wait until it is gone."""
        if self.running:
            self._signal(signal.SIGKILL)
            self._wait(STOP_TIMEOUT)

    def restart(self) -> None:
        """Stop and start again, on the same port and data."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Stop all its processes where they are (SIGSTOP): it is there but does not answer."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the server and remove its directory."""
        self.stop()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # How.

    def as_user(self) -> list[str]:
        """Return the prefix of a command that is to run as the server's user."""
        if self.user is None or os.geteuid() != 0:
            return []
        user = self.user
        return [find_program("setpriv"), f"--reuid={user}", f"--regid={user}", "--init-groups"]

    def give_to_user(self, path: Path) -> None:
        """Let the server's user own `path`."""
        if self.user is not None and os.geteuid() == 0:
            shutil.chown(path, self.user)

    def _make_home(self) -> None:
        if self.directory is None:
            self.directory = scratch_directory()
        self.directory = self.directory.resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o711)

    def _launch(self) -> None:
        command = self.command()
        if not self.detached:
            command = mortal(command, self.orphan_signal)
        log = self.home / "log"
        with log.open("ab") as output:
            # A session of its own: Ctrl-C in the terminal is for the tests, not for the server.
            self.process = launch(
                [*self.as_user(), *command],
                cwd=self.home,
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        give_up = time.monotonic() + START_TIMEOUT
        while self.running and time.monotonic() < give_up:
            try:
                if self.answers():
                    return
            except OSError:
                pass
            time.sleep(0.02)
        self.kill()
        end_of_log = log.read_text(errors="replace")[-2000:]
        raise DidNotStart(f"{self.name} on port {self.port} did not start:\n{end_of_log}")

    def _signal(self, number: signal.Signals, with_children: bool = True) -> None:
        if not self.running:
            return
        for pid in [self.pid, *(children_of(self.pid) if with_children else ())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _wait(self, timeout: float) -> None:
        assert self.process is not None
        self.process.wait(timeout)


def children_of(pid: int) -> list[int]:
    """Return the direct children: PostgreSQL runs one process per session, each a group."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def run_quietly(command: list[str], cwd: Path) -> None:
    """Run a set-up program; show what it said only if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise DidNotStart(f"{command[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
