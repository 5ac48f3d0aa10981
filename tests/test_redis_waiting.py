"""Waiting for locks on Redis: order of arrival, messages, and those that are lost."""

from __future__ import annotations

import socket
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial

import pytest
from redis.exceptions import RedisError

from distlock_app import Lock
from distlock_app.backends.redis import link as redis_link
from distlock_app.backends.redis import listening as redis_listener
from distlock_app.backends.redis import waiting as redis_waiting
from distlock_app.claims import Busy, Grant
from distlock_app.core.registry import registry
from distlock_app.core.waiting import InThread
from distlock_app.core.wakers import Waker
from distlock_app.errors import BackendError, LockTimeout
from distlock_app.primitives.names import key_of
from distlock_app.primitives.timing import monotonic
from distlock_app.testing.claims import a_claim
from tests.engines import alarmed, interrupted_everywhere, running, until
from tests.redis_workers import DEADLINE, Waiter, backend_at, left_waiting, wait_for

pytest_plugins = ["tests.redis_fixtures"]


def listeners(server, prefix):
    """Return the names of the channels that somebody listens on."""
    return server.pubsub_channels(f"{prefix}:wake:*")


def expire(server, prefix, claimed):
    """Let the lock end by its ttl, now."""
    lock = f"{prefix}:{{0}}:{claimed.key}"
    server.pexpire(lock, 1)
    while server.exists(lock):
        time.sleep(0.001)


def test_the_lock_is_handed_over_in_order_of_arrival(backend):
    grant = backend.acquire(a_claim("a"), 0)
    waiters = [Waiter(backend, "a") for _ in range(5)]
    for waiter in waiters:
        assert isinstance(waiter.ask(), Busy)
    for waiter in reversed(waiters):
        waiter.ask()  # asking again is not arriving again

    order = []
    for waiter in waiters:
        assert backend.release(grant)
        grant = waiter.granted()
        assert grant.claim is waiter.claim and backend.extend(grant, 30)
        order.append(grant.fence)

    assert order == sorted(order)
    assert [len(waiter.woken) for waiter in waiters] == [1] * 5


def test_the_first_waiter_of_a_process_stands_behind_those_of_others(backend, redis_url, prefix):
    grant = backend.acquire(a_claim("a"), 0)
    first = Waiter(backend, "a")
    first.ask()

    with closing(backend_at(redis_url, prefix=prefix)) as other:
        second = Waiter(other, "a")
        other.acquire(second.claim, 30)  # without a subscription until then
        backend.release(grant)

        assert backend.release(first.granted())
        assert other.release(second.granted())


def test_one_message_wakes_one_waiter_and_costs_two_requests_each(own):
    backend, server = own
    backend.release(wait_for(backend, 5, "a"))
    grant = wait_for(backend, 5, "a")
    waiters = [Waiter(backend, "a") for _ in range(20)]
    waiters[0].ask()
    server.config_resetstat()

    for waiter in waiters[1:]:
        waiter.ask()
    for waiter in waiters:
        backend.release(grant)
        grant = waiter.granted()

    calls = server.info("commandstats")
    assert calls["cmdstat_evalsha"]["calls"] == 19 + 20
    assert calls["cmdstat_publish"]["calls"] == 20


def test_a_thread_is_started_only_when_somebody_waits(backend, server, prefix):
    grant = wait_for(backend, 5, "a")
    assert not any(thread.name.startswith(f"distlock {prefix}") for thread in threading.enumerate())
    assert listeners(server, prefix) == []

    Waiter(backend, "a").ask()

    assert len(listeners(server, prefix)) == 1
    assert backend.release(grant)


def test_the_thread_ends_when_nobody_waits_for_long(backend, server, prefix, monkeypatch):
    monkeypatch.setattr(redis_listener, "IDLE_SECONDS", 0.1)
    grant = wait_for(backend, 5, "a")
    waiter = Waiter(backend, "a")
    waiter.ask()
    backend.release(grant)
    second = waiter.granted()

    until(lambda: not listeners(server, prefix))

    third = Waiter(backend, "a")
    third.ask()
    backend.release(second)
    assert third.granted().claim is third.claim


