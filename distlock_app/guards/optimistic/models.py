"""`VersionedModel`: a save is refused if the row has changed since it was read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import django
from django.core import checks
from django.db import connections, models, router, transaction
from django.db.models.fields.related import lazy_related_operation
from django.db.models.signals import class_prepared
from django.db.models.sql.where import AND
from django.dispatch import receiver

from ...errors import StaleObjectError
from ...signals import version_conflict
from ..retrying import Retrying
from .fields import AnyVersionField, VersionField
from .querysets import Undo, VersionedManager, VersionedQuerySet, watch, watch_read, with_versions

if TYPE_CHECKING:
    from typing_extensions import Self


class VersionedModel(models.Model):
    """A model whose `save()` raises StaleObjectError instead of overwriting another change."""

    _version_field: AnyVersionField

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
        rows: Any = type(self)._base_manager.using(using)

        def read(lock: bool) -> Any:
            self.refresh_from_db(from_queryset=rows._locked(self.pk) if lock else rows.all())
            return self

        return Retrying(read, change, using=using, model=type(self), pk=self.pk, **options)

    @classmethod
    def from_db(cls, db: Any, field_names: Any, values: Any, **options: Any) -> Any:
        obj = super().from_db(db, field_names, values, **options)
        if Undo.living and obj._version_field.attname in obj.__dict__:
            watch_read(obj, db)
        return obj

    def refresh_from_db(
        self, using: str | None = None, fields: Any = None, from_queryset: Any = None
    ) -> None:
        """Refresh as Django does; the version only together with all fields, or by its name."""
        name = self._version_field.attname
        before = self.__dict__.get(name, MISSING)
        if fields is not None:
            fields = set(fields)
        elif before is MISSING:
            self.__dict__[name] = None  # no longer deferred: read it with the rest
        taken = fields is None or name in fields
        try:
            super().refresh_from_db(using=using, fields=fields, from_queryset=from_queryset)
            if taken:
                watch_read(self, str(self._state.db))
        except BaseException:
            taken = False
            raise
        finally:
            if not taken:
                _put(self, name, before)

    def delete(
        self, using: str | None = None, keep_parents: bool = False
    ) -> tuple[int, dict[str, int]]:
        """Delete the row, or raise StaleObjectError if another writer changed it.

        A missing row is not a conflict.
        """
        using = using or router.db_for_write(type(self), instance=self)
        expected = self._version_to_rely_on(using) if _has_key(self, self) else None
        if expected is None:
            return super().delete(using=using, keep_parents=keep_parents)
        field = self._version_field
        rows = self._version_row(using)
        moved = field.after(expected)
        try:
            with transaction.atomic(using=using):
                # A write, not a read: it locks the row until it is deleted, on SQLite too.
                if rows.filter(**{field.name: expected}).update(**{field.name: moved}):
                    setattr(self, field.attname, moved)  # receivers of pre_delete may save
                elif (found := self._find_version(using, expected)) is not None:
                    raise self._conflict(expected, found)
                deleted = super().delete(using=using, keep_parents=keep_parents)
        except BaseException:
            setattr(self, field.attname, expected)
            raise
        setattr(self, field.attname, None)
        return deleted

    delete.alters_data = True  # type: ignore[attr-defined]

    # Below: the path of a save through Django. `save_base()` calls `_save_table()` for each table,
    # parents first, which calls `_do_update()`. The arguments are those of 5.2 to 6.1;
    # `_do_update()` got one more in 6.0: its `args` begin with `update_fields, forced_update`.

    def save_base(
        self,
        raw: bool = False,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> None:
        using = using or router.db_for_write(type(self), instance=self)
        try:
            super().save_base(raw, force_insert, force_update, using, update_fields)
        except StaleObjectError as conflict:
            own = self._state.__dict__.pop("conflict", None) is conflict
            if own and _is_first_table(self._version_field, type(self)):
                # Django marks the transaction as broken after any exception. But an UPDATE that
                # matched no row, before any other table was written, did no harm: the caller
                # may catch the conflict and continue.
                connection = connections[using]
                if connection.in_atomic_block:
                    connection.set_rollback(False)
            raise

    def _save_table(
        self,
        raw: bool = False,
        cls: Any = None,
        force_insert: bool = False,
        force_update: bool = False,
        using: Any = None,
        update_fields: Any = None,
    ) -> Any:
        field = self._version_field
        if cls is field.model:
            if raw:
                self._take_raw_version(using)
            else:
                return self._save_guarded(cls, force_insert, force_update, using, update_fields)
        saved = super()._save_table(  # type: ignore[misc]
            raw, cls, force_insert, force_update, using, update_fields
        )
        self._forget_saved(cls, update_fields)
        return saved

    def _save_guarded(
        self, cls: Any, force_insert: Any, force_update: bool, using: str, update_fields: Any
    ) -> Any:
        """Save the table with the version, and then set the version in memory."""
        field = self._version_field
        name = field.attname
        if update_fields:
            update_fields = frozenset((*update_fields, name))
        before = self.__dict__.get(name, MISSING)
        state: Any = self._state
        state.expected = state.written = None
        try:
            if not force_insert:
                expected = None if before is MISSING else before
                # Read from this database: the common case, nothing to check.
                if expected is None or state.db != using:
                    expected = self._version_to_rely_on(using) if _has_key(self, cls) else None
                if expected is not None:
                    state.expected, state.written = expected, field.after(expected)
            saved = super()._save_table(  # type: ignore[misc]
                False, cls, force_insert, force_update, using, update_fields
            )
            written, expected = state.written, state.expected
            if not saved:  # inserted
                written, expected = self.__dict__[name], None
        except BaseException as error:
            # Django gives an object its version before it inserts the row.
            _put(self, name, before)
            if isinstance(error, StaleObjectError):
                state.conflict = error
            raise
        finally:
            del state.expected, state.written
        self._version_written(written, expected, using)
        self._forget_saved(cls, update_fields)
        return saved

    def _do_update(self, base_qs: Any, using: Any, pk_val: Any, values: Any, *args: Any) -> Any:
        state: Any = self._state
        if not hasattr(state, "expected"):  # another table, or raw
            return super()._do_update(base_qs, using, pk_val, values, *args)
        # Forced: `select_on_save` treats a row in an old snapshot as written.
        args = args[0], True, *args[2:]
        expected = state.expected
        if expected is None:
            return self._update_unread(base_qs, using, pk_val, values, *args)
        # Directly, because `where.add()` would first search for an equal condition.
        base_qs.query.where.children.append(self._version_field.guard(expected, using))
        updated = super()._do_update(base_qs, using, pk_val, values, *args)
        if not updated:
            found = self._find_version(using, expected)
            # An object that was never read or saved is inserted if there is no row, as in Django.
            if found is not None or not state.adding:
                raise self._conflict(expected, found)
        return updated

    def _update_unread(self, base_qs: Any, using: Any, pk_val: Any, values: Any, *args: Any) -> Any:
        """Overwrite the row whatever its version, and increment that, so that others notice."""
        field = self._version_field
        state: Any = self._state
        found = self._find_version(using, None)
        while found is not None:
            state.written = field.after(found)
            values = [(f, m, state.written if f is field else value) for f, m, value in values]
            guarded = base_qs.all()
            guarded.query.where.add(field.guard(found, using), AND)
            updated = super()._do_update(guarded, using, pk_val, values, *args)
            if updated:
                return updated
            found = self._find_version(using, found)
        return False

    def _version_to_rely_on(self, using: str) -> Any:
        """Return the version that was read with this object, None if no row was read."""
        if self._state.db not in (None, using):
            # Read from a replica, it is checked; copied to another database, it is new there.
            if router.db_for_write(type(self), instance=self) != using:
                return None
        return self._version_read()

    def _version_read(self) -> Any:
        """Return the version in memory, None on a new object."""
        name = self._version_field.attname
        if name not in self.__dict__:
            what = "was read without its version, or in a transaction that was rolled back"
            raise self._conflict(None, None, what)
        return self.__dict__[name]

    def _version_row(self, using: str) -> Any:
        """Return a queryset of this object's row in the table with the version."""
        owner = self._version_field.model
        return owner._base_manager.using(using).filter(pk=self._get_pk_val(owner._meta))

    def _find_version(self, using: str, expected: Any) -> Any:
        """Return the version in the database, None if there is no row."""
        versions = self._version_row(using).values_list(self._version_field.attname, flat=True)
        found = next(iter(versions), None)
        connection = connections[using]
        if found is not None and found == expected and connection.in_atomic_block:
            # The UPDATE saw another version: this read is of REPEATABLE READ's old snapshot.
            if connection.features.has_select_for_update:
                found = next(iter(versions.select_for_update()), None)
        return found

    def _version_written(self, version: Any, before: Any, using: str) -> None:
        """Set the version in memory."""
        setattr(self, self._version_field.attname, version)
        watch(self, before, using)

    def _take_raw_version(self, using: str) -> None:
        """Keep the version of a fixture; if it has none, increment the row's."""
        field = self._version_field
        if self.__dict__.get(field.attname) is None:
            found = self._find_version(using, None)
            setattr(self, field.attname, field.first() if found is None else field.after(found))

    def _forget_saved(self, cls: Any, update_fields: Any) -> None:
        if DJANGO_FORGETS:
            return
        fields = cls._meta.local_concrete_fields
        if update_fields:
            fields = [f for f in fields if f.name in update_fields or f.attname in update_fields]
        self._forget_expressions(fields)

    def _forget_expressions(self, fields: Iterable[Any]) -> None:
        """Defer fields saved as expressions: saved again, F("stock") - 1 would apply twice."""
        values = self.__dict__
        for field in fields:
            if hasattr(values.get(field.attname), "resolve_expression") and not field.primary_key:
                del values[field.attname]

    def _conflict(self, expected: Any, found: Any, what: str | None = None) -> StaleObjectError:
        """Announce a conflict, and return the error to raise."""
        version_conflict.send_robust(
            sender=type(self),
            instance=self,
            attempt=getattr(self._state, "attempt", 1),
            expected=expected,
            found=found,
        )
        if what is None:
            what = "was deleted" if found is None else f"has version {found}, not {expected}"
        text = f"{self._meta.label} {self.pk!r} {what}"
        return StaleObjectError(text, obj=self, expected=expected, found=found)


