"""Requests to views under a lock: who gets in, what the others are told, and the transactions."""

from __future__ import annotations

import asyncio
import gc
import io
import threading
from contextlib import aclosing, suppress
from functools import partial, wraps
from urllib.request import urlopen

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.decorators import login_required
from django.contrib.auth.mixins import LoginRequiredMixin
from django.contrib.auth.models import AnonymousUser, User
from django.db import connection, connections, transaction
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, AsyncRequestFactory, Client, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.utils.functional import SimpleLazyObject
from django.utils.translation import override
from django.views.decorators.csrf import csrf_exempt
from django.views.generic import View

from distlock_app import (
    BackendError,
    Lock,
    LockError,
    LockLost,
    NotHeld,
    assert_locked,
    current_hold,
    locked_view,
)
from distlock_app.core.registry import registry
from distlock_app.core.releasing import releaser
from distlock_app.decorators.atomic_requests import mark
from distlock_app.testing import held_elsewhere, lose
from tests.app.models import Counter
from tests.view_workers import LOCKS_APART

on_locmem = partial(locked_view, using="locmem")
elsewhere = partial(held_elsewhere, using="locmem")

BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"


def holders():
    return list(registry["locmem"].backend.holders())


def held():
    """The names of all locks that anybody holds, as a response."""
    return HttpResponse(" ".join(sorted(holder.name for holder in holders())))


@pytest.fixture
def down(monkeypatch):
    """Let the backend fail."""

    def fail(claim, wait):
        raise BackendError("no route to db7")

    monkeypatch.setattr(registry["locmem"].backend, "acquire", fail)


def post(view, *args, user=None, path="/", **kwargs):
    """Call the view with a POST of `user`."""
    request = RequestFactory().post(path, **kwargs.pop("extra", {}))
    request.user = user or AnonymousUser()
    return view(request, *args, **kwargs)


# Who gets in


def test_the_name_is_made_of_the_request_and_what_the_url_captured():
    @on_locmem("pay:{order}:{request.user.pk}:{page}")
    def pay(request, order, page=1):
        return held()

    assert post(pay, order=7, user=User(pk=3)).content == b"pay:7:3:1"
    assert post(pay, 7, user=User(pk=3)).content == b"pay:7:3:1"
    assert holders() == []


def test_a_field_that_the_view_does_not_get_is_refused_when_decorating():
    with pytest.raises(ValueError, match="order_id"):

        @on_locmem("pay:{order_id}")
        def pay(request, order):
            pass


def test_without_a_template_a_view_is_locked_for_each_visitor_and_what_the_url_captured():
    @on_locmem()
    def pay(request, order):
        return held()

    name = f"{pay.__module__}.{pay.__qualname__}"

    assert post(pay, order="a:b", user=User(pk=3)).content.decode() == (
        f"{name}:order=a%3Ab:user=3"
    )
    assert post(pay, order=1).content.decode() == f"{name}:order=1:address=127.0.0.1"


@pytest.mark.parametrize("name", [None, lambda request, order: f"pay:{order}"])
def test_the_request_may_come_by_keyword(name):
    @on_locmem(name=name)
    def pay(request, order):
        return held()

    request = RequestFactory().post("/")
    by_position = pay(request, order=3)

    assert pay(request=request, order=3).content == by_position.content


def test_a_group_of_the_url_that_captured_nothing_keeps_its_place_in_the_name():
    @on_locmem()
    def pay(request, *captured):
        return held()

    name = f"{pay.__module__}.{pay.__qualname__}"

    for captured, text in [((None,), ""), ((None, "5"), ":5"), (("5", None), "5:")]:
        assert post(pay, *captured).content.decode() == f"{name}:{text}:address=127.0.0.1"


def test_an_anonymous_visitor_is_known_by_the_session_but_its_key_is_not_shown():
    @on_locmem()
    def pay(request):
        return held()

    @on_locmem("pay:{request.user.pk}")
    def pay_too(request):
        return held()

    @on_locmem("pay:{request.user}")
    def pay_as_well(request):
        return held()

    @on_locmem("pay:{request.user.company_id}")
    def pay_for_a_company(request):
        return held()

    @on_locmem("pay:{request.user.username}")
    def pay_by_name(request):
        return held()

    for view in (pay, pay_too, pay_as_well, pay_for_a_company, pay_by_name):
        request = RequestFactory().post("/")
        request.user = SimpleLazyObject(AnonymousUser)
        request.session = type("Session", (), {"session_key": "secret"})()
        name = view(request).content.decode()

        assert "session=" in name.replace("%3D", "=")
        assert "secret" not in name


