"""Streamed responses of a locked view: they keep its lock until they are closed, or dropped."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import finalize

from ..errors import NotHeld


def kept_while_streaming(response: Any, hold: Any) -> bool:
    """Whether the response keeps the hold until the server closes it.

    Only the steps of its body are inside the lock: the thread may serve other requests before the
    server has sent the rest, and these must not take the lock again.
    """
    if not getattr(response, "streaming", False):
        return False
    body = _Body(response._iterator, hold)
    response._resource_closers.append(body.end)
    hold.enter(inside=False)
    response._iterator = body
    return True


class _Body:
    """The iterator of a body, sync or async: each step of it is inside the lock.

    One that fails is the last: Django's ASGI handler does not close the response then. If nothing
    refers to it any more, the lock is given up.
    """

    def __init__(self, body: Any, hold: Any) -> None:
        self._body = body
        self._hold = hold
        # No __del__: with a cycle of the response and its body, that of the hold may come first.
        self._dropped = finalize(self, _give_up, hold)
        self._dropped.atexit = False

    def end(self) -> None:
        """Release the lock: the server closes the response."""
        self._dropped.detach()
        self._hold.leave(None)

    def __iter__(self) -> _Body:
        return self

    __aiter__ = __iter__

    def __next__(self) -> Any:
        self._hold.enter()
        try:
            return next(self._body)
        except Exception as error:
            if not isinstance(error, StopIteration):
                self._hold.leave(error)
            raise
        finally:
            self._hold.enter(inside=False)

    async def __anext__(self) -> Any:
        self._hold.enter()
        try:
            return await anext(self._body)
        except Exception as error:
            if not isinstance(error, StopAsyncIteration):
                await self._hold.aleave(error)
            raise
        finally:
            self._hold.enter(inside=False)


def _give_up(hold: Any) -> None:
    """Release it in the background: the request was cancelled on the way to the server."""
    with suppress(NotHeld):  # in a child of fork()
        hold.abandon()
