"""Late writers are refused: by the fence of a row, and by a lock that is pinned to the commit."""

from __future__ import annotations

import asyncio
import pickle
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from operator import and_, or_, xor
from pathlib import Path
from typing import Any

import django
import pytest
from asgiref.sync import sync_to_async
from django.db import NotSupportedError, OperationalError, connection, connections, transaction
from django.db.models import Count, F, QuerySet
from django.db.models.signals import post_save, pre_save
from django.template import Context, Engine
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from distlock_app import (
    Lock,
    LockError,
    LockLost,
    LockTimeout,
    NotHeld,
    StaleFenceError,
    StaleObjectError,
)
from distlock_app.core.registry import registry
from tests.app.guarded_models import ColdShelf, ColdVault, Shelf, Vault
from tests.engines import renewed
from tests.processes import Processes
from tests.test_optimistic import ReadsFromAReplica, elsewhere, repeatable_read, use_base_manager

pytestmark = pytest.mark.django_db(transaction=True)

OLD, NEW = 100, 200


class Undone(Exception):
    pass


@pytest.fixture
def shelf() -> Shelf:
    return Shelf.objects.fenced(NEW).create(name="new", stock=5)


def row(obj: Any) -> tuple[int, int]:
    return type(obj).objects.values_list("stock", "fence").get(pk=obj.pk)


# Objects


def test_a_template_cannot_write() -> None:
    vault = Vault.objects.create(stock=5)
    calls = [f"row.{verb}" for verb in ("save", "delete", "save_retrying")]
    calls += [f"rows.{verb}" for verb in ("update", "delete", "create", "bulk_create")]
    template = Engine().from_string("".join(f"{{{{ {call} }}}}" for call in calls))

    shown = template.render(Context({"row": vault, "rows": Vault.objects.fenced(NEW)}))

    assert shown == ""
    assert list(Vault.objects.values_list("stock", "version", "fence")) == [(5, 1, 0)]


@pytest.mark.parametrize("signal", [pre_save, post_save])
def test_a_receiver_may_save_the_object_under_the_fence_again(shelf: Shelf, signal: Any) -> None:
    def save_again(instance: Shelf, **kwargs: Any) -> None:
        if instance.stock == 6:
            instance.stock = 7
            instance.save(fence=NEW)

    shelf.stock = 6
    signal.connect(save_again, sender=Shelf)
    try:
        shelf.save(fence=NEW)
    finally:
        signal.disconnect(save_again, sender=Shelf)

    assert row(shelf) == (7, NEW)


def test_a_late_save_is_refused_after_a_receiver_saved_the_object_in_it(shelf: Shelf) -> None:
    def save_again(instance: Shelf, **kwargs: Any) -> None:
        if instance.stock == 6:
            instance.stock = 7
            instance.save(fence=NEW)

    shelf.stock = 6
    pre_save.connect(save_again, sender=Shelf)
    try:
        with pytest.raises(StaleFenceError):
            shelf.save(fence=OLD)
    finally:
        pre_save.disconnect(save_again, sender=Shelf)

    assert row(shelf) == (7, NEW)  # the receiver's


def test_a_save_leaves_its_fence_and_costs_one_query(
    shelf: Shelf, django_assert_num_queries: Any
) -> None:
    shelf.stock = 6
    with Lock("shelf") as hold, django_assert_num_queries(1):
        shelf.save(fence=hold)

    assert row(shelf) == (6, hold.fence)
    assert shelf.fence == hold.fence
    shelf.save(fence=hold.fence)  # the same holder again


def test_a_smaller_fence_is_refused(shelf: Shelf) -> None:
    shelf.stock = 6
    for options in ({}, {"update_fields": ["stock"]}, {"force_update": True}):
        with pytest.raises(StaleFenceError) as refusal:
            shelf.save(fence=OLD, **options)

    assert row(shelf) == (5, NEW)
    assert shelf.fence == NEW
    assert (refusal.value.obj, refusal.value.fence, refusal.value.found) == (shelf, OLD, NEW)
    assert isinstance(refusal.value, LockLost)
    assert pickle.loads(pickle.dumps(refusal.value)).found == NEW