class Machine:
    """A user that no model knows, as authenticators of REST framework make them."""

    company_id, label = 7, ""

    def __str__(self):
        return "machine 3"


def test_a_user_may_be_of_any_class():
    @on_locmem("pay:{request.user.company_id}:{request.user.label}")
    def pay(request):
        return HttpResponse(f"{holders()[0].name}, {holders()[0].holder['who']}")

    @on_locmem()
    def pay_too(request):
        return held()

    machine = Machine()
    assert post(pay, user=machine).content == b"pay:7:address=127.0.0.1, anonymous /"
    assert post(pay_too, user=machine).content.endswith(b":address=127.0.0.1")

    machine.is_authenticated = True
    assert post(pay, user=machine).content == b"pay:7:, machine 3 /"
    assert post(pay_too, user=machine).content.endswith(b":user=machine 3")


def test_no_visitor_stands_for_a_field_that_is_not_of_the_user():
    @on_locmem("pay:{order}")
    def pay(request, order=None):
        pass

    with pytest.raises(ValueError, match=r"\{order\}.* is None"):
        post(pay)


def test_a_field_that_a_known_user_lacks_is_an_error():
    @on_locmem("pay:{request.user.company_id}")
    def pay(request):
        pass

    with pytest.raises(ValueError, match="AttributeError: 'User' object has no.*company_id"):
        post(pay, user=User(pk=3))


def test_a_function_may_give_the_name():
    @on_locmem(name=lambda request, order: f"order-{order}")
    def pay(request, order):
        return held()

    assert post(pay, order=7).content == b"order-7"


def test_reading_is_free_unless_it_is_named():
    @on_locmem("a")
    def page(request):
        return held()

    @on_locmem("a", methods=["get"])
    def report(request):
        return held()

    with elsewhere("a"):
        assert page(RequestFactory().get("/")).status_code == 200
        assert report(RequestFactory().get("/")).status_code == 423
        assert report(RequestFactory().head("/")).status_code == 423
        assert post(report).status_code == 200
        # A view that asks only for GET takes it for a POST.
        assert page(RequestFactory().generic("PAY", "/")).status_code == 423
        assert report(RequestFactory().generic("PAY", "/")).status_code == 423


def test_people_see_who_holds_the_lock_and_where():
    seen = []

    @on_locmem("a")
    def pay(request):
        seen.extend(holders())
        return HttpResponse()

    post(pay, user=User(pk=3, username="alice"), path="/pay/7?card=1")

    assert seen[0].holder["who"] == "alice /pay/7"


# What the others are told


@pytest.mark.usefixtures("stopped_clock")
def test_busy_is_423_with_the_time_after_which_to_try_again():
    @on_locmem("a")
    def pay(request):
        raise AssertionError("not under the lock")

    with elsewhere("a", ttl=3):
        answer = post(pay)
    assert (answer.status_code, answer["Retry-After"]) == (423, "3")
    assert answer["Content-Type"] == "text/plain; charset=utf-8"
    assert answer["Cache-Control"] == "no-store"
    assert answer.content == b"Your request is already being processed.\n"

    with elsewhere("a", ttl=600):
        assert post(pay)["Retry-After"] == "10"
    with elsewhere("a", ttl=0.99):
        assert post(pay)["Retry-After"] == "1"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/json", "application/json"),
        ("application/json, text/plain;q=0.5", "application/json"),
        (BROWSER, "text/html; charset=utf-8"),
        ("*/*", "text/plain; charset=utf-8"),
        ("image/png", "text/plain; charset=utf-8"),
    ],
)
def test_busy_is_json_a_page_or_text_as_the_client_prefers(stopped_clock, accept, kind):
    @on_locmem("a")
    def pay(request):
        pass

    with elsewhere("a", ttl=2):
        answer = post(pay, extra={"headers": {"accept": accept}})

    assert answer["Content-Type"] == kind
    if kind == "application/json":
        assert b'"retry_after": 2' in answer.content


