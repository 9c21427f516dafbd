"""Metrics about the metrics that clients push: a few values of each client id."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from fencepost.coordinator.metrics.families import Sample, Series, labels, read_families
from fencepost.coordinator.telemetry.results import RESULTS

if TYPE_CHECKING:
    from fencepost.coordinator.broker_services import Services

MAX_CLIENTS: Final = 500
"""The maximum number of client ids with series: the most recently active ones."""

FAMILIES: Final = read_families("""
fencepost_telemetry_instances gauge
    Client instances that have asked this broker which metrics to push.
fencepost_telemetry_pushes_total counter result
    Pushes of clients' metrics, by result.
fencepost_telemetry_push_age_seconds gauge client_id
    Time since the last push; of several instances, the shortest.
fencepost_telemetry_poll_idle_ratio gauge client_id
    Part of its time that a consumer waits in poll, as it reports; of several instances, the lowest.
fencepost_telemetry_poll_interval_max_seconds gauge client_id
    Longest time between two polls of a consumer in the last minute, as it reports.
fencepost_telemetry_commit_latency_max_seconds gauge client_id
    Longest time in which a consumer's commit was answered, as it reports.
fencepost_telemetry_rebalances gauge client_id
    Rebalances that the consumer instances report.
""")

_VALUES: Final[dict[str, tuple[str, Callable[..., float], float]]] = {
    "poll_idle_ratio": ("poll_idle_ratio", min, 1),
    "poll_interval_max_seconds": ("time_between_polls_max_ms", max, 1_000),
    "commit_latency_max_seconds": ("commit_latency_max_ms", max, 1_000),
    "rebalances": ("rebalances", operator.add, 1),
}
"""For each family, by the last part of its name: the short name in ``HIGHLIGHTS``
(``telemetry/reports.py``), the function that combines the values of several instances, and the
divisor that converts the unit."""


def series(services: Services) -> Iterator[Series]:
    """Yield counts of instances and pushes, and the values of the clients that pushed last."""
    telemetry = services.telemetry if services.has_telemetry else None
    yield _family("instances", ("", 0 if telemetry is None else len(telemetry)))
    yield _family(
        "pushes_total",
        *(
            (labels(result=result), 0 if telemetry is None else telemetry.results[result])
            for result in RESULTS
        ),
    )
    now_ms = services.clock.now_ms()
    ages: dict[str, float] = {}
    values: dict[str, dict[str, float]] = {name: {} for name in _VALUES}
    for instance in telemetry or ():
        report, client_id = instance.report, instance.client.client_id or ""
        if report.at_ms is None or (client_id not in ages and len(ages) >= MAX_CLIENTS):
            continue
        age_s = max(0, now_ms - report.at_ms) / 1000
        ages[client_id] = min(age_s, ages.get(client_id, age_s))
        for name, (short, combine, _) in _VALUES.items():
            value = report.highlights.get(short)
            if value is not None:
                former = values[name].get(client_id)
                values[name][client_id] = value if former is None else combine(former, value)
    yield _family("push_age_seconds", *_by_client(ages, 1))
    for name, (_, _, divisor) in _VALUES.items():
        yield _family(name, *_by_client(values[name], divisor))


def _family(name: str, *samples: Sample) -> Series:
    return FAMILIES[f"fencepost_telemetry_{name}"], samples


def _by_client(values: dict[str, float], divisor: float) -> Iterator[Sample]:
    for client_id, value in values.items():
        yield labels(client_id=client_id), value / divisor
