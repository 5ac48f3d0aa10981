"""A Celery app for its gevent pool: one task that counts in a file, until its lock is renewed."""

from __future__ import annotations

import os
from pathlib import Path

import django
from celery import Celery

from distlock_app import current_hold, locked
from tests.engines import renewed

django.setup()
url = os.environ["DISTLOCK_TEST_REDIS_URL"]
app = Celery("tests", broker=url, backend=url)


@app.task(name="count")
@locked("count", ttl=3, wait=60, using="redis")
def count(path: str) -> bool:
    """Raise the number in the file, as unprotected as can be; return whether the lock was lost."""
    value = int(Path(path).read_text())
    renewed(current_hold())
    Path(path).write_text(str(value + 1))
    return current_hold().lost
