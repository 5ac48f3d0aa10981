"""A hold is handed to another process as text: dump() here, resume() there."""

from __future__ import annotations

import asyncio
from dataclasses import fields

import pytest
from django.core import signing
from django.db import connection, transaction

from distlock_app import BackendError, Lock, LockBusy, LockError, LockLost, NotHeld, bucket
from distlock_app.claims import Claim
from distlock_app.core.handover import FIELDS
from distlock_app.primitives.timing import monotonic
from tests import engines
from tests.engines import renewed, running, until

engine = pytest.fixture(engines.install)


def test_a_hold_goes_on_elsewhere(engine):
    hold = Lock("a", ttl=30).acquire()
    fence = hold.fence

    text = hold.dump()
    got = []
    with running(lambda: got.append(Lock.resume(text))):
        pass

    assert hold.released
    with pytest.raises(NotHeld):
        hold.release()
    with pytest.raises(LockBusy):
        Lock("a").acquire(wait=0)
    assert (got[0].name, got[0].fence) == ("a", fence)
    assert 20 < got[0].expires_in <= 30
    got[0].release()
    assert engines.free(engine)


def test_a_with_leaves_alone_what_was_dumped_inside(engine):
    with Lock("a") as hold:
        text = hold.dump()

    assert not engines.free(engine)
    Lock.resume(text).release()
    assert engines.free(engine)


def test_what_was_dumped_is_renewed_only_where_it_is_resumed(engine):
    text = Lock("a", ttl=3).acquire().dump()

    hold = Lock.resume(text)

    renewed(hold, times=2)

    hold.release()


def test_what_nobody_resumes_ends_by_itself(engine):
    text = Lock("a", ttl=2).acquire().dump()

    until(lambda: not list(engine.holders()))

    with pytest.raises(LockLost, match="not resumed in time"):
        Lock.resume(text)
    Lock("a").acquire(wait=0).release()


def test_a_dump_says_how_long_it_may_take(engine):
    Lock("a", ttl=5).acquire().dump(60)

    (holding,) = engine.holders()
    assert 40 < holding.expires_in <= 60


@pytest.mark.parametrize("owner, kept", [(None, (0, 5)), ("nightly", (40, 60))])
def test_it_lasts_no_longer_once_it_is_resumed(engine, owner, kept):
    """Unless other processes may have it, too: a crash must not keep it for so long."""
    text = Lock("a", ttl=5, owner=owner).acquire().dump(60)

    hold = Lock.resume(text)

    (holding,) = engine.holders()
    assert kept[0] < holding.expires_in <= kept[1]
    hold.release()


def test_a_resumed_hold_knows_its_mode(engine):
    got = []
    text = Lock("a", limit=2).acquire().dump()
    other = Lock("a", limit=2).acquire(wait=0)

    with running(lambda: got.append(Lock.resume(text, renew=False, max_hold=5))):
        pass

    assert got[0].expires_in <= 5
    with running(lambda: got.append(Lock("a", limit=2).try_acquire())):
        pass
    assert got[1] is None
    got[0].release()
    other.release()


def test_a_stable_owner_stays_one(engine):
    text = Lock("a", owner="nightly").acquire().dump()

    hold = Lock.resume(text)

    assert hold._lease.grant.claim.stable
    hold.release()


@pytest.mark.parametrize(
    "text",
    ["", "a", signing.dumps(["default"]), "a:b:c"],
    ids=["empty", "unsigned", "too little", "three parts"],
)
def test_other_texts_are_refused(text, engine):
    with pytest.raises(ValueError, match="SECRET_KEY"):
        Lock.resume(text)


def test_an_engine_that_cannot_tell_leaves_both_chances(engine):
    hold = Lock("a").acquire()
    engine.fail("extend", times=1)
    with pytest.raises(BackendError):
        hold.dump()
    hold.check()

    text = hold.dump()
    engine.fail("end_in", times=1)
    with pytest.raises(BackendError):
        Lock.resume(text)

    Lock.resume(text).release()
    assert engines.free(engine)


