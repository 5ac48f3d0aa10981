"""PostgreSQL's advisory locks: readers, names for people, poolers."""

from __future__ import annotations

import io
import os
import select
import signal
import time

import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import connection

from distlock_app import BackendError, Lock
from distlock_app.backends import postgresql
from distlock_app.backends.database import DatabaseBackend
from distlock_app.backends.postgresql import AdvisoryLockBackend
from distlock_app.backends.sessions.link import ServerError
from distlock_app.backends.sessions.lock_session import GRACE
from distlock_app.core.registry import registry
from distlock_app.primitives.names import key_of
from distlock_app.testing.claims import a_claim
from tests.engines import running, until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="about PostgreSQL"),
]


@pytest.fixture
def backend():
    return registry["advisory"].backend


@pytest.mark.parametrize("engine", [AdvisoryLockBackend, DatabaseBackend])
def test_a_wait_outlasts_what_the_server_says_meanwhile(engine, monkeypatch):
    # The server logs each statement as it begins; with these settings also to the client.
    logged = "-c client_min_messages=log -c log_statement=all"
    options = {**connection.settings_dict["OPTIONS"], "options": logged}
    monkeypatch.setattr(postgresql, "ANSWER_WAIT", 1)
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    holder, first, second = (engine(alias="logged", location="default") for _ in range(3))
    try:
        grant = holder.acquire(a_claim("logged"), 0)
        waits = [a_claim("logged", wake=lambda grant: None) for _ in range(2)]
        answers = [first.acquire(waits[0], 0.1)]
        began = time.monotonic()
        answers.append(second.acquire(waits[1], 2))
        if second.blocks:
            assert time.monotonic() - began >= 2
        else:  # behind the first one in the server's queue
            assert not select.select([answers[1].wake_fd], [], [], 1)[0]
        assert not any(answers)
        for backend, claim in zip((first, second), waits, strict=True):
            backend.withdraw(claim)
        assert holder.release(grant)
    finally:
        for backend in holder, first, second:
            backend.close()


def test_readers_share_and_are_both_shown(backend):
    first = backend.acquire(a_claim("shared", shared=True), 0)
    second = backend.acquire(a_claim("shared", shared=True), 0)

    assert second.fence > first.fence
    assert backend.acquire(a_claim("shared"), 0) is None
    shown = list(backend.holders(first.claim.key))
    assert [holding.kind for holding in shown] == ["shared", "shared"]
    assert backend.clear(first.claim.key, shown[0].version) == 1
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


def test_a_lock_that_is_granted_as_the_wait_for_it_ends_is_given_back(backend):
    """The server reports the end of the wait then, and its session has the lock all the same."""

    def asked(what):
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND {what}")
            return [pid for (pid,) in cursor.fetchall()]

    held, answers = backend.acquire(a_claim("a"), 0), []
    with running(lambda: answers.append(backend.acquire(a_claim("a"), 3.0))):
        until(lambda: asked("NOT granted"))
        [waiting] = asked("NOT granted")
        os.kill(waiting, signal.SIGSTOP)
        try:
            time.sleep(3.2)  # longer than its wait
            backend.release(held)
        finally:
            os.kill(waiting, signal.SIGCONT)

    assert [bool(answer) for answer in answers] == [False]
    until(lambda: asked("granted") == [], within=5)


def test_limits_of_the_role_do_not_end_a_wait(backend, monkeypatch):
    options = {**connection.settings_dict["OPTIONS"], "options": "-c statement_timeout=50"}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    backend.close()
    held = backend.acquire(a_claim("a"), 0)

    assert backend.acquire(a_claim("a"), 0.3) is None

    assert backend.release(held)
    backend.close()


def test_a_server_that_cannot_notice_dead_clients_will_do(backend, monkeypatch):
    refused = "SELECT set_config('client_connection_check_interval', 'as on Windows', false)"
    monkeypatch.setattr(postgresql, "NOTICE_THE_DEAD", refused)
    backend.close()

    with Lock("a", using="advisory"):
        pass

    backend.close()


def test_a_role_that_the_alias_assumes_keeps_nobody_from_clearing(backend, monkeypatch):
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {FEW}")
    options = {**connection.settings_dict["OPTIONS"], "assume_role": FEW}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    backend.close()
    grant = backend.acquire(a_claim("a"), 0)

    assert backend.clear(grant.claim.key) == 1

    backend.close()
    with connection.cursor() as cursor:
        cursor.execute(f"DROP ROLE {FEW}")


def test_pool_and_isolation_of_the_alias_are_not_ours(backend, monkeypatch):
    options = {**connection.settings_dict["OPTIONS"], "pool": True}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    backend.close()

    with Lock("a", using="advisory"):
        pass


def test_a_pooler_is_warned_of(backend, monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "DISABLE_SERVER_SIDE_CURSORS", True)
    assert [message.id for message in backend.check()] == ["distlock_app.W031"]

    # Several clients with one session: what a pooler makes of us.
    backend.ping()
    session = connection.copy()
    monkeypatch.setattr(type(session), "copy", lambda self, alias=None: session)
    assert "distlock_app.E032" in [message.id for message in backend.check(ask=True)]


# Advisory locks are everybody's: of whom is a session?

NUMBER = 0x0123456789ABCDEF
KEY = f"{NUMBER:016x}" + "0" * 24
FEW = f"few{settings.SUFFIX}"


