"""The settings of locks on Redis: which alias, which connections, and what the checks say."""

from __future__ import annotations

import pytest
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from redis.cache import CacheConfig

from distlock_app.backends.redis import RedisBackend
from distlock_app.errors import BackendError
from distlock_app.testing.claims import a_claim
from tests.redis_workers import Waiter, backend_at, client_of

REDIS = "django_redis.cache.RedisCache"
DJANGO = "django.core.cache.backends.redis.RedisCache"
NOWHERE = "redis://:s3cret@127.0.0.1:1/2"

pytest_plugins = ["tests.redis_fixtures"]


def backend_for(caches, location="locks", **options):
    """Return a backend on an alias of these CACHES."""
    with override_settings(CACHES=caches):
        return RedisBackend(alias="redis", location=location, **options)


def test_nothing_connects_before_the_first_lock():
    backend = backend_for({"locks": {"BACKEND": REDIS, "LOCATION": NOWHERE}})

    assert backend.check() == []
    with pytest.raises(BackendError):
        backend.acquire(a_claim("a"), 0)


@pytest.mark.parametrize(
    ("alias", "says"),
    [
        (None, r"is not in CACHES: name an alias there, one of \['default'\]"),
        ({"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}, "is not a Redis cache"),
        (
            {
                "BACKEND": REDIS,
                "LOCATION": [NOWHERE],
                "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"},
            },
            "ShardClient",
        ),
        ({"BACKEND": REDIS, "LOCATION": "redis://u:s3cret@host:s3cret/0"}, "check LOCATION"),
        ({"BACKEND": REDIS, "LOCATION": "http://:s3cret@host"}, "check LOCATION"),
        ({"BACKEND": REDIS}, "check LOCATION"),
        ({"BACKEND": REDIS, "LOCATION": f"{NOWHERE}?colour=1"}, "check LOCATION and OPTIONS"),
    ],
)
def test_a_wrong_alias_is_refused_with_a_way_out(alias, says):
    caches = {} if alias is None else {"locks": alias}

    with pytest.raises(ImproperlyConfigured, match=says) as refused:
        backend_for({"default": {"BACKEND": REDIS, "LOCATION": NOWHERE}, **caches})

    assert "s3cret" not in str(refused.value)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


@pytest.mark.parametrize(
    "options",
    [
        *({"location": None}, {"prefix": ""}, {"prefix": "a{b}"}, {"prefix": "a b"}),
        {"prefix": "a\t"},
        *({"replicas": -1}, {"replicas": "1"}, {"replicas": 1, "replicas_timeout": 5}),
        *({"replicas": 1, "replicas_timeout": 0}, {"replicas": 1, "replicas_timeout": "soon"}),
    ],
)
def test_wrong_options_are_refused(options):
    caches = {"locks": {"BACKEND": REDIS, "LOCATION": NOWHERE}}

    with pytest.raises(ImproperlyConfigured, match="^(LOCATION|PREFIX|REPLICAS|REPLICAS_TIMEOUT) "):
        backend_for(caches, **options)


@pytest.mark.parametrize("seconds", [0, "soon"])
def test_a_time_limit_that_is_none_is_named(seconds):
    caches = {"locks": {"BACKEND": REDIS, "LOCATION": NOWHERE}}

    with pytest.raises(ImproperlyConfigured, match="REPLICAS_TIMEOUT must be a number of seconds"):
        backend_for(caches, replicas=1, replicas_timeout=seconds)


def test_connections_follow_the_alias_but_never_repeat_or_wait_for_ever():
    options = {
        "PASSWORD": "from options",
        "SOCKET_CONNECT_TIMEOUT": 0.5,
        "CONNECTION_POOL_KWARGS": {"retry_on_timeout": True, "socket_timeout": None, "db": 7},
    }
    url = "redis://someone@127.0.0.1:1?health_check_interval=9&protocol=3"
    alias = {"BACKEND": REDIS, "LOCATION": [url, "redis://replica"], "OPTIONS": options}

    backend = backend_for({"locks": alias})
    kwargs = backend._recipe.connection_kwargs
    connection = backend._recipe.connection_class(**kwargs)

    assert (connection.username, connection.password, connection.db) == (
        "someone",
        "from options",
        7,
    )
    assert connection.socket_connect_timeout == 0.5 and connection.socket_timeout == 5
    assert connection.retry._retries == 0 and connection.retry_on_error == []
    assert connection.health_check_interval == 0 and connection.protocol == 2


@pytest.mark.parametrize("name", ["socket_timeout", "socket_connect_timeout"])
@pytest.mark.parametrize("seconds", ["2", 0, -1, 1e-7])
def test_a_time_limit_that_is_none_is_refused(name, seconds):
    alias = {"BACKEND": DJANGO, "LOCATION": NOWHERE, "OPTIONS": {name: seconds}}

    with pytest.raises(ImproperlyConfigured, match=f"{name} must be a number of seconds above 0"):
        backend_for({"locks": alias})


@pytest.mark.parametrize("kind", [REDIS, DJANGO])
def test_what_only_a_cache_can_use_is_left_to_the_cache(kind, own_redis):
    """Client-side caching needs RESP3, which locks do not speak."""
    options = {"protocol": 3, "cache_config": CacheConfig()}
    options = {"CONNECTION_POOL_KWARGS": options} if kind == REDIS else options
    alias = {"BACKEND": kind, "LOCATION": own_redis.url, "OPTIONS": options}
    other = {"BACKEND": REDIS, "LOCATION": NOWHERE}

    backend = backend_for({"locks": alias})

    assert backend.release(backend.acquire(a_claim("a"), 0))
    with override_settings(CACHES={"locks": other, "cached": alias}):
        assert backend_for({"locks": other}).check() == []
    backend.close()


def test_a_location_is_split_as_its_cache_splits_it():
    one, other = "redis://:se;cret@127.0.0.1:1/2", "redis://127.0.0.1:1/3"

    for kind, text, password in (
        (REDIS, f"{one},{other}", "se;cret"),
        (DJANGO, f"{other};{one}", None),
    ):
        backend = backend_for({"locks": {"BACKEND": kind, "LOCATION": text}})
        assert backend._recipe.connection_kwargs.get("password") == password


def test_the_nodes_of_a_cluster_are_split_as_its_cache_splits_them():
    alias = {
        "BACKEND": REDIS,
        "LOCATION": "redis://:se;cret@127.0.0.1:1,redis://127.0.0.1:2",
        "OPTIONS": {"REDIS_CLIENT_CLASS": "redis.cluster.RedisCluster"},
    }

    backend = backend_for({"locks": alias})

    assert backend._nodes == [("127.0.0.1", 1), ("127.0.0.1", 2)]


def test_two_aliases_with_one_url_keep_their_own_options_and_connections(own_redis):
    slow, fast = (backend_at(own_redis.url, SOCKET_TIMEOUT=seconds) for seconds in (3, 1))

    timeouts = [b._recipe.connection_kwargs["socket_timeout"] for b in (slow, fast)]

    assert timeouts == [3, 1]
    with override_settings(CACHES={"locks": {"BACKEND": REDIS, "LOCATION": own_redis.url}}):
        cache = caches["locks"]
        cache.set("x", 1)
        pool = cache.client.get_client().connection_pool
        assert pool is not slow._recipe
        pool.disconnect()


def test_two_aliases_with_one_server_share_their_locks(own_redis):
    with override_settings(CACHES={"locks": {"BACKEND": REDIS, "LOCATION": own_redis.url}}):
        old, new = (RedisBackend(alias=alias, location="locks") for alias in ("redis", "default"))

    grant = old.acquire(a_claim("moved"), 0)
    assert grant and not new.acquire(a_claim("moved"), 0)
    old.release(grant)
    assert new.acquire(a_claim("moved"), 0)

    old.close()
    new.close()


def test_locks_work_on_the_redis_cache_of_django(own_redis):
    alias = {
        "BACKEND": DJANGO,
        "LOCATION": own_redis.url,
        "OPTIONS": {"db": 5, "socket_timeout": 2},
    }
    backend = backend_for({"locks": alias})

    assert backend.acquire(a_claim("a"), 0)
    assert not backend.acquire(a_claim("a"), 0)
    backend.close()


def test_a_sentinel_alias_asks_the_sentinels_once():
    options = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": [("127.0.0.1", 1)],
        "SENTINEL_KWARGS": {"password": "s3cret"},
        "SOCKET_TIMEOUT": 3,
    }
    alias = {"BACKEND": REDIS, "LOCATION": "redis://locks/0", "OPTIONS": options}
    backend = backend_for({"locks": alias})
    [sentinel] = backend._recipe.sentinel_manager.sentinels

    kwargs = sentinel.connection_pool.connection_kwargs
    assert kwargs["password"] == "s3cret" and kwargs["retry"]._retries == 0
    assert kwargs["socket_timeout"] == kwargs["socket_connect_timeout"] == 3
    with pytest.raises(BackendError) as failed:
        backend.ping()
    assert "s3cret" not in f"{failed.value} {failed.value.__cause__}"
    assert options["SENTINEL_KWARGS"] == {"password": "s3cret"}

    options["SOCKET_CONNECT_TIMEOUT"] = 0.5
    [sentinel] = backend_for({"locks": alias})._recipe.sentinel_manager.sentinels
    kwargs = sentinel.connection_pool.connection_kwargs
    assert (kwargs["socket_timeout"], kwargs["socket_connect_timeout"]) == (3, 0.5)


