"""`NamedLockBackend`: named locks of MySQL and MariaDB (GET_LOCK), on sessions of our own."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import ceil
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from ..claims import Claim
from ..primitives.names import KEY, is_key
from .base import batches
from .sessions.backend import SessionLocksBackend
from .sessions.link import ANSWER_WAIT, MySQLLink, ServerError, Values
from .sessions.lock_session import GRACE, REPLICA, HeldLock, LockSession
from .sessions.notes import note
from .sessions.pool import LONG_WAITS, PROCESSES, adapt_to_mysql

# Deadlock of user locks (MySQL, MariaDB), lock wait timeout: then nothing was locked.
BUSY = frozenset({3058, 1213, 1205})

# Interrupted by the statement's own limit, or by KILL QUERY.
INTERRUPTED = frozenset({3024, 1317})

NO_SUCH_THREAD = 1094

# MYSQL_OPTION_MULTI_STATEMENTS_OFF: a session runs one statement at a time.
ONE_STATEMENT = 1

# 0 or 1, or a word where it has more than two values; the readers of Aurora say it of InnoDB only.
WRITABLE = "CAST(@@read_only AS CHAR) IN ('0', 'OFF') AND NOT @@innodb_read_only"
# A primary may be made a replica, and keeps its sessions.
IS_OURS = "IS_USED_LOCK(%s) = CONNECTION_ID() AND " + WRITABLE

# A node of Galera; of Group Replication in that mode.
SEVERAL_PRIMARIES = """
    SHOW VARIABLES
     WHERE (variable_name, value)
        IN (('wsrep_on', 'ON'), ('group_replication_single_primary_mode', 'OFF'))"""

# Not NOW(), which is the start of the statement. Zone and mode are of our own session.
NOW_US = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6))"

# Granted locks, and what their session said last. MySQL has this on by default, but few may read
# it; MariaDB calls the lock a schema.
INSTRUMENTED = """
    SELECT COALESCE(NULLIF(held.OBJECT_NAME, ''), held.OBJECT_SCHEMA), thread.PROCESSLIST_ID,
           CAST(statement.SQL_TEXT AS BINARY)
      FROM performance_schema.metadata_locks AS held
      JOIN performance_schema.threads AS thread ON thread.THREAD_ID = held.OWNER_THREAD_ID
      LEFT JOIN performance_schema.events_statements_current AS statement
        ON statement.THREAD_ID = thread.THREAD_ID AND statement.NESTING_EVENT_ID IS NULL
     WHERE held.OBJECT_TYPE = 'USER LEVEL LOCK' AND held.LOCK_STATUS = 'GRANTED'"""

# MariaDB, if an administrator has installed its plugin.
PLUGIN = """
    SELECT TABLE_SCHEMA, THREAD_ID, NULL
      FROM information_schema.METADATA_LOCK_INFO
     WHERE LOCK_TYPE = 'User lock'"""

# Access denied: to a command, a table, for want of a privilege.
DENIED = frozenset({1044, 1142, 1143, 1227, 1370})

WHO = f"SELECT id, host, info FROM {PROCESSES}"
WAITS = re.compile(rf"GET_LOCK\('(distlock:[0-9a-f]{{12}}:{KEY})'")

Held = dict[str, tuple[int, str | None]]

# Locks that one statement asks about by name.
BATCH = 200


class NamedLockSession(MySQLLink, LockSession):
    """A session on MySQL or MariaDB, spoken to through mysqlclient."""

    def adapt(self, wrapper: Any) -> None:
        adapt_to_mysql(wrapper)

    def connect(self, connection: Any) -> None:
        if not hasattr(connection, "send_query"):
            raise ImproperlyConfigured("NamedLockBackend needs mysqlclient")
        with suppress(connection.Error):  # a proxy may not know it
            connection.set_server_option(ONE_STATEMENT)  # not before: init_command may be several
        super().connect(connection)
        # A server that died without a word: mysqlclient has no option for it. Only Linux has this,
        # and no Unix socket.
        with suppress(AttributeError, OSError), socket.socket(fileno=os.dup(self.fd)) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, ANSWER_WAIT * 1000)

    def begin(self) -> int:
        self.ask(f"SET SESSION time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES' {LONG_WAITS}")
        ((number, version, schema, sysdate_is_now, writable),) = self.ask(
            f"SELECT CONNECTION_ID(), VERSION(), DATABASE(), SYSDATE(6) = NOW(6), {WRITABLE}"
        )
        if not writable:
            raise ServerError(None, REPLICA)
        # User locks are the whole server's: those of other schemas are other locks. Not by the
        # alias's NAME, which is empty if a file of the client's names the schema.
        self.prefix = f"distlock:{hashlib.sha256((schema or '').encode()).hexdigest()[:12]}:"
        self.is_mariadb = "mariadb" in str(version).lower()
        # With --sysdate-is-now no clock can be read after the lock was granted.
        self.reads_clock = not sysdate_is_now
        return int(number)

    def take(self, claim: Claim, wait: float) -> tuple[int | None, float] | None:
        try:
            locking = self._locking(claim, wait)
            ((locked, fence, writable),), began = self.wait(locking, wait + ANSWER_WAIT)
        except ServerError as error:
            if error.code in BUSY:
                return None
            if error.code not in INTERRUPTED:
                raise
            locked = None
        if locked is None:  # interrupted: it may have been locked just then
            self.ask("SELECT RELEASE_ALL_LOCKS()")
            if self.is_mariadb or wait == 0:  # not by the limit that MySQL was given
                raise ServerError(None, "GET_LOCK answered NULL")
        if locked and not writable:
            raise ServerError(None, REPLICA)
        return (fence if self.reads_clock else None, began) if locked else None

    def _locking(self, claim: Claim, wait: float) -> str:
        limit, seconds = "", wait
        if not self.is_mariadb:
            # MySQL rounds it to whole seconds: there, the statement has the exact limit.
            seconds = ceil(wait)
            if wait > 0:
                limit = f"/*+ MAX_EXECUTION_TIME({max(1, round(wait * 1000))}) */"
        # Columns are computed from left to right: the others are of the time of the lock.
        return (
            f"SELECT {limit} GET_LOCK('{self.prefix}{claim.key}', {seconds}) {note(claim)},"
            f" {NOW_US}, {WRITABLE}"
        )

    def question(self, claim: Claim) -> tuple[str, Values]:
        return f"SELECT {note(claim, self.fence)} {IS_OURS}", (f"{self.prefix}{claim.key}",)

    def unlock(self, claim: Claim) -> bool:
        return self.ask(f"SELECT RELEASE_LOCK('{self.prefix}{claim.key}')") == [(1,)]

    def keep(self, ttl: float) -> None:
        self.ask("SET SESSION wait_timeout = %s", ceil(ttl + GRACE))
        self.ttl = ttl

    def locks(self, key: str | None, ours: Iterable[str]) -> Iterator[HeldLock]:
        threads = {number: (host, text(info)) for number, host, info in self.ask(WHO)}
        waiting = [(lock, info) for _, info in threads.values() for lock in WAITS.findall(info)]
        waiters = Counter(lock for lock, _ in waiting)
        notes = dict(waiting)
        now_us, held = self._held({key, *ours} if key else {*ours}, waiters)
        for lock, (number, said) in held.items():
            found = lock.removeprefix(self.prefix)
            if not is_key(found) or key not in (None, found):
                continue
            address = threads.get(number, ("", ""))[0]
            named = notes.get(lock)  # a waiter for it says its name
            yield HeldLock(found, number, address, said, waiters[lock], now_us, named=named)

    def _held(self, keys: set[str], waited: Iterable[str]) -> tuple[int, Held]:
        """Return the server's time, and all locks that it shows, or else those asked for."""
        ((now_us, instrumented, plugin),) = self.ask(
            f"SELECT {NOW_US}, @@performance_schema, (SELECT COUNT(*) FROM "
            "information_schema.PLUGINS WHERE PLUGIN_NAME = 'METADATA_LOCK_INFO')"
        )
        held: Held = {}
        if instrumented or plugin:
            try:
                rows = self.ask(INSTRUMENTED if instrumented else PLUGIN)
                held = {lock: (int(number), text(said)) for lock, number, said in rows}
            except ServerError as error:
                if error.code not in DENIED:
                    raise
        more = sorted({f"{self.prefix}{key}" for key in keys} | {*waited} - held.keys())
        for some in batches(more, BATCH):
            (row,) = self.ask("SELECT " + ", ".join(["IS_USED_LOCK(%s)"] * len(some)), *some)
            used = zip(some, row, strict=True)
            held |= {lock: (number, None) for lock, number in used if number is not None}
        return now_us, held

    def stop(self, number: int) -> None:
        # Measured on MariaDB 10.11: a session that waits in GET_LOCK stays without a client.
        try:
            self.ask("KILL %s", number)
        except ServerError as error:
            if error.code != NO_SUCH_THREAD:
                raise

    def kill(self, key: str, number: int) -> bool:
        lock = f"{self.prefix}{key}"
        try:  # NULL is not a thread
            self.ask("KILL CASE WHEN IS_USED_LOCK(%s) = %s THEN %s END", lock, number, number)
        except ServerError as error:
            if error.code != NO_SUCH_THREAD:
                raise
            return False
        self.ask("SELECT GET_LOCK(%s, 1)", lock)  # the server cleans up in its own time
        self.ask("SELECT RELEASE_ALL_LOCKS()")
        return True


class NamedLockBackend(SessionLocksBackend):
    """GET_LOCK: a hash of the name, with the schema's, of 64 lower-case characters at most."""

    vendor = "mysql"
    session_type = NamedLockSession

    def look_around(self, session: LockSession) -> Iterator[checks.CheckMessage]:
        if session.ask(SEVERAL_PRIMARIES):
            yield checks.Warning(
                f"DISTLOCK[{self.alias!r}]: {self.using!r} is a cluster (Galera, or Group "
                "Replication with several primaries), whose nodes do not share named locks.",
                hint="Let LOCATION name a database alias that always connects to the same node.",
                id="distlock_app.W032",
            )


def text(said: bytes | None) -> str:
    """Return what a session said, whatever is in it; what we say is ASCII."""
    return (said or b"").decode("ascii", "replace")
