"""The requests to etcd's JSON gateway: kept connections, endpoints, tokens, errors."""

from __future__ import annotations

import base64
import json
import ssl
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import BackendError
from ...primitives.polling import readable
from ...primitives.rlock import RLock
from ..base import ConnectionLost
from ..connecting import FINISH_WITHIN, Idle, system_text
from .http import Link

# Called when a request was repeated or its answer lost: it may be carried out late, too.
Doubt = Callable[[], None]

# Codes of gRPC (google.golang.org/grpc/codes).
NOT_FOUND = 5
UNAVAILABLE = (4, 14)  # a deadline, or no leader: whether a write was carried out is not known
# No valid token. The first also says that it is older than the last change of users and roles: JWT.
UNAUTHENTICATED = (3, 16)


class Refused(BackendError):
    """etcd answered with an error, whose code says which."""

    def __init__(self, message: str | None = None, code: Any = None) -> None:
        super().__init__(message)
        self.code = code


class Gateway:
    """The connections of one backend in one process, last in first out, to any of the members."""

    def __init__(
        self,
        alias: str,
        endpoints: Sequence[str],
        *,
        timeout: float,
        tls: ssl.SSLContext | None,
        login: dict[str, str] | None,
    ) -> None:
        self._alias = alias
        self._endpoints = deque(endpoints)  # the first is used until it fails
        self._timeout = timeout
        self._tls = tls
        self._login = login
        self._token = ""
        # Reentrant: a signal handler may lock or release meanwhile.
        self._logging_in = RLock()
        self._idle: Idle[Link] = Idle()
        weakref.finalize(self, self._idle.close)  # what came back after close()

    def ask(
        self, path: str, body: dict[str, Any], *, repeat: bool = True, doubt: Doubt | None = None
    ) -> dict[str, Any]:
        """Return the answer to one request; raise BackendError.

        A request that failed is sent again to every other endpoint: all that we send may be
        repeated. With `repeat=False` only if no endpoint can have got it; else `ConnectionLost`.
        """
        data = _bytes(body)
        token = self._token
        if self._login and not token:
            token = self._log_in(token)
        try:
            return self._send(path, data, token, repeat, doubt)
        except Refused as error:
            # Tokens expire, and end with the member that gave them.
            if error.code not in UNAUTHENTICATED or not self._login:
                raise
        return self._send(path, data, self._log_in(token), repeat, doubt)

    def _log_in(self, refused: str) -> str:
        """Return another token than the one that was refused, the same to all threads."""
        with self._logging_in:
            if self._token == refused:
                answer = self._send("/v3/auth/authenticate", _bytes(self._login or {}), "")
                self._token = answer["token"]
            return self._token

    def txn(self, *parts: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
        """Return the answer to a transaction: what is compared, done if so, done if not."""
        body = dict(zip(("compare", "success", "failure"), parts, strict=True))
        return self.ask("/v3/kv/txn", body, **how)

    def stream(self, path: str, body: dict[str, Any]) -> Link:
        """Ask for answers without an end, on a connection of their own; raise OSError."""
        link = self._connect()
        try:
            link.send(path, _bytes(body), self._token)
        except BaseException:
            link.close()
            raise
        return link

    def close(self) -> None:
        """Close what is idle; in a child of fork(), only its copies of the parent's."""
        self._idle.close()

    def _send(
        self, path: str, data: bytes, token: str, repeat: bool = True, doubt: Doubt | None = None
    ) -> dict[str, Any]:
        failure: Exception | None = None
        failed, endpoints = 0, len(self._endpoints)
        for _ in range(endpoints + 1):  # once more, if it was only a kept connection that failed
            endpoint, link = self._endpoints[0], None
            try:
                link = self._idle.take() or self._connect()
                return self._exchange(link, path, data, token)
            except OSError as error:
                failure = error
                self._avoid(endpoint, link, error)
                if link is not None and doubt is not None:
                    doubt()
                if link is not None and not repeat:
                    raise ConnectionLost(self._unreachable(error).args[0]) from error
                failed += link is None or not link.used
                if failed == endpoints:
                    break
        raise self._unreachable(failure) from failure

    def _connect(self) -> Link:
        return Link(self._endpoints[0], self._timeout, self._tls)

    def _exchange(self, link: Link, path: str, data: bytes, token: str) -> dict[str, Any]:
        try:
            link.send(path, data, token)
            status, text, stays = link.receive()
            answer = _answer_of(status, text)
        except (ValueError, IndexError) as error:
            link.close()
            raise ConnectionError("not an etcd response") from error
        except OSError:  # half an exchange: what comes next would be read as our answer
            link.close()
            raise
        except BaseException:  # of a signal handler
            readable(link.socket, FINISH_WITHIN)
            link.close()
            raise
        if stays:
            self._idle.keep(link)
        else:
            link.close()
        if "error" in answer:
            why = answer.get("message") or answer["error"]
            raise Refused(f"etcd {self._alias!r} refused: {why}", answer.get("code"))
        return answer

    def _avoid(self, endpoint: str, link: Link | None, error: OSError) -> None:
        """Use other connections from now on: the endpoint or the link has failed."""
        if link is not None and link.used and not isinstance(error, TimeoutError):
            self.close()  # it had been closed meanwhile, and so had the others
            return
        failed = endpoint if link is None else link.endpoint
        if self._endpoints[0] == failed:  # else another thread has changed it
            self._endpoints.rotate(-1)
            self.close()

    def _unreachable(self, error: Exception | None) -> BackendError:
        return BackendError(f"etcd {self._alias!r} did not answer: {system_text(error)}.")


def _answer_of(status: int, text: bytes) -> dict[str, Any]:
    """Read an answer, which has an "error" if it is one; raise OSError, ValueError."""
    answer = unwrapped(json.loads(text))  # keepalive is a stream of one
    if status >= 500 or answer.get("code") in UNAVAILABLE:
        raise ConnectionError(status, f"HTTP {status}")
    if status >= 400:  # since 3.6 there is no "error" beside the message
        answer.setdefault("error", answer.get("message") or f"HTTP {status}")
    if "error" not in answer and "header" not in answer:
        raise ValueError("not an etcd response")  # each has a header, also if all else is empty
    return answer


def unwrapped(message: Any) -> dict[str, Any]:
    """Return an answer, which in a stream is wrapped in a message; raise ValueError."""
    answer = message.get("result", message) if isinstance(message, dict) else None
    if not isinstance(answer, dict):
        raise ValueError("not an etcd response")
    return answer


def encoded(text: str) -> str:
    """Return `text` as the gateway wants keys and values."""
    return base64.b64encode(text.encode()).decode()


def decoded(text: str) -> str:
    """Return what was encoded."""
    return base64.b64decode(text).decode()


def _bytes(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
