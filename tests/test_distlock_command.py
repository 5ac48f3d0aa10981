"""`manage.py distlock`: what it says, what it does, and how it ends."""

from __future__ import annotations

import getpass
import io
import json
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from unicodedata import east_asian_width

import pytest
from django.core.checks import Warning
from django.core.management import CommandError, call_command, load_command_class
from django.db import connection

from distlock_app import BackendError, Lock, LockBusy, LockError, LockLost
from distlock_app.backends.locmem import LocMemBackend
from distlock_app.claims import Claim, Grant
from distlock_app.core.registry import registry
from distlock_app.models import DistLock
from distlock_app.operations import reading, run, tethered
from distlock_app.primitives import identity
from distlock_app.primitives.names import key_of
from distlock_app.signals import lock_cleared
from tests import nursery
from tests.conftest import missing
from tests.engines import running, until
from tests.failing_engines import CrowdedBackend, HangingBackend
from tests.launching import launch, mortal

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def memory(settings):
    """Two engines in memory, and a way to add others."""
    settings.DEBUG = True  # else the checks warn of them
    settings.DISTLOCK = {
        "default": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"},
        "second": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"},
    }

    def add(alias, backend, **params):
        settings.DISTLOCK = {**settings.DISTLOCK, alias: {"BACKEND": backend, **params}}

    return add


def taken(name, alias="default", who="somewhere else", **options):
    """Take the lock as another process would."""
    with identity.activity(who):
        holder = identity.holder_text()
    owner = os.urandom(16).hex()
    claim = Claim(name=name, key=key_of(name), owner=owner, ttl=30, holder=holder, **options)
    grant = registry[alias].backend.acquire(claim, 0)
    assert isinstance(grant, Grant)
    return grant


def say(capsys, *args):
    """Call the command; return its exit code, and what it wrote."""
    code = 0
    try:
        call_command("distlock", *args)
    except SystemExit as end:
        code = end.code
    written = capsys.readouterr()
    return code, written.out, written.err


def ends_with(*args):
    """Call the command, which has to fail; return the error."""
    with pytest.raises(CommandError) as caught:
        call_command("distlock", *args)
    return caught.value


def test_list_shows_every_alias_as_a_table(memory, capsys):
    taken("invoice:42", who="alice /pay/7")
    taken("nightly", "second")

    code, out, _ = say(capsys, "list")

    head, first, second = out.splitlines()
    assert code == 0
    assert head.split()[:3] == ["NAME", "STATE", "HELD"]
    assert first.startswith("invoice:42") and "alice /pay/7" in first
    assert second.startswith("nightly") and "second" in second


def wait_for(name, alias="default"):
    """Stand in the queue of the lock, as another process would."""
    with identity.activity("in the queue"):
        holder = identity.holder_text()
    owner = os.urandom(16).hex()
    claim = Claim(name=name, key=key_of(name), owner=owner, ttl=30, holder=holder)
    assert not registry[alias].backend.acquire(claim, 5)


def first_words(out):
    return [line.split()[0] for line in out.splitlines()[1:]]


def test_list_leads_with_what_others_wait_for_and_then_with_what_is_held_longest(
    memory, capsys, monkeypatch
):
    for name in ("old", "new", "wanted"):
        taken(name)
    wait_for("wanted")
    held, seconds = LocMemBackend.holders, {"old": 7200.0, "new": 3.0, "wanted": 1.0}
    monkeypatch.setattr(
        LocMemBackend,
        "holders",
        lambda self, key=None: [replace(h, held_for=seconds[h.name]) for h in held(self, key)],
    )

    assert first_words(say(capsys, "list")[1]) == ["wanted", "old", "new"]
    assert first_words(say(capsys, "list", "--sort", "name")[1]) == ["new", "old", "wanted"]
    assert first_words(say(capsys, "list", "--held-for", "60")[1]) == ["old"]
    assert first_words(say(capsys, "stuck")[1]) == ["wanted", "old"]
    assert [lock["name"] for lock in listed(capsys)["locks"]] == ["wanted", "old", "new"]


def test_list_picks_names_by_a_pattern_and_by_how_long_they_are_held(memory, capsys):
    for name in ("order:1", "order:2", "nightly"):
        taken(name)

    assert first_words(say(capsys, "list", "--match", "order:*")[1]) == ["order:1", "order:2"]
    assert say(capsys, "list", "--match", "order")[1] == "nothing matches (locks held: 3)\n"
    assert say(capsys, "list", "--held-for", "60")[1] == "nothing matches (locks held: 3)\n"


def test_stuck_lists_what_others_wait_for_or_what_is_held_for_long(memory, capsys):
    assert say(capsys, "stuck")[:2] == (0, "nothing is held\n")
    taken("quiet")
    assert say(capsys, "stuck")[:2] == (0, "nothing is stuck (locks held: 1)\n")
    taken("wanted")
    wait_for("wanted")

    assert first_words(say(capsys, "stuck")[1]) == ["wanted"]
    assert first_words(say(capsys, "stuck", "--held-for", "0")[1]) == ["wanted", "quiet"]
    assert say(capsys, "stuck", "--match", "quiet")[1] == "nothing is stuck (locks held: 2)\n"


def test_a_table_fits_the_terminal_and_its_columns_stand_below_each_other(
    memory, capsys, monkeypatch
):
    taken("정산:" + "아주-긴-이름/" * 20, who="bob /pay/" + "7" * 90)
    taken("nightly", who="manage.py settle")
    uncut = say(capsys, "list")[1]
    monkeypatch.setenv("COLUMNS", "90")

    lines = say(capsys, "list")[1].splitlines()

    assert "7" * 80 in uncut
    assert max(map(columns, lines)) <= 90 and any("…" in line for line in lines)
    state = columns(lines[0][: lines[0].index("STATE")])
    assert [columns(line[: line.index(" held ") + 1]) for line in lines[1:]] == [state, state]
    monkeypatch.setenv("COLUMNS", "40")
    head, *narrow = say(capsys, "list")[1].splitlines()
    assert max(map(columns, [head, *narrow])) <= 40
    assert head.index("STATE") == 14  # no column is cut to less than twelve


