"""Format v2: comparisons with Apache Kafka's bytes and two client libraries, and round trips."""

from __future__ import annotations

import struct

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AiokafkaBuilder
from aiokafka.record.memory_records import MemoryRecords as AiokafkaRecords
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record import MemoryRecords as KafkaPythonRecords
from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaPythonBuilder

from fencepost.logcore.batch import (
    HEADER_SIZE,
    BatchHeader,
    Codec,
    ControlRecord,
    ControlType,
    LogRecord,
    decode_records,
    encode_batch,
    end_marker,
    iter_headers,
    parse_control,
    parse_header,
    recompress,
    record_bytes,
    stamp_log_append_time,
    verify_crc,
)
from fencepost.logcore.compression import compress, decompress
from fencepost.logcore.errors import CorruptRecordError, InvalidRecordError, LogError
from tests.unit.logcore import kafka_batches
from tests.unit.logcore.batch_driver import (
    EDITS,
    MALFORMED,
    TIMESTAMPS,
    body,
    edited,
    placed,
    record_lists,
    with_payload,
)
from tests.unit.logcore.kafka_batches import APPEND_TIME, BYTES, RECORDS, T0

V2_NAMES = sorted(name for name in BYTES if name.startswith("m2-"))
KAFKA_PYTHON_CODECS = [Codec.NONE, Codec.GZIP]  # kafka-python needs more packages for other codecs
# --- Apache Kafka's own bytes -----------------------------------------------------------------


@pytest.mark.parametrize("name", V2_NAMES)
def test_batch_written_by_kafka_is_decoded(name: str) -> None:
    batch = BYTES[name]
    header = parse_header(batch)
    verify_crc(batch, 0, header)
    assert decode_records(batch, 0, header) == kafka_batches.records(name)
    assert header.codec.name.lower() == name.split("-")[1]
    assert header.is_log_append_time == name.endswith("-lat")
    assert (header.base_offset, header.last_offset, header.next_offset) == (100, 106, 107)
    assert (header.producer_id, header.producer_epoch, header.leader_epoch) == (4000, 7, 9)
    assert header.has_producer
    assert header.is_transactional
    assert not header.is_control
    assert not header.has_delete_horizon
    assert header.size == len(batch)
    assert header.record_count == 4
    # Sequences wrap after 2**31 - 1.
    assert (header.base_sequence, header.last_sequence) == (2**31 - 2, 4)


@pytest.mark.parametrize("name", ["m2-none", "m2-none-lat", "m2-snappy", "m2-lz4"])
def test_encoded_batch_equals_kafkas_bytes(name: str) -> None:
    append_time = name.endswith("-lat")
    written = encode_batch(
        RECORDS,
        leader_epoch=9,
        codec=Codec[name.split("-")[1].upper()],
        producer_id=4000,
        producer_epoch=7,
        base_sequence=2**31 - 2,
        transactional=True,
        log_append_time=append_time,
        max_timestamp_ms=APPEND_TIME if append_time else None,
    )
    assert written == BYTES[name]


def test_delete_horizon_is_stored_in_place_of_the_base_timestamp() -> None:
    header = parse_header(BYTES["horizon"])
    assert header.delete_horizon_ms == header.base_timestamp == APPEND_TIME
    records = decode_records(BYTES["horizon"])
    assert records == [LogRecord(52, T0, b"k", None)]
    written = encode_batch(
        records,
        base_offset=50,
        leader_epoch=3,
        delete_horizon_ms=APPEND_TIME,
        last_offset_delta=9,
    )
    assert written == BYTES["horizon"]


def test_batch_emptied_by_compaction_keeps_its_offsets_and_sequences() -> None:
    written = encode_batch(
        [],
        base_offset=200,
        leader_epoch=3,
        producer_id=4000,
        producer_epoch=7,
        base_sequence=5,
        transactional=True,
        last_offset_delta=9,
        max_timestamp_ms=T0,
    )
    assert written == BYTES["empty"]
    header = parse_header(written)
    assert (header.record_count, header.last_offset, header.last_sequence) == (0, 209, 14)
    assert decode_records(written) == []


@pytest.mark.parametrize("kind", [ControlType.COMMIT, ControlType.ABORT])
def test_end_marker_equals_kafkas_bytes_and_decodes(kind: ControlType) -> None:
    marker = end_marker(
        commit=kind is ControlType.COMMIT,
        producer_id=4000,
        producer_epoch=8,
        coordinator_epoch=12,
        timestamp_ms=T0,
    )
    written = placed(marker, 77, leader_epoch=3)
    assert written == BYTES[f"marker-{kind.name}"]
    header = parse_header(written)
    assert header.is_control
    assert header.is_transactional
    assert header.last_sequence == header.base_sequence == -1
    assert parse_control(decode_records(written)[0]) == ControlRecord(kind, 12)


