"""Applies records to an image to build the next one.

Source: ``MetadataDelta``, ``TopicsDelta``, ``TopicDelta``, ``ClusterDelta``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Final, TypeVar, cast
from uuid import UUID

from fencepost.cluster.image import (
    TOPIC_RESOURCE,
    BrokerRegistration,
    ImageChanges,
    MetadataImage,
    PartitionRegistration,
    TopicImage,
    unified_name,
)
from fencepost.cluster.records import (
    AccessControlEntryRecord,
    BrokerRegistrationChangeRecord,
    ClearElrRecord,
    ClientQuotaRecord,
    ConfigRecord,
    FeatureLevelRecord,
    FenceBrokerRecord,
    MetadataRecord,
    PartitionChangeRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
    RegisterControllerRecord,
    RemoveAccessControlEntryRecord,
    RemoveTopicRecord,
    RemoveUserScramCredentialRecord,
    TopicRecord,
    UnfenceBrokerRecord,
    UnregisterBrokerRecord,
    UnregisterControllerRecord,
    UserScramCredentialRecord,
)
from fencepost.cluster.topic_records import TopicRecords
from fencepost.logcore.errors import CorruptRecordError

K = TypeVar("K")
V = TypeVar("V")


def _copied(table: Mapping[K, V]) -> dict[K, V]:
    """Return a mutable copy; ``dict()`` would be several times slower after removals."""
    return copy(cast("dict[K, V]", table))


class MetadataDelta:
    """The records since an image, from which the next image is built.

    Raises CorruptRecordError for a record that contradicts the image: earlier records were lost,
    and replay must not continue.
    """

    def __init__(self, image: MetadataImage) -> None:
        self.image = image
        """The image to which the records are applied."""
        self.topics: dict[str, TopicImage] = {}
        """New and changed topics; ``_partitions`` has their partitions until :meth:`apply`."""
        self.deleted_topics: dict[UUID, TopicImage] = {}
        """Deleted topics, as they were in the previous image."""
        self._partitions: dict[bytes, dict[int, PartitionRegistration]] = {}
        """Partitions of new and changed topics, by the bytes of the topic id: a starting broker
        looks up thousands of ids, and hashing a UUID is slow."""
        self._names: dict[bytes, str] = {}
        self._resources: dict[tuple[int, str], None] = {}
        """Resources whose settings have changed."""
        self._acl_ids: dict[UUID, None] = {}
        """ACLs that have changed."""
        self._changed: dict[str, Any] = {}
        """Copies of the other parts of the image, by the name of their attribute."""
        self._snapshot = False
        self._resized = False
        """Whether a topic was created or deleted, or got more partitions."""

    # --- records ---

    def replay(self, record: MetadataRecord) -> None:
        """Apply one record."""
        apply = _REPLAY.get(type(record))
        if apply is not None:
            apply(self, record)

    def add_partitions(
        self, topic_id: UUID, first: int, registrations: Iterable[PartitionRegistration]
    ) -> None:
        """Replay the records of a topic's new partitions, which result in ``registrations``."""
        self.partitions_of(topic_id).update(enumerate(registrations, first))

    def begin_snapshot(self) -> None:
        """Replace the image by the following records; entries that they omit are removed.

        No record may have been replayed before (kafka: ``finishSnapshot``).
        """
        self._snapshot = True
        self._changed = {name: {} for name in _TABLES}
        self._changed["next_producer_id"] = 0

    def change_all(
        self, change: PartitionChangeRecord, replicas: tuple[int, ...]
    ) -> Iterator[tuple[UUID, Sequence[int]]]:
        """Apply one change to every partition of the image that has these replicas.

        Yields topic ids with the indexes of these partitions. No record of a topic may have been
        replayed before.
        """
        # ``changed`` and ``reassigned`` contain ``id()``s of registrations, because most partitions
        # share a registration.
        changed: dict[int, PartitionRegistration] = {}
        reassigned: set[int] = set()
        for name, topic in self.image.topics.items():
            partitions = topic.partitions
            ids = [*map(id, partitions)]
            for topic_id in {*ids} - changed.keys():
                partition = partitions[ids.index(topic_id)]
                changed[topic_id] = (
                    partition.merge(change) if partition.replicas == replicas else partition
                )
                if partition.replicas != replicas:
                    reassigned.add(topic_id)
            if reassigned and not reassigned.isdisjoint(ids):
                indexes: Sequence[int] = [
                    at for at, topic_id in enumerate(ids) if topic_id not in reassigned
                ]
            else:
                indexes = range(len(ids))
            if indexes:
                after = tuple([changed[topic_id] for topic_id in ids])
                self.topics[name] = TopicImage(name, topic.topic_id, after)
                yield topic.topic_id, indexes

    def apply(self, offset: int, epoch: int) -> MetadataImage:
        """Return the next image; its last record is at ``offset`` and was written in ``epoch``."""
        changes: dict[str, Any] = dict(self._changed)
        if self._snapshot or self.topics or self.deleted_topics or self._partitions:
            changes |= self._apply_topics()
        old, step = self.image, None
        if not self._snapshot:
            topic_ids = [*self.deleted_topics, *(topic.topic_id for topic in self.topics.values())]
            step = ImageChanges(
                old.topics,
                topic_ids,
                self._resized,
                old.configs,
                self._resources,
                old.acls,
                self._acl_ids,
            )
        return replace(old, offset=offset, epoch=epoch, step=step, **changes)

    def _apply_topics(self) -> Mapping[str, Any]:
        for topic_id, partitions in self._partitions.items():
            topic = self.topics[self._names[topic_id]]
            try:
                ordered = tuple([partitions[index] for index in range(len(partitions))])
            except KeyError:
                raise CorruptRecordError(f"the partitions of {topic.name} have gaps") from None
            self.topics[topic.name] = TopicImage(topic.name, topic.topic_id, ordered)
        if self._snapshot:
            for old in self.image.topics.values():
                if old.topic_id.bytes not in self._partitions:
                    self.deleted_topics[old.topic_id] = old
            by_name: dict[str, TopicImage] = {}
            by_id: dict[UUID, TopicImage] = {}
            unified: dict[str, str] = {}
            count = 0
        else:
            by_name, by_id = _copied(self.image.topics), _copied(self.image.topics_by_id)
            unified, count = _copied(self.image.unified), self.image.partition_count
            self._resized = bool(self.deleted_topics)
            for deleted in self.deleted_topics.values():
                del by_name[deleted.name], by_id[deleted.topic_id]
                unified.pop(unified_name(deleted.name), None)
                count -= len(deleted.partitions)
        for name, topic in self.topics.items():
            former = by_name.get(name)
            more = len(topic.partitions) - (0 if former is None else len(former.partitions))
            if more:
                count += more
                self._resized = True
            by_name[name] = by_id[topic.topic_id] = topic
            if "." in name or "_" in name:
                unified[unified_name(name)] = name
        return {
            "topics": by_name,
            "topics_by_id": by_id,
            "unified": unified,
            "partition_count": count,
        }

    def _table(self, name: str) -> dict[Any, Any]:
        """Return this delta's copy of a part of the image."""
        table: dict[Any, Any] | None = self._changed.get(name)
        if table is None:
            table = self._changed[name] = _copied(getattr(self.image, name))
        return table

    def _broker(self, broker_id: int, epoch: int) -> BrokerRegistration:
        registration = self._table("brokers").get(broker_id)
        if registration is None or registration.epoch != epoch:
            raise CorruptRecordError(
                f"a record of broker {broker_id} with epoch {epoch}, which is "
                + (
                    "not registered"
                    if registration is None
                    else f"registered with {registration.epoch}"
                )
            )
        found: BrokerRegistration = registration
        return found

    def partitions_of(self, topic_id: UUID) -> dict[int, PartitionRegistration]:
        """Return the partitions of a topic by index, in a dict that the caller may change."""
        return self.partitions_at(topic_id.bytes)

    def partitions_at(self, topic_id: bytes) -> dict[int, PartitionRegistration]:
        """See :meth:`partitions_of`; ``topic_id`` are the bytes of the id."""
        partitions = self._partitions.get(topic_id)
        if partitions is None:
            uuid = UUID(bytes=topic_id)
            topic = None if self._snapshot else self.image.topics_by_id.get(uuid)
            if topic is None or uuid in self.deleted_topics:
                raise CorruptRecordError(f"a record of an unknown topic: {uuid}")
            partitions = dict(enumerate(topic.partitions))
            self._partitions[topic_id] = partitions
            self._names[topic_id] = topic.name
            self.topics[topic.name] = topic
        return partitions

    # --- one method per record type ---

    def _register_broker(self, record: RegisterBrokerRecord) -> None:
        self._table("brokers")[record.broker_id] = BrokerRegistration(
            broker_id=record.broker_id,
            epoch=record.broker_epoch,
            incarnation_id=record.incarnation_id,
            listeners={end_point.name: end_point for end_point in record.end_points},
            features={
                feature.name: (feature.min_supported_version, feature.max_supported_version)
                for feature in record.features
            },
            rack=record.rack,
            fenced=record.fenced,
            in_controlled_shutdown=record.in_controlled_shutdown,
            directories=record.log_dirs,
            cordoned_directories=record.cordoned_log_dirs,
        )

    def _unregister_broker(self, record: UnregisterBrokerRecord) -> None:
        self._broker(record.broker_id, record.broker_epoch)
        del self._table("brokers")[record.broker_id]

    def _change_registration(self, record: BrokerRegistrationChangeRecord) -> None:
        broker = self._broker(record.broker_id, record.broker_epoch)
        cordoned = record.cordoned_log_dirs
        self._table("brokers")[record.broker_id] = replace(
            broker,
            fenced=broker.fenced if record.fenced == 0 else record.fenced > 0,
            in_controlled_shutdown=broker.in_controlled_shutdown
            or record.in_controlled_shutdown > 0,
            directories=record.log_dirs or broker.directories,
            cordoned_directories=broker.cordoned_directories if cordoned is None else cordoned,
        )

    def _fence(self, record: FenceBrokerRecord | UnfenceBrokerRecord) -> None:
        broker = self._broker(record.id, record.epoch)
        fenced = isinstance(record, FenceBrokerRecord)
        self._table("brokers")[record.id] = replace(broker, fenced=fenced)

    def _register_controller(self, record: RegisterControllerRecord) -> None:
        self._table("controllers")[record.controller_id] = record

    def _unregister_controller(self, record: UnregisterControllerRecord) -> None:
        self._table("controllers").pop(record.controller_id, None)

    def _topic(self, record: TopicRecord) -> None:
        existing = self.topics.get(record.name)
        if existing is None and not self._snapshot:
            existing = self.image.topics.get(record.name)
            if existing is not None and existing.topic_id in self.deleted_topics:
                existing = None
        if existing is not None:
            raise CorruptRecordError(f"topic {record.name} is created, but exists already")
        self.topics[record.name] = TopicImage(record.name, record.topic_id, ())
        topic_id = record.topic_id.bytes
        self._partitions[topic_id], self._names[topic_id] = {}, record.name

    def _remove_topic(self, record: RemoveTopicRecord) -> None:
        topic_id = record.topic_id
        self.partitions_of(topic_id)
        name = self._names.pop(topic_id.bytes)
        del self._partitions[topic_id.bytes], self.topics[name]
        old = self.image.topics_by_id.get(topic_id)
        if old is not None:
            self.deleted_topics[topic_id] = old
        if (TOPIC_RESOURCE, name) in self._changed.get("configs", self.image.configs):
            del self._table("configs")[TOPIC_RESOURCE, name]
            self._resources[TOPIC_RESOURCE, name] = None

    def _partition(self, record: PartitionRecord) -> None:
        partitions = self.partitions_of(record.topic_id)
        partitions[record.partition_id] = PartitionRegistration.of(record)

    def _change_partition(self, record: PartitionChangeRecord) -> None:
        partitions = self.partitions_of(record.topic_id)
        partition = partitions.get(record.partition_id)
        if partition is None:
            name = self._names[record.topic_id.bytes]
            raise CorruptRecordError(
                f"a change of partition {record.partition_id} of {name}, which does not exist"
            )
        partitions[record.partition_id] = partition.merge(record)

    def _clear_elr(self, record: ClearElrRecord) -> None:
        names = [record.topic_name] if record.topic_name else list(self._all_topics())
        for name in names:
            topic = self.topics.get(name) or self.image.topics.get(name)
            if topic is None:
                raise CorruptRecordError(f"a record of an unknown topic: {name}")
            partitions = self.partitions_of(topic.topic_id)
            for index, partition in partitions.items():
                if partition.elr or partition.last_known_elr:
                    partitions[index] = replace(
                        partition,
                        elr=(),
                        last_known_elr=(),
                        partition_epoch=partition.partition_epoch + 1,
                    )

    def _all_topics(self) -> Iterator[str]:
        yield from self.topics
        if not self._snapshot:
            yield from (
                name
                for name, topic in self.image.topics.items()
                if name not in self.topics and topic.topic_id not in self.deleted_topics
            )

    def _config(self, record: ConfigRecord) -> None:
        configs = self._table("configs")
        resource = record.resource_type, record.resource_name
        self._resources[resource] = None
        values = dict(configs.get(resource, {}))
        if record.value is None:
            values.pop(record.name, None)
        else:
            values[record.name] = record.value
        if values:
            configs[resource] = values
        else:
            configs.pop(resource, None)

    def _feature(self, record: FeatureLevelRecord) -> None:
        if record.feature_level:
            self._table("features")[record.name] = record.feature_level
        else:
            self._table("features").pop(record.name, None)

    def _producer_ids(self, record: ProducerIdsRecord) -> None:
        self._changed["next_producer_id"] = record.next_producer_id

    def _acl(self, record: AccessControlEntryRecord) -> None:
        self._table("acls")[record.id] = record
        self._acl_ids[record.id] = None

    def _remove_acl(self, record: RemoveAccessControlEntryRecord) -> None:
        if self._table("acls").pop(record.id, None) is None:
            raise CorruptRecordError(f"the ACL to remove does not exist: {record.id}")
        self._acl_ids[record.id] = None

    def _credential(self, record: UserScramCredentialRecord) -> None:
        self._table("scram")[record.name, record.mechanism] = record

    def _remove_credential(self, record: RemoveUserScramCredentialRecord) -> None:
        self._table("scram").pop((record.name, record.mechanism), None)

    def _quota(self, record: ClientQuotaRecord) -> None:
        quotas = self._table("quotas")
        entity = tuple(
            sorted((component.entity_type, component.entity_name) for component in record.entity)
        )
        values = dict(quotas.get(entity, {}))
        if record.remove:
            values.pop(record.key, None)
        else:
            values[record.key] = record.value
        if values:
            quotas[entity] = values
        else:
            quotas.pop(entity, None)


