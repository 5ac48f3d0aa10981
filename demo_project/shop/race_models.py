"""What a race leaves behind: its own stock and its own orders, never the shop's."""

from __future__ import annotations

from typing import Any

from django.db import models, transaction
from django.urls import reverse
from django.utils.translation import gettext_lazy as _

from distlock_app.optimistic import VersionedModel


class Race(models.Model):
    """One run of the lab: all strategies, one after the other."""

    class State(models.TextChoices):
        RUNNING = "running", _("running")
        STOPPING = "stopping", _("being stopped")
        DONE = "done", _("finished")
        CANCELLED = "cancelled", _("cancelled")
        FAILED = "failed", _("failed")

    created = models.DateTimeField(auto_now_add=True)
    started_by = models.CharField(max_length=150)
    terms = models.JSONField()
    strategies = models.JSONField(default=list)
    results = models.JSONField(default=list)
    state = models.CharField(max_length=10, choices=State, default=State.RUNNING)
    trouble = models.TextField(blank=True)

    class Meta:
        ordering = ["-pk"]
        verbose_name = _("race")
        verbose_name_plural = _("races")

    def __str__(self) -> str:
        return f"Race {self.pk}"

    def get_absolute_url(self) -> str:
        return reverse("race", args=[self.pk])

    @property
    def is_over(self) -> bool:
        return self.state not in (self.State.RUNNING, self.State.STOPPING)


class RaceItem(VersionedModel):
    """What is sold in one race under one strategy; a product in buckets has several."""

    race = models.ForeignKey(Race, models.CASCADE, related_name="items")
    strategy = models.CharField(max_length=50)
    name = models.CharField(max_length=20)
    initial = models.IntegerField()
    stock = models.IntegerField()

    # Of one who just bought: `save()` writes the order together with the stock.
    buyer: int | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.strategy})"

    def save(self, *args: Any, **kwargs: Any) -> None:
        with transaction.atomic():
            super().save(*args, **kwargs)
            if self.buyer is not None:
                self.orders.create(buyer=self.buyer)


class RaceOrder(models.Model):
    """One unit sold: what is right and wrong about a race is counted from these."""

    item = models.ForeignKey(RaceItem, models.CASCADE, related_name="orders")
    buyer = models.PositiveSmallIntegerField()

    def __str__(self) -> str:
        return f"{self.item} to buyer {self.buyer}"
