"""The models: the lock table, its events, and the unmanaged model behind the live locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import models
from django.utils.translation import gettext_lazy as _

if TYPE_CHECKING:
    from .claims import Holding


class DistLock(models.Model):
    """One row of the lock table; it stays when the lock is released.

    Written by `backends.database` only, with the database's own clock, in UTC.
    No index but the key: one on `expiry` costs each acquisition 5 %, and on PostgreSQL the
    updates in place (HOT), so that a busy lock bloats the table.
    Readers and permits share the row of their name, see `backends.database.members`.
    """

    key = models.CharField(_("key"), max_length=64, primary_key=True, editable=False)
    name = models.CharField(_("name"), max_length=255, editable=False)
    owner = models.CharField(_("owner"), max_length=64, blank=True, default="", editable=False)
    expiry = models.DateTimeField(_("expiry"), editable=False)
    fence = models.BigIntegerField(_("fence"), default=0, editable=False)
    acquired_at = models.DateTimeField(_("acquired at"), null=True, editable=False)
    holder = models.TextField(_("holder"), blank=True, default="", editable=False)

    class Meta:
        verbose_name = _("lock table row")
        verbose_name_plural = _("lock table rows")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.name


class LockEvent(models.Model):
    """Something that happened to a lock; written by `history`, if settings ask for one."""

    ACQUIRED, BUSY, RELEASED, LOST, CLEARED = "acquired", "busy", "released", "lost", "cleared"
    WAITS, ENDS = (ACQUIRED, BUSY), (RELEASED, LOST)  # what `seconds` is about

    at = models.DateTimeField()  # by the clock of the host that reports it
    alias = models.CharField(max_length=100)
    key = models.CharField(max_length=64)
    name = models.CharField(max_length=255)
    event = models.CharField(max_length=10)
    seconds = models.FloatField(null=True)
    fence = models.BigIntegerField(null=True)
    detail = models.TextField(blank=True, default="")  # the holder as JSON; why; who cleared it

    class Meta:
        default_permissions = ()
        indexes = [models.Index(fields=["key", "alias"], name="distlock_event_of")]

    def __str__(self) -> str:
        return f"{self.name}: {self.event}"


class _NoTable(models.Manager["LiveLock"]):
    """Finds nothing, so that `dumpdata` reads no table."""

    def get_queryset(self) -> models.QuerySet[LiveLock]:
        return super().get_queryset().none()


class LiveLock(models.Model):
    """A lock that some backend holds now: no table, rows come from the backends."""

    if TYPE_CHECKING:  # set by `admin.rows.row_of`
        holding: Holding

    id = models.TextField(primary_key=True, editable=False)
    name = models.CharField(_("name"), max_length=255, editable=False)

    objects = _NoTable()

    class Meta:
        managed = False
        base_manager_name = "objects"  # `dumpdata --all` asks this one
        verbose_name = _("live lock")
        verbose_name_plural = _("live locks")
        default_permissions = ("view",)
        permissions = [
            ("clear_lock", _("Can force the release of locks")),
            ("extend_lock", _("Can extend locks")),
        ]

    def __str__(self) -> str:
        return self.name
