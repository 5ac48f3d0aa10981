"""Requests to etcd's JSON gateway over connections that are kept, and what their failures mean."""

from __future__ import annotations

import base64
import json
import select
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from ..errors import BackendError

KEEP_IDLE = 64
# A connection that was idle for less is used without looking whether it was closed meanwhile.
TRUST_SECONDS = 0.5
# Codes of gRPC (google.golang.org/grpc/codes).
NOT_FOUND = 5
UNAVAILABLE = (4, 14)  # a deadline, or no leader: whether a write was carried out is not known
UNAUTHENTICATED = 16


class Lost(BackendError):
    """The connection broke under a request: nobody knows whether it was carried out."""


class Refused(BackendError):
    """etcd answered with an error, whose code says which."""

    def __init__(self, message: str | None = None, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class Link:
    """One connection to one endpoint."""

    __slots__ = ("endpoint", "http", "used")

    def __init__(self, endpoint: str, timeout: float, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(endpoint)
        host = parts.hostname or ""
        if parts.scheme == "https":
            self.http: HTTPConnection = HTTPSConnection(
                host, parts.port or 2379, timeout=timeout, context=tls
            )
        else:
            self.http = HTTPConnection(host, parts.port or 2379, timeout=timeout)
        self.endpoint = endpoint
        self.used: float | None = None  # when it was kept, None: it is new
        self.http.connect()

    @property
    def socket(self) -> socket.socket:
        """The open socket."""
        assert self.http.sock is not None
        return self.http.sock

    def usable(self) -> bool:
        """Tell whether the idle connection is as we left it: nothing to read, no end of file."""
        if self.http.sock is None:
            return False
        if self.used is not None and monotonic() - self.used < TRUST_SECONDS:
            return True
        poll = select.poll()
        poll.register(self.http.sock, select.POLLIN)
        return not poll.poll(0)

    def send(self, path: str, data: bytes, token: str) -> None:
        """Send one request."""
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = token
        self.http.request("POST", path, data, headers)


class Watch:
    """A stream that tells when one key is deleted; it has a connection of its own."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._socket = link.socket
        self._seen = b""

    def wait(self, seconds: float) -> bool:
        """Wait until there is something to look at, at most `seconds`.

        The deletion, or the end of the stream for whatever reason: whoever is told looks.
        """
        end = monotonic() + seconds
        while (left := end - monotonic()) > 0:
            try:
                self._socket.settimeout(left)
                data = self._socket.recv(65536)
            except TimeoutError:
                return False
            except OSError:
                return True
            self._seen += data
            if not data or any(x in self._seen for x in (b'"events"', b'"canceled"', b'"error"')):
                return True
        return False

    def end(self) -> None:
        """End a wait that is under way in another thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._link.http.close()


class Gateway:
    """The connections of one backend in one process, last in first out, to any of the members."""

    def __init__(
        self,
        alias: str,
        endpoints: Sequence[str],
        *,
        timeout: float,
        tls: ssl.SSLContext | None,
        user: str,
        password: str,
    ) -> None:
        self._alias = alias
        self._endpoints = deque(endpoints)  # the first is used until it fails
        self._timeout = timeout
        self._tls = tls
        self._login = {"name": user, "password": password} if user else None
        self._token = ""
        self._idle: deque[Link] = deque()  # its append and pop are atomic: no lock

    def ask(self, path: str, body: dict[str, Any], *, repeat: bool = True) -> dict[str, Any]:
        """Return the answer to one request; raise BackendError.

        A request that failed is sent again to every other endpoint: all that we send may be
        repeated. With `repeat=False` only where nobody can have got it; else `Lost`.
        """
        data = json.dumps(body, separators=(",", ":")).encode()
        for attempt in (0, 1):
            if self._login and not self._token:
                self._token = self._send("/v3/auth/authenticate", _bytes(self._login))["token"]
            try:
                return self._send(path, data, repeat=repeat)
            except Refused as error:
                # Tokens end, with the time and with the member that gave them.
                if error.code != UNAUTHENTICATED or not self._login or attempt:
                    raise
                self._token = ""
        raise AssertionError("unreachable")

    def watch(self, key: str, revision: int) -> Watch:
        """Watch the end of `key` from `revision` on; raise BackendError."""
        create = {"key": encoded(key), "start_revision": revision, "filters": ["NOPUT"]}
        try:
            link = self._connect()
            try:
                link.send("/v3/watch", _bytes({"create_request": create}), self._token)
            except BaseException:
                link.http.close()
                raise
        except (OSError, HTTPException) as error:
            self._turn(self._endpoints[0])
            raise self._unreachable(error) from error
        return Watch(link)

    def close(self) -> None:
        """Close what is idle; in a child of fork(), only its copies of the parent's."""
        while self._idle:
            try:
                self._idle.pop().http.close()
            except IndexError:
                return

    def _send(self, path: str, data: bytes, *, repeat: bool = True) -> dict[str, Any]:
        failure: Exception | None = None
        for _ in range(len(self._endpoints) + 1):
            try:
                link = self._take()
            except OSError as error:
                failure = error
                self._turn(self._endpoints[0])
                continue
            try:
                answer = self._exchange(link, path, data)
            except (OSError, HTTPException) as error:
                if not repeat:
                    raise Lost(self._unreachable(error).args[0]) from error
                failure = error
                if link.used is None:
                    self._turn(link.endpoint)
                else:  # it had been closed meanwhile, and so had the others
                    self.close()
                continue
            if "error" in answer:
                text = str(answer.get("message") or answer["error"])
                raise Refused(f"etcd {self._alias!r} refused: {text}", int(answer.get("code", 0)))
            return answer
        raise self._unreachable(failure) from failure

    def _take(self) -> Link:
        while True:
            try:
                link = self._idle.pop()
            except IndexError:
                return self._connect()
            if link.usable():
                return link
            link.http.close()

    def _connect(self) -> Link:
        return Link(self._endpoints[0], self._timeout, self._tls)

    def _exchange(self, link: Link, path: str, data: bytes) -> dict[str, Any]:
        try:
            link.send(path, data, self._token)
            response = link.http.getresponse()
            text = response.read()
            # A stream of one (keepalive) has its answer inside "result".
            answer: dict[str, Any] = json.loads(text)
            answer = answer.get("result", answer)
            if response.status >= 500 or answer.get("code") in UNAVAILABLE:
                raise ConnectionError(f"HTTP {response.status}")
        except ValueError as error:
            link.http.close()
            raise ConnectionError("no JSON") from error
        except BaseException:  # half an exchange: what comes next would be read as our answer
            link.http.close()
            raise
        link.used = monotonic()
        if link.http.sock is not None and len(self._idle) < KEEP_IDLE:
            self._idle.append(link)
        else:
            link.http.close()
        return answer

    def _turn(self, failed: str) -> None:
        """Ask another endpoint from now on, unless another thread has seen to that."""
        if self._endpoints[0] == failed and len(self._endpoints) > 1:
            self._endpoints.rotate(-1)
            self.close()

    def _unreachable(self, error: Exception | None) -> BackendError:
        return BackendError(f"etcd {self._alias!r} did not answer: {type(error).__name__}.")


def encoded(text: str) -> str:
    """Return `text` as the gateway wants keys and values."""
    return base64.b64encode(text.encode()).decode()


def decoded(text: str) -> str:
    """Return what was encoded."""
    return base64.b64decode(text).decode()


def _bytes(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
