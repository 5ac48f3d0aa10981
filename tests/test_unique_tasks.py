"""`unique_task` with Celery and with the tasks of Django; see also test_killed_tasks.py."""

from __future__ import annotations

import asyncio
import pickle
import queue
import threading
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec

import pytest
from celery import Celery, group, shared_task
from celery.app.task import Context
from celery.signals import task_revoked
from celery.worker.state import revoked
from django.db import transaction
from kombu.exceptions import OperationalError

from distlock_app import (
    BackendError,
    Lock,
    LockBusy,
    LockError,
    current_hold,
    locked,
    unique_task,
)
from distlock_app.core.registry import registry
from distlock_app.decorators.tasks import CARRIER
from distlock_app.testing import held_elsewhere, override_locks
from tests import engines
from tests.celery_project import app, worker_here
from tests.engines import until

DEADLINE = 60
TTL = 50  # more than that of the alias

ran: queue.SimpleQueue = queue.SimpleQueue()
ran_parts: list = []
may_end = threading.Event()
# What follows upon a retry or a replacement.
next_may_end = threading.Event()


@unique_task("index:{pk}", ttl=TTL)
@shared_task
def index(pk, then="end"):
    ran.put((pk, then))
    assert may_end.wait(DEADLINE)


@unique_task("bill:{pk}", until="success", ttl=TTL)
@shared_task(bind=True)
def bill(task, pk, then="end"):
    """Say that it runs, and end when it may; return for how long its lock is kept."""
    ran.put((pk, then))
    assert (next_may_end if task.request.retries else may_end).wait(DEADLINE)
    if then == "retry" and not task.request.retries:
        raise task.retry((pk,), {"then": "again"}, countdown=1)
    if then == "retry in atomic()" and not task.request.retries:
        with transaction.atomic():
            raise task.retry((pk,), {"then": "again"}, countdown=1)
    if then == "fail":
        raise ValueError(pk)
    return expires_in(current_hold().name)


@unique_task("pair:{pk}", until="success", ttl=TTL)
@shared_task(bind=True)
def pair(task, pk):
    """Retry once, with arguments that JSON has changed."""
    ran.put(pk)
    if not task.request.retries:
        raise task.retry(countdown=0.1)


@unique_task("page:{pk}", until="success", ttl=TTL)
@shared_task(bind=True)
def page(task, pk, how):
    """Go on with the next page: as a retry, or in the place of this task."""
    ran.put(pk)
    assert (may_end if pk == 1 else next_may_end).wait(DEADLINE)
    if pk == 1 and how == "retry":
        raise task.retry((2, how), countdown=1)
    if pk == 1:
        raise task.replace(task.s(2, how).set(countdown=1))


@unique_task(name=lambda pk: f"part:{pk}:{len(ran_parts)}", until="success", ttl=TTL)
@shared_task(bind=True)
def part(task, pk):
    """Retry once, when its name has become another one."""
    ran_parts.append([holding.name for holding in Lock(f"part:{pk}:0").holders()])
    if not task.request.retries:
        raise task.retry(countdown=0.1)


@unique_task("guarded:{pk}")
@shared_task(bind=True, autoretry_for=(LockBusy, BackendError), default_retry_delay=0.1)
@locked("guarding:{pk}")
def guarded(task, pk):
    return Lock(f"guarded:{pk}").locked()


@unique_task("short", until="success", ttl=5)
@shared_task(bind=True)
def short(task):
    return [expires_in("short"), sorted(task.request.headers)]


@unique_task("load:{pk}", on_duplicate="raise")
@shared_task
def load(pk):
    pass


@unique_task(name=lambda pk: f"store:{pk}", on_duplicate=lambda busy, pk: (type(busy), pk))
@shared_task
def store(pk):
    pass


@unique_task()
@shared_task
def alone(pk):
    pass


@unique_task
@shared_task
def bare(pk):
    pass


