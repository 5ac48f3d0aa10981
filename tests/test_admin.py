"""The admin's pages of live locks: what they show, to whom, and what they refuse."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import threading
import time
from dataclasses import replace
from datetime import datetime, timedelta
from datetime import timezone as zones
from unittest import mock

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.core.management import call_command
from django.db import connection, connections
from django.test import Client, RequestFactory
from django.urls import reverse
from django.utils import timezone

from distlock_app import Lock
from distlock_app.admin import clearing, rows
from distlock_app.admin import pages as admin_pages
from distlock_app.admin.rows import id_of
from distlock_app.backends.locmem import LocMemBackend
from distlock_app.claims import Grant, Holding
from distlock_app.core.registry import registry
from distlock_app.health import health
from distlock_app.models import DistLock
from distlock_app.operations import holdings, reading
from distlock_app.operations.holdings import since, state_of
from distlock_app.primitives import identity, names
from distlock_app.primitives.names import key_of
from distlock_app.signals import lock_cleared
from distlock_app.testing.claims import a_claim
from tests.failing_engines import CrowdedBackend, HangingBackend, HoardingBackend

LIST = "/admin/distlock_app/livelock/"
CLEAR = f"{LIST}clear/"
HOST = identity.holder_fields(identity.holder_text())["host"]
NASTY = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "\u202ekcol", "a\x00b",
         "x" * 10_000, "{{ 7|add:7 }}", "%s %(name)s", " ", "../../etc", "日本",
         "\ud800"]  # fmt: skip

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def aliases(settings):
    """Two engines in memory; a test may add others."""
    settings.DISTLOCK = {
        "default": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"},
        "second": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"},
    }

    def add(alias, backend, **params):
        settings.DISTLOCK = {**settings.DISTLOCK, alias: {"BACKEND": backend, **params}}

    return add


@pytest.fixture
def browse(client):
    """Log a member of staff in who has these permissions; return their client."""

    def login(*codenames, **options):
        user = User.objects.create_user("ann", password="x", is_staff=True)
        user.user_permissions.add(*Permission.objects.filter(codename__in=codenames))
        client = Client(**options)
        client.force_login(user)
        return client

    return login


@pytest.fixture
def viewer(browse):
    return browse("view_livelock")


@pytest.fixture
def clearer(browse):
    return browse("view_livelock", "clear_lock")


def row_id(name, alias="default"):
    """Return the id under which the list shows the holder of now."""
    [holding] = registry[alias].backend.holders(key_of(name))
    return id_of(alias, holding.key, holding.version)


def taken(name, alias="default", **options):
    """Take the lock as another process would: nothing here renews or releases it."""
    wanted = replace(a_claim(name), holder=identity.holder_text(), **options)
    grant = registry[alias].backend.acquire(wanted, 0)
    assert isinstance(grant, Grant)
    return grant


def post(client, *ids, reason="host is gone"):
    return client.post(CLEAR, {"lock": ids, "reason": reason}, follow=True)


def html_of(response):
    return response.content.decode()


def said(response):
    """Return the messages on the page, in one text."""
    return "\n".join(str(message) for message in response.context["messages"])


def test_the_list_shows_the_locks_of_every_alias_and_who_holds_them(viewer):
    with identity.activity("alice /pay/7"), Lock("invoice:42"), Lock("nightly", using="second"):
        html = viewer.get(LIST).content.decode()

    assert "invoice:42" in html and "nightly" in html
    assert "alice /pay/7" in html
    assert identity.holder_fields(identity.holder_text())["host"] in html
    assert html.count("dl-pill dl-held") == 2


def test_the_list_says_who_has_a_lock_in_full_and_leaves_the_rest_to_its_page(viewer):
    who = "alice@example.com /reports/2026/11/" + "long/" * 15
    with identity.activity(who):
        grant = taken("a", limit=2)

    row, page = html_of(viewer.get(LIST)), html_of(viewer.get(change_url(row_id("a"))))

    for html in (row, page):
        assert who in html and "permit" in html and f"{HOST}:<wbr>{os.getpid()}" in html
    assert "MainThread" not in row and "MainThread" in page
    assert f">{grant.fence}<" not in row and str(grant.fence) in page


def test_a_row_says_the_kind_the_times_and_the_waiters_and_the_page_of_the_lock_the_rest(
    viewer, monkeypatch
):
    old = Holding(
        name="old", key=key_of("old"), alias="default", version="1", kind="shared", fence=4711,
        held_for=3725.0, expires_in=25.0, waiters=3, holder={"thread": "worker-9"},
    )  # fmt: skip
    new = replace(old, name="new", key=key_of("new"), kind="exclusive", waiters=0, held_for=7.0)
    every = {
        held.key: replace(held, holder={**held.holder, "renew": held is old}) for held in (old, new)
    }
    monkeypatch.setattr(
        LocMemBackend,
        "holders",
        lambda self, key=None: [
            held for held in every.values() if self.alias == "default" and key in (None, held.key)
        ],
    )

    rows = re.findall(r"<tr>.*?</tr>", html_of(viewer.get(LIST)), re.S)
    [of_old], [of_new] = ([row for row in rows if f">{name}</a>" in row] for name in ("old", "new"))
    page = html_of(viewer.get(change_url(id_of("default", old.key, "1"))))

    assert "CONTENDED</span> shared" in of_old and "exclusive" not in of_new
    assert 'data-dl-since="3725.000">1:02:05<' in of_old and ">0:07<" in of_new
    assert 'field-waiters">3<' in of_old
    assert 'data-dl-over="renewed or over"' in of_old and "not renewed" not in of_old
    assert 'data-dl-over="over"' in of_new and "not renewed" in of_new
    for fact in ("worker-9", "4711", since(old)[:-4]):
        assert f'readonly">{fact}' in page


def test_the_list_leads_with_what_others_wait_for_and_then_with_what_is_held_longest(
    viewer, monkeypatch
):
    held = {"old": 7200.0, "new": 3.0, "unknown": None, "wanted": 1.0}

    def holders(self, key=None):
        for name, seconds in held.items() if self.alias == "default" else ():
            yield Holding(
                name=name,
                key=key_of(name),
                alias="default",
                version="1",
                held_for=seconds,
                waiters=2 if name == "wanted" else None,
            )

    monkeypatch.setattr(LocMemBackend, "holders", holders)

    rows = viewer.get(LIST).context["cl"].result_list

    assert [row.name for row in rows] == ["wanted", "old", "new", "unknown"]


def test_a_lock_that_nobody_renews_is_marked(viewer):
    with Lock("renewed"):
        assert "not renewed" not in html_of(viewer.get(LIST))
        with Lock("fixed", renew=False):
            assert html_of(viewer.get(LIST)).count("not renewed") == 1


def test_the_time_left_is_the_servers_and_counted_down_by_a_file(viewer):
    with Lock("a", ttl=25):
        html = viewer.get(LIST).content.decode()

    [left] = re.findall(r'data-dl-left="([\d.]+)"', html)
    assert 20 < float(left) <= 25
    assert "distlock_app/countdown.js" in html
    assert "distlock_app/locks.css" in html


def test_no_page_has_a_script_or_style_of_its_own_in_it(clearer):
    with Lock("a"):
        pages = [LIST, f"{CLEAR}?lock={row_id('a')}"]
        htmls = [clearer.get(page).content.decode() for page in pages]

    for html in htmls:
        assert not re.search(r"<script(?![^>]*\bsrc=)", html)
        assert not re.search(r"<style|\sstyle=|\son\w+=", html)


def test_the_list_tells_a_lock_that_others_wait_for(viewer):
    waiting = Lock("wanted", ttl=20)
    with Lock("quiet", ttl=20), waiting:
        claim_of_a_waiter(waiting)
        html = viewer.get(LIST).content.decode()

    assert 'dl-held">HELD' in html
    assert 'dl-contended">CONTENDED' in html


@pytest.mark.parametrize(
    ("left", "held_for", "waiters", "state"),
    [
        (20, 300, 0, "held"),
        (20, 300, None, "held"),
        (20, 300, 3, "contended"),
        (17, 300, 3, "expiring"),  # nobody renewed it: the ttl of the alias is 30
        (0.6, 0.3, 0, "held"),  # granted for 0.9 at first
        (0.5, 0.4, 0, "expiring"),
        (None, 300, 0, "held"),  # as long as its session
    ],
)
def test_the_state_tells_waiters_and_whether_anybody_renews(left, held_for, waiters, state):
    holding = Holding(
        name="a", key="0", alias="default", version="1",
        expires_in=left, held_for=held_for, waiters=waiters,
    )  # fmt: skip

    assert state_of(holding) == state


@pytest.mark.parametrize("holder", [{"renew": False}, {"at_least": 301}])
@pytest.mark.parametrize(("left", "state"), [(17, "held"), (2.9, "expiring")])
def test_a_lock_that_nobody_is_to_renew_is_expiring_in_its_last_tenth(holder, left, state):
    holding = Holding(
        name="a", key="0", alias="default", version="1",
        expires_in=left, held_for=300, holder=holder,
    )  # fmt: skip

    assert state_of(holding) == state


@pytest.fixture(scope="module")
def ended():
    """The holder of a process that ran here and has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return {**identity.holder_fields(identity.holder_text()), "pid": process.pid}


