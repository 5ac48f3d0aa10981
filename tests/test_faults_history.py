"""Faults under load on every engine; and the checker, which has to accuse broken locks."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest

from tests.conftest import missing
from tests.faults.__main__ import start, tables
from tests.faults.broken import BROKEN, SIMPLE
from tests.faults.checker import ASLEEP, HANGS, judge
from tests.faults.engines import ENGINES
from tests.faults.history import Attempt, Fault, History, Recorder, Stop, read
from tests.faults.nemesis import schedule
from tests.processes import Processes

TTL = 1.0
EVERY_FAULT_ONCE = {"seconds": 0.0, "processes": 6, "seed": 1, "keep": ""}
SOME_FAULTS = {"seconds": 7.0, "processes": 5, "seed": 1, "keep": ""}
# What `redis` does not show already; and what it takes to lock for ever, or to starve.
ONLY = {
    "redis-aof": ["crash", "kill", "stop"],
    "sentinel": ["failover", "kill", "stop"],
    "NeverExpires": ["kill"],
    "LosesWakeUps": ["clock"],  # neither stopped nor killed, a waiter is seen to starve
}
# The suite plays each of these on one engine: all of them on all take a third longer.
FOR_LONG_RUNS = {
    "first waiter": "sqlite",
    "freeze": "etcd",
    "sessions exhausted": "redis",
    "disk full": "zookeeper",
}


def history(*attempts, **more):
    """Return a history; without `writes`, each owner wrote once, in their order."""
    held = sorted((a for a in attempts if a.got is not None), key=lambda a: a.got)
    more.setdefault("writes", [(a.name, a.id) for a in held])
    more.setdefault("end", max((a.done or a.got or a.asked for a in attempts), default=0.0))
    return History(ttl=TTL, attempts=list(attempts), **more)


def hold(who, got, over, *, asked=None, **more):
    """Return an attempt that succeeded, and held the lock from `got` to `over`."""
    more = {"over": over, "done": over + 0.01, "answer": "released", "ours": over} | more
    return Attempt(who, 1, "a", got - 0.01 if asked is None else asked, got=got, **more)


def accused(*attempts, **more):
    return judge(history(*attempts, **more)).promises


GOOD = [hold("1", 1.0, 1.5, fence=1), hold("2", 1.51, 2.0, fence=2, asked=0.5)]


def test_a_good_history_is_not_accused():
    verdict = judge(history(*GOOD, faults=[Fault("cut", 1.2, 1.3)]))

    assert verdict.accusations == []
    assert {kind: row.acquisitions for kind, row in verdict.rows.items()} == {"none": 1, "cut": 1}
    assert verdict.rows["cut"].longest_gap == pytest.approx(0.51)


def test_two_at_a_time_are_accused():
    found = judge(history(hold("1", 1.0, 1.5, fence=1), hold("2", 1.4, 2.0, fence=2)))

    assert "one at a time" in found.promises
    assert found.rows["none"].overlaps == 1


def test_the_second_of_two_is_found_behind_many_others():
    many = [hold(f"{n}", 1.02 + n / 100, 1.021 + n / 100, fence=2 + n) for n in range(200)]

    found = judge(history(hold("x", 1.0, 9.0, fence=1), *many))

    assert sum(a.promise == "one at a time" for a in found.accusations) == 200


def test_an_owner_whose_lease_was_over_explains_the_next_one():
    """It was stopped: it asked its hold at 1.1, and again after it went on, when it was lost."""
    stopped = hold("1", 1.0, 4.0, fence=1, ours=1.1, answer="lost")

    found = judge(history(stopped, hold("2", 2.2, 3.0, fence=2)))

    assert found.accusations == []
    assert found.rows["none"].overlaps == 1


@pytest.mark.parametrize(
    ("ours", "explained"),
    [(2.4, True), (3.2, False)],
    ids=["within-one-ttl", "longer-than-one-ttl"],
)
def test_what_an_engine_forgot_explains_two_owners_for_one_ttl(ours, explained):
    crash = Fault("crash", 1.5, 2.0, forgets=True)
    first = hold("1", 1.0, 3.5, fence=1, ours=ours, answer="lost")

    found = accused(first, hold("2", 2.1, 3.4, fence=2), faults=[crash])

    assert ("one at a time" not in found) is explained


def test_an_engine_that_forgot_before_the_lock_was_taken_explains_nothing():
    crash = Fault("crash", 0.1, 0.2, forgets=True)

    found = accused(
        hold("1", 1.0, 1.5, fence=1, answer="lost"), hold("2", 1.4, 2.0, fence=2), faults=[crash]
    )

    assert found == {"one at a time"}


@pytest.mark.parametrize("fence", [1, 2], ids=["smaller", "the-same"])
def test_fences_that_do_not_grow_are_accused(fence):
    assert accused(hold("1", 1.0, 1.5, fence=2), hold("2", 1.6, 2.0, fence=fence)) == {
        "fences grow"
    }


def test_fences_of_waiters_are_compared_too():
    """Both asked before one of them had it: it counts who had it later."""
    waiter = hold("2", 1.6, 2.0, fence=1, asked=0.9)

    assert accused(hold("1", 1.0, 1.5, fence=2), waiter) == {"fences grow"}


def test_a_grant_that_was_heard_late_has_an_older_fence():
    """It was stopped before it looked at its hold, which was lost by then."""
    late = hold("2", 2.2, 2.3, fence=1, asked=0.9, ours=None, answer="lost")

    assert accused(hold("1", 1.0, 2.1, fence=2), late, writes=[]) == set()


def test_a_stale_write_that_the_store_took_is_accused():
    stopped = hold("1", 1.0, 4.0, fence=1, ours=1.1, answer="lost")
    writes = [("a", "1#1"), ("a", "2#1"), ("a", "1#1")]

    found = accused(stopped, hold("2", 2.2, 3.0, fence=2), writes=writes)

    assert found == {"refuses late writers"}


def test_a_release_of_somebody_elses_lock_is_accused():
    stopped = hold("1", 1.0, 2.5, fence=1, ours=1.1, answer="released")

    found = accused(stopped, hold("2", 2.2, 3.0, fence=2))

    assert found == {"releases only its own"}


def test_an_old_master_that_still_knows_the_lock_explains_its_release():
    first = hold("1", 1.0, 2.5, fence=1)

    def found(end):
        failover = Fault("failover", 0.5, end, forgets=True)
        return accused(first, hold("2", 2.2, 3.0, fence=2), faults=[failover])

    assert found(2.1) == set()
    assert found(0.6) == {"one at a time", "releases only its own"}


def test_a_grant_that_was_forgotten_before_it_was_heard_accuses_nobody():
    """Killed sessions: 2 was granted first, 1 next; but 2 heard of it after 1 did."""
    slow = hold("2", 1.3, 1.4, asked=0.5, fence=1, answer="lost")
    after = {"faults": [Fault("killed connections", 0.9, 1.0, forgets=True)]}
    first = hold("1", 1.2, 1.5, fence=2)

    assert accused(first, slow, writes=[("a", "2#1"), ("a", "1#1")], **after) == set()
    assert accused(first, slow, writes=[("a", "2#1"), ("a", "1#1")]) >= {
        "releases only its own",
        "refuses late writers",
    }


def waiter(asked, got, **more):
    return hold("w", got, got + 0.1, asked=asked, wait=60.0, **{"fence": 9, **more})


def test_a_waiter_asleep_on_a_free_lock_is_accused():
    assert accused(*GOOD, waiter(1.9, 2.1 + ASLEEP)) == {"wakes waiters"}
    assert accused(*GOOD, waiter(1.9, 2.0 + ASLEEP)) == set()


def test_a_waiter_who_gave_up_on_a_free_lock_is_accused():
    late = Attempt("w", 1, "a", 1.9, wait=6.0, done=7.9, answer="busy")

    assert accused(*GOOD, late) == {"wakes waiters"}


@pytest.mark.parametrize(
    "excuse",
    [
        {"faults": [Fault("hole", 1.9, 2.0)]},
        {"stops": [Stop("w", 3.0, 4.0)]},
        {
            "stops": [Stop("3", 3.0, 4.0)],
            "more": [Attempt("3", 1, "a", 1.0, done=5, answer="busy")],
        },
        {"kills": {"3": 3.0}, "more": [Attempt("3", 1, "a", 1.0)]},
        {"more": [Attempt("3", 1, "a", 1.0, done=3.0, answer="error")]},
        {"more": [hold("3", 2.1, 4.0, fence=3, answer="unknown")]},
    ],
    ids=["outage", "stopped", "stopped-next", "killed-next", "failed-next", "release-unknown"],
)
def test_a_lock_that_may_have_been_held_excuses_its_waiters(excuse):
    more = excuse.pop("more", [])

    assert accused(*GOOD, *more, waiter(1.9, 2.5 + ASLEEP), **excuse) == set()


def test_a_lock_that_a_dead_owner_keeps_for_longer_than_its_ttl_is_accused():
    dead = dataclasses.replace(GOOD[0], over=None, done=None, answer="")
    after = {"kills": {"1": 1.6}}

    assert accused(dead, waiter(1.1, 1.6 + TTL + 2.9 + ASLEEP), **after) == set()
    assert accused(dead, waiter(1.1, 1.6 + TTL + 3.1 + ASLEEP), **after) == {"wakes waiters"}


def test_a_lock_that_never_came_free_is_accused():
    assert accused(*GOOD, stuck=["a"]) == {"free again"}


def test_a_waiter_whom_the_others_overtake_for_long_is_accused():
    others = [hold("o", 1.0 + n, 1.9 + n, fence=n) for n in range(12)]
    starved = waiter(1.0, 13.1, fence=99)

    assert accused(*others, starved) == {"starves nobody"}
    assert accused(*others, starved, faults=[Fault("hole", 1.0, 2.0)]) == set()


def test_a_wait_that_does_not_end_is_accused():
    late = Attempt("w", 1, "a", 1.0, wait=1.0, done=3.0 + HANGS, answer="busy")

    assert accused(late, faults=[Fault("hole", 1.0, 1.1)]) == {"ends in time", "wakes waiters"}


def test_an_error_without_a_name_is_accused():
    assert accused(*GOOD, surprises=["1.0: KeyError('x')"]) == {"clear errors"}


def test_a_recorded_history_is_read_again(tmp_path):
    nemesis = Recorder(tmp_path / "nemesis.events")
    nemesis.note("begin", t=1.0, fault="stop", forgets=False, outage=False)
    nemesis.note("stop", t=1.1, who="1.0")
    nemesis.note("go on", t=1.2, who="1.0")
    nemesis.note("end", t=1.3)
    nemesis.note("kill", t=1.4, who="2.0")
    worker = Recorder(tmp_path / "1.0.events")
    for t, what, facts in [
        (1.0, "ask", {"n": 7, "name": "a", "wait": 5.0}),
        (1.05, "ask", {"n": 9, "name": "b", "wait": 5.0, "ttl": 8.0}),
        (1.1, "got", {"n": 7, "fence": 3}),
        (1.12, "cancelled", {"n": 9}),
        (1.15, "ours", {"n": 7}),
        (1.2, "refused", {"n": 7}),
        (1.3, "leave", {"n": 7}),
        (1.4, "released", {"n": 7}),
        (2.0, "ask", {"n": 8, "name": "a", "wait": 5.0}),
        (2.1, "error", {"n": 8, "error": "down"}),
    ]:
        worker.note(what, t=t, **facts)
    (tmp_path / "2.0.events").write_text('{"t": 1.0, "what": "ask", "n": 1, "name": "a", "wait"')

    found = read(tmp_path, ttl=TTL)

    held = Attempt("1.0", 7, "a", 1.0, 5.0, 1.1, 3, 1.15, 1.3, 1.4, "released")
    cancelled = Attempt("1.0", 9, "b", 1.05, 5.0, done=1.12, answer="cancelled", ttl=8.0)
    failed = Attempt("1.0", 8, "a", 2.0, 5.0, done=2.1, answer="error")
    assert found.attempts == [held, cancelled, failed]
    assert found.faults == [Fault("stop", 1.0, 1.3, outage=False)]
    assert (found.stops, found.kills) == ([Stop("1.0", 1.1, 1.2)], {"2.0": 1.4})
    assert (found.refused, found.end) == ([("a", "1.0#7")], 2.1)


def test_a_seed_reproduces_the_schedule():
    kinds = ["cut", "kill", "stop"]
    first = list(islice(schedule(7, kinds, ttl=TTL), 6))

    assert first == list(islice(schedule(7, kinds[::-1], ttl=TTL), 6))
    assert first != list(islice(schedule(8, kinds, ttl=TTL), 6))
    assert {one.kind for one in first[:3]} == {one.kind for one in first[3:]} == set(kinds)


# Against real servers, several runs at a time.

WITHIN = 300.0


@pytest.fixture(scope="module")
def runs(request):
    """The results, to come, of all runs that are wanted."""
    items = [item for item in request.session.items if "outcome" in item.fixturenames]
    group = Processes()

    def one(engine):
        options = SOME_FAULTS if engine in SIMPLE else EVERY_FAULT_ONCE
        without = [kind for kind, by in FOR_LONG_RUNS.items() if by != engine]
        chosen = {"kinds": ONLY.get(engine, ()), "without": without}
        return start(group, engine, **chosen, **options).result(WITHIN)

    with ThreadPoolExecutor(6) as pool:
        engines = dict.fromkeys(item.callspec.params["engine"] for item in items)
        yield {engine: pool.submit(one, engine) for engine in engines}
        pool.shutdown(cancel_futures=True)
    group.close()


@pytest.fixture
def outcome(runs, engine):
    """The result of one run."""
    found = runs[engine].result(4 * WITHIN)
    if "missing" in found:
        missing(found["missing"], found["why"])
    print(tables({engine: found}))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_no_fault_breaks_a_promise(engine, outcome):
    assert outcome["accusations"] == []
    assert all(row["times"] for kind, row in outcome["rows"].items() if kind != "none")
    assert sum(row["acquisitions"] for row in outcome["rows"].values()) > 30


@pytest.mark.slow
@pytest.mark.parametrize("engine", SIMPLE)
def test_a_broken_lock_is_accused(engine, outcome):
    found = {one.partition(" (")[0] for one in outcome["accusations"]}

    assert found >= {BROKEN[engine]} if engine in BROKEN else not found