def test_the_thread_does_not_end_for_a_task_that_comes_when_its_time_is_over(backend, monkeypatch):
    monkeypatch.setattr(redis_listener, "IDLE_SECONDS", -1.0)
    grant, waiter = backend.acquire(a_claim("a"), 0), Waiter(backend, "a")
    waiter.ask()

    backend.release(grant)

    assert backend.release(waiter.granted())


def test_the_thread_counts_from_when_a_task_last_waited(backend, monkeypatch):
    monkeypatch.setattr(redis_listener, "HEARTBEAT", 0.01)
    grant, seen = backend.acquire(a_claim("a"), 0), []
    listener = backend._listener(grant.claim.key)
    ends = listener._thread_ends
    monkeypatch.setattr(listener, "_thread_ends", lambda idle: seen.append(idle) or ends(idle=idle))
    waiter = Waiter(backend, "a")
    waiter.ask()

    until(lambda: len(seen) > 50)

    assert seen != sorted(seen)
    backend.release(grant)
    assert backend.release(waiter.granted())


def test_a_waiter_whose_process_died_is_skipped_at_once(backend, server, processes, prefix):
    grant = backend.acquire(a_claim("a"), 0)
    dead = processes.start_many("tests.redis_workers:wait_once", count=3, prefix=prefix, name="a")
    for worker in dead:
        assert worker.read() == "waits"
    living = Waiter(backend, "a")
    living.ask()

    for worker in dead:
        worker.kill()
    until(lambda: len(listeners(server, prefix)) == 1)
    backend.release(grant)

    assert living.granted(within=3).claim is living.claim


def test_a_waiter_who_was_not_heard_of_lately_is_skipped(backend, server, prefix):
    grant = backend.acquire(a_claim("a"), 0)
    silent, living = Waiter(backend, "a"), Waiter(backend, "a")
    silent.ask()
    living.ask()
    waiters = f"{prefix}:{{0}}:{silent.claim.key}:w"
    heard, rest = server.hget(waiters, silent.claim.owner).split(" ", 1)
    server.hset(waiters, silent.claim.owner, f"{int(heard) - 4_000_000} {rest}")

    backend.release(grant)

    assert living.granted().claim is living.claim
    assert silent.woken == []


def test_a_waiter_who_leaves_is_not_chosen(backend):
    first = backend.acquire(a_claim("a"), 0)
    gone, living = Waiter(backend, "a"), Waiter(backend, "a")
    gone.ask()
    living.ask()

    assert backend.release(Grant(gone.claim)) is False
    backend.release(first)

    assert living.granted()
    assert gone.woken == []


def test_a_leaver_finds_the_lock_expired_and_the_others_deaf(backend, server, prefix):
    backend.acquire(a_claim("a"), 0)
    leaver, deaf = Waiter(backend, "a"), Waiter(backend, "a")
    leaver.ask()
    deaf.ask()
    waiters = f"{prefix}:{{0}}:{deaf.claim.key}:w"
    entry = server.hget(waiters, deaf.claim.owner)
    server.hset(waiters, deaf.claim.owner, entry.replace(":wake:", ":nobody:"))
    expire(server, prefix, deaf.claim)

    assert backend.release(Grant(leaver.claim)) is False

    assert list(server.scan_iter(f"{prefix}:*")) == [f"{prefix}:{{0}}:fence"]
    assert isinstance(deaf.ask(), Grant)