@unique_task("shop:{request.shop}")
@shared_task
def misnamed(pk):
    pass


@shared_task
def block():
    ran.put("blocked")
    assert may_end.wait(DEADLINE)


@pytest.fixture(autouse=True)
def locks_in_memory():
    may_end.set()
    next_may_end.set()
    with override_locks():
        yield
    app.control.purge()
    while not ran.empty():
        ran.get()


@pytest.fixture
def worker():
    """A worker of Celery with one thread, in this process; without it, messages wait."""
    with worker_here():
        yield


@contextmanager
def busy():
    """Let the worker do something else, so that messages wait in the queue."""
    may_end.clear()
    blocked = block.delay()
    try:
        assert ran.get(timeout=DEADLINE) == "blocked"
        yield
    finally:
        may_end.set()
    blocked.get(timeout=DEADLINE)


def waiting():
    """Return how many messages wait for a worker of Celery."""
    with app.connection_for_write() as connection:
        return connection.default_channel.queue_declare("celery").message_count


engine = pytest.fixture(engines.install)


def expires_in(name):
    [holding] = Lock(name).holders()
    return holding.expires_in


def test_a_task_is_queued_once_for_each_key(worker):
    with busy():
        sent = [index.delay(pk) for pk in (1, 2, 1, 2, 1)]

        assert [result is not None for result in sent] == [True, True, False, False, False]
        assert waiting() == 2

    assert [ran.get(timeout=DEADLINE)[0] for _ in range(2)] == [1, 2]
    assert not Lock("index:1").locked()


def test_until_start_a_task_that_runs_can_be_queued_again(worker):
    may_end.clear()
    index.delay(1)
    ran.get(timeout=DEADLINE)

    second = index.delay(1)

    may_end.set()
    second.get(timeout=DEADLINE)


def test_until_success_it_cannot(worker):
    may_end.clear()
    result = bill.delay(1)
    ran.get(timeout=DEADLINE)

    assert bill.delay(1) is None

    may_end.set()
    result.get(timeout=DEADLINE)
    bill.delay(1).get(timeout=DEADLINE)


def test_a_task_that_failed_can_be_queued_again(worker):
    with pytest.raises(ValueError):
        bill.delay(1, then="fail").get(timeout=DEADLINE)

    bill.delay(1).get(timeout=DEADLINE)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("then", ["retry", "retry in atomic()"])
def test_a_retry_keeps_the_lock(worker, then):
    next_may_end.clear()
    result = bill.delay(1, then=then)
    fences = [Lock("bill:1").holders()[0].fence]
    ran.get(timeout=DEADLINE)

    assert ran.get(timeout=DEADLINE) == (1, "again")

    fences += [holding.fence for holding in Lock("bill:1").holders()]
    next_may_end.set()
    result.get(timeout=DEADLINE)
    assert fences[0] == fences[1]
    assert not Lock("bill:1").locked()


def test_a_retry_keeps_the_lock_also_while_the_backend_is_down(engine, worker):
    may_end.clear()
    result = bill.delay(1, then="retry")
    ran.get(timeout=DEADLINE)
    engine.fail("extend", times=1)
    may_end.set()

    assert ran.get(timeout=DEADLINE) == (1, "again")
    result.get(timeout=DEADLINE)
    assert engine.asked.count("acquire") == 1
    assert not Lock("bill:1").locked()


@pytest.mark.parametrize("carried", [True, False])
def test_a_retry_is_sent_also_while_the_backend_is_down(engine, worker, carried):
    with busy():
        result = guarded.delay(1) if carried else app.send_task(guarded.name, (1,))
        engine.fail("acquire", times=2)  # the lock of the function, and that of its retry

    assert result.get(timeout=DEADLINE) is False
    assert "acquire" in engine.asked
    assert not Lock("guarded:1").locked()


