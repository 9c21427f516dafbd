"""The immutable picture of a cluster that its metadata records add up to, and what changes it.

An image is never changed: a ``MetadataDelta`` (``delta.py``) takes records and makes the next image
of it, which shares with the former one all that stayed. Two images, the former and the next, tell a
broker what it has to do: :func:`local_changes`.

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
NO_LEADER_CHANGE: Final = -2
"""The leader in a PartitionChangeRecord that says nothing of it."""

MIGRATING: Final = UUID(int=0)
UNASSIGNED: Final = UUID(int=1)
LOST: Final = UUID(int=2)
"""Directories that are none (kafka: ``DirectoryId``); the first two count as online."""

TOPIC_RESOURCE: Final = 2
BROKER_RESOURCE: Final = 4
GROUP_RESOURCE: Final = 32
"""What settings belong to (kafka: ``ConfigResource.Type``)."""

Entity = tuple[tuple[str, str | None], ...]
"""Types and names of the parts of a quota's entity, sorted by type."""


@dataclass(frozen=True, slots=True)
class PartitionRegistration:
    """What the cluster has decided of one partition."""

    replicas: tuple[int, ...]
    """The assignment, in the order of preference."""
    isr: tuple[int, ...]
    leader: int
    leader_epoch: int
    partition_epoch: int
    directories: tuple[UUID, ...] = ()
    """Where each of the replicas lies."""
    removing_replicas: tuple[int, ...] = ()
    adding_replicas: tuple[int, ...] = ()
    elr: tuple[int, ...] = ()
    last_known_elr: tuple[int, ...] = ()
    leader_recovery_state: int = 0
    """1 after an unclean election, until the leader has said that it took notice."""

    @classmethod
    def of(cls, record: PartitionRecord) -> PartitionRegistration:
        """That of a new partition."""
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
        """The registration after a change.

        Every one counts the partition epoch up, and one that names a leader, be it the same, counts
        the leader epoch up.
        """
        leads_anew = change.leader != NO_LEADER_CHANGE
        replicas = self.replicas if change.replicas is None else change.replicas
        directories = change.directories
        if directories is None:
            directories = self.directories
            if change.replicas is not None:
                known = dict(zip(self.replicas, self.directories, strict=False))
                directories = tuple(known.get(one, MIGRATING) for one in replicas)
        recovery = change.leader_recovery_state
        return PartitionRegistration(
            replicas=replicas,
            isr=_or(change.isr, self.isr),
            leader=change.leader if leads_anew else self.leader,
            leader_epoch=self.leader_epoch + leads_anew,
            partition_epoch=self.partition_epoch + 1,
            directories=directories,
            removing_replicas=_or(change.removing_replicas, self.removing_replicas),
            adding_replicas=_or(change.adding_replicas, self.adding_replicas),
            elr=_or(change.eligible_leader_replicas, self.elr),
            last_known_elr=_or(change.last_known_elr, self.last_known_elr),
            leader_recovery_state=self.leader_recovery_state if recovery < 0 else recovery,
        )

    def is_alone_on(self, broker_id: int) -> bool:
        """Whether a broker leads the partition and has its only replica."""
        return self.leader == broker_id and self.replicas == (broker_id,)

    def directory_of(self, broker_id: int) -> UUID:
        """Where the replica of a broker lies; UNASSIGNED if nobody said."""
        for replica, directory in zip(self.replicas, self.directories, strict=False):
            if replica == broker_id:
                return directory
        return UNASSIGNED


def _or(new: tuple[int, ...] | None, old: tuple[int, ...]) -> tuple[int, ...]:
    return old if new is None else new


@dataclass(frozen=True, slots=True)
class TopicImage:
    """A topic; its partitions are numbered from 0 without a gap."""

    name: str
    topic_id: UUID
    partitions: tuple[PartitionRegistration, ...]


@dataclass(frozen=True, slots=True)
class BrokerRegistration:
    """A broker as it has registered, and what the controller thinks of it since."""

    broker_id: int
    epoch: int
    incarnation_id: UUID
    listeners: Mapping[str, BrokerEndpoint]
    features: Mapping[str, tuple[int, int]]
    """Lowest and highest level of each feature that it supports."""
    rack: str | None
    fenced: bool
    in_controlled_shutdown: bool
    directories: tuple[UUID, ...]
    cordoned_directories: tuple[UUID, ...] | None = None

    @property
    def is_active(self) -> bool:
        """Whether it may lead and join an ISR: neither fenced nor about to go."""
        return not self.fenced and not self.in_controlled_shutdown

    def has_online(self, directory: UUID) -> bool:
        """Whether a replica in that directory can be read."""
        return directory in self.directories or directory in (MIGRATING, UNASSIGNED)


