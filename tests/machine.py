"""What this machine has for the tests: programs, Pythons, virtual environments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

from tests.launching import ROOT

VENVS = ROOT / ".venv-tests"
PIP = ("-qq", "--disable-pip-version-check")
POLICY = Path("/usr/sbin/policy-rc.d")
# Run by a Python to see whether it is what its name says, and can make a virtual environment.
ASK = """import ensurepip, sqlite3, ssl, sys, venv
print('%d.%d' % sys.version_info[:2], sys.executable, sep='\\n')"""


@dataclass(frozen=True)
class Pair:
    """A Python and a release of Django: what one virtual environment has."""

    version: str
    django: str  # a release, or "upstream"
    # "lowest" or "upstream": the versions of the other packages, in tests/<others>.txt.
    others: str = ""

    def __str__(self) -> str:
        return f"{self.version}-{self.django}"

    @property
    def bin(self) -> Path:
        """Where its programs are."""
        return VENVS / str(self) / "bin"


def has(*programs: str) -> bool:
    """Return whether all of these programs are here."""
    path = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin"
    return all(shutil.which(program, path=path) for program in programs)


def missing_packages(wanted: Container[str]) -> list[str]:
    """Return the Debian packages of what is not here: servers, a browser, a compiler."""
    client = any(_works("pkg-config", "--exists", name) for name in ("libmariadb", "mysqlclient"))
    postgresql = has("postgres") or [*Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    zookeeper = Path("/usr/share/java/zookeeper.jar").exists()
    font = Path("/usr/share/fonts/truetype/nanum").is_dir()
    needs: Sequence[tuple[str, object, Sequence[str]]] = (
        ("", _asked(sys.executable), ["python3-venv"]),
        # Tests that kill a server start one of their own, even if the suite's is given by a URL.
        ("", has("redis-server") or has("valkey-server"), ["redis-server"]),
        ("", has("openssl"), ["openssl"]),  # makes certificates
        ("etcd", has("etcd"), ["etcd-server"]),
        ("zookeeper", has("java"), ["default-jre-headless"]),
        ("zookeeper", zookeeper, ["zookeeper"]),
        ("mysql", has("gcc"), ["gcc", "libc6-dev"]),
        ("mysql", _headers(), ["python3-dev"]),
        ("mysql", client, ["libmariadb-dev", "pkg-config"]),
        ("mysql", has("mariadbd", "mariadb-install-db"), ["mariadb-server-core", "mariadb-client"]),
        ("postgresql", postgresql, ["postgresql"]),
        ("chromium", has("chromium", "chromedriver"), ["chromium", "chromium-driver"]),
        ("chromium", font, ["fonts-nanum"]),
        ("gettext", has("msgfmt"), ["gettext"]),
        ("curl", has("curl"), ["curl"]),  # the quickstart asks its site with it
    )
    return [
        package
        for need, here, packages in needs
        if not here and (not need or need in wanted)
        for package in packages
    ]


def install(packages: Sequence[str], log: Path) -> bool:
    """Install Debian packages; return whether that worked, or why not on stderr."""
    if not has("apt-get"):
        say = "There is no apt-get here; please install the equivalent of:"
    elif os.geteuid() and not has("sudo"):
        say = "Neither root nor sudo; please run: apt-get install"
    else:
        return _apt_get(packages, log)
    print(say, *packages, file=sys.stderr)
    return True  # the tests say what is missing


def _apt_get(packages: Sequence[str], log: Path) -> bool:
    root = [] if os.geteuid() == 0 else ["sudo"]
    quiet = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    # The packages must not start services of their own beside ours.
    forbidden = not POLICY.exists()
    if forbidden:
        policy = log.with_suffix(".policy")
        policy.write_text("#!/bin/sh\nexit 101\n")
        subprocess.run([*root, "install", "-m", "755", policy, POLICY])
    try:
        subprocess.run([*quiet, "update"])
        with log.open("w") as file:
            command = [*quiet, "install", "-y", "--no-install-recommends", *packages]
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
    finally:
        if forbidden:
            subprocess.run([*root, "rm", "-f", POLICY])
    if done.returncode:
        print(*log.read_text().splitlines()[-20:], sep="\n", file=sys.stderr)
    return done.returncode == 0


@cache
def find_python(version: str) -> str | None:
    """Return the path of a working Python of this version, from PATH or pyenv."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [shutil.which(name), f"/usr/bin/{name}", f"/usr/local/bin/{name}"]
    for candidate in [*found, *sorted(pyenv.glob(f"versions/*/bin/{name}"))]:
        if candidate and (asked := _asked(str(candidate))) and asked[0] == version:
            return asked[1]
    return None