def test_a_duplicate_may_raise_or_call():
    load.delay(1)
    store.delay(1)

    with pytest.raises(LockBusy):
        load.delay(1)
    assert store.delay(1) == (LockBusy, 1)


@pytest.mark.parametrize("task", [alone, bare])
def test_without_a_template_the_task_itself_is_unique(task):
    assert task.delay(1)
    assert task.delay(2) is None
    assert Lock(task.name).locked()


def test_every_way_to_send_a_task_takes_the_lock(worker):
    with busy():
        index.delay(1)

        assert index.apply_async((1,), {"then": "end"}, priority=1) is None
        assert index.s(1).delay() is None
        assert app.tasks[index.name].apply_async(kwargs={"pk": 1}) is None  # as beat does
        group(index.s(1), index.s(2)).apply_async()
        assert waiting() == 2


def send_to_nobody(task, *args):
    """Send a task by a broker that cannot be reached."""
    elsewhere = Celery(broker="amqp://127.0.0.1:1", set_as_current=False)
    at_once = {"max_retries": 0, "interval_start": 0, "interval_step": 0}
    with (
        elsewhere.connection_for_write(transport_options=at_once) as unreachable,
        pytest.raises(OperationalError),
    ):
        task.apply_async(args, connection=unreachable, retry=False)


def test_a_broker_that_refuses_the_message_leaves_no_lock():
    send_to_nobody(index, 1)

    assert not Lock("index:1").locked()


def test_it_leaves_none_either_if_the_backend_of_the_lock_is_down_too(engine):
    engine.fail("end_in")
    engine.fail("release", times=2)

    send_to_nobody(index, 1)

    until(lambda: not Lock("index:1").locked())


@pytest.mark.parametrize("due", ["countdown", "eta"])
def test_the_lock_waits_from_when_the_task_is_due(due):
    when = {"countdown": 500, "eta": datetime.now(timezone.utc) + timedelta(seconds=500)}

    index.apply_async((1,), **{due: when[due]})

    assert 500 < expires_in("index:1") <= 500 + TTL


def test_a_retry_keeps_the_lock_whatever_json_made_of_the_arguments(worker):
    with busy():
        result = pair.delay((1, 2))
        assert Lock("pair:1,2").locked()

    result.get(timeout=DEADLINE)
    assert [ran.get(timeout=DEADLINE) for _ in range(2)] == [[1, 2], [1, 2]]
    assert not Lock("pair:1,2").locked()


def test_a_retry_keeps_the_lock_although_its_name_has_become_another_one(worker):
    ran_parts.clear()

    part.delay(1).get(timeout=DEADLINE)

    assert ran_parts == [["part:1:0"]] * 2


@pytest.mark.parametrize("how", ["retry", "replace"])
def test_a_task_that_goes_on_with_another_key_takes_its_lock_and_leaves_the_old_one(worker, how):
    may_end.clear()
    page.delay(1, how)
    assert ran.get(timeout=DEADLINE) == 1
    assert not Lock("page:2").locked()

    next_may_end.clear()
    may_end.set()
    until(lambda: not Lock("page:1").locked())
    assert Lock("page:2").locked()
    assert page.delay(2, how) is None

    next_may_end.set()
    assert ran.get(timeout=DEADLINE) == 2
    until(lambda: not Lock("page:2").locked())


def test_a_bound_task_with_autoretry_and_a_lock_of_its_own_is_named_by_its_arguments():
    assert guarded.delay(1)
    assert guarded.delay(pk=1) is None


def test_a_task_that_runs_keeps_its_lock_for_the_ttl_of_the_alias_only(worker):
    with busy():
        result = bill.delay(1)
        assert registry["default"].ttl < expires_in("bill:1") <= TTL

    assert result.get(timeout=DEADLINE) <= registry["default"].ttl


def test_a_ttl_that_is_shorter_is_that_of_the_task_that_runs_too(worker):
    seconds, _ = short.delay().get(timeout=DEADLINE)

    assert seconds <= 5


