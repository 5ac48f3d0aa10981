"""The SQL of the lock table on SQLite, which has no SELECT ... FOR UPDATE.

So a try is one UPSERT that asks in its WHERE (0 errors in 1,595 acquisitions by 8 processes;
reading first and writing then gave 3,113 times "database is locked"). Times are texts of a
fixed width, in milliseconds as its clock is: Django reads them, and they sort as they should.
"""

from __future__ import annotations

import re
from time import sleep
from typing import Any

from ....claims import Busy, Claim, Grant
from ....primitives.drivers import OLD_SNAPSHOT, code_of, waiting_for_file
from ....primitives.timing import monotonic
from .base import ROW_WAIT, Cursor, Dialect, Named, Step, busy
from .statements import PURGED


class SQLite(Dialect):
    """Each statement is a transaction of its own."""

    locks_rows = False

    us_of = "strftime('%s', {0}) * 1000000 + substr(strftime('%f', {0}), 4) * 1000"
    time_of = "strftime('%Y-%m-%d %H:%M:%f', {0} / 1e6, 'unixepoch')"
    words = {
        "key": "key",
        "now": "strftime('%Y-%m-%d %H:%M:%f', 'now')",
        "now_us": us_of.format("'now'"),
        "greatest": "max",
        "in_ttl": "strftime('%Y-%m-%d %H:%M:%f', 'now', (%(ttl_us)s / 1000000.0) || ' seconds')",
        "age_ago": "strftime('%Y-%m-%d %H:%M:%f', 'now', (%(age_us)s / -1000000.0) || ' seconds')",
        "long_free": "{now}",
        "ours": "(key, owner) IN (VALUES {marks})",
        "purged": f"LIMIT {PURGED}",
    }
    TAKE = """
        INSERT INTO {table} (key, owner, fence, name, holder, acquired_at, expiry)
        VALUES (:key, :owner, {now_us}, :name, :holder, {now}, {in_ttl})
            ON CONFLICT (key) DO UPDATE
           SET fence = CASE WHEN owner = :owner THEN fence ELSE {next_fence} END,
               acquired_at = CASE WHEN owner = :owner THEN acquired_at ELSE {now} END,
               owner = :owner, name = :name, holder = :holder,
               expiry = max(CASE WHEN owner = :owner THEN expiry ELSE '' END, {in_ttl})
         WHERE owner IN ('', :owner) OR expiry <= {now}"""
    LOCK_ROW = """
        UPDATE {table}
           SET owner = '', expiry = {now}, fence = {next_fence}
         WHERE key = :key
           AND (owner = '' OR expiry <= {now})"""

    def written(self, statement: str) -> str:
        return re.sub(r"%\((\w+)\)s", r":\1", statement)

    def adapt(self, wrapper: Any) -> None:
        options = wrapper.settings_dict["OPTIONS"]
        options["timeout"] = min(ROW_WAIT, options.get("timeout", ROW_WAIT))

    def begin(self, wrapper: Any) -> Cursor:
        # The driver's cursor: Django's rewrites each statement for SQLite's own placeholders.
        cursor: Cursor = wrapper.Database.Cursor(wrapper.connection)
        return cursor

    def contended(self, error: Exception) -> bool:
        return "locked" in str(error)

    def execute(self, cursor: Cursor, statement: str, asked: Named) -> Cursor:
        deadline = monotonic() + ROW_WAIT
        while True:
            try:
                cursor.execute(statement, asked)
                return cursor
            except Exception as error:
                # Connections that share a cache (databases in memory, for tests) are told
                # "table is locked" at once: there the driver's `timeout` waits for nothing.
                if "table is locked" not in str(error) or monotonic() > deadline:
                    raise
            sleep(0.002)

    def take(self, cursor: Cursor, claim: Claim, asked: Named, step: Step) -> Grant | Busy | None:
        if self.execute(cursor, self.TAKE, asked).rowcount == 1:
            mine = self.execute(cursor, self.FENCE, asked).fetchone()
            return Grant(claim, fence=mine[0]) if mine else None
        row = self.read(cursor, claim.key)
        return busy(row.left_us) if row else None

    def lock_row(self, cursor: Cursor, claim: Claim, wait: float | None) -> int | Busy | None:
        """Lock the file for writing, which is all that SQLite can lock."""
        free = {"key": claim.key, "owner": "", "name": self.text_of(claim.name)}
        try:
            with waiting_for_file(cursor, wait):
                cursor.execute(self.MAKE, free)
                taken = cursor.execute(self.LOCK_ROW, free).rowcount == 1
        except Exception as error:
            if code_of(error) == OLD_SNAPSHOT or not self.contended(error):
                raise
            return Busy()
        # Leased at the last moment: this transaction has the file, and its holder cannot go on.
        return int(cursor.execute(self.FENCE, free).fetchone()[0]) if taken else Busy()
