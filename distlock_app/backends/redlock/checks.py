"""Checks of Redlock: its LOCATION; nodes that forget locks, or are one server under two names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured

from ..redis.alias import recipe, server_of
from ..redis.checks import check_server, check_sharing
from ..redis.pool import Pool


def checked_location(location: Any) -> list[tuple[str, Any]]:
    """Return the aliases of a LOCATION and how to connect to each, or say what is wrong."""
    if not isinstance(location, (list, tuple)) or not all(isinstance(a, str) for a in location):
        raise ImproperlyConfigured(
            "LOCATION must be a list of aliases in CACHES, one for each server."
        )
    if len(location) < 3 or len(location) % 2 == 0:
        raise ImproperlyConfigured(
            f"LOCATION names {len(location)} servers; a majority needs an odd number, at least 3. "
            "For a single server use RedisBackend."
        )
    recipes = [(alias, recipe(alias)) for alias in location]
    _check_independence(location)
    return recipes


def _check_independence(location: Sequence[str]) -> None:
    """Raise ImproperlyConfigured if one server is named twice."""
    names: dict[Any, str] = {}
    for alias in location:
        server = (server_of(alias) or (alias,))[0]
        if server in names:
            raise ImproperlyConfigured(
                f"LOCATION names the same server twice, as {names[server]!r} and {alias!r}: a "
                "majority needs independent servers."
            )
        names[server] = alias


def check_nodes(alias: str, location: Sequence[str], *, ask: bool) -> Iterator[CheckMessage]:
    """Look at every node; `ask` allows questions to the servers."""
    for name in location:
        yield from check_sharing(alias, name)
    if not ask:
        return
    names: dict[str, str] = {}  # of the servers, by what tells them apart
    forgetful = []
    for name in location:
        with closing(Pool(name, recipe(name))) as pool:
            found, by_name = check_server(alias, pool)
        yield from found
        facts = by_name.get(name, {})
        other = names.setdefault(facts.get("run_id", name), name)
        if other != name:
            yield Error(
                f"DISTLOCK[{alias!r}] counts one server twice: {other!r} and {name!r}.",
                hint="A majority needs independent servers: replace one of the aliases.",
                id="distlock_app.E014",
            )
        if facts.get("aof_enabled") == "0":
            forgetful.append(name)
    if forgetful:
        yield Warning(
            f"DISTLOCK[{alias!r}]: {', '.join(forgetful)} lose all locks in a restart.",
            hint="Set appendonly yes and appendfsync always, or restart a node that went down only "
            "after the longest ttl.",
            id="distlock_app.W015",
        )
