"""The setting DISTLOCK: read and checked, and one backend made per alias and process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from ..backends.base import BaseLockBackend
from ..backends.dummy import DummyBackend
from ..primitives.forks import in_child
from ..primitives.logs import fields, logger
from .limits import DEFAULT_TTL, DEFAULT_WAIT, checked_ttl, checked_wait

DEFAULT_SETTING: dict[str, dict[str, Any]] = {
    "default": {
        "BACKEND": "distlock_app.backends.database.DatabaseBackend",
        "LOCATION": "default",
    }
}
KEYS = frozenset({"BACKEND", "LOCATION", "TTL", "WAIT", "ON_DOWN", "OPTIONS"})
# The extra of distlock_app that installs a backend's dependency.
EXTRAS = {
    "redis": "redis",
    "django_redis": "redis",
    "MySQLdb": "mysql",
    "psycopg": "postgresql",
    "kazoo": "zookeeper",
}


def aliases_of(using: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the aliases that `using=` names: one, or several in a tuple."""
    return using if isinstance(using, tuple) else (using,)


def using_in(text: str) -> str | tuple[str, ...]:
    """Return what `using=` is for the argument of a command: several aliases by commas."""
    aliases = tuple(text.split(","))
    return aliases if len(aliases) > 1 else text


@dataclass(frozen=True, slots=True)
class Entry:
    """One alias of the setting, ready to use."""

    alias: str
    backend: BaseLockBackend
    ttl: float
    wait: float | None
    # Takes its place while it is down, and locks nothing; None: BackendError is raised then.
    stand_in: BaseLockBackend | None


def check_deployed(entry: Entry) -> Iterator[checks.CheckMessage]:
    """Report a backend that does not exclude other processes, or not while it is down."""
    if entry.backend.local and not settings.DEBUG:
        yield checks.Warning(
            f"DISTLOCK[{entry.alias!r}] uses {type(entry.backend).__name__}, "
            "which does not exclude other processes.",
            hint="Use a backend that all processes share, such as the lock table.",
            id="distlock_app.W003",
        )
    if entry.stand_in is not None:
        yield checks.Info(
            f"DISTLOCK[{entry.alias!r}] has ON_DOWN = 'open': while its backend is down, nothing "
            "is locked.",
            hint="Use 'raise' for locks that protect data.",
            id="distlock_app.I001",
        )


