"""Locks and guards under the libraries that projects use them with: the real ones."""

from __future__ import annotations

import os
import queue
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from importlib.util import find_spec

import pytest
from celery import signals as celery_signals
from django.contrib.auth.models import User
from django.db import transaction
from django.test import Client
from django.urls import include, path
from django.utils import timezone
from django.utils.decorators import method_decorator
from rest_framework import exceptions, serializers, viewsets
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.decorators import action, api_view, authentication_classes
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView

from distlock_app import Lock, LockBusy, locked, locked_view
from distlock_app.core.registry import registry
from distlock_app.etags import guarded_view, require_match, with_etag
from distlock_app.testing import held_elsewhere, override_locks
from tests import celery_project
from tests.app.models import Counter
from tests.app.versioned_models import Account
from tests.engines import until

on_locmem = partial(locked_view, using="locmem")
on_locmem_function = partial(locked, using="locmem", wait=0)
elsewhere = partial(held_elsewhere, using="locmem")

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.test_integrations")]


def held():
    """Return the names of all locks that anybody holds."""
    return sorted(holding.name for holding in registry["locmem"].backend.holders())


# Django REST framework


class TokenAuthentication(BaseAuthentication):
    """Knows a user by a header, inside the view, as REST framework does it."""

    def authenticate(self, request):
        name = request.headers.get("Authorization")
        if name is None:
            return None
        try:
            return User.objects.get(username=name), None
        except User.DoesNotExist:
            raise exceptions.AuthenticationFailed("nobody has this token") from None


class Plain(APIView):
    authentication_classes = [TokenAuthentication]

    def get(self, request):
        return Response(held())

    def post(self, request):
        return Response(held())


@on_locmem("cart:{request.user.pk}")
class Cart(Plain):
    pass


@on_locmem("session:{request.user.pk}")
class BySession(Plain):
    authentication_classes = [SessionAuthentication]


@on_locmem()
class Unnamed(Plain):
    pass


@on_locmem("function:{request.user.pk}:{item}")
@api_view(["POST"])
@authentication_classes([TokenAuthentication])
def outside(request, item):
    return Response(held())


@api_view(["POST"])
@authentication_classes([TokenAuthentication])
@on_locmem("function:{request.user.pk}:{item}")
def inside(request, item):
    return Response(held())


@on_locmem("write", atomic=True, methods=["POST"])
class Write(APIView):
    def post(self, request):
        Counter.objects.create(name="written")
        raise exceptions.ValidationError("no, after all")

    patch = post


class AccountSerializer(serializers.ModelSerializer):
    class Meta:
        model = Account
        fields = ["owner", "balance", "version"]


@method_decorator(on_locmem("account:{pk}"), name="update")
@method_decorator(transaction.non_atomic_requests, name="dispatch")
class Accounts(viewsets.ModelViewSet):
    queryset = Account.objects.all()
    serializer_class = AccountSerializer
    authentication_classes = [TokenAuthentication]

    def retrieve(self, request, pk):
        account = self.get_object()
        return with_etag(Response(self.get_serializer(account).data), account)

    def perform_update(self, serializer):
        require_match(self.request, serializer.instance, required=False)
        serializer.save()

    @action(detail=True, methods=["post"])
    @on_locmem("account:{pk}:{request.user.pk}")
    def freeze(self, request, pk):
        return Response(held())


@method_decorator(guarded_view, name="dispatch")
class GuardedAccounts(Accounts):
    pass


router = SimpleRouter()
router.register("accounts", Accounts)
router.register("guarded-class", GuardedAccounts, basename="guarded")
urlpatterns = [
    path("cart", Cart.as_view()),
    path("session", BySession.as_view()),
    path("unnamed", Unnamed.as_view()),
    path("outside/<item>", outside),
    path("inside/<item>", inside),
    path("viewset/<pk>", on_locmem("set:{request.user.pk}")(Accounts.as_view({"put": "freeze"}))),
    path("write", Write.as_view()),
    path("", include(router.urls)),
    path("guarded/<pk>/", guarded_view(Accounts.as_view({"get": "retrieve", "put": "update"}))),
]


@pytest.fixture
def ann():
    return User.objects.create_user("ann")


@pytest.fixture
def account():
    return Account.objects.create(owner="ann", balance=100)


