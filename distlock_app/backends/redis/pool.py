"""Pool of connections to a Redis server or Sentinel master: keeps idle ones; requests, errors."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import Any

from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from ...errors import BackendError, LockError
from ...primitives.timing import monotonic
from ..base import ConnectionLost
from ..connecting import KEEP_IDLE, Idle
from .link import DENIED, Link, reason_of
from .scripts import Script, pack

# Answers after which a connection is kept: being out of memory says nothing against it.
KEPT_AFTER = frozenset({list, bytes, int, type(None), OutOfMemoryError})
# Refusals for which redis-py, or one before 7, has no class: no mistakes in a caller's script.
REFUSALS = set("ASK BUSY CLUSTERDOWN MASTERDOWN MISCONF MOVED NOREPLICAS TRYAGAIN".split())
# What a refusal is for people: the second has no code, its text begins so.
SAID = {ReadOnlyError.__name__: "it is a read-only replica", "DB": "it has no such database number"}
# The Sentinels are asked so often who the master is. If they are silent, requests wait for them a
# tenth of the time; a refusal, as during a failover, comes at once.
MASTER_SECONDS = 1.0
SENTINELS_AWAY_SECONDS = 10.0


class Unreachable(BackendError):
    """There is no connection: nothing was asked."""


class Servers:
    """The servers that are asked: one (Pool), or the masters of a Cluster."""

    def __init__(self, name: str) -> None:
        self.name = name  # for messages

    def exchange(
        self, script: Script | None, requests: Sequence[bytes], repeat: bool = True
    ) -> list[Any]:
        """Return the answers; a ResponseError of the server or a BackendError is one, too.

        When a kept connection breaks under requests, they are repeated once on a new one.
        """
        raise NotImplementedError

    def node(self, request: bytes) -> Pool:
        """Return the server that has the keys of this request, or of this "{tag}"."""
        raise NotImplementedError

    def serving(self, request: bytes) -> Servers:
        """Return what node() would, as far as it is known."""
        return self

    def nodes(self) -> list[Pool]:
        """Return every server that has keys."""
        raise NotImplementedError

    def close(self) -> None:
        """Disconnect what is idle; what is in use is kept when it comes back."""
        raise NotImplementedError

    def run(self, script: Script, request: bytes, *, ends: bool = False) -> list[int]:
        """Send one packed EVALSHA and return the numbers of its answer; raise BackendError.

        Every script may be repeated. One that `ends` the claim can answer 1 in its first run only.
        """
        try:
            [answer] = self.exchange(script, (request,), not ends)
            return answer if type(answer) is list else self._value(answer)
        except ConnectionLost as error:
            if not ends:
                raise
            if (answer := self.run(script, request)) == [1]:
                return answer
            raise BackendError(
                f"Redis {self.name!r} lost the answer to a release: the lock is no longer ours, "
                "but may have been lost before."
            ) from error

    def run_once(self, script: Script, request: bytes) -> list[int]:
        """Like `run`, but for a script of a caller: sent once, and a mistake in it is a LockError.

        Our own errors do not quote the server, whose text may have a request in it.
        """
        [answer] = self.exchange(script, (request,), False)
        if type(answer) in (ResponseError, NoScriptError) and code_of(answer) not in REFUSALS:
            raise LockError(f"the script failed: {answer}")
        return answer if type(answer) is list else self._value(answer)

    def run_all(self, script: Script, requests: Sequence[bytes]) -> list[Any]:
        """Send many in one round trip; each answer is a list of numbers or a BackendError."""
        answers = self.exchange(script, requests)
        return [self._refusal(a) if isinstance(a, ResponseError) else a for a in answers]

    def ask(self, *requests: bytes) -> list[Any]:
        """Send packed commands that only read, in one round trip; raise BackendError."""
        return [self._value(answer) for answer in self.exchange(None, requests)]

    def _value(self, answer: Any) -> Any:
        if isinstance(answer, BackendError):
            raise answer
        if isinstance(answer, ResponseError):
            raise self._refusal(answer) from answer
        return answer

    def _refusal(self, error: ResponseError) -> BackendError:
        code = code_of(error)
        return BackendError(f"Redis {self.name!r} refused the request: {SAID.get(code, code)}.")


class Pool(Servers):
    """The connections of this process to one server: last in, first out."""

    def __init__(self, name: str, recipe: Any, *, replicas: int = 0, within: float = 1.0) -> None:
        """With `replicas`, a lock counts only when so many have it, at most `within` s later."""
        super().__init__(name)
        self._recipe = recipe
        self._replicas = replicas
        self._wait = pack(b"WAIT", b"%d" % replicas, b"%d" % max(1, int(within * 1000)))
        self._idle: Idle[Link] = Idle()
        weakref.finalize(self, self._idle.close)  # what came back after close()
        self.demoted = 0  # how often a connection was found to lead to a replica
        self._ask_master: Any = getattr(recipe, "get_master_address", None)  # behind Sentinels
        self._master: tuple[str, int] | None = None
        self._ask_again = 0.0

    def node(self, request: bytes) -> Pool:
        return self

    def nodes(self) -> list[Pool]:
        return [self]

    def close(self) -> None:
        self._idle.close()

    def exchange(
        self, script: Script | None, requests: Sequence[bytes], repeat: bool = True
    ) -> list[Any]:
        """Ask over one connection; see Servers. Raise BackendError when it fails."""
        idle, link = self._idle, None
        try:
            link = idle.take() if self._ask_master is None else self._take_of_master()
            if link is None:
                link = self.connect()
            try:
                answers = link.talk(script, requests)
            except ConnectionError:
                if not (link.used and repeat):
                    raise
                # The server had closed it, or was restarted, or a sentinel has a new master.
                self.close()
                link.close()
                link = None
                link = self.connect()
                answers = link.talk(script, requests)
            keep = KEPT_AFTER.issuperset(map(type, answers))
            if self._replicas and script is not None and script.promises:
                self._confirm(link, script, answers)
            if keep:
                kept, link = link, None
                kept.used = monotonic()  # Idle.keep() without its call
                idle.append(kept)
                if kept.used > idle.sweep_at or len(idle) > KEEP_IDLE:
                    idle.sweep(kept.used)
            else:  # such as READONLY: a new connection may reach the new master
                self.demoted += ReadOnlyError in map(type, answers)
                self.close()
            return answers
        except (RedisError, OSError) as error:  # the second: such as a sentinel's unknown name
            # A server that does not answer may have been replaced: a new connection asks.
            self.close()
            raise self._failure(error, sent=link is not None) from error
        finally:
            if link is not None:  # the next request on it might read our answer
                link.close()

    @property
    def _at(self) -> str:
        """Where the server is, for messages: never with a user or a password."""
        kwargs = self._recipe.connection_kwargs
        if service := getattr(self._recipe, "service_name", None):
            return f"the master of {service!r}"
        return kwargs.get("path") or f"{kwargs.get('host')}:{kwargs.get('port', 6379)}"

    def connect(self, within: float | None = None) -> Link:
        """Return a new connection for the caller alone; no step takes more than `within` s."""
        for _ in range(3):
            link = Link(self._recipe, within)
            if self._ask_master is None:
                return link
            # The Sentinels named its server before we reached it: it may have died meanwhile, lost
            # its place and come back, empty and a master in its own eyes. So they are asked again.
            try:
                self._master, self._ask_again = self._ask_master(), monotonic() + MASTER_SECONDS
            except BaseException:
                link.close()
                raise
            if link.server == self._master:
                return link
            link.close()
        raise ConnectionError("the Sentinels keep naming different masters")

    def replaced(self, link: Link) -> bool:
        """Return whether the Sentinels are known to call another server than its the master."""
        return self._ask_master is not None and link.server != self._master

    def _take_of_master(self) -> Link | None:
        while (link := self._idle.take()) and not self._leads_to_master(link):
            link.close()
        return link

    def _leads_to_master(self, link: Link) -> bool:
        """Return whether the Sentinels still call its server the master.

        A live old master learns of the failover ten seconds later, and grants locks until then.
        """
        if (asked := monotonic()) >= self._ask_again:
            self._ask_again = asked + MASTER_SECONDS  # other threads do not wait for it
            try:
                self._master = self._ask_master()
            except (RedisError, OSError):  # no reason to give up a connection that works
                failed = monotonic()
                pause = min(max(MASTER_SECONDS, 10 * (failed - asked)), SENTINELS_AWAY_SECONDS)
                self._ask_again = failed + pause
        return link.server == self._master

    def _confirm(self, link: Link, script: Script, answers: list[Any]) -> None:
        """Make errors of the promises that the replicas have not heard of in time.

        On the same connection: WAIT asks for what this one wrote.
        """
        promises = [at for at, a in enumerate(answers) if type(a) is list and a[0] == 1]
        if not promises:
            return
        [heard] = self._value(link.talk(script, [self._wait])[0])
        if heard < self._replicas:
            error = BackendError(
                f"Redis {self.name!r}: only {heard} of {self._replicas} replicas confirmed the "
                "lock in time, so it does not count."
            )
            for at in promises:
                answers[at] = error

    def _failure(self, error: RedisError | OSError, *, sent: bool) -> BackendError:
        """Say what happened; no URL, and none of the texts that may quote our request."""
        server = f"Redis {self.name!r}"
        if isinstance(error, AuthenticationError):
            return BackendError(
                f"{server} rejected the credentials: check user and password in CACHES."
            )
        if isinstance(error, ResponseError):  # to SELECT
            return self._refusal(error)
        if not sent:
            return Unreachable(f"{server} could not be reached at {self._at}: {reason_of(error)}.")
        kind = ConnectionLost if isinstance(error, ConnectionError) else BackendError
        return kind(f"{server} did not answer: {type(error).__name__}.")


def code_of(error: ResponseError) -> str:
    """Return what kind of refusal it is: "OOM", or "MovedError" where redis-py has a class."""
    if DENIED.search(str(error)):
        return NoPermissionError.__name__
    code = re.match(r"[A-Z]+(?= )|unknown command \W\w+\W", str(error))
    return code[0] if code else type(error).__name__