class Registry:
    """The aliases of `settings.DISTLOCK`; one backend for each in a process, made at its start."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __getitem__(self, alias: str) -> Entry:
        """Return the entry of `alias`, or raise ImproperlyConfigured."""
        try:
            return self._entries[alias]
        except KeyError:
            pass
        except TypeError:  # no hash
            message = f"using={alias!r}: give an alias or a tuple of them."
            raise ImproperlyConfigured(message) from None
        setting = self.setting()
        if alias not in setting:
            known = ", ".join(sorted(setting)) or "none"
            raise ImproperlyConfigured(f"DISTLOCK has no alias {alias!r} (it has: {known}).")
        # Not under a mutex: it imports a module, which may create locks or be imported by another
        # thread. If two threads create the entry, neither has connected yet.
        return self._entries.setdefault(alias, self._entry(alias, setting[alias]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.setting())

    def load(self) -> None:
        """Create the backends that can be, before there are threads: each imports modules.

        Of two threads that import parts of one package, one may get an error, as when the other
        asks a cache on Redis for the first time. And a fork meanwhile leaves a child with half.
        """
        with suppress(ImproperlyConfigured):  # `manage.py check` reports it, and the first lock
            self.working()

    def working(self) -> list[Entry]:
        """Return the entries of the aliases whose settings are right."""
        return [self[alias] for alias in self if not self.misconfigured(alias)]

    def misconfigured(self, alias: Any) -> bool:
        """Whether the settings of `alias` are wrong: `manage.py check` reports it (E001)."""
        try:
            if alias in list(self.setting()):  # not in the dict: an alias without a hash is wrong
                self[alias]
        except Exception:  # raised by a backend's own code
            return True
        return False

    def made(self) -> list[Entry]:
        """Return the entries in use so far, without creating any."""
        return list(self._entries.values())

    def setting(self) -> dict[str, dict[str, Any]]:
        """Return `settings.DISTLOCK`, or the lock table on the default database."""
        value = getattr(settings, "DISTLOCK", None)
        if value is None:
            return DEFAULT_SETTING
        if not isinstance(value, dict) or not all(
            isinstance(alias, str) and isinstance(params, dict) for alias, params in value.items()
        ):
            raise ImproperlyConfigured(
                "DISTLOCK must be a dict of aliases, as CACHES is: {'default': {'BACKEND': ...}}."
            )
        return value

    def reset(self) -> None:
        """Forget the backends, after closing their connections."""
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            _robustly(entry.backend.close, entry.alias)

    def after_fork(self) -> None:
        """Make the backends usable in a child process."""
        for entry in self._entries.values():
            _robustly(entry.backend.after_fork, entry.alias)

    def add(self, alias: str, params: dict[str, Any]) -> None:
        """Add an alias that is not in settings, for this process."""
        if alias not in self._entries:
            self._entries[alias] = self._entry(alias, params)

    def _entry(self, alias: str, params: dict[str, Any]) -> Entry:
        try:
            return _entry_of(alias, params)
        except ImproperlyConfigured as error:
            error.args = (f"DISTLOCK[{alias!r}]: {error}",)
            raise


def _robustly(call: Callable[[], None], alias: str) -> None:
    try:
        call()
    except Exception:  # do it for the other backends all the same
        logger.exception(
            "the lock backend of alias %r failed", alias, extra=fields("backend_failed", alias)
        )


def _entry_of(alias: str, params: dict[str, Any]) -> Entry:
    """Return the entry of an alias; what is raised does not say yet which alias it is."""
    if unknown := set(params) - KEYS:
        raise ImproperlyConfigured(
            f"unknown key {min(map(repr, unknown))}; known are {', '.join(sorted(KEYS))}."
        )
    try:
        ttl = checked_ttl(params.get("TTL", DEFAULT_TTL))
        wait = checked_wait(params.get("WAIT", DEFAULT_WAIT))
    except (TypeError, ValueError) as error:
        raise ImproperlyConfigured(f"{error}.") from error
    if (on_down := params.get("ON_DOWN", "raise")) not in ("raise", "open"):
        raise ImproperlyConfigured("'ON_DOWN' must be 'raise' or 'open'.")
    stand_in = DummyBackend(alias=alias) if on_down == "open" else None
    return Entry(alias, _backend(alias, params), ttl, wait, stand_in)


def _backend(alias: str, params: dict[str, Any]) -> BaseLockBackend:
    if "BACKEND" not in params:
        raise ImproperlyConfigured("'BACKEND' is missing.")
    try:
        cls = import_string(params["BACKEND"])
        known = set(inspect.signature(cls).parameters) - {"alias", "location"}
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # or it is no class
        path, example = params["BACKEND"], DEFAULT_SETTING["default"]["BACKEND"]
        full = "" if "distlock_app." in str(path) else f" (a full path is like {example!r})"
        raise ImproperlyConfigured(
            f"'BACKEND' {path!r} cannot be imported: {_why(error)}{full}"
        ) from error
    options = params.get("OPTIONS") or {}
    if not isinstance(options, dict):
        raise ImproperlyConfigured("'OPTIONS' must be a dict.")
    for key in options:
        if str(key).lower() not in known:
            names = ", ".join(sorted(k.upper() for k in known)) or "none"
            raise ImproperlyConfigured(f"unknown option {key!r}; known are: {names}.")
    kwargs = {str(key).lower(): value for key, value in options.items()}
    if len(kwargs) < len(options):
        raise ImproperlyConfigured("'OPTIONS' has the same key twice, in upper and lower case.")
    try:
        backend: BaseLockBackend = cls(alias=alias, location=params.get("LOCATION"), **kwargs)
    except ImportError as error:
        raise ImproperlyConfigured(f"{cls.__name__}: {_why(error)}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ImproperlyConfigured(
            f"{cls.__name__} cannot use this LOCATION or these OPTIONS: {error}"
        ) from error
    return backend


def _why(error: Exception) -> str:
    """Return the message, and what to install."""
    missing = (getattr(error, "name", None) or "").partition(".")[0]
    extra = EXTRAS.get(missing) if isinstance(error, ModuleNotFoundError) else None
    return f"{error}" + (f": install distlock_app with the extra {extra!r}" if extra else "")


registry = Registry()


def _on_setting_changed(*, setting: str, **kwargs: Any) -> None:
    if setting in {"DISTLOCK", "CACHES", "DATABASES"}:
        registry.reset()


setting_changed.connect(_on_setting_changed)
in_child(registry.after_fork)
