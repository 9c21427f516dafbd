"""Waits for the commit of a partition's records, after which no crash or election removes them.

Records of a partition without other replicas are committed once they are flushed, if
``flush.messages`` requires a flush (``flusher.py``), otherwise as soon as they are appended. In a
replicated partition, records below the high watermark are committed; the high watermark also waits
for the leader's own flushes.

A wait also ends if the partition goes offline, is deleted, or gets another leader. The callback is
called in these cases, too, and must check for them: nothing may be acknowledged then.

Source: ``DelayedProduce``, ``CoordinatorRuntime.HighWatermarkListener``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from fencepost.coordinator.runtime.background import SLICE_MS, swallow
from fencepost.coordinator.runtime.flusher import Callback, Flusher
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.partition import Partition


class PendingRecords(NamedTuple):
    """The records of a partition at the start of a wait: all below ``end``."""

    partition: Partition
    end: int
    leader_epoch: int

    @classmethod
    def of(cls, partition: Partition) -> PendingRecords:
        """Return all records that the partition has now."""
        return cls(partition, partition.log_end_offset, partition.marks.leader_epoch)

    @property
    def is_committed(self) -> bool:
        """Return whether the records may be acknowledged, once the wait is over.

        After a change of the leader, the records below ``end`` may be different ones.
        """
        marks = self.partition.marks
        if not marks.is_replicated:
            return marks.offline is None
        return marks.leader_epoch == self.leader_epoch and marks.high_watermark >= self.end


class _Wait:
    """A callback, and the number of partitions that it still waits for."""

    __slots__ = ("callback", "left")

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self.left = 0

    def over(self) -> None:
        """Count one partition as done."""
        self.left -= 1
        if not self.left:
            self.callback()


class _HighWatermarkWaits:
    """The waits for the high watermark of one partition, in the order of their requests.

    That is also the order of their offsets, since a log is truncated only after a loss of
    leadership. Callbacks run in a separate turn of the event loop, not inside the append or fetch
    that advances the high watermark.
    """

    def __init__(self, partition: Partition, on_empty: Callable[[], object]) -> None:
        self._partition = partition
        self._loop = asyncio.get_running_loop()
        self._waits: deque[tuple[int, _Wait]] = deque()
        self._on_empty = on_empty
        self._given_up = 0
        """The number of waits that end regardless of the high watermark."""
        self._is_armed = False
        self._unsubscribe = partition.marks.listen(self._changed)

    def __len__(self) -> int:
        return len(self._waits)

    def add(self, wait: _Wait) -> None:
        self._waits.append((self._partition.log_end_offset, wait))

    def give_up(self) -> None:
        """End all current waits."""
        self._given_up = len(self._waits)
        self._changed()

    def _is_due(self) -> bool:
        marks = self._partition.marks
        return bool(self._waits) and (
            self._given_up > 0
            or marks.stopped is not None
            or self._waits[0][0]
            <= (marks.high_watermark if marks.is_replicated else marks.flushed_end)
        )

    def _changed(self) -> None:
        if not self._is_armed and self._is_due():
            self._is_armed = True
            self._loop.call_soon(self._call)

    def _call(self) -> None:
        self._is_armed = False
        until = monotonic_s() + SLICE_MS / 1000
        while self._is_due():
            if monotonic_s() > until:
                self._changed()  # after other work of the event loop
                return
            self._given_up -= self._given_up > 0
            _, wait = self._waits.popleft()
            # Other callbacks wait for the same commit.
            with swallow("what waited for a commit", partition=self._partition.name):
                wait.over()
        if not self._waits:
            self._unsubscribe()
            self._on_empty()


class Commits:
    """The waits for commits (``storage.commits``), for use on the event loop only."""

    def __init__(self, flusher: Flusher) -> None:
        self._flusher = flusher
        self._behind: dict[Partition, _HighWatermarkWaits] = {}

        self.has_replicated = False
        """Whether any partition's high watermark depends on other replicas."""

    @property
    def is_idle(self) -> bool:
        """Return whether all records are committed: no replicated partition, no pending flush."""
        return not self.has_replicated and self._flusher.is_idle

    @property
    def waiting(self) -> int:
        """Return the number of waits for other replicas, counted per partition."""
        return sum(map(len, self._behind.values()))

    def is_held(self, partition: Partition) -> bool:
        """Return whether the partition has records that are not committed yet, but may be later."""
        marks = partition.marks
        if marks.is_replicated:
            return marks.high_watermark < partition.log_end_offset and marks.stopped is None
        return partition.flushes.is_awaited

    def after(self, partitions: Iterable[Partition], callback: Callback) -> bool:
        """Call ``callback`` once all current records of the partitions are committed or lost.

        Return False, without calling it, if no partition needs a wait. Callbacks for one partition
        are called in the order of their requests.
        """
        alone: list[Partition] = []
        shared: list[Partition] = []
        for partition in partitions:
            if partition.marks.is_replicated:
                # This request may need no wait, but the callbacks of earlier requests come first.
                if self.is_held(partition) or partition in self._behind:
                    shared.append(partition)
            else:
                alone.append(partition)
        if not shared:
            return self._flusher.after(alone, callback)
        wait = _Wait(callback)
        wait.left = len(shared)
        if alone and self._flusher.after(alone, wait.over):
            wait.left += 1
        for partition in shared:
            behind = self._behind.get(partition)
            if behind is None:
                forget = partial(self._behind.pop, partition, None)
                behind = self._behind[partition] = _HighWatermarkWaits(partition, forget)
            behind.add(wait)
        return True

    def committed(self, partitions: Iterable[Partition]) -> asyncio.Future[None] | None:
        """Return a future that is done when :meth:`after` would call back; None without a wait."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        return done if self.after(partitions, settle) else None

    def give_up(self, partition: Partition) -> None:
        """End all waits for a partition that this broker no longer leads."""
        behind = self._behind.get(partition)
        if behind is not None:
            behind.give_up()

    async def drain(self) -> None:
        """End the waits for other replicas, and return once no flush is pending."""
        for behind in self._behind.values():
            behind.give_up()
        await self._flusher.drain()
