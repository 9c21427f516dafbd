"""The records of ``__transaction_state``, byte for byte Kafka's.

Key: int16 version 0, then the transactional id. Value: int16 version, then the body; version 0 has
fixed-width lengths, version 1 is flexible and adds tagged fields. A null value is a tombstone.

Source: ``TransactionLogKey.json``, ``TransactionLogValue.json``, ``TransactionLog``; KIP-915 for
the rule that records of unknown versions are passed over, so that a downgrade can load.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from fencepost.logcore.machine import Record
from fencepost.txn.commands import NO_PRODUCER_ID, TopicPartition
from fencepost.txn.epochs import NO_EPOCH
from fencepost.txn.errors import MalformedTransactionRecordError
from fencepost.txn.state import TV2, TransactionMetadata, TransactionState

KEY_VERSION = 0
FLEXIBLE_VERSION = 1

LARGE_SET = 100
"""Partitions from which on a set's encoding is worth remembering."""

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
_ONE_BYTE = tuple(bytes((value,)) for value in range(0x80))

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
    parts = [_HEAD.pack(version, txn.producer_id, txn.producer_epoch, txn.timeout_ms, txn.state)]
    if txn.state is TransactionState.EMPTY:
        parts.append(_compact_length(-1) if flexible else _INT32.pack(-1))
    else:
        parts.append(_encode_partitions(txn.partitions, flexible=flexible))
    parts.append(_TIMES.pack(txn.last_update_ms, txn.start_ms))
    if flexible:
        parts.append(_tagged_fields(txn))
    return b"".join(parts)


class _Section(NamedTuple):
    """A large set of partitions, and how it stands in a record."""

    partitions: frozenset[TopicPartition]
    flexible: bool
    encoded: bytes


_last_section = _Section(frozenset(), False, b"")
"""The last large set that was encoded. It is replayed at once, and is the same in the record that
ends the transaction: both would take as long again, while nobody else is served."""


def _encode_partitions(partitions: frozenset[TopicPartition], *, flexible: bool) -> bytes:
    """Encode a set by topic, topics and partitions in order."""
    global _last_section  # noqa: PLW0603 - a memo of what always comes out the same
    if partitions is _last_section.partitions and flexible is _last_section.flexible:
        return _last_section.encoded
    by_topic: dict[str, list[int]] = {}
    for topic, index in partitions:
        by_topic.setdefault(topic, []).append(index)
    string, length = (_compact_string, _compact_length) if flexible else (_string, _INT32.pack)
    parts = [length(len(by_topic))]
    for topic in sorted(by_topic):
        indexes = sorted(by_topic[topic])
        count = len(indexes)
        packed = _INT32.pack(*indexes) if count == 1 else struct.pack(f">{count}i", *indexes)
        parts += (string(topic), length(count), packed)
        if flexible:
            parts.append(b"\0")
    encoded = b"".join(parts)
    if len(partitions) >= LARGE_SET:
        _last_section = _Section(partitions, flexible, encoded)
    return encoded


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
        partitions=partitions or frozenset(),
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


def _decode_partitions(reader: _Reader, *, flexible: bool) -> frozenset[TopicPartition] | None:
    known = _last_section
    if known.encoded and known.flexible is flexible and reader.passes(known.encoded):
        return known.partitions
    topics = reader.length(flexible=flexible, nullable=True)
    if topics is None:
        return None
    partitions: list[TopicPartition] = []
    string = reader.compact_string if flexible else reader.string
    for _ in range(topics):
        topic = string()
        count = reader.length(flexible=flexible, nullable=False) or 0
        if count == 1:
            partitions.append((topic, reader.int32()))
        else:
            partitions += [(topic, index) for index in reader.int32s(count)]
        if flexible:
            reader.tagged_fields()
    return frozenset(partitions)


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
    return _compact_length(len(data)) + data


def _compact_length(count: int) -> bytes:
    return _uvarint(count + 1)


def _uvarint(value: int) -> bytes:
    if value <= 0x7F:
        return _ONE_BYTE[value]
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

    def int32s(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f">{count}i", self._take(4 * count))

    def int64(self) -> int:
        return int.from_bytes(self._take(8), "big", signed=True)

    def uvarint(self) -> int:
        if self._position < len(self._data) and self._data[self._position] < 0x80:
            self._position += 1
            return self._data[self._position - 1]
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

    def passes(self, data: bytes) -> bool:
        """Whether ``data`` comes next; if it does, go on behind it."""
        if not self._data.startswith(data, self._position):
            return False
        self._position += len(data)
        return True

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
