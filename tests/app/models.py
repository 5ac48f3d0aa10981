"""What the tests write to: no migrations, the tables are made from the models."""

from __future__ import annotations

from django.db import models

from .guarded_models import *  # noqa: F403
from .versioned_models import *  # noqa: F403


class Counter(models.Model):
    """A number that is read, raised and written back: wrong as soon as two do it at once."""

    name = models.CharField(max_length=100, unique=True)
    value = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"
