"""Invariants of simulated brokers and their controller, checked on the daemons' own objects.

Source: the properties of ``KafkaReplication.tla`` and KIP-966 (StrongIsr, LeaderInIsr).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from uuid import UUID

from fencepost.cluster.controller.partition_change import RECOVERING
from fencepost.cluster.image import TOPIC_RESOURCE, MetadataImage, PartitionRegistration
from fencepost.coordinator.metadata.names import CONSUMER_OFFSETS, TRANSACTION_STATE
from fencepost.coordinator.storage.replica import Replica
from fencepost.logcore.batch import BatchHeader, LogRecord, decode_records, iter_headers
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from tests.sim.compacted import CompactedRecords
from tests.sim.invariants import BrokenInvariantError
from tests.support.partitions import fetch_bytes

if TYPE_CHECKING:
    from tests.sim.daemon import Daemon

READ_BYTES: Final = 1 << 20

Key = tuple[UUID, int]
Batch = tuple[int, int, int]
"""Base offset, last offset and CRC of a batch."""

KEYED: Final = "k"
"""A user topic that brokers compact."""
COMPACTED: Final = frozenset({CONSUMER_OFFSETS, TRANSACTION_STATE, KEYED})


@dataclass
class Committed:
    """The batches of a partition that were below the high watermark of any replica."""

    batches: dict[int, Batch] = field(default_factory=dict)
    """Base offset → batch."""
    compacted: CompactedRecords | None = None
    """The records, if brokers compact the topic."""
    start: int = 0
    """The leader's log start offset, below which all records are deleted. A follower that truncates
    its log at this offset may keep other records below it until the follower learns the log start
    offset. A killed follower may have lost the offset again.
    """
    end: int = 0
    last: Batch | None = None
    open: dict[int, list[int]] = field(default_factory=dict)
    """Producer id → offsets of the batches of its open transaction, which has no end marker below
    ``end``.
    """
    is_void: bool = False
    """Whether committed records may be lost: after an unclean election, or when every member of ISR
    and ELR may have lost records.
    """

    def extend(self, header: BatchHeader, batch: Batch) -> None:
        """Add the next committed batch."""
        self.end, self.last = header.next_offset, batch
        if header.is_control:
            self.open.pop(header.producer_id, None)
        elif header.is_transactional:
            self.open.setdefault(header.producer_id, []).append(header.base_offset)


class Watch:
    """Checks the invariants of all brokers, and stores their committed batches for comparison."""

    def __init__(self, unforced: frozenset[str] = frozenset()) -> None:
        """The topics ``unforced`` are not flushed, so a power loss may lose their records."""
        self._unforced = unforced
        self._leaders: dict[tuple[Key, int], str] = {}
        """(partition, leader epoch) → name of its leader."""
        self._newest: dict[Key, int] = {}
        """Partition → greatest epoch of a leader."""
        self._committed: dict[Key, Committed] = {}
        self._high: dict[Key, int] = {}
        """Partition → greatest high watermark of any replica."""
        self._seen: dict[tuple[str, int, Key], int] = {}
        """(node, incarnation, partition) → offset up to which that replica's log was compared."""
        self._markers: dict[tuple[int, int], bytes | None] = {}
        """Producer id and epoch → key of the committed end marker."""
        self._known: dict[Key, PartitionRegistration] = {}
        """Partition → its registration in the controller's last image."""
        self._topics: object = None
        self._configs: Mapping[tuple[int, str], object] = {}
        self._states: dict[tuple[str, int, Key], tuple[int, ...]] = {}
        """(node, incarnation, partition) → offsets and epochs of that replica at the last check."""
        self._has_changed = False
        """Whether a replica or a registration has changed since :meth:`_look_at_members` ran."""
        self._image: MetadataImage | None = None
        self._suspects: dict[int, UUID] = {}
        """Broker whose disk has lost records → its incarnation id, which is still registered."""
        self.void: set[tuple[str, int]] = set()
        """Topic and index of partitions that may have lost committed records."""
        self._loses = False
        """Whether any disk has lost records."""
        self._has_last: dict[tuple[str, int, Key], Batch] = {}
        """(node, incarnation, partition) → last committed batch that was found in that replica's
        log.
        """

    def look(self, image: MetadataImage | None, brokers: list[Daemon]) -> None:
        """Raise BrokenInvariantError for the first invariant that does not hold now."""
        if image is not None:
            self.look_at_image(image)
        for broker in brokers:
            for replica, partition in replicas_of(broker):
                self._look_at_replica(broker, replica, partition)
        if image is not None and self._has_changed:
            self._has_changed = False
            self._look_at_members(image, brokers)

    def lost_records(self, daemon: Daemon) -> None:
        """Record that the disk of a broker has lost records."""
        self._loses = True
        if (image := self._image) is None:
            return
        broker = image.brokers.get(daemon.node_id)
        if broker is not None:
            self._suspects[daemon.node_id] = broker.incarnation_id
        for topic in image.topics.values():
            for index, partition in enumerate(topic.partitions):
                self._judge((topic.topic_id, index), partition)

    def acknowledged(self, place: tuple[str, int], end: int) -> None:
        """Raise BrokenInvariantError unless records up to ``end`` were below a high watermark."""
        image = self._image
        topic = None if image is None else image.topics.get(place[0])
        if topic is None or place in self.void:
            return
        key = topic.topic_id, place[1]
        truth = self._committed.get(key)
        if truth is not None and max(truth.end, self._high.get(key, 0)) < end:
            raise BrokenInvariantError(f"{place}: {end} was acknowledged, committed is {truth.end}")

    def high_watermark_moved(self, name: str, offset: int) -> None:
        """Store the high watermark of a replica of ``name`` (``topic-index``) in every turn.

        The leader may be replaced between the response to a producer and the next :meth:`look`.
        """
        topic_name, _, index = name.rpartition("-")
        topic = None if self._image is None else self._image.topics.get(topic_name)
        if topic is not None:
            key = topic.topic_id, int(index)
            self._high[key] = max(self._high.get(key, 0), offset)

    # --- the controller ---

    def forget_image(self) -> None:
        """Do not compare the controller's next image with the last one."""
        self._known.clear()
        self._topics, self._configs = None, {}

    def look_at_image(self, image: MetadataImage) -> None:
        """Check the controller's next image, and its changes since the last one."""
        self._image = image
        for node_id, incarnation_id in [*self._suspects.items()]:
            broker = image.brokers.get(node_id)
            if broker is not None and broker.incarnation_id != incarnation_id:
                del self._suspects[node_id]
        self._look_at_settings(image)
        if image.topics is self._topics:
            return
        self._topics, self._has_changed = image.topics, True
        for topic in image.topics.values():
            for index, partition in enumerate(topic.partitions):
                key = topic.topic_id, index
                was = self._known.get(key)
                if was is not partition and was != partition:
                    self._known[key] = partition
                    self._look_at_registration(image, key, was, partition)

    def _look_at_settings(self, image: MetadataImage) -> None:
        if image.configs is not self._configs:
            gone = self._configs.keys() - image.configs.keys()
            self._configs = image.configs
            if lost := [
                name for kind, name in gone if kind == TOPIC_RESOURCE and name in image.topics
            ]:
                raise BrokenInvariantError(f"the settings of {sorted(lost)} are gone")

    def _name(self, key: Key) -> str:
        topic = None if self._image is None else self._image.topics_by_id.get(key[0])
        return f"{topic.name if topic else key[0]}-{key[1]}"

    def _look_at_registration(
        self,
        image: MetadataImage,
        key: Key,
        was: PartitionRegistration | None,
        now: PartitionRegistration,
    ) -> None:
        name = self._name(key)
        if now.leader >= 0 and now.leader not in now.isr:
            raise BrokenInvariantError(f"{name}: {now.leader} leads outside of {now.isr}")
        if not set(now.isr) <= set(now.replicas):
            raise BrokenInvariantError(f"{name}: ISR {now.isr} of {now.replicas}")
        self._look_at_isr(image, name, now)
        self._judge(key, now)
        if was is None:
            return
        if now.leader_epoch < was.leader_epoch or now.partition_epoch < was.partition_epoch:
            raise BrokenInvariantError(f"{name}: epochs go back from {was} to {now}")
        if now.partition_epoch == was.partition_epoch:
            raise BrokenInvariantError(f"{name}: {was} and {now} have one partition epoch")
        if now.leader != was.leader and now.leader_epoch == was.leader_epoch:
            raise BrokenInvariantError(f"{name}: another leader in one epoch: {now}")
        if was.adding_replicas and not (now.adding_replicas or now.removing_replicas):
            came = set(was.adding_replicas) & set(now.replicas)
            if came and not set(now.replicas) <= set(now.isr):
                raise BrokenInvariantError(f"{name}: a reassignment ends too early: {now}")
        is_unclean = now.leader_recovery_state == RECOVERING and now.leader != was.leader
        # Without an ELR, electing the last known leader loses only records that its disk has lost.
        if is_unclean and (was.elr or (now.leader,) != was.last_known_elr):
            self._voids(key)

    def _look_at_isr(self, image: MetadataImage, name: str, now: PartitionRegistration) -> None:
        for replica in now.isr:
            broker = image.brokers.get(replica)
            if broker is None or (broker.fenced and now.leader >= 0):
                raise BrokenInvariantError(f"{name}: a fenced {replica} is in the ISR: {now}")

    def _judge(self, key: Key, now: PartitionRegistration) -> None:
        """Exempt a partition if all members of its ISR and ELR may have lost records."""
        members = {*now.isr, *now.elr}
        is_lost = all(self._is_suspect(member, key) for member in members)
        if is_lost and (members or self._loses):
            self._voids(key)

    def _is_suspect(self, broker_id: int, _key: Key) -> bool:
        """Whether a replica may lack committed records, as its disk has lost records."""
        return broker_id in self._suspects

    def _voids(self, key: Key) -> None:
        self._committed.setdefault(key, Committed()).is_void = True
        topic = None if self._image is None else self._image.topics_by_id.get(key[0])
        if topic is not None:
            self.void.add((topic.name, key[1]))

    def _look_at_members(self, image: MetadataImage, brokers: list[Daemon]) -> None:
        """Check that every member of an ISR or ELR has all committed records."""
        replicas = {
            (broker.node_id, (replica.local.topic_id, replica.local.index)): (broker, partition)
            for broker in brokers
            for replica, partition in replicas_of(broker)
        }
        for topic in image.topics.values():
            if topic.name in self._unforced:
                continue
            for index, now in enumerate(topic.partitions):
                key = topic.topic_id, index
                truth = self._committed.get(key)
                if truth is None or truth.is_void or not truth.end:
                    continue
                for member in (*now.isr, *now.elr):
                    if self._is_suspect(member, key) or (member, key) not in replicas:
                        continue
                    self._look_at_member(key, truth, now, *replicas[member, key])

    def _look_at_member(
        self,
        key: Key,
        truth: Committed,
        now: PartitionRegistration,
        daemon: Daemon,
        partition: Partition,
    ) -> None:
        where = f"{self._name(key)} of {daemon.node.name}"
        if partition.log_end_offset < truth.end:
            raise BrokenInvariantError(
                f"{where} ends at {partition.log_end_offset}, {truth.end} are committed: {now}"
            )
        last, place = truth.last, (daemon.node.name, daemon.node.incarnation, key)
        if last is None or self._has_last.get(place) == last:
            return
        if last[0] < max(partition.log_start_offset, truth.start):
            return
        data = bytes(fetch_bytes(partition, last[0], READ_BYTES, Isolation.LOG_END).records or b"")
        header = next(iter_headers(data))[1]
        had = header.base_offset, header.last_offset, header.crc
        if had != last and (truth.compacted is None or had[:2] != last[:2]):
            raise BrokenInvariantError(f"{where} has {had}, {last} was committed: {now}")
        self._has_last[place] = last

    # --- brokers ---

    def _look_at_replica(self, daemon: Daemon, replica: Replica, partition: Partition) -> None:
        key, name = (replica.local.topic_id, replica.local.index), daemon.node.name
        machine, stable = replica.machine, partition.last_stable_offset
        start, high = partition.log_start_offset, partition.high_watermark
        end = partition.log_end_offset
        state = start, stable, high, end, machine.is_leader, machine.leader_epoch
        place = name, daemon.node.incarnation, key
        if self._states.get(place) == state:
            return
        self._states[place], self._has_changed = state, True
        where = f"{name} {partition.name}"
        if not stable <= high <= end or start > end:
            raise BrokenInvariantError(f"{where}: {start}, {high}, {end} are out of order")
        if machine.is_leader:
            leads = self._leaders.setdefault((key, machine.leader_epoch), name)
            self._newest[key] = max(self._newest.get(key, 0), machine.leader_epoch)
            if leads != name:
                raise BrokenInvariantError(
                    f"{where}: {leads} leads as well in epoch {machine.leader_epoch}"
                )
        if replica.local.topic in self._unforced:
            return
        # A former leader that does not know its successor may lack later records.
        is_newest = machine.leader_epoch >= self._newest.get(key, 0)
        self._compare(daemon, key, where, partition, leads=machine.is_leader and is_newest)

    def _compare(
        self, daemon: Daemon, key: Key, where: str, partition: Partition, *, leads: bool
    ) -> None:
        """Compare the batches below a replica's high watermark with the committed batches."""
        truth = self._committed.setdefault(key, Committed())
        if truth.is_void:
            return
        if partition.topic in COMPACTED and truth.compacted is None:
            truth.compacted = CompactedRecords()
        high, place = partition.high_watermark, (daemon.node.name, daemon.node.incarnation, key)
        if leads:
            truth.start = max(truth.start, partition.log_start_offset)
        at = max(self._seen.get(place, 0), partition.log_start_offset, truth.start)
        while at < high:
            data = bytes(fetch_bytes(partition, at, READ_BYTES, Isolation.LOG_END).records or b"")
            before = at
            for position, header in iter_headers(data):
                if header.next_offset > high:
                    break
                batch = header.base_offset, header.last_offset, header.crc
                is_new = header.base_offset not in truth.batches
                known = truth.batches.setdefault(header.base_offset, batch)
                if truth.compacted is not None and (is_new or known != batch):
                    truth.compacted.take(where, header, decode_records(data, position, header))
                elif known != batch:
                    raise BrokenInvariantError(f"{where}: {batch} was committed as {known}")
                if header.is_control:
                    self._look_at_marker(
                        where, header, next(iter(decode_records(data, position, header)))
                    )
                at = header.next_offset
                if at > truth.end:
                    truth.extend(header, batch)
            if at == before:
                break
        self._seen[place] = at
        if truth.compacted is not None:
            truth.compacted.check_missing(where)
        self._look_at_open(truth, where, partition)
        if leads and partition.log_end_offset < truth.end:
            raise BrokenInvariantError(
                f"{where}: it leads with {partition.log_end_offset} of {truth.end} committed"
            )

    def _look_at_open(self, truth: Committed, where: str, partition: Partition) -> None:
        """Raise BrokenInvariantError if the LSO passes a transaction without a committed marker."""
        if not truth.open or partition.high_watermark != truth.end:
            return
        # A replica may begin behind a transaction's first records if retention has deleted them;
        # then it only knows the later records.
        start, stable = partition.log_start_offset, partition.last_stable_offset
        kept = [offset for offsets in truth.open.values() for offset in offsets if offset >= start]
        first = min(kept, default=stable)
        if stable > first:
            raise BrokenInvariantError(f"{where}: {stable} is stable, and {first} in a transaction")

    def _look_at_marker(self, where: str, header: BatchHeader, marker: LogRecord) -> None:
        """Raise BrokenInvariantError if two partitions have different outcomes of a transaction.

        Each transaction has its own producer epoch (KIP-890).
        """
        stamp, ends = (header.producer_id, header.producer_epoch), marker.key
        known = self._markers.setdefault(stamp, ends)
        if known != ends:
            raise BrokenInvariantError(f"{where}: the transaction {stamp} ends twice, unlike")

    # --- in the end ---

    def differences(self, image: MetadataImage | None, brokers: list[Daemon]) -> list[str]:
        """Return the differences from a cluster that has recovered from all faults."""
        if image is None:
            return []
        wrong = [
            f"the ISR of {topic.name}-{index} is {partition.isr} of {partition.replicas}"
            for topic in image.topics.values()
            for index, partition in enumerate(topic.partitions)
            if set(partition.isr) != set(partition.replicas)
            or partition.adding_replicas
            or partition.removing_replicas
        ]
        ends: dict[Key, set[tuple[int, int]]] = {}
        for broker in brokers:
            for replica, log in replicas_of(broker):
                key = replica.local.topic_id, replica.local.index
                ends.setdefault(key, set()).add((log.high_watermark, log.log_end_offset))
                if log.last_stable_offset < log.high_watermark:
                    wrong.append(f"{log.name} of {broker.node.name} has an open transaction")
        wrong += [
            f"{key} ends differently: {sorted(seen)}" for key, seen in ends.items() if len(seen) > 1
        ]
        return wrong + [
            f"{broker.node.name} has {different}"
            for broker in brokers
            if broker.services is not None
            and (different := self._different(broker.services.metadata.image, image))
        ]

    def _different(self, image: MetadataImage, controllers: MetadataImage) -> str:
        is_equal = image.topics == controllers.topics and image.configs == controllers.configs
        return "" if is_equal else "an older image"


def replicas_of(daemon: Daemon) -> Iterator[tuple[Replica, Partition]]:
    """Yield the open replicas of a broker, none if it is standalone."""
    services = daemon.opened
    if services is None:
        return
    for replica in services.replicas:
        if replica.partition is not None:
            yield replica, replica.partition