def browsed(view, before="", path="/pay/7", **headers):
    """Return what a browser is answered whose visitor comes from the page `before`."""
    headers = {"accept": BROWSER, "referer": before, **headers}
    with elsewhere("a"):
        return post(view, path=path, extra={"headers": headers}).content.decode()


def test_the_page_goes_back_to_where_the_visitor_came_from_and_repeats_nothing():
    @on_locmem("a")
    def pay(request):
        pass

    page = browsed(pay, "http://testserver/orders/7?a=1&b=2")

    assert "<h1>Your request is already being processed.</h1>" in page
    assert 'content="3; url=http://testserver/orders/7?a=1&amp;b=2"' in page
    assert '<a href="http://testserver/orders/7?a=1&amp;b=2">' in page
    assert "try again" not in page and "<style" not in page and "<script" not in page


@pytest.mark.parametrize(
    "before",
    [
        "",
        "https://elsewhere.example/",
        "javascript:alert(1)",
        "//elsewhere.example",
        'http://"><a>',
        "http://[",
        "'https://elsewhere.example/'",  # a refresh strips quotes
    ],
)
@pytest.mark.parametrize("methods", [["POST"], ["GET", "POST"]])
def test_the_page_leads_nowhere_but_to_this_site(before, methods):
    @on_locmem("a", methods=methods)
    def pay(request):
        pass

    page = browsed(pay, before)

    assert "go back to the previous page" in page
    assert "http-equiv" not in page and "<a" not in page


@pytest.mark.parametrize(("methods", "back"), [(["POST"], True), (["GET", "POST"], False)])
def test_the_page_does_not_repeat_a_get_that_is_locked(methods, back):
    @on_locmem("a", methods=methods)
    def pay(request):
        pass

    page = browsed(pay, "http://testserver/pay/7?once=1")
    assert ("http-equiv" in page) is back

    assert "http-equiv" in browsed(pay, "http://testserver/cart")

    page = browsed(pay, "http://testserver/pay/%EC%A3%BC%EB%AC%B8%207?once=1", path="/pay/주문 7")
    assert ("http-equiv" in page) is back


def test_the_page_is_in_the_language_of_the_visitor():
    @on_locmem("a")
    def pay(request):
        pass

    with override("ko"):
        page = browsed(pay)

    assert '<html lang="ko" dir="ltr">' in page and "요청을 이미 처리하고 있습니다." in page


@pytest.mark.parametrize("engines", [0, 1])
def test_a_project_has_a_page_of_its_own_or_no_templates_at_all(settings, tmp_path, engines):
    (tmp_path / "distlock_app").mkdir()
    (tmp_path / "distlock_app/busy.html").write_text("{{ request.path }}: {{ text }} {{ back }}")
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}][:engines]

    @on_locmem("a")
    def pay(request):
        pass

    page = browsed(pay, "http://testserver/")

    if engines:
        assert page == "/pay/7: Your request is already being processed. http://testserver/"
    else:
        assert page == "Your request is already being processed.\n"


@pytest.mark.parametrize("status", ["x", 0, True], ids=repr)
def test_a_status_that_http_does_not_have_is_refused(status):
    with pytest.raises(ValueError, match="status must be"):
        on_locmem("a", status=status)


def test_the_status_and_the_response_may_be_chosen():
    @on_locmem("a", status=409)
    def conflict(request):
        pass

    @on_locmem("a", busy_response=lambda request, busy: HttpResponse(type(busy).__name__))
    def custom(request):
        pass

    with elsewhere("a"):
        assert post(conflict).status_code == 409
        assert post(custom).content == b"LockBusy"


def test_a_view_may_wait_and_then_says_the_same():
    @on_locmem("a", wait=0.05)
    def pay(request):
        pass

    with elsewhere("a"):
        assert post(pay).status_code == 423


def test_a_lock_that_the_view_itself_finds_busy_is_its_own_affair():
    @on_locmem("mine")
    def pay(request):
        Lock("a", using="locmem", wait=0).acquire()

    with elsewhere("a"), pytest.raises(LockError):
        post(pay)
    assert holders() == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("accept", ["text/html", "application/json"])
