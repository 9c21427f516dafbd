"""The invariants that are checked after every step, and the acknowledgements of a history.

The truth of a partition is its records below the highest high watermark that any leader has had.
Every invariant compares with it the replicas that a step has changed and the answers to clients.

The invariants come from the TLA+ models of Kafka's replication (``KafkaReplication``, ``Kip320``,
``AsyncIsr``), but for the last one, which concerns clients:

* **one leader per epoch**, and epochs never decrease;
* **LeaderInIsr**: the leader that the controller names is in its ISR;
* **ValidHighWatermark**: a leader's high watermark is at most the log end of each ISR member;
* **StrongIsr**: the records of every replica below its high watermark are the truth;
* **leader completeness** (WeakIsr): an elected leader has the whole truth;
* records acknowledged with acks=all are part of the truth, and an idempotent producer's records
  are in it once and in order.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

from fencepost.cluster.controller.partition_change import RECOVERING
from fencepost.cluster.image import MetadataImage, PartitionRegistration
from fencepost.logcore.machine import Record
from tests.sim.disk import Batch, Disk, Key, ModelLog

Entry = tuple[int, Hashable]


class BrokenInvariantError(AssertionError):
    """An invariant of the cluster is broken."""


class Leading(Protocol):
    """The part of a broker process that the invariants use."""

    def leads(self, key: Key) -> int | None:
        """Return the leader epoch in which it leads a partition, None if it does not."""


@dataclass(slots=True)
class Site:
    """A broker's node: one disk, and the current process."""

    broker_id: int
    disk: Disk
    process: Leading | None = None


@dataclass(slots=True)
class Truth:
    """The truth of one partition, and what clients were told of it."""

    name: str
    committed: list[Entry] = field(default_factory=list)
    leaders: dict[int, int] = field(default_factory=dict)
    """The leader by leader epoch."""
    shown: dict[int, int] = field(default_factory=dict)
    """The offset up to which each replica's records were compared, by broker."""
    is_void: bool = False
    """Whether committed records may be lost, after an unclean election."""
    was_void: bool = False
    dropped: int = 0
    """The highest log start offset of any replica so far."""
    acked: int = 0
    sequences: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """The next sequence and the offset after the last record, by producer id and epoch."""
    told: dict[int, Hashable] = field(default_factory=dict)
    """The values that were acknowledged with acks=all, by offset."""


