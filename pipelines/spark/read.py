"""Reads one range of one topic-partition into Arrow record batches, in a Spark task.

``read_committed`` is exact: control batches and the batches of aborted transactions count as
progress and yield no rows. Source of the rule: Kafka's ``CompletedFetch``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from kio.schema.errors import ErrorCode

from fencepost.logcore.batch import (
    LOG_OVERHEAD,
    BatchHeader,
    ControlType,
    decode_records,
    parse_control,
    parse_header,
    record_bytes,
    verify_crc,
)
from fencepost.pipelines.spark.broker import (
    EARLIEST,
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    RETRY_PAUSE_S,
    ClusterConnection,
    FetchedRecords,
)
from fencepost.pipelines.spark.columns import HEADERS, Columns, decode
from fencepost.pipelines.spark.errors import BrokerError, DataLossError
from fencepost.pipelines.spark.offsets import DATA_LOSS_HINT, OffsetRange
from fencepost.pipelines.spark.options import SourceOptions
from fencepost.pipelines.spark.worker import prompt, settle

FETCH_WAIT_MS = 500
MOST_MS = ((1 << 63) - 1) // 1000
"""The largest timestamp of a record: Spark counts microseconds in 64 bits."""
GROUP_BYTES = 4 * 1024 * 1024
"""The size of encoded records for one Arrow batch: small enough for a worker, and large enough to
make the cost per batch negligible."""

_log = logging.getLogger(__name__)

Group = list[tuple[BatchHeader, bytes]]


def arrow_schema(*, with_headers: bool) -> pa.Schema:
    """Return the columns of the stock Kafka source."""
    fields = [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("timestampType", pa.int32()),
    ]
    if with_headers:
        fields.append(pa.field("headers", HEADERS))
    return pa.schema(fields)


def ddl(*, with_headers: bool) -> str:
    """Return the columns of :func:`arrow_schema` as a Spark schema in DDL."""
    text = (
        "key binary, value binary, topic string, partition int, offset bigint,"
        " timestamp timestamp, timestampType int"
    )
    return text + (", headers array<struct<key: string, value: binary>>" if with_headers else "")


class Aborted:
    """The aborted transactions in one Fetch response."""

    def __init__(self, aborted: tuple[tuple[int, int], ...]) -> None:
        self._pending = sorted(aborted, reverse=True)
        self._now: set[int] = set()

    def hides(self, header: BatchHeader, data: Any, pos: int) -> bool:
        """Return whether the batch at ``pos`` yields no records; call it for batches in order."""
        while self._pending and self._pending[-1][0] <= header.last_offset:
            self._now.add(self._pending.pop()[1])
        if header.is_control:
            for record in decode_records(data, pos, header):
                if parse_control(record).type is ControlType.ABORT:
                    self._now.discard(header.producer_id)
            return True
        return header.is_transactional and header.producer_id in self._now


def read_range(options: SourceOptions, offset_range: OffsetRange) -> Iterator[pa.RecordBatch]:
    """Yield all visible records of ``offset_range``.

    Raises :class:`DataLossError` if a part of it is gone and the options do not permit that.
    """
    prompt()
    link = options.link
    position = offset_range.start
    patience = options.timeout_ms / 1000
    stuck_until = time.monotonic() + patience
    while position < offset_range.until:
        before = position
        answer = link.fetch(
            (offset_range.topic, offset_range.partition),
            position,
            isolation=options.isolation,
            max_bytes=options.fetch_bytes,
            wait_ms=FETCH_WAIT_MS,
        )
        if answer.error:
            position = _after_error(link, options, offset_range, position, answer)
            if position == before:
                time.sleep(RETRY_PAUSE_S)
        else:
            for group, behind in _groups(answer, before, offset_range.until, options.isolation):
                position = behind
                batch = _arrow(group, offset_range, before, with_headers=options.include_headers)
                if batch.num_rows:
                    yield batch
        if position > before:
            stuck_until = time.monotonic() + patience
        elif time.monotonic() > stuck_until:
            position = _when_stuck(link, options, offset_range, position, answer)
    settle()


def _after_error(
    link: ClusterConnection,
    options: SourceOptions,
    offset_range: OffsetRange,
    position: int,
    answer: FetchedRecords,
) -> int:
    """Return the next position after an error response, or raise the error."""
    name = f"{offset_range.topic}-{offset_range.partition}"
    if answer.error is ErrorCode.unknown_topic_or_partition:
        return position  # retry until the timeout: a starting broker does not know its topics yet
    if answer.error is not ErrorCode.offset_out_of_range:
        raise BrokerError(f"Fetch of {name} at {position}: {answer.error.name.upper()}")
    part = offset_range.topic, offset_range.partition
    first = link.list_offsets({part: EARLIEST}, options.isolation)[part]
    if first > position:
        return _skip(
            options,
            min(first, offset_range.until),
            f"{name}: offset {position} is not there; the log begins at {first}. Records up to"
            f" {min(first, offset_range.until) - 1} were deleted before they were read",
        )
    end = link.list_offsets({part: LATEST}, READ_UNCOMMITTED)[part]
    if position <= end:
        return position  # the records are available again
    return _skip(options, offset_range.until, _ends_early(offset_range, end))


def _when_stuck(
    link: ClusterConnection,
    options: SourceOptions,
    offset_range: OffsetRange,
    position: int,
    answer: FetchedRecords,
) -> int:
    """Return the next position after the timeout without progress, or raise the error."""
    name = f"{offset_range.topic}-{offset_range.partition}"
    if answer.error is ErrorCode.unknown_topic_or_partition:
        raise BrokerError(
            f"{name} has been missing for {options.timeout_ms / 1000:.0f} s, and the batch"
            f" contains its offsets {position} to {offset_range.until - 1}. Was it deleted? Once"
            " it is created again, failOnDataLoss=false continues with its records;"
            " otherwise begin with a new checkpoint"
        )
    part = offset_range.topic, offset_range.partition
    end = link.list_offsets({part: LATEST}, READ_UNCOMMITTED)[part]
    if end >= offset_range.until:
        raise BrokerError(
            f"{name}: nothing came from offset {position} on for {options.timeout_ms / 1000:.0f} s;"
            f" the last stable offset is {answer.stable}, the end {end}"
        )
    return _skip(options, offset_range.until, _ends_early(offset_range, end))


def _ends_early(offset_range: OffsetRange, end: int) -> str:
    return (
        f"{offset_range.topic}-{offset_range.partition} ends at {end}, but the query was promised"
        f" records up to {offset_range.until}, as if the topic had been deleted and created again"
    )


def _skip(options: SourceOptions, to: int, what: str) -> int:
    """Skip lost records, if the options permit it."""
    if options.fail_on_data_loss:
        raise DataLossError(f"{what}; {DATA_LOSS_HINT}")
    _log.warning("%s; going on at %d", what, to)
    return to


def _groups(
    answer: FetchedRecords, position: int, until: int, isolation: int
) -> Iterator[tuple[Group, int]]:
    """Yield the visible batches of a response in groups, each with the position after it."""
    aborted = Aborted(answer.aborted if isolation == READ_COMMITTED else ())
    data = answer.records
    group: Group = []
    size = pos = 0
    # The last batch of a response may be incomplete, even within its length field.
    while position < until and len(data) - pos > LOG_OVERHEAD:
        length = int.from_bytes(data[pos + 8 : pos + LOG_OVERHEAD], "big") + LOG_OVERHEAD
        if length > len(data) - pos:
            break
        header = parse_header(data, pos)
        verify_crc(data, pos, header)
        hidden = (
            aborted.hides(header, data, pos) if isolation == READ_COMMITTED else header.is_control
        )
        if not hidden and header.next_offset > position and header.record_count:
            payload = record_bytes(data, pos, header)
            group.append((header, payload))
            size += len(payload)
        position = max(position, min(header.next_offset, until))
        pos += header.size
        if size >= GROUP_BYTES:
            yield group, position
            group, size = [], 0
    yield group, position


def _arrow(
    group: Group, offset_range: OffsetRange, start: int, *, with_headers: bool
) -> pa.RecordBatch:
    """Return a group's rows from ``start`` on, up to the end of the range."""
    schema = arrow_schema(with_headers=with_headers)
    if not group:
        return pa.RecordBatch.from_pylist([], schema)
    columns = decode(group, with_headers=with_headers)
    types = np.repeat(
        np.array([int(header.is_log_append_time) for header, _ in group], np.int32),
        [header.record_count for header, _ in group],
    )
    batch = _columns(columns, offset_range, types, schema)
    keep = (columns.offsets >= start) & (columns.offsets < offset_range.until)
    return batch if keep.all() else batch.filter(pa.array(keep))


def _columns(
    data: Columns, offset_range: OffsetRange, types: Any, schema: pa.Schema
) -> pa.RecordBatch:
    count = len(data.offsets)
    columns = [
        data.keys,
        data.values,
        pa.repeat(pa.scalar(offset_range.topic, pa.string()), count),
        pa.array(np.full(count, offset_range.partition, np.int32)),
        pa.array(data.offsets),
        _micros(data.timestamps_ms),
        pa.array(types),
    ]
    if data.headers is not None:
        columns.append(data.headers)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _micros(stamps_ms: Any) -> pa.Array:
    """Return Spark's timestamps; null if one does not fit, such as nanoseconds taken for ms."""
    unfit = (stamps_ms > MOST_MS) | (stamps_ms < -MOST_MS)
    has_unfit = unfit.any()
    micros = np.where(unfit, 0, stamps_ms) * 1000 if has_unfit else stamps_ms * 1000
    return pa.array(micros, mask=unfit if has_unfit else None).cast(pa.timestamp("us", tz="UTC"))
