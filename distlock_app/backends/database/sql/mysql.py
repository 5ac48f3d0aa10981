"""The SQL of the lock table on MySQL and MariaDB.

UTC_TIMESTAMP is the time at which its statement began: one that had to wait for a row sees too
early a time, calls an expiring row busy, and gives a lease that ends too early, never too late.
"""

from __future__ import annotations

from typing import Any

from ....claims import Busy, Claim, Grant
from ....primitives.names import key_of
from ...sessions.link import ServerError
from ...sessions.pool import LONG_WAITS, PROCESSES, adapt_to_mysql
from .base import QUEUE_WAIT, ROW_WAIT, Cursor, Dialect, Named, Step, refused
from .cursors import MySQLCursor
from .statements import Statements

# What a driver gets that sends one statement at a time.
SYNTAX_ERROR = 1064

# Seconds after which the server closes a session that says nothing: its host may be cut off.
SILENCE = 600

# A binary log of statements takes no change that was made at READ COMMITTED (error 1665). MySQL may
# drop the variable that it deprecates, so there it is looked up.
LOGGED = """/*M! , tx_isolation = IF(@@log_bin AND @@binlog_format = 'STATEMENT',
    'REPEATABLE-READ', 'READ-COMMITTED') */
    /*!80000 , transaction_isolation = IF(@@log_bin AND (
        SELECT variable_value FROM performance_schema.session_variables
         WHERE variable_name = 'binlog_format') = 'STATEMENT',
    'REPEATABLE-READ', 'READ-COMMITTED') */"""

MOST_KNOWN = 10_000