class Step(NamedTuple):
    """What an image was made of, so that who knows that need not look at all of it."""

    topics: Mapping[str, TopicImage]
    """The topics of the former image."""
    topic_ids: Collection[UUID]
    """Topics that are new, others or gone."""
    resized: bool
    """Whether any of these has come, is gone or has another number of partitions."""
    configs: Mapping[tuple[int, str], Mapping[str, str]]
    """The settings of the former image."""
    resources: Collection[tuple[int, str]]
    """Type and name of the resources whose settings are others or gone."""
    acls: Mapping[UUID, AccessControlEntryRecord]
    """The ACLs of the former image."""
    acl_ids: Collection[UUID]
    """ACLs that are new, others or gone."""


@dataclass(frozen=True, slots=True)
class MetadataImage:
    """All of it, up to the record at ``offset``, which was written in ``epoch``."""

    offset: int = -1
    epoch: int = -1
    features: Mapping[str, int] = field(default_factory=dict)
    """Finalized levels, ``metadata.version`` among them; a feature at 0 is not in it."""
    brokers: Mapping[int, BrokerRegistration] = field(default_factory=dict)
    controllers: Mapping[int, RegisterControllerRecord] = field(default_factory=dict)
    topics: Mapping[str, TopicImage] = field(default_factory=dict)
    topics_by_id: Mapping[UUID, TopicImage] = field(default_factory=dict)
    partition_count: int = 0
    """Partitions of all topics."""
    unified: Mapping[str, str] = field(default_factory=dict)
    """Names of topics that have a ``.`` or a ``_``, by what they are once the two are the same."""
    configs: Mapping[tuple[int, str], Mapping[str, str]] = field(default_factory=dict)
    """Dynamic settings by type and name of their resource; "" stands for all brokers."""
    acls: Mapping[UUID, AccessControlEntryRecord] = field(default_factory=dict)
    scram: Mapping[tuple[str, int], UserScramCredentialRecord] = field(default_factory=dict)
    """Credentials by user and mechanism (1 SCRAM-SHA-256, 2 SCRAM-SHA-512)."""
    quotas: Mapping[Entity, Mapping[str, float]] = field(default_factory=dict)
    next_producer_id: int = 0
    step: Step | None = field(default=None, compare=False, repr=False)
    """How it differs from the one before it, if that is known."""

    def partition(self, topic_id: UUID, index: int) -> PartitionRegistration | None:
        """The partition, None if there is none."""
        topic = self.topics_by_id.get(topic_id)
        if topic is None or not 0 <= index < len(topic.partitions):
            return None
        return topic.partitions[index]

    def topic_configs(self, name: str) -> Mapping[str, str]:
        """A topic's own settings."""
        return self.configs.get((TOPIC_RESOURCE, name), {})

    def colliding(self, name: str) -> str | None:
        """The topic whose name differs from ``name`` in ``.`` and ``_`` alone, or is the same."""
        return name if name in self.topics else self.unified.get(unified_name(name))


def unified_name(name: str) -> str:
    """What a name becomes in the name of a metric, where two topics must not meet."""
    return name.replace(".", "_")


# --- what is different ---


def changed_configs(old: MetadataImage, new: MetadataImage) -> Collection[tuple[int, str]]:
    """Type and name of the resources whose settings are others, or gone."""
    before, after = old.configs, new.configs
    if before is after:
        return ()
    if new.step is not None and new.step.configs is before:
        return new.step.resources
    changed = [key for key, values in after.items() if before.get(key) is not values]
    return [*changed, *(before.keys() - after.keys())]


def changed_acls(old: MetadataImage, new: MetadataImage) -> Collection[UUID]:
    """Return the ids of the ACLs that are new, others or gone."""
    before, after = old.acls, new.acls
    if before is after:
        return ()
    if new.step is not None and new.step.acls is before:
        return new.step.acl_ids
    # Two images share the records that did not change, and the hash of a UUID is slow.
    shared = {*map(id, before.values())} & {*map(id, after.values())}
    return dict.fromkeys(
        record.id
        for record in (*before.values(), *after.values())
        if id(record) not in shared and before.get(record.id) != after.get(record.id)
    )


def changed_topics(old: MetadataImage, new: MetadataImage) -> Collection[UUID]:
    """The topics that are new, others or gone."""
    before, after = old.topics_by_id, new.topics_by_id
    if before is after:
        return ()
    if new.step is not None and new.step.topics is old.topics:
        return new.step.topic_ids
    changed = [topic_id for topic_id, topic in after.items() if before.get(topic_id) is not topic]
    return [*(before.keys() - after.keys()), *changed]


def topics_resized(old: MetadataImage, new: MetadataImage) -> bool:
    """Whether a topic has come or gone, or has another number of partitions."""
    if new.step is not None and new.step.topics is old.topics:
        return new.step.resized
    return any(
        _size(old, topic_id) != _size(new, topic_id) for topic_id in changed_topics(old, new)
    )


