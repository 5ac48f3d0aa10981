"""Metrics and spans, read back from the real libraries."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import subprocess
import sys

import pytest
from django.core.management import BaseCommand, call_command
from django.http import HttpResponse
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from distlock_app import (
    BackendError,
    Latch,
    Lock,
    LockBusy,
    LockLost,
    bucket,
    current_hold,
    locked,
    locked_command,
    locked_view,
    metrics,
    named,
    signals,
)
from distlock_app.primitives.names import template_of
from distlock_app.testing import held_elsewhere, lose
from tests import engines
from tests.app.models import Account
from tests.engines import renewed, running, until
from tests.test_docs import ROOT, blocks

engine = pytest.fixture(engines.install)
SIGNALS = ("acquired", "busy", "failed", "released", "lost", "cleared")


@pytest.fixture(autouse=True)
def listeners():
    """Let no receiver outlive its test."""
    sent = [*(getattr(signals, f"lock_{name}") for name in SIGNALS), signals.version_conflict]
    before = [list(signal.receivers) for signal in sent]
    yield
    for signal, receivers in zip(sent, before, strict=True):
        signal.receivers = receivers
        signal.sender_receivers_cache.clear()


@pytest.fixture
def prometheus():
    registry = CollectorRegistry()
    metrics.use_prometheus(registry)

    def value(name, **labels):
        return registry.get_sample_value(name, labels)

    return value


def use_a_lock_in_every_way():
    @locked("invoice:{pk}", wait=0)
    def pay(pk):
        pass

    pay(7)
    with held_elsewhere("invoice:8"), pytest.raises(LockBusy):
        pay(8)
    with pytest.raises(LockLost), Lock(named("invoice:{pk}", pk=9)) as hold:
        lose(hold)
    with pytest.raises(LockLost), Lock("plain"):
        Lock("plain").clear()


def test_prometheus_counts_by_template(engine, prometheus):
    use_a_lock_in_every_way()

    invoice = {"alias": "default", "template": "invoice:{pk}"}
    assert prometheus("distlock_wait_seconds_count", outcome="acquired", **invoice) == 2
    assert prometheus("distlock_wait_seconds_count", outcome="busy", **invoice) == 1
    assert prometheus("distlock_hold_seconds_count", outcome="released", **invoice) == 1
    until(lambda: prometheus("distlock_hold_seconds_count", outcome="lost", **invoice) == 1)
    plain = {"alias": "default", "template": ""}
    assert prometheus("distlock_wait_seconds_count", outcome="acquired", **plain) == 1
    assert prometheus("distlock_cleared_total", **plain) == 1


def test_prometheus_sees_what_is_held_and_waited_for_now(engine, prometheus):
    invoice = {"alias": "default", "template": "invoice:{pk}"}
    name = named("invoice:{pk}", pk=7)

    def wait():
        with Lock(name):
            pass

    hold = Lock(name).acquire()
    with running(wait), Lock(named("invoice:{pk}", pk=8)):
        until(lambda: prometheus("distlock_waiting", **invoice) == 1)
        assert prometheus("distlock_held", **invoice) == 2
        hold.release()

    assert prometheus("distlock_waiting", **invoice) is None
    assert prometheus("distlock_held", **invoice) is None


@pytest.mark.parametrize("latch", [False, True])
def test_a_task_that_waits_is_counted_as_a_thread_is(engine, prometheus, latch):
    plain = {"alias": "default", "template": ""}

    async def take():
        async with Lock("a"):
            pass

    async def main():
        hold = await Lock("a").aacquire()
        waiter = asyncio.create_task(Latch("a", 1).await_(9) if latch else take())
        while prometheus("distlock_waiting", **plain) != 1:
            await asyncio.sleep(0.01)
        await Latch("a", 1).acount_down()
        await hold.arelease()
        await waiter

    asyncio.run(asyncio.wait_for(main(), 30))

    assert prometheus("distlock_waiting", **plain) is None


def test_a_lock_that_was_extended_is_held_once(engine, prometheus):
    with Lock("a", ttl=3) as hold:
        renewed(hold)
        hold.extend()

        assert prometheus("distlock_held", alias="default", template="") == 1


def test_what_a_backend_that_is_down_refused_or_let_pass_is_counted(settings, prometheus):
    down = {"BACKEND": "tests.failing_engines.UnreachedBackend"}
    settings.DISTLOCK = {"strict": down, "open": {**down, "ON_DOWN": "open"}}

    Lock("a", using="open").acquire().release()
    with pytest.raises(BackendError):
        Lock("a", using="strict").acquire()

    def count(alias, outcome):
        labels = {"alias": alias, "template": "", "outcome": outcome}
        return prometheus("distlock_wait_seconds_count", **labels)

    assert (count("open", "opened"), count("open", "failed")) == (1, None)
    assert (count("strict", "opened"), count("strict", "failed")) == (None, 1)


@pytest.mark.django_db
def test_conflicts_are_counted_by_model(engine, prometheus):
    reader = InMemoryMetricReader()
    metrics.use_opentelemetry(meter_provider=MeterProvider(metric_readers=[reader]))
    account = Account.objects.create(balance=1)
    attempts = []

    def change(fresh):
        if not attempts:
            Account.objects.filter(pk=account.pk).update(balance=5)
        attempts.append(fresh.balance)
        fresh.balance += 1

    Account.objects.retrying(account.pk, change)

    conflicts = "distlock_version_conflicts_total"
    assert prometheus(conflicts, model=Account._meta.label) == len(attempts) - 1 == 1
    [point] = points(reader)["distlock.version_conflicts"]
    assert (point.value, point.attributes) == (1, {"distlock.model": Account._meta.label})


def points(reader):
    (of_locks,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
    return {metric.name: metric.data.data_points for metric in of_locks.metrics}


def test_opentelemetry_sees_what_is_held_and_waited_for_now(engine):
    reader = InMemoryMetricReader()
    metrics.use_opentelemetry(meter_provider=MeterProvider(metric_readers=[reader]))

    def values(name):
        return [(p.value, p.attributes["distlock.template"]) for p in points(reader).get(name, ())]

    async def wait():
        async with Lock("plain"):
            pass

    with Lock(named("invoice:{pk}", pk=7)), Lock("plain") as hold:
        with running(asyncio.run, wait()):
            until(lambda: values("distlock.waiting") == [(1, "")])
            assert sorted(values("distlock.held")) == [(1, ""), (1, "invoice:{pk}")]
            hold.release()


ASKED = [ROOT / "docs/how-to/observe.md", *sorted((ROOT / "docs/monitoring").iterdir())]


@pytest.mark.parametrize("page", ASKED, ids=lambda page: page.name)
def test_the_docs_ask_for_metrics_and_labels_that_there_are(engine, page):
    registry = CollectorRegistry()
    metrics.use_prometheus(registry)
    use_a_lock_in_every_way()
    signals.version_conflict.send(Account)
    found = list(registry.collect())
    # Gauges have samples while a lock is held or waited for.
    labels = {metric.name: {"alias", "template"} for metric in found if metric.type == "gauge"}
    labels |= {sample.name: set(sample.labels) for metric in found for sample in metric.samples}

    queries = page.read_text().replace('\\"', '"')
    asked = re.findall(r"\b(distlock_(?!app\b)\w+)(?:\{(.+?)\})?", queries)

    assert asked
    assert {name for name, _ in asked} <= labels.keys()
    for name, conditions in asked:
        assert set(re.findall(r"(\w+)=", conditions)) <= labels[name], name
    grouped = re.findall(r"\w+", " ".join(re.findall(r"by \((.+?)\)", queries)))
    assert set(grouped) <= set.union(*labels.values())
    outcomes = {"acquired", "busy", "released", "lost"}
    assert set(re.findall(r'outcome="(\w+)"', queries)) <= outcomes


SHOP = """
import django
from django.conf import settings