@pytest.mark.once
@pytest.mark.parametrize(
    ("left", "changes", "state"),
    [
        (17, {}, "orphaned"),  # of 30: it was not renewed at the last third
        (None, {}, "orphaned"),
        (23, {}, "held"),  # another process may have resumed it, and renew it
        (300, {"ttl": 600}, "orphaned"),
        (17, {"at_least": 301}, "held"),  # its work is done: it is kept for a second more
        (17, {"at_least": 299}, "orphaned"),
        (17, {"at_least": "soon"}, "orphaned"),
        (17, {"pid": os.getpid()}, "expiring"),
        (17, {"machine": "00000000"}, "expiring"),  # its process ids are others
        (17, {"machine": ""}, "expiring"),
        *((17, {"pid": pid}, "expiring") for pid in (None, "7", 0, -1, -(10**8), 1.5, 10**30)),
    ],
)
def test_a_lock_is_orphaned_if_its_process_has_certainly_ended(ended, left, changes, state):
    holding = Holding(
        name="a", key="0", alias="default", version="1",
        expires_in=left, held_for=300, holder={**ended, **changes},
    )  # fmt: skip

    assert state_of(holding) == state


def test_processes_of_machines_that_have_no_id_are_not_taken_for_those_of_this_one(
    ended, monkeypatch
):
    monkeypatch.setattr(holdings, "machine", lambda: "")
    holder = {**ended, "machine": ""}
    holding = Holding(
        name="a", key="0", alias="default", version="1", expires_in=17, held_for=300, holder=holder
    )

    assert state_of(holding) == "expiring"


def claim_of_a_waiter(lock):
    """Stand in the queue of `lock`."""
    registry["default"].backend.acquire(a_claim(lock.name), 5)


@pytest.mark.once
@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("alias=second", {"nightly"}),
        ("alias=default", {"invoice:1", "report"}),
        ("kind=shared", {"report"}),
        ("state=held", {"invoice:1", "report", "nightly"}),
        ("state=expiring", set()),
        ("q=INVOICE", {"invoice:1"}),
        ("q=bob+/reports", {"report"}),
        ("q=nothing", set()),
        ("alias=nonsense", set()),
        ("group=invoice%3A", {"invoice:1"}),
        ("group=order%3A", set()),
        (f"host={HOST}", {"invoice:1", "report", "nightly"}),
        ("host=elsewhere", set()),
        ("nonsense=1", {"invoice:1", "report", "nightly"}),
    ],
)
def test_filters_and_search(viewer, query, shown):
    with Lock("invoice:1"), Lock("nightly", using="second"):
        with identity.activity("bob /reports"), Lock("report", shared=True):
            response = viewer.get(f"{LIST}?{query}", follow=True)

    assert {row.name for row in response.context["cl"].result_list} == shown


def test_names_that_begin_alike_are_a_group_that_says_how_many_they_are(viewer):
    for name in ("order:1", "order:2", "order:3:pdf", "nightly", "once:7"):
        taken(name)

    html = html_of(viewer.get(LIST))
    rows = viewer.get(f"{LIST}?group=order%3A").context["cl"].result_list

    assert "order:… (3)" in html
    assert "nightly…" not in html and "once:…" not in html
    assert len(list(rows)) == 3


@pytest.mark.once
@pytest.mark.parametrize("query", ["q=nothing", "state=expiring", "group=order%3A"])
def test_an_empty_list_says_that_it_is_because_of_a_filter(viewer, query):
    taken("a")

    html = html_of(viewer.get(f"{LIST}?{query}"))

    assert "No lock matches the search and the filters." in html
    assert '<a href="?">Clear filters</a>' in html


def test_an_empty_list_says_that_nothing_is_held_if_that_is_known(viewer, aliases):
    assert "Nothing is held." in html_of(viewer.get(LIST))

    aliases("broken", "tests.failing_engines.DownBackend")

    assert "Nothing is held, as far as the backends answered." in html_of(viewer.get(LIST))


@pytest.mark.once
def test_every_column_can_be_sorted_both_ways(viewer):
    with Lock("a", ttl=5), Lock("b", ttl=15), Lock("c", using="second"):
        for column in range(8):
            for sign in ("", "-"):
                rows = viewer.get(f"{LIST}?o={sign}{column}").context["cl"].result_list
                assert {row.name for row in rows} == {"a", "b", "c"}
        longest = viewer.get(f"{LIST}?o=-6").context["cl"].result_list

    assert [row.name for row in longest] == ["c", "b", "a"]


def test_a_look_that_is_cut_short_shows_no_less_than_was_read_before(viewer, monkeypatch):
    for n in range(5):
        taken(f"a{n}")
    assert "too many locks to sort" not in html_of(viewer.get(LIST))
    monkeypatch.setattr(admin_pages, "MOST_SORTED", 3)
    monkeypatch.setattr(admin_pages, "LOOKED_FOR", 0)

    response, every = viewer.get(LIST, {"q": "a"}), viewer.get(LIST)

    assert len(response.context["cl"].result_list) == 3
    assert "list comes from 3 of them" in " ".join(html_of(response).split())
    assert "too many locks to sort" not in html_of(response)
    assert "too many locks to sort" in html_of(every) and "list comes from" not in html_of(every)


