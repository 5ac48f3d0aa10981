"""The version of a row: its field, its manager, and what a rollback undoes in memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from django.core import checks
from django.db import NotSupportedError, connections, models, transaction
from django.db.models.query_utils import DeferredAttribute

from .retrying import Retrying

FIRST = 1


class VersionAttribute(DeferredAttribute):
    """Shows a deferred version without keeping it.

    A version that is read later than the fields says nothing of them: kept, it would let a
    save through that overwrites somebody else's.
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


class VersionField(models.BigIntegerField):  # type: ignore[type-arg]
    """How often the row was saved: 1 when inserted, one more with every change.

    None on an object that was not saved yet.
    """

    descriptor_class = VersionAttribute
    # Every insert writes it; nothing has to be read back.
    db_returning = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The default in the database serves inserts of code that does not know the column, so
        # that it can be added while the old release is still running.
        kwargs |= {"default": None, "db_default": FIRST, "editable": False, "blank": True}
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        for key in ("default", "db_default", "editable", "blank"):
            kwargs.pop(key, None)
        return name, "distlock_app.optimistic.VersionField", args, kwargs

    def contribute_to_class(self, cls: Any, name: str, private_only: bool = False) -> None:
        super().contribute_to_class(cls, name, private_only=private_only)
        cls._version_field = self

    def pre_save(self, model_instance: Any, add: bool) -> Any:
        if add:
            setattr(model_instance, self.attname, FIRST)
        elif not hasattr(model_instance, "_save_guarded"):
            # A historical model in a migration: nothing is refused, but others will notice.
            return models.F(self.attname) + 1
        return model_instance.__dict__.get(self.attname)

    def check(self, **kwargs: Any) -> list[Any]:
        found = super().check(**kwargs)
        if not hasattr(self.model, "_save_guarded"):
            hint = "Derive the model from distlock_app.optimistic.VersionedModel."
            text = "A VersionField refuses no stale save without VersionedModel."
            found.append(checks.Error(text, hint=hint, obj=self, id="distlock_app.E021"))
        fields = [f for f in self.model._meta.concrete_fields if isinstance(f, VersionField)]
        if len(fields) > 1:
            names = ", ".join(field.name for field in fields)
            text = f"The model has more than one VersionField: {names}."
            hint = "A second one would not be checked; `version = None` removes an inherited one."
            found.append(checks.Error(text, hint=hint, obj=self, id="distlock_app.E022"))
        return found


