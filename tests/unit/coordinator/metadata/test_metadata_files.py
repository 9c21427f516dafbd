"""Metadata directories of older releases, and snapshots, after a kill or a power loss."""

from __future__ import annotations

import json
import random
import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from fencepost.cluster.image import (
    BROKER_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
    MetadataImage,
)
from fencepost.cluster.image_loader import ImageLoader
from fencepost.cluster.image_records import image_values
from fencepost.cluster.record_codec import encode
from fencepost.cluster.records import (
    AccessControlEntryRecord,
    BeginTransactionRecord,
    ConfigRecord,
    UserScramCredentialRecord,
)
from fencepost.coordinator.metadata import framing
from fencepost.coordinator.metadata import log as module
from fencepost.coordinator.metadata.errors import MetadataError
from fencepost.coordinator.metadata.names import METADATA_TOPIC
from fencepost.coordinator.metadata.quorum_state import is_of_apache_kafka
from fencepost.coordinator.metadata.server_secret import SECRET_FILE, server_secret
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.batch import decode_records
from fencepost.logcore.checkpoints import write_partition_metadata
from fencepost.logcore.fs import write_file
from fencepost.logcore.machine import Record
from fencepost.logcore.verify import verify_partition
from tests.support import old_metadata
from tests.support.memory_disk import MemoryDisk
from tests.support.metadata_changes import create_topic, delete_topic, set_topic_configs
from tests.unit.coordinator.services.coordinators import storage

DATA = "/data"
LOG = f"{DATA}/{METADATA_TOPIC}-0"
A, B, C, GONE, ACL = (uuid.UUID(int=number << 64 | 7) for number in range(1, 6))
SECRET = b"s" * 32

OLD = [
    old_metadata.starts(1),
    old_metadata.topic("a.b", A, 3, {"retention.ms": "5"}, first_start=1),
    old_metadata.topic("gone", GONE, 1, first_start=1),
    old_metadata.record("producer-ids", "", {"next": 1000}),
    old_metadata.starts(3),
    old_metadata.topic("b", B, 1, first_start=3),
    old_metadata.record("topic", "gone", None),
    old_metadata.topic(
        "a.b", A, 4, {"retention.ms": "6", "segment.bytes": "1048576"}, first_start=1
    ),
    old_metadata.settings("1", {"log.retention.ms": "7"}),
    old_metadata.settings("", {"log.retention.ms": "8", "message.max.bytes": "9"}),
    old_metadata.settings("2", {"log.retention.ms": "8"}),
    old_metadata.settings("2", {}),
    old_metadata.settings("group:g:1", {"consumer.session.timeout.ms": "50000"}),
    old_metadata.record("feature", "transaction.version", {"level": 1, "epoch": 4}),
    old_metadata.record("feature", "group.version", {"level": 0, "epoch": 5}),
    old_metadata.record(
        "acl",
        str(ACL),
        {
            "resourceType": 2,
            "resourceName": "t",
            "patternType": 3,
            "principal": "User:a",
            "host": "*",
            "operation": 3,
            "permissionType": 3,
        },
    ),
    old_metadata.record(
        "scram",
        "1:alice",
        {
            "Name": "alice",
            "Mechanism": 1,
            "Salt": b"salt",
            "StoredKey": b"stored",
            "ServerKey": b"server",
            "Iterations": 4096,
        },
    ),
    *(
        old_metadata.record(
            "quota",
            key,
            {
                "entity": [
                    {"entityType": "client-id", "entityName": None},
                    {"entityType": "user", "entityName": "u"},
                ],
                "key": key,
                "value": 12.5,
            },
        )
        for key in ("producer_byte_rate", "consumer_byte_rate")
    ),
    old_metadata.record("quota", "consumer_byte_rate", None),
    old_metadata.record("secret", "salts of unknown users", {"Secret": SECRET}),
    old_metadata.starts(7),
    old_metadata.topic("c", C, 2, first_start=7),
]


def start(disk: MemoryDisk) -> Storage:
    return storage(Path(DATA), fs=disk)


