"""Formats v0 and v1: comparisons with Apache Kafka's bytes and aiokafka, conversion to v2."""

from __future__ import annotations

import struct
import zlib

import pytest
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record import MemoryRecords as KafkaPythonRecords

from fencepost.logcore.batch import (
    LogRecord,
    decode_records,
    encode_batch,
    iter_headers,
    parse_header,
    verify_crc,
)
from fencepost.logcore.compression import Codec, compress
from fencepost.logcore.errors import CorruptRecordError, InvalidRecordError
from fencepost.logcore.legacy import (
    RUN_BYTES,
    decode_message,
    iter_messages,
    magic_at,
    parse_message,
    to_v2,
    verify_message_crc,
)
from tests.support.old_formats import encode_message_set
from tests.unit.logcore.kafka_batches import APPEND_TIME, BYTES, T0, records

NAMES = sorted(name for name in BYTES if name[:2] in {"m0", "m1"})
LATER = APPEND_TIME + 1
CODECS = [Codec.NONE, Codec.GZIP, Codec.SNAPPY, Codec.LZ4]
AIOKAFKA_CASES = [
    (magic, codec)
    for magic in (0, 1)
    for codec in CODECS
    if (magic, codec) != (0, Codec.LZ4)  # not supported by aiokafka
]
ITEMS = [
    LogRecord(7, T0, b"a", b"1"),
    LogRecord(9, T0 + 3, None, None),
    LogRecord(12, T0, b"", b""),
]


def decode_all(data: bytes) -> list[LogRecord]:
    found: list[LogRecord] = []
    for pos, header in iter_messages(data):
        verify_message_crc(data, pos, header)
        found += decode_message(data, pos, header)
    return found


def decode_v2(data: bytes) -> list[LogRecord]:
    found: list[LogRecord] = []
    for pos, header in iter_headers(data):
        verify_crc(data, pos, header)
        found += decode_records(data, pos, header)
    return found


def message(offset: int, body: bytes, magic: int = 1, attributes: int = 0, ts: int = T0) -> bytes:
    covered = bytes((magic, attributes)) + (struct.pack(">q", ts) if magic else b"") + body
    return struct.pack(">qiI", offset, len(covered) + 4, zlib.crc32(covered)) + covered


def wrapper(inner: bytes, offset: int = 5, magic: int = 1, codec: Codec = Codec.GZIP) -> bytes:
    value = compress(codec, inner)
    return message(offset, struct.pack(">ii", -1, len(value)) + value, magic, codec)


PLAIN_BODY = struct.pack(">ii", -1, -1)


@pytest.mark.parametrize("name", NAMES)
def test_message_set_written_by_kafka_is_decoded(name: str) -> None:
    assert decode_all(BYTES[name]) == records(name)


@pytest.mark.parametrize(
    "name", ["m0-none", "m0-lz4", "m1-none", "m1-none-lat", "m1-lz4", "m1-snappy"]
)
def test_encoded_message_set_equals_kafkas_bytes(name: str) -> None:
    append_time = APPEND_TIME if name.endswith("-lat") else None
    codec = Codec[name.split("-")[1].upper()]
    written = encode_message_set(
        records(name.removesuffix("-lat")),
        int(name[1]),
        codec=codec,
        log_append_time_ms=append_time,
    )
    assert written == BYTES[name]


@pytest.mark.parametrize("name", NAMES)
def test_conversion_keeps_offsets_timestamps_and_codec(name: str) -> None:
    converted = to_v2(BYTES[name])
    assert decode_v2(converted) == records(name)
    (_, header), *others = iter_headers(converted)
    assert not others
    assert header.codec.name.lower() == name.split("-")[1]
    assert header.is_log_append_time == name.endswith("-lat")
    assert (header.base_offset, header.last_offset) == (100, 106)
    assert (header.leader_epoch, header.producer_id, header.base_sequence) == (-1, -1, -1)


@pytest.mark.parametrize(("magic", "codec"), AIOKAFKA_CASES)
def test_message_set_written_by_aiokafka_is_decoded(magic: int, codec: Codec) -> None:
    builder = LegacyRecordBatchBuilder(magic, codec, 1 << 20)
    for index, item in enumerate(ITEMS):
        assert builder.append(index, item.timestamp_ms, item.key, item.value)
    data = bytes(builder.build())
    expected = [
        item._replace(offset=index, timestamp_ms=item.timestamp_ms if magic else -1)
        for index, item in enumerate(ITEMS)
    ]
    if codec is not Codec.NONE and magic == 1:
        # The builder leaves the wrapper's offset to the broker.
        data = struct.pack(">q", len(ITEMS) - 1) + data[8:]
    assert decode_all(data) == expected


