"""One HTTP/1.1 connection to an etcd member: a request, an answer, a stream of answers."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from io import BufferedReader
from typing import Any
from urllib.parse import urlsplit

from ...primitives.polling import readable


class Link:
    """One HTTP/1.1 connection to one endpoint.

    Not http.client: that sends a request in two parts, and takes longer than etcd does.
    """

    __slots__ = ("_head", "endpoint", "socket", "used")

    def __init__(self, endpoint: str, timeout: float, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port or 2379
        self.endpoint = endpoint
        self.used = 0.0  # when it was kept; 0: it is new
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
        return not readable(self.socket, 0)

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

    def messages(self) -> Iterator[Any]:
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


def _head(file: BufferedReader) -> tuple[int, int | None, bool]:
    """Read the head of an answer: status, length (None: in chunks), whether another may follow."""
    status = int(_line(file).split(b" ")[1])
    headers: dict[bytes, bytes] = {}
    while header := _line(file):
        name, _, headers[name] = header.lower().partition(b":")
    chunked = b"chunked" in headers.get(b"transfer-encoding", b"")
    length = None if chunked else int(headers.get(b"content-length", 0))
    return status, length, b"close" not in headers.get(b"connection", b"")


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
