"""What is on its way out of the data directory: topics that were deleted, files nobody reads.

A file system takes its time to give a large file up, and a topic may have thousands of them. So a
deleted partition ceases to serve at once, its directory gets another name soon, a few at a time,
and a thread removes it then. What a stop or a kill leaves is found at the next start by its name,
and removed when the broker listens.

Source: ``LogManager.asyncDelete``, ``LogManager.deleteLogs``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import structlog

from fencepost.coordinator.runtime.background import Pace, Threads, spawn
from fencepost.logcore.errors import LogError
from fencepost.logcore.fs import FileSystem
from fencepost.logcore.partition import Partition

PRODUCERS_AT_ONCE: Final = 2_000
"""Producers of a deleted partition that are forgotten before others get their turn."""

TopicPartition = tuple[str, int]

_log = structlog.get_logger(__name__)


class Removals:
    """``broker.logs.removals``. Belongs to the event loop; the thread begins with ``start``.

    No directory of a deleted partition is renamed before the record of the deletion is durable,
    because power loss may bring the topic back until then. ``force`` makes it durable at once, and
    raises LogError where it cannot.
    """

    def __init__(self, fs: FileSystem, directory: str, force: Callable[[], None]) -> None:
        self._fs = fs
        self._directory = directory
        self._force = force
        self._doomed: dict[TopicPartition, Partition] = {}
        """Partitions that were deleted, and whose directory still has its name."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_renamed = False
        """Directories have other names that are not on disk: their content has to wait."""
        self._thread = Threads("removals")
        self._task: asyncio.Task[None] | None = None
        self._may_run = False

    def start(self) -> None:
        """Begin to remove, on the running loop."""
        self._may_run = True
        self._go_on()

    async def close(self) -> None:
        """Rename the directories of deleted partitions, and finish the removal under way.

        The next start removes the rest. Where the records of deletions cannot be made durable, it
        also decides which directories belong to deleted topics.
        """
        self._may_run = False
        self._rename_forced()
        if self._task is not None:
            await asyncio.wait({self._task})
        self._thread.close()

    async def finish(self) -> None:
        """Return when nothing is left to remove."""
        self.start()
        while self._task is not None:
            await asyncio.wait({self._task})

    # --- partitions of deleted topics ---

    def doom(self, partition: Partition) -> None:
        """Let a partition serve nothing more; its directory may be in the way for a while."""
        partition.doom()
        self._doomed[partition.topic, partition.index] = partition

    @property
    def doomed(self) -> list[Partition]:
        """Deleted partitions whose directories still have their names."""
        return [*self._doomed.values()]

    def make_way(self, key: TopicPartition) -> None:
        """Rename the directory of a deleted partition at once: a new one needs the name.

        Raises LogError where the record of the deletion cannot be made durable.
        """
        if key in self._doomed:
            self._force()
            self._rename(key)

    async def rename_all(self, partitions: Sequence[Partition]) -> None:
        """Rename the directories of deleted partitions, with room for others in between.

        The records of their deletions are durable. Later deletions have to wait for their own.
        """
        pace = Pace()
        for partition in partitions:
            while not partition.producers.release(PRODUCERS_AT_ONCE):
                await pace()
            key = partition.topic, partition.index
            if self._doomed.get(key) is partition:
                self._rename(key)
            await pace()

    def _rename_forced(self) -> None:
        """Rename the directories of all deleted partitions, or close their files."""
        if not self._doomed:
            return
        try:
            self._force()
        except LogError as error:
            _log.warning("directories of deleted topics not removed", cause=str(error))
            while self._doomed:
                self._doomed.popitem()[1].finish_close(None, None)
        while self._doomed:
            self._rename(next(iter(self._doomed)))

    def _rename(self, key: TopicPartition) -> None:
        partition = self._doomed.pop(key)
        try:
            renamed = partition.rename_doomed()
        except (LogError, OSError) as error:
            # It stays for the next start; the topic is gone all the same.
            _log.warning("directory not removed", partition=partition.name, cause=str(error))
            return
        self._is_renamed = True
        self.add_directory(renamed)

    # --- files ---

    def add_directory(self, path: str) -> None:
        """Remove a directory and all in it."""
        self._add(partial(self._fs.remove_tree, path))

    def add_file(self, path: str) -> None:
        """Remove a file."""
        self._add(partial(self._fs.remove, path))

    def _add(self, removal: Callable[[], None]) -> None:
        self._waiting.append(removal)
        self._go_on()

    def _go_on(self) -> None:
        if self._may_run and self._waiting and self._task is None:
            self._task = spawn(self._run(), "removals")

    async def _run(self) -> None:
        try:
            while self._waiting and self._may_run:
                if self._is_renamed:
                    # Else power loss could bring the old name back with half of what it had.
                    self._is_renamed = False
                    if not await self._is_done(partial(self._fs.sync_directory, self._directory)):
                        self._waiting.clear()
                        return
                await self._is_done(self._waiting.popleft())
        finally:
            self._task = None

    async def _is_done(self, step: Callable[[], None]) -> bool:
        """Take a step; what fails stays for the next start."""
        try:
            await self._thread.run(step)
        except Exception as error:  # noqa: BLE001 - the others have to go as well
            _log.warning("not removed", cause=f"{type(error).__name__}: {error}")
            return False
        return True
