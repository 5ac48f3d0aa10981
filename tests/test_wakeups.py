"""Wake-ups that are lost on purpose; `python -m tests.wakeups` loses more."""

from __future__ import annotations

import statistics

import pytest

from tests.wakeups import KINDS, MOST, lost


@pytest.mark.slow
def test_no_waiter_waits_long_for_a_free_lock_whatever_is_lost(processes, redis_url):
    found = lost(processes, redis_url, times=300, seed=1)

    assert set(found) == {*KINDS}
    # Who hears that messages may be lost looks at once.
    assert statistics.median(found["subscription killed"]) < 500
    assert {kind: max(gaps) for kind, gaps in found.items() if max(gaps) > MOST * 1000} == {}
