"""System checks of the settings, registered with Django; each backend adds its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, Error, connections, router, transaction

from .core.limits import LONG_TTL
from .core.registry import Entry, check_deployed, registry
from .models import LockEvent
from .operations import history

# A renewal comes every third of the ttl: below this, a pause of a third of a second loses locks.
SHORT_TTL = 1.0
TTL_HINT = "TTL: how long a lock stays taken after a crash. Renewal covers longer work."


def check_settings(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check each alias, and let its backend look at its own settings; no server is asked."""
    try:
        aliases = list(registry)
    except ImproperlyConfigured as error:
        return [checks.Error(str(error), id="distlock_app.E001")]
    messages: list[checks.CheckMessage] = []
    for alias in aliases:
        try:
            entry = registry[alias]
            messages += [*entry.backend.check(), *_check_ttl(entry), *check_deployed(entry)]
        except Exception as error:  # whatever a backend's own code raises: other checks go on
            messages.append(checks.Error(_says(alias, error), id="distlock_app.E001"))
    if DEFAULT_DB_ALIAS not in aliases:
        messages.append(
            checks.Warning(
                "DISTLOCK has no alias 'default', which locks use unless they name another.",
                id="distlock_app.W001",
            )
        )
    if trouble := history.trouble():
        messages.append(checks.Error(trouble, id="distlock_app.E001"))
    return [*messages, *_check_isolation()]


def check_servers(
    databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Let backends ask their servers: those in these databases, and those in no database.

    `migrate` runs this first, and must not fail because a lock server is down, or because the
    tables that it will create are missing: whatever is found here is a warning at most.
    """
    if not databases:
        return []
    messages, entries = [], []
    with suppress(ImproperlyConfigured):  # `check_settings` reports it
        entries = registry.working()
    for entry in entries:
        backend = entry.backend
        if getattr(backend, "using", None) in (None, *databases):
            try:
                known = backend.check()
                messages += [found for found in backend.check(ask=True) if found not in known]
            except Exception as error:
                messages.append(checks.Error(_says(entry.alias, error), id="distlock_app.E001"))
    messages += _check_table_of_events(databases)
    for message in messages:
        message.level = min(message.level, checks.WARNING)
    return messages


def register() -> None:
    """Let Django run these checks."""
    checks.register(check_settings, "distlock")
    checks.register(check_servers, checks.Tags.database, "distlock")


def _says(alias: str, error: Exception) -> str:
    where, text = f"DISTLOCK[{alias!r}]: ", str(error) or type(error).__name__
    return text if text.startswith(where) else where + text


def _check_ttl(entry: Entry) -> Iterator[checks.CheckMessage]:
    if entry.backend.expires and entry.ttl < SHORT_TTL:
        yield checks.Warning(
            f"DISTLOCK[{entry.alias!r}]: any short pause exceeds a TTL of {entry.ttl:g} s.",
            hint=TTL_HINT,
            id="distlock_app.W002",
        )
    if entry.ttl > LONG_TTL:
        yield checks.Warning(
            f"DISTLOCK[{entry.alias!r}]: a TTL of {entry.ttl:g} s keeps a lock taken for "
            f"{entry.ttl / 3600:.1f} hours after a crash. The unit is seconds, not milliseconds.",
            hint=TTL_HINT,
            id="distlock_app.W005",
        )


def _check_table_of_events(databases: Sequence[str]) -> Iterator[checks.CheckMessage]:
    using = router.db_for_write(LockEvent)
    if not history.kept() or using not in databases:
        return
    try:
        with transaction.atomic(using=using):
            LockEvent.objects.using(using).exists()
    except Error as error:
        yield checks.Warning(
            f"DISTLOCK_HISTORY: the events on {using!r} cannot be read: {error}",
            hint=f"Run: manage.py migrate distlock_app --database={using}",
            id="distlock_app.W006",
        )


def _check_isolation() -> Iterator[checks.CheckMessage]:
    """Warn of transactions that read a snapshot: it may be older than a lock taken in them."""
    for alias in connections:
        if _repeats_reads(connections[alias]):
            yield checks.Warning(
                f"Transactions on DATABASES[{alias!r}] are REPEATABLE READ: under a lock "
                "taken after their first query, they still read old data.",
                hint="Use READ COMMITTED, or take locks before transactions begin, as "
                "Lock(..., atomic=True) and locked_view do.",
                id="distlock_app.W004",
            )


def _repeats_reads(connection: Any) -> bool:
    """Return whether the settings ask for it; SERIALIZABLE detects changes."""
    options = connection.settings_dict["OPTIONS"]
    if connection.vendor == "postgresql" and (level := options.get("isolation_level")) is not None:
        from django.db.backends.postgresql.psycopg_any import IsolationLevel

        return bool(level == IsolationLevel.REPEATABLE_READ)
    # Without the option, Django asks MySQL for READ COMMITTED; with None, for nothing.
    level = options.get("isolation_level", "read committed") or "repeatable read"
    return connection.vendor == "mysql" and str(level).lower() == "repeatable read"