def racks_of(image: MetadataImage, name: str) -> tuple[tuple[str, ...], ...]:
    """Return the racks of each partition's replicas, in order; nothing where no broker has one."""
    topic, racks = image.topics.get(name), _racks(image)
    if topic is None or not racks:
        return ()
    return tuple(
        tuple(sorted(racks[one] for one in partition.replicas if one in racks))
        for partition in topic.partitions
    )


def racks_changed(old: MetadataImage, new: MetadataImage) -> bool:
    """Whether the replicas of a topic that is in both are on other racks, or may be."""
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
    return {one.broker_id: one.rack for one in brokers if one.rack is not None}


def _size(image: MetadataImage, topic_id: UUID) -> int:
    topic = image.topics_by_id.get(topic_id)
    return 0 if topic is None else len(topic.partitions)


# --- what it means for one broker ---


@dataclass(frozen=True, slots=True)
class LocalPartition:
    """A partition of which this broker has a replica."""

    topic: str
    topic_id: UUID
    index: int
    registration: PartitionRegistration


@dataclass(frozen=True, slots=True)
class LocalChanges:
    """What a broker has to do, in this order."""

    deletes: tuple[LocalPartition, ...] = ()
    """It has no replica any more; the registration is that of before."""
    leaders: tuple[LocalPartition, ...] = ()
    """It leads, and something of the partition changed."""
    elected: tuple[LocalPartition, ...] = ()
    """Those of ``leaders`` whose leader epoch changed."""
    followers: tuple[LocalPartition, ...] = ()
    """It has a replica and does not lead, and something changed."""
    deleted_alone: tuple[TopicImage, ...] = ()
    """Deleted topics of which the broker had the only replica of each partition; ``deletes`` does
    not have them."""


def deleted_topics(old: MetadataImage, new: MetadataImage) -> list[TopicImage]:
    """Return the topics that are gone."""
    known = (old.topics_by_id.get(topic_id) for topic_id in changed_topics(old, new))
    return [one for one in known if one is not None and one.topic_id not in new.topics_by_id]


def local_changes(
    old: MetadataImage,
    new: MetadataImage,
    broker_id: int,
    *,
    topics: Collection[UUID] | None = None,
    each_alone: bool = True,
) -> LocalChanges:
    """Return the work that the step from one image to a later one gives a broker.

    ``topics`` are those to compare, by default all that changed. There may be 200,000 partitions
    whose only replica is on the broker. Without ``each_alone`` the new ones are left out, and a
    deleted topic that has no others is in ``deleted_alone``.

    Source: ``TopicDelta.localChanges``, ``TopicsDelta.localChanges``.
    """
    deletes: list[LocalPartition] = []
    leaders: list[LocalPartition] = []
    elected: list[LocalPartition] = []
    followers: list[LocalPartition] = []
    deleted_alone: list[TopicImage] = []
    if old.topics is new.topics:
        return LocalChanges()
    for topic_id in changed_topics(old, new) if topics is None else topics:
        known, after = old.topics_by_id.get(topic_id), new.topics_by_id.get(topic_id)
        if after is None:
            if known is None:
                continue
            if not each_alone and _is_alone(known, broker_id):
                deleted_alone.append(known)
            else:
                parts = _local(known)
                deletes += [one for one in parts if broker_id in one.registration.replicas]
            continue
        former = () if known is None else known.partitions
        if not each_alone and known is None and _is_alone(after, broker_id):
            continue
        for index, now in enumerate(after.partitions):
            was = former[index] if index < len(former) else None
            if was is now or (was is None and not each_alone and now.is_alone_on(broker_id)):
                continue
            one = LocalPartition(after.name, topic_id, index, now)
            if broker_id not in now.replicas:
                if was is not None and broker_id in was.replicas:
                    deletes.append(replace(one, registration=was))
            elif was is not None and was.partition_epoch == now.partition_epoch:
                continue
            elif now.leader == broker_id:
                leaders.append(one)
                if was is None or was.leader_epoch != now.leader_epoch:
                    elected.append(one)
            else:
                followers.append(one)
    return LocalChanges(
        tuple(deletes), tuple(leaders), tuple(elected), tuple(followers), tuple(deleted_alone)
    )


def _is_alone(topic: TopicImage, broker_id: int) -> bool:
    """Whether all partitions have their only replica on a broker."""
    last = None
    for one in topic.partitions:
        if one is not last:  # most partitions share their registration
            if not one.is_alone_on(broker_id):
                return False
            last = one
    return True


def _local(topic: TopicImage) -> Iterator[LocalPartition]:
    for index, registration in enumerate(topic.partitions):
        yield LocalPartition(topic.name, topic.topic_id, index, registration)