@pytest.mark.once
def test_many_locks_come_in_pages(viewer):
    holds = [Lock(f"n{i:03}").acquire() for i in range(130)]
    first = viewer.get(LIST).context["cl"].result_list
    second = viewer.get(f"{LIST}?p=2").context["cl"].result_list
    for hold in holds:
        hold.release()

    assert [row.name for row in first][:2] == ["n000", "n001"]
    assert len(first) == 100 and len(second) == 30


def test_an_engine_that_is_down_is_shown_so_without_its_secrets(viewer, aliases):
    aliases("broken", "tests.failing_engines.DownBackend")

    with Lock("a"):
        html = viewer.get(LIST).content.decode()

    assert 'dl-down">down' in html
    assert "cannot be used (OSError)" in html
    assert "hunter2" not in html and "db7" not in html
    assert html.count("data-dl-left") == 1


@pytest.mark.parametrize(("query", "said"), [("", 1), ("alias=broken", 1), ("alias=default", 0)])
def test_a_list_without_the_locks_of_an_engine_that_is_down_says_so(viewer, aliases, query, said):
    aliases("broken", "tests.failing_engines.DownBackend")

    html = viewer.get(f"{LIST}?{query}").content.decode()

    assert "0 live locks" in html
    assert html.count("It is not known what “broken” holds") == said


def test_an_engine_that_cannot_list_is_shown_as_up_with_locks_that_are_not_known(viewer, aliases):
    aliases("mute", "tests.failing_engines.UnlistedBackend")

    with Lock("a", using="mute"), Lock("a"):
        html = viewer.get(LIST).content.decode()
        gone = said(viewer.get(change_url(row_id("a").replace("default", "mute")), follow=True))

    assert "dl-down" not in html.replace("dl-down dl-failed", "")
    assert '<span class="dl-quiet">cannot list its locks</span>' in html
    assert "It is not known what “mute” holds: it cannot list its locks." in html
    assert html.count("data-dl-left") == 1
    assert gone == "“mute”: cannot list its locks."


def test_an_engine_that_is_slow_to_list_is_up_and_its_locks_can_be_found(viewer, aliases):
    aliases("full", "tests.failing_engines.CrowdedBackend")
    CrowdedBackend.answers.clear()

    with Lock("a", using="full"):
        try:
            html = viewer.get(LIST).content.decode()
            found = viewer.get(f"{LIST}?q=a").content.decode()
            page = viewer.get(change_url(row_id("a", "full")))
            status = health(RequestFactory().get("/health/")).status_code
        finally:
            CrowdedBackend.answers.set()

    assert "dl-down" not in html.replace("dl-down dl-failed", "")
    assert '<span class="dl-quiet">no answer within 2 s</span>' in html
    assert "It is not known what “full” holds: it has more to tell" in html
    assert found.count("data-dl-left") == 1
    assert (page.status_code, status) == (200, 200)


def test_an_engine_that_hangs_costs_its_bound_once_and_one_thread(viewer, aliases, monkeypatch):
    aliases("silent", "tests.failing_engines.HangingBackend")
    HangingBackend.asked = 0
    HangingBackend.answers.clear()

    with Lock("a"):
        html = viewer.get(LIST).content.decode()
        # A page that waited again would take so long.
        monkeypatch.setattr(reading, "ANSWER_WITHIN", 25)
        started = time.monotonic()
        pages = [viewer.get(LIST) for _ in range(3)]
        rest = time.monotonic() - started
        asked = HangingBackend.asked  # as soon as it answers, its thread asks again
        HangingBackend.answers.set()

    assert "no answer within 2 s" in html
    assert html.count("data-dl-left") == 1
    assert rest < 20
    assert all(page.status_code == 200 for page in pages)
    assert asked == 1


