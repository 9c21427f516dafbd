"""The metadata log for its observers: fetches, snapshots, and how far each observer has read.

Source: ``KafkaRaftClient.handleFetchRequest``/``handleFetchSnapshotRequest``,
``KafkaMetadataLog.validateOffsetAndEpoch``, ``LeaderState``; KIP-595, KIP-630, KIP-1166.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple
from uuid import UUID

import structlog

from fencepost.cluster.divergence import diverging_epoch
from fencepost.coordinator.controller.errors import (
    PositionOutOfRangeError,
    SnapshotNotFoundError,
)
from fencepost.coordinator.metadata.log import MetadataLog
from fencepost.coordinator.metadata.snapshots import SnapshotId, snapshots
from fencepost.coordinator.runtime.background import Threads, spawn
from fencepost.coordinator.runtime.delayed_fetch import (
    DelayedFetch,
    DelayedFetches,
    WatchedPartition,
)
from fencepost.coordinator.runtime.flusher import Flusher
from fencepost.coordinator.runtime.turns import Work
from fencepost.logcore.clock import Clock
from fencepost.logcore.errors import LogError
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.reading import Isolation
from fencepost.logcore.values import dataclass

_log = structlog.get_logger(__name__)

MAX_FETCH_BYTES: Final = 8 << 20
"""Maximum bytes of records in one response; a larger batch is sent alone."""

MAX_SNAPSHOT_PIECE_BYTES: Final = 8 << 20
"""Maximum bytes of a snapshot in one response."""

MAX_OBSERVERS: Final = 1_000
"""The maximum number of tracked observers; above it, the one with the oldest fetch is dropped."""

OBSERVER_TIMEOUT_MS: Final = 300_000
"""A replica without a fetch for this long is no longer an observer (Kafka: ``LeaderState``)."""

CUT_MS: Final = 60_000
"""Interval between checks whether the log has grown enough for a new snapshot."""

LISTENS_MS: Final = 10_000
"""Without a fetch in this interval there are no observers, and the high watermark need not advance.
"""


_NEVER_A_RANGE: Final = 1 << 62
"""A ``min_range_bytes`` above the size of any fetch: the reader returns bytes, not file ranges."""


class DivergingEpoch(NamedTuple):
    """The log of the observer diverges from this one at ``end_offset``."""

    epoch: int
    end_offset: int


@dataclass(frozen=True, slots=True)
class MetadataRead:
    """The result of a fetch: records, a diverging epoch, or a snapshot to fetch first."""

    records: bytes = b""
    diverging: DivergingEpoch | None = None
    snapshot: SnapshotId | None = None


@dataclass(slots=True)
class ObserverState:
    """A replica that reads the metadata log."""

    replica_id: int
    directory_id: UUID | None
    log_end_offset: int
    last_fetch_ms: int
    """Wall-clock time, ms."""
    last_caught_up_ms: int
    """Wall-clock time of the last fetch that reached the log end, ms; -1 if there was none."""


class MetadataLogReader:
    """The log of a :class:`MetadataLog`, for other nodes to read."""

    def __init__(
        self, metadata: MetadataLog, fs: FileSystem, clock: Clock, flusher: Flusher
    ) -> None:
        self.partition = metadata.partition
        self._metadata = metadata
        self._fs = fs
        self._clock = clock
        self._flusher = flusher
        self._snapshot: tuple[int, SnapshotId | None] = -1, None
        """The newest snapshot, and the log start offset for which it was looked up."""
        self._observers: dict[int, ObserverState] = {}
        self.delayed = DelayedFetches()
        """Fetches in purgatory."""
        self.delayed.close()
        self._unlisten: Callable[[], None] | None = None
        self._sent: tuple[SnapshotId, bytes] | None = None
        """The snapshot whose chunks are being sent, with its bytes."""
        self._cut_ms = 0
        self._cutting: asyncio.Task[None] | None = None
        self._threads = Threads("snapshot")

    # --- lifecycle ---

    def start(self) -> None:
        """Start to complete delayed fetches when records are appended."""
        self.delayed.closed = False
        self._unlisten = self.partition.marks.listen(self._appended)

    async def stop(self) -> None:
        """Finish the snapshot that is being written, and complete all delayed fetches."""
        if self._cutting is not None:
            await asyncio.wait({self._cutting})
        self._threads.close()
        if self._unlisten is not None:
            self._unlisten()
            self._unlisten = None
        self.delayed.close()

    def _appended(self) -> None:
        flushed = self._flusher.forced(self.partition)
        if flushed is not None:
            flushed.add_done_callback(self._flushed)

    def _flushed(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled():
            done.exception()  # The request that made the change reports the error.
        self.delayed.high_watermark_moved(self.high_watermark)

    async def _forced(self) -> None:
        """Wait until all current records are on disk. Raises StorageError."""
        flushed = self._flusher.forced(self.partition)
        if flushed is not None:
            await flushed

    # --- reading ---

    @property
    def epoch(self) -> int:
        """The epoch of the quorum."""
        return self._metadata.epoch

    @property
    def high_watermark(self) -> int:
        """The high watermark: a record is committed once it is on the disk of the only voter."""
        return min(self.partition.recovery_point, self.partition.log_end_offset)

    def read(self, offset: int, last_fetched_epoch: int, max_bytes: int) -> MetadataRead:
        """Read from ``offset``, the log end offset of an observer.

        ``last_fetched_epoch`` is the epoch of the observer's last record. Raises StorageError.
        """
        partition, snapshot = self.partition, self._find_snapshot()
        start = partition.log_start_offset
        if snapshot is not None and (
            offset == 0
            or offset < start
            or last_fetched_epoch < snapshot.epoch
            or (offset == start and last_fetched_epoch != snapshot.epoch)
        ):
            return MetadataRead(snapshot=snapshot)
        if offset or last_fetched_epoch:
            end = self._end_of(last_fetched_epoch)
            if (diverging := diverging_epoch(end, last_fetched_epoch, offset, start)) is not None:
                return MetadataRead(diverging=DivergingEpoch(*diverging))
        if offset >= partition.log_end_offset:
            return MetadataRead()
        limit = max(1, min(max_bytes, MAX_FETCH_BYTES))
        read = partition.reader.fetch(
            offset, limit, Isolation.LOG_END, at_least_one=True, min_range_bytes=_NEVER_A_RANGE
        )
        return MetadataRead(bytes(read.records))  # type: ignore[arg-type]

    def _end_of(self, epoch: int) -> DivergingEpoch:
        """Return the largest epoch up to ``epoch``, and its end offset.

        If there is none, return the latest epoch and the log end offset.
        """
        reader = self.partition.reader
        end = DivergingEpoch(*reader.offset_for_leader_epoch(epoch))
        if end.epoch < 0:
            return DivergingEpoch(max(reader.latest_epoch, 0), self.partition.log_end_offset)
        return end

    def has_news(self, read: MetadataRead, known_high_watermark: int) -> bool:
        """Return whether a read has anything new for an observer that knows this high watermark."""
        return bool(
            read.records
            or read.diverging is not None
            or read.snapshot is not None
            or known_high_watermark < self.high_watermark
        )

    def wait(self, offset: int, known_high_watermark: int, max_wait_ms: int) -> Work[None]:
        """Wait for records at ``offset``, or for a higher high watermark than the known one."""
        delayed = DelayedFetch(
            self.delayed,
            Isolation.LOG_END,
            min_bytes=1,
            max_wait_ms=max_wait_ms,
            known_high_watermark=known_high_watermark,
        )
        try:
            delayed.watch(WatchedPartition(self.partition, offset, 1))
            yield delayed
        finally:
            delayed.cancel()

    # --- snapshots ---

    def _find_snapshot(self) -> SnapshotId | None:
        """Return the newest snapshot; look it up again when the log start offset has moved."""
        start = self.partition.log_start_offset
        if self._snapshot[0] != start:
            ids = snapshots(self._fs, self.partition.log.directory)
            self._snapshot = start, ids[-1] if ids else None
        return self._snapshot[1]

    def _read_snapshot(self, snapshot_id: SnapshotId) -> bytes:
        directory = self.partition.log.directory
        if snapshot_id not in snapshots(self._fs, directory):
            raise SnapshotNotFoundError(f"there is no snapshot {snapshot_id.file_name}")
        return self._fs.read_file(f"{directory}/{snapshot_id.file_name}") or b""

    def maybe_write_snapshot(self, now_ms: int) -> None:
        """Write a snapshot if the log has outgrown the last one; checked every :data:`CUT_MS`."""
        if now_ms >= self._cut_ms and self._cutting is None:
            self._cut_ms = now_ms + CUT_MS
            if self._metadata.has_grown():
                self._cutting = spawn(self._write_snapshot(), "cut the metadata log")

    async def _write_snapshot(self) -> None:
        """Write a snapshot in a thread, so that neither encoding nor the disk blocks the loop."""
        write = self._metadata.plan_snapshot()
        try:
            await self._forced()
            self._metadata.begin_behind(await self._threads.run(write))
        except (LogError, OSError) as error:
            _log.warning("snapshot of the metadata not written", cause=str(error))
        finally:
            self._cutting = None

    def snapshot_slice(
        self, snapshot_id: SnapshotId, position: int, max_bytes: int
    ) -> tuple[int, bytes]:
        """Return the size of a snapshot, and its bytes from ``position`` on.

        Raises SnapshotNotFoundError, PositionOutOfRangeError.
        """
        if self._sent is None or self._sent[0] != snapshot_id:
            self._sent = snapshot_id, self._read_snapshot(snapshot_id)
        content = self._sent[1]
        if not 0 <= position < len(content):
            raise PositionOutOfRangeError(f"the snapshot has {len(content)} bytes")
        limit = max(1, min(max_bytes, MAX_SNAPSHOT_PIECE_BYTES))
        piece = content[position : position + limit]
        if position + len(piece) == len(content):
            self._sent = None
        return len(content), piece

    # --- observers ---

    def fetched(self, replica_id: int, directory_id: UUID | None, offset: int) -> None:
        """Record a fetch at ``offset``: the replica has all records before it."""
        now_ms = self._clock.now_ms()
        observer = self._observers.pop(replica_id, None)
        caught_up_ms = -1 if observer is None else observer.last_caught_up_ms
        if offset >= self.partition.log_end_offset:
            caught_up_ms = now_ms
        self._observers[replica_id] = ObserverState(
            replica_id, directory_id, offset, now_ms, caught_up_ms
        )
        if len(self._observers) > MAX_OBSERVERS:
            del self._observers[next(iter(self._observers))]

    def observers(self) -> list[ObserverState]:
        """Return the observers that have fetched lately, by id."""
        since_ms = self._clock.now_ms() - OBSERVER_TIMEOUT_MS
        recent = (
            observer for observer in self._observers.values() if observer.last_fetch_ms >= since_ms
        )
        return sorted(recent, key=lambda observer: observer.replica_id)

    def has_observers(self) -> bool:
        """Return whether an observer has fetched within :data:`LISTENS_MS`."""
        since_ms = self._clock.now_ms() - LISTENS_MS
        return any(observer.last_fetch_ms >= since_ms for observer in self._observers.values())
