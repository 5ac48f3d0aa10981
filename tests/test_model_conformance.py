"""The models do what the real servers do: each step of theirs, compared with the real statement."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from distlock_app.backends.database import DatabaseBackend, sql
from distlock_app.backends.redis.scripts import LUA, lua
from distlock_app.claims import Grant
from distlock_app.models import DistLock
from distlock_app.primitives.names import key_of
from distlock_app.testing.claims import a_claim
from tests.engines import until
from tests.model.explore import NAMES
from tests.model.lock_table import FREE, NO_ROW, LockTable
from tests.model.redis_handover import FIRST, NOBODY, SENDS, RedisHandover

pytest_plugins = ["tests.redis_fixtures"]

TTL_MS, FIRST_MS = 100_000, 3_000
HANDOVER = 1_000  # seconds: an expired row is taken long before a free one is open to all
FAR = 1_000_000_000  # microseconds, further than a test can take


def reachable(model):
    """Yield every state."""
    seen = {model.start()}
    states = deque(seen)
    while states:
        yield (state := states.popleft())
        for step in model.steps(state):
            after = model.normal(step.after)
            if after not in seen:
                seen.add(after)
                states.append(after)


def executed(model, state, i):
    """Return the state after the server has executed what process `i` has sent; None: nothing."""
    name, at = NAMES[i], state.processes[i].at
    labels = f"{name}: {at} ->", f"{name}: the release is committed"
    return next((s.after for s in model.steps(state) if s.label.startswith(labels)), None)


class OnRedis:
    """One lock on a real server, put into the states of the model."""

    def __init__(self, server, backend, prefix):
        self.server, self.keys = server, backend._keys(key_of("k"))
        self.live, self.dead = f"{prefix}:live", f"{prefix}:dead"
        self.acquire = server.register_script(lua(LUA / "acquire.lua"))
        self.release = server.register_script(lua(LUA / "release.lua"))

    def channel(self, process):
        return self.live if process.listens in ("subscribed", "yes") else self.dead

    def run(self, state, i):
        """Return owner, milliseconds left, and queue after a script of process `i`."""
        lock, queue, entries, _, _, members = self.keys
        now = self.server.time()[0] * 1_000_000
        pipe = self.server.pipeline(transaction=True)
        pipe.delete(lock, queue, entries, members)
        if state.owner != NOBODY:
            pipe.set(lock, f"token{state.owner} 1 {{}} n", px=TTL_MS // 2)
        for at, waiter in enumerate(state.queue):
            channel = self.channel(state.processes[waiter.process]) if waiter.channel else "-"
            heard = now - FAR if waiter.heard else now + FAR
            pipe.zadd(queue, {f"token{waiter.process}": at})
            pipe.hset(entries, f"token{waiter.process}", f"{heard} {TTL_MS} {channel} 1 {{}} n")
        process = state.processes[i]
        if process.at in ("release", "give back"):
            self.release(self.keys, ["k", f"token{i}"], client=pipe)
        else:
            channel = {"ask": self.channel(process), "last": ""}.get(process.at, "-")
            words = ["k", f"token{i}", 0, TTL_MS, "{} n", channel, 1]
            self.acquire(self.keys, words, client=pipe)
        pipe.get(lock).pttl(lock).zrange(queue, 0, -1)
        *_, held, left, waiting = pipe.execute()
        owner = int(held.split()[0][5:]) if held else NOBODY
        return owner, left, [int(token[5:]) for token in waiting]


@pytest.mark.once
@pytest.mark.parametrize(
    "case", [{"processes": 3}, {"processes": 2, "ttl": 2, "faults": 1}], ids=str
)
def test_the_scripts_do_what_the_model_does(server, backend, prefix, case):
    model, real = RedisHandover(**case), OnRedis(server, backend, prefix)
    expected, done = [], set()

    with server.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe(real.live)
        listener.get_message(timeout=10)
        for state in reachable(model):
            for i, p in enumerate(state.processes):
                listens = tuple(one.listens in ("subscribed", "yes") for one in state.processes)
                situation = i, p.at, state.owner, state.queue, listens
                if p.at not in SENDS or p.fate or situation in done:
                    continue
                done.add(situation)
                after = executed(model, state, i)

                owner, left, queue = real.run(state, i)

                assert owner == after.owner, (state, i)
                assert queue == [waiter.process for waiter in after.queue], (state, i)
                if owner not in (NOBODY, state.owner):
                    assert (left > FIRST_MS) == (after.left > FIRST), (state, i)
                    if owner != i and any(w.channel for w in state.queue if w.process == owner):
                        expected.append(owner)
        heard = []
        while len(heard) < len(expected) and (message := listener.get_message(timeout=10)):
            heard.append(int(message["data"].split()[0][5:]))

    assert len(done) > 30
    assert heard == expected


class OnDatabase:
    """One row and its queue lock on a real server, put into the states of the model."""

    def __init__(self, backend):
        self.sessions, self.claims = backend._sessions, [a_claim("k"), a_claim("k")]
        self.rows = DistLock.objects.using("locks")

    def run(self, state, i, *, frees):
        """Return owner, whether the queue lock is free, and the answer to a statement of `i`.

        `frees`: it is to become free, for which the server may take a moment after a session ends.
        """
        mine, other, third = (self.sessions.lend() for _ in range(3))
        wanted, (verb, _, step) = self.claims[i], state.processes[i].at.partition(" ")
        if connection.vendor == "mysql":
            mine.dialect._known = {wanted.key} if state.fence < 0 else set()
        try:
            self.put(state)
            until(lambda: self.lock(third))  # the sessions before have ended
            third.dialect.unlock(third.cursor)
            if state.line:
                kind = "waiter" if step == "turn" else "holder"
                self.lock(mine if state.line[0] == (i, kind) else other)
            if step == "next":
                answer = mine.dialect.release_to_next(mine.cursor, wanted)
            elif verb == "release":
                answer = mine.dialect.release(mine.cursor, wanted)
            else:
                asked = "try" if step == "turn" else step  # it has the queue lock already
                answer = isinstance(mine.dialect.acquire(mine.cursor, wanted, asked), Grant)
            if verb == "release" and (step != "next" or not answer):
                mine.dialect.unlock(mine.cursor)  # it is closed, which the server notices later
            row = self.rows.filter(key=wanted.key).first()
            if frees:
                until(lambda: self.lock(third))
            return self.owner_of(row), frees or self.lock(third), answer
        finally:
            for session in (mine, other, third):
                session.close()

    def put(self, state):
        """Make the row as the model has it."""
        key = self.claims[0].key
        self.rows.filter(key=key).delete()
        if state.owner != NO_ROW:
            owner = "" if state.owner == FREE else self.claims[state.owner].owner
            ago = timedelta(seconds=100 if owner else 2 * HANDOVER)
            ends = timezone.now() + (ago if state.left else -ago)
            self.rows.create(key=key, name="k", owner=owner, fence=1, expiry=ends, holder="{}")

    def owner_of(self, row):
        if row is None:
            return NO_ROW
        owners = [one.owner for one in self.claims]
        return owners.index(row.owner) if row.owner else FREE

    def lock(self, session):
        """Return whether the queue lock could be taken."""
        queue = session.dialect.queue_of(self.claims[0].key)
        on_mysql = connection.vendor == "mysql"
        wanted = "GET_LOCK(%(queue)s, 0)" if on_mysql else session.dialect.TRY_QUEUE
        session.cursor.execute(f"SELECT {wanted}", {"queue": queue})
        return bool(session.cursor.fetchone()[0])


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no server")
@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
def test_the_statements_do_what_the_model_does(monkeypatch):
    monkeypatch.setattr(sql.statements, "HANDOVER_US", HANDOVER * 1_000_000)
    backend, done = DatabaseBackend(alias="default", location="locks"), set()
    # A longer lease leads to more states, and to the same situations of a statement.
    model = LockTable(mysql=connection.vendor == "mysql", processes=2, ttl=1, faults=1)
    real = OnDatabase(backend)

    for state in reachable(model):
        for i, p in enumerate(state.processes):
            verb, _, step = p.at.partition(" ")
            situation = i, p.at, state.owner, state.left > 0, state.fence, state.line[:1]
            if verb not in ("take", "release") or p.fate or situation in done:
                continue
            if state.commits != FREE:  # the row is locked
                continue
            done.add(situation)
            after = executed(model, state, i)
            while (then := executed(model, after, i)) is not None:  # all that one call does
                after = then

            owner, unlocked, answer = real.run(state, i, frees=after.line == ())

            assert owner == after.owner, (state, i)
            assert unlocked is (after.line == ()), (state, i)
            if verb == "take":
                assert answer is after.processes[i].at.startswith("granted"), (state, i)

    assert len(done) > 30
    backend.close()
