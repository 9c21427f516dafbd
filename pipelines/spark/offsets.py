"""Plans of reads, as pure functions of offsets, without a broker.

Offsets are dicts by (topic, partition). In Spark's checkpoint they are ``{"topic": {"0": 12}}``, as
the stock connector writes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from fencepost.pipelines.spark.errors import DataLossError

Partition = tuple[str, int]
Offsets = dict[Partition, int]


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets ``start`` to ``until - 1`` of one topic-partition; one Spark task reads them."""

    topic: str
    partition: int
    start: int
    until: int

    @property
    def size(self) -> int:
        """The number of offsets, and so the largest possible number of records."""
        return self.until - self.start


def to_json(offsets: Offsets) -> dict[str, dict[str, int]]:
    """Return offsets as Spark's checkpoint stores them, sorted so that equal offsets look equal."""
    topics: dict[str, dict[str, int]] = defaultdict(dict)
    for topic, index in sorted(offsets):
        topics[topic][str(index)] = offsets[topic, index]
    return dict(topics)


def from_json(offsets: Mapping[str, Mapping[str, int]]) -> Offsets:
    """Parse offsets as Spark's checkpoint stores them."""
    return {
        (topic, int(index)): offset
        for topic, rows in offsets.items()
        for index, offset in rows.items()
    }


def limit(start: Offsets, latest: Offsets, max_offsets: int) -> Offsets:
    """Return the end of a batch of about ``max_offsets`` offsets, distributed in proportion to lag.

    Every partition with a lag gets at least one offset. Source:
    ``KafkaMicroBatchStream.rateLimit``.
    """
    lags = {part: max(0, until - start.get(part, 0)) for part, until in latest.items()}
    total = sum(lags.values())
    if total <= max_offsets:
        return dict(latest)
    end: Offsets = {}
    for part, lag in lags.items():
        share = lag * max_offsets / total
        granted = max(1, int(share)) if lag else 0
        end[part] = min(start.get(part, 0) + granted, latest[part])
    return end


def ranges(
    start: Offsets,
    end: Offsets,
    *,
    fail_on_data_loss: bool,
    min_partitions: int | None = None,
    max_records: int | None = None,
) -> list[OffsetRange]:
    """Return the ranges between two offsets, one per task.

    A partition that is new in ``end`` is read from offset 0. Raises :class:`DataLossError` for a
    partition that is gone or went backwards.
    """
    gone = sorted(set(start) - set(end))
    if gone and fail_on_data_loss:
        raise DataLossError(f"partitions are gone: {gone}; {DATA_LOSS_HINT}")
    whole: list[OffsetRange] = []
    for part in sorted(end):
        first, until = start.get(part, 0), end[part]
        if until < first and fail_on_data_loss:
            raise DataLossError(
                f"the end of {part[0]}-{part[1]} went back from {first} to {until}, as if"
                f" the topic had been deleted and created again; {DATA_LOSS_HINT}"
            )
        if until > first:
            whole.append(OffsetRange(*part, first, until))
    if max_records is not None:
        whole = [
            piece
            for offset_range in whole
            for piece in _split(offset_range, -(-offset_range.size // max_records))
        ]
    if min_partitions is None or len(whole) >= min_partitions or not whole:
        return whole
    return _split_large(whole, min_partitions)


DATA_LOSS_HINT = "set failOnDataLoss to false to read on with what is left"


def _split_large(whole: list[OffsetRange], min_partitions: int) -> list[OffsetRange]:
    """Split the larger ranges until there are about ``min_partitions``, as evenly as possible.

    Source: ``KafkaOffsetRangeCalculator.getRanges``: small ranges stay whole.
    """
    total = sum(offset_range.size for offset_range in whole)
    parts = {
        offset_range: max(1, round(offset_range.size / total * min_partitions))
        for offset_range in whole
    }
    short = min_partitions - sum(parts.values())
    # The remainder of the rounding goes to the ranges with the largest pieces.
    for offset_range in sorted(whole, key=lambda r: r.size / parts[r], reverse=True)[
        : max(0, short)
    ]:
        parts[offset_range] += 1
    return [piece for offset_range in whole for piece in _split(offset_range, parts[offset_range])]


def _split(offset_range: OffsetRange, parts: int) -> list[OffsetRange]:
    parts = min(max(1, parts), offset_range.size)
    edges = [
        offset_range.start + offset_range.size * number // parts for number in range(parts + 1)
    ]
    return [
        OffsetRange(offset_range.topic, offset_range.partition, first, until)
        for first, until in pairwise(edges)
    ]


def lag(start: Offsets, latest: Offsets) -> int:
    """Return the number of unread offsets."""
    return sum(max(0, until - start.get(part, 0)) for part, until in latest.items())
