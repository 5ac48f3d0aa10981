"""The write guards, as mypy and pyright see them."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from typing_extensions import Self, TypeVar, assert_type

from distlock_app import Hold, for_update, next_unlocked
from distlock_app.fencing import FencedModel, FencedVersionedModel
from distlock_app.optimistic import VersionedManager, VersionedModel, VersionedQuerySet
from distlock_app.pessimistic import LockingManager, LockingQuerySet

M = TypeVar("M", bound=models.Model)


class Account(VersionedModel):
    balance = models.IntegerField(default=0)


class OpenQuerySet(VersionedQuerySet["Order"]):
    def open(self) -> OpenQuerySet:
        return self.filter(paid=False)


class Order(VersionedModel):
    paid = models.BooleanField(default=False)

    objects = VersionedManager.from_queryset(OpenQuerySet)()


class Job(models.Model):
    objects: ClassVar[LockingManager[Self]] = LockingManager()


class Shelf(FencedModel):
    stock = models.IntegerField(default=0)


class Vault(FencedVersionedModel):
    stock = models.IntegerField(default=0)


class Both(VersionedQuerySet[M], LockingQuerySet[M]):  # type: ignore[override]
    pass


def spend(account: Account) -> None:
    account.balance -= 1


def optimistic(account: Account) -> None:
    assert_type(Account.objects.get(pk=1), Account)
    assert_type(Account.objects.retrying(1, spend), Account)
    assert_type(Account.objects.filter(balance__gt=0).retrying(1, spend), Account)
    assert_type(Account.objects.filter(balance__gt=0).first(), Account | None)
    assert_type(Account.objects.only("balance").defer("balance").update(balance=1), int)
    assert_type(account.save_retrying(spend), Account)
    assert_type(Order.objects.get(pk=1), Order)
    assert_type(Account.objects.bulk_create([account]), list[Account])
    assert_type(account.delete(), tuple[int, dict[str, int]])
    assert_type(VersionedQuerySet[Account](Account).get(pk=1), Account)


async def optimistic_async(account: Account) -> None:
    assert_type(await Account.objects.aretrying(1, spend), Account)
    assert_type(await account.asave_retrying(spend), Account)


def pessimistic() -> None:
    assert_type(Job.objects.for_update(1, wait=0), Job)
    assert_type(Job.objects.next_unlocked(2), list[Job])
    assert_type(Job.objects.filter(pk=1).for_update(1), Job)
    assert_type(for_update(Job.objects.filter(pk=1)), list[Job])
    assert_type(next_unlocked(Account.objects.all()), list[Account])
    assert_type(Both[Account](Account).for_update(1), Account)
    assert_type(Both[Account](Account).retrying(1, spend), Account)


def fencing(hold: Hold) -> None:
    assert_type(Shelf.objects.fenced(hold).get(pk=1), Shelf)
    assert_type(Shelf.objects.fenced(hold).filter(pk=1).update(stock=1), int)
    assert_type(Shelf.objects.filter(pk=1).fenced(7).create(stock=1), Shelf)
    assert_type(Shelf.objects.update_or_create(pk=1, defaults={"stock": 1}), tuple[Shelf, bool])
    assert_type(Shelf.objects.fenced(hold).delete(), tuple[int, dict[str, int]])
    assert_type(Vault.objects.fenced(hold).retrying(1, lambda vault: vault.save()), Vault)