_TABLES: Final = ("features", "brokers", "controllers", "configs", "acls", "scram", "quotas")

_REPLAY: Final[Mapping[type, Callable[[MetadataDelta, Any], None]]] = {
    RegisterBrokerRecord: MetadataDelta._register_broker,
    UnregisterBrokerRecord: MetadataDelta._unregister_broker,
    BrokerRegistrationChangeRecord: MetadataDelta._change_registration,
    FenceBrokerRecord: MetadataDelta._fence,
    UnfenceBrokerRecord: MetadataDelta._fence,
    RegisterControllerRecord: MetadataDelta._register_controller,
    UnregisterControllerRecord: MetadataDelta._unregister_controller,
    TopicRecord: MetadataDelta._topic,
    RemoveTopicRecord: MetadataDelta._remove_topic,
    PartitionRecord: MetadataDelta._partition,
    PartitionChangeRecord: MetadataDelta._change_partition,
    ClearElrRecord: MetadataDelta._clear_elr,
    ConfigRecord: MetadataDelta._config,
    FeatureLevelRecord: MetadataDelta._feature,
    ProducerIdsRecord: MetadataDelta._producer_ids,
    AccessControlEntryRecord: MetadataDelta._acl,
    RemoveAccessControlEntryRecord: MetadataDelta._remove_acl,
    UserScramCredentialRecord: MetadataDelta._credential,
    RemoveUserScramCredentialRecord: MetadataDelta._remove_credential,
    ClientQuotaRecord: MetadataDelta._quota,
}
"""The method for each record type. The other types do not affect the image: NoOp, the state of a
migration from ZooKeeper, delegation tokens, and the boundaries of metadata transactions, which
``ImageLoader`` handles."""


def replayed(
    image: MetadataImage, records: Sequence[MetadataRecord], offset: int, epoch: int
) -> MetadataImage:
    """Return the image after ``records``; the last record is at ``offset``, written in ``epoch``.

    Raises CorruptRecordError.
    """
    delta = MetadataDelta(image)
    prepared = records if isinstance(records, TopicRecords) and records.is_prepared else None
    for record in records if prepared is None else prepared.head:
        delta.replay(record)
    if prepared is not None:
        delta.add_partitions(prepared.topic_id, prepared.first, prepared.registrations)
    return delta.apply(offset, epoch)
