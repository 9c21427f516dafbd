"""Dead-letter queues of share groups (KIP-1191) on either broker: all fields of their records."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.batches import Batch, batch, seal
from tests.support.cluster import GROUP, Cluster, unique
from tests.support.share import (
    REJECT,
    RELEASE,
    Member,
    acquired,
    initialize,
    parts_of,
)
from tests.support.waits import until

TOPIC_KIND, BROKER_KIND, GROUP_KIND = 2, 4, 32
NAME = "errors.deadletterqueue.topic.name"
COPY = "errors.deadletterqueue.copy.record.enable"
ENABLE = "errors.deadletterqueue.group.enable"
AUTO = "errors.deadletterqueue.auto.create.topics.enable"
LIMIT = "share.delivery.count.limit"
SET, DELETE = 0, 1
GZIP = 1
UPGRADE, SAFE_DOWNGRADE = 1, 2
LEVEL = 2
"""The first level of share.version that has dead-letter queues."""


@pytest.fixture
def cluster(bootstrap: str) -> Iterator[Cluster]:
    with Cluster(bootstrap) as client:
        asked = {"client_software_name": "raw", "client_software_version": "1"}
        features = client.call("api_versions", 3, **asked)["finalized_features"]
        before = {feature["name"]: feature["max_version_level"] for feature in features}[
            "share.version"
        ]
        if before < LEVEL:
            set_share_version(client, LEVEL, UPGRADE)
        client.coordinator(unique("g"), GROUP)
        yield client
        if before < LEVEL:
            set_share_version(client, before, SAFE_DOWNGRADE)


def set_share_version(client: Cluster, level: int, kind: int) -> None:
    update = {"feature": "share.version", "max_version_level": level, "upgrade_type": kind}
    answer = client.call("update_features", 2, timeout=10_000, feature_updates=[update])
    assert answer["error_code"] == "none", answer


def alter(cluster: Cluster, kind: int, name: str, **settings: str | None) -> str:
    """Set or delete settings; return the error code."""
    configs = [
        {"name": key, "value": value, "config_operation": DELETE if value is None else SET}
        for key, value in settings.items()
    ]
    row = {"resource_type": kind, "resource_name": name, "configs": configs}
    body = {"resources": [row], "validate_only": False}
    return str(cluster.call("incremental_alter_configs", 1, **body)["responses"][0]["error_code"])


class Queue:
    """A share group with a source topic of two partitions, and the name of its queue."""

    def __init__(self, cluster: Cluster, **own: str | None) -> None:
        self.cluster = cluster
        self.group, self.name = unique("g"), unique("dlq.q")
        self.source = cluster.create_topic(unique("t"), 2)
        self.topic_id = cluster.topic_id(self.source)
        settings = {NAME: self.name, **own}
        assert alter(cluster, GROUP_KIND, self.group, **settings) == "none"
        initialize(cluster, self.group, self.topic_id, (0, 1))
        self.member = Member(cluster, self.group)

    def create(self, partitions: int = 1, **configs: str) -> None:
        self.cluster.create_topic(self.name, partitions, {ENABLE: "true", **configs})

    def fetch(self, index: int, **fields: Any) -> list[tuple[int, int, int]]:
        """Fetch until records of a partition are acquired."""

        def fetched() -> list[tuple[int, int, int]]:
            # The first request adds the topic to the session.
            topics = {self.topic_id: {index: []}} if self.member.epoch == 0 else {}
            part = parts_of(self.member.fetch(topics, **fields)).get(index)
            return [] if part is None else acquired(part)

        return until(fetched, "records are acquired")

    def acknowledge(self, index: int, first: int, last: int, kind: int) -> None:
        answer = self.member.acknowledge({self.topic_id: {index: [(first, last, kind)]}})
        part = parts_of(answer)[index]
        assert part["error_code"] == "none", answer

    def batches(self, partition: int = 0) -> list[Batch]:
        return self.cluster.read(self.name, partition=partition)

    def records(self, count: int, partition: int = 0) -> list[tuple[Any, ...]]:
        """Wait for ``count`` records; return each record's source offset, key and value."""
        until(lambda: self.cluster.offset(self.name, partition) == count, f"records in {self.name}")
        return [
            (int(dict(headers)[b"__dlq.errors.offset"] or b""), key, value)
            for queued in self.batches(partition)
            for key, value, headers in zip(queued.keys, queued.values, queued.headers, strict=True)
        ]

    def is_done(self, index: int) -> bool:
        """Return whether the delivery of all records of a partition is complete."""
        topics = [{"topic_name": self.source, "partitions": [index]}]
        body = {"groups": [{"group_id": self.group, "topics": topics}]}
        (found,) = self.cluster.call("describe_share_group_offsets", 1, **body)["groups"]
        ((row,),) = (topic["partitions"] for topic in found["topics"])
        return bool(row["lag"] == 0)


