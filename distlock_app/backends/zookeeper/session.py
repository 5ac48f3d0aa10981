"""The process's one ZooKeeper session: kazoo's client, with time limits."""

from __future__ import annotations

import atexit
import logging
import socket
import ssl
import threading
from contextlib import suppress
from typing import Any

from kazoo import exceptions, security
from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.serialization import Connect
from kazoo.retry import KazooRetry

from ...errors import BackendError
from ...primitives.polling import POLLIN, POLLOUT, new_poll
from ...primitives.rlock import RLock
from ...primitives.timing import monotonic
from ..connecting import system_text

# How much of a session is left after a write, at least. To the leader a write that a follower
# passed on is no sign of life: the follower tells whom it has heard half a tick later at most, if
# it is not cut off before. Then the sign before that counts, and kazoo gives one in each third of
# a session. So 2/3 less half a tick: this is enough for sessions of eight ticks and more.
TRUSTED = 3 / 5

# Seconds to connect to one server, and for its first answers, before the next one is tried.
CONNECT = 3.0

# At the level DEBUG kazoo writes whole requests, with the tokens of owners and the password.
_kazoo_says = logging.getLogger("distlock_app.zookeeper")
_kazoo_says.addFilter(lambda record: bool(_kazoo_says.level) or record.levelno >= logging.INFO)

# The clients that a child of fork() inherited: nothing of them may run or be closed.
_graveyard: list[Any] = []


