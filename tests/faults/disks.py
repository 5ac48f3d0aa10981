"""A disk for a server, in memory, that can be full; it needs root, and nobody else sees it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.launching import scratch_directory

CLONE_NEWNS = 0x20000
ROOM = 2 << 30  # bytes


@cache
def may_mount() -> bool:
    """Let this process, and what it starts from now on, see mounts of its own; False: it may not.

    To be called before there are other threads.
    """
    if ctypes.CDLL(None).unshare(CLONE_NEWNS):
        return False
    return subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True).returncode == 0


class Disk:
    """The disk that is mounted on `path`."""

    def __init__(self) -> None:
        self.path: Path = scratch_directory()

    def fill(self) -> None:
        """Leave no room but what is taken, which may grow until that is done."""
        for _ in range(100):
            with suppress(subprocess.CalledProcessError):
                self._mount(f"remount,size={shutil.disk_usage(self.path).used}")
                return
        raise OSError(f"{self.path} grows too fast")

    def empty(self) -> None:
        """Have room again."""
        self._mount(f"remount,size={ROOM}")

    @contextmanager
    def mounted(self) -> Iterator[Disk]:
        self._mount(f"size={ROOM},mode=711")
        try:
            yield self
        finally:
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)

    def _mount(self, options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.path)]
        subprocess.run(command, check=True, capture_output=True)
