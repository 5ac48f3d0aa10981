"""Decorated functions, views and commands, and holds, as mypy and pyright see them."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import Any

from django.core.management import BaseCommand
from django.http import HttpRequest, HttpResponse
from django.views import View
from typing_extensions import assert_type

from distlock_app import (
    Hold,
    Leader,
    Lock,
    all_of,
    current_hold,
    locked,
    locked_command,
    locked_view,
    retry_on_conflict,
    retry_on_deadlock,
)


@locked
def plain(pk: int) -> str:
    return str(pk)


@locked("invoice:{pk}", wait=5)
def named(pk: int) -> str:
    return str(pk)


@locked("invoice:{pk}")
async def awaited(pk: int) -> str:
    return str(pk)


@locked("invoice:{pk}", on_busy="skip")
def skipped(pk: int) -> str:
    return str(pk)


@locked("invoice:{pk}", on_busy="skip")
async def askipped(pk: int) -> str:
    return str(pk)


@locked("invoice:{pk}", on_busy="skip")
def generated(pk: int) -> Iterator[str]:
    yield str(pk)


@locked("invoice:{pk}", on_busy=lambda busy, pk: "busy")
def answered(pk: int) -> str:
    return str(pk)


class Shop:
    @locked("shop:{self.pk}", on_busy="skip")
    def count(self, exact: bool = False) -> int:
        return 1

    @retry_on_conflict(attempts=3)
    @locked
    def close(self) -> bool:
        return True


@retry_on_conflict
def again(pk: int) -> str:
    return str(pk)


@retry_on_deadlock(attempts=3)
async def aagain(pk: int) -> str:
    return str(pk)


@locked_view
def pay(request: HttpRequest, pk: int) -> HttpResponse:
    return HttpResponse()


@locked_view("pay:{pk}", methods=["POST"])
class Pay(View):
    price = 1


@locked_command("settle", wait=None)
class Command(BaseCommand):
    def handle(self, *args: Any, **options: Any) -> None:
        plain(pk=1)


async def decorated(request: HttpRequest) -> None:
    assert_type(plain(1), str)
    assert_type(named(pk=1), str)
    assert_type(await awaited(1), str)
    assert_type(skipped(1), str | None)
    assert_type(await askipped(pk=1), str | None)
    assert_type(generated(1), Iterator[str])
    assert_type(answered(1), str)
    assert_type(Shop().count(exact=True), int | None)
    assert_type(Shop().close(), bool)
    assert_type(again(1), str)
    assert_type(await aagain(pk=1), str)
    assert_type(pay(request, pk=1), HttpResponse)
    assert_type(Pay().price, int)
    assert_type(Command(), Command)
    plain("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    skipped("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def lost(hold: Hold) -> bool:
    return hold.released


async def holds(lock: Lock) -> None:
    with lock as hold:
        assert_type(hold, Hold)
    async with lock as hold:
        assert_type(hold.fence, int | None)
    assert_type(lock.try_acquire(), Hold | None)
    assert_type(await lock.aacquire(), Hold)
    assert_type(current_hold(), Hold)
    with all_of(lock, Lock("other", on_lost=lost)) as both:
        assert_type(both[0], Hold)
        both.on_lost(lost)


def beat(ended: Event) -> None:
    ended.wait()


async def leaders() -> None:
    leader = Leader("beat", beat, ttl=10)
    assert_type(leader.is_leader, bool)
    assert_type(leader.hold, Hold | None)
    await Leader("beat", leaders).arun()
