"""Begin to lead or follow partitions after a new metadata image, in slices of time.

To lead a partition that is new on this broker takes about a millisecond, for the creation of its
directory and files. A topic may have thousands of partitions. Partitions that do not fit into a
slice are handled later, or as soon as a request accesses them, so clients do not notice the delay.

A change that fails unexpectedly is retried until it succeeds or a newer change replaces it. The
retry does not wait for the next image: that image may never come, or may not change the partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from fencepost.cluster.image import LocalPartition
from fencepost.coordinator.metadata.names import INTERNAL_TOPICS
from fencepost.coordinator.runtime.background import (
    AFTER_FAILURE_MS,
    SLICE_MS,
    call_later,
    log_failure,
    spawn,
)
from fencepost.logcore.clock import monotonic_s

FIRST_SLICE_MS: Final = 20
"""The first slice of time for the changes of an image, in milliseconds."""

TopicPartition = tuple[str, int]


class DueChanges:
    """Pending changes in order; ``do`` leads or follows one partition."""

    def __init__(self, do: Callable[[LocalPartition], None]) -> None:
        self._do = do
        self.partitions: dict[TopicPartition, LocalPartition] = {}
        """The pending changes, in order."""
        self._task: asyncio.Task[None] | None = None
        self.failed: dict[TopicPartition, LocalPartition] = {}
        """The failed changes, which will be retried."""
        self._retry: asyncio.TimerHandle | None = None

    def add(self, partitions: Iterable[LocalPartition]) -> None:
        """Add changes, replacing pending ones of the same partition, and handle the first ones.

        Internal topics come first, since their shards are started next.
        """
        for partition in partitions:
            self.partitions[partition.topic, partition.index] = partition
            self.failed.pop((partition.topic, partition.index), None)
        for key in [key for key in self.partitions if key[0] in INTERNAL_TOPICS]:
            self.settle(key)
        self._settle_slice(FIRST_SLICE_MS)
        if self.partitions and (self._task is None or self._task.done()):
            self._task = spawn(self._settle_rest(), "lead and follow")

    def settle(self, key: TopicPartition) -> None:
        """Handle the partition's change now, if it is pending."""
        local = self.partitions.pop(key, None)
        if local is None:
            return
        try:
            self._do(local)
        except Exception as error:  # noqa: BLE001 - the other partitions must be handled
            log_failure("lead or follow", error, partition=f"{local.topic}-{local.index}")
            self.failed[key] = local
            if self._retry is None:
                loop = asyncio.get_running_loop()
                self._retry = call_later(loop, AFTER_FAILURE_MS, "lead or follow", self._again)

    def _again(self) -> None:
        self._retry = None
        failed, self.failed = self.failed, {}
        self.add(failed.values())

    def drop(self, local: LocalPartition) -> None:
        """Drop a pending change: the replica was deleted."""
        key = local.topic, local.index
        for kept in (self.partitions, self.failed):
            due = kept.get(key)
            if due is not None and due.topic_id == local.topic_id:
                del kept[key]

    def finish(self) -> None:
        """Handle all pending changes now."""
        while self.partitions:
            self.settle(next(iter(self.partitions)))

    async def close(self) -> None:
        """Drop all pending changes."""
        self.partitions.clear()
        self.failed.clear()
        if self._retry is not None:
            self._retry.cancel()
        if self._task is not None:
            await asyncio.wait({self._task})

    def _settle_slice(self, slice_ms: int) -> None:
        until = monotonic_s() + slice_ms / 1000
        while self.partitions and monotonic_s() < until:
            self.settle(next(iter(self.partitions)))

    async def _settle_rest(self) -> None:
        while self.partitions:
            await asyncio.sleep(0)
            self._settle_slice(SLICE_MS)
