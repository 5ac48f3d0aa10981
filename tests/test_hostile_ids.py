"""Ids, keys, names and parameters of enemies: nothing is read, changed or ended that is not theirs.

Every engine of this run is asked through the admin, the JSON of dashboards, the command and its
own verbs, while it keeps a lock, its server keeps what is a stranger's, and the database users.
"""

from __future__ import annotations

import io
import logging
import os
from contextlib import ExitStack
from itertools import cycle

import pytest
from django.conf import settings
from django.contrib.admin.utils import quote as admin_quote
from django.contrib.auth.models import Group, Permission, User
from django.core.management import CommandError, call_command
from django.db import connection
from django.urls import reverse

from distlock_app import Lock
from distlock_app.admin.rows import id_of, parts_of
from distlock_app.backends.base import KEYED_METHODS, BaseLockBackend
from distlock_app.core.registry import registry
from distlock_app.primitives.names import is_key, key_of
from distlock_app.testing import held_elsewhere

NAME = f"bystander {os.getpid()}"  # other runs may use the same servers
ALIASES = sorted(settings.DISTLOCK)
LIST = "/admin/distlock_app/livelock/"
NUMBER = 0x0123456789ABCDEF  # of a stranger's advisory lock

# What is put between, before and after: each has ended, split or widened a statement somewhere.
ENDS = [
    *("'", '"', "`", "\\", "\\'", "''", "')", "';", "' -- ", "' #", "'/*", "*/", "%'", "%s", "%00"),
    *("%27", "%2527", "%0d%0a", "\r\nSet-Cookie: a=b", "\n", "\r", "\t", " ", "\x00", "\x1b[2J"),
    *("$1", "{0}", "{key}", "{{7*7}}", "${7*7}", "*", "?", "[a-f]", "_", "%", ":q", ":w", ":m"),
    *("/", "/../", "\\..\\", "/epoch", "-w", "\u2028", "\u202e", "\ufeff", "é", "０", "٣", "😀"),
    *("|id", ";id", "&&id", "$(id)", "`id`", "<script>alert(1)</script>", "=1+1", "\udc80"),
]
STATEMENTS = [
    "' OR '1'='1",
    "x') UNION SELECT id, username, password FROM auth_user -- ",
    "x'), (SELECT password FROM auth_user LIMIT 1), ('",
    "x'); UPDATE auth_user SET is_superuser = 1 -- ",
    "x'; INSERT INTO auth_group (name) VALUES ('hacked'); -- ",
    "x'); DROP TABLE distlock_app_distlock; -- ",
    "x'); SELECT SLEEP(9) -- ",
    "0'); SELECT pg_sleep(9); --",
    "1 AND pid <> pg_backend_pid() OR true",
    "x') return redis.call('FLUSHALL') --",
    "\r\n*1\r\n$8\r\nFLUSHALL\r\n",
]
SHAPES = [
    *("", "0", "-1", "1e3", "0x10", "NaN", "None", "null", "true", "[]", "held:0", "fence"),
    *("0" * 15, "0" * 16, "0" * 39, "0" * 41, "0" * 64, "0" * 10_000, "g" * 40, "F" * 40),
    *("-" + "0" * 39, "+" + "0" * 39, " " + "0" * 39, "0x" + "0" * 38, "0_" * 20, "０" * 40),
    *("٣" * 40, "ａ" * 40, f"{NUMBER:016x}", f"{NUMBER:016X}" + "0" * 24, "payroll"),
]
NO_KEYS = [
    *SHAPES,
    *STATEMENTS,
    *(f"{'0' * 39}{end}" for end in ENDS),
    *(f"{'0' * 40}{end}" for end in ENDS),
    *(f"{end}{'0' * 40}" for end in ENDS),
]
# What the engine keeps nothing under, and a stranger something alike.
FREE = ["0" * 40, "f" * 40, f"{NUMBER:016x}" + "0" * 24]
VERSIONS = [
    "' OR '1'='1",
    "-1",
    "0",
    "1-",
    "٣",
    "9" * 30,
    "9" * 5_000,
    "1.0",
    "1 OR 1=1",
    "\n",
    "%",
]

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "locks"])


@pytest.fixture
def stranger():
    """A session of another application, with a lock of its own on the database's server."""
    take, ask = {
        "mysql": ("SELECT GET_LOCK('payroll', 0)", "SELECT IS_USED_LOCK('payroll')"),
        "postgresql": (
            f"SELECT pg_advisory_lock({NUMBER})",
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
        ),
    }.get(connection.vendor, ("SELECT 1", "SELECT 1"))
    session = connection.copy()
    with session.cursor() as cursor:
        cursor.execute(take)
        cursor.execute(ask)
        held = cursor.fetchone()
        yield
        cursor.execute(ask)
        assert cursor.fetchone() == held and held[0] is not None
    session.close()


