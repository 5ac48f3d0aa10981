"""The same purchase under each guard. Read these first: the difference is a line or two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connection, transaction
from django.db.models import F
from django.utils.translation import gettext_lazy as _

from distlock_app import Lock, for_update, lock_in_transaction
from distlock_app.backends.base import InTransaction
from distlock_app.backends.dummy import DummyBackend
from distlock_app.backends.locmem import LocMemBackend
from distlock_app.core.registry import registry
from distlock_app.operations.doctor import examine

from .race_buyers import Customer
from .race_models import RaceItem, RaceOrder


class SoldOut(Exception):
    """There is nothing left of it."""


def read(pk: int) -> RaceItem:
    """Return what is for sale, if there is any."""
    return in_stock(RaceItem.objects.get(pk=pk))


def in_stock(item: RaceItem) -> RaceItem:
    if item.stock < 1:
        raise SoldOut
    return item


def write(item: RaceItem, buyer: Customer) -> None:
    """Write down what was read, less one, and the order."""
    with transaction.atomic():
        RaceItem.objects.filter(pk=item.pk).update(stock=item.stock - 1)
        item.orders.create(buyer=buyer.number)


# Whoever reads without waiting has read before the gun: the first purchases certainly collide.


def buy_without_guard(pk: int, buyer: Customer) -> None:
    item = read(pk)
    buyer.think()
    write(item, buyer)


def buy_in_one_statement(pk: int, buyer: Customer) -> None:
    buyer.think()
    with transaction.atomic():
        in_stock = RaceItem.objects.filter(pk=pk, stock__gte=1)
        if not in_stock.update(stock=F("stock") - 1):
            raise SoldOut
        RaceOrder.objects.create(item_id=pk, buyer=buyer.number)


def buy_optimistically(pk: int, buyer: Customer) -> None:
    def take_one(item: RaceItem) -> None:
        buyer.changing()
        in_stock(item)
        buyer.think()
        item.stock -= 1
        item.buyer = buyer.number

    RaceItem.objects.retrying(pk, take_one)


def buy_pessimistically(pk: int, buyer: Customer) -> None:
    buyer.ready()
    with transaction.atomic():
        (item,) = for_update(RaceItem.objects.filter(pk=pk), wait=buyer.patience())
        in_stock(item)
        buyer.think()
        write(item, buyer)


def buy_under_lock(pk: int, buyer: Customer, *, alias: str) -> None:
    buyer.ready()
    with Lock(f"race:{pk}", using=alias, wait=buyer.patience(), atomic=True):
        item = read(pk)
        buyer.think()
        write(item, buyer)


def buy_in_locked_transaction(pk: int, buyer: Customer, *, alias: str) -> None:
    buyer.ready()
    with transaction.atomic():
        lock_in_transaction(f"race:{pk}", using=alias, wait=buyer.patience())
        item = read(pk)
        buyer.think()
        write(item, buyer)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to buy. `alias` is that of the lock's backend, if there is a lock."""

    key: str
    title: Any
    alias: str = ""

    @property
    def promises(self) -> bool:
        """Whether it promises that nothing is sold twice."""
        return self.key != "none"

    def buy(self, pk: int, buyer: Customer) -> None:
        """Buy one unit; raise SoldOut, or what the guard raises."""
        if self.key == "transaction":
            buy_in_locked_transaction(pk, buyer, alias=self.alias)
        elif self.alias:
            buy_under_lock(pk, buyer, alias=self.alias)
        else:
            WITHOUT_LOCK[self.key][1](pk, buyer)

    def warm_up(self, number: int) -> None:
        """Connect to whatever is needed, so that the race is not about that."""
        RaceItem.objects.exists()
        if self.alias:
            Lock(f"race:buyer:{number}", using=self.alias).acquire().release()

    def trouble(self) -> str:
        """Say why it cannot be run now; asks the backend."""
        return examine(self.alias).trouble if self.alias else ""


Way = Callable[[int, Customer], None]
WITHOUT_LOCK: dict[str, tuple[Any, Way]] = {
    "none": (_("No guard"), buy_without_guard),
    "f": (_("F() in one statement"), buy_in_one_statement),
    "optimistic": (_("Optimistic: version, retrying"), buy_optimistically),
    "pessimistic": (_("Pessimistic: for_update"), buy_pessimistically),
}
# By the class of the backend: a key, a title, and what to set for the demo to have it.
ENGINES: dict[str, tuple[str, Any, str]] = {
    "DatabaseBackend": ("table", _("Lock table"), ""),
    "NamedLockBackend": ("named", _("Named lock"), "DEMO_DATABASE_URL=mysql://…"),
    "AdvisoryLockBackend": ("advisory", _("Advisory lock"), "DEMO_DATABASE_URL=postgresql://…"),
    "RedisBackend": ("redis", _("Redis lock"), "DEMO_REDIS_URL=redis://…"),
    "RedlockBackend": ("redlock", _("Redlock"), "DEMO_REDLOCK_URL=redis://…,redis://…,redis://…"),
    "EtcdBackend": ("etcd", _("etcd lock"), "DEMO_ETCD_URL=http://…"),
    "ZooKeeperBackend": ("zookeeper", _("ZooKeeper lock"), "DEMO_ZOOKEEPER_URL=host:2181"),
}
IN_TRANSACTION = _("Lock table: lock_in_transaction")
IN_ONE_PROCESS = (LocMemBackend, DummyBackend)


def strategies() -> dict[str, Strategy]:
    """Return what can be run here: the guards, and a lock on every backend that settings name."""
    found = {key: Strategy(key, title) for key, (title, _way) in WITHOUT_LOCK.items()}
    for alias in registry:
        kind = type(registry[alias].backend)
        if kind in IN_ONE_PROCESS:
            continue
        key, title, _setting = ENGINES.get(kind.__name__, (alias, alias, ""))
        if key in found:
            key, title = alias, f"{title} ({alias})"
        found[key] = Strategy(key, title, alias)
        if "transaction" not in found and in_the_shops_database(registry[alias].backend):
            found["transaction"] = Strategy("transaction", IN_TRANSACTION, alias)
    return found


def in_the_shops_database(backend: Any) -> bool:
    """Return whether a transaction of the shop can be its lock; SQLite locks the whole file."""
    if not isinstance(backend, InTransaction) or connection.vendor == "sqlite":
        return False
    return backend.using == DEFAULT_DB_ALIAS


def missing() -> dict[str, tuple[Any, Any]]:
    """Return the title of each lock that cannot be run here, and why."""
    there = strategies()
    reasons: dict[str, tuple[Any, Any]] = {
        key: (title, _("not set: %(setting)s") % {"setting": setting})
        for key, title, setting in ENGINES.values()
        if key not in there
    }
    for alias in registry:
        kind = type(registry[alias].backend)
        if kind in IN_ONE_PROCESS:
            reasons[alias] = (kind.__name__, _("does not exclude other processes"))
    return reasons
