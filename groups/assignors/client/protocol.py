"""The metadata that members and leader exchange in JoinGroup and SyncGroup, encoded as in Java.

Versions 0 to 3 of ``ConsumerProtocolSubscription`` and ``ConsumerProtocolAssignment`` begin with an
int16 version; each version only appends fields, so a reader decodes the known part of any later
version. The module also has the user data of the two sticky assignors. The coordinator uses the
module as well, for groups with members of both protocols.

Unreadable bytes raise :class:`fencepost.logcore.errors.CorruptRecordError`. Unreadable user data
counts as empty instead, because the former assignment in the user data is only a preference.

Source: ``ConsumerProtocol``, ``StickyAssignor`` and ``CooperativeStickyAssignor`` of Apache Kafka.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fencepost.groups.assignors.client.java_order import computed_order
from fencepost.groups.assignors.client.model import NO_GENERATION, Subscription, TopicPartition
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.fields import FieldReader, FieldWriter

LATEST_VERSION: Final = 3
"""The newest version of both structures."""


def encode_subscription(subscription: Subscription, version: int = LATEST_VERSION) -> bytes:
    """Return a member's metadata for JoinGroup; topics and owned partitions are sorted."""
    version = _known(version)
    out = FieldWriter(version)
    topics = sorted(subscription.topics)
    out.count(len(topics))
    for topic in topics:
        out.string(topic)
    _nullable_bytes(out, subscription.user_data)
    if version >= 1:
        _topics(out, by_topic(sorted(subscription.owned)))
    if version >= 2:
        out.int32(subscription.generation)
    if version >= 3:
        out.string(subscription.rack_id)
    return out.done()


def decode_subscription(data: bytes, instance_id: str | None = None) -> Subscription:
    """Decode a member's metadata; ``instance_id`` comes from JoinGroup."""
    reader = FieldReader(data)
    version = _known(reader.int16())
    topics = tuple(reader.string() for _ in range(reader.count()))
    user_data = _read_nullable_bytes(reader)
    owned = _read_topics(reader) if version >= 1 else ()
    generation = reader.int32() if version >= 2 else NO_GENERATION
    rack_id = (reader.nullable_string() if version >= 3 else None) or None
    return Subscription(
        topics, user_data, owned, max(generation, NO_GENERATION), rack_id, instance_id
    )


def version_of(data: bytes) -> int:
    """Return the version of a member's metadata; 0 if it is unreadable."""
    try:
        decode_subscription(data)
    except CorruptRecordError:
        return 0
    return _known(FieldReader(data).int16())


def subscribed_topics(data: bytes) -> frozenset[str] | None:
    """Return the topics of a member's metadata, or None if it is unreadable.

    Only the beginning is decoded, which is the same in every version.
    """
    reader = FieldReader(data)
    try:
        _known(reader.int16())
        return frozenset(reader.string() for _ in range(reader.count()))
    except CorruptRecordError:
        return None


def encode_assignment(
    partitions: Iterable[TopicPartition],
    user_data: bytes | None = None,
    version: int = LATEST_VERSION,
) -> bytes:
    """Return a member's assignment for SyncGroup, with topics in the order of first appearance."""
    out = FieldWriter(_known(version))
    _topics(out, by_topic(partitions))
    _nullable_bytes(out, user_data)
    return out.done()


def decode_assignment(data: bytes) -> tuple[tuple[TopicPartition, ...], bytes | None]:
    """Decode an assignment: its partitions and its user data. Empty bytes mean no partitions."""
    if not data:
        return (), None
    reader = FieldReader(data)
    _known(reader.int16())
    return _read_topics(reader), _read_nullable_bytes(reader)


def encode_sticky_data(owned: Iterable[TopicPartition], generation: int) -> bytes:
    """Return the user data of *sticky*, version 1: the last assignment and its generation."""
    out = FieldWriter(None)
    grouped = by_topic(owned)
    _topics(out, {topic: grouped[topic] for topic in computed_order(grouped)})
    out.int32(generation)
    return out.done()


def decode_sticky_data(data: bytes | None) -> tuple[tuple[TopicPartition, ...], int]:
    """Decode the user data of *sticky*; version 0 has no generation. Unreadable data is empty."""
    if not data:
        return (), NO_GENERATION
    reader = FieldReader(data)
    try:
        owned = _read_topics(reader)
        return owned, reader.int32() if reader.remaining >= 4 else NO_GENERATION
    except CorruptRecordError:
        return (), NO_GENERATION


def encode_cooperative_data(generation: int) -> bytes:
    """Return the user data of *cooperative-sticky*: only the generation."""
    out = FieldWriter(None)
    out.int32(generation)
    return out.done()


def decode_cooperative_data(data: bytes | None) -> int:
    """Decode the user data of *cooperative-sticky*; unreadable data has no generation."""
    try:
        return FieldReader(data or b"").int32()
    except CorruptRecordError:
        return NO_GENERATION


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Return topic → indexes; topics and indexes keep the order of ``partitions``."""
    grouped: dict[str, list[int]] = {}
    for topic, index in partitions:
        grouped.setdefault(topic, []).append(index)
    return grouped


def _known(version: int) -> int:
    if version < 0:
        raise CorruptRecordError(f"version {version} of the consumer protocol")
    return min(version, LATEST_VERSION)


def _topics(out: FieldWriter, grouped: dict[str, list[int]]) -> None:
    out.count(len(grouped))
    for topic, indexes in grouped.items():
        out.string(topic)
        out.count(len(indexes))
        out.int32s(indexes)


def _read_topics(reader: FieldReader) -> tuple[TopicPartition, ...]:
    partitions: list[TopicPartition] = []
    for _ in range(reader.count()):
        topic = reader.string()
        partitions.extend((topic, reader.int32()) for _ in range(reader.count()))
    return tuple(partitions)


def _nullable_bytes(out: FieldWriter, data: bytes | None) -> None:
    if data is None:
        out.int32(-1)
    else:
        out.bytes_(data)


def _read_nullable_bytes(reader: FieldReader) -> bytes | None:
    length = reader.int32()
    return None if length == -1 else reader.raw(length)
