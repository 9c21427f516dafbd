"""The invariants of share groups (KIP-932): what was acquired, acknowledged and delivered again.

:class:`ShareLedger` sees each acquisition at the broker that makes it, with the share partition's
object, and each acknowledgement when a client has its answer. A former leader that does not know
its successor may acquire records whose delivery is complete under the successor, because
acquisitions are not written. Hence an acquisition is only compared with outcomes under the same or
an earlier leader epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from uuid import UUID

from fencepost.coordinator.services.share_partitions import ServedPartition, SharePartitions
from fencepost.groups.share.commands import (
    AcknowledgeBatch,
    AcquiredRange,
    AcquireRequest,
    Fetched,
    IsolationLevel,
    SharePartitionKey,
)
from fencepost.groups.share.partition import SharePartition
from fencepost.groups.share.states import AcknowledgeType
from fencepost.logcore.reading import Isolation
from tests.sim.invariants import BrokenInvariantError

DELIVERY_LIMIT: Final = 5
"""``share.delivery.count.limit``."""
FINAL: Final = frozenset({AcknowledgeType.ACCEPT, AcknowledgeType.REJECT, AcknowledgeType.GAP})
"""Acknowledgement types; after a successful one, the record is not delivered again."""


@dataclass(slots=True)
class Acquisition:
    """The last acquisition of an offset."""

    share: SharePartition
    member: str
    count: int
    is_acknowledged: bool = False
    """Whether the member got NONE for a final acknowledgement."""


@dataclass(slots=True)
class Offset:
    """The acquisitions and acknowledgements of one offset of a share partition."""

    by_leader: dict[int, Acquisition] = field(default_factory=dict)
    """Leader epoch → the last acquisition by that leader. A former leader may still deliver
    records.
    """
    most: int = 0
    """The greatest delivery count."""
    ended_epoch: int | None = None
    """The leader epoch under which a final acknowledgement succeeded."""
    written_epoch: int | None = None
    """The leader epoch under which a leader learned that a final state was written."""
    released: tuple[int, int] | None = None
    """Leader epoch and delivery count of the last successful release."""
    open_to: dict[str, Acquisition] = field(default_factory=dict)
    """Member → the offset's last acquisition when the broker received the member's last
    acknowledgement. A member is missing if the offset was already below the start offset.
    """
    may_have_ended: bool = False
    """Whether a final acknowledgement was sent, whatever its outcome."""


@dataclass
class ShareLedger:
    """The acquisitions and acknowledgements of one group on one topic."""

    offsets: dict[int, dict[int, Offset]] = field(default_factory=dict)
    """Partition → offset → its acquisitions and acknowledgements."""
    topic_id: UUID | None = None
    assigned: set[int] = field(default_factory=set)
    """The partitions that were assigned to any member. Before a partition's first assignment, a
    repeated initialization may reset its state.
    """
    is_drained: bool = False
    """Whether all deliveries are complete, so that the members may stop."""
    may_jump: bool = False
    """Whether DeleteRecords may move the start offset."""
    persisted: dict[int, int] = field(default_factory=dict)
    """Partition → the greatest persisted start offset in a response to a client."""
    acquired: int = 0
    acknowledged: int = 0

    def at(self, index: int, offset: int) -> Offset:
        """Return the entry of an offset, a new one if there is none."""
        return self.offsets.setdefault(index, {}).setdefault(offset, Offset())

    # --- at the brokers ---

    def watched(self) -> tuple[tuple[Any, str, Any], ...]:
        """Return replacements of SharePartitions's methods that report to this ledger."""
        acquire, acknowledge, ledger = SharePartitions.acquire, SharePartitions.acknowledge, self

        def watched(
            shares: SharePartitions,
            served: ServedPartition,
            request: AcquireRequest,
            fetched: Fetched,
        ) -> list[AcquiredRange]:
            acquired = acquire(shares, served, request, fetched)
            ledger.take(shares, served, request, acquired)
            return acquired

        def watched_acknowledge(
            shares: SharePartitions,
            key: SharePartitionKey,
            member_id: str,
            batches: Sequence[AcknowledgeBatch],
        ) -> asyncio.Future[object]:
            served = shares.get(key)
            final: list[tuple[int, Acquisition]] = []
            if served is not None:
                final = ledger.comes(served.share, member_id, batches)
            future = acknowledge(shares, key, member_id, batches)
            future.add_done_callback(partial(ledger.written, key.partition, final))
            return future

        return (
            (SharePartitions, "acquire", watched),
            (SharePartitions, "acknowledge", watched_acknowledge),
        )

    def comes(
        self, share: SharePartition, member: str, batches: Sequence[AcknowledgeBatch]
    ) -> list[tuple[int, Acquisition]]:
        """Note which acknowledged offsets are at or above the start offset.

        An error code NONE for an offset below the start offset proves nothing. Return the offsets
        that get a final state, with their acquisitions.
        """
        final: list[tuple[int, Acquisition]] = []
        for batch in batches:
            kinds = (
                batch.types
                if len(batch.types) > 1
                else batch.types * (batch.last - batch.first + 1)
            )
            for offset, kind in zip(range(batch.first, batch.last + 1), kinds, strict=True):
                known = self.at(share.key.partition, offset)
                last = known.by_leader.get(share.leader_epoch)
                if offset >= share.start_offset and last is not None:
                    known.open_to[member] = last
                    if kind in FINAL:
                        final.append((offset, last))
                else:
                    known.open_to.pop(member, None)
        return final

    def written(
        self,
        index: int,
        final: Iterable[tuple[int, Acquisition]],
        future: asyncio.Future[object],
    ) -> None:
        """Check and record final states that a leader has written, even if no client was told.

        A share partition that was dropped while the write was in progress calls this, too.
        """
        if future.cancelled() or future.exception() is not None:
            return
        for offset, last in final:
            known = self.at(index, offset)
            if known.written_epoch is not None:
                raise BrokenInvariantError(
                    f"offset {offset} of partition {index} ends a second time, by {last.member}"
                )
            known.written_epoch = last.share.leader_epoch

    def take(
        self,
        shares: SharePartitions,
        served: ServedPartition,
        request: AcquireRequest,
        acquired: Sequence[AcquiredRange],
    ) -> None:
        """Check an acquisition, and record it."""
        share = served.share
        share.check()
        is_committed = (
            shares.settings.of(share.key.group_id).isolation_level is IsolationLevel.READ_COMMITTED
        )
        isolation = Isolation.READ_COMMITTED if is_committed else Isolation.READ_UNCOMMITTED
        end = served.log.reader.end_of(isolation)
        for entry in acquired:
            if entry.last >= end or entry.first < share.start_offset:
                raise BrokenInvariantError(
                    f"{entry} is acquired of {share.key}, which has {share.start_offset} to {end}"
                )
            for offset in range(entry.first, entry.last + 1):
                self._acquire(share, request.member_id, offset, entry.delivery_count)
        self.acquired += sum(entry.size for entry in acquired)

    def _acquire(self, share: SharePartition, member: str, offset: int, count: int) -> None:
        index, epoch = share.key.partition, share.leader_epoch
        known = self.at(index, offset)
        where = f"offset {offset} of partition {index}, epoch {epoch}, delivery {count},"
        for ended_epoch in (known.ended_epoch, known.written_epoch):
            if ended_epoch is not None and ended_epoch <= epoch:
                raise BrokenInvariantError(
                    f"{where} is delivered to {member}; it ended in epoch {ended_epoch}"
                )
        if not 1 <= count <= DELIVERY_LIMIT:
            raise BrokenInvariantError(f"{where} is beyond the limit")
        last = known.by_leader.get(epoch)
        if last is not None and last.share is share and count != last.count + 1:
            raise BrokenInvariantError(f"{where} follows delivery {last.count}")
        if known.released is not None:
            released_epoch, released_count = known.released
            if released_epoch <= epoch and count <= released_count:
                raise BrokenInvariantError(f"{where} was released as delivery {released_count}")
        known.by_leader[epoch] = Acquisition(share, member, count)
        known.most = max(known.most, count)

    # --- at the clients ---

    def delivered(self, member: str, index: int, offset: int, count: int) -> None:
        """Check that a client got what a broker has acquired for it."""
        known = self.at(index, offset)
        if not known.by_leader or count > known.most:
            raise BrokenInvariantError(
                f"{member} gets offset {offset} of partition {index}, delivery {count}, which no"
                " broker has acquired"
            )

    def tries(self, index: int, kinds: Iterable[tuple[int, AcknowledgeType]]) -> None:
        """Record acknowledgements that a client sends; their outcome may stay unknown."""
        for offset, kind in kinds:
            if kind in FINAL:
                self.at(index, offset).may_have_ended = True

    def succeeded(
        self, member: str, index: int, kinds: Iterable[tuple[int, AcknowledgeType]]
    ) -> None:
        """Check and record acknowledgements that were answered with NONE."""
        for offset, kind in kinds:
            known, self.acknowledged = self.at(index, offset), self.acknowledged + 1
            last = known.open_to.get(member)
            if kind is AcknowledgeType.RENEW or last is None:
                continue
            if last.member != member or last.is_acknowledged:
                raise BrokenInvariantError(
                    f"{member} ends {offset} of partition {index}, which is {last.member}'s,"
                    f" acknowledged: {last.is_acknowledged}"
                )
            epoch, newest = last.share.leader_epoch, max(known.by_leader)
            if kind is AcknowledgeType.RELEASE:
                # The response may be late: a later leader has read the state and delivers the
                # record again.
                if newest > epoch and known.by_leader[newest].count <= last.count:
                    raise BrokenInvariantError(
                        f"{member} released {offset} of partition {index} as delivery"
                        f" {last.count}, and epoch {newest} does not know it"
                    )
                known.released = epoch, last.count
                continue
            if newest > epoch:
                # The later leader's read fences the writes of the earlier leader.
                raise BrokenInvariantError(
                    f"{member} ends {offset} of partition {index} under epoch {epoch}, and it was"
                    f" delivered under {newest}"
                )
            last.is_acknowledged = True
            known.ended_epoch = epoch

    def told_start(self, index: int, start_offset: int) -> None:
        """Check the persisted start offset of a DescribeShareGroupOffsets."""
        known = self.persisted.get(index, -1)
        if start_offset < known:
            raise BrokenInvariantError(f"the start offset {known} of {index} is {start_offset} now")
        self.persisted[index] = start_offset

    # --- at the end ---

    def unended(self, index: int, offset: int) -> str | None:
        """Return why the delivery of an acknowledged record is not complete, None if it is."""
        known = self.offsets.get(index, {}).get(offset)
        if known is None or not known.by_leader:
            return "it was never delivered"
        if known.may_have_ended or known.most >= DELIVERY_LIMIT:
            return None
        return f"it was delivered {known.most} times, and has not ended"

    def with_outcomes(self) -> set[int]:
        """Return the partitions that have a state: a final acknowledgement has succeeded."""
        return {
            index
            for index, known in self.offsets.items()
            if any(delivery.ended_epoch is not None for delivery in known.values())
        }
