"""Random programs of nested locks, holds and transactions: each `with` keeps what it promises."""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace

import pytest
from django.db import connection, transaction

from distlock_app import Lock, LockError, all_of, current_hold
from distlock_app.core import entered
from distlock_app.core.releasing import releaser
from distlock_app.core.renewal import renewer
from distlock_app.primitives import identity
from distlock_app.testing import held_elsewhere, lose
from tests import engines
from tests.engines import running, until

pytestmark = pytest.mark.django_db(transaction=True)
engine = pytest.fixture(engines.install)

KEPT = 600  # seconds of at_least: much longer than a program takes
OPTIONS = [{}, {}, {}, {"release": "now"}, {"at_least": KEPT}, {"reentrant": False}]
# Each as often as it is taken.
STEPS = """
lock lock lock lock atomic atomic atomic atomic group group catch catch elsewhere callback enter
acquire acquire release release release hand_over lose leave stop
""".split()


class Stop(Exception):
    pass


class Program:
    """Takes random steps. At the end of each block it compares what is with what was promised."""

    def __init__(self, seed, engine):
        self.random, self.engine = random.Random(seed), engine
        self.steps = self.random.choice([5, 10, 20, 40])
        self.holds = []  # without a `with`
        self.for_commit = []  # those that ended in the open transaction
        self.kept, self.lost = set(), set()  # names

    def run(self, depth=5):
        for _ in range(self.random.choice([1, 2, 3, 4])):
            self.steps -= 1
            for lease in [*identity.current_runner().held.values()]:
                releaser.drain(lease)  # after a rollback
            if self.steps >= 0 and depth:
                with suppress(LockError) if self.random.random() < 0.7 else nullcontext():
                    getattr(self, self.random.choice(STEPS))(depth - 1)

    def a_lock(self):
        name = self.random.choice("aaaabbc")
        return Lock(name, wait=0, ttl=2 * KEPT, **self.random.choice(OPTIONS))

    def a_hold(self):
        if not self.holds:
            self.holds.append(Lock("d").acquire())
        return self.random.choice(self.holds)

    def held(self):
        return {holding.fence for holding in self.engine.holders()}

    @contextmanager
    def promising(self, lock, hold):
        """Compare at the end of the `with`, and note what it promises from there on."""
        broken_off = False
        try:
            yield
        except KeyboardInterrupt:
            broken_off = True
            raise
        finally:
            if not (hold.released or hold.lost):
                assert hold.fence in self.held()
                assert current_hold(hold.name).fence == hold.fence
                if lock.release != "now" and connection.in_atomic_block:
                    self.for_commit.append(hold)
                if lock.at_least and not broken_off:
                    self.kept.add(hold.name)

    @contextmanager
    def committing(self, outermost):
        """Compare at the end of a transaction; add the holds to the list that must prevent it."""
        lost = []
        try:
            yield lost
            if outermost:
                lost += [hold for hold in self.for_commit if hold.lost]
                assert {hold.fence for hold in self.for_commit if hold not in lost} <= self.held()
        finally:
            self.for_commit = [] if outermost else self.for_commit

    @contextmanager
    def not_masked(self, block):
        raised = []
        try:
            with block as hold:
                try:
                    yield hold
                except BaseException as error:
                    raised.append(error)
                    raise
        except BaseException as error:
            assert raised in ([], [error])
            raise

    def lock(self, depth):
        atomic = not connection.in_atomic_block and self.random.random() < 0.3
        lock = replace(self.a_lock(), atomic=atomic)
        with self.not_masked(lock) as hold, self.committing(atomic) as lost:
            with self.promising(lock, hold):
                self.run(depth)
        assert not lost, "committed"

    def group(self, depth):
        one, other = self.a_lock(), self.a_lock()
        with self.not_masked(all_of(one, other)) as holds:
            with self.promising(one, holds[0]), self.promising(other, holds[1]):
                self.run(depth)

    def atomic(self, depth):
        outermost = not connection.in_atomic_block
        with transaction.atomic(), self.committing(outermost) as lost:
            self.run(depth)
        assert not lost, "committed"

    def callback(self, depth):
        transaction.on_commit(lambda: self.catch(depth))

    def catch(self, depth):
        with suppress(Stop, KeyboardInterrupt):
            self.run(depth)

    def stop(self, depth):
        raise self.random.choice([Stop, KeyboardInterrupt])

    def elsewhere(self, depth):
        name = self.random.choice("abc")
        with nullcontext() if Lock(name).locked() else held_elsewhere(name, ttl=KEPT):
            self.run(depth)

    def acquire(self, depth):
        self.holds.append(replace(self.a_lock(), at_least=0).acquire())

    def enter(self, depth):
        with self.not_masked(self.a_hold()):
            self.run(depth)

    def release(self, depth):
        with nullcontext() if self.random.random() < 0.7 else running(self.a_hold().release):
            self.a_hold().release()

    def hand_over(self, depth):
        self.holds.append(Lock.resume(self.a_hold().dump()))

    def leave(self, depth):
        hold = self.a_hold()
        hold.leave_for(KEPT)
        self.kept.add(hold.name)

    def lose(self, depth):
        hold = self.a_hold()
        self.lost.add(hold.name)
        lose(hold)


def held_of(engine):
    """Return the leases of this backend alone: other tests may have left some of theirs."""
    return [lease for lease in renewer.held() if lease.backend is engine]


@pytest.mark.parametrize("hundred", range(8))
def test_whatever_is_composed_each_promise_is_kept(engine, hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        program = Program(seed, engine)
        with suppress(Stop, KeyboardInterrupt, LockError):
            program.run()
        for hold in program.holds:
            with suppress(LockError):
                hold.release()

        until(lambda: not (held_of(engine) or identity.current_runner().held))
        left = {holding.name: holding.expires_in for holding in engine.holders()}
        assert left.keys() - program.lost == program.kept - program.lost, seed
        assert all(KEPT / 2 < seconds <= KEPT for seconds in left.values()), seed
        assert not (entered._by_frame or connection.in_atomic_block), seed
        for name in left:
            Lock(name).clear()
