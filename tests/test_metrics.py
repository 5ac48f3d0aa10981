"""Metrics and spans, read back from the real libraries."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from distlock_app import Lock, LockBusy, LockLost, bucket, locked, metrics, named, signals
from distlock_app.primitives.names import template_of
from distlock_app.testing import held_elsewhere, lose
from tests import engines
from tests.app.models import Account
from tests.engines import running, until

engine = pytest.fixture(engines.install)
SIGNALS = ("acquired", "busy", "released", "lost", "cleared")


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


@pytest.mark.django_db
def test_conflicts_are_counted_by_model(engine, prometheus):
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