def test_dead_letter_record_has_kafkas_fields_and_headers(cluster: Cluster) -> None:
    queue = Queue(cluster, **{COPY: "true"})
    queue.create(2)
    began_ms = time.time_ns() // 1_000_000
    cluster.produce(queue.source, batch([b"a", None], key=b"k"), partition=1)
    assert queue.fetch(1) == [(0, 1, 1)]
    queue.acknowledge(1, 0, 1, REJECT)
    assert queue.records(2, partition=1) == [(0, b"k", b"a"), (1, b"k", None)]
    (found,) = queue.batches(1)
    assert found.headers == tuple(
        (
            (b"__dlq.errors.topic", queue.source.encode()),
            (b"__dlq.errors.partition", b"1"),
            (b"__dlq.errors.offset", b"%d" % offset),
            (b"__dlq.errors.group", queue.group.encode()),
            (b"__dlq.errors.delivery.count", b"1"),
            (b"__dlq.errors.message", b"Offset rejected by client."),
        )
        for offset in range(2)
    )
    assert (found.attributes, found.producer_id, found.base_sequence) == (0, -1, -1)
    assert began_ms <= found.max_timestamp_ms <= time.time_ns() // 1_000_000
    assert queue.batches(0) == []
    until(lambda: queue.is_done(1), "records are archived")


def test_record_at_the_delivery_limit_is_queued_without_its_body(cluster: Cluster) -> None:
    queue = Queue(cluster, **{LIMIT: "2"})
    queue.create()
    cluster.produce(queue.source, batch([b"a"], key=b"k"), partition=1)
    for count in (1, 2):
        assert queue.fetch(1) == [(0, 0, count)]
        queue.acknowledge(1, 0, 0, RELEASE)
    assert queue.records(1) == [(0, None, None)]
    ((headers,),) = (queued.headers for queued in queue.batches())
    assert dict(headers)[b"__dlq.errors.delivery.count"] == b"2"
    message = b"Offset delivery count exceeded the threshold."
    assert dict(headers)[b"__dlq.errors.message"] == message
    assert dict(headers)[b"__dlq.errors.partition"] == b"1"


def test_dead_letter_batches_stay_within_max_message_bytes(cluster: Cluster) -> None:
    queue = Queue(cluster)
    queue.create(**{"max.message.bytes": "1000"})
    cluster.produce(queue.source, [b"%d" % number for number in range(20)])
    assert queue.fetch(0) == [(0, 19, 1)]
    queue.acknowledge(0, 0, 19, REJECT)
    assert [offset for offset, _, _ in queue.records(20)] == list(range(20))
    sizes = [queued.size for queued in queue.batches()]
    counts = [len(queued.values) for queued in queue.batches()]
    assert max(sizes) <= 1000
    assert counts == [4] * 5, (sizes, counts)


def test_bodies_of_a_batch_that_decompresses_too_large_are_left_out(cluster: Cluster) -> None:
    queue = Queue(cluster, **{COPY: "true"})
    queue.create(**{"max.message.bytes": "3000"})
    for size in (10, 2000):
        plain = batch([b"x" * size] * 2)[61:]
        compressed = seal(gzip.compress(plain), count=2, attributes=GZIP)
        assert cluster.produce(queue.source, compressed)["error_code"] == "none"
    ranges = queue.fetch(0)
    assert (ranges[0][0], ranges[-1][1]) == (0, 3)
    queue.acknowledge(0, 0, 3, REJECT)
    small = b"x" * 10
    assert queue.records(4) == [
        (0, None, small),
        (1, None, small),
        (2, None, None),
        (3, None, None),
    ]


def test_missing_queue_is_created_if_the_broker_may(cluster: Cluster) -> None:
    queue = Queue(cluster)
    assert alter(cluster, BROKER_KIND, "", **{AUTO: "true"}) == "none"
    try:
        cluster.produce(queue.source, [b"a"])
        assert queue.fetch(0) == [(0, 0, 1)]
        queue.acknowledge(0, 0, 0, REJECT)
        until(lambda: cluster.leaders(queue.name) == 1, "the queue is created")
        assert queue.records(1) == [(0, None, None)]
    finally:
        assert alter(cluster, BROKER_KIND, "", **{AUTO: None}) == "none"
    asked = {"resource_type": TOPIC_KIND, "resource_name": queue.name, "configuration_keys": None}
    body = {"resources": [asked], "include_synonyms": False, "include_documentation": False}
    (found,) = cluster.call("describe_configs", 4, **body)["results"]
    topic_level = 1
    own = {
        row["name"]: row["value"] for row in found["configs"] if row["config_source"] == topic_level
    }
    assert own == {ENABLE: "true", "message.timestamp.type": "CreateTime"}


@pytest.mark.parametrize("fault", ["no topic", "not enabled", "prefix"])
def test_unusable_queue_loses_the_records(cluster: Cluster, fault: str) -> None:
    queue = Queue(cluster)
    if fault == "prefix":
        queue.name = unique("plain")
        assert alter(cluster, GROUP_KIND, queue.group, **{NAME: queue.name}) == "none"
        queue.create()
    elif fault == "not enabled":
        cluster.create_topic(queue.name)
    cluster.produce(queue.source, [b"a"])
    assert queue.fetch(0) == [(0, 0, 1)]
    queue.acknowledge(0, 0, 0, REJECT)
    until(lambda: queue.is_done(0), "the record is archived")
    if fault != "no topic":
        assert cluster.offset(queue.name) == 0


def test_dead_letter_topic_with_an_internal_name_is_refused(cluster: Cluster) -> None:
    assert alter(cluster, GROUP_KIND, unique("g"), **{NAME: "__dlq"}) == "invalid_config"