@pytest.mark.parametrize(
    "url, name",
    [
        ("/cart", "cart:{pk}"),
        ("/unnamed", "tests.test_integrations.Unnamed:user={pk}"),
        ("/outside/7", "function:{pk}:7"),
        ("/inside/7", "function:{pk}:7"),
        ("/accounts/7/freeze/", "account:7:{pk}"),
    ],
)
def test_a_lock_is_named_by_the_user_whom_rest_framework_finds(client, ann, url, name):
    response = client.post(url, headers={"Authorization": "ann"})

    assert response.json() == [name.format(pk=ann.pk)]


def test_a_whole_viewset_may_be_locked(client, ann):
    response = client.put("/viewset/7", headers={"Authorization": "ann"})

    assert sorted(response.json()) == [f"account:7:{ann.pk}", f"set:{ann.pk}"]


def test_a_token_that_is_refused_is_answered_by_the_view(client):
    response = client.post("/cart", headers={"Authorization": "eve"})

    assert response.status_code == 403
    assert response.json() == {"detail": "nobody has this token"}


def test_a_session_that_fails_the_check_of_csrf_is_refused_as_without_the_lock(ann):
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(ann)

    response = strict.post("/session")

    assert response.status_code == 403
    assert response.json()["detail"].startswith("CSRF Failed")


@pytest.mark.parametrize("url", ["/cart", "/inside/7", "/accounts/7/freeze/"])
def test_rest_clients_are_told_423_as_json(stopped_clock, client, ann, url):
    headers = {"Authorization": "ann", "Accept": "application/json"}
    [name] = client.post(url, headers=headers).json()

    with elsewhere(name, ttl=5):
        response = client.post(url, headers=headers)

    assert (response.status_code, response["Retry-After"]) == (423, "5")
    assert response.json()["retry_after"] == 5
    assert client.get("/cart", headers=headers).json() == []


def test_what_rest_framework_answers_with_an_error_is_rolled_back(client):
    assert client.post("/write").status_code == 400
    assert client.patch("/write").status_code == 400  # not locked, in a transaction all the same
    assert not Counter.objects.exists()


def put(client, url, **changes):
    """Send what is to be changed, and perhaps If-Match, as JSON."""
    headers = {"If-Match": changes.pop("match")} if "match" in changes else {}
    return client.put(url, changes, content_type="application/json", headers=headers)


def test_a_method_of_a_viewset_is_locked(client, account, atomic_requests):
    url = f"/accounts/{account.pk}/"

    with elsewhere(f"account:{account.pk}"):
        assert put(client, url, balance=1).status_code == 423
    assert put(client, url, balance=1).json() == {"owner": "ann", "balance": 1, "version": 2}


@pytest.mark.parametrize("kind", ["guarded", "guarded-class"])
def test_a_serializer_saves_under_the_version_that_the_client_has_read(client, account, kind):
    url = f"/{kind}/{account.pk}/"
    tag = client.get(url)["ETag"]

    first = put(client, url, balance=90, match=tag)
    second = put(client, url, balance=80, match=tag)

    assert (first.status_code, second.status_code) == (200, 412)
    account.refresh_from_db()
    assert account.balance == 90


def test_a_client_cannot_set_the_version_that_it_is_shown(client, account):
    response = put(client, f"/guarded/{account.pk}/", balance=90, version=70)

    assert response.json()["version"] == 2


def test_what_changed_since_the_serializer_read_it_is_a_conflict(client, account, monkeypatch):
    def meanwhile(view, serializer):
        Account.objects.filter(pk=account.pk).update(balance=1)
        serializer.save()

    monkeypatch.setattr(Accounts, "perform_update", meanwhile)

    assert put(client, f"/guarded/{account.pk}/", balance=90).status_code == 409
    account.refresh_from_db()
    assert account.balance == 1


# Celery: the tasks of docs/how-to/tasks.md, and a worker


@pytest.fixture(scope="module")
def documented():
    return celery_project.documented()


@pytest.fixture(scope="module")
def worker(documented, django_db_setup, django_db_blocker):
    """A Celery worker in this process; return the tasks of docs/how-to/tasks.md."""
    with ExitStack() as stack:
        with django_db_blocker.unblock():  # it checks the models when it starts
            stack.enter_context(celery_project.worker_here())
        yield documented


@pytest.fixture
def retries():
    """What Celery says of tasks that are to be tried again, as it says it."""
    said = queue.SimpleQueue()

    def receiver(request, reason, **facts):
        said.put(reason)

    celery_signals.task_retry.connect(receiver)
    yield said
    celery_signals.task_retry.disconnect(receiver)


