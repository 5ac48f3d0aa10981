"""`VersionedModel.save()` against the plain `save()` of Django, on rows with the same columns.

    DISTLOCK_TEST_DATABASE=postgresql DISTLOCK_TEST_POSTGRESQL_URL=postgresql://me@127.0.0.1/bench \
        python -m benchmarks.versioned_save

One thread, both in turn, in a test database of its own; prints the medians and their ratio. On
SQLite twice: as Django sets it up, and as the tests do (a write-ahead log, which nobody waits for).
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import django

ROUNDS = 60
SAVES = 50  # of one model, before it is the other's turn


def define() -> list[Any]:
    """Return two models that differ in the guard alone."""
    from django.db import models

    from distlock_app.optimistic import VersionedModel

    class Plain(models.Model):
        version = models.BigIntegerField(default=1)
        owner = models.CharField(max_length=50, default="ann")
        balance = models.IntegerField(default=0)
        seen = models.DateTimeField(null=True)

        class Meta:
            app_label = "benchmarks"

        def __str__(self) -> str:
            return self.owner

    class Versioned(VersionedModel):
        owner = models.CharField(max_length=50, default="ann")
        balance = models.IntegerField(default=0)
        seen = models.DateTimeField(null=True)

        class Meta:
            app_label = "benchmarks"

        def __str__(self) -> str:
            return self.owner

    return [Plain, Versioned]


def measure(models: list[Any]) -> list[float]:
    """Return the median of a save of each model, in microseconds."""
    objects = [model.objects.create() for model in models]
    times: list[list[float]] = [[] for _ in models]
    for turn in range(ROUNDS):
        # Who comes second finds the caches of the processor as the first has left them.
        for index in (0, 1) if turn % 2 else (1, 0):
            obj = objects[index]
            for _ in range(SAVES):
                obj.balance += 1
                started = time.perf_counter()
                obj.save()
                times[index].append(time.perf_counter() - started)
    return [statistics.median(values) * 1e6 for values in times]


def compare(models: list[Any], what: str) -> None:
    """Measure in a test database of its own and print the result."""
    from django.db import connection

    name = connection.settings_dict["NAME"]
    connection.creation.create_test_db(verbosity=0, autoclobber=True)
    try:
        with connection.schema_editor() as editor:
            for model in models:
                editor.create_model(model)
        plain, versioned = measure(models)
    finally:
        connection.creation.destroy_test_db(name, verbosity=0)
    print(f"{what}: plain {plain:.0f} us, versioned {versioned:.0f} us, {versioned / plain:.2f}")


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from django.db import connection

    models = define()
    if connection.vendor == "sqlite":
        fast = connection.settings_dict["OPTIONS"].pop("init_command")
        compare(models, "sqlite, each commit on the disk")
        connection.settings_dict["OPTIONS"]["init_command"] = fast
    compare(models, connection.vendor)


if __name__ == "__main__":
    main()
