"""One flush of a partition: what has to be forced to disk, apart from who does it and when.

A partition plans a flush, anybody runs it, also in another thread while appends go on, and the
partition takes the result over. Its segments are pinned meanwhile, so that a handle in use is not
given back under it. A sync that failed is never tried again: the kernel calls the pages clean that
it could not write, and a second fsync of the same file would succeed without them. A file that
can not be opened, or not be written for want of room, has harmed nothing: that is planned anew.

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
    """Forces a log to disk up to ``end``. ``files`` are named by path, and may be gone by now.

    A cut of the log moves ``end`` down: what is written behind it from then on is not looked at.
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
        """``epochs``: a directory whose leader-epoch checkpoint is to be written, and its lines."""
        self._fs = fs
        self.end = end
        self._segments = segments
        self._files = files
        self._directories = directories
        self._epochs = epochs
        self._queue = queue
        self.on_taken_back: list[Callable[[], None]] = []
        """What to call if what this was to do has to be planned again."""
        for segment in segments:
            segment.file.pin()
        queue.under_way.append(self)

    def run(self) -> OSError | None:
        """Return once all of it survives power loss, or the first failure. For any thread.

        It waits for those of the same log that were planned before and are running, and fails as
        they did. :func:`is_refusal` tells which failures have harmed nothing.
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
                self._if_there(path, partial(sync_path, self._fs))
            if self._epochs is not None:
                directory, entries = self._epochs
                self._if_there(directory, lambda path: write_epochs(self._fs, path, entries))
            for directory in self._directories:
                self._if_there(directory, self._fs.sync_directory)
        except OSError as error:
            return without_traceback(error)
        return None

    def take_back(self) -> None:
        """Have what this was to do planned again, as far as nobody sees to it."""
        for call in self.on_taken_back:
            call()

    def done(self) -> None:
        """Let go of the segments; for the partition's own thread."""
        self._queue.under_way.remove(self)
        for segment in self._segments:
            segment.file.unpin()

    def _if_there(self, path: str, sync: Callable[[str], None]) -> None:
        """Retention, or the end of the topic, may have removed it since the plan."""
        if self._queue.is_over:
            # Another topic of the same name may have taken the directory's place.
            return
        try:
            sync(path)
        except FileNotFoundError:
            return


class FlushQueue:
    """The flushes of one log that are planned or running. They run one after the other."""

    def __init__(self) -> None:
        self.under_way: list[Flush] = []
        self.lock = threading.Lock()
        self.failure: OSError | None = None
        """Of the first that failed: what it has lost no later one can know."""
        self.is_over = False
        """The log is closed or gone, and its names are nobody's any more."""

    def take_back(self) -> None:
        """Have all that is planned and not done planned again, by the flush that comes now.

        It may not rely on the others: they may be refused.
        """
        for flush in self.under_way:
            flush.take_back()

    def cut(self, offset: int) -> None:
        """The log has lost what was at ``offset`` and behind; what is before it stays flushed."""
        for flush in self.under_way:
            flush.end = min(flush.end, offset)


def is_refusal(failure: Exception) -> bool:
    """Whether a flush has met a full disk or the limit of open files, and no sync has failed."""
    return isinstance(failure, OSError) and failure.errno in NO_ROOM | NO_HANDLES