def test_a_busy_task_of_celery_comes_again(worker, retries):
    with override_locks():
        with held_elsewhere("invoice:7"):
            result = worker.send_invoice.delay(7)
            assert isinstance(retries.get(timeout=60).exc, LockBusy)
        result.get(timeout=60)

    assert result.successful()


def test_a_busy_task_of_celery_may_come_when_the_lock_may_be_free(worker, retries):
    with override_locks(), held_elsewhere("import:7", ttl=50):
        worker.import_from.delay("7")

        assert 0 < retries.get(timeout=60).when <= 50


def test_a_task_of_celery_is_refused_as_a_function_to_lock(worker):
    with pytest.raises(TypeError, match="Swap the decorators"):
        locked("invoice:{invoice_id}")(worker.send_invoice)


def test_what_a_task_of_celery_gets_is_checked_when_it_is_sent(worker):
    with pytest.raises(TypeError, match="invoice_id"):
        worker.send_invoice.delay()


def test_a_lock_is_handed_over_to_a_task_of_celery(worker, monkeypatch):
    sent = []
    monkeypatch.setattr(worker.charge, "delay", lambda *args: sent.append(args))

    with override_locks():
        worker.start(7)
        assert not Lock("order:7").try_acquire()

        worker.charge.apply_async(sent[0]).get(timeout=30)

        assert not Lock("order:7").locked()


@pytest.mark.slow
@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
def test_children_of_celery_exclude_each_other_and_release_at_time_limits(processes, redis_url):
    Counter.objects.create(name="celery")
    env = {"TESTS_CELERY_REDIS": redis_url, "TESTS_CELERY_PREFIX": f"celery-{os.getpid()}:"}
    worker = processes.start("tests.celery_project:work", env=env)
    assert worker.read(60) == "ready"

    pids = processes.run("tests.celery_project:send", count=1, name="celery", times=4, env=env)[0]

    assert Counter.objects.get(name="celery").value == 4
    assert worker.pid not in pids
    for limit, error in {"soft_time_limit": "Soft", "time_limit": ""}.items():
        [said] = processes.run("tests.celery_project:end", count=1, env=env, **{limit: 1})
        assert said == f"{error}TimeLimitExceeded"
        until(lambda: not Lock("stuck").locked(), within=10)  # its ttl is longer


# Django Tasks

needs_django_tasks = pytest.mark.skipif(
    not find_spec("django.tasks"), reason="django.tasks came with Django 6.0"
)


@on_locmem_function("task:{number}")
def report(number, deeper=False):
    """Return the locks that are held, here and in a task that this one enqueues."""
    if deeper:
        return [held(), django_task(report).enqueue(number).return_value]
    return held()


@on_locmem_function("task:{number}")
async def areport(number):
    return held()


@on_locmem_function("task:{number}:{context.attempt}")
def report_with_context(context, number):
    return held()


def django_task(function, **options):
    from django.tasks import task

    return task(**options)(function)


@needs_django_tasks
@pytest.mark.parametrize("function", [report, areport])
def test_a_task_of_django_runs_under_its_lock(function):
    result = django_task(function).enqueue(7)

    assert result.return_value == ["task:7"]
    assert held() == []


@needs_django_tasks
def test_a_task_of_django_may_be_named_by_its_context():
    result = django_task(report_with_context, takes_context=True).enqueue(7)

    assert result.return_value == ["task:7:1"]


@needs_django_tasks
def test_a_task_that_a_task_enqueues_and_runs_at_once_enters_its_lock_again():
    result = django_task(report).enqueue(7, deeper=True)

    assert result.return_value == [["task:7"], ["task:7"]]


@needs_django_tasks
def test_a_busy_task_of_django_fails_as_busy():
    with elsewhere("task:7"):
        result = django_task(report).enqueue(7)

    assert [error.exception_class for error in result.errors] == [LockBusy]


@needs_django_tasks
def test_a_busy_task_of_django_is_sent_again_for_later(documented, settings):
    from django.tasks import task_backends

    settings.TASKS = {"default": {"BACKEND": "django.tasks.backends.dummy.DummyBackend"}}
    before = timezone.now()

    with override_locks(), held_elsewhere("settle:7", ttl=50):
        documented.settle.call(7)

    [sent] = task_backends["default"].results
    assert sent.args == [7]
    assert timedelta(0) < sent.task.run_after - before < timedelta(seconds=60)
