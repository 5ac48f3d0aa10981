"""The app loads, locks and waits without what only POSIX systems have, as on Windows."""

from __future__ import annotations

import subprocess
import sys

import pytest
from django.conf import settings

from tests.launching import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True, databases=["default", "locks"]),
]
STORES = {
    "cluster": "cluster_urls",
    "quorum": "redlock_urls",
    "etcd": "etcd_url",
    "zookeeper": "zookeeper_url",
}


def take_locks(aliases):
    command = [sys.executable, "-W", "error", "-m", "tests.without_posix", *aliases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == f"done: {' '.join(aliases)}", done.stderr


def test_in_memory_on_redis_and_in_a_database():
    take_locks([alias for alias in settings.DISTLOCK if alias not in ("dummy", *STORES)])


@pytest.mark.once
@pytest.mark.parametrize("alias", STORES)
def test_on_other_stores(alias, request):
    request.getfixturevalue(STORES[alias])
    take_locks([alias])
