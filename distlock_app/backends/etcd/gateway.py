"""The HTTP client for etcd's JSON gateway: kept connections, watches, errors."""

from __future__ import annotations

import base64
import json
import os
import select
import socket
import ssl
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import BufferedReader
from typing import Any
from urllib.parse import urlsplit

from ...errors import BackendError
from ...primitives.threads import Worker
from ...primitives.timing import monotonic

KEEP_IDLE = 64
# A connection that was idle for less is used without looking whether it was closed meanwhile.
TRUST_SECONDS = 0.5
# A stream that said nothing for so long may be dead, and is replaced; or it is not needed.
QUIET_SECONDS = 10.0
RETRY_SECONDS = 1.0  # after a stream that did not begin
# Codes of gRPC (google.golang.org/grpc/codes).
NOT_FOUND = 5
UNAVAILABLE = (4, 14)  # a deadline, or no leader: whether a write was carried out is not known
# No valid token. The first also says that it is older than the last change of users and roles: JWT.
UNAUTHENTICATED = (3, 16)


class ConnectionLost(BackendError):
    """The connection broke under a request, which may have been carried out."""


class Refused(BackendError):
    """etcd answered with an error, whose code says which."""

    def __init__(self, message: str | None = None, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class Link:
    """One HTTP/1.1 connection to one endpoint.

    Not http.client: that sends a request in two parts, and takes longer than etcd does.
    """

    __slots__ = ("_head", "endpoint", "socket", "used")

    def __init__(self, endpoint: str, timeout: float, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port or 2379
        self.endpoint = endpoint
        self.used: float | None = None  # when it was kept, None: it is new
        self.socket = socket.create_connection((host, port), timeout)
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if parts.scheme == "https" and tls is not None:
                self.socket = tls.wrap_socket(self.socket, server_hostname=host)
        except BaseException:
            self.socket.close()
            raise
        self._head = f"HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"

    def usable(self) -> bool:
        """Return whether the idle connection is as we left it: nothing to read, no end of file."""
        if self.used is not None and monotonic() - self.used < TRUST_SECONDS:
            return True
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return not poll.poll(0)

    def send(self, path: str, data: bytes, token: str) -> None:
        """Send one request; raise OSError."""
        login = f"Authorization: {token}\r\n" if token else ""
        head = f"POST {path} {self._head}{login}Content-Length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)

    def receive(self) -> tuple[int, bytes, bool]:
        """Return status and body of one answer, and whether another may follow; raise OSError."""
        with self.socket.makefile("rb") as file:
            status, length, stays = _head(file)
            body = b"".join(_chunks(file)) if length is None else _exactly(file, length)
            return status, body, stays

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what a stream says, until it ends; raise OSError or ValueError."""
        with self.socket.makefile("rb") as file:
            _head(file)
            rest = b""
            for chunk in _chunks(file):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (json.loads(line) for line in lines if line)

    def close(self) -> None:
        """Close the connection; in a child of fork(), only its copy."""
        self.socket.close()


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
        # Reentrant: a signal handler may lock or release meanwhile.
        self._logging_in = threading.RLock()
        self._idle: deque[Link] = deque()  # its append and pop are atomic: no lock
        weakref.finalize(self, _close_all, self._idle)  # what came back after close()

    def ask(self, path: str, body: dict[str, Any], *, repeat: bool = True) -> dict[str, Any]:
        """Return the answer to one request; raise BackendError.

        A request that failed is sent again to every other endpoint: all that we send may be
        repeated. With `repeat=False` only if no endpoint can have got it; else `ConnectionLost`.
        """
        data = json.dumps(body, separators=(",", ":")).encode()
        token = self._token
        if self._login and not token:
            token = self._log_in(token)
        try:
            return self._send(path, data, token, repeat=repeat)
        except Refused as error:
            # Tokens end, with the time and with the member that gave them.
            if error.code not in UNAUTHENTICATED or not self._login:
                raise
        return self._send(path, data, self._log_in(token), repeat=repeat)

    def _log_in(self, refused: str) -> str:
        """Return another token than the one that was refused, the same to all threads."""
        with self._logging_in:
            if self._token == refused:
                answer = self._send("/v3/auth/authenticate", _bytes(self._login or {}), "")
                self._token = answer["token"]
            return self._token

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
        _close_all(self._idle)

    def _send(self, path: str, data: bytes, token: str, *, repeat: bool = True) -> dict[str, Any]:
        failure: Exception | None = None
        for _ in range(len(self._endpoints) + 1):
            try:
                link = self._take()
            except OSError as error:
                failure = error
                self._use_next(self._endpoints[0])
                continue
            try:
                answer = self._exchange(link, path, data, token)
            except OSError as error:
                if not repeat:
                    raise ConnectionLost(self._unreachable(error).args[0]) from error
                failure = error
                if link.used is None:
                    self._use_next(link.endpoint)
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
            link.close()

    def _connect(self) -> Link:
        return Link(self._endpoints[0], self._timeout, self._tls)

    def _exchange(self, link: Link, path: str, data: bytes, token: str) -> dict[str, Any]:
        try:
            link.send(path, data, token)
            status, text, stays = link.receive()
            # A stream of one (keepalive) has its answer inside "result".
            answer: dict[str, Any] = json.loads(text)
            answer = answer.get("result", answer)
            if status >= 500 or answer.get("code") in UNAVAILABLE:
                raise ConnectionError(f"HTTP {status}")
        except (ValueError, IndexError) as error:
            link.close()
            raise ConnectionError("not an answer of etcd") from error
        except BaseException:  # half an exchange: what comes next would be read as our answer
            link.close()
            raise
        link.used = monotonic()
        if stays and len(self._idle) < KEEP_IDLE:
            self._idle.append(link)
        else:
            link.close()
        return answer

    def _use_next(self, failed: str) -> None:
        """Ask another endpoint from now on, unless another thread has changed it."""
        if self._endpoints[0] == failed and len(self._endpoints) > 1:
            self._endpoints.rotate(-1)
            self.close()

    def _unreachable(self, error: Exception | None) -> BackendError:
        return BackendError(f"etcd {self._alias!r} did not answer: {type(error).__name__}.")


class Watch:
    """Reports each deleted key: one stream for all waiters, on a thread of its own.

    `notify` is called with the key, and with None when any may have gone unseen; it returns
    whether there are waiters. The stream ends some time after the last one.
    """

    def __init__(
        self, gateway: Gateway, keys: Any, notify: Callable[[str | None], bool], name: str
    ) -> None:
        self._gateway = gateway
        # Not from a given revision on: where there are newer ones, etcd looks at such a watch
        # only ten times a second.
        self._body = {"create_request": {**keys, "filters": ["NOPUT"]}}
        self._notify = notify
        self._worker = Worker(name, self._run)
        self._link: Link | None = None
        self._running = False
        self._ended = threading.Event()

    def start(self) -> None:
        """Have it run soon, for a waiter."""
        if not self._running:
            self._worker.put(None)

    def end(self) -> None:
        """End it for good."""
        self._ended.set()
        if (link := self._link) is not None:
            with suppress(OSError):  # it has ended
                link.socket.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close the copy of the stream in a child of fork(), where its thread is not."""
        if (link := self._link) is not None and (copy := link.socket.detach()) >= 0:
            os.close(copy)

    def _run(self, _: list[Any]) -> None:
        self._running = True
        try:
            while self._notify("") and not self._ended.is_set():
                if not self._follow():
                    self._ended.wait(RETRY_SECONDS)
        finally:
            self._running = False

    def _follow(self) -> bool:
        """Pass on what one stream says, until it ends; return whether it had begun."""
        began = False
        with suppress(OSError, ValueError):
            link = self._link = self._gateway.stream("/v3/watch", self._body)
            try:
                needed_at = monotonic()
                for message in link.messages():
                    answer = message.get("result", {})
                    if "canceled" in answer or "error" in message or self._ended.is_set():
                        return False
                    if "created" in answer:
                        began = True
                        link.socket.settimeout(QUIET_SECONDS)
                        self._notify(None)
                    for event in answer.get("events", ()):
                        self._notify(decoded(event["kv"]["key"]))
                    if self._notify(""):
                        needed_at = monotonic()
                    elif monotonic() - needed_at > QUIET_SECONDS:
                        break
            finally:
                self._link = None
                link.close()
        return began


def _close_all(links: deque[Link]) -> None:
    while links:
        try:
            links.pop().close()
        except IndexError:
            return


def encoded(text: str) -> str:
    """Return `text` as the gateway wants keys and values."""
    return base64.b64encode(text.encode()).decode()


def decoded(text: str) -> str:
    """Return what was encoded."""
    return base64.b64decode(text).decode()


def _head(file: BufferedReader) -> tuple[int, int | None, bool]:
    """Read the head of an answer: status, length (None: in chunks), whether another may follow."""
    status = int(_line(file).split(b" ")[1])
    length: int | None = 0
    stays = True
    while header := _line(file):
        name, _, value = header.lower().partition(b":")
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding" and b"chunked" in value:
            length = None
        elif name == b"connection":
            stays = b"close" not in value
    return status, length, stays


def _chunks(file: BufferedReader) -> Iterator[bytes]:
    while size := int(_line(file).partition(b";")[0], 16):
        yield _exactly(file, size)
        _line(file)
    while _line(file):
        pass  # trailers


def _line(file: BufferedReader) -> bytes:
    line = file.readline(65536)
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection was closed")
    return line.rstrip(b"\r\n")


def _exactly(file: BufferedReader, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise ConnectionError("the connection was closed")
    return data


def _bytes(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
