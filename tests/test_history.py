"""The history of locks: who waited how long and held it how long, told by every process."""

from __future__ import annotations

import atexit
import multiprocessing
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import closing, suppress
from datetime import datetime, timedelta

import pytest
from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.core import checks
from django.db import DataError, connection, connections, transaction
from django.utils import timezone
from django.utils.html import escape

from distlock_app import Lock, LockBusy, LockLost, signals
from distlock_app.admin import past as past_events
from distlock_app.admin.chart import BAR, BARS
from distlock_app.admin.rows import id_of
from distlock_app.backends.locmem import LocMemBackend
from distlock_app.checks import check_servers
from distlock_app.claims import Holding
from distlock_app.core import operators
from distlock_app.core.registry import registry
from distlock_app.core.releasing import releaser
from distlock_app.models import LiveLock, LockEvent
from distlock_app.operations import history
from distlock_app.primitives import identity, names, threads
from distlock_app.primitives.names import key_of
from distlock_app.testing import held_elsewhere, lose
from tests.engines import until

pytestmark = pytest.mark.django_db(transaction=True)

LIST = "/admin/distlock_app/livelock/"
EVENTS = f"{LIST}events/"
LOCMEM = "distlock_app.backends.locmem.LocMemBackend"


@pytest.fixture(autouse=True)
def locks_in_memory(settings):
    settings.DISTLOCK = {"default": {"BACKEND": LOCMEM}}


@pytest.fixture
def kept(settings, monkeypatch):
    """Keep a history of twenty events for each lock, written soon."""
    monkeypatch.setattr(history, "EVERY", 0.01)
    settings.DISTLOCK_HISTORY = 20


@pytest.fixture
def page(client, kept):
    """Return a function that gets a page of the admin as somebody who may look at locks."""
    user = User.objects.create_user("ann", password="x", is_staff=True)
    kind = ContentType.objects.get_for_model(LiveLock)
    permission, _ = Permission.objects.get_or_create(
        codename="view_livelock", content_type=kind, defaults={"name": "x"}
    )
    user.user_permissions.add(permission)
    client.force_login(user)

    def get(url, **query):
        history.writer.flush(30)
        response = client.get(url, query, follow=True)
        assert response.status_code == 200
        return response

    return get


def events():
    """Return what was written, in order, as (event, name)."""
    history.writer.flush(30)
    return [(e.event, e.name) for e in LockEvent.objects.order_by("pk")]


def test_without_the_setting_nobody_listens_and_nothing_is_written():
    with Lock("a"):
        pass

    for signal in (signals.lock_acquired, signals.lock_busy, signals.lock_released):
        assert not signal.receivers
    assert events() == []


def test_every_event_is_written_with_its_seconds(kept):
    with identity.activity("alice /pay"), Lock("told") as hold:
        fence = hold.fence
        time.sleep(0.02)
    with held_elsewhere("b"), pytest.raises(LockBusy):
        Lock("b", wait=0.05).acquire()
    with pytest.raises(LockLost), Lock("c") as hold:
        lose(hold)
    with pytest.raises(LockLost), Lock("d") as hold:
        Lock("d").clear(if_version=str(hold.fence), user="ann", reason="hangs")
        hold.check()

    taken = Lock("e").acquire()
    Lock("e").clear()
    with pytest.raises(LockLost):
        taken.release()

    until(lambda: sorted(n for e, n in events() if e == "lost") == ["c", "d", "e"])
    told = events()
    for name, said in {
        "told": ["acquired", "released"],
        "c": ["acquired", "lost"],
        "d": ["acquired", "cleared", "lost"],
        "e": ["acquired", "cleared", "lost"],
    }.items():
        assert [event for event, of in told if of == name] == said
    released = LockEvent.objects.get(name="told", event="released")
    assert released.seconds >= 0.02 and released.fence == fence
    assert "alice /pay" in LockEvent.objects.get(name="told", event="acquired").detail
    assert LockEvent.objects.get(event="busy").seconds >= 0.05
    assert LockEvent.objects.get(name="c", event="lost").detail
    cleared = {e.name: e for e in LockEvent.objects.filter(event="cleared")}
    assert (cleared["d"].detail, cleared["e"].detail) == ("ann: hangs", "")
    assert cleared["d"].fence == LockEvent.objects.get(name="d", event="acquired").fence
    assert cleared["e"].fence is None  # any holder was meant


