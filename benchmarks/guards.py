"""One hot row: how many changes a second get through each guard, and after how many retries.

K processes read the row, add 1 in Python (except F()) and write it back; a lost update ends the
run. Also what a version costs when nobody else writes.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

TURNS = 4  # in which all are measured, one after the other: what disturbs one disturbs them all
SAVES = 50  # of one model, before it is the other's turn
METHODS = {
    "raw": "raw: a row locked, read and written, by the driver",
    "f": "`F()` in one statement",
    "orm": "version, ORM loop by hand, at once",
    "concurrency": "django-concurrency, loop by hand, at once",
    "retrying": "`objects.retrying()`",
    "for_update": "`objects.for_update()`",
    "transaction": "`lock_in_transaction()`",
    "lock": "`Lock(..., atomic=True)`, lock table",
    "fenced": "`Lock` and `save(fence=hold)`",
}


def models() -> dict[str, Any]:
    """Define one table for each kind of guard; all have a key, a value and a column more."""
    from django.db import models as m

    from distlock_app.fencing import FencedModel
    from distlock_app.optimistic import VersionedModel
    from distlock_app.pessimistic import LockingManager

    def make(name: str, base: type, **fields: Any) -> Any:
        meta = type("Meta", (), {"app_label": "testapp"})
        body = {"value": m.IntegerField(default=0), "__module__": __name__, "Meta": meta}
        return type(name, (base,), {**body, **fields})

    made = {
        "plain": make(
            "HotPlain", m.Model, version=m.IntegerField(default=0), objects=LockingManager()
        ),
        "versioned": make("HotVersioned", VersionedModel),
        "fenced": make("HotFenced", FencedModel),
    }
    with suppress(ImportError):
        from concurrency.fields import IntegerVersionField

        made["concurrency"] = make("HotConcurrency", m.Model, version=IntegerVersionField())
    return made


# Adds 1, and returns its number of retries, if it retries.
Add = Callable[[], int | None]


def methods(made: dict[str, Any]) -> dict[str, tuple[Any, Add]]:
    """Return each guard's model and what adds 1 under it."""
    from django.db import transaction
    from django.db.models import F

    from distlock_app import Lock, lock_in_transaction, retry_on_deadlock

    plain, versioned, fenced = made["plain"], made["versioned"], made["fenced"]

    def add_one(row: Any, **options: Any) -> None:
        row.value += 1
        row.save(**options)

    def by_f() -> None:
        plain.objects.filter(pk=1).update(value=F("value") + 1)

    def by_retrying() -> int:
        calls = 0

        def add(row: Any) -> None:
            nonlocal calls
            calls += 1
            row.value += 1

        versioned.objects.retrying(1, add)
        return calls - 1

    def by_for_update() -> None:
        with transaction.atomic():
            add_one(plain.objects.for_update(1, wait=60))

    @retry_on_deadlock
    def by_transaction() -> None:
        with transaction.atomic():
            lock_in_transaction("hot", wait=60)
            add_one(plain.objects.get(pk=1))

    def by_lock() -> None:
        with Lock("hot", wait=60, atomic=True):
            add_one(plain.objects.get(pk=1))

    def by_fence() -> None:
        with Lock("hot", wait=60) as hold:
            add_one(fenced.objects.get(pk=1), fence=hold)

    found: dict[str, tuple[Any, Add]] = {
        "raw": (plain, by_the_driver(plain)),
        "f": (plain, by_f),
        "orm": (plain, by_orm_loop(plain)),
        "retrying": (versioned, by_retrying),
        "for_update": (plain, by_for_update),
        "transaction": (plain, by_transaction),
        "lock": (plain, by_lock),
        "fenced": (fenced, by_fence),
    }
    if "concurrency" in made:
        found["concurrency"] = (made["concurrency"], by_concurrency(made["concurrency"]))
    return found


def by_the_driver(model: Any) -> Add:
    """Return what locks the row with the fewest statements and without the ORM."""
    from django.db import connection

    from .raw import cursor_of

    table = model._meta.db_table
    cursors: dict[str, Any] = {}

    def add() -> None:
        if not cursors:  # in a child: after the fork
            cursors["mine"] = cursor_of(connection.vendor)
        cursor = cursors["mine"]
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT value FROM {table} WHERE id = 1 FOR UPDATE")
        [[value]] = cursor.fetchall()
        cursor.execute(f"UPDATE {table} SET value = %s WHERE id = 1", (value + 1,))
        cursor.execute("COMMIT")

    return add


def by_orm_loop(model: Any) -> Add:
    def add() -> int:
        retries = 0
        while True:
            row = model.objects.get(pk=1)
            same = model.objects.filter(pk=1, version=row.version)
            if same.update(value=row.value + 1, version=row.version + 1):
                return retries
            retries += 1

    return add


def by_concurrency(model: Any) -> Add:
    from concurrency.exceptions import RecordModifiedError

    def add() -> int:
        retries = 0
        while True:
            row = model.objects.get(pk=1)
            row.value += 1
            try:
                row.save()
            except RecordModifiedError:
                retries += 1
            else:
                return retries

    return add


def work(pipe: Any, found: dict[str, tuple[Any, Add]]) -> None:
    """Do what the pipe says, until it says nothing more: (method, seconds)."""
    while (order := pipe.recv()) is not None:
        method, seconds = order
        add = found[method][1]
        done = in_time = retries = 0
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end or not done:
                retries += add() or 0
                done += 1
                in_time += time.monotonic() < end
        except Exception as error:
            pipe.send(f"{method}: {error!r}\n{traceback.format_exc()}")
        else:
            pipe.send((done, in_time, retries))