def test_with_the_backend_down_it_is_503_with_the_time_after_which_to_try_again(
    down, accept, caplog
):
    @on_locmem("a", status=409, busy_response=lambda request, busy: HttpResponse("busy"))
    def pay(request):
        raise AssertionError("not under the lock")

    @on_locmem("a", in_transaction=True)
    def pay_in_transaction(request):
        raise AssertionError("not under the lock")

    @on_locmem("a")
    async def pay_async(request):
        raise AssertionError("not under the lock")

    request = AsyncRequestFactory().post("/", headers={"accept": accept})
    request.user = AnonymousUser()
    answers = [
        post(view, extra={"headers": {"accept": accept}}) for view in (pay, pay_in_transaction)
    ]
    answers.append(asyncio.run(pay_async(request)))

    for answer in answers:
        assert (answer.status_code, answer["Retry-After"]) == (503, "10")
        assert answer["Cache-Control"] == "no-store"
        assert (b'"retry_after": 10' in answer.content) == (accept == "application/json")
        assert b"db7" not in answer.content
    assert caplog.messages == 3 * [
        "answered 503: cannot take the lock 'a' (alias 'locmem'): no route to db7"
    ]
    assert [record.lock_event for record in caplog.records] == 3 * ["unavailable"]


def test_a_backend_that_the_view_itself_finds_down_is_its_own_affair():
    @on_locmem("a")
    def pay(request):
        raise BackendError("no route to db7")

    with pytest.raises(BackendError):
        post(pay)
    assert holders() == []


# Kinds of views


class Pay(View):
    def get(self, request, **kwargs):
        return held()

    def post(self, request, **kwargs):
        return held()


@on_locmem()
class LockedPay(Pay):
    pass


@on_locmem("named:{order}")
class NamedPay(Pay):
    pass


@method_decorator(on_locmem("method:{order}"), name="dispatch")
class MethodPay(Pay):
    pass


@method_decorator(on_locmem(), name="dispatch")
class UnnamedPay(Pay):
    pass


class OnlyPost(Pay):
    @method_decorator(on_locmem("post:{order}"))
    def post(self, request, order):
        return held()


@on_locmem("own:{request.user.pk}")
class Own(LoginRequiredMixin, Pay):
    pass


class AsyncPlain(View):
    async def get(self, request, order):
        return HttpResponse("read")

    async def post(self, request, order):
        await asyncio.sleep(0)
        return held()


@on_locmem("async:{order}")
class AsyncPay(AsyncPlain):
    pass


@method_decorator(on_locmem("async:{order}"), name="dispatch")
class AsyncMethodPay(AsyncPlain):
    pass


@on_locmem("async:{order}")
async def async_pay(request, order):
    await asyncio.sleep(0)
    return held()


@on_locmem("user:{request.user.pk}")
async def async_user(request):
    return held()


@csrf_exempt
@on_locmem("exempt")
def exempt_outside(request):
    return held()


@on_locmem("exempt")
@csrf_exempt
def exempt_inside(request):
    return held()


@on_locmem("stream")
def stream(request):
    return StreamingHttpResponse(iter([b"a", b"b"]))


@on_locmem("stream")
async def async_stream(request):
    async def body():
        yield b"a"
        yield held().content

    return StreamingHttpResponse(body())


@on_locmem("stream")
def checking_stream(request):
    def body():
        for _ in range(2):
            assert_locked("stream", using="locmem")
            yield b"inside "

    return StreamingHttpResponse(body())


@on_locmem("stream")
async def async_checking_stream(request):
    async def body():
        for _ in range(2):
            assert_locked("stream", using="locmem")
            yield b"inside "

    return StreamingHttpResponse(body())


@on_locmem("stream")
def failing_stream(request):
    def body():
        yield b"a"
        raise ConnectionResetError

    return StreamingHttpResponse(body())


@on_locmem("stream")
async def async_failing_stream(request):
    async def body():
        yield b"a"
        raise ConnectionResetError

    return StreamingHttpResponse(body())


@on_locmem("stream")
def download(request):
    return FileResponse(io.BytesIO(b"ab"))


def hiding(view):
    def wrapper(request, *args, **kwargs):
        return view(request, *args, **kwargs)

    return wrapper


def wrapping(view):
    return wraps(view)(hiding(view))


@on_locmem("write", wait=10)
def write(request, name):
    Counter.objects.create(name=name)
    if name == "fails":
        raise KeyError(name)
    if name == "loses":
        lose(Lock("write", using="locmem").acquire())
    assert connection.in_atomic_block
    return held()


