"""What drivers have in common: the code of an error; how long SQLite waits for its file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The longest wait that SQLite and PostgreSQL accept, in milliseconds: 24 days.
LONGEST_MS = 2**31 - 1

# Why SQLite did not write: another connection has the file, or has written since our transaction
# read it, which then gets no newer by waiting. Python 3.10 cannot tell the second from the first.
FILE_LOCKED, OLD_SNAPSHOT = "SQLITE_BUSY", "SQLITE_BUSY_SNAPSHOT"


def code_of(error: BaseException) -> Any:
    """Return PostgreSQL's SQLSTATE, MySQL's number, or FILE_LOCKED or OLD_SNAPSHOT for SQLite.

    Else what the error says first. It may be Django's, the driver's, or one of our own
    statements' that has a `code`.
    """
    cause = error.__cause__ or error
    first = next(iter(cause.args), None)
    if isinstance(first, int):  # MySQL's; PyMySQL has a sqlstate, too
        return first
    if str(first).startswith("database is locked"):
        old = getattr(cause, "sqlite_errorname", "") == OLD_SNAPSHOT
        return OLD_SNAPSHOT if old else FILE_LOCKED
    # Our own, psycopg 3, psycopg 2.
    codes = (getattr(cause, name, None) for name in ("code", "sqlstate", "pgcode"))
    return next(filter(None, codes), first)


@contextmanager
def waiting_for_file(cursor: Any, wait: float | None) -> Iterator[None]:
    """Let SQLite wait so many seconds (None: forever) for a file that others write to."""
    cursor.execute("PRAGMA busy_timeout")
    before = cursor.fetchone()[0]
    wait_ms = LONGEST_MS if wait is None else min(math.ceil(wait * 1000), LONGEST_MS)
    cursor.execute(f"PRAGMA busy_timeout = {wait_ms}")
    try:
        yield
    finally:
        cursor.execute(f"PRAGMA busy_timeout = {before}")
