"""`manage.py migrate_locked`: one host migrates; the others wait, and then find nothing to do."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.core.management.commands.migrate import Command as Migrate
from django.db import connections

from distlock_app.backends.database.backend import DatabaseBackend
from distlock_app.core.registry import aliases_of, registry, using_in
from distlock_app.decorators.commands import locked_command

# Locks of the database server itself need no table, which may not be there yet.
SERVERS_OWN = {
    "mysql": "distlock_app.backends.mysql.NamedLockBackend",
    "postgresql": "distlock_app.backends.postgresql.MigrationLockBackend",
}
WAIT = 600.0  # seconds; the longest migrations take minutes


def lock_alias(*, database: str, lock_using: str | None, **options: Any) -> str | tuple[str, ...]:
    """Return the alias, or the aliases, to lock with."""
    if lock_using is not None:
        using = using_in(lock_using)
        for alias in aliases_of(using):
            try:
                backend = registry[alias].backend
            except ImproperlyConfigured as error:
                raise CommandError(str(error)) from error
            if isinstance(backend, DatabaseBackend):
                raise CommandError(
                    f"DISTLOCK[{alias!r}] keeps its locks in a table, which migrations make and "
                    "change: name another alias with --lock-using."
                )
        return using
    vendor = connections[database].vendor
    if vendor not in SERVERS_OWN:
        raise CommandError(
            f"The database {database!r} is {vendor}, which has no locks of its own: name an alias "
            "of DISTLOCK with --lock-using, or run migrate on one host only."
        )
    alias = f"migrate:{database}"
    registry.add(alias, {"BACKEND": SERVERS_OWN[vendor], "LOCATION": database})
    return alias


@locked_command("migrate:{database}", wait=WAIT, using=lock_alias)
class Command(Migrate):
    help = "Run `migrate` on one host at a time; the others wait for it."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--lock-using",
            metavar="ALIAS",
            help="The alias of DISTLOCK to lock with, or several separated by commas; default: "
            "locks of the database server (MySQL, MariaDB, PostgreSQL).",
        )
