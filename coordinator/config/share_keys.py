"""Keys of share partitions (``ShareGroupConfig``, ``GroupConfig``) and of the share coordinator.

Source for the share coordinator: ``ShareCoordinatorConfig``.
"""

from __future__ import annotations

from fencepost.coordinator.config.key import read_keys

_BROKER = """
group.share.record.lock.duration.ms INT 30000 unit=ms low=1000 high=3600000
    The time that a member of a share group has to acknowledge an acquired record.
group.share.min.record.lock.duration.ms INT 15000 unit=ms low=1000 high=30000
    The shortest lock duration that can be configured for a group.
group.share.max.record.lock.duration.ms INT 60000 unit=ms low=30000 high=3600000
    The longest lock duration that can be configured for a group.
group.share.delivery.count.limit INT 5 unit=deliveries low=2 high=10
    Deliveries of one record to a share group, after which it is archived.
group.share.min.delivery.count.limit INT 2 unit=deliveries low=2 high=5
    The lowest delivery limit that can be configured for a group.
group.share.max.delivery.count.limit INT 10 unit=deliveries low=5 high=25
    The highest delivery limit that can be configured for a group.
group.share.partition.max.record.locks INT 2000 unit=offsets low=100 high=10000
    Offsets of a share partition between the first unfinished one and the last acquired one.
group.share.min.partition.max.record.locks INT 100 unit=offsets low=100 high=2000
    The lowest such limit that can be configured for a group.
group.share.max.partition.max.record.locks INT 4000 unit=offsets low=2000 high=10000
    The highest such limit that can be configured for a group.
group.share.max.share.sessions INT 2000 unit=sessions low=1
    Share sessions of this broker: one for each member that fetches from it.
errors.deadletterqueue.auto.create.topics.enable BOOLEAN false dynamic
    Whether the topic of a share group's dead-letter queue is created when it does not exist.
errors.deadletterqueue.topic.name.prefix STRING dlq. dynamic
    The beginning of the names of all dead-letter queues. Records for other topics are archived.
fencepost.share.state.max.bytes LONG 268435456 unit=bytes low=1
    Memory of the states that the share coordinator keeps; beyond it no share partition is
    initialized. Fencepost's own.
share.coordinator.state.topic.num.partitions INT 50 low=1
    Partitions of __share_group_state; fixed once the topic exists.
share.coordinator.state.topic.replication.factor SHORT 3 low=1
    Replicas of each partition of __share_group_state, in a cluster.
share.coordinator.state.topic.min.isr SHORT 2 low=1
    The setting min.insync.replicas of __share_group_state.
share.coordinator.state.topic.segment.bytes INT 104857600 unit=bytes low=1
    Segment size of __share_group_state.
share.coordinator.write.timeout.ms INT 5000 unit=ms low=1
    How long a request to the share coordinator waits until other replicas have what it changed.
share.coordinator.snapshot.update.records.per.snapshot INT 500 unit=records low=0 high=500
    Updates of a share partition's state after which a snapshot of it is written.
share.coordinator.state.topic.prune.interval.ms INT 300000 unit=ms low=1 internal
    How often records of __share_group_state that no state needs are deleted.
share.coordinator.cold.partition.snapshot.interval.ms INT 300000 unit=ms low=1 internal
    The age at which a snapshot is repeated, so that the records before it can be deleted.
"""

_GROUP = """
share.record.lock.duration.ms INT - unit=ms low=1000
    The time that a member of this group has to acknowledge an acquired record.
share.delivery.count.limit INT - unit=deliveries low=2
    Deliveries of one record to this group, after which it is archived.
share.partition.max.record.locks INT - unit=offsets low=100
    Offsets of a share partition between the first unfinished one and the last acquired one.
share.auto.offset.reset STRING latest
    Where a share partition without state begins: earliest, latest, or by_duration and an ISO 8601
    duration before its first fetch.
share.isolation.level STRING read_uncommitted of=read_committed,read_uncommitted
    Whether this group reads records of open and aborted transactions.
share.renew.acknowledge.enable BOOLEAN true
    Whether members of this group may extend the locks of acquired records.
errors.deadletterqueue.topic.name STRING ""
    The topic of this share group's dead-letter queue, from share.version 2 on: records that members
    reject, or that reach the delivery limit.
errors.deadletterqueue.copy.record.enable BOOLEAN false
    Whether records in the dead-letter queue have the keys and values of the originals.
"""

_TOPIC = """
errors.deadletterqueue.group.enable BOOLEAN false
    Whether the topic may be the dead-letter queue of share groups.
"""

SHARE_KEYS = read_keys(_BROKER)
SHARE_GROUP_KEYS = read_keys(_GROUP)
"""Keys that can be set for a single group."""

SHARE_TOPIC_KEYS = read_keys(_TOPIC)
"""Keys of topics for which no broker key gives the default."""
