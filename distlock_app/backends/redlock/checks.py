"""System checks of Redlock: nodes that forget locks, or are one server under two names."""

from __future__ import annotations

from collections.abc import Sequence

from django.core.checks import CheckMessage, Error, Warning

from ...errors import BackendError
from ..redis.alias import recipe
from ..redis.checks import check_server, check_sharing
from ..redis.pool import Pool
from ..redis.scripts import pack


def check_nodes(alias: str, location: Sequence[str], *, ask: bool) -> list[CheckMessage]:
    """Look at every node; `ask` allows questions to the servers."""
    messages: list[CheckMessage] = []
    runs: dict[bytes, str] = {}
    forgetful = []
    for name in location:
        messages += check_sharing(alias, name)
        if not ask:
            continue
        pool = Pool(name, recipe(name))
        messages += (found := check_server(alias, pool))
        if any(message.id == "distlock_app.E013" for message in found):
            continue
        facts = _facts(pool)
        pool.close()
        other = runs.setdefault(facts.get(b"run_id", name.encode()), name)
        if other != name:
            messages.append(
                Error(
                    f"DISTLOCK[{alias!r}] counts one server twice: {other!r} and {name!r}.",
                    hint="A majority needs independent servers: replace one of the aliases.",
                    id="distlock_app.E014",
                )
            )
        if facts.get(b"aof_enabled") == b"0":
            forgetful.append(name)
    if forgetful:
        messages.append(
            Warning(
                f"DISTLOCK[{alias!r}]: {', '.join(forgetful)} lose all locks in a restart.",
                hint="Set appendonly yes and appendfsync always, or restart a node that went down "
                "only after the longest ttl.",
                id="distlock_app.W015",
            )
        )
    return messages


def _facts(pool: Pool) -> dict[bytes, bytes]:
    try:
        texts = pool.ask(pack(b"INFO", b"server"), pack(b"INFO", b"persistence"))
    except BackendError:
        return {}
    lines = b"\n".join(texts).splitlines()
    return dict(line.split(b":", 1) for line in lines if b":" in line)
