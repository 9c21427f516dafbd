"""The immutable image of a cluster's metadata, and the differences between two images.

A ``MetadataDelta`` (``delta.py``) applies records to an image and builds the next one, which shares
every unchanged part with the previous image. Two successive images show what a broker must do:
:func:`local_changes`.

Source: ``MetadataImage``, ``PartitionRegistration.merge``, ``TopicsDelta.localChanges``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import field, replace
from typing import Final, NamedTuple
from uuid import UUID

from fencepost.cluster.records import (
    AccessControlEntryRecord,
    BrokerEndpoint,
    PartitionChangeRecord,
    PartitionRecord,
    RegisterControllerRecord,
    UserScramCredentialRecord,
)
from fencepost.logcore.values import dataclass

NO_LEADER: Final = -1
NEVER_LED: Final = -1
"""The partition epoch of a partition that has replicas but never had a leader (ZooKeeper): another
program has written its assignment."""
NO_LEADER_CHANGE: Final = -2
"""The leader in a PartitionChangeRecord that does not change the leader."""

MIGRATING: Final = UUID(int=0)
UNASSIGNED: Final = UUID(int=1)
LOST: Final = UUID(int=2)
"""Reserved directory ids that name no directory (kafka: ``DirectoryId``); MIGRATING and UNASSIGNED
count as online."""

TOPIC_RESOURCE: Final = 2
BROKER_RESOURCE: Final = 4
CLIENT_METRICS_RESOURCE: Final = 16
GROUP_RESOURCE: Final = 32
"""The types of resources with settings (kafka: ``ConfigResource.Type``)."""

Entity = tuple[tuple[str, str | None], ...]
"""The types and names of a quota's entity, sorted by type."""


@dataclass(frozen=True, slots=True)
class PartitionRegistration:
    """The state of one partition as the metadata records it."""

    replicas: tuple[int, ...]
    """The assignment, in order of preference."""
    isr: tuple[int, ...]
    leader: int
    leader_epoch: int
    partition_epoch: int
    directories: tuple[UUID, ...] = ()
    """The log directory of each replica."""
    removing_replicas: tuple[int, ...] = ()
    adding_replicas: tuple[int, ...] = ()
    elr: tuple[int, ...] = ()
    last_known_elr: tuple[int, ...] = ()
    leader_recovery_state: int = 0
    """1 after an unclean election, until the leader reports that it has recovered."""

    @classmethod
    def of(cls, record: PartitionRecord) -> PartitionRegistration:
        """Return the registration of a new partition."""
        return cls(
            replicas=record.replicas,
            isr=record.isr,
            leader=record.leader,
            leader_epoch=record.leader_epoch,
            partition_epoch=record.partition_epoch,
            directories=record.directories or (MIGRATING,) * len(record.replicas),
            removing_replicas=record.removing_replicas,
            adding_replicas=record.adding_replicas,
            elr=record.eligible_leader_replicas or (),
            last_known_elr=record.last_known_elr or (),
            leader_recovery_state=record.leader_recovery_state,
        )

    def merge(self, change: PartitionChangeRecord) -> PartitionRegistration:
        """Return the registration after a change.

        Every change raises the partition epoch; a change that names a leader, even the same one,
        raises the leader epoch.
        """
        elects = change.leader != NO_LEADER_CHANGE
        replicas = self.replicas if change.replicas is None else change.replicas
        directories = change.directories
        if directories is None:
            directories = self.directories
            if change.replicas is not None:
                directory_of_replica = dict(zip(self.replicas, self.directories, strict=False))
                directories = tuple(
                    directory_of_replica.get(replica, MIGRATING) for replica in replicas
                )
        recovery = change.leader_recovery_state
        return PartitionRegistration(
            replicas=replicas,
            isr=_changed_or(change.isr, self.isr),
            leader=change.leader if elects else self.leader,
            leader_epoch=self.leader_epoch + elects,
            partition_epoch=self.partition_epoch + 1,
            directories=directories,
            removing_replicas=_changed_or(change.removing_replicas, self.removing_replicas),
            adding_replicas=_changed_or(change.adding_replicas, self.adding_replicas),
            elr=_changed_or(change.eligible_leader_replicas, self.elr),
            last_known_elr=_changed_or(change.last_known_elr, self.last_known_elr),
            leader_recovery_state=self.leader_recovery_state if recovery < 0 else recovery,
        )

    def is_sole_replica_on(self, broker_id: int) -> bool:
        """Whether a broker leads the partition and has its only replica."""
        return self.leader == broker_id and self.replicas == (broker_id,)

    def directory_of(self, broker_id: int) -> UUID:
        """Return the directory of a broker's replica; UNASSIGNED if it is unknown."""
        for replica, directory in zip(self.replicas, self.directories, strict=False):
            if replica == broker_id:
                return directory
        return UNASSIGNED