@pytest.mark.parametrize("name", ["x" * 300, "tab\there"])
def test_a_clear_is_told_of_its_lock_whatever_name_was_shown(kept, name):
    with pytest.raises(LockLost), Lock(name) as hold:
        [held] = Lock(name).holders()
        operators.clear("default", held.key, names.shown(held.name), held.version, "ann", "hangs")
        hold.check()

    def told():
        history.writer.flush(30)
        return sorted(event.event for event in history.events_of("default", key_of(name)))

    until(lambda: "lost" in told())
    assert told() == ["acquired", "cleared", "lost"]


def test_it_joins_no_transaction_of_the_caller(kept):
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        with Lock("a"):
            raise ZeroDivisionError

    deadline = time.monotonic() + 30
    while len(events()) < 2 and time.monotonic() < deadline:  # it is released after the rollback
        time.sleep(0.01)
    assert events() == [("acquired", "a"), ("released", "a")]


def take_once():
    """Take a lock, and end before anything can have been written."""
    settings.DISTLOCK = {"default": {"BACKEND": LOCMEM}}
    settings.DISTLOCK_HISTORY = 20
    history.listen()
    with Lock("of another process"):
        pass


def test_a_process_that_ends_at_once_has_told(processes):
    processes.run("tests.test_history:take_once", count=1)

    assert ("released", "of another process") in events()


def take_in_a_child():
    """Let a child of multiprocessing do it."""
    child = multiprocessing.get_context("fork").Process(target=take_once)
    child.start()
    child.join()


def test_a_child_of_multiprocessing_that_ends_at_once_has_told(processes):
    processes.run("tests.test_history:take_in_a_child", count=1)

    assert ("released", "of another process") in events()


def fail_in_a_transaction():
    """Have a lock released in the background at the end."""
    settings.DISTLOCK = {"default": {"BACKEND": "tests.test_history.SlowRelease"}}
    settings.DISTLOCK_HISTORY = 20
    history.listen()
    atexit.unregister(releaser.drain)  # it may come later than that of the history
    with suppress(ValueError), transaction.atomic():
        Lock("rolled back").acquire().release()
        raise ValueError


class SlowRelease(LocMemBackend):
    def release(self, grant):
        time.sleep(0.3)
        return super().release(grant)


def test_a_process_that_ends_has_told_what_was_released_in_the_background(processes):
    processes.run("tests.test_history:fail_in_a_transaction", count=1)

    assert ("released", "rolled back") in events()


def test_what_is_noted_just_as_the_writer_ends_a_turn_is_waited_for(kept, monkeypatch):
    class JustThen(deque):
        def append(self, event):
            turns = len(written)
            writer._worker.put(None)
            until(lambda: len(written) > turns)
            super().append(event)

    def write():
        written.append([event["name"] for _, event in writer._waiting])
        writer._waiting.clear()

    monkeypatch.setattr(history, "EVERY", 0.2)
    writer, written = history._Writer(), []
    monkeypatch.setattr(writer, "_write", write)
    writer.note(name="one")
    writer.flush(30)
    writer._waiting = JustThen()

    writer.note(name="two")
    writer.flush(30)

    assert ["two"] in written


def test_what_is_noted_as_no_thread_can_be_started_is_written_all_the_same(kept, monkeypatch):
    history.writer.flush(30)
    monkeypatch.setattr(history, "writer", history._Writer())
    monkeypatch.setattr(threads, "started", lambda work, name: False)  # as at exit on Python 3.12

    with Lock("a"):
        pass
    history.writer.flush(30)

    assert ("released", "a") in events()


def test_an_event_that_waits_for_the_database_is_short_whatever_the_name(kept, monkeypatch):
    history.writer.flush(30)
    monkeypatch.setattr(history._Writer, "_work", lambda writer, _: None)
    monkeypatch.setattr(history, "writer", history._Writer())

    with Lock("x" * 10_000):
        pass

    assert [len(event["name"]) for _, event in history.writer._waiting] == [200, 200]
    assert {event["key"] for _, event in history.writer._waiting} == {key_of("x" * 10_000)}


def test_a_letter_that_the_database_cannot_keep_costs_no_event(kept, monkeypatch):
    queryset = type(LockEvent.objects.all())
    write = queryset.bulk_create

    def in_latin1(self, rows, **options):
        if any(row.name == "😀" for row in rows):
            raise DataError("has no equivalent in encoding LATIN1")
        return write(self, rows, **options)

    monkeypatch.setattr(queryset, "bulk_create", in_latin1)
    with Lock("a"), Lock("😀"):
        pass
    history.writer.flush(30)

    both = ("a", "\\U0001f600")
    assert sorted(events()) == [
        (event, x) for event in ("acquired", "released") for x in sorted(both)
    ]