@pytest.fixture
def silent_port():
    """A port where the system accepts connections, and nobody ever answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


def test_servers_that_accept_connections_and_never_answer_are_said_to(
    viewer, aliases, settings, silent_port
):
    for alias in ("one", "two", "three"):
        settings.CACHES = {
            **settings.CACHES,
            alias: {
                "BACKEND": "django_redis.cache.RedisCache",
                "LOCATION": f"redis://127.0.0.1:{silent_port}/0",
            },
        }
    aliases("redis", "distlock_app.backends.redis.RedisBackend", LOCATION="one")
    nodes = ["one", "two", "three"]
    aliases("quorum", "distlock_app.backends.redlock.RedlockBackend", LOCATION=nodes)
    url = f"http://127.0.0.1:{silent_port}"
    aliases("etcd", "distlock_app.backends.etcd.EtcdBackend", LOCATION=url)

    with Lock("a"):
        started = time.monotonic()
        html = viewer.get(LIST).content.decode()
        took = time.monotonic() - started

    # At least one of them gives no word at all, and each is said to be down.
    assert html.count("dl-down") - html.count("dl-failed") == 3
    assert "no answer within 2 s" in html
    assert html.count("data-dl-left") == 1
    assert took < 5  # 2 s, and the page itself on a machine that does other work


def test_an_alias_with_wrong_settings_does_not_break_the_page(viewer, aliases):
    aliases("wrong", "no.such.Backend")

    with Lock("a"):
        html = viewer.get(LIST).content.decode()

    assert "wrong settings, see the system checks" in html
    assert html.count("data-dl-left") == 1


@pytest.mark.parametrize("name", NASTY)
def test_nasty_names_are_text_on_every_page(clearer, name):
    with identity.activity(name[:100]):
        taken(name)
        pk = row_id(name)
        detail = clearer.get(change_url(pk)).content.decode()
        htmls = [clearer.get(LIST).content.decode(), detail]
        htmls.append(clearer.get(CLEAR, {"lock": pk}).content.decode())
        htmls.append(post(clearer, pk, reason=f"{names.shown(name)[:100]}!").content.decode())
        htmls.append(clearer.get(history_url(pk)).content.decode())
        assert not Lock(name).locked()

    for html in htmls:
        assert "<script>alert" not in html and "<img src=x" not in html
        assert "\u202e" not in html and "\x00" not in html
    assert LogEntry.objects.count() == 1


def change_url(pk):
    return reverse("admin:distlock_app_livelock_change", args=[quote(pk)])


def history_url(pk):
    return reverse("admin:distlock_app_livelock_history", args=[quote(pk)])


def test_the_detail_page_shows_one_lock_and_leads_to_its_release(clearer):
    with Lock("a"):
        pk = row_id("a")
        html = clearer.get(change_url(pk)).content.decode()
        [link] = re.findall(r'href="([^"]*/clear/[^"]*)"', html)
        confirmation = clearer.get(link.replace("&amp;", "&")).content.decode()

    assert "data-dl-left" in html
    assert 'name="reason"' in confirmation


def test_what_is_not_known_of_a_lock_is_not_shown_as_none(viewer, monkeypatch):
    taken("a")
    held = registry["default"].backend.holders
    unknown = {"waiters": None, "held_for": None, "fence": None, "holder": {}}
    monkeypatch.setattr(
        LocMemBackend, "holders", lambda self, key=None: [replace(h, **unknown) for h in held(key)]
    )

    page = html_of(viewer.get(change_url(row_id("a"))))

    assert page.count(">unknown<") >= len(unknown)
    assert ">None<" not in page


def test_the_detail_page_names_every_holder_and_who_waits_in_order(viewer):
    with identity.activity("reader one"):
        taken("a", shared=True)
    with identity.activity("reader two"):
        second = taken("a", shared=True)
    for who in ("writer one", "writer two <b>"):
        with identity.activity(who):
            waiter = replace(a_claim("a"), holder=identity.holder_text())
        registry["default"].backend.acquire(waiter, 5)

    html = viewer.get(change_url(id_of("default", key_of("a"), str(second.fence))))
    text = html.content.decode()

    assert text.index("reader one") < text.index("writer one") < text.index("writer two &lt;b&gt;")
    assert text.count("reader two</") == 2  # of this page, and among all
    assert second.claim.owner not in text and waiter.owner not in text


def test_pages_about_locks_lead_back_to_them(clearer):
    with Lock("a"):
        pages = [f"{CLEAR}?lock={row_id('a')}", LEFTOVER]
        htmls = [clearer.get(page).content.decode() for page in pages]

    for html in htmls:
        assert_crumbs(html)


def test_what_leads_to_a_page_is_a_link_also_to_a_screen_reader(clearer):
    """Said to be a button, it would have to act on the space bar, too."""
    with Lock("a"):
        pages = [change_url(row_id("a")), f"{CLEAR}?lock={row_id('a')}", LEFTOVER]
        htmls = [clearer.get(page).content.decode() for page in pages]

    for html in htmls:
        [link] = re.findall("<a [^>]*dl-button[^>]*>", html)
        assert "role=" not in link


def assert_crumbs(html):
    """Check that the page says where it is: below the list of live locks."""
    [crumbs] = re.findall(r'<ol class="breadcrumbs.*?</ol>', html, re.S)
    links = ["/admin/", "/admin/distlock_app/", LIST]
    assert re.findall(r'href="(.*?)"', crumbs) == links


def test_a_reason_is_kept_where_the_page_says(clearer):
    taken("a")
    pk = row_id("a")
    said = clearer.get(CLEAR, {"lock": pk}).content.decode()
    lock = clearer.get(change_url(pk)).content.decode()
    post(clearer, pk, reason="host is gone")
    history = clearer.get(history_url(pk)).content.decode()

    assert "the change history of the lock (“History” on its page)" in said
    assert history_url(pk) in lock and ">History<" in lock
    assert "Change history: a" in history and "host is gone" in history


def test_the_detail_page_of_a_lock_that_is_free_says_so(viewer):
    with Lock("a"):
        pk = row_id("a")

    response = viewer.get(change_url(pk), follow=True)

    assert response.redirect_chain[0][0] == LIST
    assert f"“{key_of('a')}” is free now." in said(response)


def test_an_old_link_of_the_list_names_the_lock_that_is_free_and_leads_to_its_history(viewer):
    with Lock("pay:<b>7"):
        pk = row_id("pay:<b>7")
        [link] = re.findall(r'<a href="([^"]*)">pay:&lt;b&gt;7</a>', html_of(viewer.get(LIST)))

    page = html_of(viewer.get(link.replace("&amp;", "&"), follow=True))
    forged = html_of(viewer.get(f"{change_url(pk)}?name=another", follow=True))

    assert "“pay:&lt;b&gt;7” is free now." in page
    [history] = re.findall(r'<a href="([^"]*)">Change history</a>', page)
    assert history == history_url(id_of("default", key_of("pay:<b>7")))
    assert "Nobody has forced" in html_of(viewer.get(history))
    assert "another" not in forged


def test_a_long_name_is_cut_in_titles_and_whole_beside_its_label(clearer):
    name = "report:" + "0123456789" * 18
    taken(name)

    page = html_of(clearer.get(change_url(row_id(name))))

    [title] = re.findall(r"<title>(.*?)</title>", page, re.S)
    assert len(title) < 150 and "…" in title
    assert page.count(name) == 1


def test_the_detail_page_of_a_holder_that_is_gone_names_the_next(viewer):
    with Lock("a"):
        old = row_id("a")
    with identity.activity("bob /b"), Lock("a"):
        response = viewer.get(change_url(old), follow=True)

    assert "changed hands" in said(response) and "bob /b" in said(response)


@pytest.mark.once
@pytest.mark.parametrize("pk", ["nonsense", "a:b:c:d", "default:00:1", "none:00:1", ":", "1"])
def test_made_up_ids_lead_back_to_the_list(clearer, pk):
    for page in (change_url(pk), history_url(pk)):
        assert clearer.get(page).status_code in (200, 302)
    assert clearer.get(CLEAR, {"lock": pk}).status_code == 302
    assert post(clearer, pk).status_code == 200


def test_without_the_view_permission_there_is_nothing_to_see(browse):
    client = browse()

    with Lock("a"):
        for page in (LIST, change_url(row_id("a")), history_url(row_id("a")), CLEAR):
            assert client.get(page).status_code == 403


def test_a_viewer_may_look_but_not_clear(viewer):
    with Lock("a") as hold:
        pk = row_id("a")
        detail = viewer.get(change_url(pk)).content.decode()
        assert "Force release" not in detail
        assert viewer.get(CLEAR, {"lock": pk}).status_code == 403
        assert viewer.post(CLEAR, {"lock": pk, "reason": "x"}).status_code == 403
        viewer.post(LIST, {"action": "force_release", "_selected_action": [pk], "index": 0})
        assert Lock("a").locked()
        hold.check()


def test_visitors_are_sent_to_the_login(client):
    assert client.get(LIST).status_code == 302
    assert client.post(CLEAR, {"lock": "x", "reason": "x"}).status_code == 302


def test_the_permission_to_change_rows_does_not_clear_locks(browse):
    client = browse("view_livelock", "view_distlock", "delete_user", "change_user")

    with Lock("a"):
        assert client.post(CLEAR, {"lock": row_id("a"), "reason": "x"}).status_code == 403


def test_get_clears_nothing(clearer):
    with Lock("a") as hold:
        pk = row_id("a")
        for query in ({"lock": pk}, {"lock": pk, "reason": "x"}, {"lock": pk, "post": "yes"}):
            assert clearer.get(CLEAR, query).status_code == 200
        assert Lock("a").locked()
        hold.extend()

    # As after a login on the way, which has lost the form.
    assert "Nothing was released" in said(clearer.get(CLEAR, follow=True))
    assert not LogEntry.objects.exists()


def test_a_forged_form_is_refused(browse):
    client = browse("view_livelock", "clear_lock", enforce_csrf_checks=True)

    with Lock("a"):
        response = client.post(CLEAR, {"lock": row_id("a"), "reason": "x"})
        assert response.status_code == 403
        assert Lock("a").locked()


def test_a_reason_is_required(clearer):
    with Lock("a"):
        pk = row_id("a")
        for reason in ("", "   ", "x" * 201):
            response = post(clearer, pk, reason=reason)
            assert response.context["form"].errors
        assert Lock("a").locked()


def test_the_confirmation_names_the_holder(clearer):
    with identity.activity("alice /pay/7"), Lock("a"):
        html = clearer.get(CLEAR, {"lock": row_id("a")}).content.decode()

    assert "alice /pay/7" in html
    assert f"{identity.holder_fields(identity.holder_text())['pid']}" in html
    assert "errorlist" not in html  # nothing was asked of the reason yet


def test_force_release_frees_the_lock_moves_the_fence_on_and_is_written_down(clearer):
    heard = []
    receiver = lambda **facts: heard.append(facts)  # noqa: E731
    lock_cleared.connect(receiver)
    cleared = taken("a")

    response = post(clearer, row_id("a"), reason=" host\n is  gone ")

    assert "was released" in said(response)
    assert taken("a").fence > cleared.fence
    entry = LogEntry.objects.get()
    assert entry.object_repr == "a"
    assert entry.get_change_message().endswith("host is gone")
    assert (heard[0]["user"], heard[0]["reason"]) == ("ann", "host is gone")
    lock_cleared.disconnect(receiver)


def test_a_lock_that_changed_hands_meanwhile_is_left_alone(clearer):
    with Lock("a"):
        old = row_id("a")
    with identity.activity("bob /b"), Lock("a") as hold:
        response = post(clearer, old)
        hold.extend()

    assert "changed hands" in said(response) and "bob /b" in said(response)
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("action", ["clear", "extend"])
def test_a_lock_that_changes_hands_in_the_last_moment_is_left_alone(browse, monkeypatch, action):
    """Between the look that the request itself takes and what it does."""
    client = browse("view_livelock", f"{action}_lock")
    with Lock("a"):
        old = row_id("a")
        answers = [reading.read_all(registry)]
    really = reading.read
    monkeypatch.setattr(rows, "read", lambda *a, **k: answers.pop() if answers else really(*a, **k))
    with identity.activity("bob /b"), Lock("a", ttl=25) as hold:
        response = post(client, old) if action == "clear" else extended(client, old)
        assert left("a") <= 25
        hold.extend()

    assert "changed hands" in said(response) and "bob /b" in said(response)
    assert not LogEntry.objects.exists()


def test_a_free_lock_is_not_cleared_again(clearer):
    with Lock("a"):
        pk = row_id("a")

    assert "free now" in said(post(clearer, pk))


def test_an_engine_that_fails_at_the_clearing_is_told_without_its_secrets(clearer, aliases):
    aliases("stubborn", "tests.failing_engines.StubbornBackend")

    with Lock("a", using="stubborn"):
        response = post(clearer, row_id("a", "stubborn"))

    assert "may still be held" in said(response)
    assert "hunter2" not in response.content.decode()
    assert not LogEntry.objects.exists()


def test_several_locks_are_released_after_one_confirmation(clearer):
    locks = ["a", "b", "c"]
    for name in locks:
        taken(name)
    selected = [row_id("a"), row_id("b")]

    response = clearer.post(
        LIST, {"action": "force_release", "_selected_action": selected, "index": 0}
    )
    assert all(Lock(name).locked() for name in locks)
    ids = re.findall(r'name="lock" value="([^"]+)"', response.content.decode())
    done = post(clearer, *ids)

    assert sorted(ids) == sorted(selected)
    assert said(done).count("was released") == 2
    assert [Lock(name).locked() for name in locks] == [False, False, True]
    assert LogEntry.objects.count() == 2


def test_a_selected_lock_that_changed_hands_is_not_even_confirmed(clearer):
    with Lock("a"):
        old = row_id("a")
    taken("a"), taken("b")
    both = [old, row_id("b")]

    def select(*ids):
        return clearer.post(LIST, {"action": "force_release", "_selected_action": ids, "index": 0})

    htmls = html_of(select(*both)), html_of(clearer.get(CLEAR, {"lock": both}))
    alone = select(old)
    done = post(clearer, *both)

    for html in htmls:
        assert "changed hands" in html
        assert len(re.findall(r'name="lock" value=', html)) == 1
    assert alone.status_code == 302 and alone.url.startswith(LIST)
    assert "changed hands" in said(done) and "“b” was released" in said(done)
    assert [Lock(name).locked() for name in "ab"] == [True, False]


@pytest.mark.once
def test_too_many_at_once_are_refused(clearer):
    holds = [Lock(f"n{i}").acquire() for i in range(201)]
    ids = [row_id(f"n{i}") for i in range(201)]

    select = {"action": "force_release", "_selected_action": ids[:1], "index": 0}
    action = clearer.post(LIST, {**select, "select_across": "1"}, follow=True)
    posted = post(clearer, *ids)

    assert "at most 200" in said(action)
    assert "at most 200" in said(posted)
    for hold in holds:
        hold.release()


def test_the_history_of_a_lock_outlives_its_holders(clearer):
    taken("a")
    pk = row_id("a")
    post(clearer, pk, reason="host is gone")

    html = clearer.get(history_url(pk)).content.decode()

    assert "host is gone" in html
    assert clearer.get(LogEntry.objects.get().get_admin_url(), follow=True).status_code == 200


def test_the_history_of_a_lock_is_read_from_the_entries_of_locks_alone(viewer):
    lock_id = id_of("default", key_of("a"))
    user = User.objects.get()
    kind = ContentType.objects.get_for_model(User)
    LogEntry.objects.create(
        user=user, content_type=kind, object_id=lock_id, object_repr="a user", action_flag=2
    )

    assert "a user" not in html_of(viewer.get(history_url(lock_id)))


def test_the_history_is_not_read_for_who_may_not_see_it(browse, monkeypatch):
    def read(*args):
        raise AssertionError("it was read")

    client = browse()
    monkeypatch.setattr(clearing, "name_of", read)

    assert client.get(history_url(id_of("default", key_of("a")))).status_code == 403


def test_no_page_shows_a_token(clearer):
    with Lock("a", owner="the owner's name") as hold:
        token = hold._lease.grant.claim.owner
        pk = row_id("a")
        pages = [LIST, change_url(pk), history_url(pk), f"{CLEAR}?lock={pk}", "/admin/"]
        htmls = [clearer.get(page).content.decode() for page in pages]

    for html in htmls:
        assert token not in html and "the owner's name" not in html


EXTEND = f"{LIST}extend/"
LEFTOVER = f"{LIST}leftover/"
ROWS = "/admin/distlock_app/distlock/"


def extended(client, pk, seconds=600):
    return client.post(EXTEND, {"lock": pk, "seconds": seconds}, follow=True)


def left(name, alias="default"):
    [holding] = registry[alias].backend.holders(key_of(name))
    return holding.expires_in


@pytest.fixture
def extender(browse):
    return browse("view_livelock", "extend_lock")


def test_a_lock_is_extended_and_that_is_written_down(extender):
    grant = taken("a", ttl=20)
    pk = row_id("a")
    assert EXTEND in extender.get(change_url(pk)).content.decode()

    response = extended(extender, pk)

    assert "at least 600 more seconds" in said(response)
    assert response.redirect_chain[0][0] == change_url(pk)
    assert left("a") > 500
    assert "600" in LogEntry.objects.get().get_change_message()
    assert registry["default"].backend.release(grant) is True


def test_extending_needs_its_permission_a_form_of_ours_and_post(browse, viewer):
    taken("a", ttl=20)
    pk = row_id("a")
    forger = Client(enforce_csrf_checks=True)
    forger.force_login(User.objects.create_superuser("eve"))

    assert EXTEND not in viewer.get(change_url(pk)).content.decode()
    assert extended(viewer, pk).status_code == 403
    assert extended(forger, pk).status_code == 403
    response = forger.get(EXTEND, {"lock": pk, "seconds": 600}, follow=True)
    assert "Nothing was extended" in said(response)
    assert left("a") < 21 and not LogEntry.objects.exists()


@pytest.mark.once
@pytest.mark.parametrize("seconds", ["", "-1", "0", "1e9", "99999999999", "x", "nan"])
def test_only_sensible_times_extend_a_lock(extender, seconds):
    taken("a", ttl=20)

    assert said(extended(extender, row_id("a"), seconds))
    assert left("a") < 21 and not LogEntry.objects.exists()


def test_a_user_whose_name_is_a_number_may_act_as_any(browse, monkeypatch):
    monkeypatch.setattr(User, "get_username", lambda self: 821012345678)  # as of a custom model
    client = browse("view_livelock", "clear_lock", "extend_lock")
    taken("a")

    assert extended(client, row_id("a")).status_code == 200
    assert post(client, row_id("a")).status_code == 200

    assert LogEntry.objects.count() == 2
    assert not list(registry["default"].backend.holders())


def test_what_changed_hands_or_cannot_be_extended_is_not(extender, aliases):
    with Lock("a"):
        old = row_id("a")
    aliases("dull", "tests.failing_engines.DullBackend")
    taken("b", "dull")
    taken("a", ttl=20)

    assert "changed hands" in said(extended(extender, old))
    assert "cannot be extended" in said(extended(extender, row_id("b", "dull")))
    assert EXTEND not in extender.get(change_url(row_id("b", "dull"))).content.decode()
    assert "no such lock" in said(extended(extender, "made up"))
    assert left("a") < 21 and not LogEntry.objects.exists()


def test_an_engine_that_fails_at_the_extending_is_named_without_its_secrets(extender, aliases):
    aliases("stubborn", "tests.failing_engines.StubbornBackend")

    with Lock("a", using="stubborn"):
        response = extended(extender, row_id("a", "stubborn"))

    assert "“stubborn”: cannot be used" in said(response)
    assert "hunter2" not in response.content.decode()
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("action", ["clear-expired", "purge"])
def test_an_engine_that_fails_at_the_clearing_up_is_named_without_its_secrets(
    clearer, aliases, action
):
    aliases("stubborn", "tests.failing_engines.StubbornBackend")

    form = {"alias": "stubborn", "action": action, "days": 7}
    response = clearer.post(LEFTOVER, form, follow=True)

    assert said(response) == "“stubborn”: cannot be used (OSError)."
    assert "hunter2" not in html_of(response)
    assert not LogEntry.objects.exists()


@pytest.mark.once
def test_what_is_too_much_to_count_can_be_cleared_up_all_the_same(clearer, aliases, monkeypatch):
    aliases("hoard", "tests.failing_engines.HoardingBackend")
    counted = threading.Event()
    monkeypatch.setattr(HoardingBackend, "left_over", lambda *_: counted.wait(30) and (7, 0))

    html = html_of(clearer.get(LEFTOVER))
    counted.set()

    assert html.count("no answer within 2 s") == 2
    assert 'value="clear-expired"' in html and 'value="purge"' in html


def test_without_a_lock_table_there_is_nothing_to_clear_up(clearer):
    assert LEFTOVER not in clearer.get(LIST).content.decode()
    assert clearer.get(LEFTOVER).status_code == 200
    assert (
        clearer.post(LEFTOVER, {"alias": "default", "action": "purge", "days": 7}).status_code
        == 200
    )


DATA = f"{LIST}data/"
TOKEN = {"Authorization": "Bearer a long token"}


def test_dashboards_get_the_locks_as_json_without_a_token_of_theirs(viewer):
    with identity.activity("bob /b"), Lock("b", shared=True, using="second") as hold, Lock("a"):
        response = viewer.get(DATA)
        token = hold._lease.grant.claim.owner

    answer = response.json()
    assert [lock["name"] for lock in answer["locks"]] == ["a", "b"]
    assert answer["locks"][1]["state"] == "held" and answer["locks"][1]["kind"] == "shared"
    assert answer["locks"][1]["holder"]["who"] == "bob /b"
    assert answer["count"] == 2
    assert [(engine["alias"], engine["up"]) for engine in answer["backends"]] == [
        ("default", True),
        ("second", True),
    ]
    assert token not in response.content.decode()
    assert "no-store" in response["Cache-Control"]


@pytest.mark.once
@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("alias=second", ["b"]),
        ("kind=shared&alias=default", []),
        ("q=b", ["b"]),
        (f"host={HOST}&limit=1", ["a"]),
        ("start=1", ["b"]),
        ("start=9", []),
        ("start=&limit=", ["a", "b"]),
    ],
)
def test_dashboards_pick_as_the_list_does(viewer, query, shown):
    with Lock("a"), Lock("b", shared=True, using="second"):
        answer = viewer.get(f"{DATA}?{query}").json()

    assert [lock["name"] for lock in answer["locks"]] == shown


@pytest.mark.once
@pytest.mark.parametrize(
    "query", ["limit=-1", "limit=x", "start=1e3", "start=9999999999", "limit=٣"]
)
def test_dashboards_are_told_what_is_no_number(viewer, query):
    assert viewer.get(f"{DATA}?{query}").status_code == 400


def test_a_dashboard_may_have_the_token_of_the_settings(client, settings, aliases):
    aliases("broken", "tests.failing_engines.DownBackend")
    assert client.get(DATA, headers=TOKEN).status_code == 401
    settings.DISTLOCK_DASHBOARD_TOKEN = "a long token"

    for wrong in "Bearer a long toke", "Bearer ", "Bearer ü", "bearer x":
        refused = client.get(DATA, headers={"Authorization": wrong})
        assert refused.status_code == 401 and refused["WWW-Authenticate"] == "Bearer"
    for other in "Basic a long token", "a long token", "":
        assert client.get(DATA, headers={"Authorization": other}).status_code == 403
    answer = client.get(DATA, headers=TOKEN)

    assert answer.status_code == 200
    assert "hunter2" not in answer.content.decode()
    assert client.get(LIST, headers=TOKEN).status_code == 302
    assert client.post(CLEAR, {"lock": "x", "reason": "x"}, headers=TOKEN).status_code == 302
    assert client.post(DATA, headers=TOKEN).status_code == 405


def test_staff_behind_a_proxy_with_a_password_of_its_own_get_the_data(viewer):
    assert viewer.get(DATA, headers={"Authorization": "Basic YW5uOng="}).status_code == 200


@pytest.mark.once
@pytest.mark.parametrize("parameter", ["q", "host", "other"])
def test_a_question_of_any_length_is_answered_in_a_line(viewer, parameter):
    query = {parameter: "word " * 4_000}

    answer = viewer.get(DATA, query)
    page = viewer.get(LIST, query)

    assert answer.status_code == 400 and "too long" in answer.json()["error"]
    assert page.status_code == 302 and page.url == LIST


def test_dashboards_need_no_database_that_keeps_no_locks(
    client, settings, monkeypatch, atomic_requests, django_assert_num_queries
):
    settings.DISTLOCK_DASHBOARD_TOKEN = "a long token"
    monkeypatch.setitem(connections.settings["locks"], "ATOMIC_REQUESTS", True)

    with django_assert_num_queries(0):
        assert client.get(DATA, headers=TOKEN).status_code == 200


def test_an_empty_token_opens_nothing(client, settings):
    settings.DISTLOCK_DASHBOARD_TOKEN = ""

    assert client.get(DATA, headers={"Authorization": "Bearer "}).status_code == 401


def test_data_is_for_staff_with_the_permission_alone(client, browse):
    assert client.get(DATA).status_code == 403
    assert browse().get(DATA).status_code == 403


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
class TestLockTable:
    """Locks in the table of a second database, where the rows are shown as well."""

    @pytest.fixture(autouse=True)
    def table(self, aliases):
        aliases("table", "distlock_app.backends.database.DatabaseBackend", LOCATION="locks")

    def test_its_locks_are_listed_and_cleared_with_a_greater_fence(self, clearer):
        cleared = taken("a", "table")
        assert "a" in {row.name for row in clearer.get(LIST).context["cl"].result_list}

        response = post(clearer, row_id("a", "table"))

        assert "was released" in said(response)
        assert taken("a", "table").fence > cleared.fence

    def test_what_is_held_is_held_in_any_time_zone(self, browse, settings):
        taken("a", "table")
        client = browse("view_distlock")
        settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Seoul"

        page = client.get("/admin/distlock_app/distlock/")

        assert [row.is_held for row in page.context["cl"].result_list] == [True]

    @pytest.mark.parametrize("zone", [None, "America/New_York"])
    @pytest.mark.parametrize("use_tz", [True, False])
    def test_its_times_are_shown_in_the_time_zone_of_the_project(
        self, browse, settings, use_tz, zone
    ):
        taken("a", "table")
        noon = datetime(2036, 5, 4, 3, 2, 1, tzinfo=zones.utc)
        DistLock.objects.using("locks").update(expiry=noon, acquired_at=noon - timedelta(hours=1))
        client = browse("view_distlock")

        # Undone before the settings are, by which the connection gets the time zone of the others.
        with mock.patch.dict(connections["locks"].settings_dict, TIME_ZONE=zone):
            settings.USE_TZ, settings.TIME_ZONE = use_tz, "Asia/Seoul"
            pages = [client.get(f"{ROWS}?o=2.3"), client.get(f"{ROWS}{key_of('a')}/change/")]

        for page in pages:
            assert "May 4, 2036, 12:02 p.m." in html_of(page)
            assert "May 4, 2036, 11:02 a.m." in html_of(page)
            assert "icon-yes" in html_of(page)
        assert pages[0].context["cl"].queryset.query.order_by[:2] == ("expiry", "acquired_at")

    def test_its_locks_are_extended(self, extender):
        grant = taken("a", "table", ttl=20)

        extended(extender, row_id("a", "table"))

        assert left("a", "table") > 500
        assert registry["table"].backend.release(grant) is True

    def test_what_it_keeps_is_counted_first_and_cleared_or_deleted_then(self, clearer):
        late = taken("late", "table", ttl=0.1)
        taken("held", "table")
        taken("old", "table", ttl=0.1)
        time.sleep(0.2)
        long_ago = timezone.now() - timedelta(days=9)
        DistLock.objects.using("locks").filter(name="old").update(expiry=long_ago)

        assert LEFTOVER in clearer.get(LIST).content.decode()
        assert clearer.get(LEFTOVER).context["tables"][0][1] == (2, 1)
        assert clearer.get(LEFTOVER, {"days": 30}).context["tables"][0][1] == (2, 0)
        clear = {"alias": "table", "action": "clear-expired", "days": 7}
        assert "2 locks cleared" in said(clearer.post(LEFTOVER, clear, follow=True))
        assert registry["table"].backend.extend(late, 30) is False
        DistLock.objects.using("locks").filter(name="old").update(expiry=long_ago)
        purged = clearer.post(LEFTOVER, {**clear, "action": "purge"}, follow=True)

        assert "1 row deleted" in said(purged)
        assert {row.name for row in DistLock.objects.using("locks").all()} == {"late", "held"}
        assert LogEntry.objects.count() == 2

    def test_rows_free_for_years_are_deleted_where_thousands_have_separators(
        self, clearer, settings
    ):
        settings.USE_THOUSAND_SEPARATOR = True
        DistLock.objects.using("locks").create(
            key=key_of("a"), name="a", expiry="2001-01-01T00:00Z"
        )

        page = clearer.get(LEFTOVER, {"days": 1500}).content.decode()
        [days, *_] = re.findall('type="hidden" name="days" value="(.*)"', page)
        purge = {"alias": "table", "action": "purge", "days": days}

        assert "1 row deleted" in said(clearer.post(LEFTOVER, purge, follow=True))

    def test_clearing_up_needs_the_permission_and_a_form_of_ours(self, viewer, browse):
        forger = Client(enforce_csrf_checks=True)
        forger.force_login(User.objects.create_superuser("eve"))
        purge = {"alias": "table", "action": "purge", "days": 1}
        DistLock.objects.using("locks").create(
            key=key_of("a"), name="a", expiry="2001-01-01T00:00Z"
        )

        assert viewer.get(LEFTOVER).status_code == viewer.post(LEFTOVER, purge).status_code == 403
        assert LEFTOVER not in html_of(viewer.get(LIST))
        assert forger.post(LEFTOVER, purge).status_code == 403
        assert forger.get(LEFTOVER, purge).status_code == 200
        for wrong in ({"days": 0}, {"alias": "second"}, {"alias": ""}, {"action": "drop"}):
            forger.cookies["csrftoken"] = token = "x" * 32
            told = forger.post(LEFTOVER, {**purge, **wrong, "csrfmiddlewaretoken": token})
            assert told.status_code == 200
        assert DistLock.objects.using("locks").exists()

    def test_its_rows_are_shown_to_who_may_see_them_without_the_owner(self, browse):
        client = browse("view_distlock")
        with identity.activity("alice /pay/7"), Lock("a", using="table") as hold:
            token = hold._lease.grant.claim.owner
            page = reverse("admin:distlock_app_distlock_change", args=[key_of("a")])
            htmls = [client.get("/admin/distlock_app/distlock/").content.decode()]
            htmls.append(client.get(page).content.decode())
            assert DistLock.objects.using("locks").get().owner == token

        for html in htmls:
            assert "alice /pay/7" in html and "icon-yes" in html
            assert f"{HOST}:{os.getpid()}:MainThread" in html
            assert token not in html

    def test_a_row_that_says_nothing_of_its_holder_is_shown(self, browse):
        client = browse("view_distlock")
        DistLock.objects.using("locks").create(
            key=key_of("a"), name="a", expiry="2001-01-01T00:00Z"
        )

        listed = html_of(client.get(ROWS))
        row = client.get(f"{ROWS}{key_of('a')}/change/")

        assert listed.count(">—<") == 3 and "icon-no" in listed
        assert row.status_code == 200

    def test_a_row_of_readers_is_held_and_by_the_last_without_the_owners(self, browse):
        client = browse("view_distlock", "view_livelock")
        reading = Lock("a", using="table", shared=True)
        with identity.activity("alice /pay/7"), reading as hold:
            page = reverse("admin:distlock_app_distlock_change", args=[key_of("a")])
            html = client.get(page).content.decode()
            listed = client.get(LIST).content.decode()

        assert "alice /pay/7" in html and "icon-yes" in html
        assert "shared" in listed
        assert hold._lease.grant.claim.owner not in html + listed

    def test_its_rows_are_said_to_be_of_its_database(self, browse):
        client = browse("view_distlock")
        with Lock("a", using="table"):
            html = client.get(ROWS).content.decode()
            row = client.get(f"{ROWS}{key_of('a')}/change/").content.decode()

        assert "Database “locks”, with the locks of: table" in html
        assert "locks (table)" in row
        assert "database=" not in html  # nothing to choose

    def test_of_several_tables_one_is_chosen_and_kept(self, browse, aliases):
        aliases("first", "distlock_app.backends.database.DatabaseBackend", LOCATION="default")
        aliases("again", "distlock_app.backends.database.DatabaseBackend", LOCATION="locks")
        client = browse("view_distlock")
        with (
            Lock("a", using="table"),
            Lock("zebra", using="first"),
            Lock("a", using="first") as hold,
        ):
            default = client.get(f"{ROWS}?database=default")
            shown = {
                query: {row.name for row in client.get(f"{ROWS}?{query}").context["cl"].queryset}
                for query in ("", "database=locks", "database=nonsense", "database=default&q=zebra")
            }
            [link] = re.findall(rf'href="({ROWS}{key_of("a")}/change/[^"]*)"', html_of(default))
            row = client.get(link.replace("&amp;", "&"))

        assert {row.name for row in default.context["cl"].queryset} == {"a", "zebra"}
        assert default.context["cl"].full_result_count == 2
        assert "Database “default”, with the locks of: first" in html_of(default)
        assert shown == {
            "": {"a"},
            "database=locks": {"a"},
            "database=nonsense": {"a"},
            "database=default&q=zebra": {"zebra"},
        }
        assert "default (first)" in html_of(row)
        assert str(hold.fence) in html_of(row).replace(",", "")

    def test_nobody_can_ask_for_an_owner_digit_by_digit(self, browse):
        client = browse("view_distlock")

        for lookup in ("owner__startswith=0", "owner__gte=0", "q=0&owner=1"):
            assert client.get(f"/admin/distlock_app/distlock/?{lookup}").status_code == 400

    @pytest.mark.parametrize("page", ["change", "history"])
    def test_there_is_no_row_of_what_is_no_key(self, browse, page):
        client = browse("view_distlock")

        for no_key in ("%00", "a", f"{key_of('a')}%00"):
            answer = client.get(f"{ROWS}{no_key}/{page}/")
            assert answer.status_code == 302 and answer.url == "/admin/"

    def test_its_rows_cannot_be_changed(self, browse):
        client = browse("view_distlock")
        with Lock("a", using="table") as hold:
            page = reverse("admin:distlock_app_distlock_change", args=[key_of("a")])
            assert client.post(page, {"name": "b"}).status_code == 403
            hold.extend()

    def test_its_rows_need_their_own_permission(self, viewer):
        assert viewer.get("/admin/distlock_app/distlock/").status_code == 403


def test_without_a_lock_table_the_admin_has_no_page_for_it(browse):
    client = browse("view_distlock", "view_livelock")

    assert "/distlock/" not in client.get("/admin/").content.decode()
    assert client.get("/admin/distlock_app/distlock/").status_code == 403


def test_an_engine_that_keeps_data_in_no_table_has_no_page_of_rows(browse, aliases):
    aliases("hoard", "tests.failing_engines.HoardingBackend")
    client = browse("view_distlock", "view_livelock", "clear_lock")

    assert "/distlock/" not in client.get("/admin/").content.decode()
    assert client.get(ROWS).status_code == 403
    assert client.get(LEFTOVER).context["tables"][0][1] == (7, 0)


@pytest.fixture
def no_table_of_events():
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE distlock_app_lockevent RENAME TO gone")
    yield
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE gone RENAME TO distlock_app_lockevent")


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("atomic_requests", "no_table_of_events")
def test_pages_do_without_the_events_if_their_table_is_missing(viewer, settings, caplog):
    settings.DISTLOCK_HISTORY = 20
    taken("a")

    found = viewer.get(LIST, {"q": "a"})
    page = viewer.get(change_url(row_id("a")))
    events = viewer.get(f"{LIST}events/", {"lock": id_of("default", key_of("a"))})

    assert [found.status_code, page.status_code, events.status_code] == [200, 200, 200]
    assert caplog.messages.count("lock events could not be read") == 3


@pytest.mark.parametrize("every", [False, True])
def test_live_locks_are_in_no_table_that_dumpdata_would_read(every):
    taken("a")
    written = io.StringIO()

    call_command("dumpdata", "distlock_app", all=every, stdout=written)

    models = {row["model"] for row in json.loads(written.getvalue())}
    assert "distlock_app.livelock" not in models


def test_locks_on_redis_are_listed_and_cleared(redis_url, clearer, aliases):
    aliases("redis", "distlock_app.backends.redis.RedisBackend", LOCATION="locks")
    cleared = taken("test-admin", "redis")
    assert "test-admin" in {row.name for row in clearer.get(LIST).context["cl"].result_list}

    response = post(clearer, row_id("test-admin", "redis"))

    assert "was released" in said(response)
    following = taken("test-admin", "redis")
    assert following.fence > cleared.fence
    registry["redis"].backend.release(following)


@pytest.mark.parametrize("options", [{"shared": True}, {"limit": 2}], ids=str)
@pytest.mark.parametrize("using", ["default", "redis"])
def test_each_of_several_holders_has_a_row_and_is_cleared_alone(
    request, clearer, aliases, using, options
):
    if using == "redis":
        request.getfixturevalue("redis_url")
        aliases("redis", "distlock_app.backends.redis.RedisBackend", LOCATION="locks")
    first, second = taken("test-several", using, **options), taken("test-several", using, **options)
    held = {h.fence: h for h in registry[using].backend.holders(first.claim.key)}

    rows = clearer.get(f"{LIST}?q=test-several").context["cl"].result_list
    response = post(clearer, id_of(using, first.claim.key, held[first.fence].version))

    assert {row.holding.fence for row in rows} == {first.fence, second.fence}
    assert {row.holding.kind for row in rows} == {"shared" if "shared" in options else "permit"}
    assert "was released" in said(response)
    assert registry[using].backend.extend(first, 30) is False
    assert registry[using].backend.release(second) is True
