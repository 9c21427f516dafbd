"""Removal of deleted topics and unused files from the data directory.

A file system may take a long time to remove a large file, and a topic may have thousands of files.
So a deleted partition stops serving at once, its directory is renamed soon afterwards, and a thread
removes the renamed directory later. A restarted broker finds the remaining directories by their
names, and removes them once it accepts connections.

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
"""How many producers of a deleted partition are removed before the event loop runs other work."""

TopicPartition = tuple[str, int]

_log = structlog.get_logger(__name__)


class Removals:
    """The queue of removals (``logs.removals``), for use on the event loop only.

    No directory of a deleted partition is renamed before the record of the deletion is durable,
    because until then a power failure may restore the topic. ``force`` makes the record durable at
    once, or raises LogError.
    """

    def __init__(self, fs: FileSystem, directory: str, force: Callable[[], None]) -> None:
        self._fs = fs
        self._directory = directory
        self._force = force
        self._deleted: dict[TopicPartition, Partition] = {}
        """Deleted partitions whose directories have not been renamed yet."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_renamed = False
        """Whether a rename is not on disk yet; until it is, no directory is removed."""
        self._thread = Threads("removals")
        self._task: asyncio.Task[None] | None = None
        self._may_run = False

    def start(self) -> None:
        """Start the removals, on the running loop."""
        self._may_run = True
        self._go_on()

    async def close(self) -> None:
        """Rename the directories of deleted partitions, and finish the current removal.

        The other directories are removed when the broker starts again. If the records of deletions
        cannot be made durable, no directory is renamed. At the next start, the metadata decides
        which topics are deleted.
        """
        self._may_run = False
        self._rename_forced()
        if self._task is not None:
            await asyncio.wait({self._task})
        self._thread.close()

    async def finish(self) -> None:
        """Wait until the queue is empty."""
        self.start()
        while self._task is not None:
            await asyncio.wait({self._task})

    # --- partitions of deleted topics ---

    def mark_deleted(self, partition: Partition) -> None:
        """Stop serving a partition; its directory is renamed later."""
        partition.mark_deleted()
        self._deleted[partition.topic, partition.index] = partition

    @property
    def deleted(self) -> list[Partition]:
        """Return the deleted partitions whose directories have not been renamed yet."""
        return [*self._deleted.values()]

    def free_name(self, key: TopicPartition) -> None:
        """Rename the directory of a deleted partition at once, because a new one needs the name.

        Raises LogError if the record of the deletion cannot be made durable.
        """
        if key in self._deleted:
            self._force()
            self._rename(key)

    async def rename_all(self, partitions: Sequence[Partition]) -> None:
        """Rename the directories of deleted partitions, yielding in between.

        The caller has made the records of their deletions durable; partitions that are deleted
        later need another call.
        """
        pace = Pace()
        for partition in partitions:
            while not partition.producers.release(PRODUCERS_AT_ONCE):
                await pace()
            key = partition.topic, partition.index
            if self._deleted.get(key) is partition:
                self._rename(key)
            await pace()

    def _rename_forced(self) -> None:
        """Rename the directories of deleted partitions, or close their files if that is unsafe."""
        if not self._deleted:
            return
        try:
            self._force()
        except LogError as error:
            _log.warning("directories of deleted topics not removed", cause=str(error))
            while self._deleted:
                self._deleted.popitem()[1].finish_close(None, None)
        while self._deleted:
            self._rename(next(iter(self._deleted)))

    def _rename(self, key: TopicPartition) -> None:
        partition = self._deleted.pop(key)
        try:
            renamed = partition.rename_deleted()
        except (LogError, OSError) as error:
            # The directory is removed when the broker starts again; the topic is deleted anyway.
            _log.warning("directory not removed", partition=partition.name, cause=str(error))
            return
        self._is_renamed = True
        self.add_directory(renamed)

    # --- files ---

    def add_directory(self, path: str) -> None:
        """Queue the removal of a directory with its content."""
        self._add(partial(self._fs.remove_tree, path))

    def add_file(self, path: str) -> None:
        """Queue the removal of a file."""
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
                    # Otherwise a power failure could restore the old name with half of the content.
                    self._is_renamed = False
                    if not await self._is_done(partial(self._fs.sync_directory, self._directory)):
                        self._waiting.clear()
                        return
                await self._is_done(self._waiting.popleft())
        finally:
            self._task = None

    async def _is_done(self, step: Callable[[], None]) -> bool:
        """Run a step; return False after a failure: the removal is then left to a restart."""
        try:
            await self._thread.run(step)
        except Exception as error:  # noqa: BLE001 - the other removals must be done
            _log.warning("not removed", cause=f"{type(error).__name__}: {error}")
            return False
        return True
