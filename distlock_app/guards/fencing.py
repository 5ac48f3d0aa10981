"""Fencing tokens in rows: a write with a smaller token than the row's is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from asgiref.sync import sync_to_async
from django.db import NotSupportedError, connections, models, router, transaction

from ..errors import LockError, StaleFenceError
from .optimistic.fields import LAST
from .optimistic.models import VersionedModel
from .optimistic.querysets import VersionedQuerySet
from .optimistic.repeating import Retrying
from .optimistic.rollbacks import MISSING, restored_on_error
from .optimistic.saving import forced, row_of, unjoined
from .retrying import M

if TYPE_CHECKING:
    from typing_extensions import Self


def fence_of(hold: Any) -> int:
    """Return the fencing token of a hold that is still trusted, or the given number.

    Raise LockLost or NotHeld, LockError if the hold has no token, TypeError for anything else.
    """
    if isinstance(hold, int) and not isinstance(hold, bool):
        return hold
    if hold is None:  # perhaps the `hold.fence` of a hold without a token
        raise LockError("there is no fencing token: fence= takes a hold, or its number")
    if not hasattr(hold, "check"):  # True, or a Lock
        raise TypeError(f"a fenced write takes a hold, or its number, not {hold!r}")
    hold.check()
    if hold.fence is None:
        raise LockError(f"{hold!r} has no fencing token: its backend does not provide them")
    return int(hold.fence)


class FencedQuerySet(models.QuerySet[M]):
    """A queryset whose `fenced(hold)` refuses to write rows that a later holder has written."""

    _fencing: Any = None  # a hold, or its number

    def fenced(self, hold: Any) -> Self:
        """Return a queryset that writes with the fencing token of `hold` (or a number).

        Its `update()`, `bulk_update()` and `delete()` raise StaleFenceError, and write nothing, if
        one of the rows has a greater token; they and `create()` store this one. `update()`
        without values only stores it: done before reading, that excludes all earlier holders.
        The hold is checked now, and again before each write.
        """
        fence_of(hold)
        rows = self.all()
        rows._fencing = hold
        return rows

    def _fence(self) -> int | None:
        """Return the token to write with, if any; raise as `fence_of` does."""
        return None if self._fencing is None else fence_of(self._fencing)

    def _clone(self) -> Any:
        clone = super()._clone()  # type: ignore[misc]
        clone._fencing = self._fencing
        return clone

    def __or__(self, other: Any) -> Any:
        self._check_same_fence(other)
        return super().__or__(other)

    def __and__(self, other: Any) -> Any:
        self._check_same_fence(other)
        return super().__and__(other)

    def __xor__(self, other: Any) -> Any:
        self._check_same_fence(other)
        return super().__xor__(other)

    def _check_same_fence(self, other: Any) -> Any:
        """Raise TypeError if the combination would drop the token of one of both."""
        if self._fencing != getattr(other, "_fencing", None):
            raise TypeError(
                "Cannot combine querysets that are not fenced by the same hold: combine them "
                "first, as in (one | other).fenced(hold)"
            )
        if self._fencing is not None and not self.query.can_filter():
            raise TypeError("Cannot combine fenced querysets once a slice has been taken.")
        return NotImplemented  # on the right of a plain QuerySet, which combines both

    __ror__ = __rand__ = __rxor__ = _check_same_fence

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self._fencing)] = self._fencing  # a hold has no copies
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        # A hold stays in its process; its number may go elsewhere.
        state = super().__getstate__()
        return {**state, "_fencing": getattr(self._fencing, "fence", self._fencing)}

    def update(self, **kwargs: Any) -> int:
        fence = self._fence()
        if fence is None:
            return super().update(**kwargs)
        self._for_write = True
        with transaction.atomic(using=self.db):
            if self._of_one_table() and kwargs:
                # One statement checks and writes; the rows that it skipped are checked afterwards.
                rows = self.filter(fence__lte=fence)
                updated = super(FencedQuerySet, rows).update(**kwargs, fence=fence)
                refuse_newer(self.all(), fence)
                return updated
            rows = self._claimed(fence)
            return super(FencedQuerySet, rows).update(**kwargs) if kwargs else rows.count()

    def delete(self) -> tuple[int, dict[str, int]]:
        fence = self._fence()
        if fence is None:
            return super().delete()
        self._for_write = True
        with transaction.atomic(using=self.db):
            return super(FencedQuerySet, self._claimed(fence)).delete()

    delete.queryset_only = True  # type: ignore[attr-defined]

    def _of_one_table(self) -> bool:
        """Whether Django updates these rows with one statement that contains their conditions.

        If it has to read or write other tables, it updates by key alone.
        """
        query = self.query.clone()
        query.get_initial_alias()
        concrete: Any = self.model._meta.concrete_model
        inherits = concrete is not self._fenced_model or concrete._meta.parents
        return not inherits and query.count_active_tables() == 1

    def _claimed(self, fence: int) -> Any:
        """Store the token in the rows and return them, now locked until the transaction ends."""
        owner = self._fenced_model
        key = owner._meta.pk.name
        keys = list(self.values_list(key, flat=True))
        # A plain queryset: that of a manager may hide rows, join tables or increment a version.
        rows: Any = models.QuerySet(owner, using=self.db).filter(pk__in=keys)
        rows.filter(fence__lte=fence).update(fence=fence)
        refuse_newer(rows, fence)
        return self.filter(**{f"{key}__in": keys})

    @property
    def _fenced_model(self) -> Any:
        return self.model._meta.get_field("fence").model

    def create(self, **kwargs: Any) -> M:
        fence = self._fence()
        if fence is not None:
            kwargs["fence"] = fence
        return super().create(**kwargs)

    def bulk_create(
        self,
        objs: Iterable[Any],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> list[M]:
        objs = list(objs)
        fence = self._fence()
        if fence is not None:
            if update_conflicts:
                raise NotSupportedError(
                    "bulk_create(update_conflicts=True) cannot check fencing tokens"
                )
            for obj in objs:
                obj.fence = fence
        return super().bulk_create(
            objs, batch_size, ignore_conflicts, update_conflicts, *args, **kwargs
        )

    def update_or_create(
        self, defaults: Any = None, create_defaults: Any = None, **kwargs: Any
    ) -> tuple[M, bool]:
        if self._fencing is not None:
            raise NotSupportedError("update_or_create() cannot check fencing tokens: use update()")
        return super().update_or_create(defaults, create_defaults, **kwargs)


if TYPE_CHECKING:
    # Checkers do not see how a manager gets the methods of its queryset.
    class FencedManager(FencedQuerySet[M], models.Manager[M]): ...  # type: ignore[misc]

else:

    class FencedManager(models.Manager.from_queryset(FencedQuerySet)):
        """The manager of fenced models."""


class FencedModel(models.Model):
    """A model whose `save(fence=hold)` is refused once a later holder has written the row.

    A write without `fence=`, by the admin for example, compares no token and does not change
    it; `FencedVersionedModel` refuses such writes if they are stale.
    """

    # Also a database default, so that the column can be added while an old release is running.
    fence = models.BigIntegerField(default=0, db_default=0, editable=False)
    fence.creation_counter += LAST

    objects: ClassVar[FencedManager[Self]] = FencedManager()

    class Meta:
        abstract = True

    def save(self, *args: Any, fence: Any = MISSING, **kwargs: Any) -> None:
        """Save as Django does; with a hold or its number, raise StaleFenceError if it is late.

        Also refused if the row is gone, since a later holder may have deleted it. An object
        that was never saved is inserted.
        """
        if fence is MISSING:
            return super().save(*args, **kwargs)
        state: Any = self._state
        outer = getattr(state, "fencing", None)  # of a save whose receiver calls this one
        number = fence_of(fence)
        try:
            with restored_on_error("fence", self):
                self.fence = state.fencing = number
                super().save(*args, **kwargs)
        finally:
            state.fencing = outer

    async def asave(self, *args: Any, **kwargs: Any) -> None:
        return await sync_to_async(self.save)(*args, **kwargs)

    def delete(
        self, using: str | None = None, keep_parents: bool = False, *, fence: Any = MISSING
    ) -> tuple[int, dict[str, int]]:
        """Delete as Django does; with a hold or its number, raise StaleFenceError if it is late.

        A missing row is not an error.
        """
        if fence is MISSING:
            return super().delete(using=using, keep_parents=keep_parents)
        using = using or router.db_for_write(type(self), instance=self)
        number = fence_of(fence)
        with transaction.atomic(using=using):
            rows = self._fenced_row(using)
            # The plain update(): that of another queryset would increment a version.
            if not models.QuerySet.update(rows.filter(fence__lte=number), fence=number):
                refuse_newer(rows, number, obj=self)
            return super().delete(using=using, keep_parents=keep_parents)

    async def adelete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        return await sync_to_async(self.delete)(*args, **kwargs)

    def _do_update(self, base_qs: Any, using: Any, pk_val: Any, values: Any, *args: Any) -> Any:
        field = self._meta.get_field("fence")
        if base_qs.model is not field.model:  # another table of the same object
            return super()._do_update(base_qs, using, pk_val, values, *args)
        number = getattr(self._state, "fencing", None)
        # An old object must not lower the token of its row.
        values = [value for value in values if value[0] is not field]
        if number is not None:
            values.append((field, None, number))  # whatever the update_fields are
            base_qs = unjoined(base_qs, using).filter(fence__lte=number)
            args = forced(args)
        updated = super()._do_update(base_qs, using, pk_val, values, *args)
        if not updated and number is not None:
            self._refuse_late(using, number)
        return updated

    def _find_version(self, using: str, expected: int | None) -> int | None:
        """Check the token first when a VersionedModel looks for the cause of a conflict."""
        number = getattr(self._state, "fencing", None)
        if number is not None:
            refuse_newer(self._fenced_row(using), number, obj=self)
        found: int | None = super()._find_version(using, expected)  # type: ignore[misc]
        return found

    def _refuse_late(self, using: str, number: int) -> None:
        rows = self._fenced_row(using)
        refuse_newer(rows, number, obj=self)
        if not self._state.adding:
            text = f"{self._meta.label} {self.pk!r} is gone: a late holder does not insert it again"
            raise StaleFenceError(text, obj=self, fence=number)

    def _fenced_row(self, using: str) -> Any:
        return row_of(self, self._meta.get_field("fence"), using)


class FencedVersionedQuerySet(FencedQuerySet[M], VersionedQuerySet[M]):  # type: ignore[override]
    """A queryset of models with fencing tokens and versions."""

    def _retrying(self, pk: Any, change: Callable[[M], Any], options: Any) -> Retrying[M]:
        if self._fencing is not None:
            raise NotSupportedError(
                "retrying() cannot check fencing tokens: use save(fence=...) in a function "
                "decorated with retry_on_conflict"
            )
        return super()._retrying(pk, change, options)


if TYPE_CHECKING:

    class FencedVersionedManager(  # type: ignore[misc, override]
        FencedVersionedQuerySet[M], models.Manager[M]
    ): ...

else:

    class FencedVersionedManager(models.Manager.from_queryset(FencedVersionedQuerySet)):
        """The manager of models with fencing tokens and versions."""


class FencedVersionedModel(FencedModel, VersionedModel):
    """A model that refuses writes by late holders and by stale objects."""

    objects: ClassVar[FencedVersionedManager[Self]] = FencedVersionedManager()  # type: ignore[assignment]

    class Meta(VersionedModel.Meta):
        abstract = True


def refuse_newer(rows: Any, fence: int, *, obj: Any = None) -> None:
    """Raise StaleFenceError if one of the rows has a token greater than `fence`."""
    connection = connections[rows.db]
    newer = rows.filter(fence__gt=fence).order_by()
    if connection.vendor == "mysql" and connection.in_atomic_block:
        newer = newer.select_for_update()  # a plain read may see an old snapshot
    found = next(iter(newer.values_list("fence", flat=True)[:1]), None)
    if found is not None:
        what = rows.model._meta.label if obj is None else f"{obj._meta.label} {obj.pk!r}"
        text = f"{what} was written with fencing token {found}, which is greater than {fence}"
        raise StaleFenceError(text, obj=obj, fence=fence, found=found)