settings.configure(DISTLOCK={"default": {"BACKEND": "distlock_app.backends.locmem.LocMemBackend"}})
django.setup()
"""
WORKER = """
from distlock_app import Lock, metrics

metrics.use_prometheus()
with Lock("report"):
    pass
"""


def test_the_page_of_metrics_in_the_docs_adds_up_what_several_processes_counted(tmp_path):
    [page] = blocks(ROOT / "docs/how-to/deploy.md", "python")
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def run(code):
        command = [sys.executable, "-c", SHOP + code]
        options = {"cwd": ROOT, "env": environment, "timeout": 60}
        return subprocess.run(command, check=True, capture_output=True, text=True, **options)

    for _ in range(2):
        run(WORKER)
    shown = run(f"{page}\nprint(metrics(None).content.decode())").stdout

    labels = 'alias="default",outcome="released",template=""'
    assert f"distlock_hold_seconds_count{{{labels}}} 2.0" in shown
    assert "distlock_held" not in shown  # as the page says


def test_opentelemetry_gets_metrics_and_spans(engine):
    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    metrics.use_opentelemetry(
        meter_provider=MeterProvider(metric_readers=[reader]), tracer_provider=tracers
    )

    with tracers.get_tracer("test").start_as_current_span("request") as request:
        use_a_lock_in_every_way()
    until(lambda: len(exporter.get_finished_spans()) == 8)

    found = points(reader)
    assert {"distlock.wait", "distlock.hold", "distlock.cleared"} <= set(found)
    counts = {
        (p.attributes["distlock.template"], p.attributes["distlock.outcome"]): p.count
        for p in found["distlock.wait"]
    }
    assert counts == {
        ("invoice:{pk}", "acquired"): 2,
        ("invoice:{pk}", "busy"): 1,
        ("", "acquired"): 1,
    }
    spans = [s for s in exporter.get_finished_spans() if s.name == "distlock.acquire"]
    assert len(spans) == 4
    assert {s.parent.span_id for s in spans} == {request.get_span_context().span_id}
    assert all(s.start_time <= s.end_time for s in spans)


def test_the_default_name_of_a_view_or_command_is_labelled_by_what_it_locks(engine, rf):
    def seen(*_, **__):
        hold = current_hold()
        names[hold.name] = template_of(hold.name)

    @locked_view
    def pay(request, pk):
        seen()
        return HttpResponse()

    names = {}
    command = type("Command", (BaseCommand,), {"handle": seen, "__module__": __name__})
    call_command(locked_command(command)())
    pay(rf.post("/"), pk=7)

    path, module = f"{__name__}.{pay.__qualname__}", f"command:{__name__}"
    assert names == {f"{path}:pk=7:address=127.0.0.1": path, module: module}


def test_a_made_name_is_its_text_and_remembers_its_template():
    name = named("invoice:{pk}", pk=Account(pk=42))

    assert name == "invoice:42" and hash(name) == hash("invoice:42")
    assert template_of(name) == template_of(pickle.loads(pickle.dumps(name))) == "invoice:{pk}"
    assert template_of(bucket(name, 1)) == "invoice:{pk}:{bucket}"
    assert template_of("invoice:42") == template_of(bucket("invoice:42", 1)) == ""
    with pytest.raises(ValueError, match="not one of the values"):
        named("invoice:{pk}", id=42)
    with pytest.raises(ValueError, match="None"):
        named("invoice:{pk}", pk=None)
