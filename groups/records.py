"""The records of ``__consumer_offsets``, byte for byte Kafka's.

A key is its type (two bytes) and a body; a value is its version (two bytes) and a body; a missing
value is a tombstone. :data:`_CODECS` holds one entry per record type; the formats of
consumer-protocol groups are in ``consumer_records.py``.

This module writes GroupMetadata v3, and OffsetCommit v4, or v1 for a commit with a retention time.
It reads every version of both since Kafka 0.9, so that a log of Apache Kafka loads.

Source: the ``*Key.json``/``*Value.json`` schemas of Kafka's group-coordinator module.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

from fencepost.groups.consumer_records import (
    VALUE_READERS,
    ConsumerKey,
    ConsumerRecordType,
    ConsumerValue,
    read_key,
)
from fencepost.groups.foreign_group import (
    PER_MEMBER,
    ForeignKey,
    ForeignRecordType,
    ForeignValue,
)
from fencepost.groups.share_records import (
    VALUE_READERS as SHARE_VALUE_READERS,
)
from fencepost.groups.share_records import ShareKey, ShareRecordType, ShareValue
from fencepost.groups.share_records import read_key as read_share_key
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.fields import FieldReader, FieldWriter
from fencepost.logcore.machine import Record, Written
from fencepost.logcore.values import dataclass

NO_TIMESTAMP: Final = -1
"""The value of an absent timestamp or timeout field."""

_TOPIC_ID_TAG: Final = 0
_ZERO_ID: Final = bytes(16)

MAX_KEY_PREFIXES: Final = 256
"""The size of two caches of key prefixes (group and topic), one to encode and one to decode: a
request repeats the prefix for every partition. A prefix takes at most 64 KiB, because each of its
two strings takes at most 32 KiB."""

_PARTITION: Final = struct.Struct(">i")
_V4_HEAD: Final = struct.Struct(">hqiB")
"""Version, offset, leader epoch, and the length of the metadata plus one, if below 128."""
_V4_TAIL: Final = struct.Struct(">qBBB16s")
"""Commit timestamp, and one tagged field: its number, its size, the topic id."""
_LONGEST_PLAIN: Final = 126
_BATCH_HEAD_BYTES: Final = 61
_PLAIN_FIELDS_BYTES: Final = 3
"""A record's attributes, timestamp delta and header count."""
_ANY_VERSION: Final = (1 << 15) - 1


class RecordType(IntEnum):
    """The type at the beginning of a key."""

    LEGACY_OFFSET_COMMIT = 0
    OFFSET_COMMIT = 1
    GROUP_METADATA = 2


class OffsetCommitKey(NamedTuple):
    """The key of types 0 (only read) and 1."""

    group_id: str
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class GroupMetadataKey:
    """The key of type 2."""

    group_id: str


class OffsetCommitValue(NamedTuple):
    """A committed offset; ``expire_timestamp_ms`` is -1 unless the client chose a retention.

    ``topic_id`` is None if unknown (zero on the wire).
    """

    offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp_ms: int
    expire_timestamp_ms: int = NO_TIMESTAMP
    topic_id: bytes | None = None


@dataclass(frozen=True, slots=True)
class MemberMetadata:
    """One member of a generation; ``subscription`` is its metadata for the chosen protocol."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True)
class GroupMetadataValue:
    """A classic group's generation."""

    protocol_type: str
    generation_id: int
    protocol_name: str | None
    leader: str | None
    state_timestamp_ms: int
    members: tuple[MemberMetadata, ...]


Key = OffsetCommitKey | GroupMetadataKey | ConsumerKey | ShareKey | ForeignKey
Value = OffsetCommitValue | GroupMetadataValue | ConsumerValue | ShareValue | ForeignValue


# --- writing -------------------------------------------------------------------------------------


def _offset_key(group_id: str, topic: str, partition: int) -> bytes:
    return _key_prefix(group_id, topic) + _PARTITION.pack(partition)


