"""PostgreSQL's advisory locks: readers, names for people, poolers."""

from __future__ import annotations

import pytest
from django.db import connection

from distlock_app import Lock
from distlock_app.backends.server_sessions import GRACE
from distlock_app.registry import registry
from distlock_app.sharing_contract import a_claim

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="about PostgreSQL"),
]


@pytest.fixture
def backend():
    return registry["advisory"].backend


def test_readers_share_and_are_both_shown(backend):
    first = backend.acquire(a_claim("shared", shared=True), 0)
    second = backend.acquire(a_claim("shared", shared=True), 0)

    assert second.fence > first.fence
    assert backend.acquire(a_claim("shared"), 0) is None
    shown = list(backend.holders(first.claim.key))
    assert [holding.kind for holding in shown] == ["shared", "shared"]
    assert backend.clear(first.claim.key, shown[0].seen) == 1
    assert sorted([backend.release(first), backend.release(second)]) == [False, True]
    assert backend.release(backend.acquire(a_claim("shared"), 0))


def test_the_name_and_the_holder_are_seen_from_other_processes(processes):
    name = "인보이스 */ ; '1'"
    worker = processes.start(
        "tests.server_lock_workers:hold_until_told", name=name, using="advisory", ttl=30
    )
    fence = worker.read()

    (holding,) = [one for one in registry["advisory"].backend.holders() if one.name == name]

    assert holding.holder["pid"] == worker.pid
    assert holding.fence in (None, fence)  # said at the first question after the grant
    assert 0 <= holding.held_for < 60


def test_the_server_ends_a_session_that_says_nothing_and_only_ours(backend):
    grant = backend.acquire(a_claim("a", ttl=7.5), 0)

    assert grant.session.ask("SHOW idle_session_timeout") == [(f"{round((7.5 + GRACE) * 1000)}ms",)]
    backend.extend(grant, 60)
    assert grant.session.ask("SHOW idle_session_timeout") == [(f"{60 + GRACE:.0f}s",)]
    with connection.cursor() as cursor:
        cursor.execute("SHOW idle_session_timeout")
        assert cursor.fetchone() == ("0",)
    backend.release(grant)


def test_limits_of_the_role_do_not_end_a_wait(backend, monkeypatch):
    options = {**connection.settings_dict["OPTIONS"], "options": "-c statement_timeout=50"}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    backend.close()
    held = backend.acquire(a_claim("a"), 0)

    assert backend.acquire(a_claim("a"), 0.3) is None

    assert backend.release(held)
    backend.close()


def test_pool_and_isolation_of_the_alias_are_not_ours(backend, monkeypatch):
    options = {**connection.settings_dict["OPTIONS"], "pool": True}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    backend.close()

    with Lock("a", using="advisory"):
        pass


def test_a_pooler_is_warned_of(backend, monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "DISABLE_SERVER_SIDE_CURSORS", True)
    assert [message.id for message in backend.check()] == ["distlock_app.W031"]

    # Two clients with one session: what a pooler makes of us.
    line = backend._lend()
    monkeypatch.setattr(backend, "_lend", lambda: line)
    assert [message.id for message in backend.look_around(line)] == ["distlock_app.E032"]