def columns(text):
    """Return how wide a terminal shows it."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def test_states_are_coloured_if_colours_are_wanted(memory, capsys):
    taken("wanted")
    wait_for("wanted")

    call_command("distlock", "stuck", force_color=True)

    assert re.search(r"\x1b\[[\d;]*mwanted .*\x1b\[0m", capsys.readouterr().out)
    assert "\x1b" not in say(capsys, "stuck")[1]


@pytest.mark.parametrize(("options", "cleared"), [([], 2), (["--json"], 0)])
def test_watch_clears_a_terminal_before_each_list_but_writes_no_codes_into_json(
    memory, options, cleared
):
    class Terminal(io.StringIO):
        flushed = 0

        def isatty(self):
            return True

        def flush(self):
            self.flushed += 1

    terminal = Terminal()

    call_command("distlock", "watch", "--times=2", "--interval=0.1", *options, stdout=terminal)

    assert terminal.getvalue().count("\x1b[H\x1b[2J") == cleared
    assert terminal.flushed >= 2


def test_cards_of_several_holders_are_apart_and_their_states_are_coloured(memory, capsys):
    for _ in range(2):
        taken("wanted", limit=3)
    wait_for("wanted")

    call_command("distlock", "show", "wanted", force_color=True)

    shown = capsys.readouterr().out
    cards = shown.split("\n\n")
    assert len(cards) == 2 and not shown.startswith("\n")
    for card in cards:
        assert len(re.findall(r"^.*\x1b\[", card, re.MULTILINE)) == 1
        assert re.search(r"^state +\x1b\[", card, re.MULTILINE)


def test_show_says_that_a_lock_is_kept_after_its_work(memory, capsys):
    with Lock("settle", at_least=300):
        pass

    assert re.search(r"^at least +5:00$", say(capsys, "show", "settle")[1], re.MULTILINE)


def test_show_is_a_card_with_the_commands_that_are_of_use_now(memory, capsys):
    grant = taken("pay:7 #1", "second", who="alice /pay/7")
    wait_for("pay:7 #1", "second")

    code, out, _ = say(capsys, "show", "pay:7 #1")

    card = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines() if line[0] != " ")
    host = identity.holder_fields(grant.claim.holder)["host"]
    assert code == 0
    assert (card["name"], card["alias"]) == ("pay:7 #1", "second")
    assert card["state"] == "contended" and card["waiters"] == "1"
    assert re.fullmatch(r"0:[23]\d", card["time left"])
    assert re.fullmatch(r"0:\d\d", card["held for"])
    assert (card["who"], card["host"]) == ("alice /pay/7", host)
    assert (card["process"], card["thread"]) == (str(os.getpid()), "MainThread")
    assert datetime.fromisoformat(card["since"]).tzinfo is None
    assert card["fencing token"] == str(grant.fence)
    assert "in the queue" in out
    assert card["look at it"] == f"ps -o pid,stat,etime,args -p {os.getpid()}    # on {host}"
    words = shlex.split(card["take it away"])
    assert words[:3] == ["python", "manage.py", "distlock"]
    assert say(capsys, *words[3:], "--yes")[:2] == (0, "1 cleared\n")


@pytest.mark.parametrize("name", ["x" * 300, "tab\there"])
def test_show_gives_no_command_for_a_name_that_is_shown_otherwise(memory, capsys, name):
    taken(name)

    code, out, _ = say(capsys, "show", name)

    assert code == 0 and "look at it" in out
    assert "take it away" not in out  # it would be another lock


def test_a_list_says_how_long_a_lock_lasts_by_itself(memory, capsys, monkeypatch):
    taken("renewed")
    taken("bound")
    held = LocMemBackend.holders
    monkeypatch.setattr(
        LocMemBackend,
        "holders",
        lambda self, key=None: [
            replace(h, expires_in=None) if h.name == "bound" else h for h in held(self, key)
        ],
    )

    with Lock("fixed", ttl=25, renew=False):
        lines = {line.split()[0]: line for line in say(capsys, "list")[1].splitlines()}

    assert re.search(r" 0:2\d fixed +default$", lines["fixed"])
    assert re.search(r" 0:[23]\d +default$", lines["renewed"])
    assert re.search(r" session +default$", lines["bound"])
    assert all(re.search(r" held +0:\d\d ", lines[name]) for name in ("fixed", "renewed", "bound"))


def test_a_name_that_looks_like_an_option_comes_after_two_dashes(memory, capsys):
    taken("-x", "second")

    _, card, _ = say(capsys, "show", "--", "-x")

    [command] = re.findall(r"^take it away +python manage.py distlock (.*)$", card, re.MULTILINE)
    verb, *words = shlex.split(command)
    assert "after -- if it begins with -" in say(capsys, "clear", "--help")[1]
    assert say(capsys, verb, "--yes", *words)[:2] == (0, "1 cleared\n")
    assert say(capsys, "run", "--", "-x", "sh", "-c", "exit 3")[0] == 3


@pytest.mark.parametrize(
    ("argv", "who"),
    [
        (["manage.py", "beat", "--key=secret"], "manage.py beat"),
        (["/venv/lib/django/__main__.py", "beat"], "django beat"),
        (["/venv/lib/celery/__main__.py", "worker"], "celery"),
        (["/venv/bin/gunicorn", "shop.wsgi"], "gunicorn"),
        (["stuck.py", "secret"], "stuck.py"),
        (["manage.py"], "manage.py"),
        (["-c"], "unknown"),
        ([""], "unknown"),
        ([], "unknown"),
    ],
)
def test_a_lock_that_no_decorator_took_names_the_program(memory, capsys, monkeypatch, argv, who):
    monkeypatch.setattr(sys, "argv", argv)
    # A thread keeps its description: take a new one.
    thread = threading.Thread(target=taken, args=("a",), kwargs={"who": ""}, name=f"of {argv}")
    thread.start()
    thread.join(10)

    assert re.search(rf"^who +{re.escape(who)}$", say(capsys, "show", "a")[1], re.MULTILINE)


def test_what_is_not_known_is_called_so(memory, capsys, monkeypatch):
    taken("a")
    held = registry["default"].backend.holders
    unknown = {"waiters": None, "held_for": None, "fence": None, "holder": {}}
    monkeypatch.setattr(
        LocMemBackend, "holders", lambda self, key=None: [replace(h, **unknown) for h in held(key)]
    )

    assert say(capsys, "list", "--using", "default")[1].count("unknown") == 4
    shown = say(capsys, "show", "a", "--using", "default")[1]
    assert shown.count("unknown") == 8 and "None" not in shown


def test_json_is_written_in_the_letters_of_the_names_and_writes_to_no_terminal(memory, capsys):
    taken("정산", who="\x9b2J\u202e\U000e0001 ann /pay")

    out = say(capsys, "list", "--json")[1]

    assert '"name": "정산"' in out and '"state": "held"' in out
    assert all(letter.isprintable() for letter in out.replace("\n", ""))
    assert json.loads(out)["locks"][0]["holder"]["who"] == "\x9b2J\u202e\U000e0001 ann /pay"


@pytest.mark.parametrize("kind", ["shared", "permit"])
@pytest.mark.parametrize("using", ["default", "redis"])
def test_each_of_several_holders_has_a_line_and_is_cleared_alone(
    memory, capsys, request, using, kind
):
    if using == "redis":
        request.getfixturevalue("redis_url")
        memory("redis", "distlock_app.backends.redis.RedisBackend", LOCATION="locks")
    options = {"shared": True} if kind == "shared" else {"limit": 2}
    first = taken("test-command", using, who="the first", **options)
    second = taken("test-command", using, who="the second", **options)

    _, out, _ = say(capsys, "show", "test-command", "--using", using)
    arguments = ["test-command", "--using", using, "--yes"]
    cleared = say(capsys, "clear", *arguments, "--if-version", str(first.fence))
    again = say(capsys, "clear", *arguments, "--if-version", str(first.fence))

    assert re.findall(r"^kind +(\w+)$", out, re.M) == [kind, kind]
    assert "the first" in out and "the second" in out
    assert (cleared[0], again[0]) == (0, 1)
    assert registry[using].backend.extend(second, 30)
    assert registry[using].backend.release(first) is False
    assert say(capsys, "clear", *arguments)[:2] == (0, "1 cleared\n")


def test_list_of_one_alias(memory, capsys):
    taken("a")
    taken("b", "second")

    assert [lock["name"] for lock in listed(capsys, "--using", "second")["locks"]] == ["b"]


def listed(capsys, *args):
    return json.loads(say(capsys, "list", "--json", *args)[1])


def test_list_as_json_has_no_secret(memory, capsys):
    grant = taken("a")

    answer = listed(capsys)

    [lock] = answer["locks"]
    assert lock["fence"] == grant.fence and lock["version"] == str(grant.fence)
    assert [engine["up"] for engine in answer["backends"]] == [True, True]
    assert grant.claim.owner not in json.dumps(answer)


def test_list_tells_which_engine_is_down_and_shows_the_rest(memory, capsys):
    memory("broken", "tests.failing_engines.DownBackend")
    taken("a")

    code, out, err = say(capsys, "list")

    assert code == 69
    assert "broken is down: no route to db7" in err
    assert out.splitlines()[1].startswith("a")


@pytest.mark.once
@pytest.mark.parametrize(
    ("engine", "how"), [(HangingBackend, "is down"), (CrowdedBackend, "is slow")]
)
def test_list_tells_an_engine_that_is_silent_from_one_that_is_slow(memory, capsys, engine, how):
    memory("far", f"tests.failing_engines.{engine.__name__}")
    taken("a")
    engine.answers.clear()
    try:
        code, out, err = say(capsys, "list")
    finally:
        engine.answers.set()

    assert (code, first_words(out)) == (69, ["a"])
    assert err == f"far {how}: no answer within 2 s\n"


def test_list_keeps_what_it_has_read_if_the_rest_does_not_come(memory, capsys, monkeypatch):
    monkeypatch.setattr(reading, "MOST", 2)
    memory("tiring", "tests.failing_engines.TiringBackend")
    for name in "abc":
        taken(name, alias="tiring")

    code, out, err = say(capsys, "list")

    assert code == 0
    assert "tiring: the first 2 of 3 locks" in err
    assert len(out.splitlines()) == 3


def test_list_reads_on_if_more_is_held_than_one_question_tells(memory, capsys, monkeypatch):
    monkeypatch.setattr(reading, "MOST", 2)
    taken("nightly", "second")
    for number in range(5):
        taken(f"order:{number}")

    code, out, err = say(capsys, "list", "--sort", "name")
    monkeypatch.setattr(reading, "READ_FOR", 0)
    cut = say(capsys, "list")

    names = ["nightly", *(f"order:{number}" for number in range(5))]
    assert (code, first_words(out), err) == (0, names, "")
    assert len(first_words(cut[1])) == 3 and cut[2] == "default: the first 2 locks\n"


def test_an_engine_that_breaks_is_logged_and_one_that_is_down_is_not(memory, capsys, caplog):
    memory("down", "tests.failing_engines.DownBackend")
    memory("broken", "tests.failing_engines.BrokenBackend")

    assert say(capsys, "list")[0] == 69

    [record] = [r for r in caplog.records if getattr(r, "lock_event", "") == "not_listed"]
    assert record.name == "distlock_app" and record.lock_alias == "broken"
    assert record.exc_info[0] is ZeroDivisionError


def test_list_does_not_say_that_nothing_is_held_if_it_is_not_known(memory, capsys):
    memory("typo", "distlock_app.backends.redis.RedisBakend")

    code, out, err = say(capsys, "list")

    assert (code, out) == (69, "")
    assert err.startswith("typo cannot be used: DISTLOCK['typo']")


def test_list_names_an_engine_that_cannot_list_and_shows_the_rest(memory, capsys):
    memory("mute", "tests.failing_engines.UnlistedBackend")

    assert say(capsys, "list") == (0, "", "mute cannot list its locks\n")
    taken("a")
    code, out, err = say(capsys, "list")
    assert (code, err) == (0, "mute cannot list its locks\n")
    assert out.splitlines()[1].startswith("a")
    [*_, mute] = listed(capsys)["backends"]
    assert (mute["up"], mute["reason"]) == (True, "cannot list its locks")


def test_show_and_clear_do_not_say_that_a_lock_is_free_if_an_engine_cannot_list(memory, capsys):
    memory("mute", "tests.failing_engines.UnlistedBackend")
    taken("a", "mute")

    assert say(capsys, "show", "a") == (69, "", "mute cannot list its locks\n")
    assert say(capsys, "clear", "a", "--yes") == (69, "", "mute cannot list its locks\n")
    taken("a")
    assert say(capsys, "show", "a")[0] == 0
    with pytest.raises(LockError, match="cannot list its locks"):
        Lock("a", using="mute").locked()
    with pytest.raises(LockError, match="cannot clear a lock"):
        Lock("a", using="mute").clear()


def test_show_names_the_lock_that_nobody_holds(memory, capsys):
    taken("other")

    code, out, _ = say(capsys, "show", "nightly")

    assert (code, out) == (1, "nobody holds 'nightly' (asked: default, second)\n")


def test_show_and_clear_find_a_lock_of_any_alias(memory, capsys):
    taken("a", "second")

    shown = say(capsys, "show", "a")
    cleared = say(capsys, "clear", "a", "--yes")

    assert shown[0] == 0 and "second" in shown[1]
    assert cleared[:2] == (0, "1 cleared\n")


def test_clear_does_not_choose_between_aliases(memory, capsys):
    for alias in "default", "second":
        taken("a", alias)

    assert "--using" in str(ends_with("clear", "a", "--yes"))
    assert say(capsys, "clear", "a", "--yes", "--using", "second")[:2] == (0, "1 cleared\n")
    assert list(registry["default"].backend.holders(key_of("a")))


def test_every_action_takes_several_aliases(memory, capsys):
    memory("third", "distlock_app.backends.locmem.LocMemBackend")
    for alias in "default", "second", "third":
        taken("a", alias)
    both = ["--using", "second,third"]

    assert {lock["alias"] for lock in listed(capsys, *both)["locks"]} == {"second", "third"}
    assert re.findall(r"^(\w+): LocMemBackend works", say(capsys, "doctor", *both)[1], re.M) == [
        *("second", "third")
    ]
    assert say(capsys, "clear", "a", "--yes", *both)[:2] == (0, "2 cleared\n")
    assert say(capsys, "show", "a", *both)[:2] == (1, "nobody holds 'a' (asked: second, third)\n")
    assert list(registry["default"].backend.holders(key_of("a")))
    assert "none" in str(ends_with("list", "--using", "second,none"))


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
def test_purge_sums_up_the_tables_of_several_aliases(capsys, settings):
    path = "distlock_app.backends.database.DatabaseBackend"
    settings.DISTLOCK = {
        alias: {"BACKEND": path, "LOCATION": alias} for alias in ("default", "locks")
    }
    both = ("--older-than", "0", "--using", "default,locks,locks")
    say(capsys, "purge", *both)
    for alias in settings.DISTLOCK:
        Lock(f"test-command on {alias}", using=alias).acquire().release()

    assert say(capsys, "purge", *both, "--dry-run")[:2] == (0, "2 to delete\n")
    assert say(capsys, "purge", *both)[:2] == (0, "2 deleted\n")


def test_clear_says_that_one_of_its_aliases_was_down(memory, capsys):
    memory("broken", "tests.failing_engines.DownBackend")
    taken("a")

    code, out, err = say(capsys, "clear", "a", "--yes", "--using", "default,broken")

    assert (code, out) == (69, "1 cleared\n")
    assert "broken is down" in err
    taken("a")
    assert say(capsys, "clear", "a", "--yes")[:2] == (0, "1 cleared\n")  # no alias was asked for


def test_show_names_a_holder_although_another_engine_is_down(memory, capsys):
    memory("broken", "tests.failing_engines.DownBackend")
    taken("a", who="bob /b")

    code, out, err = say(capsys, "show", "a")

    assert code == 0 and "bob /b" in out and "broken is down" in err


def test_no_name_or_holder_can_write_to_the_terminal(memory, capsys):
    taken("\x1b[2Jred\n\u202efake", who="\x1b]0;title\x07")

    _, out, _ = say(capsys, "list")

    assert "\x1b" not in out and "\u202e" not in out and "\x07" not in out
    assert len(out.splitlines()) == 2


@pytest.mark.parametrize("action", [["list"], ["show", "pay:😀"], ["list", "--json"]])
def test_a_name_that_the_output_has_no_letters_for_is_escaped(memory, monkeypatch, action):
    taken("pay:😀")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1", write_through=True))

    call_command("distlock", *action)

    assert b"pay:\\U0001f600" in written.getvalue()


def test_show_ends_with_1_if_nobody_holds_it(memory, capsys):
    assert say(capsys, "show", "a")[0] == 1
    taken("a", who="bob /b")

    code, out, _ = say(capsys, "show", "a")

    assert code == 0 and "bob /b" in out


def test_clear_frees_the_lock_with_a_greater_fence_and_says_who_did_it(memory, capsys):
    heard = []
    receiver = lambda **facts: heard.append(facts)  # noqa: E731
    lock_cleared.connect(receiver)
    before = taken("a")

    code, out, _ = say(capsys, "clear", "a", "--yes", "--reason", "host is gone")

    lock_cleared.disconnect(receiver)
    assert (code, out) == (0, "1 cleared\n")
    assert taken("a").fence > before.fence
    assert heard[0]["reason"] == "host is gone"
    assert heard[0]["user"] == f"{getpass.getuser()} (command line)"


@pytest.mark.parametrize("error", [KeyError("uid not found: 4711"), OSError("No username set")])
def test_a_user_without_a_name_may_clear(memory, capsys, caplog, monkeypatch, error):
    """As of a container that runs with any number."""

    def unknown():
        raise error

    taken("a")
    monkeypatch.setattr(getpass, "getuser", unknown)

    assert say(capsys, "clear", "a", "--yes")[:2] == (0, "1 cleared\n")
    assert "cleared by unknown (command line)" in caplog.text


@pytest.mark.parametrize("action", [["show", "a"], ["clear", "a", "--yes"]], ids=lambda a: a[0])
def test_programs_get_the_holders_that_are_shown_or_cleared_as_json(memory, capsys, action):
    grant = taken("a")

    code, out, err = say(capsys, *action, "--json")
    say(capsys, "clear", "a", "--yes")
    free = say(capsys, *action, "--json")

    assert (code, err) == (0, "")
    assert [(lock["name"], lock["fence"]) for lock in json.loads(out)["locks"]] == [
        ("a", grant.fence)
    ]
    assert (free[0], json.loads(free[1])) == (1, {"locks": []})


@pytest.mark.parametrize("version", ["1", ""])
def test_clear_spares_a_holder_who_was_not_meant(memory, capsys, version):
    held = taken("a")

    code, out, err = say(capsys, "clear", "a", "--yes", "--if-version", version)

    assert (code, out) == (1, "0 cleared\n")
    assert err == "it is held with another version: see `show --json`\n"
    assert registry["default"].backend.extend(held, 30)


def test_clear_says_that_nobody_holds_the_lock(memory, capsys):
    code, out, err = say(capsys, "clear", "a", "--yes")

    assert (code, out, err) == (1, "0 cleared\n", "nobody holds 'a' (asked: default, second)\n")


def test_clear_asks_before_it_does_anything(memory, capsys, monkeypatch):
    taken("a", who="bob /b")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter(["", "no", "yes"])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))

    for _ in range(2):
        assert str(ends_with("clear", "a")) == "nothing was cleared"
    asked = capsys.readouterr().out
    assert "bob /b" in asked and "Clearing does not stop its holder" in asked
    assert say(capsys, "clear", "a")[0] == 0


def test_clear_does_not_guess_where_nobody_can_be_asked(memory, monkeypatch):
    taken("a")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)

    assert "--yes" in str(ends_with("clear", "a"))
    monkeypatch.setattr("sys.stdin", None)  # closed, by `<&-`
    assert "--yes" in str(ends_with("clear", "a"))


def test_clear_takes_the_end_of_the_input_for_a_no(memory, monkeypatch):
    def ctrl_d(question):
        raise EOFError

    taken("a")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", ctrl_d)

    assert str(ends_with("clear", "a")) == "nothing was cleared"


@pytest.mark.parametrize(
    "args",
    [["list"], ["show", "a"], ["doctor"], ["watch", "--times", "1"], ["clear", "a", "--yes"]],
)
def test_a_closed_output_keeps_no_action_from_its_work(memory, monkeypatch, args):
    taken("a")
    monkeypatch.setattr("sys.stdout", None)  # closed, by `>&-`

    call_command("distlock", *args)

    assert bool(Lock("a").holders()) == (args[0] != "clear")


@pytest.mark.once
@pytest.mark.parametrize("buffered", [["env", "-u", "PYTHONUNBUFFERED"], ["env"]])
def test_a_list_on_a_full_disk_says_so_without_a_traceback(started, buffered):
    full = [*buffered, "sh", "-c", 'exec "$@" >/dev/full', "sh"]
    process = started("list", "--using", "default", wrapper=full)
    _, err = process.communicate(timeout=60)

    assert err == "CommandError: [Errno 28] No space left on device\n"
    assert process.returncode == 1


def test_clear_of_a_free_lock_ends_with_1(memory, capsys):
    assert say(capsys, "clear", "a", "--yes")[0] == 1


@pytest.mark.parametrize("action", [["show", "a"], ["clear", "a", "--yes"]])
def test_an_engine_that_is_down_is_neither_free_nor_cleared(memory, capsys, action):
    memory("broken", "tests.failing_engines.DownBackend")

    assert say(capsys, *action, "--using", "broken")[0] == 69


@pytest.mark.parametrize(
    "args",
    [
        ["list", "--using", "none"],
        ["show", "a", "--using", "none"],
        ["show", ""],
        ["purge", "--older-than", "-1"],
        ["purge", "--older-than", "inf"],
        ["list", "--held-for", "-1"],
        ["stuck", "--held-for", "nan"],
        ["watch", "--times", "0"],
        ["run", "a", "--ttl", "0", "--", "true"],
        ["run", "a", "--using", "none", "--", "true"],
        ["run", "", "--", "true"],
    ],
)
def test_mistakes_are_told_as_such(memory, args):
    assert ends_with(*args).returncode == 1


def test_a_program_has_to_be_named(memory):
    failure = ends_with("run", "a", "--", "--")

    assert (failure.returncode, str(failure)) == (2, "name the program to run after --")


@pytest.mark.parametrize("args", [["clear", "a", "--yes"], ["purge"]], ids=lambda args: args[0])
def test_an_engine_that_fails_in_the_middle_of_an_action_ends_it_with_69(memory, args):
    memory("stubborn", "tests.failing_engines.StubbornBackend")
    taken("a", "stubborn")

    end = ends_with(*args, "--using", "stubborn")

    assert (end.returncode, str(end)) == (69, "no route to db7")
    assert Lock("a", using="stubborn").locked()


def test_purge_says_how_many_rows_went(memory, capsys):
    assert say(capsys, "purge")[1] == "0 deleted\n"


@pytest.fixture
def empty_table(transactional_db):
    """Delete the rows of tests before: locks commit on connections of their own."""
    DistLock.objects.all().delete()


@pytest.mark.usefixtures("empty_table")
def test_purge_deletes_from_the_lock_table_what_has_long_been_free(capsys):
    backend = registry["default"].backend
    backend.release(taken("free"))
    taken("held")
    time.sleep(0.1)
    purge = ["purge", "--older-than", "0.05"]

    for _ in range(2):
        assert say(capsys, *purge, "--dry-run")[1] == "1 to delete\n"
        assert json.loads(say(capsys, *purge, "--dry-run", "--json")[1]) == {"to_purge": 1}
    code, out, _ = say(capsys, *purge, "--json")

    assert (code, json.loads(out)) == (0, {"purged": 1})
    assert say(capsys, *purge, "--dry-run")[1] == "0 to delete\n"


@pytest.fixture
def started(transactional_db):
    """Start the command; whatever still runs is killed at the end.

    With a `wrapper` it is started as a shell does, else by a fork of what has loaded Django.
    """
    running = []

    def start(*args, wrapper=(), **env):
        if wrapper:
            command = mortal([*wrapper, sys.executable, "-m", "django", "distlock", *args])
            env = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", **env}
            pipe = subprocess.PIPE
            pipes = {"stdout": pipe, "stderr": pipe, "text": True}
            process = launch(command, cwd=ROOT, env=env, start_new_session=True, **pipes)
        else:
            process = nursery.command("distlock_app", "distlock", *args, env=env)
        running.append(process)
        return process

    yield start
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its program has our pipes open, too
        process.communicate()


def is_running(pid):
    try:
        # A zombie only waits for init to fetch its exit code.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_held(name):
    return any(registry["default"].backend.holders(key_of(name)))


def shell(script):
    return ["--", "sh", "-c", script]


def test_run_holds_the_lock_and_returns_the_exit_code(started, tmp_path):
    process = started(
        "run", "a", *shell(f"while [ ! -e {tmp_path}/go ]; do sleep .05; done; exit 7")
    )

    until(lambda: is_held("a"))
    (tmp_path / "go").touch()

    assert process.wait(30) == 7
    assert not is_held("a")


def test_run_gives_the_program_no_connection_in_place_of_a_closed_input(started):
    closed = ["sh", "-c", 'exec "$@" <&-', "sh"]

    process = started("run", "a", *shell("ls -l /proc/$$/fd"), wrapper=closed)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    assert "socket:" not in out


@pytest.mark.once
def test_run_gives_a_busy_lock_up_with_75_and_names_the_holder(started):
    taken("a", who="bob /b")

    process = started("run", "a", "--wait", "0", *shell("echo ran"))
    out, err = process.communicate(timeout=60)

    assert process.returncode == 75
    assert out == "" and "bob /b" in err


@pytest.mark.once
@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full", "2> >(true)"])
def test_run_ends_with_75_although_its_stderr_cannot_be_written(started, stderr):
    taken("a")
    bash = ["env", "-u", "PYTHONUNBUFFERED", "bash", "-c", f'exec "$@" {stderr}', "bash"]

    assert started("run", "a", "--wait", "0", *shell(":"), wrapper=bash).wait(60) == 75


@pytest.mark.once
def test_a_process_that_calls_the_command_keeps_its_stderr_on_a_full_disk(memory, monkeypatch):
    full = open("/dev/full", "w", buffering=1)
    monkeypatch.setattr("sys.stderr", full)
    command = load_command_class("distlock_app", "distlock")
    call_command(command, "list", stdout=io.StringIO())
    write = command.stderr.write

    call_command(command, "run", "a", *shell(":"))  # says that LocMem excludes no other process

    assert command.stderr.write is write  # one call in each other would become too many
    assert os.readlink(f"/proc/self/fd/{full.fileno()}") == "/dev/full"
    with suppress(OSError):
        full.close()


def test_the_holder_of_a_busy_lock_cannot_write_to_the_terminal(memory):
    taken("a", who="GET /\x1b]0;title\x07\nforged")

    said = str(ends_with("run", "a", "--wait", "0", "--", "true"))

    assert "GET /" in said and said.isprintable()


@pytest.mark.once
def test_run_waits_for_its_turn(started):
    grant = taken("a")
    process = started("run", "a", "--wait", "30", *shell("echo ran"))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(4)  # longer than it needs to start
    registry["default"].backend.release(grant)

    assert process.communicate(timeout=60)[0] == "ran\n"
    assert process.returncode == 0


@pytest.mark.once
@pytest.mark.parametrize(
    "number",
    [
        *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
        *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM),
    ],
)
def test_run_passes_signals_on_and_releases(started, tmp_path, number):
    trap = f"trap 'echo got; exit 3' {number.name[3:]}"
    script = f"{trap}; touch {tmp_path}/up; while :; do sleep .05; done"
    process = started("run", "a", *shell(script))
    until((tmp_path / "up").exists)

    process.send_signal(number)
    out, _ = process.communicate(timeout=30)

    assert (process.returncode, out) == (3, "got\n")
    assert not is_held("a")


@pytest.mark.once
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program as another user")
def test_run_waits_for_a_program_that_it_may_not_signal(started):
    mere_root = ["setpriv", "--bounding-set=-kill"]  # without the right to signal other users
    script = ["sh", "-c", "echo $$; exec sleep 60"]
    process = started(
        *("run", "a", "--ttl", "3", "--", "setpriv", "--reuid=65534", *script), wrapper=mere_root
    )
    program = int(process.stdout.readline())

    process.terminate()
    assert "cannot send SIGTERM" in process.stderr.readline()
    assert is_held("a")

    registry["default"].backend.clear(key_of("a"))
    # It logs the loss and ends the program at the same time, in two threads.
    said = sorted(process.stderr.readline() for _ in range(2))
    assert "cannot send SIGTERM" in said[0] and "lost the lock" in said[1]
    os.kill(program, signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 76, err
    assert "the program ended with 143" in err


def test_run_gives_the_lock_up_if_no_program_can_be_started(memory):
    lock = Lock("a")
    lock.acquire().release()  # which has files to read, the first time
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            run.run(lock, ["true"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert not is_held("a")


@pytest.mark.once
def test_run_ends_with_128_and_the_signal_that_ended_the_program(started):
    process = started("run", "a", *shell("kill -KILL $$"))

    assert process.wait(60) == 137
    assert not is_held("a")


@pytest.mark.once
def test_a_signal_ends_the_waiting(started):
    taken("a")
    process = started("run", "a", "--wait", "60", *shell("echo ran"))
    time.sleep(2.5)  # it needs as long to start

    process.terminate()
    out, _ = process.communicate(timeout=30)

    assert (process.returncode, out) in [(143, ""), (-15, "")]  # -15: it was still starting


@pytest.mark.slow
def test_run_ends_a_program_whose_lock_is_lost_with_76(started, tmp_path, capfd):
    begun = tmp_path / "begun"  # earlier, `run` may not know yet that it has the lock
    process = started("run", "a", "--ttl", "3", *shell(f"touch {begun}; exec sleep 60"))
    until(begun.exists)

    registry["default"].backend.clear(key_of("a"))
    began = time.monotonic()
    _, err = process.communicate(timeout=30)

    assert process.returncode == 76, err
    assert "the program ended with 143" in err
    assert time.monotonic() - began < 10


@pytest.mark.once
def test_run_says_that_a_program_whose_lock_is_lost_has_ended_by_itself(started, tmp_path):
    begun, go = tmp_path / "begun", tmp_path / "go"
    script = f"trap '' TERM; touch {begun}; while [ ! -e {go} ]; do sleep .05; done"
    process = started("run", "a", *shell(script))
    until(begun.exists)  # earlier, `run` may not know yet that it has the lock

    registry["default"].backend.clear(key_of("a"))
    go.touch()
    _, err = process.communicate(timeout=30)

    assert process.returncode == 76, err
    assert "the program ended with 0" in err


# Writes who leads, and whether another leads at the same time; then it leads for ever.
LEADS = """
import fcntl, sys, time
path, who = sys.argv[1:]
log = open(path, "a", buffering=1)
try:
    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print(who, file=log)