@lru_cache(maxsize=MAX_KEY_PREFIXES)
def _key_prefix(group_id: str, topic: str) -> bytes:
    writer = FieldWriter(RecordType.OFFSET_COMMIT)
    writer.string(group_id)
    writer.string(topic)
    return writer.done()


def _group_key(group_id: str) -> bytes:
    writer = FieldWriter(RecordType.GROUP_METADATA)
    writer.string(group_id)
    return writer.done()


def _offset_value(value: OffsetCommitValue) -> bytes:
    """Encode v1 if there is an expiry, which v4 lacks; v1 has no leader epoch and no topic id."""
    if value.expire_timestamp_ms != NO_TIMESTAMP:
        writer = FieldWriter(1)
        writer.int64(value.offset)
        writer.string(value.metadata)
        writer.int64(value.commit_timestamp_ms)
        writer.int64(value.expire_timestamp_ms)
        return writer.done()
    known_id = value.topic_id if value.topic_id != _ZERO_ID else None
    metadata = value.metadata.encode()
    if known_id is not None and len(metadata) <= _LONGEST_PLAIN:
        head = _V4_HEAD.pack(4, value.offset, value.leader_epoch, len(metadata) + 1)
        tail = _V4_TAIL.pack(value.commit_timestamp_ms, 1, _TOPIC_ID_TAG, len(known_id), known_id)
        return head + metadata + tail
    writer = FieldWriter(4, flexible=True)
    writer.int64(value.offset)
    writer.int32(value.leader_epoch)
    writer.string(value.metadata)
    writer.int64(value.commit_timestamp_ms)
    writer.tags({} if known_id is None else {_TOPIC_ID_TAG: known_id})
    return writer.done()


def offset_commit(group_id: str, topic: str, partition: int, value: OffsetCommitValue) -> Record:
    """Return the record that commits one offset."""
    key, data = _offset_key(group_id, topic, partition), _offset_value(value)
    if value.expire_timestamp_ms != NO_TIMESTAMP or value.topic_id == _ZERO_ID:
        return Record(key, data)  # the record cannot hold the whole value
    return Written.of(key, data, (OffsetCommitKey(group_id, topic, partition), value))


def offset_tombstone(group_id: str, topic: str, partition: int) -> Record:
    """Return the record that deletes one offset, committed and pending."""
    return Record(_offset_key(group_id, topic, partition), None)


def group_metadata(group_id: str, value: GroupMetadataValue) -> Record:
    """Return the record of a group's generation (v3)."""
    writer = FieldWriter(3)
    writer.string(value.protocol_type)
    writer.int32(value.generation_id)
    writer.string(value.protocol_name)
    writer.string(value.leader)
    writer.int64(value.state_timestamp_ms)
    writer.count(len(value.members))
    for member in value.members:
        writer.string(member.member_id)
        writer.string(member.group_instance_id)
        writer.string(member.client_id)
        writer.string(member.client_host)
        writer.int32(member.rebalance_timeout_ms)
        writer.int32(member.session_timeout_ms)
        writer.bytes_(member.subscription)
        writer.bytes_(member.assignment)
    return Record(_group_key(group_id), writer.done())


def group_tombstone(group_id: str) -> Record:
    """Return the record that removes a classic group."""
    return Record(_group_key(group_id), None)


# --- reading -------------------------------------------------------------------------------------


def _read_offset_commit_value(reader: FieldReader, version: int) -> OffsetCommitValue:
    offset = reader.int64()
    leader_epoch = reader.int32() if version >= 3 else -1
    metadata = reader.string()
    commit_timestamp_ms = reader.int64()
    expire_timestamp_ms = reader.int64() if version == 1 else NO_TIMESTAMP
    topic_id = reader.tags().get(_TOPIC_ID_TAG)
    if topic_id is not None and len(topic_id) != len(_ZERO_ID):
        raise CorruptRecordError(f"a topic id has {len(topic_id)} bytes")
    if topic_id == _ZERO_ID:
        topic_id = None
    return OffsetCommitValue(
        offset, leader_epoch, metadata, commit_timestamp_ms, expire_timestamp_ms, topic_id
    )


