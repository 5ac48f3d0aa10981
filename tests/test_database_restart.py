"""The lock table while its server crashes and restarts."""

from __future__ import annotations

import threading

import pytest

from distlock_app import Lock
from distlock_app.backends.database import DatabaseBackend
from distlock_app.core.registry import registry
from distlock_app.errors import BackendError
from tests.database_workers import grab

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.slow
def test_a_restart_of_the_server_is_not_seen_once_it_is_back(own_server):
    backend = DatabaseBackend(alias="default", location="own")
    held = grab(backend, "a")
    own_server.kill()

    with pytest.raises(BackendError) as unknown:
        backend.extend(held, 30)
    own_server.start()

    assert isinstance(unknown.value.__cause__, Exception)
    assert backend.extend(held, 30) is True
    own_server.restart()
    assert backend.release(held) is True
    backend.close()


@pytest.mark.slow
def test_who_waits_while_the_server_restarts_is_served_afterwards(own_server, settings):
    settings.DISTLOCK = {
        "default": {
            "BACKEND": "distlock_app.backends.database.DatabaseBackend",
            "LOCATION": "own",
        }
    }
    backend = DatabaseBackend(alias="holder", location="own")
    held = grab(backend, "a")
    got = threading.Event()

    def wait():
        with Lock("a", wait=60):
            got.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not registry["default"].backend._sessions.queues.connections() and waiter.is_alive():
        got.wait(0.01)

    own_server.kill()
    own_server.start()

    assert not got.is_set()
    assert backend.release(held) is True
    assert got.wait(60)
    waiter.join(60)
    backend.close()
    registry.reset()
