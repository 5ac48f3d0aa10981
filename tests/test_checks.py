"""The system checks: settings that would fail, or protect less than they seem to."""

from __future__ import annotations

import io
import subprocess
import sys
import traceback

import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import BaseCommand, CommandError, call_command
from django.db import connections
from django.test import override_settings

from distlock_app import BackendError, Lock, locked, locked_command, locked_view
from distlock_app.backends.locmem import LocMemBackend
from distlock_app.checks import check_servers, check_settings
from distlock_app.core.registry import EXTRAS, registry
from distlock_app.models import LockEvent
from distlock_app.operations import doctor
from distlock_app.operations.history import kept

LOCMEM = "distlock_app.backends.locmem.LocMemBackend"
TABLE = "distlock_app.backends.database.DatabaseBackend"


class Answering(LocMemBackend):
    """An engine with a warning of its own, and an error once its server is asked."""

    def check(self, *, ask=False):
        known = [checks.Warning("known", id="distlock_app.W099")]
        return [*known, checks.Error("down", id="distlock_app.E099")] if ask else known


@pytest.fixture(autouse=True)
def nothing_else_to_tell(settings, monkeypatch):
    """Engines in memory are warned of in production alone; databases are as Django has them."""
    settings.DEBUG = True
    for alias in connections:
        options = connections[alias].settings_dict["OPTIONS"]
        monkeypatch.delitem(options, "isolation_level", raising=False)


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
        (alias(BACKEND="redis"), "a full path is like 'distlock_app.backends.database."),
        (alias(BACKEND="distlock_app.checks.DEFAULT_DB_ALIAS"), "DISTLOCK['default']"),
        ({**alias(), 1: {"BACKEND": LOCMEM}}, "must be a dict"),
        (alias(TIMEOUT=3), "unknown key 'TIMEOUT'"),
        ({"default": {"BACKEND": LOCMEM, "TIMEOUT": 3, 5: 1}}, "unknown key 'TIMEOUT'"),
        (alias(BACKEND="distlock_app.backends.base.BaseLockBackend"), "instantiate abstract class"),
        (alias(OPTIONS={"colour": 1}), "unknown option 'colour'"),
        (alias(BACKEND=TABLE, OPTIONS={"QUEUE": False, "queue": True}), "the same key twice"),
        (alias(TTL=0), "ttl must be"),
        (alias(TTL=None), "ttl must be"),
        (alias(WAIT=-1), "wait must be"),
        (alias(BACKEND=TABLE, LOCATION="none"), "DISTLOCK['default']: LOCATION is not an alias"),
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


@pytest.mark.parametrize("error", [ValueError("out of range"), ValueError()], ids=str)
def test_an_engine_whose_checks_fail_does_not_hide_the_others(settings, monkeypatch, error):
    def check(self, ask=False):
        raise error

    settings.DISTLOCK = {
        **alias(BACKEND="tests.test_checks.Answering"),
        "other": {"BACKEND": TABLE},
    }
    monkeypatch.setattr(Answering, "check", check)

    messages = [*check_settings(), *check_servers(databases=["elsewhere"])]

    wrong = [m.msg for m in messages if m.id == "distlock_app.E001"]
    assert wrong == [f"DISTLOCK['default']: {str(error) or 'ValueError'}"] * 2


def test_settings_without_an_alias_for_all_who_name_none(settings):
    settings.DISTLOCK = {"other": {"BACKEND": LOCMEM}}

    assert found(check_settings) == ["W001"]


@pytest.mark.parametrize(("ttl", "ids"), [(0.9, ["W002"]), (1, []), (30, [])])
def test_a_ttl_that_any_pause_outlives(settings, monkeypatch, ttl, ids):
    settings.DISTLOCK = alias(TTL=ttl)

    assert [i for i in found(check_settings) if i == "W002"] == ids
    monkeypatch.setattr(LocMemBackend, "expires", False)  # as of locks of a session
    assert "W002" not in found(check_settings)


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

    assert found(check_settings) == ids
    assert [message["id"][-4:] for message in doctor.examine("default").messages] == ids


@pytest.mark.parametrize(("ttl", "ids"), [(3600, []), (30_000, ["W005"])])
def test_a_ttl_in_milliseconds_is_told(settings, ttl, ids):
    settings.DISTLOCK = alias(TTL=ttl)

    assert found(check_settings) == ids


def test_a_lock_with_a_ttl_in_milliseconds_names_the_line():
    with pytest.warns(UserWarning, match="8.3 hours") as caught:
        Lock("a", ttl=30_000)

    assert caught[0].filename == __file__
    Lock("a", ttl=30_000, renew=False)  # a fixed lease has nothing else to last by


@pytest.mark.parametrize(
    ("vendor", "level", "ids"),
    [
        ("mysql", "repeatable read", ["W004"]),
        ("mysql", "REPEATABLE READ", ["W004"]),
        ("mysql", "read committed", []),
        ("mysql", None, ["W004"]),
        ("mysql", "as Django does", []),
        ("postgresql", "REPEATABLE_READ", ["W004"]),
        ("postgresql", "SERIALIZABLE", []),
        ("postgresql", None, []),
        ("postgresql", "as Django does", []),
    ],
)
def test_transactions_that_read_a_snapshot(settings, monkeypatch, vendor, level, ids):
    settings.DISTLOCK = alias()
    if vendor == "postgresql" and level and level != "as Django does":
        psycopg = pytest.importorskip("psycopg")
        level = psycopg.IsolationLevel[level]
    for name in connections:
        asked = {"isolation_level": level} if name == "locks" else {}
        if level == "as Django does":
            asked = {}
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