@on_locmem("write")
@transaction.non_atomic_requests
def write_alone(request):
    return HttpResponse(str(connection.in_atomic_block))


@transaction.non_atomic_requests
@on_locmem("write")
def write_alone_too(request):
    return HttpResponse(str(connection.in_atomic_block))


@on_locmem("class-write")
class Write(View):
    def get(self, request):
        return HttpResponse(str(connection.in_atomic_block))

    post = get


@on_locmem("async-write")
async def async_write(request):
    return HttpResponse()


urlpatterns = [
    path("pay/<order>", LockedPay.as_view(), {"shop": object()}),
    path("unnamed/<order>", UnnamedPay.as_view()),
    path("own", Own.as_view()),
    path("named/<order>", NamedPay.as_view()),
    path("method/<order>", MethodPay.as_view()),
    path("post/<order>", OnlyPost.as_view()),
    path("around/<order>", on_locmem("around:{order}")(Pay.as_view())),
    path("async-around/<order>", on_locmem("async:{order}")(AsyncPlain.as_view())),
    path("async-class/<order>", AsyncPay.as_view()),
    path("async-method/<order>", AsyncMethodPay.as_view()),
    path("async/<order>", async_pay),
    path("async-user", async_user),
    path("exempt-outside", exempt_outside),
    path("exempt-inside", exempt_inside),
    path("stream", stream),
    path("async-stream", async_stream),
    path("login", login_required(on_locmem("login:{request.user.pk}")(lambda r: held()))),
    path("write/<name>", write),
    path("wrapped/<name>", wrapping(write)),
    path("hidden/<name>", hiding(write)),
    path("hidden-method/<order>", OnlyPost.as_view()),
    path("write-alone", write_alone),
    path("write-alone-too", write_alone_too),
    path("class-write", Write.as_view()),
    path("async-write", async_write),
]


@pytest.mark.django_db
@pytest.mark.urls("tests.test_locked_view")
@pytest.mark.parametrize("kind", ["named", "method", "post", "around"])
def test_a_class_based_view_is_locked_however_it_is_decorated(client, kind):
    assert client.post(f"/{kind}/7").content.decode() == f"{kind}:7"
    with elsewhere(f"{kind}:7"):
        assert client.post(f"/{kind}/7").status_code == 423
        assert client.get(f"/{kind}/7").status_code == 200
    assert holders() == []


@pytest.mark.django_db
@pytest.mark.urls("tests.test_locked_view")
@pytest.mark.parametrize(("kind", "name"), [("pay", "LockedPay"), ("unnamed", "UnnamedPay")])
def test_a_class_is_named_by_itself_and_what_the_url_captured(client, kind, name):
    assert client.post(f"/{kind}/7").content.decode() == (
        f"tests.test_locked_view.{name}:order=7:address=127.0.0.1"
    )


@pytest.mark.django_db
@pytest.mark.urls("tests.test_locked_view")
def test_a_view_for_users_still_sends_the_others_to_the_login(client, admin_user):
    assert client.post("/own").status_code == 302
    assert client.post("/login").status_code == 302
    client.force_login(admin_user)
    assert client.post("/own").content.decode() == f"own:{admin_user.pk}"
    assert client.post("/login").content.decode() == f"login:{admin_user.pk}"


@pytest.mark.django_db
@pytest.mark.urls("tests.test_locked_view")
@pytest.mark.parametrize("kind", ["async", "async-class", "async-method", "async-around"])
def test_an_async_view_is_locked_in_either_kind_of_server(client, kind):
    async def main():
        answer = await AsyncClient().post(f"/{kind}/7")
        with elsewhere("async:7"):
            read = await AsyncClient().get(f"/{kind}/7")
            again = await AsyncClient().post(f"/{kind}/7")
        return answer.content, read.status_code, again.status_code

    assert asyncio.run(main()) == (b"async:7", 200, 423)
    assert client.post(f"/{kind}/7").content == b"async:7"
    assert holders() == []


@pytest.mark.django_db
@pytest.mark.urls("tests.test_locked_view")
def test_an_async_view_may_be_named_by_its_user_who_is_read_from_the_database(client, admin_user):
    client.force_login(admin_user)

    assert client.post("/async-user").content.decode() == f"user:{admin_user.pk}"


