"""The suite that every backend must pass: `LockBackendContract`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import sleep
from unittest import SkipTest

from ..backends.base import BaseLockBackend
from ..claims import Busy, Grant
from ..primitives.timing import monotonic
from .claims import Waiter, a_claim
from .faults import FaultContract
from .inspection import InspectionContract
from .processes import ProcessContract
from .sharing import SharingContract
from .suite import FLAGS, ROUNDING, lacking

# Names that backends have folded, cut, quoted or taken for something else; all are different.
NASTY_NAMES = [
    *("job", "JOB", "Job", "jób", "jo\u0301b", "job ", " job", "job\t", "job\n", "job\r\n"),
    *("job\x00", "job\x00x", "\x00job", "\x00", " ", "  ", "\t", "{job}", "{job", "job}", "{}"),
    *("{}job", "{job}{x}", "lock:job", "lock:lock:job", ":job", "job:", "*", "job*", "?", "[a-z]"),
    *("job'", 'job"', "job`", "job;--", "%s", "%(name)s", "\\", "job\\", "../job", "/job", "job/"),
    *("<script>alert(1)</script>", "&lt;", "ﬁ", "fi", "ß", "ss", "İ", "i", "ı"),
    *("K", "\u212a", "ｊｏｂ"),
    *("עבודה", "\u202ejob", "job\u200b", "작업", "🔒", "🔒" * 40, "\ud800", "None", "0", "-1"),
    *("x" * 64, "x" * 65, "x" * 192, "x" * 193, "x" * 255, "x" * 256, "x" * 10_000),
    *("x" * 9_999 + "y", "y" + "x" * 9_999),
]


class LockBackendContract(SharingContract, FaultContract, ProcessContract, InspectionContract):
    """The promises of a backend: subclass it, name an alias of DISTLOCK, run it with pytest.

        class TestMyBackend(LockBackendContract):
            alias = "mine"

    A test is skipped if a flag of the backend says that it cannot do this. Two more promises are
    tested if the class has `broken()` and `lose_data()`: only its author can break the server.
    """

    def test_it_has_the_methods_that_its_flags_promise(self) -> None:
        missing = lacking(self.backend)

        assert not missing, f"{', '.join(missing)}: write it, or set the flag to False"

    def test_its_flags_say_yes_or_no(self) -> None:
        flags = {flag: getattr(self.backend, flag) for flag in FLAGS}

        odd = [f"{flag} = {value!r}" for flag, value in flags.items() if value not in (True, False)]
        assert not odd, (
            f"{', '.join(odd)}: a flag is True or False; give your attribute another name"
        )

    def test_a_free_lock_is_granted(self) -> None:
        claim = a_claim(self.name())

        grant = self.backend.acquire(claim, 0)

        assert isinstance(grant, Grant)
        assert grant.claim == claim
        fenced = isinstance(grant.fence, int)
        assert fenced is self.backend.fences, "a fence, a whole number, if `fences` is set"
        assert (grant.asked_at or 0) <= monotonic(), "asked_at: monotonic(), before the lease began"
        assert (grant.ttl or 0) <= claim.ttl, "a ttl of the grant's own may only be less"
        assert self.backend.release(grant) is True

    def test_a_held_lock_is_refused_to_another_owner(self) -> None:
        name = self.name()
        grant = self.take(name)

        refusal = self.take(name)

        assert not refusal
        if isinstance(refusal, Busy) and refusal.free_in is not None:
            ttl = grant.claim.ttl
            assert ttl / 2 < refusal.free_in < 2 * ttl, "seconds until the claim in the way ends"
        self.backend.release(grant)

    def test_the_same_owner_is_granted_again_with_the_same_fence(self) -> None:
        claim = a_claim(self.name())
        first = self.backend.acquire(claim, 0)

        second = self.backend.acquire(claim, 0)

        assert second
        assert second.fence == first.fence
        assert self.backend.release(second) is True
        assert self.take(claim.name)

    def test_release_spares_the_next_owner(self) -> None:
        name = self.name()
        first = self.taken_away(name)
        second = self.take(name)

        assert self.backend.release(first) is False
        assert not self.take(name)
        assert self.backend.release(second) is True

    def taken_away(self, name: str) -> Grant:
        """Return a grant whose claim is over, without a release."""
        if self.backend.lists:
            grant: Grant = self.take(name)
            self.backend.clear(grant.claim.key)
            return grant
        self.needs("expires")
        grant = self.take(name, ttl=0.1)
        self.backend.release(self.eventually(lambda: self.take(name)))
        return grant

    def test_release_says_once_that_it_was_ours(self) -> None:
        grant = self.take(self.name())

        assert self.backend.release(grant) is True
        assert self.backend.release(grant) is False

    def test_release_of_what_was_never_granted_is_harmless(self) -> None:
        name = self.name()
        held = self.take(name)

        assert self.backend.release(Grant(a_claim(name))) is False
        assert self.backend.release(Grant(a_claim(self.name()))) is False
        assert self.backend.release(held) is True

    def test_extend_is_refused_to_a_stranger_and_after_the_end(self) -> None:
        name = self.name()
        grant = self.take(name)

        assert self.backend.extend(Grant(a_claim(name)), 30) is False
        assert self.backend.extend(grant, 30) is True
        self.backend.release(grant)
        assert self.backend.extend(grant, 30) is False

    def test_extend_never_revives_what_another_owner_took(self) -> None:
        name = self.name()
        first = self.taken_away(name)
        second = self.take(name)

        assert self.backend.extend(first, 30) is False
        answers = self.backend.extend_many([(first, 30), (second, 30)])
        # A backend with a heartbeat asks only when it has to.
        kept = True if self.backend.heartbeat is None else None
        assert answers in ([False, True], [False, kept])

    def test_an_expired_claim_goes_to_the_next_owner(self) -> None:
        self.needs("expires")
        name = self.name()
        first = self.take(name, ttl=0.3)

        second = self.eventually(lambda: self.take(name))

        assert self.backend.release(first) is False
        assert self.backend.release(second) is True

    def test_a_claim_without_expiry_outlasts_its_ttl(self) -> None:
        if self.backend.expires:
            raise SkipTest("its claims end after their ttl")
        grant = self.take(self.name(), ttl=0.3)
        sleep(0.5)

        assert not self.take(grant.claim.name), "it ended after its ttl: leave `expires` True"
        assert self.backend.release(grant) is True

    def test_a_claim_is_kept_for_its_whole_ttl(self) -> None:
        self.needs("expires")
        name = self.name()
        asked_at = monotonic()  # this process may sleep between the grant and its next step
        self.take(name, ttl=0.5)

        self.eventually(lambda: self.take(name))

        assert monotonic() - asked_at >= 0.5 - ROUNDING

    def test_extend_prolongs_and_never_shortens(self) -> None:
        self.needs("expires")
        name = self.name()
        grant, one_of_many = self.take(name, ttl=2), self.take(self.name(), ttl=2)

        assert self.backend.extend_many([(one_of_many, 30)]) == [True]
        assert self.backend.extend(grant, 30) is True
        assert self.backend.extend(grant, 0.2) is True
        assert self.backend.extend_many([(grant, 0.2)]) == [True]
        sleep(2.2)

        assert not self.take(one_of_many.claim.name), "extend_many() did not prolong it"
        assert not self.take(name)
        assert self.backend.release(grant) is True

    def test_an_extended_claim_ends_too(self) -> None:
        self.needs("expires")
        grant = self.take(self.name(), ttl=2)
        assert self.backend.extend(grant, 2.1) is True

        assert self.eventually(lambda: self.take(grant.claim.name))

    def test_end_in_lets_a_claim_end_later_or_sooner(self) -> None:
        self.needs("expires", "lists")
        if type(self.backend).end_in is BaseLockBackend.end_in:
            raise SkipTest("what is left to it lasts for the rest of its ttl")
        grant = self.take(self.name(), ttl=5)
        key, other = grant.claim.key, a_claim(grant.claim.name)

        assert self.backend.end_in(Grant(other), 0.1) is False
        assert self.backend.end_in(grant, 60) is True
        (later,) = self.backend.holders(key)
        assert later.expires_in > 50
        asked_at = monotonic()
        assert self.backend.end_in(grant, 0.5) is True
        sooner = list(self.backend.holders(key))
        assert all(held.expires_in < 5 and held.fence == later.fence for held in sooner)
        self.eventually(lambda: self.backend.acquire(other, 0))
        assert monotonic() - asked_at >= 0.5 - ROUNDING
        assert self.backend.end_in(grant, 30) is False

    def test_several_are_acquired_in_one_step_or_none(self) -> None:
        free, held = self.name(), self.name()
        grants = self.backend.acquire_all([a_claim(free), a_claim(self.name())])
        if grants is None:
            raise SkipTest("it takes one after the other")
        assert len(grants) == 2 and all(grants) and not self.take(free)
        assert [self.backend.release(grant) for grant in grants] == [True, True]

        assert self.take(held)
        refusal = self.backend.acquire_all([a_claim(free), a_claim(held)])
        assert refusal is None, "one of them is held: None"
        assert self.take(free), "one of them was held, so none may be taken"

    def test_fences_grow_with_every_owner(self) -> None:
        self.needs("fences")
        name = self.name()
        fences = []
        for end in ("release", "clear", "release", "clear", "release"):
            grant = self.take(name)
            fences.append(grant.fence)
            if end == "release" or not self.backend.lists:
                self.backend.release(grant)
            else:
                self.backend.clear(grant.claim.key)

        assert fences == sorted(set(fences))

    def test_different_names_are_different_locks(self) -> None:
        assert len(set(NASTY_NAMES)) == len(NASTY_NAMES)
        grants = [self.take(name) for name in NASTY_NAMES]
        try:
            assert all(grants)
            assert not any(self.take(name) for name in NASTY_NAMES)
        finally:
            released = [self.backend.release(grant) for grant in grants if grant]
        assert all(released)

    def test_the_last_try_leaves_no_place_in_a_queue(self) -> None:
        name = self.name()
        holder = self.take(name)
        waiter = a_claim(name, wake=lambda grant: None)
        assert self.backend.blocks or not self.backend.acquire(waiter, 5)
        self.backend.acquire(waiter, 0)

        self.backend.release(holder)

        assert self.take(name)

    def test_a_waiter_that_withdraws_leaves_the_queue_and_a_holder_keeps_its_lock(self) -> None:
        self.needs("expires")  # else no owner has several claims
        if self.backend.blocks:
            raise SkipTest("it waits on its server, within acquire()")
        name = self.name()
        holder = self.take(name)
        first, second = (Waiter(self.backend, name, fair=True, stable=True) for _ in range(2))
        self.backend.withdraw(first.claim)
        waiting = self.backend.queue(holder.claim.key)
        assert waiting is None or len(waiting) == 1

        self.backend.release(holder)

        grant = second.granted()
        self.backend.withdraw(grant.claim)
        assert self.backend.extend(grant, 30) is True
        self.backend.release(grant)

    def test_one_of_many_threads_has_it_at_a_time(self) -> None:
        name, counter, pool = self.name(), [0], ThreadPoolExecutor(4)

        counts = [pool.submit(self.count_to_ten, counter, name) for _ in range(4)]

        assert [count.exception(90) for count in counts] == [None] * 4
        assert counter == [40]
        pool.shutdown()

    def test_the_server_answers(self) -> None:
        self.backend.ping()

    def test_a_closed_engine_may_be_used_again(self) -> None:
        grant = self.take(self.name())
        self.backend.close()

        again = self.take(self.name())

        assert again
        self.backend.release(again)
        if self.backend.expires:
            self.backend.release(grant)
