from __future__ import annotations

import errno
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

from fencepost.cluster.controller.view import ControllerSettings
from fencepost.cluster.image import GROUP_RESOURCE, MetadataImage
from fencepost.cluster.record_codec import encode
from fencepost.cluster.records import (
    BeginTransactionRecord,
    ConfigRecord,
    EndTransactionRecord,
    PartitionChangeRecord,
    RemoveTopicRecord,
    TopicRecord,
)
from fencepost.coordinator.config.broker_config import ConfigSource
from fencepost.coordinator.daemon.broker import Broker
from fencepost.coordinator.errors import PolicyViolationError, UnknownTopicOrPartitionError
from fencepost.coordinator.metadata import framing
from fencepost.coordinator.metadata import log as module
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.names import (
    CONSUMER_OFFSETS,
    METADATA_TOPIC,
    TRANSACTION_STATE,
    is_internal,
)
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.logcore.errors import LogError, NoSpaceError
from fencepost.logcore.fs import FileSystem
from tests.support.faults import FaultyDisk
from tests.support.metadata_changes import (
    create_partitions,
    create_topic,
    delete_topic,
    internal_topic,
    set_broker_configs,
    set_group_configs,
    set_topic_configs,
)
from tests.unit.coordinator.services.coordinators import allocate_producer_ids, storage


class Node:
    """A metadata log in a directory; a new object for the same directory is a restart."""

    def __init__(
        self,
        directory: Path,
        fs: FileSystem | None = None,
        config: Mapping[str, str] | None = None,
    ) -> None:
        self.store = store = storage(directory, config, fs=fs)
        self.config, self.logs, self.log = store.config, store.logs, store.metadata_log

    def stop(self) -> None:
        self.logs.close()


def test_metadata_survives_a_kill_and_a_clean_stop(tmp_path):
    node = Node(tmp_path)
    made = create_topic(node.log, "a.b", 3, {"retention.ms": "5"})
    create_topic(node.log, "gone", 1, {})
    create_partitions(node.log, "a.b", 5)
    set_topic_configs(node.log, "a.b", {"retention.ms": "6"})
    gone = delete_topic(node.log, "gone")
    assert allocate_producer_ids(node.store) == (0, 1000)
    assert node.log.epoch == 1
    set_broker_configs(node.log, "1", {"log.retention.ms": "7"})
    set_broker_configs(node.log, "", {"log.retention.ms": "8", "message.max.bytes": "9"})
    set_broker_configs(node.log, "2", {"log.retention.ms": "10"})
    for starts, stop in enumerate((False, True, False), 2):
        if stop:
            node.stop()
        node = Node(tmp_path)
        topic = node.log.topic("a.b")
        assert topic is not None
        assert topic.topic_id == made.topic_id
        assert (len(topic.partitions), node.log.topic_configs("a.b")) == (5, {"retention.ms": "6"})
        assert node.log.topic_by_id(made.topic_id) is topic
        assert node.log.topic("gone") is None
        assert node.log.was_deleted(gone.topic_id)
        assert not node.log.was_deleted(made.topic_id)
        assert node.log.image.partition_count == 5
        assert node.log.epoch == starts
        assert node.config.int("log.retention.ms") == 7
        assert node.config.int("message.max.bytes") == 9
        assert node.log.settings("2") == {"log.retention.ms": "10"}
    assert allocate_producer_ids(node.store) == (1000, 1000)


def test_resetting_dynamic_settings_restores_the_defaults(tmp_path):
    node = Node(tmp_path)
    set_broker_configs(node.log, "1", {"message.max.bytes": "9"})
    set_broker_configs(node.log, "1", {})
    assert node.config.int("message.max.bytes") == 1_048_588
    assert Node(tmp_path).config.dynamic(ConfigSource.DYNAMIC_BROKER) == {}


def test_names_that_differ_in_dot_and_underscore_collide(tmp_path):
    node = Node(tmp_path)
    create_topic(node.log, "a.b", 1, {})
    assert node.log.colliding("a_b") == "a.b"
    assert node.log.colliding("a.b") == "a.b"
    assert node.log.colliding("a-b") is None
    delete_topic(node.log, "a.b")
    assert node.log.colliding("a_b") is None


def test_leader_epoch_starts_at_zero_and_increases_with_every_start(tmp_path):
    node = Node(tmp_path)
    old = create_topic(node.log, "old", 1, {})
    assert old.partitions[0].leader_epoch == 0
    node = Node(tmp_path)
    new = create_topic(node.log, "new", 1, {})
    assert node.log.topics["old"].partitions[0].leader_epoch == 1
    assert new.partitions[0].leader_epoch == 0


