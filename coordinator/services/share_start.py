"""The start offset of a share partition without state: ``share.auto.offset.reset``."""

from __future__ import annotations

from fencepost.coordinator.runtime.background import Pace
from fencepost.groups.share.commands import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation


async def offset_at(log: Partition, timestamp: int) -> int:
    """Return the first offset at or after a timestamp, as ListOffsets finds it."""
    if timestamp == EARLIEST_TIMESTAMP:
        return log.log_start_offset
    if timestamp != LATEST_TIMESTAMP:
        pace = Pace()
        search = log.reader.offset_for_timestamp(timestamp, Isolation.READ_UNCOMMITTED)
        while True:
            try:
                next(search)
            except StopIteration as end:
                if end.value is not None:
                    return int(end.value.offset)
                break
            await pace()
    return log.high_watermark
