"""Management commands under a lock, from shells and from code."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import BaseCommand, LabelCommand
from django.db import connection, transaction

from distlock_app import Lock, LockBusy, LockLost, current_hold, locked_command
from distlock_app.core.registry import registry
from distlock_app.errors import Terminated
from distlock_app.testing import held_elsewhere, lose
from tests import nursery
from tests.app.models import Counter
from tests.engines import until
from tests.launching import ROOT

# Django 6.1 checks every database before a command.
pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "locks"])

NAP = "command:testapp.lock_nap"


def holders(using="default"):
    return list(registry[using].backend.holders())


def command(handle, *args, **options):
    """A locked command whose `handle` is this function."""

    class Command(BaseCommand):
        requires_system_checks = []

        def add_arguments(self, parser):
            parser.add_argument("--shop")

    Command.handle = handle
    return locked_command(*args, **{"using": "locmem", **options})(Command)


@pytest.fixture
def shells():
    """Commands of the test's app in other processes, killed at the end of the test."""
    started = []

    def start(*arguments):
        started.append(nursery.command("tests.app", *arguments, env={}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=30)


# From shells


def test_of_two_started_at_once_one_runs_and_the_other_says_so_and_exits_with_75(shells, tmp_path):
    end = tmp_path / "end"
    nap = ["lock_nap", "--seconds=90", f"--until={end}", "--skip-checks"]
    both = [shells(*nap) for _ in range(2)]

    until(lambda: any(process.poll() is not None for process in both), within=60)
    end.touch()
    outputs = [process.communicate(timeout=90) for process in both]

    assert sorted(process.returncode for process in both) == [0, 75]
    for process, (out, err) in zip(both, outputs, strict=True):
        if process.returncode == 0:
            assert (out, err) == ("running\ndone\n", "")
        else:
            [other] = [p for p in both if p is not process]
            assert out == ""
            assert err.startswith("CommandError: lock_nap is already running: ")
            assert f"'{NAP}' is held by host" in err
            assert f"process {other.pid}, manage.py lock_nap, for " in err
    assert holders() == []


@pytest.mark.crowd
@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
def test_a_busy_command_exits_with_75_although_its_stderr_cannot_be_written(stderr):
    closed = ["sh", "-c", f'exec "$@" {stderr}', "sh"]
    command = [sys.executable, "-m", "django", "lock_nap", "--skip-checks"]
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}

    with held_elsewhere(NAP):
        assert subprocess.call([*closed, *command], env=environment, cwd=ROOT, timeout=60) == 75


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_a_signal_releases_the_lock(shells, number, code):
    process = shells("lock_nap", "--seconds=60")
    assert process.stdout.readline() == "running\n", process.stderr.read()
    assert [holder.name for holder in holders()] == [NAP]

    process.send_signal(number)

    assert process.wait(30) == code
    assert holders() == []


def test_a_kill_leaves_the_lock_to_its_ttl(shells):
    process = shells("lock_nap", "--seconds=60", "--lock-ttl=1")
    assert process.stdout.readline() == "running\n", process.stderr.read()

    process.kill()
    process.wait(30)

    Lock(NAP, wait=15).acquire().release()


@pytest.mark.once
def test_help_explains_the_options(shells):
    out, _ = shells("lock_nap", "--help").communicate(timeout=60)

    assert "--lock-wait SECONDS" in out
    assert "--lock-ttl SECONDS" in out
    assert "--no-lock" in out


@pytest.mark.slow
def test_200_terminated_commands_leave_no_lock(processes):
    workers = [
        processes.start("tests.command_workers:terminate_children", number=100, seed=seed)
        for seed in range(2)
    ]

    ends = [worker.result() for worker in workers]

    # Before the handler is there, the signal ends the process: it has no lock yet.
    assert {code for of_worker in ends for code in of_worker} <= {"143", "-15", "0", "75"}
    assert sum(of_worker.get("143", 0) for of_worker in ends) > 50
    assert holders() == []


# From code


def test_the_lock_is_held_while_the_command_runs():
    seen = []
    nap = command(lambda self, **options: seen.extend(holders("locmem")))

    call_command(nap())

    assert [holder.name for holder in seen] == [f"command:{__name__}"]
    assert seen[0].holder["who"] == "manage.py test_locked_command"
    assert holders("locmem") == []


