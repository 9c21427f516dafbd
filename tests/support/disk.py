"""The operating system's file system with faults at hand: slow, failing and full disks."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fencepost.logcore.fs import OsFileSystem, ReadableBuffer

GATE_S = 30.0
"""How long a held sync waits at most: only a failing test spends it."""


class Step(NamedTuple):
    """A durable step that was done: ``write`` or ``sync``, and the path of the file."""

    kind: str
    path: str


def _never(_path: str) -> bool:
    return False


def _fine(_kind: str, _path: str) -> None:
    pass


class FaultyDisk(OsFileSystem):
    """Does as it should until told otherwise; may be told from any thread."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        """Writes and syncs that succeeded, oldest first."""
        self.gate = threading.Event()
        """While it is clear, syncs in threads other than the main loop's wait."""
        self.is_gated: Callable[[str], bool] = lambda _path: True
        """Paths whose sync waits then."""
        self.gate.set()
        self.held = threading.Event()
        """A sync waits at the gate."""
        self.sync_fails: Callable[[str], bool] = _never
        """Paths whose sync fails with EIO."""
        self.write_fails: Callable[[str], bool] = _never
        """Paths whose write fails with EIO."""
        self.is_full = False
        """No file grows: half of a write gets through, then the disk says ENOSPC."""
        self.before: Callable[[str, str], None] = _fine
        """Called with the kind and the path of every open (for writing), write, read, sync, rename
        and removal before it is done; what it raises comes in its place."""
        self._paths: dict[int, str] = {}

    def open(self, path: str, *, create: bool = False) -> int:
        self.before("open", path)
        handle = super().open(path, create=create)
        self._paths[handle] = path
        return handle

    def close(self, handle: int) -> None:
        # First: another thread may be given the same number at once.
        self._paths.pop(handle, None)
        super().close(handle)

    @property
    def open_paths(self) -> list[str]:
        """Of the files that are open."""
        return sorted(self._paths.values())

    def open_for_reading(self, path: str) -> int:
        handle = super().open_for_reading(path)
        self._paths[handle] = path
        return handle

    def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        path = self._paths[handle]
        self.before("write", path)
        if self.write_fails(path):
            raise OSError(errno.EIO, "Input/output error")
        if self.is_full:
            data = b"".join(bytes(one) for one in buffers)
            super().write(handle, (data[: len(data) // 2],), position)
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(handle, buffers, position)
        self.steps.append(Step("write", path))
        return written

    def allocate(self, handle: int, position: int, count: int) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().allocate(handle, position, count)

    def read(self, handle: int, count: int, position: int) -> bytes:
        self.before("read", self._paths[handle])
        return super().read(handle, count, position)

    def rename(self, source: str, target: str) -> None:
        self.before("rename", source)
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self.before("remove", path)
        super().remove(path)

    def remove_tree(self, path: str) -> None:
        self.before("remove_tree", path)
        super().remove_tree(path)

    def sync_directory(self, path: str) -> None:
        self.before("sync_directory", path)
        super().sync_directory(path)

    def sync(self, handle: int) -> None:
        path = self._paths[handle]
        self.before("sync", path)
        in_thread = threading.current_thread().name.startswith("fsync")
        if in_thread and not self.gate.is_set() and self.is_gated(path):
            self.held.set()
            self.gate.wait(GATE_S)
        if self.sync_fails(path):
            raise OSError(errno.EIO, "Input/output error")
        super().sync(handle)
        self.steps.append(Step("sync", path))

    def of_logs(self, *topics: str, since: int = 0) -> list[tuple[str, str]]:
        """(kind, topic) of the steps on the log files of ``topics``, from the n-th step on."""
        found = []
        for step in self.steps[since:]:
            directory = step.path.rsplit("/", 2)[-2]
            topic = directory.rsplit("-", 1)[0]
            if step.path.endswith(".log") and topic in topics:
                found.append((step.kind, topic))
        return found