def known(image: MetadataImage) -> MetadataImage:
    """Return the image without offsets, epochs and registrations, which restarts change."""
    return replace(image, offset=0, epoch=0, brokers={})


def epochs(image: MetadataImage) -> dict[str, set[int]]:
    return {
        topic.name: {partition.leader_epoch for partition in topic.partitions}
        for topic in image.topics.values()
    }


def old_directory() -> MemoryDisk:
    disk = MemoryDisk()
    disk.make_directory(DATA)
    old_metadata.write_old_log(disk, DATA, OLD)
    for directory in ("gone-0", "a.b-0"):
        disk.make_directory(f"{DATA}/{directory}")
        topic_id = GONE if directory == "gone-0" else A
        write_partition_metadata(disk, f"{DATA}/{directory}", topic_id)
    return disk


def check_converted(storage: Storage, *, starts: int) -> None:
    """Check the converted image after the new release has started ``starts`` times."""
    image = storage.metadata.image
    assert {topic.name: topic.topic_id for topic in image.topics.values()} == {
        "a.b": A,
        "b": B,
        "c": C,
    }
    assert {topic.name: len(topic.partitions) for topic in image.topics.values()} == {
        "a.b": 4,
        "b": 1,
        "c": 2,
    }
    assert epochs(image) == {"a.b": {6 + starts}, "b": {4 + starts}, "c": {starts}}
    assert image.configs == {
        (TOPIC_RESOURCE, "a.b"): {"retention.ms": "6", "segment.bytes": "1048576"},
        (BROKER_RESOURCE, "1"): {"log.retention.ms": "7"},
        (BROKER_RESOURCE, ""): {"log.retention.ms": "8", "message.max.bytes": "9"},
        (GROUP_RESOURCE, "g:1"): {"consumer.session.timeout.ms": "50000"},
    }
    assert storage.config.int("log.retention.ms") == 7
    assert image.features == {
        "metadata.version": 30,
        "share.version": 1,
        "transaction.version": 1,
    }
    assert image.next_producer_id == 1000
    assert image.acls == {
        ACL: AccessControlEntryRecord(ACL, 2, "t", 3, "User:a", "*", 3, 3),
    }
    assert image.scram == {
        ("alice", 1): UserScramCredentialRecord("alice", 1, b"salt", b"stored", b"server", 4096)
    }
    assert image.quotas == {(("client-id", None), ("user", "u")): {"producer_byte_rate": 12.5}}
    assert server_secret(storage.fs, DATA) == SECRET
    assert storage.metadata.epoch == 7 + starts


def test_metadata_directory_of_an_older_release_is_converted_at_first_start() -> None:
    disk = old_directory()
    for starts in (1, 2, 3):
        now = start(disk)
        check_converted(now, starts=starts)
        if starts == 2:
            now.logs.close()
    names = disk.list_directory(DATA) or []
    assert [name for name in names if name.startswith("gone-0") and name.endswith("-delete")]
    assert "a.b-0" in names
    assert SECRET not in b"".join(
        bytes(content) for path, content in files(disk) if SECRET_FILE not in path
    )
    for header, batch in now.metadata.partition.reader.read_all():
        assert header.is_control or {record.key for record in decode_records(batch, 0, header)} == {
            None
        }


def files(disk: MemoryDisk) -> list[tuple[str, bytes]]:
    """Return the metadata files: the snapshots and the secret."""
    return [
        (f"{directory}/{name}", disk.read_file(f"{directory}/{name}") or b"")
        for directory, names in disk.names.items()
        for name in names
        if name.endswith((".checkpoint", SECRET_FILE))
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"\xc1", msgpack.packb({"version": 1})),
        (msgpack.packb(["what", ""]), msgpack.packb({"version": 1})),
        (msgpack.packb(["topic", "a"]), msgpack.packb({"version": 2})),
        (msgpack.packb(["topic", "a"]), msgpack.packb([1])),
        (msgpack.packb(["topic", "a"]), msgpack.packb({"version": 1, "id": b"short"})),
        (msgpack.packb(["topic", "a"]), b"\xc1"),
        (msgpack.packb(["starts", ""]), None),
        (msgpack.packb(["acl", "a"]), msgpack.packb({"version": 1})),
    ],
)
def test_older_metadata_log_with_unreadable_records_does_not_load(
    key: bytes, value: bytes | None
) -> None:
    disk = MemoryDisk()
    old_metadata.write_old_log(disk, DATA, [*OLD, Record(key, value)])
    with pytest.raises(MetadataError, match=METADATA_TOPIC):
        start(disk)


