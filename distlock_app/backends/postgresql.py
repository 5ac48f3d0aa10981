"""`AdvisoryLockBackend`: PostgreSQL's advisory locks, on sessions of our own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..claims import Claim
from .sessions.backend import SessionLocksBackend
from .sessions.link import ANSWER_WAIT, PostgreSQLLink, ServerError, Value, Values
from .sessions.lock_session import GRACE, REPLICA, HeldLock, LockSession
from .sessions.notes import NOTE, note
from .sessions.one_server import lends_by_transaction
from .sessions.pool import adapt_to_postgresql

# Lock timeout; deadlock.
BUSY = frozenset({"55P03", "40P01"})

# Milliseconds, 24.8 days: a session with a longer ttl is asked often enough all the same.
MAX_TIMEOUT = 2**31 - 1

NOW_US = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"

# Limits of a role or a database must not end our waits (the last exists from version 17 on), and
# what else the server says while we wait would look like its answer.
BEGIN = """
    SELECT pg_backend_pid(),
           (SELECT count(set_config(name, '0', false))
              FROM pg_settings
             WHERE name IN ('statement_timeout', 'lock_timeout', 'transaction_timeout')),
           pg_is_in_recovery(),
           set_config('client_min_messages', 'error', false)"""
# A client that went away while it waited leaves the queue within a second. Not on Windows, and
# before version 15 on Linux only.
NOTICE_THE_DEAD = "SELECT set_config('client_connection_check_interval', '1000', false)"

# Advisory locks are open to all apps. A session of ours has this name, and its last statement has
# the note of its lock, unless the server does not show it: to another user, or to any.
APPLICATION = "distlock"

# An advisory lock on a bigint: classid is its upper half, objid the lower, objsubid is 1.
OURS = """
      FROM pg_locks AS lock
      JOIN pg_stat_activity AS activity USING (pid)
     WHERE lock.locktype = 'advisory' AND lock.granted AND lock.objsubid = 1
       AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
       AND activity.application_name = $1
       AND (activity.query LIKE $2 OR activity.state IS NULL OR activity.state = 'disabled')"""
OF_KEY = " AND lock.classid = $3::oid AND lock.objid = $4::oid"

LOCKS = f"""
    SELECT lock.pid, lock.mode, activity.query, lock.classid, lock.objid, {NOW_US},
           (extract(epoch FROM activity.state_change) * 1000000)::bigint,
           (SELECT count(*) FROM pg_locks AS waiter
             WHERE waiter.locktype = 'advisory' AND NOT waiter.granted
               AND (waiter.database, waiter.classid, waiter.objid, waiter.objsubid)
                   = (lock.database, lock.classid, lock.objid, lock.objsubid)),
           coalesce(host(activity.client_addr), '') || ':' || activity.client_port
    {OURS}"""

KILL = f"SELECT pg_terminate_backend(lock.pid, $5::bigint) {OURS} {OF_KEY} AND lock.pid = $6::int"

AROUND = (
    "Let LOCATION name a database alias that connects to the server directly, or to a pooler in "
    "session mode."
)


class AdvisoryLockSession(PostgreSQLLink, LockSession):
    """A session on PostgreSQL, spoken to through libpq as psycopg wraps it."""

    limit = 0.0  # of the server for a wait, in seconds

    def adapt(self, wrapper: Any) -> None:
        adapt_to_postgresql(wrapper)
        options = wrapper.settings_dict["OPTIONS"]
        options.pop("assume_role", None)  # the one that logged in may end its other sessions
        options["application_name"] = APPLICATION

    def connect(self, connection: Any) -> None:
        if not hasattr(connection, "pgconn"):
            raise ImproperlyConfigured("AdvisoryLockBackend needs psycopg 3, not psycopg2")
        super().connect(connection)

    def begin(self) -> int:
        ((pid, _, recovers, _),) = self.ask(BEGIN)
        if recovers:
            raise ServerError(None, REPLICA)
        with suppress(ServerError):
            self.ask(NOTICE_THE_DEAD)
        return int(pid)

    def take(self, claim: Claim, wait: float) -> tuple[int | None, float] | None:
        if wait > 0 and self.limit != wait:
            limit = max(1, round(wait * 1000))
            self.ask(f"{self.note()} SELECT set_config('lock_timeout', $1, false)", limit)
            self.limit = wait
        # Prepared, as a note makes each statement a new one to the server. Columns are computed
        # from left to right: the time is that of the lock.
        verb = f"pg{'_try' * (wait == 0)}_advisory_lock{'_shared' * claim.shared}"
        lock = f"SELECT {verb}($1::bigint), {NOW_US}"
        name = self.prepared.get(lock) or self.prepare_once(lock)
        take = f"{note(claim)} EXECUTE {name}({_number(claim.key)})"
        try:
            # With values, if none: so the server takes it for one statement, whatever is in it.
            ((locked, fence),), began = self.wait(take, wait + ANSWER_WAIT, ())
        except ServerError as error:
            if error.code in BUSY:
                # It may have been granted just as the wait ended; the session keeps it then.
                self.ask("SELECT pg_advisory_unlock_all()")
                return None
            raise
        return None if locked is False else (fence, began)

    def question(self, claim: Claim) -> tuple[str, Values]:
        # Not the lock but the session: behind a pooler, another process of the server would answer.
        return f"{note(claim, self.fence)} SELECT pg_backend_pid() = $1::int", (self.number,)

    def unlock(self, claim: Claim) -> bool:
        unlock = f"SELECT pg_advisory_unlock{'_shared' * claim.shared}($1::bigint)"
        if unlock not in self.prepared:
            self.prepare_once(unlock)
        return self.ask(unlock, _number(claim.key)) == [(True,)]

    def keep(self, ttl: float) -> None:
        statement = f"{self.note()} SELECT set_config('idle_session_timeout', $1, false)"
        self.ask(statement, min(round((ttl + GRACE) * 1000), MAX_TIMEOUT))
        self.ttl = ttl

    def locks(self, key: str | None, ours: Iterable[str]) -> Iterator[HeldLock]:
        rows = self.ask(LOCKS + OF_KEY, *_ours(key)) if key else self.ask(LOCKS, *_ours())
        for row in rows:
            pid, mode, query, upper, lower, now_us, since_us, waiters, address = row
            said = NOTE.search(query or "")
            # Untold, it is the one that was asked for; there are but 64 bits to compare.
            found = said[2] if said else key or ""
            if found.startswith(f"{upper:08x}{lower:08x}"):
                kind = "shared" if mode == "ShareLock" else "exclusive"
                yield HeldLock(found, pid, address, query, waiters, now_us, since_us, kind=kind)

    def stop(self, number: int) -> None:
        self.ask("SELECT pg_terminate_backend($1::int, $2::bigint)", number, ANSWER_WAIT * 100)

    def kill(self, key: str, number: int) -> bool:
        return bool(self.ask(KILL, *_ours(key), ANSWER_WAIT * 500, number))


class AdvisoryLockBackend(SessionLocksBackend):
    """Advisory locks: 64 bits of the name's hash, in the key space of their database."""

    shares = True
    vendor = "postgresql"
    session_type = AdvisoryLockSession

    def check(self, *, ask: bool = False) -> list[checks.CheckMessage]:
        found = super().check(ask=ask)
        if connections[self.using].settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"):
            found.append(
                checks.Warning(
                    f"DISTLOCK[{self.alias!r}]: {self.using!r} seems to be behind a transaction "
                    "pooler (DISABLE_SERVER_SIDE_CURSORS).",
                    hint=AROUND,
                    id="distlock_app.W031",
                )
            )
        return found

    def look_around(self, session: LockSession) -> Iterator[checks.CheckMessage]:
        if lends_by_transaction(self.using):
            yield checks.Error(
                f"DISTLOCK[{self.alias!r}]: {self.using!r} is behind a transaction pooler: locks "
                "are lost or left behind.",
                hint=AROUND,
                id="distlock_app.E032",
            )


class MigrationLockBackend(AdvisoryLockBackend):
    """That of `migrate_locked`: its waiters poll.

    One that waits on the server has a snapshot, for whose end CREATE INDEX CONCURRENTLY waits.
    """

    sessions_waiting = 0


@lru_cache(maxsize=1024)
def _number(key: str) -> int:
    """Return the first 64 bits of a key as PostgreSQL's bigint."""
    number = int(key[:16], 16)
    return number - 2**64 if number >= 2**63 else number


def _ours(key: str | None = None) -> tuple[Value, ...]:
    """Return the values of OURS, and of OF_KEY for a key."""
    if key is None:
        return APPLICATION, "/* distlock %"
    return APPLICATION, f"/* distlock ________ {key} %", int(key[:8], 16), int(key[8:16], 16)
