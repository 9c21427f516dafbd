"""Partitions that an image asks to lead or to follow; of many of them a slice of time at once.

To lead a partition that is new here takes about a millisecond, for its directory and files are
made. A topic may have thousands. So what a slice has no room for comes later, and at once for
whoever asks for it: nobody sees that it has not been done.

What fails for a reason that nobody expected is tried again until it is done or there is something
newer: the next image may never come, and says nothing of what has not changed.
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
    spawn,
    tell,
)
from fencepost.logcore.clock import monotonic_s

FIRST_SLICE_MS: Final = 20
"""How long an image keeps the event loop at first for what is to be led and followed."""

TopicPartition = tuple[str, int]


class DueChanges:
    """What is still to be done, in order; ``do`` leads or follows one partition."""

    def __init__(self, do: Callable[[LocalPartition], None]) -> None:
        self._do = do
        self.partitions: dict[TopicPartition, LocalPartition] = {}
        """Those that are due, in order."""
        self._task: asyncio.Task[None] | None = None
        self.failed: dict[TopicPartition, LocalPartition] = {}
        """Those that are tried again."""
        self._retry: asyncio.TimerHandle | None = None

    def take(self, partitions: Iterable[LocalPartition]) -> None:
        """Begin with these; a partition that was due already is due as it is now.

        Those of the coordinators come first, for their shards are next.
        """
        for one in partitions:
            self.partitions[one.topic, one.index] = one
            self.failed.pop((one.topic, one.index), None)
        for key in [key for key in self.partitions if key[0] in INTERNAL_TOPICS]:
            self.settle(key)
        self._some(FIRST_SLICE_MS)
        if self.partitions and (self._task is None or self._task.done()):
            self._task = spawn(self._rest(), "lead and follow")

    def settle(self, key: TopicPartition) -> None:
        """Do it now, if it is due."""
        one = self.partitions.pop(key, None)
        if one is None:
            return
        try:
            self._do(one)
        except Exception as error:  # noqa: BLE001 - the others have to be led and followed as well
            tell("lead or follow", error, partition=f"{one.topic}-{one.index}")
            self.failed[key] = one
            if self._retry is None:
                loop = asyncio.get_running_loop()
                self._retry = call_later(loop, AFTER_FAILURE_MS, "lead or follow", self._again)

    def _again(self) -> None:
        self._retry = None
        failed, self.failed = self.failed, {}
        self.take(failed.values())

    def drop(self, one: LocalPartition) -> None:
        """Do not do it: the replica is gone."""
        key = one.topic, one.index
        for kept in (self.partitions, self.failed):
            due = kept.get(key)
            if due is not None and due.topic_id == one.topic_id:
                del kept[key]

    def finish(self) -> None:
        """Do all of it now."""
        while self.partitions:
            self.settle(next(iter(self.partitions)))

    async def close(self) -> None:
        """Leave the rest undone."""
        self.partitions.clear()
        self.failed.clear()
        if self._retry is not None:
            self._retry.cancel()
        if self._task is not None:
            await asyncio.wait({self._task})

    def _some(self, slice_ms: int) -> None:
        until = monotonic_s() + slice_ms / 1000
        while self.partitions and monotonic_s() < until:
            self.settle(next(iter(self.partitions)))

    async def _rest(self) -> None:
        while self.partitions:
            await asyncio.sleep(0)
            self._some(SLICE_MS)
