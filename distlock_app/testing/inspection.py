"""The part of the backends' suite about inspection: list, clear and prolong others' claims."""

from __future__ import annotations

from collections.abc import Mapping
from unittest import SkipTest

from ..primitives.names import shown
from .claims import a_claim
from .suite import Suite


class InspectionContract(Suite):
    """The promises of a backend that `lists`, or `prolongs`; see LockBackendContract."""

    def test_people_can_prolong_the_claim_they_see_and_no_other(self) -> None:
        self.needs("prolongs", "lists")
        name = self.name()
        grant = self.take(name, ttl=5)
        held = self.only_holding(grant.claim.key)

        assert self.backend.prolong(grant.claim.key, held.version, 60) is True
        now = self.only_holding(grant.claim.key)
        assert now.expires_in > 50 and now.version == held.version
        assert self.backend.prolong(grant.claim.key, str(held.fence - 1), 60) is False
        assert self.backend.prolong(grant.claim.key, "made up", 60) is False
        assert self.backend.release(grant) is True
        assert self.backend.prolong(grant.claim.key, held.version, 60) is False

    def test_holders_tell_who_holds_it_without_the_token(self) -> None:
        self.needs("lists")
        claim = a_claim(self.name() + "\u202e\0")
        grant = self.backend.acquire(claim, 0)
        other = self.take(self.name())

        holding = self.only_holding(claim.key)

        assert (holding.name, holding.alias) == (shown(claim.name), self.alias)
        assert holding.fence == grant.fence
        assert holding.version == str(grant.fence) or not holding.version.isdecimal()
        assert isinstance(holding.holder, Mapping), "json.loads(claim.holder), not the text"
        assert holding.holder.get("host") == "elsewhere"
        assert holding.expires_in is None or 0 < holding.expires_in <= claim.ttl + 0.01
        assert claim.owner not in repr(holding)
        self.backend.release(grant)
        assert list(self.backend.holders(claim.key)) == []
        self.backend.release(other)

    def test_what_has_expired_is_not_listed(self) -> None:
        self.needs("lists", "expires")
        grant = self.take(self.name(), ttl=0.1)
        key = grant.claim.key

        self.eventually(lambda: not list(self.backend.holders(key)))

        assert key not in {holding.key for holding in self.backend.holders()}

    def test_all_holders_are_listed(self) -> None:
        self.needs("lists")
        grants = [self.take(self.name()) for _ in range(3)]

        listed = {holding.key for holding in self.backend.holders()}

        assert listed >= {grant.claim.key for grant in grants}
        for grant in grants:
            self.backend.release(grant)

    def test_the_queue_says_who_waits_if_the_engine_can_tell(self) -> None:
        name = self.name()
        first = self.take(name)
        if self.backend.queue(first.claim.key) is None:
            raise SkipTest("it does not know its waiters")
        waiter = a_claim(name, wake=lambda grant: None)
        refusal = self.backend.acquire(waiter, 5)

        shown = self.backend.queue(first.claim.key)

        assert not refusal and [who["host"] for who in shown] == ["elsewhere"]
        assert waiter.owner not in repr(shown)
        self.backend.acquire(waiter, 0)
        self.backend.release(first)
        assert self.backend.queue(first.claim.key) == []

    def test_pages_have_every_lock_once_and_tell_how_many_there_are(self) -> None:
        self.needs("lists")
        held = {self.take(self.name()) for _ in range(3)}
        if self.backend.shares:  # one lock, however many hold it
            name = self.name()
            held |= {self.take(name, shared=True) for _ in range(3)}

        ours = {grant.claim.key for grant in held}

        def agree() -> bool:  # what other tests left behind may end meanwhile
            page, total = self.backend.page(0, 10_000)
            parts = [self.backend.page(start, 2) for start in range(0, (total or 0) + 2, 2)]
            keys = sorted(holding.key for holding in page)
            assert ours <= set(keys)
            counts = {total, *(known for _, known in parts)} - {None}
            return counts <= {len(set(keys))} and keys == sorted(
                holding.key for part, _ in parts for holding in part
            )

        self.eventually(agree)
        for grant in held:
            self.backend.release(grant)

    def test_clear_spares_a_lock_that_changed_hands(self) -> None:
        self.needs("lists")
        name = self.name()
        first = self.take(name)
        held = self.only_holding(first.claim.key)
        self.backend.release(first)
        second = self.take(name)

        assert self.backend.clear(first.claim.key, held.version) == 0
        assert self.backend.extend(second, 30) is True
        held = self.only_holding(first.claim.key)
        assert self.backend.clear(first.claim.key, held.version) == 1
        assert self.backend.release(second) is False
        assert self.backend.clear(first.claim.key) == 0
