"""A connection to a Redis server: redis-py opens it, scripts run over its raw socket."""

from __future__ import annotations

import _socket
import re
import socket
import ssl
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import ConnectionError, NoScriptError, ResponseError
from redis.exceptions import TimeoutError as NoAnswer

from ...primitives.polling import POLLIN, new_poll
from ...primitives.timing import monotonic
from ..connecting import FINISH_WITHIN, system_text
from .scripts import Script, pack

# Bytes read at once: about a hundred answers.
RECEIVED = 4096
# Of what comes at any time: more than a TLS record, of which a rest would wait unseen.
RECEIVED_LINES = 65536
# A connection that is silent for so long is asked for a sign of life.
HEARTBEAT = 0.5

# Times that a script is loaded for one request: it may itself answer NOSCRIPT.
MOST_LOADS = 3

PING = pack(b"PING")
# What Redis says, and redis-py as a ConnectionError without a cause.
TOO_MANY = "max number of clients reached"
# What Redis says, without NOPERM, when the ACL forbids what a script does: before 7.2, and since.
DENIED = re.compile("The user executing the script can't|ACL failure in script")


class Broken(ConnectionError):
    """A connection is broken. A class of its own: no signal handler raises it."""


class Lines:
    """A connection on which lines may come at any time: nothing waits for them here."""

    __slots__ = ("_begun", "_connection", "_heard", "_pinged", "_socket", "fd")

    def __init__(self, connection: Any) -> None:
        """Take a connected Connection of redis-py, with nothing left to read."""
        self._connection = connection
        self._socket = connection._sock
        self._socket.setblocking(False)
        self.fd: int = self._socket.fileno()
        self._begun = b""  # of a line that is not complete
        self._heard, self._pinged = monotonic(), 0.0

    def send(self, data: bytes) -> None:
        """Send without waiting; raise Broken."""
        try:
            sent = self._socket.send(data)
        except (OSError, ValueError) as error:
            raise Broken from error
        if sent != len(data):
            raise Broken("it does not read")

    def read(self) -> list[bytes]:
        """Return the lines that have come; raise Broken."""
        try:
            data: bytes = self._socket.recv(RECEIVED_LINES)
        except (BlockingIOError, ssl.SSLWantReadError):
            return []
        except (OSError, ValueError) as error:  # such as that another thread closed it
            raise Broken from error
        if not data:
            raise Broken("closed by the server")
        self._heard = monotonic()
        *lines, self._begun = (self._begun + data).split(b"\r\n")
        return lines

    def is_dead(self) -> bool:
        """Ask for a sign of life now and then; return whether there was none for long."""
        now = monotonic()
        if self._pinged > self._heard:
            return now - self._pinged > 2 * HEARTBEAT
        if now - self._heard >= HEARTBEAT:
            self._pinged = now
            with suppress(Broken):  # the next to read is told
                self.send(PING)
        return False

    def close(self) -> None:
        """Disconnect; its shutdown() ends a poll() of another thread."""
        self._connection.disconnect()


