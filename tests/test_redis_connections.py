"""Connections to Redis: TCP, TLS and Unix sockets, and their time limits."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from distlock_app.errors import BackendError
from tests.conftest import missing
from tests.launching import free_port
from tests.redis_workers import backend_at, claim
from tests.servers import RedisServer

pytest_plugins = ["tests.redis_fixtures"]

LIMITS = {"SOCKET_TIMEOUT": 1, "SOCKET_CONNECT_TIMEOUT": 30}


@pytest.fixture(params=["tcp", "unix", "tls"])
def reached(request, private_server, tmp_path):
    """A server, and a backend that reaches it so."""
    config, url, options = {}, "redis://127.0.0.1:{port}/0", dict(LIMITS)
    if request.param == "unix":
        config["unixsocket"] = str(tmp_path / "redis.sock")
        url = f"unix://{tmp_path}/redis.sock?db=0"
    if request.param == "tls":
        certificate, key = certified(tmp_path)
        config = {"tls-port": str(free_port()), "tls-auth-clients": "no"}
        config |= {"tls-cert-file": str(certificate), "tls-key-file": str(key)}
        url = f"rediss://127.0.0.1:{config['tls-port']}/0"
        options["CONNECTION_POOL_KWARGS"] = {"ssl_ca_certs": str(certificate)}
    with private_server(RedisServer, config=config) as server:
        backend = backend_at(url.format(port=server.port), **options)
        yield server, backend
        backend.close()


def certified(directory):
    """Return a certificate of this host that nobody else trusts, and its key."""
    if shutil.which("openssl") is None:
        missing("openssl", "it makes the certificate of a server")
    files = directory / "certificate.pem", directory / "key.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext"
    out = ["subjectAltName=IP:127.0.0.1", "-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run([*words.split(), *out], check=True, capture_output=True)
    return files


def test_every_kind_of_connection_carries_locks(reached):
    _, backend = reached
    grant = backend.acquire(claim("a"), 0)

    assert not backend.acquire(claim("a"), 0)
    assert backend.extend_many([(grant, 60)] * 500) == [True] * 500
    assert [held.fence for held in backend.holders()] == [grant.fence]
    assert backend.release(grant)


@pytest.mark.parametrize("verb", ["acquire", "ping"])
def test_every_kind_of_connection_has_a_time_limit(reached, verb):
    server, backend = reached
    backend.release(backend.acquire(claim("a"), 0))
    backend.ping()

    server.pause()
    with pytest.raises(BackendError, match=r"did not answer: TimeoutError\.$"):
        backend.acquire(claim("a"), 0) if verb == "acquire" else backend.ping()
    server.resume()
