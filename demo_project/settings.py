"""Settings of the demo shop; the environment chooses where its locks and its data are.

DEMO_ENGINE        database (default): the lock table; redis: the server of DEMO_REDIS_URL
DEMO_REDIS_URL     redis://:password@host:6379/0
DEMO_DATABASE_URL  mysql://user:password@host:3306/name or postgresql://...; without it, SQLite
DEMO_REDLOCK_URL, DEMO_ETCD_URL, DEMO_ZOOKEEPER_URL  more backends for the race lab: the URLs of
                   three or more Redis servers, of etcd, host:port of ZooKeeper
DEMO_VAR           the directory of the files of SQLite and of the secret key
DEMO_DEBUG         1 shows Django's error pages
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured
from django.core.management.utils import get_random_secret_key

BASE_DIR = Path(__file__).resolve().parent
VAR_DIR = Path(os.environ.get("DEMO_VAR", BASE_DIR / "var"))
VAR_DIR.mkdir(parents=True, exist_ok=True)


def secret_key() -> str:
    """Return the key of this copy of the shop; the first of its processes makes it."""
    path = VAR_DIR / "secret_key"
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=VAR_DIR) as file:
            file.write(get_random_secret_key())
            file.flush()
            try:
                os.link(file.name, path)  # whole or not at all, and only once
            except FileExistsError:
                pass
    return path.read_text()


def sqlite(name: str, **options: Any) -> dict[str, Any]:
    """Return a database in a file; in WAL mode those who read do not wait for who writes."""
    options |= {
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
    }
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": VAR_DIR / f"{name}.sqlite3",
        "OPTIONS": options,
        "TEST": {"NAME": VAR_DIR / f"test_{name}.sqlite3"},
    }


def on_server(url: str) -> dict[str, Any]:
    """Return the database of a URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("mysql", "postgresql"):
        raise ImproperlyConfigured("DEMO_DATABASE_URL begins with mysql:// or postgresql://")
    return {
        "ENGINE": f"django.db.backends.{parts.scheme}",
        "NAME": unquote(parts.path.lstrip("/")),
        "HOST": parts.hostname or "127.0.0.1",
        "PORT": parts.port or "",
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
    }


if url := os.environ.get("DEMO_DATABASE_URL"):
    DATABASES = {"default": on_server(url)}
    LOCK_TABLE_IN = "default"
else:
    # SQLite has one writer for each file. In a file of its own, a lock never waits for the
    # shop's transactions. IMMEDIATE: a transaction that reads before it writes waits for its
    # turn at the beginning, instead of failing with "database is locked" in the middle.
    DATABASES = {"default": sqlite("shop", transaction_mode="IMMEDIATE"), "locks": sqlite("locks")}
    DATABASE_ROUTERS = ["demo_project.routers.LocksApart"]
    LOCK_TABLE_IN = "locks"

ENGINE = os.environ.get("DEMO_ENGINE", "database")
if ENGINE not in ("database", "redis"):
    raise ImproperlyConfigured(f"DEMO_ENGINE is database or redis, not {ENGINE!r}")

CACHES: dict[str, dict[str, Any]] = {
    "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
}


def engine(backend: str, location: Any) -> dict[str, Any]:
    """Return an alias of DISTLOCK."""
    return {"BACKEND": f"distlock_app.backends.{backend}", "LOCATION": location}


def on_redis(alias: str, url: str) -> str:
    """Add a cache, which is how locks find a Redis server; return its alias."""
    CACHES[alias] = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}
    return alias


# The shop has its locks on `default`; the race lab tries every backend that there is.
ENGINES = {"database": engine("database.DatabaseBackend", LOCK_TABLE_IN)}
if ENGINE == "redis" or "DEMO_REDIS_URL" in os.environ:
    url = os.environ.get("DEMO_REDIS_URL", "redis://127.0.0.1:6379/0")
    ENGINES["redis"] = engine("redis.RedisBackend", on_redis("locks", url))
if urls := os.environ.get("DEMO_REDLOCK_URL"):
    nodes = [on_redis(f"node{n}", url) for n, url in enumerate(urls.split(","), start=1)]
    ENGINES["redlock"] = engine("redlock.RedlockBackend", nodes)
if url := os.environ.get("DEMO_ETCD_URL"):
    ENGINES["etcd"] = engine("etcd.EtcdBackend", url)
if url := os.environ.get("DEMO_ZOOKEEPER_URL"):
    ENGINES["zookeeper"] = engine("zookeeper.ZooKeeperBackend", url)
if DATABASES["default"]["ENGINE"].endswith("mysql"):
    ENGINES["named"] = engine("mysql.NamedLockBackend", "default")
if DATABASES["default"]["ENGINE"].endswith("postgresql"):
    ENGINES["advisory"] = engine("postgresql.AdvisoryLockBackend", "default")
DISTLOCK = {"default": ENGINES.pop(ENGINE), **ENGINES}

SECRET_KEY = secret_key()
DEBUG = os.environ.get("DEMO_DEBUG") == "1"
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "[::1]"]
ROOT_URLCONF = "demo_project.urls"
WSGI_APPLICATION = "demo_project.wsgi.application"
LOGIN_URL = "admin:login"
LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("ko", "한국어")]
TIME_ZONE = "UTC"
USE_TZ = True
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SESSION_COOKIE_NAME = "shop_session"  # cookies know no ports: not that of another local project
CSRF_COOKIE_NAME = "shop_csrf"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "demo_project.shop",  # before distlock_app, whose page for busy locks it replaces
    "distlock_app",
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
    "demo_project.shop.middleware.StrictPolicy",
    "demo_project.shop.middleware.LostLocks",
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
                "demo_project.shop.visitors.visitor",
            ],
        },
    },
]
