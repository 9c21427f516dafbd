"""Metrics by the names of the JMX exporter, compared with Apache Kafka's MBeans."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.cluster import Cluster
from tests.unit.coordinator.test_metrics import scraped, serving, value

REQUESTS = "kafka_network_requestmetrics_requests_total"
TIMED = "kafka_network_requestmetrics_totaltimems_count"


async def test_fetches_of_followers_are_counted_apart(tmp_path: Path) -> None:
    limits = {"max_wait": 0, "min_bytes": 1, "max_bytes": 1000, "session_epoch": -1, "topics": []}

    def fetch(bootstrap: str) -> None:
        with Cluster(bootstrap) as client:
            for replica_id in (-1, -1, 2):
                client.call("fetch", 11, replica_id=replica_id, **limits)
            # From version 15 a follower has its id in a tagged field.
            for state in ({}, *[{"replica_state": {"replica_id": 2, "replica_epoch": 1}}] * 3):
                client.call("fetch", 16, **limits, **state)

    async with serving(tmp_path) as broker:
        await asyncio.to_thread(fetch, broker.bootstrap)
        values = await scraped(broker)
    for request, version, count in (
        ("FetchConsumer", "11", 2),
        ("FetchFollower", "11", 1),
        ("FetchConsumer", "16", 1),
        ("FetchFollower", "16", 3),
    ):
        assert value(values, REQUESTS, request=request, version=version) == count
    assert value(values, TIMED, request="FetchConsumer") == 3
    assert value(values, TIMED, request="FetchFollower") == 4
    assert value(values, "kafka_server_brokertopicmetrics_totalfetchrequests_total") == 7
    assert value(values, "fencepost_requests_total", api="Fetch", version="16") == 4
