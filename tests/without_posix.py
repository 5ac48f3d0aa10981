"""Takes locks in a process that lacks what Windows lacks: fork(), poll(), most signals.

    python -m tests.without_posix ALIAS...

It removes names before it loads the app, which shows that the app does without them. What else is
different on Windows is not tested.
"""

from __future__ import annotations

import asyncio
import io
import os
import select
import selectors
import signal
import stat
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from time import sleep

import django

# These adapt to their system as they are loaded.
for module in (
    *("MySQLdb", "django_redis", "kazoo.client", "multiprocessing.util"),
    *("psycopg", "redis", "subprocess"),
):
    with suppress(ImportError):
        import_module(module)

LACKING = {
    os: "eventfd fork forkpty getegid geteuid getgid getloadavg getpgid getpgrp getsid getuid"
    " killpg mkfifo openpty pidfd_open pipe2 posix_spawn register_at_fork sched_getaffinity"
    " setpgid setsid tcgetpgrp ttyname uname wait wait3 wait4 waitid ctermid",
    select: "epoll poll POLLIN POLLOUT POLLERR POLLHUP",
    signal: "SIGALRM SIGCHLD SIGHUP SIGKILL SIGPIPE SIGQUIT SIGUSR1 SIGUSR2 SIGXFSZ alarm"
    " pthread_kill pthread_sigmask setitimer siginterrupt sigwait",
}
MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")


def become_like_windows() -> None:
    """Remove names; let select() take sockets only, and event loops have no readers."""
    for module, names in LACKING.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    selectors.DefaultSelector = selectors.SelectSelector  # type: ignore[assignment, misc]
    real = select.select

    def sockets_only(readers, writers, others, seconds=None):
        files = [*readers, *writers, *others]
        assert files, "select() without a socket"
        numbers = [file if isinstance(file, int) else file.fileno() for file in files]
        assert all(stat.S_ISSOCK(os.fstat(number).st_mode) for number in numbers)
        return real(readers, writers, others, seconds)

    def add_reader(*_):
        raise NotImplementedError  # as the loop that asyncio.run() makes on Windows

    select.select = sockets_only
    for name in "add_reader", "remove_reader":
        setattr(asyncio.SelectorEventLoop, name, add_reader)


def take_turns(alias: str) -> None:
    """Hold a lock until after its ttl while a thread and a task wait for it."""
    from distlock_app import Lock

    lock = Lock("without-posix", using=alias, ttl=3.0, wait=30)
    done = []

    def wait() -> None:
        with lock:
            done.append("thread")

    async def wait_in_loop() -> None:
        async with lock:
            done.append("task")

    with ThreadPoolExecutor(2) as pool:
        with lock as hold:
            waiting = [pool.submit(wait), pool.submit(lambda: asyncio.run(wait_in_loop()))]
            sleep(3.5)
            assert not hold.lost
            assert not done
        for one in waiting:
            one.result(30)
    assert sorted(done) == ["task", "thread"], done


def call_commands(aliases: list[str]) -> None:
    """Look at the locks, and find that no program can be run."""
    from django.core.management import CommandError, call_command

    from distlock_app import Lock

    for alias in aliases:
        out = io.StringIO()
        with Lock("shown", using=alias):
            call_command("distlock", "list", "--using", alias, stdout=out)
            call_command("distlock", "doctor", "--using", alias, stdout=out)
        assert "shown" in out.getvalue(), out.getvalue()
    with suppress(CommandError):
        call_command("distlock", "run", "a", "--", "true")
        raise AssertionError("distlock run went on without fork()")


def test_a_backend() -> None:
    """Run the part of the backends' suite about processes, which skips what needs fork()."""
    from distlock_app.testing import LockBackendContract
    from distlock_app.testing.processes import ProcessContract

    class OnLocMem(LockBackendContract, unittest.TestCase):
        alias = "locmem"

    result = unittest.TestResult()
    tests = [name for name in vars(ProcessContract) if name.startswith("test_")]
    unittest.TestSuite(map(OnLocMem, tests)).run(result)
    assert result.wasSuccessful(), result.errors


def main(aliases: list[str]) -> None:
    become_like_windows()
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()
    for alias in aliases:
        take_turns(alias)
    call_commands(aliases)
    test_a_backend()
    print("done:", *aliases)


if __name__ == "__main__":
    main(sys.argv[1:])