def test_select_on_save_does_not_hide_a_later_holder_in_an_old_snapshot(
    shelf: Shelf, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Shelf._meta, "select_on_save", True)

    # PostgreSQL and SQLite end a transaction that would write on an old snapshot.
    with suppress(OperationalError), repeatable_read():
        mine = Shelf.objects.get()
        elsewhere(lambda: Shelf.objects.fenced(NEW + 2).update(stock=9))
        with pytest.raises(StaleFenceError) as refusal:
            mine.save(fence=NEW + 1)
        assert refusal.value.found == NEW + 2

    assert row(shelf) == (9, NEW + 2)


def test_some_fields_are_saved_with_the_fence(shelf: Shelf) -> None:
    shelf.stock, shelf.name = 6, "unsaved"
    shelf.save(fence=NEW + 1, update_fields=["stock"])
    Shelf.objects.only("stock").get(pk=shelf.pk).save(fence=NEW + 2)

    assert row(shelf) == (6, NEW + 2)
    assert Shelf.objects.get().name == "new"


@pytest.mark.skipif(django.VERSION >= (6,), reason="save() takes options by name only")
@pytest.mark.filterwarnings("ignore:Passing positional arguments to save")
def test_some_fields_named_by_position_are_saved_with_the_fence(shelf: Shelf) -> None:
    shelf.stock = 6
    shelf.save(False, False, None, ["stock"], fence=NEW + 1)

    assert row(shelf) == (6, NEW + 1)


def test_a_save_without_a_fence_leaves_that_of_the_row(shelf: Shelf) -> None:
    old = Shelf.objects.get()
    shelf.save(fence=NEW + 1)

    old.stock = 9
    old.save()

    assert row(shelf) == (9, NEW + 1)


def test_a_new_object_is_inserted_with_its_fence() -> None:
    shelf = Shelf(stock=1)
    shelf.save(fence=OLD)
    known = Shelf(pk=shelf.pk, stock=2)

    with pytest.raises(StaleFenceError):
        known.save(fence=OLD - 1)
    known.save(fence=OLD)
    Shelf(pk=shelf.pk + 1, stock=3).save(fence=OLD)

    assert sorted(Shelf.objects.values_list("stock", "fence")) == [(2, OLD), (3, OLD)]


def test_a_row_that_is_gone_is_not_made_again(shelf: Shelf) -> None:
    Shelf.objects.all().delete()

    with pytest.raises(StaleFenceError, match="gone"):
        shelf.save(fence=NEW + 1)

    assert not Shelf.objects.exists()


def test_a_row_that_an_old_snapshot_still_shows_is_not_made_again(shelf: Shelf) -> None:
    # PostgreSQL and SQLite end a transaction that would write on an old snapshot.
    with suppress(OperationalError), repeatable_read():
        mine = Shelf.objects.get()
        elsewhere(Shelf.objects.all().delete)
        with pytest.raises(StaleFenceError, match="gone"):
            mine.save(fence=NEW + 1)

    assert not Shelf.objects.exists()


def test_delete_asks_the_fence_too(shelf: Shelf) -> None:
    with pytest.raises(StaleFenceError):
        shelf.delete(fence=OLD)
    assert Shelf.objects.get().pk

    again = Shelf.objects.get()
    assert shelf.delete(fence=NEW) == (1, {"testapp.Shelf": 1})
    assert again.delete(fence=OLD)[0] == 0


def test_the_fence_of_a_parents_table_guards_the_child() -> None:
    shelf = ColdShelf.objects.fenced(NEW).create(stock=5, degrees=4)
    shelf.stock, shelf.degrees = 6, 5

    for refused in (shelf.save, shelf.delete):
        with pytest.raises(StaleFenceError):
            refused(fence=OLD)
    assert (row(shelf), ColdShelf.objects.get().degrees) == ((5, NEW), 4)

    shelf.save(fence=NEW + 1)
    assert (row(shelf), ColdShelf.objects.get().degrees) == ((6, NEW + 1), 5)
    shelf.delete(fence=NEW + 1)
    assert not Shelf.objects.exists()