def _changed_or(new: tuple[int, ...] | None, old: tuple[int, ...]) -> tuple[int, ...]:
    return old if new is None else new


@dataclass(frozen=True, slots=True)
class TopicImage:
    """A topic; its partitions are numbered from 0 without a gap."""

    name: str
    topic_id: UUID
    partitions: tuple[PartitionRegistration, ...]


@dataclass(frozen=True, slots=True)
class BrokerRegistration:
    """A broker's registration, and its state at the controller."""

    broker_id: int
    epoch: int
    incarnation_id: UUID
    listeners: Mapping[str, BrokerEndpoint]
    features: Mapping[str, tuple[int, int]]
    """The lowest and highest supported level of each feature."""
    rack: str | None
    fenced: bool
    in_controlled_shutdown: bool
    directories: tuple[UUID, ...]
    cordoned_directories: tuple[UUID, ...] | None = None

    @property
    def is_active(self) -> bool:
        """Whether the broker may lead and join an ISR: unfenced, not in controlled shutdown."""
        return not self.fenced and not self.in_controlled_shutdown

    def has_online(self, directory: UUID) -> bool:
        """Whether a replica in that directory is online."""
        return directory in self.directories or directory in (MIGRATING, UNASSIGNED)


class ImageChanges(NamedTuple):
    """The changes between two successive images, noted while the second one was built."""

    topics: Mapping[str, TopicImage]
    """The topics of the previous image."""
    topic_ids: Collection[UUID]
    """The topics that were created, changed or deleted."""
    resized: bool
    """Whether a topic was created or deleted, or its number of partitions changed."""
    configs: Mapping[tuple[int, str], Mapping[str, str]]
    """The settings of the previous image."""
    resources: Collection[tuple[int, str]]
    """The type and name of the resources whose settings changed or were removed."""
    acls: Mapping[UUID, AccessControlEntryRecord]
    """The ACLs of the previous image."""
    acl_ids: Collection[UUID]
    """The ACLs that were created, changed or deleted."""


@dataclass(frozen=True, slots=True)
class MetadataImage:
    """The cluster's metadata up to the record at ``offset``, which was written in ``epoch``."""

    offset: int = -1
    epoch: int = -1
    features: Mapping[str, int] = field(default_factory=dict)
    """Finalized levels, including ``metadata.version``; a feature at level 0 is omitted."""
    brokers: Mapping[int, BrokerRegistration] = field(default_factory=dict)
    controllers: Mapping[int, RegisterControllerRecord] = field(default_factory=dict)
    topics: Mapping[str, TopicImage] = field(default_factory=dict)
    topics_by_id: Mapping[UUID, TopicImage] = field(default_factory=dict)
    partition_count: int = 0
    """The number of partitions of all topics."""
    unified: Mapping[str, str] = field(default_factory=dict)
    """The names of topics that contain a ``.`` or a ``_``, by their :func:`unified_name`."""
    configs: Mapping[tuple[int, str], Mapping[str, str]] = field(default_factory=dict)
    """Dynamic settings by the type and name of their resource; "" stands for all brokers."""
    acls: Mapping[UUID, AccessControlEntryRecord] = field(default_factory=dict)
    scram: Mapping[tuple[str, int], UserScramCredentialRecord] = field(default_factory=dict)
    """Credentials by user and mechanism (1 SCRAM-SHA-256, 2 SCRAM-SHA-512)."""
    quotas: Mapping[Entity, Mapping[str, float]] = field(default_factory=dict)
    next_producer_id: int = 0
    step: ImageChanges | None = field(default=None, compare=False, repr=False)
    """The changes since the previous image, if known."""

    def partition(self, topic_id: UUID, index: int) -> PartitionRegistration | None:
        """Return the partition, None if it does not exist."""
        topic = self.topics_by_id.get(topic_id)
        if topic is None or not 0 <= index < len(topic.partitions):
            return None
        return topic.partitions[index]

    def topic_configs(self, name: str) -> Mapping[str, str]:
        """Return the settings of one topic."""
        return self.configs.get((TOPIC_RESOURCE, name), {})

    def colliding(self, name: str) -> str | None:
        """Return the topic whose name equals ``name`` if ``.`` and ``_`` count as equal."""
        return name if name in self.topics else self.unified.get(unified_name(name))