except OSError:
    print("two lead", file=log)
time.sleep(3600)
"""
KILLS = 6


def lead(started, path, who, **options):
    program = [sys.executable, "-c", LEADS, str(path), who]
    return started("lead", "a", "--ttl", "3", "--", *program, **options)


def leaders(path):
    return path.read_text().split("\n")[:-1] if path.exists() else []


@pytest.mark.once
@pytest.mark.slow
def test_a_killed_leader_is_followed_by_the_other_candidate(started, tmp_path):
    path = tmp_path / "leaders"
    candidates = {who: lead(started, path, who) for who in ("0", "1")}

    for kill in range(KILLS):
        until(lambda kill=kill: len(leaders(path)) > kill)
        who = leaders(path)[-1]
        candidates[who].kill()
        candidates[who].wait()
        until(lambda kill=kill: len(leaders(path)) > kill + 1)
        candidates[who] = lead(started, path, who)

    assert "two lead" not in leaders(path)
    assert all(one != next_one for one, next_one in pairwise(leaders(path)))


@pytest.mark.once
@pytest.mark.slow
def test_a_wrapper_that_is_killed_at_any_moment_leaves_no_program_behind(started, tmp_path):
    """As the kernel kills it when memory is short: while it starts, waits or holds the lock."""
    path, chance = tmp_path / "owners", random.Random(1)

    def wrap(who):
        program = [sys.executable, "-c", LEADS, str(path), who]
        return started("run", "a", "--ttl", "1", "--wait", "60", "--", *program)

    owner = wrap("0")
    for kill in range(2 * KILLS):
        until(lambda: is_held("a"))
        following = wrap(str(kill + 1))
        time.sleep(chance.uniform(0.0, 0.6))
        owner.kill()
        owner.wait()
        owner = following

    until(lambda: leaders(path)[-1:] == [str(2 * KILLS)])
    assert "two lead" not in leaders(path)


@pytest.mark.once
def test_a_leader_that_lost_its_lock_leads_again_in_its_turn(started, tmp_path):
    path = tmp_path / "leaders"
    process = lead(started, path, "0")
    until(lambda: leaders(path))
    [held] = registry["default"].backend.holders(key_of("a"))
    assert held.holder["who"] == f"distlock lead {sys.executable}"

    registry["default"].backend.clear(key_of("a"))

    until(lambda: len(leaders(path)) >= 2)
    assert set(leaders(path)) == {"0"}
    process.terminate()
    assert process.wait(30) == 143
    assert "waiting for the next turn" in process.stderr.read()
    assert not is_held("a")


def reloading(tmp_path):
    """A program that notes when it starts and what it survives; it ends when it may."""
    noted = "".join(f"trap 'touch {tmp_path}/{name}' {name}; " for name in ("HUP", "TERM"))
    wait = f"while [ ! -e {tmp_path}/go ]; do sleep .05; done"
    return shell(f"{noted} echo >> {tmp_path}/begun; {wait}; rm {tmp_path}/go")


def begun(tmp_path):
    return len(leaders(tmp_path / "begun"))


@pytest.mark.once
def test_a_leader_goes_on_after_a_signal_that_its_program_survived(started, tmp_path):
    process = started("lead", "a", "--ttl", "3", *reloading(tmp_path))
    until(lambda: begun(tmp_path) == 1)
    process.send_signal(signal.SIGHUP)
    until((tmp_path / "HUP").exists)

    registry["default"].backend.clear(key_of("a"))
    until((tmp_path / "TERM").exists)  # it was asked to end
    (tmp_path / "go").touch()

    until(lambda: begun(tmp_path) == 2)


@pytest.mark.once
def test_a_leader_that_was_asked_to_end_does_not_go_on_after_a_loss(started, tmp_path):
    process = started("lead", "a", "--ttl", "3", *reloading(tmp_path))
    until(lambda: begun(tmp_path) == 1)
    for name in "TERM", "HUP":
        process.send_signal(signal.Signals[f"SIG{name}"])
        until((tmp_path / name).exists)

    registry["default"].backend.clear(key_of("a"))
    (tmp_path / "go").touch()

    assert process.wait(30) == 143


def test_a_signal_that_another_thread_gets_is_passed_on(memory, tmp_path):
    """As one that comes just before the main thread begins to wait."""
    heard = f"trap 'exit 7' TERM; touch {tmp_path}/begun"
    program = shell(f"{heard}; for i in $(seq 400); do sleep .05; done")[1:]

    def signal_me():
        until((tmp_path / "begun").exists)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    with running(signal_me):
        assert run.run(Lock("a"), program) == 7


@pytest.mark.once
@pytest.mark.parametrize("action", ["run", "lead"])
def test_the_exit_code_is_known_if_the_parent_ignores_the_end_of_children(started, action):
    process = started(action, "a", *shell("exit 3"), wrapper=["env", "--ignore-signal=CHLD"])

    assert process.wait(60) == 3


def test_a_handler_that_python_did_not_install_is_let_be(memory, monkeypatch):
    install, before = signal.signal, signal.getsignal(signal.SIGUSR1)

    def of_another_library(number, handler):
        found = install(number, handler)
        return None if number == signal.SIGUSR1 else found

    monkeypatch.setattr(signal, "signal", of_another_library)
    try:
        assert run.run(Lock("a"), ["true"]) == 0
    finally:
        install(signal.SIGUSR1, before)


def test_a_candidate_asks_again_after_pauses_that_grow_until_it_has_led(monkeypatch):
    outcomes = iter([LockLost(), BackendError(), BackendError(), LockLost(), BackendError()])
    pauses, reported = [], []

    def lose(*_):
        if (error := next(outcomes, None)) is not None:
            raise error
        return 3

    monkeypatch.setattr(run, "_run", lose)
    monkeypatch.setattr(run, "full_jitter", lambda failures, **_: failures)
    monkeypatch.setattr(run, "sleep", pauses.append)

    assert run.lead(Lock("a"), ["true"], reported.append) == 3

    assert pauses == [1, 2, 3, 1, 2]
    assert len(reported) == 5


@pytest.mark.once
def test_a_leader_whose_program_ends_by_itself_ends_with_its_code(started):
    process = started("lead", "a", *shell("exit 3"))

    assert process.wait(60) == 3
    assert not is_held("a")


@pytest.mark.once
@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full", "2> >(true)"])
def test_a_leader_goes_on_where_nobody_reads_what_it_says(started, tmp_path, closed):
    path = tmp_path / "leaders"
    # Unbuffered, nothing would be left to be written at the exit.
    bash = ["env", "-u", "PYTHONUNBUFFERED", "bash", "-c", f'exec "$@" {closed}', "bash"]
    process = lead(started, path, "0", wrapper=bash)
    until(lambda: leaders(path))

    registry["default"].backend.clear(key_of("a"))

    until(lambda: len(leaders(path)) >= 2)
    process.terminate()
    assert process.wait(30) == 143


def test_a_candidate_asks_a_backend_until_it_answers_again(memory, monkeypatch):
    outcomes, said = [LockLost("gone"), BackendError("down"), BackendError("down"), 0], []

    def ends(lock, program, signals):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(run, "_run", ends)

    assert run.lead(Lock("a"), ["true"], said.append) == 0
    assert [str(error) for error in said] == ["gone", "down", "down"]


def test_a_candidate_outlives_a_backend_that_fails_in_its_first_request(memory, monkeypatch):
    """As one that waits in that request, for hours; the try before it told that it answers."""
    outcomes, waits, said = [LockBusy(), BackendError("restarted"), 0], [], []

    def ends(lock, program, signals):
        waits.append(lock.wait)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(run, "_run", ends)

    assert run.lead(Lock("a", wait=None), ["true"], said.append) == 0
    assert [str(error) for error in said] == ["restarted"]
    assert waits == [0, None, None]


def test_a_signal_that_comes_while_a_loss_is_reported_ends_the_candidate(memory, monkeypatch):
    def is_lost(lock, program, signals):
        signals.ends_us = False  # as since it had the lock
        raise LockLost("gone")

    monkeypatch.setattr(run, "_run", is_lost)

    def stop(error):
        assert not stopped, "it went on"
        stopped.append(error)
        signal.raise_signal(signal.SIGTERM)

    stopped = []
    with pytest.raises(SystemExit) as end:
        run.lead(Lock("a"), ["true"], stop)
    assert end.value.code == 143


@pytest.mark.parametrize("using", ["down", "default,down"])
def test_a_candidate_ends_if_one_of_its_backends_does_not_answer_at_first(memory, using):
    memory("down", "tests.failing_engines.UnreachedBackend")

    assert ends_with("lead", "a", "--using", using, "--", "true").returncode == 69


@pytest.mark.once
def test_a_program_dies_with_the_process_that_runs_it(started):
    process = started("run", "a", *shell("echo $$; exec sleep 60"))
    program = int(process.stdout.readline())

    process.kill()

    until(lambda: not is_running(program))


# Runs a program as operations/run.py does, on a system without Linux's signal at a parent's death.
ELSEWHERE = """
import os, runpy, subprocess, sys
reading, writing = os.pipe()
as_script = "import runpy, sys; sys.platform = 'elsewhere'; del sys.argv[0]; " \
    "runpy.run_path(sys.argv[0], run_name='__main__')"
