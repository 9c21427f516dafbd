"""Invariants of real brokers and their controller, checked on their own objects.

Source: the properties of ``KafkaReplication.tla`` and KIP-966 (StrongIsr, LeaderInIsr).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from uuid import UUID

from fencepost.cluster.image import MetadataImage
from fencepost.coordinator.data.replica import Replica
from fencepost.logcore.batch import iter_headers
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation
from tests.sim.invariants import BrokenInvariantError
from tests.support.partitions import fetch_bytes

if TYPE_CHECKING:
    from tests.sim.daemon import Daemon

READ_BYTES: Final = 1 << 20

Key = tuple[UUID, int]
Batch = tuple[int, int, int]
"""First offset, last offset, checksum."""


@dataclass
class Committed:
    """Batches that a partition has shown below a high watermark."""

    batches: dict[int, Batch] = field(default_factory=dict)
    """By their first offsets."""
    end: int = 0


class Watch:
    """Looks at all brokers, and remembers their committed batches."""

    def __init__(self, unforced: frozenset[str] = frozenset()) -> None:
        """``unforced``: topics whose records a power loss may take, for nothing forces them."""
        self._unforced = unforced
        self._leaders: dict[tuple[Key, int], str] = {}
        """The leader of each epoch."""
        self._committed: dict[Key, Committed] = {}
        self._seen: dict[tuple[str, int, Key], int] = {}
        """The offset up to which the log of a process was compared."""
        self._epochs: dict[Key, tuple[int, int]] = {}
        """Leader and partition epoch, as the controller had them last."""

    def look(self, controller: Daemon | None, brokers: list[Daemon]) -> None:
        """Raise BrokenInvariantError for the first rule that does not hold now."""
        if (image := _image(controller)) is not None:
            self._look_at_image(image)
        for one in brokers:
            for replica, partition in _replicas(one):
                self._look_at_replica(one, replica, partition)

    # --- the controller ---

    def _look_at_image(self, image: MetadataImage) -> None:
        for topic in image.topics.values():
            for index, one in enumerate(topic.partitions):
                name, key = f"{topic.name}-{index}", (topic.topic_id, index)
                if one.leader >= 0 and one.leader not in one.isr:
                    raise BrokenInvariantError(f"{name}: {one.leader} leads outside of {one.isr}")
                if not set(one.isr) <= set(one.replicas):
                    raise BrokenInvariantError(f"{name}: ISR {one.isr} of {one.replicas}")
                epochs = one.leader_epoch, one.partition_epoch
                before = self._epochs.get(key, epochs)
                if epochs[0] < before[0] or epochs[1] < before[1]:
                    raise BrokenInvariantError(f"{name}: epochs go back from {before} to {epochs}")
                self._epochs[key] = epochs

    # --- brokers ---

    def _look_at_replica(self, daemon: Daemon, replica: Replica, partition: Partition) -> None:
        key, name = (replica.local.topic_id, replica.local.index), daemon.node.name
        where = f"{name} {partition.name}"
        start, high = partition.log_start_offset, partition.high_watermark
        end = partition.log_end_offset
        if not partition.last_stable_offset <= high <= end or start > end:
            raise BrokenInvariantError(f"{where}: {start}, {high}, {end} are out of order")
        machine = replica.machine
        if machine.is_leader:
            leads = self._leaders.setdefault((key, machine.leader_epoch), name)
            if leads != name:
                raise BrokenInvariantError(
                    f"{where}: {leads} leads as well in epoch {machine.leader_epoch}"
                )
        if replica.local.topic in self._unforced:
            return
        self._compare(daemon, key, where, partition, leads=machine.is_leader)

    def _compare(
        self, daemon: Daemon, key: Key, where: str, partition: Partition, *, leads: bool
    ) -> None:
        """Compare the batches below the high watermark with those that were there before."""
        truth = self._committed.setdefault(key, Committed())
        high, place = partition.high_watermark, (daemon.node.name, daemon.node.incarnation, key)
        at = max(self._seen.get(place, 0), partition.log_start_offset)
        while at < high:
            data = bytes(fetch_bytes(partition, at, READ_BYTES, Isolation.LOG_END).records or b"")
            before = at
            for _, header in iter_headers(data):
                if header.next_offset > high:
                    break
                batch = header.base_offset, header.last_offset, header.crc
                known = truth.batches.setdefault(header.base_offset, batch)
                if known != batch:
                    raise BrokenInvariantError(f"{where}: {batch} was committed as {known}")
                at = header.next_offset
            if at == before:
                break
        self._seen[place] = at
        truth.end = max(truth.end, at)
        if leads and partition.log_end_offset < truth.end:
            raise BrokenInvariantError(
                f"{where}: it leads with {partition.log_end_offset} of {truth.end} committed"
            )

    # --- in the end ---

    def differences(self, controller: Daemon | None, brokers: list[Daemon]) -> list[str]:
        """List the traces that faults have left in the cluster."""
        image = _image(controller)
        if image is None:
            return []
        wrong = [
            f"the ISR of {topic.name}-{index} is {one.isr} of {one.replicas}"
            for topic in image.topics.values()
            for index, one in enumerate(topic.partitions)
            if set(one.isr) != set(one.replicas) or one.adding_replicas or one.removing_replicas
        ]
        ends: dict[Key, set[tuple[int, int]]] = {}
        for one in brokers:
            for replica, log in _replicas(one):
                key = replica.local.topic_id, replica.local.index
                ends.setdefault(key, set()).add((log.high_watermark, log.log_end_offset))
        wrong += [
            f"{key} ends differently: {sorted(seen)}" for key, seen in ends.items() if len(seen) > 1
        ]
        wrong += [
            f"{one.node.name} has an older image"
            for one in brokers
            if one.services is not None and one.services.metadata.image.topics != image.topics
        ]
        return wrong


def _image(controller: Daemon | None) -> MetadataImage | None:
    if controller is None or controller.services is None:
        return None
    return controller.services.metadata.image


def _replicas(daemon: Daemon) -> Iterator[tuple[Replica, Partition]]:
    """Open replicas of a broker that has others beside it."""
    if daemon.services is None:
        return
    for replica in daemon.services.replicas:
        if replica.partition is not None:
            yield replica, replica.partition
