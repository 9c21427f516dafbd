"""The operating system's file system with injected faults: slow, failing, full and dying disks."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from fencepost.logcore.fs import FileMap, OsFileSystem, ReadableBuffer

GATE_S = 30.0
"""The longest time that a sync waits at the gate, which only a failing test reaches."""


class Step(NamedTuple):
    """A completed durable step: ``write`` or ``sync``, and the path of the file."""

    kind: str
    path: str


def _never(_path: str) -> bool:
    return False


def _fine(_kind: str, _path: str) -> None:
    pass


class FaultyDisk(OsFileSystem):
    """Works normally until the test sets a fault, which any thread may do."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        """Writes and syncs that succeeded, oldest first."""
        self.gate = threading.Event()
        """While this event is clear, syncs in the flusher's threads (``fsync…``) wait."""
        self.is_gated: Callable[[str], bool] = lambda _path: True
        """Predicate of the paths whose sync waits at the gate."""
        self.gate.set()
        self.held = threading.Event()
        """Set when a sync waits at the gate."""
        self.sync_fails: Callable[[str], bool] = _never
        """Predicate of the paths whose sync fails with EIO."""
        self.write_fails: Callable[[str], bool] = _never
        """Predicate of the paths whose write fails with EIO."""
        self.is_full = False
        """Whether the disk is full: a write stores half of its bytes, and fails with ENOSPC."""
        self.is_short = False
        """Whether a write omits its last byte, and returns the smaller count."""
        self.fails: dict[str, int] = {}
        """Kind of a call → error number with which it fails."""
        self.before: Callable[[str, str], None] = _fine
        """Called with the kind and the path before every open (for writing), write, read,
        truncation, allocation, map, sync, rename and removal; its exception replaces the call."""
        self._paths: dict[int, str] = {}

    def _begin(self, kind: str, path: str) -> None:
        self.before(kind, path)
        if kind in self.fails:
            raise OSError(self.fails[kind], os.strerror(self.fails[kind]))

    def open(self, path: str, *, create: bool = False) -> int:
        self._begin("open", path)
        handle = super().open(path, create=create)
        self._paths[handle] = path
        return handle

    def close(self, handle: int) -> None:
        # Forget the path first: another thread may get the descriptor as soon as it is closed.
        self._paths.pop(handle, None)
        super().close(handle)

    @property
    def open_paths(self) -> list[str]:
        """Return the paths of all open files."""
        return sorted(self._paths.values())

    def open_for_reading(self, path: str) -> int:
        handle = super().open_for_reading(path)
        self._paths[handle] = path
        return handle

    def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        path = self._paths[handle]
        self._begin("write", path)
        if self.write_fails(path):
            raise OSError(errno.EIO, "Input/output error")
        if self.is_full:
            data = b"".join(bytes(buffer) for buffer in buffers)
            super().write(handle, (data[: len(data) // 2],), position)
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.is_short:
            return super().write(handle, (b"".join(map(bytes, buffers))[:-1],), position)
        written = super().write(handle, buffers, position)
        self.steps.append(Step("write", path))
        return written

    def truncate(self, handle: int, size: int) -> None:
        self._begin("truncate", self._paths[handle])
        super().truncate(handle, size)

    def map(self, handle: int, size: int) -> FileMap:
        self._begin("map", self._paths[handle])
        return super().map(handle, size)

    def allocate(self, handle: int, position: int, count: int) -> None:
        self._begin("allocate", self._paths[handle])
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().allocate(handle, position, count)

    def read(self, handle: int, count: int, position: int) -> bytes:
        self._begin("read", self._paths[handle])
        return super().read(handle, count, position)

    def send(self, handle: int, count: int, position: int, target: int) -> int:
        self._begin("read", self._paths[handle])
        self._begin("send", self._paths[handle])
        return super().send(handle, count, position, target)

    def rename(self, source: str, target: str) -> None:
        self._begin("rename", source)
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self._begin("remove", path)
        super().remove(path)

    def remove_tree(self, path: str) -> None:
        self._begin("remove_tree", path)
        super().remove_tree(path)

    def sync_directory(self, path: str) -> None:
        self._begin("sync_directory", path)
        super().sync_directory(path)

    def sync(self, handle: int) -> None:
        path = self._paths[handle]
        self._begin("sync", path)
        in_thread = threading.current_thread().name.startswith("fsync")
        if in_thread and not self.gate.is_set() and self.is_gated(path):
            self.held.set()
            self.gate.wait(GATE_S)
        if self.sync_fails(path):
            raise OSError(errno.EIO, "Input/output error")
        super().sync(handle)
        self.steps.append(Step("sync", path))

    def of_logs(self, *topics: str, since: int = 0) -> list[tuple[str, str]]:
        """Return (kind, topic) of the steps on log files of ``topics``, from step ``since`` on."""
        steps = []
        for step in self.steps[since:]:
            directory = step.path.rsplit("/", 2)[-2]
            topic = directory.rsplit("-", 1)[0]
            if step.path.endswith(".log") and topic in topics:
                steps.append((step.kind, topic))
        return steps


CHANGES = frozenset(
    {"create", "write", "truncate", "rename", "remove", "remove_tree", "make_directory"}
)
"""Kinds of steps that change the files of a disk."""


class Killed(BaseException):
    """The simulated process ends here."""


class MortalDisk(OsFileSystem):
    """Simulates a kill after ``lifetime`` steps: the next step and all later steps raise Killed.

    With ``torn`` half of a write at that step still happens. Only steps of ``kinds`` count. Nothing
    is synced, because a kill preserves the page cache.
    """

    def __init__(
        self,
        lifetime: int = 1 << 60,
        *,
        torn: bool = False,
        kinds: Collection[str] = CHANGES | {"sync", "sync_directory", "map"},
    ) -> None:
        self.lifetime = lifetime
        self.torn = torn
        self.kinds = kinds
        self.steps: list[tuple[str, str]] = []
        self.handles: dict[int, str] = {}

    def dies_after(self, steps: int) -> None:
        """Let the process die after ``steps`` further steps."""
        self.lifetime = len(self.steps) + steps

    def _step(self, kind: str, name: str) -> None:
        if kind not in self.kinds:
            return
        if len(self.steps) >= self.lifetime:
            raise Killed(kind)
        self.steps.append((kind, Path(name).name))

    def bury(self) -> None:
        """Close the files of the dead process."""
        # One by one: the garbage collector may close a retired segment's file meanwhile.
        while self.handles:
            super().close(self.handles.popitem()[0])

    def open(self, path: str, *, create: bool = False) -> int:
        if create and not Path(path).exists():
            self._step("create", path)
        handle = super().open(path, create=create)
        self.handles[handle] = path
        return handle

    def close(self, handle: int) -> None:
        if self.handles.pop(handle, None) is not None:
            super().close(handle)

    def write(self, handle: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        try:
            self._step("write", self.handles[handle])
        except Killed:
            if self.torn:
                whole = b"".join(buffers)
                super().write(handle, [whole[: len(whole) // 2]], position)
            raise
        return super().write(handle, buffers, position)

    def truncate(self, handle: int, size: int) -> None:
        self._step("truncate", self.handles[handle])
        super().truncate(handle, size)

    def sync(self, handle: int) -> None:
        self._step("sync", self.handles[handle])

    def map(self, handle: int, size: int) -> FileMap:
        self._step("map", self.handles[handle])
        return super().map(handle, size)

    def rename(self, source: str, target: str) -> None:
        self._step("rename", target)
        super().rename(source, target)

    def remove(self, path: str) -> None:
        if Path(path).exists():
            self._step("remove", path)
        super().remove(path)

    def sync_directory(self, path: str) -> None:
        self._step("sync_directory", path)

    def remove_tree(self, path: str) -> None:
        self._step("remove_tree", path)
        super().remove_tree(path)

    def make_directory(self, path: str) -> None:
        self._step("make_directory", path)
        super().make_directory(path)
