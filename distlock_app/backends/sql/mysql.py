"""The lock table on MySQL and MariaDB.

UTC_TIMESTAMP is the time at which its statement began: one that had to wait for a row sees too
early a time, calls an expiring row busy, and gives a lease that ends too early, never too late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...claims import Busy, Claim, Grant
from .base import ANSWER_WAIT, ROW_WAIT, Cursor, Dialect, Named, Pair, busy, marked

# Deadlock, lock wait timeout, NOWAIT, and (MariaDB 11.6) a row changed since the snapshot.
CROWDED = frozenset({1213, 1205, 3572, 1020})


class MySQL(Dialect):
    """Four statements in two requests to acquire, one for anything else."""

    SEEN = """
        BEGIN;
        SELECT fence,
               CASE WHEN owner = %(owner)s THEN 'mine' WHEN owner = '' THEN 'free' END,
               TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expiry),
               TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
          FROM {table}
         WHERE `key` = %(key)s
           FOR UPDATE"""
    TAKE = """
        UPDATE {table}
           SET owner = %(owner)s, fence = %(fence)s, name = %(name)s, holder = %(holder)s,
               acquired_at = UTC_TIMESTAMP(6),
               expiry = UTC_TIMESTAMP(6) + INTERVAL %(ttl_us)s MICROSECOND
         WHERE `key` = %(key)s;
        COMMIT"""
    INSERT = """
        INSERT IGNORE INTO {table} (`key`, owner, fence, name, holder, acquired_at, expiry)
        VALUES (%(key)s, %(owner)s,
                TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)),
                %(name)s, %(holder)s, UTC_TIMESTAMP(6),
                UTC_TIMESTAMP(6) + INTERVAL %(ttl_us)s MICROSECOND)"""
    FENCE = """
        SELECT fence FROM {table} WHERE `key` = %(key)s AND owner = %(owner)s"""
    LOOK = """
        SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expiry)
          FROM {table}
         WHERE `key` = %(key)s AND owner NOT IN ('', %(owner)s) AND expiry > UTC_TIMESTAMP(6)"""
    EXTEND = """
        UPDATE {table}
           SET expiry = GREATEST(expiry, UTC_TIMESTAMP(6) + INTERVAL %(ttl_us)s MICROSECOND)
         WHERE `key` = %(key)s AND owner = %(owner)s"""
    EXTEND_PAIRS = """
        UPDATE {table}
           SET expiry = GREATEST(expiry, UTC_TIMESTAMP(6) + INTERVAL %s MICROSECOND)
         WHERE (`key`, owner) IN ({pairs})"""
    OURS = """
        SELECT `key`, owner FROM {table} WHERE (`key`, owner) IN ({pairs})"""
    RELEASE = """
        UPDATE {table}
           SET owner = '', expiry = UTC_TIMESTAMP(6)
         WHERE `key` = %(key)s AND owner = %(owner)s"""
    RELEASED = """
        SELECT 1 FROM {table} WHERE `key` = %(key)s AND owner = '' AND fence = %(fence)s"""
    HOLDERS = """
        SELECT `key`, name, fence, holder,
               TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expiry),
               TIMESTAMPDIFF(MICROSECOND, acquired_at, UTC_TIMESTAMP(6))
          FROM {table}
         WHERE owner <> '' AND expiry > UTC_TIMESTAMP(6)
           AND `key` BETWEEN %(first)s AND %(last)s"""
    CLEAR = """
        UPDATE {table}
           SET owner = '', expiry = UTC_TIMESTAMP(6),
               fence = GREATEST(fence + 1,
                   TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))
         WHERE `key` = %(key)s AND owner <> '' AND fence BETWEEN %(first)s AND %(last)s"""
    PURGE = """
        DELETE FROM {table}
         WHERE expiry < UTC_TIMESTAMP(6) - INTERVAL %(age_us)s MICROSECOND
           AND `key` BETWEEN %(first)s AND %(last)s"""

    def adapt(self, settings: dict[str, Any]) -> None:
        options = settings["OPTIONS"]
        options["isolation_level"] = "read committed"
        options["charset"] = "utf8mb4"
        for wait in ("connect_timeout", "read_timeout", "write_timeout"):
            options.setdefault(wait, ANSWER_WAIT)

    def begin(self, wrapper: Any) -> Cursor:
        cursor: Cursor = wrapper.connection.cursor()
        # Strict: a value that does not fit is an error, never cut short or turned into zero.
        cursor.execute(
            f"SET SESSION innodb_lock_wait_timeout = {ROW_WAIT}, sql_mode = 'STRICT_ALL_TABLES'"
        )
        return cursor

    def crowded(self, error: Exception) -> bool:
        return bool(error.args) and error.args[0] in CROWDED

    def take(self, cursor: Cursor, claim: Claim, asked: Named) -> Grant | Busy | None:
        cursor.execute(self.SEEN, {"key": claim.key, "owner": claim.owner})
        cursor.nextset()  # the answer to BEGIN comes first
        row = cursor.fetchone()
        if row is None:
            cursor.execute("COMMIT")
            return None
        fence, state, left_us, now_us = row
        if state is None and left_us > 0:
            cursor.execute("COMMIT")
            return busy(left_us)
        if state == "mine":
            cursor.execute(self.EXTEND, asked)
            cursor.execute("COMMIT")
            return Grant(claim, fence=fence)
        fence = max(fence + 1, now_us)
        cursor.execute(self.TAKE, {**asked, "fence": fence})
        cursor.nextset()  # raises if the COMMIT failed
        return Grant(claim, fence=fence)

    def extend_pairs(self, cursor: Cursor, pairs: Sequence[Pair], ttl: float) -> set[Pair]:
        statement, values = marked(self.EXTEND_PAIRS, "(%s, %s)", pairs)
        cursor.execute(statement, [round(ttl * 1e6), *values])
        if cursor.rowcount == len(pairs):
            return set(pairs)
        cursor.execute(*marked(self.OURS, "(%s, %s)", pairs))
        return set(cursor.fetchall())
