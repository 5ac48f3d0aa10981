"""What worker processes do to locks on a quorum, and helpers that its tests share."""

from __future__ import annotations

import random
from contextlib import contextmanager
from time import sleep

from django.conf import settings
from django.test import override_settings

from distlock_app import BackendError, Lock, LockBusy, LockLost
from distlock_app.backends.redlock import RedlockBackend
from distlock_app.primitives.timing import monotonic
from tests.processes import hear, say
from tests.redis_workers import client_of


@contextmanager
def caches_of(urls):
    """Let CACHES have an alias for each node; yield the aliases."""
    nodes = {
        f"own{number}": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}
        for number, url in enumerate(urls)
    }
    with override_settings(CACHES={**settings.CACHES, **nodes}):
        yield list(nodes)


def quorum_at(urls, **options):
    """Return a backend on nodes of its own."""
    with caches_of(urls) as aliases:
        return RedlockBackend(alias="quorum", location=aliases, **options)


class Nodes:
    """The servers of a quorum, and clients to look at them."""

    def __init__(self, servers):
        self.servers = servers
        self.urls = [server.url for server in servers]
        self.clients = [client_of(url) for url in self.urls]

    def heal(self):
        """Let all run and forget everything."""
        for server, client in zip(self.servers, self.clients, strict=True):
            server.resume()
            server.start()
            client.flushall()

    def holding(self, key):
        """Return the numbers of the nodes that hold the lock."""
        return [at for at, one in enumerate(self.clients) if one.exists(f"distlock:redlock:{key}")]

    def sent(self):
        """Return how many scripts each node was asked to run."""
        stats = [client.info("commandstats") for client in self.clients]
        return [
            sum(one.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))
            for one in stats
        ]

    def close(self):
        for client in self.clients:
            client.close()
        for server in self.servers:
            server.close()


def work(*, name, seconds, ttl=1.0):
    """Take the lock again and again; return when each hold began and ended, and its fence."""
    history = []
    chance = random.Random()
    end = monotonic() + seconds
    while monotonic() < end:
        try:
            hold = Lock(name, using="quorum", ttl=ttl, wait=5, renew=False).acquire()
        except (LockBusy, BackendError):
            continue
        began = monotonic()
        sleep(chance.uniform(0, 0.02))
        history.append((began, min(monotonic(), hold._lease.trusted_until), hold.fence))
        try:
            hold.release()
        except (LockLost, BackendError):
            pass
    return history


def hold_for(*, name, ttl=10.0):
    """Hold the lock until told to let go; return when it was got and ended, and the fence."""
    hold = Lock(name, using="quorum", ttl=ttl, wait=30).acquire()
    began = monotonic()
    say("holding")
    hear()
    ended = monotonic()
    lost = hold.lost
    hold.release()
    return {"hold": (began, ended, hold.fence), "lost": lost}


def wait_to_die(*, name):
    """Wait for the lock for long."""
    say("waits")
    Lock(name, using="quorum", wait=60).acquire()
