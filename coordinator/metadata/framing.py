"""Batches of the metadata log: records without a key, and often with nearly equal values.

Source: ``BatchAccumulator``, ``BatchBuilder``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final

from fencepost.cluster.record_codec import (
    BODY_AFTER_TOPIC_ID,
    KIND,
    OF_ONE_PARTITION,
    PARTITION,
    TOPIC_ID,
    SimilarPartitionRecords,
)
from fencepost.logcore.batch import (
    LOG_OVERHEAD,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    BatchHeader,
    Buffer,
    Codec,
    batch_of_payload,
    decode_records,
    record_bytes,
)
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.varint import ONE_BYTE, encode, read_varint

MAX_BATCH_BYTES: Final = 8 << 20
"""The maximum size of the values in one batch: Kafka's ``KafkaRaftClient.MAX_BATCH_SIZE_BYTES``."""

_PLACE: Final = Struct(">qii")
"""Base offset, length, leader epoch: the bytes of a batch that its CRC does not cover."""

_CONTINUES: Final = 0x80
"""The bit in a byte of a varint that is set if another byte follows."""

_NO_KEY: Final = 0x01
"""The encoded length of a null key."""

_BLOCK: Final = 64
"""The number of consecutive offset deltas whose varints differ only in the first byte."""
_ALONE: Final = tuple(encode(delta) for delta in range(_BLOCK))
_LOW: Final = tuple(bytes((byte[0] | _CONTINUES,)) for byte in _ALONE)

_FEW_ROWS: Final = 8
_MOST_ROWS: Final = 4096
"""The minimum and the maximum number of similar records that are decoded together."""


def data_batch(
    values: Sequence[bytes], now_ms: int, *, base_offset: int = 0, epoch: int = 0
) -> bytes:
    """Return a batch of records with these values."""
    batch = batch_of_payload(
        b"".join(_records(values)),
        len(values),
        codec=Codec.NONE,
        base_timestamp_ms=now_ms,
        max_timestamp_ms=now_ms,
        producer_id=NO_PRODUCER_ID,
        producer_epoch=NO_PRODUCER_EPOCH,
        base_sequence=NO_SEQUENCE,
        transactional=False,
    )
    return _PLACE.pack(base_offset, len(batch) - LOG_OVERHEAD, epoch) + batch[_PLACE.size :]


def _records(values: Sequence[bytes]) -> Iterator[bytes]:
    """Yield parts of the records: attributes, timestamp delta 0, offset delta, null key, value."""
    heads: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    for block in range(0, len(values), _BLOCK):
        rows = values[block : block + _BLOCK]
        lows, behind = (_LOW, encode(block)[1:]) if block else (_ALONE, b"")
        for size in {*map(len, rows)}:
            if (size, len(behind)) not in heads:
                encoded_size = encode(size)
                length = encode(2 + 1 + len(behind) + 1 + len(encoded_size) + size + 1)
                heads[size, len(behind)] = length + b"\0\0", b"\x01" + encoded_size
        if len({*map(len, rows)}) == 1:
            head, mid = heads[len(rows[0]), len(behind)]
            mid = behind + mid
            yield head
            yield (b"\0" + head).join(
                [low + mid + row for low, row in zip(lows, rows, strict=False)]
            )
            yield b"\0"
        else:
            for low, row in zip(lows, rows, strict=False):
                head, mid = heads[len(row), len(behind)]
                yield b"%b%b%b%b%b\0" % (head, low, behind, mid, row)


def values_of(header: BatchHeader, batch: Buffer) -> Sequence[bytes | SimilarPartitionRecords]:
    """Return the values of a data batch's records; a run of many similar records is one item.

    Raises CorruptRecordError for a record without a value, and the errors of ``decode_records``.
    """
    try:
        return _plain_values(record_bytes(batch, 0, header), header.record_count)
    except IndexError:
        records = decode_records(batch, 0, header)
    values = [record.value for record in records if record.value is not None]
    if len(values) < len(records):
        raise CorruptRecordError(f"metadata records behind {header.base_offset} have no values")
    return values


def _plain_values(data: bytes, count: int) -> list[bytes | SimilarPartitionRecords]:
    """Return the values of records without parsing anything else, which makes startup faster.

    Every record must have a timestamp delta of one byte, no key and no headers, as
    :func:`data_batch` and Apache Kafka write it. Raises IndexError for any other record.
    """
    values: list[bytes | SimilarPartitionRecords] = []
    append, one_byte, pos = values.append, ONE_BYTE, 0
    while count > 0:
        begin = pos
        length = one_byte[data[pos]]
        pos += 1
        if length is None:
            length, pos = read_varint(data, pos - 1)
        end = pos + length
        has_long_time = data[pos + 1] >= _CONTINUES
        pos += 2
        offset_at = pos
        while data[pos] >= _CONTINUES:
            pos += 1
        has_key = data[pos + 1] != _NO_KEY
        size = one_byte[data[pos + 2]]
        pos += 3
        if size is None:
            size, pos = read_varint(data, pos - 1)
        if has_long_time or has_key or size < 0 or pos + size + 1 != end or data[end - 1]:
            raise IndexError
        value, row = data[pos : pos + size], end - begin
        rows = 1
        if value[KIND] in OF_ONE_PARTITION and size >= BODY_AFTER_TOPIC_ID.start:
            sampled = data[end : begin + _FEW_ROWS * row : row]
            if sampled == data[begin : begin + 1] * (_FEW_ROWS - 1):
                window = data[begin : begin + row * min(count, _MOST_ROWS)]
                rows = _similar_rows(window, row, offset_at - begin, pos - begin)
        if rows < _FEW_ROWS:
            append(value)
            count, pos = count - 1, end
            continue
        place = Struct(
            f">{pos - begin + PARTITION.start}xi16s{end - pos - BODY_AFTER_TOPIC_ID.start}x"
        )
        block = memoryview(data)[begin : begin + rows * row]
        append(
            SimilarPartitionRecords(
                value[KIND], value[BODY_AFTER_TOPIC_ID], place.iter_unpack(block)
            )
        )
        count, pos = count - rows, begin + rows * row
    if pos != len(data):
        raise IndexError
    return values


def _similar_rows(data: bytes, row: int, offset_at: int, value_at: int) -> int:
    """Return how many leading records differ only in offset, partition and topic id.

    Each record has ``row`` bytes. The result may be too low. All work is on columns of bytes, not
    on records.
    """
    lengths = data[::row][: len(data) // row]
    rows = len(lengths) - len(lengths.lstrip(lengths[:1]))
    block = bytearray(data[: rows * row])
    last = offset_at
    while block[last] >= _CONTINUES:
        last += 1
    # If an offset delta does not have as many bytes as the first, the bytes after it are shifted.
    if max(block[last::row]) >= _CONTINUES or any(
        min(block[column::row]) < _CONTINUES for column in range(offset_at, last)
    ):
        return 0
    blank, place = bytes(rows), range(value_at + PARTITION.start, value_at + TOPIC_ID.stop)
    for column in (*range(offset_at, last + 1), *place):
        block[column::row] = blank
    while rows and block[: rows * row] != block[:row] * rows:
        rows //= 2
    return rows


def in_chunks(values: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Split the values into as few chunks as possible, each of which fits into one batch."""
    if sum(map(len, values)) <= MAX_BATCH_BYTES:
        if values:
            yield values
        return
    begin = size = 0
    for at, value in enumerate(values):
        size += len(value)
        if size > MAX_BATCH_BYTES and at > begin:
            yield values[begin:at]
            begin, size = at, len(value)
    if begin < len(values):
        yield values[begin:] if begin else values