def test_call_command_gets_an_error_with_the_exit_code():
    with (
        held_elsewhere(NAP),
        pytest.raises(CommandError, match="is already running") as error,
    ):
        call_command("lock_nap")

    assert error.value.returncode == 75
    assert isinstance(error.value.__cause__, LockBusy)


def test_options_make_it_wait_or_run_without_the_lock():
    out = io.StringIO()
    with held_elsewhere(NAP):
        started = time.monotonic()
        with pytest.raises(CommandError):
            call_command("lock_nap", lock_wait=0.3)
        assert time.monotonic() - started > 0.29
        call_command("lock_nap", no_lock=True, stdout=out)
    assert out.getvalue() == "running\ndone\n"


def test_waiting_for_ever_is_inf():
    with held_elsewhere(NAP, ttl=0.3):
        call_command("lock_nap", "--lock-wait=inf", stdout=io.StringIO())


@pytest.mark.parametrize(
    "option, told",
    [
        ("--lock-wait=-1", "--lock-wait: wait must be 0 .* or more seconds, not -1"),
        ("--lock-ttl=0", "--lock-ttl: ttl must be 0.1 to .* seconds, not 0"),
        ("--lock-ttl=x", "--lock-ttl: invalid seconds value: 'x'"),
    ],
)
def test_options_that_make_no_sense_are_refused(option, told):
    with pytest.raises(CommandError, match=told):
        call_command("lock_nap", option)


def test_a_busy_command_may_be_skipped_in_silence():
    out, err = io.StringIO(), io.StringIO()

    with held_elsewhere("settle:a"):
        assert call_command("lock_shop", "a", stdout=out, stderr=err) is None
        assert (out.getvalue(), err.getvalue()) == ("", "")
        call_command("lock_shop", "a", verbosity=2, stdout=out, stderr=err)
        assert "lock_shop is already running" in out.getvalue()
        assert call_command("lock_shop", "b", stdout=out) == "settled b"


def test_the_name_is_made_of_the_options():
    def handle(self, **options):
        return holders("locmem")[0].name

    by_template = command(handle, "shop:{shop}")
    by_function = command(handle, name=lambda shop, **options: f"shop-{shop}")

    assert call_command(by_template(), shop="a:b", stdout=io.StringIO()) == "shop:a%3Ab"
    assert call_command(by_function(), shop="a", stdout=io.StringIO()) == "shop-a"
    with pytest.raises(ValueError, match="shop"):
        call_command(by_template())
    with pytest.raises(ValueError, match=r"\{city\}.*options of the command"):
        call_command(command(handle, "shop:{city}")())


@pytest.mark.parametrize(
    ("naming", "name"),
    [
        ({"template": "load:{args}"}, "load:a,b"),
        ({"name": lambda args, **options: f"load {len(args)}"}, "load 2"),
    ],
    ids=["template", "function"],
)
def test_arguments_without_an_option_can_be_in_the_name(naming, name):
    @locked_command(naming.get("template"), name=naming.get("name"), using="locmem")
    class Load(LabelCommand):  # as `loaddata`
        def handle_label(self, label, **options):
            return holders("locmem")[0].name

    assert call_command(Load(), "a", "b", stdout=io.StringIO()) == f"{name}\n{name}"


def test_a_lock_that_the_command_itself_finds_busy_is_its_own_affair():
    nap = command(lambda self, **options: Lock("x", using="locmem", wait=0).acquire(), "mine")

    with held_elsewhere("x", using="locmem"), pytest.raises(LockBusy):
        call_command(nap())
    assert holders("locmem") == []


def test_a_command_that_fails_gives_up_its_lock():
    def handle(self, **options):
        raise CommandError("fails", returncode=3)

    with pytest.raises(CommandError, match="fails"):
        call_command(command(handle)())
    assert holders("locmem") == []


def test_checks_come_before_the_lock():
    order = []

    class Command(BaseCommand):
        requires_system_checks = ["models"]

        def check(self, **kwargs):
            order.append(f"checks, {len(holders('locmem'))} locks")

        def handle(self, **options):
            order.append(f"work, {len(holders('locmem'))} locks")

    call_command(locked_command("c", using="locmem")(Command)(), skip_checks=False)

    assert order == ["checks, 0 locks", "work, 1 locks"]


