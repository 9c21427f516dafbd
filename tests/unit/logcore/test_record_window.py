"""Records read from windows: the same records and errors, wherever the windows end."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.logcore.batch import (
    HEADER_SIZE,
    BatchHeader,
    LogRecord,
    decode_records,
    encode_batch,
    iter_records,
    parse_header,
    record_chunks,
    record_window,
)
from fencepost.logcore.compression import PIECE_BYTES, Codec, compress, inflated_pieces
from fencepost.logcore.errors import CorruptRecordError, InvalidRecordError
from fencepost.logcore.record_check import check_records, record_times
from fencepost.logcore.record_codec import RecordBase, decode_chunk
from fencepost.logcore.record_spans import span_chunks
from fencepost.logcore.record_window import CHUNK_RECORDS, RecordWindow
from fencepost.logcore.varint import read_varint
from tests.unit.logcore.batch_driver import EDITS, edited, record_lists, with_payload

CODECS = pytest.mark.parametrize("codec", list(Codec))
MIB = 1 << 20

Read = Callable[[BatchHeader, RecordWindow], object]


def decoded(header: BatchHeader, window: RecordWindow) -> object:
    base = RecordBase(header.base_offset, header.base_timestamp, None, header.last_offset_delta)
    read = partial(decode_chunk, base)
    return list(chain.from_iterable(window.chunks(header.record_count, read)))


def times(header: BatchHeader, window: RecordWindow) -> object:
    return list(chain.from_iterable(record_times(header, window)))


def keys(header: BatchHeader, window: RecordWindow) -> object:
    found = chain.from_iterable(span_chunks(header, window))
    return [(delta, time, key, has_value) for delta, time, key, has_value, *_ in found]


def keyless(header: BatchHeader, window: RecordWindow) -> object:
    steps = check_records(window, header, None, want_keys=True)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


READERS: list[Read] = [decoded, times, keys, keyless]


def outcome(read: Read, header: BatchHeader, pieces: Iterator[bytes]) -> object:
    try:
        return read(header, RecordWindow(pieces))
    except InvalidRecordError:
        return None


def cut(raw: bytes, places: Sequence[int]) -> Iterator[bytes]:
    ends = sorted({min(place, len(raw)) for place in places} | {0, len(raw)})
    return iter([raw[start:end] for start, end in pairwise(ends)])


@pytest.mark.parametrize("read", READERS)
@settings(max_examples=40, deadline=None)
@given(
    records=record_lists(),
    edits=st.just([]) | EDITS,
    places=st.lists(st.integers(0, 300), max_size=20),
)
def test_records_read_in_pieces_equal_those_read_at_once(
    read: Read, records: list[LogRecord], edits: list[tuple[int, int, int]], places: list[int]
) -> None:
    batch = encode_batch(records)
    raw = edited(batch[HEADER_SIZE:], edits)
    header = parse_header(with_payload(batch, raw))
    assert outcome(read, header, cut(raw, places)) == outcome(read, header, iter((raw,)))


@CODECS
def test_pieces_and_chunks_are_bounded(codec: Codec) -> None:
    records = [LogRecord(at, 5, b"k", bytes(90)) for at in range(10_000)]
    batch = encode_batch(records, codec=codec)
    pieces = list(inflated_pieces(codec, batch[HEADER_SIZE:], 10 * MIB))
    assert max(map(len, pieces)) <= PIECE_BYTES
    chunks = list(record_chunks(batch))
    assert max(map(len, chunks)) <= CHUNK_RECORDS
    assert list(chain.from_iterable(chunks)) == records == decode_records(batch)


@CODECS
def test_record_spanning_many_pieces_is_read_whole(codec: Codec) -> None:
    records = [LogRecord(at, 5, b"k", bytes(size)) for at, size in enumerate((10, 20 * MIB, 10))]
    batch = encode_batch(records, codec=codec)
    chunks = list(record_chunks(batch))
    assert list(chain.from_iterable(chunks)) == records
    assert [] in chunks, "others have their turn while the record is inflated"
    header = parse_header(batch)
    stored = inflated_pieces(codec, batch[HEADER_SIZE:], 30 * MIB)
    assert times(header, RecordWindow(stored)) == [(0, 5), (1, 5), (2, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_reader_of_first_record_inflates_no_more_than_a_piece(codec: Codec) -> None:
    batch = encode_batch([LogRecord(at, 5, b"", bytes(1000)) for at in range(60_000)], codec=codec)
    list(iter_records(encode_batch([LogRecord(0, 5, b"", b"")], codec=codec)))  # loads the library
    tracemalloc.start()
    try:
        assert next(iter_records(batch)).offset == 0
        peak = tracemalloc.get_traced_memory()[1]
        for record in iter_records(batch):
            assert len(record.value or b"") == 1000
        assert tracemalloc.get_traced_memory()[1] < 3 * MIB
    finally:
        tracemalloc.stop()
    assert peak < MIB


@CODECS
def test_bytes_behind_the_last_record_are_refused_at_the_end(codec: Codec) -> None:
    batch = encode_batch([LogRecord(at, 5, b"", b"") for at in range(10)], codec=codec)
    header = parse_header(batch)._replace(record_count=9)
    records = iter_records(batch, 0, header)
    assert [next(records).offset for _ in range(9)] == list(range(9))
    with pytest.raises(InvalidRecordError, match="follow the last record"):
        next(records)


@CODECS
def test_truncated_last_record_is_reported_by_every_reader(codec: Codec) -> None:
    batch = encode_batch([LogRecord(at, 5, b"k", bytes(90)) for at in range(10)])
    header = parse_header(batch)
    cut = compress(codec, batch[HEADER_SIZE:-9])
    for read in (decoded, times, keys):
        window = RecordWindow(inflated_pieces(codec, cut, MIB))
        with pytest.raises(InvalidRecordError, match=r"end inside|extends beyond its batch"):
            read(header, window)


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_damage_is_reported_only_when_its_record_is_reached(codec: Codec) -> None:
    batch = encode_batch([LogRecord(at, 5, b"", bytes(999)) for at in range(5000)], codec=codec)
    broken = with_payload(batch, batch[HEADER_SIZE:-9])
    records = iter_records(broken)
    assert next(records).offset == 0
    with pytest.raises(CorruptRecordError):
        list(records)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("sizes", [(5, 4), (4, 200, 5), (4, PIECE_BYTES, 5), (5 * PIECE_BYTES, 4)])
@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_record_of_compressed_batch_above_the_bound_is_invalid(
    read: Read, sizes: tuple[int, ...], codec: Codec
) -> None:
    records = [LogRecord(at, 5, b"k", bytes(size)) for at, size in enumerate(sizes)]
    batch = encode_batch(records, codec=codec)
    header = parse_header(batch)
    (largest,) = {_body_size(LogRecord(0, 5, b"k", bytes(max(sizes))))}
    whole = read(header, record_window(batch, 0, header))
    assert read(header, record_window(batch, 0, header, max_record_bytes=largest)) == whole
    with pytest.raises(InvalidRecordError, match=f"{largest} exceeds .* size of {largest - 1}"):
        read(header, record_window(batch, 0, header, max_record_bytes=largest - 1))
    # The limit applies only to compressed records; uncompressed records are limited by the batch
    # size.
    plain = encode_batch(records)
    header = parse_header(plain)
    assert read(header, record_window(plain, 0, header, max_record_bytes=1)) == whole


def _body_size(record: LogRecord) -> int:
    """Return the size of a record's encoding without its length field."""
    raw = encode_batch([record])[HEADER_SIZE:]
    return read_varint(raw, 0)[0]


def test_record_above_the_bound_is_refused_before_its_bytes_are_collected() -> None:
    bound = MIB
    batch = encode_batch([LogRecord(0, 5, b"k", bytes(40 * MIB))], codec=Codec.GZIP)
    header = parse_header(batch)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRecordError):
            decoded(header, record_window(batch, 0, header, max_record_bytes=bound))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < bound
