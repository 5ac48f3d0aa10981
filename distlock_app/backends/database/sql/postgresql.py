"""The SQL of the lock table on PostgreSQL: one statement locks a row and takes it; its queue.

clock_timestamp(), never now(): the latter is the start of the transaction, which may have waited.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from ....claims import Busy, Claim, Grant
from ....primitives.drivers import code_of
from ....primitives.names import key_of, shown
from ....primitives.timing import Deadline
from ...sessions.link import ANSWER_WAIT
from ...sessions.pool import adapt_to_postgresql
from ...sessions.queues import ClaimKey
from .base import QUEUE_WAIT, ROW_WAIT, Cursor, Dialect, Named, Step, refused
from .cursors import PooledCursor, PostgreSQLCursor
from .statements import Statements

# The longest statement_timeout, in seconds: 24 days.
LONGEST_WAIT = 2_147_483.0

# For a session of our own. What else the server says while we wait would look like its answer, and
# a session that waits in a queue is to detect that its client has died. (Not on Windows.)
SETTINGS = f"""
    SET lock_timeout = '{ROW_WAIT}s';
    SET statement_timeout = '{QUEUE_WAIT}s';
    SET client_min_messages = error;
    SET tcp_keepalives_idle = 60;
    SET tcp_keepalives_interval = 10;
    SET default_transaction_isolation = 'read committed';
    DO $$ BEGIN
        PERFORM set_config('client_connection_check_interval', '2s', false);
    EXCEPTION WHEN OTHERS THEN NULL;
    END $$"""

# For a session that a pooler lends by the transaction.
BEGIN = f"""
    BEGIN ISOLATION LEVEL READ COMMITTED;
    SET LOCAL lock_timeout = '{ROW_WAIT}s';
    SET LOCAL statement_timeout = '{ANSWER_WAIT}s'"""


# To the savepoint of LOCK_ROW. Pgpool sends several statements at once to the primary alone, but a
# single ROLLBACK TO also to the replicas, which have no such savepoint.
UNDO = "ROLLBACK TO SAVEPOINT distlock; RELEASE SAVEPOINT distlock"


class PostgreSQL(Dialect):
    """One statement for anything: SELECT ... FOR UPDATE and its UPDATE travel together.

    The row lock is taken first, and a row that changed while we waited for it is read again
    before anything is decided (READ COMMITTED), as in four statements; three round trips less.
    """

    queues = True
    codec = "utf-8"  # of the database
    # Serialization failure, deadlock, lock timeout or NOWAIT.
    crowded = frozenset({"40001", "40P01", "55P03"})

    us_of = "(extract(epoch FROM {0}) * 1000000)::bigint"
    time_of = "'epoch'::timestamptz + {0}::bigint * interval '1 microsecond'"
    words = {
        "key": "key",
        "now": "clock_timestamp()",
        "greatest": "greatest",
        "in_ttl": "{now} + %(ttl_us)s::bigint * interval '1 microsecond'",
        "age_ago": "{now} - %(age_us)s::bigint * interval '1 microsecond'",
        "long_free": "{now} - {handover_us} * interval '1 microsecond'",
        "purged": "FOR UPDATE SKIP LOCKED",
        # A database has one set of advisory locks for the tables of all its schemas.
        "table_id": "'{table}'::regclass::oid::bigint",
    }
    TRY_QUEUE = "pg_try_advisory_lock(%(queue)s::bigint # {table_id})"
    JOIN = TRY_QUEUE + " OR owner <> '' OR expiry <= {long_free}"
    TAKE = """
        WITH locked AS MATERIALIZED (
            SELECT key, owner, expiry
              FROM {table}
             WHERE key = %(key)s
               FOR UPDATE
        ), seen AS MATERIALIZED (
            SELECT key,
                   owner = %(owner)s AS mine,
                   CASE WHEN owner = %(owner)s THEN true
                        WHEN owner <> '' AND expiry > {now} THEN false
                        ELSE {may} END AS free,
                   {expiry_us} - {now_us} AS left_us
              FROM locked
        ), taken AS (
            UPDATE {table} AS lock
               SET owner = %(owner)s, name = %(name)s, holder = %(holder)s,
                   fence = CASE WHEN seen.mine THEN fence ELSE {next_fence} END,
                   acquired_at = CASE WHEN seen.mine THEN acquired_at ELSE {now} END,
                   expiry = greatest(CASE WHEN seen.mine THEN expiry END, {in_ttl})
              FROM seen
             WHERE lock.key = seen.key AND seen.free
         RETURNING lock.fence
        )
        SELECT taken.fence, seen.left_us FROM seen LEFT JOIN taken ON true"""
    INSERT = """
        INSERT INTO {table} (key, owner, fence, name, holder, acquired_at, expiry)
        VALUES (%(key)s, %(owner)s, {now_us}, %(name)s, %(holder)s, {now}, {in_ttl})
            ON CONFLICT (key) DO NOTHING
     RETURNING fence, {may}"""
    EXTEND = """
        UPDATE {table} AS lock
           SET expiry = {extended}
          FROM unnest(%(keys)s::text[], %(owners)s::text[]) AS ours (key, owner)
         WHERE lock.key = ours.key AND lock.owner = ours.owner
     RETURNING lock.key, lock.owner"""
    # An UPDATE whose snapshot is from before the lease finds no row of ours, and says nothing. This
    # is an error then.
    RELEASE_AT_COMMIT = """
        INSERT INTO {table} AS lock (key, owner, fence, name, holder, expiry)
        VALUES (%(key)s, '', 0, '', '', {now})
            ON CONFLICT (key) DO UPDATE
           SET owner = '', expiry = {now}
         WHERE lock.owner = %(owner)s"""
    # RETURNING is computed for a row that was ours when it was locked, and changed.
    RELEASE_TO_NEXT = (
        Statements.RELEASE
        + """
     RETURNING pg_advisory_unlock(%(queue)s::bigint # {table_id})"""
    )
    # Pgpool would ask a replica, whose sessions have other numbers. A pooler that lends sessions by
    # the transaction has names of its own for our prepared statements, of which this is one.
    SESSION = """/*NO LOAD BALANCE*/
        SELECT pg_backend_pid(),
               EXISTS (SELECT FROM pg_prepared_statements WHERE name LIKE %(ours)s)"""
    # The time for rows is not for this one; statement_timeout ends it.
    LINE_UP = """
        SELECT true, set_config('lock_timeout', '0', true),
               pg_advisory_lock('{queue}'::bigint # {table_id})"""
    # As the user that logged in: the role that the alias assumes may end no session. The table is
    # looked up before, for "$user" in search_path is the role.
    EVICT = """
        SELECT set_config('distlock.queue', ('{queue}'::bigint # {table_id})::text, true);
        SET LOCAL ROLE NONE;
        SELECT pg_terminate_backend(pid, 300)
          FROM pg_locks
         WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND pid <> pg_backend_pid()
           AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
           AND (classid::bigint << 32) | objid::bigint
               = current_setting('distlock.queue')::bigint"""
    WAITING = """
        SELECT ((classid::bigint << 32) | objid::bigint) # {table_id}, count(*)
          FROM pg_locks
         WHERE locktype = 'advisory' AND NOT granted AND objsubid = 1
           AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
         GROUP BY 1"""
    # One request. The savepoint frees a row that turned out to be leased; it stays if all is well.
    LOCK_ROW = """
        SAVEPOINT distlock;
        SELECT set_config('distlock.statement', current_setting('statement_timeout'), true),
               set_config('distlock.lock', current_setting('lock_timeout'), true),
               set_config('statement_timeout', '{wait_ms}', true),
               set_config('lock_timeout', '0', true);
        WITH locked AS MATERIALIZED (
            SELECT key, owner, expiry
              FROM {table}
             WHERE key = '{row}'
               FOR UPDATE {nowait}
        ), moved AS (
            UPDATE {table} AS lock
               SET owner = '', expiry = {now}, fence = {next_fence}
              FROM locked
             WHERE lock.key = locked.key
               AND (locked.owner = '' OR locked.expiry <= {now})
         RETURNING lock.fence
        )
        SELECT (SELECT fence FROM moved),
               set_config('statement_timeout', current_setting('distlock.statement'), true),
               set_config('lock_timeout', current_setting('distlock.lock'), true)"""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._takes = self.by_step(self.TAKE, self.JOIN)
        self._inserts = self.by_step(self.INSERT, self.TRY_QUEUE)

    def text_of(self, name: str) -> str:
        text = shown(name).encode(self.codec, "backslashreplace").decode(self.codec)
        return text[: self.longest_name]  # escapes are longer than letters

    def adapt(self, wrapper: Any) -> None:
        adapt_to_postgresql(wrapper)

    def cursor(self, wrapper: Any) -> Cursor:
        # Never prepared, whatever the alias says: several statements at once cannot be.
        client = getattr(wrapper.Database, "ClientCursor", None)  # None: psycopg2
        return client(wrapper.connection) if client else super().cursor(wrapper)

    def begin(self, wrapper: Any) -> Any:
        connection = wrapper.connection
        self.codec = codec_of(connection.info.parameter_status("server_encoding"))
        ours = hasattr(connection, "pgconn")  # not psycopg2's
        new_cursor: Any = partial(PostgreSQLCursor, connection) if ours else connection.cursor
        cursor = new_cursor()
        if not wrapper.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"):
            cursor.execute(SETTINGS, None)
            return cursor
        # That is how Django is told of a pooler that lends sessions by the transaction: neither
        # settings nor prepared statements may be left on those.
        if ours:
            cursor.prepares = False
        return PooledCursor(cursor, new_cursor(), BEGIN)

    def take(self, cursor: Cursor, claim: Claim, asked: Named, step: Step) -> Grant | Busy | None:
        cursor.execute(self._takes[step], asked)
        row = cursor.fetchone()
        if row is None:
            return None
        fence, left_us = row
        return refused(left_us) if fence is None else Grant(claim, fence=fence)

    def insert(self, cursor: Cursor, claim: Claim, asked: Named, step: Step) -> Grant | None:
        row = self.execute(cursor, self._inserts[step], asked).fetchone()
        return Grant(claim, fence=row[0]) if row else None

    def unlock(self, cursor: Cursor) -> None:
        cursor.execute("SELECT pg_advisory_unlock_all()")

    def can_queue(self, wrapper: Any, cursor: Cursor) -> bool:
        if not isinstance(cursor, PostgreSQLCursor):  # lent by the transaction
            return False
        cursor.pid, as_named = cursor.execute(self.SESSION, {"ours": "distlock%"}).fetchone()
        return bool(as_named)

    def queue_of(self, key: str) -> int:
        # Hashed again: advisory locks on the same name may be another app's. The statements mix
        # the table into it.
        return int(key_of(f"queue/{key}")[:16], 16) - 2**63

    def line_up(self, cursor: Any, key: str) -> None:
        cursor.send(self.LINE_UP.replace("{queue}", str(self.queue_of(key))))

    def leave(self, waiting: Any, cursor: Cursor) -> None:
        # Not by the driver, which stops all threads of the process until the server answers. And as
        # the user that logged in: the role that the alias assumes may end no statement of its.
        cursor.execute(
            f"SET LOCAL ROLE NONE; SELECT pg_cancel_backend(pid) FROM pg_locks"
            f" WHERE pid = {waiting.pid} AND locktype = 'advisory' AND NOT granted",
            None,
        )

    def release_at_commit(self, cursor: Cursor, claim: Claim) -> bool:
        asked = {"key": claim.key, "owner": claim.owner}
        return self.execute(cursor, self.RELEASE_AT_COMMIT, asked).rowcount == 1

    def release_to_next(self, cursor: Cursor, claim: Claim) -> bool:
        # The next one is woken before the commit, and waits for it at the row.
        _, queue = self._named(claim.name, claim.key)
        asked = {"key": claim.key, "owner": claim.owner, "queue": queue}
        cursor.execute(self.RELEASE_TO_NEXT, asked)
        row = cursor.fetchone()
        if row is not None and not row[0]:
            self.evict(cursor, claim.key)
        return row is not None

    def lock_row(self, cursor: Cursor, claim: Claim, wait: float | None) -> int | Busy | None:
        deadline = Deadline(wait)
        wait_ms = math.ceil(min(wait or 0, LONGEST_WAIT) * 1000)
        statement = self.LOCK_ROW.replace("{row}", claim.key).replace("{wait_ms}", str(wait_ms))
        try:
            cursor.execute(statement.replace("{nowait}", "NOWAIT" * (wait == 0)))
        except Exception as error:
            # Cancelled by a person, it says what it says after its time.
            timed_out = code_of(error) == "57014" and deadline.remaining() == 0
            if not timed_out and code_of(error) != "55P03":
                raise
            cursor.execute(UNDO)
            return Busy()
        if hasattr(cursor.connection, "pgconn"):  # psycopg2 keeps the last answer only
            while cursor.nextset():
                pass
        fence: int | None = cursor.fetchone()[0]
        if fence is None:
            cursor.execute(UNDO)
        return fence

    def extend(
        self, cursor: Cursor, claim_keys: Sequence[ClaimKey], ttl: float, *, exactly: bool = False
    ) -> set[ClaimKey]:
        # Hex digits, so these are arrays as PostgreSQL writes them.
        keys, owners = ("{" + ",".join(column) + "}" for column in zip(*claim_keys, strict=True))
        asked = {"keys": keys, "owners": owners, "ttl_us": round(ttl * 1e6), "exactly": exactly}
        return set(self.execute(cursor, self.EXTEND, asked).fetchall())


def codec_of(encoding: str | None) -> str:
    """Return Python's name of an encoding of PostgreSQL's; if it has none, a part of it."""
    if encoding in (None, "UTF8", "SQL_ASCII"):  # which takes any bytes
        return "utf-8"
    try:
        return codecs.lookup(str(encoding).replace("WIN", "cp")).name
    except LookupError:
        return "ascii"
