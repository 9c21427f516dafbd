"""The records of consumer-protocol groups (KIP-848): types 3 to 8 and 16.

The values have one version, 0, and are flexible; keys are plain. Each record can be decoded without
any other, so that a log loads regardless of the records that compaction has removed.

Kafka 4.1 dropped type 4. A group only notes that its log still has such a record, so that the
record can be tombstoned.

Source: the ``ConsumerGroup*Key.json`` and ``ConsumerGroup*Value.json`` schemas of Kafka 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final

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
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.fields import FieldReader, FieldWriter
from fencepost.logcore.machine import Record
from fencepost.logcore.values import dataclass

_VERSION: Final = 0
_ONLY_TAG: Final = 0


class ConsumerRecordType(IntEnum):
    """The type at the beginning of a key."""

    GROUP_METADATA = 3
    PARTITION_METADATA = 4
    MEMBER_METADATA = 5
    TARGET_ASSIGNMENT_METADATA = 6
    TARGET_ASSIGNMENT_MEMBER = 7
    CURRENT_MEMBER_ASSIGNMENT = 8
    REGULAR_EXPRESSION = 16


PER_GROUP: Final = {
    ConsumerRecordType.GROUP_METADATA,
    ConsumerRecordType.PARTITION_METADATA,
    ConsumerRecordType.TARGET_ASSIGNMENT_METADATA,
}
"""Types with one record per group, whose key contains only the group id."""


# --- keys ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConsumerKey:
    """A key. ``name`` is a member's id (types 5, 7, 8) or an expression (16), else ""."""

    kind: ConsumerRecordType
    group_id: str
    name: str = ""


# --- values --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupEpochValue:
    """Type 3. ``metadata_hash`` covers the subscribed topics; 0 stands for none."""

    epoch: int
    metadata_hash: int = 0


@dataclass(frozen=True, slots=True)
class PartitionMetadataValue:
    """Type 4, in logs of older brokers."""


@dataclass(frozen=True, slots=True)
class ClassicMemberMetadata:
    """The metadata of a member of the classic protocol. ``protocols`` are (name, metadata)."""

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class ConsumerMemberValue:
    """Type 5: a member's metadata and subscription."""

    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    subscribed_topic_names: tuple[str, ...]
    subscribed_topic_regex: str | None
    """None and "" both mean no expression; Kafka writes "" since 4.0."""
    rebalance_timeout_ms: int
    server_assignor: str | None
    classic: ClassicMemberMetadata | None = None


@dataclass(frozen=True, slots=True)
class AssignmentEpochValue:
    """Type 6. ``timestamp_ms`` is when the target was computed, 0 if unknown."""

    epoch: int
    timestamp_ms: int = 0


@dataclass(frozen=True, slots=True)
class TargetAssignmentValue:
    """Type 7: a member's target."""

    partitions: tuple[TopicPartitions, ...]


@dataclass(frozen=True, slots=True)
class AssignedPartitions:
    """Partitions of one topic, each with the epoch of its assignment (KIP-1251), if known."""

    topic_id: bytes
    partitions: tuple[int, ...]
    assignment_epochs: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class CurrentAssignmentValue:
    """Type 8: a member's current assignment. ``state`` is the number of Kafka's ``MemberState``."""

    member_epoch: int
    previous_member_epoch: int
    state: int
    assigned: tuple[AssignedPartitions, ...]
    pending_revocation: tuple[AssignedPartitions, ...]


@dataclass(frozen=True, slots=True)
class RegularExpressionValue:
    """Type 16: the topics that a regular expression matches, as of a version of the metadata."""

    topics: tuple[str, ...]
    version: int
    timestamp_ms: int


ConsumerValue = (
    GroupEpochValue
    | PartitionMetadataValue
    | ConsumerMemberValue
    | AssignmentEpochValue
    | TargetAssignmentValue
    | CurrentAssignmentValue
    | RegularExpressionValue
)