@pytest.mark.parametrize(("magic", "codec"), AIOKAFKA_CASES)
def test_aiokafka_decodes_an_encoded_message_set(magic: int, codec: Codec) -> None:
    reader = MemoryRecords(encode_message_set(ITEMS, magic, codec=codec))
    found = []
    while reader.has_next():
        batch = reader.next_batch()
        assert batch is not None
        assert batch.validate_crc()
        found += [(item.offset, item.timestamp, item.key, item.value) for item in batch]
    assert found == [
        (item.offset, item.timestamp_ms if magic else None, item.key, item.value) for item in ITEMS
    ]


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP])
def test_kafka_python_decodes_an_encoded_message_set(magic: int, codec: Codec) -> None:
    found = []
    for batch in KafkaPythonRecords(encode_message_set(ITEMS, magic, codec=codec)):
        assert batch.validate_crc()
        found += [(item.offset, item.key, item.value) for item in batch]
    assert found == [(item.offset, item.key, item.value) for item in ITEMS]


@st.composite
def item_lists(draw: st.DrawFn) -> list[LogRecord]:
    offset = draw(st.integers(0, 2**40))
    blobs = st.none() | st.binary(max_size=40)
    items = []
    for _ in range(draw(st.integers(1, 6))):
        timestamp = draw(st.integers(-1, 2**63 - 1))
        items.append(LogRecord(offset, timestamp, draw(blobs), draw(blobs)))
        offset += draw(st.integers(1, 2**31))
    return items


@given(items=item_lists(), magic=st.integers(0, 1), codec=st.sampled_from(CODECS))
@settings(max_examples=80, deadline=None)
def test_encoded_messages_decode_to_the_same_records(
    items: list[LogRecord], magic: int, codec: Codec
) -> None:
    data = encode_message_set(items, magic, codec=codec)
    expected = items if magic else [item._replace(timestamp_ms=-1) for item in items]
    assert decode_all(data) == expected
    if codec is Codec.NONE or items[-1].offset - items[0].offset < 2**31:
        assert decode_v2(to_v2(data)) == expected
    else:
        with pytest.raises(InvalidRecordError):
            to_v2(data)


def test_conversion_of_mixed_formats_yields_v2_batches() -> None:
    parts = [
        encode_message_set([LogRecord(0, -1, b"a", b"v0")], 0),
        encode_message_set([LogRecord(1, T0, b"b", b"v1")], 1),
        encode_message_set(
            [LogRecord(2, T0, b"c", b"v1"), LogRecord(4, T0, b"c", b"v1")], 1, codec=Codec.LZ4
        ),
        encode_message_set([LogRecord(5, T0, b"d", b"v1")], 1, log_append_time_ms=APPEND_TIME),
        encode_message_set([LogRecord(6, T0, b"d", b"v1")], 1, log_append_time_ms=LATER),
        encode_batch([LogRecord(7, T0, b"e", b"v2", (("h", None),))], leader_epoch=4),
        encode_message_set([LogRecord(8, T0, None, b"v1")], 1),
    ]
    converted = to_v2(b"".join(parts))
    assert [(header.base_offset, header.last_offset) for _, header in iter_headers(converted)] == [
        (0, 1),
        (2, 4),
        (5, 5),
        (6, 6),
        (7, 7),
        (8, 8),
    ]
    found = decode_v2(converted)
    assert [item.offset for item in found] == [0, 1, 2, 4, 5, 6, 7, 8]
    assert [item.timestamp_ms for item in found[4:6]] == [APPEND_TIME, LATER]
    assert parts[5] in converted
    assert to_v2(b"") == b""


def test_conversion_limits_the_size_of_each_batch() -> None:
    items = [LogRecord(index, T0, None, bytes(1000)) for index in range(200)]
    converted = to_v2(encode_message_set(items, 1))
    assert decode_v2(converted) == items
    sizes = [header.size for _, header in iter_headers(converted)]
    assert len(sizes) == 4
    assert max(sizes) <= RUN_BYTES + 61


def test_conversion_keeps_the_last_offset_of_a_compacted_wrapper() -> None:
    # Compaction of v0 may have removed the last inner message.
    inner = encode_message_set(ITEMS[:2], 0)
    header = parse_header(to_v2(wrapper(inner, offset=20, magic=0)))
    assert (header.base_offset, header.last_offset, header.record_count) == (7, 20, 2)


@pytest.mark.parametrize("size", [0, 8, 16, 17, 21, 29, 30, 33])
def test_truncated_message_is_corrupt(size: int) -> None:
    data = message(1, PLAIN_BODY)
    assert len(data) == 42 - 8
    with pytest.raises(CorruptRecordError):
        decode_message(data[:size])
    if size:
        with pytest.raises(CorruptRecordError):
            to_v2(data[:size])


