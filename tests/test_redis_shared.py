"""Readers, writers and permits on Redis: who is inside together, in which order, who died."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic, sleep

import pytest
from django.conf import settings

from distlock_app import BackendError, Lock, LockBusy, LockError, LockLost, NotHeld
from distlock_app.backends.redis.waiting import Listener
from distlock_app.claims import Busy, Grant
from distlock_app.core.registry import registry
from distlock_app.primitives.names import key_of
from distlock_app.signals import lock_released
from distlock_app.testing.claims import a_claim
from tests.engines import until
from tests.redis_workers import Waiter, backend_at, wait_for
from tests.sharing_workers import overtakings, together, visits_of

pytest_plugins = ["tests.redis_fixtures"]

KINDS = [{"shared": True}, {"limit": 9}]


@pytest.fixture
def name(redis_url):
    """A lock of the alias `redis` that no other test uses."""
    made = f"shared-{secrets.token_hex(4)}"
    yield made
    registry["redis"].backend.clear(key_of(made))


def elsewhere(lock):
    """Take the lock in another thread: this one would only enter it again."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lock.acquire, 30).result(60)


def waiters_of(name, backend=None):
    held = list((backend or registry["redis"].backend).holders(key_of(name)))
    return held[0].waiters if held else 0


def listeners_of(name, server):
    """How many wait for the lock in processes that listen for their turn."""
    entries = server.hvals(f"distlock{settings.SUFFIX}:{{0}}:{key_of(name)}:w")
    return sum(":wake:" in entry.split()[2] for entry in entries)


def test_nobody_is_inside_with_whom_it_must_not_be_and_nobody_starves(processes, name, tmp_path):
    """The file in which the writers count has no other protection."""
    mixed, permits = tmp_path / "mixed", tmp_path / "permits"
    mixed.write_text("0")
    options = {"hold": 0.001, "ttl": 30, "times": 30}

    processes.run(
        "tests.sharing_workers:visit_twice",
        count=6,
        first={
            "log": str(mixed),
            "name": name,
            "kinds": ["reader", "reader", "writer"],
            **options,
        },
        second={"log": str(permits), "name": f"{name} permits", "kinds": ["3"], **options},
    )

    for inside in together(visits_of(mixed)):
        assert len(inside) == 1 or {one.kind for one in inside} == {"reader"}
    assert mixed.read_text() == str(6 * 10)
    assert max(len(inside) for inside in together(visits_of(permits))) <= 3
    for visits in (visits_of(mixed), visits_of(permits)):
        assert len(visits) == 6 * 30
        most = overtakings(visits)
        print(f"overtaken by {most}")
        assert most <= 2 * 6


@pytest.mark.slow
def test_killed_processes_take_no_permit_with_them(processes, name, tmp_path):
    log = tmp_path / "log"
    workers = processes.start_many(
        "tests.sharing_workers:visit",
        count=6,
        log=str(log),
        name=name,
        kinds=["3"],
        hold=0.02,
        ttl=0.6,
    )
    until(lambda: len(visits_of(log)) > 20)
    for worker in workers[:3]:
        sleep(0.4)
        worker.kill()
    killed_at = monotonic()
    until(lambda: sum(one.came > killed_at + 1.2 for one in visits_of(log)) > 20)
    for worker in workers[3:]:
        worker.kill()

    inside = together(visits_of(log))
    late = [one for one in inside if max(visit.came for visit in one) > killed_at + 1.2]
    assert max(len(one) for one in inside) == 3
    assert max(len(one) for one in late) == 3, "a permit did not come back"


def test_the_permits_of_killed_holders_come_back_after_their_ttl(processes, name):
    ttl = 3.0
    holders = processes.start_many(
        "tests.sharing_workers:hold_permit", count=3, name=name, limit=3, ttl=ttl
    )
    for worker in holders:
        assert worker.read() == "holds"
    lock = Lock(name, using="redis", limit=3, ttl=30)
    with pytest.raises(LockBusy):
        lock.acquire(wait=0)

    killed_at = monotonic()
    for worker in holders:
        worker.kill()
    taken = [elsewhere(lock) for _ in range(3)]
    waited = monotonic() - killed_at

    with pytest.raises(LockBusy):
        lock.acquire(wait=0)
    for hold in taken:
        hold.release()
    assert waited < ttl + 10