class Link:
    """A connection: redis-py opens it and parses lists; one line answers a script, read here."""

    __slots__ = ("_kernel_limits", "_poll", "_socket", "connection", "used")

    def __init__(self, recipe: Any, within: float | None = None) -> None:
        """Connect; `within`: seconds that no step may take, if that is less than in the recipe."""
        kwargs = dict(recipe.connection_kwargs)
        if within is not None:
            for limit in ("socket_timeout", "socket_connect_timeout"):
                kwargs[limit] = min(kwargs.get(limit) or within, within)
        self.connection: Any = recipe.connection_class(**kwargs)
        self.connection.connect()  # not left to the first command: this one asks the sentinels
        self.used = 0.0  # when it was last returned to the pool; 0: new
        self._socket = self.connection._sock
        self._poll = new_poll()
        self._poll.register(self._socket, POLLIN)
        # Kernel time limits, as in hiredis: Python's own cost a poll() before each call. A signal
        # restarts them. TLS and gevent have a recv() of their own, and Windows other options.
        plain = type(self._socket).recv is _socket.socket.recv
        self._kernel_limits = plain and sys.platform != "win32"
        if self._kernel_limits:
            seconds, micros = divmod(int(self.connection.socket_timeout * 1_000_000), 1_000_000)
            timeval = struct.pack("@ll", seconds, micros)
            for option in socket.SO_RCVTIMEO, socket.SO_SNDTIMEO:
                self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)
            self._socket.settimeout(None)

    def for_redis_py(self) -> Any:
        """Return the connection with the time limit that redis-py expects."""
        self._socket.settimeout(self.connection.socket_timeout)
        return self.connection

    @property
    def server(self) -> tuple[str, int]:
        """Where it leads, over TCP."""
        return self.connection.host, self.connection.port

    def readable(self, seconds: float) -> bool:
        """Return whether something comes within so many seconds, be it the end of file."""
        return bool(self._poll.poll(seconds * 1000))

    def usable(self) -> bool:
        """Return whether the idle connection is as we left it: nothing to read, no end of file."""
        return not self.readable(0)

    def talk(
        self, script: Script | None, requests: Sequence[bytes], loads: int = MOST_LOADS
    ) -> list[Any]:
        """Return the answer to each request, or its error; a script answers a list of numbers."""
        if script is None:
            return self._ask(requests)
        receive, size, answers = self._socket.recv, len(requests), []
        try:
            self._socket.sendall(b"".join(requests))
            data = receive(RECEIVED)
            while data.count(b"\r\n") < size:
                if not (more := receive(RECEIVED)):
                    raise EOFError
                data += more
            for line in data.split(b"\r\n")[:size]:
                refused = line.startswith(b"-")
                answers.append(self._error(line) if refused else [*map(int, line[1:].split())])
        except (TimeoutError, BlockingIOError) as error:  # Python's limit, or the kernel's
            raise NoAnswer from error
        except (OSError, EOFError, ValueError) as error:
            raise ConnectionError from error
        except BaseException:  # of a signal handler
            self.readable(FINISH_WITHIN)
            raise
        if NoScriptError in map(type, answers) and loads:
            self._teach(script, requests, answers, loads - 1)
        return answers

    def subscribe(self, channel: str) -> Lines:
        """Listen on a channel, from now on; what else comes with the answer is lost."""
        connection = self.for_redis_py()
        connection.send_command("SUBSCRIBE", channel, check_health=False)
        connection.read_response(disconnect_on_error=True)
        return Lines(connection)

    def close(self) -> None:
        """Disconnect."""
        self.connection.disconnect()

    def _ask(self, requests: Sequence[bytes]) -> list[Any]:
        connection, answers = self.for_redis_py(), []
        connection.send_packed_command(requests, check_health=False)
        for _ in requests:
            try:
                answers.append(connection.read_response(disconnect_on_error=True))
            except ResponseError as error:
                answers.append(error)
        if self._kernel_limits:
            self._socket.settimeout(None)
        return answers

    def _teach(
        self, script: Script, requests: Sequence[bytes], answers: list[Any], loads: int
    ) -> None:
        """Load the script that a restarted or flushed server forgot; repeat what needed it."""
        again = [at for at, answer in enumerate(answers) if type(answer) is NoScriptError]
        rest = self._ask([script.load])
        if isinstance(rest[0], ResponseError):  # such as NOPERM
            rest *= len(again)
        else:
            rest = self.talk(script, [requests[at] for at in again], loads)
        for at, answer in zip(again, rest, strict=True):
            answers[at] = answer

    def _error(self, line: bytes) -> ResponseError:
        error = self.connection._parser.parse_error(line[1:].decode(errors="replace"))
        if isinstance(error, ResponseError):
            return error
        raise error  # such as LOADING


def reason_of(error: Exception) -> str:
    """Say why connecting failed."""
    return TOO_MANY if str(error) == TOO_MANY else system_text(error)