def test_an_async_view_may_answer_asynchronously_when_busy():
    async def answer(request, busy):
        return HttpResponse("later")

    @on_locmem("a", busy_response=answer)
    async def pay(request):
        pass

    with elsewhere("a"):
        assert asyncio.run(pay(AsyncRequestFactory().post("/"))).content == b"later"


@pytest.mark.django_db
def test_a_plain_response_to_a_busy_async_view_may_read_the_database():
    @on_locmem("a", busy_response=lambda request, busy: HttpResponse(User.objects.count()))
    async def pay(request):
        pass

    with elsewhere("a"):
        assert async_to_sync(pay)(AsyncRequestFactory().post("/")).content == b"0"


@pytest.mark.django_db
@pytest.mark.urls("tests.test_locked_view")
def test_the_page_of_an_async_view_may_read_the_database(client, admin_user, settings, tmp_path):
    (tmp_path / "distlock_app").mkdir()
    (tmp_path / "distlock_app/busy.html").write_text("groups: {{ user.groups.count }}")
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    client.force_login(admin_user)

    with elsewhere(f"user:{admin_user.pk}"):
        page = client.post("/async-user", headers={"accept": BROWSER})

    assert (page.status_code, page.content) == (423, b"groups: 0")


def test_a_cancelled_async_view_gives_up_its_lock():
    @on_locmem("a")
    async def pay(request):
        await asyncio.sleep(30)

    async def main():
        task = asyncio.create_task(pay(AsyncRequestFactory().post("/")))
        while not holders():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    assert holders() == []


def test_the_error_of_an_async_view_is_raised_and_its_lock_released():
    @on_locmem("a")
    async def pay(request):
        raise KeyError("paid")

    with pytest.raises(KeyError, match="paid"):
        asyncio.run(pay(AsyncRequestFactory().post("/")))
    assert holders() == []


@pytest.mark.urls("tests.test_locked_view")
@pytest.mark.parametrize("url", ["/exempt-outside", "/exempt-inside"])
@pytest.mark.django_db
def test_other_marks_of_a_view_are_kept(url):
    assert Client(enforce_csrf_checks=True).post(url).content == b"exempt"


def end_early(hold, how):
    """End a hold in one of the ways that there are; say what of it is left."""
    {"dump": hold.dump, "leave_for": lambda: hold.leave_for(60), "release": hold.release}[how]()
    return HttpResponse(f"{hold.released} {len(holders())}")


@pytest.mark.parametrize(("how", "kept"), [("dump", 1), ("leave_for", 1), ("release", 0)])
def test_a_view_may_end_its_hold_or_hand_it_over(how, kept):
    @on_locmem("a")
    def pay(request):
        return end_early(current_hold(), how)

    @on_locmem("a")
    async def pay_async(request):
        return await sync_to_async(end_early)(current_hold(), how)

    assert post(pay).content.decode() == f"True {kept}"
    Lock("a", using="locmem").clear()
    answer = asyncio.run(pay_async(AsyncRequestFactory().post("/")))
    assert answer.content.decode() == f"True {kept}"
    Lock("a", using="locmem").clear()


# Streams


@pytest.mark.django_db
@pytest.mark.urls("tests.test_locked_view")
def test_a_stream_keeps_the_lock_until_it_is_closed(client):
    answer = client.post("/stream")

    assert [holder.name for holder in holders()] == ["stream"]
    assert b"".join(answer.streaming_content) == b"ab"  # the client closes it at its end
    assert holders() == []


@pytest.mark.django_db
def test_a_stream_that_is_closed_early_gives_up_its_lock():
    answer = post(stream)
    next(iter(answer))

    assert holders() != []
    answer.close()
    assert holders() == []


@pytest.mark.django_db
@pytest.mark.urls("tests.test_locked_view")
def test_an_async_stream_keeps_the_lock_until_it_is_closed():
    async def main():
        answer = await AsyncClient().post("/async-stream")
        return [part async for part in answer.streaming_content]

    assert asyncio.run(main()) == [b"a", b"stream"]
    assert holders() == []


@pytest.mark.django_db
@pytest.mark.parametrize("view", [stream, download])
def test_a_worker_whose_response_is_still_sent_does_not_take_its_lock_again(view):
    first = post(view)  # as waitress sends a file: on another thread, while this one goes on

    assert post(view).status_code == 423
    next(iter(first))
    assert post(view).status_code == 423

    first.close()
    assert holders() == []