@pytest.mark.parametrize(
    ("name", "configs"),
    [
        (CONSUMER_OFFSETS, {"compression.type": "producer"}),
        (
            TRANSACTION_STATE,
            {
                "compression.type": "uncompressed",
                "min.insync.replicas": "2",
                "unclean.leader.election.enable": "false",
            },
        ),
    ],
)
def test_internal_topics_have_kafkas_settings(tmp_path, name, configs):
    node = Node(tmp_path)
    topic = internal_topic(node.log, name)
    assert len(topic.partitions) == 50
    assert is_internal(topic.name)
    assert node.log.topic_configs(name) == {
        "cleanup.policy": "compact",
        "segment.bytes": "104857600",
        **configs,
    }
    assert internal_topic(node.log, name) is topic


def test_topics_and_partitions_above_their_limits_are_refused(tmp_path):
    node = Node(tmp_path, config={"fencepost.max.topics": "2", "fencepost.max.partitions": "5"})
    create_topic(node.log, "a", 2, {})
    create_topic(node.log, "b", 3, {})
    with pytest.raises(PolicyViolationError, match=r"fencepost\.max\.topics=2"):
        create_topic(node.log, "c", 1, {})
    delete_topic(node.log, "b")
    with pytest.raises(PolicyViolationError, match=r"fencepost\.max\.partitions=5"):
        create_topic(node.log, "b", 4, {})
    create_partitions(node.log, "a", 5)
    with pytest.raises(PolicyViolationError, match=r"fencepost\.max\.partitions=5"):
        create_partitions(node.log, "a", 6)
    assert node.log.image.partition_count == 5


def test_change_of_an_unknown_topic_is_refused(tmp_path):
    node = Node(tmp_path)
    for change in (
        lambda: create_partitions(node.log, "x", 2),
        lambda: set_topic_configs(node.log, "x", {}),
    ):
        with pytest.raises(UnknownTopicOrPartitionError):
            change()


def test_subscriber_gets_the_old_and_new_image_of_each_change(tmp_path):
    node = Node(tmp_path)
    heard = []

    def published(old: MetadataImage, new: MetadataImage) -> None:
        assert node.log.image is new
        heard.append((len(old.topics), new.partition_count, new.topic_configs("a")))

    node.log.subscribe(Subscriber.HISTORY, published)
    changes = node.log.topic_changes
    create_topic(node.log, "a", 1, {})
    create_partitions(node.log, "a", 2)
    set_topic_configs(node.log, "a", {"retention.ms": "1"})
    assert heard == [(0, 1, {}), (1, 2, {}), (1, 2, {"retention.ms": "1"})]
    assert node.log.topic_changes == changes + 2, "settings are not counted"
    node.log.append([PartitionChangeRecord(node.log.known("a").topic_id, 0, leader=1)])
    assert node.log.topic_changes == changes + 2
    delete_topic(node.log, "a")
    assert node.log.topic_changes == changes + 3


def test_compacted_metadata_log_restores_the_same_image(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "COMPACT_SLACK_RECORDS", 10)
    monkeypatch.setattr(framing, "MAX_BATCH_BYTES", 200)
    node = Node(tmp_path)
    allocate_producer_ids(node.store)
    set_broker_configs(node.log, "1", {"message.max.bytes": "9"})
    topics = [create_topic(node.log, f"t{n}", 1, {}) for n in range(3)]
    node.log.compact()
    assert node.log.partition.log_start_offset == 0
    for number in range(40):
        set_topic_configs(node.log, "t0", {"retention.ms": str(number)})
    before = node.log.partition.log_end_offset
    node.log.compact()
    assert node.log.partition.log_start_offset == before
    # A kill loses the new log start offset: replaying the old records too gives the same image.
    for starts, stop in enumerate((False, True, False), 2):
        if stop:
            node.stop()
        node = Node(tmp_path)
        assert [topic.topic_id for topic in node.log.topics.values()] == [
            t.topic_id for t in topics
        ]
        assert allocate_producer_ids(node.store)[0] >= 1000
        assert node.log.epoch == starts
        assert node.config.int("message.max.bytes") == 9


