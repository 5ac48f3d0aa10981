"""What worker processes do to locks on Redis, and helpers that its tests share."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import redis
from django.conf import settings
from django.test import override_settings

from distlock_app.backends.etcd import gateway
from distlock_app.backends.redis import RedisBackend, link
from distlock_app.backends.redis.scripts import pack
from distlock_app.backends.redlock import nodes
from distlock_app.claims import Grant
from distlock_app.core.waiting import InThread, arun
from distlock_app.core.wakers import AsyncWaker, Waker
from distlock_app.primitives.names import key_of
from distlock_app.primitives.timing import monotonic
from distlock_app.testing.claims import a_claim
from tests.engines import alarmed, closing_loop, until
from tests.processes import hear, say
from tests.proxy import Proxy

DEADLINE = 60.0


def backend_at(url: str, *, prefix: str = "distlock", **more: Any) -> RedisBackend:
    """Return a backend on an alias of its own.

    `more` are options of the backend, and in capitals OPTIONS of the alias.
    """
    cache = {key: more.pop(key) for key in list(more) if key.isupper()}
    options = {"CLIENT_CLASS": "django_redis.client.DefaultClient", **cache}
    alias = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url, "OPTIONS": options}
    with override_settings(CACHES={**settings.CACHES, "own": alias}):
        return RedisBackend(alias="redis", location="own", prefix=prefix, **more)


def wait_for(backend: RedisBackend, wanted: float, name: str, **options: Any) -> Grant:
    """Get the lock as the core does, within `wanted` seconds."""
    waker = Waker()
    wanting = a_claim(name, wake=waker.wake, blocking=True, **options)
    grant, _ = InThread(backend, wanting, waker).acquired(wanted)
    return grant


class Waiter:
    """A claim that waits, without the core: what its wake is called with is in `woken`."""

    def __init__(self, backend: RedisBackend, name: str, **options: Any) -> None:
        self.backend = backend
        self.event = threading.Event()
        self.woken: list[Grant | None] = []
        self.claim = a_claim(name, wake=self.wake, **options)

    def wake(self, grant: Grant | None) -> None:
        self.woken.append(grant)
        self.event.set()

    def ask(self) -> Any:
        """Try once, as one who will go on waiting."""
        if isinstance(self.backend, RedisBackend):
            # Longer than the second that a lock gives it: the test waits for its message.
            # On a busy machine the first try to subscribe may fail.
            until(self.backend._listener(self.claim.key).ensure_subscribed)
        return self.backend.acquire(self.claim, 30)

    def granted(self, within: float = 5.0) -> Grant:
        """Return the grant that the next message brings."""
        assert self.event.wait(within), "not woken"
        self.event.clear()
        grant = self.woken[-1]
        assert grant is not None
        return grant


class Untold(AsyncWaker):
    """Gives nothing back if its event loop was closed: only the backend does."""

    on_loop_closed = property(lambda self: None, lambda self, call: None)
    waits = False

    async def wait(self, *args: Any) -> Grant | None:
        self.waits = True
        return await super().wait(*args)


@contextmanager
def left_waiting(backend: Any, name: str) -> Iterator[None]:
    """Let a task wait for the lock whose event loop was closed without a word to it."""

    wakers = []

    async def wait() -> None:
        wakers.append(Untold())
        await arun(backend, a_claim(name, wake=wakers[0].wake), None, wakers[0])

    if isinstance(backend, RedisBackend):
        until(backend._listener(key_of(name)).ensure_subscribed)
    # Not as soon as it is in the queue: the answer to its try may still be on the way.
    with closing_loop(wait, lambda: bool(wakers) and wakers[0].waits):
        yield


def ended_by_a_signal(call: Callable[[], object], *proxies: Proxy) -> None:
    """Make a call until a signal handler raises; the proxies have then what it has sent.

    They pass it on 0.2 s later, and its answer is waited for as long as that takes.
    """

    class Interrupted(BaseException):
        pass

    def interrupt(*_: Any) -> None:
        for proxy in proxies:
            proxy.delay = 0.0  # for what is sent from now on
        raise Interrupted

    for proxy in proxies:
        proxy.delay, proxy.delayed = 0.2, 0
    with ExitStack() as patient:
        for module in (link, gateway, nodes):
            patient.enter_context(patch.object(module, "FINISH_WITHIN", DEADLINE))
        with suppress(Interrupted), alarmed(lambda: all(p.delayed for p in proxies), interrupt):
            call()
            raise AssertionError("the call had ended before the signal came")


def count(*, path: str, prefix: str, times: int, threads: int) -> list[int]:
    """Raise the number in a file under the lock, in several threads; return the fences."""
    backend = RedisBackend(alias="redis", location="locks", prefix=prefix)
    fences: list[int] = []

    def work() -> None:
        for _ in range(times):
            grant = wait_for(backend, DEADLINE, "counter")
            number = int(Path(path).read_text())
            time.sleep(0.0005)
            Path(path).write_text(str(number + 1))
            fences.append(grant.fence or 0)
            assert backend.release(grant)

    group = [threading.Thread(target=work) for _ in range(threads)]
    for thread in group:
        thread.start()
    for thread in group:
        thread.join(DEADLINE)
    backend.close()
    return fences


def wait_once(
    *, prefix: str, name: str, ttl: float = 30.0, limit: int = 1, using: str = "redis"
) -> dict[str, float | int | None]:
    """Take a place in the queue, say so, and tell of the grant that arrives: also how old it is."""
    params = settings.DISTLOCK[using]
    cluster = params.get("OPTIONS", {}).get("CLUSTER", ())
    backend = RedisBackend(
        alias=using, location=params.get("LOCATION"), cluster=cluster, prefix=prefix
    )
    waiter = Waiter(backend, name, ttl=ttl, limit=limit)
    assert not waiter.ask()
    say("waits")
    grant = waiter.granted(DEADLINE)
    assert grant.asked_at is not None
    age = monotonic() - grant.asked_at
    backend.release(grant)
    backend.close()
    return {"age": age, "fence": grant.fence, "ttl": grant.ttl}


def fork_and_go_on(*, prefix: str) -> dict[str, Any]:
    """Hold a lock and wait for another over the life of a forked child that locks too."""
    backend = RedisBackend(alias="redis", location="locks", prefix=prefix)
    mine = wait_for(backend, 5, "of the parent")
    waiter = Waiter(backend, "of another process")
    assert not waiter.ask()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: that is what is tested
        child = os.fork()
    if child == 0:
        backend.after_fork()
        own = wait_for(backend, 5, "of the child")
        second = Waiter(backend, "of the child")
        waits = not second.ask()
        fine = backend.release(own) and waits and second.granted().claim is second.claim
        backend.close()
        os._exit(0 if fine else 1)
    _, status = os.waitpid(child, 0)
    say("child is gone")
    hear()
    answer = {
        "child": os.waitstatus_to_exitcode(status),
        "extended": backend.extend(mine, 30),
        "granted": waiter.granted().fence is not None,
        "released": backend.release(mine),
    }
    backend.close()
    return answer


def listeners(backend: RedisBackend, key: str) -> int:
    """Return how many processes listen at the server of the lock."""
    node = backend._pool.node(backend._lock(key))
    pattern = f"{backend._channels}*".encode()
    return len(node.ask(pack(b"PUBSUB", b"CHANNELS", pattern))[0])


def client_of(url: str) -> redis.Redis:
    """Return a client to look at the server with."""
    return redis.Redis.from_url(url, decode_responses=True)
