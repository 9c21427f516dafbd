"""``leader-epoch-checkpoint`` against the log: the file carries no checksum, every batch its epoch.

A wrong number in it would send a consumer back, or past records, that asks where an epoch ended; in
a recovery it would make good batches look damaged. Compared is what a few batch headers tell, at
the first use after an open; only where they disagree is the log walked.

Compaction may have removed the batches at which an epoch begins, or all of it. Then nobody can ask
for an offset in between, and any number between its neighbours is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fencepost.logcore.batch import BatchHeader
from fencepost.logcore.log import Log
from fencepost.logcore.segment import Segment

NO_EPOCH = -1
"""The epoch of what messages of format v0 and v1 were written in."""


def agree(log: Log, log_start_offset: int, entries: Sequence[tuple[int, int]]) -> bool:
    """Whether the headers around the beginning of each epoch, and the last one, say the same.

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
        here = _header_at(log, start)
        if here is None or here.leader_epoch < epoch:
            return False
        if here.leader_epoch > epoch and here.base_offset < following:
            return False
        earlier = _header_at(log, start - 1) if start > log_start_offset else None
        if earlier is not None and earlier.base_offset < start and earlier.leader_epoch > before:
            return False
        before = epoch
    return True


def epochs_of(log: Log, log_start_offset: int) -> list[tuple[int, int]]:
    """(epoch, start offset) pairs as the batch headers tell them.

    Segments in which the epoch does not change are not walked. Raises as :func:`agree`.
    """
    found: list[tuple[int, int]] = []
    segments = [one for one in log.from_offset(log_start_offset) if one.size]
    for at, segment in enumerate(segments):
        latest = found[-1][0] if found else NO_EPOCH
        following = segments[at + 1].header_at(0) if at + 1 < len(segments) else None
        if following is not None and following.leader_epoch == latest:
            continue
        position = segment.locate(max(log_start_offset, segment.base_offset)) or 0
        for _, header, _ in segment.batches(position, with_payload=False):
            if header.leader_epoch > (found[-1][0] if found else NO_EPOCH):
                found.append((header.leader_epoch, max(header.base_offset, log_start_offset)))
    return found


def lowest_epoch(log: Log, segment: Segment, claimed: int) -> int:
    """Return the epoch below which no good batch of ``segment`` can be, as far as is certain.

    The batch before it tells; a file that ``claimed`` a later one is believed if the segment's
    second batch bears it out, for then it is the first one that is damaged. Where the file claims
    an earlier one, either is wrong: no good batch is given up for a number without a checksum.
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
    """The header of the first batch that ends at or behind ``offset``."""
    for segment in log.from_offset(offset):
        position = segment.locate(offset)
        if position is not None:
            return segment.header_at(position)
    return None