class Environments:
    """The virtual environments of this checkout, kept from run to run."""

    def __init__(self, run: Callable[..., bool], *, compiler: bool) -> None:
        """`run` runs a command; without `compiler`, mysqlclient is left out."""
        self._run = run
        self._compiler = compiler
        self._uv = threading.Lock()
        self._locks: defaultdict[Pair, threading.Lock] = defaultdict(threading.Lock)

    def make(self, pair: Pair, out: object = None) -> bool:
        """Make it, or keep it if what it was made from is the same; return whether it is there."""
        with self._locks[pair]:
            venv, python = pair.bin.parent, find_python(pair.version)
            stamp = venv / "stamp"
            everything = self._requirements(pair)
            # mysqlclient has to be compiled: not for those who only try SQLite and Redis.
            some = [line for line in everything if not line.startswith("mysqlclient")]
            wanted = everything if self._compiler else some
            made = stamp.read_text() if stamp.exists() else ""
            if made in ("\n".join([str(python), *lines]) for lines in (wanted, everything)):
                return True
            print(f"\n=== Virtual environment {pair}", file=out, flush=True)  # type: ignore[call-overload]
            VENVS.mkdir(exist_ok=True)
            requirements = VENVS / f"{pair}.txt"
            requirements.write_text("\n".join(wanted))
            if not any(
                make(python, venv, requirements, out) for make in (self._by_uv, self._by_pip)
            ):
                return False
            stamp.write_text("\n".join([str(python), *wanted]))
            return True

    def _by_uv(self, python: object, venv: Path, requirements: Path, out: object) -> bool:
        """Make it in a quarter of pip's time; False if uv, or an index, cannot be had here."""
        home = VENVS / "uv"
        uv = home / "bin/uv"
        with self._uv:
            if not uv.exists() and self._run(python, "-m", "venv", "--clear", home, out=out):
                self._run(home / "bin/python", "-m", "pip", *PIP, "install", "uv", out=out)
        common = ("-q", "--system-certs", "--python")
        return (
            uv.exists()
            and self._run(uv, "venv", "--clear", "--seed", *common, python, venv, out=out)
            and self._run(uv, "pip", "install", *common, venv, "-r", requirements, out=out)
        )

    def _by_pip(self, python: object, venv: Path, requirements: Path, out: object) -> bool:
        pip = [venv / "bin/python", "-m", "pip", *PIP]
        return self._run(python, "-m", "venv", "--clear", venv, out=out) and self._run(
            *pip, "install", "--no-compile", "-r", requirements, out=out
        )

    def _requirements(self, pair: Pair) -> list[str]:
        lines = (ROOT / "requirements.txt").read_text().splitlines()
        if pair.others:
            lines += (ROOT / f"tests/{pair.others}.txt").read_text().splitlines()
        # The newest of today: an environment of yesterday is made anew.
        newest = pair.django == "upstream"
        return [*lines, f"# {date.today()}" if newest else f"Django~={pair.django}.0"]


def _asked(python: str) -> list[str] | None:
    """Return the version and the path of a Python that works."""
    try:
        done = subprocess.run([python, "-c", ASK], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.split("\n") if done.returncode == 0 else None


def _headers() -> bool:
    """Return whether Python.h is there for Debian's own Python."""
    debians = "/usr/bin/python3"
    if not os.access(debians, os.X_OK):
        return True
    look = "import os, sysconfig as s; assert os.path.exists(s.get_path('include') + '/Python.h')"
    return _works(debians, "-c", look)


def _works(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