def test_killed_waiters_leave_no_gap(processes, server, name, tmp_path):
    """3 of 8 waiters are killed; alone on the machine the gaps are below 2 x hold + 50 ms."""
    log = tmp_path / "log"
    log.write_text("0")
    backend = registry["redis"].backend
    gate = backend.acquire(a_claim(name, ttl=60), 0)
    workers = processes.start_many(
        "tests.sharing_workers:visit",
        count=8,
        log=str(log),
        name=name,
        kinds=["writer", "reader", "2", "reader"],
        hold=0.02,
        ttl=10,
        times=4,
    )
    # Whoever does not listen yet is only known to live by asking again: see HEARD_WITHIN.
    until(lambda: listeners_of(name, server) == 8)

    for worker in workers[1:8:3]:
        worker.kill()
    released_at = monotonic()
    backend.release(gate)
    for worker in set(workers) - set(workers[1:8:3]):
        worker.result()

    came = [released_at, *(one.came for one in visits_of(log))]
    assert len(came) == 1 + 5 * 4
    longest = max(later - earlier for earlier, later in zip(came, came[1:], strict=False))
    print(f"longest gap {longest * 1000:.0f} ms")
    assert longest < 2  # a queue that waits for the dead takes 3 s and more


def test_a_dead_writer_keeps_readers_waiting_for_a_moment_only(backend, server, prefix):
    reader = backend.acquire(a_claim("a", shared=True), 0)
    dead, living = Waiter(backend, "a"), Waiter(backend, "a", shared=True)
    dead.ask()
    assert isinstance(living.ask(), Busy)
    claims = f"{prefix}:{{0}}:{dead.claim.key}:w"
    heard, rest = server.hget(claims, dead.claim.owner).split(" ", 1)
    server.hset(claims, dead.claim.owner, f"{int(heard) - 4_000_000} {rest}")

    assert isinstance(living.ask(), Grant)

    assert backend.extend(reader, 30)
    assert dead.woken == []


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_waiters_whose_process_died_get_nothing(backend, server, prefix, kind):
    writer = backend.acquire(a_claim("a"), 0)
    deaf, living = Waiter(backend, "a", **kind), Waiter(backend, "a", **kind)
    deaf.ask()
    living.ask()
    claims = f"{prefix}:{{0}}:{deaf.claim.key}:w"
    entry = server.hget(claims, deaf.claim.owner)
    server.hset(claims, deaf.claim.owner, entry.replace(":wake:", ":nobody:"))

    backend.release(writer)

    grant = living.granted()
    assert [held.fence for held in backend.holders(deaf.claim.key)] == [grant.fence]
    backend.release(grant)
    assert list(server.scan_iter(f"{prefix}:*")) == [f"{prefix}:{{0}}:fence"]
    assert isinstance(deaf.ask(), Grant)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_server_that_evicts_what_it_knew_of_members_answers_and_heals(
    backend, server, prefix, kind
):
    mine = a_claim("a", ttl=30, **kind)
    first, other = backend.acquire(mine, 0), backend.acquire(a_claim("a", **kind), 0)
    writer = Waiter(backend, "a")
    writer.ask()

    server.delete(f"{prefix}:{{0}}:{mine.key}:w")

    assert not backend.acquire(a_claim("a", **kind), 0)  # nobody knows beside whom it would be
    assert backend.release(other)
    assert backend.acquire(mine, 0).fence > first.fence
    assert not backend.acquire(a_claim("a"), 0)
    assert backend.release(first)
    assert isinstance(writer.ask(), Grant)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_message_wakes_each_and_costs_two_requests(own, kind):
    backend, server = own
    backend.release(wait_for(backend, 5, "a"))  # the server has the scripts now
    writer = wait_for(backend, 5, "a")
    waiters = [Waiter(backend, "a", **kind) for _ in range(9)]
    waiters[0].ask()
    server.config_resetstat()

    for waiter in waiters[1:]:
        waiter.ask()
    backend.release(writer)
    for waiter in waiters:
        backend.release(waiter.granted())

    calls = server.info("commandstats")
    assert calls["cmdstat_evalsha"]["calls"] == 8 + 1 + 9
    assert calls["cmdstat_publish"]["calls"] == 9


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("how", ["silent", "close"])
def test_a_request_whose_answer_was_lost_is_repeated_without_harm(proxy, own_redis, kind, how):
    backend = backend_at(proxy.url, SOCKET_TIMEOUT=2)
    wanted = a_claim("a", **kind)
    first = backend.acquire(a_claim("a", **kind), 0)

    def asked(call):
        proxy.swallow = how
        while True:
            with suppress(BackendError):
                return call()

    grant = asked(lambda: backend.acquire(wanted, 0))
    again = backend.acquire(wanted, 0)
    asked(lambda: backend.release(grant))

    assert again.fence == grant.fence > first.fence
    assert [held.fence for held in backend.holders(wanted.key)] == [first.fence]
    backend.close()


