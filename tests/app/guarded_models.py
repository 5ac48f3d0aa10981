"""Models whose rows are locked or fenced, for the tests of these guards."""

from __future__ import annotations

from django.db import models

from distlock_app.fencing import FencedModel, FencedVersionedModel
from distlock_app.pessimistic import LockingManager


class Job(models.Model):
    """A queue: its order has no index, as is usual."""

    state = models.CharField(max_length=10, default="new", db_index=True)
    rank = models.IntegerField(default=0)
    after = models.ForeignKey("self", models.SET_NULL, null=True)

    objects = LockingManager()

    def __str__(self) -> str:
        return f"{self.pk}: {self.state}"


class Crate(models.Model):
    """The database computes its first column."""

    volume = models.GeneratedField(
        expression=models.F("side") * models.F("side") * models.F("side"),
        output_field=models.IntegerField(),
        db_persist=True,
    )
    code = models.CharField(max_length=10, primary_key=True)
    side = models.IntegerField(default=1)


class Shelf(FencedModel):
    name = models.CharField(max_length=50, default="")
    stock = models.IntegerField(default=0)


class ColdShelf(Shelf):
    """The fence is in the table of the parent."""

    degrees = models.IntegerField(default=0)


class Vault(FencedVersionedModel):
    stock = models.IntegerField(default=0)


class ColdVault(Vault):
    """Both guards are in the table of the parent."""

    degrees = models.IntegerField(default=0)