def test_a_waiter_who_leaves_when_it_is_chosen_passes_the_lock_on(backend, server, prefix):
    for _ in range(200):
        first = backend.acquire(a_claim("a"), 0)
        leaver = Waiter(backend, "a")
        leaver.ask()
        together = threading.Barrier(2)

        def leave(leaver=leaver, together=together):
            together.wait(5)
            backend.release(Grant(leaver.claim))

        thread = threading.Thread(target=leave)
        thread.start()
        together.wait(5)
        backend.release(first)
        thread.join(5)

        assert list(backend.holders()) == []
    assert list(server.scan_iter(f"{prefix}:*")) == [f"{prefix}:{{0}}:fence"]


def test_an_expired_lock_goes_to_the_head_of_the_queue(backend, server, prefix):
    backend.acquire(a_claim("a"), 0)
    head, other = Waiter(backend, "a"), Waiter(backend, "a")
    head.ask()
    other.ask()
    expire(server, prefix, head.claim)

    assert isinstance(other.ask(), Busy)

    assert head.granted().claim is head.claim
    assert isinstance(backend.acquire(a_claim("a"), 0), Busy)


def test_a_waiter_who_died_holding_its_place_does_not_stop_the_queue(backend, server, prefix):
    backend.acquire(a_claim("a", ttl=0.05), 0)
    time.sleep(0.06)
    key = a_claim("a").key
    server.zadd(f"{prefix}:{{0}}:{key}:q", {"0" * 32: 1})

    assert backend.acquire(a_claim("a"), 0)


def test_a_killed_subscription_costs_neither_the_place_nor_a_second(own_redis, own):
    backend, server = own
    other = backend_at(own_redis.url)
    other.poll_max = 30.0  # it has to be woken: it does not just ask again by itself
    grant = backend.acquire(a_claim("a"), 0)
    # Longer than the second that a lock gives it: who is queued need not have subscribed.
    until(other._listener(grant.claim.key).ensure_subscribed)
    [subscriber] = server.client_list(_type="pubsub")
    result = {}

    def wait():
        result["grant"] = wait_for(other, 20, "a")
        result["at"] = time.monotonic()

    with running(wait):
        until(lambda: backend.queue(grant.claim.key))
        later = Waiter(backend, "a")
        later.ask()

        server.client_kill_filter(_id=subscriber["id"])
        backend.release(grant)
        if later.event.wait(0.5):
            # The lock was handed over while nobody listened: the next turn is the older waiter's.
            backend.release(later.granted())
        freed = time.monotonic()

    assert result["at"] - freed < 5
    assert other.release(result["grant"])
    other.close()


def test_a_waiter_is_woken_to_try_again_when_messages_may_be_lost(own):
    backend, server = own
    backend.acquire(a_claim("a"), 0)
    waiter = Waiter(backend, "a")
    waiter.ask()

    server.client_kill_filter(_type="pubsub")

    assert waiter.event.wait(5)
    assert waiter.woken == [None]


def test_half_a_message_costs_the_subscription_and_no_waiter(own):
    backend, server = own
    first = backend.acquire(a_claim("a"), 0)
    listener, grants = backend._listener(first.claim.key), []

    with running(lambda: grants.append(wait_for(backend, DEADLINE, "a"))):
        until(lambda: backend.queue(first.claim.key) and listener._leader)
        losses = listener.losses
        server.publish(listener.channel, "half a")
        until(lambda: listener.losses > losses)
        backend.release(first)
        until(lambda: grants)

    assert backend.release(grants[0])


def test_waiting_works_in_order_without_any_message(backend, monkeypatch):
    monkeypatch.setattr(redis_listener.Listener, "ensure_subscribed", lambda self: False)
    monkeypatch.setattr(backend, "poll_max", 0.1)
    grant = backend.acquire(a_claim("a"), 0)
    order = []

    def wait(number):
        got = wait_for(backend, 20, "a")
        order.append(number)
        backend.release(got)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for number, thread in enumerate(threads):
        thread.start()
        while list(backend.holders(grant.claim.key))[0].waiters <= number:
            time.sleep(0.01)
    backend.release(grant)
    for thread in threads:
        thread.join(20)

    assert order == [0, 1, 2]
    assert list(backend.holders()) == []