def test_a_task_that_starts_late_takes_the_lock_again(worker):
    with busy():
        result = bill.delay(1)
        Lock("bill:1").clear()  # as at the end of the ttl

    assert result.get(timeout=DEADLINE)
    assert not Lock("bill:1").locked()


def test_a_task_that_starts_late_leaves_it_to_a_newer_one(worker):
    with busy():
        old = bill.delay(1)
        Lock("bill:1").clear()
        new = bill.delay(1)

    assert old.get(timeout=DEADLINE) is None
    assert new.get(timeout=DEADLINE)
    assert ran.qsize() == 1


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_a_task_that_will_not_run_gives_up_its_lock(worker, how):
    with busy():
        result = index.apply_async((1,), expires=-1 if how == "expired" else None)
        if how == "revoked":
            revoked.add(result.id)

    until(lambda: not Lock("index:1").locked())
    assert ran.empty()


@pytest.mark.parametrize(
    ("task", "terminated", "kept"), [(index, True, 0), (bill, False, 0), (bill, True, 1)]
)
def test_a_task_that_is_revoked_keeps_its_lock_only_while_it_may_still_run(task, terminated, kept):
    task.delay(1)
    name = f"{task.name.rpartition('.')[2]}:1"
    with app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        message = queue.get(timeout=DEADLINE)
        message.ack()
    assert expires_in(name) > 30

    # What the main process of a worker with child processes sends.
    signum = 15 if terminated else None
    request = Context(message.headers)
    task_revoked.send(
        sender=task, request=request, terminated=terminated, signum=signum, expired=False
    )

    assert [holding.expires_in <= 30 for holding in Lock(name).holders()] == [True] * kept


@pytest.mark.django_db(transaction=True)
def test_a_task_is_enqueued_after_the_commit():
    for options in {}, {"task_id": "of-the-caller"}:
        with transaction.atomic(), pytest.raises(LockError, match="after the commit"):
            index.apply_async((1,), **options)

    with transaction.atomic():
        transaction.on_commit(lambda: index.delay(1))
        assert not Lock("index:1").locked()
    assert Lock("index:1").locked()


@pytest.mark.django_db
def test_the_transaction_of_a_test_does_not_count():
    assert index.delay(1)


def test_what_was_not_enqueued_with_the_lock_runs_without(worker):
    with held_elsewhere("index:1"):
        index(1, "called")
        index.apply((1, "applied"))
        app.send_task(index.name, (1, "sent by name")).get(timeout=DEADLINE)

    assert [ran.get(timeout=1)[1] for _ in range(3)] == ["called", "applied", "sent by name"]


@pytest.fixture
def eager():
    app.conf.task_always_eager = True
    yield
    app.conf.task_always_eager = False


def test_an_eager_task_takes_and_releases_its_lock(eager):
    assert bill.delay(1).get()
    assert bill.delay(1, then="retry").get()
    assert not Lock("bill:1").locked()
    with held_elsewhere("bill:1"):
        assert bill.delay(1) is None


def test_the_headers_of_the_caller_are_sent_too(worker):
    _, headers = short.apply_async(headers={"tenant": "a"}).get(timeout=DEADLINE)

    assert headers == [CARRIER, "tenant"]


def test_a_lock_that_cannot_be_had_now_is_no_duplicate(engine):
    engine.fail("acquire")

    with pytest.raises(BackendError):
        index.delay(1)


def test_a_task_that_cannot_take_its_lock_over_fails_and_gives_it_up(engine, worker):
    with busy():
        result = index.delay(1)
        engine.fail("end_in")
        engine.fail("release", times=2)

    with pytest.raises(BackendError):
        result.get(timeout=DEADLINE)
    until(lambda: not Lock("index:1").locked())
    assert ran.empty()


