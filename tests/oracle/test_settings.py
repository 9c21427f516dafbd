"""Settings of topics, groups and client metrics, as Apache Kafka describes and applies them."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support import requests
from tests.support.batches import HEADER, batch, seal
from tests.support.cluster import Cluster
from tests.support.daemon import Daemon
from tests.support.kafka import Kafka, required
from tests.support.targets import SETTINGS
from tests.support.waits import until

pytestmark = pytest.mark.oracle

TOPIC, METRICS, GROUP = 2, 16, 32
OWN_SOURCES = {TOPIC: 1, METRICS: 7, GROUP: 8}
"""Resource type → the config source of a setting that was set on the resource itself."""

NAME = "settings"
BOUND = "max.decompressed.message.bytes"
MAX_TIMESTAMP = -3

ELIGIBLE = "min.insync.replicas"
"""Not compared, because Apache Kafka's default for this key changes with the ELR feature."""

VALUES: dict[int, dict[str, tuple[str, ...]]] = {
    TOPIC: {
        BOUND: ("0", "1", "2147483639", "2147483640", "x"),
        "remote.copy.lag.ms": ("-2", "-1", "0", "x"),
        "remote.copy.lag.bytes": ("-2", "-1", "0", "10000000000"),
        "local.retention.ms": ("-3", "-2"),
        "remote.storage.enable": ("true", "false", "x"),
        "remote.log.copy.disable": ("false", "x"),
        "errors.deadletterqueue.group.enable": ("true", "x"),
        "internal.segment.bytes": ("1000000",),
        "message.format.version": ("3.0-IV1",),
        "message.downconversion.enable": ("true",),
    },
    GROUP: {
        "errors.deadletterqueue.topic.name": ("__dlq", "", "dlq.orders"),
        "errors.deadletterqueue.copy.record.enable": ("true", "x"),
        "streams.assignor.name": ("other", "sticky"),
        "streams.rack.aware.assignment.tags": ("zone,zone", "zone,rack"),
        "streams.num.warmup.replicas": ("-1", "21", "20"),
        "streams.task.offset.interval.ms": ("14999", "15000"),
        "streams.acceptable.recovery.lag": ("-1", "0"),
        "consumer.assignor.offload.enable": ("x", "false"),
    },
    METRICS: {
        "interval.ms": ("99", "3600001", "x", "100"),
        "metrics": ("org.apache.kafka.,org.apache.kafka.", "org.apache.kafka.", "*"),
        "match": ("client_id", "client=a", "client_id=(", "client_id=a=b", "client_id=a.*"),
        "no.such.key": ("1",),
    },
}
"""Values on both sides of the limits. The last accepted value stays set."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster]]:
    """Return clients of Fencepost and of Apache Kafka."""
    with ExitStack() as stack:
        kafka = Kafka(tmp_path_factory.mktemp("kafka"), SETTINGS)
        with required():
            kafka.start()
        stack.callback(kafka.stop)
        daemon = Daemon(tmp_path_factory.mktemp("fencepost"), dict(SETTINGS)).start()
        stack.callback(daemon.stop)
        ours, theirs = (
            stack.enter_context(Cluster(broker.bootstrap)) for broker in (daemon, kafka)
        )
        for client in (ours, theirs):
            client.create_topic(NAME, 1)
        yield ours, theirs


def described(client: Cluster, kind: int) -> dict[str, tuple[Any, ...]]:
    """Return the rows of DescribeConfigs for each key."""
    row = requests.described_resource(kind, NAME)
    body = requests.describe_configs(row, include_synonyms=True)
    (result,) = client.call("describe_configs", 4, **body)["results"]
    assert result["error_code"] == "none"
    return {
        config["name"]: (
            *(config[key] for key in ("value", "config_source", "read_only", "is_sensitive")),
            config["config_type"],
            [(place["name"], place["value"], place["source"]) for place in config["synonyms"]],
        )
        for config in result["configs"]
        if config["name"] != ELIGIBLE
    }


def changed(client: Cluster, kind: int, key: str, value: str) -> str:
    row = requests.altered_resource(kind, NAME, requests.config_op(key, value))
    body = requests.incremental_alter_configs(row)
    (answer,) = client.call("incremental_alter_configs", 1, **body)["responses"]
    return str(answer["error_code"])


def set_and_wait(client: Cluster, kind: int, key: str, value: str) -> str:
    """Change a setting; if that is accepted, wait until it is described."""
    code = changed(client, kind, key, value)
    if code == "none":
        # A repeated item of a list counts once.
        shown = ",".join(dict.fromkeys(value.split(",")))
        # Compare the source too, because the value may equal the default.
        expected = shown, OWN_SOURCES[kind]
        until(lambda: described(client, kind)[key][:2] == expected, f"{key} is {shown}")
    return code


@pytest.mark.parametrize("kind", VALUES)
def test_settings_are_described_and_checked_as_by_kafka(
    pair: tuple[Cluster, Cluster], kind: int
) -> None:
    ours, theirs = pair
    assert described(ours, kind) == described(theirs, kind)
    for key, values in VALUES[kind].items():
        for value in values:
            expected = set_and_wait(theirs, kind, key, value)
            assert set_and_wait(ours, kind, key, value) == expected, (key, value)
        assert described(ours, kind) == described(theirs, kind), key


def test_bound_of_decompressed_records_is_kafkas(pair: tuple[Cluster, Cluster]) -> None:
    records = gzip.compress(batch([b"x" * 300])[HEADER.size :])
    compressed = seal(records, count=1, attributes=1)
    body = 307

    def found(client: Cluster) -> list[tuple[str, int]]:
        rows = []
        for timestamp in (0, MAX_TIMESTAMP):
            topic = requests.list_offsets_topic(NAME, 0, timestamp=timestamp)
            answer = client.call("list_offsets", 10, **requests.list_offsets(topic))
            (row,) = answer["topics"][0]["partitions"]
            rows.append((row["error_code"], row["offset"]))
        return rows

    def played(client: Cluster) -> list[Any]:
        steps: list[Any] = []
        for bound in (body - 1, body, body - 1, body):
            assert set_and_wait(client, TOPIC, BOUND, str(bound)) == "none"
            topic = requests.produce_topic(NAME, compressed)
            answer = client.call("produce", 9, **requests.produce(topic))
            (row,) = answer["responses"][0]["partition_responses"]
            steps += [row["error_code"], row["base_offset"], *found(client)]
        plain = requests.produce_topic(NAME, batch([b"x" * 300]))
        assert set_and_wait(client, TOPIC, BOUND, "1") == "none"
        answer = client.call("produce", 9, **requests.produce(plain))
        return [*steps, answer["responses"][0]["partition_responses"][0]["error_code"]]

    ours, theirs = pair
    assert played(ours) == played(theirs)