def unified_name(name: str) -> str:
    """Return a topic's name as it appears in metric names, where it must be unique."""
    return name.replace(".", "_")


# --- differences between images ---


def changed_configs(old: MetadataImage, new: MetadataImage) -> Collection[tuple[int, str]]:
    """Return the type and name of the resources whose settings changed or were removed."""
    before, after = old.configs, new.configs
    if before is after:
        return ()
    if new.step is not None and new.step.configs is before:
        return new.step.resources
    changed = [key for key, values in after.items() if before.get(key) is not values]
    return [*changed, *(before.keys() - after.keys())]


def changed_acls(old: MetadataImage, new: MetadataImage) -> Collection[UUID]:
    """Return the ids of the ACLs that were created, changed or deleted."""
    before, after = old.acls, new.acls
    if before is after:
        return ()
    if new.step is not None and new.step.acls is before:
        return new.step.acl_ids
    # Two images share unchanged records. Hashing UUIDs is slow, so compare identities first.
    shared = {*map(id, before.values())} & {*map(id, after.values())}
    return dict.fromkeys(
        record.id
        for record in (*before.values(), *after.values())
        if id(record) not in shared and before.get(record.id) != after.get(record.id)
    )


def changed_topics(old: MetadataImage, new: MetadataImage) -> Collection[UUID]:
    """Return the ids of the topics that were created, changed or deleted."""
    before, after = old.topics_by_id, new.topics_by_id
    if before is after:
        return ()
    if new.step is not None and new.step.topics is old.topics:
        return new.step.topic_ids
    changed = [topic_id for topic_id, topic in after.items() if before.get(topic_id) is not topic]
    return [*(before.keys() - after.keys()), *changed]


def topics_resized(old: MetadataImage, new: MetadataImage) -> bool:
    """Whether a topic was created or deleted, or its number of partitions changed."""
    if new.step is not None and new.step.topics is old.topics:
        return new.step.resized
    return any(
        _size(old, topic_id) != _size(new, topic_id) for topic_id in changed_topics(old, new)
    )


def racks_of(image: MetadataImage, name: str) -> tuple[tuple[str, ...], ...]:
    """Return the racks of each partition's replicas, sorted; empty if no broker has a rack."""
    topic, racks = image.topics.get(name), _racks(image)
    if topic is None or not racks:
        return ()
    return tuple(
        tuple(sorted(racks[replica] for replica in partition.replicas if replica in racks))
        for partition in topic.partitions
    )


def racks_changed(old: MetadataImage, new: MetadataImage) -> bool:
    """Whether replicas of a topic that is in both images may have moved to other racks."""
    if old.brokers is not new.brokers and _racks(old) != _racks(new):
        return True
    if old.topics is new.topics or not _racks(new):
        return False
    for topic_id in changed_topics(old, new):
        before, after = old.topics_by_id.get(topic_id), new.topics_by_id.get(topic_id)
        if before is None or after is None:
            continue
        pairs = zip(before.partitions, after.partitions, strict=False)
        if any(one is not two and one.replicas != two.replicas for one, two in pairs):
            return True
    return False


def _racks(image: MetadataImage) -> dict[int, str]:
    brokers = image.brokers.values()
    return {broker.broker_id: broker.rack for broker in brokers if broker.rack is not None}


def _size(image: MetadataImage, topic_id: UUID) -> int:
    topic = image.topics_by_id.get(topic_id)
    return 0 if topic is None else len(topic.partitions)


# --- changes for one broker ---


@dataclass(frozen=True, slots=True)
class LocalPartition:
    """A partition of which this broker has, or had, a replica."""

    topic: str
    topic_id: UUID
    index: int
    registration: PartitionRegistration


