"""Consumers read past every batch that a broken producer could append."""

from __future__ import annotations

import json
import random

import confluent_kafka
import pytest

from tests.support.broken_batches import draw_batch
from tests.support.cluster import Cluster, unique
from tests.support.daemon import Daemon
from tests.support.kafka import run_tool
from tests.wire.clients import confluent_consumer, drain


@pytest.fixture(scope="module", params=[500, pytest.param(1_500, marks=pytest.mark.slow)])
def written(fencepost: Daemon, request: pytest.FixtureRequest) -> tuple[str, int]:
    """Produce many random batches to a topic; return the topic and its log end offset."""
    rng, count = random.Random(2), request.param
    with Cluster(fencepost.bootstrap) as cluster:
        topic = cluster.create_topic(unique("broken"))
        codes = [cluster.produce(topic, draw_batch(rng))["error_code"] for _ in range(count)]
        assert codes.count("invalid_record") > count / 10
        end = cluster.offset(topic)
        assert end > count / 2
        return topic, end


def test_librdkafka_reads_past_broken_batches(fencepost: Daemon, written: tuple[str, int]) -> None:
    topic, end = written
    with confluent_consumer(fencepost.bootstrap, check_crcs=True) as consumer:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
        assert [message.offset() for message in drain(consumer, end)] == list(range(end))


@pytest.mark.slow
@pytest.mark.usefixtures("java_tools")
def test_java_consumer_reads_past_broken_batches(
    fencepost: Daemon, written: tuple[str, int]
) -> None:
    topic, end = written
    said = run_tool(
        "org.apache.kafka.tools.VerifiableConsumer",
        *("--bootstrap-server", fencepost.bootstrap, "--topic", topic, "--group-id", unique("g")),
        *("--max-messages", str(end), "--reset-policy", "earliest"),
    )
    events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert (
        sum(event.get("count", 0) for event in events if event["name"] == "records_consumed") == end
    )