def test_a_database_that_is_down_costs_events_and_no_lock(kept, monkeypatch, caplog):
    def down(*args, **kwargs):
        raise OSError("no route to the database")

    for outage in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(type(LockEvent.objects.all()), "bulk_create", down)
            for _ in range(2):
                history.writer._worker.put(None)  # a turn in which nothing waits
                before = events()
                with Lock("a") as hold:
                    hold.check()
                assert events() == before
        with Lock("b"):
            pass

        assert events() == [("acquired", "b"), ("released", "b")] * outage
        assert caplog.messages.count("lock events could not be written") == outage


class NoHistory:
    """Routes the history nowhere, as a router does that needs a tenant and has none."""

    def db_for_write(self, model, **hints):
        if model is LockEvent:
            raise LookupError("no tenant")


def test_a_router_that_raises_costs_events_and_no_other_receiver(kept, settings):
    told = []

    def tell(name, **facts):
        told.append(name)

    signals.lock_acquired.connect(tell)
    settings.DATABASE_ROUTERS = [f"{__name__}.NoHistory"]
    with Lock("a"):
        pass
    settings.DATABASE_ROUTERS = []

    assert (told, events()) == (["a"], [])


class HistoryElsewhere:
    """Routes the history to another database."""

    def db_for_read(self, model, **hints):
        return "locks" if model is LockEvent else None

    db_for_write = db_for_read


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
def test_pages_do_without_the_events_of_a_database_that_is_down(
    page, settings, monkeypatch, caplog
):
    settings.DATABASE_ROUTERS = ["tests.test_history.HistoryElsewhere"]
    connections["locks"].close()
    monkeypatch.setitem(connections["locks"].settings_dict, "NAME", "/no/such/folder/db")

    html = page(EVENTS, lock=id_of("default", key_of("a"))).content.decode()
    [warning] = check_servers(databases=["locks"])

    assert "free" in html
    assert "lock events could not be read" in caplog.text
    assert (warning.id, warning.level) == ("distlock_app.W006", checks.WARNING)
    assert "cannot be read" in warning.msg


IN_A_TEST_RUN = """
import sys
import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["distlock_app"], DISTLOCK_HISTORY=20, USE_TZ=True,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}},
    DISTLOCK={"default": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"}},
)
django.setup()
from django.core.management import call_command
from django.test.utils import setup_databases, teardown_databases
from distlock_app import Lock

call_command("migrate", verbosity=0)
made = setup_databases(verbosity=0, interactive=False)
with Lock("a"):
    pass
teardown_databases(made, verbosity=0)
with Lock("b"):
    pass
"""


def test_the_events_of_a_test_run_are_not_written_into_the_real_database(tmp_path):
    path = tmp_path / "real.sqlite3"

    subprocess.run([sys.executable, "-c", IN_A_TEST_RUN, path], check=True, timeout=60)

    with closing(sqlite3.connect(path)) as database:
        found = database.execute("SELECT event, name FROM distlock_app_lockevent").fetchall()
    assert found == [("acquired", "b"), ("released", "b")]


def test_of_a_hot_lock_no_more_is_kept_than_settings_say(kept):
    with Lock("quiet"):
        pass
    for _ in range(5):
        for _ in range(50):
            with Lock("hot"):
                pass
        history.writer.flush(30)

    assert LockEvent.objects.filter(name="hot").count() <= 40
    assert LockEvent.objects.filter(name="quiet").count() == 2
    assert len(history.events_of("default", key_of("hot"))) == 20


def test_of_all_locks_together_so_many_are_kept(kept, monkeypatch):
    monkeypatch.setattr(history, "MOST_KEPT", 30)
    for number in range(100):
        with Lock(f"order:{number}"):
            pass

    assert len(events()) <= 30


def test_no_more_is_kept_of_many_processes_that_each_write_little(kept, monkeypatch):
    monkeypatch.setattr(history, "MOST_KEPT", 100)
    event = {"at": timezone.now(), "alias": "default", "event": "busy"}
    for number in range(120):
        process = history._Writer()
        process._waiting.append((history._database(), {**event, "key": str(number)}))
        process._write()

    assert len(events()) == 100


def test_a_child_of_fork_tells_nothing_twice():
    writer = history._Writer()
    writer._waiting.append({"name": "of the parent"})

    writer.__init__()

    assert not writer._waiting and not writer._worker.running


