"""The queryset and manager of versioned models, which increment versions outside of `save()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from django.db import NotSupportedError, connections, models, router, transaction

from ..retrying import M
from .fields import AnyVersionField
from .repeating import Retrying
from .rollbacks import key_in, restored_on_error, watch_rows
from .saving import unjoined

if TYPE_CHECKING:
    from typing_extensions import Self


class VersionedQuerySet(models.QuerySet[M]):
    """Increments the version with every write that does not go through `save()`."""

    @property
    def _version_field(self) -> AnyVersionField:
        model: Any = self.model
        field: AnyVersionField = model._version_field
        return field

    def only(self, *fields: Any) -> Self:
        version = () if None in fields else (self._version_field.name,)
        return super().only(*fields, *version)

    def defer(self, *fields: Any) -> Self:
        return super().defer(*(f for f in fields if f != self._version_field.name))

    def update(self, **kwargs: Any) -> int:
        if not kwargs:
            return super().update()
        field = self._version_field
        values = {field.name: field.next()} | kwargs
        updated = super().update(**values)
        watch_rows(self.model, self.db)
        return updated

    def bulk_update(
        self, objs: Iterable[Any], fields: Iterable[str], batch_size: int | None = None
    ) -> int:
        """Update as Django does; raise StaleObjectError, and write nothing, if one is stale."""
        self._for_write = True
        using = self.db
        version = self._version_field
        objs = tuple({id(obj): obj for obj in objs}.values())  # given twice, updated once
        fields = tuple(name for name in fields if name != version.name)
        if not objs:
            return super().bulk_update(objs, fields, batch_size)
        relied_on = [(obj, key_in(self.model, obj), obj._version_to_rely_on(using)) for obj in objs]
        # If every row is written, the old version follows from the new one.
        computed = version.counts and not self.query.where
        with transaction.atomic(using=using):
            before = {} if computed else self._versions(objs, lock=True)
            rows = super().bulk_update(objs, fields, batch_size)
            # In the same transaction: the written rows are locked and current. An old snapshot
            # could show the others differently.
            written = self._versions(objs, lock=not computed)
            if computed:
                before = {pk: number - 1 for pk, number in written.items()}
            for obj, key, expected in _changed(relied_on, before, written):
                # Of two objects of one row Django uses the first; the other one is now stale.
                now = written.pop(key, None)
                if now is not None:
                    obj._version_written(now, expected, using)
                    obj._forget_expressions(self.model._meta.get_field(f) for f in fields)
        return rows

    def _versions(self, objs: Iterable[Any], *, lock: bool = False) -> dict[Any, Any]:
        """Return the versions of these rows by key; with `lock`, lock the rows."""
        name = self._version_field.attname
        rows = unjoined(self.model._base_manager.using(self.db), self.db)
        if lock and connections[self.db].features.has_select_for_update:
            rows = rows.select_for_update()
        elif lock:  # SQLite: the first to write is the only writer
            self._touch([obj.pk for obj in objs][:1])
        found = rows.only(name).in_bulk([obj.pk for obj in objs])
        return {pk: getattr(row, name) for pk, row in found.items()}

    def bulk_create(
        self,
        objs: Iterable[Any],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Any = None,
        unique_fields: Any = None,
    ) -> list[M]:
        if update_conflicts:
            raise NotSupportedError(
                "bulk_create(update_conflicts=True) would overwrite rows without incrementing "
                "their version. Use update_or_create(), or bulk_update() and bulk_create()."
            )
        name = self._version_field.attname
        objs = list(objs)
        with restored_on_error(name, *objs):  # Django sets versions before it inserts the rows
            created: list[Any] = super().bulk_create(objs, batch_size, ignore_conflicts)
        for obj in created:
            if ignore_conflicts:  # the row may be another writer's
                obj.__dict__.pop(name, None)
            else:
                obj._version_written(obj.__dict__[name], None, self.db)  # MySQL leaves _state
        return created

    def retrying(self, pk: Any, change: Callable[[M], Any], **options: Any) -> M:
        """Read the row, call `change(obj)`, save; repeat on a fresh row after each conflict.

        Return the saved object. Options: `attempts=5`, then RetriesExhausted; `lock_from=2`, the
        first attempt that locks the row (-1: the last one, None: never), and for one second
        after that, first attempts lock too; `pause=0.05` and `max_pause=1`, seconds of
        full-jitter back-off before a retry that does not lock.
        """
        return self._retrying(pk, change, options).run()

    retrying.alters_data = True  # type: ignore[attr-defined]

    async def aretrying(self, pk: Any, change: Callable[[M], Any], **options: Any) -> M:
        return await self._retrying(pk, change, options).arun()

    aretrying.alters_data = True  # type: ignore[attr-defined]

    def _retrying(self, pk: Any, change: Callable[[M], Any], options: Any) -> Retrying[M]:
        self._for_write = True
        rows = self.using(self.db)
        return Retrying(
            lambda lock: (rows._locked(pk) if lock else rows).get(pk=pk),
            change,
            using=self.db,
            model=self.model,
            pk=pk,
            **options,
        )

    def _locked(self, pk: Any) -> Any:
        """Return the queryset whose read locks the row until the transaction ends."""
        if not connections[self.db].features.has_select_for_update:
            # SQLite: a transaction that starts with a write waits for its turn; one that reads
            # first fails with "database is locked" (19 of 80 times).
            self._touch([pk])
            return self
        # PostgreSQL refuses to lock the nullable side of a join, and groups.
        rows: Any = self.select_related(None)
        more = rows.query.annotations or rows.query.distinct or len(rows.query.alias_map) > 1
        if not more or connections[self.db].vendor == "mysql":
            return rows.select_for_update()
        # Lock the row alone, then read. Not on MySQL, where the read may see an old snapshot.
        row: Any = models.QuerySet(self.model, using=self.db).filter(pk=pk)
        next(iter(row.select_for_update()), None)
        return self

    def _touch(self, keys: list[Any]) -> None:
        """Write the rows unchanged; not by update(), which is watched for a rollback."""
        name = self._version_field.name
        rows: Any = models.QuerySet(self.model, using=self.db)
        rows.filter(pk__in=keys).update(**{name: models.F(name)})


if TYPE_CHECKING:
    # Checkers do not see how a manager gets the methods of its queryset.
    class VersionedManager(VersionedQuerySet[M], models.Manager[M]): ...  # type: ignore[misc]

else:

    class VersionedManager(models.Manager.from_queryset(VersionedQuerySet)):
        """The manager of versioned models."""


def _changed(
    relied_on: list[tuple[Any, Any, Any]], before: dict[Any, Any], written: dict[Any, Any]
) -> list[tuple[Any, Any, Any]]:
    """Return those of `relied_on`, (object, key, version), whose rows were written.

    Raise StaleObjectError if one of them relied on another version than its row had `before`.
    """
    changed = []
    for obj, key, expected in relied_on:
        found = before.get(key)
        if key in written and written[key] == found:  # outside the queryset
            continue
        if expected is not None and found != expected:
            raise obj._conflict(expected, found)
        changed.append((obj, key, expected))
    return changed


def with_versions(manager: Any) -> Any:
    """Return a related manager class whose `add()` also increments versions in memory.

    Django's `add()` changes the foreign key of the given objects, in their rows and in memory.
    """

    class VersionedRelatedManager(manager):  # type: ignore[misc]
        def add(self, *objs: Any, bulk: bool = True) -> None:
            if not bulk or not all(isinstance(obj, self.model) for obj in objs):
                return super().add(*objs, bulk=bulk)  # type: ignore[no-any-return]
            using = router.db_for_write(self.model, instance=self.instance)
            rows: Any = VersionedQuerySet(self.model, using=using)
            with transaction.atomic(using=using):
                before = rows._versions(objs, lock=True)
                super().add(*objs, bulk=bulk)
                written = rows._versions(objs)
                for obj in objs:
                    expected = obj.__dict__.get(self.model._version_field.attname)
                    # A stale object stays stale.
                    key = key_in(self.model, obj)
                    if expected is not None and before.get(key) == expected:
                        obj._version_written(written[key], expected, using)

    return VersionedRelatedManager
