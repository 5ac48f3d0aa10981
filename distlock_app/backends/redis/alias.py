"""Which Redis a LOCATION means: how to connect, with which timeouts, as CACHES or a URL says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.connection import Connection, ConnectionPool, parse_url
from redis.retry import Retry

# The default of redis-py since 8.0; older ones wait forever.
SOCKET_TIMEOUT = 5.0

# Names of this host; what else leads to one server (DNS, a socket) only the servers could tell.
LOCALHOST = {"localhost", "127.0.0.1", "::1"}

# What a lock needs whatever the alias says: scripts are never repeated behind our back, one
# answer for one request (RESP3 may push others in between), and bytes.
_OURS = {
    "retry": Retry(NoBackoff(), 0),
    "protocol": 2,
    "decode_responses": False,
    "health_check_interval": 0,
}
_NOT_OURS = {
    "retry_on_timeout",
    "retry_on_error",
    "maint_notifications_config",
    "maint_notifications_pool_handler",
    "cache",
    "cache_config",
}

# The first one imports modules: a fork meanwhile would leave a child with half of them.
Connection()  # type: ignore[no-untyped-call]


def recipe(alias: str) -> Any:
    """Return a redis-py pool to take `connection_class` and `connection_kwargs` from.

    It is nobody else's: django-redis keeps one pool per URL and gives a second alias with
    the same URL the options of the first (jazzband/django-redis#685). Nothing connects.
    """
    params = settings.CACHES.get(alias)
    if params is None:
        # Not the value: it may be a URL with a password.
        raise ImproperlyConfigured(
            f"LOCATION is not in CACHES: name an alias there, one of {sorted(settings.CACHES)}."
        )
    with _explained(f"CACHES[{alias!r}]", "LOCATION and OPTIONS"):
        return _ours(_pool(alias, params))


def where(location: Any, cluster: Sequence[str]) -> tuple[Any, list[tuple[str, int]]]:
    """Return a recipe, and the nodes to ask first if it is for a Cluster: of an alias, or of URLs.

    An alias says so by its REDIS_CLIENT_CLASS. It is no use as a cache: django-redis cannot serve
    it.
    """
    if cluster and location is None and not isinstance(cluster, str):
        return _cluster(cluster)
    if cluster or not isinstance(location, str):
        raise ImproperlyConfigured(
            "LOCATION must be the name of an alias in CACHES, unless OPTIONS has a CLUSTER, a list "
            "of URLs."
        )
    found = recipe(location)
    params = settings.CACHES[location]
    client = (params.get("OPTIONS") or {}).get("REDIS_CLIENT_CLASS")
    if client is None or not issubclass(import_string(client), RedisCluster):
        return found, []
    return found, _cluster(_urls(params["LOCATION"]))[1]


def _cluster(urls: Sequence[str]) -> tuple[Any, list[tuple[str, int]]]:
    """Return a recipe from the first URL, which says how to log in, and the nodes of all."""
    with _explained("A Redis Cluster: its list of URLs", "each of them"):
        parts = [parse_url(url) for url in urls]  # type: ignore[no-untyped-call]
        if any(part.get("db") for part in parts):
            raise ImproperlyConfigured("A Redis Cluster has only database 0.")
        nodes = [(part["host"], int(part.get("port", 6379))) for part in parts]
        return _ours(ConnectionPool.from_url(urls[0])), nodes


def server_of(alias: str) -> tuple[Any, ...] | None:
    """Return what two aliases of one Redis database have in common; None: not a Redis cache."""
    try:
        pool = recipe(alias)
    except (ImproperlyConfigured, ImportError):
        return None
    kwargs = pool.connection_kwargs
    host = str(kwargs.get("host", "localhost")).lower()
    host = "localhost" if host in LOCALHOST else host
    server = kwargs.get("path") or (host, int(kwargs.get("port", 6379)))
    return (getattr(pool, "service_name", None) or server, int(kwargs.get("db") or 0))


def _pool(alias: str, params: dict[str, Any]) -> Any:
    """Return a pool as a cache with these settings would build it."""
    path = params.get("BACKEND", "")
    cache = import_string(path)
    modules = [base.__module__ for base in cache.__mro__]
    if any(module.startswith("django_redis.") for module in modules):
        client = (params.get("OPTIONS") or {}).get("CLIENT_CLASS", "")
        if "ShardClient" in client:
            raise ImproperlyConfigured(
                f"CACHES[{alias!r}] spreads its keys over several servers (ShardClient): "
                "a lock needs an alias with one server, DefaultClient or SentinelClient."
            )
        return _django_redis(params)
    if "django.core.cache.backends.redis" in modules:
        return cache(params["LOCATION"], params)._cache.get_client(write=True).connection_pool
    raise ImproperlyConfigured(
        f"CACHES[{alias!r}] is not a Redis cache (BACKEND {path!r}): "
        "use one whose BACKEND is django_redis.cache.RedisCache."
    )


@contextmanager
def _explained(what: str, check: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        # Not chained: a message of urllib or redis-py may quote the URL with its password.
        raise ImproperlyConfigured(
            f"{what} does not describe a Redis server: check {check} ({type(error).__name__})."
        ) from None


def _ours(pool: Any) -> Any:
    theirs = pool.connection_kwargs
    kwargs = {**{name: theirs[name] for name in theirs if name not in _NOT_OURS}, **_OURS}
    pool.connection_kwargs = kwargs
    if kwargs.get("socket_timeout") is None:
        kwargs["socket_timeout"] = SOCKET_TIMEOUT
    for name in "socket_timeout", "socket_connect_timeout":
        seconds = kwargs.get(name)
        # The kernel takes less than a microsecond for none at all.
        if seconds is not None and (not isinstance(seconds, int | float) or seconds < 1e-6):
            raise ImproperlyConfigured(
                f"{name} must be a number of seconds above 0, not {seconds!r}."
            )
    pool.connection_class(**kwargs)  # connects to nothing; an unknown option is a TypeError
    if (sentinels := getattr(pool, "sentinel_manager", None)) is not None:
        sentinels.discover_master = partial(_master, sentinels)
    return pool


def _master(sentinels: Any, service: str) -> tuple[str, int]:
    """Return the address of the master, as the sentinel names it that says all is well.

    redis-py reads it from SENTINEL MASTERS, which names the old one until the failover is over:
    if that is back by then, without its memory, it would be a second master for its clients.
    """
    found = type(sentinels).discover_master(sentinels, service)  # puts that sentinel first
    host, port = sentinels.sentinels[0].sentinel_get_master_addr_by_name(service) or found
    return getattr(sentinels, "_force_master_ip", None) or host, port


def _urls(location: Any) -> list[str]:
    """Return the URLs of a LOCATION of django-redis; the primary's is the first."""
    return location.split(",") if isinstance(location, str) else list(location)


def _django_redis(params: dict[str, Any]) -> Any:
    from django_redis.pool import get_connection_factory

    options = dict(params.get("OPTIONS") or {})
    if options.get("SENTINELS"):
        # A client for a sentinel would try ten times by default (redis-py 8).
        timeout = options.get("SOCKET_TIMEOUT") or SOCKET_TIMEOUT
        options["SENTINEL_KWARGS"] = {
            "socket_timeout": timeout,
            "socket_connect_timeout": options.get("SOCKET_CONNECT_TIMEOUT") or timeout,
            "retry": Retry(NoBackoff(), 0),
            **(options.get("SENTINEL_KWARGS") or {}),
        }
    factory: Any = get_connection_factory(options=options)
    url = _urls(params["LOCATION"])[0]
    return factory.get_connection_pool(factory.make_connection_params(url))
