"""System check: do all connections to a database reach the same server?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress

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
    if question is None:
        return
    servers = {}
    with suppress(DjangoDatabaseError), ExitStack() as stack:  # another check reports an error
        for _ in range(CONNECTIONS):
            connection = connections[using].copy()
            connection.settings_dict["OPTIONS"].pop("pool", None)
            stack.callback(connection.close)
            cursor = stack.enter_context(connection.cursor())
            cursor.execute(question)
            server = cursor.fetchone()
            servers[server[0]] = str(server[-1])
    if len(servers) > 1:
        yield Warning(
            f"DISTLOCK[{alias!r}]: connections to {using!r} reach different servers "
            f"({', '.join(sorted(servers.values()))}), as through a load balancer.",
            hint="Locks of one server do not exclude callers on another: use an alias that always "
            "connects to the same server, unless all of them are nodes of one synchronous cluster.",
            id="distlock_app.W033",
        )
