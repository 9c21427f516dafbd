"""Checks for contradictions between broker keys; a broker with contradictory keys does not start.

Source: ``GroupCoordinatorConfig.validate``, ``ShareGroupConfig.validate``,
``KafkaConfig.validateValues``.
"""

from __future__ import annotations

from collections.abc import Mapping

from fencepost.coordinator.config.key import ConfigError, Value

_INTERVALS = ("session.timeout.ms", "heartbeat.interval.ms", "assignment.interval.ms")
_SHARE_LIMITS = ("delivery.count.limit", "partition.max.record.locks", "record.lock.duration.ms")

KINDS = {
    "consumer": _INTERVALS,
    "share": (*_INTERVALS, *_SHARE_LIMITS),
    "streams": _INTERVALS,
}
"""The keys that have bounds, by kind of group; the keys of the bounds are ``group.KIND.min.KEY``
and ``group.KIND.max.KEY``."""

_ASCENDING = (
    ("group.min.session.timeout.ms", "group.max.session.timeout.ms"),
    ("log.cleaner.min.compaction.lag.ms", "log.cleaner.max.compaction.lag.ms"),
    *(
        (f"group.{kind}.{low}{name}", f"group.{kind}.{high}{name}")
        for kind, names in KINDS.items()
        for name in names
        for low, high in (("min.", "max."), ("min.", ""), ("", "max."))
    ),
    ("group.share.max.size", "group.share.max.share.sessions"),
    ("group.streams.num.standby.replicas", "group.streams.max.standby.replicas"),
    ("group.streams.min.task.offset.interval.ms", "group.streams.task.offset.interval.ms"),
    ("group.streams.num.warmup.replicas", "group.streams.max.warmup.replicas"),
)
"""Pairs of keys; the first key's value must not be greater than the second key's value."""

_SHARE_ASSIGNORS = "group.share.assignors"


def check_together(values: Mapping[str, Value]) -> None:
    """Raise ConfigError if two values contradict each other."""
    for low, high in _ASCENDING:
        smaller, larger = values[low], values[high]
        if isinstance(smaller, int) and isinstance(larger, int) and smaller > larger:
            raise ConfigError(low, smaller, f"it is above {high} ({larger})")
    for kind in KINDS:
        beat, session = f"group.{kind}.heartbeat.interval.ms", f"group.{kind}.session.timeout.ms"
        between, silence = values[beat], values[session]
        if isinstance(between, int) and isinstance(silence, int) and between >= silence:
            raise ConfigError(beat, between, f"it must be below {session} ({silence})")
    assignors = values[_SHARE_ASSIGNORS]
    if isinstance(assignors, tuple) and len(assignors) != 1:
        raise ConfigError(_SHARE_ASSIGNORS, ",".join(assignors), "it must name one assignor")
