"""Queues inside one process: few connections for many callers, waiters in order of arrival.

A process asks a server by a bounded number of connections (`FairSemaphore`). The waiters for one
lock form a queue inside the process, and the first of them asks the server for all
(`WaiterQueues`): so a thousand waiters keep their order behind one connection.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...claims import Claim
from ...primitives.rlock import RLock
from ...primitives.timing import monotonic

# So many connections of a process ask at a time, beside those that stay with claims; later callers
# wait for their turn. As many as the threads in which asyncio tasks ask.
ASKING = 8

# The first of a queue looks at its lock once a second. One that has not done so for so many seconds
# hangs (a blocked event loop, a debugger): the next waiter that looks becomes the first.
HANGS = 3.0

ClaimKey = tuple[str, str]  # key, owner; in queues the owner as claim_key_of() has it
Wake = Callable[[Any], None] | None


def claim_key_of(claim: Claim) -> ClaimKey:
    """Return what the waiter and the connection of a claim are found by.

    A stable owner may have several locks, and several threads for one: they share no connection.
    """
    return claim.key, f"{claim.owner} {id(claim)}" if claim.stable else claim.owner


class FairSemaphore:
    """Lets so many callers in at a time, in order of arrival.

    Without a mutex: a signal handler may ask in the middle of each of these steps.
    """

    __slots__ = ("_free", "_queue")

    def __init__(self, number: int) -> None:
        self._free: deque[None] = deque([None] * number)
        self._queue: deque[threading.Lock] = deque()

    def acquire(self, within: float, *, urgent: bool = False) -> bool:
        """Wait for a turn, at most `within` seconds; `urgent`: before all waiters."""
        if not self._queue:
            try:
                self._free.pop()
                return True
            except IndexError:
                pass
            except BaseException:  # interrupted after that
                self.release()
                raise
        turn = threading.Lock()
        turn.acquire()
        (self._queue.appendleft if urgent else self._queue.append)(turn)
        try:
            self._serve()
            if turn.acquire(timeout=within):
                return True
        except BaseException:  # interrupted
            if not self._cancelled(turn):
                self.release()
            raise
        return not self._cancelled(turn)

    def release(self) -> None:
        """Let the next one in."""
        self._free.append(None)
        if self._queue:
            self._serve()

    def _cancelled(self, turn: threading.Lock) -> bool:
        """Leave the queue; return False if the turn has come just now."""
        try:
            self._queue.remove(turn)
        except ValueError:
            return False
        return True

    def _serve(self) -> None:
        while self._queue:
            try:
                self._free.pop()
            except IndexError:
                return
            except BaseException:  # interrupted after that
                self.release()
                raise
            try:
                self._queue.popleft().release()
            except IndexError:  # Another thread has served it.
                self._free.append(None)


class WaiterQueue:
    """The waiters for one lock; `connection` waits on the server for all of them."""

    __slots__ = ("connection", "key", "seen_at", "waiters")

    def __init__(self, key: str) -> None:
        self.key = key
        self.connection: Any = None
        self.waiters: deque[Waiter] = deque()
        self.seen_at = monotonic()  # when its first was heard of

    def first(self) -> Waiter | None:
        """Return the waiter that asks the server."""
        while self.waiters and self.waiters[0].queue is None:  # interrupted as it left
            self.waiters.popleft()
        return self.waiters[0] if self.waiters else None


class Waiter:
    """A claim in the queue of its process."""

    __slots__ = ("_wake", "asked", "claim_key", "connection", "queue")

    def __init__(self, claim_key: ClaimKey, queue: WaiterQueue, wake: Wake) -> None:
        self.claim_key = claim_key
        self.queue: WaiterQueue | None = queue  # None: it has left
        self._wake = wake  # None: it only looks, from time to time
        self.asked = False  # since it leads the queue: the server, or what waits there for all
        self.connection: Any = None  # was the queue's, until another waiter led it as this one hung

    def wake(self) -> bool:
        """Wake it; return False if its event loop is closed."""
        try:
            if self._wake is not None:
                self._wake(None)
        except RuntimeError:
            return False
        return True


class WaiterQueues:
    """The queues of one process, by lock; `emptied` is given the connection of one that ends."""

    def __init__(self, emptied: Callable[[Any], None], *, hangs: float = HANGS) -> None:
        self._emptied = emptied
        self._hangs = hangs
        # Reentrant: a signal handler may enqueue, or leave, in the middle of our own step.
        self._mutex = RLock()
        self.by_key: dict[str, WaiterQueue] = {}  # those that have waiters
        self._waiters: dict[ClaimKey, Waiter] = {}

    def waiter_of(self, claim_key: ClaimKey) -> Waiter | None:
        """Return the waiter of a claim, if it is in a queue."""
        waiter = self._waiters.get(claim_key) if self.by_key else None
        return None if waiter is None or waiter.queue is None else waiter

    def enqueue(self, claim_key: ClaimKey, wake: Wake) -> Waiter:
        """Return the waiter of a claim, at the end of the queue if it is new.

        `wake` is called when it comes to lead the queue.
        """
        with self._mutex:
            waiter = self.waiter_of(claim_key)
            if waiter is None:
                queue = self.by_key.get(claim_key[0])
                if queue is None:
                    queue = self.by_key[claim_key[0]] = WaiterQueue(claim_key[0])
                waiter = self._waiters[claim_key] = Waiter(claim_key, queue, wake)
                queue.waiters.append(waiter)
            return waiter

    def leads(self, waiter: Waiter) -> bool:
        """Return whether this one asks the server for its queue, also if the first one hangs."""
        self._give_up(waiter)
        with self._mutex:
            queue, now = waiter.queue, monotonic()
            if queue is None:
                return True
            first = queue.first()
            if first is not waiter:
                if now < queue.seen_at + self._hangs:
                    return False
                if first is not None:  # it may be using the connection just now
                    first.asked = False
                    first.connection, queue.connection = queue.connection, None
                queue.waiters.remove(waiter)
                queue.waiters.appendleft(waiter)
            queue.seen_at = now
            return True

    def connection_of(self, waiter: Waiter) -> Any:
        """Return the connection that waits on the server for the queue that this one leads."""
        with self._mutex:
            queue = waiter.queue
            return queue.connection if queue is not None and queue.first() is waiter else None

    def attach(self, waiter: Waiter, connection: Any) -> None:
        """Let the queue wait on `connection`, unless another waiter has come to lead it."""
        with self._mutex:
            queue = waiter.queue
            if queue is not None and queue.connection is None and queue.first() is waiter:
                queue.connection = connection
            else:
                waiter.connection = connection

    def detach(self, waiter: Waiter, connection: Any) -> None:
        """Forget `connection`: it serves a claim, or has ended."""
        with self._mutex:
            if waiter.connection is connection:
                waiter.connection = None
            elif waiter.queue is not None and waiter.queue.connection is connection:
                waiter.queue.connection = None

    def leave(self, waiter: Waiter) -> None:
        """Leave the queue, with a lock or without; the next one comes to lead it."""
        if (queue := self._remove(waiter)) is not None:
            self._advance(queue)

    def connections(self) -> list[Any]:
        """Return the connections that wait on the server."""
        return [q.connection for q in list(self.by_key.values()) if q.connection is not None]

    def _give_up(self, waiter: Waiter) -> None:
        connection, waiter.connection = waiter.connection, None
        if connection is not None:
            self._emptied(connection)

    def _remove(self, waiter: Waiter) -> WaiterQueue | None:
        """Take a waiter out; return the queue that it was in."""
        self._give_up(waiter)
        with self._mutex:
            queue, waiter.queue = waiter.queue, None
            if queue is not None:
                self._waiters.pop(waiter.claim_key, None)
                with suppress(ValueError):  # interrupted as it came
                    queue.waiters.remove(waiter)
            return queue

    def _advance(self, queue: WaiterQueue) -> None:
        """Wake the first that is left to be woken, or end the queue."""
        while True:
            connection = None
            with self._mutex:
                first = queue.first()
                if first is None:
                    connection, queue.connection = queue.connection, None
                    if self.by_key.get(queue.key) is queue:
                        del self.by_key[queue.key]
                elif not first.asked:
                    queue.seen_at = monotonic()
            if connection is not None:
                self._emptied(connection)
            if first is None or first.asked or first.wake():
                return
            self._remove(first)
