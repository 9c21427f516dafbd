"""A model of a share partition with one entry per record: slow, simple and independent.

The model has no ranges, no flags that save a search and no incremental counts. Random tests compare
it with the state machine after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fencepost.groups.share.batches import StateBatch
from fencepost.groups.share.commands import (
    AcknowledgeBatch,
    AcquireMode,
    AcquireRequest,
    Fetched,
    IsolationLevel,
    ShareSettings,
)

AVAILABLE, ACQUIRED, ACKNOWLEDGED, ARCHIVING, ARCHIVED = range(5)
FINAL = (ACKNOWLEDGED, ARCHIVED)


@dataclass
class Entry:
    """One record."""

    batch: int
    """The first offset of the batch in which the record was first acquired."""
    state: int = AVAILABLE
    count: int = 0
    owner: str | None = None
    deadline_ms: int | None = None
    write: int | None = None
    """The write that the record's transition waits for."""
    previous_owner: str | None = None


class NaivePartition:
    """The model."""

    def __init__(
        self, settings: ShareSettings, start: int, batches: Sequence[StateBatch] = ()
    ) -> None:
        self.settings = settings
        self.records: dict[int, Entry] = {}
        self.batches: dict[int, int] = {}
        """First offset of a batch → its last offset."""
        self.divided: set[int] = set()
        self.start = self.end = start
        self.gap: int | None = None
        self.gap_end: int | None = None
        for batch in batches:
            if self.gap is None and batch.first > (self.end + 1 if self.batches else start):
                self.gap = self.end + 1 if self.batches else start
            self.batches[batch.first] = self.end = batch.last
            for offset in range(batch.first, batch.last + 1):
                self.records[offset] = Entry(batch.first, batch.state, batch.delivery_count)
        if self.gap is not None:
            self.gap_end = self.end
        self.advance()

    # --- inspection ------------------------------------------------------------------------------

    def complete_count(self) -> int:
        return sum(entry.state in FINAL for entry in self.records.values())

    def in_flight(self) -> int:
        return self.end - self.start + 1 if self.records else 0

    def has_gaps(self) -> bool:
        return self.gap is not None and self.gap_end == self.end

    def next_fetch_offset(self) -> int:
        if not self.records:
            return self.end
        for offset in range(self.start, self.end + 1):
            entry = self.records.get(offset)
            if entry is None:
                if self.gap is not None and self.has_gaps() and offset >= self.gap:
                    return offset
            elif entry.state == AVAILABLE and entry.write is None:
                return offset
        return self.end + 1

    # --- acquisition -----------------------------------------------------------------------------

    def acquire(
        self, request: AcquireRequest, fetched: Fetched, now_ms: int
    ) -> list[tuple[int, int, int]]:
        """Return the acquired ranges, as a response lists them."""
        last = fetched.batches[-1].last
        if last < self.start:
            return []
        room = self.settings.max_record_locks - self.in_flight()
        if room > 0:
            room = min(room, request.max_records)
        else:
            room = min(request.max_records, self.end - fetched.fetch_offset + 1)
            last = min(last, self.end)
        if room <= 0:
            return []
        first_read = fetched.batches[0].first
        self.archived = fetched.fetch_offset < first_read
        for offset in range(fetched.fetch_offset, first_read):
            entry = self.records.get(offset)
            if entry is not None and entry.state == AVAILABLE:
                if not self.whole_within(entry.batch, fetched.fetch_offset, first_read - 1):
                    self.divided.add(entry.batch)
                entry.state, entry.write, entry.deadline_ms = ARCHIVED, None, None
        if self.archived:
            self.read_up_to(first_read)
        groups = self._acquire(request, fetched, first_read, last, room, now_ms)
        if groups:
            self.read_up_to(groups[-1][-1] + 1)
        if self.settings.isolation_level is IsolationLevel.READ_COMMITTED:
            groups = self._without_aborted(groups, fetched)
        acquired = [
            (group[0], group[-1], self.records[group[0]].count)
            for whole in groups
            for group in _consecutive(whole, lambda offset: self.records[offset].count)
        ]
        if self.archived:
            self.advance()
        return acquired

    def _acquire(
        self,
        request: AcquireRequest,
        fetched: Fetched,
        first_read: int,
        last: int,
        room: int,
        now_ms: int,
    ) -> list[list[int]]:
        limit = self.settings.delivery_count_limit
        threshold = max(2, -(-limit // 2))
        exact = request.mode is AcquireMode.RECORD_LIMIT
        base = first_read
        holders = [first for first in self.batches if first <= base <= self.batches[first]]
        base = holders[0] if holders else max(base, self.start)
        groups: list[list[int]] = []
        gap_first = base
        known = [first for first in sorted(self.batches) if min(first_read, base) <= first <= last]

        def taken() -> int:
            return sum(len(group) for group in groups)

        for first in known:
            if taken() >= room:
                break
            if self.has_gaps():
                if gap_first < first:
                    groups += self._acquire_new(
                        request, fetched, gap_first, first - 1, room - taken(), now_ms
                    )
                gap_first = self.batches[first] + 1
                if taken() >= room:
                    break
            offsets = [
                offset
                for offset in range(max(first, first_read), min(self.batches[first], last) + 1)
                if (entry := self.records.get(offset)) is not None
                and entry.state == AVAILABLE
                and entry.write is None
            ]
            throttled = any(self.records[offset].count >= threshold for offset in offsets)
            if throttled and taken():
                return groups
            size = self.batches[first] - first + 1
            partial = (
                first in self.divided
                or not self.whole_within(first, first_read, last)
                or (exact and size > room - taken())
                or throttled
            )
            if not offsets:
                continue
            if not partial:
                for offset in offsets:
                    self.take(offset, request.member_id, now_ms)
                groups.append(offsets)
                continue
            groups.append(self._acquire_parts(request, first, offsets, room - taken(), now_ms))
            if throttled:
                return groups
        if taken() < room:
            next_first = self.batches[known[-1]] + 1 if known else base
            groups += self._acquire_new(request, fetched, next_first, last, room - taken(), now_ms)
        return groups

    def _acquire_parts(
        self, request: AcquireRequest, batch: int, offsets: list[int], room: int, now_ms: int
    ) -> list[int]:
        """Acquire available offsets of a batch, up to a limit."""
        self.divided.add(batch)
        limit = self.settings.delivery_count_limit
        threshold = max(2, -(-limit // 2))
        group: list[int] = []
        portion = -1
        for offset in offsets:
            count = self.records[offset].count
            is_last = limit > 2 and count >= limit - 1
            if is_last and group:
                break
            if count >= threshold and portion < 0:
                portion = (self.batches[batch] - batch + 1) >> (count - threshold + 1) or 1
            self.take(offset, request.member_id, now_ms)
            group.append(offset)
            is_full = request.mode is AcquireMode.RECORD_LIMIT and len(group) == room
            if is_last or is_full or len(group) == portion:
                break
        return group

    def _acquire_new(
        self,
        request: AcquireRequest,
        fetched: Fetched,
        first: int,
        last: int,
        room: int,
        now_ms: int,
    ) -> list[list[int]]:
        if last < first:
            return []
        if last - first + 1 > room:
            wanted = first + room - 1
            for batch in fetched.batches:
                if batch.first <= wanted <= batch.last:
                    wanted = batch.last
                    break
            last = min(last, wanted)
        exact = request.mode is AcquireMode.RECORD_LIMIT
        starts = [first]
        if not exact and last - first + 1 > request.batch_size:
            for batch in fetched.batches:
                if batch.first <= last and batch.first - starts[-1] >= request.batch_size:
                    starts.append(batch.first)
        groups = []
        for begin, end in zip(starts, [*starts[1:], last + 1], strict=True):
            self.batches[begin] = end - 1
            for offset in range(begin, end):
                assert offset not in self.records, "a second range for an offset"
                self.records[offset] = Entry(begin)
            offsets = list(range(begin, min(end, begin + room) if exact else end))
            if len(offsets) < end - begin:
                self.divided.add(begin)
            for offset in offsets:
                self.take(offset, request.member_id, now_ms)
            groups.append(offsets)
        if min(self.batches) == first:
            self.start = first
        self.end = max(self.end, last)
        self.read_up_to(groups[-1][-1] + 1)
        return groups

    def read_up_to(self, offset: int) -> None:
        if self.gap is not None and self.has_gaps() and offset <= self.end:
            self.gap = max(self.gap, offset)
        else:
            self.gap = None

    def whole_within(self, batch: int, first: int, last: int) -> bool:
        return first <= batch and self.batches[batch] <= last

    def take(self, offset: int, member: str, now_ms: int) -> None:
        entry = self.records[offset]
        assert entry.state == AVAILABLE
        assert entry.write is None
        entry.state, entry.owner = ACQUIRED, member
        entry.count += 1
        entry.deadline_ms = now_ms + self.settings.record_lock_duration_ms

    def _without_aborted(self, groups: list[list[int]], fetched: Fetched) -> list[list[int]]:
        gone: set[int] = set()
        for batch in fetched.batches:
            if not batch.is_transactional or batch.is_abort_marker:
                continue
            for transaction in fetched.aborted:
                ends = [
                    other.first
                    for other in fetched.batches
                    if other.is_abort_marker
                    and other.producer_id == batch.producer_id
                    and other.first > transaction.first_offset
                ]
                if (
                    transaction.producer_id == batch.producer_id
                    and transaction.first_offset <= batch.last
                    and (not ends or batch.first < min(ends))
                ):
                    gone.update(range(batch.first, batch.last + 1))
        for offset in gone:
            entry = self.records.get(offset)
            if entry is not None and entry.state == ACQUIRED:
                covered = set(range(entry.batch, self.batches[entry.batch] + 1))
                if not covered <= gone:
                    self.divided.add(entry.batch)
                entry.state, entry.owner, entry.deadline_ms = ARCHIVED, None, None
                self.archived = True
        kept = []
        for group in groups:
            kept += _consecutive([offset for offset in group if offset not in gone], lambda _: 0)
        return kept

    # --- ends of acquisitions --------------------------------------------------------------------

    def released(self, entry: Entry) -> int:
        if entry.count < self.settings.delivery_count_limit:
            return AVAILABLE
        return ARCHIVING if self.settings.dead_letter_queue else ARCHIVED

    def acknowledge(
        self, member: str, batches: Sequence[AcknowledgeBatch], write: int, now_ms: int
    ) -> str:
        """Return an error's kind, "ok" if a write must follow, or "none" if no write is needed."""
        changed: list[Entry] = []

        def fail(kind: str) -> str:
            for entry in changed:
                self.undo(entry)
            return kind

        for batch in batches:
            if batch.last < self.start:
                continue
            if not any(first <= batch.first for first in self.batches) and not (
                batch.first < self.start and any(offset <= batch.last for offset in self.records)
            ):
                return fail("state")
            known = [first for first in self.batches if first <= batch.last]
            if not known or self.batches[max(known)] < batch.last:
                return fail("request")
            for offset in range(batch.first, batch.last + 1):
                entry = self.records.get(offset)
                if entry is None:
                    continue
                if entry.state != ACQUIRED or entry.owner != member:
                    return fail("state")
                kind = batch.types[0 if len(batch.types) == 1 else offset - batch.first]
                if kind == 4:
                    if not self.settings.renew_acknowledge_enabled:
                        return fail("state")
                    entry.deadline_ms = now_ms + self.settings.record_lock_duration_ms
                else:
                    entry.write, entry.previous_owner, entry.owner = write, member, None
                    entry.state = {
                        0: ARCHIVED,
                        1: ACKNOWLEDGED,
                        2: self.released(entry),
                        3: ARCHIVING if self.settings.dead_letter_queue else ARCHIVED,
                    }[kind]
                    changed.append(entry)
                if len(batch.types) > 1 or not self.whole_within(
                    entry.batch, batch.first, batch.last
                ):
                    self.divided.add(entry.batch)
        return "ok" if changed else "none"

    def release(self, member: str, write: int) -> str:
        changed = False
        for entry in self.records.values():
            if entry.state == ACQUIRED and entry.owner == member:
                entry.write, entry.previous_owner, entry.owner = write, member, None
                entry.state = self.released(entry)
                changed = True
        return "ok" if changed else "none"

    def expire(self, now_ms: int) -> set[int]:
        """End the locks whose deadline has passed, and return the offsets of the locked records."""
        expired = set()
        for offset, entry in self.records.items():
            if entry.state == ACQUIRED and entry.deadline_ms <= now_ms:
                entry.state, entry.owner, entry.deadline_ms = self.released(entry), None, None
                expired.add(offset)
        return expired

    def undo(self, entry: Entry) -> None:
        entry.state, entry.owner = ACQUIRED, entry.previous_owner
        entry.write = entry.previous_owner = None

    def written(self, write: int, *, failed: bool) -> set[int]:
        """Complete a write; return the offsets that go to the dead-letter queue."""
        archiving = set()
        for offset, entry in self.records.items():
            if entry.write == write:
                if failed:
                    self.undo(entry)
                else:
                    entry.write = entry.previous_owner = entry.deadline_ms = None
                    if entry.state == ARCHIVING:
                        archiving.add(offset)
        return archiving

    def dead_lettered(self, first: int, last: int) -> None:
        for offset in range(first, last + 1):
            entry = self.records.get(offset)
            if entry is not None and entry.state == ARCHIVING and entry.write is None:
                entry.state = ARCHIVED

    # --- offsets ---------------------------------------------------------------------------------

    def advance(self) -> None:
        """Move the start offset past final records and compacted holes, up to the first gap."""
        if not self.records:
            return
        for offset in range(self.start, max(self.records) + 1):
            entry = self.records.get(offset)
            if entry is None:
                is_open = self.gap is not None and self.has_gaps() and offset >= self.gap
            else:
                is_open = entry.state not in FINAL or entry.write is not None
            if is_open:
                if offset > self.start:
                    self.forget_below(offset)
                return
        self.forget_below(max(self.records) + 1)
        self.end = self.start

    def forget_below(self, offset: int) -> None:
        self.start = offset
        self.end = max(self.end, offset)
        if self.gap is not None:
            self.gap = max(self.gap, offset)
        for known in [known for known in self.records if known < offset]:
            del self.records[known]
        for first in [first for first in self.batches if self.batches[first] < offset]:
            del self.batches[first]
        self.divided.update(first for first in self.batches if first < offset)

    def log_start_moved(self, offset: int) -> None:
        if offset > self.start:
            self.forget_below(offset)
            self.advance()


def _consecutive(offsets: list[int], mark) -> list[list[int]]:
    """Group consecutive offsets that have the same mark."""
    groups: list[list[int]] = []
    for offset in offsets:
        if groups and groups[-1][-1] + 1 == offset and mark(groups[-1][-1]) == mark(offset):
            groups[-1].append(offset)
        else:
            groups.append([offset])
    return groups