# --- writing -------------------------------------------------------------------------------------


def _key(kind: ConsumerRecordType, *texts: str) -> bytes:
    writer = FieldWriter(kind)
    for text in texts:
        writer.string(text)
    return writer.done()


def tombstone(kind: ConsumerRecordType, group_id: str, *rest: str) -> Record:
    """Return the tombstone of a record; ``rest`` is the member id or regular expression."""
    return Record(_key(kind, group_id, *rest), None)


def group_epoch(group_id: str, value: GroupEpochValue) -> Record:
    """Return the record of a group's epoch."""
    writer = FieldWriter(_VERSION, flexible=True)
    writer.int32(value.epoch)
    writer.tags(tag_int64(value.metadata_hash))
    return Record(_key(ConsumerRecordType.GROUP_METADATA, group_id), writer.done())


def member(group_id: str, member_id: str, value: ConsumerMemberValue) -> Record:
    """Return the record of a member's metadata and subscription."""
    writer = FieldWriter(_VERSION, flexible=True)
    writer.string(value.instance_id)
    writer.string(value.rack_id)
    writer.string(value.client_id)
    writer.string(value.client_host)
    write_strings(writer, value.subscribed_topic_names)
    writer.string(value.subscribed_topic_regex)
    writer.int32(value.rebalance_timeout_ms)
    writer.string(value.server_assignor)
    writer.tags({_ONLY_TAG: _classic(value.classic)})
    key = _key(ConsumerRecordType.MEMBER_METADATA, group_id, member_id)
    return Record(key, writer.done())


def _classic(value: ClassicMemberMetadata | None) -> bytes:
    """Encode the content of the tagged field: a varint, 0 for None, and then the structure."""
    writer = FieldWriter(None, flexible=True)
    if value is None:
        writer.uvarint(0)
        return writer.done()
    writer.uvarint(1)
    writer.int32(value.session_timeout_ms)
    writer.count(len(value.protocols))
    for name, metadata in value.protocols:
        writer.string(name)
        writer.bytes_(metadata)
        writer.tags({})
    writer.tags({})
    return writer.done()


def assignment_epoch(group_id: str, value: AssignmentEpochValue) -> Record:
    """Return the record of the target assignment's epoch."""
    writer = FieldWriter(_VERSION, flexible=True)
    writer.int32(value.epoch)
    writer.tags(tag_int64(value.timestamp_ms))
    key = _key(ConsumerRecordType.TARGET_ASSIGNMENT_METADATA, group_id)
    return Record(key, writer.done())


def target_assignment(group_id: str, member_id: str, value: TargetAssignmentValue) -> Record:
    """Return the record of a member's target."""
    writer = FieldWriter(_VERSION, flexible=True)
    write_topics(writer, value.partitions)
    writer.tags({})
    key = _key(ConsumerRecordType.TARGET_ASSIGNMENT_MEMBER, group_id, member_id)
    return Record(key, writer.done())


def current_assignment(group_id: str, member_id: str, value: CurrentAssignmentValue) -> Record:
    """Return the record of a member's current assignment."""
    writer = FieldWriter(_VERSION, flexible=True)
    writer.int32(value.member_epoch)
    writer.int32(value.previous_member_epoch)
    writer.int8(value.state)
    for topics in (value.assigned, value.pending_revocation):
        writer.count(len(topics))
        for topic in topics:
            writer.raw(topic.topic_id)
            write_int32s(writer, topic.partitions)
            writer.tags({} if topic.assignment_epochs is None else _tag_int32s(topic))
    writer.tags({})
    key = _key(ConsumerRecordType.CURRENT_MEMBER_ASSIGNMENT, group_id, member_id)
    return Record(key, writer.done())


def regular_expression(group_id: str, regex: str, value: RegularExpressionValue) -> Record:
    """Return the record of the topics that a regular expression matches."""
    writer = FieldWriter(_VERSION, flexible=True)
    write_strings(writer, value.topics)
    writer.int64(value.version)
    writer.int64(value.timestamp_ms)
    writer.tags({})
    return Record(_key(ConsumerRecordType.REGULAR_EXPRESSION, group_id, regex), writer.done())


