"""The records of ``__share_group_state``, identical to Kafka's byte for byte.

Key: int16 type, then group id, topic id and partition in the plain encoding. Value: int16 version
0, then the body in the flexible encoding. A null value of a snapshot's key is a tombstone.

Source: ``ShareSnapshotKey.json``, ``ShareSnapshotValue.json``, ``ShareUpdateKey.json``,
``ShareUpdateValue.json`` and ``ShareCoordinatorRecordHelpers``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from fencepost.groups.share.batches import UNKNOWN_COUNT, StateBatch
from fencepost.groups.share.commands import SharePartitionKey
from fencepost.groups.share.states import RecordState
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.fields import FieldReader, FieldWriter
from fencepost.logcore.machine import Record

VALUE_VERSION: Final = 0
TOPIC_ID_BYTES: Final = 16

PERSISTED_STATES: Final = frozenset(RecordState) - {RecordState.ACQUIRED}
"""Acquisitions are never persisted."""
MAX_DELIVERY_COUNT: Final = 32_767
"""The field is a signed int16."""

_COUNT_TAG: Final = 0
_COUNT: Final = struct.Struct(">i")
_BATCH: Final = struct.Struct(">qqbh")
"""First and last offset, delivery state, delivery count; tagged fields follow."""


class RecordType(IntEnum):
    """The type at the beginning of a key."""

    SHARE_SNAPSHOT = 0
    SHARE_UPDATE = 1


class Snapshot(NamedTuple):
    """The whole state of a share partition."""

    snapshot_epoch: int
    state_epoch: int
    leader_epoch: int
    start_offset: int
    create_timestamp_ms: int
    write_timestamp_ms: int
    """When the snapshot was written. This is later than the creation time if the snapshot only
    repeats an older one, so that earlier records can be pruned."""
    batches: tuple[StateBatch, ...]
    delivery_complete_count: int


class Update(NamedTuple):
    """Changes since a snapshot; an epoch or an offset of -1 means no change."""

    snapshot_epoch: int
    leader_epoch: int
    start_offset: int
    batches: tuple[StateBatch, ...]
    delivery_complete_count: int


class DecodedRecord(NamedTuple):
    """A decoded record; ``value`` is None for a tombstone."""

    key: SharePartitionKey
    value: Snapshot | Update | None


def snapshot_record(key: SharePartitionKey, value: Snapshot) -> Record:
    """Build the record of a snapshot."""
    writer = FieldWriter(VALUE_VERSION, flexible=True)
    writer.int32(value.snapshot_epoch)
    writer.int32(value.state_epoch)
    writer.int32(value.leader_epoch)
    writer.int64(value.start_offset)
    writer.int64(value.create_timestamp_ms)
    writer.int64(value.write_timestamp_ms)
    _write_batches(writer, value.batches)
    _write_count(writer, value.delivery_complete_count)
    return Record(_encode_key(RecordType.SHARE_SNAPSHOT, key), writer.done())


def update_record(key: SharePartitionKey, value: Update) -> Record:
    """Build the record of an update."""
    writer = FieldWriter(VALUE_VERSION, flexible=True)
    writer.int32(value.snapshot_epoch)
    writer.int32(value.leader_epoch)
    writer.int64(value.start_offset)
    _write_batches(writer, value.batches)
    _write_count(writer, value.delivery_complete_count)
    return Record(_encode_key(RecordType.SHARE_UPDATE, key), writer.done())


def tombstone(key: SharePartitionKey) -> Record:
    """Build the record that deletes the state of a share partition."""
    return Record(_encode_key(RecordType.SHARE_SNAPSHOT, key), None)


def _encode_key(kind: RecordType, key: SharePartitionKey) -> bytes:
    writer = FieldWriter(kind)
    writer.string(key.group_id)
    writer.raw(key.topic_id)
    writer.int32(key.partition)
    return writer.done()


def _write_batches(writer: FieldWriter, batches: Sequence[StateBatch]) -> None:
    writer.count(len(batches))
    for batch in batches:
        writer.raw(_BATCH.pack(*batch))
        writer.tags({})


def _write_count(writer: FieldWriter, delivery_complete_count: int) -> None:
    is_known = delivery_complete_count != UNKNOWN_COUNT
    writer.tags({_COUNT_TAG: _COUNT.pack(delivery_complete_count)} if is_known else {})


def decode(record: Record) -> DecodedRecord | None:
    """Decode a record; None for a type or version that this broker does not know.

    Raises CorruptRecordError.
    """
    reader = FieldReader(record.key)
    kind = reader.int16()
    if kind not in (RecordType.SHARE_SNAPSHOT, RecordType.SHARE_UPDATE):
        return None
    key = SharePartitionKey(reader.string(), reader.raw(TOPIC_ID_BYTES), reader.int32())
    reader.end()
    if record.value is None:
        return DecodedRecord(key, None)
    reader = FieldReader(record.value, flexible=True)
    if reader.int16() != VALUE_VERSION:
        return None
    if kind == RecordType.SHARE_SNAPSHOT:
        return DecodedRecord(key, _read_snapshot(reader))
    return DecodedRecord(key, _read_update(reader))


def _read_snapshot(reader: FieldReader) -> Snapshot:
    epochs = reader.int32(), reader.int32(), reader.int32()
    offset_and_times = reader.int64(), reader.int64(), reader.int64()
    return Snapshot(*epochs, *offset_and_times, _read_batches(reader), _read_count(reader))


def _read_update(reader: FieldReader) -> Update:
    epochs = reader.int32(), reader.int32()
    return Update(*epochs, reader.int64(), _read_batches(reader), _read_count(reader))


def _read_batches(reader: FieldReader) -> tuple[StateBatch, ...]:
    batches: list[StateBatch] = []
    for _ in range(reader.count()):
        batch = StateBatch(*_BATCH.unpack(reader.raw(_BATCH.size)))
        if batch.last < batch.first or batch.state not in PERSISTED_STATES:
            raise CorruptRecordError(f"impossible state batch {batch}")
        batches.append(batch)
        reader.tags()
    return tuple(batches)


def _read_count(reader: FieldReader) -> int:
    field = reader.tags().get(_COUNT_TAG)
    reader.end()
    if field is None:
        return UNKNOWN_COUNT
    if len(field) != _COUNT.size:
        raise CorruptRecordError(f"a delivery-complete count of {len(field)} bytes")
    count: int = _COUNT.unpack(field)[0]
    return count
