"""Metrics with unknown values have no samples: lag without a commit, other brokers' partitions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.metadata.names import is_progress
from fencepost.pipelines.spark.progress import Progress
from fencepost.testing import Cluster as BrokerCluster
from tests.support.cluster import GROUP, Cluster
from tests.support.http import Address, page
from tests.support.waits import until
from tests.unit.coordinator.metrics.test_families import (
    SETTINGS,
    Found,
    found,
    read_prometheus,
    serving,
)

LAGS = (
    *(f"fencepost_group_{name}" for name in ("lag_offsets", "lag_records", "lag_seconds")),
    *("fencepost_group_lag_uncommitted_records", "fencepost_group_held_back_records"),
    *("kafka_consumergroup_lag", "kminion_kafka_consumer_group_topic_partition_lag"),
)
LAG_SUMS = ("kafka_consumergroup_lag_sum", "kminion_kafka_consumer_group_topic_lag")
GROUP_LABELS = ("group", "consumergroup", "group_id")
PROGRESS = Progress(7, "a query", "digest").to_text()


def told_of(values: Found, name: str, group: str) -> dict[str, float]:
    """Return partition → value of a group's samples ("" for samples without a partition)."""
    told = {}
    for (sample, pairs), value in values.items():
        by_name = dict(pairs)
        if sample == name and group in {by_name.get(label) for label in GROUP_LABELS}:
            told[by_name.get("partition", by_name.get("partition_id", ""))] = value
    return told


async def scrape(address: Address | None) -> Found:
    _, _, text = await page(address, "/metrics")
    return found(read_prometheus(text))


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_owned_partition_without_a_commit_is_counted_as_unknown(
    tmp_path: Path, protocol: str
) -> None:
    async with serving(tmp_path) as broker:
        consumer = Consumer(
            {
                "bootstrap.servers": broker.bootstrap,
                "group.id": "g",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "group.protocol": protocol,
            }
        )

        def join() -> None:
            with Cluster(broker.bootstrap) as cluster:
                cluster.create_topic("t", 3)
                for index in (0, 1):
                    cluster.produce("t", [b"x"] * 2, partition=index)
            consumer.subscribe(["t"])
            until(lambda: consumer.poll(0.1) is None and len(consumer.assignment()) == 3, "owned")

        try:
            await asyncio.to_thread(join)
            values = await scrape(broker.metrics_address)
            assert told_of(values, "fencepost_group_lag_unknown_partitions", "g") == {"": 2}
            assert not [name for name in (*LAGS, *LAG_SUMS) if told_of(values, name, "g")]
            await asyncio.to_thread(
                consumer.commit, offsets=[TopicPartition("t", 0, 1)], asynchronous=False
            )
            values = await scrape(broker.metrics_address)
        finally:
            await asyncio.to_thread(consumer.close)
    assert told_of(values, "fencepost_group_lag_unknown_partitions", "g") == {"": 1}
    for name in LAGS:
        assert told_of(values, name, "g").keys() == {"0"}, name
    for name in LAG_SUMS:
        assert told_of(values, name, "g") == {"": 1}, name


async def test_progress_of_a_spark_query_has_no_lag(tmp_path: Path) -> None:
    reason = "PySpark is not installed; `make spark` brings it"
    plan = pytest.importorskip("fencepost.pipelines.spark.plan", reason=reason)
    group = plan.group_of("q")
    assert is_progress(group, PROGRESS)
    assert not is_progress(group, "")
    assert not is_progress("q", PROGRESS)

    def commit(bootstrap: str) -> None:
        with Cluster(bootstrap) as cluster:
            cluster.create_topic("t")
            cluster.produce("t", [b"x"] * 2)
            cluster.coordinator(group, GROUP)
            part = {"partition_index": 0, "committed_offset": 0, "committed_metadata": PROGRESS}
            cluster.call(
                "offset_commit",
                7,
                group_id=group,
                generation_id_or_member_epoch=-1,
                member_id="",
                topics=[{"name": "t", "partitions": [part]}],
            )

    async with serving(tmp_path) as broker:
        await asyncio.to_thread(commit, broker.bootstrap)
        values = await scrape(broker.metrics_address)
    assert told_of(values, "fencepost_group_committed_offset", group) == {"0": 0}
    assert told_of(values, "fencepost_group_lag_unknown_partitions", group) == {"": 0}
    assert not [name for name in (*LAGS, *LAG_SUMS) if told_of(values, name, group)]


async def test_partitions_of_other_brokers_and_their_controller_have_no_samples(
    tmp_path: Path,
) -> None:
    async def address(broker: Broker) -> Address | None:
        return broker.metrics_address

    def run() -> None:
        with BrokerCluster(2, tmp_path, SETTINGS) as cluster:
            cluster.topic("t", 2, replicas=1)
            leaders = {str(index): cluster.leader("t", index) for index in (0, 1)}
            assert set(leaders.values()) == {1, 2}
            seen = {}
            consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "g"})
            places = [TopicPartition("t", index, 0) for index in (0, 1)]
            consumer.commit(offsets=places, asynchronous=False)
            consumer.close()
            for node, broker in cluster.brokers.items():
                seen[node] = asyncio.run(scrape(broker.call(address)))
        owners = []
        for node, values in seen.items():
            mine = {index for index, leader in leaders.items() if leader == node}
            for name in (
                *("fencepost_partition_high_watermark", "kafka_log_log_size"),
                "kafka_topic_partition_current_offset",
            ):
                told = {
                    dict(pairs)["partition"]
                    for (sample, pairs) in values
                    if sample == name and dict(pairs).get("topic") == "t"
                }
                assert told == mine, name
            assert values["kafka_brokers", ()] == 2
            assert not [name for name, _ in values if name.startswith("kafka_controller_")]
            if told_of(values, "fencepost_group_committed_offset", "g"):
                owners.append(node)
                assert told_of(values, "fencepost_group_lag_unknown_partitions", "g") == {"": 1}
                for name in LAGS:
                    assert told_of(values, name, "g").keys() == mine, name
        assert len(owners) == 1, "the group's coordinator"

    await asyncio.to_thread(run)