def test_a_user_with_few_permissions_is_enough(own_redis):
    client = client_of(own_redis.url)
    commands = (
        "+evalsha +script|load +get +set +getset +del +exists +pttl +pexpire +time +zadd +zrem "
        "+zrange +zrangebyscore +zpopmin +zcard +hset +hget +hdel +publish "
        "+pubsub|numsub +subscribe +ping"
    )
    user = "on >word ~distlock:* &distlock:wake:* -@all"
    client.execute_command("ACL", "SETUSER", "locks", *user.split(), *commands.split())
    backend = backend_at(own_redis.url.replace("//", "//locks:word@"))

    first = backend.acquire(a_claim("a"), 0)
    waiter = Waiter(backend, "a")
    assert not waiter.ask()
    assert backend.extend(first, 60) and [held.waiters for held in backend.holders()] == [1]
    assert backend.release(first) and backend.release(waiter.granted())
    backend.close()
    client.close()


def test_a_cache_in_the_database_of_the_locks_is_warned_of():
    url, other = "redis://127.0.0.1:1/1", "redis://127.0.0.1:1/2"
    alone = {"locks": {"BACKEND": REDIS, "LOCATION": url}}

    def found(location="locks", **more):
        with override_settings(CACHES={**alone, **more}):
            backend = RedisBackend(alias="redis", location=location)
            return [message.id for message in backend.check()]

    assert found() == []
    assert found(default={"BACKEND": REDIS, "LOCATION": other}) == []
    assert found(default={"BACKEND": REDIS, "LOCATION": url}) == ["distlock_app.W013"]
    assert found("default", default={"BACKEND": REDIS, "LOCATION": other}) == ["distlock_app.W013"]


