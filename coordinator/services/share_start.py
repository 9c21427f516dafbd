"""The start offset of a share partition without state: ``share.auto.offset.reset``."""

from __future__ import annotations

from fencepost.coordinator.runtime.turns import completed
from fencepost.groups.share.commands import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation


async def offset_at(log: Partition, timestamp: int) -> int:
    """Return the first offset at or after a timestamp, as ListOffsets finds it."""
    if timestamp == EARLIEST_TIMESTAMP:
        return log.log_start_offset
    if timestamp != LATEST_TIMESTAMP:
        search = log.reader.offset_for_timestamp(timestamp, Isolation.READ_UNCOMMITTED)
        offset = await completed(search)
        if offset is not None:
            return offset.offset
    return log.high_watermark