class VersionedQuerySet(models.QuerySet[Any]):
    """Moves the version on with every write that does not go through `save()`."""

    def only(self, *fields: Any) -> Any:
        return super().only(*fields, self.model._version_field.name)

    def defer(self, *fields: Any) -> Any:
        return super().defer(*(f for f in fields if f != self.model._version_field.name))

    def update(self, **kwargs: Any) -> int:
        name = self.model._version_field.name
        if kwargs:
            kwargs.setdefault(name, models.F(name) + 1)
        return super().update(**kwargs)

    update.alters_data = True  # type: ignore[attr-defined]

    def bulk_update(
        self, objs: Iterable[Any], fields: Iterable[str], batch_size: int | None = None
    ) -> int:
        """Do as Django does; raise StaleObjectError, and write nothing, if one is stale."""
        self._for_write = True
        using = self.db
        objs, fields = tuple(objs), tuple(fields)
        if not objs:
            return super().bulk_update(objs, fields, batch_size)
        relied_on = [(obj, obj._version_to_rely_on(using)) for obj in objs]
        with transaction.atomic(using=using):
            rows = super().bulk_update(objs, fields, batch_size)
            # Afterwards, in the same transaction: these rows are locked now and as they are.
            name = self.model._version_field.attname
            written = (
                self.model._base_manager.using(using).only(name).in_bulk([obj.pk for obj in objs])
            )
            for obj, expected in relied_on:
                found = getattr(written.get(obj.pk), name, None)
                if expected is not None and found != expected + 1:
                    raise obj._conflict(expected, None if found is None else found - 1)
            for obj, expected in relied_on:
                if obj.pk in written:
                    obj._version_written(getattr(written[obj.pk], name), expected, using)
                    obj._forget_expressions(self.model._meta.get_field(f) for f in fields)
        return rows

    bulk_update.alters_data = True  # type: ignore[attr-defined]

    def bulk_create(
        self,
        objs: Iterable[Any],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Any = None,
        unique_fields: Any = None,
    ) -> list[Any]:
        if update_conflicts:
            raise NotSupportedError(
                "bulk_create(update_conflicts=True) would overwrite rows without moving their "
                "version on. Use update_or_create(), or bulk_update() and bulk_create()."
            )
        objs = super().bulk_create(objs, batch_size, ignore_conflicts)
        for obj in objs:
            if ignore_conflicts:  # it may stand for a row of somebody else
                obj.__dict__.pop(self.model._version_field.attname, None)
            else:
                obj._version_written(FIRST, None, obj._state.db)
        return objs

    bulk_create.alters_data = True  # type: ignore[attr-defined]

    def retrying(self, pk: Any, change: Callable[[Any], Any], **options: Any) -> Any:
        """Read the row, call `change(obj)`, save; again on a fresh row after each conflict.

        Return the saved object. Options: `attempts=5`, then RetriesExhausted; `lock_from=-1`,
        the attempt from which the row is locked (-1: the last one, None: never); `pause=0.05`
        and `max_pause=1`, seconds of full-jitter back-off.
        """
        return self._retrying(pk, change, options).run()

    retrying.alters_data = True  # type: ignore[attr-defined]

    async def aretrying(self, pk: Any, change: Callable[[Any], Any], **options: Any) -> Any:
        return await self._retrying(pk, change, options).arun()

    aretrying.alters_data = True  # type: ignore[attr-defined]

    def _retrying(self, pk: Any, change: Callable[[Any], Any], options: Any) -> Retrying:
        self._for_write = True
        rows = self.using(self.db)
        return Retrying(
            lambda lock: (rows._locked(pk) if lock else rows).get(pk=pk),
            change,
            using=self.db,
            **options,
        )

    def _locked(self, pk: Any) -> Any:
        """Return the queryset whose read locks the row until the transaction ends."""
        if not connections[self.db].features.has_select_for_update:
            # SQLite: a transaction that begins with a write waits for its turn; one that reads
            # first fails with "database is locked" (19 of 80 times).
            name = self.model._version_field.name
            self.model._base_manager.using(self.db).filter(pk=pk).update(**{name: models.F(name)})
            return self
        # PostgreSQL refuses to lock the nullable side of a join.
        return self.select_related(None).select_for_update()


class VersionedManager(models.Manager.from_queryset(VersionedQuerySet)):  # type: ignore[misc]
    """The manager of versioned models."""


class Undo:
    """Puts versions back in memory when the transaction that wrote them is rolled back.

    Django keeps callbacks of `on_commit` in a list, calls them on commit and drops them on
    rollback, of a savepoint too. An object that lives only in that list sees both.
    """

    __slots__ = ("using", "written")

    def __init__(self, using: str) -> None:
        self.using = using
        self.written: list[tuple[weakref.ref[Any], int | None]] = []

    def __call__(self) -> None:
        self.written.clear()

    def __del__(self) -> None:
        for reference, before in reversed(self.written):
            obj = reference()
            if obj is not None and obj._state.db == self.using:
                name = obj._version_field.attname
                now = obj.__dict__.get(name)
                # Whatever is higher comes from this transaction: it had locked the row.
                if now is not None and (before is None or now > before):
                    obj.__dict__[name] = before


def watch(obj: Any, before: int | None, using: str) -> None:
    """Put the version of `obj` back to `before` if the open transaction is rolled back.

    Otherwise an object could be ahead of its row, and overwrite the change by which somebody
    else brings the row to the same number. The blocks of a TestCase do not count.
    """
    connection: Any = connections[using]
    if not connection.in_atomic_block or connection.atomic_blocks[-1]._from_testcase:
        return
    # One callback for all saves between two savepoints: Django pops them from the front of a
    # list, which takes the square of their number.
    last = connection.run_on_commit[-1:]
    undo = last[0][1] if last and last[0][0] == set(connection.savepoint_ids) else None
    if not isinstance(undo, Undo):
        undo = Undo(using)
        transaction.on_commit(undo, using=using)
    undo.written.append((weakref.ref(obj), before))