@pytest.mark.parametrize("wrong", [True, Lock("a"), "3", 3.5], ids=str)
def test_what_is_no_hold_and_no_number_of_one_is_refused(shelf: Shelf, wrong: Any) -> None:
    for write in (shelf.save, shelf.delete):
        with pytest.raises(TypeError, match="takes a hold, or its number, not "):
            write(fence=wrong)
    with pytest.raises(TypeError, match="takes a hold, or its number, not "):
        Shelf.objects.fenced(wrong)


def test_a_hold_without_a_fence_or_of_the_past_is_refused(shelf: Shelf, monkeypatch: Any) -> None:
    with Lock("a", using="dummy") as hold, monkeypatch.context() as without:
        without.setattr(type(hold), "fence", None)
        with pytest.raises(LockError, match="no fencing token"):
            shelf.save(fence=hold)
    with Lock("a") as hold:
        pass
    for write in (shelf.save, shelf.delete):
        with pytest.raises(NotHeld):
            write(fence=hold)
        with pytest.raises(LockError, match="no fencing token"):
            write(fence=None)  # the `hold.fence` of a backend without them
    with pytest.raises(NotHeld):
        Shelf.objects.fenced(hold)

    assert row(shelf) == (5, NEW)


def test_the_async_twins_take_a_fence(shelf: Shelf) -> None:
    async def run() -> None:
        with pytest.raises(StaleFenceError):
            await shelf.asave(fence=OLD)
        with pytest.raises(StaleFenceError):
            await Shelf.objects.fenced(OLD).aupdate(stock=1)
        with pytest.raises(StaleFenceError):
            await shelf.adelete(fence=OLD)
        await sync_to_async(connections.close_all)()

    asyncio.run(run())
    assert row(shelf) == (5, NEW)


# Querysets


def test_an_update_is_all_or_nothing(shelf: Shelf) -> None:
    other = Shelf.objects.fenced(OLD).create(name="new", stock=5)
    middle = Shelf.objects.fenced(OLD + 1)

    with pytest.raises(StaleFenceError):
        middle.filter(name="new").update(name="done", stock=0)
    assert (row(shelf), row(other)) == ((5, NEW), (5, OLD))

    assert middle.filter(pk=other.pk).update(stock=0) == 1
    assert middle.filter(pk=0).update(stock=0) == 0
    assert Shelf.objects.fenced(NEW).filter(name="new").update(name="done") == 2
    assert set(Shelf.objects.values_list("name", "fence")) == {("done", NEW)}


def test_an_update_of_one_table_checks_and_writes_by_one_statement(
    shelf: Shelf, django_assert_num_queries: Any
) -> None:
    with transaction.atomic(), django_assert_num_queries(4):  # two are about a savepoint
        assert Shelf.objects.fenced(NEW).filter(stock=5).update(stock=6) == 1

    assert row(shelf) == (6, NEW)


def test_an_update_without_values_shuts_earlier_holders_out(shelf: Shelf) -> None:
    assert Shelf.objects.fenced(NEW + 1).filter(pk=shelf.pk).update() == 1

    with pytest.raises(StaleFenceError):
        shelf.save(fence=NEW)
    assert row(shelf) == (5, NEW + 1)


