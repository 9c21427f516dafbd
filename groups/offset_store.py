"""Committed and pending offsets of a shard. Only replay changes them.

A *pending* offset belongs to an open transaction. Until the transaction's marker is replayed,
OffsetFetch does not return the offset; an OffsetFetch with ``require_stable`` gets
UNSTABLE_OFFSET_COMMIT.

Source: Kafka's ``OffsetMetadataManager`` (its replay methods) and ``OffsetAndMetadata``.
"""

from __future__ import annotations

from dataclasses import field
from typing import Final, NamedTuple

from fencepost.groups.group import text_bytes
from fencepost.groups.records import OffsetCommitValue
from fencepost.logcore.budget import Account
from fencepost.logcore.machine import InvariantViolation
from fencepost.logcore.values import dataclass

OFFSET_BYTES: Final = 400
"""The measured memory, in bytes, of an offset without its metadata."""

TopicPartition = tuple[str, int]


class StoredOffset(NamedTuple):
    """A commit and its record's log offset. Of competing commits, the highest log offset wins."""

    value: OffsetCommitValue
    log_offset: int


@dataclass(slots=True)
class GroupOffsets:
    """One group's offsets."""

    committed: dict[TopicPartition, StoredOffset] = field(default_factory=dict)
    pending: dict[TopicPartition, dict[int, StoredOffset]] = field(default_factory=dict)
    """Pending offsets, by partition and producer id of the open transaction."""
    commits: int = field(default=0, compare=False)
    """The number of replayed plain commits."""

    @property
    def is_empty(self) -> bool:
        """Whether the group has no offsets."""
        return not self.committed and not self.pending

    @property
    def count(self) -> int:
        """The number of partitions with a committed or a pending offset."""
        return len(self.committed) + sum(tp not in self.committed for tp in self.pending)

    def partitions(self) -> list[TopicPartition]:
        """Return every partition with a committed or a pending offset, committed ones first."""
        return [*self.committed, *(tp for tp in self.pending if tp not in self.committed)]


def offset_bytes(metadata: str) -> int:
    """Return the memory of an offset with its metadata."""
    return OFFSET_BYTES + text_bytes(metadata) if metadata else OFFSET_BYTES


class OffsetStore:
    """The offsets of all groups of a shard."""

    def __init__(self, memory: Account | None = None) -> None:
        self.memory = memory or Account()
        """The memory of all offsets in bytes; see :func:`offset_bytes`."""
        self._groups: dict[str, GroupOffsets] = {}
        self._open: dict[int, dict[str, set[TopicPartition]]] = {}

    def of_group(self, group_id: str) -> GroupOffsets | None:
        """Return the group's offsets, None if it has none."""
        return self._groups.get(group_id)

    def group_ids(self) -> list[str]:
        """Return the groups that have offsets."""
        return list(self._groups)

    # --- replay ----------------------------------------------------------------------------------

    def put(self, group_id: str, partition: TopicPartition, stored: StoredOffset) -> None:
        """Replay a plain commit."""
        offsets = self._groups.get(group_id)
        if offsets is None:
            offsets = self._groups[group_id] = GroupOffsets()
        self._count(stored, offsets.committed.get(partition))
        offsets.committed[partition] = stored
        offsets.commits += 1

    def put_pending(
        self, group_id: str, partition: TopicPartition, producer_id: int, stored: StoredOffset
    ) -> None:
        """Replay a commit inside the transaction of ``producer_id``."""
        offsets = self._groups.setdefault(group_id, GroupOffsets())
        by_producer = offsets.pending.setdefault(partition, {})
        self._count(stored, by_producer.get(producer_id))
        by_producer[producer_id] = stored
        by_group = self._open.setdefault(producer_id, {})
        by_group.setdefault(group_id, set()).add(partition)

    def remove(self, group_id: str, partition: TopicPartition) -> None:
        """Replay a tombstone, which also removes pending offsets of open transactions."""
        offsets = self._groups.get(group_id)
        if offsets is None:
            return
        self._count(None, offsets.committed.pop(partition, None))
        for producer_id, stored in offsets.pending.pop(partition, {}).items():
            self._count(None, stored)
            self._forget_open(producer_id, group_id, partition)
        self._drop_if_empty(group_id)

    def end_transaction(self, producer_id: int, *, commit: bool) -> None:
        """Replay a marker. A plain commit at a higher log offset wins over a transactional one."""
        for group_id, partitions in self._open.pop(producer_id, {}).items():
            offsets = self._groups[group_id]
            for partition in partitions:
                by_producer = offsets.pending[partition]
                stored = by_producer.pop(producer_id)
                if not by_producer:
                    del offsets.pending[partition]
                present = offsets.committed.get(partition)
                is_newer = present is None or stored.log_offset > present.log_offset
                if commit and is_newer:
                    self._count(None, present)
                    offsets.committed[partition] = stored
                else:
                    self._count(None, stored)
            self._drop_if_empty(group_id)

    def _count(self, new: StoredOffset | None, old: StoredOffset | None) -> None:
        size = 0 if new is None else offset_bytes(new.value.metadata)
        self.memory.add(size if old is None else size - offset_bytes(old.value.metadata))

    def _forget_open(self, producer_id: int, group_id: str, partition: TopicPartition) -> None:
        by_group = self._open[producer_id]
        by_group[group_id].discard(partition)
        if not by_group[group_id]:
            del by_group[group_id]
        if not by_group:
            del self._open[producer_id]

    def _drop_if_empty(self, group_id: str) -> None:
        if self._groups[group_id].is_empty:
            del self._groups[group_id]

    # --- inspection ------------------------------------------------------------------------------

    def durable_state(self) -> object:
        """Return all offsets, sorted, in a form with a stable repr."""
        return [
            (
                group_id,
                sorted(offsets.committed.items(), key=lambda item: item[0]),
                sorted(
                    (partition, sorted(by_producer.items(), key=lambda item: item[0]))
                    for partition, by_producer in offsets.pending.items()
                ),
            )
            for group_id, offsets in sorted(self._groups.items(), key=lambda item: item[0])
        ]

    def check(self) -> None:
        """Raise :class:`InvariantViolation` if the index of open transactions is wrong."""
        expected: dict[int, dict[str, set[TopicPartition]]] = {}
        memory = 0
        for group_id, offsets in self._groups.items():
            if offsets.is_empty:
                raise InvariantViolation(f"group {group_id!r} keeps an empty table of offsets")
            memory += sum(
                offset_bytes(offset.value.metadata) for offset in offsets.committed.values()
            )
            for partition, by_producer in offsets.pending.items():
                memory += sum(
                    offset_bytes(offset.value.metadata) for offset in by_producer.values()
                )
                if not by_producer:
                    raise InvariantViolation(f"{partition} of {group_id!r} is pending for nobody")
                for producer_id in by_producer:
                    by_group = expected.setdefault(producer_id, {})
                    by_group.setdefault(group_id, set()).add(partition)
        if expected != self._open:
            raise InvariantViolation("pending offsets and open transactions differ")
        if memory != self.memory.used:
            raise InvariantViolation("the memory of the shard's offsets is miscounted")
