"""Backend calls for event loops: in a few threads per backend, or in a thread of their own."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from ..backends.base import BaseLockBackend
from ..claims import Claim
from ..errors import BackendError
from ..primitives.forks import in_child
from ..primitives.threads import started

THREADS = 8  # per backend, so a backend that hangs does not delay the others
HOLDERS = 4  # more, for holders: a release must not queue behind the tries of waiting tasks

# Takes a backend, a function and its arguments, and starts the call.
Begin = Callable[..., Future[Any]]


class Threads:
    """The threads of one backend."""

    def __init__(self) -> None:
        self.for_all = ThreadPoolExecutor(THREADS, thread_name_prefix="distlock-io")
        self.for_holders = ThreadPoolExecutor(HOLDERS, thread_name_prefix="distlock-io")
        self.first_tries = threading.Semaphore(THREADS // 2)  # limits those under way


_threads: weakref.WeakKeyDictionary[BaseLockBackend, Threads] = weakref.WeakKeyDictionary()
in_child(_threads.clear)


def threads_of(backend: BaseLockBackend) -> Threads:
    """Return the threads of `backend`."""
    return _threads.get(backend) or _threads.setdefault(backend, Threads())


async def in_thread(
    backend: BaseLockBackend,
    function: Callable[..., Any],
    *args: Any,
    cancelled: Callable[[], None] | None = None,
) -> Any:
    """Call `function` in the threads of `backend` that are for holders.

    A cancellation does not wait for the call; `cancelled` is called when the call has ended.
    """
    return await ended(begin(backend, function, *args, holder=True), cancelled)


async def ended(
    request: Future[Any], cancelled: Callable[[], None] | None, *, at_once: bool = False
) -> Any:
    """Wait for a call. `cancelled`: see `in_thread`; with `at_once`, it ends the call."""
    if cancelled is not None:
        loop = asyncio.get_running_loop()
        # If the loop was closed, the answer is dropped silently.
        request.add_done_callback(lambda _: cancelled() if loop.is_closed() else None)
    try:
        return await asyncio.wrap_future(request)
    except BaseException as error:
        # Cancelled, or dropped (GeneratorExit); not what the call raised.
        if cancelled is not None and not isinstance(error, Exception):
            if at_once:
                cancelled()
            request.add_done_callback(lambda _: cancelled())
        raise
    finally:
        del request  # it refers to the error, and that to this frame


def begin(
    backend: BaseLockBackend, function: Callable[..., Any], *args: Any, holder: bool = False
) -> Future[Any]:
    """Make the call in one of the threads of `backend`; raise BackendError if it has none.

    `holder`: in one that is kept for holders.
    """
    threads = threads_of(backend)
    pool = threads.for_holders if holder else threads.for_all
    request: Future[Any] = Future()
    try:
        pool.submit(_answer, [request, function, args])
    except RuntimeError:
        # The main thread has ended, and another still runs its event loop. Or no thread could be
        # started, but the call is in the queue, and a thread that is there may have begun it.
        if request.cancel():
            return begin_alone(backend, function, *args)
    return request


def _answer(call: list[Any]) -> None:
    """Make the call, unless it was cancelled."""
    request, function, args = call
    call.clear()  # an error refers to its thread's frames, which would refer to the request
    if not request.set_running_or_notify_cancel():
        return
    try:
        answer = function(*args)
    except BaseException as error:
        request.set_exception(error)
        del request  # it refers to the error, and that to this frame
    else:
        request.set_result(answer)


class Seen(NamedTuple):
    """The result of `look()` instead of a try."""

    busy: Any


def begin_first(backend: BaseLockBackend, *call: Any) -> Future[Any]:
    """Like `begin`, for a task's first try, which may take a second on a locked row.

    Half of the threads are reserved for other locks; beyond the other half, `look()` answers.
    """
    return begin(backend, _try_first, backend, *call)


def _try_first(
    backend: BaseLockBackend, acquire: Callable[..., Any], claim: Claim, wait: float | None
) -> Any:
    room = threads_of(backend).first_tries
    with_room = room.acquire(blocking=False)
    try:
        if not with_room and (answer := backend.look(claim)) is not None:
            return Seen(answer)
        return acquire(claim, wait)
    finally:
        if with_room:
            room.release()


def begin_alone(backend: BaseLockBackend, function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call it in a daemon thread: in the pool, waiters could block the holder's release."""
    request: Future[Any] = Future()
    if not started(partial(_answer, [request, function, args]), "distlock-wait"):
        raise BackendError(f"{backend.alias!r} was not asked: no thread could be started.")
    return request