def _tag_int32s(topic: AssignedPartitions) -> dict[int, bytes]:
    writer = FieldWriter(None, flexible=True)
    write_int32s(writer, topic.assignment_epochs or ())
    return {_ONLY_TAG: writer.done()}


# --- reading -------------------------------------------------------------------------------------


def _read_member(reader: FieldReader) -> ConsumerMemberValue:
    return ConsumerMemberValue(
        instance_id=reader.nullable_string(),
        rack_id=reader.nullable_string(),
        client_id=reader.string(),
        client_host=reader.string(),
        subscribed_topic_names=read_strings(reader),
        subscribed_topic_regex=reader.nullable_string(),
        rebalance_timeout_ms=reader.int32(),
        server_assignor=reader.nullable_string(),
        classic=_read_classic(reader.tags().get(_ONLY_TAG)),
    )


def _read_classic(field: bytes | None) -> ClassicMemberMetadata | None:
    if field is None:
        return None
    reader = FieldReader(field, flexible=True)
    if reader.uvarint() == 0:
        return None
    session_timeout_ms = reader.int32()
    protocols = []
    for _ in range(reader.count()):
        protocols.append((reader.string(), reader.bytes_()))
        reader.tags()
    return ClassicMemberMetadata(session_timeout_ms, tuple(protocols))


def _read_assigned(reader: FieldReader) -> tuple[AssignedPartitions, ...]:
    topics = []
    for _ in range(reader.count()):
        topic_id, partitions = reader.raw(16), read_int32s(reader)
        field = reader.tags().get(_ONLY_TAG)
        epochs = None
        if field is not None:
            inner = FieldReader(field, flexible=True)
            epochs = tuple(inner.int32() for _ in range(inner.nullable_count() or 0)) or None
            if epochs is not None and len(epochs) != len(partitions):
                raise CorruptRecordError(f"{len(epochs)} epochs of {len(partitions)} partitions")
        topics.append(AssignedPartitions(topic_id, partitions, epochs))
    return tuple(topics)


def _read_current(reader: FieldReader) -> CurrentAssignmentValue:
    return CurrentAssignmentValue(
        member_epoch=reader.int32(),
        previous_member_epoch=reader.int32(),
        state=reader.int8(),
        assigned=_read_assigned(reader),
        pending_revocation=_read_assigned(reader),
    )


def read_key(kind: ConsumerRecordType, reader: FieldReader) -> ConsumerKey:
    """Decode a key of one of this module's types, after its leading number."""
    group_id = reader.string()
    return ConsumerKey(kind, group_id, "" if kind in PER_GROUP else reader.string())


VALUE_READERS: Final[Mapping[ConsumerRecordType, Callable[[FieldReader], ConsumerValue]]] = (
    MappingProxyType(
        {
            ConsumerRecordType.GROUP_METADATA: lambda r: GroupEpochValue(
                r.int32(), read_only_tag(r)
            ),
            ConsumerRecordType.PARTITION_METADATA: lambda _: PartitionMetadataValue(),
            ConsumerRecordType.MEMBER_METADATA: _read_member,
            ConsumerRecordType.TARGET_ASSIGNMENT_METADATA: lambda r: AssignmentEpochValue(
                r.int32(), read_only_tag(r)
            ),
            ConsumerRecordType.TARGET_ASSIGNMENT_MEMBER: lambda r: TargetAssignmentValue(
                read_topics(r)
            ),
            ConsumerRecordType.CURRENT_MEMBER_ASSIGNMENT: _read_current,
            ConsumerRecordType.REGULAR_EXPRESSION: lambda r: RegularExpressionValue(
                read_strings(r), r.int64(), r.int64()
            ),
        }
    )
)
"""Record type → reader of its value, after the version."""
