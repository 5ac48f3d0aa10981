"""The backend of docs/how-to/write-a-backend.md keeps the contract, as the page says."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from tests.test_docs import ROOT, blocks, compiled

PAGE = ROOT / "docs/how-to/write-a-backend.md"
LOCKS = ModuleType("shop.locks")


def in_shop(patch):
    """Let `shop.locks` be what the page says."""
    patch.setitem(sys.modules, "shop", ModuleType("shop"))
    patch.setitem(sys.modules, "shop.locks", LOCKS)


with pytest.MonkeyPatch.context() as patch:
    in_shop(patch)
    for code in blocks(PAGE, "python"):
        exec(compiled(code, PAGE.name), vars(LOCKS))
Suite: Any = vars(LOCKS)["TestScriptBackend"]


class OnRedis:
    """The settings of the page, with the Redis of this run."""

    name_of_class = "ScriptBackend"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def locks(cls, redis_url):
        params = {
            "BACKEND": f"shop.locks.{cls.name_of_class}",
            "LOCATION": redis_url,
            "OPTIONS": {"PREFIX": f"{cls.name_of_class}{settings.SUFFIX}"},
        }
        assert params.keys() == LOCKS.DISTLOCK["default"].keys()
        with pytest.MonkeyPatch.context() as patch, override_settings(DISTLOCK={"default": params}):
            in_shop(patch)
            yield


class TestTheBackendOfThePage(OnRedis, Suite):
    pass


class TestTheBackendWithAllThatThePageAdds(OnRedis, Suite):
    name_of_class = "LockBackend"

    def test_it_does_all_of_it(self):
        assert self.backend.pushes and self.backend.lists and self.backend.fences


def test_the_backend_of_the_page_is_short():
    assert len(blocks(PAGE, "python")[0].splitlines()) <= 95