@pytest.mark.parametrize("task", [index, bill], ids=["until start", "until success"])
def test_with_on_down_open_a_task_is_queued_and_runs_without_its_lock(settings, worker, task):
    settings.DISTLOCK = {"default": {"BACKEND": "tests.engines.FakeBackend", "ON_DOWN": "open"}}
    engine = registry["default"].backend
    with busy():
        task.delay(1, "sent before")
        for verb in ("acquire", "extend", "end_in", "release"):
            engine.fail(verb)
        task.delay(2, "sent while it is down")

    assert [ran.get(timeout=DEADLINE)[0] for _ in range(2)] == [1, 2]
    engine.go_on()
    name = task.name.rpartition(".")[2]
    until(lambda: not Lock(f"{name}:1").locked())


def test_a_field_that_is_no_argument_is_refused_when_the_task_is_sent():
    with pytest.raises(ValueError, match=r"\{request.shop\}.*arguments of .*misnamed\(\): pk"):
        misnamed.delay(1)


def test_a_task_of_an_app_is_made_when_it_is_used():
    other = Celery("other", broker="memory://", set_as_current=False)

    @unique_task("lazy")
    @other.task(shared=False)
    def lazy():
        pass

    assert not lazy.__evaluated__()
    assert lazy.delay()
    assert lazy.delay() is None


@pytest.mark.filterwarnings("ignore:Task name")  # in random order; see below
def test_a_shared_task_is_unique_in_every_app():
    later = Celery("later", broker="memory://", set_as_current=False)

    task = later.tasks[index.name]

    assert task is not app.tasks[index.name]
    assert task.delay(1)
    assert task.delay(1) is None


@pytest.mark.filterwarnings("ignore:Task name")
def test_a_task_whose_module_is_imported_again_can_be_sent():
    def index_again(pk):
        pass

    unique_task("index:{pk}")(shared_task(name=index.name)(index_again))

    assert index.delay(1)


def test_it_goes_above_the_decorator_of_the_queue():
    def job_of_rq():
        pass

    job_of_rq.enqueue = job_of_rq.delay = lambda: None

    for function in (index.run, job_of_rq):
        with pytest.raises(TypeError, match="above a task's decorator"):
            unique_task("a")(function)
        with pytest.raises(TypeError, match="above a task's decorator"):
            unique_task(function)


async def no_plain_function(busy, *args):
    """Is awaited by nobody who enqueues a task."""


