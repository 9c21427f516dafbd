"""What consumers of the classic protocol say in their opaque bytes: subscription and assignment.

The coordinator reads the topics of a subscription for OffsetDelete and expiry. It reads everything,
and writes assignments itself, where members of both protocols share a group.

Source: ``ConsumerProtocolSubscription.json``, ``ConsumerProtocolAssignment.json`` (versions 0 to 3)
and ``ConsumerProtocol``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.fields import FieldReader, FieldWriter

NEWEST_VERSION: Final = 3
"""A newer version is read as this one: fields are only ever added at the end."""

TopicPartitions = tuple[str, tuple[int, ...]]
"""A topic's name and partition indexes."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a member wants. ``owned`` (from version 1) is what it had when it rejoined."""

    version: int
    topics: tuple[str, ...]
    owned: tuple[TopicPartitions, ...] = ()
    rack_id: str | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a member was given. ``has_user_data`` tells an assignor of the member's own kind."""

    partitions: tuple[TopicPartitions, ...]
    has_user_data: bool = False


def subscribed_topics(metadata: bytes) -> frozenset[str] | None:
    """Return the topics of a consumer's JoinGroup metadata, or None if it can't be read.

    Every version of the subscription begins with version (int16) and topics, and only that much is
    read, so that versions of the future do no harm.
    """
    reader = FieldReader(metadata)
    try:
        if reader.int16() < 0:
            return None
        return frozenset(reader.string() for _ in range(reader.count()))
    except CorruptRecordError:
        return None


def read_subscription(metadata: bytes) -> Subscription:
    """Read a consumer's whole JoinGroup metadata.

    Raises :class:`fencepost.logcore.errors.CorruptRecordError`.
    """
    reader = FieldReader(metadata)
    version = _version(reader)
    topics = tuple(reader.string() for _ in range(reader.count()))
    _user_data(reader)
    owned = _partitions(reader) if version >= 1 else ()
    if version >= 2:
        reader.int32()  # the generation that the owned partitions are of
    rack_id = reader.nullable_string() if version >= NEWEST_VERSION else None
    return Subscription(version, topics, owned, rack_id)


def read_assignment(assignment: bytes) -> Assignment:
    """Read what a leader assigned; raises :class:`fencepost.logcore.errors.CorruptRecordError`.

    No bytes at all stand for a member that the leader left out.
    """
    if not assignment:
        return Assignment(())
    reader = FieldReader(assignment)
    _version(reader)
    return Assignment(_partitions(reader), has_user_data=bool(_user_data(reader)))


def write_assignment(version: int, partitions: Iterable[TopicPartitions]) -> bytes:
    """Return an assignment as a member whose subscription has ``version`` can read it."""
    everything = tuple(partitions)
    writer = FieldWriter(min(version, NEWEST_VERSION))
    writer.count(len(everything))
    for topic, indexes in everything:
        writer.string(topic)
        writer.count(len(indexes))
        for index in indexes:
            writer.int32(index)
    writer.int32(-1)  # no user data
    return writer.done()


def _version(reader: FieldReader) -> int:
    version = reader.int16()
    if version < 0:
        raise CorruptRecordError(f"version {version} of a consumer's metadata")
    return min(version, NEWEST_VERSION)


def _partitions(reader: FieldReader) -> tuple[TopicPartitions, ...]:
    return tuple(
        (reader.string(), tuple(reader.int32() for _ in range(reader.count())))
        for _ in range(reader.count())
    )


def _user_data(reader: FieldReader) -> bytes:
    length = reader.int32()
    if length < -1:
        raise CorruptRecordError(f"user data of {length} bytes")
    return reader.raw(max(length, 0))
