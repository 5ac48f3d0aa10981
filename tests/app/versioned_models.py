"""Models with a version, for the tests of the optimistic guard."""

from __future__ import annotations

import uuid
from datetime import timedelta

from django.db import models

from distlock_app.optimistic import (
    TimestampVersionField,
    VersionedManager,
    VersionedModel,
    VersionField,
)


class Account(VersionedModel):
    owner = models.CharField(max_length=50, default="")
    balance = models.IntegerField(default=0)
    seen = models.DateTimeField(null=True)
    parent = models.ForeignKey("self", models.SET_NULL, null=True, related_name="children")


class ProxyAccount(Account):
    class Meta:
        proxy = True


class SavingsAccount(Account):
    """The version is in the table of the parent."""

    rate = models.IntegerField(default=0)


class Named(models.Model):
    name = models.CharField(max_length=50, default="")


class GuardedNamed(VersionedModel, Named):  # type: ignore[misc]
    """The version is in the table of the child, which is written after the parent's."""

    points = models.IntegerField(default=0)


class Document(VersionedModel):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    title = models.CharField(max_length=50, default="")


class Country(VersionedModel):
    code = models.CharField(max_length=2, primary_key=True)
    name = models.CharField(max_length=50, unique=True)


class Seat(VersionedModel):
    pk = models.CompositePrimaryKey("row", "number")
    row = models.CharField(max_length=2)
    number = models.IntegerField()
    guest = models.CharField(max_length=50, default="")


class Box(VersionedModel):
    side = models.IntegerField(default=1)
    area = models.GeneratedField(
        expression=models.F("side") * models.F("side"),
        output_field=models.IntegerField(),
        db_persist=True,
    )


class Shown(VersionedManager):
    def get_queryset(self) -> models.QuerySet:
        return super().get_queryset().filter(hidden=False)


class Article(VersionedModel):
    """Its version has another name, its manager hides rows, and it looks before it writes."""

    version = None
    revision = VersionField()
    text = models.CharField(max_length=50, default="")
    hidden = models.BooleanField(default=False)

    objects = Shown()  # type: ignore[misc]

    class Meta:
        select_on_save = True


class Page(VersionedModel):
    """Its table has no number, only the time of the last change."""

    version = None
    updated_at = TimestampVersionField()
    text = models.CharField(max_length=50, default="")


class Sheet(VersionedModel):
    """As where the column keeps whole seconds: DATETIME(0) of MySQL."""

    version = None
    updated_at = TimestampVersionField(resolution=timedelta(seconds=1))
    text = models.CharField(max_length=50, default="")