def test_no_dump_of_one_hold_among_several(engine):
    with Lock("a") as outer, Lock("a") as inner:
        with pytest.raises(LockError, match="has another hold here"):
            inner.dump()
        outer.check()


def test_no_dump_of_a_lost_lock(engine):
    hold = Lock("a").acquire()
    engine.clear(hold._lease.grant.claim.key)

    with pytest.raises(LockLost):
        hold.dump()


def test_no_dump_from_an_engine_of_sessions(engine, monkeypatch):
    monkeypatch.setattr(type(engine), "expires", False)
    with Lock("a") as hold, pytest.raises(LockError, match="session"):
        hold.dump()


@pytest.mark.django_db(transaction=True)
def test_no_dump_before_the_commit(engine):
    with transaction.atomic():
        hold = Lock("a").acquire()
        with pytest.raises(LockError, match="after the commit"):
            hold.dump()
        text = Lock("b", release="now").acquire().dump()
        Lock.resume(Lock.resume(text).dump()).release()
        assert not Lock("b").locked()
        hold.release()


@pytest.mark.parametrize(("max_hold", "kept"), [(None, 20), (5, 5)])
def test_what_is_left_of_at_least_is_handed_over(engine, max_hold, kept):
    text = Lock("a", at_least=20).acquire().dump(60)

    Lock.resume(text, max_hold=max_hold).release()

    (holding,) = engine.holders()
    assert kept - 4 < holding.expires_in <= kept


def test_at_least_that_is_over_is_not_handed_over(engine):
    hold = Lock("a", at_least=0.1).acquire()
    until(lambda: hold.keep_until < monotonic())

    Lock.resume(hold.dump()).release()

    assert engines.free(engine)


@pytest.mark.django_db(transaction=True)
def test_no_resume_in_a_transaction_whose_end_cannot_be_seen(engine):
    text = Lock("a").acquire().dump()

    connection.set_autocommit(False)
    try:
        with pytest.raises(LockError, match="manual transaction management"):
            Lock.resume(text)
        assert not engines.free(engine)
    finally:
        connection.set_autocommit(True)

    Lock.resume(text).release()


def test_tasks_hand_over_too(engine):
    async def work():
        hold = await Lock("a").aacquire()
        text = await hold.adump()
        resumed = await Lock.aresume(text)
        await resumed.arelease()

    asyncio.run(work())

    assert engines.free(engine)


def test_every_field_of_a_claim_is_handed_over_or_made_anew():
    # A latch is no lock: nobody holds it.
    made_anew = {"key", "holder", "wake", "blocking", "renew", "latch"}
    assert {f.name for f in fields(Claim)} == {*FIELDS, *made_anew}


@pytest.mark.parametrize("using", ["default", "redis"])
@pytest.mark.django_db(transaction=True)
def test_another_process_goes_on(using, processes, request):
    if using == "redis":
        request.getfixturevalue("redis_url")
    hold = Lock("handed", using=using).acquire()
    fence = hold.fence

    (seen,) = processes.run("tests.lock_workers:resume", count=1, text=hold.dump())

    assert seen == fence
    assert not Lock("handed", using=using).locked()


def test_a_value_has_one_bucket():
    names = {bucket("item", value, buckets=8) for value in range(1000)}

    assert names == {f"item:{n}" for n in range(8)}
    assert bucket("item", "7") == bucket("item", 7) == "item:2"
    with pytest.raises(ValueError, match="1 or more"):
        bucket("item", 7, buckets=0)


@pytest.mark.parametrize("text", [None, 5, b"text"])
def test_what_is_no_text_cannot_be_resumed(text):
    with pytest.raises(TypeError, match=r"takes the text of Hold.dump\(\), not"):
        Lock.resume(text)
