"""Acquisition: the choice of the fetched records that go to the fetching member.

A fetch reads whole batches from the next fetch offset on. New offsets are acquired up to the end of
a batch, without reading the records: the client acknowledges offsets without a record as gaps.
In-flight offsets are acquired again if they are available.

Source: ``SharePartition.acquire``, ``ShareFetchUtils.accumulateAcquiredRecords``.
"""

from __future__ import annotations

from collections.abc import Sequence

from fencepost.groups.share.aborted import aborted_ranges, without_ranges
from fencepost.groups.share.commands import (
    AcquiredRange,
    AcquireMode,
    AcquireRequest,
    Fetched,
    FetchedBatch,
    IsolationLevel,
)
from fencepost.groups.share.events import EventKind
from fencepost.groups.share.in_flight import InFlightBatch, Run
from fencepost.groups.share.partition import SharePartition
from fencepost.groups.share.states import (
    MIN_THROTTLE_COUNT,
    Cause,
    PartitionState,
    RecordState,
    throttle_count,
)
from fencepost.logcore.machine import DecisionBuilder


def acquire(
    partition: SharePartition, decision: DecisionBuilder, request: AcquireRequest, fetched: Fetched
) -> list[AcquiredRange]:
    """Acquire records for a member, and return their ranges in ascending order."""
    if partition.state is not PartitionState.ACTIVE or request.max_records <= 0:
        return []
    if fetched.batches[-1].last < partition.start_offset:
        return []
    last, room = _room(partition, request, fetched)
    if room <= 0:
        return []
    acquisition = _Acquisition(partition, decision, request, fetched, last, room)
    acquired = acquisition.run()
    if partition.settings().isolation_level is IsolationLevel.READ_COMMITTED:
        aborted = aborted_ranges(fetched.batches, fetched.aborted)
        archived: list[tuple[int, int]] = []
        for first, last in aborted:
            archived += partition.archive_within(
                first, last, RecordState.ACQUIRED, Cause.TRANSACTION_ABORTED
            )
        acquisition.has_passed_over |= bool(archived)
        acquisition.record_archived(archived, Cause.TRANSACTION_ABORTED)
        acquired = without_ranges(acquired, aborted)
    if acquisition.has_passed_over:
        # Kafka waits for a write, which never comes if archived offsets take all the room.
        partition.advance_start_offset()
    return acquired


def sent_batches(
    batches: Sequence[FetchedBatch], acquired: Sequence[AcquiredRange]
) -> tuple[int, int]:
    """Return which of the batches to send: the index of the first, and the index after the last.

    Whole batches are sent, from the one with the first acquired offset to the one with the last;
    the client drops records that it has not acquired. Source:
    ``ShareFetchUtils.maybeSliceFetchRecords``.
    """
    begin = end = 0
    for index, batch in enumerate(batches):
        if batch.first <= acquired[0].first:
            begin = index
        if batch.first <= acquired[-1].last:
            end = index + 1
    return begin, end


def _room(partition: SharePartition, request: AcquireRequest, fetched: Fetched) -> tuple[int, int]:
    """Return the last offset that may be acquired, and the maximum number of offsets."""
    last = fetched.batches[-1].last
    room = partition.settings().max_record_locks - partition.in_flight_count
    if room > 0:
        return last, min(request.max_records, room)
    # Offsets that are in flight already may be acquired again, but none after the end offset:
    # otherwise many consumers that release records would exceed the limit (KAFKA-19555). If the
    # read ended before the end offset, no offset after the read may be acquired (KAFKA-19808).
    unread = partition.end_offset - fetched.fetch_offset + 1
    return min(last, partition.end_offset), min(request.max_records, unread)


