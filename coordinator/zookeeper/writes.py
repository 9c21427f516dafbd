"""Turns decisions of the controller's state machine into writes of Apache Kafka 3.9's znodes.

This module has no I/O: the writes follow from records and the images before and after them. The
version of a partition's state znode is the partition epoch. Each write of such a znode names the
version that it replaces, so that a concurrent write is detected.

Source: ``KafkaZkClient``, ``TopicDeletionManager``, ``AdminZkClient``, ``ZkProducerIdManager``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final
from uuid import UUID

from fencepost.cluster.controller.producer_ids import BLOCK_SIZE
from fencepost.cluster.image import (
    NEVER_LED,
    TOPIC_RESOURCE,
    MetadataImage,
    PartitionRegistration,
    TopicImage,
)
from fencepost.cluster.records import (
    BrokerRegistrationChangeRecord,
    ConfigRecord,
    MetadataRecord,
    NoOpRecord,
    PartitionChangeRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
    RemoveTopicRecord,
    TopicRecord,
    UnregisterBrokerRecord,
)
from fencepost.cluster.topic_records import without_partition_records
from fencepost.coordinator.zookeeper import znodes
from fencepost.coordinator.zookeeper.errors import NotInZooKeeperError
from fencepost.coordinator.zookeeper.session import ANY_VERSION, Check, Create, Put, Set, Write
from fencepost.logcore.steps import Steps

MAX_WRITES: Final = 500
"""The maximum number of writes in a transaction; a transaction must fit into 1 MiB
(``jute.maxbuffer``)."""

_OF_SESSIONS: Final = (
    RegisterBrokerRecord,
    BrokerRegistrationChangeRecord,
    UnregisterBrokerRecord,
    NoOpRecord,
)
"""Records that the controller does not write: each broker creates its own registration."""


_WRITTEN: Final = (
    TopicRecord,
    PartitionRecord,
    PartitionChangeRecord,
    RemoveTopicRecord,
    ProducerIdsRecord,
)


def check_storable(records: Sequence[MetadataRecord]) -> None:
    """Raise NotInZooKeeperError for records that cannot be stored in ZooKeeper."""
    for record in without_partition_records(records):
        if isinstance(record, ConfigRecord):
            if znodes.config_path(record.resource_type, record.resource_name) is None:
                raise NotInZooKeeperError("a cluster on ZooKeeper cannot store such settings")
        elif not isinstance(record, (*_WRITTEN, *_OF_SESSIONS)):
            raise NotInZooKeeperError(
                f"a cluster on ZooKeeper cannot store {type(record).__name__}"
            )


class ZnodeWriter:
    """Turns one decision into writes; ``marked`` are the topics already marked for deletion."""

    def __init__(
        self,
        before: MetadataImage,
        after: MetadataImage,
        controller_epoch: int,
        marked: Collection[str] = (),
    ) -> None:
        self._before, self._after = before, after
        self._epoch, self._marked = controller_epoch, marked
        self._states: dict[tuple[UUID, int], PartitionRegistration] = {}
        """The partition states after the records that were converted so far."""
        self._new: set[UUID] = set()
        self._assigned: dict[UUID, None] = {}
        self._resources: dict[tuple[int, str], None] = {}
        self._writes: list[Write] = []

    def write(self, records: Iterable[MetadataRecord]) -> Steps[list[Write]]:
        """Return the writes, ordered so that a failure after any of them does no harm.

        Each step converts one record, because a decision may create 10,000 partitions.
        """
        for record in records:
            match record:
                case TopicRecord():
                    self._new.add(record.topic_id)
                    self._assigned[record.topic_id] = None
                    self._resources[TOPIC_RESOURCE, record.name] = None
                case PartitionRecord():
                    self._create(record)
                case PartitionChangeRecord():
                    self._change(record)
                case ConfigRecord():
                    self._resources[record.resource_type, record.resource_name] = None
                case RemoveTopicRecord():
                    name = self._before.topics_by_id[record.topic_id].name
                    if name not in self._marked:
                        self._writes.append(Create(znodes.delete_path(name)))
                case ProducerIdsRecord():
                    data = znodes.producer_ids_data(
                        record.broker_id, record.next_producer_id - BLOCK_SIZE, BLOCK_SIZE
                    )
                    self._writes.append(Set(znodes.PRODUCER_IDS, data))
            yield
        return [*self._settings(), *self._assignments(), *self._writes, *self._notifications()]

    def _create(self, record: PartitionRecord) -> None:
        topic, index = self._after.topics_by_id[record.topic_id], record.partition_id
        state = PartitionRegistration.of(record)
        self._states[record.topic_id, index] = state
        self._assigned[record.topic_id] = None
        self._writes.append(Create(znodes.partition_path(topic.name, index)))
        self._writes.append(Create(znodes.state_path(topic.name, index), self._state(state)))

    def _change(self, record: PartitionChangeRecord) -> None:
        key = record.topic_id, record.partition_id
        was = self._states.get(key) or self._before.partition(*key)
        if was is None:
            return
        now = self._states[key] = was.merge(record)
        if (was.replicas, was.adding_replicas, was.removing_replicas) != (
            now.replicas,
            now.adding_replicas,
            now.removing_replicas,
        ):
            self._assigned[record.topic_id] = None
        name = self._after.topics_by_id[record.topic_id].name
        path = znodes.state_path(name, record.partition_id)
        if was.partition_epoch == NEVER_LED:  # there is no state znode yet
            self._writes.append(Create(path, self._state(now)))
        else:
            self._writes.append(Set(path, self._state(now), was.partition_epoch))

    def _state(self, now: PartitionRegistration) -> bytes:
        return znodes.state_data(
            znodes.PartitionStateZnode(
                now.leader, now.isr, now.leader_epoch, self._epoch, now.leader_recovery_state
            )
        )

    def _assignments(self) -> Iterator[Write]:
        for topic_id in self._assigned:
            topic = self._after.topics_by_id[topic_id]
            data = znodes.topic_data(assignment_of(topic))
            if topic_id in self._new:
                yield Create(znodes.topic_path(topic.name), data)
                yield Create(znodes.partitions_path(topic.name))
            else:
                yield Set(znodes.topic_path(topic.name), data, ANY_VERSION)

    def _settings(self) -> Iterator[Write]:
        """Yield the writes of settings, without versions: brokers and tools also write settings."""
        new = self._new_names()
        for kind, name in self._resources:
            values = self._after.configs.get((kind, name), {})
            yield put_settings(kind, name, values, is_new=kind == TOPIC_RESOURCE and name in new)

    def _new_names(self) -> set[str]:
        return {self._after.topics_by_id[topic_id].name for topic_id in self._new}

    def _notifications(self) -> Iterator[Write]:
        """Yield notifications of changed settings; a new topic's settings need none."""
        new = self._new_names()
        for kind, name in self._resources:
            if kind != TOPIC_RESOURCE or name not in new:
                yield config_change_notification(kind, name)


