"""The code that a database gave for an error, whichever driver reported it."""

from __future__ import annotations

from typing import Any


def code_of(error: BaseException) -> Any:
    """Return the SQLSTATE of PostgreSQL, or the number of MySQL; else what the error says first.

    The error may be Django's, the driver's, or one of our own statements' that has a `code`.
    """
    cause = error.__cause__ or error
    first = next(iter(cause.args), None)
    if isinstance(first, int):  # MySQL's; PyMySQL has a sqlstate, too
        return first
    # Our own, psycopg 3, psycopg 2; what is left is SQLite.
    codes = (getattr(cause, name, None) for name in ("code", "sqlstate", "pgcode"))
    return next(filter(None, codes), first)
