"""Settings with which a coordinator's topic would lose state.

Requests for such settings are refused. If the settings come in another way (from controllers of
Apache Kafka, from ZooKeeper, from an older release, as broker-wide defaults), the logs of these
topics use the nearest safe value. Apache Kafka accepts and applies them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from fencepost.cluster.image import TOPIC_RESOURCE, MetadataImage
from fencepost.coordinator.config.broker_config import TOPIC_KEYS, ConfigError
from fencepost.coordinator.config.key import Value
from fencepost.coordinator.metadata.names import (
    CONSUMER_OFFSETS,
    SHARE_GROUP_STATE,
    TRANSACTION_STATE,
)
from fencepost.logcore.config import MAX_INT64, LogConfig

STATE_TOPICS: Final = frozenset({CONSUMER_OFFSETS, TRANSACTION_STATE, SHARE_GROUP_STATE})

MAX_INT32: Final = (1 << 31) - 1
_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS

CLEANUP_POLICY: Final = "cleanup.policy"
RETENTION: Final = "retention.ms"
UNCLEAN_LEADER_ELECTION: Final = "unclean.leader.election.enable"
COMPACT: Final = frozenset({"compact"})
DELETE: Final = frozenset({"delete"})


class SafeRange(NamedTuple):
    """The values of a setting with which no state is lost, and the reason against other values."""

    low: int
    high: int
    reason: str


SAFE: Final[Mapping[str, SafeRange]] = {
    RETENTION: SafeRange(-1, -1, "state must not be deleted by age"),
    "retention.bytes": SafeRange(-1, -1, "state must not be deleted by size"),
    "delete.retention.ms": SafeRange(
        _DAY_MS, MAX_INT64, "a replica that misses a tombstone restores deleted state"
    ),
    "min.compaction.lag.ms": SafeRange(
        0, 7 * _DAY_MS, "a new coordinator reads all records that are not compacted"
    ),
    "max.compaction.lag.ms": SafeRange(_HOUR_MS, MAX_INT64, "each lag begins a segment"),
    "max.message.bytes": SafeRange(1_048_588, MAX_INT32, "a group's state is one record"),
    "message.timestamp.before.max.ms": SafeRange(
        _HOUR_MS, MAX_INT64, "a coordinator's writes would be refused"
    ),
    "message.timestamp.after.max.ms": SafeRange(
        _HOUR_MS, MAX_INT64, "a coordinator's writes would be refused"
    ),
}
"""The safe values by topic key. Other keys, such as ``compression.type`` and ``segment.*``, cost
time or space, not state."""


def unsafe_configs(topic: str, configs: Mapping[str, str]) -> dict[str, str]:
    """Return, by key, the reason against each topic setting that would lose state.

    This includes a missing ``cleanup.policy``, because the broker's default would apply.
    """
    if topic not in STATE_TOPICS:
        return {}
    unsafe = {}
    for key, (low, high, reason) in SAFE.items():
        value = TOPIC_KEYS[key].parse(configs[key]) if key in configs else low
        if isinstance(value, int) and not low <= value <= high:
            words = "" if low == high else "at least " if value < low else "at most "
            unsafe[key] = f"for {topic} it must be {words}{low if value < low else high}: {reason}"
    if TOPIC_KEYS[UNCLEAN_LEADER_ELECTION].parse(configs.get(UNCLEAN_LEADER_ELECTION, "false")):
        unsafe[UNCLEAN_LEADER_ELECTION] = (
            f"for {topic} it must be false: a replica that is not in sync lacks state;"
            " ElectLeaders can still elect it"
        )
    policies = frozenset(policy.strip() for policy in configs.get(CLEANUP_POLICY, "").split(","))
    if policies != _policy(topic):
        unsafe[CLEANUP_POLICY] = (
            f"for {topic} it must be delete: compaction removes updates, which build on each other"
            if topic == SHARE_GROUP_STATE
            else f"for {topic} it must be compact: other policies delete state"
        )
    if topic == SHARE_GROUP_STATE and RETENTION not in configs:
        # Brokers of Apache Kafka in the cluster would apply their own default.
        unsafe[RETENTION] = f"for {topic} it must be set to -1: {SAFE[RETENTION].reason}"
    return unsafe


def _policy(topic: str) -> frozenset[str]:
    """Return the cleanup policy that keeps a topic's state.

    The share coordinator prunes its topic by DeleteRecords; retention is off.
    """
    return DELETE if topic == SHARE_GROUP_STATE else COMPACT


def check_state_topic(topic: str, configs: Mapping[str, str]) -> None:
    """Raise ConfigError if a topic's own settings, which are otherwise valid, would lose state."""
    for key, why in unsafe_configs(topic, configs).items():
        raise ConfigError(key, configs.get(key), why)


def safe_configs(topic: str, configs: Mapping[str, str]) -> dict[str, str]:
    """Return a topic's own settings without those that would lose state."""
    safe = {key: text for key, text in configs.items() if key not in unsafe_configs(topic, configs)}
    if topic in STATE_TOPICS:
        safe.setdefault(CLEANUP_POLICY, *_policy(topic))
    if topic == SHARE_GROUP_STATE:
        safe.setdefault(RETENTION, "-1")
    return safe


def without_unsafe_configs(image: MetadataImage) -> MetadataImage:
    """Return ``image`` with only safe settings of state topics."""
    configs = dict(image.configs)
    for topic in STATE_TOPICS & image.topics.keys():
        resource = TOPIC_RESOURCE, topic
        settings = configs.pop(resource, {})
        if safe := safe_configs(topic, settings):
            configs[resource] = safe
    return replace(image, configs=configs, step=None)


def value_in_force(topic: str, key: str, value: Value) -> Value:
    """Return the value in force for a topic if ``value`` is configured."""
    if topic not in STATE_TOPICS:
        return value
    if key in SAFE and isinstance(value, int):
        low, high, _ = SAFE[key]
        return min(max(value, low), high)
    return False if key == UNCLEAN_LEADER_ELECTION else value


def safe_log_config(topic: str, config: LogConfig) -> LogConfig:
    """Return the configuration of a topic's logs, each value moved to the nearest safe one."""
    if topic not in STATE_TOPICS:
        return config
    values: dict[str, Any] = {}
    for key in SAFE:
        field = key.replace(".", "_")
        values[field] = value_in_force(topic, key, getattr(config, field))
    return replace(config, cleanup_policy=_policy(topic), **values)
