"""The test project; `DISTLOCK_TEST_...` environment variables choose its servers.

DISTLOCK_TEST_DATABASE        sqlite (default), mysql or postgresql: what `default` is
DISTLOCK_TEST_MYSQL_URL       mysql://user:password@host:port/name, also of MariaDB
DISTLOCK_TEST_POSTGRESQL_URL  postgresql://user:password@host:port/name
DISTLOCK_TEST_REDIS_URL       redis://:password@host:port/0; without it, no lock is on Redis
DISTLOCK_TEST_REDIS_CLUSTER_URL  redis://host:port of some nodes of a Cluster, comma separated
DISTLOCK_TEST_ETCD_URL        http://host:port of etcd; without it, no lock is on etcd
DISTLOCK_TEST_ZOOKEEPER_URL   host:port of ZooKeeper; without it, no lock is there
DISTLOCK_TEST_REDLOCK_URL     redis://host:port/0 of each node of Redlock, comma separated
DISTLOCK_TEST_REDIS_DB        the number of the Redis database, instead of the URL's
DISTLOCK_TEST_ISOLATION       "repeatable read" ...: the transactions of MySQL and PostgreSQL
DISTLOCK_TEST_SUFFIX          keeps runs apart that share servers (but those of Redlock)
DISTLOCK_TEST_VAR             where the files of SQLite are, instead of tests/var
DISTLOCK_TEST_REQUIRE         servers whose absence fails tests instead of skipping them: 1 = all
DISTLOCK_TEST_EXAMPLES        so many other examples in tests by Hypothesis, smallest one shown
DISTLOCK_TEST_DB_NAME         set by conftest.py: processes started by a test use its database
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

BASE_DIR = Path(__file__).resolve().parent
VAR_DIR = Path(os.environ.get("DISTLOCK_TEST_VAR", BASE_DIR / "var"))
VAR_DIR.mkdir(exist_ok=True)

SUFFIX = os.environ.get("DISTLOCK_TEST_SUFFIX", "")
ENGINE = os.environ.get("DISTLOCK_TEST_DATABASE", "sqlite")
ISOLATION = os.environ.get("DISTLOCK_TEST_ISOLATION", "")


def sqlite(alias: str) -> dict[str, Any]:
    """Return a database in a file, which processes share; in memory they could not."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": VAR_DIR / f"{alias}{SUFFIX}.sqlite3",
        "OPTIONS": {
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
        },
        "TEST": {"NAME": VAR_DIR / f"test_{alias}{SUFFIX}.sqlite3"},
    }