@pytest.mark.parametrize(
    "option, error",
    [
        ({"until": "end"}, "until must be"),
        ({"on_duplicate": "skip"}, "on_duplicate: 'drop'"),
        ({"on_duplicate": no_plain_function}, "a plain function, not <function no_plain"),
        ({"ttl": 0}, "ttl must be"),
        ({"using": "absent"}, "no alias 'absent'"),
        ({"name": repr}, "not both"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(option, error):
    with pytest.raises(Exception, match=error):
        unique_task("a", **option)


# The tasks of Django


needs_django_tasks = pytest.mark.skipif(
    not find_spec("django.tasks"), reason="django.tasks came with Django 6.0"
)

if find_spec("django.tasks"):
    from django.tasks import TaskContext, task, task_backends

    @unique_task("tell:{pk}", ttl=TTL)
    @task
    def tell(pk):
        return Lock(f"tell:{pk}").locked()

    @unique_task("atell:{pk}", ttl=TTL)
    @task
    async def atell(pk):
        async with Lock(f"atell:{pk}", wait=0, reentrant=False):
            return "it was free"

    @unique_task("mail:{pk}", until="success", on_duplicate=lambda busy, pk: [pk], ttl=TTL)
    @task(takes_context=True)
    def mail(context, pk, deeper=False):
        if deeper:
            return mail.enqueue(pk)
        return [current_hold().name, context.attempt]

    @unique_task
    @task
    def tidy():
        pass

    @unique_task("amail:{pk}", until="success", on_duplicate=lambda busy, pk: [pk], ttl=TTL)
    @task
    async def amail(pk):
        return current_hold().name


@pytest.fixture
def queued(settings):
    """What is in a queue of Django that has no worker."""
    settings.TASKS = {"default": {"BACKEND": "django.tasks.backends.dummy.DummyBackend"}}
    return task_backends["default"].results


def start(result):
    """Run a task as a worker of Django does."""
    context = [TaskContext(task_result=result)] if result.task.takes_context else []
    return result.task.call(*context, *result.args, **result.kwargs)


@needs_django_tasks
def test_a_task_of_django_is_queued_once_for_each_key(queued):
    sent = [tell.enqueue(pk) for pk in (1, 2, 1)]

    assert [result.args for result in queued] == [[1], [2]]
    assert sent[2] is None
    assert start(queued[0]) is False
    assert tell.enqueue(1)


@needs_django_tasks
def test_without_a_template_a_task_of_django_itself_is_unique(queued):
    assert tidy.enqueue()
    assert tidy.enqueue() is None
    assert Lock("tests.test_unique_tasks.tidy").locked()


@needs_django_tasks
def test_a_task_of_django_has_the_lock_until_it_has_ended():
    assert mail.enqueue(1).return_value == ["mail:1", 1]
    assert mail.enqueue(1, deeper=True).return_value == [1]
    assert not Lock("mail:1").locked()


@needs_django_tasks
def test_a_coroutine_of_django_has_it_too():
    async def enqueue():
        result = await amail.aenqueue(1)
        with held_elsewhere("amail:1"):
            return [result.return_value, await amail.aenqueue(1)]

    assert asyncio.run(enqueue()) == ["amail:1", [1]]
    assert not Lock("amail:1").locked()


@needs_django_tasks
def test_a_coroutine_of_django_has_it_until_it_starts(queued):
    atell.enqueue(1)
    assert Lock("atell:1").locked()

    assert start(queued[0]) == "it was free"


@needs_django_tasks
def test_a_coroutine_of_django_that_was_not_enqueued_takes_no_lock():
    assert asyncio.run(atell.func(1)) == "it was free"


@needs_django_tasks
@pytest.mark.parametrize("name", ["mail", "amail"])
def test_a_task_of_django_that_starts_late_leaves_the_lock_to_a_newer_one(queued, name):
    globals()[name].enqueue(1)
    Lock(f"{name}:1").clear()

    with held_elsewhere(f"{name}:1"):
        assert start(queued[0]) == [1]
    assert f"{name}:1" in start(queued[0])


@needs_django_tasks
@pytest.mark.parametrize("name", ["mail", "amail"])
def test_a_task_of_django_that_cannot_take_its_lock_over_gives_it_up(engine, queued, name):
    globals()[name].enqueue(1)
    engine.fail("end_in")

    with pytest.raises(BackendError):
        start(queued[0])
    until(lambda: not Lock(f"{name}:1").locked())


@needs_django_tasks
def test_the_lock_waits_from_when_a_task_of_django_is_to_run(queued):
    due = datetime.now(timezone.utc) + timedelta(seconds=500)

    tell.using(run_after=due).enqueue(1)

    assert 500 < expires_in("tell:1") <= 500 + TTL


@needs_django_tasks
def test_a_copy_of_a_task_of_django_is_unique_too(queued):
    copy = pickle.loads(pickle.dumps(tell.using(queue_name="default")))

    assert copy.enqueue(1)
    assert copy.enqueue(1) is None
    assert copy == tell


@needs_django_tasks
def test_a_task_of_django_that_is_called_takes_no_lock():
    with held_elsewhere("tell:1"):
        assert tell.call(1) is True


@needs_django_tasks
def test_the_template_is_checked_when_a_task_of_django_is_decorated():
    with pytest.raises(ValueError, match="arguments of .*tell"):
        unique_task("tell:{shop}")(task(tell.func))
