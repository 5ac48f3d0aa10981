"""What processes that take turns with one lock got: how often, in which order, at what price."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.processes import Processes


class Turns:
    """Run `count` processes that hold one lock for 1 ms and ask again at once.

    `requests()` says how many requests clients have sent the server so far.
    """

    def __init__(
        self,
        processes: Processes,
        requests: Callable[[], int],
        *,
        using: str,
        count: int,
        seconds: float,
        env: dict[str, str],
    ) -> None:
        before = requests()
        options: dict[str, Any] = {"using": using, "seconds": seconds, "env": env}
        (waits,) = processes.run(
            "tests.lock_workers:contend_in_children",
            count=1,
            number=count,
            name="contended",
            **options,
        )
        total = sum(len(one) for one in waits)
        self.requests = (requests() - before) / total
        # The first and last second do not count: processes come and go then.
        begin = max(one[0][0] for one in waits) + 1
        end = min(one[-1][1] for one in waits) - 1
        self.acquisitions = [sum(begin < got < end for _, got in one) for one in waits]
        self.per_second = sum(self.acquisitions) / (end - begin)
        granted = sorted(got for one in waits for _, got in one)
        self.overtaken = max(
            sum(asked < got < served for got in granted)
            for one in waits
            for asked, served in one
            if begin < asked and served < end
        )
        self.longest_wait = max(
            served - asked for one in waits for asked, served in one if begin < served < end
        )

    @property
    def looks(self) -> float:
        """How often a waiter looks by itself, once a second, before its turn comes."""
        return len(self.acquisitions) / self.per_second

    @property
    def spread(self) -> float:
        """The most acquisitions of one process, divided by the fewest."""
        return max(self.acquisitions) / max(1, min(self.acquisitions))

    def __str__(self) -> str:
        return (
            f"{self.per_second:.0f} acquisitions a second, {self.requests:.2f} requests each,"
            f" max/min {self.spread:.2f}, longest wait {self.longest_wait:.3f} s,"
            f" overtaken at most {self.overtaken} times"
        )