def on_server(url: str, alias: str, engine: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return a database on the server at `url`, with a test database for each alias."""
    parts = urlsplit(url)
    name = unquote(parts.path.lstrip("/")) or "distlock"
    return {
        "ENGINE": engine,
        "NAME": name,
        "HOST": parts.hostname or "127.0.0.1",
        "PORT": parts.port or "",
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "OPTIONS": options,
        "TEST": {"NAME": f"test_{name}_{alias}{SUFFIX}"},
    }


def mysql(alias: str) -> dict[str, Any]:
    """Return a database on MySQL or MariaDB."""
    options = {"charset": "utf8mb4", **({"isolation_level": ISOLATION} if ISOLATION else {})}
    url = os.environ["DISTLOCK_TEST_MYSQL_URL"]
    database = on_server(url, alias, "django.db.backends.mysql", options)
    database["TEST"] |= {"CHARSET": "utf8mb4"}
    return database


def postgresql(alias: str) -> dict[str, Any]:
    """Return a database on PostgreSQL."""
    options = {}
    if ISOLATION:
        from psycopg import IsolationLevel

        options = {"isolation_level": IsolationLevel[ISOLATION.upper().replace(" ", "_")]}
    url = os.environ["DISTLOCK_TEST_POSTGRESQL_URL"]
    return on_server(url, alias, "django.db.backends.postgresql", options)


# `locks` is a second database: a file of its own on SQLite, a schema of its own on a server.
DATABASES = {
    alias: {"sqlite": sqlite, "mysql": mysql, "postgresql": postgresql}[ENGINE](alias)
    for alias in ("default", "locks")
}
if os.environ.get("DISTLOCK_TEST_DB_NAME"):
    for database in DATABASES.values():
        database["NAME"] = database["TEST"]["NAME"]

REDIS_URL = os.environ.get("DISTLOCK_TEST_REDIS_URL", "")
if REDIS_URL and os.environ.get("DISTLOCK_TEST_REDIS_DB"):
    REDIS_URL = (
        urlsplit(REDIS_URL)._replace(path="/" + os.environ["DISTLOCK_TEST_REDIS_DB"]).geturl()
    )
REDIS_CLUSTER_URL = os.environ.get("DISTLOCK_TEST_REDIS_CLUSTER_URL", "")

CACHES: dict[str, dict[str, Any]] = {
    "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
}
DISTLOCK: dict[str, dict[str, Any]] = {
    "default": {"BACKEND": "distlock_app.backends.database.DatabaseBackend", "LOCATION": "default"},
    "locks": {"BACKEND": "distlock_app.backends.database.DatabaseBackend", "LOCATION": "locks"},
    "locmem": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"},
    "dummy": {"BACKEND": "distlock_app.backends.dummy.DummyBackend"},
}
# Locks of a database server's own: the alias that runs on this database have, and its engine.
SERVER_LOCKS = {
    "mysql": ("named", "distlock_app.backends.mysql.NamedLockBackend"),
    "postgresql": ("advisory", "distlock_app.backends.postgresql.AdvisoryLockBackend"),
}
if ENGINE in SERVER_LOCKS:
    DISTLOCK[SERVER_LOCKS[ENGINE][0]] = {"BACKEND": SERVER_LOCKS[ENGINE][1], "LOCATION": "default"}
if REDIS_URL:
    CACHES["locks"] = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": REDIS_URL,
        "KEY_PREFIX": SUFFIX,
        "OPTIONS": {"CLIENT_CLASS": "django_redis.client.DefaultClient"},
    }
    DISTLOCK["redis"] = {
        "BACKEND": "distlock_app.backends.redis.RedisBackend",
        "LOCATION": "locks",
        "OPTIONS": {"PREFIX": f"distlock{SUFFIX}"},
    }
if REDIS_CLUSTER_URL:
    DISTLOCK["cluster"] = {
        "BACKEND": "distlock_app.backends.redis.RedisBackend",
        "OPTIONS": {"CLUSTER": REDIS_CLUSTER_URL.split(","), "PREFIX": f"distlock{SUFFIX}"},
    }

ETCD_URL = os.environ.get("DISTLOCK_TEST_ETCD_URL", "")
if ETCD_URL:
    DISTLOCK["etcd"] = {
        "BACKEND": "distlock_app.backends.etcd.EtcdBackend",
        "LOCATION": ETCD_URL,
        "OPTIONS": {"PREFIX": f"distlock{SUFFIX}", "TIMEOUT": 10},
    }

ZOOKEEPER_URL = os.environ.get("DISTLOCK_TEST_ZOOKEEPER_URL", "")
if ZOOKEEPER_URL:
    DISTLOCK["zookeeper"] = {
        "BACKEND": "distlock_app.backends.zookeeper.ZooKeeperBackend",
        "LOCATION": ZOOKEEPER_URL,
        "OPTIONS": {"PREFIX": f"distlock{SUFFIX}", "TIMEOUT": 10, "SESSION": 60},
    }

REDLOCK_URL = os.environ.get("DISTLOCK_TEST_REDLOCK_URL", "")
if REDLOCK_URL:
    nodes = {f"node{number}": url for number, url in enumerate(REDLOCK_URL.split(","), start=1)}
    for alias, url in nodes.items():
        CACHES[alias] = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}
    DISTLOCK["quorum"] = {
        "BACKEND": "distlock_app.backends.redlock.RedlockBackend",
        "LOCATION": list(nodes),
    }

SECRET_KEY = "only for tests"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
STATIC_URL = "static/"
ROOT_URLCONF = os.environ.get("TESTS_URLS", "tests.urls")
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # users of tests log in often

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "distlock_app",
    "tests.app",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
