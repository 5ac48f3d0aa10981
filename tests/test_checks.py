"""The system checks: settings that would fail, or protect less than they seem to."""

from __future__ import annotations

import io

import pytest
from django.core import checks
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from distlock_app.backends.locmem import LocMemBackend
from distlock_app.checks import check_deployment, check_servers, check_settings

LOCMEM = "distlock_app.backends.locmem.LocMemBackend"
TABLE = "distlock_app.backends.database.DatabaseBackend"


class Answering(LocMemBackend):
    """An engine with a warning of its own, and an error once its server is asked."""

    def check(self, *, ask=False):
        known = [checks.Warning("known", id="distlock_app.W099")]
        return [*known, checks.Error("down", id="distlock_app.E099")] if ask else known


def found(check, **kwargs):
    """Return the ids of what a check says, its own and those of the engines."""
    return [message.id.removeprefix("distlock_app.") for message in check(**kwargs)]


def alias(**params):
    """Return settings with one alias, `default`."""
    return {"default": {"BACKEND": LOCMEM, **params}}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ([], "must be a dict"),
        ({"default": "redis"}, "must be a dict"),
        ({"default": {}}, "'BACKEND' is missing"),
        (alias(BACKEND="no.such.Backend"), "cannot be imported"),
        (alias(BACKEND="distlock_app.checks.DEFAULT_DB_ALIAS"), "DISTLOCK['default']"),
        (alias(TIMEOUT=3), "unknown key 'TIMEOUT'"),
        (alias(OPTIONS={"colour": 1}), "unknown option 'colour'"),
        (alias(TTL=0), "ttl must be"),
        (alias(TTL=None), "ttl must be"),
        (alias(WAIT=-1), "wait must be"),
        (alias(BACKEND=TABLE, LOCATION="none"), "no alias of DATABASES"),
    ],
)
def test_a_broken_alias_is_an_error_that_names_it(settings, setting, says):
    settings.DISTLOCK = setting

    messages = check_settings()

    assert [message.id for message in messages] == ["distlock_app.E001"]
    assert says in messages[0].msg


def test_one_broken_alias_does_not_hide_the_others(settings):
    settings.DISTLOCK = {**alias(), "a": {"BACKEND": "no.A"}, "b": {"BACKEND": "no.B"}}

    assert ["'a'" in m.msg or "'b'" in m.msg for m in check_settings()] == [True, True]


def test_settings_without_an_alias_for_all_who_name_none(settings):
    settings.DISTLOCK = {"other": {"BACKEND": LOCMEM}}

    assert found(check_settings) == ["W001"]


@pytest.mark.parametrize(("ttl", "ids"), [(0.9, ["W002"]), (1, []), (30, [])])
def test_a_ttl_that_any_pause_outlives(settings, ttl, ids):
    settings.DISTLOCK = alias(TTL=ttl)

    assert [i for i in found(check_settings) if i == "W002"] == ids


def test_what_an_engine_finds_in_its_own_settings_is_told(settings, monkeypatch):
    settings.DISTLOCK = alias()
    warning = checks.Warning("it leaks", id="other_app.W001")
    monkeypatch.setattr(
        "distlock_app.backends.locmem.LocMemBackend.check", lambda self, ask=False: [warning]
    )

    assert warning in check_settings()


@pytest.mark.parametrize("backend", [LOCMEM, "distlock_app.backends.dummy.DummyBackend"])
@pytest.mark.parametrize(("debug", "ids"), [(True, []), (False, ["W003"])])
def test_engines_of_one_process_are_not_deployed(settings, backend, debug, ids):
    settings.DISTLOCK = alias(BACKEND=backend)
    settings.DEBUG = debug

    assert found(check_deployment) == ids


@pytest.mark.parametrize(
    ("vendor", "level", "ids"),
    [
        ("mysql", "repeatable read", ["W004"]),
        ("mysql", "REPEATABLE READ", ["W004"]),
        ("mysql", "read committed", []),
        ("mysql", None, []),
        ("postgresql", "REPEATABLE_READ", ["W004"]),
        ("postgresql", "SERIALIZABLE", []),
        ("postgresql", None, []),
    ],
)
def test_transactions_that_read_a_snapshot(settings, monkeypatch, vendor, level, ids):
    settings.DISTLOCK = alias()
    if vendor == "postgresql" and level:
        psycopg = pytest.importorskip("psycopg")
        level = psycopg.IsolationLevel[level]
    for name in connections:
        asked = {"isolation_level": level} if name == "locks" and level else {}
        ours = connections[name]
        monkeypatch.setitem(ours.settings_dict, "OPTIONS", asked)
        monkeypatch.setattr(ours, "vendor", vendor)

    messages = [m for m in check_settings() if m.id == "distlock_app.W004"]

    assert [m.id.removeprefix("distlock_app.") for m in messages] == ids
    assert all("'locks'" in m.msg for m in messages)


def test_servers_are_asked_only_with_a_database(settings):
    settings.DISTLOCK = {"default": {"BACKEND": "tests.test_checks.Answering"}}

    assert found(check_servers) == []
    assert found(check_servers, databases=[]) == []
    assert found(check_servers, databases=["default"]) == ["E099"]


def test_what_a_server_says_stops_no_migration(settings):
    settings.DISTLOCK = {"default": {"BACKEND": "tests.test_checks.Answering"}}

    assert [m.level for m in check_servers(databases=["default"])] == [checks.WARNING]


@pytest.mark.django_db(databases=["default", "locks"])
def test_only_the_databases_that_were_named_are_asked(settings):
    settings.DISTLOCK = {
        "default": {"BACKEND": TABLE, "LOCATION": "locks"},
    }
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "distlock_app.backends.database.check_table",
            lambda alias, sessions: asked.append(sessions.using) or [],
        )
        check_servers(databases=["default"])
        assert asked == []
        check_servers(databases=["default", "locks"])

    assert asked == ["locks"]


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
def test_migrate_makes_the_lock_table_although_the_check_misses_it(settings):
    settings.DISTLOCK = {"default": {"BACKEND": TABLE, "LOCATION": "locks"}}
    written = io.StringIO()
    options = {"database": "locks", "stdout": written, "stderr": written, "skip_checks": False}
    call_command("migrate", "distlock_app", "zero", **options)
    try:
        assert found(check_servers, databases=["locks"]) == ["E012"]
    finally:
        call_command("migrate", "distlock_app", **options)

    assert found(check_servers, databases=["locks"]) == []


def test_the_checks_are_known_to_django():
    with override_settings(DISTLOCK=[]), pytest.raises(CommandError, match="distlock_app.E001"):
        call_command("check", "--tag", "distlock")