@pytest.mark.parametrize(
    ("url", "other"),
    [
        ("redis://127.0.0.1:1/1", "redis://localhost:1/1"),
        ("redis://LOCALHOST:1/1", "redis://[::1]:1/1"),
        ("redis://127.0.0.1/1", "redis:///1"),
        ("redis://Redis.example/1", "rediss://redis.example:6379?db=1"),
    ],
)
def test_one_server_under_two_names_is_one(url, other):
    caches = {"locks": {"BACKEND": REDIS, "LOCATION": url}}

    def found(location):
        with override_settings(
            CACHES={**caches, "default": {"BACKEND": REDIS, "LOCATION": location}}
        ):
            backend = RedisBackend(alias="redis", location="locks")
            return [message.id for message in backend.check()]

    assert found(other) == ["distlock_app.W013"]
    assert found(other.replace("1", "2")) == []


def test_the_server_is_asked_whether_it_evicts_locks(own_redis):
    alias = {"BACKEND": REDIS, "LOCATION": own_redis.url}
    client = client_of(own_redis.url)

    def found():
        with override_settings(CACHES={"locks": alias}):
            backend = RedisBackend(alias="redis", location="locks")
            messages = backend.check(ask=True)
            backend.close()
            return [message.id for message in messages]

    assert found() == []
    client.config_set("maxmemory-policy", "volatile-lru")
    assert found() == ["distlock_app.W014"]
    own_redis.stop()
    assert found() == ["distlock_app.E013"]
    client.close()