class _Acquisition:
    """One acquisition, until its records are filtered."""

    def __init__(
        self,
        partition: SharePartition,
        decision: DecisionBuilder,
        request: AcquireRequest,
        fetched: Fetched,
        last: int,
        room: int,
    ) -> None:
        self.partition = partition
        self.decision = decision
        self.request = request
        self.fetched = fetched
        self.last = last
        self.room = room
        """The number of offsets that may be acquired. In batch-optimized mode, a batch that exceeds
        the number is acquired as a whole."""
        self.is_record_limit = request.mode is AcquireMode.RECORD_LIMIT
        self.acquired: list[AcquiredRange] = []
        self.count = 0
        self.has_passed_over = False

    def run(self) -> list[AcquiredRange]:
        """Acquire available offsets, in ascending order."""
        partition = self.partition
        first_read = self.fetched.batches[0].first
        self._skip_hole(first_read)
        base = first_read
        floor = partition.records.floor(base)
        if floor is not None and floor.last >= base:
            base = floor.first
        else:
            base = max(base, partition.start_offset)
        in_flight = partition.records.begun_within(min(first_read, base), self.last)
        self._acquire_in_flight(in_flight, base)
        if self.count < self.room:
            next_first = in_flight[-1].last + 1 if in_flight else base
            self._acquire_new(next_first, self.last)
        if self.acquired:
            partition.gaps_read_up_to(self.acquired[-1].last + 1)
        return self.acquired

    def _skip_hole(self, first_read: int) -> None:
        """Handle the offsets from the fetch offset to ``first_read``, where the log has no batch.

        Available offsets are archived; gaps between the persisted batches count as read.
        """
        first = self.fetched.fetch_offset
        if first < first_read:
            archived = self.partition.archive_within(
                first, first_read - 1, RecordState.AVAILABLE, Cause.NO_RECORD
            )
            self.record_archived(archived, Cause.NO_RECORD)
            self.partition.gaps_read_up_to(first_read)
            self.has_passed_over = True

    def record_archived(self, ranges: Sequence[tuple[int, int]], cause: Cause) -> None:
        """Record in the event history that offsets have no record to deliver."""
        kind = EventKind.SHARE_RECORDS_GIVEN_UP
        self.partition.record_ranges(self.decision, kind, ranges, cause=cause.value)

    def _acquire_in_flight(self, batches: Sequence[InFlightBatch], base: int) -> None:
        first_read = self.fetched.batches[0].first
        gap_first = base
        for batch in batches:
            if self.count >= self.room:
                return
            if self.partition.has_gaps:
                if gap_first < batch.first:
                    self._acquire_new(gap_first, batch.first - 1)
                gap_first = batch.last + 1
                if self.count >= self.room:
                    return
            is_throttled = self._is_throttled(batch, first_read)
            if is_throttled and self.count > 0:
                # A throttled batch must be the first batch of a response, so this acquisition ends
                # before it.
                self.room = 0
                return
            is_partial = (
                batch.is_divided
                or not batch.lies_within(first_read, self.last)
                or (self.is_record_limit and batch.size > self.room - self.count)
            )
            if not is_partial and not is_throttled:
                self._acquire_whole(batch.runs[0])
            elif self._acquire_parts(batch, first_read) and is_throttled:
                self.room = 0
                return

    def _is_throttled(self, batch: InFlightBatch, first_read: int) -> bool:
        threshold = throttle_count(self.partition.settings().delivery_count_limit)
        return any(
            run.is_available and run.count >= threshold
            for run in batch.overlapping(first_read, self.last)
        )

    def _acquire_whole(self, run: Run) -> None:
        if run.is_available:
            self._acquire_run(run)
            self._add_range(AcquiredRange(run.first, run.last, run.count))

    def _acquire_parts(self, batch: InFlightBatch, first_read: int) -> int:
        """Acquire available offsets of a batch inside the fetched range; return their number.

        Records near the delivery limit are acquired in smaller portions: half of the batch, then a
        quarter and so on, and on the last attempt each record alone. Thus a record that crashes its
        consumers does not cause the other records to be archived.
        """
        limit = self.partition.settings().delivery_count_limit
        threshold = throttle_count(limit)
        portion: int | None = None
        count, room = 0, self.room - self.count
        acquired: list[AcquiredRange] = []
        first = first_read
        while (run := batch.next_available(first, self.last)) is not None:
            batch.is_divided = True
            is_last_attempt = limit > MIN_THROTTLE_COUNT and run.count >= limit - 1
            if is_last_attempt and count > 0:
                break
            if portion is None and run.count >= threshold:
                portion = max(1, batch.size >> (run.count - threshold + 1))
            begin = max(run.first, first)
            size = min(run.last, self.last) - begin + 1
            if is_last_attempt:
                size = 1
            if self.is_record_limit:
                size = min(size, room - count)
            # As in Kafka, the portion has no effect if records with lower delivery counts have
            # already filled it.
            if portion is not None and count < portion:
                size = min(size, portion - count)
            (part,) = batch.carve(begin, begin + size - 1)
            self._acquire_run(part)
            _extend(acquired, AcquiredRange(part.first, part.last, part.count))
            count += size
            is_full = count == portion or (self.is_record_limit and count == room)
            if is_last_attempt or is_full:
                break
            first = part.last + 1
        for entry in acquired:
            self._add_range(entry)
        return count

    def _acquire_run(self, run: Run) -> None:
        self.partition.change(run, RecordState.ACQUIRED, Cause.FETCHED)
        run.count += 1
        self.partition.lock(self.decision, run, self.request.member_id)

    def _add_range(self, entry: AcquiredRange) -> None:
        self.acquired.append(entry)
        self.count += entry.size

    def _acquire_new(self, first: int, last: int) -> None:
        """Acquire offsets that are not in flight, up to the end of a batch of the log."""
        partition, room = self.partition, self.room - self.count
        if last < first:
            return
        if room < last - first + 1:
            last = min(last, _batch_end(self.fetched.batches, first + room - 1))
        acquired_last = min(last, first + room - 1) if self.is_record_limit else last
        begin = first
        for begin_next in (*self._split_points(first, last), last + 1):
            run = Run(begin, begin_next - 1, RecordState.AVAILABLE, 0)
            batch = partition.records.add(run)
            if acquired_last < run.last:
                # The remaining offsets of the log's batch are in flight and available.
                (run,) = batch.carve(begin, acquired_last)
                partition.may_be_available = True
            self._acquire_run(run)
            self._add_range(AcquiredRange(run.first, run.last, run.count))
            begin = begin_next
        if partition.records.first.first == first:
            # The log has no record between the start offset and this batch.
            partition.start_offset = first
        partition.end_offset = max(partition.end_offset, last)
        partition.gaps_read_up_to(acquired_last + 1)

    def _split_points(self, first: int, last: int) -> list[int]:
        """Return where to divide a range: at batch boundaries, after ``BatchSize`` offsets each."""
        cuts: list[int] = []
        if self.is_record_limit or last - first + 1 <= self.request.batch_size:
            return cuts
        begin = first
        for batch in self.fetched.batches:
            if begin + self.request.batch_size <= batch.first <= last:
                cuts.append(batch.first)
                begin = batch.first
        return cuts


def _batch_end(batches: Sequence[FetchedBatch], offset: int) -> int:
    """Return the last offset of the batch that contains ``offset``, or the offset itself."""
    return next((batch.last for batch in batches if batch.first <= offset <= batch.last), offset)


def _extend(acquired: list[AcquiredRange], entry: AcquiredRange) -> None:
    """Append an entry, or extend the last one if the entry continues it (KAFKA-19957)."""
    if acquired:
        last = acquired[-1]
        if last.last + 1 == entry.first and last.delivery_count == entry.delivery_count:
            acquired[-1] = last._replace(last=entry.last)
            return
    acquired.append(entry)
