"""Fixtures of the tests of Redis: backends, and clients to look at their servers."""

from __future__ import annotations

import secrets

import pytest

from tests.proxy import proxy_to
from tests.redis_workers import backend_at, client_of
from tests.redlock_workers import Nodes
from tests.servers import RedisServer


@pytest.fixture
def prefix():
    return f"test{secrets.token_hex(4)}"


@pytest.fixture
def server(redis_url):
    client = client_of(redis_url)
    yield client
    client.close()


@pytest.fixture
def backend(redis_url, prefix, server):
    made = backend_at(redis_url, prefix=prefix)
    yield made
    made.close()
    for key in server.scan_iter(f"{prefix}:*"):
        server.delete(key)


@pytest.fixture
def own(own_redis):
    """A backend with a server for itself, and a client to look at it."""
    made = backend_at(own_redis.url)
    client = client_of(own_redis.url)
    yield made, client
    made.close()
    client.close()


@pytest.fixture
def proxy(own_redis):
    """A way to the test's own server that can swallow an answer."""
    with proxy_to(own_redis.port) as made:
        made.url = own_redis.url.replace(str(own_redis.port), str(made.port))
        yield made


@pytest.fixture(scope="module")
def five(private_server):
    """The nodes of a quorum, which the tests of a module share."""
    made = Nodes([private_server(RedisServer) for _ in range(5)])
    yield made
    made.close()


@pytest.fixture
def nodes(five):
    """The same, all of them running and empty."""
    five.heal()
    yield five
    five.heal()
