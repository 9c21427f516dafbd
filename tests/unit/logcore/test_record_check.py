"""A client's batch must have only records within limits that every consumer can decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import cramjam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.logcore.batch import (
    DEFAULT_MAX_OUTPUT_BYTES,
    HEADER_SIZE,
    LogRecord,
    decode_records,
    encode_batch,
    parse_header,
)
from fencepost.logcore.compression import Codec, compress, decompress
from fencepost.logcore.config import MAX_INT64, LogConfig
from fencepost.logcore.errors import (
    InvalidRecordError,
    InvalidTimestampError,
    LogError,
)
from fencepost.logcore.record_check import (
    COMPRESSED_BYTE_COST,
    MAX_RECORD_ERRORS,
    MAX_RECORD_HEADERS,
    TURN_BYTES,
    TURN_RECORDS,
    CheckBudget,
    CheckBudgetExceededError,
)
from fencepost.logcore.validation import MAX_BATCH_RECORDS, ValidatedBatch, validate
from fencepost.logcore.varint import encode
from tests.support.quick import only
from tests.unit.logcore.batch_driver import (
    EDITS,
    MALFORMED,
    body,
    edited,
    record_lists,
    with_payload,
)

NOW_MS: Final = 1_700_000_000_000
ANY_TIME: Final = LogConfig(message_timestamp_after_max_ms=MAX_INT64)
COMPACTED: Final = LogConfig(cleanup_policy=frozenset({"compact"}))
CODECS = pytest.mark.parametrize("codec", list(Codec))
COMPRESSED = pytest.mark.parametrize("codec", list(Codec)[1:])


def admitted(
    data: bytes, config: LogConfig = ANY_TIME, budget: CheckBudget | None = None
) -> ValidatedBatch:
    return validate(data, config, now_ms=NOW_MS, min_zstd_ok=True, budget=budget)


def as_client(records: list[LogRecord]) -> list[LogRecord]:
    return [record._replace(offset=index) for index, record in enumerate(records)]


def many(count: int, codec: Codec = Codec.NONE, **fields: object) -> bytes:
    record = LogRecord(0, NOW_MS, b"k", b"value")._replace(**fields)  # type: ignore[arg-type]
    return encode_batch([record._replace(offset=index) for index in range(count)], codec=codec)


# --- accepted batches -----------------------------------------------------------------------------


@given(records=record_lists().map(as_client), codec=st.sampled_from(list(Codec)))
@settings(max_examples=100, deadline=None)
def test_well_formed_batch_is_admitted_unchanged(records: list[LogRecord], codec: Codec) -> None:
    data = encode_batch(records, codec=codec)
    assert admitted(data) == (parse_header(data), data, NOW_MS)


@CODECS
@pytest.mark.parametrize("count", [1, 63, 64, 65, 8191, 8192, 8193])
def test_offset_deltas_of_every_varint_width_are_admitted(codec: Codec, count: int) -> None:
    """Offset deltas of one, two and three bytes; the lengths of the records grow with them."""
    records = [
        LogRecord(index, NOW_MS + index, None, bytes(index if count < 100 else index % 130))
        for index in range(count)
    ]
    admitted(encode_batch(records, codec=codec))


@pytest.mark.parametrize("size", [0, 63, 64, 8191, 8192, 200_000])
@pytest.mark.parametrize("field", ["key", "value", "headers"])
def test_fields_of_every_length_are_admitted(size: int, field: str) -> None:
    blob = bytes(size)
    admitted(
        many(2, **{field: ((blob.decode(), blob), ("", None)) if field == "headers" else blob})
    )


@pytest.mark.parametrize("version", [b"\0\0\0\1", b"\1\0\0\0"])
def test_snappy_version_of_either_byte_order_is_admitted(version: bytes) -> None:
    """Old clients in Go write the version in little-endian byte order."""
    data = many(50, Codec.SNAPPY)
    stored = data[HEADER_SIZE : HEADER_SIZE + 8] + version * 2 + data[HEADER_SIZE + 16 :]
    admitted(with_payload(data, stored))


def test_lz4_frame_with_optional_checksums_is_admitted() -> None:
    """Checksums of blocks and content, and a content size, which Java does not write."""
    plain = many(3, value=bytes(range(256)) * 800)
    compressor = cramjam.lz4.Compressor(1, content_checksum=True, block_linked=False)
    compressor.compress(plain[HEADER_SIZE:])
    admitted(with_payload(plain, bytes(compressor.finish()), attributes=Codec.LZ4))


# --- refused batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", MALFORMED)
@CODECS
def test_malformed_records_are_refused(payload: bytes, codec: Codec) -> None:
    valid = many(1)
    with pytest.raises(InvalidRecordError):
        admitted(with_payload(valid, compress(codec, payload), attributes=codec))


@pytest.mark.parametrize("deltas", [(0, 0), (1, 0), (0, 2), (1, 2), (0, -1), (0, 64), (0, 8192)])
@CODECS
def test_offset_deltas_that_do_not_count_from_zero_are_refused(
    deltas: tuple[int, int], codec: Codec
) -> None:
    payload = b"".join(body(0, delta, -1, -1, 0) for delta in deltas)
    with pytest.raises(InvalidRecordError):
        admitted(with_payload(many(2), compress(codec, payload), attributes=codec))


@CODECS
@pytest.mark.parametrize("said", [1, 7, 9, 1000, 15_000_000])
def test_record_count_that_differs_from_the_header_is_refused(codec: Codec, said: int) -> None:
    eight = many(8, codec)
    with pytest.raises(InvalidRecordError):
        admitted(
            with_payload(eight, eight[HEADER_SIZE:], record_count=said, last_offset_delta=said - 1)
        )


@pytest.mark.parametrize("number", [b"\x80\x80\x80\x80\x80\0", b"\x80\x80\x80\x80\x10"])
def test_varints_that_clients_decode_differently_are_refused(number: bytes) -> None:
    """Zero in six bytes, and a value with a 33rd bit, which Java drops and librdkafka keeps."""
    with pytest.raises(InvalidRecordError):
        admitted(with_payload(many(1), body(0, number, -1, -1, 0)))
    with pytest.raises(InvalidRecordError):
        admitted(with_payload(many(1), body(0, 0, number, -1, 0)))


@COMPRESSED
@pytest.mark.parametrize("harm", ["nothing", "cut", "noise", "tail"])
def test_payload_that_does_not_decompress_is_refused(codec: Codec, harm: str) -> None:
    data = many(100, codec)
    stored = data[HEADER_SIZE:]
    broken = {
        "nothing": b"",
        "cut": stored[:-5],
        "noise": stored[:3] + bytes(range(40, 90)) + stored[53:],
        "tail": stored + b"tail",
    }[harm]
    for budget in (None, CheckBudget()):
        with pytest.raises((InvalidRecordError, CheckBudgetExceededError)):
            admitted(with_payload(data, broken), budget=budget)
    with pytest.raises(InvalidRecordError):
        admitted(with_payload(data, broken))


def test_lz4_with_dependent_blocks_is_refused() -> None:
    plain = many(10)
    stored = bytes(cramjam.lz4.compress(plain[HEADER_SIZE:]))
    assert decompress(Codec.LZ4, stored, 1 << 20) == plain[HEADER_SIZE:]
    with pytest.raises(InvalidRecordError, match="independent"):
        admitted(with_payload(plain, stored, attributes=Codec.LZ4))


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4])
def test_concatenated_gzip_snappy_or_lz4_streams_are_refused(codec: Codec) -> None:
    plain = many(50)
    records = plain[HEADER_SIZE:]
    stored = compress(codec, records[:100]) + compress(codec, records[100:])
    assert decompress(codec, stored, 1 << 20) == records
    with pytest.raises(InvalidRecordError):
        admitted(with_payload(plain, stored, attributes=codec))


def test_concatenated_zstd_frames_are_admitted() -> None:
    plain = many(50)
    records = plain[HEADER_SIZE:]
    stored = compress(Codec.ZSTD, records[:100]) + compress(Codec.ZSTD, records[100:])
    admitted(with_payload(plain, stored, attributes=Codec.ZSTD))


def test_snappy_version_that_java_refuses_is_refused() -> None:
    data = many(50, Codec.SNAPPY)
    for version in (b"\0\0\0\0", b"\x80\0\0\1"):
        stored = data[HEADER_SIZE : HEADER_SIZE + 8] + version * 2 + data[HEADER_SIZE + 16 :]
        with pytest.raises(InvalidRecordError, match="version"):
            admitted(with_payload(data, stored))


@CODECS
def test_records_without_key_are_refused_and_listed_on_a_compacted_topic(codec: Codec) -> None:
    records = [LogRecord(index, NOW_MS, b"" if index % 3 else None, b"v") for index in range(9)]
    data = encode_batch(records, codec=codec)
    with pytest.raises(InvalidRecordError, match="key") as refused:
        admitted(data, COMPACTED)
    assert [index for index, _ in refused.value.record_errors] == [0, 3, 6]
    admitted(data)


@CODECS
def test_timestamps_out_of_bounds_are_refused_and_listed(codec: Codec) -> None:
    config = LogConfig(message_timestamp_before_max_ms=10, message_timestamp_after_max_ms=20)
    times = [-11, -10, 20, 21, -NOW_MS - 1, 0]
    records = [LogRecord(index, NOW_MS + ms, b"", b"") for index, ms in enumerate(times)]
    with pytest.raises(InvalidTimestampError) as refused:
        admitted(encode_batch(records, codec=codec), config)
    assert str(refused.value) == ("One or more records have been rejected due to invalid timestamp")
    assert [index for index, _ in refused.value.record_errors] == [0, 3]
    within = [r._replace(offset=at) for at, r in enumerate([*records[1:3], *records[4:]])]
    admitted(encode_batch(within, codec=codec), config)


@pytest.mark.slow
@given(
    records=record_lists().map(as_client),
    codec=st.sampled_from(list(Codec)),
    edits=EDITS,
    inside=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_admitted_batch_decodes_completely(
    records: list[LogRecord], codec: Codec, edits: list[tuple[int, int, int]], inside: bool
) -> None:
    batch = encode_batch(records, codec=codec)
    stored = batch[HEADER_SIZE:]
    if inside:
        changed = compress(codec, edited(decompress(codec, stored, 1 << 20), edits))
    else:
        changed = edited(stored, edits)
    data = with_payload(batch, changed)
    for config in (ANY_TIME, COMPACTED):
        try:
            admitted(data, config)
        except LogError:
            continue
        assert [record.offset for record in decode_records(data)] == list(range(len(records)))


# --- limits -----------------------------------------------------------------------------------


def test_batch_with_more_records_than_the_limit_is_refused() -> None:
    two = many(2, Codec.ZSTD)
    for count, reason in ((MAX_BATCH_RECORDS, "end inside"), (MAX_BATCH_RECORDS + 1, "at most")):
        said = {"record_count": count, "last_offset_delta": count - 1}
        with pytest.raises(InvalidRecordError, match=reason):
            admitted(with_payload(two, two[HEADER_SIZE:], **said))


@pytest.mark.slow
@COMPRESSED
def test_batch_inflating_to_exactly_the_limit_is_admitted_larger_one_is_refused(
    codec: Codec,
) -> None:
    config = LogConfig(max_message_bytes=1 << 24)
    size = DEFAULT_MAX_OUTPUT_BYTES - 100
    overhead = len(many(1, value=bytes(size))) - HEADER_SIZE - size
    for excess in (0, 1):
        value = bytes(DEFAULT_MAX_OUTPUT_BYTES - overhead + excess)
        data = many(1, codec, value=value)
        if excess:
            with pytest.raises(InvalidRecordError):
                admitted(data, config)
        else:
            admitted(data, config)


@COMPRESSED
def test_compressed_record_above_the_decompressed_bound_is_refused(codec: Codec) -> None:
    value = bytes(1000)
    body = len(many(1, value=value)) - HEADER_SIZE - 2  # the length field has two bytes
    config = LogConfig(max_decompressed_message_bytes=body)
    admitted(many(3, codec, value=value), config)
    for target in ("producer", "uncompressed"):
        tighter = replace(config, max_decompressed_message_bytes=body - 1, compression_type=target)
        with pytest.raises(InvalidRecordError, match=f"{body} exceeds"):
            admitted(many(3, codec, value=value), tighter)
        admitted(many(3, value=value), tighter)


@pytest.mark.parametrize("excess", [-1, 0])
def test_record_bound_applies_only_if_tighter_than_the_batch_bound(excess: int) -> None:
    bound = DEFAULT_MAX_OUTPUT_BYTES + excess
    expected = bound if excess < 0 else None
    assert LogConfig(max_decompressed_message_bytes=bound).max_record_bytes == expected
    assert LogConfig().max_record_bytes is None


@CODECS
def test_record_errors_are_listed_up_to_their_limit(codec: Codec) -> None:
    for count in (MAX_RECORD_ERRORS, MAX_RECORD_ERRORS + 1):
        with pytest.raises(InvalidRecordError) as keyless:
            admitted(many(count, codec, key=None), COMPACTED)
        with pytest.raises(InvalidTimestampError) as late:
            admitted(many(count, codec, timestamp_ms=NOW_MS + 3_600_001), LogConfig())
        for refused in (keyless, late):
            listed = [index for index, _ in refused.value.record_errors]
            assert listed == list(range(MAX_RECORD_ERRORS))


@CODECS
def test_more_records_than_the_turn_budget_raise_budget_exceeded(codec: Codec) -> None:
    config = LogConfig()
    admitted(many(TURN_RECORDS, codec), config, CheckBudget())
    with pytest.raises(CheckBudgetExceededError):
        admitted(many(TURN_RECORDS + 1, codec), config, CheckBudget())
    half = many(TURN_RECORDS // 2, codec)
    budget = CheckBudget(bytes=1 << 30)
    for _ in range(2):
        admitted(half, config, budget)
    with pytest.raises(CheckBudgetExceededError):
        admitted(many(1, codec), config, budget)


@pytest.mark.parametrize("codec", only(list(Codec), Codec.NONE, Codec.ZSTD))
def test_record_with_too_many_headers_is_refused(codec: Codec) -> None:
    config = LogConfig(message_timestamp_after_max_ms=MAX_INT64, max_message_bytes=1 << 20)
    headers = (("", None),) * MAX_RECORD_HEADERS
    admitted(many(1, codec, headers=headers), config)
    with pytest.raises(InvalidRecordError, match="at most 250000"):
        admitted(many(1, codec, headers=(*headers, ("", None))), config)


def test_headers_count_toward_the_record_budget_of_a_turn() -> None:
    headers = (("", b""),) * (TURN_RECORDS - 1)
    admitted(many(1, headers=headers), budget=CheckBudget())
    with pytest.raises(CheckBudgetExceededError):
        admitted(many(1, headers=(*headers, ("", b""))), budget=CheckBudget())
    admitted(many(1, headers=(*headers, ("", b""))))


@COMPRESSED
def test_more_bytes_than_the_turn_budget_raise_budget_exceeded(codec: Codec) -> None:
    data = many(1, codec, value=bytes(1000))
    header = parse_header(data)
    cost = (header.size - HEADER_SIZE) * COMPRESSED_BYTE_COST
    inflated = len(many(1, value=bytes(1000))) - HEADER_SIZE
    admitted(data, budget=CheckBudget(bytes=cost + inflated))
    for short in (1, inflated + 1):
        with pytest.raises(CheckBudgetExceededError):
            admitted(data, budget=CheckBudget(bytes=cost + inflated - short))
    assert cost + inflated < TURN_BYTES


def test_recompression_exceeds_the_turn_budget() -> None:
    data = many(1)
    assert admitted(data, LogConfig(compression_type="uncompressed"), CheckBudget()).data == data
    config = LogConfig(compression_type="zstd")
    with pytest.raises(CheckBudgetExceededError):
        admitted(data, config, CheckBudget())
    assert admitted(data, config).header.codec is Codec.ZSTD


def test_varint_of_three_bytes_is_admitted() -> None:
    """A length of three bytes takes the slow path, which must give the same result."""
    assert len(encode(8192)) == 3
    admitted(many(3, value=bytes(8192)))