async def test_broker_stop_writes_a_snapshot_and_advances_the_log_start(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "COMPACT_SLACK_RECORDS", 20)
    async with Broker(tmp_path, "127.0.0.1:0") as broker:
        create_topic(broker.services.metadata, "t", 30, {})
        assert broker.services.metadata.partition.log_start_offset == 0
    log = tmp_path / "__cluster_metadata-0"
    (snapshot,) = log.glob("*.checkpoint")
    async with Broker(tmp_path, "127.0.0.1:0") as broker:
        assert broker.services.metadata.partition.log_start_offset == int(
            snapshot.name.split("-")[0]
        )
        assert len(broker.services.metadata.known("t").partitions) == 30


@pytest.mark.parametrize(
    "values",
    [
        [b""],
        [b"\x02\x02\x00" + encode(TopicRecord("t", uuid.UUID(int=5)))[3:]],
        [b"\x01\x63\x00"],
        [b"\x01\x02\x01" + encode(TopicRecord("t", uuid.UUID(int=5)))[3:]],
        [encode(TopicRecord("t", uuid.UUID(int=5))) + b"\x00"],
        [encode(RemoveTopicRecord(uuid.UUID(int=5)))],
        [encode(PartitionChangeRecord(uuid.UUID(int=5), 0, leader=1))],
        [encode(EndTransactionRecord())],
        [encode(BeginTransactionRecord())] * 2,
    ],
)
def test_metadata_log_with_unreadable_records_does_not_load(tmp_path, values):
    node = Node(tmp_path)
    node.log.partition.append_batch(framing.data_batch(values, 0), 0)
    with pytest.raises(MetadataError, match=METADATA_TOPIC):
        Node(tmp_path)


def test_failed_metadata_append_leaves_the_image_unchanged(tmp_path):
    fs = FaultyDisk()
    node = Node(tmp_path, fs=fs)
    create_topic(node.log, "a", 1, {})
    fs.fails = {"write": errno.ENOSPC}
    with pytest.raises(LogError):
        create_topic(node.log, "b", 1, {})
    assert list(node.log.topics) == ["a"]
    fs.fails = {}
    assert list(Node(tmp_path).log.topics) == ["a"]


async def test_failed_flush_is_an_error_and_a_later_flush_makes_the_change_durable(
    tmp_path, monkeypatch
):
    fs = FaultyDisk()
    node = Node(tmp_path, fs=fs)
    create_topic(node.log, "a", 1, {})
    node.log.partition.flushes.roll(0)
    fs.fails = {"sync_directory": errno.EMFILE}
    with pytest.raises(NoSpaceError, match="is not on disk"):
        create_topic(node.log, "b", 1, {})
    with pytest.raises(NoSpaceError, match="is not on disk"):
        node.log.force()
    monkeypatch.setattr(module, "COMPACT_SLACK_RECORDS", 0)
    start = node.log.partition.log_start_offset
    node.log.compact(0)
    assert node.log.partition.log_start_offset == start, "no snapshot of what may be lost"
    # The refused topic stays: its records are in the log, and later records follow them.
    assert list(node.log.topics) == ["a", "b"]
    fs.fails = {}
    create_topic(node.log, "c", 1, {})
    assert node.log.partition.recovery_point == node.log.partition.log_end_offset
    assert list(Node(tmp_path).log.topics) == ["a", "b", "c"]


def test_topic_ids_do_not_begin_with_a_dash_in_base64(monkeypatch):
    ids = iter([uuid.UUID(int=62 << 122), uuid.UUID(int=1 << 122)])
    monkeypatch.setattr(module.uuid, "uuid4", lambda: next(ids))
    assert module.new_topic_id() == uuid.UUID(int=1 << 122)


def test_group_configs_above_the_maximum_of_configured_groups_are_refused(tmp_path):
    node, limit = Node(tmp_path), ControllerSettings("").max_configured_groups
    own = {"consumer.session.timeout.ms": "50000"}
    node.log.append(
        [
            ConfigRecord(GROUP_RESOURCE, f"g{number}", name, value)
            for number in range(limit - 1)
            for name, value in own.items()
        ]
    )
    set_group_configs(node.log, "last", own)
    for _ in range(2):
        with pytest.raises(PolicyViolationError, match=f"{limit} groups"):
            set_group_configs(node.log, "one too many", own)
        set_group_configs(node.log, "one too many", {})
        assert node.log.group_settings("one too many") == {}
        set_group_configs(node.log, "last", {**own, "consumer.heartbeat.interval.ms": "6000"})
        node.stop()
        node = Node(tmp_path)
    assert len(node.log.group_settings("last")) == 2
    set_group_configs(node.log, "g0", {})
    set_group_configs(node.log, "one more", own)
    assert node.log.group_settings("one more") == own
