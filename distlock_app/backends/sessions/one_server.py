"""System checks: do connections reach one server, and has each of them a session of its own?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

from django.core.checks import CheckMessage, Warning
from django.db import Error as DjangoDatabaseError
from django.db import connections

from .link import PostgreSQLLink, ReplyTimeout, ServerError
from .pool import adapt_to_mysql, adapt_to_postgresql, copy_of

# What tells one server from another, by vendor; and how to show it. Pgpool sends what is about
# locks to the primary, so this, too.
SERVER = {
    "mysql": "SELECT CONCAT_WS(':', @@hostname, @@port, @@server_id)",
    "postgresql": """/*NO LOAD BALANCE*/
        SELECT pg_postmaster_start_time(),
               CONCAT_WS(' since ', inet_server_addr(), pg_postmaster_start_time())""",
}
# Open at once, so that a load balancer spreads them.
CONNECTIONS = 4


def check_one_server(alias: str, using: str) -> Iterator[CheckMessage]:
    """Warn if connections to the database `using` reach different servers."""
    question = SERVER.get(connections[using].vendor)
    answers = _asked_at_once(using, question) if question else []
    servers = {row[0]: str(row[-1]) for row in answers}
    if len(servers) > 1:
        yield Warning(
            f"DISTLOCK[{alias!r}]: connections to {using!r} reach different servers "
            f"({', '.join(sorted(servers.values()))}), as through a load balancer.",
            hint="Locks of one server do not exclude callers on another: use an alias that always "
            "connects to the same server, unless all of them are nodes of one synchronous cluster.",
            id="distlock_app.W033",
        )


def lends_by_transaction(using: str) -> bool:
    """Return whether a pooler before PostgreSQL does: connections that idle share a session."""
    sessions = _asked_at_once(using, "SELECT pg_backend_pid()")
    return len(set(sessions)) < len(sessions)


def _asked_at_once(using: str, question: str) -> list[Any]:
    """Return what several connections answer that are open at once, as far as they do in time."""
    answers: list[Any] = []
    with suppress(DjangoDatabaseError, ServerError, ReplyTimeout), ExitStack() as stack:
        for _ in range(CONNECTIONS):  # another check reports an error
            wrapper = copy_of(using)
            stack.callback(wrapper.close)
            if wrapper.vendor == "mysql":
                adapt_to_mysql(wrapper)
            else:
                adapt_to_postgresql(wrapper)
            cursor = stack.enter_context(wrapper.cursor())
            if hasattr(wrapper.connection, "pgconn"):  # a pooler may have no session for it
                link = PostgreSQLLink()
                link.connect(wrapper.connection)
                answers += link.ask(question)
            else:
                cursor.execute(question)
                answers.append(cursor.fetchone())
    return answers
