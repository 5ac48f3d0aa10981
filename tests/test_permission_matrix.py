"""Who gets what from each page about locks: every kind of user, URL and method."""

from __future__ import annotations

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.test import Client

from distlock_app.admin.rows import id_of
from distlock_app.core.registry import registry
from distlock_app.models import DistLock, LiveLock
from distlock_app.operations import history
from distlock_app.primitives.names import key_of
from distlock_app.testing.claims import a_claim

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "locks"])

LIVE = "/admin/distlock_app/livelock/"
ROWS = "/admin/distlock_app/distlock/"
TOKEN = "a long token"

# Staff unless it says otherwise, with these permissions.
PEOPLE = {
    "anonymous": None,
    "inactive": {"is_active": False, "is_superuser": True},
    "no staff": {"is_staff": False, "codenames": ["view_livelock", "clear_lock", "extend_lock"]},
    "none": {},
    "others": {"codenames": ["change_user", "delete_user", "view_logentry"]},
    "viewer": {"codenames": ["view_livelock"]},
    "clear alone": {"codenames": ["clear_lock"]},
    "clearer": {"codenames": ["view_livelock", "clear_lock"]},
    "extender": {"codenames": ["view_livelock", "extend_lock"]},
    "row viewer": {"codenames": ["view_distlock"]},
    "superuser": {"is_superuser": True},
    "dashboard": {"token": TOKEN},
    "wrong token": {"token": "another"},
}

# GET, POST. Django's own pages of what cannot be added, changed or deleted refuse that.
LOGIN, REFUSED = (302, 302), (403, 403)
LIST_ONLY, ONE = (200, 200), (200, 403)
LOOKS = {
    "": LIST_ONLY,
    "data/": (200, 405),
    "events/": LIST_ONLY,
    "change/": ONE,
    "history/": LIST_ONLY,
}
CLEARS = {"clear/": (200, 302), "leftover/": (200, 302)}
EXTENDS = {"extend/": (302, 302)}
SEES_ROWS = {"rows": LIST_ONLY, "rows change/": ONE, "rows history/": LIST_ONLY}
ALLOWED = {
    "viewer": LOOKS,
    "clearer": LOOKS | CLEARS,
    "extender": LOOKS | EXTENDS,
    "row viewer": SEES_ROWS,
    "superuser": LOOKS | CLEARS | EXTENDS | SEES_ROWS,
    "dashboard": {"data/": (200, 405)},
    "wrong token": {"data/": (401, 405)},
}
OUTSIDE = {"anonymous", "inactive", "no staff", "dashboard", "wrong token"}


@pytest.fixture
def lock(settings):
    """The id of a lock in memory, beside an expired one in the table."""
    settings.DISTLOCK = {
        "default": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"},
        "table": {
            "BACKEND": "distlock_app.backends.database.DatabaseBackend",
            "LOCATION": "default",
        },
    }
    settings.DISTLOCK_DASHBOARD_TOKEN = TOKEN
    settings.DISTLOCK_HISTORY = 10
    history.listen()
    DistLock.objects.create(key=key_of("row"), name="row", expiry="2001-01-01T00:00Z")
    registry["default"].backend.acquire(a_claim("a", ttl=30), 0)
    [holding] = registry["default"].backend.holders(key_of("a"))
    return id_of("default", holding.key, holding.version)


def pages(lock):
    """Return the address of each page, by the end of its path."""
    one, row = f"{LIVE}{quote(lock)}/", f"{ROWS}{key_of('row')}/"
    named = {f"{page}/": f"{LIVE}{page}/" for page in ("data", "extend", "leftover", "add")}
    asked = {f"{page}/": f"{LIVE}{page}/?lock={lock}" for page in ("events", "clear")}
    of_one = {f"{page}/": f"{one}{page}/" for page in ("change", "history", "delete")}
    of_row = {f"rows {page}/": f"{row}{page}/" for page in ("change", "history", "delete")}
    return {
        "": LIVE,
        **named,
        **asked,
        **of_one,
        "rows": ROWS,
        "rows add/": f"{ROWS}add/",
        **of_row,
    }


def client_of(kind):
    """Return a browser in which this user is logged in."""
    facts = {"is_staff": True, "codenames": [], **(PEOPLE[kind] or {})}
    if token := facts.pop("token", None):
        return Client(headers={"Authorization": f"Bearer {token}"})
    client, codenames = Client(), facts.pop("codenames")
    if PEOPLE[kind] is not None:
        user = User.objects.create_user("ann", password="x", **facts)
        user.user_permissions.add(*Permission.objects.filter(codename__in=codenames))
        client.force_login(user)
    return client


def state():
    """Return what pages might change: who holds the lock and for how long, which rows are left."""
    held = [
        (h.version, h.expires_in > 60) for h in registry["default"].backend.holders(key_of("a"))
    ]
    return held, DistLock.objects.count(), LogEntry.objects.count()


@pytest.mark.parametrize("kind", PEOPLE)
def test_each_page_answers_each_user_as_it_should(kind, lock):
    client, before = client_of(kind), state()
    form = {"lock": lock, "reason": "x", "seconds": 600, "days": 1}
    form |= {"alias": "table", "action": "purge", "post": "yes", "name": "a"}
    refused = dict.fromkeys(pages(lock), LOGIN if kind in OUTSIDE else REFUSED)
    refused["data/"] = (403, 405)

    got = {page: client.get(url).status_code for page, url in pages(lock).items()}
    looked = state()
    # The clearing comes last: without lock and row, their pages would lead back to the list.
    posts = sorted(pages(lock).items(), key=lambda item: item[0] in CLEARS)
    posted = {page: client.post(url, form).status_code for page, url in posts}

    answers = {page: (got[page], posted[page]) for page in got}
    assert answers == {**refused, **ALLOWED.get(kind, {})}
    assert looked == before
    if not {"clear/", "extend/"} & ALLOWED.get(kind, {}).keys():
        assert state() == before


def test_no_page_is_missing_in_the_matrix(lock):
    known = {page.removeprefix("rows").strip() for page in pages(lock)} | {""}
    routes = {
        str(pattern.pattern)
        for model in (LiveLock, DistLock)
        for pattern in admin.site.get_model_admin(model).get_urls()
    }

    # What Django redirects to the page of a row.
    assert {route.removeprefix("<path:object_id>/") for route in routes} <= known