@pytest.mark.django_db
def test_a_file_is_left_to_the_server_under_a_lock():
    answer = post(download)

    assert answer.file_to_stream.read() == b"ab"
    answer.close()


@pytest.mark.django_db
def test_each_step_of_a_stream_is_inside_its_lock():
    async def main():
        answer = await async_checking_stream(AsyncRequestFactory().post("/"))
        async with aclosing(answer.streaming_content) as parts:
            read = [part async for part in parts]
        with pytest.raises(NotHeld):
            assert_locked("stream", using="locmem")
        return read, len(holders()), await sync_to_async(answer.close)()

    answer = post(checking_stream)

    assert b"".join(answer) == b"inside inside "
    with pytest.raises(NotHeld):
        assert_locked("stream", using="locmem")
    assert holders() != []
    answer.close()
    assert asyncio.run(main()) == ([b"inside "] * 2, 1, None)
    assert holders() == []


def test_a_stream_is_not_sent_if_the_lock_was_lost_in_the_view():
    def begin(request):
        lose(current_hold())
        return StreamingHttpResponse(iter([b"a"]))

    async def abegin(request):
        return begin(request)

    with pytest.raises(LockLost):
        post(on_locmem("a")(begin))
    with pytest.raises(LockLost):
        asyncio.run(on_locmem("a")(abegin)(AsyncRequestFactory().post("/")))


@pytest.mark.parametrize("using", ["locmem", ("locmem", "locmem-two")])
def test_a_stream_that_nobody_closes_gives_up_its_lock_when_it_is_dropped(using, settings, caplog):
    settings.DISTLOCK = {**settings.DISTLOCK, "locmem-two": settings.DISTLOCK["locmem"]}

    @locked_view("stream", using=using)
    def view(request):
        return StreamingHttpResponse(iter([b"a", b"b"]))

    answer = post(view)
    body = iter(answer)
    next(body)
    del answer

    assert holders() != []  # a middleware may have put the body into a response of its own
    del body
    gc.collect()
    releaser.drain()
    assert holders() == []
    # The releaser may just now give up on a server that an earlier test has ended.
    assert not [record for record in caplog.records if "stream" in record.getMessage()]


@pytest.mark.django_db
@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume synchronous iterators")
def test_a_stream_that_cannot_be_sent_gives_up_its_lock():
    async def send():
        answer = await sync_to_async(stream)(AsyncRequestFactory().post("/"))
        async for _ in answer:  # as Django sends it, all of it read in another thread
            raise ConnectionResetError

    async def main():
        with suppress(ConnectionResetError):
            await send()
        await sync_to_async(int)()  # by now that thread has let go of its call before

    asyncio.run(main())

    gc.collect()
    releaser.drain()
    assert holders() == []


@pytest.mark.django_db
def test_a_stream_that_fails_gives_up_its_lock_though_nobody_closes_it():
    async def main():
        answer = await async_failing_stream(AsyncRequestFactory().post("/"))
        with pytest.raises(ConnectionResetError):
            _ = [part async for part in answer]
        return answer

    answer = post(failing_stream)
    with pytest.raises(ConnectionResetError):
        list(answer)
    assert holders() == []
    answers = [answer, asyncio.run(main())]
    assert holders() == []

    for answer in answers:
        answer.close()


# Transactions


