"""The proxy of the fault tests: what it must survive."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

from tests.proxy import proxy_to

RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: close() sends a reset


def test_a_server_that_resets_its_connections_does_not_end_the_proxy():
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:

        def refuse():
            with suppress(OSError):  # the listener was shut down
                while True:
                    with listener.accept()[0] as client:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

        server = threading.Thread(target=refuse)
        server.start()
        with proxy_to(listener.getsockname()[1]) as proxy:
            for _ in range(300):
                socket.create_connection(("127.0.0.1", proxy.port), timeout=5).close()
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
