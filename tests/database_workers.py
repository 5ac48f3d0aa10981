"""What worker processes do to the lock table, and helpers that its tests share."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from django.db import connections

from distlock_app import Lock
from distlock_app.backends.database import DatabaseBackend, sql
from distlock_app.backends.sessions import link
from distlock_app.backends.sessions.pool import Contended
from distlock_app.claims import Busy, Grant
from distlock_app.core.registry import registry
from distlock_app.errors import BackendError
from distlock_app.testing.claims import a_claim
from tests.engines import until
from tests.processes import hear, say

DEADLINE = 60.0


def stop_waiting(sessions: Any) -> None:
    """Let the claims leave that still wait: they are in no waiting loop that does it."""
    for queue in list(sessions.queues.by_key.values()):
        for waiter in list(queue.waiters):
            sessions.queues.leave(waiter)


def parked(sessions: Any) -> int:
    """Count the connections that stay with claims, or are about to."""
    return int(sessions._queue) - len(sessions.slots)


def close(backend: DatabaseBackend) -> None:
    """End all connections of a backend, also those that wait."""
    stop_waiting(backend._sessions)
    backend.close()


def lock_table(request: Any) -> Iterator[DatabaseBackend]:
    """The lock table in the second database, as one process has it, by each kind of SQL."""
    if request.param == "generic":
        request.getfixturevalue("generic_dialect")
    backend = DatabaseBackend(alias="default", location="locks")
    yield backend
    close(backend)


def grab(backend: DatabaseBackend, name: str, **options: Any) -> Grant:
    """Try until the lock is ours."""
    wanted = a_claim(name, **options)
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        grant = backend.acquire(wanted, 0)
        if isinstance(grant, Grant):
            return grant
        time.sleep(0.002)
    raise AssertionError(f"{name} never came free")


def given_back(backend: DatabaseBackend, grant: Grant) -> bool:
    """Release it; return whether it was ours, or False if that is to be asked again."""
    with suppress(Contended):  # others had the row for too long
        return backend.release(grant)
    return False


def take_each(*, prefix: str, names: int) -> list[int]:
    """Take and release every one of `names` locks; return the fences."""
    backend = DatabaseBackend(alias="default", location="locks")
    fences = []
    for number in range(names):
        grant = grab(backend, f"{prefix}{number}")
        fences.append(grant.fence or 0)
        assert backend.release(grant)
    backend.close()
    return fences


def count(*, path: str, times: int, generic: bool = False) -> list[int]:
    """Raise the number in a file under the lock, `times` times; return the fences."""
    if generic:
        sql.DIALECTS.clear()
    backend = DatabaseBackend(alias="default", location="locks")
    fences = []
    for _ in range(times):
        grant = grab(backend, "counter")
        number = int(Path(path).read_text())
        time.sleep(0.0005)
        Path(path).write_text(str(number + 1))
        fences.append(grant.fence or 0)
        until(partial(given_back, backend, grant))
    backend.close()
    return fences


def wait_in_a_task(*, name: str) -> None:
    """Wait for a lock in an event loop, until Ctrl-C."""
    asyncio.run(Lock(name, using="locks", wait=DEADLINE).aacquire())


def fork_and_go_on(*, name: str, at_exit: str) -> dict[str, Any]:
    """Hold a lock over the life of a forked child; say which connections were used."""
    backend = DatabaseBackend(alias="default", location="locks")
    grant = grab(backend, name)
    before = connection_id(backend)
    faulthandler.cancel_dump_traceback_later()  # its thread is missed at the child's exit
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(said, 2)
        mine = grab(backend, f"{name} of the child")
        fine = backend.release(mine) and connection_id(backend) != before
        if at_exit == "exit":
            sys.exit(0 if fine else 1)  # the interpreter frees what it has
        os._exit(0 if fine else 1)
    os.close(said)
    _, status = os.waitpid(child, 0)
    answer = {
        "child": os.waitstatus_to_exitcode(status),
        "said": os.read(heard, 1000).decode(),
        "same": connection_id(backend) == before,
        "parked": grant.session is None or _answers(grant.session.session),
        "released": backend.release(grant),
    }
    backend.close()
    return answer


def _answers(session: Any) -> bool:
    try:
        session.cursor.execute("SELECT 1")
    except session.wrapper.Database.Error:
        return False
    return bool(session.cursor.fetchall())


def connection_id(backend: DatabaseBackend) -> int:
    """Return the server's number of the connection used last; on SQLite its address."""

    def ask(session: Any) -> int:
        vendor = session.wrapper.vendor
        if vendor == "sqlite":
            return id(session.wrapper)
        call = {"mysql": "CONNECTION_ID()", "postgresql": "pg_backend_pid()"}[vendor]
        session.cursor.execute(f"SELECT {call}")
        return int(session.cursor.fetchone()[0])

    return backend._sessions.ask(ask)


def give_up_a_wait(*, name: str, port: int) -> None:
    """Wait for a lock, by way of a port; give that up when told to."""
    connections["locks"].settings_dict.update(HOST="127.0.0.1", PORT=port)
    backend = DatabaseBackend(alias="default", location="locks")
    for session in [backend._sessions.lend() for _ in range(3)]:
        backend._sessions.give_back(session)
    wanted = a_claim(name)
    busy = backend.acquire(wanted, None)
    assert isinstance(busy, Busy)
    assert busy.wake_fd is not None
    say("waits")
    hear()
    vars(link)["ANSWER_WAIT"] = 0.5
    with suppress(BackendError):
        backend.release(Grant(wanted))


def migrate() -> None:
    """Make the tables where the environment says."""
    from django.core.management import call_command

    call_command("migrate", "distlock_app", verbosity=0)


def lock_without_files(spare):
    """Lock while the process can open only so many files; return what became of it."""
    outcomes = []

    def take(name, wait):
        try:
            Lock(name, using="locks").acquire(wait).release()
            outcomes.append("fine")
        except Exception as error:
            outcomes.append(type(error).__name__)

    def take_elsewhere(name, wait):
        thread = threading.Thread(target=take, args=(name, wait))
        thread.start()
        thread.join()

    def leave(files):
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + files, limits[1]))

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Lock("a", using="locks"):
        take_elsewhere("a", 0.1)
        leave(0)
        take_elsewhere("a", 0.1)  # on the connection that is there
        registry["locks"].backend.close()
        leave(spare)
        take("b", 0)  # on a new one
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        take("b", 0)
    return outcomes