@pytest.fixture
def stranger():
    """A session of another application, which holds an advisory lock of its own."""
    other = connection.copy()
    with other.cursor() as cursor:
        cursor.execute("SELECT set_config('application_name', 'payroll', false)")
        cursor.execute("SELECT pg_advisory_lock(%s)", [NUMBER])
    yield other
    other.close()


def alive(session):
    with session.cursor() as cursor:
        cursor.execute("SELECT 1")
        return cursor.fetchone() == (1,)


def poses(session):
    """Let a session bear our name, as any may; what it says is its own."""
    with session.cursor() as cursor:
        cursor.execute("SET application_name = 'distlock'")
        cursor.execute("SELECT 1 /* distlock 00000000 %s 0 */", ["not a key"])


@pytest.mark.parametrize("kind", ["stranger", "namesake"])
def test_a_clear_ends_no_session_of_another_application(backend, stranger, kind):
    if kind == "namesake":
        poses(stranger)
    shown = f"{stranger.connection.info.backend_pid}-"

    assert list(backend.holders(KEY)) == []
    assert backend.clear(KEY) == backend.clear(KEY, shown) == 0

    session = backend._pool.lend()
    assert session.kill(KEY, stranger.connection.info.backend_pid) is False
    backend._pool.give_back(session)
    assert alive(stranger)


def test_a_made_up_end_of_a_key_is_another_lock(backend):
    grant = backend.acquire(a_claim("a"), 0)
    posing = grant.claim.key[:16] + "0" * 24

    assert list(backend.holders(posing)) == [] and backend.clear(posing) == 0

    assert [holding.key for holding in backend.holders(grant.claim.key)] == [grant.claim.key]
    assert backend.release(grant) is True


@pytest.mark.parametrize("number", ["9" * 320, "1e999", "-1e999", "NaN"])
def test_numbers_that_a_session_made_up_break_no_page_and_no_command(
    backend, stranger, admin_client, number
):
    key = key_of("forged")
    said = f'{{"ttl":{number},"at_least":{number},"who":{"[" * 100}{"]" * 100},"host":"there"}}'
    with stranger.cursor() as cursor:
        cursor.execute("SET application_name = 'distlock'")
        cursor.execute(f"SELECT pg_advisory_lock({postgresql._number(key)})")
        cursor.execute(f'/* distlock 00000000 {key} 0 "forged" {said} */ SELECT 1')

    (holding,) = backend.holders(key)

    assert (holding.name, holding.holder) == ("forged", {"host": "there"})
    for page in "", "data/":
        answer = admin_client.get(f"/admin/distlock_app/livelock/{page}?alias=advisory")
        assert (answer.status_code, b"forged" in answer.content) == (200, True)
    for action in ["list"], ["list", "--json"], ["show", "forged"]:
        call_command("distlock", *action, "--using=advisory", stdout=(out := io.StringIO()))
        assert "forged" in out.getvalue()


@pytest.mark.parametrize("verb", ["extend", "refused"])
def test_a_holder_is_known_whatever_it_asked_last(backend, monkeypatch, verb):
    grant = backend.acquire(a_claim("a", ttl=5), 0)
    if verb == "extend":
        grant.session.keep(50)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(grant.session, "question", lambda claim: ("SELECT nonsense", ()))
            with pytest.raises(BackendError, match="nonsense"):
                backend.extend(grant, 5)

    (holding,) = AdvisoryLockBackend(alias="other").holders(grant.claim.key)

    assert (holding.key, holding.name) == (grant.claim.key, "a")
    assert backend.clear(holding.key, holding.version) == 1


def test_a_session_whose_statements_the_server_keeps_to_itself_can_be_cleared(backend, monkeypatch):
    options = {**connection.settings_dict["OPTIONS"], "options": "-c track_activities=off"}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    backend.close()
    grant = backend.acquire(a_claim("a"), 0)

    (holding,) = AdvisoryLockBackend(alias="other").holders(grant.claim.key)

    assert holding.key == grant.claim.key
    assert backend.clear(holding.key) == 1
    backend.close()


def test_a_lock_of_another_user_is_seen_and_what_that_user_said_is_not(backend):
    grant, session = backend.acquire(a_claim("a"), 0), backend._pool.lend()
    session.ask(f"CREATE ROLE {FEW}")
    session.ask(f"SET ROLE {FEW}")

    (held,) = session.locks(grant.claim.key, ())

    assert (held.key, held.number) == (grant.claim.key, grant.session.number)
    assert list(session.locks(None, ())) == []
    assert list(session.locks(grant.claim.key[:15] + "00" + "0" * 23, ())) == []
    session.ask("RESET ROLE")
    session.ask(f"DROP ROLE {FEW}")
    session.close()
    assert backend.release(grant) is True


def test_a_note_that_the_server_cut_off_still_tells_the_key(backend):
    grant = backend.acquire(a_claim("\U0001f600" * 150), 0)

    (holding,) = AdvisoryLockBackend(alias="other").holders()

    assert (holding.key, holding.name) == (grant.claim.key, f"({grant.claim.key})")
    assert backend.release(grant) is True


def test_a_session_runs_one_statement_at_a_time_and_binds_values(backend):
    session = backend._pool.lend()

    value = "'\\\"$1; -- /*é"
    assert session.ask("SELECT $1::text", value) == [(value,)]
    with pytest.raises(ServerError):
        session.ask("SELECT 1; SELECT 2")

    session.close()
