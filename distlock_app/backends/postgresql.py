"""PostgreSQL's advisory locks: locks of the server's own, each on a session of ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..claims import Claim
from .server_sessions import ANSWER_WAIT, GRACE, Rows, Trouble
from .session_locks import LockSession, SessionLocksBackend, note

# Lock timeout; deadlock; then nothing was locked.
BUSY = frozenset({"55P03", "40P01"})

# Milliseconds, 24.8 days: a session with a longer ttl is asked often enough all the same.
MAX_TIMEOUT = 2**31 - 1

NOW_US = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"

# Limits of a role or a database must not end our waits (the last exists from version 17 on);
# a client that went away while it waited leaves the queue within a second.
BEGIN = """
    SELECT pg_backend_pid(),
           (SELECT count(set_config(name, '0', false))
              FROM pg_settings
             WHERE name IN ('statement_timeout', 'lock_timeout', 'transaction_timeout')),
           set_config('client_connection_check_interval', '1000', false)"""

# An advisory lock on a bigint: classid is its upper half, objid the lower, objsubid is 1.
LOCKS = """
    SELECT lock.pid, lock.mode, activity.query, lock.classid, lock.objid,
           (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
           (extract(epoch FROM activity.state_change) * 1000000)::bigint,
           (SELECT count(*) FROM pg_locks AS waiter
             WHERE waiter.locktype = 'advisory' AND NOT waiter.granted
               AND (waiter.database, waiter.classid, waiter.objid, waiter.objsubid)
                   = (lock.database, lock.classid, lock.objid, lock.objsubid)),
           coalesce(host(activity.client_addr), '') || ':' || activity.client_port
      FROM pg_locks AS lock
      JOIN pg_stat_activity AS activity USING (pid)
     WHERE lock.locktype = 'advisory' AND lock.granted AND lock.objsubid = 1
       AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())"""

KILL = """
    SELECT pg_terminate_backend(pid, {wait})
      FROM pg_locks
     WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND pid = {pid}
       AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
       AND classid = {upper} AND objid = {lower}"""


AROUND = (
    "Let LOCATION name a database alias that goes to the server itself, or to a pooler that "
    "keeps one session for each client."
)


class AdvisoryLockSession(LockSession):
    """A session on PostgreSQL, spoken to through libpq as psycopg wraps it."""

    def adapt(self, settings: dict[str, Any]) -> None:
        options = settings["OPTIONS"]
        options.pop("pool", None)
        options.pop("isolation_level", None)
        options.setdefault("connect_timeout", ANSWER_WAIT)
        options.setdefault("tcp_user_timeout", ANSWER_WAIT * 1000)
        options.setdefault("application_name", "distlock")

    def descriptor(self) -> int:
        if not hasattr(self.wrapper.connection, "pgconn"):
            raise ImproperlyConfigured("AdvisoryLockBackend needs psycopg 3, not psycopg2")
        self._pq = self.wrapper.connection.pgconn
        return int(self._pq.socket)

    def begin(self) -> int:
        return int(self.ask(BEGIN)[0][0])

    def send(self, question: str) -> None:
        try:
            self._pq.send_query(question.encode())
            while self._pq.flush():  # what does not fit into the socket's buffer
                self.heard(0.01)
        except self.wrapper.Database.Error as error:
            raise Trouble(None, str(error)) from error

    def receive(self) -> Rows:
        rows: Rows = []
        refused = None
        try:
            while True:
                while self._pq.is_busy():
                    if not self.heard(ANSWER_WAIT):
                        raise Trouble(None, "half an answer")
                    self._pq.consume_input()
                result = self._pq.get_result()
                if result is None:
                    break
                if message := result.error_message:
                    refused = Trouble(_text(result.error_field(ord("C"))), message.decode())
                rows += [
                    tuple(_text(result.get_value(row, column)) for column in range(result.nfields))
                    for row in range(result.ntuples)
                ]
        except self.wrapper.Database.Error as error:
            raise Trouble(None, str(error)) from error
        self.owes = False
        if refused:
            raise refused
        return rows

    def take(self, claim: Claim, wait: float) -> tuple[int | None, float] | None:
        mode = "_shared" if claim.shared else ""
        steps = []
        if self.ttl != claim.ttl:
            steps.append(self._keeping(claim.ttl))
        if wait > 0:
            steps.append(f"set_config('lock_timeout', '{max(1, round(wait * 1000))}', true)")
        attempt = "" if wait > 0 else "try_"
        # Columns are computed from left to right: the time is that of the lock.
        steps += [f"pg_{attempt}advisory_lock{mode}({_number(claim.key)})", NOW_US]
        try:
            rows, began = self.wait(f"SELECT {note(claim)} {', '.join(steps)}", wait + ANSWER_WAIT)
        except Trouble as error:
            if error.code in BUSY:
                return None
            raise
        self.ttl = claim.ttl
        *_, locked, fence = rows[0]
        return None if locked == "f" else (int(fence), began)

    def question(self, claim: Claim) -> str:
        # Not the lock but the session: who shares one with others is asked by another process.
        return f"SELECT {note(claim, self.fence)} pg_backend_pid() = {self.number}"

    def unlock(self, claim: Claim) -> bool:
        mode = "_shared" if claim.shared else ""
        return bool(self.ask(f"SELECT pg_advisory_unlock{mode}({_number(claim.key)})") == [("t",)])

    def keep(self, ttl: float) -> None:
        self.ask(f"SELECT {self._keeping(ttl)}")
        self.ttl = ttl

    @staticmethod
    def _keeping(ttl: float) -> str:
        timeout = min(round((ttl + GRACE) * 1000), MAX_TIMEOUT)
        return f"set_config('idle_session_timeout', '{timeout}', false)"

    def locks(self, key: str | None, ours: Iterable[str]) -> Iterator[dict[str, Any]]:
        statement = LOCKS
        if key is not None:
            upper, lower = _halves(key)
            statement += f" AND lock.classid = {upper} AND lock.objid = {lower}"
        for row in self.ask(statement):
            pid, mode, query, upper, lower, now_us, since_us, waiters, address = row
            if key is not None or "/* distlock " in (query or ""):
                yield {
                    "number": int(pid),
                    "key": f"{int(upper):08x}{int(lower):08x}",
                    "kind": "shared" if mode == "ShareLock" else "exclusive",
                    "note": query,
                    "now_us": int(now_us),
                    "since_us": int(since_us),
                    "waiters": int(waiters),
                    "holder": {"host": address, "who": f"session {pid}"},
                }

    def kill(self, key: str, number: int) -> bool:
        upper, lower = _halves(key)
        wait = ANSWER_WAIT * 500
        statement = KILL.format(wait=wait, pid=number, upper=upper, lower=lower)
        return bool(self.ask(statement))


class AdvisoryLockBackend(SessionLocksBackend[AdvisoryLockSession]):
    """Advisory locks: 64 bits of the name's hash, in the key space of their database."""

    shares = True
    vendor = "postgresql"
    session_type = AdvisoryLockSession

    def check(self, *, ask: bool = False) -> list[checks.CheckMessage]:
        found = super().check(ask=ask)
        if connections[self.using].settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"):
            found.append(
                checks.Warning(
                    f"DISTLOCK[{self.alias!r}]: {self.using!r} seems to be behind a pooler that "
                    "lends sessions by the transaction (DISABLE_SERVER_SIDE_CURSORS).",
                    hint=AROUND,
                    id="distlock_app.W031",
                )
            )
        return found

    def look_around(self, session: AdvisoryLockSession) -> Iterator[checks.CheckMessage]:
        other = self._lend()
        numbers = {session.ask("SELECT pg_backend_pid()")[0][0] for _ in range(3)}
        self._pool.give_back(other)
        if numbers != {str(session.number)} or other.number == session.number:
            yield checks.Error(
                f"DISTLOCK[{self.alias!r}]: a pooler lends the sessions of {self.using!r} by the "
                "transaction: locks are lost, and left behind.",
                hint=AROUND,
                id="distlock_app.E032",
            )


def _text(value: bytes | None) -> str | None:
    return None if value is None else bytes(value).decode()


def _number(key: str) -> int:
    """Return the first 64 bits of a key as PostgreSQL's bigint."""
    number = int(key[:16], 16)
    return number - 2**64 if number >= 2**63 else number


def _halves(key: str) -> tuple[int, int]:
    return int(key[:8], 16), int(key[8:16], 16)
