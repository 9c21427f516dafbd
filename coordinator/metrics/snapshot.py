"""The broker as it stands while a scrape looks at it, piece by piece: rows for all who tell of it.

Rows are taken down in slices of the loop's time, so two of them may be of different moments; each
by itself is of one. Nothing is kept from one scrape to the next but what :mod:`tally` has learned.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from fencepost.coordinator.metadata.names import is_progress
from fencepost.coordinator.metrics.families import label, labels
from fencepost.coordinator.runtime.background import Pace
from fencepost.coordinator.runtime.shard import M_co, ShardRuntime
from fencepost.coordinator.runtime.shard_state import ShardState
from fencepost.groups.assignors.client.protocol import decode_assignment
from fencepost.groups.classic_group import CONSUMER_PROTOCOL_TYPE, ClassicGroup
from fencepost.groups.foreign_group import ForeignGroup
from fencepost.logcore.errors import CorruptRecordError, LogError
from fencepost.logcore.traffic import Traffic
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.cluster.image import TopicImage
    from fencepost.coordinator.services import Services
    from fencepost.groups.shard import Group
    from fencepost.logcore.partition import Partition
    from fencepost.txn.state import TransactionMetadata

TopicPartition = tuple[str, int]

LOOKED_AT = 1_000
"""Open transactions of one partition that are asked about at the coordinator."""


@dataclass(slots=True)
class PartitionRow:
    """A partition. One that was never used has no log, and is at 0.

    Where another broker has it, nothing is known of its offsets here.
    """

    topic: str
    index: int
    written: str
    """The labels ``topic`` and ``partition``."""
    start: int = 0
    stable: int = 0
    high: int = 0
    end: int = 0
    size: int = 0
    segments: int = 0
    open_transactions: int = 0
    hanging: int = 0
    held_since_ms: int | None = None
    """When the transaction began that holds the last stable offset back."""
    partition: Partition | None = None
    is_here: bool = True
    """Whether this broker has a replica."""
    is_in_sync: bool = True
    """Whether that replica has all that is committed, so that lags can be counted by it."""


@dataclass(slots=True)
class TopicRow:
    """A topic and what its partitions add up to."""

    topic: TopicImage
    written: str
    """The label ``topic``."""
    rows: list[PartitionRow] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(slots=True)
class OffsetRow:
    """A group's committed offset. The figures behind it are filled in by :mod:`lag`."""

    group: str
    written: str
    """The labels ``group``, ``topic`` and ``partition``."""
    at: PartitionRow
    committed: int
    records: int = 0
    held_back: int = 0
    uncommitted: int = 0
    seconds: float | None = 0.0
    """None if the first record has no time."""
    is_progress: bool = False
    """It is the progress of a Spark query, from which nothing is read: no lag."""

    @property
    def has_lag(self) -> bool:
        """Whether its lag is known here."""
        return self.at.is_in_sync and not self.is_progress

    @property
    def offsets(self) -> int:
        """What others call lag: high watermark minus committed offset."""
        return max(0, self.at.high - self.committed)


@dataclass(slots=True)
class GroupRow:
    """A group."""

    group_id: str
    written: str
    """The label ``group``."""
    kind: str
    state: str
    protocol_type: str
    protocol: str
    members: int
    commits: int
    group: Group
    assigned: list[frozenset[TopicPartition]] = field(default_factory=list)
    """What each member has; empty for a group of another protocol type."""
    offsets: list[OffsetRow] = field(default_factory=list)
    sums: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    """By topic, what the committed offsets and the known lags in offsets add up to."""
    unknown: int = 0
    """Partitions whose lag is not known: of another broker, or assigned, without a commit and not
    empty. The reset policy of the members decides where they begin in these."""


