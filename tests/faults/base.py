"""What every engine under test has: servers behind proxies, and what may be done to those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from random import Random
from time import monotonic, sleep
from typing import Any

from tests.faults.clocks import ServerClock
from tests.faults.disks import Disk, may_mount
from tests.launching import START_TIMEOUT, Server, scratch_directory
from tests.proxy import Proxy, proxy_to

# What happens inside of it happens while the fault lasts.
Act = Callable[[Random], AbstractContextManager[None]]

BACKENDS = "distlock_app.backends"


class Engine:
    """An engine without a server, whose workers alone can be hurt."""

    name = "sqlite"
    backend = f"{BACKENDS}.database.DatabaseBackend"
    ttl = 1.0
    migrate = True
    share = 0.25  # of the workers, hit by each fault
    plan: dict[str, Any] = {"names": ["a", "b", "c", "d"]}  # see workers.Worker
    # Faults after which the engine may have forgotten who has a lock.
    forgetful: frozenset[str] = frozenset()
    # Faults that no request notices.
    harmless = frozenset({"kill", "stop", "first waiter", "clock", "script flush", "flushall"})

    def __init__(self) -> None:
        self.stack = ExitStack()

    def start(self) -> None:
        """Start the servers and the proxies."""

    def let_clocks_step(self) -> None:
        """Have servers, if they use a clock of their own, use one that can be set; before start."""

    def close(self) -> None:
        self.stack.close()

    @property
    def server(self) -> str:
        """What tests/run.sh calls its server."""
        return "sqlite"

    @property
    def locks(self) -> dict[str, Any]:
        """The entry of DISTLOCK."""
        return {"BACKEND": self.backend, "LOCATION": "default", "WAIT": 5}

    @property
    def caches(self) -> dict[str, Any]:
        """What CACHES has beside."""
        return {}

    @property
    def env(self) -> dict[str, str]:
        """The environment of the workers."""
        home = str(scratch_directory())
        return {
            "DISTLOCK_TEST_DATABASE": "sqlite",
            "DISTLOCK_TEST_VAR": home,
            "DISTLOCK_TEST_DB_NAME": "",
        }

    def faults(self) -> dict[str, Act]:
        """What can be done to the servers and the paths to them, by kind."""
        return {}


class Served(Engine):
    """An engine on servers, each behind a proxy."""

    kind: type[Server]
    config: dict[str, str] | None = None
    count = 1
    migrate = False
    on_disk = False  # whether what it knows is there
    disk: Disk | None = None
    has_clock = False  # whether leases or fences are by the clock of the server
    steps_back = True  # whether its fences grow even if that is set back
    server_clock: ServerClock | None = None

    @property
    def server(self) -> str:
        return self.kind.name

    def let_clocks_step(self) -> None:
        self.server_clock = ServerClock() if self.has_clock else None

    def start(self) -> None:
        directory = None
        if self.on_disk and may_mount():
            self.disk = self.stack.enter_context(Disk().mounted())
            directory = self.disk.path
        servers = [self.kind(config=self.config, directory=directory) for _ in range(self.count)]
        for server in servers:
            server.env = self.server_clock.env if self.server_clock else {}
        self.servers: list[Any] = [self.stack.enter_context(server) for server in servers]
        self.proxies = [self.stack.enter_context(proxy_to(one.port)) for one in self.servers]

    def faults(self) -> dict[str, Act]:
        return {
            "cut": self.cut,
            "hole": self.hole,
            "silence": self.silence,
            "delay": self.delay,
            "lost replies": self.lose,
            "crash": self.crash,
            "freeze": self.freeze,
            **({"disk full": self.fill} if self.disk else {}),
            **({"server clock": self.step_clock} if self.server_clock else {}),
        }

    def some(self, chance: Random) -> list[int]:
        """Return the places of the servers that a fault hits."""
        return [0]

    def paths(self, chance: Random) -> list[Proxy]:
        return [self.proxies[at] for at in self.some(chance)]

    @contextmanager
    def cut(self, chance: Random) -> Iterator[None]:
        """Close every connection, and soon again."""
        paths = self.paths(chance)
        for path in paths:
            path.cut()
        yield
        for path in paths:
            path.cut()

    @contextmanager
    def hole(self, chance: Random) -> Iterator[None]:
        """Hold everything back, and deliver it late: packets are sent again and again."""
        paths = self.paths(chance)
        for path in paths:
            path.clear.clear()
        yield
        for path in paths:
            path.clear.set()

    @contextmanager
    def silence(self, chance: Random) -> Iterator[None]:
        """Lose everything both ways without a word; cut the connections at the end."""
        paths = self.paths(chance)
        for path in paths:
            path.silent = True
        yield
        for path in paths:
            path.silent = False
            path.cut()

    @contextmanager
    def delay(self, chance: Random) -> Iterator[None]:
        """Let each way take its time."""
        paths = self.paths(chance)
        for path in paths:
            path.delay = chance.uniform(0.01, 0.15)
        yield
        for path in paths:
            path.delay = 0.0

    @contextmanager
    def lose(self, chance: Random) -> Iterator[None]:
        """Lose answers, with their connections."""
        paths = self.paths(chance)
        for path in paths:
            path.lose = chance.uniform(0.05, 0.5)
        yield
        for path in paths:
            path.lose = 0.0

    @contextmanager
    def crash(self, chance: Random) -> Iterator[None]:
        """Kill servers, and start them again on the same port and data."""
        servers = [self.servers[at] for at in self.some(chance)]
        for server in servers:
            server.kill()
        yield
        for server in servers:
            server.start()

    @contextmanager
    def freeze(self, chance: Random) -> Iterator[None]:
        """Stop servers where they are (SIGSTOP), and let them go on."""
        servers = [self.servers[at] for at in self.some(chance)]
        for server in servers:
            server.pause()
        yield
        for server in servers:
            server.resume()

    @contextmanager
    def fill(self, chance: Random) -> Iterator[None]:
        """Leave no room on the disk; a server that ends itself then is started again."""
        assert self.disk is not None
        self.disk.fill()
        yield
        self.disk.empty()
        give_up = monotonic() + START_TIMEOUT
        while not self._answers():  # it may be about to end
            assert monotonic() < give_up, "it does not come back"
            self.servers[0].start()
            sleep(0.05)

    @contextmanager
    def step_clock(self, chance: Random) -> Iterator[None]:
        """Set the clock of the servers back, where it may be, and then forward for good."""
        assert self.server_clock is not None
        back = chance.randint(1, 3) if self.steps_back else 0
        self.server_clock.step(-back)
        yield
        self.server_clock.step(back + chance.randint(1, 3))

    def _answers(self) -> bool:
        with suppress(OSError):
            return bool(self.servers[0].running and self.servers[0].answers())
        return False