class MySQL(Dialect):
    """One statement for anything: an UPDATE locks the row before it looks at it (any isolation).

    Its columns are assigned from left to right, so the owner comes last. LAST_INSERT_ID(fence)
    is how an UPDATE answers a number. CASE, unlike AND, promises to leave out what is not asked:
    the queue lock is taken together with the row, or not at all. What a function answers is always
    used: MySQL folds `RELEASE_ALL_LOCKS() IS NOT NULL` to true and never calls it.
    """

    us_of = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {0})"
    time_of = "'1970-01-01' + INTERVAL {0} MICROSECOND"
    words = {
        "key": "`key`",
        "now": "UTC_TIMESTAMP(6)",
        "greatest": "GREATEST",
        "in_ttl": "{now} + INTERVAL %(ttl_us)s MICROSECOND",
        "age_ago": "{now} - INTERVAL %(age_us)s MICROSECOND",
        "long_free": "{now} - INTERVAL {handover_us} MICROSECOND",
        # For one pair alone MariaDB reads, and locks, all rows.
        "ours": "`key` IN ({keys}) AND (`key`, owner) IN ({marks})",
    }
    JOIN = "GET_LOCK(%(queue)s, 0) OR owner <> '' OR expiry <= {long_free}"
    TAKE = """
        UPDATE {table}
           SET fence = LAST_INSERT_ID(CASE WHEN owner = %(owner)s THEN fence ELSE {next_fence} END),
               acquired_at = CASE WHEN owner = %(owner)s THEN acquired_at ELSE {now} END,
               expiry = GREATEST(CASE WHEN owner = %(owner)s THEN expiry ELSE {now} END, {in_ttl}),
               name = %(name)s, holder = %(holder)s, owner = %(owner)s
         WHERE `key` = %(key)s
           AND CASE WHEN owner = %(owner)s THEN TRUE
                    WHEN owner <> '' AND expiry > {now} THEN FALSE
                    ELSE {may} END"""
    # A statement of its own: FOR UPDATE on a missing row and then INSERT in one transaction
    # deadlock on InnoDB (279 of 320 with 8 sessions, even on different names). The row is free, so
    # that the next TAKE gets the queue lock with it.
    MAKE = """
        INSERT IGNORE INTO {table} (`key`, owner, fence, name, holder, expiry)
        VALUES (%(key)s, '', 0, %(name)s, '', {now})"""
    # The UPDATE alone would lock the row, but logs of the server would not say so.
    RELEASE_AT_COMMIT = (
        """
        SELECT `key` INTO @distlock
          FROM {table}
         WHERE `key` = %(key)s AND owner = %(owner)s
           FOR UPDATE;"""
        + Statements.RELEASE
    )
    RELEASE_TO_NEXT = """
        UPDATE {table}
           SET owner = '', expiry = {now}
         WHERE `key` = %(key)s
           AND CASE WHEN owner = %(owner)s
                    THEN LAST_INSERT_ID(RELEASE_ALL_LOCKS()) >= 0 END"""
    EVICT = """
        KILL IS_USED_LOCK('{queue}')"""
    WAITING = f"""
        SELECT SUBSTRING_INDEX(SUBSTRING_INDEX(CONVERT(info USING utf8mb4), '''', 2), '''', -1),
               COUNT(*)
          FROM {PROCESSES}
         WHERE state = 'User lock' AND info LIKE 'SELECT GET_LOCK(''distlock-q-%%'
         GROUP BY 1"""
    # One request, if the driver sends several statements at once. It does not wait for the row: at
    # READ COMMITTED a row that turns out to be leased is unlocked at once, but not if it was
    # waited for, nor if it was looked up by a constant. So '' is looked for as well.
    # MariaDB's SKIP LOCKED waits for a moment, so a variable notes whether the row was locked here.
    LOCK_ROW = """
        SET @distlock = NULL, @distlock_had = NULL;
        SELECT `key` INTO @distlock
          FROM {table}
         WHERE `key` IN (%(key)s, '') /*M! AND (@distlock_had := `key`) IS NOT NULL */
           AND (owner = '' OR expiry <= {now})
           FOR UPDATE SKIP LOCKED;
        UPDATE {table}
           SET fence = LAST_INSERT_ID({next_fence}),
               owner = '', expiry = {now}
         WHERE `key` = @distlock"""
    TRY_ROW = """
        SELECT 1 FROM {table} WHERE `key` = %(key)s FOR UPDATE SKIP LOCKED"""
    PURGE = """
        DELETE FROM {table}
         WHERE expiry < {age_ago}
           AND `key` BETWEEN %(first)s AND %(last)s"""

    queues = True
    one_request = True
    has_trigger = False  # of the table: then LAST_INSERT_ID() says nothing
    # Deadlock, lock wait timeout, NOWAIT, and (MariaDB 11.6) a row changed since the snapshot.
    crowded = frozenset({1213, 1205, 3572, 1020})

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self.database = str(connection.settings_dict["NAME"])
        self._takes = self.by_step(self.TAKE, self.JOIN)
        self._known: set[str] = set()  # keys that had a row when we asked last

    def adapt(self, wrapper: Any) -> None:
        wrapper.settings_dict["OPTIONS"]["isolation_level"] = "read committed"
        adapt_to_mysql(wrapper)

    def begin(self, wrapper: Any) -> Any:
        cursor: Any = wrapper.connection.cursor()
        # Strict: a value that does not fit is an error, never cut short or turned into zero.
        cursor.execute(
            f"SET SESSION innodb_lock_wait_timeout = {ROW_WAIT}, sql_mode = 'STRICT_ALL_TABLES',"
            f" wait_timeout = {SILENCE} {LONG_WAITS} {LOGGED}"
        )
        if not self.database:  # by OPTIONS, or a file of the client's
            cursor.execute("SELECT DATABASE()")
            self.database = cursor.fetchone()[0]
        ours = hasattr(wrapper.connection, "send_query")  # not PyMySQL's
        return MySQLCursor(wrapper.connection) if ours else cursor

    def take(self, cursor: Cursor, claim: Claim, asked: Named, step: Step) -> Grant | Busy | None:
        cursor.execute(self._takes[step], asked)
        if cursor.rowcount == 1:
            return Grant(claim, fence=cursor.lastrowid or self._fence(cursor, asked))
        if step == "wait" and claim.key in self._known:
            return Busy()  # A row that was purged is missed when it is our turn.
        row = self.read(cursor, claim.key)
        if row is None:
            return None
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known.add(claim.key)
        return refused(row.left_us)

    def _fence(self, cursor: Cursor, asked: Named) -> int:
        """Read the fence where a trigger of the table keeps LAST_INSERT_ID() back."""
        self.has_trigger = True
        row = self.execute(cursor, self.FENCE, asked).fetchone()
        if row is None:
            raise ServerError(None, "the lock was cleared as it was taken")
        return int(row[0])

    def unlock(self, cursor: Cursor) -> None:
        cursor.execute("DO RELEASE_ALL_LOCKS()")

    def can_queue(self, wrapper: Any, cursor: Cursor) -> bool:
        if not isinstance(cursor, MySQLCursor):
            return False
        try:
            cursor.execute(
                "SELECT CONNECTION_ID(), GET_LOCK('distlock', 0), RELEASE_ALL_LOCKS(),"
                " /*M! @@tx_isolation */ /*!80000 @@transaction_isolation */ = 'READ-COMMITTED'"
            )
        except ServerError:  # a cluster or proxy that refuses it
            return False
        number, _, _, logs_rows = cursor.fetchone()
        # A proxy in between has numbers of its own, and may lend the session to others. A replica
        # that repeats statements (see LOGGED) is always granted the queue lock, and then the row.
        return bool(logs_rows and number == wrapper.connection.thread_id())

    def queue_of(self, key: str) -> str:
        # A server has one set of these names for all of its databases.
        return "distlock-q-" + key_of(f"{self.database}/{key}")

    def line_up(self, cursor: Any, key: str) -> None:
        cursor.send(f"SELECT GET_LOCK('{self.queue_of(key)}', {QUEUE_WAIT})")

    def leave(self, waiting: Any, cursor: Cursor) -> None:
        # Not the connection: that is closed before its thread has left the queue.
        cursor.execute(f"KILL QUERY {waiting.connection.thread_id()}")

    def release_at_commit(self, cursor: Cursor, claim: Claim) -> bool:
        self._execute_all(cursor, self.RELEASE_AT_COMMIT, {"key": claim.key, "owner": claim.owner})
        return cursor.rowcount == 1

    def release_to_next(self, cursor: Cursor, claim: Claim) -> bool:
        # The next one is woken before the commit, and waits for it at the row.
        asked = {"key": claim.key, "owner": claim.owner}
        cursor.execute(self.RELEASE_TO_NEXT, asked)
        ours = cursor.rowcount == 1
        if ours and not cursor.lastrowid and not self.has_trigger:
            self.evict(cursor, claim.key)
        return ours

    def lock_row(self, cursor: Cursor, claim: Claim, wait: float | None) -> int | Busy | None:
        free = {"key": claim.key, "owner": ""}
        self._execute_all(cursor, self.LOCK_ROW, free)
        if cursor.rowcount == 1:
            return int(cursor.lastrowid or self._fence(cursor, free))
        row = self.read(cursor, claim.key) if wait == 0 else None
        return refused(row.left_us) if row else None

    def may_have_kept(self, cursor: Cursor) -> bool:
        if "MariaDB" not in cursor.connection.get_server_info():
            return False
        cursor.execute("SELECT @distlock_had")
        return cursor.fetchone()[0] is not None

    def try_row(self, cursor: Cursor, key: str) -> bool:
        return self.execute(cursor, self.TRY_ROW, {"key": key}).fetchone() is not None

    def _execute_all(self, cursor: Cursor, statements: str, asked: Named) -> None:
        if self.one_request:
            try:
                cursor.execute(statements, asked)
                while cursor.nextset():
                    pass
                return
            except Exception as error:
                if not error.args or error.args[0] != SYNTAX_ERROR:
                    raise
                self.one_request = False  # PyMySQL, or "multi_statements": False
        for statement in statements.split(";"):
            cursor.execute(statement, asked)