def test_the_page_of_a_lock_shows_what_happened_and_a_chart(page):
    released = threading.Event()
    with Lock("a") as first:
        waiter = threading.Thread(target=lambda: Lock("a", wait=30).acquire().release())
        waiter.start()
        while not Lock("a").holders()[0].waiters:
            time.sleep(0.005)
        time.sleep(0.1)
        assert first.fence and not released.is_set()
    waiter.join(30)
    with identity.activity("bob /b"), Lock("a"):
        [held] = registry["default"].backend.holders(key_of("a"))
        html = page(f"{LIST}{id_of('default', held.key, held.version).replace(':', '_3A')}/change/")
        past = html.context["past"]
        text = html.content.decode()

    assert [line.event for line in past.lines].count("acquired") == 3
    assert max(line.waited or 0 for line in past.lines) >= 0.1
    assert "<svg" in text and text.count("<rect") > 2 and "bob /b" in text
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\bsrc=)", text)


def test_a_free_lock_has_a_page_too_and_is_found_by_its_name(page):
    name = "<script>alert(1)</script>\u202e"
    with Lock(name) as hold:
        old = id_of("default", key_of(name), str(hold.fence))
    found = page(LIST, q=name).content.decode()
    shown = escape(names.shown(name))
    html = page(EVENTS, lock=id_of("default", key_of(name))).content.decode()
    redirected = page(f"{LIST}{old.replace(':', '_3A')}/change/")

    assert "events/?lock=default" in found
    assert f"Recent events of “<bdi>{shown}</bdi>” in “default”" in found
    assert "released" in html and "free" in html
    assert "<script>alert" not in html + found and "\u202e" not in html
    assert redirected.redirect_chain[-1][0].startswith(EVENTS)


def test_what_happened_leads_to_the_list_and_to_what_people_did(page):
    with Lock("a"):
        pass
    lock = id_of("default", key_of("a"))
    html = page(EVENTS, lock=lock).content.decode()

    [crumbs] = re.findall(r'<ol class="breadcrumbs.*?</ol>', html, re.S)
    assert re.findall(r'href="(.*?)"', crumbs) == ["/admin/", "/admin/distlock_app/", LIST]
    [link] = re.findall(r'href="([^"]*/history/)"', html)
    assert "Change history: a" in page(link).content.decode()


def happened(event, ago, *, fence=None, seconds=None, detail=""):
    """Tell of an event of the lock "a", so many seconds ago."""
    return LockEvent.objects.create(
        at=timezone.now() - timedelta(seconds=ago), alias="default", key=key_of("a"), name="a",
        event=event, seconds=seconds, fence=fence, detail=detail,
    )  # fmt: skip


def test_each_event_says_how_long_it_took_and_by_whom_in_plain_text(page):
    holder = '{"host": "web1", "who": "alice <b>"}'
    happened("busy", 50, seconds=2.5, detail=holder)
    happened("acquired", 40, fence=1, seconds=1.5, detail=holder)
    happened("cleared", 30, fence=1, detail="ann: <b>hangs</b>")
    happened("lost", 20, fence=1, seconds=20, detail="renewal failed")

    response = page(EVENTS, lock=id_of("default", key_of("a")))

    who = "web1 – alice <b>"
    assert [
        (line.event, line.waited, line.held, line.detail) for line in response.context["past"].lines
    ] == [
        ("lost", None, 20, "renewal failed"),
        ("cleared", None, None, "ann: <b>hangs</b>"),
        ("acquired", 1.5, None, who),
        ("busy", 2.5, None, who),
    ]
    assert [(n, most) for _, n, _, most in response.context["past"].sums] == [
        (1, 1.5),
        (1, 2.5),
        (1, 20),
    ]
    assert escape(who) in response.content.decode()
    assert "<b>hangs" not in response.content.decode()


