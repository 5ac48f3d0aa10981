"""Models with a version, for the tests of the optimistic guard."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta

from django.contrib.contenttypes.fields import GenericForeignKey, GenericRelation
from django.contrib.contenttypes.models import ContentType
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


class Tag(models.Model):
    name = models.CharField(max_length=20)

    def __str__(self) -> str:
        return self.name


class Offer(VersionedModel):
    """With a field of each kind, for the forms."""

    class Kind(models.TextChoices):
        TEA = "tea", "Tea"
        CUP = "cup", "Cup"

    name = models.CharField(max_length=50)
    text = models.TextField(default="", blank=True)
    price = models.DecimalField(max_digits=8, decimal_places=2, default=0)
    kind = models.CharField(max_length=5, choices=Kind, default=Kind.TEA)
    active = models.BooleanField(default=True)
    starts = models.DateTimeField(null=True, blank=True)
    ends = models.DateField(null=True, blank=True)
    account = models.ForeignKey(Account, models.CASCADE, null=True, blank=True)
    tags = models.ManyToManyField(Tag, blank=True)
    stock = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.name


class Shelved(Tag):
    """Relations in another class than the one that they name: a proxy, and a generic one."""

    remarks = GenericRelation("Remark")

    class Meta:
        proxy = True


class Remark(VersionedModel):
    shelved = models.ForeignKey(Shelved, models.CASCADE, null=True)
    # No constraint: tables without migrations are made before that of content types.
    content_type = models.ForeignKey(ContentType, models.CASCADE, null=True, db_constraint=False)
    object_id = models.IntegerField(null=True)
    about = GenericForeignKey(for_concrete_model=False)


class Extra(VersionedModel):
    offer = models.ForeignKey(Offer, models.CASCADE)
    name = models.CharField(max_length=50)
    price = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.name


class Note(models.Model):
    """Has no version of its own."""

    offer = models.ForeignKey(Offer, models.CASCADE)
    text = models.CharField(max_length=50)

    def __str__(self) -> str:
        return self.text


class Ticket(VersionedModel):
    """Gets its key when it is made, not from the database."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)


class Leaflet(VersionedModel):
    title = models.CharField(max_length=50)
    picture = models.FileField(upload_to="leaflets", blank=True)
    shown_at = models.TimeField(null=True, blank=True)
    printed = models.IntegerField(default=0, editable=False)


@dataclass(frozen=True)
class Span:
    """A value that is no JSON, as of a range field."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


class SpanField(models.TextField):
    def from_db_value(self, value: str, *args: object) -> Span:
        return self.to_python(value)

    def to_python(self, value: str | Span) -> Span:
        return value if isinstance(value, Span) else Span(*map(int, value.split("-")))

    def get_prep_value(self, value: object) -> str:
        return str(value)


class Chapter(VersionedModel):
    title = models.CharField(max_length=50)
    pages = SpanField()