@dataclass(slots=True)
class Snapshot:
    """Everything, row by row."""

    now_ms: int
    topics: list[TopicRow] = field(default_factory=list)
    partitions: dict[TopicPartition, PartitionRow] = field(default_factory=dict)
    groups: list[GroupRow] = field(default_factory=list)
    transactions: Counter[str] = field(default_factory=Counter)
    """Transactional ids by Kafka's name of their state."""
    oldest_ms: int | None = None
    """When the transaction began that is open for longest."""
    shards: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By topic and state."""
    traffic: Traffic = field(default_factory=Traffic)
    offline: int = 0
    missed: int = 0
    """Committed offsets that were left out, for want of room."""

    def offsets(self) -> Iterator[OffsetRow]:
        """The committed offsets of all groups."""
        return itertools.chain.from_iterable(one.offsets for one in self.groups)

    def lags(self) -> Iterator[OffsetRow]:
        """Those of them whose lag is known."""
        return (one for one in self.offsets() if one.has_lag)

    def here(self) -> Iterator[PartitionRow]:
        """The partitions of which this broker has a replica."""
        return (one for one in self.partitions.values() if one.is_here)


async def take(services: Services, max_rows: int, pace: Pace) -> Snapshot:
    """Look at everything; at ``max_rows`` committed offsets at most."""
    snapshot = Snapshot(services.clock.now_ms())
    suspects = await _partitions(services, snapshot, pace)
    await _transactions(services, snapshot, suspects, pace)
    await _groups(services, snapshot, max_rows, pace)
    return snapshot


async def _partitions(
    services: Services, snapshot: Snapshot, pace: Pace
) -> dict[TopicPartition, dict[int, int]]:
    """Fill in topics and partitions. Returns (producer id → first offset) of open transactions."""
    snapshot.traffic.add(services.logs.past_traffic)
    suspects: dict[TopicPartition, dict[int, int]] = {}
    for topic in list(services.metadata.topics.values()):
        one = TopicRow(topic, labels(topic=topic.name))
        snapshot.topics.append(one)
        for index in range(len(topic.partitions)):
            row = PartitionRow(topic.name, index, f'{one.written},partition="{index}"')
            registration = services.replicas.registration(topic.name, index)
            if registration is not None:
                row.is_here = services.node_id in registration.replicas
                row.is_in_sync = services.node_id in registration.isr
            partition = services.logs.find_open((topic.name, index))
            if partition is not None:
                opened = _look(row, partition)
                if opened:
                    suspects[topic.name, index] = opened
                one.traffic.add(partition.traffic)
                snapshot.offline += partition.offline is not None
            one.rows.append(row)
            snapshot.partitions[topic.name, index] = row
            await pace()
        snapshot.traffic.add(one.traffic)
    return suspects


def _look(row: PartitionRow, partition: Partition) -> dict[int, int]:
    row.partition = partition
    row.start, row.stable = partition.log_start_offset, partition.last_stable_offset
    row.high, row.end = partition.high_watermark, partition.log_end_offset
    log = partition.log
    row.segments = log.segment_count
    row.size = log.active.size if row.segments == 1 else log.size_bytes
    if partition.producers.first_unstable_offset is None:
        return {}
    opened = partition.producers.open_transactions()
    row.open_transactions = len(opened)
    return {producer_id: first for first, producer_id in opened[:LOOKED_AT]}


async def _transactions(
    services: Services,
    snapshot: Snapshot,
    suspects: Mapping[TopicPartition, Mapping[int, int]],
    pace: Pace,
) -> None:
    """Count transactions, and find those that are open in a log but not at their coordinator.

    They were open before we ask the coordinator. If it does not know them, and they are open still,
    nobody will ever end them: a marker is written before a transaction is over.
    """
    known: dict[int, TransactionMetadata] = {}
    knows_all = True
    for shard in _counted(services.txns.shards, snapshot):
        if shard.state is not ShardState.ACTIVE:
            knows_all = False
            continue
        for txn in list(shard.machine.transactions.values()):
            snapshot.transactions[txn.state.kafka_name] += 1
            if txn.partitions:
                known[txn.producer_id] = txn
                if snapshot.oldest_ms is None or txn.start_ms < snapshot.oldest_ms:
                    snapshot.oldest_ms = txn.start_ms
            await pace()
    for key, opened in suspects.items():
        row = snapshot.partitions[key]
        if row.partition is None:
            continue
        still = {producer_id: at for at, producer_id in row.partition.producers.open_transactions()}
        for producer_id, first in opened.items():
            txn_or_none = known.get(producer_id)
            if txn_or_none is not None and key in txn_or_none.partitions:
                if first == row.stable:
                    row.held_since_ms = txn_or_none.start_ms
            elif still.get(producer_id) == first:
                row.hanging += knows_all
                if first == row.stable:
                    row.held_since_ms = timestamp_at(row.partition, first)
        await pace()


def timestamp_at(partition: Partition, offset: int) -> int | None:
    """The time of the batch that holds an offset, in ms; None if it has none or can't be read."""
    try:
        for segment in partition.log.from_offset(offset)[:2]:
            position = segment.locate(offset)
            if position is not None:
                header = segment.header_at(position)
                is_first = not (header.has_delete_horizon or header.is_log_append_time)
                found = header.base_timestamp if is_first else header.max_timestamp
                return found if found >= 0 else None
    except (LogError, OSError):
        pass
    return None