def each_end(
    before: MemoryDisk,
    run: Callable[[MemoryDisk], object],
    judge: Callable[[MemoryDisk], None],
    losses: int = 1,
) -> int:
    """Check the disk after a kill and power losses at each step; count the power losses."""
    disk = before.after_kill()
    run(disk)
    loss, count = before.base(), 0
    for step in loss.walk(disk.steps):
        judge(loss.killed())
        for number in range(losses):
            judge(loss.state(random.Random(f"{step} {number}")))
            count += 1
    return count


def test_crash_during_conversion_loses_no_metadata() -> None:
    def judge(left: MemoryDisk) -> None:
        now = start(left)
        # The interrupted start may or may not have bumped the epochs.
        check_converted(now, starts=now.metadata.epoch - 7)
        assert now.metadata.epoch in {8, 9}

    assert each_end(old_directory(), start, judge) > 20


# --- snapshots ---


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPACT_SLACK_RECORDS", 20)
    monkeypatch.setattr(module, "COMPACT_FACTOR", 1)


def grown() -> MemoryDisk:
    """Return a disk with a metadata log that a starting broker rewrites as a snapshot."""
    disk = MemoryDisk()
    disk.make_directory(DATA)
    now = start(disk)
    create_topic(now.metadata, "t.1", 3, {"retention.ms": "1"})
    create_topic(now.metadata, "gone", 1, {})
    delete_topic(now.metadata, "gone")
    for number in range(30):
        set_topic_configs(now.metadata, "t.1", {"retention.ms": str(number)})
    return disk


def snapshots_of(disk: MemoryDisk) -> list[str]:
    return [name for name in disk.list_directory(LOG) or [] if name.endswith(".checkpoint")]


@pytest.mark.usefixtures("small")
def test_metadata_snapshot_replaces_the_log_before_its_end_offset() -> None:
    disk = grown()
    before = known(storage(Path(DATA), fs=disk.after_kill()).metadata.image)
    now = start(disk)
    (name,) = snapshots_of(disk)
    end = now.metadata.partition.log_start_offset
    assert name == f"{end:020}-{2:010}.checkpoint"
    assert known(now.metadata.image) == before
    create_topic(now.metadata, "behind", 1, {})
    again = start(disk)
    assert again.metadata.partition.log_start_offset == end
    assert sorted(again.metadata.topics) == ["behind", "t.1"]
    assert epochs(again.metadata.image) == {"t.1": {2}, "behind": {1}}
    for number in range(30):
        set_topic_configs(again.metadata, "t.1", {"retention.ms": str(number)})
    assert list(verify_partition(disk, LOG)) == []
    start(disk)
    assert list(verify_partition(disk, LOG)) == []
    (other,) = snapshots_of(disk)
    assert other > name


@pytest.mark.usefixtures("small")
def test_crash_while_writing_a_snapshot_loses_no_metadata() -> None:
    before = grown()
    expected = storage(Path(DATA), fs=before.after_kill()).metadata.image.configs

    def judge(left: MemoryDisk) -> None:
        now = start(left)
        assert now.metadata.image.configs == expected
        assert sorted(now.metadata.topics) == ["t.1"]
        assert epochs(now.metadata.image) == {"t.1": {now.metadata.epoch - 1}}
        assert len(snapshots_of(left)) == 1
        create_topic(now.metadata, "next", 1, {})
        assert sorted(start(left).metadata.topics) == ["next", "t.1"]

    assert each_end(before, start, judge) > 20


