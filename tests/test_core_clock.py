"""The clock of leases and waits is one, and goes on while the machine is suspended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import ROOT

HOUR = 3600


def after_a_suspension(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program as after an hour's suspension, which CLOCK_BOOTTIME has counted.

    It is told by how much the two clocks differ without that hour: they do on a machine that was
    suspended. Skip the test if this machine lets nobody set such a clock.
    """
    if not hasattr(time, "CLOCK_BOOTTIME"):
        pytest.skip("no such clock")
    try:  # offsets count from the machine's own clock, and this one may have an offset already
        offsets = Path("/proc/self/timens_offsets").read_text().split()
    except OSError:
        pytest.skip("no clocks of a program's own")
    offset = int(offsets[offsets.index("boottime") + 1])
    namespace = ["--time", "--boottime", str(offset + HOUR)]
    ahead = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    # The second: with rights of its own, where we are not root.
    for unshare in (["unshare", *namespace], ["unshare", "--map-root-user", *namespace]):
        if subprocess.run([*unshare, "true"], capture_output=True).returncode == 0:
            return subprocess.run(
                [*unshare, sys.executable, "-W", "error", "-c", code, str(ahead)],
                cwd=ROOT,
                env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
                capture_output=True,
                text=True,
                timeout=120,
            )
    pytest.skip("no right to set the clocks of a program")


# A clock that is mixed up with the other is an hour off: what is held is lost at once, or never;
# what is waited for comes at once, or never.
HOLD_AND_WAIT = """
import django
django.setup()

import sys, threading, time
from distlock_app import Lock
from distlock_app.core.renewal import renewer
from distlock_app.primitives import timing

ahead = timing.monotonic() - time.monotonic() - float(sys.argv[1])
assert 3599 < ahead < 3601, ahead

hold = Lock("a", ttl=2, using="locmem").acquire()
time.sleep(2.5)  # it is renewed
assert 0 < hold.expires_in <= 2 and not hold.lost, hold

began = time.monotonic()

def take():
    with Lock("a", wait=20, using="locmem"):
        taken.append(time.monotonic())

taken = []
thread = threading.Thread(target=take)
thread.start()
time.sleep(0.3)
assert not taken
hold.release()
thread.join(20)
assert taken and taken[0] - began < 10

renewer.watch = lambda lease: None  # who would tell
unwatched = Lock("b", ttl=0.3, using="locmem").acquire()
time.sleep(0.5)
assert unwatched.lost
"""


def test_leases_and_waits_know_no_other_clock():
    ended = after_a_suspension(HOLD_AND_WAIT)

    assert ended.returncode == 0, ended.stderr


# As on a system without CLOCK_BOOTTIME, and as freezegun stops a clock: in each module that has it.
FROZEN = """
import sqlite3, sys, time
vars(time).pop("CLOCK_BOOTTIME", None)

import django
django.setup()

from distlock_app import Lock, LockTimeout
from distlock_app.backends.database.sql.sqlite import SQLite

real = time.monotonic
for module in [time, *(m for name, m in sys.modules.items() if name.startswith("distlock_app"))]:
    for name, value in list(vars(module).items()):
        if value is real:
            setattr(module, name, lambda: 0.0)

hold = Lock("a", using="locmem").acquire()
try:
    Lock("a", using="locmem").acquire(wait=0.1)
except LockTimeout:
    hold.release()

memory = "file:frozen?mode=memory&cache=shared"
writer, waiter = (sqlite3.connect(memory, uri=True, isolation_level=None) for _ in range(2))
writer.execute("CREATE TABLE t (n)")
writer.execute("BEGIN IMMEDIATE")
writer.execute("INSERT INTO t VALUES (1)")
try:
    SQLite.execute(None, waiter.cursor(), "UPDATE t SET n = :n", {"n": 2})
except sqlite3.OperationalError as error:
    assert "table is locked" in str(error)
    print("refused")
writer.close(), waiter.close()
"""


def test_a_wait_ends_though_a_test_has_frozen_the_clock():
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", FROZEN],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (ended.returncode, ended.stdout) == (0, "refused\n"), ended.stderr
