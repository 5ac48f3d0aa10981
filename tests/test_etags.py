"""ETag and If-Match: what a client says of the version it changes."""

from __future__ import annotations

import asyncio
from datetime import datetime, timezone
from functools import partial
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncRequestFactory, RequestFactory
from django.utils.decorators import method_decorator
from django.views import View

from distlock_app import StaleObjectError, locked_view
from distlock_app.etags import (
    PreconditionFailed,
    PreconditionRequired,
    etag_of,
    guarded_view,
    require_match,
    with_etag,
)
from tests.app.versioned_models import Account, Page

pytestmark = pytest.mark.django_db


@pytest.fixture
def account() -> Account:
    return Account.objects.create(balance=10)


def put(**headers: str) -> Any:
    return RequestFactory().put("/", "{}", headers=headers)


def pay(request: Any, pk: Any) -> HttpResponse:
    """Change the row, as the views of these tests do."""
    account = Account.objects.get(pk=pk)
    require_match(request, account)
    account.balance -= 1
    account.save()
    return with_etag(JsonResponse({"balance": account.balance}), account)


@method_decorator(guarded_view, name="dispatch")
class ClassView(View):
    def put(self, request: HttpRequest, pk: Any) -> HttpResponse:
        return pay(request, pk)


class Wrapped:
    """A request as REST framework gives it to a view."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class FrameworkView:
    """What REST framework does with a view: it answers its own errors and raises the others."""

    @classmethod
    def as_view(cls) -> Any:
        def view(request: Any, pk: Any) -> Any:
            try:
                return pay(Wrapped(request), pk)
            except PermissionError:
                return HttpResponse(status=403)

        view.csrf_exempt = True  # type: ignore[attr-defined]
        return view


VIEWS = pytest.mark.parametrize(
    "view", [guarded_view(pay), ClassView.as_view(), guarded_view(FrameworkView.as_view())]
)


@VIEWS
def test_the_version_that_was_read_is_changed(view: Any, account: Account) -> None:
    response = view(put(if_match=etag_of(account)), account.pk)

    account.refresh_from_db()
    assert (response.status_code, account.balance) == (200, 9)
    assert response["ETag"] == etag_of(account) == '"2"'


@VIEWS
@pytest.mark.parametrize(
    ("headers", "status"), [({"if_match": '"7"'}, 412), ({"if_match": ""}, 412), ({}, 428)]
)
def test_another_version_or_none_is_refused(
    view: Any, account: Account, headers: Any, status: int
) -> None:
    response = view(put(**headers), account.pk)

    account.refresh_from_db()
    assert (response.status_code, account.balance) == (status, 10)
    assert response["Cache-Control"] == "no-store"


def test_a_wrapped_view_stays_exempt_from_csrf() -> None:
    assert guarded_view(FrameworkView.as_view()).csrf_exempt


@pytest.mark.parametrize("header", ['W/"1"', '"9", "1"', "*"])
def test_what_proxies_and_lists_make_of_a_tag_is_understood(account: Account, header: str) -> None:
    require_match(put(if_match=header), account)


def test_a_view_may_do_without(account: Account) -> None:
    require_match(put(), account, required=False)

    with pytest.raises(PreconditionRequired):
        require_match(put(), account)
    with pytest.raises(PreconditionFailed):
        require_match(put(if_match='"2"'), account, required=False)


def test_a_save_in_between_is_refused_by_the_guard(account: Account) -> None:
    @guarded_view
    def view(request: HttpRequest) -> HttpResponse:
        mine = Account.objects.get()
        require_match(request, mine, required=False)
        Account.objects.update(balance=5)
        mine.save()
        return HttpResponse()

    assert view(put(if_match='"1"')).status_code == 412
    assert view(put()).status_code == 409


async def stale(request: Any) -> HttpResponse:
    raise StaleObjectError


class AsyncView(View):
    async def put(self, request: HttpRequest) -> HttpResponse:
        return await stale(request)


class EarlyView(AsyncView):
    def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        raise StaleObjectError


@method_decorator(guarded_view, name="dispatch")
class GuardedAsyncView(AsyncView):
    pass


@pytest.mark.parametrize(
    "view",
    [
        guarded_view(stale),
        guarded_view(partial(stale)),
        guarded_view(AsyncView.as_view()),
        guarded_view(EarlyView.as_view()),
        GuardedAsyncView.as_view(),
    ],
)
def test_async_views_answer_too(view: Any) -> None:
    request = AsyncRequestFactory().put("/", headers={"if_match": '"1"'})

    assert iscoroutinefunction(view)  # else Django would call it in a thread
    assert asyncio.run(view(request)).status_code == 412


@pytest.mark.parametrize("wanted", ["application/json", "text/html"])
def test_the_answer_is_what_the_client_reads(account: Account, wanted: str) -> None:
    response = guarded_view(pay)(put(accept=wanted), account.pk)

    kind = "application/json" if "json" in wanted else "text/plain; charset=utf-8"
    assert response["Content-Type"] == kind
    assert "If-Match" in response.content.decode()


@guarded_view
def half(request: HttpRequest) -> HttpResponse:
    """Be refused after a part of the job."""
    Account.objects.create(owner="half a job")
    raise StaleObjectError


@pytest.mark.parametrize(
    "view",
    [
        transaction.atomic(half),
        transaction.atomic(transaction.atomic(savepoint=False)(half)),
        locked_view("half", using="locmem", atomic=True)(half),
    ],
)
def test_the_transaction_around_a_refused_view_is_rolled_back(view: Any) -> None:
    assert view(put()).status_code == 409

    assert not Account.objects.exists()


def test_what_was_done_before_the_savepoint_of_a_refused_view_stays() -> None:
    with transaction.atomic():
        Account.objects.create(owner="before")
        with transaction.atomic():
            half(put())
        Account.objects.create(owner="after")

    assert [account.owner for account in Account.objects.order_by("pk")] == ["before", "after"]


def test_a_time_as_the_version_is_a_tag() -> None:
    page = Page(updated_at=datetime(2026, 5, 4, 3, 2, 1, 5, tzinfo=timezone.utc))

    assert etag_of(page) == '"2026-05-04T03:02:01.000005+00:00"'
