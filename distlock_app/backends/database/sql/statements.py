"""Statements of the lock table that dialects share: all but those that take a row.

A dialect has its words in `words`; they may contain each other. Parameters are %(named)s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Microseconds for which a lock that was released is kept for the first in the queue. One that has
# not come for it by then has died or hangs: any claim may take it. (A free row says by its `expiry`
# since when it is; one that was cleared says: for so long already.)
HANDOVER_US = 250_000

PURGED = 500  # rows that one statement deletes, where there is one writer at a time


class Statements:
    """Statements with {words}, which a dialect fills in.

    `key` is the column; `..._us` are microseconds, of a time since 1970; `in_ttl`, `age_ago`,
    `at_acquired` and `at_expiry` are times, computed from a parameter; `long_free` is the expiry
    of a row that was cleared; `purged` chooses among the rows that PURGE may delete; `ours` takes
    {marks} for so many keys and owners, or {keys}, too.
    """

    words: Mapping[str, str] = {}
    us_of = ""  # a time {0} as microseconds
    time_of = ""  # the time of so many microseconds {0}

    # If the row is in the way; shorter than READ, for it is asked before many a try.
    LOOK = """
        SELECT ({expiry_us}) - ({now_us})
          FROM {table}
         WHERE {key} = %(key)s AND owner NOT IN ('', %(owner)s) AND expiry > {now}"""
    MAKE = """
        INSERT INTO {table} ({key}, owner, fence, name, holder, expiry)
        VALUES (%(key)s, '', 0, %(name)s, '', {now})
            ON CONFLICT ({key}) DO NOTHING"""
    FENCE = """
        SELECT fence FROM {table} WHERE {key} = %(key)s AND owner = %(owner)s"""
    PROBE = """
        SELECT 1 FROM {table} WHERE {key} = %(key)s FOR UPDATE NOWAIT"""
    EXTEND = """
        UPDATE {table}
           SET expiry = {extended}
         WHERE {ours}"""
    OURS = """
        SELECT {key}, owner FROM {table} WHERE {ours}"""
    RELEASE = """
        UPDATE {table}
           SET owner = '', expiry = {now}
         WHERE {key} = %(key)s AND owner = %(owner)s"""
    HOLDERS = """
        SELECT {columns}
          FROM {table}
         WHERE owner <> '' AND expiry > {now} AND {key} BETWEEN %(first)s AND %(last)s
         ORDER BY {key}
         LIMIT %(count)s OFFSET %(start)s"""
    # Of the rows that HOLDERS would read.
    COUNT = """
        SELECT count(*) FROM {table} WHERE owner <> '' AND expiry > {now}"""
    # All that was not renewed.
    CLEAR_EXPIRED = """
        UPDATE {table}
           SET owner = '', expiry = {long_free}, fence = {next_fence}
         WHERE owner <> '' AND expiry <= {now} AND {key} BETWEEN %(first)s AND %(last)s"""
    PURGE = """
        DELETE FROM {table}
         WHERE {key} IN (SELECT {key}
                           FROM {table}
                          WHERE expiry < {age_ago}
                            AND {key} BETWEEN %(first)s AND %(last)s
                            {purged})"""
    READ = """
        SELECT {columns}
          FROM {table}
         WHERE {key} = %(key)s"""
    # If it is as it was read.
    REPLACE = """
        UPDATE {table}
           SET owner = %(owner)s, fence = %(fence)s, name = %(name)s, holder = %(holder)s,
               acquired_at = {at_acquired}, expiry = {at_expiry}
         WHERE {key} = %(key)s AND owner = %(old_owner)s AND fence = %(old_fence)s
           AND {expiry_us} = %(old_expiry_us)s"""
    # How many rows CLEAR_EXPIRED would change, and PURGE delete.
    LEFT_OVER = """
        SELECT coalesce(sum(CASE WHEN owner <> '' AND expiry <= {now} THEN 1 ELSE 0 END), 0),
               coalesce(sum(CASE WHEN expiry < {age_ago} THEN 1 ELSE 0 END), 0)
          FROM {table}"""

    def __init__(self, table: str) -> None:
        """Fill the words in, and the `table`, quoted; once for all connections of a process."""
        words = {
            "next_fence": "{greatest}(fence + 1, {now_us})",
            "extended": "CASE WHEN %(exactly)s THEN {in_ttl} ELSE {greatest}(expiry, {in_ttl}) END",
            "columns": "{key}, owner, fence, name, holder, {acquired_us}, {expiry_us}, {now_us}",
            "now_us": self.us_of.format("{now}"),
            "expiry_us": self.us_of.format("expiry"),
            "acquired_us": self.us_of.format("acquired_at"),
            "at_expiry": self.time_of.format("%(expiry_us)s"),
            "at_acquired": self.time_of.format("%(acquired_us)s"),
            **self.words,
            "table": table,
            "handover_us": str(HANDOVER_US),
        }
        for name in dir(type(self)):
            if name.isupper() and isinstance(text := getattr(self, name), str):
                setattr(self, name, self.written(_filled(text, words)))

    def written(self, statement: str) -> str:
        """Return the statement as the driver takes it."""
        return statement


def _filled(text: str, words: Mapping[str, str]) -> str:
    """Replace each {word}, also in words; leave those that a statement gets later."""
    filled = re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], found[0]), text)
    return filled if filled == text else _filled(filled, words)
