"""The state of the broker during a scrape, collected step by step as rows for all exporters.

Rows are collected in several turns of the event loop, so two rows may show the state at different
times; each row is consistent. A snapshot lasts for one scrape; :mod:`tally` and :mod:`view` keep
state between scrapes.
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
from fencepost.groups.share_group import ShareGroup
from fencepost.logcore.errors import CorruptRecordError, LogError
from fencepost.logcore.traffic import Traffic
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.cluster.image import TopicImage
    from fencepost.coordinator.broker_services import Services
    from fencepost.groups.shard import Group
    from fencepost.logcore.partition import Partition
    from fencepost.txn.state import TransactionMetadata

TopicPartition = tuple[str, int]

LOOKED_AT = 1_000
"""The maximum number of open transactions of one partition that are compared with the transactions
of the coordinator."""


@dataclass(slots=True)
class PartitionRow:
    """A partition. An unused partition has no log, and its offsets are 0.

    If only other brokers have replicas, this broker does not know the offsets.
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
    """Start time of the transaction that holds back the last stable offset."""
    partition: Partition | None = None
    is_here: bool = True
    """Whether this broker has a replica."""
    is_in_sync: bool = True
    """Whether this broker's replica is in the ISR, so that lags can be computed from its log."""


@dataclass(slots=True)
class TopicRow:
    """A topic and the sums over its partitions."""

    topic: TopicImage
    written: str
    """The label ``topic``."""
    rows: list[PartitionRow] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(slots=True)
class OffsetRow:
    """A group's committed offset. :mod:`lag` fills in the fields after ``committed``."""

    group: str
    written: str
    """The labels ``group``, ``topic`` and ``partition``."""
    at: PartitionRow
    committed: int
    records: int = 0
    held_back: int = 0
    uncommitted: int = 0
    seconds: float | None = 0.0
    """The age of the first record that counts in ``records``; None if it has no timestamp."""
    is_progress: bool = False
    """Whether a Spark query committed the offset only to show its progress; if so, there is no lag.
    """

    @property
    def has_lag(self) -> bool:
        """Whether the lag is known on this broker."""
        return self.at.is_in_sync and not self.is_progress

    @property
    def offsets(self) -> int:
        """The lag as other tools define it: high watermark minus committed offset."""
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
    """The partitions of each member; empty unless the protocol type is ``consumer``."""
    offsets: list[OffsetRow] = field(default_factory=list)
    sums: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    """By topic, the sum of committed offsets, and the sum of the known lags in offsets."""
    unknown: int = 0
    """The number of partitions with an unknown lag. Either this broker has no in-sync replica of
    the partition, or a member owns the partition, which has records, and the group has not
    committed an offset. In the second case the member's reset policy decides where it starts."""