def test_a_backend_without_checks_of_its_own_is_pinged(settings):
    settings.DISTLOCK = {"default": {"BACKEND": "tests.failing_engines.DownBackend"}}

    (message,) = check_servers(databases=["default"])

    assert (message.id, message.msg) == (
        "distlock_app.E017",
        "DISTLOCK['default']: no route to db7",
    )


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
            "distlock_app.backends.database.inspection.check_table",
            lambda alias, session: asked.append(session.wrapper.alias) or [],
        )
        check_servers(databases=["default"])
        assert asked == []
        check_servers(databases=["default", "locks"])

    assert asked == ["locks"]


class HistoryBesideLocks:
    """Routes the history to the database of the locks."""

    def db_for_write(self, model, **hints):
        return "locks" if model is LockEvent else None


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
def test_migrate_makes_the_tables_although_the_checks_miss_them(settings):
    settings.DISTLOCK = {"default": {"BACKEND": TABLE, "LOCATION": "locks"}}
    settings.DATABASE_ROUTERS = ["tests.test_checks.HistoryBesideLocks"]
    settings.DISTLOCK_HISTORY = 20
    written = io.StringIO()
    options = {"database": "locks", "stdout": written, "stderr": written, "skip_checks": False}
    call_command("migrate", "distlock_app", "zero", **options)
    try:
        assert found(check_servers, databases=["locks"]) == ["E012", "W006"]
        assert found(check_servers, databases=["default"]) == []
        settings.DISTLOCK_HISTORY = 0
        assert found(check_servers, databases=["locks"]) == ["E012"]
        settings.DISTLOCK_HISTORY = 20
        with pytest.raises(BackendError, match=r"\(run: manage.py migrate .* --database=locks\)"):
            Lock("invoice").acquire()
    finally:
        call_command("migrate", "distlock_app", **options)

    assert found(check_servers, databases=["locks"]) == []


@pytest.mark.parametrize("setting", [[], {"default": {}}, alias(LOCATION=1, OPTIONS={"x": 1})])
def test_wrong_settings_leave_it_to_the_checks_to_tell_where_functions_are_decorated(
    settings, setting
):
    settings.DISTLOCK = setting

    @locked("invoice:{number}")
    def bill(number): ...

    @locked_view("pay:{number}")
    def pay(request, number): ...

    @locked_command(at_least=1)
    class Command(BaseCommand): ...

    assert found(check_settings) == ["E001"]
    with pytest.raises(ImproperlyConfigured, match="DISTLOCK"):
        bill(1)


@pytest.mark.parametrize("history", ["many", -5, 2.5, True])
def test_a_wrong_history_is_an_error_and_keeps_none(settings, history):
    settings.DISTLOCK = alias()
    settings.DISTLOCK_HISTORY = history

    assert found(check_settings) == ["E001"]
    assert kept() == 0


def test_a_name_that_is_no_alias_is_told_where_it_is_written(settings):
    settings.DISTLOCK = {"default": {}}

    for wrong, why in (
        ("rdeis", r"no alias 'rdeis' \(it has: default\)"),
        (["redis"], "or a tuple of them"),
    ):
        with pytest.raises(ImproperlyConfigured, match=why):
            locked("invoice", using=wrong)


@pytest.mark.once
@pytest.mark.parametrize(
    ("package", "backend"),
    [
        ("redis", "redis.RedisBackend"),
        ("kazoo", "zookeeper.ZooKeeperBackend"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(package, backend):
    program = f"""
import sys
sys.modules[{package!r}] = None  # as if it were not installed
from django.conf import settings
settings.configure(DISTLOCK={{"default": {{"BACKEND": "distlock_app.backends.{backend}"}}}})
from distlock_app.core.registry import registry
registry["default"]
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert "ImproperlyConfigured: DISTLOCK['default']" in ended.stderr
    assert f"install distlock_app with the extra {EXTRAS[package]!r}" in ended.stderr


def test_a_missing_django_redis_is_named_with_its_extra(settings, monkeypatch):
    for module in [name for name in sys.modules if name.partition(".")[0] == "django_redis"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "django_redis", None)
    settings.CACHES = {
        "other": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://localhost"}
    }
    settings.DISTLOCK = alias(BACKEND="distlock_app.backends.redis.RedisBackend", LOCATION="other")

    [message] = check_settings()

    assert message.id == "distlock_app.E001"
    assert "install distlock_app with the extra 'redis'" in message.msg


def test_the_checks_are_known_to_django():
    with override_settings(DISTLOCK=[]), pytest.raises(CommandError, match="distlock_app.E001"):
        call_command("check", "--tag", "distlock")


@pytest.mark.once
@pytest.mark.parametrize(
    "engine",
    [
        *("database.DatabaseBackend", "mysql.NamedLockBackend", "postgresql.AdvisoryLockBackend"),
        *("redis.RedisBackend", "redlock.RedlockBackend", "etcd.EtcdBackend"),
    ],
)
@pytest.mark.parametrize(
    "url",
    [
        *("redis://u:s3cret@h/0", "http://:s3cret@h:2379", "http://u:s3cret/x@h", "http://[s3cret"),
        *("mysql://u:s3cret@h/db", "http://h:s3cret"),
    ],
)
def test_no_message_quotes_a_location_with_a_password(settings, engine, url):
    for location in (url, [url], [url] * 3):
        settings.DISTLOCK = alias(BACKEND=f"distlock_app.backends.{engine}", LOCATION=location)

        messages = check_settings()

        assert "distlock_app.E001" in [message.id for message in messages]
        with pytest.raises(ImproperlyConfigured) as refused:
            registry["default"]
        text = "".join(traceback.format_exception(refused.value, limit=0))
        assert "s3cret" not in f"{messages} {text}"
