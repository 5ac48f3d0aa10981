"""Named locks of MySQL and MariaDB: their names, and what differs between the two."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
from django.db import connection, connections

from distlock_app.backends import mysql
from distlock_app.backends.database import DatabaseBackend
from distlock_app.backends.mysql import NamedLockBackend
from distlock_app.backends.sessions.link import ServerError
from distlock_app.backends.sessions.notes import note
from distlock_app.core.registry import registry
from distlock_app.errors import BackendError
from distlock_app.primitives.names import key_of
from distlock_app.testing.claims import a_claim
from tests.engines import running, until

# As on MySQL by default.
INSTRUMENTED = {
    "performance-schema": "ON",
    "performance-schema-instrument": "wait/lock/metadata/sql/mdl=ON",
    "performance-schema-consumer-events-statements-current": "ON",
}

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "mysql", reason="about MySQL and MariaDB"),
]


@pytest.fixture
def backend():
    return registry["named"].backend


def test_the_names_obey_mysql_and_have_the_schema_in_them(backend):
    grant = backend.acquire(a_claim("x" * 300 + "JOB\x00é"), 0)
    name = grant.session.prefix + grant.claim.key

    assert len(name) <= 64
    assert name == name.lower()
    assert grant.session.ask(f"SELECT IS_USED_LOCK('{name}') = CONNECTION_ID()") == [(1,)]
    assert backend.release(grant)
    backend.close()


@pytest.mark.parametrize("named_by", ["NAME", "read_default_file"])
def test_each_schema_has_its_own_locks(backend, tmp_path, named_by):
    settings = connections[backend.using].settings_dict
    here, held = settings["NAME"], backend.acquire(a_claim("nightly"), 0)

    for schema, free in (here, False), ("mysql", True):
        file = tmp_path / schema
        file.write_text(f"[client]\ndatabase = {schema}\n")
        options = {**settings["OPTIONS"], "read_default_file": str(file)}
        ours = {"NAME": schema} if named_by == "NAME" else {"NAME": "", "OPTIONS": options}
        with patch.dict(settings, ours):
            other = NamedLockBackend(alias="other", location=backend.using)
            grant = other.acquire(a_claim("nightly"), 0)
            table = DatabaseBackend(alias="table", location=backend.using)
            table.ping()
        assert bool(grant) is free
        assert table._sessions.dialect.database == schema
        other.close()
        table.close()
    assert backend.release(held)


def test_the_server_ends_a_session_that_says_nothing_and_only_ours(backend):
    grant = backend.acquire(a_claim("a", ttl=7.5), 0)

    assert grant.session.ask("SELECT @@wait_timeout") == [(10,)]
    backend.extend(grant, 60)
    assert grant.session.ask("SELECT @@wait_timeout") == [(62,)]
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@wait_timeout")
        assert cursor.fetchone()[0] > 62
    backend.release(grant)


def test_on_mysql_the_statement_has_the_exact_limit(backend):
    """MySQL rounds GET_LOCK's seconds; the hint is MySQL's own."""
    line = backend._pool.lend()
    line.is_mariadb = False

    statement = line._locking(a_claim("a"), 0.3)

    assert statement.startswith("SELECT /*+ MAX_EXECUTION_TIME(300) */ GET_LOCK('distlock:")
    assert f"GET_LOCK('{line.prefix + key_of('a')}', 1)" in statement
    assert "MAX_EXECUTION_TIME" not in line._locking(a_claim("a"), 0)
    line.close()


def test_a_statement_that_was_interrupted_has_locked_nothing(backend):
    """As MAX_EXECUTION_TIME does it on MySQL."""
    held = backend.acquire(a_claim("a"), 0)
    line, answers = backend._pool.lend(), []
    line.is_mariadb = False

    with running(lambda: answers.append(line.take(a_claim("a"), 20))):
        until(lambda: [h.waiters for h in backend.holders(held.claim.key)] == [1])
        backend._pool.ask(lambda other: other.ask(f"KILL QUERY {line.number}"))

    assert answers == [None]
    assert line.ask("SELECT 1") == [(1,)]
    assert backend.release(held)
    line.close()


@pytest.mark.parametrize(
    ("code", "is_mariadb", "wait", "said"),
    [
        *((code, True, 1, None) for code in (1205, 1213, 3058)),  # busy
        *((code, False, 1, None) for code in (1317, 3024)),  # the limit that MySQL was given
        (1317, True, 1, "answered NULL"),  # KILL QUERY
        (1317, False, 0, "answered NULL"),
        (1064, False, 1, "refused"),
    ],
)
def test_a_statement_that_failed_has_locked_nothing(
    backend, monkeypatch, code, is_mariadb, wait, said
):
    line, claim = backend._pool.lend(), a_claim("a")
    line.is_mariadb = is_mariadb
    line.ask(f"SELECT GET_LOCK('{line.prefix}{claim.key}', 0)")  # granted just then

    def fail(*_):
        monkeypatch.undo()
        raise ServerError(code, "refused")

    monkeypatch.setattr(line, "wait", fail)
    if said is None:
        assert line.take(claim, wait) is None
    else:
        with pytest.raises(ServerError, match=said):
            line.take(claim, wait)

    interrupted = code in (1317, 3024)
    [(free,)] = line.ask(f"SELECT IS_FREE_LOCK('{line.prefix}{claim.key}')")
    assert bool(free) is interrupted
    line.close()


def test_a_server_whose_clock_stands_still_in_a_statement_grants_without_a_fence(backend):
    line = backend._pool.lend()
    line.reads_clock = False  # --sysdate-is-now

    [fence, _] = line.take(a_claim("a"), 0)

    assert fence is None
    line.close()


@pytest.mark.parametrize(("code", "listed"), [(1142, ["a"]), (1146, None)])
def test_a_server_that_shows_its_locks_to_others_only_is_asked_for_ours(
    backend, monkeypatch, code, listed
):
    grant, ask = backend.acquire(a_claim("a"), 0), backend.session_type.ask

    def instrumented(session, statement, *values):
        rows = ask(session, statement, *values)
        return [(rows[0][0], 1, 0)] if "METADATA_LOCK_INFO" in statement else rows

    monkeypatch.setattr(backend.session_type, "ask", instrumented)
    refusal = f"SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = {code}"
    monkeypatch.setattr(mysql, "INSTRUMENTED", refusal)

    if listed:
        assert [holding.name for holding in backend.holders()] == listed
    else:
        with pytest.raises(BackendError):
            list(backend.holders())
    assert backend.release(grant)


def test_a_null_of_the_server_is_an_error_not_a_lock(backend, monkeypatch):
    monkeypatch.setattr(backend.session_type, "_locking", lambda *args: "SELECT NULL, 1, 1")

    wanted = a_claim("a")

    with pytest.raises(Exception, match="NULL"):
        backend.acquire(wanted, 0)

    assert (wanted.key, wanted.owner) not in backend._taken


def test_a_wait_outlasts_the_limit_that_the_server_has_for_statements(backend, short_statements):
    held = backend.acquire(a_claim("a"), 0)
    other = NamedLockBackend(alias="named", location="default")

    assert not other.acquire(a_claim("a"), 0.5)

    assert backend.release(held)
    other.close()


@pytest.mark.slow
@pytest.mark.parametrize("own_server", [INSTRUMENTED], indirect=True)
def test_with_performance_schema_all_locks_are_listed(own_server):
    mine, other = (NamedLockBackend(alias="own", location="own") for _ in range(2))
    grant = other.acquire(a_claim("seen from afar"), 0)
    (holding,) = mine.holders()

    assert holding.name == "seen from afar"
    assert holding.holder["host"] == "elsewhere"
    assert mine.clear(holding.key, holding.version) == 1
    assert other.release(grant) is False
    mine.close()
    other.close()


@pytest.fixture
def speaker():
    """A session that is just saying what is no text, and what is not in every character set."""
    other = connections["default"].copy()
    with other.cursor():
        said = b"SELECT GET_LOCK('said', 0), _binary'\xff\xfe', '\xf0\x9f\x98\x80', SLEEP(60)"
        other.connection.send_query(said)
    with connection.cursor() as cursor:

        def speaks():
            cursor.execute("SELECT IS_USED_LOCK('said')")
            return cursor.fetchone() == (other.connection.thread_id(),)

        until(speaks)
        yield
        cursor.execute(f"KILL {other.connection.thread_id()}")
    other.connection.close()


@pytest.mark.parametrize("kind", [NamedLockBackend, DatabaseBackend])
def test_locks_are_listed_whatever_other_sessions_say(kind, speaker):
    backend = kind(alias="own", location="default")
    grant = backend.acquire(a_claim("a"), 0)

    assert [holding.name for holding in backend.holders()] == ["a"]

    backend.release(grant)
    backend.close()


@pytest.mark.parametrize("kind", [NamedLockBackend, DatabaseBackend])
@pytest.mark.parametrize(
    "options",
    [
        {"charset": "utf8mb3", "collation": "utf8mb3_unicode_ci"},
        {"init_command": "SET sql_mode = 'ANSI_QUOTES'; SET lock_wait_timeout = 9"},
    ],
    ids=["collation", "init_command"],
)
def test_options_of_the_alias_do_not_keep_our_connections_away(kind, options):
    backend = kind(alias="own", location="default")
    with patch.dict(connections["default"].settings_dict["OPTIONS"], options):
        grant = backend.acquire(a_claim("é😀"), 0)

    assert [holding.name for holding in backend.holders()] == ["é😀"]

    assert backend.release(grant) is True
    backend.close()


@pytest.mark.parametrize("verb", ["holders", "clear"])
def test_no_engine_takes_another_text_for_a_key(backend, verb):
    """The text stood in the statement: a second one after `;` was executed, too."""
    with pytest.raises(ValueError, match="not the key of a lock"):
        list(getattr(backend, verb)("x'); INSERT INTO auth_group (name) VALUES ('injected') -- "))
    with connection.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM auth_group WHERE name = 'injected'")
        assert cursor.fetchone() == (0,)


def test_a_session_runs_one_statement_at_a_time_and_quotes_values(backend):
    session = backend._pool.lend()

    value = "'\\\"%s; -- /*\x00é"
    assert session.ask("SELECT %s", value) == [(value,)]
    with pytest.raises(ServerError):
        session.ask("SELECT 1; SELECT 2")

    session.close()


def test_a_clear_ends_no_session_that_got_the_lock_since_it_was_seen(backend):
    grant = backend.acquire(a_claim("a"), 0)
    session, number = backend._pool.lend(), grant.session.number

    assert session.kill(grant.claim.key, number + 100_000) is False
    assert session.kill("0" * 40, number) is False

    backend._pool.give_back(session)
    assert backend.release(grant) is True


@pytest.mark.parametrize(("said", "shown"), [("payroll", "payroll"), ("harmless", "({key})")])
def test_a_stranger_who_waits_for_a_lock_gives_it_no_other_name(backend, said, shown):
    claim = a_claim("payroll")
    grant = backend.acquire(claim, 0)
    other = NamedLockBackend(alias="named", location="default")  # of another process
    session = backend._pool.lend()

    waits = f"SELECT GET_LOCK('{session.prefix}{claim.key}', 20) {note(replace(claim, name=said))}"
    with running(lambda: session.wait(waits, 30)):
        until(lambda: [holding.waiters for holding in other.holders(claim.key)] == [1])
        [holding] = other.holders(claim.key)
        assert backend.release(grant)

    assert holding.name == shown.format(key=claim.key)
    session.close()
    other.close()


def test_a_lock_that_only_begins_as_ours_is_not_listed(backend):
    session, prefix = backend._pool.lend(), backend._pool.lend().prefix
    for end in ("<script>", "A" * 20, "0" * 39):
        assert session.ask(f"SELECT GET_LOCK('{prefix}{end}', 0)") == [(1,)]

    waits = f"SELECT GET_LOCK('{prefix}{'0' * 39}', 20)"
    other = backend._pool.lend()
    with running(lambda: other.wait(waits, 30)):
        waiting = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE INFO = %s"
        with connection.cursor() as cursor:
            until(lambda: cursor.execute(waiting, [waits]) and cursor.fetchone() == (1,))
        assert list(backend.holders()) == []
        session.ask("SELECT RELEASE_ALL_LOCKS()")
    session.close()
    other.close()
