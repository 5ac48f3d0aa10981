"""Metrics and traces: `use_prometheus()`, `use_opentelemetry()`, to call in `AppConfig.ready()`.

They use the signals, and count current holds when they are read. Locks are labelled by the
template of their name ("invoice:{pk}"), never by the name, which would create a time series per
invoice. A name without a template is labelled "".
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from django.dispatch import Signal

from . import signals
from .core.renewal import renewer
from .core.waiting import waiting
from .primitives.names import template_of

# Seconds. Locks are waited for and held for milliseconds, and for minutes.
BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

WAITED = "Seconds of waiting for a lock, until it was acquired, busy, or its backend down."
HELD = "Seconds that a lock was held, until it was released or lost."
CLEARED = "Locks that were taken away by hand."
CONFLICTS = "Saves of a versioned model that had a conflict with another writer."

# (alias, template, outcome, seconds)
Timed = Callable[[str, str, str, float], None]
# By alias and template.
ByTemplate = dict[tuple[str, str], int]


def use_prometheus(registry: Any = None) -> None:
    """From now on, count in `registry` (default: that of prometheus_client).

    Histograms `distlock_wait_seconds` (outcome: acquired, busy, failed, opened)
    and `distlock_hold_seconds` (released, lost), counters `distlock_cleared_total` and
    `distlock_version_conflicts_total`, gauges `distlock_held` and `distlock_waiting` of this
    process.
    """
    from prometheus_client import REGISTRY, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily

    where = REGISTRY if registry is None else registry
    labels = ("alias", "template", "outcome")
    wait = Histogram("distlock_wait_seconds", WAITED, labels, registry=where, buckets=BUCKETS)
    hold = Histogram("distlock_hold_seconds", HELD, labels, registry=where, buckets=BUCKETS)
    cleared = Counter("distlock_cleared_total", CLEARED, labels[:2], registry=where)
    conflicts = Counter("distlock_version_conflicts_total", CONFLICTS, ("model",), registry=where)
    _listen(
        waited=partial(_observe, wait),
        held=partial(_observe, hold),
        cleared=lambda alias, template: cleared.labels(alias, template).inc(),
        conflict=lambda model: conflicts.labels(model).inc(),
    )

    class Now:
        def collect(self) -> Iterable[Any]:
            for name, (text, count) in NOW.items():
                gauge = GaugeMetricFamily(f"distlock_{name}", text, labels=labels[:2])
                for of, number in count().items():
                    gauge.add_metric(of, number)
                yield gauge

    where.register(Now())


def use_opentelemetry(*, meter_provider: Any = None, tracer_provider: Any = None) -> None:
    """From now on, record metrics and spans with these providers (default: the global ones).

    Histograms `distlock.wait` and `distlock.hold`, counters `distlock.cleared` and
    `distlock.version_conflicts`, gauges `distlock.held` and `distlock.waiting` of this process;
    spans `distlock.acquire` and `distlock.hold`, children of the span that is current where the
    lock is taken or released.
    """
    from opentelemetry import metrics, trace

    meter = metrics.get_meter("distlock_app", meter_provider=meter_provider)
    tracer = trace.get_tracer("distlock_app", tracer_provider=tracer_provider)
    advice = {"explicit_bucket_boundaries_advisory": list(BUCKETS)}
    wait = meter.create_histogram("distlock.wait", unit="s", description=WAITED, **advice)
    hold = meter.create_histogram("distlock.hold", unit="s", description=HELD, **advice)
    cleared = meter.create_counter("distlock.cleared", description=CLEARED)
    conflicts = meter.create_counter("distlock.version_conflicts", description=CONFLICTS)

    def observed(count: Callable[[], ByTemplate], _: Any) -> Iterable[Any]:
        return [metrics.Observation(n, _attributes(*of)) for of, n in count().items()]

    for name, (text, count) in NOW.items():
        meter.create_observable_gauge(
            f"distlock.{name}", [partial(observed, count)], description=text
        )

    def timed(instrument: Any, span: str) -> Timed:
        def record(alias: str, template: str, outcome: str, seconds: float) -> None:
            facts = {**_attributes(alias, template), "distlock.outcome": outcome}
            instrument.record(seconds, facts)
            end = time.time_ns()
            begun = end - int(seconds * 1e9)
            tracer.start_span(span, attributes=facts, start_time=begun).end(end)

        return record

    _listen(
        waited=timed(wait, "distlock.acquire"),
        held=timed(hold, "distlock.hold"),
        cleared=lambda alias, template: cleared.add(1, _attributes(alias, template)),
        conflict=lambda model: conflicts.add(1, {"distlock.model": model}),
    )


def _held() -> ByTemplate:
    return _counted((lease.alias, lease.grant.claim.name) for lease in renewer.held())


def _waiting() -> ByTemplate:
    return _counted((backend.alias, name) for backend, name in [*waiting.values()])


def _counted(locks: Iterable[tuple[str, str]]) -> ByTemplate:
    return collections.Counter((alias, template_of(name)) for alias, name in locks)


NOW = {
    "held": ("Locks that this process holds now.", _held),
    "waiting": ("Calls of this process that wait for a lock now.", _waiting),
}


def _listen(
    *,
    waited: Timed,
    held: Timed,
    cleared: Callable[[str, str], None],
    conflict: Callable[[str], None],
) -> None:
    def timed(record: Timed, outcome: str, seconds: str) -> Callable[..., None]:
        def receive(alias: str, name: str, opened: bool = False, **facts: Any) -> None:
            record(alias, template_of(name), "opened" if opened else outcome, facts[seconds])

        return receive

    receivers: dict[Signal, Callable[..., None]] = {
        signals.lock_acquired: timed(waited, "acquired", "waited"),
        signals.lock_busy: timed(waited, "busy", "waited"),
        signals.lock_failed: timed(waited, "failed", "waited"),
        signals.lock_released: timed(held, "released", "held"),
        signals.lock_lost: timed(held, "lost", "held"),
        signals.lock_cleared: lambda alias, name, **_: cleared(alias, template_of(name)),
        signals.version_conflict: lambda sender, **_: conflict(sender._meta.label),
    }
    for signal, receiver in receivers.items():
        signal.connect(receiver, weak=False)


def _observe(histogram: Any, alias: str, template: str, outcome: str, seconds: float) -> None:
    histogram.labels(alias, template, outcome).observe(seconds)


def _attributes(alias: str, template: str) -> dict[str, str]:
    return {"distlock.alias": alias, "distlock.template": template}
