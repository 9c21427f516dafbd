"""The records of share groups (KIP-932): types 10 to 15.

The values have one version, 0, and are flexible; keys are plain. As with consumer groups, each
record can be decoded without any other.

Source: the ``ShareGroup*Key.json`` and ``ShareGroup*Value.json`` schemas of Kafka 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from fencepost.groups.consumer_records import AssignmentEpochValue, TargetAssignmentValue
from fencepost.groups.record_fields import (
    TopicPartitions,
    read_int32s,
    read_only_tag,
    read_strings,
    read_topics,
    tag_int64,
    write_int32s,
    write_strings,
    write_topics,
)
from fencepost.logcore.fields import FieldReader, FieldWriter
from fencepost.logcore.machine import Record
from fencepost.logcore.values import dataclass

_VERSION: Final = 0


class ShareRecordType(IntEnum):
    """The type at the beginning of a key."""

    MEMBER_METADATA = 10
    GROUP_METADATA = 11
    TARGET_ASSIGNMENT_METADATA = 12
    TARGET_ASSIGNMENT_MEMBER = 13
    CURRENT_MEMBER_ASSIGNMENT = 14
    STATE_PARTITION_METADATA = 15


PER_MEMBER: Final = {
    ShareRecordType.MEMBER_METADATA,
    ShareRecordType.TARGET_ASSIGNMENT_MEMBER,
    ShareRecordType.CURRENT_MEMBER_ASSIGNMENT,
}
"""Types with a member id in the key."""


@dataclass(frozen=True, slots=True)
class ShareKey:
    """A key. ``member_id`` is "" for a type with one record per group."""

    kind: ShareRecordType
    group_id: str
    member_id: str = ""


# --- values --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShareMemberValue:
    """Type 10: a member's metadata and subscription."""

    rack_id: str | None
    client_id: str
    client_host: str
    subscribed_topic_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShareGroupEpochValue:
    """Type 11. ``metadata_hash`` covers the subscribed topics; 0 stands for none."""

    epoch: int
    metadata_hash: int = 0


@dataclass(frozen=True, slots=True)
class ShareAssignmentValue:
    """Type 14: a member's current assignment. ``state`` is 0, which Kafka calls STABLE."""

    member_epoch: int
    previous_member_epoch: int
    partitions: tuple[TopicPartitions, ...]
    state: int = 0


@dataclass(frozen=True, slots=True)
class StateTopic:
    """Partitions of one topic in a record of type 15."""

    topic_id: bytes
    name: str
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StatePartitionsValue:
    """Type 15: the partitions with state at the share coordinator, and pending changes of it.

    ``deleting`` are (topic id, name).
    """

    initializing: tuple[StateTopic, ...] = ()
    initialized: tuple[StateTopic, ...] = ()
    deleting: tuple[tuple[bytes, str], ...] = ()


ShareValue = (
    ShareMemberValue
    | ShareGroupEpochValue
    | AssignmentEpochValue
    | TargetAssignmentValue
    | ShareAssignmentValue
    | StatePartitionsValue
)


# --- writing -------------------------------------------------------------------------------------


def _key(kind: ShareRecordType, *texts: str) -> bytes:
    writer = FieldWriter(kind)
    for text in texts:
        writer.string(text)
    return writer.done()


def tombstone(kind: ShareRecordType, group_id: str, *member_id: str) -> Record:
    """Return the tombstone of a record."""
    return Record(_key(kind, group_id, *member_id), None)


def member(group_id: str, member_id: str, value: ShareMemberValue) -> Record:
    """Return the record of a member's metadata and subscription."""
    writer = FieldWriter(_VERSION, flexible=True)
    writer.string(value.rack_id)
    writer.string(value.client_id)
    writer.string(value.client_host)
    write_strings(writer, value.subscribed_topic_names)
    writer.tags({})
    return Record(_key(ShareRecordType.MEMBER_METADATA, group_id, member_id), writer.done())


def group_epoch(group_id: str, value: ShareGroupEpochValue) -> Record:
    """Return the record of a group's epoch."""
    writer = FieldWriter(_VERSION, flexible=True)
    writer.int32(value.epoch)
    writer.int64(value.metadata_hash)
    writer.tags({})
    return Record(_key(ShareRecordType.GROUP_METADATA, group_id), writer.done())


