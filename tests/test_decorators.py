"""Functions under a lock: names, kinds of functions, busy locks, wrong uses."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import inspect
import threading
import time
import uuid
import warnings
from types import SimpleNamespace

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, transaction
from django.utils.functional import SimpleLazyObject

from distlock_app import (
    Lock,
    LockBusy,
    LockLost,
    NotHeld,
    all_of,
    assert_locked,
    current_hold,
    locked,
    locked_command,
    locked_view,
    unique_task,
)
from distlock_app.core.lease import Lease
from distlock_app.core.registry import registry
from distlock_app.decorators.naming import NameTemplate
from distlock_app.testing import held_elsewhere
from tests.app.models import Counter

on_locmem = functools.partial(locked, using="locmem", wait=0)


def held(using="locmem"):
    """The names of all locks that anybody holds."""
    return sorted(holding.name for holding in registry[using].backend.holders())


def path_of(function):
    return f"{function.__module__}.{function.__qualname__}"


# Names


def test_the_name_is_made_of_the_arguments_however_they_are_passed():
    @on_locmem("invoice:{invoice_id}:{kind}")
    def pay(invoice_id, *, kind="full"):
        return held()

    assert pay(42) == pay(invoice_id=42) == ["invoice:42:full"]
    assert pay(42, kind="part") == ["invoice:42:part"]


def test_a_field_may_lead_to_attributes_and_items():
    @on_locmem("{request.user.pk}:{items[0]}:{sizes[big]}:{more}")
    def buy(request, items, sizes, **options):
        return held()

    request = SimpleNamespace(user=SimpleLazyObject(lambda: SimpleNamespace(pk=7)))

    assert buy(request, ["a"], {"big": 9}, more="m") == ["7:a:9:m"]


def test_a_method_is_named_by_its_object():
    class Order:
        pk = 5

        @on_locmem("order:{self.pk}")
        def ship(self):
            return held()

    assert Order().ship() == ["order:5"]


def test_a_keyword_does_not_pass_for_a_positional_only_argument():
    @on_locmem("order:{pk}")
    def change(pk, /, **data):
        return held()

    assert change(5, pk=6) == ["order:5"]


def test_without_a_template_the_name_is_the_dotted_path():
    @on_locmem()
    def settle():
        return held()

    assert settle() == [path_of(settle)]


@pytest.mark.django_db(transaction=True)
def test_the_decorator_needs_no_parentheses():
    @locked
    def settle():
        return held("default")

    assert settle() == [path_of(settle)]
    assert held("default") == []


def test_a_function_of_the_arguments_may_give_the_name():
    @on_locmem(name=lambda a, b=2: f"sum:{a + b}")
    def first(a, b=2):
        return held()

    @on_locmem(lambda a: f"one:{a}")
    def second(a):
        return held()

    assert first(1) == ["sum:3"]
    assert second(a=1) == ["one:1"]


def test_a_named_function_needs_name_since_it_could_be_what_is_decorated():
    def name_of(a):
        return a

    for options in ({"wait": 0}, {"on_busy": "skip"}, {"in_transaction": True}):
        with pytest.raises(TypeError, match="name="):
            locked(name_of, **options)


@pytest.mark.parametrize("decorator", [locked, locked_view, locked_command, unique_task])
def test_what_cannot_name_a_lock_is_refused_before_anything_is_decorated(decorator):
    with pytest.raises(TypeError, match="name= must be a function .*, not 'nightly'"):
        decorator(name="nightly")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": "x:y", "b": "z"}, {"a": "x", "b": "y:z"}),
        ({"a": "x%3Ay", "b": "z"}, {"a": "x:y", "b": "z"}),
        ({"a": "x", "b": ""}, {"a": "", "b": "x"}),
        ({"a": ":", "b": ""}, {"a": "", "b": ":"}),
    ],
)
@pytest.mark.parametrize("template", ["{a}:{b}", "{a}-and-{b}", "n:{a}/{b}", "{a}{{{b}}}"])
def test_different_values_never_give_the_same_name(template, one, other):
    template = NameTemplate(template)

    assert template.fill(one) != template.fill(other)


def test_separators_of_the_template_are_quoted_inside_of_values():
    assert NameTemplate("{a}-{b}:c").fill({"a": "1-2", "b": "é:%"}) == "1%2D2-é%3A%25:c"


def test_plain_values_are_written_as_they_are():
    key = uuid.UUID(int=1)

    assert NameTemplate("k:{key}").fill({"key": key}) == f"k:{key}"
    assert NameTemplate("k:{key}").fill({"key": Counter(pk=3)}) == "k:3"
    assert NameTemplate("k:{key}").fill({"key": enum.Enum("Kind", {"A": "a"}).A}) == "k:a"
    assert NameTemplate("k:{key}").fill({"key": 1}) == NameTemplate("k:{key}").fill({"key": "1"})


@pytest.mark.parametrize("value", [None, Counter(), [1], b"x", object(), print, int])
def test_a_value_that_names_nothing_is_refused_with_its_field(value):
    with pytest.raises(ValueError, match=r"\{key\} in the lock name 'k:\{key\}'"):
        NameTemplate("k:{key}").fill({"key": value})


def test_a_field_that_leads_nowhere_is_refused_with_its_name():
    with pytest.raises(ValueError, match=r"\{a\.b\[3\]\}.*IndexError"):
        NameTemplate("{a.b[3]}").fill({"a": SimpleNamespace(b=[])})


@pytest.mark.parametrize(
    "template",
    ["{missing}", "{}", "{0}", "{a._b}", "{a.__class__}", "{a!r}", "{a:>9}", "{a}{b}", "{a}and{b}",
     "{a}%{b}", "{a", "a}", "", "{a.b.}", "{a[]}"],
)  # fmt: skip
def test_a_bad_template_is_refused_when_decorating(template):
    def work(a, b):
        pass

    with pytest.raises(ValueError):
        on_locmem(template)(work)


def test_a_field_that_is_no_argument_is_named_when_decorating():
    with pytest.raises(ValueError, match=r"\{invoice\}.*arguments of .*pay\(\): invoice_id"):

        @on_locmem("{invoice}")
        def pay(invoice_id):
            pass


def test_a_wrapped_function_is_known_by_its_real_arguments():
    def wrapping(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    @on_locmem("n:{number}")
    @wrapping
    def work(number=1):
        return held()

    assert work() == ["n:1"]


def test_a_bound_method_that_is_wrapped_is_known_by_its_arguments_without_self():
    class Account:
        @on_locmem("a")
        def pay(self, number, amount=0):
            return held()

        close = classmethod(pay)

    for method in (Account().pay, Account.close):
        work = on_locmem("n:{number}")(method)

        assert work(1, 100) == work(number=1) == ["a", "n:1"]


# Kinds of functions


def test_the_lock_is_released_when_the_function_ends_or_raises():
    @on_locmem("a")
    def work(error):
        assert held() == ["a"]
        if error:
            raise error

    work(None)
    assert held() == []
    with pytest.raises(KeyError):
        work(KeyError("x"))
    assert held() == []


def test_a_coroutine_is_locked_until_it_ends():
    @on_locmem("n:{number}")
    async def work(number):
        for phase in (inside, looked):
            phase.append(held())
            while len(phase) < 2:
                await asyncio.sleep(0.001)

    inside, looked = [], []

    async def main():
        await asyncio.gather(*(work(n) for n in range(2)))

    asyncio.run(main())

    assert looked == [["n:0", "n:1"]] * 2
    assert held() == []


def test_two_tasks_of_one_function_exclude_each_other():
    value = 0

    @locked("task", using="locmem", wait=10)
    async def add():
        nonlocal value
        seen = value
        await asyncio.sleep(0.001)
        value = seen + 1

    async def main():
        await asyncio.gather(*(add() for _ in range(20)))

    asyncio.run(main())

    assert value == 20


def test_threads_that_share_a_decorated_function_exclude_each_other():
    value = 0

    @locked("thread", using="locmem", wait=30)
    def add():
        nonlocal value
        seen = value
        threading.Event().wait(0.0005)
        value = seen + 1

    threads = [threading.Thread(target=lambda: [add() for _ in range(25)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert value == 200
    assert held() == []


def test_a_generator_is_locked_while_it_runs():
    @on_locmem("g")
    def rows():
        got = yield 1
        yield got
        return "end"

    running = rows()
    assert held() == []  # nothing of it has run yet
    assert next(running) == 1
    assert held() == ["g"]
    assert running.send("sent") == "sent"
    with pytest.raises(StopIteration, match="end"):
        next(running)
    assert held() == []


def test_a_generator_that_is_closed_early_gives_up_its_lock():
    @on_locmem("g")
    def rows():
        yield from range(9)

    running = rows()
    next(running)
    running.close()

    assert held() == []


def test_a_generator_may_be_finished_by_another_thread():
    @on_locmem("g")
    def rows():
        yield 1

    running = rows()
    next(running)
    thread = threading.Thread(target=running.close)
    thread.start()
    thread.join(10)

    assert held() == []


def test_an_async_generator_is_locked_while_it_runs():
    @on_locmem("g")
    async def rows():
        try:
            got = yield 1
            yield got
        except KeyError:
            yield "caught"
            yield held()

    async def main():
        running = rows()
        seen = [await anext(running), held(), await running.asend(2)]
        seen.append(await running.athrow(KeyError()))
        seen += [item async for item in running]
        return [*seen, held()]

    assert asyncio.run(main()) == [1, ["g"], 2, "caught", ["g"], []]


def test_an_async_generator_that_is_closed_early_ends_before_its_lock():
    seen = []

    @on_locmem("g")
    async def rows():
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            seen.append(held())

    @on_locmem("stubborn")
    async def stubborn():
        with contextlib.suppress(GeneratorExit):
            yield 1
        yield 2

    async def close(running):
        await anext(running)
        await running.aclose()

    asyncio.run(close(rows()))
    assert seen == [["g"]]
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        asyncio.run(close(stubborn()))
    assert held() == []


def test_a_context_manager_is_locked_from_its_start_to_its_end():
    @contextlib.contextmanager
    @on_locmem("cm:{name}")
    def session(name):
        yield held()

    with session("a") as seen:
        assert seen == ["cm:a"]
    assert held() == []


def test_what_asgiref_adapts_keeps_its_name_and_arguments():
    async def send(pk):
        return await sync_to_async(held)()

    def pack(pk):
        return held()

    named = on_locmem("pk:{pk}")(async_to_sync(send))
    bare = on_locmem()(async_to_sync(send))

    assert named(1) == ["pk:1"]
    assert asyncio.run(on_locmem("pk:{pk}")(sync_to_async(pack))(2)) == ["pk:2"]
    assert bare(1) == [f"{__name__}.{send.__qualname__}"]
    assert (named.__name__, named.__module__) == ("send", __name__)  # Celery names tasks by these


def test_a_locked_function_may_call_itself():
    @on_locmem("deep")
    def down(depth):
        return held() if depth == 0 else down(depth - 1)

    assert down(3) == ["deep"]
    assert held() == []


@pytest.mark.django_db(transaction=True)
def test_an_atomic_function_runs_in_a_transaction_inside_its_lock():
    @locked("a", atomic=True)
    def work():
        Counter.objects.create(name="a")
        Counter.objects.filter(name="nobody").delete()
        return connection.in_atomic_block

    @locked("b", using="locmem", atomic=True)
    def fail():
        Counter.objects.create(name="b")
        raise KeyError

    assert work() is True
    with pytest.raises(KeyError):
        fail()
    assert [counter.name for counter in Counter.objects.all()] == ["a"]


# Busy


def test_a_busy_lock_raises_skips_or_asks():
    calls = []

    @on_locmem("busy")
    def raises():
        calls.append("raises")

    @on_locmem("busy", on_busy="skip")
    def skips():
        calls.append("skips")

    @on_locmem("busy", on_busy=lambda busy, a, b=2: (type(busy), a, b))
    def asks(a, b=2):
        calls.append("asks")

    with held_elsewhere("busy", using="locmem"):
        with pytest.raises(LockBusy):
            raises()
        assert skips() is None
        assert asks(1) == (LockBusy, 1, 2)
    assert calls == []


def test_busy_generators_and_coroutines_are_skipped_or_replaced():
    @on_locmem("busy", on_busy="skip")
    def none():
        yield 1

    @on_locmem("busy", on_busy=lambda busy: [7])
    def others():
        yield 1

    @on_locmem("busy", on_busy="skip")
    async def coroutine():
        return 1

    @on_locmem("busy", on_busy="skip")
    async def stream():
        yield 1

    @on_locmem("busy", on_busy=lambda busy: [7])
    async def replaced():
        yield 1

    async def answer(busy):
        return 8

    @on_locmem("busy", on_busy=answer)
    async def asked():
        return 1

    async def main():
        items = [item async for item in stream()], [item async for item in replaced()]
        return await coroutine(), await asked(), *items

    with held_elsewhere("busy", using="locmem"):
        assert (list(none()), list(others())) == ([], [7])
        assert asyncio.run(main()) == (None, 8, [], [7])


def test_a_busy_lock_inside_of_the_function_is_no_reason_to_skip_it():
    skipping = on_locmem("mine", on_busy="skip")
    lock = Lock("busy", using="locmem", wait=0)

    def generator():
        yield lock.acquire()

    async def coroutine():
        await lock.aacquire()

    async def stream():
        yield await lock.aacquire()

    async def first_item():
        await anext(skipping(stream)())

    with held_elsewhere("busy", using="locmem"):
        for work in (
            skipping(lambda: lock.acquire()),
            lambda: next(skipping(generator)()),
            lambda: asyncio.run(skipping(coroutine)()),
            lambda: asyncio.run(first_item()),
        ):
            with pytest.raises(LockBusy):
                work()
    assert held() == []


# Wrong uses


@pytest.mark.parametrize("method", ["enqueue", "defer_async"])  # of Django, of Procrastinate
def test_a_task_object_is_refused_with_the_order_that_works(method):
    class Task:
        def __call__(self):
            pass

    setattr(Task, method, Task.__call__)
    with pytest.raises(TypeError, match="Swap the decorators"):
        on_locmem("a")(Task())


def test_a_task_of_django_is_refused_and_takes_a_locked_function():
    tasks = pytest.importorskip("django.tasks")

    with pytest.raises(TypeError, match="Swap the decorators"):
        on_locmem("a")(tasks.task(module_level_task))

    assert tasks.task(module_level_task).call() == [path_of(module_level_task)]


@on_locmem()
def module_level_task():
    return held()


@pytest.mark.parametrize("wrong", [int, classmethod(print), staticmethod(print), 3])
def test_what_is_no_function_is_refused(wrong):
    with pytest.raises(TypeError):
        on_locmem("a")(wrong)


def test_wrong_options_are_refused_when_decorating():
    for options, error in (
        ({"ttl": 0}, ValueError),
        ({"ttk": 1}, TypeError),
        ({"using": "nowhere"}, Exception),
        ({"using": "default", "fair": True}, ValueError),
        ({"on_busy": "sometimes"}, ValueError),
    ):
        with pytest.raises(error):
            locked("a", **options)


def test_what_runs_later_cannot_be_atomic():
    async def coroutine():
        pass

    def generator():
        yield

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match="atomic"):
            on_locmem("a", atomic=True)(function)


def test_an_answer_that_nobody_would_await_is_refused():
    async def answer(busy):
        return 8

    def generator():
        yield

    for function in (lambda: 1, generator):
        with pytest.raises(TypeError, match="answer is awaited by coroutine functions only"):
            on_locmem("a", on_busy=answer)(function)


def test_a_plain_function_whose_work_comes_later_is_refused():
    async def coroutine():
        pass

    def generator():
        yield

    async def stream():
        yield

    loop = asyncio.new_event_loop()
    with pytest.raises(TypeError, match="returned a Task, which would run without the lock"):
        on_locmem("a")(lambda: loop.create_task(coroutine()))()
    loop.run_until_complete(asyncio.sleep(0))  # in which it is cancelled
    loop.close()

    for work in (coroutine, generator, stream):
        with pytest.raises(TypeError, match="without the lock"):
            on_locmem("a")(lambda work=work: work())()

    for manager in (contextlib.contextmanager(generator), contextlib.asynccontextmanager(stream)):
        with pytest.raises(TypeError, match="ContextManager, which would run without the lock"):
            on_locmem("a")(manager)()


def test_decorating_connects_to_nothing(settings):
    settings.DISTLOCK = {
        "default": {
            "BACKEND": "distlock_app.backends.database.DatabaseBackend",
            "LOCATION": "default",
        }
    }

    locked("a", ttl=5)(print)  # no database is allowed in this test


def test_what_it_decorates_keeps_its_name_and_attributes():
    @on_locmem("a")
    def work(pk):
        """Work."""

    assert (work.__name__, work.__doc__) == ("work", "Work.")
    # Celery asks so what may be sent to a task.
    assert inspect.getfullargspec(work).args == ["pk"]


# current_hold


def test_decorated_code_finds_its_hold():
    @on_locmem("invoice:{number}")
    def send(number):
        hold = current_hold()
        assert hold is current_hold(f"invoice:{number}", using="locmem")
        hold.check()
        with Lock("stock", using="locmem") as inner:
            assert current_hold() is inner
            assert current_hold(f"invoice:{number}", using="locmem") is hold
        assert current_hold() is hold
        return hold

    hold = send(7)

    assert hold.released
    for wanted in [(), ("invoice:7",)]:
        with pytest.raises(NotHeld):
            current_hold(*wanted, using="locmem")


def test_code_that_takes_its_lock_again_still_has_a_hold():
    lock = Lock("a", using="locmem")

    with lock as outer:
        with lock:
            assert current_hold().fence == outer.fence
        assert current_hold() is outer


def test_the_current_hold_is_the_innermost_also_of_locks_taken_again():
    a, b, c = (Lock(name, using="locmem") for name in "abc")
    found = []

    def look():
        found.append(current_hold().name)

    @on_locmem("a")
    def again():
        look()
        with b:
            look()
            with c:
                look()
                with a, a:
                    look()
                look()
            look()
        look()

    with a, b:
        again()
        look()
        with pytest.raises(LockBusy), a:
            raise LockBusy
        look()
    assert "".join(found) == "abcacba" + "bb"


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_the_last_of_several_is_the_current_one_whichever_was_taken_first(names):
    with all_of(*(Lock(name, using="locmem") for name in names)) as holds:
        assert current_hold() is holds[1]


def test_a_hold_that_is_entered_later_is_the_current_one():
    first, second = (Lock(name, using="locmem").acquire() for name in "ab")

    with second:
        with first:
            assert current_hold() is first
        assert current_hold() is second


def test_a_hold_that_another_thread_enters_is_not_the_current_one_here():
    def enter():
        with hold:
            assert current_hold() is hold

    hold = Lock("a", using="locmem").acquire()
    with Lock("b", using="locmem") as inner:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert current_hold() is inner


def test_another_thread_may_release_a_hold_while_the_current_one_is_looked_for(monkeypatch):
    def while_another_releases(lease):
        if not other.released:
            thread = threading.Thread(target=other.release)
            thread.start()
            thread.join()
        return entered_holds(lease)

    entered_holds = Lease.entered_holds
    with Lock("a", using="locmem") as hold:
        other = Lock("b", using="locmem").acquire().enter()
        monkeypatch.setattr(Lease, "entered_holds", while_another_releases)

        assert current_hold("a", using="locmem") is hold


def test_a_bare_acquire_and_another_thread_have_no_current_hold():
    found = []

    def look():
        with contextlib.suppress(NotHeld):
            found.append(current_hold())

    hold = Lock("a", using="locmem").acquire()
    look()
    with hold:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert current_hold() is hold

    assert found == []


def test_each_task_finds_its_own_hold():
    @on_locmem("c{number}")
    async def hold_it(number):
        await asyncio.sleep(0.01)
        return current_hold().name

    async def main():
        return await asyncio.gather(*(hold_it(number) for number in range(5)))

    assert asyncio.run(main()) == [f"c{number}" for number in range(5)]


# assert_locked


def test_code_that_needs_a_lock_says_so():
    with pytest.raises(NotHeld, match="stock"):
        assert_locked("stock", using="locmem")
    with Lock("stock", using="locmem"):
        assert_locked("stock", using="locmem")
        with pytest.raises(NotHeld):
            assert_locked("Stock", using="locmem")
        with pytest.raises(NotHeld):
            assert_locked("stock", using="dummy")
    with pytest.raises(NotHeld):
        assert_locked("stock", using="locmem")


def test_a_lock_that_another_thread_or_task_holds_is_not_held_here():
    async def child():
        assert_locked("b", using="locmem")

    async def main():
        async with Lock("b", using="locmem"):
            assert_locked("b", using="locmem")
            with pytest.raises(NotHeld):
                await asyncio.create_task(child())

    with held_elsewhere("a", using="locmem"), pytest.raises(NotHeld):
        assert_locked("a", using="locmem")
    asyncio.run(main())


def test_a_shared_hold_is_enough_only_where_that_is_said():
    with Lock("s", using="locmem", shared=True):
        assert_locked("s", using="locmem", shared=True)
        with pytest.raises(NotHeld):
            assert_locked("s", using="locmem")
    with Lock("s", using="locmem"):
        assert_locked("s", using="locmem", shared=True)


def test_a_lost_lock_is_not_taken_for_a_held_one():
    with pytest.raises(LockLost), Lock("l", using="locmem", ttl=0.1, renew=False):
        threading.Event().wait(0.15)

        with pytest.raises(LockLost):
            assert_locked("l", using="locmem")


def test_a_hold_without_a_with_is_no_held_lock_for_it_may_have_been_passed_on():
    hold = Lock("b", using="locmem").acquire()

    with pytest.raises(NotHeld):
        assert_locked("b", using="locmem")
    with hold:
        assert_locked("b", using="locmem")


@pytest.mark.django_db(transaction=True)
def test_a_lock_that_only_waits_for_the_commit_is_not_held_by_the_code_any_more():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # REPEATABLE READ in some runs
        with transaction.atomic():
            hold = Lock("c", using="locmem").acquire()
            hold.release()
            assert held() == ["c"]
            with pytest.raises(NotHeld):
                assert_locked("c", using="locmem")
    assert held() == []


# Leaving a lock to its time


def test_a_lock_that_is_left_for_a_time_is_busy_until_then():
    hold = Lock("cool", using="locmem", ttl=2).acquire()

    hold.leave_for(5)

    with pytest.raises(LockBusy):
        Lock("cool", using="locmem", wait=2.2).acquire()
    Lock("cool", using="locmem", wait=10).acquire().release()
    with pytest.raises(NotHeld):
        hold.release()


def test_a_lock_that_is_left_for_less_than_its_ttl_ends_then():
    hold = Lock("soon", using="locmem", ttl=600).acquire()
    left_at = time.monotonic()

    hold.leave_for(0.3)

    with Lock("soon", using="locmem", wait=10).acquire() as next_hold:
        assert time.monotonic() - left_at >= 0.3
        assert next_hold.fence > hold.fence


def test_a_lock_of_a_named_owner_is_not_taken_from_its_other_process():
    lock = Lock("named", using="locmem", ttl=600, owner="job 7")

    lock.acquire().leave_for(0.3)

    assert [holder.expires_in > 300 for holder in lock.holders()] == [True]


def test_a_lock_that_is_left_is_not_taken_from_the_hold_around_it():
    lock = Lock("nested", using="locmem", ttl=600)
    with lock as outer:
        lock.acquire().leave_for(0.3)

        assert [holder.expires_in > 300 for holder in lock.holders()] == [True]
        outer.check()
    assert [holder.expires_in <= 0.3 for holder in lock.holders()] in ([True], [])


def test_a_lock_that_was_taken_away_cannot_be_left():
    hold = Lock("gone", using="locmem").acquire()
    hold_elsewhere = Lock("gone", using="locmem")
    hold_elsewhere.clear()

    with hold_elsewhere, pytest.raises(LockLost):
        hold.leave_for(0.3)

    assert hold.released and hold.lost


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_a_lock_cannot_be_left_until_before_now(seconds):
    with Lock("past", using="locmem") as hold:
        with pytest.raises(ValueError, match="0 or more seconds"):
            hold.leave_for(seconds)

        hold.check()


def test_a_lock_that_is_left_belongs_to_nobody_here():
    Lock("cool2", using="locmem").acquire().leave_for(5)

    with pytest.raises(NotHeld):
        assert_locked("cool2", using="locmem")
    with pytest.raises(LockBusy):
        Lock("cool2", using="locmem", wait=0).acquire()


@pytest.mark.parametrize("wrong", [[Lock("a", using="locmem")], "a", None])
def test_all_of_takes_nothing_but_locks(wrong):
    with pytest.raises(TypeError, match=r"takes locks, all_of\(\*locks\), not "):
        all_of(Lock("b", using="locmem"), wrong)
