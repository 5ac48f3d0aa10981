"""Code that knows nothing of versions finds Django as it was.

What Django's own suites say of saving (basic, force_insert_update, update_only_fields,
get_or_create, select_for_update, defer, model_inheritance, m2m_through), said of versioned models.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import FieldError, ObjectDoesNotExist
from django.db import DatabaseError, IntegrityError, connection, connections, models, transaction
from django.db.models.signals import post_save, pre_save
from django.test.utils import CaptureQueriesContext
from django.utils.translation import gettext_lazy

from tests.app.versioned_models import (
    Account,
    Article,
    Box,
    Country,
    Document,
    GuardedNamed,
    Offer,
    ProxyAccount,
    SavingsAccount,
    Seat,
    Tag,
)

pytestmark = pytest.mark.django_db


@pytest.fixture
def ann() -> Account:
    return Account.objects.create(owner="Ann", balance=10)


@pytest.fixture
def saved() -> Any:
    """What receivers of pre_save and post_save were told."""
    told: list[Any] = []

    def receiver(signal: Any, instance: Any, update_fields: Any, **rest: Any) -> None:
        told.append((signal is post_save, update_fields, rest.get("created")))

    pre_save.connect(receiver)
    post_save.connect(receiver)
    yield told
    pre_save.disconnect(receiver)
    post_save.disconnect(receiver)


# basic


def test_an_object_has_no_key_until_it_is_saved() -> None:
    account = Account(owner="Ann")
    assert account.pk is None and account._state.adding

    account.save()

    assert account.pk is not None and not account._state.adding
    assert Account.objects.get() == account


@pytest.mark.parametrize("create", [Account, Account.objects.create])
def test_unknown_and_surplus_arguments_are_refused(create: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        create(nothing=1)


def test_values_may_be_given_by_position() -> None:
    make: Any = Account

    account = make(*[None] * len(Account._meta.concrete_fields))

    assert account.owner is None and account.pk is None


def test_a_lazy_text_is_saved_as_its_text() -> None:
    ann: Any = gettext_lazy("Ann")
    bob: Any = gettext_lazy("Bob")
    account = Account.objects.create(owner=ann)
    account.owner = bob
    account.save()

    assert Account.objects.get().owner == "Bob"


def test_equality_and_hash_are_those_of_the_key(ann: Account) -> None:
    assert Account.objects.get() == ann and hash(Account.objects.get()) == hash(ann)
    assert Account() != Account()
    with pytest.raises(TypeError, match="unhashable"):
        hash(Account())


def test_deleting_sets_the_key_to_none(ann: Account) -> None:
    assert ann.delete() == (1, {"testapp.Account": 1})

    assert ann.pk is None
    with pytest.raises(ObjectDoesNotExist):
        ann.refresh_from_db()


def test_deleting_what_was_never_saved_is_refused() -> None:
    with pytest.raises(ValueError, match="can't be deleted because"):
        Account().delete()


def test_a_deleted_object_can_be_saved_anew(ann: Account) -> None:
    ann.delete()

    ann.save()

    assert Account.objects.get().owner == "Ann"


def test_a_refresh_reads_what_is_there(ann: Account, django_assert_num_queries: Any) -> None:
    Account.objects.update(owner="Bob", balance=5)
    ann.balance = 7

    with django_assert_num_queries(1):
        ann.refresh_from_db(fields=["owner"])
    assert (ann.owner, ann.balance) == ("Bob", 7)
    with django_assert_num_queries(1):
        ann.refresh_from_db()
    assert (ann.owner, ann.balance) == ("Bob", 5)
    with django_assert_num_queries(0):
        ann.refresh_from_db(fields=[])


def test_a_refresh_forgets_related_objects(ann: Account) -> None:
    child = Account.objects.create(parent=ann)
    other = Account.objects.create(owner="Bob")
    assert child.parent == ann
    Account.objects.filter(pk=child.pk).update(parent=other)

    child.refresh_from_db()

    assert child.parent == other


def test_a_refresh_with_a_lookup_in_the_fields_is_refused(ann: Account) -> None:
    with pytest.raises(ValueError, match="Relations|relations|transforms"):
        ann.refresh_from_db(fields=["parent__owner"])


def test_a_refresh_may_name_the_rows_it_reads(ann: Account) -> None:
    with transaction.atomic():
        ann.refresh_from_db(from_queryset=Account.objects.select_for_update())
        ann.save()


def test_a_save_with_select_first_does_not_ask_because_its_update_does() -> None:
    article = Article.objects.create(text="a")

    for force in (False, True):
        with CaptureQueriesContext(connection) as queries:
            article.save(force_update=force)
        assert [q["sql"].split()[0] for q in queries] == ["UPDATE"]


def test_a_copy_with_no_key_is_another_row(ann: Account) -> None:
    other = copy.copy(ann)
    other.pk = None
    other._state.adding = True
    other.save()

    assert Account.objects.count() == 2
    assert other.pk != ann.pk


def test_a_row_of_ones_own_key_is_inserted_or_overwritten() -> None:
    Country(code="KR", name="Korea").save()
    Country(code="KR", name="South Korea").save()

    assert Country.objects.get().name == "South Korea"


def test_a_default_key_inserts_at_once(django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(1):
        document = Document.objects.create(title="a")
    with django_assert_num_queries(1):
        document.save()
    with django_assert_num_queries(1):
        Document(title="b").save()


# force_insert_update


def test_an_update_can_be_forced(ann: Account) -> None:
    ann.balance = 11
    ann.save(force_update=True)

    assert Account.objects.get().balance == 11


@pytest.mark.parametrize("options", [{"force_update": True}, {"update_fields": ["balance"]}])
def test_insert_and_update_cannot_both_be_forced(ann: Account, options: Any) -> None:
    with pytest.raises(ValueError, match="Cannot force both insert and updating"):
        ann.save(force_insert=True, **options)


@pytest.mark.parametrize("options", [{"force_update": True}, {"update_fields": ["balance"]}])
def test_an_update_without_a_key_cannot_be_forced(options: Any) -> None:
    with pytest.raises(ValueError, match="Cannot force an update in save"):
        with transaction.atomic():
            Account().save(**options)


def test_an_insert_over_a_row_is_an_integrity_error(ann: Account) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        ann.save(force_insert=True)

    ann.save()


@pytest.mark.parametrize("options", [{"force_update": True}, {"update_fields": ["name"]}])
def test_an_update_of_a_row_that_never_was_is_a_database_error(options: Any) -> None:
    with pytest.raises(DatabaseError, match="did not affect any rows"), transaction.atomic():
        Country(code="KR", name="Korea").save(**options)


@pytest.mark.parametrize("model", [ProxyAccount, SavingsAccount])
def test_an_update_of_a_proxy_or_child_can_be_forced(model: Any) -> None:
    account = model(owner="Ann")
    account.save()
    account.owner = "Bob"

    account.save(force_update=True)

    assert model.objects.get().owner == "Bob"


def test_the_tables_of_a_new_child_are_inserted(django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(2):
        SavingsAccount.objects.create(owner="Ann")
    with django_assert_num_queries(2):
        SavingsAccount(owner="Bob").save(force_insert=True)


def test_a_child_can_be_added_to_a_row_of_its_parent(ann: Account) -> None:
    child = SavingsAccount(account_ptr=ann, rate=3)
    child.__dict__.update({k: v for k, v in ann.__dict__.items() if k not in ("_state",)}, rate=3)
    child.save_base(raw=True)

    assert SavingsAccount.objects.get().owner == "Ann"
    assert SavingsAccount.objects.get().version == ann.version


def test_a_childs_row_can_be_deleted_alone() -> None:
    child = SavingsAccount.objects.create(owner="Ann")

    child.delete(keep_parents=True)

    assert Account.objects.count() == 1 and SavingsAccount.objects.count() == 0


# update_only_fields


def test_only_the_named_fields_are_written(ann: Account) -> None:
    ann.owner, ann.balance = "Bob", 11
    ann.save(update_fields=["owner"])

    fresh = Account.objects.get()
    assert (fresh.owner, fresh.balance) == ("Bob", 10)


def test_a_foreign_key_may_be_named_both_ways(ann: Account) -> None:
    child = Account.objects.create()
    child.parent = ann
    child.save(update_fields=["parent"])
    assert Account.objects.get(pk=child.pk).parent == ann
    child.parent = None
    child.save(update_fields=["parent_id"])

    assert Account.objects.get(pk=child.pk).parent is None


def test_receivers_are_told_the_named_fields_and_no_others(ann: Account, saved: Any) -> None:
    ann.save(update_fields=["owner"])

    assert saved == [(False, frozenset({"owner"}), None), (True, frozenset({"owner"}), False)]


def test_no_named_fields_no_query_and_no_signal(
    ann: Account, saved: Any, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(0):
        ann.save(update_fields=[])

    assert saved == []


@pytest.mark.parametrize("fields", [["nothing"], "owner", ["tags"]])
def test_fields_that_are_none_are_refused(fields: Any) -> None:
    with pytest.raises(ValueError, match="do not exist in this model"):
        Offer.objects.create(name="a").save(update_fields=fields)


def test_what_was_deferred_is_not_written_unless_it_was_set(
    ann: Account, django_assert_num_queries: Any
) -> None:
    partial = Account.objects.defer("balance", "seen").get()
    partial.owner, partial.balance = "Bob", 11
    with django_assert_num_queries(1):
        partial.save()
    only = Account.objects.only("owner").get()
    only.owner = "Eve"
    with django_assert_num_queries(1):
        only.save()

    fresh = Account.objects.get()
    assert (fresh.owner, fresh.balance) == ("Eve", 11)


def test_a_deferred_field_that_is_named_is_read_and_written(
    ann: Account, django_assert_num_queries: Any
) -> None:
    only = Account.objects.only("owner").get()
    only.owner = "Bob"

    with django_assert_num_queries(2):
        only.save(update_fields=["balance"])

    assert Account.objects.get().owner == "Ann"


@pytest.mark.parametrize("model", [SavingsAccount, GuardedNamed])
def test_a_child_writes_the_tables_of_the_named_fields(model: Any) -> None:
    child = model.objects.create()
    own = "rate" if model is SavingsAccount else "points"
    setattr(child, own, 5)
    child.save(update_fields=[own])

    assert getattr(model.objects.get(), own) == 5


# get_or_create, update_or_create


def test_get_or_create_gets_and_creates() -> None:
    first, created = Country.objects.get_or_create(code="KR", defaults={"name": "Korea"})
    again, found = Country.objects.get_or_create(code="KR", defaults={"name": "Other"})

    assert (created, found) == (True, False)
    assert again == first and again.name == "Korea"


def test_defaults_may_be_callables_that_are_called_only_to_create() -> None:
    for name in (lambda: "Korea", lambda: 1 / 0):
        Country.objects.get_or_create(code="KR", defaults={"name": name})  # type: ignore[misc]

    assert Country.objects.get().name == "Korea"


@pytest.mark.parametrize("method", ["get_or_create", "update_or_create"])
def test_a_row_in_the_way_is_an_integrity_error_and_stays(method: str) -> None:
    Country.objects.create(code="KR", name="Korea")

    with pytest.raises(IntegrityError), transaction.atomic():
        getattr(Country.objects, method)(code="KR", name="Other")

    assert Country.objects.get().name == "Korea"


@pytest.mark.parametrize("method", ["get_or_create", "update_or_create"])
def test_fields_that_are_none_are_named(method: str) -> None:
    with pytest.raises(FieldError, match="nothing"):
        getattr(Country.objects, method)(code="KR", defaults={"nothing": 1})


def test_update_or_create_updates_and_creates() -> None:
    first, created = Country.objects.update_or_create(code="KR", defaults={"name": "Korea"})
    again, second = Country.objects.update_or_create(
        code="KR",
        defaults={"name": lambda: "South Korea"},  # type: ignore[misc]
    )

    assert (created, second) == (True, False)
    assert again == first
    assert (Country.objects.get().name, Country.objects.get().version) == ("South Korea", 2)


def test_update_or_create_has_values_only_to_create() -> None:
    for _ in range(2):
        Account.objects.update_or_create(
            owner="Ann", defaults={"balance": 2}, create_defaults={"balance": 1}
        )

    assert Account.objects.get().balance == 2


def test_update_or_create_writes_the_named_fields_only(ann: Account) -> None:
    with CaptureQueriesContext(connection) as queries:
        Account.objects.update_or_create(owner="Ann", defaults={"balance": 11})

    [update] = [q["sql"] for q in queries if q["sql"].startswith("UPDATE")]
    assert "balance" in update and "parent" not in update


def test_update_or_create_works_through_related_managers(ann: Account) -> None:
    child, created = ann.children.update_or_create(owner="Bob", defaults={"balance": 1})
    again, second = ann.children.update_or_create(owner="Bob", defaults={"balance": 2})
    offer = Offer.objects.create(name="Tea")
    tag, new = offer.tags.get_or_create(name="new")

    assert (created, second, new) == (True, False, True)
    assert again == child and again.balance == 2 and again.parent == ann
    assert list(offer.tags.all()) == [tag]


def test_update_or_create_of_a_child_works() -> None:
    for rate in (1, 2):
        SavingsAccount.objects.update_or_create(owner="Ann", defaults={"rate": rate})

    assert SavingsAccount.objects.get().rate == 2


# The async twins


async def use_the_async_twins() -> tuple[Any, ...]:
    account = await Account.objects.acreate(owner="Ann")
    account.balance = 1
    await account.asave(update_fields=["balance"])
    await account.arefresh_from_db()
    await Account.objects.filter(pk=account.pk).aupdate(owner="Bob")
    other, created = await Account.objects.aupdate_or_create(owner="Bob", defaults={"balance": 2})
    same, made = await Account.objects.aget_or_create(owner="Bob")
    await Account.objects.abulk_update([same], ["owner"])
    await Account.objects.abulk_create([Account(), Account()])
    version = same.version
    await same.adelete()
    left = await Account.objects.acount()
    await sync_to_async(connections.close_all)()
    return other == account, created, made, version, left


@pytest.mark.django_db(transaction=True)
def test_the_async_twins_work() -> None:
    assert asyncio.run(use_the_async_twins()) == (True, False, False, 5, 2)


# select_for_update, and the rest of what writes rows


def test_a_locked_row_is_saved(ann: Account) -> None:
    with transaction.atomic():
        mine = Account.objects.select_for_update().get()
        mine.balance = 11
        mine.save()
        mine.save()

    assert (Account.objects.get().balance, Account.objects.get().version) == (11, 3)


def test_iterating_and_saving_works(ann: Account) -> None:
    Account.objects.create()

    for account in Account.objects.iterator(chunk_size=1):
        account.balance += 1
        account.save()

    assert sorted(Account.objects.values_list("balance", flat=True)) == [1, 11]


def test_in_bulk_values_and_aggregates_read_as_ever(ann: Account) -> None:
    assert Account.objects.in_bulk() == {ann.pk: ann}
    assert Account.objects.values("owner").get() == {"owner": "Ann"}
    assert Account.objects.aggregate(models.Sum("balance")) == {"balance__sum": 10}
    assert Account.objects.values_list("pk").union(Account.objects.values_list("pk")).count() == 1


def test_no_rows_are_updated_without_a_query(django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(0):
        assert Account.objects.none().update(balance=1) == 0


def test_update_counts_and_refuses_as_ever(ann: Account) -> None:
    assert Account.objects.update(balance=models.F("balance") + 1) == 1
    assert Account.objects.filter(owner="nobody").update(balance=0) == 0
    with pytest.raises(TypeError, match="slice"):
        Account.objects.all()[:1].update(balance=0)


def test_an_expression_becomes_its_value(ann: Account) -> None:
    ann.balance = models.F("balance") + 1
    ann.save()

    assert ann.balance == 11


def test_generated_values_and_composite_keys_work() -> None:
    box = Box.objects.create(side=3)
    box.side = 4
    box.save()
    box.refresh_from_db()
    seat = Seat.objects.create(row="A", number=1)
    seat.guest = "Ann"
    seat.save(update_fields=["guest"])

    assert box.area == 16
    assert Seat.objects.get(pk=("A", 1)).guest == "Ann"


def test_bulk_create_ignores_rows_in_the_way() -> None:
    Country.objects.create(code="KR", name="Korea")

    Country.objects.bulk_create(
        [Country(code="KR", name="Other"), Country(code="DE", name="Germany")],
        ignore_conflicts=True,
    )

    assert dict(Country.objects.values_list("code", "name")) == {"KR": "Korea", "DE": "Germany"}


def test_many_to_many_relations_leave_the_version(ann: Account) -> None:
    offer = Offer.objects.create(name="Tea")
    offer.tags.set([Tag.objects.create(name="new")])
    offer.tags.clear()

    offer.save()

    assert offer.version == 2


def test_save_base_of_a_fixture_writes_as_it_is(ann: Account) -> None:
    Account(pk=ann.pk, owner="Eve", version=7).save_base(raw=True)

    assert (Account.objects.get().owner, Account.objects.get().version) == ("Eve", 7)
