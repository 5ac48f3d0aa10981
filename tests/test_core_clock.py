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