def test_other_ways_to_write_many_rows(shelf: Shelf) -> None:
    shelf.stock = 6
    fenced = Shelf.objects.fenced(OLD)

    for write in (
        lambda: fenced.bulk_update([shelf], ["stock"]),
        lambda: fenced.all().delete(),
        lambda: fenced.exclude(pk=0).update(stock=6),
    ):
        with pytest.raises(StaleFenceError):
            write()
    with pytest.raises(NotSupportedError):
        fenced.update_or_create(pk=shelf.pk, defaults={"stock": 6})
    with pytest.raises(NotSupportedError):
        fenced.bulk_create([shelf], update_conflicts=True)
    with pytest.raises(NotSupportedError):
        fenced.bulk_create([shelf], None, False, True, ["stock"], ["id"])
    assert row(shelf) == (5, NEW)

    assert [made.fence for made in fenced.bulk_create(Shelf() for _ in range(1))] == [OLD]
    assert fenced.get_or_create(name="other")[0].fence == OLD
    assert Shelf.objects.fenced(NEW).bulk_update([shelf], ["stock"]) == 1
    assert row(shelf) == (6, NEW)
    assert Shelf.objects.fenced(NEW).all().delete()[0] == 3
    assert Shelf.objects.update_or_create(name="unfenced")[0].fence == 0


def test_writes_without_a_fence_leave_that_of_the_row(shelf: Shelf) -> None:
    assert Shelf.objects.update(stock=6) == 1
    assert row(shelf) == (6, NEW)
    assert Shelf.objects.bulk_create([Shelf()])[0].fence == 0
    assert shelf.delete()[0] == 1

    vault = Vault.objects.fenced(NEW).create(stock=5)
    Vault.objects.retrying(vault.pk, lambda obj: setattr(obj, "stock", 6))
    assert row(vault) == (6, NEW)


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
@pytest.mark.parametrize("cold", [False, True], ids=["one table", "two tables"])
def test_a_fence_is_compared_where_the_row_is_written(settings: Any, cold: bool) -> None:
    model = ColdShelf if cold else Shelf
    model.objects.fenced(NEW).create(stock=5)
    settings.DATABASE_ROUTERS = [ReadsFromAReplica()]

    for write in (
        lambda: model.objects.fenced(OLD).update(stock=6),
        lambda: model.objects.fenced(OLD).all().delete(),
    ):
        with pytest.raises(StaleFenceError):
            write()
    assert model.objects.fenced(NEW).update(stock=7) == 1
    assert [row.stock for row in model.objects.using("default")] == [7]


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
def test_a_row_of_another_database_is_guarded_there() -> None:
    shelf, vault = Shelf(), Vault()
    for obj in shelf, vault:
        obj.save(using="locks", fence=NEW)

        for write in obj.save, obj.delete:
            with pytest.raises(StaleFenceError):
                write(fence=OLD)
        assert obj.delete(fence=NEW)[0] == 1


def test_a_queryset_asks_its_hold_before_each_write(shelf: Shelf) -> None:
    with Lock("shelf") as hold:
        fenced = Shelf.objects.fenced(hold)
        copied = deepcopy(fenced)
        pickled = pickle.loads(pickle.dumps(fenced))  # elsewhere, there is only the number
        assert fenced.filter(pk=shelf.pk).update(stock=6) == 1
    shelf.stock = 7

    for write in (
        lambda: fenced.update(stock=7),
        lambda: fenced.filter(pk=shelf.pk).update(),
        lambda: fenced.bulk_update([shelf], ["stock"]),
        lambda: fenced.all().delete(),
        lambda: fenced.create(stock=7),
        lambda: fenced.bulk_create([Shelf(stock=7)]),
        lambda: fenced.get_or_create(stock=7),
        lambda: copied.update(stock=7),
    ):
        with pytest.raises(NotHeld):
            write()
    assert row(Shelf.objects.get()) == (6, hold.fence)
    assert pickled.update(stock=8) == 1


@pytest.mark.parametrize("combine", [or_, and_, xor])
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_querysets_of_different_holds_are_not_combined(
    shelf: Shelf, combine: Callable[[Any, Any], Any], empty: int
) -> None:
    unfenced: Any = Shelf.objects.all()
    plain: Any = QuerySet(Shelf)
    old, new = Shelf.objects.fenced(OLD), Shelf.objects.fenced(NEW)

    def combined(*rows: Any) -> Any:
        rows = tuple(
            r.none() if at == empty else r.filter(pk=shelf.pk) for at, r in enumerate(rows)
        )
        return combine(*rows)

    for one, other in (unfenced, old), (plain, old), (old, new):
        for rows in (one, other), (other, one):
            with pytest.raises(TypeError, match="same hold"):
                combined(*rows)
    with pytest.raises(StaleFenceError):
        (combined(old, old) | old.filter(pk=shelf.pk)).update(stock=6)
    assert row(shelf) == (5, NEW)
    for rows in (unfenced, plain), (plain, unfenced):
        assert combined(*rows).count() == combined(plain, plain).count()