@pytest.mark.parametrize(("magic", "length"), [(0, 13), (1, 21), (0, -1), (1, -(2**31))])
def test_message_with_an_impossible_length_is_corrupt(magic: int, length: int) -> None:
    data = bytearray(message(1, PLAIN_BODY, magic))
    struct.pack_into(">i", data, 8, length)
    with pytest.raises(CorruptRecordError):
        parse_message(data)


def test_message_of_another_magic_is_corrupt() -> None:
    assert [magic_at(BYTES[name], 0) for name in ("m0-none", "m1-none", "m2-none")] == [0, 1, 2]
    with pytest.raises(CorruptRecordError):
        parse_message(BYTES["m2-none"])
    broken = bytearray(BYTES["m1-none"])
    broken[16] = 3
    with pytest.raises(CorruptRecordError):
        to_v2(broken)


@pytest.mark.parametrize(
    "data",
    [
        message(1, struct.pack(">ii", -2, -1)),
        message(1, struct.pack(">ii", -1, -2)),
        message(1, struct.pack(">ii", 2**31 - 1, -1)),
        message(1, struct.pack(">ii", 5, -1)),
        message(1, struct.pack(">ii", -1, 1)),
        message(1, PLAIN_BODY + b"tail"),
        message(1, PLAIN_BODY, attributes=Codec.GZIP),
        message(1, PLAIN_BODY, attributes=Codec.ZSTD),
        message(1, PLAIN_BODY, attributes=7),
        wrapper(b""),
        wrapper(message(0, PLAIN_BODY, magic=0)),
        wrapper(wrapper(message(0, PLAIN_BODY), offset=0)),
        wrapper(message(1, PLAIN_BODY) + message(1, PLAIN_BODY)),
        wrapper(message(-1, PLAIN_BODY)),
        wrapper(message(6, PLAIN_BODY) + message(2**63 - 1, PLAIN_BODY)),
        wrapper(message(0, PLAIN_BODY) + message(6, PLAIN_BODY), offset=5),
    ],
)
def test_invalid_message_is_refused_despite_a_correct_crc(data: bytes) -> None:
    verify_message_crc(data, 0, parse_message(data))
    with pytest.raises(InvalidRecordError):
        decode_message(data)
    with pytest.raises(InvalidRecordError):
        to_v2(data)


@pytest.mark.parametrize(
    "inner", [message(0, PLAIN_BODY)[:-1], message(0, PLAIN_BODY) + b"x", b"garbage" * 5]
)
def test_corrupt_inner_message_is_refused(inner: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        decode_message(wrapper(inner))


def test_message_inflating_beyond_the_limit_is_refused() -> None:
    data = encode_message_set([LogRecord(0, T0, None, bytes(100_000))], 1, codec=Codec.GZIP)
    assert decode_message(data, max_output_bytes=100_034)
    with pytest.raises(CorruptRecordError):
        decode_message(data, max_output_bytes=100_033)
    with pytest.raises(CorruptRecordError):
        to_v2(data, max_output_bytes=100_033)


def test_encoding_an_unsupported_magic_or_codec_is_refused() -> None:
    for magic, codec in ((2, Codec.NONE), (-1, Codec.NONE), (1, Codec.ZSTD)):
        with pytest.raises(ValueError, match="can't be written"):
            encode_message_set(ITEMS, magic, codec=codec)


@pytest.mark.parametrize("size", range(8))
def test_truncated_lz4_value_of_v0_is_corrupt(size: int) -> None:
    value = b"\x04\x22\x4d\x18\x69\x40\x82"[:size]
    data = message(0, struct.pack(">ii", -1, size) + value, magic=0, attributes=Codec.LZ4)
    with pytest.raises(CorruptRecordError):
        decode_message(data)


@given(
    name=st.sampled_from(NAMES),
    edits=st.lists(st.tuples(st.integers(0, 1 << 10), st.integers(0, 255)), min_size=1, max_size=5),
    cut=st.integers(0, 40),
)
@settings(max_examples=300, deadline=None)
def test_mutated_messages_are_read_or_refused(
    name: str, edits: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(BYTES[name])
    for place, byte in edits:
        data[place % len(data)] = byte
    data = data[: len(data) - max(0, cut - 30)]
    if len(data) > 30 and cut % 2:
        # With a valid CRC, only the later checks detect the damage.
        length = struct.unpack_from(">i", data, 8)[0]
        struct.pack_into(">I", data, 12, zlib.crc32(data[16 : max(16, 12 + length)]))
    try:
        to_v2(data, max_output_bytes=1 << 16)
    except (CorruptRecordError, InvalidRecordError):
        return
