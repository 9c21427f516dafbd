"""The smallest sequence of records that produces an image: the content of a snapshot.

Source: ``MetadataImage.write`` and the ``write`` methods of its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

from fencepost.cluster.image import MetadataImage, PartitionRegistration, TopicImage
from fencepost.cluster.record_codec import Template, encode, topic_value
from fencepost.cluster.records import (
    BrokerFeature,
    ClientQuotaRecord,
    ConfigRecord,
    EntityData,
    FeatureLevelRecord,
    MetadataRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
)

METADATA_FEATURE = "metadata.version"
"""The feature whose level decides how records are written; its record comes first."""


def count_of(image: MetadataImage) -> int:
    """Return the approximate number of records of an image."""
    settings = sum(map(len, image.configs.values()))
    return len(image.topics) + image.partition_count + settings + len(image.acls)


def image_values(image: MetadataImage) -> Iterator[bytes]:
    """Yield the values of the records."""
    for record in _cluster_records(image):
        yield encode(record)
    templates: dict[int, Template] = {}
    for topic in image.topics.values():
        yield topic_value(topic.name, topic.topic_id)
    # Partitions are written after all topics, because adjacent records with the same content are
    # replayed together.
    for topic in image.topics.values():
        yield from _partition_values(topic, templates)
    for record in _records_after_topics(image):
        yield encode(record)


def _cluster_records(image: MetadataImage) -> Iterator[MetadataRecord]:
    for name in sorted(image.features, key=lambda name: (name != METADATA_FEATURE, name)):
        yield FeatureLevelRecord(name, image.features[name])
    for broker in image.brokers.values():
        yield RegisterBrokerRecord(
            broker_id=broker.broker_id,
            incarnation_id=broker.incarnation_id,
            broker_epoch=broker.epoch,
            end_points=tuple(broker.listeners.values()),
            features=tuple(
                BrokerFeature(name, low, high) for name, (low, high) in broker.features.items()
            ),
            rack=broker.rack,
            fenced=broker.fenced,
            in_controlled_shutdown=broker.in_controlled_shutdown,
            log_dirs=broker.directories,
            cordoned_log_dirs=broker.cordoned_directories,
        )
    yield from image.controllers.values()


def _partition_values(topic: TopicImage, templates: dict[int, Template]) -> Iterator[bytes]:
    """Yield a topic's encoded partitions; ``templates`` is a cache by ``id()`` of registrations."""
    begin, partitions = 0, topic.partitions
    while begin < len(partitions):
        registration, end = partitions[begin], begin + 1
        while end < len(partitions) and partitions[end] is registration:
            end += 1
        template = templates.get(id(registration))
        if template is None:
            template = Template(partition_record(topic.topic_id, begin, registration))
            templates[id(registration)] = template
        yield from template.at(topic.topic_id, range(begin, end))
        begin = end


def partition_record(
    topic_id: UUID, index: int, registration: PartitionRegistration
) -> PartitionRecord:
    """Return the record of a partition's current state."""
    return PartitionRecord(
        topic_id=topic_id,
        partition_id=index,
        replicas=registration.replicas,
        isr=registration.isr,
        removing_replicas=registration.removing_replicas,
        adding_replicas=registration.adding_replicas,
        leader=registration.leader,
        leader_recovery_state=registration.leader_recovery_state,
        leader_epoch=registration.leader_epoch,
        partition_epoch=registration.partition_epoch,
        directories=registration.directories,
        eligible_leader_replicas=registration.elr or None,
        last_known_elr=registration.last_known_elr or None,
    )


def _records_after_topics(image: MetadataImage) -> Iterator[MetadataRecord]:
    for (kind, resource), values in image.configs.items():
        for name, value in values.items():
            yield ConfigRecord(kind, resource, name, value)
    for entity, quotas in image.quotas.items():
        parts = tuple(EntityData(kind, name) for kind, name in entity)
        for key, limit in quotas.items():
            yield ClientQuotaRecord(parts, key, limit, remove=False)
    if image.next_producer_id:
        yield ProducerIdsRecord(broker_id=-1, next_producer_id=image.next_producer_id)
    yield from image.acls.values()
    yield from image.scram.values()
