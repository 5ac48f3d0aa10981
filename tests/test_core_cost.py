"""What a lock costs in calls, bytecodes and system calls, which do not vary as times do."""

from __future__ import annotations

import asyncio
import queue
import socket
import sys
import threading
from dataclasses import replace
from functools import partial

import pytest

from distlock_app import Lock, locked
from distlock_app.core.registry import registry
from distlock_app.primitives.names import key_of
from tests.cost import (
    PACKAGE,
    POLL,
    block,
    fewest,
    is_bytecode,
    is_call,
    is_own_call,
    methods_called,
    new,
    pair,
)
from tests.engines import running, until


@pytest.mark.parametrize(("work", "most"), [(pair, 28), (block, 30), (new, 34)])
def test_a_lock_on_an_engine_that_does_nothing_costs_few_calls(work, most):
    lock = Lock("a", using="dummy")

    assert fewest(lambda: work(lock), sys.setprofile, is_call) - 2 <= most


@pytest.mark.parametrize("work", [pair, block])
def test_a_lock_in_memory_costs_few_calls_of_our_own(work):
    lock = Lock("a", using="locmem")

    assert fewest(lambda: work(lock), sys.setprofile, is_own_call) <= 35


def test_a_decorated_function_costs_little_more_than_a_block():
    @locked("a", using="dummy")
    def nothing():
        pass

    assert fewest(nothing, sys.setprofile, is_call) - 2 <= 38


@pytest.mark.skipif(sys.version_info[:2] != (3, 13), reason="bytecodes differ between versions")
@pytest.mark.parametrize(("work", "most"), [(pair, 915), (block, 960), (new, 1165)])
def test_a_lock_on_an_engine_that_does_nothing_costs_few_bytecodes(work, most):
    lock = Lock("a", using="dummy")

    assert fewest(lambda: work(lock), sys.settrace, is_bytecode) <= most


@pytest.fixture
def redis_lock(redis_url):
    """A lock on Redis in a process that has not waited for one, whatever tests ran before."""
    registry["redis"].backend.close()
    yield Lock("a", using="redis")
    registry["redis"].backend.close()


@pytest.mark.parametrize(("work", "most"), [(pair, 37), (block, 39), (new, 43)])
def test_a_lock_on_redis_costs_few_calls(work, most, redis_lock):
    assert fewest(lambda: work(redis_lock), sys.setprofile, is_call) - 2 <= most


def test_a_process_that_has_waited_pays_little_for_its_subscription(redis_lock):
    backend = registry["redis"].backend
    assert backend._listener(key_of(redis_lock.name)).ensure_subscribed()

    assert fewest(lambda: block(redis_lock), sys.setprofile, is_own_call) <= 50


@pytest.mark.skipif(sys.version_info[:2] != (3, 13), reason="bytecodes differ between versions")
@pytest.mark.parametrize(("work", "most"), [(pair, 1390), (block, 1435), (new, 1640)])
def test_a_lock_on_redis_costs_few_bytecodes(work, most, redis_lock):
    assert fewest(lambda: work(redis_lock), sys.settrace, is_bytecode) <= most


def test_a_lock_on_redis_costs_four_system_calls(redis_lock):
    def look(called):
        # With a time limit of Python's own, each would begin with a poll().
        assert called.gettimeout() is None

    block(redis_lock)

    done = methods_called(lambda: block(redis_lock), socket.socket, POLL, look=look)
    assert done == ["sendall", "recv"] * 2


def handed_over(lock, count):
    """Return what `count(work)` does, where `work` waits for the lock until it is handed over."""
    backend, key = registry["redis"].backend, key_of(lock.name)
    orders = queue.SimpleQueue()

    def hold_and_pass_on():
        while (held := orders.get()) is not None:
            with lock:
                held.release()
                until(lambda: backend.queue(key))

    def work():
        held = threading.Lock()
        held.acquire()
        orders.put(held)
        held.acquire()
        block(lock)

    with running(hold_and_pass_on):
        try:
            return count(work)
        finally:
            orders.put(None)


def test_a_hand_over_on_redis_costs_few_calls(redis_lock):
    def count(work):
        return fewest(work, sys.setprofile, is_own_call)

    assert handed_over(replace(redis_lock, wait=30), count) <= 84


def test_a_hand_over_on_redis_costs_six_system_calls(redis_lock):
    def count(work):  # in some, a connection may be opened
        return min((methods_called(work, socket.socket, POLL) for _ in range(5)), key=len)

    done = handed_over(replace(redis_lock, wait=30), count)

    assert done == ["sendall", "recv", "poll", "recv", "sendall", "recv"]


def test_open_locks_of_other_tasks_cost_a_coroutine_nothing():
    def lines_of_each(tasks):
        async def hold_all():
            go = asyncio.Event()

            @locked("c{number}", using="dummy")
            async def hold(number):
                await go.wait()

            begun = [asyncio.create_task(hold(number)) for number in range(tasks)]
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.1, go.set)
            await asyncio.gather(*begun)

        def is_own_line(frame, event):
            frame.f_trace_opcodes = False  # ten times as many events
            return event == "line" and frame.f_code.co_filename.startswith(PACKAGE)

        work = partial(asyncio.run, hold_all())
        return fewest(work, sys.settrace, is_own_line, warm=0, tries=1) / tasks

    assert lines_of_each(400) < 1.5 * lines_of_each(40)


def test_locks_of_other_threads_cost_nothing():
    lock = Lock("a", using="dummy")
    alone = fewest(lambda: block(lock), sys.setprofile, is_call)
    done = threading.Event()

    def hold_many():
        holds = [Lock(f"b{number}", using="dummy").acquire() for number in range(100)]
        done.wait()
        for hold in holds:
            hold.release()

    with running(hold_many):
        try:
            assert fewest(lambda: block(lock), sys.setprofile, is_call) <= alone
        finally:
            done.set()
