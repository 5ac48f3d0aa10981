"""Checks of Redis: a PREFIX that is none, and settings under which locks would vanish."""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured

from ...errors import BackendError
from ..base import no_answer
from .alias import server_of
from .pool import Pool, Servers
from .scripts import Script, pack

NOTHING = Script("return {}", keys=0, args=0)


def refuse_wrong_prefix(prefix: Any) -> None:
    """Raise ImproperlyConfigured for what no key of ours can begin with."""
    if not isinstance(prefix, str) or not prefix or set(prefix) & {"{", "}", *string.whitespace}:
        raise ImproperlyConfigured("PREFIX must be text without braces or blanks.")


def check_sharing(alias: str, location: str | None) -> Iterator[CheckMessage]:
    """Warn if a cache lives in the database of the locks: its clear() is a FLUSHDB."""
    if location is None:
        return
    here = server_of(location)
    others = [other for other in settings.CACHES if other != location and server_of(other) == here]
    if here is not None and (location == "default" or others):
        yield Warning(
            f"The locks of DISTLOCK[{alias!r}] are in the Redis database of the cache "
            f"{(others or [location])[0]!r}: clearing that cache deletes them all.",
            hint="Give the locks an alias of their own in CACHES, with another database number "
            "or another server, and never clear it.",
            id="distlock_app.W013",
        )


def check_server(
    alias: str, servers: Servers, replicas: int = 0
) -> tuple[list[CheckMessage], dict[str, dict[str, str]]]:
    """Ask whether the servers answer, run scripts and take writes, and whether they evict locks.

    Return what each server that has keys says about itself, too.
    """
    try:
        facts = {node.name: _facts_of(node) for node in servers.nodes()}
    except BackendError as error:
        return [no_answer(alias, error, "distlock_app.E013")], {}
    return [*_wrong_in(facts, alias, replicas)], facts


def _wrong_in(
    facts: dict[str, dict[str, str]], alias: str, replicas: int
) -> Iterator[CheckMessage]:
    policies = {fact.get("maxmemory_policy", "noeviction") for fact in facts.values()}
    for policy in sorted(policies - {"noeviction"}):
        yield Warning(
            f"The Redis of DISTLOCK[{alias!r}] evicts locks when its memory is full "
            f"(maxmemory-policy {policy}).",
            hint="Set maxmemory-policy to noeviction, or give the locks a server of their own.",
            id="distlock_app.W014",
        )
    for name, fact in facts.items():
        if fact.get("role") == "slave":
            yield Error(
                f"Redis {name!r} of DISTLOCK[{alias!r}] is a replica: it grants no lock.",
                hint="Let the alias lead to the primary.",
                id="distlock_app.E013",
            )
        if (connected := int(fact.get("connected_slaves", 0))) < replicas:
            yield Warning(
                f"Redis {name!r} has {connected} replicas, but REPLICAS of DISTLOCK[{alias!r}] "
                f"requires {replicas}: it grants no lock.",
                hint="Add replicas, or lower REPLICAS.",
                id="distlock_app.W016",
            )


def _facts_of(node: Pool) -> dict[str, str]:
    node.run(NOTHING, NOTHING.head())
    [text] = node.ask(pack(b"INFO"))
    return dict(
        line.split(":", 1) for line in text.decode(errors="replace").splitlines() if ":" in line
    )
