"""Saves a versioned object if its version is current; else words and raises StaleObjectError."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import django
from django.db import connections, models, router
from django.db.models.sql.where import AND

from ...errors import StaleObjectError
from ...signals import version_conflict
from .fields import AnyVersionField
from .rollbacks import restored_on_error, watch

# Since 6.0 save() replaces an expression by its result, or defers the field.
DJANGO_FORGETS = django.VERSION >= (6,)


class GuardedSave(models.Model):
    """The base of VersionedModel, without its fields.

    `save_base()` calls `_save_table()` for each table, parents first, which calls `_do_update()`.
    The arguments are those of 5.2 to 6.1; `_do_update()` got one more in 6.0: its `args` begin
    with `update_fields, forced_update`.
    """

    _version_field: AnyVersionField

    class Meta:
        abstract = True

    def save_base(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().save_base(*args, **kwargs)
        except StaleObjectError as error:
            conflict, using = self._state.__dict__.pop("conflict", (None, ""))
            if conflict is error and _is_first_table(self._version_field, type(self)):
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
        save = super()._save_table  # type: ignore[misc]
        if cls is self._version_field.model:
            if raw:
                self._take_raw_version(using)
            else:
                save = self._save_guarded
        saved = save(raw, cls, force_insert, force_update, using, update_fields)
        self._forget_saved(cls, update_fields)
        return saved

    def _save_guarded(
        self, raw: Any, cls: Any, force_insert: Any, force_update: Any, using: str, fields: Any
    ) -> Any:
        """Save the table with the version, and then set the version in memory."""
        field = self._version_field
        name = field.attname
        if fields:
            fields = frozenset((*fields, name))
        state: Any = self._state
        state.expected = state.written = None
        try:
            # Django gives an object its version before it inserts the row.
            with restored_on_error(name, self):
                expected = None if force_insert else self._version_to_rely_on(using)
                if expected is not None:
                    state.expected, state.written = expected, field.after(expected)
                saved = super()._save_table(  # type: ignore[misc]
                    raw, cls, force_insert, force_update, using, fields
                )
                written = state.written
                if not saved:  # inserted
                    written, expected = self.__dict__[name], None
        except StaleObjectError as error:
            # Not if a receiver's query or an earlier one has broken the transaction.
            if not connections[using].needs_rollback:
                state.conflict = error, using
            raise
        finally:
            # Gone already if a receiver of version_conflict has saved the object.
            for attribute in "expected", "written":
                state.__dict__.pop(attribute, None)
        self._version_written(written, expected, using)
        return saved

    def _do_update(self, base_qs: Any, using: Any, pk_val: Any, values: Any, *args: Any) -> Any:
        state: Any = self._state
        if not hasattr(state, "expected"):  # another table, or raw
            return super()._do_update(base_qs, using, pk_val, values, *args)
        args, base_qs = forced(args), unjoined(base_qs, using)
        expected = state.expected
        if expected is None:
            return self._update_unread(base_qs, using, pk_val, values, *args)
        base_qs.query.where.add(self._version_field.guard(expected, using), AND)
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
        found, tried = self._find_version(using, None), None
        # Not twice with one version: then a trigger or row security keeps the row as it is.
        while found not in (None, tried):
            state.written = field.after(found)
            values = [(f, m, state.written if f is field else value) for f, m, value in values]
            guarded = base_qs.all()
            guarded.query.where.add(field.guard(found, using), AND)
            updated = super()._do_update(guarded, using, pk_val, values, *args)
            if updated:
                return updated
            found, tried = self._find_version(using, found), found
        return False

    def _version_to_rely_on(self, using: str) -> Any:
        """Return the version that was read with this object, None if no row was read."""
        if not self._is_pk_set(self._version_field.model._meta):  # type: ignore[attr-defined]
            return None
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

    def _find_version(self, using: str, expected: Any) -> Any:
        """Return the version in the database, None if there is no row."""
        field = self._version_field
        versions = row_of(self, field, using).values_list(field.attname, flat=True)
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
        """Keep the version of a fixture; if it has none, or an earlier one, increment the row's."""
        field = self._version_field
        version = field.get_prep_value(self.__dict__.get(field.attname))
        found = self._find_version(using, None)
        if found is not None and (version is None or version < found):
            version = field.after(found)
        setattr(self, field.attname, field.first() if version is None else version)

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


def row_of(obj: Any, field: Any, using: str) -> Any:
    """Return a queryset of the object's row in the table that has `field`."""
    owner = field.model
    rows = unjoined(owner._base_manager.using(using), using)
    return rows.filter(pk=obj._get_pk_val(owner._meta))


def forced(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the last arguments of `_do_update()` with `forced_update`.

    Without it, `select_on_save` treats a row in an old snapshot as written.
    """
    return args[0], True, *args[2:]


def unjoined(rows: Any, using: str) -> Any:
    """Return these rows of a base manager; all rows of the model if it joins another table.

    Then Django would read keys, and update by them without the other conditions.
    """
    return models.QuerySet(rows.model, using=using) if len(rows.query.alias_map) > 1 else rows


def _is_first_table(field: AnyVersionField, model: Any) -> bool:
    """Whether a save of the model writes the table of the version before any other."""
    model = model._meta.concrete_model
    while model._meta.parents:
        model = next(iter(model._meta.parents))
    return bool(model is field.model)
