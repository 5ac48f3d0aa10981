"""What worker processes of the core's tests do: mostly fork, and say what became of the locks."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from contextlib import suppress
from types import SimpleNamespace

import django
from django.db import connection, transaction
from django.test import override_settings

from distlock_app import Lock, LockLost, NotHeld
from distlock_app.core.registry import registry
from distlock_app.core.releasing import releaser
from distlock_app.core.renewal import renewer
from distlock_app.primitives import forks
from distlock_app.primitives.identity import new_token
from distlock_app.primitives.timing import monotonic
from tests.engines import renewed

FAKE = {"BACKEND": "tests.engines.FakeBackend"}
CHILD_DEADLINE = 30


def engine():
    """Make `default` a FakeBackend, and return it."""
    override_settings(DISTLOCK={"default": FAKE}).enable()
    return registry["default"].backend


def in_child(work, fork=os.fork):
    """Return what `work` returns in a forked child, or raise what became of it."""
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        signal.alarm(CHILD_DEADLINE)
        try:
            answer = {"result": work()}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = json.loads(file.read() or '{"error": "the child died or hung"}')
    os.waitpid(pid, 0)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["result"]


def fork_in_c():
    """Fork as uWSGI does, without a word to Python: while no thread asks for the interpreter.

    A child would wait for such a thread, which it does not have.
    """
    before = None
    while before != (before := where_threads_are()):
        time.sleep(0.1)
    return ctypes.PyDLL(None).fork()


def where_threads_are():
    """Return the instruction of each thread: the same for a while if it waits for something."""
    return {number: frame.f_lasti for number, frame in sys._current_frames().items()}


def _raised(work, *errors):
    try:
        work()
    except errors as error:
        return type(error).__name__
    return None


def draw_tokens_in_a_child():
    """Return how many tokens child and parent have drawn that no other has, of 600."""
    new_token()  # the parent has some in stock when it forks
    children = [in_child(lambda: [new_token() for _ in range(200)]) for _ in range(2)]
    return len({*children[0], *children[1], *(new_token() for _ in range(200))})


def leave_the_with_in_a_child():
    backend = engine()
    warnings.simplefilter("error")
    with Lock("a", ttl=3) as hold:
        asked = len(backend.asked)

        def work():
            return {
                "lost": hold.lost,
                "check": _raised(hold.check, LockLost),
                "extend": _raised(hold.extend, LockLost),
                "release": _raised(hold.release, NotHeld),
                "expires_in": hold.expires_in,
            }

        child = in_child(work)
        pid = os.getpid()
        reader, writer = os.pipe()
        if os.fork() == 0:
            pass  # and goes on, out of the with
    if os.getpid() != pid:
        time.sleep(1.5)  # nothing renews in the child either, after a third of the ttl
        os.write(writer, json.dumps(backend.asked[asked:]).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader) as file:
        asked_by_child = json.loads(file.read())
    gc.collect()
    return {"child": child, "asked by child": asked_by_child, "mine": hold.lost}


def take_the_same_lock_in_a_child():
    backend = engine()
    with Lock("a", ttl=30) as mine:
        Lock("warm", ttl=30).acquire().release()

        def work():
            asked = len(backend.asked)
            with Lock("a", ttl=3) as hold:
                renewed(hold)
                fresh = hold.fence != mine.fence
            return {"fresh": fresh, "asked": sorted(set(backend.asked[asked:]))}

        child = in_child(work)
        mine.check()
    return child


def lock_in_workers_of_uwsgi():
    """Return what a worker does whose fork Python does not see, and one that it sees."""
    engine()
    calls = []
    forks.in_child(lambda: calls.append("anew"))
    uwsgi = SimpleNamespace(post_fork_hook=lambda: calls.append("earlier hook"))
    sys.modules["uwsgi"] = uwsgi
    forks.hook_into_uwsgi()

    def work():
        uwsgi.post_fork_hook()
        with Lock("b", ttl=3) as hold:
            renewed(hold)
        return {"calls": calls, "lost": mine.lost, "tokens": [new_token() for _ in range(100)]}

    with Lock("a", ttl=3) as mine:
        renewed(mine)  # by threads that no child has
        answers = [in_child(work, fork) for fork in (fork_in_c, os.fork)]
    tokens = {new_token() for _ in range(100)}.union(*(each.pop("tokens") for each in answers))
    return {"workers": answers, "tokens": len(tokens), "calls here": calls}


def use_asyncio_in_a_child():
    engine()

    async def use():
        async with Lock("a"):
            await asyncio.sleep(0.01)
        return True

    asyncio.run(use())
    return in_child(lambda: asyncio.run(use()))


def leave_an_atomic_lock_in_a_child():
    engine()
    told = []
    connection.ensure_connection()
    with Lock("a", atomic=True):
        pid = os.getpid()
        reader, writer = os.pipe()
        if os.fork() == 0:
            for name in ("commit", "rollback", "set_autocommit"):
                setattr(connection, name, lambda *a, name=name, **k: told.append(name))
    if os.getpid() != pid:
        os.write(writer, json.dumps(told).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader) as file:
        return json.loads(file.read())


def end_the_transaction_in_a_child():
    backend = engine()
    with transaction.atomic():
        with Lock("a"):
            pass

        def work():
            asked = len(backend.asked)
            if os.environ.get("COMMITS"):
                for _, function, _ in connection.run_on_commit:
                    function()
            connection.run_on_commit.clear()
            releaser.drain()
            return backend.asked[asked:]

        os.environ["COMMITS"] = "1"
        answers = [in_child(work)]
        del os.environ["COMMITS"]
        answers.append(in_child(work))
        held = bool(list(backend.holders()))
    return {"children": answers, "held": held, "free": not list(backend.holders())}


def roll_back_at_the_end_of_a_child(method):
    """Return whether the lock is free when the child of multiprocessing has ended."""
    child = multiprocessing.get_context(method).Process(target=roll_back)
    child.start()
    child.join(CHILD_DEADLINE)
    return child.exitcode or not Lock("rolled back").locked()


def roll_back():
    django.setup()
    weakref.finalize(releaser, lambda: releaser._under_way and os._exit(3))
    with suppress(ValueError), transaction.atomic(), Lock("rolled back", wait=0):
        raise ValueError


def modules_of_the_first_lock(using):
    """Return what is imported by the first lock of a process, once its backend is made."""
    _ = registry[using]
    before = set(sys.modules)
    with Lock("a", using=using):
        pass
    return sorted(sys.modules.keys() - before)


def fork_while_threads_lock(forks):
    engine()
    stop = threading.Event()

    # A child that is forked in the middle of an import can never import that module: all of them
    # lock once before the first fork.
    locked = [threading.Event() for _ in range(4)]

    def hammer(number):
        while not stop.is_set():
            # A short ttl, so that the renewer has something to do at the fork.
            with suppress(LockLost), Lock(f"b{number % 2}", ttl=0.3, wait=None):
                locked[number].set()

    async def ahammer():
        while not stop.is_set():
            async with Lock("c", wait=None):
                locked[3].set()

    threads = [threading.Thread(target=hammer, args=(n,), daemon=True) for n in range(3)]
    threads.append(threading.Thread(target=lambda: asyncio.run(ahammer()), daemon=True))
    for thread in threads:
        thread.start()
    assert all(event.wait(CHILD_DEADLINE) for event in locked)

    def work():
        for name in ("a", "b0", "b1", "c"):
            with Lock(name, ttl=30, wait=0) as hold:
                hold.check()
        with Lock("a", ttl=30) as hold:
            renewer._schedule(hold._lease, monotonic())
            renewed(hold)
        return "fine"

    answers = [in_child(work) for _ in range(forks)]
    stop.set()
    for thread in threads:
        thread.join(10)
    return answers
