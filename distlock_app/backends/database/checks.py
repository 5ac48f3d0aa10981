"""Checks of the lock table: is it there, and does every process see the same one?"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

from django.conf import settings
from django.core.checks import CheckMessage, Error, Info, Warning
from django.db import DEFAULT_DB_ALIAS, connections

from ...claims import Claim
from ..sessions.one_server import check_one_server, lends_by_transaction
from .connections import Session
from .sql import Generic
from .sql.cursors import PooledCursor
from .sql.postgresql import PostgreSQL
from .sql.rows import Rows

# Time zones differ by quarters of an hour, clocks hardly by so much.
ZONE = timedelta(minutes=10)

# A claim without a row: its release shows whether the table can be written, as on no replica.
NOBODY = Claim(name="", key="", owner="", ttl=1, holder="")

# That of a table on MySQL or MariaDB, if it knows no transactions.
ENGINE = """
    SELECT engine
      FROM information_schema.tables JOIN information_schema.engines USING (engine)
     WHERE table_schema = DATABASE() AND table_name = %s AND transactions <> 'YES'"""


def check_sharing(alias: str, using: str) -> Iterator[CheckMessage]:
    """Warn if other data is in the same SQLite file, unless this is a project in development."""
    ours = connections[using]
    names = [database["NAME"] for database in connections.settings.values()]
    shared = using == DEFAULT_DB_ALIAS or names.count(ours.settings_dict["NAME"]) > 1
    if ours.vendor == "sqlite" and shared and not settings.DEBUG:
        yield Warning(
            f"DISTLOCK[{alias!r}] keeps its locks in the same SQLite file as other data.",
            hint="A lock waits for every transaction that writes, and cannot be taken inside"
            " one. Add a database file for locks to DATABASES and set it as LOCATION.",
            id="distlock_app.W011",
        )


def check_table(alias: str, session: Session) -> list[CheckMessage]:
    """Ask the database for the lock table."""
    using, dialect = session.wrapper.alias, session.dialect
    if dialect.table_name not in session.wrapper.introspection.table_names():
        return [
            Error(
                f"DISTLOCK[{alias!r}]: the database {using!r} has no lock table.",
                hint=f"Run: manage.py migrate distlock_app --database={using}",
                id="distlock_app.E012",
            )
        ]
    if dialect.locks_rows:
        dialect.release(session.cursor, NOBODY)
    found = [*check_generic(alias, session), *check_pooler(alias, session)]
    return [*found, *check_engine(alias, session), *check_one_server(alias, using)]


def check_pooler(alias: str, session: Session) -> Iterator[CheckMessage]:
    """Report a pooler that lends sessions by the transaction, if the settings do not name it."""
    using, known = session.wrapper.alias, isinstance(session.cursor, PooledCursor)
    if isinstance(session.dialect, PostgreSQL) and not known and lends_by_transaction(using):
        yield Error(
            f"DISTLOCK[{alias!r}]: {using!r} is behind a transaction pooler: statements may"
            " fail or hang, and waiters poll.",
            hint="Set DISABLE_SERVER_SIDE_CURSORS in DATABASES to True, or QUEUE in DISTLOCK to 0.",
            id="distlock_app.E018",
        )


def check_engine(alias: str, session: Session) -> Iterator[CheckMessage]:
    """Report a table without transactions on MySQL or MariaDB, such as MyISAM's."""
    if session.wrapper.vendor != "mysql":
        return
    with session.wrapper.cursor() as cursor:
        cursor.execute(ENGINE, [session.dialect.table_name])
        row = cursor.fetchone()
    if row is not None:
        text = f"DISTLOCK[{alias!r}]: the lock table on {session.wrapper.alias!r} is in {row[0]},"
        yield Error(
            f"{text} without transactions: lock_in_transaction() and hold.pin() exclude nobody.",
            hint=f"ALTER TABLE {session.dialect.table_name} ENGINE = InnoDB",
            id="distlock_app.E019",
        )


def check_generic(alias: str, session: Session) -> Iterator[CheckMessage]:
    """Report what is missing and what may go wrong where Django generates the SQL."""
    if not isinstance(session.dialect, Generic):
        return
    server = session.wrapper.display_name
    yield Info(
        f"DISTLOCK[{alias!r}]: this app has no SQL for {server}; Django generates it."
        " Waiters poll, in no order of arrival.",
        hint="This was tested with PostgreSQL, MariaDB and SQLite as stand-ins.",
        id="distlock_app.I011",
    )
    now = Rows(session.wrapper).now()
    now = now if now.tzinfo else now.replace(tzinfo=timezone.utc)
    ahead = now - datetime.now(timezone.utc)
    if abs(ahead) > ZONE:
        text = f"DISTLOCK[{alias!r}]: the clock of {server} is {ahead / timedelta(minutes=1):+.0f}"
        hint = "Set the server or its sessions to UTC: summer time would end every lease at once."
        yield Warning(f"{text} minutes from UTC.", hint=hint, id="distlock_app.W012")