def _read_member(reader: FieldReader, version: int) -> MemberMetadata:
    member_id = reader.string()
    group_instance_id = reader.nullable_string() if version >= 3 else None
    client_id = reader.string()
    client_host = reader.string()
    rebalance_timeout_ms = reader.int32() if version >= 1 else NO_TIMESTAMP
    session_timeout_ms = reader.int32()
    subscription = reader.bytes_()
    assignment = reader.bytes_()
    reader.tags()
    return MemberMetadata(
        member_id,
        group_instance_id,
        client_id,
        client_host,
        # Before v1 the session timeout was also the rebalance timeout.
        session_timeout_ms if rebalance_timeout_ms == NO_TIMESTAMP else rebalance_timeout_ms,
        session_timeout_ms,
        subscription,
        assignment,
    )


def _read_group_metadata_value(reader: FieldReader, version: int) -> GroupMetadataValue:
    protocol_type = reader.string()
    generation_id = reader.int32()
    protocol_name = reader.nullable_string()
    leader = reader.nullable_string()
    state_timestamp_ms = reader.int64() if version >= 2 else NO_TIMESTAMP
    members = tuple(_read_member(reader, version) for _ in range(reader.count()))
    reader.tags()
    return GroupMetadataValue(
        protocol_type, generation_id, protocol_name, leader, state_timestamp_ms, members
    )


@dataclass(frozen=True, slots=True)
class _Codec:
    """The decoder of a record type. It reads all value versions from 0 to ``newest_version``."""

    read_key: Callable[[FieldReader], Key]
    read_value: Callable[[FieldReader, int], Value]
    newest_version: int = 4
    first_flexible_version: int = 4


def _consumer_codec(
    kind: ConsumerRecordType, read_value: Callable[[FieldReader], ConsumerValue]
) -> _Codec:
    """Return the codec of a type of ``consumer_records``: one version, flexible."""
    return _Codec(
        read_key=lambda reader: read_key(kind, reader),
        read_value=lambda reader, _version: read_value(reader),
        newest_version=0,
        first_flexible_version=0,
    )


def _share_codec(kind: ShareRecordType, read_value: Callable[[FieldReader], ShareValue]) -> _Codec:
    """Return the codec of a type of ``share_records``: one version, flexible."""
    return _Codec(
        read_key=lambda reader: read_share_key(kind, reader),
        read_value=lambda reader, _version: read_value(reader),
        newest_version=0,
        first_flexible_version=0,
    )


def _foreign_codec(kind: ForeignRecordType) -> _Codec:
    """Return the codec of a type of ``foreign_group``, which ignores the value."""

    def read_foreign_key(reader: FieldReader) -> ForeignKey:
        return ForeignKey(kind, reader.string(), reader.string() if kind in PER_MEMBER else "")

    return _Codec(read_foreign_key, lambda _reader, _version: ForeignValue(), _ANY_VERSION)


_OFFSET_COMMIT_CODEC: Final = _Codec(
    lambda reader: OffsetCommitKey(reader.string(), reader.string(), reader.int32()),
    _read_offset_commit_value,
)
_CODECS: Final[Mapping[int, _Codec]] = MappingProxyType(
    {
        RecordType.LEGACY_OFFSET_COMMIT: _OFFSET_COMMIT_CODEC,
        RecordType.OFFSET_COMMIT: _OFFSET_COMMIT_CODEC,
        RecordType.GROUP_METADATA: _Codec(
            lambda reader: GroupMetadataKey(reader.string()), _read_group_metadata_value
        ),
        **{kind: _consumer_codec(kind, reader) for kind, reader in VALUE_READERS.items()},
        **{kind: _share_codec(kind, reader) for kind, reader in SHARE_VALUE_READERS.items()},
        **{kind: _foreign_codec(kind) for kind in ForeignRecordType},
    }
)