def assignment_epoch(group_id: str, value: AssignmentEpochValue) -> Record:
    """Return the record of the target assignment's epoch."""
    writer = FieldWriter(_VERSION, flexible=True)
    writer.int32(value.epoch)
    writer.tags(tag_int64(value.timestamp_ms))
    return Record(_key(ShareRecordType.TARGET_ASSIGNMENT_METADATA, group_id), writer.done())


def target_assignment(group_id: str, member_id: str, value: TargetAssignmentValue) -> Record:
    """Return the record of a member's target."""
    writer = FieldWriter(_VERSION, flexible=True)
    write_topics(writer, value.partitions)
    writer.tags({})
    kind = ShareRecordType.TARGET_ASSIGNMENT_MEMBER
    return Record(_key(kind, group_id, member_id), writer.done())


def current_assignment(group_id: str, member_id: str, value: ShareAssignmentValue) -> Record:
    """Return the record of a member's current assignment."""
    writer = FieldWriter(_VERSION, flexible=True)
    writer.int32(value.member_epoch)
    writer.int32(value.previous_member_epoch)
    writer.int8(value.state)
    write_topics(writer, value.partitions)
    writer.tags({})
    kind = ShareRecordType.CURRENT_MEMBER_ASSIGNMENT
    return Record(_key(kind, group_id, member_id), writer.done())


def state_partitions(group_id: str, value: StatePartitionsValue) -> Record:
    """Return the record of the partitions with state at the share coordinator."""
    writer = FieldWriter(_VERSION, flexible=True)
    for topics in (value.initializing, value.initialized):
        writer.count(len(topics))
        for topic in topics:
            writer.raw(topic.topic_id)
            writer.string(topic.name)
            write_int32s(writer, topic.partitions)
            writer.tags({})
    writer.count(len(value.deleting))
    for topic_id, name in value.deleting:
        writer.raw(topic_id)
        writer.string(name)
        writer.tags({})
    writer.tags({})
    return Record(_key(ShareRecordType.STATE_PARTITION_METADATA, group_id), writer.done())


# --- reading -------------------------------------------------------------------------------------


def _read_member(reader: FieldReader) -> ShareMemberValue:
    return ShareMemberValue(
        rack_id=reader.nullable_string(),
        client_id=reader.string(),
        client_host=reader.string(),
        subscribed_topic_names=read_strings(reader),
    )


def _read_current(reader: FieldReader) -> ShareAssignmentValue:
    epoch, previous, state = reader.int32(), reader.int32(), reader.int8()
    return ShareAssignmentValue(epoch, previous, read_topics(reader), state)


def _read_state_topics(reader: FieldReader) -> tuple[StateTopic, ...]:
    topics = []
    for _ in range(reader.count()):
        topics.append(StateTopic(reader.raw(16), reader.string(), read_int32s(reader)))
        reader.tags()
    return tuple(topics)


def _read_state_partitions(reader: FieldReader) -> StatePartitionsValue:
    initializing, initialized = _read_state_topics(reader), _read_state_topics(reader)
    deleting = []
    for _ in range(reader.count()):
        deleting.append((reader.raw(16), reader.string()))
        reader.tags()
    return StatePartitionsValue(initializing, initialized, tuple(deleting))


def read_key(kind: ShareRecordType, reader: FieldReader) -> ShareKey:
    """Decode a key of one of this module's types, after its leading number."""
    return ShareKey(kind, reader.string(), reader.string() if kind in PER_MEMBER else "")


VALUE_READERS: Final[Mapping[ShareRecordType, Callable[[FieldReader], ShareValue]]] = (
    MappingProxyType(
        {
            ShareRecordType.MEMBER_METADATA: _read_member,
            ShareRecordType.GROUP_METADATA: lambda r: ShareGroupEpochValue(r.int32(), r.int64()),
            ShareRecordType.TARGET_ASSIGNMENT_METADATA: lambda r: AssignmentEpochValue(
                r.int32(), read_only_tag(r)
            ),
            ShareRecordType.TARGET_ASSIGNMENT_MEMBER: lambda r: TargetAssignmentValue(
                read_topics(r)
            ),
            ShareRecordType.CURRENT_MEMBER_ASSIGNMENT: _read_current,
            ShareRecordType.STATE_PARTITION_METADATA: _read_state_partitions,
        }
    )
)
"""Record type → reader of its value, after the version."""