def test_an_atomic_command_commits_only_under_its_lock():
    def handle(self, shop, **options):
        Counter.objects.create(name=shop)
        assert connection.in_atomic_block
        if shop == "loses":
            lose(Lock("c", using="locmem").acquire())

    atomic = command(handle, "c", atomic=True)

    call_command(atomic(), shop="keeps")
    with pytest.raises(LockLost):
        call_command(atomic(), shop="loses")
    assert [counter.name for counter in Counter.objects.all()] == ["keeps"]


def test_an_atomic_command_may_end_its_hold():
    def handle(self, **options):
        Counter.objects.create(name="kept")
        current_hold().leave_for(60)

    call_command(command(handle, "c", atomic=True)())

    assert Counter.objects.exists()
    assert Lock("c", using="locmem").clear() == 1


# At least


def test_a_quick_job_keeps_its_lock_for_a_time_after_its_end():
    started = time.monotonic()
    out = io.StringIO()

    assert call_command("lock_shop", "a", stdout=out) == "settled a"

    assert call_command("lock_shop", "a", stdout=out) is None
    Lock("settle:a", wait=15).acquire().release()
    assert 1.99 < time.monotonic() - started < 15


def test_a_quick_job_keeps_its_lock_although_its_process_has_ended(shells):
    process = shells("lock_shop", "a")
    out, err = process.communicate(timeout=60)

    assert (process.returncode, out, err) == (0, "settled a\n", "")
    Lock("settle:a", wait=15).acquire().release()


def test_a_lock_is_kept_no_longer_than_at_least():
    call_command(command(lambda self, **options: None, at_least=5)())

    assert [0 < holder.expires_in <= 5 for holder in holders("locmem")] == [True]


def test_who_finds_it_kept_is_told_why():
    call_command(command(lambda self, **options: None, at_least=60)())

    with pytest.raises(CommandError, match=r", for \d+ s, and kept for at least 60 s even"):
        call_command(command(lambda self, **options: None, at_least=60)())


def test_a_job_that_failed_keeps_it_too_but_one_that_was_stopped_does_not():
    with pytest.raises(RuntimeError):
        call_command("lock_shop", "a", fail=True)
    assert [holder.name for holder in holders()] == ["settle:a"]

    def stopped(self, **options):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_command(command(stopped, at_least=60)())
    assert holders("locmem") == []


def test_a_long_job_gives_up_its_lock_at_its_end():
    call_command(command(lambda self, **options: time.sleep(0.2), at_least=0.15)())

    assert holders("locmem") == []


def test_in_a_transaction_a_lock_is_kept_from_its_end():
    with transaction.atomic():
        call_command(command(lambda self, **options: None, at_least=5)())
        assert [holder.expires_in > 5 for holder in holders("locmem")] == [True]

    assert [0 < holder.expires_in <= 5 for holder in holders("locmem")] == [True]


def test_a_job_that_sigterm_ended_does_not_keep_it():
    with pytest.raises(Terminated):
        call_command(command(lambda self, **o: os.kill(os.getpid(), signal.SIGTERM), at_least=60)())

    assert holders("locmem") == []


# SIGTERM


def test_sigterm_ends_the_run_and_is_what_it_was_afterwards():
    def handle(self, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    with pytest.raises(Terminated) as error:
        call_command(command(handle)())

    assert error.value.code == 143
    assert holders("locmem") == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("verb", ["acquire", "release"])
@pytest.mark.parametrize("after", [False, True])
def test_sigterm_on_the_way_into_the_lock_or_out_of_it_leaves_it_free(monkeypatch, verb, after):
    backend = registry["locmem"].backend
    unpatched = getattr(backend, verb)

    def interrupted(*args):
        monkeypatch.undo()
        if not after:
            signal.raise_signal(signal.SIGTERM)
        answer = unpatched(*args)
        if after:
            signal.raise_signal(signal.SIGTERM)
        return answer

    monkeypatch.setattr(backend, verb, interrupted)
    with pytest.raises(Terminated) as error:
        call_command(command(lambda self, **options: None)())

    assert error.value.code == 143
    until(lambda: not holders("locmem"))


def test_sigterm_just_after_the_lock_was_taken_leaves_it_free(monkeypatch):
    unpatched = Lock.acquire

    def interrupted(lock):
        hold = unpatched(lock)
        signal.raise_signal(signal.SIGTERM)
        return hold

    monkeypatch.setattr(Lock, "acquire", interrupted)
    with pytest.raises(Terminated) as error:
        call_command(command(lambda self, **options: None)())

    assert holders("locmem") == []
    del error  # until here its traceback referred to the hold


def test_sigterm_does_not_interrupt_the_release(monkeypatch):
    backend = registry["locmem"].backend
    unpatched, answers = backend.release, []

    def interrupted(grant):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGTERM)
        answers.append(unpatched(grant))
        return answers[-1]

    monkeypatch.setattr(backend, "release", interrupted)
    with pytest.raises(Terminated):
        call_command(command(lambda self, **options: None)())

    assert answers == [True]


