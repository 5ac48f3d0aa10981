"""Version fields: a number, or the time of the last change."""

from __future__ import annotations

import datetime as times
from datetime import datetime, timedelta
from typing import Any

from django.core import checks
from django.db import connections, models
from django.db.models.functions import Greatest
from django.db.models.query_utils import DeferredAttribute
from django.db.models.sql.where import ExtraWhere
from django.utils import timezone

# Puts these columns after the model's own fields: Django assigns positional arguments in the order
# in which fields were created, and in Author(None, "Ann") the second is the name.
LAST = 10**9


class VersionAttribute(DeferredAttribute):
    """Shows a deferred version without keeping it.

    A version that was read later than the fields does not belong to them: kept, it would allow a
    save that overwrites another change.
    """

    def __get__(self, instance: Any, cls: Any = None) -> Any:
        if instance is None or self.field.attname in instance.__dict__:
            return super().__get__(instance, cls)
        state = instance._state.__dict__
        peers = state.pop("peers", None)  # FETCH_PEERS of Django 6.1 would give it to all of them
        try:
            return super().__get__(instance, cls)
        finally:
            instance.__dict__.pop(self.field.attname, None)
            if peers is not None:
                state["peers"] = peers


class AnyVersionField(models.Field):  # type: ignore[type-arg]
    """The interface of a version column.

    Versions never repeat: `after(version)` is later than `version`, in any process.
    """

    descriptor_class = VersionAttribute
    # Every insert writes it; nothing has to be read back.
    db_returning = False
    # Whether the previous version follows from the current one.
    counts = False
    # Arguments that are the same for all such fields, and left out of migrations.
    fixed: dict[str, Any] = {"default": None, "editable": False, "blank": True}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | self.fixed)
        self.creation_counter += LAST

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        for key in self.fixed:
            kwargs.pop(key, None)
        return name, f"distlock_app.optimistic.{type(self).__name__}", args, kwargs

    def contribute_to_class(self, cls: Any, name: str, private_only: bool = False) -> None:
        super().contribute_to_class(cls, name, private_only=private_only)
        cls._version_field = self

    def guard(self, version: Any, using: str) -> ExtraWhere:
        """Return `version = ...` for a WHERE; with filter() it costs a quarter of a save."""
        connection = connections[using]
        quote = connection.ops.quote_name
        condition = f"{quote(self.model._meta.db_table)}.{quote(str(self.column))} = %s"
        if type(version) is not int:  # which is what it is in any database
            version = self.get_db_prep_value(version, connection)
        return ExtraWhere([condition], [version])

    def text_of(self, obj: Any) -> str:
        """Return the version in memory as text that is the same everywhere.

        A version that is not in memory is a conflict: read now, it may be later than the fields.
        """
        version = obj._version_read()
        if isinstance(version, datetime) and timezone.is_aware(version):
            version = version.astimezone(times.timezone.utc)
        return version.isoformat() if isinstance(version, datetime) else str(version)

    def first(self) -> Any:
        """Return the version of a new row."""
        raise NotImplementedError

    def after(self, version: Any) -> Any:
        """Return the version that replaces this one."""
        raise NotImplementedError

    def next(self) -> Any:
        """Return the expression with which an UPDATE increments the version of any row."""
        raise NotImplementedError

    def pre_save(self, model_instance: Any, add: bool) -> Any:
        if add:
            setattr(model_instance, self.attname, self.first())
            return model_instance.__dict__[self.attname]
        if not hasattr(model_instance, "_save_guarded"):
            # A historical model in a migration: refuses nothing, but others will notice.
            return self.next()
        return model_instance._state.written

    def check(self, **kwargs: Any) -> list[Any]:
        found = super().check(**kwargs)
        kind = type(self).__name__
        if not hasattr(self.model, "_save_guarded"):
            hint = "Derive the model from distlock_app.optimistic.VersionedModel."
            text = f"Without VersionedModel, a {kind} does not refuse stale saves."
            found.append(checks.Error(text, hint=hint, obj=self, id="distlock_app.E021"))
        fields = [f for f in self.model._meta.concrete_fields if isinstance(f, AnyVersionField)]
        if len(fields) > 1:
            names = ", ".join(field.name for field in fields)
            text = f"The model has more than one version: {names}."
            hint = "A second one would not be checked; `version = None` removes an inherited one."
            found.append(checks.Error(text, hint=hint, obj=self, id="distlock_app.E022"))
        if self.null:
            text = f"{self.name} may be NULL: such a row has no version and cannot be saved."
            fill = f"filter({self.name}=None).update({self.name}=...)"
            hint = f"Fill the column in a migration, by {fill}, then remove null=True."
            found.append(checks.Error(text, hint=hint, obj=self, id="distlock_app.E024"))
        return found


class VersionField(AnyVersionField, models.BigIntegerField):  # type: ignore[type-arg]
    """The number of saves: 1 when inserted, incremented with every change.

    None on an object that has not been saved yet.
    """

    # The database default is for inserts by code that does not know the column, so that it can be
    # added while the old release is still running.
    fixed = AnyVersionField.fixed | {"db_default": 1}
    counts = True

    def first(self) -> int:
        return 1

    def after(self, version: int) -> int:
        return version + 1

    def next(self) -> Any:
        return models.F(self.attname) + 1


class TimestampVersionField(AnyVersionField, models.DateTimeField):  # type: ignore[type-arg, misc]
    """The time of the last save, for a table with such a column.

    Each save writes this host's time, but at least one `resolution` later than it read: two saves
    in one microsecond, or after a clock was set back, still get different versions. Set
    `resolution` to the precision of the column: a second for MySQL's DATETIME(0).
    """

    def __init__(
        self,
        *args: Any,
        resolution: timedelta = timedelta(microseconds=1),
        **kwargs: Any,
    ) -> None:
        self.resolution = resolution
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, path, args, kwargs = super().deconstruct()
        if self.resolution != timedelta(microseconds=1):
            kwargs["resolution"] = self.resolution
        return name, path, args, kwargs

    def first(self) -> datetime:
        now = timezone.now()
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        return now - (now - midnight) % self.resolution

    def after(self, version: datetime) -> datetime:
        return max(self.first(), version + self.resolution)

    def next(self) -> Any:
        step = models.ExpressionWrapper(
            models.F(self.attname) + self.resolution, output_field=models.DateTimeField()
        )
        return Greatest(models.Value(self.first(), models.DateTimeField()), step)