def test_a_grant_heard_late_tells_how_old_it_is(backend, processes, prefix):
    grant = backend.acquire(a_claim("a"), 0)
    worker = processes.start("tests.redis_workers:wait_once", prefix=prefix, name="a")
    assert worker.read() == "waits"
    time.sleep(0.5)

    worker.pause()
    backend.release(grant)
    time.sleep(1.5)
    worker.resume()

    assert 1.4 < worker.result()["age"] < 5


def test_a_grant_heard_at_once_is_as_young_as_it_is(backend):
    grant = backend.acquire(a_claim("a"), 0)
    waiter, tried = Waiter(backend, "a"), monotonic()
    waiter.ask()
    time.sleep(0.5)

    backend.release(grant)
    asked_at = waiter.granted().asked_at

    # A hundredth of the half second since the try may be the clocks' difference in rate.
    assert tried + 0.48 < asked_at <= monotonic()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, {"limit": 2}])
def test_a_stopped_waiter_has_the_lock_for_three_seconds(backend, processes, prefix, kind):
    grants = [backend.acquire(a_claim("a", **kind), 0) for _ in range(kind.get("limit", 1))]
    worker = processes.start("tests.redis_workers:wait_once", prefix=prefix, name="a", **kind)
    assert worker.read() == "waits"

    worker.pause()
    backend.release(grants[0])
    [stopped] = [one for one in backend.holders() if one.version != str(grants[-1].fence)]
    second = wait_for(backend, 15, "a", **kind)
    worker.resume()

    assert 0 < stopped.expires_in <= 3 < 30 == second.claim.ttl
    result = worker.result()
    assert result["age"] > result["ttl"] == 3
    assert backend.release(second)


@pytest.mark.parametrize("renew", [True, False])
def test_a_lock_that_was_handed_over_is_soon_held_for_its_ttl(redis_url, prefix, renew):
    name, backend = f"{prefix}-a", registry["redis"].backend
    lock = Lock(name, using="redis", ttl=30, renew=renew)
    first = lock.acquire()
    # Or its second try finds the lock its own.
    until(backend._listener(key_of(name)).ensure_subscribed)
    seen = []

    def wait():
        with lock.acquire(wait=30) as hold:
            seen.append(hold.expires_in)
            until(lambda: hold.expires_in > 10)
            seen.extend(holding.expires_in for holding in lock.holders())

    with running(wait):
        until(lambda: backend.queue(key_of(name)))
        first.release()

    assert renew or seen[0] > 3
    assert seen[1] > 10


def test_a_message_that_overtakes_the_answer_is_not_lost(backend, monkeypatch):
    first = backend.acquire(a_claim("a"), 0)
    Waiter(backend, "b").ask()
    waiter = Waiter(backend, "a")
    listener = backend._listener(waiter.claim.key)
    arm = listener.arm

    def late(*args):
        backend.release(first)
        give_up = time.monotonic() + 5
        while not listener._early and time.monotonic() < give_up:
            time.sleep(0.001)
        return arm(*args)

    backend.acquire(a_claim("b"), 0)
    Waiter(backend, "b").ask()  # starts the listener
    monkeypatch.setattr(listener, "arm", late)

    grant = waiter.ask()

    assert grant.claim is waiter.claim and backend.extend(grant, 30)
    assert waiter.woken == []


def test_a_waiter_whose_last_question_failed_is_still_handed_the_lock(backend, monkeypatch):
    first = backend.acquire(a_claim("a"), 0)
    waiter = Waiter(backend, "a")
    waiter.ask()

    def fail(*args):
        raise BackendError("no answer")

    with monkeypatch.context() as patch, pytest.raises(BackendError):
        patch.setattr(backend, "_try", fail)
        waiter.ask()
    backend.release(first)

    assert backend.release(waiter.granted()) is True


