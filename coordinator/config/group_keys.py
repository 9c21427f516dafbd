"""Keys of the group coordinator: ``GroupCoordinatorConfig``; of single groups: ``GroupConfig``."""

from __future__ import annotations

from fencepost.coordinator.config.key import ConfigKey, ConfigType
from fencepost.coordinator.config.unused_keys import UNUSED_GROUP_KEYS

_I, _L, _LI = ConfigType.INT, ConfigType.LONG, ConfigType.LIST
_MIB = 1 << 20

GROUP_KEYS = (
    ConfigKey(
        "group.coordinator.rebalance.protocols",
        _LI,
        "classic,consumer",
        "The group protocols that are served; the classic one always is.",
        choices=("classic", "consumer", "streams", "share"),
    ),
    ConfigKey(
        "group.consumer.session.timeout.ms",
        _I,
        "45000",
        "A member of a consumer group that is silent for so long is removed.",
        "ms",
        1,
    ),
    ConfigKey(
        "group.consumer.heartbeat.interval.ms",
        _I,
        "5000",
        "How often members of consumer groups are told to send a heartbeat.",
        "ms",
        1,
    ),
    ConfigKey(
        "group.consumer.assignment.interval.ms",
        _I,
        "1000",
        "A consumer group's target assignment is computed at most once in this time.",
        "ms",
        0,
        15000,
    ),
    ConfigKey(
        "group.consumer.min.session.timeout.ms",
        _I,
        "45000",
        "The shortest session timeout that a group may be given as its own.",
        "ms",
        1,
    ),
    ConfigKey(
        "group.consumer.max.session.timeout.ms",
        _I,
        "60000",
        "The longest session timeout that a group may be given as its own.",
        "ms",
        1,
    ),
    ConfigKey(
        "group.consumer.min.heartbeat.interval.ms",
        _I,
        "5000",
        "The shortest heartbeat interval that a group may be given as its own.",
        "ms",
        1,
    ),
    ConfigKey(
        "group.consumer.max.heartbeat.interval.ms",
        _I,
        "15000",
        "The longest heartbeat interval that a group may be given as its own.",
        "ms",
        1,
    ),
    ConfigKey(
        "group.consumer.min.assignment.interval.ms",
        _I,
        "0",
        "The shortest assignment interval that a group may be given as its own.",
        "ms",
        0,
    ),
    ConfigKey(
        "group.consumer.max.assignment.interval.ms",
        _I,
        "15000",
        "The longest assignment interval that a group may be given as its own.",
        "ms",
        0,
    ),
    ConfigKey(
        "group.consumer.max.size",
        _I,
        "1000",
        "Members of one consumer group. Kafka's default is unlimited; here a table has a limit.",
        "members",
        1,
    ),
    ConfigKey(
        "group.consumer.migration.policy",
        ConfigType.STRING,
        "bidirectional",
        "Whether groups with members may change between the classic and the consumer protocol.",
        choices=("disabled", "upgrade", "downgrade", "bidirectional"),
    ),
    ConfigKey(
        "group.consumer.assignors",
        _LI,
        "uniform,range",
        "Server-side assignors; the first is the default. Others than uniform and range are entry"
        " points of the group fencepost.assignors.",
    ),
    ConfigKey(
        "group.min.session.timeout.ms",
        _I,
        "6000",
        "The shortest session timeout a member may ask for.",
        "ms",
        0,
    ),
    ConfigKey(
        "group.max.session.timeout.ms",
        _I,
        "1800000",
        "The longest session timeout a member may ask for.",
        "ms",
        0,
    ),
    ConfigKey(
        "group.initial.rebalance.delay.ms",
        _I,
        "3000",
        "How long the first rebalance of an empty group waits for more members.",
        "ms",
        0,
    ),
    ConfigKey(
        "group.max.size", _I, "1000", "Members of one group; Kafka's default sets no bound.", low=1
    ),
    ConfigKey(
        "offset.metadata.max.bytes",
        _I,
        "4096",
        "Length of the text stored with a committed offset.",
        low=0,
    ),
    ConfigKey(
        "offsets.retention.minutes",
        _I,
        "10080",
        "How long the offsets of an unused group are kept.",
        "minutes",
        1,
    ),
    ConfigKey(
        "offsets.retention.check.interval.ms",
        _L,
        "600000",
        "How often expired offsets are looked for.",
        "ms",
        1,
    ),
    ConfigKey(
        "offsets.topic.num.partitions",
        _I,
        "50",
        "Partitions of __consumer_offsets; fixed once the topic exists.",
        low=1,
    ),
    ConfigKey(
        "offsets.topic.segment.bytes",
        _I,
        "104857600",
        "Segment size of __consumer_offsets.",
        "bytes",
        _MIB,
    ),
)

_OWN_KEYS = (
    ConfigKey(
        "consumer.session.timeout.ms",
        _I,
        None,
        "A member of this group that is silent for so long is removed.",
        "ms",
        1,
    ),
    ConfigKey(
        "consumer.heartbeat.interval.ms",
        _I,
        None,
        "How often members of this group are told to send a heartbeat.",
        "ms",
        1,
    ),
    ConfigKey(
        "consumer.assignment.interval.ms",
        _I,
        None,
        "This group's target assignment is computed at most once in this time.",
        "ms",
        0,
    ),
)

GROUP_OWN_KEYS = {key.name: key for key in (*_OWN_KEYS, *UNUSED_GROUP_KEYS)}
"""What a single group may have set for itself, by name.

The default of a key is the broker's key of the same name behind ``group.``, its bounds are
``group.KIND.min.*`` and ``group.KIND.max.*``, each where there is one. Share and streams groups are
not served here; their keys are described, checked and kept all the same, so that what sets up the
groups of an Apache Kafka runs here too.
"""
