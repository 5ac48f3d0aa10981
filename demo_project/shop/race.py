"""A race from its start to its end, for the page and for `manage.py race`.

One race at a time, on all hosts: that is a lock of our own. The page takes it, and hands it over
to the process that conducts the race.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from django.conf import settings

from distlock_app import Hold, Lock, LockError

from .race_buyers import GRACE, START, Crowd
from .race_models import Race
from .race_results import Result, counted, stock_up, timed
from .race_strategies import Strategy, strategies
from .race_terms import Terms

LOCK = Lock("race-lab", wait=0, ttl=30, max_hold=600)
KEPT = 10  # races, with their orders
LOOK = 0.25  # seconds between two looks at the clock, the lock and the Cancel button

# What is told of the progress: the strategy, purchases tried, and their total.
Tell = Callable[[Strategy, int, int], None]


class Stopped(Exception):
    """The race was cancelled, or its lock was taken away."""


def announce(terms: Terms, keys: Sequence[str], *, by: str) -> Race:
    """Write a new race down, and forget old ones; only under the lock."""
    old = Race.objects.values_list("pk", flat=True)[KEPT - 1 :]
    Race.objects.filter(pk__in=list(old)).delete()
    once = list(dict.fromkeys(keys))
    return Race.objects.create(terms=asdict(terms), strategies=once, started_by=by)


def start(terms: Terms, keys: Sequence[str], *, by: str) -> Race:
    """Start a race in a process of its own; raise LockBusy if one is running."""
    hold = LOCK.acquire()
    try:
        race = announce(terms, keys, by=by)
        handed_over = hold.dump()
    except BaseException:
        hold.release()
        raise
    director = subprocess.Popen(
        [sys.executable, "-m", "django", "race", f"--conduct={race.pk}"],
        cwd=settings.BASE_DIR.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # it ends by its own clock, not with the web server
    )
    # Waits for its end, too: nobody else would.
    threading.Thread(target=director.communicate, args=[handed_over], daemon=True).start()
    return race


def conduct(race: Race, hold: Hold, tell: Tell = lambda *_: None) -> list[Result]:
    """Run a race that was announced; return its results, which are in its row as well."""
    terms, known, results = Terms(**race.terms), strategies(), []
    state, trouble = Race.State.CANCELLED, ""
    try:
        for key in race.strategies:
            results.append(run(race, hold, known[key], terms, tell))
            race.results = [asdict(result) for result in results]
            race.save(update_fields=["results"])
        state = Race.State.DONE
    except (Stopped, LockError) as stopped:
        trouble = str(stopped)
    except Exception as error:
        state, trouble = Race.State.FAILED, f"{type(error).__name__}: {error}"
        raise
    finally:
        Race.objects.filter(pk=race.pk).update(state=state, trouble=trouble)
        race.state, race.trouble = state, trouble
    return results


def run(race: Race, hold: Hold, strategy: Strategy, terms: Terms, tell: Tell) -> Result:
    """Let the buyers in; return what came of it."""
    said: dict[str, Any] = {
        "strategy": strategy.key,
        "title": str(strategy.title),
        "promises": strategy.promises,
    }
    if trouble := strategy.trouble():
        return Result(**said, skipped=trouble)
    began = time.monotonic()
    crowd = Crowd(strategy.key, terms, stock_up(race, strategy.key, terms))
    try:
        give_up = began + START + terms.seconds + GRACE
        while not crowd.wait(LOOK) and time.monotonic() < give_up:
            tell(strategy, crowd.tried, terms.purchases)
            hold.check()
            if not Race.objects.filter(pk=race.pk, state=Race.State.RUNNING).exists():
                raise Stopped
    finally:
        crowd.close()
    tell(strategy, crowd.tried, terms.purchases)
    measured = timed(crowd.reports)
    if len(crowd.reports) < terms.buyers:
        measured["note"] = measured["note"] or "some buyers had to be stopped"
    return Result(**said, tried=crowd.tried, **counted(race, strategy.key, terms), **measured)


def cancel(race: Race) -> None:
    """Ask the process that conducts a race to stop it."""
    Race.objects.filter(pk=race.pk, state=Race.State.RUNNING).update(state=Race.State.STOPPING)


def look_after(race: Race) -> None:
    """Call a race failed whose process has gone without a word: its lock is free."""
    try:
        if race.is_over or LOCK.locked():
            return
    except LockError:  # nobody can tell now
        return
    unfinished = [Race.State.RUNNING, Race.State.STOPPING]  # it may have ended meanwhile
    Race.objects.filter(pk=race.pk, state__in=unfinished).update(
        state=Race.State.FAILED, trouble="the process that conducted it is gone"
    )
    race.refresh_from_db()


def results_of(race: Race) -> list[Result]:
    """Return the results so far."""
    return [Result(**result) for result in race.results]
