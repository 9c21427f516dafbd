"""A file system that freezes as a SIGKILL would leave it, although the process continues."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fencepost.logcore.fs import FileMap, OsFileSystem
from fencepost.logcore.system import ReadableBuffer


class CrashableFileSystem(OsFileSystem):
    """The operating system's file system, which ignores all changes after :meth:`die`.

    After :meth:`die` every operation succeeds without an effect. The broker can then shut down, and
    its directory stays as after a SIGKILL. The directory has everything that was written, because
    the page cache outlives a process. It lacks the checkpoints and the clean-shutdown marker of an
    orderly stop. ``forces=False`` skips all flushes to disk, which only matters in a power loss.
    """

    def __init__(self, *, forces: bool = True) -> None:
        self.is_dead = False
        self._forces = forces

    def die(self) -> None:
        """Ignore all changes from now on."""
        self.is_dead = True

    def open(self, path: str, *, create: bool = False) -> int:
        """Open for reading and writing; after :meth:`die` a missing file is opened as empty."""
        if self.is_dead and not Path(path).exists():
            path = os.devnull
        return super().open(path, create=create)

    def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        """Write; after :meth:`die` discard the bytes."""
        if self.is_dead:
            return sum(map(len, buffers))
        return super().write(handle, buffers, position)

    def truncate(self, handle: int, size: int) -> None:
        """Set the size."""
        if not self.is_dead:
            super().truncate(handle, size)

    def allocate(self, handle: int, position: int, count: int) -> None:
        """Reserve blocks."""
        if not self.is_dead:
            super().allocate(handle, position, count)

    def sync(self, handle: int) -> None:
        """Force to disk."""
        if self._forces and not self.is_dead:
            super().sync(handle)

    def map(self, handle: int, size: int) -> FileMap:
        """Map a file."""
        # After die(), truncate() did not extend the file, so `size` may be beyond its end.
        return _MortalMap(self, bytearray(size) if self.is_dead else super().map(handle, size))

    def rename(self, source: str, target: str) -> None:
        """Rename."""
        if not self.is_dead:
            super().rename(source, target)

    def remove(self, path: str) -> None:
        """Remove a file."""
        if not self.is_dead:
            super().remove(path)

    def remove_tree(self, path: str) -> None:
        """Remove a directory."""
        if not self.is_dead:
            super().remove_tree(path)

    def make_directory(self, path: str) -> None:
        """Create a directory."""
        if not self.is_dead:
            super().make_directory(path)

    def sync_directory(self, path: str) -> None:
        """Force the directory's entries to disk."""
        if self._forces and not self.is_dead:
            super().sync_directory(path)


class _MortalMap:
    """A memory map of a file of :class:`CrashableFileSystem`."""

    def __init__(self, files: CrashableFileSystem, content: FileMap | bytearray) -> None:
        self._files, self._content = files, content

    def __getitem__(self, key: slice, /) -> bytes:
        return bytes(self._content[key])

    def __setitem__(self, key: slice, value: bytes, /) -> None:
        if not self._files.is_dead:
            self._content[key] = value

    def flush(self) -> None:
        if not isinstance(self._content, bytearray):
            self._content.flush()

    def close(self) -> None:
        if not isinstance(self._content, bytearray):
            self._content.close()