class Gone(BackendError):
    """There is no such node: an error where one is needed."""


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, with a select() that makes no epoll object: a request calls it five times.

    A server that does not answer costs `CONNECT` seconds, not a whole session.
    """

    trouble = ""  # what the last try to connect failed by

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self._tls = tls

    def create_connection(
        self, address: Any, hostname: str | None = None, timeout: float = CONNECT, **_: Any
    ) -> Any:
        # Not by kazoo, which leaves the socket open when a certificate is refused.
        self.trouble = ""
        try:
            connection = socket.create_connection(address, min(timeout, CONNECT))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                return connection
            return self._tls.wrap_socket(connection, server_hostname=hostname)
        except OSError as error:
            self.trouble = system_text(error)
            raise

    def select(self, readers: Any, writers: Any, _: Any, seconds: float) -> Any:
        poll = new_poll()
        for one in readers:
            poll.register(one, POLLIN)
        for one in writers:
            poll.register(one, POLLOUT)
        # Answers that came in one TLS record, as from a proxy, have left the socket together.
        read = {one.fileno() for one in readers if isinstance(one, ssl.SSLSocket) and one.pending()}
        ready = read | {fd for fd, _ in poll.poll(0 if read else seconds * 1000)}
        return tuple([one for one in x if one.fileno() in ready] for x in (readers, writers, ()))


class Session:
    """Connects at the first request, and again, in kazoo's threads, for as long as it is open."""

    def __init__(
        self,
        alias: str,
        hosts: str,
        root: str,
        *,
        login: tuple[str, str] | None,
        tls: ssl.SSLContext | None,
        timeout: float,
        seconds: float,
    ) -> None:
        """`timeout` is for an answer; the session is to last `seconds` without a sign of life.

        All nodes are in the directory `root`.
        """
        self._alias = alias
        self._root = root
        self._timeout = timeout
        KazooClient(hosts)  # raises ValueError now rather than for the first lock
        self._options: dict[str, Any] = {"hosts": hosts, "timeout": seconds}
        if login is not None:
            self._options["auth_data"] = [("digest", ":".join(login))]
            self._options["default_acl"] = security.CREATOR_ALL_ACL
        self._tls = tls
        self._reset()

    def _reset(self) -> None:
        # Reentrant: a signal handler may lock or release while the client is made.
        self._opening = RLock()
        # kazoo's client, and its event that is set while there is a connection.
        self._client: tuple[Any, Any] | None = None
        self._granted = 0.0  # seconds that the server lets the session live
        self._heard_at = float("inf")  # when a server last said anything
        # Of which session, as of which directory, and its value.
        self._epoch: tuple[int, int, int] | None = None
        # When a write was sent that was carried out: a majority knew the session then.
        self.proved_at = float("-inf")
        self._numbers: set[int] = set()  # of the sessions since the client was made

    @property
    def trusted(self) -> float:
        """The seconds for which the session certainly lives after `proved_at`."""
        if not self._granted:
            raise BackendError("this version of kazoo does not expose its session timeout")
        return self._granted * TRUSTED

    def id(self) -> int:
        """Return the number of the session, waiting for the connection; raise BackendError."""
        found = self._connected().client_id
        if found is None:
            raise BackendError(f"ZooKeeper {self._alias!r} is not connected.")
        number = unsigned(found[0])
        self._numbers.add(number)
        return number

    def closed(self, number: int) -> bool:
        """Return whether we closed that session: its nodes are gone, or go without us."""
        return number not in self._numbers

    def epoch(self, made: int) -> int:
        """Return what makes numbers of changes (zxid) fences: they start again with new data.

        So they are counted from the time, in microseconds by the server's clock, at which the root
        was made. Data that was lost takes its sessions along. What an operator deleted is noticed
        by the change that `made` the directory inside it that is used now.
        """
        session, known = self.id(), self._epoch
        if known is None or known[0] != session or known[1] < made:
            known = self._epoch = (session, made, self.read_epoch())
        return known[2]

    def read_epoch(self) -> int:
        """Ask ZooKeeper for that number."""
        while (stat := self.ask("exists", self._root)) is None:
            self.ask("ensure_path", self._root)
        return int(stat.ctime * 1000 - stat.czxid)

    def prove(self) -> None:
        """Prove that the session lives, by a write that changes nothing; raise BackendError.

        A question proves nothing: a server answers it alone, also while it is cut off from a
        leader that has ended the session.
        """
        sent_at = monotonic()
        write = self._connected().transaction()
        write.check(self._root, -1)
        self._commit(write, exceptions.SessionExpiredError)
        self.proved_at = max(self.proved_at, sent_at)

    def try_write(self) -> None:
        """Make and delete a node in one step: this user may; else raise BackendError."""
        write, path = self._connected().transaction(), f"{self._root}/ping"
        write.create(path, ephemeral=True)
        write.delete(path)
        self._commit(write, exceptions.KazooException)

    def _commit(self, write: Any, trouble: type[Exception]) -> None:
        for outcome in self.answer(write.commit_async()):  # kazoo raises none of these errors
            if isinstance(outcome, trouble):
                raise BackendError(f"ZooKeeper {self._alias!r}: {type(outcome).__name__}.")

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Send one request and return its answer; raise Gone or BackendError."""
        return self.answer(self.send(method, *args, **kwargs))

    def send(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Send a request, in order after all before it; `answer` waits for what it returns.

        Never while there is no connection: kazoo would keep the request, and send it when
        its caller has given up.
        """
        return getattr(self._connected(), f"{method}_async")(*args, **kwargs)

    def answer(self, result: Any) -> Any:
        """Return the answer to a request; raise Gone or BackendError."""
        try:
            return result.get(timeout=self._timeout)
        except exceptions.NoNodeError as error:
            raise Gone(f"ZooKeeper {self._alias!r}: there is no such node.") from error
        except KazooTimeoutError as error:
            self._leave_silent()
            raise BackendError(f"ZooKeeper {self._alias!r} did not answer in time.") from error
        except (exceptions.KazooException, RuntimeError) as error:  # see read_and_note()
            raise BackendError(f"ZooKeeper {self._alias!r}: {type(error).__name__}.") from error

    def close(self) -> None:
        """End the session, and with it all of its nodes."""
        found = self._client
        self._reset()
        if found is None:
            return
        client, live = found
        if live.is_set():
            _end(client)
        else:  # kazoo waits until its attempt to connect has ended
            _end_later(client)

    def forget(self) -> None:
        """Leave, in a child of fork(), the parent's session alone."""
        if self._client is not None:
            _graveyard.append(self._client)
            atexit.unregister(self._client[0].handler.stop)
        self._reset()

    def _connected(self) -> Any:
        found = self._client
        if found is None:
            with self._opening:
                found = self._client or self._open()
        client, live = found
        if not live.wait(self._timeout):
            if client.client_state == "AUTH_FAILED":  # kazoo has given up
                self.close()
                raise BackendError(f"ZooKeeper {self._alias!r} rejected the credentials.")
            if monotonic() - self._heard_at > self._granted:
                # The session is over. A server that lost its data would refuse this client for
                # ever, which has seen later changes than there are: a new one has seen none.
                self.close()
            why = f": {trouble}" if (trouble := client.handler.trouble) else ""
            raise BackendError(f"ZooKeeper {self._alias!r} could not be reached{why}.")
        return client

    def _leave_silent(self) -> None:
        """Have kazoo connect again if the server has said nothing since the request was sent.

        It does so by itself only if nothing is asked: each request puts off its sign of life.
        """
        if (found := self._client) is None:
            return
        client, live = found
        silent = client._connection._socket
        if live.is_set() and monotonic() - self._heard_at > self._timeout:
            with suppress(OSError):  # with TLS, its own shutdown() is not for another thread
                socket.socket.shutdown(silent, socket.SHUT_RDWR)

    def _open(self) -> tuple[Any, Any]:
        retry = KazooRetry(max_tries=-1, delay=0.1, max_delay=1.0)
        more = {"connection_retry": retry, "handler": Handler(self._tls), "logger": _kazoo_says}
        client = KazooClient(**more, **self._options)
        self._listen_to(client._connection)
        try:
            live = client.start_async()
            if self._client is None:
                self._client = (client, live)
        finally:
            if self._client is None or self._client[0] is not client:
                _end_later(client)  # Ctrl-C, or a signal handler has made one meanwhile
        return self._client

    def _listen_to(self, connection: Any) -> None:
        """Note what kazoo keeps to itself: when the server spoke, and how long a session lives."""
        invoke, read = connection._invoke, connection._read_socket

        def invoke_and_note(timeout: float, request: Any, xid: Any = None) -> Any:
            answer = invoke(min(timeout, CONNECT), request, xid)
            self._heard_at = monotonic()
            if isinstance(request, Connect) and answer[0].time_out > 0:
                self._granted = answer[0].time_out / 1000
            return answer

        def read_and_note(timeout: float) -> Any:
            self._heard_at = monotonic()
            try:
                return read(timeout)
            except RuntimeError as error:  # an answer to another request: it ends kazoo's thread
                raise ConnectionError(str(error)) from error

        connection._invoke, connection._read_socket = invoke_and_note, read_and_note


def unsigned(number: int) -> int:
    """Return the number of a session as it is shown in names; kazoo's have a sign."""
    return number & (1 << 64) - 1


def _end_later(client: Any) -> None:
    threading.Thread(target=_end, args=(client,), daemon=True).start()


def _end(client: Any) -> None:
    client.stop()
    client.close()