def test_a_sigterm_that_the_command_swallows_still_ends_the_run():
    def handle(self, shop, **options):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except SystemExit:
            if shop == "fails":
                raise CommandError("half of it is done", returncode=3) from None
            return "finished in order"

    with pytest.raises(Terminated):
        call_command(command(handle)())
    with pytest.raises(CommandError, match="half"):
        call_command(command(handle)(), shop="fails")
    assert holders("locmem") == []


def test_a_child_of_the_command_ends_by_sigterm_as_without_the_lock(processes):
    worker = processes.start("tests.command_workers:terminate_child_of_command")

    assert worker.result() == "-15"


def test_handlers_of_the_project_are_left_alone():
    came = []

    def own(*args):
        came.append(1)

    before = signal.signal(signal.SIGTERM, own)
    try:
        call_command(command(lambda self, **o: os.kill(os.getpid(), signal.SIGTERM))())
        signal.signal(signal.SIGTERM, before)
        call_command(command(lambda self, **o: signal.signal(signal.SIGTERM, own) and None)())
    finally:
        after = signal.signal(signal.SIGTERM, before)

    assert (came, after) == ([1], own)


def test_in_another_thread_there_is_no_handler_and_the_lock_works():
    seen = []
    thread = threading.Thread(
        target=lambda: call_command(
            command(
                lambda self, **o: seen.append(
                    (len(holders("locmem")), signal.getsignal(signal.SIGTERM))
                )
            )()
        )
    )
    thread.start()
    thread.join(30)

    assert seen == [(1, signal.SIG_DFL)]


def test_a_command_that_inherits_the_lock_may_override_what_it_does():
    seen = []

    def handle(self, **options):
        seen.append([holder.name for holder in holders("locmem")])

    class Noted(BaseCommand):
        def __init__(self, *args, **kwargs):
            seen.append("made")
            super().__init__(*args, **kwargs)

    class Override(command(handle, "c:{shop}", atomic=True), Noted):
        def handle(self, **options):
            super().handle(**options)

    class Mixin:
        def handle(self, **options):
            handle(self)

    class Mixed(Mixin, command(handle, "c:{shop}")):
        pass

    call_command(Override(), shop="a")
    call_command(Override(), shop="a", no_lock=True)
    call_command(Mixed(), shop="b")
    assert seen == ["made", ["c:a"], "made", [], ["c:b"]]


def test_a_command_with_a_lock_may_inherit_another_one():
    def handle(self, **options):
        return ",".join(sorted(holder.name for holder in holders("locmem")))

    @locked_command("inner:{shop}", using="locmem")
    class Inherits(command(handle, "outer:{shop}")):
        pass

    def run(*options):
        return call_command(Inherits(), "--shop=a", *options, stdout=io.StringIO())

    assert run() == "inner:a,outer:a"
    assert run("--no-lock") == ""
    for name in "inner:a", "outer:a":
        with held_elsewhere(name, using="locmem"):
            with pytest.raises(CommandError, match=name):
                run()
            assert run("--no-lock") == name
        with held_elsewhere(name, ttl=0.3, using="locmem"):
            assert run("--lock-wait=60") == "inner:a,outer:a"


def test_only_classes_of_commands_can_be_decorated():
    for wrong in (print, Counter, BaseCommand()):
        with pytest.raises(TypeError):
            locked_command("a")(wrong)
    with pytest.raises(ValueError):
        locked_command("a", ttl=-1)
    with pytest.raises(ValueError):
        locked_command("{a!r}")


def test_an_engine_that_is_down_is_told_without_a_traceback(settings):
    down = "tests.failing_engines.UnreachedBackend"
    settings.DISTLOCK = {**settings.DISTLOCK, "down": {"BACKEND": down}}

    with pytest.raises(CommandError) as error:
        call_command(command(lambda self, **options: "done", "settle", using="down")())

    assert error.value.returncode == 69
    assert str(error.value) == "cannot take the lock 'settle' (alias 'down'): no route to db7"
