"""Every engine does what a model of a few lines does, whatever the order of the calls."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

import hypothesis.strategies as st
import pytest
import redis
from django.conf import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from distlock_app import Hold, Lock, LockLost, NotHeld
from distlock_app.core.registry import registry
from distlock_app.models import DistLock
from distlock_app.primitives.names import key_of
from tests.examples import examples

# Hypothesis takes what engines' threads do for a strategy's: they use `random` for their jitter.
# And it warns of long values, which are asked for.
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")

TTL = 1000.0  # time decides nothing here
EXCLUSIVE, SHARED, PERMIT = (1, False), (1, True), (2, False)  # limit, shared
DEADLINE = 60.0


def entered(take, *args):
    """Call what takes a lock, and enter its hold: so the runner may take the lock again."""
    hold = take(*args)
    return hold and hold.__enter__()


@dataclass(eq=False)
class Claimed:
    """A claim in the model: what its holds are, and what the engine and this process know."""

    mode: tuple[int, bool]
    fence: int
    runner: object
    holds: list[Hold] = field(default_factory=list)
    state: str = "kept"  # by the engine; or "lapsed": nobody took it since; or "gone"
    told: bool = False  # of its loss

    @property
    def kept(self) -> bool:
        return self.state == "kept"


class LockMachine(RuleBasedStateMachine):
    """Runners, each a thread, that take two locks; subclasses name the engine."""

    alias = "locmem"

    holds = Bundle("holds")
    texts = Bundle("texts")
    names = st.sampled_from("aaab")
    places = st.integers(0, 2)

    def __init__(self):
        super().__init__()
        self.prefix = f"model-{secrets.token_hex(6)}-"
        self.backend = registry[self.alias].backend
        self.runners = [ThreadPoolExecutor(1) for _ in range(3)]
        self.crashed = []
        self.left = []  # holds of crashed runners, which nobody uses any more
        self.claims = {"a": [], "b": []}
        self.last = {"a": 0, "b": 0}

    def lock(self, name, mode=EXCLUSIVE):
        limit, shared = mode
        name = self.prefix + name
        return Lock(name, using=self.alias, ttl=TTL, wait=0, limit=limit, shared=shared)

    def kept(self, name):
        return [claimed for claimed in self.claims[name] if claimed.kept]

    def fits(self, name, mode):
        beside = [claimed.mode for claimed in self.kept(name)]
        if not beside:
            return True
        if mode == EXCLUSIVE or set(beside) != {mode}:
            return False
        return mode == SHARED or len(beside) < 2

    def on(self, place, call, *args):
        return self.runners[place].submit(call, *args).result(DEADLINE)

    @rule(target=holds, place=places, name=names, data=st.data())
    def acquire(self, place, name, data):
        modes = [EXCLUSIVE, EXCLUSIVE]
        modes += [SHARED] * self.backend.shares + [PERMIT] * self.backend.limits
        return self.take(place, name, data.draw(st.sampled_from(modes)))

    def take(self, place, name, mode):
        mine = self.entered(place, name, mode)

        hold = self.on(place, entered, self.lock(name, mode).try_acquire)

        if mine is not None and (hold is None or hold.fence != mine.fence):
            assert not mine.kept and self.backend.heartbeat, "not entered again"
            mine.told, mine = True, None  # its session had told already
        if mine is None and not self.fits(name, mode):
            assert hold is None, "granted though somebody has it"
            return multiple()
        assert hold is not None, "refused though it is free"
        if mine is None:
            assert hold.fence > self.last[name], "the fence does not grow"
            self.last[name] = hold.fence
            self.forget(name, "lapsed")
            mine = Claimed(mode, hold.fence, self.runners[place])
            self.claims[name].append(mine)
        mine.holds.append(hold)
        return (mine, hold)

    def entered(self, place, name, mode):
        """Return what a runner has, as far as it knows, and so enters again; it got it last."""
        for claimed in reversed(self.claims[name]):
            if claimed.runner is self.runners[place] and claimed.mode == mode and claimed.holds:
                return None if claimed.told else claimed
        return None

    def ask(self, claimed, call, *args):
        """Call what asks the engine; return the answer, None if it was LockLost.

        An engine may give a claim that lapsed, and that nobody took, to its owner again.
        """
        try:
            answer = call(*args)
        except LockLost:
            assert claimed.told or not claimed.kept, "lost though the engine has it"
            claimed.state = "gone" if claimed.state == "lapsed" else claimed.state
            claimed.told = True
            return None
        assert not claimed.told and claimed.state != "gone", "given though it is gone"
        claimed.state = "kept"
        return answer or True

    def hear(self, claimed, call):
        """Call what does not ask the engine; a session that ended may tell by itself."""
        try:
            call()
            assert not claimed.told, "not lost any more"
        except LockLost:
            assert claimed.told or not claimed.kept, "lost though the engine has it"
            assert claimed.told or self.backend.heartbeat, "told by nobody"
            claimed.told = True

    @rule(held=holds)
    def check(self, held):
        claimed, hold = held
        if hold in self.left:
            return
        if hold not in claimed.holds:
            with pytest.raises(NotHeld):
                hold.check()
        else:
            self.hear(claimed, hold.check)

    @rule(held=holds)
    def extend(self, held):
        claimed, hold = held
        if hold in claimed.holds:
            self.ask(claimed, hold.extend)
            assert hold.lost is claimed.told
        elif hold not in self.left:
            with pytest.raises(NotHeld):
                hold.extend()

    @rule(held=holds)
    def release(self, held):
        claimed, hold = held
        if hold in self.left:
            return
        if hold not in claimed.holds:
            with pytest.raises(NotHeld):
                hold.release()
            return
        last = claimed.holds == [hold]
        if last:
            self.ask(claimed, hold.release)
        else:
            self.hear(claimed, hold.release)
        claimed.holds.remove(hold)
        if last:
            claimed.state = "gone"

    @rule(target=texts, held=holds)
    def dump(self, held):
        claimed, hold = held
        if not self.backend.expires or claimed.holds != [hold]:
            return multiple()
        text = self.ask(claimed, hold.dump)
        if text is None:
            return multiple()
        claimed.holds = []
        claimed.runner = None
        return (claimed, text)

    @rule(target=holds, dumped=consumes(texts), place=places)
    def resume(self, dumped, place):
        claimed, text = dumped
        hold = self.ask(claimed, self.on, place, entered, Lock.resume, text)
        if hold is None:
            return multiple()
        assert hold.fence == claimed.fence
        claimed.runner, claimed.holds = self.runners[place], [hold]
        # A runner enters again what it got last.
        name = hold.name[-1]
        self.claims[name].remove(claimed)
        self.claims[name].append(claimed)
        return (claimed, hold)

    @rule(name=names)
    def expire(self, name):
        end = EXPIRE.get(self.alias)
        if end is not None:
            end(self.backend, key_of(self.prefix + name))
            for claimed in self.kept(name):
                claimed.state = "lapsed"

    @rule(name=names)
    def clear(self, name):
        lapsed = sum(claimed.state == "lapsed" for claimed in self.claims[name])
        assert 0 <= self.lock(name).clear() - len(self.kept(name)) <= lapsed
        self.forget(name, "kept", "lapsed")

    def forget(self, name, *states):
        for claimed in self.claims[name]:
            if claimed.state in states:
                claimed.state = "gone"

    @rule(target=holds, place=places, name=names, cleared=st.booleans())
    def take_over(self, place, name, cleared):
        """Go at once where chance alone seldom leads."""
        self.clear(name) if cleared else self.expire(name)
        return self.take(place, name, EXCLUSIVE)

    @rule(place=places)
    def crash(self, place):
        """Forget a runner, with all that it holds: nobody releases that."""
        self.crashed.append(self.runners[place])
        for claims in self.claims.values():
            for claimed in claims:
                if claimed.runner is self.runners[place]:
                    self.left += claimed.holds
                    claimed.holds = []
        self.runners[place] = ThreadPoolExecutor(1)

    @invariant()
    def the_engine_lists_what_the_model_holds(self):
        for name in self.claims:
            listed = [holding.fence for holding in self.lock(name).holders()]
            assert sorted(listed) == sorted(claimed.fence for claimed in self.kept(name))

    def teardown(self):
        for name in self.claims:
            self.lock(name).clear()
        holds = [hold for claims in self.claims.values() for one in claims for hold in one.holds]
        for hold in holds + self.left:
            with suppress(LockLost):
                hold.release()
        for runner in [*self.runners, *self.crashed]:
            runner.shutdown()


# How a lease ends before its time, by the engine's own means.


def expire_in_memory(backend, key):
    state = backend._states.get(key)
    for held in state.held.values() if state else ():
        held.until = 0.0


def expire_in_table(backend, key):
    past = datetime.now(timezone.utc) - timedelta(days=2)
    DistLock.objects.using(backend.using).filter(key=key).exclude(owner="").update(expiry=past)


def expire_on_redis(backend, key):
    lock = backend._lock(key)
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        client.pexpire(lock, 0)
        for member in client.zrange(lock + b":m", 0, -1):
            client.zadd(lock + b":m", {member: 1})


def expire_on_nodes(backend, key):
    for url in settings.REDLOCK_URL.split(","):
        with redis.Redis.from_url(url) as client:
            client.pexpire(f"distlock:redlock:{key}", 0)


EXPIRE = {
    "locmem": expire_in_memory,
    "default": expire_in_table,
    "redis": expire_on_redis,
    "quorum": expire_on_nodes,
}


def follows_the_model(alias, number):
    machine = type("Machine", (LockMachine,), {"alias": alias})
    settings = examples(number, stateful_step_count=40)
    run_state_machine_as_test(machine, settings=settings)


@pytest.mark.once
def test_memory_follows_the_model():
    follows_the_model("locmem", 60)


@pytest.mark.django_db(transaction=True)
def test_the_lock_table_follows_the_model():
    follows_the_model("default", 20)


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(not settings.SERVER_LOCKS.get(settings.ENGINE), reason="SQLite has none")
def test_locks_of_the_server_follow_the_model():
    follows_the_model(settings.SERVER_LOCKS[settings.ENGINE][0], 8)


@pytest.mark.once
def test_redis_follows_the_model(redis_url):
    follows_the_model("redis", 30)


def test_redlock_follows_the_model(redlock_urls):
    follows_the_model("quorum", 10)


def test_etcd_follows_the_model(etcd_url):
    follows_the_model("etcd", 6)


def test_zookeeper_follows_the_model(zookeeper_url):
    follows_the_model("zookeeper", 8)
