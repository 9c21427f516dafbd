"""Batches of aborted transactions among fetched records.

Source: ``SharePartition.fetchAbortedTransactionRecordBatches`` and
``filterRecordBatchesFromAcquiredRecords``.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencepost.groups.share.commands import AbortedTransaction, AcquiredRange, FetchedBatch


def aborted_ranges(
    batches: Sequence[FetchedBatch], aborted: Sequence[AbortedTransaction]
) -> list[tuple[int, int]]:
    """Return the offsets of batches that belong to aborted transactions.

    Markers are not among them: they are acquired, and the client reports them as gaps.
    """
    if not aborted:
        return []
    upcoming = sorted(aborted, key=lambda transaction: transaction.first_offset, reverse=True)
    open_producers: set[int] = set()
    ranges: list[tuple[int, int]] = []
    for batch in batches:
        if batch.producer_id < 0:
            continue
        while upcoming and upcoming[-1].first_offset <= batch.last:
            open_producers.add(upcoming.pop().producer_id)
        if batch.is_abort_marker:
            open_producers.discard(batch.producer_id)
        elif batch.is_transactional and batch.producer_id in open_producers:
            ranges.append((batch.first, batch.last))
    return ranges


def without_ranges(
    acquired: Sequence[AcquiredRange], excluded: Sequence[tuple[int, int]]
) -> list[AcquiredRange]:
    """Return the acquired ranges without the excluded offsets; both are in ascending order."""
    remaining: list[AcquiredRange] = []
    for entry in acquired:
        first = entry.first
        for excluded_first, excluded_last in excluded:
            if excluded_last < first or excluded_first > entry.last:
                continue
            if excluded_first > first:
                remaining.append(AcquiredRange(first, excluded_first - 1, entry.delivery_count))
            first = excluded_last + 1
        if first <= entry.last:
            remaining.append(AcquiredRange(first, entry.last, entry.delivery_count))
    return remaining
