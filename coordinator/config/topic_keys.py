"""All topic-level configuration keys, with the broker keys that give their defaults.

Source: ``LogConfig``, ``ServerTopicConfigSynonyms``.
"""

from __future__ import annotations

from collections.abc import Mapping

from fencepost.coordinator.config.broker_keys import BROKER_KEYS
from fencepost.coordinator.config.key import ConfigKey, ConfigType, Synonym
from fencepost.coordinator.config.replication_keys import REPLICATION_TOPIC_KEYS
from fencepost.coordinator.config.share_keys import SHARE_TOPIC_KEYS
from fencepost.coordinator.config.unused_keys import UNUSED_TOPIC_KEYS

_HOUR_MS = 3_600_000
_MINUTE_MS = 60_000


def _topic(name: str, broker: str, *others: Synonym) -> ConfigKey:
    """Return a topic key with type, bounds and choices of the broker key that gives its default."""
    base = BROKER_KEYS[broker]
    strongest_default = others[-1] if base.default is None and others else None
    default = base.default
    if strongest_default is not None:
        weakest = BROKER_KEYS[strongest_default.name].default
        default = None if weakest is None else str(int(weakest) * strongest_default.factor)
    return ConfigKey(
        name, base.type, default, base.doc, base.unit, base.low, base.high, base.choices,
        updatable=True, inert=base.inert, synonyms=(Synonym(broker), *others),
    )  # fmt: skip


TOPIC_KEYS: Mapping[str, ConfigKey] = {
    key.name: key
    for key in (
        _topic("cleanup.policy", "log.cleanup.policy"),
        _topic("compression.gzip.level", "compression.gzip.level"),
        _topic("compression.lz4.level", "compression.lz4.level"),
        _topic("compression.type", "compression.type"),
        _topic("compression.zstd.level", "compression.zstd.level"),
        _topic("delete.retention.ms", "log.cleaner.delete.retention.ms"),
        _topic("file.delete.delay.ms", "log.segment.delete.delay.ms"),
        _topic("flush.messages", "log.flush.interval.messages"),
        _topic(
            "flush.ms", "log.flush.interval.ms", Synonym("log.flush.scheduler.interval.ms")
        ),
        _topic("index.interval.bytes", "log.index.interval.bytes"),
        ConfigKey(
            "internal.segment.bytes", ConfigType.INT, None,
            "Segment size below the smallest segment.bytes; for tests.", "bytes", 1, updatable=True,
            internal=True,
        ),
        _topic("local.retention.bytes", "log.local.retention.bytes"),
        _topic("local.retention.ms", "log.local.retention.ms"),
        _topic("max.compaction.lag.ms", "log.cleaner.max.compaction.lag.ms"),
        _topic("max.decompressed.message.bytes", "max.decompressed.message.bytes"),
        _topic("max.message.bytes", "message.max.bytes"),
        _topic("message.timestamp.after.max.ms", "log.message.timestamp.after.max.ms"),
        _topic("message.timestamp.before.max.ms", "log.message.timestamp.before.max.ms"),
        _topic("message.timestamp.type", "log.message.timestamp.type"),
        _topic("min.cleanable.dirty.ratio", "log.cleaner.min.cleanable.ratio"),
        _topic("min.compaction.lag.ms", "log.cleaner.min.compaction.lag.ms"),
        _topic("min.insync.replicas", "min.insync.replicas"),
        _topic("preallocate", "log.preallocate"),
        _topic("remote.copy.lag.bytes", "log.remote.copy.lag.bytes"),
        _topic("remote.copy.lag.ms", "log.remote.copy.lag.ms"),
        _topic("retention.bytes", "log.retention.bytes"),
        _topic(
            "retention.ms", "log.retention.ms",
            Synonym("log.retention.minutes", _MINUTE_MS), Synonym("log.retention.hours", _HOUR_MS),
        ),
        _topic("segment.bytes", "log.segment.bytes"),
        _topic("segment.index.bytes", "log.index.size.max.bytes"),
        _topic(
            "segment.jitter.ms", "log.roll.jitter.ms", Synonym("log.roll.jitter.hours", _HOUR_MS)
        ),
        _topic("segment.ms", "log.roll.ms", Synonym("log.roll.hours", _HOUR_MS)),
        _topic("unclean.leader.election.enable", "unclean.leader.election.enable"),
        *REPLICATION_TOPIC_KEYS,
        *SHARE_TOPIC_KEYS,
        *UNUSED_TOPIC_KEYS,
    )
}  # fmt: skip
"""Topic keys by name."""

REFUSED_TOPIC_KEYS: Mapping[str, str] = {
    "message.downconversion.enable": "Kafka 4.0 removed it",
    "message.format.version": "Kafka 4.0 removed it",
    "message.timestamp.difference.max.ms": "Kafka 4.0 removed it",
}
"""Topic keys of Kafka 3.9 that the broker refuses as Kafka 4 does, and the reason."""
