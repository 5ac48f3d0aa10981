"""Locks of the database server, GET_LOCK and advisory locks: what becomes of their sessions."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections import deque

import pytest
from django.conf import settings
from django.db import connection, connections, transaction
from django.test import override_settings

from distlock_app import BackendError, Lock, LockBusy, LockLost, LockTimeout
from distlock_app.backends import postgresql
from distlock_app.backends.sessions import asking, link, lock_session, pool
from distlock_app.backends.sessions import backend as session_backend
from distlock_app.backends.sessions.link import ReplyTimeout, ServerError
from distlock_app.backends.sessions.queues import FairSemaphore
from distlock_app.claims import Grant
from distlock_app.core.limits import MAX_TTL
from distlock_app.core.registry import registry
from distlock_app.core.releasing import releaser
from distlock_app.core.waiting import waiting
from distlock_app.operations import doctor
from distlock_app.operations.holdings import has_version
from distlock_app.primitives.names import key_of
from distlock_app.primitives.timing import monotonic
from distlock_app.testing import held_elsewhere
from distlock_app.testing.claims import a_claim
from tests.engines import DEADLINE, InterruptedSlots, closing_loop, running, until
from tests.proxy import proxy_to

ALIAS, ENGINE = settings.SERVER_LOCKS.get(settings.ENGINE, ("", ""))

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(not ALIAS, reason="SQLite has no locks of its own"),
]


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(asking, "BEAT_WAIT", DEADLINE)  # for a server that takes a while
    registry.reset()  # with what other tests left in its sessions
    return registry[ALIAS].backend


@pytest.fixture
def proxy(django_db_blocker):
    """The way to the database of alias `proxied`, which has locks of the same name."""
    with proxy_to(int(settings.DATABASES["default"]["PORT"])) as way, django_db_blocker.unblock():
        far = {**connections.settings["default"], "HOST": "127.0.0.1", "PORT": way.port}
        far["NAME"] = connection.settings_dict["NAME"]
        connections.settings["proxied"] = far
        locks = {"proxied": {"BACKEND": ENGINE, "LOCATION": "proxied"}}
        with override_settings(DISTLOCK={**settings.DISTLOCK, **locks}):
            yield way
        with contextlib.suppress(AttributeError):
            del connections["proxied"]
        del connections.settings["proxied"]


def lock(name, **options):
    return Lock(name, **{"using": ALIAS, **options})


def number(hold):
    return hold._lease.grant.session.number


def kill(session):
    """End a session as an administrator would."""
    verb = "KILL %s" if connection.vendor == "mysql" else "SELECT pg_terminate_backend(%s)"
    with connection.cursor() as cursor:
        cursor.execute(verb, [session])


def free(name, using=ALIAS):
    """Tell whether somebody else could take the lock."""
    backend = registry[using].backend
    grant = backend.acquire(a_claim(name), 0)
    return grant is not None and backend.release(grant)


def waiters(name):
    return sum(holding.waiters for holding in lock(name).holders())


def test_a_thread_that_waits_on_the_server_counts_as_waiting(backend):
    def wait():
        with lock("a"):
            pass

    hold = lock("a").acquire()
    with running(wait):
        until(lambda: [*waiting.values()] == [(backend, "a")])
        hold.release()

    assert not waiting


def test_many_waiters_of_a_process_wait_on_two_sessions(backend):
    """The first caller on its own, and one for all others, who get the lock in their order."""
    hold, order = lock("a").acquire(), []

    def wait(number):
        with lock("a", wait=DEADLINE):
            order.append(number)

    with contextlib.ExitStack() as stack:
        for number in range(6):
            stack.enter_context(running(wait, number))
            until(lambda number=number: len(waiting) == number + 1)
            until(lambda number=number: waiters("a") == min(number + 1, 2))
        hold.release()

    assert order == [*range(6)]


# The wrong server.


def demote(server):
    """Make the primary a replica, as a failover does."""
    if connection.vendor == "mysql":
        with connections["own"].cursor() as cursor:
            cursor.execute("SET GLOBAL read_only = 1")
    else:
        server.stop()
        (server.data / "standby.signal").touch()
        server.start()


@pytest.fixture
def own_locks(own_server, settings):
    """A server of this test alone, with the locks of the alias `own`."""
    settings.DISTLOCK = {**settings.DISTLOCK, "own": {"BACKEND": ENGINE, "LOCATION": "own"}}
    yield own_server
    registry["own"].backend.close()


@pytest.mark.slow
def test_a_replica_grants_no_lock(own_locks):
    demote(own_locks)

    with pytest.raises(BackendError, match="on 'own': the server is a read-only replica"):
        lock("a", using="own").acquire()
    assert "read-only replica" in doctor.examine("own").trouble


# Nobody else is in these clusters, of MariaDB and of MySQL.
CLUSTER = {
    "loose-wsrep-on": "ON",
    "binlog-format": "ROW",
    "plugin-load-add": "group_replication.so",
    "loose-group-replication-start-on-boot": "OFF",
    "loose-group-replication-single-primary-mode": "OFF",
}


@pytest.mark.slow
@pytest.mark.skipif(connection.vendor != "mysql", reason="about Galera and Group Replication")
@pytest.mark.parametrize(("own_server", "warned"), [(CLUSTER, 1), ({}, 0)], indirect=["own_server"])
def test_a_cluster_of_several_primaries_is_told(own_locks, warned):
    ids = [message.id for message in registry["own"].backend.check(ask=True)]

    assert ids == ["distlock_app.W032"] * warned


@pytest.fixture
def warned_of_several(own_locks, monkeypatch):
    """Tell whether the check warns that `own` reaches several servers behind a load balancer."""

    def ask(*servers):
        own = connections["own"]
        with proxy_to(*servers) as proxy:
            address = {"HOST": "127.0.0.1", "PORT": proxy.port}
            monkeypatch.setattr(own, "settings_dict", {**own.settings_dict, **address})
            ids = [message.id for message in registry["own"].backend.check(ask=True)]
            registry["own"].backend.close()
        assert len(proxy.reached) == len(servers)
        return "distlock_app.W033" in ids

    return ask


@pytest.mark.slow
@pytest.mark.parametrize("engine", [ENGINE, "distlock_app.backends.database.DatabaseBackend"])
def test_two_servers_behind_one_address_are_told(
    own_locks, private_server, settings, warned_of_several, engine
):
    settings.DISTLOCK = {"own": {"BACKEND": engine, "LOCATION": "own"}}
    other = private_server(type(own_locks))
    if connection.vendor == "mysql":
        there = connections["own"].copy()
        there.settings_dict["PORT"] = other.port
        with there._nodb_cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {there.settings_dict['NAME']}")

    assert not warned_of_several(own_locks.port)
    assert warned_of_several(own_locks.port, other.port)
    other.close()


@pytest.mark.slow
@pytest.mark.skipif(connection.vendor != "postgresql", reason="MySQL names itself by its host")
@pytest.mark.parametrize("own_server", [{"listen_addresses": "127.0.0.1,127.0.0.2"}], indirect=True)
def test_one_server_with_two_addresses_is_one(own_locks, warned_of_several):
    assert not warned_of_several(("127.0.0.1", own_locks.port), ("127.0.0.2", own_locks.port))


@pytest.mark.slow
@pytest.mark.skipif(connection.vendor != "mysql", reason="a standby has no session of a primary")
def test_a_primary_that_is_made_a_replica_loses_its_locks(own_locks):
    hold = lock("a", using="own", ttl=3).acquire()

    demote(own_locks)

    until(lambda: hold.lost)
    with pytest.raises(LockLost):
        hold.release()


@pytest.mark.slow
@pytest.mark.skipif(connection.vendor != "mysql", reason="a standby has no session of a primary")
def test_a_session_from_before_its_server_was_made_a_replica_takes_no_lock(own_locks):
    hold, idle = lock("a", using="own").acquire(), lock("b", using="own").acquire()
    idle.release()  # its session stays

    def wait(name, seconds):
        with pytest.raises(BackendError, match="read-only replica"):
            lock(name, using="own").acquire(seconds)

    with running(wait, "a", DEADLINE):
        until(lambda: lock("a", using="own").holders()[0].waiters == 1)
        demote(own_locks)
        wait("b", 0)
        hold.release()


# A session that ends.


def test_a_killed_session_is_a_lost_lock_within_a_second():
    lost = threading.Event()
    hold = lock("a", ttl=1000).acquire()
    hold.on_lost(lambda _: lost.set())

    began = time.monotonic()
    kill(number(hold))

    assert lost.wait(10)
    # 0.3 s until the next look on an idle machine; without looks it would take ASK_EVERY, 5 s.
    assert time.monotonic() - began < 3
    with pytest.raises(LockLost):
        hold.extend()
    with pytest.raises(LockLost):
        hold.release()


@pytest.mark.parametrize("verb", ["extend", "release"])
def test_a_killed_session_never_says_that_the_lock_is_ours(verb):
    hold = lock("a").acquire()

    kill(number(hold))

    with pytest.raises(LockLost):
        getattr(hold, verb)()
    until(lambda: free("a"))


def test_leaving_the_with_of_a_killed_session_raises():
    with pytest.raises(LockLost), lock("a") as hold:
        kill(number(hold))


def test_a_cut_connection_is_a_lost_lock_within_a_second(proxy):
    lost = threading.Event()
    hold = lock("a", using="proxied", ttl=1000).acquire()
    hold.on_lost(lambda _: lost.set())

    began = time.monotonic()
    proxy.cut()

    assert lost.wait(10)
    assert time.monotonic() - began < 3
    with pytest.raises(LockLost):
        hold.release()
    until(lambda: free("a"))


def test_a_client_that_is_cut_off_without_a_word_keeps_no_lock_for_ever(proxy):
    lost_at = []
    hold = lock("a", using="proxied", ttl=1).acquire()
    hold.on_lost(lambda _: lost_at.append(time.monotonic()))

    proxy.silent = True
    with lock("a", wait=30):
        got_at = monotonic()
    proxy.silent = False

    until(lambda: lost_at)
    assert hold._lease.trusted_until < got_at, "two owners"
    with pytest.raises(LockLost):
        hold.release()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such limit")
def test_a_server_that_dies_without_a_word_is_given_up_by_the_system(backend):
    """Else the process would ask it until the end of the ttl."""
    grant = backend.acquire(a_claim("a"), 0)

    with socket.socket(fileno=os.dup(grant.session.fd)) as end:
        limit = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    assert limit == link.ANSWER_WAIT * 1000
    assert backend.release(grant)


def test_an_idle_session_that_died_is_not_noticed_by_who_locks_next(backend):
    with lock("a") as hold:
        session = number(hold)
    kill(session)

    with lock("a") as hold:
        assert number(hold) != session


def test_one_try_is_not_a_wait_if_an_idle_session_had_died(backend):
    held, idle = (backend.acquire(a_claim(name), 0) for name in "ab")
    session = idle.session.number
    assert backend.release(idle)
    kill(session)

    assert not backend.acquire(a_claim("a"), 0)

    assert backend.release(held)


def test_a_lost_session_is_nothing_to_the_one_that_its_owner_locks_on_next(backend):
    claim, grants = a_claim("a"), []
    lost = backend.acquire(claim, 0)
    kill(lost.session.number)

    until(lambda: grants.append(backend.acquire(claim, 0)) or grants[-1])

    again = grants[-1]
    assert again.session is not lost.session
    backend._drop(lost.session)  # a heartbeat that began earlier finds it dead
    assert backend.extend(lost, 30) is False
    assert backend.release(lost) is False
    assert backend.extend(again, 30) is True
    assert backend.release(again) is True


def test_an_idle_session_that_died_is_not_noticed_by_who_asks(backend):
    idle = backend.acquire(a_claim("a"), 0)
    assert backend.release(idle)
    kill(idle.session.number)

    backend.ping()

    assert idle.session not in backend._pool._open


def test_a_session_that_only_asked_is_kept_for_the_next_question(backend, monkeypatch):
    pauses, over = [], threading.Event()

    def pause(seconds):
        pauses.append(seconds)
        over.wait(30)

    monkeypatch.setattr(lock_session, "sleep", pause)
    with contextlib.closing(type(backend)(alias="own", location=backend.using)) as own:
        session = own._pool.ask(lambda session: session)
        until(lambda: pauses)  # who closes idle sessions has seen it

        assert own._pool.ask(lambda session: session) is session
        over.set()


def test_a_question_is_asked_by_an_idle_session_and_ends_it_only_if_it_fails(backend):
    idle = backend.acquire(a_claim("a"), 0)
    assert backend.release(idle)

    for _ in range(4):
        backend.ping()
    assert backend._pool._open == {idle.session}

    def interrupted(session):
        asked.append(session)
        raise KeyboardInterrupt

    asked = []
    with pytest.raises(KeyboardInterrupt):
        backend._pool.ask(interrupted)
    assert not backend._pool._open.intersection(asked)
    with pytest.raises(BackendError, match="on 'default': .*nonsense"):
        backend._pool.ask(lambda session: asked.append(session) or session.ask("SELECT nonsense"))
    assert not backend._pool._open.intersection(asked)


def test_more_callers_than_may_ask_at_a_time_are_told_so(backend, monkeypatch):
    monkeypatch.setattr(session_backend, "ANSWER_WAIT", 0.01)
    monkeypatch.setattr(backend._pool, "semaphore", FairSemaphore(0))

    with pytest.raises(BackendError, match="all sessions of this process are busy"):
        backend.acquire(a_claim("a"), 0)


def test_a_hold_lives_on_by_its_heartbeats_alone():
    hold = lock("a", ttl=2).acquire()

    time.sleep(2 + lock_session.GRACE + 1.5)  # MySQL counts whole seconds

    assert not hold.lost
    assert not free("a")
    hold.release()


def test_a_session_is_not_asked_at_each_heartbeat(backend):
    grant = backend.acquire(a_claim("a"), 0)

    assert backend.extend_many([(grant, 30)]) == [None]
    assert backend.release(grant)


def test_a_fixed_lease_ends_with_its_ttl():
    began = time.monotonic()
    hold = lock("a", ttl=0.5, renew=False).acquire()

    with running(lambda: lock("a", wait=30).acquire().release()):
        pass

    assert time.monotonic() - began > 0.45
    assert hold.lost


def test_the_longest_ttl_is_a_lock_like_any_other():
    with pytest.warns(UserWarning, match="744.0 hours"):
        hold = lock("a", ttl=MAX_TTL).acquire()
    hold.release()
    with lock("a") as hold:
        hold.extend(MAX_TTL)


def test_a_heartbeat_asks_the_sessions_that_are_due(backend):
    grant = backend.acquire(a_claim("a"), 0)
    grant.session.asked_at = 0.0

    assert [backend.extend_many([(grant, 30)]) for _ in range(2)] == [[True], [None]]

    assert backend.release(grant)


def test_a_heartbeat_leaves_a_session_alone_that_is_just_being_asked(backend):
    grant = backend.acquire(a_claim("a"), 0)

    with grant.session.mutex:
        assert backend.extend_many([(grant, 30)]) == [None]

    assert backend.release(grant)


def test_a_heartbeat_tells_who_is_lost_beside_one_whose_answer_takes_a_while(backend, monkeypatch):
    lost, slow = (backend.acquire(a_claim(name), 0) for name in "ab")
    statement = {"mysql": "SELECT SLEEP(0.1) + 1", "postgresql": "SELECT 1 FROM pg_sleep(0.1)"}
    monkeypatch.setattr(slow.session, "question", lambda claim: (statement[connection.vendor], ()))
    slow.session.asked_at = 0.0
    kill(lost.session.number)
    until(lambda: lost.session.heard(0))

    assert backend.extend_many([(lost, 30), (slow, 30)]) == [False, True]

    assert [*backend._taken.values()] == [slow.session]
    assert backend.release(slow)


def test_a_heartbeat_without_an_answer_says_so_until_it_comes(backend, monkeypatch):
    grant, other = (backend.acquire(a_claim(name), 0) for name in "ab")
    wait = {
        "mysql": f"SELECT GET_LOCK('{getattr(other.session, 'prefix', '')}{other.claim.key}', 60)",
        "postgresql": f"SELECT pg_advisory_lock({postgresql._number(other.claim.key)})",
    }
    grant.session.asked_at = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(asking, "BEAT_WAIT", 0.0)
        patch.setattr(grant.session, "question", lambda claim: (wait[connection.vendor], ()))
        [first] = backend.extend_many([(grant, 30)])
        [second] = backend.extend_many([(grant, 30)])
    assert backend.release(other)
    until(lambda: grant.session.heard(0))

    assert [str(answer).partition(": ")[2] for answer in (first, second)] == [
        "no answer",
        "still no answer",
    ]
    assert backend.extend_many([(grant, 30)]) == [True]
    backend._drop(grant.session)  # it has both


@pytest.mark.parametrize("answer", ["SELECT 0", "SELECT 1 LIMIT 0"])
@pytest.mark.parametrize("verb", ["extend", "extend_many"])
def test_a_lock_that_its_session_no_longer_has_is_lost(backend, monkeypatch, verb, answer):
    grant = backend.acquire(a_claim("a"), 0)
    grant.session.asked_at = 0.0
    monkeypatch.setattr(grant.session, "question", lambda claim: (answer, ()))

    if verb == "extend":
        assert backend.extend(grant, 30) is False
    else:
        assert backend.extend_many([(grant, 30)]) == [False]

    assert not backend._taken
    until(lambda: free("a"))


def test_an_interrupt_in_a_question_ends_the_session(backend, monkeypatch):
    grant = backend.acquire(a_claim("a"), 0)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(grant.session, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.extend(grant, 30)

    assert backend.extend(grant, 30) is False
    until(lambda: free("a"))


@pytest.mark.parametrize("verb", ["extend", "extend_many"])
def test_a_statement_that_is_refused_is_no_lost_lock(backend, monkeypatch, verb):
    monkeypatch.setattr(asking, "ASK_EVERY", 0)
    grant = backend.acquire(a_claim("a"), 0)
    with monkeypatch.context() as patch:
        patch.setattr(grant.session, "question", lambda claim: ("SELECT nonsense", ()))
        if verb == "extend":
            with pytest.raises(BackendError, match="nonsense"):
                backend.extend(grant, 10)
        else:
            (answer,) = backend.extend_many([(grant, 10)])
            assert isinstance(answer, BackendError)

    assert backend.extend(grant, 10) is True
    assert backend.release(grant) is True


def test_an_answer_that_takes_long_is_no_lost_lock_and_awaited_by_the_next_question(
    backend, monkeypatch
):
    grant = backend.acquire(a_claim("a"), 0)
    asleep = {"mysql": "SELECT SLEEP(1)", "postgresql": "SELECT pg_sleep(1)"}[connection.vendor]
    with monkeypatch.context() as patch:
        patch.setattr(link, "ANSWER_WAIT", 0.1)
        patch.setattr(grant.session, "question", lambda claim: (asleep, ()))
        with pytest.raises(BackendError, match="no answer within"):
            backend.extend(grant, 10)

    assert backend.extend(grant, 10) is True
    assert backend.release(grant) is True


@pytest.mark.parametrize("verb", ["extend", "extend_many"])
def test_a_renewal_leaves_the_session_alone_that_serves_another_claim_by_now(
    backend, monkeypatch, verb
):
    monkeypatch.setattr(asking, "ASK_EVERY", 0)
    grant, after = backend.acquire(a_claim("a"), 0), []
    session_of = backend._session_of

    def while_another_releases(grant):
        session = session_of(grant)
        monkeypatch.setattr(backend, "_session_of", session_of)
        assert backend.release(grant)
        after.append(backend.acquire(a_claim("b"), 0))
        return session

    monkeypatch.setattr(backend, "_session_of", while_another_releases)
    if verb == "extend":
        assert backend.extend(grant, 10) is False
    else:
        assert backend.extend_many([(grant, 10)]) == [False]

    assert after[0].session is grant.session
    assert backend.extend(after[0], 10) is True
    assert backend.release(after[0]) is True


def test_a_fence_stays_with_its_lock_when_that_is_released_as_it_is_granted(backend, monkeypatch):
    first, mutex, second = a_claim("a"), backend._mutex, []

    class Mutex:
        def __enter__(self):
            mutex.acquire()

        def __exit__(self, *exc_info):
            mutex.release()
            session = backend._taken.get((first.key, first.owner))
            if session and not session.waits:  # just granted: another thread comes between
                monkeypatch.setattr(backend, "_mutex", mutex)
                assert backend.release(Grant(first))
                second.append(backend.acquire(a_claim("b"), 0))
                assert second[0].session is session

    monkeypatch.setattr(backend, "_mutex", Mutex())
    grant = backend.acquire(first, 0)

    assert grant.fence < second[0].fence == backend.acquire(second[0].claim, 0).fence
    assert backend.release(second[0])


# Waiting.


def test_the_server_waits_to_the_fraction_of_a_second():
    with held_elsewhere("a", using=ALIAS):
        took = []
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(LockTimeout):
                lock("a").acquire(wait=0.3)
            took.append(time.monotonic() - began)

    assert 0.3 <= min(took) < 0.9


def test_a_waiter_gets_the_lock_when_it_comes_free():
    got = []

    def wait():
        with lock("a", wait=30) as hold:
            got.append(hold.fence)

    with contextlib.ExitStack() as held:
        grant = held.enter_context(held_elsewhere("a", using=ALIAS))
        with running(wait):
            until(lambda: waiters("a") == 1)
            held.close()

    assert got[0] > grant.fence


def test_a_fence_is_of_the_moment_of_the_grant_not_of_the_question(backend):
    fences = []

    def wait():
        with lock("a", wait=30) as hold:
            fences.append(hold.fence)

    early = backend.acquire(a_claim("a"), 0)
    with running(wait):
        until(lambda: waiters("a") == 1)
        with lock("clock") as later:
            pass
        backend.release(early)

    assert fences[0] > later.fence > early.fence


def test_fences_grow_over_processes(processes):
    results = processes.run(
        "tests.server_lock_workers:fences", count=4, name="fence", using=ALIAS, times=50
    )

    assert [sorted(set(one)) for one in results] == results
    assert len({fence for one in results for fence in one}) == 200


def test_ctrl_c_just_as_a_caller_may_wait_on_the_server_takes_no_place_there(backend, monkeypatch):
    monkeypatch.setattr(backend, "_waiting", InterruptedSlots([None]))

    with pytest.raises(KeyboardInterrupt):
        backend.acquire(a_claim("a"), DEADLINE)

    assert len(backend._waiting) == 1
    assert backend.release(backend.acquire(a_claim("a"), DEADLINE)) is True


def test_ctrl_c_ends_the_wait_and_leaves_the_queue(backend):
    holder = backend.acquire(a_claim("a"), 0)

    def interrupt():
        until(lambda: waiters("a") == 1)
        os.kill(os.getpid(), signal.SIGINT)

    with running(interrupt), pytest.raises(KeyboardInterrupt):
        lock("a").acquire(wait=60)

    until(lambda: waiters("a") == 0, within=10)
    assert backend.release(holder)
    assert free("a")


@pytest.mark.parametrize("kept", [True, False])
def test_a_cancelled_task_leaves_the_queue_at_once(backend, kept):
    """Also on a session that was idle before, which the server might have closed meanwhile."""
    backend.close()
    holder = backend.acquire(a_claim("a"), 0)
    # More than one: those who count the waiters take one, too.
    for idle in [backend.acquire(a_claim(f"b{n}"), 0) for n in range(3 if kept else 0)]:
        assert backend.release(idle)

    async def main():
        loop = asyncio.get_running_loop()
        waiter = asyncio.ensure_future(lock("a", wait=None).aacquire())
        await loop.run_in_executor(None, until, lambda: waiters("a") == 1)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        # At once: a statement that nobody ends waits for SLICE, 30 seconds.
        await loop.run_in_executor(None, until, lambda: waiters("a") == 0, 15)

    asyncio.run(main())

    until(lambda: not backend._taken.keys() - {(holder.claim.key, holder.claim.owner)})
    assert backend.release(holder)
    assert free("a")


def test_a_task_cancelled_while_its_thread_connects_does_not_line_up(backend, monkeypatch):
    holder = backend.acquire(a_claim("a"), 0)
    lend, connects, go_on = backend._pool.lend, threading.Event(), threading.Event()

    def lend_late():
        connects.set()
        assert go_on.wait(30)
        return lend()

    async def main():
        waiter = asyncio.ensure_future(lock("a", wait=None).aacquire())
        await asyncio.to_thread(connects.wait, 30)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    monkeypatch.setattr(backend._pool, "lend", lend_late)
    asyncio.run(main())
    releaser.drain()  # the release came before the thread has lined up
    monkeypatch.setattr(backend._pool, "lend", lend)
    go_on.set()

    def waiting_threads():
        return [thread for thread in threading.enumerate() if thread.name == "distlock-wait"]

    until(lambda: not waiting_threads(), within=15)  # the statement would wait for SLICE
    assert waiters("a") == 0
    assert len(backend._taken) == 1
    assert backend.release(holder)


def test_a_task_whose_loop_was_closed_takes_no_lock_with_it():
    held = lock("a").acquire()

    with closing_loop(lock("a", ttl=60).aacquire, lambda: waiters("a") == 1):
        held.release()
        lock("a", wait=15).acquire().release()


def test_what_was_given_up_before_it_began_is_forgotten(backend, monkeypatch):
    monkeypatch.setattr(session_backend, "SLICE", 0)
    for _ in range(10):
        assert backend.release(Grant(a_claim("a"))) is False

    assert len(backend._given_up) == 1


def sessions_are_idle(backend):
    """Whether all that are open can be lent: none is lost."""
    return len(backend._pool._idle) == len(backend._pool._open)


def test_claims_that_were_given_up_before_they_began_take_no_lock(backend):
    claims = [a_claim("a") for _ in range(2)]
    for claim in claims:
        assert backend.release(Grant(claim)) is False

    for claim in claims:
        with pytest.raises(BackendError, match="given up"):
            backend.acquire(claim, 0)

    assert sessions_are_idle(backend)
    assert free("a")


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("raised", [None, KeyboardInterrupt])
def test_a_claim_that_is_given_up_as_its_answer_comes_leaves_nothing(
    backend, monkeypatch, held, raised
):
    others = [backend.acquire(a_claim("a"), 0) for _ in range(held)]
    take = backend.session_type.take

    def take_and_give_up(session, claim, wait):
        answer = take(session, claim, wait)
        assert backend.release(Grant(claim)) is False
        if raised:
            raise raised
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(backend.session_type, "take", take_and_give_up)
        with pytest.raises(raised or BackendError, match=None if raised else "given up"):
            backend.acquire(a_claim("a"), 0)

    assert [session.claim.owner for session in backend._taken.values()] == [
        grant.claim.owner for grant in others
    ]
    assert all(backend.release(grant) for grant in others)
    assert sessions_are_idle(backend)
    until(lambda: free("a"))


def test_a_try_that_is_refused_leaves_nothing(backend):
    held = backend.acquire(a_claim("a"), 0)

    assert backend.acquire(a_claim("a"), 0) is None

    assert len(backend._taken) == 1
    assert backend.release(held)


@pytest.mark.parametrize("verb", ["take", "unlock"])
def test_a_session_that_does_not_answer_is_an_error_and_keeps_no_lock(backend, monkeypatch, verb):
    claim, real = a_claim("a"), getattr(backend.session_type, verb)

    def without_an_answer(session, *asked):
        real(session, *asked) if verb == "take" else None
        raise ReplyTimeout("no answer")

    grant = backend.acquire(claim, 0) if verb == "unlock" else None
    with monkeypatch.context() as patch:
        patch.setattr(backend.session_type, verb, without_an_answer)
        with pytest.raises(BackendError, match="no answer"):
            backend.release(grant) if grant else backend.acquire(claim, 0)

    assert not backend._taken
    until(lambda: free("a"))


def test_a_release_waits_for_who_just_asks_on_its_session(backend):
    grant, answers = backend.acquire(a_claim("a"), 0), []
    assert grant.session.mutex.acquire()

    with running(lambda: answers.append(backend.release(grant))):
        until(lambda: not backend._taken)
        grant.session.mutex.release()

    assert answers == [True]


def test_a_session_that_is_busy_for_too_long_is_an_error(backend, monkeypatch):
    monkeypatch.setattr(lock_session, "ANSWER_WAIT", 0.01)
    grant = backend.acquire(a_claim("a"), 0)

    with grant.session.mutex, pytest.raises(BackendError, match="the session is busy"):
        backend.extend(grant, 30)

    assert backend.extend(grant, 30) is True
    assert backend.release(grant)


def test_where_no_thread_can_close_idle_sessions_the_next_release_asks_for_one(
    backend, monkeypatch
):
    asked = []
    monkeypatch.setattr(lock_session, "started", lambda *thread: asked.append(thread))

    for _ in range(2):
        assert backend.release(backend.acquire(a_claim("a"), 0))

    assert len(asked) == 2


def test_a_claim_that_is_given_up_in_the_queue_of_its_process_leaves_it_at_once(backend):
    first, claim = backend._queues.enqueue((key_of("a"), "first"), None), a_claim("a")

    def wait():
        with pytest.raises(BackendError, match="given up"):
            backend.acquire(claim, DEADLINE)

    with running(wait):
        until(lambda: backend._queues.waiter_of((claim.key, claim.owner)))
        assert backend.release(Grant(claim)) is False
    assert backend.release(Grant(claim)) is False
    wait()  # given up before it came

    assert backend._queues.by_key[claim.key].first() is first
    backend._queues.leave(first)


def test_a_newcomer_does_not_overtake_the_queue_of_its_process(backend):
    first = backend._queues.enqueue((key_of("a"), "first"), None)

    assert backend.acquire(a_claim("a"), 0.01) is None

    backend._queues.leave(first)
    assert backend.release(backend.acquire(a_claim("a"), DEADLINE))


def test_a_caller_that_may_not_wait_on_the_server_tries_again_after_growing_pauses(
    backend, monkeypatch
):
    held, pauses = backend.acquire(a_claim("a"), 0), []

    class Pause(session_backend.Gate):  # of this thread alone: the timer has a gate, too
        def wait(self, seconds):
            pauses.append(seconds)
            if len(pauses) == 3:
                assert backend.release(held)

    monkeypatch.setattr(backend, "_waiting", deque())
    monkeypatch.setattr(session_backend, "full_jitter", lambda attempt, base, cap: attempt)
    monkeypatch.setattr(session_backend, "Gate", Pause)

    assert backend.release(backend.acquire(a_claim("a"), DEADLINE))
    assert pauses[:4] == [0, 1, 2]


def test_a_lock_that_was_released_twice_may_be_taken_again(backend):
    grant = backend.acquire(a_claim("a"), 0)
    assert backend.release(grant) is True
    assert backend.release(grant) is False

    assert backend.release(backend.acquire(grant.claim, 0)) is True


def test_a_wait_longer_than_a_statement_goes_on(backend, monkeypatch):
    monkeypatch.setattr(session_backend, "SLICE", 0.1)
    began = time.monotonic()

    with held_elsewhere("a", using=ALIAS), pytest.raises(LockTimeout):
        lock("a").acquire(wait=0.5)

    assert time.monotonic() - began >= 0.5


def test_a_wait_goes_on_for_what_is_left_of_it_when_its_session_dies(backend, monkeypatch):
    backend.close()
    held, waits, grants = backend.acquire(a_claim("a"), 0), [], []
    # More than one: those who count the waiters take one, too.
    for idle in [backend.acquire(a_claim(f"b{n}"), 0) for n in range(3)]:
        assert backend.release(idle)
    take = backend.session_type.take

    def note_and_take(session, claim, wait):
        waits.append(wait)
        return take(session, claim, wait)

    monkeypatch.setattr(backend.session_type, "take", note_and_take)
    with running(lambda: grants.append(backend.acquire(a_claim("a"), 20))):
        until(lambda: waiters("a") == 1)
        kill(*(session.number for session in backend._taken.values() if session.waits))
        until(lambda: len(waits) == 2)
        assert backend.release(held)

    assert waits[1] < waits[0]
    assert backend.release(grants[0])


# Sessions are few, and not Django's.


def test_a_thousand_acquisitions_leave_no_lock_and_hardly_a_session(backend):
    backend.close()
    for turn in range(500):
        with lock(f"a{turn % 7}"):
            pass
        assert backend.release(backend.acquire(a_claim(f"b{turn}"), 0))

    assert list(backend.holders()) == []
    assert len(backend._pool._open) == 1
    assert backend._taken == {}


def test_threads_share_the_sessions_and_idle_ones_are_closed(backend, monkeypatch):
    monkeypatch.setattr(lock_session, "IDLE", 0.2)
    barrier = threading.Barrier(6)

    def work(mine):
        barrier.wait(30)
        for _ in range(5):
            with lock(mine):
                pass

    backend.close()
    with contextlib.ExitStack() as stack:
        for place in range(6):
            stack.enter_context(running(work, f"a{place}"))
    assert len(backend._pool._open) <= 9

    until(lambda: not backend._pool._open)
    until(lambda: backend._pool._tidy_above < math.inf)  # who closes them has ended
    with lock("a"):
        pass
    until(lambda: not backend._pool._open)


def test_a_session_that_is_just_looked_at_for_its_idle_time_is_closed_with_the_others(
    backend, monkeypatch
):
    looks, closed = threading.Event(), threading.Event()
    monkeypatch.setattr(
        lock_session, "monotonic", lambda: looks.set() or closed.wait(DEADLINE) and monotonic()
    )
    backend.ping()
    assert looks.wait(DEADLINE)

    backend.close()

    closed.set()
    assert not backend._pool._open


def test_a_session_that_comes_back_just_as_none_was_left_to_be_closed_is_closed(
    backend, monkeypatch
):
    class Idle(deque):
        def __getitem__(self, at):
            try:
                return super().__getitem__(at)
            except IndexError:
                while lent:
                    backend._pool.give_back(lent.pop())
                raise

    lent = [backend._pool.lend()]
    monkeypatch.setattr(lock_session, "IDLE", 0)
    monkeypatch.setattr(backend._pool, "_idle", Idle())
    backend.ping()

    until(lambda: not (lent or backend._pool._open))


def test_a_process_that_ends_says_goodbye_on_its_own_sessions(backend):
    session = backend._pool.lend()

    pool._close_all([session], os.getppid())
    assert session.ask("SELECT 1") == [(1,)]

    pool._close_all([session], os.getpid())
    with pytest.raises((ServerError, ReplyTimeout)):
        session.ask("SELECT 1")


def test_nothing_stays_on_a_persistent_connection_of_django(monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", None)
    with transaction.atomic():
        with lock("a", release="now"), connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        assert free("a")


def test_a_broken_transaction_of_the_caller_does_not_matter():
    from django.db import DatabaseError

    with contextlib.suppress(DatabaseError), transaction.atomic():
        hold = lock("a", release="now").acquire()
        with contextlib.suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT nonsense")
        hold.release()
        assert free("a")
        raise DatabaseError


@pytest.mark.parametrize("at_exit", ["exit", "_exit"])
def test_the_locks_of_a_parent_survive_its_child(backend, processes, at_exit):
    worker = processes.start(
        "tests.server_lock_workers:outlive_a_child", using=ALIAS, at_exit=at_exit
    )
    said = worker.read()

    assert said["child"] == "['LockLost', 'NotHeld', False]"
    assert said["status"] == 0
    assert not free("forked")
    (holding,) = lock("forked").holders()
    assert holding.version.startswith(f"{said['number']}-")
    worker.tell("go on")
    assert worker.result() is False
    assert free("forked")


# What people see and do.


def test_locks_that_are_released_while_they_are_listed_are_shown(backend):
    grants = [backend.acquire(a_claim(name), 0) for name in ("a", "b")]

    listed = backend.holders()
    found = [next(listed)]
    for grant in grants:
        assert backend.release(grant)
    found += listed

    assert {holding.key for holding in found} == {key_of("a"), key_of("b")}


def test_the_holder_in_another_process_is_shown_and_cleared(processes):
    worker = processes.start(
        "tests.server_lock_workers:hold_until_told", name="far", using=ALIAS, ttl=30
    )
    fence = worker.read()

    (holding,) = lock("far").holders()
    assert holding.key == key_of("far")
    assert lock("far").locked()
    number, _, tag = holding.version.partition("-")
    assert has_version(holding, f"{number}-")  # as from a process to which the server showed no tag
    assert not (tag and has_version(holding, f"{number}-{tag[::-1]}0"))
    assert lock("far").clear(if_version=f"9{holding.version}") == 0
    assert lock("far").clear(if_version=holding.version) == 1

    with lock("far") as hold:
        assert hold.fence > fence
    worker.tell("well?")
    assert worker.read(within=30) is True


def test_a_lock_that_was_cleared_is_free_at_once(backend):
    held, other = backend.acquire(a_claim("a"), 0), type(backend)(alias="other")

    assert other.clear(held.claim.key) == 1

    after = backend.acquire(a_claim("a"), 0)
    assert backend.release(held) is False
    assert backend.release(after) is True
    other.close()


def test_who_waits_is_counted(backend):
    with held_elsewhere("a", using=ALIAS), running(lambda: lock("a", wait=30).acquire().release()):
        until(lambda: waiters("a") == 1)
        (holding,) = [one for one in backend.holders() if one.key == key_of("a")]
        assert holding.held_for >= 0
        backend.clear(holding.key)


def test_a_server_that_is_down_is_an_error_and_a_message_of_the_check(proxy):
    proxy.close()

    with pytest.raises(BackendError):
        lock("a", using="proxied").acquire()

    (message,) = registry["proxied"].backend.check(ask=True)
    assert message.id == "distlock_app.E031"


def test_the_check_finds_nothing_wrong_here(backend):
    assert backend.check() == []
    assert not backend._pool._open  # it asked nobody
    assert backend.check(ask=True) == []


def test_the_wrong_database_is_refused(settings):
    other = next(engine for _, engine in settings.SERVER_LOCKS.values() if engine != ENGINE)
    settings.DISTLOCK = {"default": {"BACKEND": other}}

    with pytest.raises(Exception, match="requires"):
        Lock("a")


def test_a_stable_owner_is_refused():
    with pytest.raises(ValueError, match="owner="):
        lock("a", owner="me")


def test_busy_is_busy():
    with held_elsewhere("a", using=ALIAS), pytest.raises(LockBusy):
        lock("a").acquire(wait=0)


# Many processes.

REQUESTS = {
    "mysql": "SHOW GLOBAL STATUS LIKE 'Questions'",
    "postgresql": "SELECT '', sum(xact_commit + xact_rollback) FROM pg_stat_database",
}


def requests_so_far():
    with connections["own"].cursor() as cursor:
        cursor.execute(REQUESTS[connection.vendor])
        return int(cursor.fetchone()[1])


@pytest.mark.slow
def test_16_processes_take_turns_with_two_requests_each(own_server, processes):
    variable = f"DISTLOCK_TEST_{settings.ENGINE.upper()}_URL"
    url = own_server.url.rpartition("/")[0] + "/" + connections["own"].settings_dict["NAME"]
    before = requests_so_far()
    waits = processes.run(
        "tests.lock_workers:contend",
        count=16,
        env={variable: url, "DISTLOCK_TEST_DB_NAME": ""},
        name="contended",
        using=ALIAS,
        seconds=8,
    )
    connections["own"].close()
    time.sleep(1.5)  # PostgreSQL's counters come late
    sent = requests_so_far() - before

    # The first and last second do not count: processes come and go then.
    begin = max(one[0][0] for one in waits) + 1
    end = min(one[-1][1] for one in waits) - 1
    counts = [sum(begin < got < end for _, got in one) for one in waits]
    each = sent / sum(len(one) for one in waits)
    print(f"{each:.2f} requests each, {min(counts)} to {max(counts)} acquisitions")
    # Connecting takes some of its own, 16 times.
    assert each <= 2.1 + 16 * 10 / sum(len(one) for one in waits)
    # Within 1.1 on an idle machine; a busy one keeps a process from asking again.
    assert max(counts) <= 1.25 * min(counts) + 2