# --- against client libraries ---------------------------------------------------------------------


@pytest.mark.parametrize("codec", list(Codec))
def test_batch_written_by_aiokafka_is_decoded(codec: Codec) -> None:
    builder = AiokafkaBuilder(2, codec, 1, 77, 3, 11, 1 << 20)
    for index, record in enumerate(RECORDS):
        headers = list(record.headers)
        assert builder.append(index, record.timestamp_ms, record.key, record.value, headers)
    batch = bytes(builder.build())
    header = parse_header(batch)
    verify_crc(batch, 0, header)
    expected = [record._replace(offset=index) for index, record in enumerate(RECORDS)]
    assert decode_records(batch) == expected
    assert (header.producer_id, header.producer_epoch, header.last_sequence) == (77, 3, 14)
    assert header.codec is codec
    assert header.is_transactional


@pytest.mark.parametrize("codec", list(Codec))
def test_aiokafka_decodes_an_encoded_batch(codec: Codec) -> None:
    one = encode_batch(RECORDS, codec=codec, producer_id=77, producer_epoch=3, base_sequence=11)
    two = encode_batch([LogRecord(107, T0, None, b"last")], codec=codec)
    buffer = AiokafkaRecords(one + two)
    batch = buffer.next_batch()
    assert batch is not None
    assert batch.validate_crc()
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (77, 3, 11)
    assert batch.next_offset == 107
    found = [
        LogRecord(item.offset, item.timestamp, item.key, item.value, tuple(item.headers))
        for item in batch
    ]
    assert found == RECORDS
    batch = buffer.next_batch()
    assert batch is not None
    assert [item.value for item in batch] == [b"last"]
    assert not buffer.has_next()


@pytest.mark.parametrize("codec", KAFKA_PYTHON_CODECS)
def test_batch_written_by_kafka_python_is_decoded(codec: Codec) -> None:
    builder = KafkaPythonBuilder(2, codec, True, 77, 3, 11, 1 << 20)
    for index, record in enumerate(RECORDS):
        headers = list(record.headers)
        assert builder.append(index, record.timestamp_ms, record.key, record.value, headers)
    batch = bytes(builder.build())
    verify_crc(batch, 0, parse_header(batch))
    expected = [record._replace(offset=index) for index, record in enumerate(RECORDS)]
    assert decode_records(batch) == expected


@pytest.mark.parametrize("codec", KAFKA_PYTHON_CODECS)
def test_kafka_python_decodes_an_encoded_batch(codec: Codec) -> None:
    written = encode_batch(RECORDS, codec=codec, leader_epoch=5, producer_id=77, base_sequence=1)
    batch = KafkaPythonRecords(written).next_batch()
    assert batch.validate_crc()
    assert batch.leader_epoch == 5
    assert batch.last_sequence == 7
    found = [
        LogRecord(item.offset, item.timestamp, item.key, item.value, tuple(item.headers))
        for item in batch
    ]
    assert found == RECORDS


# --- round trips ------------------------------------------------------------------------------


@given(records=record_lists(), codec=st.sampled_from(list(Codec)), horizon=st.none() | TIMESTAMPS)
@settings(max_examples=80, deadline=None)
def test_encoded_records_decode_to_the_same_records(
    records: list[LogRecord], codec: Codec, horizon: int | None
) -> None:
    batch = encode_batch(records, codec=codec, delete_horizon_ms=horizon)
    header = parse_header(batch)
    verify_crc(batch, 0, header)
    assert decode_records(memoryview(bytearray(batch)), 0, header) == records
    assert header.last_offset == records[-1].offset
    assert header.max_timestamp == max(record.timestamp_ms for record in records)
    assert header.delete_horizon_ms == horizon


def test_record_header_keys_that_are_not_utf8_round_trip() -> None:
    plain = encode_batch([LogRecord(0, 0, None, None, (("~~", b"v"),))])
    batch = with_payload(plain, plain[HEADER_SIZE:].replace(b"~~", b"\xff\xc3"))
    records = decode_records(batch)
    assert encode_batch(records) == batch


