"""A stale save is refused, in every way in which Django writes a row."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
from django.core import serializers
from django.core.exceptions import ObjectDoesNotExist
from django.db import (
    DatabaseError,
    IntegrityError,
    NotSupportedError,
    OperationalError,
    connection,
    models,
    transaction,
)
from django.db.models import F, ProtectedError
from django.test import TestCase
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from distlock_app.errors import StaleObjectError
from distlock_app.etags import etag_of
from distlock_app.forms import VERSION, VersionedModelForm
from distlock_app.signals import version_conflict
from tests.app.guarded_models import Shelf, Vault
from tests.app.versioned_models import (
    Account,
    Article,
    Box,
    Country,
    Document,
    GuardedNamed,
    Named,
    Page,
    ProxyAccount,
    Remark,
    SavingsAccount,
    Seat,
    Shelved,
    Ticket,
)

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "locks"])


@pytest.fixture
def account() -> Account:
    return Account.objects.create(owner="Ann", balance=100)


def other_saves(obj: Any, **values: Any) -> int:
    """Let somebody else save the row; return the new version."""
    other = type(obj)._base_manager.get(pk=obj.pk)
    for name, value in values.items():
        setattr(other, name, value)
    other.save()
    return int(getattr(other, other._version_field.attname))


def version_of(obj: Any) -> int:
    name = obj._version_field.attname
    return int(type(obj)._base_manager.values_list(name, flat=True).get(pk=obj.pk))


def use_base_manager(monkeypatch: Any, model: Any, change: Callable[[Any], Any]) -> None:
    """Let the base manager begin with changed querysets, as one of `Meta.base_manager_name`."""
    default = model._meta.base_manager

    class Changed(type(default)):  # type: ignore[misc]
        def get_queryset(self) -> Any:
            return change(super().get_queryset())

    manager = Changed()
    manager.name, manager.model, manager.auto_created = "_base_manager", model, True
    monkeypatch.setattr(model._meta, "base_manager", manager)


def elsewhere(write: Callable[[], Any]) -> None:
    """Let another connection write."""

    def run() -> None:
        try:
            write()
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)


@contextmanager
def repeatable_read() -> Iterator[None]:
    """A transaction whose reads keep to the snapshot of the first one."""
    with transaction.atomic():
        if connection.vendor != "sqlite":
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        yield


class AccountForm(VersionedModelForm):
    class Meta:
        model = Account
        fields = ["balance"]


def test_positional_values_are_those_of_the_models_own_fields() -> None:
    account, article = Account(None, "Ann", 7), Article(None, "text", True)
    shelf, vault = Shelf(None, "new", 5), Vault(None, 6)

    assert (account.owner, account.balance, account.version) == ("Ann", 7, None)
    assert (article.text, article.hidden, article.revision) == ("text", True, None)
    assert (shelf.name, shelf.stock, shelf.fence) == ("new", 5, 0)
    assert (vault.stock, vault.fence, vault.version) == (6, 0, None)
    for obj in (account, article, shelf, vault):
        obj.save()
        assert type(obj)._base_manager.get() == obj


def test_add_and_set_of_a_related_manager_move_the_version_in_memory(account: Account) -> None:
    first, second = Account.objects.create(), Account.objects.create()
    stale = Account.objects.get(pk=first.pk)

    account.children.add(first, first)
    account.children.set([first, second])
    for obj in (first, second):
        assert obj.version == version_of(obj) == 2
        obj.save()
        assert obj.parent == Account.objects.get(pk=obj.pk).parent == account
    account.children.add(stale)
    with pytest.raises(StaleObjectError):
        stale.save()
    account.children.add(new := Account(), bulk=False)
    assert (new.parent, new.version) == (account, version_of(new))
    with pytest.raises(TypeError, match="instance expected"):
        account.children.add("first")  # type: ignore[arg-type]
    with pytest.raises(Undone), transaction.atomic():
        with pytest.raises(ValueError, match="saved"):
            account.children.add(Account())
        account.children.add(second)
        raise Undone
    assert second.version == version_of(second) == 3


@pytest.mark.parametrize("manager", ["remark_set", "remarks"])
def test_relations_of_a_proxy_and_generic_ones_move_the_version_too(manager: str) -> None:
    remark = Remark.objects.create()

    getattr(Shelved.objects.create(), manager).add(remark)
    remark.save()

    assert remark.version == version_of(remark) == 3


def test_a_removed_object_is_stale_since_django_leaves_its_foreign_key(account: Account) -> None:
    child = Account.objects.create(parent=account)

    account.children.remove(child)

    assert child.parent == account  # saved, it would undo the removal
    with pytest.raises(StaleObjectError):
        child.save()


def test_only_none_is_refused_as_django_refuses_it(account: Account) -> None:
    with pytest.raises(TypeError, match="None"):
        Account.objects.only(None)

    assert Account.objects.defer("owner").defer(None).get().get_deferred_fields() == set()


# save()


def test_a_new_object_is_inserted_with_version_1_by_one_query(
    django_assert_num_queries: Any,
) -> None:
    account = Account(owner="Ann")
    assert account.version is None

    with django_assert_num_queries(1):
        account.save()

    assert account.version == version_of(account) == 1


def test_a_save_is_one_update_that_moves_the_version_on(
    account: Account, django_assert_num_queries: Any
) -> None:
    account.balance = 50

    with django_assert_num_queries(1) as queries:
        account.save()

    assert queries[0]["sql"].startswith("UPDATE")
    assert account.version == version_of(account) == 2


def test_a_stale_save_is_refused_and_changes_nothing(account: Account) -> None:
    stale = Account.objects.get(pk=account.pk)
    other_saves(account, balance=70)
    stale.balance = 10

    with pytest.raises(StaleObjectError) as refusal:
        stale.save()

    assert (refusal.value.obj, refusal.value.expected, refusal.value.found) == (stale, 1, 2)
    assert "version 2, not 1" in str(refusal.value)
    assert stale.version == 1
    assert Account.objects.get(pk=account.pk).balance == 70


def test_a_row_that_was_deleted_meanwhile_is_not_inserted_again(account: Account) -> None:
    Account.objects.filter(pk=account.pk).delete()

    with pytest.raises(StaleObjectError) as refusal:
        account.save()

    assert refusal.value.found is None
    assert not Account.objects.exists()


def test_a_stale_save_in_a_transaction_locks_no_row(account: Account) -> None:
    stale = Account.objects.get(pk=account.pk)
    other_saves(account)

    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        with pytest.raises(StaleObjectError):
            stale.save()

    assert not any("FOR UPDATE" in query["sql"] for query in queries)


@pytest.mark.parametrize("options", [{"force_update": True}, {"update_fields": ["balance"]}])
def test_a_forced_update_of_a_stale_or_deleted_row_is_a_conflict(
    account: Account, options: dict[str, Any]
) -> None:
    stale = Account.objects.get(pk=account.pk)
    other_saves(account)

    with pytest.raises(StaleObjectError):
        stale.save(**options)
    Account.objects.all().delete()
    with pytest.raises(StaleObjectError):
        stale.save(**options)


def test_update_fields_always_include_the_version(account: Account) -> None:
    stale = Account.objects.get(pk=account.pk)
    account.seen = timezone.now()

    account.save(update_fields=["seen"])

    assert account.version == version_of(account) == 2
    with pytest.raises(StaleObjectError):
        stale.save(update_fields=["balance"])


def test_empty_update_fields_write_nothing(
    account: Account, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(0):
        account.save(update_fields=[])

    assert account.version == version_of(account) == 1


def test_receivers_of_post_save_see_the_new_version_and_may_save_again(account: Account) -> None:
    seen = []

    def receiver(instance: Account, update_fields: Any, **kwargs: Any) -> None:
        seen.append((instance.version, update_fields))
        if len(seen) == 1:
            instance.save(update_fields=["seen"])

    models.signals.post_save.connect(receiver, sender=Account)
    try:
        account.save()
    finally:
        models.signals.post_save.disconnect(receiver, sender=Account)

    assert seen == [(2, None), (3, frozenset({"seen"}))]
    assert version_of(account) == 3


def test_a_save_that_fails_leaves_the_version_in_memory(account: Account) -> None:
    taken = Country.objects.create(code="kr", name="Korea")
    country = Country.objects.create(code="de", name="Germany")
    country.name = taken.name
    new = Country(code="fr", name=taken.name)

    for obj in (country, new):
        with pytest.raises(IntegrityError):
            obj.save()

    assert country.version == 1
    assert new.version is None


def test_select_on_save_and_another_name_of_the_version_are_guarded() -> None:
    article = Article.objects.create(text="one")
    stale = Article.objects.get(pk=article.pk)
    article.save()
    assert article.revision == version_of(article) == 2

    with pytest.raises(StaleObjectError):
        stale.save()


def test_select_on_save_does_not_hide_a_conflict_in_an_old_snapshot() -> None:
    """Whether the row is still there is asked of the snapshot, where nothing has changed."""
    article = Article.objects.create(text="one")

    # PostgreSQL and SQLite end a transaction that would write on an old snapshot.
    with suppress(OperationalError), repeatable_read():
        mine = Article.objects.get()
        elsewhere(lambda: other_saves(article, text="theirs"))
        mine.text = "mine"
        with pytest.raises(StaleObjectError):
            mine.save()

    assert Article.objects.get().text == "theirs"


def test_select_on_save_of_what_was_never_read_writes_in_an_old_snapshot() -> None:
    article = Article.objects.create(text="one")

    with suppress(OperationalError), repeatable_read():
        Article.objects.get()
        elsewhere(lambda: other_saves(article, text="theirs"))
        mine = Article(pk=article.pk, text="mine")
        mine.save()

        assert Article.objects.get().text == "mine"
        assert mine.revision == version_of(article) == 3


# New objects whose key is known


def test_an_object_with_a_key_of_its_own_is_inserted(django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(1):
        document = Document.objects.create(title="one")  # a default makes the key
    with django_assert_num_queries(1):
        Country(code="kr", name="Korea").save(force_insert=True)
    with django_assert_num_queries(2):  # Django looks for the row first, too
        country = Country(code="de", name="Germany")
        country.save()

    assert document.version == country.version == 1
    with pytest.raises(IntegrityError):
        Country(code="kr", name="Corea").save(force_insert=True)


def test_an_object_that_was_never_read_overwrites_the_row_and_moves_its_version_on() -> None:
    Country.objects.create(code="kr", name="Korea")
    reader = Country.objects.get(code="kr")
    country = Country(code="kr", name="Republic of Korea")

    country.save()

    assert country.version == version_of(country) == 2
    with pytest.raises(StaleObjectError):
        reader.save()
    country.save()


def test_a_row_that_the_database_does_not_let_be_updated_ends_an_unread_save() -> None:
    if connection.vendor != "sqlite":
        pytest.skip("stands for triggers and row security on other databases")
    Country.objects.create(code="KR", name="Korea")
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TRIGGER kept BEFORE UPDATE ON testapp_country BEGIN SELECT RAISE(IGNORE); END"
        )
        try:
            with pytest.raises(IntegrityError):  # as in Django, which then inserts
                Country(code="KR", name="South Korea").save()
        finally:
            cursor.execute("DROP TRIGGER kept")


def test_an_object_built_from_a_key_and_a_version_is_guarded(account: Account) -> None:
    other_saves(account)

    with pytest.raises(StaleObjectError):
        Account(pk=account.pk, version=1, owner="Bob").save()
    Account(pk=account.pk, version=2, owner="Bob").save()

    assert Account.objects.get().owner == "Bob"


def test_a_forced_update_of_a_row_that_never_was_fails_as_in_django() -> None:
    with pytest.raises(DatabaseError, match="Forced update did not affect any rows"):
        Account(pk=12345).save(force_update=True)


def test_a_copy_begins_at_version_1(account: Account) -> None:
    other_saves(account)
    account.refresh_from_db()
    account.pk = None
    account._state.adding = True
    country = Country.objects.create(code="kr", name="Korea")
    other_saves(country)
    country.refresh_from_db()
    country.code, country.name, country._state.adding = "de", "Germany", True

    account.save()
    country.save()

    assert account.version == version_of(account) == 1
    assert country.version == version_of(country) == 1


def test_a_key_that_was_changed_is_refused_unless_its_row_has_the_same_version() -> None:
    for code, name in (("kr", "Korea"), ("de", "Germany")):
        Country.objects.create(code=code, name=name)
    country = Country.objects.get(code="kr")

    country.code, country.name = "fr", "France"
    with pytest.raises(StaleObjectError):
        country.save()
    other_saves(Country.objects.get(code="de"))
    country.code = "de"
    with pytest.raises(StaleObjectError):
        country.save()
    country.version = 2
    country.save()

    names = dict(Country.objects.values_list("code", "name"))
    assert names == {"de": "France", "kr": "Korea"}


def test_a_copy_whose_key_is_made_in_python_is_inserted() -> None:
    ticket = Ticket.objects.create()
    ticket.save()
    ticket.pk = None

    ticket.save()

    assert sorted(Ticket.objects.values_list("version", flat=True)) == [1, 2]


def test_a_copy_to_another_database_is_new_there(account: Account) -> None:
    for _ in range(2):
        account.save(using="default")
        account.save(using="locks")

    assert Account.objects.using("locks").get().balance == 100
    assert account.version == Account.objects.using("locks").get().version
    account.delete(using="default")
    assert not Account.objects.using("default").exists()
    assert Account.objects.using("locks").exists()


def test_an_object_read_from_a_replica_is_guarded(account: Account, settings: Any) -> None:
    replica = Account.objects.get(pk=account.pk)
    replica._state.db = "locks"
    settings.DATABASE_ROUTERS = ["tests.test_optimistic.WritesToDefault"]
    other_saves(account, balance=1)

    with pytest.raises(StaleObjectError):
        replica.save()


class WritesToDefault:
    """A router for one primary and its replicas."""

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"


class ReadsFromAReplica(WritesToDefault):
    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "locks"


def test_a_field_loaded_later_is_not_read_from_a_replica_that_lags(
    account: Account, settings: Any
) -> None:
    account.save(using="locks")  # the replica, with a balance of 100
    deferred = Account.objects.using("default").defer("balance").get(pk=account.pk)
    settings.DATABASE_ROUTERS = [ReadsFromAReplica()]
    deferred.owner = "Bob"
    deferred.save(update_fields=["owner"])
    other = Account.objects.using("default").get(pk=account.pk)
    other.balance = F("balance") - 10
    other.save()
    assert other.balance == 90
    other.save()

    assert Account.objects.using("default").get().balance == 90
    assert deferred.balance == 90
    with pytest.raises(StaleObjectError):
        deferred.save()


def test_get_or_create_and_update_or_create_behave_as_in_django(account: Account) -> None:
    same, created = Account.objects.get_or_create(owner="Ann")
    assert (same.version, created) == (1, False)

    updated, created = Account.objects.update_or_create(owner="Ann", defaults={"balance": 5})
    assert (updated.version, updated.balance, created) == (2, 5, False)
    new, created = Account.objects.update_or_create(owner="Bob", defaults={"balance": 7})
    assert (new.version, created) == (1, True)

    with pytest.raises(StaleObjectError):
        account.save()


# Deferred and refreshed fields


def test_only_and_defer_always_read_the_version(
    account: Account, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(3):
        some = Account.objects.only("balance").get()
        most = Account.objects.defer("version", "owner").get()
        none = Account.objects.only("balance").defer("version").get()
        assert some.version == most.version == none.version == 1
    other_saves(account)

    for stale in (some, most, none):
        with pytest.raises(StaleObjectError):
            stale.save()


@pytest.mark.skipif(not hasattr(models, "FETCH_PEERS"), reason="since Django 6.1")
def test_a_look_at_a_missing_version_leaves_other_fields_to_be_fetched_together(
    account: Account, django_assert_num_queries: Any
) -> None:
    for _ in range(2):
        Account.objects.create(parent=Account.objects.create())
    children = Account.objects.exclude(parent=None).select_related("parent")
    parents: list[Any] = [
        child.parent for child in children.only("parent__balance").fetch_mode(models.FETCH_PEERS)
    ]

    with django_assert_num_queries(2):
        assert parents[0].version == 1
        assert [parent.owner for parent in parents] == ["", ""]


def test_a_row_read_without_its_version_is_neither_saved_nor_given_a_tag(account: Account) -> None:
    child = Account.objects.create(parent=account)
    raw = Account.objects.raw("SELECT id, balance FROM testapp_account WHERE owner = 'Ann'")[0]
    children = Account.objects.select_related("parent").only("parent__balance")
    related: Any = children.get(pk=child.pk).parent
    if hasattr(models, "FETCH_PEERS"):  # Django 6.1
        related = children.fetch_mode(models.FETCH_PEERS).get(pk=child.pk).parent

    for obj in (raw, related):
        assert obj.version == version_of(obj)  # to be looked at: it says nothing of the fields
        with transaction.atomic():
            for write in (obj.save, obj.delete):
                with pytest.raises(StaleObjectError, match="read without its version"):
                    write()
            # What would go out under a version that is read now may be older than that.
            for show in (etag_of, lambda one: AccountForm(instance=one)):
                with pytest.raises(StaleObjectError, match="read without its version"):
                    show(obj)
            obj.refresh_from_db()
            obj.save()
            assert etag_of(obj) == f'"{obj.version}"'
            assert AccountForm(instance=obj)[VERSION].value()


def test_refreshing_some_fields_does_not_hide_a_conflict(account: Account) -> None:
    article = Article.objects.create(text="one")
    for obj, fields in ((account, {"balance": 70}), (article, {"text": "two"})):
        other_saves(obj, **fields)

        obj.refresh_from_db(fields=list(fields))

        with pytest.raises(StaleObjectError):
            obj.save()


@pytest.mark.parametrize(
    "rows", [Account.objects.only("owner"), Account.objects.defer("balance")], ids=["only", "defer"]
)
def test_refreshing_from_a_queryset_without_all_fields_does_not_hide_a_conflict(
    account: Account, rows: Any
) -> None:
    other_saves(account, balance=70)

    account.refresh_from_db(from_queryset=rows)

    with pytest.raises(StaleObjectError):
        account.save()


def test_a_base_manager_that_defers_a_field_does_not_hide_a_conflict(
    account: Account, monkeypatch: Any
) -> None:
    other_saves(account, balance=70)
    use_base_manager(monkeypatch, Account, lambda rows: rows.defer("balance"))

    account.refresh_from_db()

    with pytest.raises(StaleObjectError):
        account.save()
    account.save_retrying(lambda obj: setattr(obj, "owner", "Bob"))
    assert (account.balance, account.owner) == (70, "Bob")


def test_refreshing_from_a_queryset_with_all_fields_of_the_object_takes_the_version(
    account: Account,
) -> None:
    partly = Account.objects.defer("balance").get()
    parents = Account.objects.select_related("parent").defer("parent__owner")
    for obj, rows in (
        (account, Account.objects),
        (account, parents),
        (partly, Account.objects.defer("balance")),
        (partly, Account.objects.only("owner")),
    ):
        version = other_saves(obj, seen=timezone.now())

        obj.refresh_from_db(from_queryset=rows)

        assert obj.version == version
        obj.save()


def test_a_deferred_field_loaded_late_does_not_hide_a_conflict(account: Account) -> None:
    late = Account.objects.defer("balance").get()
    other_saves(account, balance=70)

    assert late.balance == 70

    with pytest.raises(StaleObjectError):
        late.save()


def test_refreshing_all_or_the_version_by_its_name_takes_it(account: Account) -> None:
    mine_wins = Account.objects.get(pk=account.pk)
    other_saves(account, balance=70)

    account.refresh_from_db()
    mine_wins.refresh_from_db(fields=["version"])

    assert account.version == mine_wins.version == 2
    mine_wins.save()
    assert Account.objects.get().balance == 100


def test_a_refresh_of_a_deleted_row_leaves_the_version(account: Account) -> None:
    Account.objects.all().delete()

    with pytest.raises(ObjectDoesNotExist):
        account.refresh_from_db()

    assert account.version == 1


# Expressions, generated fields, keys, inheritance


def test_an_expression_is_not_applied_twice(account: Account) -> None:
    account.balance = F("balance") + 10
    account.save()
    account.save()
    assert account.balance == 110

    account.balance = F("balance") + 10
    account.save(update_fields=["owner"])
    account.save(update_fields=["balance"])
    account.save()
    account.refresh_from_db()
    assert account.balance == 120


def test_an_expression_in_a_new_object_is_not_kept() -> None:
    account = Account(owner=models.Value("Ann"))
    account.save()

    assert account.owner == "Ann"
    account.save()
    assert account.version == version_of(account) == 2


def test_generated_fields_and_composite_keys_are_guarded() -> None:
    box = Box.objects.create(side=2)
    box.side = 3
    box.save()
    box.refresh_from_db()
    assert (box.area, box.version) == (9, 2)

    seat = Seat.objects.create(row="A", number=1)
    stale = Seat.objects.get(pk=("A", 1))
    seat.guest = "Ann"
    seat.save()
    with pytest.raises(StaleObjectError):
        stale.save()
    with pytest.raises(StaleObjectError):
        stale.delete()
    assert Seat.objects.retrying(("A", 1), lambda s: setattr(s, "guest", "Bob")).version == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.annotate(number=models.Count("children")),
        lambda rows: rows.filter(parent__owner=""),
    ],
    ids=["annotate", "filter"],
)
def test_a_base_manager_that_joins_another_table_leaves_the_guard_in_the_update(
    account: Account, monkeypatch: Any, change: Callable[[Any], Any]
) -> None:
    account.parent = Account.objects.create()
    account.save()
    stale = Account.objects.get(pk=account.pk)
    use_base_manager(monkeypatch, Account, change)

    with CaptureQueriesContext(connection) as save:
        account.save()
    with CaptureQueriesContext(connection) as unread:
        Account(pk=account.pk, parent_id=account.parent_id).save()
    for refused in (stale.save, stale.delete):
        with pytest.raises(StaleObjectError, match="has version 4, not 2"):
            refused()
    stale.refresh_from_db()
    with CaptureQueriesContext(connection) as delete:
        stale.delete()

    assert len(save) == 1
    for queries, version in (save, 2), (unread, 3), (delete, 4):
        update = next(q["sql"] for q in queries if q["sql"].startswith("UPDATE"))
        assert "SELECT" not in update and re.search(rf"version\W* = {version}\b", update)


def test_a_base_manager_of_combined_querysets_leaves_the_guard_in_force(
    account: Account, monkeypatch: Any
) -> None:
    stale = Account.objects.get(pk=account.pk)
    use_base_manager(
        monkeypatch, Account, lambda rows: rows.filter(owner="Ann") | rows.filter(balance=0)
    )
    account.save()

    for refused in (stale.save, stale.delete):
        with pytest.raises(StaleObjectError, match="has version 2, not 1"):
            refused()


def test_a_base_manager_that_joins_another_table_leaves_the_fence_in_the_update(
    monkeypatch: Any,
) -> None:
    shelf = Shelf.objects.create()
    use_base_manager(monkeypatch, Shelf, lambda rows: rows.annotate(n=models.Count("coldshelf")))

    with CaptureQueriesContext(connection) as save:
        shelf.save(fence=5)

    assert len(save) == 1
    assert "SELECT" not in save[0]["sql"] and re.search(r"fence\W* <= 5\b", save[0]["sql"])


def test_a_proxy_shares_the_version_of_its_model(account: Account) -> None:
    proxy = ProxyAccount.objects.get(pk=account.pk)
    account.save()

    with pytest.raises(StaleObjectError):
        proxy.save()
    assert ProxyAccount.objects.retrying(proxy.pk, lambda a: None).version == 3


def test_a_change_of_the_childs_table_alone_moves_the_version_of_the_parent(
    django_assert_num_queries: Any,
) -> None:
    savings = SavingsAccount.objects.create(rate=1)
    stale = SavingsAccount.objects.get(pk=savings.pk)
    as_parent = Account.objects.get(pk=savings.pk)
    savings.rate = 2

    savings.save(update_fields=["rate"])

    assert savings.version == version_of(savings) == 2
    for obj in (stale, as_parent):
        with pytest.raises(StaleObjectError):
            obj.save()
    SavingsAccount.objects.update(rate=3)
    assert version_of(savings) == 3


def test_a_conflict_in_the_childs_table_undoes_the_write_to_the_parents() -> None:
    guarded = GuardedNamed.objects.create(name="one")
    stale = GuardedNamed.objects.get(pk=guarded.pk)
    other_saves(guarded)
    stale.name = "two"

    with pytest.raises(StaleObjectError):
        stale.save()

    assert Named.objects.get().name == "one"
    # In the caller's transaction only a rollback can undo it.
    with transaction.atomic():
        with pytest.raises(StaleObjectError):
            stale.save()
        assert connection.needs_rollback
    assert Named.objects.get().name == "one"


# Queries that write


def test_update_moves_the_version_on(account: Account, django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(1):
        assert Account.objects.filter(owner="Ann").update(balance=1) == 1

    assert version_of(account) == 2
    with pytest.raises(StaleObjectError):
        account.save()
    assert Account.objects.update() == 0


def test_related_managers_and_set_null_move_the_version_on(account: Account) -> None:
    child = Account.objects.create(owner="Bob")

    account.children.add(child)
    assert version_of(child) == 2
    account.children.update(balance=1)
    assert version_of(child) == 3
    account.children.clear()
    assert version_of(child) == 4
    account.children.add(child)
    Account.objects.filter(pk=account.pk).delete()
    assert version_of(child) == 6


def test_set_default_moves_no_version(account: Account, monkeypatch: Any) -> None:
    """Django has no queryset for it, only the keys of the rows."""
    parent = Account._meta.get_field("parent").remote_field
    child = Account.objects.create(parent=account)
    monkeypatch.setattr(parent, "on_delete", models.SET_DEFAULT)

    account.delete()

    assert Account.objects.get().parent is None
    assert version_of(child) == 1


def test_bulk_update_is_guarded_and_moves_the_version_on(account: Account) -> None:
    other = Account.objects.create(owner="Bob")
    account.balance, other.balance = 1, F("balance") + 2

    assert Account.objects.bulk_update([account, other], ["balance"], batch_size=1) == 2

    assert account.version == version_of(account) == 2
    other.save()
    assert (other.balance, other.version) == (2, 3)


@pytest.mark.parametrize("gone", [False, True])
def test_bulk_update_with_one_stale_object_writes_none(account: Account, gone: bool) -> None:
    stale = Account.objects.create(owner="Bob")
    if gone:
        Account.objects.filter(owner="Bob").delete()
    else:
        other_saves(stale, balance=7)
    account.balance = stale.balance = 1

    with transaction.atomic():
        with pytest.raises(StaleObjectError) as refusal:
            Account.objects.bulk_update([account, stale], ["balance"])
        assert Account.objects.get(owner="Ann").balance == 100

    assert (refusal.value.obj, refusal.value.found) == (stale, None if gone else 2)
    assert (account.version, stale.version) == (1, 1)
    account.save()


def test_bulk_update_of_all_fields_moves_the_version_on(account: Account) -> None:
    fields = [f.name for f in Account._meta.concrete_fields if not f.primary_key]
    account.balance = 1

    assert Account.objects.bulk_update([account], fields) == 1

    account.refresh_from_db()
    assert (account.balance, account.version) == (1, 2)


@pytest.mark.parametrize("model", [Account, Page])
def test_bulk_update_leaves_rows_that_its_queryset_leaves_out(model: Any) -> None:
    name = "owner" if model is Account else "text"
    inside, outside = (model.objects.create(**{name: text}) for text in ("in", "out"))
    version = outside._version_field.attname
    for obj in (inside, outside):
        setattr(obj, name, models.Value("new"))

    assert model.objects.filter(**{name: "in"}).bulk_update([inside, outside], [name]) == 1

    assert sorted(model.objects.values_list(name, flat=True)) == ["new", "out"]
    for obj in (inside, outside):
        assert getattr(obj, version) == model.objects.values_list(version, flat=True).get(pk=obj.pk)
        obj.save()  # what was left out is saved now
    assert list(model.objects.values_list(name, flat=True)) == ["new", "new"]


def test_bulk_update_leaves_out_a_row_that_is_newer_than_the_snapshot(account: Account) -> None:
    # PostgreSQL and SQLite end a transaction that would write on an old snapshot.
    with suppress(OperationalError), repeatable_read():
        Account.objects.get()
        elsewhere(lambda: other_saves(account, balance=7))
        account = Account.objects.select_for_update().get()

        assert Account.objects.filter(owner="Bob").bulk_update([account], ["balance"]) == 0

        assert account.version == 2


def test_bulk_update_of_a_queryset_is_guarded(account: Account) -> None:
    other_saves(account, balance=7)

    for owner in ("Ann", "Bob"):
        account.balance = 1
        rows = Account.objects.filter(owner=owner)
        if owner == "Ann":
            with pytest.raises(StaleObjectError):
                rows.bulk_update([account], ["balance"])
        else:
            assert rows.bulk_update([account], ["balance"]) == 0
        with pytest.raises(StaleObjectError):
            account.save()

    assert Account.objects.get().balance == 7


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
def test_bulk_update_is_guarded_where_objects_are_read_from_a_replica(
    account: Account, settings: Any
) -> None:
    other_saves(account, balance=7)
    account.balance = 1
    settings.DATABASE_ROUTERS = [ReadsFromAReplica()]

    with pytest.raises(StaleObjectError):
        Account.objects.bulk_update([account], ["balance"])

    assert Account.objects.using("default").get().balance == 7


def test_keys_in_memory_may_be_of_another_type_than_those_of_the_database(
    account: Account,
) -> None:
    document, savings = Document.objects.create(), SavingsAccount.objects.create()
    Seat.objects.create(row="A", number=1)
    objects: list[tuple[Any, list[str]]] = [
        (Account(pk=str(account.pk), version=1), ["balance"]),
        (SavingsAccount(pk=str(savings.pk), id=str(savings.pk), version=1), ["rate"]),
        (Document(pk=document.pk.hex, version=1), ["title"]),
        (Seat(row="A", number="1", version=1), ["guest"]),
    ]
    for obj, fields in objects:
        for rows in (type(obj).objects, type(obj).objects.exclude(version=0)):
            rows.bulk_update([obj], fields)
        assert obj.version == 3
        stale = copy.copy(obj)
        stale.version = 1
        with pytest.raises(StaleObjectError):
            type(obj).objects.bulk_update([stale], fields)

    child: Any = Account.objects.get(pk=account.pk)
    child.pk = str(child.pk)
    Account.objects.create().children.add(child)
    assert child.version == version_of(account) == 4


def test_bulk_update_takes_an_object_that_it_is_given_twice_once(account: Account) -> None:
    same = Account.objects.get()
    account.balance, same.balance = 1, 2

    assert Account.objects.bulk_update([account, account], ["balance"], batch_size=1) == 1

    assert account.version == version_of(account) == 2
    same.version = 2
    Account.objects.bulk_update([account, same], ["balance"])
    assert Account.objects.get().balance == 1
    with pytest.raises(StaleObjectError):  # Django took the first of the two
        same.save()
    account.save()


def test_bulk_create_inserts_version_1_and_its_objects_can_be_saved() -> None:
    documents = Document.objects.bulk_create([Document(title="one"), Document(title="two")])
    documents[0].save()

    assert [d.version for d in documents] == [2, 1]
    assert set(Document.objects.values_list("version", flat=True)) == {1, 2}


def test_a_bulk_create_that_fails_leaves_the_versions() -> None:
    countries = [Country(code="kr", name="Korea"), Country(code="ko", name="Korea")]

    with pytest.raises(IntegrityError):
        Country.objects.bulk_create(iter(countries))

    assert [country.version for country in countries] == [None, None]


def test_bulk_create_that_may_meet_rows_of_others_claims_none_of_them() -> None:
    Country.objects.create(code="kr", name="Korea")
    mine = Country(code="kr", name="Corea")

    Country.objects.bulk_create([mine], ignore_conflicts=True)

    with pytest.raises(StaleObjectError):
        mine.save()
    with pytest.raises(NotSupportedError, match="without incrementing"):
        Country.objects.bulk_create(
            [mine], update_conflicts=True, update_fields=["name"], unique_fields=["code"]
        )


def test_a_row_that_the_models_manager_hides_can_be_saved() -> None:
    article = Article.objects.create(hidden=True)
    assert not Article.objects.exists()

    article.save()

    assert article.revision == version_of(article) == 2


# delete()


def test_a_stale_delete_is_refused(account: Account) -> None:
    stale = Account.objects.get(pk=account.pk)
    other_saves(account, balance=1)

    with transaction.atomic():
        with pytest.raises(StaleObjectError) as refusal:
            stale.delete()
        assert Account.objects.count() == 1  # the transaction goes on

    assert refusal.value.found == 2
    assert stale.pk == account.pk and stale.version == 1


def test_a_fresh_delete_and_one_of_a_row_that_is_gone_work_as_in_django(account: Account) -> None:
    same = Account.objects.get(pk=account.pk)
    pk = account.pk

    assert account.delete() == (1, {"testapp.Account": 1})
    assert same.delete()[0] == 0

    assert account.pk is None and account.version is None
    account.pk = pk
    account.save()
    assert account.version == version_of(account) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_receiver_of_pre_delete_may_save_the_object(account: Account, fails: bool) -> None:
    def close(instance: Account, **kwargs: Any) -> None:
        instance.owner = "closed"
        instance.save()
        if fails:
            raise ProtectedError("no", set())

    models.signals.pre_delete.connect(close, sender=Account)
    try:
        with pytest.raises(ProtectedError) if fails else nullcontext():
            account.delete()
    finally:
        models.signals.pre_delete.disconnect(close, sender=Account)

    if fails:
        assert account.version == version_of(account) == 1
    else:
        assert account.version is None and not Account.objects.exists()


def test_a_delete_that_fails_leaves_row_and_version(account: Account) -> None:
    def protect(**kwargs: Any) -> None:
        raise ProtectedError("no", set())

    models.signals.pre_delete.connect(protect, sender=Account)
    try:
        with transaction.atomic(), pytest.raises(ProtectedError):
            account.delete()
    finally:
        models.signals.pre_delete.disconnect(protect, sender=Account)

    assert account.version == version_of(account) == 1


def test_a_query_that_deletes_and_raw_sql_ask_for_no_version(account: Account) -> None:
    stale = Account.objects.filter(balance=100)
    other_saves(account, owner="Bob")
    with connection.cursor() as cursor:
        cursor.execute("UPDATE testapp_account SET balance = 100")
    assert version_of(account) == 2

    stale.delete()

    assert not Account.objects.exists()


# Fixtures, pickles, copies


def test_a_fixture_keeps_its_version_and_gets_one_if_it_has_none(account: Account) -> None:
    other_saves(account)
    account.refresh_from_db()
    fixture = serializers.serialize("json", [account])
    Account.objects.all().delete()

    for _ in range(2):  # insert, then overwrite
        for loaded in serializers.deserialize("json", fixture):
            loaded.save()
        assert version_of(account) == 2

    fixture = fixture.replace(', "version": 2', "")
    for loaded in serializers.deserialize("json", fixture):
        loaded.save()
    assert version_of(account) == 3
    Account.objects.all().delete()
    for loaded in serializers.deserialize("json", fixture):
        loaded.save()
    assert version_of(account) == 1


def test_a_fixture_of_an_earlier_version_brings_no_version_back(account: Account) -> None:
    fixture = serializers.serialize("json", [account])
    other_saves(account)
    stale = Account.objects.get()

    for loaded in serializers.deserialize("json", fixture):
        loaded.save()
    other_saves(account)

    with pytest.raises(StaleObjectError):
        stale.save()


def test_a_pickled_or_copied_object_keeps_its_guard(account: Account) -> None:
    pickled = pickle.loads(pickle.dumps(account))
    copied = copy.copy(account)
    other_saves(account)

    for stale in (pickled, copied):
        with pytest.raises(StaleObjectError) as refusal:
            stale.save()
        pickle.loads(pickle.dumps(refusal.value))


# Transactions


def test_a_conflict_does_not_break_the_callers_transaction(account: Account) -> None:
    savings = SavingsAccount.objects.create(rate=1)
    for obj in (account, savings):
        stale = type(obj).objects.get(pk=obj.pk)
        other_saves(obj)

        with transaction.atomic():
            with pytest.raises(StaleObjectError):
                stale.save()
            stale.refresh_from_db()
            stale.save()

        assert version_of(obj) == 3


def test_another_error_breaks_the_callers_transaction_as_in_django() -> None:
    Country.objects.create(code="kr", name="Korea")

    with transaction.atomic():
        with pytest.raises(IntegrityError):
            Country(code="de", name="Korea").save(force_insert=True)
        assert connection.needs_rollback


@pytest.mark.parametrize("how", ["before", "receiver"])
def test_a_conflict_does_not_mend_a_transaction_that_something_else_broke(how: str) -> None:
    def fail(**kwargs: Any) -> None:
        with suppress(IntegrityError):
            Country.objects.create(code="kr", name="again")

    Country.objects.create(code="kr", name="Korea")
    stale = Account.objects.create(owner="Ann")
    other_saves(stale)
    if how == "receiver":
        version_conflict.connect(fail)
    try:
        with pytest.raises(Undone), transaction.atomic():
            Account.objects.create(owner="Bob")
            if how == "before":
                fail()
                stale = Account(pk=stale.pk)
                del stale.__dict__["version"]
                stale._state.adding = False
            with pytest.raises(StaleObjectError):
                stale.save()
            assert connection.needs_rollback
            raise Undone
    finally:
        version_conflict.disconnect(fail)


def test_a_conflict_in_a_receiver_does_not_mend_a_transaction_that_it_broke(
    account: Account,
) -> None:
    def receiver(instance: Account, **kwargs: Any) -> None:
        if not instance.owner:
            return
        with transaction.atomic(savepoint=False):
            Account.objects.create(owner="")
            stale.save()

    stale = Account.objects.get(pk=account.pk)
    models.signals.post_save.connect(receiver, sender=Account)
    try:
        with transaction.atomic():
            with pytest.raises(StaleObjectError):
                account.save()
            assert connection.needs_rollback
    finally:
        models.signals.post_save.disconnect(receiver, sender=Account)

    assert Account.objects.count() == 1


class Undone(Exception):
    """Rolls a block back."""


def rolled_back() -> Iterator[None]:
    with pytest.raises(Undone):
        with transaction.atomic():
            yield
            raise Undone


@pytest.fixture
def undone() -> Callable[[], Any]:
    return contextmanager(rolled_back)


def test_a_rollback_puts_the_version_back(account: Account, undone: Any) -> None:
    with undone():
        account.save()
        account.save()
        assert account.version == 3

    assert account.version == version_of(account) == 1
    account.save()


@pytest.mark.parametrize(
    "kept", [lambda obj: obj, copy.copy, copy.deepcopy, lambda obj: pickle.loads(pickle.dumps(obj))]
)
def test_an_object_of_a_rolled_back_block_does_not_overwrite_its_successor(
    account: Account, undone: Any, kept: Callable[[Account], Account]
) -> None:
    with undone():
        account.balance = 0
        account.save()
        obj = kept(account)
    other_saves(account, balance=70)  # version 2, which it had for a moment

    with pytest.raises(StaleObjectError):
        obj.save()


def test_what_was_read_from_a_replica_does_not_overwrite_the_successor_of_a_rolled_back_row(
    account: Account, undone: Any, settings: Any
) -> None:
    account._state.db = "locks"
    settings.DATABASE_ROUTERS = [WritesToDefault()]
    with undone():
        Account.objects.bulk_update([account], ["balance"])
    other_saves(Account.objects.using("default").get(pk=account.pk), balance=70)

    with pytest.raises(StaleObjectError):
        account.save()


def test_a_rolled_back_savepoint_puts_back_only_what_was_saved_in_it(
    account: Account, undone: Any
) -> None:
    with transaction.atomic():
        account.save()
        with undone():
            account.save()
        assert account.version == 2
        with transaction.atomic():
            account.save()
        assert account.version == 3

    assert account.version == version_of(account) == 3


def test_a_rolled_back_insert_can_be_saved_again(undone: Any) -> None:
    account, country = Account(owner="Ann"), Country(code="kr", name="Korea")
    documents = [Document(title="one")]
    with undone():
        account.save()
        country.save()
        Document.objects.bulk_create(documents)

    for obj in (account, country, *documents):
        assert obj.version is None
        obj.save()
        assert obj.version == version_of(obj) == 1


def test_a_rolled_back_delete_puts_the_version_back(account: Account, undone: Any) -> None:
    savings = SavingsAccount.objects.create(balance=100)
    pk = account.pk
    with undone():
        for obj in (account, savings):
            obj.delete()
            assert obj.version is None
    account.pk = pk
    for obj in (account, savings):
        assert obj.version == 1
        other_saves(Account.objects.get(pk=obj.id), balance=70)

        with pytest.raises(StaleObjectError):
            obj.save()

    assert set(Account.objects.values_list("balance", flat=True)) == {70}


def test_a_row_that_was_inserted_and_deleted_in_a_rolled_back_block_can_be_inserted(
    undone: Any,
) -> None:
    saved, deleted = SavingsAccount(), SavingsAccount()
    with undone():
        saved.save()
        deleted.save()
        with transaction.atomic():
            saved.save()
            deleted.delete()

    for obj in (saved, deleted):
        assert obj.version is None
        obj.save()
        assert obj.version == version_of(obj) == 1


def test_a_rolled_back_bulk_update_puts_the_versions_back(account: Account, undone: Any) -> None:
    with undone():
        Account.objects.bulk_update([account], ["balance"])
        assert account.version == 2

    assert account.version == 1


def test_a_savepoint_that_is_rolled_back_by_hand_puts_the_version_back(account: Account) -> None:
    with transaction.atomic():
        account.save()
        sid: Any = connection.savepoint()
        with transaction.atomic():
            account.save()
        later: Any = connection.savepoint()
        connection.savepoint_rollback(later)
        assert account.version == 3
        connection.savepoint_rollback(sid)
        assert account.version == version_of(account) == 2
        account.save()
        connection.savepoint_rollback(sid)

    assert account.version == version_of(account) == 2
    other_saves(account)  # version 3, which `account` had for a moment
    with pytest.raises(StaleObjectError):
        account.save()


MOVES: dict[str, Callable[[Account], Any]] = {
    "save": lambda account: Account.objects.get(pk=account.pk).save(),
    "update": lambda account: Account.objects.filter(pk=account.pk).update(balance=0),
    "update of the version": lambda account: Account.objects.update(balance=0, version=2),
    "bulk_update": lambda account: Account.objects.bulk_update([account], ["balance"]),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_version_that_was_read_in_a_rolled_back_transaction_saves_nothing(
    account: Account, undone: Any, move: Callable[[Account], Any]
) -> None:
    refreshed = Account.objects.get()
    with undone():
        move(account)
        mine = Account.objects.get()
        refreshed.refresh_from_db()
        assert mine.version == refreshed.version == 2
    account.refresh_from_db()
    other_saves(account, balance=70)  # version 2, which was read

    for obj in (mine, refreshed):
        with pytest.raises(StaleObjectError, match="rolled back"):
            obj.save()
        with pytest.raises(StaleObjectError):
            obj.delete()
        obj.refresh_from_db()
        obj.save()
    assert Account.objects.get().balance == 70


def test_a_field_that_was_loaded_in_a_rolled_back_transaction_is_not_saved(
    account: Account, undone: Any
) -> None:
    own = Account.objects.get(pk=account.pk)
    with undone():
        own.balance = F("balance") + 0
        own.save()
        assert own.balance == 100  # loaded, where it was not returned
    own.save()  # as other values of a rolled back save, it may be saved again
    deferred = Account.objects.defer("balance").get(pk=account.pk)
    with undone():
        own.balance = 0
        own.save()
        assert deferred.balance == 0

    with pytest.raises(StaleObjectError, match="rolled back"):
        deferred.save()


def test_a_key_of_another_type_does_not_hide_what_was_read_in_a_rolled_back_transaction(
    undone: Any,
) -> None:
    document = Document.objects.create()
    with undone():
        document.pk = document.pk.hex
        document.save()
        mine = Document.objects.get()
    other_saves(document, title="other")

    with pytest.raises(StaleObjectError):
        mine.save()


def test_what_was_read_before_or_of_other_rows_survives_a_rollback(
    account: Account, undone: Any
) -> None:
    second, third = Account.objects.create(), Account.objects.create()
    with transaction.atomic():
        third.save()
        with undone():
            early = Account.objects.get(pk=account.pk)
            account.save()
            other = Account.objects.get(pk=second.pk)
            outer = Account.objects.get(pk=third.pk)
        again = Account.objects.get(pk=account.pk)
        with undone():
            other.save()

    for obj in (early, other, outer):
        obj.save()
    with pytest.raises(StaleObjectError):
        again.save()
    again.refresh_from_db()
    again.save()


def test_what_locks_or_deletes_one_row_leaves_others_after_a_rollback(
    account: Account, undone: Any
) -> None:
    second = Account.objects.create()
    first_page, second_page = Page.objects.create(), Page.objects.create()
    with undone():
        Account.objects.retrying(second.pk, lambda obj: None, lock_from=1)
        second_page.delete()
        others = [Account.objects.get(pk=account.pk), Page.objects.get(pk=first_page.pk)]

    for other in others:
        other.save()


def test_a_callback_that_fails_after_the_commit_puts_no_version_back(account: Account) -> None:
    def fail() -> None:
        raise Undone

    with pytest.raises(Undone):
        with transaction.atomic():
            transaction.on_commit(fail)
            account.save()
            with transaction.atomic():
                transaction.on_commit(fail)
                account.save()

    assert account.version == version_of(account) == 3
    account.save()


def test_the_watch_for_a_rollback_neither_piles_up_nor_keeps_objects(account: Account) -> None:
    with transaction.atomic():
        for _ in range(50):
            Account.objects.get(pk=account.pk).save()
        assert len(connection.run_on_commit) == 1

    assert version_of(account) == 51


class OnCommitCallbacks(TestCase):
    def test_a_save_in_a_block_runs_no_callback_from_before_the_capture(self) -> None:
        account = Account.objects.create()
        calls: list[int] = []
        transaction.on_commit(lambda: calls.append(1))

        with self.captureOnCommitCallbacks(execute=True):
            with transaction.atomic():
                account.save()
                transaction.on_commit(lambda: calls.append(2))

        self.assertEqual(calls, [2])

    def test_saves_add_no_callback_to_those_that_a_test_case_counts(self) -> None:
        with self.captureOnCommitCallbacks() as callbacks:
            account = Account.objects.create()
            account.save()
            transaction.on_commit(list)

        self.assertEqual(len(callbacks), 1)


# Signal


def test_every_conflict_is_announced_and_a_receiver_that_raises_does_no_harm(
    account: Account,
) -> None:
    stale = Account.objects.get(pk=account.pk)
    other_saves(account)
    seen = []

    def receiver(sender: Any, **facts: Any) -> None:
        seen.append((sender, *(facts[k] for k in ("instance", "attempt", "expected", "found"))))
        raise ValueError("broken receiver")

    version_conflict.connect(receiver)
    try:
        with pytest.raises(StaleObjectError):
            stale.save()
    finally:
        version_conflict.disconnect(receiver)

    assert seen == [(Account, stale, 1, 1, 2)]


def test_a_receiver_of_a_conflict_may_refresh_and_save_the_object(account: Account) -> None:
    stale = Account.objects.get(pk=account.pk)
    other_saves(account, balance=200)

    def receiver(instance: Any, **facts: Any) -> None:
        instance.refresh_from_db()
        instance.owner = "conflict"
        instance.save()

    version_conflict.connect(receiver)
    try:
        with pytest.raises(StaleObjectError):
            stale.save()
        with pytest.raises(StaleObjectError):
            stale.save()
    finally:
        version_conflict.disconnect(receiver)

    account.refresh_from_db()
    assert (account.owner, account.balance) == ("conflict", 200)


# Threads of one process


def test_of_many_threads_with_the_same_version_one_saves(account: Account) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(8)

    def save() -> None:
        try:
            mine = Account.objects.get(pk=account.pk)
            barrier.wait(30)
            mine.save()
            outcomes.append("saved")
        except StaleObjectError:
            outcomes.append("refused")
        finally:
            connection.close()

    threads = [threading.Thread(target=save) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(outcomes) == ["refused"] * 7 + ["saved"]
