"""A partition's segments in the order of their offsets: append, roll, read, truncate, remove.

A ``Log`` knows files and offsets; producers, epochs and the high watermark belong to its owner
(``partition.py``). Reads return bytes of one segment at a time, whole batches only.

Source: ``LocalLog``, ``LogSegments``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from sortedcontainers import SortedDict

from fencepost.logcore.batch import BatchHeader
from fencepost.logcore.config import LogConfig
from fencepost.logcore.disk_steps import DiskSteps, run_blocking
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.file_range import FileRange
from fencepost.logcore.flush import Flush, FlushQueue
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.index import MappedIndexes
from fencepost.logcore.legacy import RUN_BYTES
from fencepost.logcore.segment import (
    LOG_SUFFIX,
    SEGMENT_SUFFIXES,
    TXN_INDEX_SUFFIX,
    Segment,
    file_stem,
)
from fencepost.logcore.system import ReadableBuffer

CLEANED_SUFFIX: Final = ".cleaned"
SWAP_SUFFIX: Final = ".swap"
DELETED_SUFFIX: Final = ".deleted"
SNAPSHOT_SUFFIX: Final = ".snapshot"


class ReadBytes(NamedTuple):
    """Whole batches, and the offset below which the reader has now seen all records."""

    records: bytes | FileRange
    upper_bound: int
    is_behind: bool = False
    """Whether the limit lies in a later segment; a read never continues into the next one."""


class Log:
    """Segments by base offset. The last one is active, always exists, and takes the appends."""

    def __init__(
        self, fs: FileSystem, directory: str, name: str, config: LogConfig, now_ms: int
    ) -> None:
        self._fs = fs
        self.directory = directory
        self._name = name
        self.config = config
        self._now_ms = now_ms
        self._segments: SortedDict[int, Segment] = SortedDict()
        self._active: Segment | None = None
        """Cache of the last segment, set on first use."""
        self._roll_after: tuple[LogConfig, Segment | None, int] = config, None, 0
        """Cache of :meth:`_roll_after_ms`: its configuration and segment, and the age limit."""
        self._mapped_indexes = MappedIndexes()
        self._files_to_delete: list[tuple[int, str]] = []
        self.remove_later: Callable[[str], None] | None = None
        """Removes a file in the background: a file system may take long to free a large one."""
        self.log_end_offset = 0
        self.directory_changed = False
        """Whether files were created, renamed or removed since the directory was last synced."""
        self.flushes = FlushQueue()
        self.sealed: list[Segment] = []
        """Segments whose indexes no flush has forced to disk yet."""
        self.truncation_count = 0
        """How often the log was truncated; records that were read before may be gone."""

    # --- segments ---

    @property
    def active(self) -> Segment:
        """The segment that takes appends."""
        active = self._active
        if active is None:
            active = self._active = self._segments.peekitem()[1]
        return active

    @property
    def segments(self) -> list[Segment]:
        """All segments, oldest first."""
        return list(self._segments.values())

    @property
    def is_empty(self) -> bool:
        """Whether the log has no segment; true only while it is being loaded."""
        return not self._segments

    @property
    def first_offset(self) -> int:
        """Base offset of the oldest segment."""
        offset: int = self._segments.keys()[0]
        return offset

    @property
    def segment_count(self) -> int:
        """The number of segments."""
        return len(self._segments)

    @property
    def size_bytes(self) -> int:
        """The total size of the log files in bytes."""
        return sum(segment.size for segment in self._segments.values())

    def open_segment(self, base_offset: int, *, has_txn_index: bool) -> Segment:
        """Open a segment that is on disk and add it."""
        segment = Segment(
            self._fs,
            self.directory,
            base_offset,
            self.config,
            created_ms=self._now_ms,
            has_txn_index=has_txn_index,
            mapped_indexes=self._mapped_indexes,
        )
        self._segments[base_offset] = segment
        self._active = None
        return segment

    def create_segment(self, base_offset: int, now_ms: int) -> Segment:
        """Add an empty segment, which becomes the active one."""
        segment = Segment(
            self._fs,
            self.directory,
            base_offset,
            self.config,
            created_ms=now_ms,
            fresh=True,
            preallocate_bytes=self.config.segment_bytes if self.config.preallocate else 0,
            mapped_indexes=self._mapped_indexes,
        )
        self._segments[base_offset] = segment
        self._active = None
        self.directory_changed = True
        return segment

    def from_offset(self, offset: int) -> list[Segment]:
        """Return the segment that may hold ``offset``, and all later segments."""
        active = self._active
        if active is not None and offset >= active.base_offset:
            return [active]
        index = max(self._segments.bisect_right(offset) - 1, 0)
        return list(self._segments.values()[index:])

    def end_of(self, segment: Segment) -> int:
        """Return the offset after a segment of this log: the next one's base, or the log end."""
        slot = self._segments.bisect_right(segment.base_offset)
        return self._segments.keys()[slot] if slot < len(self._segments) else self.log_end_offset

    def end_before(self, offset: int) -> int:
        """Return the log end after a truncation to ``offset``, which must be in the log."""
        segment: Segment = self._segments.values()[self._floor(offset)]
        try:
            return segment.end_before(offset)
        except CorruptRecordError:
            return segment.base_offset

    def _floor(self, offset: int) -> int:
        return max(int(self._segments.bisect_right(offset)) - 1, 0)

    # --- appending ---

    def must_roll(
        self, incoming_bytes: int, last_offset: int, max_timestamp: int, now_ms: int
    ) -> bool:
        """Return whether the batch must go to a new segment (``LogSegment.shouldRoll``)."""
        segment = self.active
        size = segment.size
        if size == 0:
            # A roll would only replace the empty segment with another one.
            return not segment.can_hold(last_offset)
        config = self.config
        return (
            size > config.segment_bytes - incoming_bytes
            or segment.age_ms(max_timestamp, now_ms) > self._roll_after_ms(segment)
            or segment.indexes_full
            or not segment.can_hold(last_offset)
        )

    def _roll_after_ms(self, segment: Segment) -> int:
        """Return :meth:`LogConfig.roll_after_ms`, cached for all appends to a segment."""
        config, cached, roll_after_ms = self._roll_after
        if config is not self.config or cached is not segment:
            roll_after_ms = self.config.roll_after_ms(self._name, segment.base_offset)
            self._roll_after = self.config, segment, roll_after_ms
        return roll_after_ms

    def roll(self, now_ms: int) -> Segment:
        """Seal the active segment and begin a new one at the log end."""
        active = self.active
        if active.base_offset == self.log_end_offset:
            return active
        active.seal()
        segment = self.create_segment(self.log_end_offset, now_ms)
        self.sealed.append(active)
        return segment

    def append(
        self,
        buffers: Sequence[ReadableBuffer],
        size: int,
        last_offset: int,
        max_timestamp: int,
        active: Segment,
    ) -> None:
        """Write one batch that begins at the log end."""
        active.append(buffers, size, self.log_end_offset, last_offset, max_timestamp)
        self.log_end_offset = last_offset + 1

    def skip_to(self, offset: int, now_ms: int) -> Segment:
        """Replace the empty active segment, which cannot index ``offset``, with one that can."""
        self.remove([self.active], now_ms=now_ms, delay_ms=0)
        return self.create_segment(offset, now_ms)

    def append_run(
        self, data: ReadableBuffer, headers: Sequence[BatchHeader], active: Segment
    ) -> None:
        """Write the consecutive batches in ``data``; their offsets may leave gaps."""
        active.append_run(data, headers)
        self.log_end_offset = headers[-1].next_offset

    # --- reading ---

    def read(
        self,
        offset: int,
        max_bytes: int,
        limit: int,
        *,
        at_least_one: bool,
        min_range_bytes: int,
    ) -> ReadBytes:
        """Read whole batches below ``limit``; the first is the one that holds ``offset``.

        ``limit`` is a batch boundary. A result of ``min_range_bytes`` or more is a range of the
        file instead of bytes. The result is empty when nothing is below the limit, or (without
        ``at_least_one``) nothing fits. The caller has checked that ``offset`` is between log start
        and log end.
        """
        if offset >= limit:
            return ReadBytes(b"", offset)
        count = len(self._segments)
        active = self.active
        # Most readers are in the active segment, which needs no search.
        slot = count - 1 if offset >= active.base_offset else self._floor(offset)
        while slot < count:
            segment = active if slot == count - 1 else self._segments.values()[slot]
            slot += 1
            start = segment.locate(offset)
            if start is None:
                continue
            next_base = self._segments.keys()[slot] if slot < count else self.log_end_offset
            end = segment.size
            if limit < next_base:
                located = segment.locate(limit)
                end = segment.size if located is None else located
            if start >= end:
                break
            if not segment.is_v2_from(start):
                # Messages of format v0 and v1 are converted on the event loop: read only a few.
                at_least_one = at_least_one or segment.batch_size(start) <= max_bytes
                max_bytes = min(max_bytes, RUN_BYTES)
            stop, bound = self._range(
                segment, start, end, max_bytes, min(limit, next_base), at_least_one
            )
            is_behind = slot < count and limit >= next_base
            if stop == start:
                return ReadBytes(b"", bound, is_behind)
            records = segment.read_batches(start, stop, min_range_bytes)
            return ReadBytes(records, bound, is_behind)
        return ReadBytes(b"", offset)

    @staticmethod
    def _range(
        segment: Segment, start: int, end: int, max_bytes: int, limit: int, at_least_one: bool
    ) -> tuple[int, int]:
        """Return the end position of the batches to read, and the offset after them."""
        stop, upper_bound = segment.boundary(start, max_bytes, end)
        if stop == start:
            if not at_least_one:
                return start, limit
            stop = start + segment.batch_size(start)
            upper_bound = None
        if upper_bound is None:
            upper_bound = limit
        else:
            segment.hint(upper_bound, stop)
        return stop, upper_bound

    def bytes_between(self, offset: int, limit: int) -> int:
        """Count the bytes that a reader at ``offset`` can read below the boundary ``limit``."""
        if offset >= limit:
            return 0
        total = 0
        for segment in self.from_offset(offset):
            if segment.base_offset >= limit:
                break
            start = 0 if segment.base_offset > offset else segment.locate(offset)
            if start is None:
                continue
            end = segment.locate(limit) if limit < self.log_end_offset else None
            total += (segment.size if end is None else end) - start
        return total

    def aborted_between(self, offset: int, upper_bound: int) -> list[tuple[int, int]]:
        """Return (producer id, first offset) of aborted transactions in [offset, upper bound)."""
        aborted: list[tuple[int, int]] = []
        for segment in self.from_offset(offset):
            if segment.txn_index.collect(offset, upper_bound, aborted):
                break
        return aborted

    def batches(
        self, offset: int = 0, *, with_payload: bool = True
    ) -> Iterator[tuple[int, BatchHeader, memoryview]]:
        """Yield position, header and bytes of each batch, beginning with the one at ``offset``."""
        for segment in self.from_offset(offset):
            position = segment.locate(offset)
            if position is not None:
                yield from segment.batches(position, with_payload=with_payload)

    # --- truncation ---

    def truncate_to(self, offset: int) -> None:
        """Remove the batch that holds ``offset`` and all later ones; the log then ends there.

        Later segments are removed first, from the end, so that a kill in between leaves no hole.
        """
        self._cut(offset)
        for segment in reversed(self.segments):
            if segment.base_offset > offset:
                self.remove([segment], now_ms=0, delay_ms=0)
        active = self.active
        active.truncate_to(offset)
        if offset < self.log_end_offset:
            # Not ``offset``: a gap before the next batch would look like lost data to recovery.
            self.log_end_offset = active.next_offset()

    def restart_at(self, offset: int, now_ms: int) -> None:
        """Remove all records and restart at ``offset``."""
        self._cut(offset)
        self.remove(list(reversed(self.segments)), now_ms=now_ms, delay_ms=0)
        self.log_end_offset = offset
        self.create_segment(offset, now_ms)

    def _cut(self, offset: int) -> None:
        self.truncation_count += 1
        self.flushes.cut(offset)

    def remove(self, segments: Iterable[Segment], *, now_ms: int, delay_ms: int) -> None:
        """Run :meth:`removing` in this thread."""
        run_blocking(self.remove_in_steps(segments, now_ms=now_ms, delay_ms=delay_ms))

    def remove_in_steps(
        self, segments: Iterable[Segment], *, now_ms: int, delay_ms: int
    ) -> DiskSteps[None]:
        """Take segments out of the log; rename their files now, remove them after the delay.

        All log files are removed first, durably, so that none of them can remain without its
        indexes: once earlier records are gone, the indexes cannot be rebuilt. The next load
        removes indexes and snapshots that have no log file.
        """
        removed = list(segments)
        for segment in removed:
            del self._segments[segment.base_offset]
            self._active = None
            segment.close()
            self._remove_file(segment.stem + LOG_SUFFIX, now_ms, delay_ms)
        if removed:
            yield partial(self._fs.sync_directory, self.directory)
        for segment in removed:
            self.directory_changed = True
            for suffix in (*SEGMENT_SUFFIXES[1:], SNAPSHOT_SUFFIX):
                self._remove_file(segment.stem + suffix, now_ms, delay_ms)

    def set_aside(self, segment: Segment, path: str) -> None:
        """Take a segment out of the log, rename its log file to ``path``, remove its other files.

        The rename is durable before the other files are removed.
        """
        del self._segments[segment.base_offset]
        self._active = None
        segment.close()
        self._fs.rename(segment.path, path)
        self._fs.sync_directory(self.directory)
        self.directory_changed = True
        for suffix in (*SEGMENT_SUFFIXES[1:], SNAPSHOT_SUFFIX):
            self._fs.remove(segment.stem + suffix)

    def holds(self, segments: Iterable[Segment]) -> bool:
        """Return whether these very segment objects are still part of the log."""
        return all(self._segments.get(segment.base_offset) is segment for segment in segments)

    def replace(
        self,
        old: Sequence[Segment],
        base_offset: int,
        suffixes: Sequence[str],
        *,
        now_ms: int,
        delay_ms: int,
    ) -> None:
        """Replace the neighbouring segments ``old`` with the ``.cleaned`` files of one segment.

        As ``LocalLog.replaceSegments``: ``.cleaned`` becomes ``.swap``, the old files ``.deleted``,
        and ``.swap`` loses its suffix; ``recovery.py`` finishes or undoes an interrupted
        replacement. The directory is synced before the old files are renamed, and before the new
        ones take their names: power loss may reorder unsynced renames.
        """
        stem = f"{self.directory}/{file_stem(base_offset)}"
        for suffix in suffixes:
            self._fs.rename(stem + suffix + CLEANED_SUFFIX, stem + suffix + SWAP_SUFFIX)
        self._fs.sync_directory(self.directory)
        for segment in old:
            segment.retire()
            del self._segments[segment.base_offset]
            self._active = None
            # The snapshot at the beginning of the new segment stays valid.
            also = () if segment.base_offset == base_offset else (SNAPSHOT_SUFFIX,)
            for suffix in (*SEGMENT_SUFFIXES, *also):
                self._remove_file(segment.stem + suffix, now_ms, delay_ms)
        self._fs.sync_directory(self.directory)
        for suffix in suffixes:
            self._fs.rename(stem + suffix + SWAP_SUFFIX, stem + suffix)
        self._fs.sync_directory(self.directory)
        self.directory_changed = False
        self.open_segment(base_offset, has_txn_index=TXN_INDEX_SUFFIX in suffixes)

    def _remove_file(self, path: str, now_ms: int, delay_ms: int) -> None:
        if delay_ms <= 0 and self.remove_later is None:
            self._fs.remove(path)
            return
        try:
            self._fs.rename(path, path + DELETED_SUFFIX)
        except FileNotFoundError:
            return
        if delay_ms <= 0 and self.remove_later is not None:
            self.remove_later(path + DELETED_SUFFIX)
        else:
            self._files_to_delete.append((now_ms + delay_ms, path + DELETED_SUFFIX))

    def remove_deleted_files(self, now_ms: int | None) -> None:
        """Remove the ``.deleted`` files whose delay has passed, or all if ``now_ms`` is None."""
        waiting = []
        remove = self.remove_later or self._fs.remove
        for due_ms, path in self._files_to_delete:
            if now_ms is None or due_ms <= now_ms:
                remove(path)
            else:
                waiting.append((due_ms, path))
        self._files_to_delete = waiting

    # --- durability ---

    def plan_flush(
        self,
        offset: int,
        upto: int,
        further: Sequence[str],
        *,
        epochs: Sequence[tuple[int, int]] | None,
        parent: str | None,
    ) -> Flush:
        """Plan the flush of the offsets from ``offset`` to ``upto``, and of the files' names.

        ``upto`` is the base of a segment or the log end. ``further`` are paths of other files to
        sync. ``epochs`` is the content to write to the leader-epoch checkpoint, None if it is up to
        date. ``parent`` is the parent directory if the name of this directory must be synced.
        """
        end = self.log_end_offset
        segments = [
            segment
            for segment in self.from_offset(offset)
            if segment.base_offset < upto or upto == end
        ]
        aborts = [segment.txn_index for segment in segments if not segment.txn_index.is_synced]
        sealed, self.sealed = self.sealed, []
        files = [*further, *(index.path for index in aborts)]
        for segment in sealed:
            files += segment.index_paths
        for index in aborts:
            index.is_synced = True
        # Writing the epochs syncs the directory as well.
        changed = self.directory_changed and epochs is None
        directories = [self.directory] if changed else []
        if parent is not None:
            directories.append(parent)
        self.directory_changed = False
        flush = Flush(
            self._fs,
            end=upto,
            segments=segments,
            files=files,
            directories=directories,
            epochs=None if epochs is None else (self.directory, epochs),
            queue=self.flushes,
        )

        def mark_unsynced() -> None:
            self.sealed += sealed
            self.directory_changed = True
            for index in aborts:
                index.is_synced = False

        flush.on_reschedule.append(mark_unsynced)
        return flush

    def close(self) -> None:
        """Close all handles; files stay unchanged."""
        self.flushes.is_over = True
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._active = None