def test_a_part_of_fenced_rows_is_not_combined(shelf: Shelf) -> None:
    rows = Shelf.objects.fenced(OLD)

    for combine in or_, and_, xor:
        with pytest.raises(TypeError, match="slice"):
            combine(rows[:1], rows)
    with pytest.raises(StaleFenceError):
        (rows | rows[:1]).update(stock=6)


def one_commits_while_another_waits(write: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """Let `other` find what it writes, and wait for the row; then commit `write`."""
    pids: list[int] = []

    def run() -> Any:
        try:
            with connection.cursor() as cursor:
                mysql = connection.vendor == "mysql"
                cursor.execute(f"SELECT {'connection_id()' if mysql else 'pg_backend_pid()'}")
                pids.append(cursor.fetchone()[0])
            return other()
        finally:
            connection.close()

    def waits() -> bool:
        query = {
            "mysql": "SELECT 1 FROM information_schema.innodb_trx"
            " WHERE trx_mysql_thread_id = %s AND trx_state = 'LOCK WAIT'",
            "postgresql": "SELECT 1 FROM pg_stat_activity"
            " WHERE pid = %s AND wait_event_type = 'Lock'",
        }[connections["locks"].vendor]
        with connections["locks"].cursor() as cursor:
            cursor.execute(query, pids)
            return cursor.fetchone() is not None

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            write()
            future = pool.submit(run)
            give_up = time.monotonic() + 60
            while not (pids and waits()) and not future.done():
                assert time.monotonic() < give_up
                time.sleep(0.15)  # asked more often, InnoDB answers what it answered before
            assert not future.done()
        return future.result(60)


LATE_WRITES: dict[str, Callable[[], Any]] = {
    "a join": lambda: Shelf.objects.fenced(OLD).filter(coldshelf__degrees=4).update(stock=-1),
    "exclude": lambda: Shelf.objects.fenced(OLD).exclude(coldshelf__degrees=5).update(stock=-1),
    "a join, no values": lambda: Shelf.objects.fenced(OLD).filter(coldshelf__degrees=4).update(),
    "a child": lambda: ColdShelf.objects.fenced(OLD).update(degrees=-1),
    "a child's parent": lambda: ColdShelf.objects.fenced(OLD).update(stock=-1),
    "a child, no values": lambda: ColdShelf.objects.fenced(OLD).update(),
    "bulk_update": lambda: ColdShelf.objects.fenced(OLD).bulk_update(
        [ColdShelf(pk=pk, degrees=-1) for pk in ColdShelf.objects.values_list("pk", flat=True)],
        ["degrees"],
    ),
    "delete": lambda: Shelf.objects.fenced(OLD).filter(coldshelf__degrees=4).delete(),
    "delete of a child": lambda: ColdShelf.objects.fenced(OLD).delete(),
}


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
@pytest.mark.parametrize("late", LATE_WRITES.values(), ids=LATE_WRITES)
def test_who_finds_rows_before_a_later_holder_writes_them_is_refused(
    late: Callable[[], Any],
) -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no row locks: nobody writes between a read and a write")
    shelf = ColdShelf.objects.fenced(OLD - 1).create(stock=5, degrees=4)

    with pytest.raises(StaleFenceError):
        one_commits_while_another_waits(
            lambda: Shelf.objects.filter(pk=shelf.pk).update(stock=9, fence=NEW), late
        )

    assert row(shelf) == (9, NEW)
    assert ColdShelf.objects.get().degrees == 4


@pytest.mark.parametrize(
    "change",
    [lambda rows: rows.filter(name="shown"), lambda rows: rows.annotate(n=Count("coldshelf"))],
    ids=["hides", "joins"],
)
def test_a_base_manager_that_hides_rows_or_joins_others_lets_no_earlier_holder_in(
    shelf: Shelf, monkeypatch: Any, change: Callable[[Any], Any]
) -> None:
    use_base_manager(monkeypatch, Shelf, change)

    with pytest.raises(StaleFenceError):
        Shelf.objects.fenced(OLD).delete()
    with CaptureQueriesContext(connection) as queries:
        Shelf.objects.fenced(NEW + 1).update()

    assert row(shelf) == (5, NEW + 1)
    update = next(q["sql"] for q in queries if q["sql"].startswith("UPDATE"))
    assert "SELECT" not in update and re.search(rf"fence\W* <= {NEW + 1}\b", update)


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
def test_who_finds_versioned_rows_before_a_later_holder_writes_them_is_refused() -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no row locks: nobody writes between a read and a write")
    vault = ColdVault.objects.fenced(OLD - 1).create(stock=5, degrees=4)

    with pytest.raises(StaleFenceError):
        one_commits_while_another_waits(
            lambda: Vault.objects.fenced(NEW).update(stock=9),
            lambda: ColdVault.objects.fenced(OLD).update(degrees=-1),
        )

    vault.refresh_from_db()
    assert (row(vault), vault.degrees, vault.version) == ((9, NEW), 4, 2)


def test_conditions_on_other_tables_decide_what_is_written_and_what_is_refused() -> None:
    old, new = (
        ColdShelf.objects.fenced(fence).create(name=name, stock=5, degrees=degrees)
        for fence, name, degrees in ((OLD, "old", 4), (NEW, "new", 5))
    )
    double = ColdShelf.objects.fenced(OLD + 1).annotate(double=F("shelf_ptr__stock") * 2)
    shelves = Shelf.objects.fenced(OLD + 1)

    assert double.filter(degrees=4).update(degrees=1, name="both") == 1
    assert shelves.filter(coldshelf__degrees=1).update() == 1
    with pytest.raises(StaleFenceError):
        shelves.filter(coldshelf__degrees__gt=0).update(stock=0)
    with pytest.raises(StaleFenceError):
        shelves.filter(coldshelf__degrees__gt=0).delete()
    assert (row(old), row(new)) == ((5, OLD + 1), (5, NEW))
    assert list(ColdShelf.objects.values_list("degrees", "name").order_by("pk")) == [
        (1, "both"),
        (5, "new"),
    ]

    assert shelves.filter(coldshelf__degrees=1).delete()[0] == 2
    assert Shelf.objects.get().pk == new.pk


def test_an_update_without_values_leaves_the_version() -> None:
    vault = Vault.objects.create(stock=5)

    assert Vault.objects.fenced(NEW).update() == 1

    assert Vault.objects.values_list("version", "fence").get() == (vault.version, NEW)


# Together with a version


def test_both_guards_refuse_for_their_own_reason() -> None:
    vault = Vault.objects.fenced(NEW).create(stock=5)
    stale = Vault.objects.get()
    vault.save()

    with pytest.raises(StaleObjectError):
        stale.save()
    with pytest.raises(StaleObjectError):
        stale.save(fence=NEW)
    with pytest.raises(StaleFenceError):
        stale.save(fence=OLD)
    with pytest.raises(StaleFenceError):
        vault.save(fence=OLD)
    with pytest.raises(StaleFenceError):
        Vault(pk=vault.pk).save(fence=OLD)
    assert (vault.version, vault.fence) == (2, NEW)

    vault.save(fence=NEW + 1)
    assert Vault.objects.fenced(NEW + 2).update(stock=7) == 1
    vault.refresh_from_db()
    assert (vault.version, row(vault)) == (4, (7, NEW + 2))
    vault.stock = 8
    assert Vault.objects.fenced(NEW + 2).bulk_update([vault], ["stock"]) == 1
    assert (vault.version, row(vault)) == (5, (8, NEW + 2))
    with pytest.raises(StaleObjectError):
        stale.delete(fence=NEW + 2)
    assert vault.delete(fence=NEW + 2)[0] == 1


def test_a_fenced_queryset_does_not_retry_without_its_token() -> None:
    vault = Vault.objects.fenced(NEW).create(stock=5)
    fenced: Any = Vault.objects.fenced(OLD)

    with pytest.raises(NotSupportedError):
        fenced.retrying(vault.pk, lambda obj: setattr(obj, "stock", 6))
    with pytest.raises(NotSupportedError):
        asyncio.run(fenced.aretrying(vault.pk, lambda obj: setattr(obj, "stock", 6)))
    assert row(vault) == (5, NEW)


# Pinned locks


def test_a_pinned_lock_needs_no_renewal_and_is_kept_after_the_commit(shelf: Shelf) -> None:
    with Lock("shelf", ttl=2) as hold:
        with transaction.atomic():
            hold.pin()
            time.sleep(2.2)
            hold.check()
            with pytest.raises(LockError, match="pinned"):
                hold.extend()
            shelf.save()
        hold.check()
        renewed(hold)  # again


def test_the_commit_of_a_pinned_transaction_asks_for_no_renewal_before_it_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    with Lock("shelf", ttl=30) as hold:
        monkeypatch.setattr(registry["default"].backend, "extend", lambda *a: asked.append(a))
        with transaction.atomic():
            hold.pin()
        monkeypatch.undo()

    assert asked == []


@pytest.mark.parametrize("renew", [True, False])
def test_a_pin_renews_a_lock_that_is_renewed_and_no_other(renew: bool) -> None:
    backend: Any = registry["default"].backend
    with Lock("shelf", ttl=60, renew=renew) as hold:
        assert backend.end_in(hold._lease.grant, 30)

        with transaction.atomic():
            hold.pin()

        [holding] = Lock("shelf").holders()
        assert ((holding.expires_in or 0) > 30) is renew


def test_a_rollback_of_its_savepoint_ends_the_pin(shelf: Shelf) -> None:
    with Lock("shelf", ttl=30) as hold:
        with transaction.atomic():
            with pytest.raises(Undone), transaction.atomic():
                hold.pin()
                raise Undone
            assert hold._lease.pins == 0
            with transaction.atomic():
                hold.pin()
                hold.pin()
            assert hold._lease.pins == 2
        assert hold._lease.pins == 0
        with pytest.raises(Undone), transaction.atomic():
            hold.pin()
            raise Undone
        assert hold._lease.pins == 0
        hold.extend()


def test_a_savepoint_that_is_rolled_back_by_hand_ends_the_pin() -> None:
    with Lock("shelf", ttl=30) as hold, transaction.atomic():
        sid: Any = connection.savepoint()
        hold.pin()
        later: Any = connection.savepoint()
        connection.savepoint_rollback(later)
        assert hold._lease.pins == 1

        connection.savepoint_rollback(sid)

        assert hold._lease.pins == 0


def test_a_lock_that_is_gone_cannot_be_pinned() -> None:
    hold = Lock("shelf").acquire()
    Lock("shelf").clear()

    with pytest.raises(LockLost), transaction.atomic():
        hold.pin()
    with pytest.raises(LockLost):
        hold.release()


@pytest.mark.skipif(connection.vendor == "sqlite", reason="one file, one writer")
def test_a_pinned_lock_does_not_keep_others_from_theirs() -> None:
    """MariaDB locked all rows of the lock table in such a transaction."""
    with Lock("other"):
        pass
    with Lock("shelf", ttl=30) as hold, ThreadPoolExecutor() as pool, repeatable_read():
        hold.pin()

        assert pool.submit(lambda: Lock("other", wait=2).acquire().release()).result() is None


def test_a_release_at_once_waits_for_the_pinned_transaction() -> None:
    lock = Lock("shelf", release="now")

    with transaction.atomic():
        hold = lock.acquire()
        hold.pin()
        hold.release()
        assert hold.released
        assert connection.vendor == "sqlite" or lock.locked()

    assert not lock.locked()


def test_pin_says_where_it_is_not_possible() -> None:
    with Lock("a", using="locmem") as hold, transaction.atomic():
        with pytest.raises(LockError, match="lock table"):
            hold.pin()
    with Lock("a") as hold:
        with pytest.raises(LockError, match="atomic"):
            hold.pin()
    with pytest.raises(NotHeld), transaction.atomic():
        hold.pin()
    for together in (Lock("a", shared=True), Lock("b", limit=2)):
        with together as hold, transaction.atomic(), pytest.raises(LockError, match="share"):
            hold.pin()


def test_under_manual_management_a_pin_would_have_no_end(monkeypatch: Any) -> None:
    hold = Lock("a", release="now").acquire()
    transaction.set_autocommit(False)
    try:
        with transaction.atomic(), pytest.raises(LockError, match="autocommit"):
            hold.pin()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    hold.release()


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
def test_the_transaction_has_to_be_in_the_database_of_the_lock() -> None:
    with Lock("a", using="locks") as hold, transaction.atomic(using="default"):
        with pytest.raises(LockError, match="on 'locks' .*: the open transaction is on 'default'"):
            hold.pin()


class InTestCase(TestCase):
    def test_pin_asks_the_engine_and_needs_a_block_of_its_own(self) -> None:
        if connection.vendor == "sqlite":
            self.skipTest("a lock cannot be taken inside a transaction on its own file")
        with Lock("shelf") as hold:
            with self.assertRaises(LockError):
                hold.pin()
            with transaction.atomic():
                hold.pin()
            self.assertEqual(hold._lease.pins, 0)


# A store outside of the database


def test_the_store_of_the_documentation_refuses_a_late_holder(rf: Any) -> None:
    page = Path(__file__).parent.parent / "docs/how-to/fencing.md"
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(import threading.*?)```", page.read_text(), re.S)[0], names)
    store = names["FencedStore"]()

    def put(value: str, fence: int | None) -> int:
        request = rf.put("/a", value, headers={"Fence": str(fence)})
        return int(store(request, "a").status_code)

    with Lock("a") as late:
        pass
    with Lock("a") as hold:
        writers = (late, hold, late, hold)
        answers = [put(f"{number}", writer.fence) for number, writer in enumerate(writers)]

    assert answers == [204, 204, 409, 204]
    assert store.values == {"a": b"3"}


# Holders that were stopped


@pytest.mark.slow
def test_100_of_100_holders_who_were_stopped_are_refused(processes: Processes) -> None:
    shelves = [Shelf.objects.create(stock=0) for _ in range(100)]
    worker = processes.start(
        "tests.fencing_workers:write_late", pks=[shelf.pk for shelf in shelves], ttl=1
    )
    assert worker.read(within=60) == "holding"
    worker.pause()

    for shelf in shelves:
        with Lock(f"shelf:{shelf.pk}", ttl=30).acquire(wait=30) as hold:
            shelf.stock = 1
            shelf.save(fence=hold)
    worker.resume()
    worker.tell("write")

    assert worker.result() == {
        way: 0 if way == "update by clock" else 100
        for name in ("save", "update", "delete", "pin")
        for way in (name, f"{name} by clock")
    }
    assert set(Shelf.objects.values_list("stock", flat=True)) == {1}


@pytest.mark.slow
def test_nobody_takes_a_pinned_lock_over_before_the_commit(processes: Processes) -> None:
    shelf = Shelf.objects.create(stock=0)
    lock = Lock(f"shelf:{shelf.pk}", ttl=30)
    worker = processes.start("tests.fencing_workers:save_pinned", pk=shelf.pk, ttl=2)
    assert worker.read() == "pinned"
    worker.pause()

    with pytest.raises(LockTimeout):
        lock.acquire(wait=3)
    assert row(shelf)[0] == 0
    worker.resume()
    worker.tell("commit")

    with lock.acquire(wait=30):
        assert row(shelf)[0] == 1
    worker.wait(30)  # it may have been told that we took the lock right after its commit
