"""The records of ``__transaction_state``, identical to Kafka's byte for byte.

Key: int16 version 0, then the transactional id. Value: int16 version, then the body; version 0 has
fixed-width lengths, version 1 is flexible and adds tagged fields. A null value is a tombstone.

Source: ``TransactionLogKey.json``, ``TransactionLogValue.json``, ``TransactionLog``; KIP-915 for
the rule that records of unknown versions are skipped, so that a broker can load after a downgrade.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.fields import MAX_STRING_BYTES, FieldReader, FieldWriter
from fencepost.logcore.machine import InvariantViolation, Record, Written
from fencepost.txn.commands import NO_PRODUCER_ID, TopicPartition
from fencepost.txn.epochs import NO_EPOCH
from fencepost.txn.state import TV2, TransactionMetadata, TransactionState

KEY_VERSION = 0
FLEXIBLE_VERSION = 1

_TAG_PREVIOUS_PRODUCER_ID = 0
_TAG_NEXT_PRODUCER_ID = 1
_TAG_CLIENT_TRANSACTION_VERSION = 2
_TAG_NEXT_PRODUCER_EPOCH = 3

_KEY = struct.Struct(">hh")
_HEAD, _BODY_HEAD = struct.Struct(">hqhib"), struct.Struct(">qhib")
"""The beginning of a value, with and without its version."""
_TIMES = struct.Struct(">qq")
_INT16 = struct.Struct(">h")
_INT64 = struct.Struct(">q")
_LONG_FIELD, _SHORT_FIELD = struct.Struct(">BBq"), struct.Struct(">BBh")
"""A tagged field: tag, size, value."""

_NULL = b"\xff\xff\xff\xff", b"\x00"
_NOTHING = b"\x00\x00\x00\x00", b"\x01"
"""A null array, and an empty array: each in the plain and in the flexible encoding."""

_DURABLE_STATES = range(TransactionState.COMPLETE_ABORT + 1)


class DecodedRecord(NamedTuple):
    """A decoded record; ``txn`` is None for a tombstone."""

    transactional_id: str
    txn: TransactionMetadata | None


def encode(transactional_id: str, txn: TransactionMetadata, transaction_version: int) -> Record:
    """Build the record for ``txn``.

    ``transaction_version`` is the cluster's: from 1 on, value version 1 is written, as in Kafka. A
    TV2 client's transaction and a kept transaction are always written as version 1, because version
    0 cannot contain the identity that the client was given.
    """
    promised = txn.client_transaction_version >= TV2 or txn.is_kept_prepared
    flexible = transaction_version >= FLEXIBLE_VERSION or promised
    key, value = encode_key(transactional_id), encode_value(txn, FLEXIBLE_VERSION * flexible)
    if not flexible or (txn.state is TransactionState.EMPTY and txn.partitions):
        return Record(key, value)  # it lacks a part of ``txn``, so replay must decode it
    return Written.of(key, value, DecodedRecord(transactional_id, txn))


def tombstone(transactional_id: str) -> Record:
    """Build the record that deletes the id."""
    return Record(encode_key(transactional_id), None)


def encode_key(transactional_id: str) -> bytes:
    """Encode a record key."""
    name = transactional_id.encode()
    if len(name) > MAX_STRING_BYTES:
        raise InvariantViolation(f"a transactional id of {len(name)} bytes in a record")
    return _KEY.pack(KEY_VERSION, len(name)) + name


def encode_value(txn: TransactionMetadata, version: int) -> bytes:
    """Encode a record value of ``version`` 0 or 1, with topics and partitions in order."""
    flexible = version >= FLEXIBLE_VERSION
    head = _HEAD.pack(version, txn.producer_id, txn.producer_epoch, txn.timeout_ms, txn.state)
    if txn.state is TransactionState.EMPTY:
        partitions = _NULL[flexible]
    else:
        partitions = _encode_partitions(txn.partitions, flexible=flexible)
    times = _TIMES.pack(txn.last_update_ms, txn.start_ms)
    return head + partitions + times + (_tagged_fields(txn) if flexible else b"")


class _EncodedPartitions(NamedTuple):
    """A set of partitions, and its encoding."""

    partitions: frozenset[TopicPartition]
    flexible: bool
    encoded: bytes


_last_encoded = _EncodedPartitions(frozenset(), False, b"")
"""The set that was encoded last. Replay may decode the same set next, and the record that ends the
transaction contains it again. Without this cache, a set of 10,000 partitions would be encoded or
decoded each time, and no other request would be served meanwhile."""


def _encode_partitions(partitions: frozenset[TopicPartition], *, flexible: bool) -> bytes:
    """Encode a set by topic, with topics and partitions in order."""
    global _last_encoded  # noqa: PLW0603 - a cache of a pure function's result
    if not partitions:
        return _NOTHING[flexible]
    if partitions is _last_encoded.partitions and flexible is _last_encoded.flexible:
        return _last_encoded.encoded
    by_topic: dict[str, list[int]] = {}
    for topic, index in partitions:
        by_topic.setdefault(topic, []).append(index)
    section = FieldWriter(None, flexible=flexible)
    section.count(len(by_topic))
    for topic in sorted(by_topic):
        indexes = sorted(by_topic[topic])
        section.string(topic)
        section.count(len(indexes))
        section.int32s(indexes)
        if flexible:
            section.tags({})
    encoded = section.done()
    _last_encoded = _EncodedPartitions(partitions, flexible, encoded)
    return encoded


def decode(record: Record) -> DecodedRecord | None:
    """Decode a record; return None if its key or value version is unknown.

    Raises CorruptRecordError for a known version that cannot be read.
    """
    key = FieldReader(record.key)
    if key.int16() != KEY_VERSION:
        return None
    transactional_id = key.string()
    key.end()
    if record.value is None:
        return DecodedRecord(transactional_id, None)
    value = FieldReader(record.value)
    version = value.int16()
    if not 0 <= version <= FLEXIBLE_VERSION:
        return None
    value.flexible = version == FLEXIBLE_VERSION
    return DecodedRecord(transactional_id, _decode_body(value))


def _decode_body(reader: FieldReader) -> TransactionMetadata:
    producer_id, producer_epoch, timeout_ms, status = _BODY_HEAD.unpack(reader.raw(_BODY_HEAD.size))
    # DEAD and PREPARE_EPOCH_FENCE have numbers, but are never written.
    if status not in _DURABLE_STATES:
        raise CorruptRecordError(f"transaction status {status}")
    state = TransactionState(status)
    partitions = _decode_partitions(reader)
    if partitions is None and state is not TransactionState.EMPTY:
        raise CorruptRecordError(f"no list of partitions in state {state.name}")
    last_update_ms, start_ms = _TIMES.unpack(reader.raw(_TIMES.size))
    tags = reader.tags()
    reader.end()
    return TransactionMetadata(
        producer_id=producer_id,
        previous_producer_id=_tag(tags, _TAG_PREVIOUS_PRODUCER_ID, _INT64, NO_PRODUCER_ID),
        next_producer_id=_tag(tags, _TAG_NEXT_PRODUCER_ID, _INT64, NO_PRODUCER_ID),
        producer_epoch=producer_epoch,
        timeout_ms=timeout_ms,
        state=state,
        partitions=partitions or frozenset(),
        start_ms=start_ms,
        last_update_ms=last_update_ms,
        client_transaction_version=_tag(tags, _TAG_CLIENT_TRANSACTION_VERSION, _INT16, 0),
        next_producer_epoch=_tag(tags, _TAG_NEXT_PRODUCER_EPOCH, _INT16, NO_EPOCH),
    )


def _decode_partitions(reader: FieldReader) -> frozenset[TopicPartition] | None:
    last = _last_encoded
    if last.encoded and last.flexible is reader.flexible and reader.passes(last.encoded):
        return last.partitions
    topics = reader.nullable_count()
    if topics is None:
        return None
    partitions: list[TopicPartition] = []
    for _ in range(topics):
        topic = reader.string()
        count = reader.count()
        if count == 1:
            partitions.append((topic, reader.int32()))
        else:
            partitions += [(topic, index) for index in reader.int32s(count)]
        reader.tags()
    return frozenset(partitions)


def _tagged_fields(txn: TransactionMetadata) -> bytes:
    """Encode the tagged fields that end a flexible value: a count, then tag, size and value."""
    fields: list[bytes] = []
    if txn.previous_producer_id != NO_PRODUCER_ID:
        fields.append(_LONG_FIELD.pack(_TAG_PREVIOUS_PRODUCER_ID, 8, txn.previous_producer_id))
    if txn.next_producer_id != NO_PRODUCER_ID:
        fields.append(_LONG_FIELD.pack(_TAG_NEXT_PRODUCER_ID, 8, txn.next_producer_id))
    if txn.client_transaction_version:
        version = txn.client_transaction_version
        fields.append(_SHORT_FIELD.pack(_TAG_CLIENT_TRANSACTION_VERSION, 2, version))
    if txn.is_kept_prepared:
        fields.append(_SHORT_FIELD.pack(_TAG_NEXT_PRODUCER_EPOCH, 2, txn.next_producer_epoch))
    return b"".join((bytes((len(fields),)), *fields))


def _tag(tags: dict[int, bytes], tag: int, form: struct.Struct, default: int) -> int:
    data = tags.get(tag)
    if data is None:
        return default
    if len(data) != form.size:
        raise CorruptRecordError(f"tagged field {tag} of {len(data)} bytes")
    (value,) = form.unpack(data)
    return int(value)