def answer_of(pipe: Any) -> Any:
    """Return what a process answers; raise if that is an error."""
    answer = pipe.recv()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def make_tables(made: dict[str, Any]) -> None:
    """Make each model's table, with its row; leave no connection to a child."""
    from django.db import connection, connections

    from distlock_app.core.registry import registry

    with connection.schema_editor() as editor:
        for model in made.values():
            editor.create_model(model)
    for model in made.values():
        model().save()
    connections.close_all()
    registry.reset()


def started(count: int, found: dict[str, Any]) -> list[Any]:
    """Start the processes; return the pipe to each."""
    fork = multiprocessing.get_context("fork")
    pipes = []
    for _ in range(count):
        ours, theirs = fork.Pipe()
        fork.Process(target=work, args=(theirs, found), daemon=True).start()
        pipes.append(ours)
    return pipes


def measure(seconds: float, counts: list[int]) -> dict[str, Any]:
    """Return by method and number of processes [changes a second, retries for each]."""
    made = models()
    found = methods(made)
    make_tables(made)
    pipes = started(max(counts), found)

    def all_do(count: int, method: str, seconds: float) -> list[Any]:
        for pipe in pipes[:count]:
            pipe.send((method, seconds))
        return [answer_of(pipe) for pipe in pipes[:count]]

    cells = [(method, count) for method in METHODS if method in found for count in counts]
    totals = {cell: [0, 0, 0] for cell in cells}
    for turn, (method, count) in [(turn, cell) for turn in range(TURNS) for cell in cells]:
        rows = found[method][0].objects.filter(pk=1).values_list("value", flat=True)
        if turn == 0:
            all_do(count, method, 0)  # connects
        before = rows.get()
        answers = all_do(count, method, seconds / TURNS)
        done = sum(answer[0] for answer in answers)
        if rows.get() - before != done:
            raise RuntimeError(f"{method}, {count} processes: {done} changes, some are lost")
        for column in range(3):
            totals[method, count][column] += sum(answer[column] for answer in answers)
    results: dict[str, Any] = {}
    for (method, count), (done, in_time, retries) in totals.items():
        # Who pauses at the end is not waited for, or it would seem to be slow.
        results.setdefault(method, {})[str(count)] = [in_time / seconds, retries / done]
    if "concurrency" not in found:
        results["concurrency"] = {"error": "skipped: No module named 'concurrency'"}
    for pipe in pipes:
        pipe.send(None)
    return results


def saving(rounds: int, plain_sqlite: bool) -> dict[str, float]:
    """Return medians in microseconds, of what nobody else does at the time.

    `VersionedModel.save()` beside the plain `save()`; and, where rows can be locked, a transaction
    with `lock_in_transaction()` beside one with a row by `select_for_update()`. `plain_sqlite`:
    SQLite as Django sets it up, where each commit waits for the disk.
    """
    from django.db import connection, models

    from distlock_app.optimistic import VersionedModel

    def make(name: str, base: type, **fields: Any) -> Any:
        body = {
            "owner": models.CharField(max_length=50, default="ann"),
            "balance": models.IntegerField(default=0),
            "seen": models.DateTimeField(null=True),
            "__module__": __name__,
            "Meta": type("Meta", (), {"app_label": "testapp"}),
        }
        return type(name, (base,), {**body, **fields})

    made = {
        "plain": make("Plain", models.Model, version=models.BigIntegerField(default=1)),
        "versioned": make("Versioned", VersionedModel),
    }
    if plain_sqlite:
        connection.close()
        connection.settings_dict["OPTIONS"].pop("init_command")
        connection.settings_dict["NAME"] = f"{connection.settings_dict['NAME']}-plain"
    with connection.schema_editor() as editor:
        for model in made.values():
            if model._meta.db_table in connection.introspection.table_names():  # of a turn before
                editor.delete_model(model)
            editor.create_model(model)
    rows = {title: model.objects.create() for title, model in made.items()}

    def save(title: str) -> None:
        rows[title].balance += 1
        rows[title].save()

    found = _medians(rounds, {title: partial(save, title) for title in rows})
    if connection.features.has_select_for_update:
        found |= _medians(rounds, _locking(made["plain"], rows["plain"].pk))
    return found


def _locking(model: Any, pk: int) -> dict[str, Callable[[], object]]:
    from django.db import transaction

    from distlock_app import lock_in_transaction

    @transaction.atomic
    def for_update() -> None:
        model.objects.select_for_update().get(pk=pk)

    @transaction.atomic
    def in_transaction() -> None:
        lock_in_transaction("saving")

    return {"for_update": for_update, "in_transaction": in_transaction}


def _medians(rounds: int, actions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median of each action, in microseconds; they take turns."""
    times: dict[str, list[float]] = {title: [] for title in actions}
    for turn in range(rounds):
        # Who comes second finds the caches of the processor as the first has left them.
        for title in sorted(actions, reverse=bool(turn % 2)):
            for _ in range(SAVES):
                begun = time.perf_counter()
                actions[title]()
                times[title].append(time.perf_counter() - begun)
    return {title: statistics.median(values) * 1e6 for title, values in times.items()}
