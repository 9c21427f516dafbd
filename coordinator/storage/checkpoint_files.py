"""The offset checkpoints of a data directory, and the thread that writes them.

Each write takes two or three fsyncs, and therefore runs in a thread. A caller that cannot continue
before a checkpoint is on disk writes the file synchronously, after the thread's current write. A
write never overwrites one that was requested later.
"""

from __future__ import annotations

import threading
from functools import partial

import structlog

from fencepost.coordinator.runtime.background import Threads
from fencepost.logcore.checkpoints import CheckpointError, read_offsets, write_offsets
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.tracebacks import without_traceback

Offsets = dict[tuple[str, int], int]

_log = structlog.get_logger(__name__)


class CheckpointFiles:
    """Reads and writes checkpoints by name.

    Failures are logged but not raised, because they only make the broker start more slowly.
    """

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self._fs = fs
        self._directory = directory
        self._thread = Threads("checkpoints")
        self._lock = threading.Lock()
        self._number = 0
        self._written: dict[str, tuple[int, Offsets]] = {}

    def read(self, name: str) -> Offsets:
        """Return the offsets of a checkpoint or its copy; empty if it is missing or unreadable."""
        is_whole = True

        def report_damage(damage: CheckpointError) -> None:
            nonlocal is_whole
            is_whole = False
            _log.warning("checkpoint is damaged", file=name, cause=str(damage))

        try:
            offsets = read_offsets(self._fs, self._directory, name, on_damage=report_damage)
        except CheckpointError as error:
            _log.warning("checkpoint is damaged, ignored", file=name, cause=str(error))
            return {}
        if is_whole:
            self._written[name] = 0, dict(offsets)
        return offsets

    def write(self, name: str, offsets: Offsets) -> bool:
        """Write a checkpoint if it has changed; return whether it is on disk."""
        return self._log_failure(name, self._write(name, offsets, self._turn()))

    async def save(self, name: str, offsets: Offsets) -> bool:
        """Do the same as :meth:`write`, in the thread."""
        step = partial(self._write, name, offsets, self._turn())
        return self._log_failure(name, await self._thread.run(step))

    def close(self) -> None:
        """Wait for the thread and end it."""
        self._thread.close()

    def _turn(self) -> int:
        self._number += 1
        return self._number

    def _write(self, name: str, offsets: Offsets, turn: int) -> OSError | None:
        with self._lock:
            before, written = self._written.get(name, (0, None))
            if turn < before or offsets == written:
                return None
            try:
                write_offsets(self._fs, self._directory, name, offsets, copied=True)
            except OSError as error:
                return without_traceback(error)
            self._written[name] = turn, offsets
        return None

    @staticmethod
    def _log_failure(name: str, failure: OSError | None) -> bool:
        if failure is not None:
            _log.warning("checkpoint not written", file=name, cause=str(failure))
        return failure is None
