"""The lock table on PostgreSQL.

clock_timestamp(), never now(): the latter is the start of the transaction, which may have waited.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...claims import Busy, Claim, Grant
from .base import ANSWER_WAIT, ROW_WAIT, Cursor, Dialect, Named, Pair, busy

# Serialization failure, deadlock, lock timeout or NOWAIT.
CROWDED = frozenset({"40001", "40P01", "55P03"})


class PostgreSQL(Dialect):
    """One statement for anything: SELECT ... FOR UPDATE and its UPDATE travel together.

    The row lock is taken first, and a row that changed while we waited for it is read again
    before anything is decided (READ COMMITTED), as in four statements; three round trips less.
    """

    TAKE = """
        WITH seen AS MATERIALIZED (
            SELECT key,
                   owner = %(owner)s AS mine,
                   owner = %(owner)s OR owner = '' OR expiry <= clock_timestamp() AS free,
                   (extract(epoch FROM expiry - clock_timestamp()) * 1000000)::bigint AS left_us
              FROM {table}
             WHERE key = %(key)s
               FOR UPDATE
        ), taken AS (
            UPDATE {table} AS lock
               SET owner = %(owner)s, name = %(name)s, holder = %(holder)s,
                   fence = CASE WHEN seen.mine THEN lock.fence
                       ELSE greatest(lock.fence + 1,
                           (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) END,
                   acquired_at = CASE WHEN seen.mine THEN lock.acquired_at
                       ELSE clock_timestamp() END,
                   expiry = greatest(CASE WHEN seen.mine THEN lock.expiry END,
                       clock_timestamp() + %(ttl_us)s::bigint * interval '1 microsecond')
              FROM seen
             WHERE lock.key = seen.key AND seen.free
         RETURNING lock.fence
        )
        SELECT taken.fence, seen.left_us FROM seen LEFT JOIN taken ON true"""
    INSERT = """
        INSERT INTO {table} (key, owner, fence, name, holder, acquired_at, expiry)
        VALUES (%(key)s, %(owner)s,
                (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
                %(name)s, %(holder)s, clock_timestamp(),
                clock_timestamp() + %(ttl_us)s::bigint * interval '1 microsecond')
            ON CONFLICT (key) DO NOTHING
     RETURNING fence"""
    LOOK = """
        SELECT (extract(epoch FROM expiry - clock_timestamp()) * 1000000)::bigint
          FROM {table}
         WHERE key = %(key)s AND owner NOT IN ('', %(owner)s) AND expiry > clock_timestamp()"""
    EXTEND = """
        UPDATE {table}
           SET expiry = greatest(expiry,
                   clock_timestamp() + %(ttl_us)s::bigint * interval '1 microsecond')
         WHERE key = %(key)s AND owner = %(owner)s"""
    EXTEND_PAIRS = """
        UPDATE {table} AS lock
           SET expiry = greatest(expiry,
                   clock_timestamp() + %(ttl_us)s::bigint * interval '1 microsecond')
          FROM unnest(%(keys)s::text[], %(owners)s::text[]) AS ours (key, owner)
         WHERE lock.key = ours.key AND lock.owner = ours.owner
     RETURNING lock.key, lock.owner"""
    RELEASE = """
        UPDATE {table}
           SET owner = '', expiry = clock_timestamp()
         WHERE key = %(key)s AND owner = %(owner)s"""
    RELEASED = """
        SELECT 1 FROM {table} WHERE key = %(key)s AND owner = '' AND fence = %(fence)s"""
    HOLDERS = """
        SELECT key, name, fence, holder,
               (extract(epoch FROM expiry - clock_timestamp()) * 1000000)::bigint,
               (extract(epoch FROM clock_timestamp() - acquired_at) * 1000000)::bigint
          FROM {table}
         WHERE owner <> '' AND expiry > clock_timestamp()
           AND key BETWEEN %(first)s AND %(last)s"""
    CLEAR = """
        UPDATE {table}
           SET owner = '', expiry = clock_timestamp(),
               fence = greatest(fence + 1,
                   (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
         WHERE key = %(key)s AND owner <> ''
           AND fence BETWEEN %(first)s::bigint AND %(last)s::bigint"""
    PURGE = """
        DELETE FROM {table}
         WHERE key IN (SELECT key
                         FROM {table}
                        WHERE expiry < clock_timestamp()
                                       - %(age_us)s::bigint * interval '1 microsecond'
                          AND key BETWEEN %(first)s AND %(last)s
                          FOR UPDATE SKIP LOCKED)"""

    def adapt(self, settings: dict[str, Any]) -> None:
        options = settings["OPTIONS"]
        options.pop("pool", None)
        options.pop("isolation_level", None)
        options.setdefault("connect_timeout", ANSWER_WAIT)
        options.setdefault("tcp_user_timeout", ANSWER_WAIT * 1000)

    def begin(self, wrapper: Any) -> Cursor:
        cursor: Cursor = wrapper.connection.cursor()
        # DISABLE_SERVER_SIDE_CURSORS is how Django is told of a pooler that lends sessions by
        # the transaction: neither settings nor prepared statements may be left on those.
        kept = not wrapper.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
        if kept:
            cursor.execute(f"SET lock_timeout = '{ROW_WAIT}s'")
            cursor.execute(f"SET statement_timeout = '{ANSWER_WAIT}s'")
            cursor.execute("SET default_transaction_isolation = 'read committed'")
        if hasattr(wrapper.connection, "prepare_threshold"):  # not psycopg2
            # The driver's cursor: Django's may write the values into the statement's text.
            # Prepared, at the first use, a statement costs 25 % less.
            cursor = wrapper.Database.Cursor(wrapper.connection)
            wrapper.connection.prepare_threshold = 0 if kept else None
        return cursor

    def crowded(self, error: Exception) -> bool:
        return (getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)) in CROWDED

    def take(self, cursor: Cursor, claim: Claim, asked: Named) -> Grant | Busy | None:
        row = self.execute(cursor, self.TAKE, asked).fetchone()
        if row is None:
            return None
        fence, left_us = row
        return busy(left_us) if fence is None else Grant(claim, fence=fence)

    def granted(self, cursor: Cursor, claim: Claim, asked: Named) -> Grant | Busy:
        return Grant(claim, fence=cursor.fetchone()[0])

    def extend_pairs(self, cursor: Cursor, pairs: Sequence[Pair], ttl: float) -> set[Pair]:
        keys, owners = zip(*pairs, strict=True)
        asked = {"keys": list(keys), "owners": list(owners), "ttl_us": round(ttl * 1e6)}
        return set(self.execute(cursor, self.EXTEND_PAIRS, asked).fetchall())
