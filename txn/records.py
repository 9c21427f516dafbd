"""The records of ``__transaction_state``, byte for byte Kafka's.

Key: int16 version 0, then the transactional id. Value: int16 version, then the body; version 0 has
fixed-width lengths, version 1 is flexible and adds tagged fields. A null value is a tombstone.

Source: ``TransactionLogKey.json``, ``TransactionLogValue.json``, ``TransactionLog``; KIP-915 for
the rule that records of unknown versions are passed over, so that a downgrade can load.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

from logcore.machine import Record
from txn.commands import NO_PRODUCER_ID, TopicPartition
from txn.epochs import NO_EPOCH
from txn.errors import MalformedTransactionRecordError
from txn.state import TV2, TransactionMetadata, TransactionState

KEY_VERSION = 0
FLEXIBLE_VERSION = 1

MAX_STRING_BYTES = 2**15 - 1
"""UTF-8 bytes of a string with an int16 length."""

_TAG_PREVIOUS_PRODUCER_ID = 0
_TAG_NEXT_PRODUCER_ID = 1
_TAG_CLIENT_TRANSACTION_VERSION = 2
_TAG_NEXT_PRODUCER_EPOCH = 3

_HEAD = struct.Struct(">hqhib")
_TIMES = struct.Struct(">qq")
_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_INT64 = struct.Struct(">q")

_DURABLE_STATES = frozenset(
    TransactionState(number) for number in range(TransactionState.COMPLETE_ABORT + 1)
)


class Decoded(NamedTuple):
    """A record that was understood; ``txn`` None is a tombstone."""

    transactional_id: str
    txn: TransactionMetadata | None


def encode(transactional_id: str, txn: TransactionMetadata, transaction_version: int) -> Record:
    """Build the record for ``txn``.

    ``transaction_version`` is the cluster's: value version 1 from 1 on, as in Kafka. A transaction
    of a TV2 client, and one that was kept, is written as version 1 in any case, because version 0
    can not say which identity the client was promised.
    """
    promised = txn.client_transaction_version >= TV2 or txn.is_kept
    flexible = transaction_version >= FLEXIBLE_VERSION or promised
    return Record(encode_key(transactional_id), encode_value(txn, FLEXIBLE_VERSION * flexible))


def tombstone(transactional_id: str) -> Record:
    """Build the record that forgets the id."""
    return Record(encode_key(transactional_id), None)


def encode_key(transactional_id: str) -> bytes:
    """Encode a record key."""
    return _INT16.pack(KEY_VERSION) + _string(transactional_id)


def encode_value(txn: TransactionMetadata, version: int) -> bytes:
    """Encode a record value of ``version`` 0 or 1, topics and partitions in order."""
    flexible = version >= FLEXIBLE_VERSION
    length: Callable[[int], bytes] = (lambda n: _uvarint(n + 1)) if flexible else _INT32.pack
    parts = [_HEAD.pack(version, txn.producer_id, txn.producer_epoch, txn.timeout_ms, txn.state)]
    if txn.state is TransactionState.EMPTY:
        parts.append(length(-1))
    else:
        topics = [
            (topic, [index for _, index in group])
            for topic, group in groupby(sorted(txn.partitions), key=lambda pair: pair[0])
        ]
        parts.append(length(len(topics)))
        for topic, indexes in topics:
            parts.append(_compact_string(topic) if flexible else _string(topic))
            parts.append(length(len(indexes)))
            parts.append(struct.pack(f">{len(indexes)}i", *indexes))
            if flexible:
                parts.append(_uvarint(0))
    parts.append(_TIMES.pack(txn.last_update_ms, txn.start_ms))
    if flexible:
        parts.append(_tagged_fields(txn))
    return b"".join(parts)


def decode(record: Record) -> Decoded | None:
    """Read a record; None for one whose key or value version is unknown.

    Raises MalformedTransactionRecordError for a known version that can not be read.
    """
    key = _Reader(record.key)
    if key.int16() != KEY_VERSION:
        return None
    transactional_id = key.string()
    key.end()
    if record.value is None:
        return Decoded(transactional_id, None)
    value = _Reader(record.value)
    version = value.int16()
    if not 0 <= version <= FLEXIBLE_VERSION:
        return None
    return Decoded(transactional_id, _decode_body(value, flexible=version == FLEXIBLE_VERSION))


def _decode_body(reader: _Reader, *, flexible: bool) -> TransactionMetadata:
    producer_id = reader.int64()
    producer_epoch = reader.int16()
    timeout_ms = reader.int32()
    state = _decode_state(reader.int8())
    partitions = _decode_partitions(reader, flexible=flexible)
    if partitions is None and state is not TransactionState.EMPTY:
        raise MalformedTransactionRecordError(f"no list of partitions in state {state.name}")
    last_update_ms = reader.int64()
    start_ms = reader.int64()
    tags = reader.tagged_fields() if flexible else {}
    reader.end()
    return TransactionMetadata(
        producer_id=producer_id,
        previous_producer_id=_tag(tags, _TAG_PREVIOUS_PRODUCER_ID, _INT64, NO_PRODUCER_ID),
        next_producer_id=_tag(tags, _TAG_NEXT_PRODUCER_ID, _INT64, NO_PRODUCER_ID),
        producer_epoch=producer_epoch,
        timeout_ms=timeout_ms,
        state=state,
        partitions=frozenset(partitions or ()),
        start_ms=start_ms,
        last_update_ms=last_update_ms,
        client_transaction_version=_tag(tags, _TAG_CLIENT_TRANSACTION_VERSION, _INT16, 0),
        next_producer_epoch=_tag(tags, _TAG_NEXT_PRODUCER_EPOCH, _INT16, NO_EPOCH),
    )


def _decode_state(number: int) -> TransactionState:
    # DEAD and PREPARE_EPOCH_FENCE have numbers, but nothing ever writes them.
    if number not in _DURABLE_STATES:
        raise MalformedTransactionRecordError(f"transaction status {number}")
    return TransactionState(number)


def _decode_partitions(reader: _Reader, *, flexible: bool) -> list[TopicPartition] | None:
    topics = reader.length(flexible=flexible, nullable=True)
    if topics is None:
        return None
    partitions: list[TopicPartition] = []
    for _ in range(topics):
        topic = reader.compact_string() if flexible else reader.string()
        indexes = reader.length(flexible=flexible, nullable=False) or 0
        partitions.extend((topic, reader.int32()) for _ in range(indexes))
        if flexible:
            reader.tagged_fields()
    return partitions


def _tagged_fields(txn: TransactionMetadata) -> bytes:
    fields: list[tuple[int, bytes]] = []
    if txn.previous_producer_id != NO_PRODUCER_ID:
        fields.append((_TAG_PREVIOUS_PRODUCER_ID, _INT64.pack(txn.previous_producer_id)))
    if txn.next_producer_id != NO_PRODUCER_ID:
        fields.append((_TAG_NEXT_PRODUCER_ID, _INT64.pack(txn.next_producer_id)))
    if txn.client_transaction_version:
        fields.append(
            (_TAG_CLIENT_TRANSACTION_VERSION, _INT16.pack(txn.client_transaction_version))
        )
    if txn.is_kept:
        fields.append((_TAG_NEXT_PRODUCER_EPOCH, _INT16.pack(txn.next_producer_epoch)))
    return _uvarint(len(fields)) + b"".join(
        _uvarint(tag) + _uvarint(len(data)) + data for tag, data in fields
    )


def _tag(tags: dict[int, bytes], tag: int, form: struct.Struct, default: int) -> int:
    data = tags.get(tag)
    if data is None:
        return default
    if len(data) != form.size:
        raise MalformedTransactionRecordError(f"tagged field {tag} of {len(data)} bytes")
    (value,) = form.unpack(data)
    return int(value)


def _string(text: str) -> bytes:
    data = text.encode()
    return _INT16.pack(len(data)) + data


def _compact_string(text: str) -> bytes:
    data = text.encode()
    return _uvarint(len(data) + 1) + data


def _uvarint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Reader:
    """Reads one key or value from front to back; running short is a malformed record."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def int8(self) -> int:
        return int.from_bytes(self._take(1), "big", signed=True)

    def int16(self) -> int:
        return int.from_bytes(self._take(2), "big", signed=True)

    def int32(self) -> int:
        return int.from_bytes(self._take(4), "big", signed=True)

    def int64(self) -> int:
        return int.from_bytes(self._take(8), "big", signed=True)

    def uvarint(self) -> int:
        value = shift = 0
        while shift < 35:
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise MalformedTransactionRecordError("a length of more than five bytes")

    def string(self) -> str:
        return self._text(self.int16())

    def compact_string(self) -> str:
        return self._text(self.uvarint() - 1)

    def length(self, *, flexible: bool, nullable: bool) -> int | None:
        count = self.uvarint() - 1 if flexible else self.int32()
        if count == -1 and nullable:
            return None
        # Every element takes bytes of its own: more of them than bytes is never true.
        if not 0 <= count <= len(self._data) - self._position:
            raise MalformedTransactionRecordError(f"a list of {count} elements")
        return count

    def tagged_fields(self) -> dict[int, bytes]:
        fields: dict[int, bytes] = {}
        for _ in range(self.uvarint()):
            tag = self.uvarint()
            fields[tag] = self._take(self.uvarint())
        return fields

    def end(self) -> None:
        if self._position != len(self._data):
            surplus = len(self._data) - self._position
            raise MalformedTransactionRecordError(f"{surplus} surplus bytes")

    def _text(self, length: int) -> str:
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise MalformedTransactionRecordError(f"not UTF-8: {error}") from error

    def _take(self, length: int) -> bytes:
        end = self._position + length
        if length < 0 or end > len(self._data):
            raise MalformedTransactionRecordError(
                f"{length} bytes at {self._position} are not there"
            )
        data = self._data[self._position : end]
        self._position = end
        return data