@dataclass(frozen=True, slots=True)
class LocalChanges:
    """The changes of a broker's partitions, in the order in which the broker applies them."""

    deletes: tuple[LocalPartition, ...] = ()
    """The broker no longer has a replica; the registration is from the previous image."""
    leaders: tuple[LocalPartition, ...] = ()
    """The broker leads, and the partition has changed."""
    elected: tuple[LocalPartition, ...] = ()
    """The partitions of ``leaders`` whose leader epoch has changed."""
    followers: tuple[LocalPartition, ...] = ()
    """The broker has a replica and does not lead, and the partition has changed."""
    deleted_sole_replicas: tuple[TopicImage, ...] = ()
    """Deleted topics, all of whose partitions had their only replica on the broker; ``deletes``
    omits these partitions."""


def deleted_topics(old: MetadataImage, new: MetadataImage) -> list[TopicImage]:
    """Return the topics of the old image that the new image lacks."""
    topics = (old.topics_by_id.get(topic_id) for topic_id in changed_topics(old, new))
    return [
        topic for topic in topics if topic is not None and topic.topic_id not in new.topics_by_id
    ]


def local_changes(
    old: MetadataImage,
    new: MetadataImage,
    broker_id: int,
    *,
    topics: Collection[UUID] | None = None,
    sole_replicas: bool = True,
) -> LocalChanges:
    """Return what a broker must do when one image follows another.

    ``topics`` are the topics to compare, by default all that changed. With ``sole_replicas=False``,
    the result omits new partitions whose only replica is on this broker, and lists deleted topics
    that consist of such partitions in ``deleted_sole_replicas``. A broker may have 200,000 such
    partitions.

    Source: ``TopicDelta.localChanges``, ``TopicsDelta.localChanges``.
    """
    deletes: list[LocalPartition] = []
    leaders: list[LocalPartition] = []
    elected: list[LocalPartition] = []
    followers: list[LocalPartition] = []
    deleted_sole_replicas: list[TopicImage] = []
    if old.topics is new.topics:
        return LocalChanges()
    for topic_id in changed_topics(old, new) if topics is None else topics:
        before, after = old.topics_by_id.get(topic_id), new.topics_by_id.get(topic_id)
        if after is None:
            if before is None:
                continue
            if not sole_replicas and _is_sole_replica(before, broker_id):
                deleted_sole_replicas.append(before)
            else:
                parts = _local_partitions(before)
                deletes += [local for local in parts if broker_id in local.registration.replicas]
            continue
        former = () if before is None else before.partitions
        if not sole_replicas and before is None and _is_sole_replica(after, broker_id):
            continue
        for index, now in enumerate(after.partitions):
            was = former[index] if index < len(former) else None
            if was is now or (
                was is None and not sole_replicas and now.is_sole_replica_on(broker_id)
            ):
                continue
            local = LocalPartition(after.name, topic_id, index, now)
            if broker_id not in now.replicas:
                if was is not None and broker_id in was.replicas:
                    deletes.append(replace(local, registration=was))
            elif (
                was is not None
                and was.partition_epoch == now.partition_epoch
                # A broker that starts on ZooKeeper reads the replicas first and the states later. A
                # reassignment in between makes the broker a replica without a new partition epoch.
                and broker_id in was.replicas
            ):
                continue
            elif now.leader == broker_id:
                leaders.append(local)
                if was is None or was.leader_epoch != now.leader_epoch:
                    elected.append(local)
            else:
                followers.append(local)
    return LocalChanges(
        tuple(deletes),
        tuple(leaders),
        tuple(elected),
        tuple(followers),
        tuple(deleted_sole_replicas),
    )


def _is_sole_replica(topic: TopicImage, broker_id: int) -> bool:
    """Whether each partition of a topic has its only replica on the broker."""
    last = None
    for partition in topic.partitions:
        if partition is not last:  # most partitions share their registration
            if not partition.is_sole_replica_on(broker_id):
                return False
            last = partition
    return True


def _local_partitions(topic: TopicImage) -> Iterator[LocalPartition]:
    for index, registration in enumerate(topic.partitions):
        yield LocalPartition(topic.name, topic.topic_id, index, registration)
