"""The encoder of coordinators' batches gives the same bytes as the general encoder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.logcore.batch import LogRecord, encode_batch, parse_header
from fencepost.logcore.machine import ProducerStamp, Record
from fencepost.logcore.own_batch import own_batch

BYTES = st.binary(max_size=300)


@given(
    rows=st.lists(st.tuples(BYTES, st.none() | BYTES), min_size=1, max_size=5),
    timestamp_ms=st.integers(0, 1 << 42),
    producer=st.none() | st.builds(ProducerStamp, st.integers(0, 1 << 62), st.integers(0, 32_767)),
    stamped=st.booleans(),
)
def test_coordinator_batch_equals_the_general_encoding(
    rows: list[tuple[bytes, bytes | None]],
    timestamp_ms: int,
    producer: ProducerStamp | None,
    stamped: bool,
) -> None:
    records = [Record(*row) for row in rows]
    header, data = own_batch(records, timestamp_ms, producer, log_append_time=stamped)
    assert data == encode_batch(
        [LogRecord(at, timestamp_ms, *row) for at, row in enumerate(rows)],
        producer_id=-1 if producer is None else producer.producer_id,
        producer_epoch=-1 if producer is None else producer.producer_epoch,
        base_sequence=-1 if producer is None else 0,
        transactional=producer is not None,
        log_append_time=stamped,
    )
    assert header == parse_header(data)


def test_coordinator_batch_without_records_is_refused() -> None:
    with pytest.raises(ValueError, match="without records"):
        own_batch([], 0, None, log_append_time=False)
