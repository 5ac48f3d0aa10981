"""The view that says whether the backends answer."""

from __future__ import annotations

import threading

import pytest
from django.db import connections
from django.test import RequestFactory
from django.urls import path

from distlock_app.health import health
from distlock_app.operations import reading
from tests.failing_engines import HangingBackend

LOCMEM = "distlock_app.backends.locmem.LocMemBackend"


@pytest.fixture
def get(settings):
    """Ask for the health of these backends."""

    def get(using=None, **backends):
        settings.DISTLOCK = {alias: {"BACKEND": backend} for alias, backend in backends.items()}
        return health(RequestFactory().get("/health/"), using)

    return get


def test_all_is_well_if_each_backend_answers(get):
    response = get(default=LOCMEM, second=LOCMEM)

    assert (response.status_code, response.text) == (200, "default: ok\nsecond: ok\n")
    assert response["Content-Type"] == "text/plain; charset=utf-8"
    assert "no-store" in response["Cache-Control"]


@pytest.mark.parametrize("kind", ["DownBackend", "BrokenBackend", "NoSuchBackend"])
def test_a_backend_that_does_not_answer_is_named_without_its_address(get, kind):
    response = get(default=LOCMEM, far=f"tests.failing_engines.{kind}")

    assert response.status_code == 503
    assert response.text.startswith("default: ok\nfar: ")
    assert "db7" not in response.text


def test_a_monitor_may_ask_for_one_alias(get):
    backends = {"default": LOCMEM, "far": "tests.failing_engines.DownBackend"}

    assert get("default", **backends).text == "default: ok\n"
    assert [get(alias, **backends).status_code for alias in ("far", "none")] == [503, 503]


def test_a_process_that_can_start_no_thread_is_not_well(get, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)

    response = get(default=LOCMEM)

    assert (response.status_code, response.text[:9]) == (503, "default: ")


def test_a_backend_that_hangs_is_not_waited_for(get, monkeypatch):
    monkeypatch.setattr(reading, "ANSWER_WITHIN", 0.1)
    HangingBackend.answers.clear()
    try:
        response = get(default=LOCMEM, silent="tests.failing_engines.HangingBackend")
    finally:
        HangingBackend.answers.set()

    assert response.status_code == 503
    assert "silent: no answer within 0.1 s\n" in response.text


urlpatterns = [path("health/", health)]


@pytest.mark.urls(__name__)
@pytest.mark.usefixtures("atomic_requests")
def test_it_asks_no_database_that_keeps_no_locks(get, client, monkeypatch):
    """This test may not open any."""
    monkeypatch.setitem(connections.settings["locks"], "ATOMIC_REQUESTS", True)
    get(default=LOCMEM)

    assert client.get("/health/").status_code == 200


def test_only_reading_is_allowed_and_needs_no_login():
    assert health(RequestFactory().post("/health/")).status_code == 405
    assert health.login_required is False