@pytest.mark.usefixtures("small")
def test_log_that_ends_before_its_snapshot_continues_at_the_snapshot_end() -> None:
    """The damaged records are older than the snapshot."""
    disk = grown()
    now = start(disk)
    end = now.metadata.partition.log_start_offset
    for name in disk.list_directory(LOG) or []:
        if name.endswith(".log"):
            disk.contents[disk.names[LOG][name]][:] = b""
    again = start(disk)
    create_topic(again.metadata, "next", 1, {})
    assert again.metadata.partition.log_start_offset == end
    assert sorted(start(disk).metadata.topics) == ["next", "t.1"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("harm", ["gone", "cut", "bit", "tail"])
def test_metadata_log_with_a_missing_or_damaged_snapshot_does_not_load(harm: str) -> None:
    disk = grown()
    start(disk).logs.close()
    (name,) = snapshots_of(disk)
    content = disk.contents[disk.names[LOG][name]]
    if harm == "gone":
        disk.remove(f"{LOG}/{name}")
    elif harm == "cut":
        del content[-80:]
    elif harm == "bit":
        content[len(content) // 2] ^= 1
    else:
        content.extend(b"tail")
    with pytest.raises(MetadataError, match=re.escape(METADATA_TOPIC)):
        start(disk)


def test_loaded_snapshot_equals_the_image_it_was_written_from() -> None:
    now = start(old_directory())
    create_topic(now.metadata, "wide", 300, {})
    image = now.metadata.image
    loader = ImageLoader(image)
    loader.begin_snapshot()
    loader.replay(image_values(image), 0, 0)
    assert loader.end_snapshot(image.offset + 1, image.epoch) == image
    assert len({id(partition) for partition in loader.publish().topics["wide"].partitions}) == 1


# --- metadata transactions ---


def test_change_larger_than_a_batch_is_written_as_a_metadata_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(framing, "MAX_BATCH_BYTES", 900)
    disk = MemoryDisk()
    disk.make_directory(DATA)
    now = start(disk)
    before = disk.after_kill()

    def make(left: MemoryDisk) -> None:
        create_topic(start(left).metadata, "t", 40, {})

    def judge(left: MemoryDisk) -> None:
        again = start(left)
        made = again.metadata.topic("t")
        assert made is None or len(made.partitions) == 40
        create_topic(again.metadata, "u", 40, {})
        last = start(left)
        assert {"u"} <= set(last.metadata.topics) <= {"t", "u"}

    assert each_end(before, make, judge) > 10
    create_topic(now.metadata, "t", 40, {})
    assert len(start(disk).metadata.known("t").partitions) == 40


def test_unfinished_metadata_transaction_is_ignored_on_load() -> None:
    disk = MemoryDisk()
    disk.make_directory(DATA)
    now = start(disk)
    begun = [
        encode(BeginTransactionRecord("cut short")),
        encode(ConfigRecord(TOPIC_RESOURCE, "x", "retention.ms", "1")),
    ]
    now.metadata.partition.append_batch(framing.data_batch(begun, 0), 0)
    now.metadata.partition.flushes.run(0)
    for _ in range(3):
        now = start(disk)
        assert now.metadata.image.configs == {}
        create_topic(now.metadata, f"t{now.metadata.epoch}", 1, {})
    assert sorted(start(disk).metadata.topics) == ["t2", "t3", "t4"]


# --- others ---


def test_quorum_state_file_identifies_a_directory_of_apache_kafka() -> None:
    """Apache Kafka reads the quorum state before it takes the lock (tests/oracle/test_lock.py)."""
    disk = old_directory()
    assert not is_of_apache_kafka(disk, LOG)
    start(disk)
    content = disk.read_file(f"{LOG}/quorum-state")
    assert content is not None
    assert json.loads(content)["data_version"] > 1
    assert not is_of_apache_kafka(disk, LOG)
    write_file(disk, f"{LOG}/quorum-state", b'{"leaderId":1,"data_version":1}', sync=True)
    assert is_of_apache_kafka(disk, LOG)
    start(disk).logs.close()
    assert is_of_apache_kafka(disk, LOG), "what is there is left as it is"