@receiver(class_prepared)
def _write_with_versions(sender: Any, **kwargs: Any) -> None:
    """Use versioned managers where Django itself writes: ON DELETE SET NULL, `related_set.add()`.

    Not `Meta.base_manager_name`: it must name one of the model's managers, which every migration
    would repeat. And `objects` may hide rows.
    """
    meta = sender._meta
    if issubclass(sender, VersionedModel) and meta.base_manager.auto_created:
        manager: Any = VersionedManager()
        manager.name, manager.model, manager.auto_created = "_base_manager", sender, True
        meta.base_manager = manager
        # A cached property, which Django drops whenever a model is added.
        meta.FORWARD_PROPERTIES = meta.FORWARD_PROPERTIES - {"base_manager"}

    for field in meta.local_fields if issubclass(sender, VersionedModel) else ():
        if field.many_to_one:
            lazy_related_operation(
                _add_with_versions, sender, field.remote_field.model, field=field
            )


def _add_with_versions(model: Any, related: Any, field: Any) -> None:
    descriptor = related.__dict__.get(field.remote_field.get_accessor_name())
    if descriptor is not None:  # otherwise it is hidden
        descriptor.related_manager_cls = with_versions(descriptor.related_manager_cls)


MISSING = object()
# Since 6.0 save() replaces an expression by its result, or defers the field.
DJANGO_FORGETS = django.VERSION >= (6,)


def _put(obj: Any, name: str, value: Any) -> None:
    """Set the field in memory, or defer it."""
    if value is MISSING:
        obj.__dict__.pop(name, None)
    else:
        obj.__dict__[name] = value


def _has_key(obj: Any, model: Any) -> bool:
    return bool(obj._is_pk_set(model._meta))


def _is_first_table(field: AnyVersionField, model: Any) -> bool:
    """Whether a save of the model writes the table of the version before any other."""
    model = model._meta.concrete_model
    while model._meta.parents:
        model = next(iter(model._meta.parents))
    return bool(model is field.model)
