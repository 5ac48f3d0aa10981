"""The SQL of the lock table on SQLite, which has no SELECT ... FOR UPDATE.

So the UPDATE comes first and asks in its WHERE (0 errors in 1,595 acquisitions by 8 processes;
reading first and writing then gave 3,113 times "database is locked"). Times are texts of a
fixed width, in milliseconds as its clock is: Django reads them, and they sort as they should.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from ....claims import Busy, Claim, Grant
from .base import ROW_WAIT, Asked, Cursor, Dialect, Named, Pair, Step, busy, marked


class SQLite(Dialect):
    """Each statement is a transaction of its own."""

    locks_rows = False

    TAKE = """
        UPDATE {table}
           SET fence = CASE WHEN owner = :owner THEN fence ELSE max(fence + 1,
                   strftime('%s', 'now') * 1000000 + substr(strftime('%f', 'now'), 4) * 1000) END,
               acquired_at = CASE WHEN owner = :owner THEN acquired_at
                   ELSE strftime('%Y-%m-%d %H:%M:%f', 'now') END,
               owner = :owner, name = :name, holder = :holder,
               expiry = max(CASE WHEN owner = :owner THEN expiry ELSE '' END,
                   strftime('%Y-%m-%d %H:%M:%f', 'now', (:ttl_us / 1000000.0) || ' seconds'))
         WHERE key = :key
           AND (owner IN ('', :owner) OR expiry <= strftime('%Y-%m-%d %H:%M:%f', 'now'))"""
    LEFT = """
        SELECT CAST(round((julianday(expiry) - julianday('now')) * 86400000) AS INTEGER) * 1000
          FROM {table}
         WHERE key = :key"""
    INSERT = """
        INSERT OR IGNORE INTO {table} (key, owner, fence, name, holder, acquired_at, expiry)
        VALUES (:key, :owner,
                strftime('%s', 'now') * 1000000 + substr(strftime('%f', 'now'), 4) * 1000,
                :name, :holder, strftime('%Y-%m-%d %H:%M:%f', 'now'),
                strftime('%Y-%m-%d %H:%M:%f', 'now', (:ttl_us / 1000000.0) || ' seconds'))"""
    FENCE = """
        SELECT fence FROM {table} WHERE key = :key AND owner = :owner"""
    LOOK = """
        SELECT CAST(round((julianday(expiry) - julianday('now')) * 86400000) AS INTEGER) * 1000
          FROM {table}
         WHERE key = :key AND owner NOT IN ('', :owner)
           AND expiry > strftime('%Y-%m-%d %H:%M:%f', 'now')"""
    EXTEND = """
        UPDATE {table}
           SET expiry = max(expiry,
                   strftime('%Y-%m-%d %H:%M:%f', 'now', (:ttl_us / 1000000.0) || ' seconds'))
         WHERE key = :key AND owner = :owner"""
    END_IN = """
        UPDATE {table}
           SET expiry = strftime('%Y-%m-%d %H:%M:%f', 'now', (:ttl_us / 1000000.0) || ' seconds')
         WHERE key = :key AND owner = :owner"""
    EXTEND_PAIRS = """
        UPDATE {table}
           SET expiry = max(expiry,
                   strftime('%Y-%m-%d %H:%M:%f', 'now', (? / 1000000.0) || ' seconds'))
         WHERE (key, owner) IN (VALUES {pairs})"""
    OURS = """
        SELECT key, owner FROM {table} WHERE (key, owner) IN (VALUES {pairs})"""
    RELEASE = """
        UPDATE {table}
           SET owner = '', expiry = strftime('%Y-%m-%d %H:%M:%f', 'now')
         WHERE key = :key AND owner = :owner"""
    MAKE = """
        INSERT OR IGNORE INTO {table} (key, owner, fence, name, holder, expiry)
        VALUES (:key, '', 0, '', '', strftime('%Y-%m-%d %H:%M:%f', 'now'))"""
    LOCK_ROW = """
        UPDATE {table}
           SET owner = '', expiry = strftime('%Y-%m-%d %H:%M:%f', 'now'),
               fence = max(fence + 1,
                   strftime('%s', 'now') * 1000000 + substr(strftime('%f', 'now'), 4) * 1000)
         WHERE key = :key
           AND (owner = '' OR expiry <= strftime('%Y-%m-%d %H:%M:%f', 'now'))"""
    RELEASED = """
        SELECT 1 FROM {table} WHERE key = :key AND owner = '' AND fence = :fence"""
    HOLDERS = """
        SELECT key, name, fence, holder,
               CAST(round((julianday(expiry) - julianday('now')) * 86400000) AS INTEGER) * 1000,
               CAST(round((julianday('now') - julianday(acquired_at)) * 86400000) AS INTEGER) * 1000
          FROM {table}
         WHERE owner <> '' AND expiry > strftime('%Y-%m-%d %H:%M:%f', 'now')
           AND key BETWEEN :first AND :last
         ORDER BY key
         LIMIT :count OFFSET :start"""
    COUNT = """
        SELECT count(*)
          FROM {table}
         WHERE owner <> '' AND expiry > strftime('%Y-%m-%d %H:%M:%f', 'now')"""
    _CLEARED = """
        UPDATE {table}
           SET owner = '', expiry = strftime('%Y-%m-%d %H:%M:%f', 'now'),
               fence = max(fence + 1,
                   strftime('%s', 'now') * 1000000 + substr(strftime('%f', 'now'), 4) * 1000)"""
    CLEAR = (
        _CLEARED
        + """
         WHERE key = :key AND owner <> '' AND fence BETWEEN :first AND :last"""
    )
    CLEAR_EXPIRED = (
        _CLEARED
        + """
         WHERE owner <> '' AND expiry <= strftime('%Y-%m-%d %H:%M:%f', 'now')
           AND key BETWEEN :first AND :last"""
    )
    READ = """
        SELECT owner, fence, name, holder,
               strftime('%s', acquired_at) * 1000000
                   + substr(strftime('%f', acquired_at), 4) * 1000,
               strftime('%s', expiry) * 1000000 + substr(strftime('%f', expiry), 4) * 1000,
               strftime('%s', 'now') * 1000000 + substr(strftime('%f', 'now'), 4) * 1000
          FROM {table}
         WHERE key = :key"""
    REPLACE = """
        UPDATE {table}
           SET owner = :owner, fence = :fence, name = :name, holder = :holder,
               acquired_at = strftime('%Y-%m-%d %H:%M:%f', :acquired_us / 1e6, 'unixepoch'),
               expiry = strftime('%Y-%m-%d %H:%M:%f', :expiry_us / 1e6, 'unixepoch')
         WHERE key = :key AND owner = :old_owner AND fence = :old_fence
           AND strftime('%s', expiry) * 1000000 + substr(strftime('%f', expiry), 4) * 1000
               = :old_expiry_us"""
    LEFT_OVER = """
        SELECT coalesce(sum(CASE WHEN owner <> '' AND expiry <= strftime('%Y-%m-%d %H:%M:%f', 'now')
                                 THEN 1 ELSE 0 END), 0),
               coalesce(sum(CASE WHEN expiry < strftime('%Y-%m-%d %H:%M:%f', 'now',
                                                        (:age_us / -1000000.0) || ' seconds')
                                 THEN 1 ELSE 0 END), 0)
          FROM {table}"""
    PURGE = """
        DELETE FROM {table}
         WHERE key IN (SELECT key
                         FROM {table}
                        WHERE expiry < strftime('%Y-%m-%d %H:%M:%f', 'now',
                                                (:age_us / -1000000.0) || ' seconds')
                          AND key BETWEEN :first AND :last
                        LIMIT {purged})"""

    def adapt(self, settings: dict[str, Any]) -> None:
        options = settings["OPTIONS"]
        options["timeout"] = min(ROW_WAIT, options.get("timeout", ROW_WAIT))

    def begin(self, wrapper: Any) -> Cursor:
        # The driver's cursor: Django's rewrites each statement for SQLite's own placeholders.
        cursor: Cursor = wrapper.Database.Cursor(wrapper.connection)
        return cursor

    def contended(self, error: Exception) -> bool:
        return "locked" in str(error)

    def execute(self, cursor: Cursor, statement: str, asked: Asked) -> Cursor:
        deadline = time.monotonic() + ROW_WAIT
        while True:
            try:
                cursor.execute(statement, asked)
                return cursor
            except Exception as error:
                # Connections that share a cache (databases in memory, for tests) are told
                # "table is locked" at once: there the driver's `timeout` waits for nothing.
                if "table is locked" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.002)

    def take(self, cursor: Cursor, claim: Claim, asked: Named, step: Step) -> Grant | Busy | None:
        if self.execute(cursor, self.TAKE, asked).rowcount == 1:
            return self.granted(cursor, claim, asked)
        row = self.execute(cursor, self.LEFT, asked).fetchone()
        return busy(row[0]) if row else None

    def insert(self, cursor: Cursor, claim: Claim, asked: Named, step: Step) -> Grant | None:
        made = self.execute(cursor, self.INSERT, asked).rowcount == 1
        return self.granted(cursor, claim, asked) if made else None

    def granted(self, cursor: Cursor, claim: Claim, asked: Named) -> Grant | None:
        """Read the fence of a row that the last statement made ours."""
        row = self.execute(cursor, self.FENCE, asked).fetchone()
        return Grant(claim, fence=row[0]) if row else None

    def lock_row(self, cursor: Cursor, key: str, wait: float | None) -> int | Busy | None:
        """Lock the file for writing, which is all that SQLite can lock."""
        asked = {"key": key, "owner": ""}
        cursor.execute("PRAGMA busy_timeout")
        before = cursor.fetchone()[0]
        longest = 2**31 - 1
        wait_ms = longest if wait is None else min(math.ceil(wait * 1000), longest)
        cursor.execute(f"PRAGMA busy_timeout = {wait_ms}")
        try:
            cursor.execute(self.MAKE, asked)
            taken = cursor.execute(self.LOCK_ROW, asked).rowcount == 1
        except Exception as error:
            # A snapshot that is too old gets no newer by waiting. (Python 3.10 cannot tell.)
            too_old = getattr(error, "sqlite_errorname", "") == "SQLITE_BUSY_SNAPSHOT"
            if too_old or not self.contended(error):
                raise
            return Busy()
        finally:
            cursor.execute(f"PRAGMA busy_timeout = {before}")
        # Leased at the last moment: this transaction has the file, and its holder cannot go on.
        return int(cursor.execute(self.FENCE, asked).fetchone()[0]) if taken else Busy()

    def extend_pairs(self, cursor: Cursor, pairs: Sequence[Pair], ttl: float) -> set[Pair]:
        statement, values = marked(self.EXTEND_PAIRS, "(?, ?)", pairs)
        self.execute(cursor, statement, [round(ttl * 1e6), *values])
        if cursor.rowcount == len(pairs):
            return set(pairs)
        self.execute(cursor, *marked(self.OURS, "(?, ?)", pairs))
        return set(cursor.fetchall())
