"""Metrics about the metrics that clients push."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.metrics import client_telemetry
from fencepost.coordinator.metrics.client_telemetry import MAX_CLIENTS
from fencepost.coordinator.telemetry.reports import HIGHLIGHTS
from fencepost.coordinator.telemetry.results import RESULTS
from tests.support import otlp
from tests.support.cluster import Cluster
from tests.support.telemetry import ENABLED
from tests.unit.coordinator.metrics.test_families import SETTINGS, scraped, value

NAMES = {short: name for name, short in HIGHLIGHTS.items()}
ME = {"client_id": "shop"}


def _push(bootstrap: str, number: int, idle: float, pause_ms: float, rebalances: int) -> Cluster:
    """Push the metrics of a client instance, which ends when the returned client closes."""
    client = Cluster(bootstrap).__enter__()
    client.client_id = "shop"
    told = client.call("get_telemetry_subscriptions", 0, client_instance_id=UUID(int=number))
    data = otlp.metrics_data(
        otlp.gauge(NAMES["poll_idle_ratio"], otlp.point(idle)),
        otlp.gauge(NAMES["time_between_polls_max_ms"], otlp.point(pause_ms)),
        otlp.counter(NAMES["rebalances"], otlp.point(rebalances)),
    )
    answer = client.call(
        "push_telemetry",
        0,
        client_instance_id=UUID(int=number),
        subscription_id=told["subscription_id"],
        metrics=data,
    )
    assert answer["error_code"] == "none"
    return client


async def test_values_of_a_client_id_combine_its_instances(tmp_path: Path) -> None:
    async with Broker(tmp_path, config={**SETTINGS, **ENABLED}) as broker:
        values = await scraped(broker)
        assert value(values, "fencepost_telemetry_instances") == 0
        first = await asyncio.to_thread(_push, broker.bootstrap, 2, 0.5, 3_000.0, 2)
        second = await asyncio.to_thread(_push, broker.bootstrap, 3, 0.25, 1_000.0, 1)
        values = await scraped(broker)
        assert value(values, "fencepost_telemetry_instances") == 2
        results = {
            result: value(values, "fencepost_telemetry_pushes_total", result=result)
            for result in RESULTS
        }
        assert results == {**dict.fromkeys(RESULTS, 0), "accepted": 2}
        assert value(values, "fencepost_telemetry_poll_idle_ratio", **ME) == 0.25
        assert value(values, "fencepost_telemetry_poll_interval_max_seconds", **ME) == 3
        assert value(values, "fencepost_telemetry_rebalances", **ME) == 3
        assert value(values, "fencepost_telemetry_push_age_seconds", **ME) >= 0
        assert not any(
            name == "fencepost_telemetry_commit_latency_max_seconds" for name, _ in values
        )
        for client in (first, second):
            await asyncio.to_thread(client.close)


async def test_clients_above_the_limit_have_no_series(tmp_path: Path) -> None:
    async with Broker(tmp_path, config={**SETTINGS, **ENABLED}) as broker:

        def push(number: int) -> None:
            told = client.call(
                "get_telemetry_subscriptions", 0, client_instance_id=UUID(int=number)
            )
            answer = client.call(
                "push_telemetry",
                0,
                client_instance_id=UUID(int=number),
                subscription_id=told["subscription_id"],
                metrics=otlp.metrics_data(otlp.gauge("m", otlp.point(1))),
            )
            assert answer["error_code"] == "none"

        def push_all() -> None:
            for number in range(MAX_CLIENTS + 1):
                client.client_id = f"c-{number}"
                push(number + 2)

        with Cluster(broker.bootstrap) as client:
            await asyncio.to_thread(push_all)
            ages = {
                labels: samples
                for family, samples in client_telemetry.series(broker.services)
                if family.name == "fencepost_telemetry_push_age_seconds"
                for labels, _ in samples
            }
    assert len(ages) == MAX_CLIENTS
    assert 'client_id="c-0"' not in ages
