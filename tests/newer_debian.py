"""Programs of a newer Debian than this machine's, unpacked into a directory of ours.

apt gets lists, a cache and a source of its own here, and installs nothing: the machine stays as it
is. A program is started through the loader that was unpacked with it, on the libraries beside it.
"""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from tests.launching import ROOT, NotInstalled, find_program

RELEASE = "sid"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
CACHE = ROOT / ".venv-tests"  # kept from run to run, beside the virtual environments


def unpacked(package: str) -> Path:
    """Return the directory with the package and all it depends on; download it the first time."""
    target = CACHE / f"{RELEASE}-{package}"
    CACHE.mkdir(exist_ok=True)
    with (CACHE / f"{package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Lanes of one run need it at the same time.
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as work:
                _unpack(package, Path(work)).rename(target)
    return target


def started_by_own_loader(root: Path, program: str) -> list[str]:
    """Return the beginning of the command line that runs a program of `unpacked`."""
    (loader,) = root.glob("usr/lib/*/ld-linux-*.so.*")
    return [str(loader), "--library-path", str(loader.parent), str(root / program)]


def _unpack(package: str, work: Path) -> Path:
    root = work / "root"
    for directory in ("root", "lists/partial", "cache/archives/partial"):
        (work / directory).mkdir(parents=True)
    (work / "status").touch()  # Nothing is installed: apt fetches libc6, too.
    (work / "sources.list").write_text(_source())
    settings = {
        "Dir::State": work,
        "Dir::State::lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache": work / "cache",
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::Etc::preferencesparts": "-",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in settings.items())]
    _run([*apt, "update"])
    _run([*apt, "install", "--download-only", "--no-install-recommends", "--yes", package])
    for archive in sorted((work / "cache/archives").glob("*.deb")):
        if "perl" not in archive.name:  # for the package's scripts, which nobody runs
            _run(["dpkg-deb", "--extract", str(archive), str(root)])
            archive.unlink()
    return root


def _source() -> str:
    """Return the line of a sources.list: this machine's own mirror, with the newer release."""
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    listed = _run(
        ["apt-get", "indextargets", "--format=$(REPO_URI) $(RELEASE) $(COMPONENT)"]
        + ["Created-By: Packages"]
    )
    for line in listed.splitlines():
        mirror, release, component = line.split()
        if component == "main" and release in (codename, "stable", "testing", "unstable", RELEASE):
            key = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
            return f"deb {key}{mirror} {RELEASE} main\n"
    raise NotInstalled("apt has no mirror of Debian")


def _run(command: list[str]) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    program = find_program(command[0])
    done = subprocess.run(
        # A mirror that does not answer is given up.
        ["timeout", "300", program, *command[1:]],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise NotInstalled(f"{' '.join(command)}: {done.stderr[-1000:]}")
    return done.stdout