def test_who_comes_while_another_one_subscribes_has_its_subscription(backend, monkeypatch):
    listener = backend._listener(a_claim("a").key)
    subscribe, opening, go_on = listener._open, threading.Event(), threading.Event()

    def slowly():
        opening.set()
        assert go_on.wait(DEADLINE)
        return subscribe()

    def waits():
        # Anywhere below: on Python 3.14 a frame of the mutex that it waits for is on top.
        frames = [f for top in sys._current_frames().values() for f, _ in traceback.walk_stack(top)]
        return [f.f_code for f in frames].count(listener.ensure_subscribed.__code__) == 2

    monkeypatch.setattr(listener, "_open", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(listener.ensure_subscribed)
        assert opening.wait(DEADLINE)
        second = pool.submit(listener.ensure_subscribed)
        until(waits)
        go_on.set()

        assert first.result(DEADLINE) and second.result(DEADLINE)


def test_a_stable_owner_who_waits_for_two_locks_gets_the_one_that_came_free(backend):
    first = backend.acquire(a_claim("a"), 0)
    other = backend.acquire(a_claim("b"), 0)
    owner = a_claim("of both").owner
    waits_for_a, waits_for_b = Waiter(backend, "a", owner=owner), Waiter(backend, "b", owner=owner)
    waits_for_a.ask()
    waits_for_b.ask()

    backend.release(first)

    grant = waits_for_a.granted()
    assert grant.claim is waits_for_a.claim and backend.extend(grant, 30)
    backend.release(other)
    assert waits_for_b.granted().claim is waits_for_b.claim
    assert len(waits_for_a.woken) == len(waits_for_b.woken) == 1


def test_a_stable_owner_who_gives_up_one_lock_goes_on_waiting_for_the_other(backend):
    backend.acquire(a_claim("a"), 0)
    other = backend.acquire(a_claim("b"), 0)
    owner = a_claim("of both").owner
    waits_for_b, gives_up = Waiter(backend, "b", owner=owner), Waiter(backend, "a", owner=owner)
    waits_for_b.ask()
    gives_up.ask()

    assert not backend.acquire(gives_up.claim, 0)
    backend.release(other)

    assert waits_for_b.granted().claim is waits_for_b.claim


def test_all_who_wait_for_one_lock_with_one_stable_owner_are_told(backend):
    first = backend.acquire(a_claim("a"), 0)
    owner = a_claim("a").owner
    waiters = [Waiter(backend, "a", owner=owner) for _ in range(3)]
    for waiter in waiters:
        waiter.ask()
    backend.acquire(waiters[1].claim, 0)  # gives up: the others still listen
    waiters[0].ask()

    backend.release(first)

    for waiter in waiters[0], waiters[2]:
        grant = waiter.granted()
        assert grant.claim is waiter.claim and backend.extend(grant, 30)
    assert waiters[1].woken == []


def test_a_message_that_a_later_try_proves_old_is_no_grant(backend):
    blocks = backend.acquire(a_claim("another"), 0)
    first = backend.acquire(a_claim("a"), 0)
    stuck, go_on = threading.Event(), threading.Event()

    def hold_up_the_listener(grant):
        stuck.set()
        go_on.wait(30)

    owner = a_claim("a").owner
    earlier, later = Waiter(backend, "a", owner=owner), Waiter(backend, "a", owner=owner)
    earlier.ask()
    assert not backend.acquire(a_claim("another", wake=hold_up_the_listener), 30)
    backend.release(blocks)
    assert stuck.wait(5)
    backend.release(first)  # its message is not read yet
    backend.release(earlier.ask())
    stranger = backend.acquire(a_claim("a"), 0)
    later.ask()

    go_on.set()
    backend.release(stranger)

    assert later.granted().fence > stranger.fence
    assert len(later.woken) == 1


def test_a_grant_that_its_waiter_cannot_take_is_given_back(backend, caplog):
    first = backend.acquire(a_claim("a"), 0)

    def wake(grant):
        raise RuntimeError("event loop is closed")

    assert not backend.acquire(a_claim("a", wake=wake), 30)
    backend.release(first)

    deadline = time.monotonic() + 5
    while list(backend.holders()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "could not be woken" in caplog.text


def test_a_first_try_during_which_messages_were_lost_is_followed_by_another(backend, monkeypatch):
    first, tried = backend.acquire(a_claim("a"), 0), backend._try
    listener = backend._listener(first.claim.key)
    until(listener.ensure_subscribed)

    def lost(*asked):
        answer = tried(*asked)
        listener._lose(listener._subscription)
        return answer

    monkeypatch.setattr(backend, "_try", lost)

    assert backend.acquire(a_claim("a", wake=lambda grant: None), 30).free_in == 0.0


def test_what_a_signal_handler_raises_as_a_task_is_woken_takes_its_lock_from_nobody(
    backend, caplog
):
    class TimeLimit(Exception):
        pass

    def wake(grant):
        granted.append(grant)
        raise TimeLimit

    granted = []
    first = backend.acquire(a_claim("a"), 0)
    assert not backend.acquire(a_claim("a", wake=wake), 30)
    backend.release(first)

    until(lambda: "listening failed" in caplog.text)
    assert backend.release(granted[0])


def test_a_task_whose_loop_was_closed_takes_no_lock_with_it(backend, caplog):
    first = backend.acquire(a_claim("a"), 0)
    with left_waiting(backend, "a"):
        living = Waiter(backend, "a")
        living.ask()
        backend.release(first)

        assert living.granted().claim is living.claim
    assert "could not be woken" in caplog.text


@pytest.mark.parametrize("listens", [False, True])
def test_a_signal_handler_may_lock_and_release_in_the_middle_of_waiting(redis_url, prefix, listens):
    def steps():
        with closing(backend_at(redis_url, prefix=prefix)) as backend:
            first, other = (backend.acquire(a_claim(name), 0) for name in "ab")
            waiter, quitter = Waiter(backend, "a"), Waiter(backend, "a")
            if listens:
                Waiter(backend, "b").ask()

            def handler():
                backend.acquire(quitter.claim, 30)
                backend.acquire(quitter.claim, 0)
                backend.release(other)

            yield lambda: backend.acquire(waiter.claim, 30), handler

            waiter.ask()
            backend.release(first)
            until(lambda: any(waiter.woken) or (not listens and waiter.ask()))
            assert not any(quitter.woken)
            for holding in backend.holders():
                assert backend.clear(holding.key) == 1

    interrupted_everywhere([redis_listener, redis_waiting], steps, every=5)


def test_a_signal_handler_may_wait_in_the_middle_of_reading_for_others(redis_url, prefix):
    def steps():
        with closing(backend_at(redis_url, prefix=prefix)) as backend:
            first, other = (backend.acquire(a_claim(name), 0) for name in "ab")
            grants = []

            def lead():
                grants.append(wait_for(backend, DEADLINE, "a"))

            def handler():
                with suppress(LockTimeout):
                    wait_for(backend, 0.02, "b")
                backend.release(other)

            def release():
                until(lambda: backend.queue(first.claim.key))
                backend.release(first)

            with running(release):
                yield lead, handler
            assert backend.release(grants.pop()) and list(backend.holders()) == []

    interrupted_everywhere([redis_listener, redis_waiting], steps, every=7)


def test_one_waiting_thread_reads_for_all_and_is_followed_by_the_next(own, monkeypatch):
    backend, server = own
    backend.poll_max = DEADLINE  # it has to be woken
    # Else a server that a busy machine lets wait for a second would be taken for dead.
    monkeypatch.setattr(redis_link, "HEARTBEAT", DEADLINE)
    monkeypatch.setattr(redis_listener, "ABSENT", DEADLINE)
    backend.release(wait_for(backend, 5, "a"))  # the scripts are loaded
    names = "abcde"
    held = {name: backend.acquire(a_claim(name), 0) for name in names}
    with pytest.raises(LockTimeout):  # from now on the process is subscribed
        wait_for(backend, 0.01, "a")
    listener, woken = backend._listener(held["a"].claim.key), []

    def wait(name):
        grant = wait_for(backend, DEADLINE, name)
        woken.append(name)
        backend.release(grant)

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(running(partial(wait, name)))
            until(lambda key=held[name].claim.key: backend.queue(key))
        server.config_resetstat()
        assert f"distlock {listener.channel}" not in {t.name for t in threading.enumerate()}
        for name in "cabed":
            backend.release(held[name])
            until(lambda name=name: name in woken)

    assert woken == list("cabed")
    calls = server.info("commandstats")
    # Nobody had to ask again: a release each of ours and of theirs.
    assert calls["cmdstat_evalsha"]["calls"] == 2 * len(names)
    assert len(server.pubsub_channels()) == 1


def test_a_follower_takes_over_from_a_leader_that_is_stuck(own, monkeypatch):
    backend, _ = own
    monkeypatch.setattr(redis_listener, "ABSENT", 0.5)
    first, other = (backend.acquire(a_claim(name), 0) for name in "ab")
    stuck, go_on, grants = threading.Event(), threading.Event(), []
    receive = redis_waiting.Subscription.receive

    def hang(self, seconds):
        if not stuck.is_set():
            stuck.set()
            go_on.wait(DEADLINE)
        receive(self, seconds)

    monkeypatch.setattr(redis_waiting.Subscription, "receive", hang)
    with running(lambda: backend.release(wait_for(backend, DEADLINE, "a"))):
        assert stuck.wait(DEADLINE)
        with running(lambda: grants.append(wait_for(backend, DEADLINE, "b"))):
            until(lambda: backend.queue(other.claim.key))
            backend.release(other)
            until(lambda: grants)
        go_on.set()
        backend.release(first)

    assert backend.release(grants[0])


@pytest.mark.parametrize(
    "kind", [TimeoutError, RuntimeError, KeyboardInterrupt, ValueError, RedisError, BackendError]
)
def test_what_a_signal_handler_raises_ends_the_wait(redis_url, prefix, kind):
    lock = Lock(f"{prefix}-a", using="redis", wait=DEADLINE, reentrant=False)

    def handler(*_):
        raise kind("from a signal handler")

    listener = registry["redis"].backend._listener(key_of(lock.name))
    until(listener.ensure_subscribed)
    held = threading.Event(), threading.Event()

    def sleeps():
        # Not as soon as it is in the queue: redis-py would take a TimeoutError for its own.
        return any(hasattr(one, "claim") for one in [listener._leader, *listener._followers])

    def hold():
        with lock:
            held[0].set()
            held[1].wait(DEADLINE)

    with running(hold):
        assert held[0].wait(DEADLINE)
        with pytest.raises(kind) as raised, alarmed(sleeps, handler):
            lock.acquire()
        assert raised.value.args == ("from a signal handler",)
        # Others than Ctrl-C let another thread leave the queue.
        until(lambda: [holding.waiters for holding in lock.holders()] == [0])
        held[1].set()


@pytest.fixture
def unreachable(own_redis, proxy):
    """A backend with two connections, whose server is silent on all new ones."""
    made = backend_at(proxy.url)
    for link in [made._pool.connect() for _ in range(2)]:
        made._pool._idle.keep(link)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        proxy.lead_to(silent.getsockname()[1])
        yield made
        made.close()


def test_nobody_waits_for_a_subscription_that_cannot_be_had(own, unreachable):
    backend, _ = own
    first = backend.acquire(a_claim("a"), 0)
    began = monotonic()
    with pytest.raises(LockTimeout):
        wait_for(unreachable, 0.1, "a")
    assert monotonic() - began < 3 < unreachable._recipe.connection_kwargs["socket_timeout"]

    grants = []
    with ExitStack() as stack:
        for _ in range(2):
            work = running(lambda: grants.append(wait_for(unreachable, DEADLINE, "a")))
            stack.enter_context(work)
        until(lambda: len(backend.queue(first.claim.key)) == 2)
        time.sleep(1)
        for freed in (first, None):
            backend.release(freed or grants[0])
            began = monotonic()
            until(lambda number=1 if freed else 2: len(grants) == number)
            assert monotonic() - began < 4


def test_who_cannot_subscribe_waits_no_longer_for_that(own, monkeypatch):
    backend, server = own
    server.execute_command("ACL", "SETUSER", "default", "-subscribe")
    monkeypatch.setattr(redis_listener, "RETRY_MAX", 10.0)
    listener = backend._listener(backend.acquire(a_claim("a"), 0).claim.key)
    listener._retry_pause = 10.0  # it has failed for long
    assert not listener.ensure_subscribed()

    began = monotonic()
    with pytest.raises(LockTimeout):
        wait_for(backend, 0.1, "a")
    assert monotonic() - began < 5


def test_the_thread_for_tasks_rests_while_it_cannot_subscribe(own, monkeypatch, caplog):
    backend, server = own
    grant = backend.acquire(a_claim("a"), 0)
    listener, reads = backend._listener(grant.claim.key), []
    waiter = Waiter(backend, "a")
    waiter.ask()
    read = listener._read

    def refuse():
        raise ConnectionError

    monkeypatch.setattr(listener, "_open", refuse)
    monkeypatch.setattr(listener, "_read", lambda *args: [reads.append(1), read(*args)])
    server.client_kill_filter(_type="pubsub")
    assert waiter.event.wait(5)
    until(lambda: listener._retry_pause == redis_listener.RETRY_MAX)

    assert len(reads) < 5
    assert caplog.text.count("cannot listen for locks: ConnectionError") == 1  # tried again, too


def test_a_thread_that_is_interrupted_while_it_reads_lets_another_one_read(own):
    backend, _ = own
    first, other = (backend.acquire(a_claim(name), 0) for name in "ab")
    reads, grants = threading.Event(), []

    class Interrupt(BaseException):
        pass

    def receive(seconds):
        reads.set()
        until(lambda: backend._listener(first.claim.key)._followers)
        raise Interrupt

    def broken_off():
        waker = Waker()
        wanted = a_claim("a", wake=waker.wake, blocking=True)
        busy = backend.acquire(wanted, DEADLINE)
        subscription = backend._listener(wanted.key)._subscription
        subscription.receive = receive
        with pytest.raises(Interrupt):
            busy.pause(DEADLINE)
        del subscription.receive
        backend.release(Grant(wanted))

    with running(broken_off):
        assert reads.wait(DEADLINE)
        with running(lambda: grants.append(wait_for(backend, DEADLINE, "b"))):
            until(lambda: backend.queue(other.claim.key))
            backend.release(other)
            until(lambda: grants)

    assert backend.release(first) and backend.release(grants[0])


def test_waiting_ends_at_its_deadline_and_leaves_nothing(backend, server, prefix):
    grant = backend.acquire(a_claim("a"), 0)
    waker = Waker()

    with pytest.raises(LockTimeout):
        InThread(backend, a_claim("a", wake=waker.wake), waker).acquired(0.2)

    assert list(server.scan_iter(f"{prefix}:*:[qw]")) == []
    backend.release(grant)


def test_a_forked_child_locks_by_itself_and_leaves_the_parent_alone(backend, processes, prefix):
    other = backend.acquire(a_claim("of another process"), 0)
    worker = processes.start("tests.redis_workers:fork_and_go_on", prefix=prefix)

    assert worker.read() == "child is gone"
    worker.tell("go on")
    backend.release(other)

    assert worker.result() == {"child": 0, "extended": True, "granted": True, "released": True}
