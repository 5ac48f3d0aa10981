"""What is logged about locks: the same fields in every record, and never a secret."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import re
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
from django.conf import settings as django_settings
from django.dispatch import Signal
from django.views.debug import ExceptionReporter

import distlock_app
from distlock_app import BackendError, Lock, LockBusy, LockLost, LockTimeout, signals
from distlock_app.core import acquiring, operators
from distlock_app.core.registry import registry
from distlock_app.primitives import identity
from distlock_app.testing import held_elsewhere, lose
from tests import engines
from tests.engines import running, until

PACKAGE = Path(distlock_app.__file__).parent
PAGE = Path(__file__).resolve().parent.parent / "docs/reference/errors-and-signals.md"

engine = pytest.fixture(engines.install)


class Json(logging.Handler):
    """Writes records as the usual JSON formatters do: what `extra` has put beside the rest."""

    def __init__(self):
        super().__init__()
        self.usual = set(vars(logging.makeLogRecord({})))
        self.lines = []

    def emit(self, record):
        more = {key: value for key, value in vars(record).items() if key not in self.usual}
        # Whatever it is, its text must be harmless too.
        line = {"message": self.format(record), "logger": record.name, **more}
        self.lines.append(json.dumps(line, default=repr))

    def of(self, event):
        """Return the records of this event."""
        return [line for line in map(json.loads, self.lines) if line.get("lock_event") == event]


@pytest.fixture
def log():
    handler, root = Json(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.setLevel(level)
    root.removeHandler(handler)


@pytest.fixture
def tokens(monkeypatch):
    """The owner tokens that are made while the test runs."""
    made = []

    def new_token(draw=identity.new_token):
        made.append(draw())
        return made[-1]

    monkeypatch.setattr(identity, "new_token", new_token)
    return made


def test_a_loss_says_which_lock_whose_and_how_long(engine, log):
    hold = Lock("loss").acquire()
    engine.clear(hold._lease.grant.claim.key)

    with pytest.raises(LockLost):
        hold.extend()
    until(lambda: log.of("lost"))

    [record] = log.of("lost")
    assert record["lock_alias"] == "default"
    assert record["lock_name"] == "loss"
    assert record["lock_key"] == hold._lease.grant.claim.key
    assert record["lock_fence"] == hold.fence
    assert {"host", "pid", "thread"} <= set(record["lock_holder"])
    assert 0 <= record["lock_held"] < 60
    assert "gone" in record["lock_reason"]
    assert "lost the lock 'loss'" in record["message"]


def test_a_loss_that_the_error_of_the_body_hides_is_noted(engine, log):
    with pytest.raises(ZeroDivisionError), Lock("hidden") as hold:
        lose(hold)
        _ = 1 / 0

    [record] = log.of("not_raised")
    assert record["lock_name"] == "hidden"
    assert "may belong to another owner" in record["lock_error"]


def test_a_clear_says_who_and_why(engine, log):
    with held_elsewhere("clear"):
        Lock("clear").clear(user="ann", reason="it hangs")
        with held_elsewhere("clear"):
            Lock("clear").clear(user="ann")

    first, second = log.of("cleared")
    assert (first["lock_user"], first["lock_reason"]) == ("ann", "it hangs")
    assert first["message"] == "'clear' (alias 'default') cleared by ann: it hangs"
    assert second["message"] == "'clear' (alias 'default') cleared by ann"


def test_an_extension_says_by_whom_and_for_how_long(engine, log):
    with held_elsewhere("extend", ttl=20):
        [holding] = Lock("extend").holders()
        for version, user in ("gone", "bob"), (holding.version, "ann"):
            operators.prolong(replace(holding, version=version), 600, user)

    [record] = log.of("prolonged")
    assert (record["lock_key"], record["lock_user"]) == (holding.key, "ann")
    assert record["lock_ttl"] == 600
    assert record["message"] == "'extend' (alias 'default') extended to 600 s by ann"


def test_long_waits_are_noted_whatever_came_of_them(engine, log, monkeypatch):
    monkeypatch.setattr(acquiring, "SLOW_WAIT", 0.05)

    with held_elsewhere("slow", ttl=2):
        with pytest.raises(LockTimeout):
            Lock("slow").acquire(wait=0.1)
        Lock("slow").acquire(wait=30).release()

    [timeout], [slow] = log.of("timeout"), log.of("slow_wait")
    assert timeout["lock_waited"] >= 0.1
    assert timeout["message"].startswith("gave up waiting for the lock 'slow' (alias 'default')")
    assert slow["message"].startswith("got the lock 'slow' (alias 'default') after ")
    assert slow["lock_waited"] >= 0.05
    assert slow["lock_fence"]


def test_short_waits_are_not_noted(engine, log):
    with Lock("quick"):
        pass

    assert log.of("slow_wait") == []


def test_an_engine_that_fails_is_noted_with_what_is_left_of_the_lease(engine, log):
    hold = Lock("down", ttl=3).acquire()
    engine.fail("extend")

    until(lambda: log.of("not_renewed"))

    record = log.of("not_renewed")[0]
    assert record["lock_error"] == "the engine is down"
    assert record["lock_left"] <= 3
    engine.go_on()
    hold.leave(KeyError("the caller's own"))


def test_a_renewal_that_fails_again_and_again_is_noted_once(engine, log):
    """A process with a thousand locks would log a thousand records a second."""
    hold = Lock("down", ttl=3).acquire()
    for noted in (1, 2):
        engine.fail("extend", times=5)
        tries = engine.asked.count("extend")

        until(lambda tries=tries: engine.asked.count("extend") >= tries + 7)

        assert len(log.of("not_renewed")) == noted
    hold.release()


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
@pytest.mark.parametrize("alias", sorted(django_settings.DISTLOCK))
def test_no_secret_is_written_anywhere(alias, log, tokens, capfd, settings):
    settings.DEBUG = True
    backend = registry[alias].backend
    lock = Lock("secrets", using=alias, ttl=2, wait=0.2)
    if alias == "dummy":
        pytest.skip("it has no owners")

    hold = lock.acquire()
    with running(lock.try_acquire):  # busy, for another thread
        pass
    hold.extend()
    print(repr(hold), repr(lock), lock.holders())
    if backend.expires:
        hold = Lock.resume(hold.dump())
    assert lock.clear(user="ann") == 1
    with pytest.raises(LockLost) as lost:
        hold.extend()
    print(repr(lost.value))
    until(lambda: log.of("lost"))

    said = "\n".join([*log.lines, *capfd.readouterr()])
    assert tokens
    assert [token for token in tokens if token in said] == []


@pytest.mark.skipif("zookeeper" not in django_settings.DISTLOCK, reason="no ZooKeeper")
def test_a_level_above_info_silences_kazoo(log):
    logging.getLogger().setLevel(logging.WARNING)

    with Lock("quiet", using="zookeeper"):
        pass
    registry["zookeeper"].backend.close()

    assert log.lines == []


@pytest.mark.django_db(transaction=True, databases=["default", "locks"])
@pytest.mark.parametrize("alias", sorted({*django_settings.DISTLOCK} - {"dummy"}))
@pytest.mark.parametrize("wait", [0, 0.1])
def test_no_owner_is_in_a_report_that_shows_local_variables(alias, tokens, wait):
    with held_elsewhere("report", using=alias), pytest.raises(LockBusy) as busy:
        Lock("report", using=alias).acquire(wait=wait)

    ours = busy.tb.tb_next  # `tokens` is a local variable here
    report = ExceptionReporter(None, busy.type, busy.value, ours).get_traceback_html()

    assert tokens
    assert [token for token in tokens if token in report] == []


def test_a_reason_writes_one_line_into_the_log(engine, log):
    with held_elsewhere("a"):
        Lock("a").clear(user="ann\nforged", reason="gone\r\nforged \x1b[2J")
    [record] = log.of("cleared")

    assert all(text.isprintable() for text in record.values() if isinstance(text, str))
    assert record["lock_reason"].startswith("gone")


@pytest.mark.parametrize(
    "backend, location",
    [
        ("redis.RedisBackend", "locks"),
        ("redlock.RedlockBackend", ["locks", "locks2", "locks3"]),
        ("etcd.EtcdBackend", "http://127.0.0.1:1"),
    ],
)
def test_no_password_is_written_when_an_engine_is_down(backend, location, settings, log, capfd):
    cache = {"BACKEND": "django_redis.cache.RedisCache"}
    settings.CACHES = {
        name: {**cache, "LOCATION": f"redis://ann:pa55word@127.0.0.1:{port}/0"}
        for port, name in enumerate(["locks", "locks2", "locks3"], start=1)
    }
    options = {"USER": "ann", "PASSWORD": "pa55word"} if "etcd" in backend else {}
    path = f"distlock_app.backends.{backend}"
    settings.DISTLOCK = {"default": {"BACKEND": path, "LOCATION": location, "OPTIONS": options}}

    with pytest.raises(BackendError) as down:
        Lock("a").acquire(wait=0)

    chain = "".join(traceback.format_exception(down.value))
    said = "\n".join([*log.lines, *capfd.readouterr(), chain, repr(registry["default"].backend)])
    assert "pa55word" not in said


def test_every_record_has_its_event_and_the_page_names_them_all():
    events, without = set(), []
    for path in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            called = ast.unparse(call.func)
            if called.startswith("logger.") and "extra" not in [k.arg for k in call.keywords]:
                without.append(f"{path}:{call.lineno}")
            if called in ("fields", "attempt.note_wait", "self.note_wait") or called.endswith(
                ".log_fields"
            ):
                events |= {a.value for a in call.args[:1] if isinstance(a, ast.Constant)}

    assert without == []
    assert len(events) > 10
    assert sorted(events - set(re.findall(r"`(\w+)`", PAGE.read_text()))) == []


@pytest.mark.parametrize("sent", [signals.send, lambda *args: asyncio.run(signals.asend(*args))])
def test_a_signal_that_cannot_be_sent_is_noted(caplog, sent):
    sent(Signal(), {"alias": "locmem"})  # without a sender

    assert "signal_failed" in [record.lock_event for record in caplog.records]
