"""Threads of one process, each with a name of its own that nobody else wants."""

from __future__ import annotations

import threading
import time
from typing import Any

from .contenders import GROUPS, Contender
from .raw import Turn
from .uncontended import at_most, failure


def measure(group: str, seconds: float, counts: list[int], peers: bool) -> dict[str, Any]:
    """Return by contender and number of threads acquisitions a second, or {"error": why not}."""
    results: dict[str, Any] = {}
    made: dict[str, Turn] = {}
    contenders = GROUPS[group].of("threads", peers=peers)
    for contender, count in [(x, n) for n in counts for x in contenders]:
        found = results.setdefault(contender.title, {})
        if "error" in found:
            continue
        try:
            with at_most(30):
                if not contender.limit and contender.title not in made:
                    made[contender.title] = contender.make()
                shared = made.get(contender.title)
                found[str(count)] = _rate(contender, shared, count, seconds)
        except BaseException as error:
            found.update(failure(error))
    return results


def _rate(contender: Contender, shared: Turn | None, count: int, seconds: float) -> float:
    done = [0] * count
    errors: list[BaseException] = []
    gate, stop = threading.Barrier(count + 1), threading.Event()

    def work(me: int) -> None:
        from django.db import connections

        name = f"thread:{me}"
        try:
            turn = shared or contender.make()
            with turn(name):  # connects
                pass
            gate.wait(20)
            while not stop.is_set():
                with turn(name):
                    done[me] += 1
        except BaseException as error:
            errors.append(error)
            gate.abort()
        finally:
            connections.close_all()

    threads = [threading.Thread(target=work, args=(me,), daemon=True) for me in range(count)]
    for thread in threads:
        thread.start()
    try:
        gate.wait(20)
    except threading.BrokenBarrierError:
        raise errors[0] if errors else TimeoutError("the threads do not begin") from None
    started = time.monotonic()
    time.sleep(seconds)
    stop.set()
    took, total = time.monotonic() - started, sum(done)
    for thread in threads:
        thread.join(20)
    if errors:
        raise errors[0]
    return total / took