def put_settings(kind: int, name: str, values: Mapping[str, str], *, is_new: bool = False) -> Put:
    """Return the write of all settings of a resource that :func:`check_storable` accepts."""
    path = znodes.config_path(kind, name) or ""
    return Put(path, znodes.config_data(values), is_new=is_new)


def config_change_notification(kind: int, name: str) -> Create:
    """Return the notification by which brokers learn that a resource's settings have changed."""
    data = znodes.config_change_data(kind, name)
    return Create(znodes.CONFIG_CHANGE_PREFIX, data, sequence=True)


def assignment_of(topic: TopicImage) -> znodes.TopicZnode:
    """Return the znode of a topic's assignment."""

    def of(values: Mapping[int, tuple[int, ...]]) -> Mapping[int, tuple[int, ...]]:
        return {index: value for index, value in values.items() if value}

    parts = dict(enumerate(topic.partitions))
    return znodes.TopicZnode(
        topic.topic_id,
        {index: part.replicas for index, part in parts.items()},
        of({index: part.adding_replicas for index, part in parts.items()}),
        of({index: part.removing_replicas for index, part in parts.items()}),
    )


def fenced(writes: Sequence[Write], epoch_version: int) -> Iterator[list[Write]]:
    """Yield transactions that fail unless this controller is still active (KAFKA-6082)."""
    for start in range(0, len(writes), MAX_WRITES):
        yield [
            Check(znodes.CONTROLLER_EPOCH, epoch_version),
            *writes[start : start + MAX_WRITES],
        ]
