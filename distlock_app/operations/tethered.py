"""A script that runs a program and kills it when the process that started the script dies.

python tethered.py PARENT FD PROGRAM ARGUMENTS: PARENT is that process's id, FD the reading end of
a pipe of which it alone keeps the writing end. Needs nothing of this package: it starts quickly.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
# What a shell answers for a command that it cannot run, or not find.
EX_NOT_EXECUTABLE, EX_NOT_FOUND = 126, 127


def main(parent: int, fd: int, program: list[str]) -> int:
    """Become `program`; return the exit code of a shell if that is not possible."""
    # Python's own dispositions, which the program would inherit.
    for number in signal.SIGPIPE, signal.SIGXFSZ:
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before that
            return 128 + signal.SIGKILL
        os.close(fd)
    elif os.fork() == 0:
        kill_at_the_end_of(fd)
    try:
        os.execvp(program[0], program)
    except (FileNotFoundError, ValueError):  # or it has no name
        return EX_NOT_FOUND
    except OSError:
        return EX_NOT_EXECUTABLE


def kill_at_the_end_of(fd: int) -> None:
    """Kill the parent, which becomes the program, when no process can write to the pipe."""
    program = os.getppid()
    for number in signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)
    os.read(fd, 1)
    if os.getppid() == program:  # otherwise it has exited
        os.kill(program, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
