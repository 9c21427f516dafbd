"""Records as spans of a batch's bytes equal decoded records, and cause the same errors."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fencepost.logcore.batch import (
    BatchHeader,
    LogRecord,
    decode_records,
    encode_batch,
    parse_header,
    record_bytes,
    with_fewer_records,
)
from fencepost.logcore.compression import Codec
from fencepost.logcore.errors import InvalidRecordError
from fencepost.logcore.record_spans import Span, joined, span_chunks
from fencepost.logcore.record_window import RecordWindow
from tests.unit.logcore.batch_driver import EDITS, MALFORMED, edited, record_lists, with_payload


def _outcome(read):
    try:
        return read()
    except InvalidRecordError:
        return None


def spans_of(header: BatchHeader, raw: bytes) -> list[Span]:
    """Return the spans of all chunks; their positions refer to ``raw``, a single window."""
    return list(chain.from_iterable(span_chunks(header, RecordWindow.over(raw, 0))))


@settings(max_examples=50, deadline=None)
@given(record_lists(), st.sampled_from(list(Codec)), st.none() | st.integers(0, 2**42), st.data())
def test_batch_of_kept_spans_equals_the_encoding_of_the_kept_records(records, codec, horizon, data):
    batch = encode_batch(records, codec=codec, producer_id=7, producer_epoch=1, base_sequence=3)
    header = parse_header(batch)
    raw = record_bytes(batch, 0, header)
    spans = spans_of(header, raw)
    assert [(header.base_offset + span[0], span[2], span[3]) for span in spans] == [
        (record.offset, record.key, record.value is not None) for record in records
    ]
    chosen = sorted(data.draw(st.sets(st.sampled_from(range(len(records))), min_size=1)))
    kept = [records[at] for at in chosen]
    fewer = header._replace(
        base_timestamp=kept[0].timestamp_ms,
        max_timestamp=max(record.timestamp_ms for record in kept),
        record_count=len(kept),
    )
    if horizon is not None:
        fewer = fewer.with_horizon(horizon)
    later = fewer.base_timestamp - header.base_timestamp
    made = with_fewer_records(fewer, [joined(raw, [spans[at] for at in chosen], later)])
    expected = encode_batch(
        kept,
        base_offset=header.base_offset,
        last_offset_delta=header.last_offset_delta,
        codec=codec,
        producer_id=7,
        producer_epoch=1,
        base_sequence=3,
        delete_horizon_ms=horizon,
    )
    assert decode_records(made) == decode_records(expected)
    # A zstd frame written in pieces does not contain its size.
    assert codec is Codec.ZSTD or made == expected


@pytest.mark.parametrize("payload", MALFORMED)
def test_malformed_records_are_refused(payload):
    batch = with_payload(encode_batch([LogRecord(0, 0, b"k", b"v")]), payload)
    header = parse_header(batch)
    with pytest.raises(InvalidRecordError):
        spans_of(header, record_bytes(batch, 0, header))


@settings(max_examples=50, deadline=None)
@given(record_lists(), EDITS)
def test_spans_of_damaged_records_are_accepted_only_if_they_decode(records, edits):
    batch = encode_batch(records)
    header = parse_header(batch)
    raw = edited(record_bytes(batch, 0, header), edits)
    damaged = with_payload(batch, raw)
    header = parse_header(damaged)
    decoded = _outcome(lambda: decode_records(damaged, 0, header))
    spans = _outcome(lambda: spans_of(header, raw))
    if spans is None:
        # Only the decoder accepts a varint that is too large for its integer type.
        return
    assert decoded is not None
    assert [span[2] for span in spans] == [record.key for record in decoded]
