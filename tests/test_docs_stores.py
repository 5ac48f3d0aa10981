"""The samples of docs/explanation/several-stores.md do what the page says, at a real Redis."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import redis
from django.core.cache import cache
from django.test.utils import isolate_apps

from distlock_app import Lock
from distlock_app.testing import override_locks
from tests.test_docs import ROOT, blocks, compiled

PAGE = ROOT / "docs/explanation/several-stores.md"


@pytest.fixture
def page(monkeypatch):
    """What the samples define."""
    shop = ModuleType("shop.models")
    shop.Product = MagicMock()
    monkeypatch.setitem(sys.modules, "shop", ModuleType("shop"))
    monkeypatch.setitem(sys.modules, "shop.models", shop)
    names = {"__name__": "tests.app.stores"}
    with isolate_apps("tests.app"):
        for code in blocks(PAGE, "python"):
            exec(compiled(code, PAGE.name), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("how", ["take", "take_watching"])
def test_as_many_pieces_are_taken_as_there_were(page, redis_url, how):
    take = getattr(page, how)
    with redis.Redis.from_url(redis_url) as client:
        key = f"docs:{how}"
        client.set(key, 51)

        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(lambda _: take(client, key, 2), range(60)))

        assert (taken.count(True), client.getdel(key)) == (25, b"1")


def test_a_saga_that_was_refused_and_then_crashed_is_undone_by_the_next_attempt(page):
    order = MagicMock(pk=1, step=0, refused=False)
    crash, done = [OSError], []

    def step(name):
        def do(order):
            done.append(f"do {name}")
            if name == "c":
                raise page.Refused

        def undo(order):
            if name == "a" and crash:
                raise crash.pop()
            done.append(f"undo {name}")

        return do, undo

    page.STEPS.extend(map(step, "abc"))
    with override_locks():
        with pytest.raises(OSError):
            page.go_on(order)
        page.go_on(order)

    assert done == ["do a", "do b", "do c", "undo b", "undo a"]
    assert (order.step, order.refused) == (0, True)


@pytest.mark.django_db(transaction=True)
def test_a_cached_price_is_deleted_after_the_commit_and_under_the_lock(page, monkeypatch):
    seen = []
    delete = cache.delete
    monkeypatch.setattr(cache, "delete", lambda key: seen.append(Lock(key).locked()) or delete(key))
    page.Product.objects.get.return_value.price = 10

    with override_locks():
        assert page.price_of(1) == page.price_of(1) == 10
        page.change_price(1, 12)

    assert page.Product.objects.get.call_count == 1
    assert (seen, cache.get("price:1")) == ([True], None)
