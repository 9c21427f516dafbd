"""One flush of a partition: what has to be forced to disk, apart from who does it and when.

A partition plans a flush, anybody runs it, also in another thread while appends go on, and the
partition takes the result over. Its segments are pinned meanwhile, so that a handle in use is not
given back under it. A flush that failed is never tried again: the kernel calls the pages clean that
it could not write, and a second fsync of the same file would succeed without them.

Source: ``UnifiedLog.flush``, ``LogSegment.flush``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from logcore.checkpoints import write_epochs
from logcore.fs import FileSystem
from logcore.segment import Segment


class Flush:
    """Forces a log to disk up to ``end``. ``files`` are named by path, and may be gone by now."""

    def __init__(
        self,
        fs: FileSystem,
        *,
        end: int,
        cuts: int,
        segments: Sequence[Segment],
        files: Sequence[str],
        directories: Sequence[str],
        epochs: tuple[str, Sequence[tuple[int, int]]] | None,
    ) -> None:
        """``epochs``: a directory whose leader-epoch checkpoint is to be written, and its lines."""
        self._fs = fs
        self.end = end
        self.cuts = cuts
        """How often the log had been cut when this was planned."""
        self._segments = segments
        self._files = files
        self._directories = directories
        self._epochs = epochs
        for segment in segments:
            segment.pin()

    def run(self) -> OSError | None:
        """Return once all of it survives power loss, or the first failure. For any thread."""
        try:
            for segment in self._segments:
                segment.sync_log()
            for path in self._files:
                self._sync_file(path)
            if self._epochs is not None:
                self._if_there(self._epochs[0], self._write_epochs)
            for directory in self._directories:
                self._if_there(directory, self._fs.sync_directory)
        except OSError as error:
            return error
        return None

    def done(self) -> None:
        """Let go of the segments; for the partition's own thread."""
        for segment in self._segments:
            segment.unpin()

    def _write_epochs(self, directory: str) -> None:
        if self._epochs is not None:
            write_epochs(self._fs, directory, self._epochs[1])

    def _sync_file(self, path: str) -> None:
        def sync(path: str) -> None:
            handle = self._fs.open(path)
            try:
                self._fs.sync(handle)
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from error
            finally:
                self._fs.close(handle)

        self._if_there(path, sync)

    def _if_there(self, path: str, sync: Callable[[str], None]) -> None:
        """Retention, or the end of the topic, may have removed it since the plan."""
        try:
            sync(path)
        except FileNotFoundError:
            return
