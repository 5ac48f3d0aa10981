"""Processes that run commands under locks, and end them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand

from distlock_app import locked_command


@locked_command("terminated:{number}", wait=5)
class Terminated(BaseCommand):
    """Take other locks for ever, inside of its own."""

    requires_system_checks = []
    told = -1  # a pipe to the test

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("number", type=int)
        parser.add_argument("--seconds", type=float, default=60.0)

    def handle(self, *args: Any, **options: Any) -> None:
        os.write(self.told, b"x")
        end = time.monotonic() + options["seconds"]
        while time.monotonic() < end:
            time.sleep(0.001)


def terminate_children(*, number: int, seed: int) -> dict[str, int]:
    """Fork children that run the command, terminate each at a random moment; return their ends."""
    chance = random.Random(seed)
    ends: Counter[str] = Counter()
    for child in range(number):
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            # Every third has nearly nothing to do, and may get the signal in its release.
            _run_until_terminated(child, told, seconds=60.0 if child % 3 else 0.02)
        os.close(told)
        for _ in range(1 + child % 2):  # every second has its lock, however busy the machine is
            os.read(ready, 1)
        time.sleep(chance.uniform(0.0, 0.06))
        os.kill(pid, signal.SIGTERM)
        ends[str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))] += 1
        os.close(ready)
    return dict(ends)


def _run_until_terminated(child: int, told: int, *, seconds: float) -> None:
    code = 99
    try:
        os.write(told, b"x")
        Terminated.told = told
        call_command(Terminated(), str(child), seconds=seconds)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 98
    finally:
        os._exit(code)


@locked_command("forking", using="locmem")
class Forking(BaseCommand):
    """Fork a child that would survive an exception, and terminate it."""

    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> str:
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(told, b"x")
                time.sleep(60)
            finally:
                os._exit(0)
        os.read(ready, 1)
        os.kill(pid, signal.SIGTERM)
        return str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def terminate_child_of_command() -> str:
    """Return how a child ends that a locked command forked."""
    return str(call_command(Forking()))
