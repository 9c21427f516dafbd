"""Checks of ``leader-epoch-checkpoint``, which has no checksum, against the epochs in the batches.

With a wrong entry, a consumer that asks for the end of an epoch would go back too far or skip
records, and a recovery would take good batches for damaged ones. The first use after an open
compares the entries with a few batch headers. If they disagree, all batch headers are read.

Compaction may have removed the first batches of an epoch, or all of them. Any start offset between
the neighbouring batches is right then, because the offsets between them hold no records.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fencepost.logcore.batch import BatchHeader
from fencepost.logcore.log import Log
from fencepost.logcore.segment import Segment

NO_EPOCH = -1
"""The epoch of messages of format v0 and v1."""


def agree(log: Log, log_start_offset: int, entries: Sequence[tuple[int, int]]) -> bool:
    """Return whether the entries match the headers around each epoch's start, and the last header.

    Raises OSError, CorruptIndexError, CorruptRecordError.
    """
    last = _header_at(log, log.log_end_offset - 1)
    if last is None or last.next_offset <= log_start_offset:
        return not entries
    if last.leader_epoch != (entries[-1][0] if entries else NO_EPOCH):
        return False
    bounded = (*entries, (last.leader_epoch + 1, log.log_end_offset))
    before = NO_EPOCH
    for (epoch, start), (_, following) in pairwise(bounded):
        if not log_start_offset <= start < log.log_end_offset:
            return False
        this_epoch = _header_at(log, start)
        if this_epoch is None or this_epoch.leader_epoch < epoch:
            return False
        if this_epoch.leader_epoch > epoch and this_epoch.base_offset < following:
            return False
        earlier = _header_at(log, start - 1) if start > log_start_offset else None
        if earlier is not None and earlier.base_offset < start and earlier.leader_epoch > before:
            return False
        before = epoch
    return True


def epochs_of(log: Log, log_start_offset: int) -> list[tuple[int, int]]:
    """Return the (epoch, start offset) pairs according to the batch headers.

    Segments in which the epoch does not change are not walked. Raises as :func:`agree`.
    """
    entries: list[tuple[int, int]] = []
    segments = [segment for segment in log.from_offset(log_start_offset) if segment.size]
    for at, segment in enumerate(segments):
        latest = entries[-1][0] if entries else NO_EPOCH
        following = segments[at + 1].header_at(0) if at + 1 < len(segments) else None
        if following is not None and following.leader_epoch == latest:
            continue
        position = segment.locate(max(log_start_offset, segment.base_offset)) or 0
        for _, header, _ in segment.batches(position, with_payload=False):
            if header.leader_epoch > (entries[-1][0] if entries else NO_EPOCH):
                entries.append((header.leader_epoch, max(header.base_offset, log_start_offset)))
    return entries


def lowest_epoch(log: Log, segment: Segment, claimed: int) -> int:
    """Return a lower bound of the leader epochs in ``segment``.

    ``claimed`` is the epoch at the segment's base offset according to the checkpoint file. Neither
    the file nor a batch's epoch has a checksum, and no wrong value may make a good batch look
    damaged. If ``claimed`` is lower than the epoch of the batch before the segment, one of the two
    is wrong, and the lower one is the bound. If ``claimed`` is higher, the segment's second
    batch decides: if it has at least that epoch, ``claimed`` is the bound, otherwise the epoch of
    the batch before the segment. The first batch cannot decide, as its own epoch may be damaged.
    """
    before = NO_EPOCH
    if segment.base_offset > log.first_offset:
        header = _header_at(log, segment.base_offset - 1)
        if header is not None and header.base_offset < segment.base_offset:
            before = header.leader_epoch
    if claimed <= before or not segment.size:
        return before if claimed == NO_EPOCH else claimed
    second = segment.header_at(0).size
    if second >= segment.size or segment.header_at(second).leader_epoch < claimed:
        return before
    return claimed


def _header_at(log: Log, offset: int) -> BatchHeader | None:
    """Return the header of the first batch that ends at or after ``offset``."""
    for segment in log.from_offset(offset):
        position = segment.locate(offset)
        if position is not None:
            return segment.header_at(position)
    return None
