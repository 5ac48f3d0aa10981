"""System checks: do connections reach one server, and has each of them a session of its own?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

from django.core.checks import CheckMessage, Warning
from django.db import Error as DjangoDatabaseError
from django.db import connections

# What tells one server from another, by vendor; and how to show it.
SERVER = {
    "mysql": "SELECT CONCAT_WS(':', @@hostname, @@port, @@server_id)",
    "postgresql": """
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
    """Return what several connections answer that are open at once."""
    answers = []
    with suppress(DjangoDatabaseError), ExitStack() as stack:  # another check reports an error
        for _ in range(CONNECTIONS):
            connection = connections[using].copy()
            connection.settings_dict["OPTIONS"].pop("pool", None)
            stack.callback(connection.close)
            cursor = stack.enter_context(connection.cursor())
            cursor.execute(question)
            answers.append(cursor.fetchone())
    return answers