@pytest.fixture
def enemy(client, settings, caplog, stranger):
    """May do all that the admin offers for locks, and must get no further."""
    settings.DISTLOCK_HISTORY = 5
    User.objects.create_superuser("root", password="x")
    user = User.objects.create_user("eve", password="x", is_staff=True)
    # Not set(), whose transaction reads first: SQLite refuses it if the history writes meanwhile.
    user.user_permissions.add(*Permission.objects.filter(content_type__model="livelock"))
    client.force_login(user)
    pages = []

    def ask(method, url, parameters):
        parameters = {name: sendable(value) for name, value in parameters.items()}
        answer = getattr(client, method)(url, parameters)
        assert answer.status_code in (200, 302, 400, 403, 404, 405), (url, parameters)
        assert not answer.has_header("Set-Cookie") or "a=b" not in answer["Set-Cookie"]
        pages.append(answer.content)
        return answer

    with caplog.at_level(logging.DEBUG):
        yield ask
    assert not [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR]
    hashes = User.objects.values_list("password", flat=True)
    assert not [page for page in pages for secret in hashes if secret.encode() in page]
    assert not Group.objects.exists()
    assert list(User.objects.filter(is_superuser=True).values_list("username")) == [("root",)]


@pytest.fixture(params=ALIASES)
def bystander(request):
    """A lock of somebody else, which is as it was in the end."""
    alias = request.param
    if alias == "dummy":
        yield alias
        return
    with held_elsewhere(NAME, using=alias, ttl=600):
        [before] = Lock(NAME, using=alias).holders()
        yield alias
        [after] = Lock(NAME, using=alias).holders()
        assert (after.version, after.fence) == (before.version, before.fence)
        assert before.expires_in is None or after.expires_in <= before.expires_in


def sendable(text):
    """Return what of `text` can be in a URL or a form: no lone surrogate."""
    return text.encode(errors="replace").decode() if isinstance(text, str) else text


def hostile_ids(alias):
    """Yield ids as `id_of` would write them, and as it would not."""
    key = key_of(NAME)
    yield from (id_of(alias, sendable(no_key)) for no_key in NO_KEYS)
    yield from (f"{alias}:{no_key}" for no_key in (*STATEMENTS, *SHAPES))
    yield from (id_of(alias, free, version) for free in FREE for version in ("", "1", "1-"))
    yield from (id_of(alias, key, version) for version in VERSIONS)
    yield from (f"{text}{alias}:{key}" for text in ("%00", "%0a", "'", "x:", "*"))


def test_there_are_500_and_none_is_the_key_of_a_lock():
    ids = {each for alias in ALIASES for each in hostile_ids(alias)}

    assert len(ids) >= 500
    assert not any(map(is_key, NO_KEYS))
    for no_key in filter(None, NO_KEYS):
        assert parts_of(id_of("default", sendable(no_key))) is None


def test_the_admin_does_nothing_for_hostile_ids(bystander, enemy):
    ids = list(hostile_ids(bystander))

    pages = cycle(("change", "history", "events", "clear", "extend"))
    for each, page in zip(ids[ALIASES.index(bystander) :: 6], pages, strict=False):
        if page in ("change", "history"):
            url = reverse(f"admin:distlock_app_livelock_{page}", args=[admin_quote(each)])
            enemy("get", url, {})
        else:
            enemy("get", f"{LIST}{page}/", {"lock": each})
        if page == "extend":
            enemy("post", f"{LIST}extend/", {"lock": each, "seconds": 3600})
    for start in range(0, len(ids), 100):
        few = ids[start : start + 100]
        enemy("post", f"{LIST}clear/", {"lock": few, "reason": "mine"})
        chosen = {"action": "force_release", "_selected_action": few}
        enemy("post", LIST, chosen)


@pytest.mark.once  # the list is filtered in memory: a database is asked for the key of a name
def test_the_list_and_its_json_do_nothing_for_hostile_parameters(enemy):
    names = cycle(("q", "alias", "host", "kind", "state", "o", "p", "start", "limit"))

    for text, name in zip([*STATEMENTS, *SHAPES[:12], *ENDS[::3]], names, strict=False):
        enemy("get", f"{LIST}data/" if name in ("q", "start", "limit") else LIST, {name: text})


def test_clearing_up_does_nothing_for_hostile_words(enemy):
    for text in STATEMENTS:
        enemy("post", f"{LIST}leftover/", {"alias": text, "action": text, "days": text})


def test_the_command_does_nothing_for_hostile_words(bystander, enemy):
    def distlock(*words):
        with ExitStack() as stack:
            stack.enter_context(pytest.raises((SystemExit, CommandError)))
            call_command("distlock", *words, stdout=io.StringIO(), stderr=io.StringIO())

    for text in (*STATEMENTS, *ENDS[::4]):
        distlock("clear", "--yes", f"--using={bystander}", "--", text)
    for text in (*STATEMENTS, *VERSIONS):
        distlock("clear", "--yes", f"--using={bystander}", f"--if-version={text}", "--", NAME)
        distlock("show", f"--using={text}", "--", NAME)


def test_no_verb_of_an_engine_takes_anything_but_a_key(bystander, enemy):
    backend = registry[bystander].backend
    more = {"prolong": ("1", 60.0)}
    kind = type(backend)

    # What an engine leaves to the base class asks nobody.
    for verb in (v for v in KEYED_METHODS if getattr(kind, v) is not getattr(BaseLockBackend, v)):
        for no_key in NO_KEYS:
            with pytest.raises(ValueError, match="not the key of a lock"):
                getattr(backend, verb)(no_key, *more.get(verb, ()))
    for version in ("", *VERSIONS):  # in an id of the admin, none means any
        assert backend.clear(key_of(NAME), version) == 0
        assert not backend.prolongs or backend.prolong(key_of(NAME), version, 60.0) is False
    for free in FREE:
        assert list(backend.holders(free)) == [] and backend.clear(free) == 0
