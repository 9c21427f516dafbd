"""A partition's segments in the order of their offsets: append, roll, read, truncate, remove.

A ``Log`` knows files and offsets; producers, epochs and the high watermark are its owner's
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
from fencepost.logcore.disk_steps import DiskSteps, run_here
from fencepost.logcore.errors import CorruptRecordError
from fencepost.logcore.file_range import FileRange
from fencepost.logcore.flush import Flush, FlushQueue
from fencepost.logcore.fs import FileSystem, ReadableBuffer
from fencepost.logcore.index import MappedIndexes
from fencepost.logcore.legacy import RUN_BYTES
from fencepost.logcore.segment import (
    LOG_SUFFIX,
    SEGMENT_SUFFIXES,
    TXN_INDEX_SUFFIX,
    Segment,
    file_stem,
)

CLEANED_SUFFIX: Final = ".cleaned"
SWAP_SUFFIX: Final = ".swap"
DELETED_SUFFIX: Final = ".deleted"
SNAPSHOT_SUFFIX: Final = ".snapshot"


class ReadBytes(NamedTuple):
    """Whole batches, and the offset below which the reader has now seen everything."""

    records: bytes | FileRange
    upper_bound: int
    is_behind: bool = False
    """Whether the limit lies in a later segment; a read never goes on to the next one."""


class Log:
    """Segments by base offset. There is always an active one, the last; only it is appended to."""

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
        """The last of them, once somebody has asked for it."""
        self._roll_after: tuple[LogConfig, Segment | None, int] = config, None, 0
        """For which settings and segment it is known when that is too old, and when."""
        self._looked_into = MappedIndexes()
        self._doomed: list[tuple[int, str]] = []
        self.remove_later: Callable[[str], None] | None = None
        """Removes a file behind everybody's back: a file system may take long to give one up."""
        self.log_end_offset = 0
        self.directory_changed = False
        """Files were created, renamed or removed since the directory was last synced."""
        self.flushes = FlushQueue()
        self.sealed: list[Segment] = []
        """Segments whose indexes no flush has forced to disk yet."""
        self.cuts = 0
        """How often the log was cut; what somebody read of it before may not be in it any more."""

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
        """Whether there is no segment at all; true only while a log is being loaded."""
        return not self._segments

    @property
    def first_offset(self) -> int:
        """Base offset of the oldest segment."""
        offset: int = self._segments.keys()[0]
        return offset

    @property
    def segment_count(self) -> int:
        """How many there are."""
        return len(self._segments)

    @property
    def size_bytes(self) -> int:
        """Bytes of all log files."""
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
            looked_into=self._looked_into,
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
            looked_into=self._looked_into,
        )
        self._segments[base_offset] = segment
        self._active = None
        self.directory_changed = True
        return segment

    def from_offset(self, offset: int) -> list[Segment]:
        """Segments from the one that may hold ``offset`` on."""
        index = max(self._segments.bisect_right(offset) - 1, 0)
        return list(self._segments.values()[index:])

    def end_of(self, segment: Segment) -> int:
        """The offset behind a segment of this log: where the next one begins, or the log ends."""
        slot = self._segments.bisect_right(segment.base_offset)
        return self._segments.keys()[slot] if slot < len(self._segments) else self.log_end_offset

    def end_before(self, offset: int) -> int:
        """Where the log ends once it is cut to an ``offset`` that it holds."""
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
        """Whether the batch has to go to a new segment (``LogSegment.shouldRoll``)."""
        segment = self.active
        size = segment.size
        if size == 0:
            # Rolling would put a new segment in the place of the empty one.
            return not segment.can_hold(last_offset)
        config = self.config
        return (
            size > config.segment_bytes - incoming_bytes
            or segment.age_ms(max_timestamp, now_ms) > self._roll_after_ms(segment)
            or segment.indexes_full
            or not segment.can_hold(last_offset)
        )

    def _roll_after_ms(self, segment: Segment) -> int:
        """See :meth:`LogConfig.roll_after_ms`; the same for all appends to a segment."""
        config, known, roll_after_ms = self._roll_after
        if config is not self.config or known is not segment:
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
        active.append(buffers, size, last_offset, max_timestamp)
        self.log_end_offset = last_offset + 1

    def skip_to(self, offset: int, now_ms: int) -> Segment:
        """Begin the empty active segment at ``offset``, behind a hole that is too wide for it."""
        self.remove([self.active], now_ms=now_ms, delay_ms=0)
        return self.create_segment(offset, now_ms)

    def append_run(
        self, data: ReadableBuffer, headers: Sequence[BatchHeader], active: Segment
    ) -> None:
        """Write batches that stand one behind the other in ``data``; they may leave gaps."""
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
        """Read whole batches from the one that holds ``offset`` on, below the boundary ``limit``.

        What has ``min_range_bytes`` stays in its file. Empty when nothing is below the limit, or
        (without ``at_least_one``) nothing fits. The caller has checked that ``offset`` is between
        log start and log end.
        """
        if offset >= limit:
            return ReadBytes(b"", offset)
        slot = self._floor(offset)
        count = len(self._segments)
        while slot < count:
            segment: Segment = self._segments.values()[slot]
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
            if not segment.is_new(start):
                # They are converted in this turn of the event loop, so there are not many.
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
        """Return where the batches to read end in the file, and the offset behind them."""
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
        """Count the bytes a reader at ``offset`` would get below the boundary ``limit``."""
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
        found: list[tuple[int, int]] = []
        for segment in self.from_offset(offset):
            if segment.txn_index.collect(offset, upper_bound, found):
                break
        return found

    def batches(
        self, offset: int = 0, *, with_payload: bool = True
    ) -> Iterator[tuple[int, BatchHeader, memoryview]]:
        """Yield position, header and bytes of each batch from the one that holds ``offset`` on."""
        for segment in self.from_offset(offset):
            position = segment.locate(offset)
            if position is not None:
                yield from segment.batches(position, with_payload=with_payload)

    # --- cutting ---

    def truncate_to(self, offset: int) -> None:
        """Remove everything from the batch that holds ``offset`` on; the log ends where that began.

        Later segments go first and from the end, so that a kill on the way leaves no hole.
        """
        self._cut(offset)
        for segment in reversed(self.segments):
            if segment.base_offset > offset:
                self.remove([segment], now_ms=0, delay_ms=0)
        active = self.active
        active.truncate_to(offset)
        if offset < self.log_end_offset:
            # Not the offset itself: a hole before what comes next would look like a loss.
            self.log_end_offset = active.next_offset()

    def restart_at(self, offset: int, now_ms: int) -> None:
        """Remove everything and begin anew at ``offset``."""
        self._cut(offset)
        self.remove(list(reversed(self.segments)), now_ms=now_ms, delay_ms=0)
        self.log_end_offset = offset
        self.create_segment(offset, now_ms)

    def _cut(self, offset: int) -> None:
        self.cuts += 1
        self.flushes.cut(offset)

    def remove(self, segments: Iterable[Segment], *, now_ms: int, delay_ms: int) -> None:
        """Do :meth:`removing` in this thread."""
        run_here(self.removing(segments, now_ms=now_ms, delay_ms=delay_ms))

    def removing(
        self, segments: Iterable[Segment], *, now_ms: int, delay_ms: int
    ) -> DiskSteps[None]:
        """Take segments out of the log; their files are renamed now and removed after the delay.

        The log files go first, durably: a log file never stands there without its indexes, which
        would have to be built anew from a log whose past is gone. What is left without a log file
        is removed at the next load.
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
        """Take a segment out of the log, whose file goes on under another name in its directory.

        Its other files are removed, durably behind it.
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
        """Whether these very segments are still part of the log."""
        return all(self._segments.get(one.base_offset) is one for one in segments)

    def replace(
        self,
        old: Sequence[Segment],
        base_offset: int,
        suffixes: Sequence[str],
        *,
        now_ms: int,
        delay_ms: int,
    ) -> None:
        """Put the ``.cleaned`` files of a segment in the place of neighbouring ``old`` ones.

        As ``LocalLog.replaceSegments``: ``.cleaned`` becomes ``.swap``, the old files ``.deleted``,
        and ``.swap`` goes away; ``recovery.py`` finishes or undoes what is cut short. The directory
        is synced before the old files go, and before the new ones take their names: no order of
        renames survives power loss by itself.
        """
        stem = f"{self.directory}/{file_stem(base_offset)}"
        for suffix in suffixes:
            self._fs.rename(stem + suffix + CLEANED_SUFFIX, stem + suffix + SWAP_SUFFIX)
        self._fs.sync_directory(self.directory)
        for segment in old:
            segment.retire()
            del self._segments[segment.base_offset]
            self._active = None
            # The producers as of the beginning of the new segment are what they were.
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
            self._doomed.append((now_ms + delay_ms, path + DELETED_SUFFIX))

    def remove_doomed(self, now_ms: int | None) -> None:
        """Remove renamed files whose delay has passed; all of them with None."""
        waiting = []
        remove = self.remove_later or self._fs.remove
        for due_ms, path in self._doomed:
            if now_ms is None or due_ms <= now_ms:
                remove(path)
            else:
                waiting.append((due_ms, path))
        self._doomed = waiting

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
        """Plan to make everything from ``offset`` to ``upto`` survive power loss, names included.

        ``upto`` is the beginning of a segment or the log end. ``further`` are paths of files to
        force to disk, ``epochs`` is what the leader-epoch checkpoint has to say, ``parent`` the
        directory that must not forget this one's name.
        """
        end = self.log_end_offset
        segments = [
            one for one in self.from_offset(offset) if one.base_offset < upto or upto == end
        ]
        aborts = [one.txn_index for one in segments if not one.txn_index.is_synced]
        sealed, self.sealed = self.sealed, []
        files = [*further, *(index.path for index in aborts)]
        for segment in sealed:
            files += segment.index_paths
        for index in aborts:
            index.is_synced = True
        # To write the epochs syncs the directory as well.
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

        def again() -> None:
            self.sealed += sealed
            self.directory_changed = True
            for index in aborts:
                index.is_synced = False

        flush.on_taken_back.append(again)
        return flush

    def close(self) -> None:
        """Give all handles back; files stay as they are."""
        self.flushes.is_over = True
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._active = None
