"""Worker processes for tests: real ones, with a deadline, that can be killed and stopped.

A test starts them with the fixture `processes`, by the dotted name of a function:

    totals = processes.run("tests.workers:count", count=8, name="a", times=50)  # all at once
    holder = processes.start("tests.workers:hold", name="a")
    assert holder.read() == "holding"                      # what the function said with say()
    holder.tell("release")                                 # what it gets from hear()
    holder.kill(); holder.pause(); holder.resume(); holder.result()

The function gets the keyword arguments and returns what JSON can carry.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import queue
import signal
import sys
import tempfile
import threading
from typing import Any

from tests import nursery

DEADLINE = 120.0


class WorkerFailed(AssertionError):
    """The worker ended with an error or too late; the message has what it wrote to stderr."""


# In the worker.


def say(value: Any) -> None:
    """Tell the test something before the function returns."""
    print(json.dumps({"said": value}), flush=True)


def hear() -> Any:
    """Wait for what the test tells this worker."""
    return json.loads(sys.stdin.readline())


def main(dotted: str, arguments: str, deadline: str) -> None:
    """Say that it is there, wait for the start, call the function, print what it returns."""
    module, _, function = dotted.partition(":")
    work = getattr(importlib.import_module(module), function)
    say("ready")
    hear()
    # No worker outlives its deadline, and it says where it hung.
    faulthandler.dump_traceback_later(float(deadline), exit=True)
    print(json.dumps({"result": work(**json.loads(arguments))}), flush=True)


# In the test.


class Worker:
    """One process; every wait for it has a deadline."""

    def __init__(
        self, dotted: str, arguments: dict[str, Any], *, deadline: float, env: dict[str, str]
    ) -> None:
        self.dotted = dotted
        self.errors = tempfile.TemporaryFile("w+")
        self.process = nursery.fork(
            {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", **env},
            [dotted, json.dumps(arguments), str(deadline)],
            stderr=self.errors.fileno(),
        )
        self.deadline = deadline
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_lines, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def read(self, within: float = 30.0) -> Any:
        """Return what the worker says next."""
        line = self._next(within)
        if "said" not in line:
            raise WorkerFailed(f"{self.dotted} returned {line} without a word")
        return line["said"]

    def result(self, within: float | None = None) -> Any:
        """Return what the function returned, once the process has ended."""
        line: dict[str, Any] = {}
        while "result" not in line:
            line = self._next(self.deadline if within is None else within)
        self.process.wait(30)
        return line["result"]

    def tell(self, value: Any) -> None:
        """Send something to the worker, which gets it from `hear()`."""
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def wait(self, within: float = 30.0) -> int:
        """Wait until the process has ended; return its exit code (-9: it was killed)."""
        return self.process.wait(within)

    def kill(self) -> None:
        """End the process as a crash would (SIGKILL), and wait until it is gone."""
        self.process.kill()
        self.process.wait(10)

    def pause(self) -> None:
        """Stop the process where it is (SIGSTOP)."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on (SIGCONT)."""
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the process if it still runs, and free its pipes."""
        self.kill()
        self._reader.join(10)
        if self._reader.is_alive():  # to close what it reads would hang
            raise WorkerFailed(f"a child of {self.dotted} outlived it")
        for file in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(BrokenPipeError):
                file.close()

    def _read_lines(self) -> None:
        for line in self.process.stdout:
            if line.startswith("{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def _next(self, within: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=within)
        except queue.Empty:
            raise WorkerFailed(f"{self.dotted} said nothing for {within} s") from None
        if line is None:
            self.process.wait(10)
            self.errors.seek(0)
            raise WorkerFailed(
                f"{self.dotted} ended with {self.process.returncode}:\n{self.errors.read()[-4000:]}"
            )
        return line


class Processes:
    """The worker processes of one test."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []

    def start(
        self,
        dotted: str,
        /,
        *,
        deadline: float = DEADLINE,
        env: dict[str, str] | None = None,
        **arguments: Any,
    ) -> Worker:
        """Start one worker and return it as soon as its function runs."""
        return self.start_many(dotted, count=1, deadline=deadline, env=env, **arguments)[0]

    def start_many(
        self,
        dotted: str,
        /,
        *,
        count: int,
        deadline: float = DEADLINE,
        env: dict[str, str] | None = None,
        **arguments: Any,
    ) -> list[Worker]:
        """Start `count` workers whose functions begin at the same moment."""
        started = [
            Worker(dotted, arguments, deadline=deadline, env=env or {}) for _ in range(count)
        ]
        self.workers += started
        for worker in started:
            assert worker.read(within=60) == "ready"
        for worker in started:
            worker.tell("go")
        return started

    def run(
        self,
        dotted: str,
        /,
        *,
        count: int,
        deadline: float = DEADLINE,
        env: dict[str, str] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Run `count` workers at once and return their results."""
        started = self.start_many(dotted, count=count, deadline=deadline, env=env, **arguments)
        return [worker.result() for worker in started]

    def close(self) -> None:
        """Kill whatever still runs."""
        for worker in self.workers:
            worker.close()
