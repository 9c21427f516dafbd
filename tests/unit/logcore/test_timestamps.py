"""Lookups by timestamp in compressed batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fencepost.logcore.compression import Codec
from fencepost.logcore.errors import InvalidRecordError
from fencepost.logcore.reading import Isolation
from fencepost.logcore.timestamps import TimestampOffset
from fencepost.protocol.steps import finish
from tests.unit.logcore.partition_driver import T0, append, fetch_all, open_partition


def test_lookups_by_timestamp_fail_at_a_record_above_the_decompressed_bound(
    tmp_path: Path,
) -> None:
    partition = open_partition(tmp_path)
    append(partition, 3, size=300, codec=Codec.GZIP)
    append(partition, 3, now_ms=T0 + 10, timestamp_ms=T0 + 10, codec=Codec.GZIP)
    isolation = Isolation.READ_UNCOMMITTED
    body = 300 + 8  # the value's length has two bytes
    whole = partition.log.config
    for bound in (body - 1, body):
        partition.log.config = replace(whole, max_decompressed_message_bytes=bound)
        lookup = partition.reader.offset_for_timestamp(T0 + 1, isolation)
        if bound < body:
            with pytest.raises(InvalidRecordError, match=f"{body} exceeds"):
                finish(lookup)
        else:
            assert finish(lookup) == TimestampOffset(1, T0 + 1, 0)
        # A batch whose header rules out a match is not decompressed.
        later = finish(partition.reader.offset_for_timestamp(T0 + 11, isolation))
        assert later == TimestampOffset(4, T0 + 11, 0)
        assert finish(partition.reader.max_timestamp_offset(isolation)) == TimestampOffset(
            5, T0 + 12, 0
        )
    partition.log.config = replace(whole, max_decompressed_message_bytes=10)
    with pytest.raises(InvalidRecordError):
        finish(partition.reader.max_timestamp_offset(isolation))
    assert fetch_all(partition)
