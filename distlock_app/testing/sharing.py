"""The part of the backends' suite about shared locks, permits, queues and latches."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from time import sleep
from typing import Any
from unittest import SkipTest

from ..claims import Grant
from ..core.latch import Latch
from ..primitives.timing import monotonic
from .claims import Waiter, a_claim
from .suite import ROUNDING, Suite

WRITER: dict[str, Any] = {}
READER: dict[str, Any] = {"shared": True}
PERMIT: dict[str, Any] = {"limit": 2}


class SharingContract(Suite):
    """The promises of a backend whose flags say that it can do this; see LockBackendContract."""

    def kinds(self) -> list[dict[str, Any]]:
        """Return the kinds of claims of which several can hold a lock at this backend."""
        if not self.backend.limits:
            self.needs("shares")
        return [READER] * bool(self.backend.shares) + [PERMIT] * bool(self.backend.limits)

    def each_kind(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield each of these kinds, with the name of a lock for it."""
        return ((kind, self.name()) for kind in self.kinds())

    def needs_a_queue(self) -> None:
        """Skip the test for a backend whose tries leave no place in a queue."""
        self.needs("queues")
        if self.backend.blocks:
            raise SkipTest("it waits on its server")

    def test_readers_hold_it_together_and_a_writer_alone(self) -> None:
        self.needs("shares")
        name = self.name()
        readers = [self.take(name, **READER) for _ in range(3)]

        assert all(readers)
        for reader in readers:
            assert not self.take(name)
            assert self.backend.release(reader) is True
        writer = self.take(name)
        assert writer
        assert not self.take(name, **READER)
        assert self.backend.release(writer) is True
        assert self.take(name, **READER)

    def test_so_many_hold_a_permit_as_the_limit_says(self) -> None:
        self.needs("limits")
        name = self.name()
        permits = [self.take(name, limit=3) for _ in range(3)]

        assert all(permits)
        assert not self.take(name, limit=3)
        assert self.backend.release(permits[1]) is True
        assert self.take(name, limit=3)
        assert not self.take(name, limit=3)

    def test_each_claim_counts_all_permits_against_its_own_limit(self) -> None:
        self.needs("limits")
        name = self.name()
        assert self.take(name, limit=2)
        assert self.take(name, limit=2)

        assert not self.take(name, limit=2)
        assert self.take(name, limit=3)
        assert not self.take(name, limit=3)

    def test_writers_readers_and_permits_exclude_each_other(self) -> None:
        kinds = [WRITER, *self.kinds()]
        for first in kinds:
            for second in kinds:
                if first == second != WRITER:
                    continue
                name = self.name()
                held = self.take(name, **first)

                assert not self.take(name, **second), (first, second)
                self.backend.release(held)
                assert self.take(name, **second), (first, second)

    def test_each_of_several_holders_has_its_own_claim(self) -> None:
        for kind, name in self.each_kind():
            claims = [a_claim(name, **kind) for _ in range(2)]
            first, second = [self.backend.acquire(claim, 0) for claim in claims]

            again = self.backend.acquire(claims[0], 0)
            assert again and again.fence == first.fence
            if self.backend.fences:
                assert first.fence < second.fence
            assert self.backend.release(Grant(a_claim(name, **kind))) is False
            assert self.backend.release(first) is True
            assert self.backend.release(first) is False
            assert self.backend.extend(first, 30) is False
            assert self.backend.extend(second, 30) is True
            assert not self.take(name)
            assert self.backend.release(second) is True
            assert self.take(name)

    def test_the_claim_of_one_of_several_holders_expires_alone(self) -> None:
        self.needs("expires")
        for kind, name in self.each_kind():
            kept = self.take(name, **kind)
            dead = self.take(name, ttl=0.3, **kind)

            if kind is PERMIT:
                self.eventually(lambda n=name: self.take(n, **PERMIT))
            else:
                sleep(0.4)

            assert self.backend.extend(dead, 30) is False
            assert self.backend.release(dead) is False
            assert not self.take(name)
            assert self.backend.extend(kept, 30) is True

    def test_the_claim_of_one_of_several_holders_may_end_sooner(self) -> None:
        self.needs("expires", "lists")
        for kind, name in self.each_kind():
            kept, left = self.take(name, ttl=60, **kind), self.take(name, ttl=60, **kind)

            assert self.backend.end_in(left, 0.1) is True

            holders = partial(self.backend.holders, kept.claim.key)
            self.eventually(lambda h=holders: len(list(h())) == 1)
            assert self.backend.extend(left, 60) is False
            assert self.backend.extend(kept, 60) is True

    def test_the_last_of_several_holders_to_expire_frees_it(self) -> None:
        self.needs("expires")
        for kind, name in self.each_kind():
            asked_at = monotonic()
            self.take(name, ttl=0.5, **kind)
            self.take(name, ttl=0.1, **kind)

            self.eventually(lambda n=name: self.take(n))

            assert monotonic() - asked_at >= 0.5 - ROUNDING

    def test_holders_list_each_of_several_and_clear_takes_one_away(self) -> None:
        self.needs("lists")
        for kind, name in self.each_kind():
            first, second = self.take(name, **kind), self.take(name, **kind)
            key = first.claim.key
            what = "shared" if kind is READER else "permit"

            held = list(self.backend.holders(key))

            assert [(h.name, h.kind) for h in held] == [(name, what)] * 2
            assert len({h.version for h in held}) == 2
            assert {h.fence for h in held} == {first.fence, second.fence}
            assert [h.key for h in self.backend.holders()].count(key) == 2
            if self.backend.fences:
                [version] = [h.version for h in held if h.fence == first.fence]
                assert self.backend.clear(key, version) == 1
                assert self.backend.clear(key, version) == 0
                assert self.backend.extend(first, 30) is False
                assert self.backend.extend(second, 30) is True
                assert self.take(name, **kind).fence > second.fence
                assert self.backend.clear(key) == 2
                assert self.take(name)

    def test_waiters_are_served_in_order_of_arrival(self) -> None:
        self.needs_a_queue()
        name = self.name()
        grant = self.take(name)
        waiters = [Waiter(self.backend, name, fair=True) for _ in range(4)]

        while waiters:
            first, *waiters = waiters
            self.backend.release(grant)
            for other in reversed(waiters):
                assert other.waits(), "it overtook one who came before"
            grant = first.granted()

    def test_nobody_overtakes_a_waiter_of_another_kind(self) -> None:
        self.needs_a_queue()
        for kind, name in self.each_kind():
            held = self.take(name, **kind)
            writer = Waiter(self.backend, name)
            late = Waiter(self.backend, name, **kind)

            assert not self.take(name, **kind)
            assert late.waits()
            self.backend.release(held)
            grant = writer.granted()
            assert late.waits()
            self.backend.release(grant)
            assert late.granted()

    def test_all_who_fit_are_let_in_at_once_in_order_of_arrival(self) -> None:
        self.needs_a_queue()
        for kind, name in self.each_kind():
            writer = self.take(name)
            first, second = (Waiter(self.backend, name, **kind) for _ in range(2))
            behind = Waiter(self.backend, name)

            self.backend.release(writer)

            grants = [first.granted(), second.granted()]
            assert behind.waits()
            if self.backend.fences:
                assert (grants[0].fence or 0) < (grants[1].fence or 0)
            for grant in grants:
                assert behind.waits()
                self.backend.release(grant)
            assert behind.granted()

    def test_a_waiter_who_leaves_lets_those_behind_in(self) -> None:
        self.needs_a_queue()
        for kind in self.kinds():
            for by_release in (True, False):
                name = self.name()
                assert self.take(name, **kind)
                writer = Waiter(self.backend, name)
                behind = Waiter(self.backend, name, **kind)

                if by_release:
                    self.backend.release(Grant(writer.claim))
                else:
                    assert not self.backend.acquire(writer.claim, 0)

                assert behind.granted()

    def test_waiters_of_all_kinds_are_served_in_order_of_arrival(self) -> None:
        self.needs_a_queue()
        name = self.name()
        grant = self.take(name)
        kinds = [WRITER, *self.kinds()] * 3
        waiters = [Waiter(self.backend, name, fair=True, **kind) for kind in kinds]

        fences = []
        for waiter in waiters:
            self.backend.release(grant)
            grant = waiter.granted()
            fences.append(grant.fence or 0)

        if self.backend.fences:
            assert all(one < next_one for one, next_one in pairwise(fences))

    def test_a_latch_opens_when_all_have_counted_down(self) -> None:
        self.needs("latches")
        latch, pool = Latch(self.name(), 3, ttl=30, using=self.alias), ThreadPoolExecutor(3)

        assert (latch.left(), latch.wait(0)) == (3, False)
        waits = [pool.submit(latch.wait, 30) for _ in range(3)]
        assert latch.count_down(by="a") == 2
        assert latch.count_down(by="a") == 2
        assert latch.count_down() == 1
        assert not latch.wait(0.05)
        assert not any(wait.done() for wait in waits)
        started = monotonic()
        assert latch.count_down() == 0

        assert [wait.result(30) for wait in waits] == [True] * 3
        assert monotonic() - started < 20
        assert (latch.count_down(), latch.left(), latch.wait(0)) == (0, 0, True)
        pool.shutdown()

    def test_a_latch_and_a_lock_of_one_name_have_nothing_in_common(self) -> None:
        self.needs("latches")
        name = self.name()
        latch = Latch(name, 1, ttl=30, using=self.alias)
        assert self.take(name)

        assert latch.count_down() == 0
        assert latch.wait(0) is True
        assert not self.take(name)

    def test_what_a_latch_counted_is_forgotten_after_its_ttl(self) -> None:
        self.needs("latches")
        latch = Latch(self.name(), 2, ttl=0.3, using=self.alias)
        latch.count_down()

        self.eventually(lambda: latch.left() == 2)

        assert latch.count_down() == 1
