"""A TCP proxy between a client and a real server, for what networks do to locks."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle


class Proxy:
    """Passes bytes on; `lose` is the chance that an answer is lost and its connection cut.

    To several servers, as a load balancer does, one connection after the other; to 127.0.0.1, where
    only a port is given.
    """

    def __init__(self, *servers: int | tuple[str, int], seed: int = 1) -> None:
        self._servers = cycle(("127.0.0.1", s) if isinstance(s, int) else s for s in servers)
        self.reached: set[tuple[str, int]] = set()
        self.lose = 0.0
        self.lost = 0  # answers lost so far
        self.swallow = ""  # "silent" or "close": loses the next answer, and the connection or not
        self.silent = False  # passes nothing on any more, and cuts nothing: a black hole
        self.delay = 0.0  # seconds before each piece is passed on
        self.delayed = 0  # pieces so far for which that was so
        self.clear = threading.Event()  # unless set, everything waits, and nothing is lost
        self.clear.set()
        self._chance = random.Random(seed)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def lead_to(self, server: int) -> None:
        """Pass new connections on to another server; those that are open stay where they are."""
        self._servers = cycle([("127.0.0.1", server)])

    def cut(self) -> None:
        """Close every connection that is open now."""
        with self._lock:
            sockets = list(self._open)
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Accept no more, cut what is open, and wait until nothing is passed on."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()  # what it is accepting is open, or closed
        self._listener.close()
        self.clear.set()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener was shut down
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(at := next(self._servers), timeout=5)
                except OSError:
                    client.close()
                    continue
                self.reached.add(at)
                server.settimeout(None)
                for one in (client, server):
                    with suppress(OSError):  # it was reset at once
                        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open |= {client, server}
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                for source, target, answers in ((client, server, False), (server, client, True)):
                    args = (source, target, answers)
                    thread = threading.Thread(target=self._pass_on, args=args, daemon=True)
                    thread.start()
                    self._threads.append(thread)

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.clear.wait()
                if self.delay:
                    self.delayed += 1
                    time.sleep(self.delay)
                if self.silent:
                    self.lost += answers
                    continue
                if answers and self.swallow:
                    how, self.swallow = self.swallow, ""
                    if how == "close":
                        break
                    continue
                if answers and self.lose and self._chance.random() < self.lose:
                    self.lost += 1
                    break
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {source}
        source.close()


@contextmanager
def proxy_to(*servers: int | tuple[str, int]) -> Iterator[Proxy]:
    """Run a proxy to these."""
    proxy = Proxy(*servers)
    try:
        yield proxy
    finally:
        proxy.close()