def test_the_chart_tells_who_waits_from_who_holds_also_of_the_hold_of_now(kept):
    happened("released", 70, fence=1, seconds=20)
    happened("acquired", 60, fence=2, seconds=30)
    holding = Holding(
        name="a", key=key_of("a"), alias="default", version="2", fence=2, held_for=60.0, holder={}
    )

    chart = past_events.past_of("default", key_of("a"), [holding]).chart
    waiting, holding = ([left // BAR for left, *_ in panel.bars] for panel in chart.panels)

    assert (chart.end - chart.begin).total_seconds() == pytest.approx(90, abs=5)
    assert [panel.top for panel in chart.panels] == pytest.approx([1, 1], abs=0.01)
    assert waiting[0] == 0 and 18 <= waiting[-1] <= 21
    assert holding[0] == 0 and holding[-1] == BARS - 1
    assert not {15, 16, 17} & {*holding}


@pytest.mark.parametrize(("seconds", "bars"), [(0, None), (1e-9, [0, 0])])
def test_what_took_no_time_has_no_bars(kept, seconds, bars):
    happened("acquired", 60, fence=2, seconds=seconds)

    chart = past_events.past_of("default", key_of("a"), []).chart

    assert (chart and [len(panel.bars) for panel in chart.panels]) == bars


def test_a_hold_that_was_cleared_ends_there_in_the_chart(kept):
    happened("lost", 50, fence=1, seconds=50)
    happened("cleared", 60, fence=1)
    happened("released", 40, fence=2, seconds=20)

    past = past_events.past_of("default", key_of("a"), [])

    assert past.chart.panels[1].top == pytest.approx(1.0, abs=0.01)
    assert not past.chart.overlap
    assert max(held for _, _, _, held in past.sums) == 50  # which is when it was told


@pytest.mark.parametrize(("fence", "at"), [(9, 60), (None, 60), (1, 999), (1, 5)])
def test_only_the_clear_of_this_hold_ends_it(kept, fence, at):
    happened("lost", 50, fence=1, seconds=50)
    happened("cleared", at, fence=fence)
    happened("released", 40, fence=2, seconds=20)

    past = past_events.past_of("default", key_of("a"), [])

    most = {999: 1.0}.get(at, 2.0)
    assert past.chart.panels[1].top == pytest.approx(most, abs=0.01)


@pytest.mark.parametrize("use_tz", [True, False])
def test_the_chart_tells_the_time_of_the_project(page, settings, use_tz):
    settings.USE_TZ, settings.TIME_ZONE = use_tz, "Asia/Seoul"
    noon = datetime(2026, 5, 4, 12)
    event = happened("released", 0, fence=2, seconds=60)
    event.at = timezone.make_aware(noon) if use_tz else noon
    event.save()

    html = page(EVENTS, lock=id_of("default", key_of("a"))).content.decode()

    assert "11:59:00: 1.00" in html


def test_the_chart_says_what_its_bars_are(page):
    happened("lost", 50, fence=1, seconds=50)
    happened("acquired", 60, fence=2, seconds=30)
    happened("released", 40, fence=2, seconds=20)
    html = page(EVENTS, lock=id_of("default", key_of("a"))).content.decode()

    assert "(average per bar; full height: 2.0)" in html
    assert html.count("Waits are shown once they have ended.") == 1
    assert "A holder that lost the lock counts as holding it until it noticed" in html


@pytest.mark.parametrize("lock", ["", "x", "a:b:c:d", "none:00", "%00:00", "default:%00"])
def test_made_up_locks_lead_somewhere(page, lock):
    page(EVENTS, lock=lock)


def test_the_page_of_events_is_for_who_may_see_locks(client, kept):
    client.force_login(User.objects.create_user("bob", is_staff=True))

    assert client.get(EVENTS, {"lock": "default:00"}).status_code == 403


def test_a_lock_whose_process_died_is_told_expired(kept):
    def acquired(fence, ago):
        return LockEvent.objects.create(
            at=timezone.now() - timedelta(seconds=ago), alias="default", key=key_of("a"), name="a",
            event="acquired", seconds=0.0, fence=fence, detail="not JSON",
        )  # fmt: skip

    acquired(1, 900)
    acquired(2, 600)
    acquired(3, 300)
    LockEvent.objects.filter(fence=2).update(event="released")
    acquired(2, 601)
    acquired(4, 1)
    past = past_events.past_of("default", key_of("a"), [])

    told = [line.event for line in past.lines]
    assert told == [
        "acquired",
        "expired",
        "acquired",
        "released",
        "acquired",
        "expired",
        "acquired",
    ]


def test_a_lock_that_is_held_without_a_fence_did_not_expire(kept):
    happened("acquired", 300, fence=1)
    happened("acquired", 200, fence=2)
    holding = Holding(name="a", key=key_of("a"), alias="default", version="7", holder={})

    past = past_events.past_of("default", key_of("a"), [holding])

    assert [line.event for line in past.lines] == ["acquired", "expired", "acquired"]


@pytest.mark.parametrize(
    ("backend", "why"),
    [("DownBackend", "cannot be used (OSError)"), ("UnlistedBackend", "cannot list its locks")],
)
def test_the_page_of_events_does_not_say_that_a_lock_is_free_if_that_is_not_known(
    page, settings, backend, why
):
    settings.DISTLOCK = {"default": {"BACKEND": f"tests.failing_engines.{backend}"}}
    happened("acquired", 300, fence=1)

    html = page(EVENTS, lock=id_of("default", key_of("a"))).content.decode()

    assert f"“default”: {why}." in html
    assert "it is free" not in html and "expired" not in html


def test_a_history_needs_no_connection_of_the_request(kept, django_assert_num_queries):
    with django_assert_num_queries(0, connection=connection):
        with Lock("a"):
            pass
