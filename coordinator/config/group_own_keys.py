"""What a single group may have set for itself: ``GroupConfig`` of Apache Kafka.

The default of a key is the broker's key of the same name behind ``group.``, its bounds are
``group.KIND.min.*`` and ``group.KIND.max.*``, each where there is one. Share and streams groups are
not served here; their keys are described, checked and kept all the same, so that what sets up the
groups of an Apache Kafka runs here too.
"""

from __future__ import annotations

from fencepost.coordinator.config.key import ConfigKey, ConfigType
from fencepost.coordinator.config.unused_keys import inert_key

_B, _I, _S = ConfigType.BOOLEAN, ConfigType.INT, ConfigType.STRING

NO_SHARE_GROUPS = "share groups are not served"
NO_STREAMS_GROUPS = "streams groups are not served"

_CONSUMER = (
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

_SHARE = (
    inert_key("share.session.timeout.ms", _I, None, NO_SHARE_GROUPS, low=1),
    inert_key("share.heartbeat.interval.ms", _I, None, NO_SHARE_GROUPS, low=1),
    inert_key("share.assignment.interval.ms", _I, None, NO_SHARE_GROUPS, low=0),
    inert_key("share.record.lock.duration.ms", _I, None, NO_SHARE_GROUPS, low=1000),
    inert_key("share.delivery.count.limit", _I, None, NO_SHARE_GROUPS, low=2),
    inert_key("share.partition.max.record.locks", _I, None, NO_SHARE_GROUPS, low=100),
    inert_key("share.auto.offset.reset", _S, "latest", NO_SHARE_GROUPS),
    inert_key(
        "share.isolation.level",
        _S,
        "read_uncommitted",
        NO_SHARE_GROUPS,
        choices=("read_committed", "read_uncommitted"),
    ),
    inert_key("share.renew.acknowledge.enable", _B, "true", NO_SHARE_GROUPS),
)

_STREAMS = (
    inert_key("streams.session.timeout.ms", _I, None, NO_STREAMS_GROUPS, low=1),
    inert_key("streams.heartbeat.interval.ms", _I, None, NO_STREAMS_GROUPS, low=1),
    inert_key("streams.assignment.interval.ms", _I, None, NO_STREAMS_GROUPS, low=0),
    inert_key("streams.initial.rebalance.delay.ms", _I, None, NO_STREAMS_GROUPS, low=0),
    inert_key("streams.num.standby.replicas", _I, None, NO_STREAMS_GROUPS, low=0),
)

GROUP_OWN_KEYS = {key.name: key for key in (*_CONSUMER, *_SHARE, *_STREAMS)}
"""By name."""

OTHER_GROUP_KEYS = (
    *(
        inert_key(f"group.share.{name}", _I, default, NO_SHARE_GROUPS)
        for name, default in (
            ("session.timeout.ms", "45000"),
            ("min.session.timeout.ms", "45000"),
            ("max.session.timeout.ms", "60000"),
            ("heartbeat.interval.ms", "5000"),
            ("min.heartbeat.interval.ms", "5000"),
            ("max.heartbeat.interval.ms", "15000"),
            ("assignment.interval.ms", "1000"),
            ("min.assignment.interval.ms", "0"),
            ("max.assignment.interval.ms", "15000"),
            ("record.lock.duration.ms", "30000"),
            ("min.record.lock.duration.ms", "15000"),
            ("max.record.lock.duration.ms", "60000"),
            ("delivery.count.limit", "5"),
            ("min.delivery.count.limit", "2"),
            ("max.delivery.count.limit", "10"),
            ("partition.max.record.locks", "2000"),
            ("min.partition.max.record.locks", "100"),
            ("max.partition.max.record.locks", "4000"),
            ("max.share.sessions", "2000"),
            ("max.size", "200"),
        )
    ),
    inert_key("group.share.assignors", ConfigType.LIST, "simple", NO_SHARE_GROUPS),
    *(
        inert_key(f"group.streams.{name}", _I, default, NO_STREAMS_GROUPS)
        for name, default in (
            ("session.timeout.ms", "45000"),
            ("min.session.timeout.ms", "45000"),
            ("max.session.timeout.ms", "60000"),
            ("heartbeat.interval.ms", "5000"),
            ("min.heartbeat.interval.ms", "5000"),
            ("max.heartbeat.interval.ms", "15000"),
            ("assignment.interval.ms", "1000"),
            ("min.assignment.interval.ms", "0"),
            ("max.assignment.interval.ms", "15000"),
            ("initial.rebalance.delay.ms", "3000"),
            ("num.standby.replicas", "0"),
            ("max.standby.replicas", "2"),
            ("max.size", "2147483647"),
        )
    ),
)
"""Broker keys of share and streams groups: the defaults and bounds of the groups' own."""
