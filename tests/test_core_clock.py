"""The clock of leases and waits is one, and goes on while the machine is suspended."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.launching import ROOT

HOUR = 3600
# As after an hour in which the machine was suspended: CLOCK_BOOTTIME has counted it.
NAMESPACE = ["--time", "--boottime", str(HOUR)]


def after_a_suspension(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program; skip the test if this machine lets nobody set such a clock."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        pytest.skip("no such clock")
    # The second: with rights of its own, where we are not root.
    for unshare in (["unshare", *NAMESPACE], ["unshare", "--map-root-user", *NAMESPACE]):
        if subprocess.run([*unshare, "true"], capture_output=True).returncode == 0:
            return subprocess.run(
                [*unshare, sys.executable, "-W", "error", "-c", code],
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

import threading, time
from distlock_app import Lock, timing
from distlock_app.renewal import renewer

ahead = timing.monotonic() - time.monotonic()
assert 3599 < ahead < 3700, ahead

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