class Invariants:
    """Checks the disks and processes of a cluster."""

    def __init__(self) -> None:
        self.sites: dict[int, Site] = {}
        self.truths: dict[Key, Truth] = {}
        self.image = MetadataImage()
        """The controller's image."""
        self.checked = 0
        self._touched: dict[tuple[int, Key], None] = {}
        self._changed: dict[Key, None] = {}

    def truth(self, key: Key) -> Truth:
        """Return the truth of a partition, created on first use."""
        found = self.truths.get(key)
        if found is None:
            topic = self.image.topics_by_id.get(key[0])
            name = f"{topic.name if topic else key[0]}-{key[1]}"
            found = self.truths[key] = Truth(name)
        return found

    def touched(self, broker_id: int, key: Key) -> None:
        """Have a replica checked after this step, as its log or offsets have changed."""
        self._touched[broker_id, key] = None

    def check(self) -> None:
        """Check the replicas and partitions that have changed. Raises BrokenInvariantError."""
        if self._touched:
            touched, self._touched = self._touched, {}
            for broker_id, key in touched:
                self.checked += 1
                self._check_replica(broker_id, key)
                self._changed[key] = None
        if self._changed:
            changed, self._changed = self._changed, {}
            for key in changed:
                self._check_partition(key)

    # --- the controller ---

    def decided(self, image: MetadataImage) -> None:
        """Take the controller's next committed image, and check its changes."""
        old, self.image = self.image, image
        if old.topics is image.topics:
            return
        for topic_id, topic in image.topics_by_id.items():
            known = old.topics_by_id.get(topic_id)
            if known is topic:
                continue
            before = () if known is None else known.partitions
            for index, now in enumerate(topic.partitions):
                was = before[index] if index < len(before) else None
                if was is not now and was != now:
                    self._decided((topic_id, index), was, now)

    def _decided(
        self, key: Key, was: PartitionRegistration | None, now: PartitionRegistration
    ) -> None:
        truth = self.truth(key)
        if now.leader >= 0 and now.leader not in now.isr:
            raise BrokenInvariantError(f"{truth.name}: LeaderInIsr: {now}")
        if not set(now.isr) <= set(now.replicas):
            raise BrokenInvariantError(f"{truth.name}: an ISR beyond the replicas: {now}")
        was_leader = -1 if was is None else was.leader
        if was is not None:
            if now.partition_epoch <= was.partition_epoch or now.leader_epoch < was.leader_epoch:
                raise BrokenInvariantError(f"{truth.name}: epochs go back: {was} to {now}")
            if now.leader != was.leader and now.leader_epoch == was.leader_epoch:
                raise BrokenInvariantError(f"{truth.name}: another leader in one epoch: {now}")
            if was.adding_replicas and not (now.adding_replicas or now.removing_replicas):
                came = set(was.adding_replicas) & set(now.replicas)
                if came and not set(now.replicas) <= set(now.isr):
                    raise BrokenInvariantError(
                        f"{truth.name}: a reassignment ends before all are in sync: {now}"
                    )
        if now.leader_recovery_state == RECOVERING and now.leader != was_leader:
            self.voids(key)
        self._changed[key] = None

    def voids(self, key: Key) -> None:
        """Void a partition: its records so far may be lost."""
        truth = self.truth(key)
        truth.is_void = truth.was_void = True

    # --- replicas ---

    def shown_again(self, broker_id: int, key: Key) -> None:
        """Compare a replica from its beginning again, after its process has ended."""
        if key in self.truths:
            self.truths[key].shown[broker_id] = 0

    def took_office(self, broker_id: int, key: Key, leader_epoch: int) -> None:
        """Check leader completeness as a broker begins to lead in an epoch."""
        truth = self.truth(key)
        other = truth.leaders.setdefault(leader_epoch, broker_id)
        if other != broker_id:
            raise BrokenInvariantError(
                f"{truth.name}: {other} and {broker_id} both lead in epoch {leader_epoch}"
            )
        if leader_epoch < max(truth.leaders):
            return
        log = self.sites[broker_id].disk.logs[key]
        count = len(truth.committed)
        if log.part(log.first, count) == truth.committed[log.first :] and log.end >= count:
            return
        if not truth.is_void:
            lost = _first_difference(truth.committed, log)
            raise BrokenInvariantError(
                f"{truth.name}: {broker_id} leads in epoch {leader_epoch} without what was"
                f" committed at {lost}: {truth.committed[lost : lost + 3]}, it has"
                f" {log.part(lost, lost + 3)}"
            )
        self._begin_anew(truth, log)

    def _begin_anew(self, truth: Truth, log: ModelLog) -> None:
        """Reduce the truth to the new leader's log, after an election that may lose records."""
        keep = _first_difference(truth.committed, log)
        del truth.committed[keep:]
        truth.is_void = False
        truth.shown = {broker: min(offset, keep) for broker, offset in truth.shown.items()}
        truth.told = {offset: value for offset, value in truth.told.items() if offset < keep}
        truth.sequences = {}

    def shows_more(self, broker_id: int, key: Key) -> None:
        """Check a leader's new high watermark at once, as it may resign within the same step."""
        self._check_replica(broker_id, key)
        self._changed[key] = None

    def _check_replica(self, broker_id: int, key: Key) -> None:
        site = self.sites[broker_id]
        log = site.disk.logs.get(key)
        if log is None:
            return
        truth = self.truth(key)
        leads = None if site.process is None else site.process.leads(key)
        truth.dropped = max(truth.dropped, log.start)
        if not log.start <= log.high_watermark <= log.end:
            raise BrokenInvariantError(
                f"{truth.name} of {broker_id}: log start {log.start}, high watermark"
                f" {log.high_watermark}, end {log.end}"
            )
        shown = min(truth.shown.get(broker_id, 0), log.high_watermark)
        truth.shown[broker_id] = log.high_watermark
        known = min(len(truth.committed), log.high_watermark)
        if truth.is_void or (truth.was_void and leads != max(truth.leaders)):
            return
        shown = max(min(shown, known), log.first)
        if log.part(shown, known) != truth.committed[shown:known]:
            at = _first_difference(truth.committed, log)
            raise BrokenInvariantError(
                f"{truth.name} of {broker_id} shows {log.part(at, at + 3)} at {at}, where"
                f" {truth.committed[at : at + 3]} was committed (high watermark"
                f" {log.high_watermark})"
            )
        if log.high_watermark <= len(truth.committed):
            return
        if leads is None:
            raise BrokenInvariantError(
                f"{truth.name}: follower {broker_id} shows records up to {log.high_watermark},"
                f" committed are {len(truth.committed)}"
            )
        self._commit(truth, log, known)

    def _commit(self, truth: Truth, log: ModelLog, low: int) -> None:
        truth.committed += log.part(low, log.high_watermark)
        for batch in log.read(low, log.high_watermark, most=1 << 30):
            header = batch.header
            if header.producer_id < 0 or isinstance(batch.values[0], Record) or batch.marker:
                continue  # a coordinator's records have no sequence
            identity = header.producer_id, header.producer_epoch
            expected, end = truth.sequences.get(identity, (header.base_sequence, 0))
            # Without records of a producer, a log does not know the producer here; the daemon's
            # log keeps the producer state in a snapshot.
            if header.base_sequence != expected and end > truth.dropped:
                raise BrokenInvariantError(
                    f"{truth.name}: producer {identity} has sequence {header.base_sequence} at"
                    f" {batch.base_offset}, where {expected} comes next"
                )
            following = header.base_sequence + len(batch.values)
            truth.sequences[identity] = following, batch.next_offset

    # --- partitions ---

    def _check_partition(self, key: Key) -> None:
        """Check that every member of the ISR has all committed records."""
        registration, truth = self.image.partition(*key), self.truths.get(key)
        if registration is None or truth is None or truth.is_void:
            return
        count = len(truth.committed)
        if truth.was_void and registration.leader != truth.leaders.get(registration.leader_epoch):
            return  # the truth becomes the new leader's log, once it leads
        for replica in registration.isr:
            site = self.sites[replica]
            log = site.disk.logs.get(key)
            if not count:
                continue
            if log is None or log.end < count:
                end = 0 if log is None else log.end
                raise BrokenInvariantError(
                    f"{truth.name}: ValidHighWatermark: {count} are committed, {replica} ends at"
                    f" {end}: {registration}"
                )
            if log.first < count and log.records[count - 1 - log.first] != truth.committed[-1]:
                raise BrokenInvariantError(
                    f"{truth.name}: StrongIsr: at {count - 1} {truth.committed[-1]} was committed,"
                    f" {replica} has {log.records[count - 1 - log.first]}: {registration}"
                )

    # --- answers to clients ---

    def acknowledged(self, key: Key, offset: int, values: tuple[Hashable, ...]) -> None:
        """Check values that were acknowledged with acks=all at ``offset``."""
        truth = self.truth(key)
        truth.acked += len(values)
        if truth.is_void:
            return
        found = [value for _, value in truth.committed[offset : offset + len(values)]]
        if found != list(values):
            if truth.was_void:
                return  # by a leader that did not know of the next one yet
            raise BrokenInvariantError(
                f"{truth.name}: acknowledged {values} at {offset}, committed is {found}"
            )
        truth.told.update((offset + at, value) for at, value in enumerate(values))

    def consumed(self, key: Key, offset: int, values: list[Hashable]) -> None:
        """Check consecutive values that a consumer got from ``offset`` on."""
        truth = self.truth(key)
        if truth.is_void:
            return
        found = [value for _, value in truth.committed[offset : offset + len(values)]]
        if found != values and not truth.was_void:
            raise BrokenInvariantError(
                f"{truth.name}: a consumer got {values} at {offset}, committed is {found}"
            )

    def has_ended(self, key: Key, batch: Batch) -> None:
        """Check that the transaction of a batch ended, as a read_committed consumer got it."""
        truth, producer_id = self.truth(key), batch.header.producer_id
        ends = (value for _, value in truth.committed[batch.next_offset :])
        if not truth.was_void and not any(
            isinstance(one, tuple) and one[:2] == ("marker", producer_id) for one in ends
        ):
            raise BrokenInvariantError(
                f"{truth.name}: a read_committed consumer got {batch.values} at"
                f" {batch.base_offset}, whose transaction has not ended"
            )

    # --- the end ---

    def converged(self) -> list[str]:
        """Return a message for each partition that has not recovered from the faults."""
        wrong: list[str] = []
        for topic in self.image.topics.values():
            for index, now in enumerate(topic.partitions):
                name, key = f"{topic.name}-{index}", (topic.topic_id, index)
                if now.leader < 0:
                    wrong.append(f"{name} has no leader: {now}")
                    continue
                if (
                    set(now.isr) != set(now.replicas)
                    or now.adding_replicas
                    or now.removing_replicas
                ):
                    wrong.append(f"{name} is not in sync: {now}")
                    continue
                wrong += self._differences(name, key, now)
        return wrong

    def _differences(self, name: str, key: Key, now: PartitionRegistration) -> list[str]:
        logs = {one: self.sites[one].disk.logs.get(key) for one in now.replicas}
        leader = logs[now.leader]
        if leader is None:
            return [f"{name}: {now.leader} leads without a log"]
        wrong = []
        for broker_id, log in logs.items():
            if log is None:
                wrong.append(f"{name}: {broker_id} has no log")
            elif log.end != leader.end or log.high_watermark != leader.end:
                wrong.append(
                    f"{name}: {broker_id} ends at {log.end} (high watermark {log.high_watermark}),"
                    f" {now.leader} at {leader.end}"
                )
            else:
                low = max(log.first, leader.first)
                if log.part(low, log.end) != leader.part(low, leader.end):
                    raise BrokenInvariantError(f"{name}: {broker_id} and {now.leader} differ")
        for broker_id, site in self.sites.items():
            if broker_id not in now.replicas and key in site.disk.logs:
                wrong.append(f"{name}: {broker_id} keeps a replica that is none")
        return wrong

    def finish(self) -> None:
        """Check that the leaders' logs have everything that was acknowledged."""
        for key, truth in self.truths.items():
            registration = self.image.partition(*key)
            if registration is None or registration.leader < 0:
                continue
            log = self.sites[registration.leader].disk.logs[key]
            for offset, value in truth.told.items():
                if offset >= log.first and [one for _, one in log.part(offset, offset + 1)] != [
                    value
                ]:
                    raise BrokenInvariantError(f"{truth.name}: {value} at {offset} is lost")


def _first_difference(committed: list[Entry], log: ModelLog) -> int:
    for offset in range(log.first, len(committed)):
        if offset >= log.end or log.records[offset - log.first] != committed[offset]:
            return offset
    return len(committed)
