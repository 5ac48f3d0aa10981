"""`VersionedModel`: a save is refused if the row has changed since it was read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from django.core import checks
from django.db import models, router, transaction
from django.db.models.fields.related import lazy_related_operation
from django.db.models.signals import class_prepared
from django.dispatch import receiver

from .fields import AnyVersionField, VersionField
from .querysets import VersionedManager, VersionedQuerySet, with_versions
from .repeating import Retrying
from .rollbacks import MISSING, put, restored_on_error, watch, watch_read
from .saving import GuardedSave, row_of

if TYPE_CHECKING:
    from typing_extensions import Self


class VersionedModel(GuardedSave):
    """A model whose `save()` raises StaleObjectError instead of overwriting another change."""

    version = VersionField()

    objects: ClassVar[VersionedManager[Self]] = VersionedManager()

    class Meta:
        abstract = True

    @classmethod
    def check(cls, **kwargs: Any) -> list[Any]:
        found = super().check(**kwargs)
        managers = (cls._default_manager, cls._base_manager)
        if not all(isinstance(m.get_queryset(), VersionedQuerySet) for m in managers):
            text = (
                f"With {cls.__name__}'s manager, update(), bulk_update() and "
                "bulk_create(update_conflicts=True) overwrite rows without incrementing their "
                "version, and objects read with only() cannot be saved."
            )
            hint = "Derive it from VersionedManager, or its queryset from VersionedQuerySet."
            found.append(checks.Warning(text, hint=hint, obj=cls, id="distlock_app.W023"))
        if not any(isinstance(field, AnyVersionField) for field in cls._meta.concrete_fields):
            text = f"{cls.__name__} has no version: its stale saves are not refused."
            hint = "Remove a `version` of another kind, or make it a VersionField."
            found.append(checks.Error(text, hint=hint, obj=cls, id="distlock_app.E025"))
        return found

    def save_retrying(self, change: Callable[[Self], Any], **options: Any) -> Self:
        """Reload this object, call `change(self)`, save; repeat after each conflict.

        Unsaved values of this object are dropped: even without a conflict, only `change` is applied
        to the row in the database. Return this object. The options are those of
        `objects.retrying()`.
        """
        return self._retrying(change, options).run()

    save_retrying.alters_data = True  # type: ignore[attr-defined]

    async def asave_retrying(self, change: Callable[[Self], Any], **options: Any) -> Self:
        return await self._retrying(change, options).arun()

    asave_retrying.alters_data = True  # type: ignore[attr-defined]

    def _retrying(self, change: Callable[[Self], Any], options: Any) -> Retrying[Self]:
        using = router.db_for_write(type(self), instance=self)
        rows: Any = type(self)._base_manager.using(using).defer(None)

        def read(lock: bool) -> Any:
            self.refresh_from_db(from_queryset=rows._locked(self.pk) if lock else rows.all())
            return self

        return Retrying(read, change, using=using, model=type(self), pk=self.pk, **options)

    @classmethod
    def from_db(cls, db: Any, field_names: Any, values: Any, **options: Any) -> Any:
        obj = super().from_db(db, field_names, values, **options)
        watch_read(obj, db)
        return obj

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Watch a copy, too: it has the version of a transaction that may be rolled back."""
        super().__setstate__(state)  # type: ignore[misc]
        if using := self._state.db:
            watch_read(self, using)

    def refresh_from_db(
        self, using: str | None = None, fields: Any = None, from_queryset: Any = None
    ) -> None:
        """Refresh as Django does; the version only together with all fields, or by its name."""
        name = self._version_field.attname
        before = self.__dict__.get(name, MISSING)
        with restored_on_error(name, self):
            if fields is not None:
                fields = set(fields)
                if from_queryset is None:  # not from a replica that may be older than the version
                    using = using or self._state.db
            elif before is MISSING:
                self.__dict__[name] = None  # no longer deferred: read it with the rest
            taken = self._reads_all(from_queryset) if fields is None else name in fields
            super().refresh_from_db(using=using, fields=fields, from_queryset=from_queryset)
        if taken or self.__dict__.get(name) != before:  # read with the fields, by only()
            watch_read(self, str(self._state.db))
        if not taken:
            put(self, name, before)

    def _reads_all(self, rows: Any) -> bool:
        """Whether a refresh from these rows, or the default ones, reads all fields in memory."""
        rows = (type(self)._base_manager if rows is None else rows).all()
        fields = [f for f in self._meta.concrete_fields if f.attname in self.__dict__]
        if self.get_deferred_fields():  # Django then reads only the others
            rows = rows.only(*(f.attname for f in fields))
        read = rows.query.get_select_mask()  # empty: everything
        return not read or all(f in read for f in fields if not f.primary_key)

    def delete(
        self, using: str | None = None, keep_parents: bool = False
    ) -> tuple[int, dict[str, int]]:
        """Delete the row, or raise StaleObjectError if another writer changed it.

        A missing row is not a conflict.
        """
        using = using or router.db_for_write(type(self), instance=self)
        expected = self._version_to_rely_on(using)
        if expected is None:
            return super().delete(using=using, keep_parents=keep_parents)
        field = self._version_field
        rows = row_of(self, field, using)
        moved = field.after(expected)
        watch(self, expected, using)
        with restored_on_error(field.attname, self), transaction.atomic(using=using):
            # A write, not a read: it locks the row until it is deleted, on SQLite too.
            # The plain update(): a versioned one would have all rows watched for a rollback.
            current = rows.filter(**{field.name: expected})
            if models.QuerySet.update(current, **{field.name: moved}):
                setattr(self, field.attname, moved)  # receivers of pre_delete may save
            elif (found := self._find_version(using, expected)) is not None:
                raise self._conflict(expected, found)
            deleted = super().delete(using=using, keep_parents=keep_parents)
        setattr(self, field.attname, None)
        return deleted


@receiver(class_prepared)
def _write_with_versions(sender: Any, **kwargs: Any) -> None:
    """Use versioned managers where Django itself writes: ON DELETE SET NULL, `related_set.add()`.

    Not `Meta.base_manager_name`: it must name one of the model's managers, which every migration
    would repeat. And `objects` may hide rows.
    """
    meta = sender._meta
    fields = [f for f in meta.private_fields if f.one_to_many]
    if issubclass(sender, VersionedModel):
        fields += [f for f in meta.local_fields if f.many_to_one]
        if meta.base_manager.auto_created:
            _use_versioned_manager(sender)
    for field in fields:
        lazy_related_operation(_add_with_versions, sender, field.remote_field.model, field=field)


def _use_versioned_manager(model: Any) -> None:
    manager: Any = VersionedManager()
    manager.name, manager.model, manager.auto_created = "_base_manager", model, True
    model._meta.base_manager = manager
    # A cached property, which Django drops whenever a model is added.
    model._meta.FORWARD_PROPERTIES = model._meta.FORWARD_PROPERTIES - {"base_manager"}


def _add_with_versions(model: Any, related: Any, field: Any) -> None:
    if field.many_to_one:  # a foreign key of `model`: the `add()` of `related`, unless hidden
        accessor = field.remote_field.get_accessor_name()
        descriptor = related._meta.concrete_model.__dict__.get(accessor)
    else:  # a GenericRelation of `model`
        descriptor = getattr(model, field.name) if issubclass(related, VersionedModel) else None
    if descriptor is not None:
        descriptor.related_manager_cls = with_versions(descriptor.related_manager_cls)