@pytest.mark.parametrize("source", list(Codec))
@pytest.mark.parametrize("target", list(Codec))
def test_recompressed_batch_keeps_its_records_and_header_fields(
    source: Codec, target: Codec
) -> None:
    batch = encode_batch(RECORDS, codec=source, producer_id=5, producer_epoch=1, base_sequence=0)
    given = parse_header(batch)
    changed = recompress(given, compress(target, record_bytes(batch, 0, given)), target)
    header = parse_header(changed)
    verify_crc(changed, 0, header)
    assert header.codec is target
    assert header.size == len(changed)
    assert header[6:] == parse_header(batch)[6:]
    assert decode_records(changed) == RECORDS


def test_stamped_log_append_time_equals_kafkas_bytes() -> None:
    buffer = memoryview(bytearray(BYTES["m2-lz4"] + b"tail"))
    stamp_log_append_time(buffer, 0, APPEND_TIME)
    assert bytes(buffer) == BYTES["m2-lz4-lat"] + b"tail"


# --- headers ----------------------------------------------------------------------------------


def test_iter_headers_yields_position_and_header_of_each_batch() -> None:
    one, two = BYTES["m2-none"], BYTES["marker-COMMIT"]
    assert [(pos, header.base_offset) for pos, header in iter_headers(one + two)] == [
        (0, 100),
        (len(one), 77),
    ]
    assert list(iter_headers(b"")) == []


@pytest.mark.parametrize("cut", [1, 11, 12, 60, 61, 70])
def test_iter_headers_refuses_a_truncated_batch(cut: int) -> None:
    with pytest.raises(CorruptRecordError):
        list(iter_headers(BYTES["m2-none"] + BYTES["m2-gzip"][:cut]))


def test_header_is_parsed_but_not_verified_without_its_records() -> None:
    header = parse_header(BYTES["m2-none"][:HEADER_SIZE])
    assert isinstance(header, BatchHeader)
    with pytest.raises(CorruptRecordError):
        verify_crc(BYTES["m2-none"][:HEADER_SIZE], 0, header)
    with pytest.raises(CorruptRecordError):
        decode_records(BYTES["m2-none"][:-1], 0, header)


@pytest.mark.parametrize("length", [-(2**31), -12, 0, 48])
def test_header_with_an_impossible_length_is_corrupt(length: int) -> None:
    batch = bytearray(BYTES["m2-none"])
    struct.pack_into(">i", batch, 8, length)
    with pytest.raises(CorruptRecordError):
        parse_header(batch)


@pytest.mark.parametrize("magic", [-1, 0, 1, 3])
def test_header_with_another_magic_is_corrupt(magic: int) -> None:
    batch = bytearray(BYTES["m2-none"])
    struct.pack_into(">b", batch, 16, magic)
    with pytest.raises(CorruptRecordError):
        parse_header(batch)


@pytest.mark.parametrize(
    ("base", "delta", "last"),
    [(0, 0, 0), (2**31 - 1, 0, 2**31 - 1), (2**31 - 1, 1, 0), (-1, 4, -1), (2**31 - 3, 5, 2)],
)
def test_last_sequence_wraps_after_the_maximum(base: int, delta: int, last: int) -> None:
    header = parse_header(BYTES["empty"])
    assert header._replace(base_sequence=base, last_offset_delta=delta).last_sequence == last


@pytest.mark.parametrize("number", [5, 6, 7])
def test_batch_with_an_unknown_codec_is_invalid(number: int) -> None:
    batch = with_payload(BYTES["m2-none"], b"x", attributes=number)
    with pytest.raises(InvalidRecordError):
        decode_records(batch)


# --- control records --------------------------------------------------------------------------


def control(key: bytes | None, value: bytes | None) -> ControlRecord:
    return parse_control(LogRecord(0, 0, key, value))


