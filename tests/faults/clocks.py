"""The wall clock of servers, which a library of ours, loaded before theirs, sets."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from tests.launching import find_program, run_quietly, scratch_directory

SOURCE = Path(__file__).with_name("clock.c")
HOUR = 3600


class ServerClock:
    """One clock for all servers that are started with `env`; it needs a C compiler."""

    def __init__(self) -> None:
        home = scratch_directory()
        library, ahead = home / "clock.so", home / "ahead"
        run_quietly(
            [find_program("gcc", "cc"), "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)],
            home,
        )
        ahead.write_bytes(bytes(8))
        with ahead.open("r+b") as file:
            self._ahead = mmap.mmap(file.fileno(), 8)
        self.env = {"LD_PRELOAD": str(library), "DISTLOCK_CLOCK": str(ahead)}

    def step(self, hours: int) -> None:
        """Set the clock forward, or back."""
        (ahead,) = struct.unpack("l", self._ahead)
        self._ahead[:] = struct.pack("l", ahead + hours * HOUR)