def batch_bytes(records: Iterable[Record]) -> int:
    """Return the size of a batch of ``records``, which ``max.message.bytes`` bounds."""
    size = _BATCH_HEAD_BYTES
    for at, (key, value) in enumerate(records):
        body = _PLAIN_FIELDS_BYTES + _varint_bytes(at) + _varint_bytes(len(key)) + len(key)
        body += 1 if value is None else _varint_bytes(len(value)) + len(value)
        size += _varint_bytes(body) + body
    return size


def _varint_bytes(number: int) -> int:
    """Return the size of a non-negative number as a zigzag varint."""
    return number.bit_length() // 7 + 1


def record_type(key: bytes) -> int:
    """Return the type of ``key``, known or unknown. Raises :class:`CorruptRecordError`."""
    if len(key) < 2:
        raise CorruptRecordError(f"a key of {len(key)} bytes")
    return int.from_bytes(key[:2], "big", signed=True)


@lru_cache(maxsize=MAX_KEY_PREFIXES)
def _names_of(prefix: bytes) -> tuple[str, str] | None:
    """Decode group and topic from a key's bytes before the partition; None if bytes remain."""
    reader = FieldReader(prefix)
    reader.int16()
    names = reader.string(), reader.string()
    return None if reader.remaining else names


def _decode_common(record: Record) -> tuple[OffsetCommitKey, OffsetCommitValue] | None:
    """Decode the most common kind of record, an offset of a current version; None for others.

    Such a record is a committed offset as this broker and Apache Kafka 4 write it, with a known
    topic id and with metadata of up to 126 bytes. The readers for all versions give the same result
    at six times the cost, and this decoding is most of the cost of a large commit and of a load.
    """
    key, value = record.key, record.value
    if value is None or len(value) < _V4_HEAD.size + _V4_TAIL.size or len(key) < 6:
        return None
    version, offset, leader_epoch, size = _V4_HEAD.unpack_from(value)
    end = _V4_HEAD.size + size - 1
    if version != 4 or not 0 < size <= _LONGEST_PLAIN + 1 or len(value) != end + _V4_TAIL.size:
        return None
    committed_ms, tags, tag, id_size, topic_id = _V4_TAIL.unpack_from(value, end)
    if (tags, tag, id_size) != (1, _TOPIC_ID_TAG, len(_ZERO_ID)) or topic_id == _ZERO_ID:
        return None
    names = _names_of(key[:-4])
    if names is None:
        return None
    try:
        metadata = value[_V4_HEAD.size : end].decode() if size > 1 else ""
    except UnicodeDecodeError as error:
        raise CorruptRecordError("a string is not UTF-8") from error
    return (
        OffsetCommitKey(*names, _PARTITION.unpack_from(key, len(key) - 4)[0]),
        OffsetCommitValue(offset, leader_epoch, metadata, committed_ms, NO_TIMESTAMP, topic_id),
    )


def decode(record: Record) -> tuple[Key, Value | None] | None:
    """Return a record's key and value (None for a tombstone), or None for an unknown type.

    Raises :class:`CorruptRecordError` for malformed bytes and for a newer value version: skipping
    that record would lose state.
    """
    kind = record_type(record.key)
    if kind == RecordType.OFFSET_COMMIT:
        common = _decode_common(record)
        if common is not None:
            return common
    codec = _CODECS.get(kind)
    if codec is None:
        return None
    key_reader = FieldReader(record.key)
    key_reader.int16()
    key = codec.read_key(key_reader)
    if record.value is None:
        return key, None
    reader = FieldReader(record.value)
    version = reader.int16()
    if not 0 <= version <= codec.newest_version:
        raise CorruptRecordError(f"record type {kind} has a value of unknown version {version}")
    reader.flexible = version >= codec.first_flexible_version
    return key, codec.read_value(reader, version)