def test_control_records_of_later_versions_and_unknown_types_are_parsed() -> None:
    assert control(b"\0\5\0\1", b"\0\3\0\0\0\7more") == ControlRecord(ControlType.COMMIT, 7)
    assert control(b"\0\0\0\2", b"raft") == ControlRecord(ControlType.LEADER_CHANGE, -1)
    assert control(b"\0\0\x70\0", None) == ControlRecord(ControlType.UNKNOWN, -1)
    assert control(b"\0\0\xff\xff", None) == ControlRecord(ControlType.UNKNOWN, -1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b""),
        (b"\0\0\0", b"\0\0\0\0\0\0"),
        (b"\xff\xff\0\1", b"\0\0\0\0\0\0"),
        (b"\0\0\0\1", None),
        (b"\0\0\0\1", b"\0\0\0\0\0"),
        (b"\0\0\0\0", b"\xff\xff\0\0\0\0"),
    ],
)
def test_malformed_control_record_is_invalid(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(InvalidRecordError):
        control(key, value)


# --- input that the encoder refuses ---------------------------------------------------------------


def test_encoding_offsets_that_do_not_increase_or_fit_is_refused() -> None:
    first, second = LogRecord(5, 0, None, None), LogRecord(5 + 2**31, 0, None, None)
    with pytest.raises(ValueError, match="offset"):
        encode_batch([first, first])
    with pytest.raises(ValueError, match="offset"):
        encode_batch([first, second])
    with pytest.raises(ValueError, match="offset"):
        encode_batch([first], base_offset=6)
    with pytest.raises(ValueError, match="offset"):
        encode_batch([first], base_offset=3, last_offset_delta=1)
    assert encode_batch([first, second._replace(offset=4 + 2**31)])


def test_encoding_an_empty_batch_without_offsets_is_refused() -> None:
    with pytest.raises(ValueError, match="offset"):
        encode_batch([])
    with pytest.raises(ValueError, match="offset"):
        encode_batch([], base_offset=3)
    with pytest.raises(ValueError, match="offset"):
        encode_batch([], base_offset=3, last_offset_delta=-1)


# --- malformed records ------------------------------------------------------------------------


@pytest.mark.parametrize("payload", MALFORMED)
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_malformed_record_is_invalid(payload: bytes, codec: Codec) -> None:
    valid = encode_batch([LogRecord(0, 0, None, None)])
    assert decode_records(with_payload(valid, body(0, 0, -1, -1, 0))) == [
        LogRecord(0, 0, None, None)
    ]
    batch = with_payload(valid, compress(codec, payload), attributes=codec)
    verify_crc(batch, 0, parse_header(batch))
    with pytest.raises(InvalidRecordError):
        decode_records(batch)


@pytest.mark.parametrize("count", [-(2**31), -1, 0, 3, 5, 2**31 - 1])
def test_wrong_record_count_is_invalid(count: int) -> None:
    batch = with_payload(BYTES["m2-none"], BYTES["m2-none"][HEADER_SIZE:], record_count=count)
    with pytest.raises(InvalidRecordError):
        decode_records(batch)


def test_offsets_that_do_not_increase_inside_a_batch_are_invalid() -> None:
    two = encode_batch([LogRecord(0, 0, None, None), LogRecord(1, 0, None, None)])
    with pytest.raises(InvalidRecordError):
        decode_records(with_payload(two, body(0, 1, -1, -1, 0) + body(0, 0, -1, -1, 0)))
    with pytest.raises(InvalidRecordError):
        decode_records(with_payload(two, body(0, 1, -1, -1, 0) + body(0, 1, -1, -1, 0)))


def test_batch_inflating_to_exactly_the_limit_decodes_one_byte_more_is_refused() -> None:
    batch = encode_batch(RECORDS, codec=Codec.ZSTD)
    size = len(encode_batch(RECORDS)) - HEADER_SIZE
    assert decode_records(batch, max_output_bytes=size) == RECORDS
    with pytest.raises(CorruptRecordError):
        decode_records(batch, max_output_bytes=size - 1)


def decoded_or_refused(batch: bytes) -> None:
    try:
        header = parse_header(batch)
        records = decode_records(batch, 0, header, max_output_bytes=1 << 16)
    except (CorruptRecordError, InvalidRecordError):
        return
    # Accepted records can be encoded again.
    again = encode_batch(
        records,
        base_offset=header.base_offset,
        last_offset_delta=header.last_offset_delta & 0x7FFFFFFF,
    )
    if not header.is_log_append_time:
        assert decode_records(again) == records


@given(
    records=record_lists(),
    codec=st.sampled_from(list(Codec)),
    edits=EDITS,
    place=st.sampled_from(["batch", "stored", "records"]),
)
@settings(max_examples=150, deadline=None)
def test_mutated_batches_are_read_or_refused(
    records: list[LogRecord], codec: Codec, edits: list[tuple[int, int, int]], place: str
) -> None:
    batch = encode_batch(records, codec=codec)
    stored = batch[HEADER_SIZE:]
    if place == "batch":
        decoded_or_refused(edited(batch, edits))
    elif place == "stored":
        decoded_or_refused(with_payload(batch, edited(stored, edits)))
    else:
        plain = edited(decompress(codec, stored, 1 << 20), edits)
        decoded_or_refused(with_payload(batch, compress(codec, plain)))


@given(data=st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(LogError):
        list(iter_headers(data + b"\0"))