@pytest.mark.django_db(transaction=True)
@pytest.mark.urls("tests.test_locked_view")
@pytest.mark.usefixtures("atomic_requests")
class TestUnderAtomicRequests:
    @pytest.mark.parametrize("kind", ["write", "wrapped"])
    def test_the_view_runs_in_its_transaction_inside_the_lock(self, client, kind):
        assert client.post(f"/{kind}/a").content == b"write"
        assert client.get(f"/{kind}/b").status_code == 200  # no lock, but the transaction
        assert Counter.objects.count() == 2

    def test_a_view_that_raises_is_rolled_back(self, client):
        with pytest.raises(KeyError):
            client.post("/write/fails")
        assert not Counter.objects.exists()
        assert holders() == []

    def test_a_lock_that_was_lost_meanwhile_commits_nothing(self, client):
        with pytest.raises(LockLost):
            client.post("/write/loses")
        assert not Counter.objects.exists()

    def test_the_lock_is_held_until_the_commit_is_done(self, client):
        seen = []

        @on_locmem("commit")
        def view(request):
            transaction.on_commit(lambda: seen.extend(h.name for h in holders()))
            return HttpResponse()

        post(view)

        assert seen == ["commit"]
        assert holders() == []

    def test_a_class_runs_in_its_transaction_too(self, client):
        assert client.post("/class-write").content == b"True"
        assert client.get("/class-write").content == b"True"

    @pytest.mark.parametrize("url", ["/write-alone", "/write-alone-too"])
    def test_a_view_that_was_exempt_stays_so(self, client, url):
        assert client.post(url).content == b"False"

    @pytest.mark.parametrize("url", ["/hidden/a", "/hidden-method/7"])
    def test_a_decorator_that_hides_the_mark_is_found_out(self, client, url):
        with pytest.raises(LockError, match="outermost"):
            client.post(url)
        assert not Counter.objects.exists()

    def test_an_async_view_is_refused_as_django_refuses_it(self, client):
        with pytest.raises(RuntimeError, match="ATOMIC_REQUESTS"):
            client.post("/async-write")


@pytest.mark.django_db
@pytest.mark.urls("tests.test_locked_view")
def test_in_a_testcase_the_tests_own_transaction_is_none(client, atomic_requests):
    assert client.post("/write/a").content == b"write"


def test_the_database_whose_commit_ends_the_lock_commits_last(monkeypatch):
    for alias in "default", "locks":
        monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)

    exempt = mark(lambda request: None, None)

    assert exempt.aliases(("default",))[0] == "default"
    assert exempt.aliases(("locks",))[0] == "locks"
    assert set(exempt.aliases(())) == {"default", "locks"}


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
@pytest.mark.parametrize(("atomic", "database"), [(True, "default"), ("locks", "locks")])
def test_a_view_may_ask_for_a_transaction_of_its_own(atomic, database):
    @on_locmem("a", atomic=atomic)
    def pay(request):
        return [c.alias for c in connections.all() if c.in_atomic_block]

    assert post(pay) == [database]


def test_wrong_uses_are_refused_when_decorating():
    async def asynchronous(request):
        pass

    with pytest.raises(TypeError, match="atomic"):
        on_locmem("a", atomic=True)(asynchronous)
    with pytest.raises(TypeError, match="atomic"):
        on_locmem("a", atomic=True)(AsyncPay)
    with pytest.raises(TypeError):
        on_locmem("a", methods="POST")
    with pytest.raises(ValueError):
        on_locmem("a", ttl=-1)
    with pytest.raises(TypeError):
        on_locmem("a")(int)


# Exclusion, of real requests


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
def test_240_posts_of_8_processes_are_all_counted_under_atomic_requests(processes):
    Counter.objects.create(name="a")

    answers = processes.run("tests.view_workers:post", count=8, url="/locked/a", times=30)

    assert Counter.objects.get(name="a").value == 240
    assert answers == [[[200, "in a transaction"]]] * 8


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite refuses the second writer itself")
@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
def test_posts_are_lost_under_a_lock_that_is_released_before_the_commit(processes):
    Counter.objects.create(name="a")

    processes.run("tests.view_workers:post", count=8, url="/early/a", times=10)

    assert Counter.objects.get(name="a").value < 80


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
@pytest.mark.urls("tests.view_workers")
@pytest.mark.usefixtures("atomic_requests")
def test_80_posts_to_a_threaded_server_are_all_counted_under_atomic_requests(settings, live_server):
    settings.DISTLOCK = LOCKS_APART
    Counter.objects.create(name="a")
    answers = []

    def work():
        for _ in range(10):
            with urlopen(f"{live_server.url}/locked/a", data=b"", timeout=60) as answer:
                answers.append(answer.read())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert answers == [b"in a transaction"] * 80
    assert Counter.objects.get(name="a").value == 80


@pytest.mark.parametrize("roll_back", [False, True], ids=["committed", "half rolled back"])
@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
def test_a_plain_lock_inside_of_atomic_loses_nothing(processes, roll_back):
    Counter.objects.create(name="a")

    kept = processes.run(
        "tests.view_workers:bump_in_transactions",
        count=8,
        name="a",
        times=12,
        roll_back=roll_back,
    )

    assert sum(kept) == (48 if roll_back else 96)
    assert Counter.objects.get(name="a").value == sum(kept)
