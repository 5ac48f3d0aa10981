"""What few workers do: storms of cancelled tasks, holds passed on, savepoints rolled back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from django.db import Error, connection, connections, transaction

from distlock_app import BackendError, Hold, Lock, LockBusy, LockLost
from distlock_app.backends.database import DatabaseBackend
from distlock_app.core.registry import registry
from tests.faults.turn import Turn

if TYPE_CHECKING:
    from tests.faults.workers import Worker

STORM = 8  # tasks
# The ttl of their locks: a grant that a cancelled task left behind keeps others waiting for so
# long that the checker accuses it.
KEPT = 6.0


def oddities() -> list[Callable[[Worker], None]]:
    """Return those that the alias `default` allows."""
    backend = registry["default"].backend
    dumps = [pass_on_as_text] if backend.expires else []
    return [storm, pass_on, *dumps, *([roll_back] if isinstance(backend, DatabaseBackend) else [])]


def storm(worker: Worker) -> None:
    """Let tasks wait for one lock, and cancel most of them."""
    name = worker.chance.choice(worker.names)

    async def all_of_them() -> None:
        await asyncio.gather(*(_wait_or_be_cancelled(worker, name) for _ in range(STORM)))

    asyncio.run(all_of_them())


async def _wait_or_be_cancelled(worker: Worker, name: str) -> None:
    turn = Turn(worker, name=name, ttl=KEPT)
    task = asyncio.create_task(turn.lock.aacquire())
    if worker.chance.random() < 0.8:
        await asyncio.sleep(worker.chance.choice([0.0, 0.001, 0.01, 0.1]))
        task.cancel()
    try:
        hold = await task
    except (LockBusy, BackendError, asyncio.CancelledError) as error:
        turn.failed(error)
        return
    turn.note("got", fence=hold.fence)
    turn.write(hold)
    await turn.arelease(hold)


def pass_on(worker: Worker) -> None:
    """Let another thread write, too, and release."""
    turn = Turn(worker)
    if (hold := turn.acquire()) is not None:
        turn.write(hold)
        _elsewhere(_write_and_release, turn, hold)


def pass_on_as_text(worker: Worker) -> None:
    """Dump the hold for another thread, which resumes it."""
    turn = Turn(worker)
    if (hold := turn.acquire()) is None:
        return
    try:
        text = hold.dump()
    except (LockLost, BackendError):
        turn.release(hold)
    else:
        _elsewhere(_resume, turn, text)


def _resume(turn: Turn, text: str) -> None:
    try:
        hold = Lock.resume(text)
    except (LockLost, BackendError) as error:
        turn.note("leave")
        turn.note("lost" if isinstance(error, LockLost) else "unknown")
    else:
        _write_and_release(turn, hold)


def _write_and_release(turn: Turn, hold: Hold) -> None:
    turn.write(hold)
    turn.release(hold)


def _elsewhere(work: Callable[..., None], *arguments: object) -> None:
    def run() -> None:
        try:
            work(*arguments)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


class _Undone(Exception):
    pass


def roll_back(worker: Worker) -> None:
    """Take and release a lock in a savepoint that is rolled back; the release is at the commit."""
    turn, answer = None, "released"
    try:
        with transaction.atomic(), suppress(_Undone), transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
            turn = Turn(worker)
            if (hold := turn.acquire()) is None:
                turn = None
            else:
                turn.write(hold)
                turn.note("leave")
                hold.release()
            raise _Undone
    except LockLost:
        answer = "lost"
    except (BackendError, Error):
        answer = "unknown"
        connection.close()
    if turn is not None:
        turn.note(answer)
