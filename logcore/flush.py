"""One flush of a partition: the files to force to disk, independent of the thread that runs it.

A partition plans a flush, any thread runs it, even while appends go on, and the partition applies
the result. The segments are pinned meanwhile, so that no handle is closed while the flush uses it.
A failed sync is never retried: the kernel marks the pages that it failed to write as clean, and a
second fsync of the same file would succeed without them. If a file cannot be opened, or the disk
has no room for it, no data is lost, and the flush is planned again.

Source: ``UnifiedLog.flush``, ``LogSegment.flush``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from fencepost.logcore.checkpoints import write_epochs
from fencepost.logcore.fs import NO_HANDLES, NO_ROOM, FileSystem, sync_path
from fencepost.logcore.segment import Segment
from fencepost.logcore.tracebacks import without_traceback


class Flush:
    """Forces a log to disk up to ``end``. ``files`` are paths, and may be removed before the flush.

    A truncation of the log lowers ``end``: the flush does not cover appends after the truncation.
    """

    def __init__(
        self,
        fs: FileSystem,
        *,
        end: int,
        segments: Sequence[Segment],
        files: Sequence[str],
        directories: Sequence[str],
        epochs: tuple[str, Sequence[tuple[int, int]]] | None,
        queue: FlushQueue,
    ) -> None:
        """``epochs``: the directory of the leader-epoch checkpoint to write, and its entries."""
        self._fs = fs
        self.end = end
        self._segments = segments
        self._files = files
        self._directories = directories
        self._epochs = epochs
        self._queue = queue
        self.on_reschedule: list[Callable[[], None]] = []
        """Called if the work of this flush must be planned again."""
        for segment in segments:
            segment.file.pin()
        queue.under_way.append(self)

    def run(self) -> OSError | None:
        """Force all files to disk; return None, or the first failure. May run on any thread.

        A flush waits for the running flushes of the same log, and fails if one of them has failed.
        :func:`is_refusal` tells which failures have lost no data.
        """
        with self._queue.lock:
            failure = self._queue.failure
            if failure is None:
                failure = self._run()
                if failure is not None and not is_refusal(failure):
                    self._queue.failure = failure
            return failure

    def _run(self) -> OSError | None:
        try:
            for segment in self._segments:
                segment.file.sync()
            for path in self._files:
                self._sync_if_exists(path, partial(sync_path, self._fs))
            if self._epochs is not None:
                directory, entries = self._epochs
                self._sync_if_exists(directory, lambda path: write_epochs(self._fs, path, entries))
            for directory in self._directories:
                self._sync_if_exists(directory, self._fs.sync_directory)
        except OSError as error:
            return without_traceback(error)
        return None

    def reschedule(self) -> None:
        """Have the unfinished work of this flush planned again."""
        for call in self.on_reschedule:
            call()

    def done(self) -> None:
        """Unpin the segments; call it on the partition's own thread."""
        self._queue.under_way.remove(self)
        for segment in self._segments:
            segment.file.unpin()

    def _sync_if_exists(self, path: str, sync: Callable[[str], None]) -> None:
        """Sync ``path``, if neither retention nor a topic's deletion removed it since the plan."""
        if self._queue.is_over:
            # Another topic of the same name may have taken the directory's place.
            return
        try:
            sync(path)
        except FileNotFoundError:
            return


class FlushQueue:
    """The planned and running flushes of one log. They run one after the other."""

    def __init__(self) -> None:
        self.under_way: list[Flush] = []
        self.lock = threading.Lock()
        self.failure: OSError | None = None
        """The error of the first failed flush. All later flushes fail with it: the lost data may be
        in any file of the log."""
        self.is_over = False
        """Whether the log is closed or deleted, and its paths may belong to another log."""

    def reschedule(self) -> None:
        """Let the next flush repeat the work of all planned and running flushes.

        These flushes may be refused (:func:`is_refusal`).
        """
        for flush in self.under_way:
            flush.reschedule()

    def cut(self, offset: int) -> None:
        """Lower the flushes' ends to ``offset``, to which the log was truncated."""
        for flush in self.under_way:
            flush.end = min(flush.end, offset)


def is_refusal(failure: Exception) -> bool:
    """Return whether the disk was full or too many files were open.

    A failed sync never counts as one of these: :func:`fencepost.logcore.fs.sync_handle` raises EIO.
    """
    return isinstance(failure, OSError) and failure.errno in NO_ROOM | NO_HANDLES
