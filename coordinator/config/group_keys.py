"""Keys of the group coordinator (``GroupCoordinatorConfig``) and of groups (``GroupConfig``)."""

from __future__ import annotations

from fencepost.coordinator.config.key import read_keys
from fencepost.coordinator.config.share_keys import SHARE_GROUP_KEYS
from fencepost.coordinator.config.unused_keys import UNUSED_GROUP_KEYS

_BROKER = """
group.coordinator.rebalance.protocols LIST classic,consumer of=classic,consumer,streams,share
    The group protocols that are served; the classic one always is.
group.consumer.session.timeout.ms INT 45000 unit=ms low=1
    A member of a consumer group that is silent for this long is removed.
group.consumer.heartbeat.interval.ms INT 5000 unit=ms low=1
    How often members of consumer groups are told to send a heartbeat.
group.consumer.assignment.interval.ms INT 1000 unit=ms low=0 dynamic
    A consumer group's target assignment is computed at most once in this time.
group.consumer.min.session.timeout.ms INT 45000 unit=ms low=1
    The shortest session timeout that can be configured for a group.
group.consumer.max.session.timeout.ms INT 60000 unit=ms low=1
    The longest session timeout that can be configured for a group.
group.consumer.min.heartbeat.interval.ms INT 5000 unit=ms low=1
    The shortest heartbeat interval that can be configured for a group.
group.consumer.max.heartbeat.interval.ms INT 15000 unit=ms low=1
    The longest heartbeat interval that can be configured for a group.
group.consumer.min.assignment.interval.ms INT 0 unit=ms low=0
    The shortest assignment interval that can be configured for a group.
group.consumer.max.assignment.interval.ms INT 15000 unit=ms low=0
    The longest assignment interval that can be configured for a group.
group.consumer.max.size INT 1000 unit=members low=1
    Members of one consumer group; Kafka's default sets no bound.
group.consumer.migration.policy STRING bidirectional any-case \
of=disabled,upgrade,downgrade,bidirectional
    Whether groups with members may change between the classic and the consumer protocol.
group.consumer.assignors LIST uniform,range
    Server-side assignors; the first is the default. Built in are uniform and range, which may also
    be given as Apache Kafka's classes. Other names are entry points of the group
    fencepost.assignors.
group.share.session.timeout.ms INT 45000 unit=ms low=1
    A member of a share group that is silent for this long is removed.
group.share.min.session.timeout.ms INT 45000 unit=ms low=1
    The shortest session timeout that can be configured for a share group.
group.share.max.session.timeout.ms INT 60000 unit=ms low=1
    The longest session timeout that can be configured for a share group.
group.share.heartbeat.interval.ms INT 5000 unit=ms low=1
    How often members of share groups are told to send a heartbeat.
group.share.min.heartbeat.interval.ms INT 5000 unit=ms low=1
    The shortest heartbeat interval that can be configured for a share group.
group.share.max.heartbeat.interval.ms INT 15000 unit=ms low=1
    The longest heartbeat interval that can be configured for a share group.
group.share.assignment.interval.ms INT 1000 unit=ms low=0 dynamic
    A share group's target assignment is computed at most once in this time.
group.share.min.assignment.interval.ms INT 0 unit=ms low=0
    The shortest assignment interval that can be configured for a share group.
group.share.max.assignment.interval.ms INT 15000 unit=ms low=0
    The longest assignment interval that can be configured for a share group.
group.share.max.size INT 200 unit=members low=1 high=1000
    Members of one share group.
group.share.assignors LIST simple
    The assignor of share groups: simple, which may also be given as Apache Kafka's class.
group.share.initialize.retry.interval.ms INT 30000 unit=ms low=1 internal
    How long the share coordinator may take to initialize a share partition before it is asked
    again.
group.min.session.timeout.ms INT 6000 unit=ms low=0
    The shortest session timeout a member may ask for.
group.max.session.timeout.ms INT 1800000 unit=ms low=0
    The longest session timeout a member may ask for.
group.initial.rebalance.delay.ms INT 0 unit=ms low=0
    How long the first rebalance of an empty group waits for more members; Kafka's default is 3000.
group.max.size INT 1000 low=1
    Members of one group; Kafka's default sets no bound.
offset.metadata.max.bytes INT 4096 low=0
    Length of the text stored with a committed offset.
offsets.retention.minutes INT 10080 unit=minutes low=1
    How long the offsets of an unused group are kept.
offsets.retention.check.interval.ms LONG 600000 unit=ms low=1
    How often expired offsets are looked for.
fencepost.groups.max.bytes LONG 1073741824 unit=bytes low=1
    Memory of all groups with their members; beyond it no member joins. Fencepost's own.
fencepost.offsets.max.bytes LONG 1073741824 unit=bytes low=1
    Memory of all committed offsets with their metadata; beyond it no offset is added. Fencepost's
    own.
offsets.commit.timeout.ms INT 5000 unit=ms low=1
    How long a group's request waits until other replicas have what it changed.
offsets.topic.num.partitions INT 50 low=1
    Partitions of __consumer_offsets; fixed once the topic exists.
offsets.topic.segment.bytes INT 104857600 unit=bytes low=1048576
    Segment size of __consumer_offsets.
"""

_OWN = """
consumer.session.timeout.ms INT - unit=ms low=1
    A member of this group that is silent for this long is removed.
consumer.heartbeat.interval.ms INT - unit=ms low=1
    How often members of this group are told to send a heartbeat.
consumer.assignment.interval.ms INT - unit=ms low=0
    This group's target assignment is computed at most once in this time.
share.session.timeout.ms INT - unit=ms low=1
    A member of this share group that is silent for this long is removed.
share.heartbeat.interval.ms INT - unit=ms low=1
    How often members of this share group are told to send a heartbeat.
share.assignment.interval.ms INT - unit=ms low=0
    This share group's target assignment is computed at most once in this time.
"""

GROUP_KEYS = read_keys(_BROKER)

GROUP_OWN_KEYS = {
    key.name: key for key in (*read_keys(_OWN), *SHARE_GROUP_KEYS, *UNUSED_GROUP_KEYS)
}
"""Keys that can be set for a single group, by name.

The default of a key is the value of the broker key ``group.KEY``; its bounds are the values of
``group.KIND.min.*`` and ``group.KIND.max.*``, if these keys exist. Streams groups are not served,
but their keys are described, checked and stored, so that tools for Apache Kafka work.
"""