@dataclass(slots=True)
class Snapshot:
    """The collected state, as rows."""

    now_ms: int
    topics: list[TopicRow] = field(default_factory=list)
    partitions: dict[TopicPartition, PartitionRow] = field(default_factory=dict)
    groups: list[GroupRow] = field(default_factory=list)
    transactions: Counter[str] = field(default_factory=Counter)
    """The number of transactional ids in each state, by Kafka's name for the state."""
    oldest_ms: int | None = None
    """The start time of the oldest open transaction."""
    shards: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The number of shards by topic and state."""
    traffic: Traffic = field(default_factory=Traffic)
    offline: int = 0
    leaderless: int = 0
    missed: int = 0
    """The number of committed offsets left out because of the limit."""

    def offsets(self) -> Iterator[OffsetRow]:
        """Return the committed offsets of all groups."""
        return itertools.chain.from_iterable(group.offsets for group in self.groups)

    def lags(self) -> Iterator[OffsetRow]:
        """Return the committed offsets whose lag is known."""
        return (offset for offset in self.offsets() if offset.has_lag)

    def hosted(self) -> Iterator[PartitionRow]:
        """Return the partitions of which this broker has a replica."""
        return (partition for partition in self.partitions.values() if partition.is_here)


async def collect(services: Services, max_rows: int, pace: Pace) -> Snapshot:
    """Collect a snapshot, with at most ``max_rows`` committed offsets."""
    snapshot = Snapshot(services.clock.now_ms())
    suspects = await _partitions(services, snapshot, pace)
    await _transactions(services, snapshot, suspects, pace)
    await _groups(services, snapshot, max_rows, pace)
    return snapshot


async def _partitions(
    services: Services, snapshot: Snapshot, pace: Pace
) -> dict[TopicPartition, dict[int, int]]:
    """Fill in topics and partitions; return (producer id → first offset) of open transactions."""
    snapshot.traffic.add(services.logs.past_traffic)
    suspects: dict[TopicPartition, dict[int, int]] = {}
    for topic in list(services.metadata.topics.values()):
        topic_row = TopicRow(topic, labels(topic=topic.name))
        snapshot.topics.append(topic_row)
        for index in range(len(topic.partitions)):
            row = PartitionRow(topic.name, index, f'{topic_row.written},partition="{index}"')
            registration = services.replicas.registration(topic.name, index)
            if registration is not None:
                row.is_here = services.node_id in registration.replicas
                row.is_in_sync = services.node_id in registration.isr
                snapshot.leaderless += registration.leader < 0
            partition = services.logs.find_open((topic.name, index))
            if partition is not None:
                opened = _read_partition(row, partition)
                if opened:
                    suspects[topic.name, index] = opened
                topic_row.traffic.add(partition.traffic)
                snapshot.offline += partition.offline is not None
            topic_row.rows.append(row)
            snapshot.partitions[topic.name, index] = row
            await pace()
        snapshot.traffic.add(topic_row.traffic)
    return suspects


def _read_partition(row: PartitionRow, partition: Partition) -> dict[int, int]:
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
    """Count transactions, and find those that are open in a log but unknown to their coordinator.

    ``suspects`` are transactions that were open in the logs before this function reads the
    coordinators' transactions. A coordinator writes the markers before it completes a transaction.
    So a transaction that the coordinator does not know, and that is still open in the log
    afterwards, is hanging: the coordinator will never end it.
    """
    transactions: dict[int, TransactionMetadata] = {}
    knows_all = True
    for shard in _counted(services.txns.shards, snapshot):
        if shard.state is not ShardState.ACTIVE:
            knows_all = False
            continue
        for txn in list(shard.machine.transactions.values()):
            snapshot.transactions[txn.state.kafka_name] += 1
            if txn.partitions:
                transactions[txn.producer_id] = txn
                if snapshot.oldest_ms is None or txn.start_ms < snapshot.oldest_ms:
                    snapshot.oldest_ms = txn.start_ms
            await pace()
    for key, opened in suspects.items():
        row = snapshot.partitions[key]
        if row.partition is None:
            continue
        still = {producer_id: at for at, producer_id in row.partition.producers.open_transactions()}
        for producer_id, first in opened.items():
            txn_or_none = transactions.get(producer_id)
            if txn_or_none is not None and key in txn_or_none.partitions:
                if first == row.stable:
                    row.held_since_ms = txn_or_none.start_ms
            elif still.get(producer_id) == first:
                row.hanging += knows_all
                if first == row.stable:
                    row.held_since_ms = timestamp_at(row.partition, first)
        await pace()


def timestamp_at(partition: Partition, offset: int) -> int | None:
    """Return the timestamp of the batch that holds an offset, in ms; None if there is none."""
    try:
        for segment in partition.log.from_offset(offset)[:2]:
            position = segment.locate(offset)
            if position is not None:
                header = segment.header_at(position)
                is_first = not (header.has_delete_horizon or header.is_log_append_time)
                timestamp = header.base_timestamp if is_first else header.max_timestamp
                return timestamp if timestamp >= 0 else None
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
    topics = {topic.topic.topic_id.bytes: topic.topic.name for topic in snapshot.topics}
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
                rows = (snapshot.partitions.get(key) for key in owned - committed.keys())
                row.unknown += sum(_is_unread(at) for at in rows if at is not None)
                await pace()
            for (topic, index), committed_offset in committed.items():
                at = snapshot.partitions.get((topic, index))
                if at is None:
                    continue  # the topic has been deleted, or is being created
                if count >= max_rows:
                    snapshot.missed += 1
                    continue
                count += 1
                added = OffsetRow(
                    group_id, f"{row.written},{at.written}", at, committed_offset.value.offset
                )
                added.is_progress = is_progress(group_id, committed_offset.value.metadata)
                row.offsets.append(added)
                row.unknown += not (added.has_lag or added.is_progress)
                offsets, lag = row.sums.get(topic, (0, None))
                lag = (lag or 0) + added.offsets if added.has_lag else lag
                row.sums[topic] = offsets + added.committed, lag
                await pace()


def _is_unread(at: PartitionRow) -> bool:
    """Return whether a group without a commit may have records to read in a partition."""
    return not at.is_in_sync or at.start < at.stable


def assigned(group: Group, topics: Mapping[bytes, str]) -> Iterator[frozenset[TopicPartition]]:
    """Yield the partitions of each member, if the protocol type is ``consumer``."""
    if isinstance(group, ForeignGroup | ShareGroup):
        return
    if not isinstance(group, ClassicGroup):
        for member_id in list(group.members):
            held = group.current(member_id).held
            yield frozenset(
                (topics[topic_id], index) for topic_id, index in held if topic_id in topics
            )
    elif group.protocol_type == CONSUMER_PROTOCOL_TYPE:
        for member in list(group.members.values()):
            yield _decoded(member.assignment)


def _decoded(assignment: bytes) -> frozenset[TopicPartition]:
    """Return the partitions of an assignment; none if the client used another format."""
    if not assignment:
        return frozenset()
    try:
        return frozenset(decode_assignment(assignment)[0])
    except (CorruptRecordError, ValueError):
        return frozenset()


def _group(group_id: str, group: Group, commits: int) -> GroupRow:
    listed = group.as_listed_group()
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
