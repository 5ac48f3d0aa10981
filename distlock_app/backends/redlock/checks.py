"""System checks of Redlock: nodes that forget locks, or are one server under two names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from django.core.checks import CheckMessage, Error, Warning

from ...errors import BackendError
from ..base import no_answer
from ..redis.alias import recipe
from ..redis.checks import check_server, check_sharing, facts_of
from ..redis.pool import Pool


def check_nodes(alias: str, location: Sequence[str], *, ask: bool) -> list[CheckMessage]:
    """Look at every node; `ask` allows questions to the servers."""
    messages = [message for name in location for message in check_sharing(alias, name)]
    if not ask:
        return messages
    names: dict[str, str] = {}  # of the servers, by what tells them apart
    forgetful = []
    for name in location:
        found, facts = _asked(alias, name)
        messages += found
        other = names.setdefault(facts.get("run_id", name), name)
        if other != name:
            messages.append(
                Error(
                    f"DISTLOCK[{alias!r}] counts one server twice: {other!r} and {name!r}.",
                    hint="A majority needs independent servers: replace one of the aliases.",
                    id="distlock_app.E014",
                )
            )
        if facts.get("aof_enabled") == "0":
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


def _asked(alias: str, name: str) -> tuple[list[CheckMessage], dict[str, str]]:
    """Return messages about one node, and what it says about itself, if it answers."""
    with closing(Pool(name, recipe(name))) as pool:
        try:
            facts = facts_of(pool, b"server", b"persistence")
        except BackendError as error:
            return [no_answer(alias, error, "distlock_app.E013")], {}
        return check_server(alias, pool), facts
