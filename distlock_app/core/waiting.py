"""The waiting loop: retries, wake-ups and time limits, for threads and event loops.

The loop is a generator that does nothing itself: it yields calls to make and pauses to take.
`run` makes them in the calling thread; `arun` makes the calls in a small pool of threads and
takes the pauses in the event loop, so that a waiting task occupies no thread. Only a call that
itself waits, of an engine that `blocks`, has a thread of its own.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from ..backends.base import BaseLockBackend
from ..claims import Claim, Grant
from ..errors import BackendError, LockBusy, LockError, LockTimeout
from ..primitives.names import shown
from ..primitives.timing import Deadline, full_jitter, monotonic, trusted_for

# A claim that ends by itself is asked for this much later than the engine said, in seconds.
AFTER_EXPIRY = 0.005
# A waiter that the server will wake looks this often all the same, in seconds: a lock that was
# cleared, or whose owner hangs, wakes no waiter.
LOOK_EVERY = 1.0
IO_THREADS = 8  # of each backend: one that hangs holds up no other

# ("call", function, arguments) answers what the function returns, and so do ("wait", ...), which
# may take as long as the caller is ready to wait, and ("first", ...), the first try of a task;
# ("pause", seconds, file descriptor or None) answers the grant that was pushed meanwhile, or None;
# it ends when the descriptor is readable.
Step = tuple[Any, ...]


def acquired(
    backend: BaseLockBackend, claim: Claim, wait: float | None, waker: Waker
) -> tuple[Grant, float]:
    """Run `acquiring` in this thread: a free lock is granted without any of its steps."""
    asked_at = monotonic()
    answer: Any = backend.acquire(claim, wait)
    if answer:
        began = asked_at if answer.asked_at is None else answer.asked_at
        # Surely trusted; else asked exactly.
        if answer.ttl is None and monotonic() < began + claim.ttl / 2:
            return answer, began
        if (exactly := _trusted(answer, asked_at)) is not None:
            return answer, exactly
    steps = acquiring(backend, claim, wait, first=(asked_at, answer))
    del answer  # it may hold a ticket of a queue, which the steps alone keep or drop
    grant, began = run(steps, waker)
    return grant, began


def acquiring(
    backend: BaseLockBackend,
    claim: Claim,
    wait: float | None,
    *,
    first: tuple[float, Any] | None = None,
) -> Generator[Step, Any, tuple[Grant, float]]:
    """Get the claim granted; return the grant and a time before which its lease cannot begin.

    Raise LockBusy (wait=0), LockTimeout, or BackendError: at once if the first try fails so,
    and if it still does at the deadline when the engine had answered before. `first`: when
    the first try was made already, and its answer.
    """
    deadline = Deadline(wait, since=first[0] if first else None)
    attempt = 0
    tried = first is not None  # not merely looked, because too many others try
    failures: list[LockError] = []
    answer: Any = None
    refusal: Any = None  # kept, for it may hold a ticket of a queue
    while True:
        left = deadline.remaining()
        last = left == 0
        asked_at, failures = monotonic(), []
        try:
            if first is not None:
                asked_at, answer, refusal, first, last = *first, first[1], None, wait == 0
            elif (
                not tried
                or (last and not _keeps_nothing(backend, refusal))
                or (answer := (yield ("call", backend.look, claim))) is None
            ):
                asked_at = monotonic()
                kind = "wait" if backend.blocks and not last else "call" if tried else "first"
                answer = yield (kind, backend.acquire, claim, left)
                tried = not isinstance(answer, _Seen)
                answer = refusal = answer if tried else answer.busy
            # Such as a row that is locked: to ask again would take as long again.
            last = last or (_keeps_nothing(backend, refusal) and deadline.remaining() == 0)
        except BackendError as error:
            if attempt == 0 or last:
                raise
            failures, answer, refusal = [error], None, None
        free_in = getattr(answer, "free_in", None)
        if not answer and not last:
            wake_fd = getattr(refusal, "wake_fd", None)
            notified = wake_fd is not None or getattr(refusal, "will_wake", False)
            pause = _pause(backend, attempt, free_in, notified=notified, failed=bool(failures))
            answer = yield ("pause", deadline.cap(pause), wake_fd)
        if answer:
            if (began := _trusted(answer, asked_at)) is not None:
                return answer, began
            # The process or the network slept for longer than the lease: it may be over.
            failures += yield from _giving_back(backend, answer)
        if last:
            # Taken out: its traceback will refer to this frame.
            raise (failures or [busy_error(claim.name, wait, free_in)]).pop()
        attempt += 1


def _keeps_nothing(backend: BaseLockBackend, refusal: Any) -> bool:
    """Return whether the engine keeps nothing of the claim that a last try would take away."""
    polled = not (backend.blocks or backend.pushes or backend.queues)
    return polled and getattr(refusal, "ticket", None) is None


def _giving_back(backend: BaseLockBackend, grant: Grant) -> Generator[Step, Any, list[LockError]]:
    try:
        yield ("call", backend.release, grant)
    except BackendError as error:
        return [error]  # the same owner is granted again
    return []


def _trusted(grant: Grant, asked_at: float) -> float | None:
    """Return a time before which the lease cannot begin; None: it may be over already."""
    began = asked_at if grant.asked_at is None else grant.asked_at
    ttl = grant.ttl or grant.claim.ttl  # an engine may give less than it was asked for
    return began if monotonic() < began + trusted_for(ttl) else None


def _pause(
    backend: BaseLockBackend,
    attempt: int,
    free_in: float | None,
    *,
    notified: bool,
    failed: bool,
) -> float:
    if backend.blocks and not failed:
        return 0.0
    if notified:
        pause = LOOK_EVERY
    elif backend.pushes:
        pause = backend.poll_max
    else:
        pause = full_jitter(attempt, base=backend.poll_min, cap=backend.poll_max)
    return pause if free_in is None else min(pause, free_in + AFTER_EXPIRY)


def busy_error(name: str, wait: float | None, free_in: float | None = None) -> LockBusy:
    """Return the error for a lock that was not had within `wait` seconds."""
    name = shown(name)
    if wait == 0:
        return LockBusy(f"the lock {name!r} is held by another owner", free_in=free_in)
    return LockTimeout(f"the lock {name!r} was held by others for {wait:.3f} s", free_in=free_in)


class Waker:
    """Ends the pause of a waiting thread."""

    # Defaults of the class: most locks are free, and nobody sleeps.
    _grant: Grant | None = None
    _woken = False  # before the first sleep
    _gate: threading.Lock | None = None  # open to let the sleeper go on

    def wake(self, grant: Grant | None) -> None:
        """Wake the waiter; may be called from any thread, any number of times."""
        if grant is not None:
            self._grant = grant
        self._woken = True  # first: `wait` looks the other way round
        if self._gate is not None:
            with suppress(RuntimeError):  # open already
                self._gate.release()

    def wait(self, seconds: float, wake_fd: int | None = None) -> Grant | None:
        """Sleep until woken or until `wake_fd` is readable, at most `seconds`."""
        if wake_fd is None:
            if self._gate is None:
                gate = threading.Lock()
                gate.acquire()
                self._gate = gate
                if self._woken:
                    seconds = 0.0
            self._gate.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))
        else:  # an engine that has one calls no wake()
            with selectors.DefaultSelector() as selector:
                selector.register(wake_fd, selectors.EVENT_READ)
                selector.select(seconds)
        grant, self._grant = self._grant, None
        return grant


class AsyncWaker:
    """Ends the pause of a waiting asyncio task."""

    __slots__ = ("_grant", "_loop", "_woken", "on_loop_closed")

    def __init__(self) -> None:
        self.on_loop_closed: Callable[[], None] | None = None
        self._grant: Grant | None = None
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    def wake(self, grant: Grant | None) -> None:
        """Wake the waiter; may be called from any thread, any number of times.

        Raise RuntimeError if its loop is closed: there is no waiter any more to take a grant.
        """
        if grant is not None:
            self._grant = grant
        try:
            self._loop.call_soon_threadsafe(self._woken.set)
        except RuntimeError:
            if self.on_loop_closed is not None:
                self.on_loop_closed()
            raise

    async def wait(self, seconds: float, wake_fd: int | None = None) -> Grant | None:
        """Sleep until woken or until `wake_fd` is readable, at most `seconds`."""
        # Not wait_for(): before Python 3.12 it swallows a cancellation as it is woken.
        timer = self._loop.call_later(seconds, self._woken.set)
        if wake_fd is not None:
            with suppress(NotImplementedError):  # the default loop of Windows: it looks later
                self._loop.add_reader(wake_fd, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()
            if wake_fd is not None:
                with suppress(NotImplementedError):
                    self._loop.remove_reader(wake_fd)
        self._woken.clear()
        grant, self._grant = self._grant, None
        return grant


def run(steps: Generator[Step, Any, Any], waker: Waker) -> Any:
    """Run the generator in this thread; return what it returns."""
    answer: Any = None
    error: Exception | None = None
    try:
        while True:
            try:
                step = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value
            error = None
            try:
                if step[0] == "pause":
                    answer = waker.wait(*step[1:])
                else:
                    answer = step[1](*step[2:])
            except Exception as raised:
                error = raised
    finally:
        error = None  # its traceback refers to this frame


async def arun(
    backend: BaseLockBackend,
    steps: Generator[Step, Any, Any],
    waker: AsyncWaker,
    *,
    cancelled: Callable[[], None],
) -> Any:
    """Run the generator in the event loop; its calls are made in threads.

    `cancelled` is called when the task was cancelled and no call is under way any more, and
    at once if that call waits: to end it. Also when its turn comes after its loop was closed.
    """
    waker.on_loop_closed = cancelled
    answer: Any = None
    error: Exception | None = None
    request: Future[Any] | None = None
    try:
        while True:
            try:
                step = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value
            error = None
            try:
                if step[0] == "pause":
                    answer = await _paused(waker, step, cancelled)
                else:
                    request = _BEGIN[step[0]](backend, *step[1:])
                    answer = await _end(request, cancelled, at_once=step[0] == "wait")
            except Exception as raised:
                error = raised
    finally:
        error = request = None  # their tracebacks refer to this frame


async def _paused(waker: AsyncWaker, step: Step, cancelled: Callable[[], None]) -> Grant | None:
    try:
        return await waker.wait(*step[1:])
    except BaseException:
        cancelled()
        raise


async def in_thread(
    backend: BaseLockBackend,
    function: Callable[..., Any],
    *args: Any,
    cancelled: Callable[[], None] | None = None,
) -> Any:
    """Call `function` in the threads of `backend`.

    A cancellation does not wait for the call; `cancelled` is called when it has ended.
    """
    return await _end(_begin(backend, function, *args), cancelled)


async def _end(
    request: Future[Any], cancelled: Callable[[], None] | None, *, at_once: bool = False
) -> Any:
    if cancelled is not None:
        loop = asyncio.get_running_loop()
        # The answer is dropped without a word if the loop was closed.
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


_pools: weakref.WeakKeyDictionary[BaseLockBackend, ThreadPoolExecutor]
_pools = weakref.WeakKeyDictionary()
_first_tries: weakref.WeakKeyDictionary[BaseLockBackend, threading.Semaphore]
_first_tries = weakref.WeakKeyDictionary()


def _begin(backend: BaseLockBackend, function: Callable[..., Any], *args: Any) -> Future[Any]:
    pool = _pools.get(backend)
    if pool is None:
        pool = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="distlock-io")
        pool = _pools.setdefault(backend, pool)
    try:
        return pool.submit(function, *args)
    except RuntimeError:  # the main thread has ended, and another still runs its event loop
        return _begin_alone(backend, function, *args)


class _Seen(NamedTuple):
    """What a look has said instead of a first try."""

    busy: Any


def _begin_first(backend: BaseLockBackend, *call: Any) -> Future[Any]:
    return _begin(backend, _try_first, backend, *call)


def _try_first(
    backend: BaseLockBackend, acquire: Callable[..., Any], claim: Claim, wait: float | None
) -> Any:
    """Call `acquire`; but look first if many do: a try of a locked row may take a second.

    So half of the threads are there for tries of other locks.
    """
    room = _first_tries.setdefault(backend, threading.Semaphore(IO_THREADS // 2))
    with_room = room.acquire(blocking=False)
    try:
        if not with_room and (answer := backend.look(claim)) is not None:
            return _Seen(answer)
        return acquire(claim, wait)
    finally:
        if with_room:
            room.release()


def _begin_alone(_: BaseLockBackend, function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call it in a daemon thread: in the pool, waiters would keep the holder from releasing."""
    request: Future[Any] = Future()

    def work() -> None:
        try:
            request.set_result(function(*args))
        except BaseException as error:
            request.set_exception(error)

    request.set_running_or_notify_cancel()
    threading.Thread(target=work, name="distlock-wait", daemon=True).start()
    return request


_BEGIN: dict[str, Callable[..., Future[Any]]]
_BEGIN = {"call": _begin, "first": _begin_first, "wait": _begin_alone}
os.register_at_fork(after_in_child=_pools.clear)
os.register_at_fork(after_in_child=_first_tries.clear)
