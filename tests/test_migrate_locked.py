"""`manage.py migrate_locked`: one at a time, without the lock table."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections

from distlock_app.backends.postgresql import AdvisoryLockBackend
from distlock_app.core.waiting import waiting
from distlock_app.management.commands.migrate_locked import lock_alias
from distlock_app.testing import held_elsewhere
from tests.engines import running, until

LOCMEM = {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"}
on_a_server = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite is no server")


@on_a_server
@pytest.mark.django_db(transaction=True)
def test_somebody_else_migrates(capsys):
    alias = lock_alias(database="default", lock_using=None)
    with held_elsewhere("migrate:default", using=alias):
        with pytest.raises(
            CommandError, match="is already running: the lock 'migrate:default'"
        ) as busy:
            call_command("migrate_locked", "--lock-wait", "0", verbosity=0)

    assert busy.value.returncode == 75
    call_command("migrate_locked", "--lock-wait", "0", "--plan")
    assert "No planned migration operations" in capsys.readouterr().out


@on_a_server
@pytest.mark.django_db(transaction=True)
def test_whoever_waited_finds_nothing_to_do(capsys):
    alias = lock_alias(database="default", lock_using=None)
    done = threading.Event()

    def migrate():
        call_command("migrate_locked", "--plan")
        done.set()
        connections.close_all()

    with ExitStack() as stack:
        with held_elsewhere("migrate:default", using=alias):
            stack.enter_context(running(migrate))
            until(lambda: waiting)
            assert not done.is_set()
        until(done.is_set)

    assert "No planned migration operations" in capsys.readouterr().out


@pytest.mark.skipif(connection.vendor != "postgresql", reason="CREATE INDEX CONCURRENTLY")
@pytest.mark.django_db(transaction=True)
def test_an_index_is_created_concurrently_while_others_wait(monkeypatch):
    take, takes = AdvisoryLockBackend._take, []
    alias = lock_alias(database="default", lock_using=None)

    def migrate():
        call_command("migrate_locked", "--plan", verbosity=0)
        connections.close_all()

    with ExitStack() as stack:
        with held_elsewhere("migrate:default", using=alias), connection.cursor() as cursor:
            monkeypatch.setattr(
                AdvisoryLockBackend, "_take", lambda *args: takes.append(args) or take(*args)
            )
            stack.enter_context(running(migrate))
            until(lambda: len(takes) > 1)  # it tries again, instead of waiting on the server
            cursor.execute("SET lock_timeout = '5s'")
            try:
                cursor.execute("CREATE INDEX CONCURRENTLY test ON distlock_app_distlock (name)")
            finally:
                cursor.execute("RESET lock_timeout")
                cursor.execute("DROP INDEX IF EXISTS test")


@pytest.mark.django_db(transaction=True)
def test_an_alias_may_decide(settings, capsys):
    settings.DISTLOCK = {"default": LOCMEM}
    with held_elsewhere("migrate:default"):
        with pytest.raises(CommandError, match="is already running"):
            call_command("migrate_locked", "--lock-using=default", "--lock-wait=0")

    call_command("migrate_locked", "--lock-using=default", "--plan")

    assert "No planned migration operations" in capsys.readouterr().out


def test_never_on_the_lock_table():
    with pytest.raises(CommandError, match="keeps its locks in a table"):
        call_command("migrate_locked", "--lock-using=default")


@pytest.mark.skipif(connection.vendor != "sqlite", reason="it has locks of its own")
def test_sqlite_needs_another_engine():
    with pytest.raises(CommandError, match="--lock-using"):
        call_command("migrate_locked")


def test_a_wrong_alias_is_told_without_a_traceback():
    with pytest.raises(CommandError, match="no alias 'nope'"):
        call_command("migrate_locked", lock_using="nope")