def _counted(
    shards: Iterable[ShardRuntime[M_co]], snapshot: Snapshot
) -> Iterator[ShardRuntime[M_co]]:
    for shard in list(shards):
        snapshot.shards[shard.partition.topic, shard.state.value] += 1
        yield shard


async def _groups(services: Services, snapshot: Snapshot, max_rows: int, pace: Pace) -> None:
    count = 0
    topics = {one.topic.topic_id.bytes: one.topic.name for one in snapshot.topics}
    for shard in _counted(services.groups.shards, snapshot):
        if shard.state is not ShardState.ACTIVE:
            continue
        machine = shard.machine
        for group_id, group in list(machine.groups.items()):
            stored = machine.offsets.of_group(group_id)
            row = _group(group_id, group, 0 if stored is None else stored.commits)
            snapshot.groups.append(row)
            committed = {} if stored is None else dict(stored.committed)
            await pace()
            for owned in assigned(group, topics):
                row.assigned.append(owned)
                found = (snapshot.partitions.get(key) for key in owned - committed.keys())
                row.unknown += sum(_is_unread(at) for at in found if at is not None)
                await pace()
            for (topic, index), one in committed.items():
                at = snapshot.partitions.get((topic, index))
                if at is None:
                    continue  # the topic is gone, or about to come
                if count >= max_rows:
                    snapshot.missed += 1
                    continue
                count += 1
                added = OffsetRow(group_id, f"{row.written},{at.written}", at, one.value.offset)
                added.is_progress = is_progress(group_id, one.value.metadata)
                row.offsets.append(added)
                row.unknown += not (added.has_lag or added.is_progress)
                offsets, lag = row.sums.get(topic, (0, None))
                lag = (lag or 0) + added.offsets if added.has_lag else lag
                row.sums[topic] = offsets + added.committed, lag
                await pace()


def _is_unread(at: PartitionRow) -> bool:
    """Whether a group that has not committed may have something to read in a partition."""
    return not at.is_in_sync or at.start < at.stable


def assigned(group: Group, topics: Mapping[bytes, str]) -> Iterator[frozenset[TopicPartition]]:
    """What each member has; nothing of a group whose protocol type is not that of consumers."""
    if isinstance(group, ForeignGroup):
        return
    if not isinstance(group, ClassicGroup):
        for member_id in list(group.members):
            held = group.current(member_id).held
            yield frozenset((topics[one], index) for one, index in held if one in topics)
    elif group.protocol_type == CONSUMER_PROTOCOL_TYPE:
        for member in list(group.members.values()):
            yield _decoded(member.assignment)


def _decoded(assignment: bytes) -> frozenset[TopicPartition]:
    """The partitions of an assignment; none where a client has written something else."""
    if not assignment:
        return frozenset()
    try:
        return frozenset(decode_assignment(assignment)[0])
    except (CorruptRecordError, ValueError):
        return frozenset()


def _group(group_id: str, group: Group, commits: int) -> GroupRow:
    listed = group.listed()
    return GroupRow(
        group_id=group_id,
        written=f'group="{label(group_id)}"',
        kind=listed.group_type,
        state=listed.state,
        protocol_type=listed.protocol_type,
        protocol=getattr(group, "protocol_name", None) or "",
        members=len(group.members),
        commits=commits,
        group=group,
    )