tether = [sys.executable, "-c", as_script, sys.argv[1], str(os.getpid()), str(reading)]
process = subprocess.Popen([*tether, *sys.argv[2:]], pass_fds=[reading])
os.close(reading)
sys.exit(process.wait())
"""


@pytest.mark.once
def test_where_the_kernel_does_not_end_a_program_a_pipe_does():
    def start(script):
        command = [sys.executable, "-c", ELSEWHERE, tethered.__file__, "sh", "-c", script]
        return launch(mortal(command), stdout=subprocess.PIPE, text=True)

    ended = start("exit 7")
    ended.communicate(timeout=30)
    process = start("echo $$; exec sleep 60")
    program = int(process.stdout.readline())

    process.kill()

    until(lambda: not is_running(program))
    process.communicate()
    assert ended.returncode == 7


@pytest.mark.parametrize(
    ("program", "code"),
    [("/no/such/program", 127), ("", 127), (str(Path(__file__)), 126)],
    ids=["missing", "without a name", "not executable"],
)
def test_run_of_what_cannot_run_ends_as_a_shell_does(memory, capsys, program, code):
    ended, _, err = say(capsys, "run", "a", "--", program)

    assert ended == code
    assert f"\n{program}: " in err
    assert not is_held("a")


@pytest.mark.parametrize(("args", "wait"), [([], 0), (["--wait", "0"], 60)])
def test_run_waits_as_its_alias_does_unless_it_is_told_how_long(memory, args, wait):
    memory("other", "distlock_app.backends.locmem.LocMemBackend", WAIT=wait)
    taken("a", "other")

    assert ends_with("run", "a", "--using", "other", *args, "--", "true").returncode == 75


def test_run_says_that_an_engine_in_memory_excludes_nobody(memory, capfd):
    code, _, err = say(capfd, "run", "a", "--", "true")

    assert (code, err) == (0, "default: LocMemBackend does not exclude other processes\n")


@pytest.mark.parametrize(
    "before", [["a", "--wait", "5", "--"], ["a", "--"], ["--", "-a"], ["--", "-a", "--"]]
)
def test_run_leaves_the_options_of_the_program_alone(memory, capfd, before):
    args = ["run", *before, "echo", "--wait", "--", "--settings=x", "-v"]

    call_command("distlock", *args)

    assert capfd.readouterr().out == "--wait -- --settings=x -v\n"


@pytest.mark.once
def test_locks_on_other_engines_are_shown_and_cleared_while_the_database_is_down(
    redis_url, started
):
    grant = taken("test-command", "redis")
    url = "mysql://nobody@127.0.0.1:1/none"
    if connection.vendor != "mysql":
        try:
            import MySQLdb  # noqa: F401
        except ImportError:
            missing("mysql", "mysqlclient is not installed")
    down = {"DISTLOCK_TEST_DATABASE": "mysql", "DISTLOCK_TEST_MYSQL_URL": url}

    process = started("list", "--using", "redis", **down)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "test-command" in out

    process = started("clear", "test-command", "--using", "redis", "--yes", **down)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "1 cleared\n"), err

    process = started("list", **down)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 69 and "default is down" in err
    assert not registry["redis"].backend.release(grant)


def test_the_doctor_takes_a_lock_of_every_engine(memory, capsys):
    code, out, err = say(capsys, "doctor")

    assert (code, err) == (0, "")
    assert out.startswith("default: LocMemBackend works; one round trip took ")
    assert "\nsecond: LocMemBackend works" in out
    assert list(registry["default"].backend.holders()) == []


@pytest.mark.usefixtures("empty_table")
def test_the_doctor_leaves_no_more_than_one_row_in_a_lock_table(settings, capsys):
    table = "distlock_app.backends.database.DatabaseBackend"
    settings.DISTLOCK = {"default": {"BACKEND": table, "LOCATION": "default"}}

    for _ in range(3):
        assert say(capsys, "doctor")[0] == 0

    assert DistLock.objects.count() == 1


def test_the_doctor_says_what_is_wrong_and_goes_on(memory, capsys):
    memory("down", "tests.failing_engines.DownBackend")
    memory("broken", "tests.failing_engines.BrokenBackend")
    memory("typo", "distlock_app.backends.redis.RedisBakend")

    code, out, _ = say(capsys, "doctor")

    assert code == 69
    assert "default: LocMemBackend works" in out
    assert "\ndown: DownBackend: no route to db7\n" in out
    assert "\nbroken: BrokenBackend: ZeroDivisionError: division by zero\n" in out
    assert re.search(r"^typo: not usable: .*RedisBakend.*cannot be imported", out, re.M)


def test_the_doctor_passes_on_what_the_checks_say(memory, capsys, monkeypatch):
    warning = Warning("Its clock is slow.", hint="Wind it up.", id="distlock_app.W099")
    monkeypatch.setattr(LocMemBackend, "check", lambda self, ask: [warning] if ask else [])

    code, out, _ = say(capsys, "doctor", "--using", "second")

    assert code == 0
    assert out.endswith("\n  distlock_app.W099: Its clock is slow.\n    Wind it up.\n")
    assert "default" not in out


def test_the_doctor_writes_json(memory, capsys):
    code, out, _ = say(capsys, "doctor", "--json")

    (first, second) = json.loads(out)["backends"]
    assert code == 0
    assert (first["alias"], first["backend"], first["works"]) == ("default", "LocMemBackend", True)
    assert first["pair_ms"] >= 0 and first["messages"] == []


def test_watch_lists_until_it_is_told_to_stop(memory, capsys):
    taken("nightly")

    code, out, _ = say(capsys, "watch", "--interval", "0.1", "--times", "3")

    assert code == 0
    assert out.count("nightly") == 3
    assert "\x1b" not in out


def test_watch_ends_quietly_with_ctrl_c(memory, capsys, monkeypatch):
    monkeypatch.setattr("distlock_app.management.looking.sleep", _interrupt)

    code, out, err = say(capsys, "watch")

    assert (code, err) == (0, "")
    assert out.count("nothing is held") == 1
    with pytest.raises(CommandError, match="--interval"):
        call_command("distlock", "watch", "--interval", "0")


def _interrupt(seconds):
    raise KeyboardInterrupt


@pytest.mark.once
@pytest.mark.parametrize("action", [["list"], ["watch", "--interval", "0.1"]])
def test_a_reader_that_goes_away_ends_it_quietly(started, action):
    taken("a")

    process = started(*action)
    process.stdout.close()

    assert process.wait(60) == 141
    assert process.stderr.read() == ""