def test_who_came_in_while_the_queue_was_read_does_not_wait(backend, monkeypatch):
    first = backend.acquire(a_claim("a"), 0)
    reader = Waiter(backend, "a", shared=True)
    reader.ask()
    read = backend._entries

    def late(key, owners):
        backend.release(first)
        reader.granted()
        return read(key, owners)

    monkeypatch.setattr(backend, "_entries", late)

    assert backend.queue(first.claim.key) == []


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_died_together_is_gone_with_the_next_claim(backend, server, prefix, kind):
    for _ in range(3):
        assert backend.acquire(a_claim("a", ttl=0.05, **kind), 0)
    sleep(0.1)
    assert list(backend.holders(key_of("a"))) == []

    writer = backend.acquire(a_claim("a"), 0)

    assert writer
    assert backend.release(writer)
    assert list(server.scan_iter(f"{prefix}:*")) == [f"{prefix}:{{0}}:fence"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_keys_of_several_holders_expire(backend, server, prefix, kind):
    backend.acquire(a_claim("a", ttl=20, **kind), 0)
    short = backend.acquire(a_claim("a", ttl=15, **kind), 0)
    Waiter(backend, "a").ask()

    keys = {key.rpartition(":")[2]: server.pttl(key) for key in server.scan_iter(f"{prefix}:*")}

    assert keys.pop("fence") == -1
    assert len(keys) == 4
    # As long as the longest lease, and a while, so that what is left over is found.
    assert all(20_000 < left <= 40_000 for left in keys.values())
    assert backend.extend(short, 60)
    assert server.pttl(f"{prefix}:{{0}}:{key_of('a')}:m") > 60_000


def test_a_waiter_without_a_channel_gets_a_short_lease_first(backend, monkeypatch):
    writer = backend.acquire(a_claim("a"), 0)
    monkeypatch.setattr(Listener, "ensure_subscribed", lambda self: False)
    unheard = a_claim("a", shared=True, wake=lambda grant: None)
    assert not backend.acquire(unheard, 30)

    backend.release(writer)

    [held] = backend.holders(unheard.key)
    assert held.kind == "shared" and held.expires_in <= 3
    grant = backend.acquire(unheard, 30)
    assert grant.fence == held.fence
    [held] = backend.holders(unheard.key)
    assert held.expires_in > 20


def test_a_thousand_readers_come_and_go(own):
    backend, server = own
    grants = [backend.acquire(a_claim("a", shared=True), 0) for _ in range(1000)]

    assert len({grant.fence for grant in grants}) == 1000
    assert len(list(backend.holders())) == 1000
    assert all(backend.extend_many([(grant, 60) for grant in grants]))
    assert all(backend.release(grant) for grant in reversed(grants))
    assert server.keys() == ["distlock:{0}:fence"]


def test_threads_share_a_lock_object_each_with_its_own_hold(name):
    lock = Lock(name, using="redis", shared=True, wait=5)
    with lock as one:
        same = lock.acquire()
        other = elsewhere(lock)

        assert one.fence == same.fence != other.fence
        with pytest.raises(LockBusy):
            Lock(name, using="redis").acquire(wait=0)
        for hold in (one, same, other):
            hold.release()
    with Lock(name, using="redis", wait=0) as writer:
        assert writer.fence > other.fence


@pytest.mark.parametrize("held", [{}, {"shared": True}, {"limit": 2}], ids=str)
def test_a_stable_owner_holds_in_one_mode(name, held):
    hold = Lock(name, using="redis", owner="job", **held).acquire()

    for other in {}, {"shared": True}, {"limit": 2}:
        if other != held:
            with pytest.raises(LockBusy):
                Lock(name, using="redis", owner="job", **other).acquire(wait=0)
    hold.check()
    hold.release()


@pytest.mark.parametrize("value", [None, ["1"]], ids=str)
def test_a_guarded_write_of_what_redis_cannot_keep_is_refused(name, server, value):
    with Lock(name, using="redis", wait=5) as hold, pytest.raises(TypeError, match="text"):
        hold.guarded_set(f"{name}:written", value, ttl=60)

    assert not server.exists(f"{name}:written")


@pytest.mark.parametrize("options", [{}, *KINDS], ids=str)
def test_a_guarded_write_of_a_lost_hold_writes_nothing(name, server, options):
    key = f"{name}:written"
    hold = Lock(name, using="redis", **options).acquire(wait=5)
    hold.guarded_set(key, "before", ttl=60)
    registry["redis"].backend.clear(key_of(name))  # nobody told the holder

    with pytest.raises(LockLost):
        hold.guarded_set(key, "after", ttl=60, release=True)

    assert hold.lost
    assert server.get(key) == "before"
    server.delete(key)


@pytest.mark.parametrize("options", [{}, *KINDS], ids=str)
def test_a_guarded_write_gives_the_lock_up_with_it(name, server, options):
    key = f"{name}:written"
    with Lock(name, using="redis", **options) as hold:
        hold.guarded_set(key, b"\x00done", ttl=60, release=True)

    assert server.get(key) == "\x00done"
    assert not Lock(name, using="redis").locked()
    server.delete(key)


def test_a_guarded_release_is_signalled_and_not_of_a_lock_held_twice(name, server):
    said = []

    def listen(held, **facts):
        said.extend([held >= 0] * (facts["name"] == name))

    lock, key = Lock(name, using="redis"), f"{name}:written"
    lock_released.connect(listen)
    try:
        with lock, lock as inner, pytest.raises(LockError, match="another hold"):
            inner.guarded_set(key, "1", ttl=60, release=True)
        assert not server.exists(key)
        hold = lock.acquire()
        hold.guarded_set(key, "1", ttl=60, release=True)
        with pytest.raises(NotHeld):
            hold.guarded_set(key, "2", ttl=60)
    finally:
        lock_released.disconnect(listen)

    assert said == [True] * 2
    assert server.get(key) == "1"
    server.delete(key)


def test_a_guarded_release_whose_answer_is_lost_leaves_no_trusted_hold(name, server, monkeypatch):
    backend, key = registry["redis"].backend, f"{name}:written"
    guarded_set = backend.guarded_set

    def lose_the_answer(*args, **options):
        guarded_set(*args, **options)
        raise BackendError("no answer")

    hold = Lock(name, using="redis").acquire()
    monkeypatch.setattr(backend, "guarded_set", lose_the_answer)
    with pytest.raises(BackendError):
        hold.guarded_set(key, "written", ttl=60)
    hold.check()
    with pytest.raises(BackendError):
        hold.guarded_set(key, "written", ttl=60, release=True)

    with pytest.raises(LockLost, match="the answer to its release was lost"):
        hold.check()
    hold.release()
    server.delete(key)


def test_a_guarded_value_lives_for_more_than_no_time(name):
    with Lock(name, using="redis") as hold, pytest.raises(ValueError, match="ttl must be more"):
        hold.guarded_set(f"{name}:written", "1", ttl=0)


def test_an_engine_without_guarded_writes_says_so(name):
    with (
        Lock(name, using="locmem") as hold,
        pytest.raises(LockError, match="has no guarded_set"),
    ):
        hold.guarded_set("key", "value")
    with (
        Lock(name, using="locmem") as hold,
        pytest.raises(LockError, match="has no guarded_script"),
    ):
        hold.guarded_script("return 1")


SELL = """
-- 100 % of it, or nothing
local left = tonumber(redis.call('GET', KEYS[1])) - ARGV[1]
if left < 0 then return -1 end
redis.call('SET', KEYS[1], left, 'KEEPTTL')
redis.call('SET', KEYS[2], ARGV[2], 'EX', 60)
return left -- of what there was"""


@pytest.mark.parametrize("options", [{}, *KINDS], ids=str)
def test_a_guarded_script_runs_with_its_own_keys_and_arguments(name, server, options):
    keys = stock, buyer = f"{name}:stock", f"{name}:buyer"
    server.set(stock, 10, ex=60)

    with Lock(name, using="redis", **options) as hold:
        left = [hold.guarded_script(SELL, keys, [amount, "바이어"]) for amount in (7, 4, 3)]

    assert left == [3, -1, 0]
    assert server.get(buyer) == "바이어"
    server.delete(*keys)


@pytest.mark.parametrize("one_text", [("stock", [1]), (["stock"], "1"), (b"stock",)], ids=str)
def test_the_keys_and_arguments_of_a_guarded_script_are_no_letters_of_one_text(name, one_text):
    with Lock(name, using="redis") as hold, pytest.raises(TypeError, match="takes lists"):
        hold.guarded_script("return #KEYS + #ARGV", *one_text)


@pytest.mark.parametrize("options", [{}, *KINDS], ids=str)
def test_a_guarded_script_of_a_lost_hold_is_not_run(name, server, options):
    key = f"{name}:written"
    hold = Lock(name, using="redis", **options).acquire(wait=5)
    registry["redis"].backend.clear(key_of(name))  # nobody told the holder

    with pytest.raises(LockLost):
        hold.guarded_script("redis.call('SET', KEYS[1], '1', 'EX', 60)", [key])

    assert hold.lost
    assert not server.exists(key)


@pytest.mark.parametrize("script", ["return nonsense(", "error('no stock')"])
def test_a_mistake_in_a_guarded_script_is_told_and_keeps_the_lock(name, script):
    with Lock(name, using="redis") as hold:
        with pytest.raises(LockError, match=r"the script failed: .*(nonsense|unexpected|no stock)"):
            hold.guarded_script(script)
        hold.check()

        assert hold.guarded_script("return 4") == 4
        assert hold.guarded_script("") == 0


@pytest.mark.parametrize(
    "script",
    [
        "return redis.error_reply('ERR no stock')",
        "return redis.pcall('INCR', 'no stock', 'twice')",
        "return redis.error_reply('NOSCRIPT of its own')",
        "error({err = 'NOSCRIPT of its own'})",
    ],
)
def test_an_error_that_a_guarded_script_returns_is_raised(name, script):
    with Lock(name, using="redis") as hold, pytest.raises(LockError, match="the script failed"):
        hold.guarded_script(script)


@pytest.mark.parametrize(
    "result", ["2.5", "1/0", "0/0", "'nan'", "'many'", "true", "{1}", "{err = 1}"]
)
def test_a_guarded_script_returns_no_other_than_a_whole_number(name, result):
    with Lock(name, using="redis") as hold:
        with pytest.raises(LockError, match="must return a whole number"):
            hold.guarded_script(f"return {result}")

        assert hold.guarded_script("return '-12'") == -12
        assert hold.guarded_script("return false") == 0


def test_a_hold_that_was_taken_away_is_lost_alone(name):
    lock = Lock(name, using="redis", limit=2)
    one, other = elsewhere(lock), elsewhere(lock)
    [version] = [h.version for h in Lock(name, using="redis").holders() if h.fence == one.fence]

    assert Lock(name, using="redis").clear(if_version=version) == 1

    with pytest.raises(LockLost):
        one.extend()
    other.extend()
    other.release()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_last_try_of_a_writer_wakes_those_behind(backend, kind):
    backend.acquire(a_claim("a", **kind), 0)
    writer, behind = Waiter(backend, "a"), Waiter(backend, "a", **kind)
    writer.ask()
    assert not behind.ask()

    assert not backend.acquire(writer.claim, 0)

    assert behind.granted().claim is behind.claim


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_of_several_with_a_short_lease_shortens_nothing(backend, server, prefix, kind):
    grant = backend.acquire(a_claim("a", ttl=60, **kind), 0)
    backend.acquire(a_claim("a", ttl=20, **kind), 0)

    assert backend.extend(grant, 2)

    ends = [held.expires_in for held in backend.holders(grant.claim.key)]
    assert max(ends) > 40 > 20 >= min(ends)
    [index] = server.scan_iter(f"{prefix}:*held:*")
    [(_, listed_until)] = server.zrange(index, 0, -1, withscores=True)
    assert listed_until / 1000 - server.time()[0] > 40
