"""Who waits until what a partition holds is committed: what crashes and elections can't take back.

A partition that this broker has alone is committed where the disk is, as far as ``flush.messages``
asks for that (``flusher.py``), and at once without it. One with other replicas is committed below
its high watermark, which a leader's own flushes hold back as well.

A wait can also end because the partition is off line or deleted, or because another broker leads
it now. Whoever waits is called all the same, and looks: nothing may be acknowledged then.

Source: ``DelayedProduce``, ``CoordinatorRuntime.HighWatermarkListener``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from fencepost.coordinator.runtime.background import SLICE_MS, survived
from fencepost.coordinator.runtime.flusher import Callback, Flusher
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.partition import Partition


class Held(NamedTuple):
    """What a partition held when somebody began to wait for it: all below ``end``."""

    partition: Partition
    end: int
    leader_epoch: int

    @classmethod
    def of(cls, partition: Partition) -> Held:
        """All that it holds now."""
        return cls(partition, partition.log_end_offset, partition.marks.leader_epoch)

    @property
    def is_committed(self) -> bool:
        """Whether it can be acknowledged, once the wait is over.

        With another leader in between, what stands below ``end`` may be something else.
        """
        marks = self.partition.marks
        if not marks.is_replicated:
            return marks.offline is None
        return marks.leader_epoch == self.leader_epoch and marks.high_watermark >= self.end


class _Wait:
    """One call that has to come, and how many partitions still keep it from coming."""

    __slots__ = ("callback", "left")

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self.left = 0

    def over(self) -> None:
        """One partition less."""
        self.left -= 1
        if not self.left:
            self.callback()


class _Behind:
    """Those who wait for the high watermark of one partition, in the order of their requests.

    So they are in the order of their offsets, for a log that shrinks has lost its leadership first.
    They are called in a turn of their own: news of a log come inside an append.
    """

    def __init__(self, partition: Partition, on_empty: Callable[[], object]) -> None:
        self._partition = partition
        self._loop = asyncio.get_running_loop()
        self._waits: deque[tuple[int, _Wait]] = deque()
        self._on_empty = on_empty
        self._given_up = 0
        """How many of them need not wait, whatever the high watermark."""
        self._is_armed = False
        self._unsubscribe = partition.marks.listen(self._changed)

    def __len__(self) -> int:
        return len(self._waits)

    def add(self, wait: _Wait) -> None:
        self._waits.append((self._partition.log_end_offset, wait))

    def give_up(self) -> None:
        """Have all called that wait now."""
        self._given_up = len(self._waits)
        self._changed()

    def _is_due(self) -> bool:
        marks = self._partition.marks
        return bool(self._waits) and (
            self._given_up > 0
            or marks.stopped is not None
            or self._waits[0][0] <= (marks.high_watermark if marks.is_replicated else marks.own_end)
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
                self._changed()  # others have their turn first
                return
            self._given_up -= self._given_up > 0
            _, wait = self._waits.popleft()
            # Others wait for the same.
            with survived("what waited for a commit", partition=self._partition.name):
                wait.over()
        if not self._waits:
            self._unsubscribe()
            self._on_empty()


class Commits:
    """``storage.commits``. Belongs to the event loop."""

    def __init__(self, flusher: Flusher) -> None:
        self._flusher = flusher
        self._behind: dict[Partition, _Behind] = {}

        self.has_replicated = False
        """Whether any partition has its high watermark from outside."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing that any partition holds has to be waited for."""
        return not self.has_replicated and self._flusher.is_idle

    @property
    def waiting(self) -> int:
        """Partitions' shares of the waits for other replicas."""
        return sum(map(len, self._behind.values()))

    def is_held(self, partition: Partition) -> bool:
        """Whether some of what the partition holds now is not committed, and still may be."""
        marks = partition.marks
        if marks.is_replicated:
            return marks.high_watermark < partition.log_end_offset and marks.stopped is None
        return partition.flushes.is_awaited

    def after(self, partitions: Iterable[Partition], callback: Callback) -> bool:
        """Call ``callback`` once all that these partitions hold now is committed, or can't be.

        False, and no call, if nothing of it is held. Calls about one partition come in the order
        of their requests.
        """
        alone: list[Partition] = []
        shared: list[Partition] = []
        for one in partitions:
            if one.marks.is_replicated:
                # Who comes later is called later, though there may be nothing to wait for by now.
                if self.is_held(one) or one in self._behind:
                    shared.append(one)
            else:
                alone.append(one)
        if not shared:
            return self._flusher.after(alone, callback)
        wait = _Wait(callback)
        wait.left = len(shared)
        if alone and self._flusher.after(alone, wait.over):
            wait.left += 1
        for one in shared:
            behind = self._behind.get(one)
            if behind is None:
                forget = partial(self._behind.pop, one, None)
                behind = self._behind[one] = _Behind(one, forget)
            behind.add(wait)
        return True

    def committed(self, partitions: Iterable[Partition]) -> asyncio.Future[None] | None:
        """Do as :meth:`after` with a future instead of a call; None if nothing is held."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        return done if self.after(partitions, settle) else None

    def give_up(self, partition: Partition) -> None:
        """Call all who wait for a partition that this broker leads no more."""
        behind = self._behind.get(partition)
        if behind is not None:
            behind.give_up()

    async def drain(self) -> None:
        """Return once nothing waits for the disk any more; who waits for others is called."""
        for behind in self._behind.values():
            behind.give_up()
        await self._flusher.drain()
