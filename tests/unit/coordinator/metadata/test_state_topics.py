"""No setting from any source makes a coordinator's topic lose state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from fencepost import Broker
from fencepost.coordinator.config.broker_config import (
    TOPIC_KEYS,
    BrokerConfig,
    ConfigError,
    ConfigSource,
    ConfigType,
    check_topic_configs,
)
from fencepost.coordinator.config.key import ConfigKey
from fencepost.coordinator.metadata.controller_settings import controller_settings
from fencepost.coordinator.metadata.names import (
    CONSUMER_OFFSETS,
    HISTORY_TOPIC,
    SHARE_GROUP_STATE,
    TRANSACTION_STATE,
)
from fencepost.coordinator.metadata.state_topics import (
    SAFE,
    STATE_TOPICS,
    check_state_topic,
    safe_configs,
    safe_log_config,
    unsafe_configs,
    without_unsafe_configs,
)
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.config import LogConfig
from fencepost.logcore.machine import Record
from tests.support.clock import ManualClock
from tests.support.cluster import GROUP, Cluster
from tests.support.metadata_changes import create_topic, internal_topic, set_topic_configs
from tests.support.partitions import retain
from tests.unit.coordinator.services.coordinators import storage

COMPACT = {"cleanup.policy": "compact"}
YEAR_MS = 365 * 86_400_000


AS_KAFKA = {"cleanup.policy": "delete", "retention.ms": "-1"}


def needed(topic: str) -> dict[str, str]:
    """Return the settings with which a topic loses no state."""
    return AS_KAFKA if topic == SHARE_GROUP_STATE else COMPACT


def acceptable(configs: Mapping[str, str]) -> bool:
    """Return whether these settings are valid for an ordinary topic."""
    try:
        check_topic_configs(BrokerConfig(), configs)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("topic", sorted(STATE_TOPICS))
@pytest.mark.parametrize("key", SAFE)
def test_internal_topic_config_is_accepted_only_within_its_safe_bounds(
    topic: str, key: str
) -> None:
    low, high, reason = SAFE[key]
    for value in {low, high}:
        check_state_topic(topic, {**needed(topic), key: str(value)})
    for value in {low - 1, high + 1}:
        if acceptable({key: str(value)}):
            with pytest.raises(ConfigError, match=reason):
                check_state_topic(topic, {**needed(topic), key: str(value)})
            check_state_topic("ordinary", {key: str(value)})


@pytest.mark.parametrize("policy", ["delete", "compact,delete", "delete, compact", ""])
def test_coordinator_topic_with_a_policy_other_than_compact_is_refused(policy: str) -> None:
    for topic in (CONSUMER_OFFSETS, TRANSACTION_STATE):
        with pytest.raises(ConfigError, match="must be compact"):
            check_state_topic(topic, {"cleanup.policy": policy})
        with pytest.raises(ConfigError, match="must be compact"):
            check_state_topic(topic, {})
    check_state_topic("ordinary", {"cleanup.policy": policy})


@pytest.mark.parametrize("topic", sorted(STATE_TOPICS))
def test_unclean_leader_election_is_refused_for_internal_topics(topic: str) -> None:
    check_state_topic(topic, {**needed(topic), "unclean.leader.election.enable": "FALSE"})
    with pytest.raises(ConfigError, match="must be false"):
        check_state_topic(topic, {**needed(topic), "unclean.leader.election.enable": "True"})
    settings = controller_settings(
        BrokerConfig({"unclean.leader.election.enable": "true"}),
        node_id=1,
    )
    assert topic in settings.state_topics


def test_dynamic_unclean_election_default_is_not_a_static_topic_default() -> None:
    """The controller reads the dynamic default from the image, not from its configuration."""
    config = BrokerConfig()
    config.set_dynamic(
        ConfigSource.DYNAMIC_DEFAULT_BROKER, {"unclean.leader.election.enable": "true"}
    )
    settings = controller_settings(config, node_id=1)
    assert settings.topic_defaults["unclean.leader.election.enable"] == "false"


def test_share_group_state_topic_must_have_policy_delete_without_retention() -> None:
    """Apache Kafka prunes the topic only by DeleteRecords; compaction would remove updates."""
    check_state_topic(SHARE_GROUP_STATE, AS_KAFKA)
    for other in (
        {"cleanup.policy": "delete"},
        {"cleanup.policy": "compact"},
        {**AS_KAFKA, "cleanup.policy": "compact"},
        {**AS_KAFKA, "retention.ms": "1"},
    ):
        with pytest.raises(ConfigError):
            check_state_topic(SHARE_GROUP_STATE, other)
        config = safe_log_config(SHARE_GROUP_STATE, LogConfig(retention_ms=1, retention_bytes=1))
        assert (config.retention_ms, config.retention_bytes) == (-1, -1)
        assert config.cleanup_policy == {"delete"}


def values_of(key: ConfigKey) -> st.SearchStrategy[str]:
    """Return a strategy for values of ``key``, including the values at its bounds."""
    if key.type in {ConfigType.INT, ConfigType.LONG, ConfigType.SHORT}:
        low = int(key.low) if key.low is not None else -(1 << 31)
        high = int(key.high) if key.high is not None else (1 << 31) - 1
        near = [low, low + 1, high - 1, high, -1, 0, 1, 14, 1_000]
        return st.sampled_from([str(number) for number in near if low <= number <= high])
    if key.name == "cleanup.policy":
        return st.sampled_from(["delete", "compact", "compact,delete"])
    return st.sampled_from([*map(str, key.choices or ())] or ["true", "false"])


INTERESTING = sorted(
    {*SAFE, "cleanup.policy", "segment.ms", "segment.bytes", "internal.segment.bytes"}
    | {"compression.type", "message.timestamp.type", "min.cleanable.dirty.ratio"}
    | {"file.delete.delay.ms", "segment.jitter.ms", "unclean.leader.election.enable"}
)
SETTINGS = st.fixed_dictionaries(
    {}, optional={key: values_of(TOPIC_KEYS[key]) for key in INTERESTING}
)


@given(SETTINGS)
def test_safe_configs_of_internal_topics_contain_no_unsafe_values(configs: dict[str, str]) -> None:
    for topic in STATE_TOPICS:
        left = safe_configs(topic, configs)
        assert unsafe_configs(topic, left) == {}
        assert left.items() - configs.items() <= needed(topic).items()


def keep(store: Storage, topic: str, clock: ManualClock) -> int:
    """Append a record, run retention a year later, and return the log start offset."""
    partition = store.logs.partition(topic, 0)
    partition.append_records([Record(b"k", b"v")], now_ms=clock.now_ms())
    clock.advance(YEAR_MS)
    partition.append_records([Record(b"other", b"v")], now_ms=clock.now_ms())
    retain(partition, clock.now_ms())
    return partition.log_start_offset


EVIL = {"cleanup.policy": "delete", "retention.ms": "1", "segment.ms": "1"}


@pytest.mark.parametrize("topic", [CONSUMER_OFFSETS, TRANSACTION_STATE])
def test_unsafe_internal_topic_configs_in_the_metadata_are_ignored_and_logged(
    tmp_path: Path, topic: str
) -> None:
    """Apache Kafka's controllers or older releases may have accepted such settings."""
    clock = ManualClock(1_700_000_000_000)
    store = storage(tmp_path, clock=clock)
    internal_topic(store.metadata, topic)
    store.logs.partition(topic, 0)
    create_topic(store.metadata, "ordinary", 1, EVIL)
    with capture_logs() as lines:
        set_topic_configs(store.metadata, topic, EVIL)
        set_topic_configs(store.metadata, topic, {**EVIL, "segment.ms": "2"})
    told = [(line["topic"], line["key"]) for line in lines if line["event"] == "setting ignored"]
    assert told == [(topic, "retention.ms"), (topic, "cleanup.policy")]
    assert keep(store, topic, clock) == 0
    assert keep(store, "ordinary", clock) > 0, "the same settings delete records elsewhere"
    store.logs.close()
    with capture_logs() as lines:
        again = storage(tmp_path, clock=clock)
    assert keep(again, topic, clock) == 0
    assert {line["key"] for line in lines if line["event"] == "setting ignored"} == {
        "cleanup.policy",
        "retention.ms",
    }
    again.logs.close()


def test_unsafe_broker_defaults_do_not_apply_to_internal_topics(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    defaults = {
        "log.cleanup.policy": "delete",
        "log.retention.ms": "1",
        "log.retention.bytes": "1",
        "log.roll.ms": "1",
        "log.cleaner.delete.retention.ms": "0",
        "log.cleaner.max.compaction.lag.ms": "1",
        "message.max.bytes": "100",
        "log.message.timestamp.before.max.ms": "0",
        "log.message.timestamp.after.max.ms": "0",
    }
    store = storage(tmp_path, defaults, clock=clock)
    for topic in (CONSUMER_OFFSETS, TRANSACTION_STATE):
        internal_topic(store.metadata, topic)
        assert keep(store, topic, clock) == 0
        config = store.logs.partition(topic, 0).log.config
        for key, (low, high, _) in SAFE.items():
            assert low <= getattr(config, key.replace(".", "_")) <= high
    create_topic(store.metadata, "ordinary", 1, {})
    assert keep(store, "ordinary", clock) > 0
    store.logs.close()


def test_describe_configs_of_an_internal_topic_returns_the_effective_values(tmp_path: Path) -> None:
    configured = {
        "delete.retention.ms": ("log.cleaner.delete.retention.ms", "1000", "86400000"),
        "max.compaction.lag.ms": ("log.cleaner.max.compaction.lag.ms", "2000", "3600000"),
        "max.message.bytes": ("message.max.bytes", "2000000", "2000000"),
        "retention.bytes": ("log.retention.bytes", "9", "-1"),
        "cleanup.policy": ("log.cleanup.policy", "delete", "compact"),
        "unclean.leader.election.enable": ("unclean.leader.election.enable", "true", "false"),
    }
    defaults = {key: value for key, value, _ in configured.values()}
    with Broker.in_thread(tmp_path, config=defaults) as broker, Cluster(broker.bootstrap) as client:
        client.coordinator("g", GROUP)
        client.create_topic("ordinary")
        for topic, at in ((CONSUMER_OFFSETS, 2), ("ordinary", 1)):
            asked = {"resource_type": 2, "resource_name": topic, "configuration_keys": None}
            answer = client.call("describe_configs", 4, resources=[asked])
            shown = {config["name"]: config["value"] for config in answer["results"][0]["configs"]}
            assert {key: shown[key] for key in configured} == {
                key: values[at] for key, values in configured.items()
            }


def test_history_topic_retention_follows_the_broker_config(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    store = storage(tmp_path, {"fencepost.history.retention.ms": str(2 * YEAR_MS)}, clock=clock)
    create_topic(store.metadata, HISTORY_TOPIC, 1, EVIL)
    assert keep(store, HISTORY_TOPIC, clock) == 0
    store.logs.close()


def test_promoted_metadata_omits_unsafe_internal_topic_configs(tmp_path: Path) -> None:
    store = storage(tmp_path)
    for topic in (CONSUMER_OFFSETS, TRANSACTION_STATE):
        internal_topic(store.metadata, topic)
        set_topic_configs(store.metadata, topic, {**EVIL, "min.insync.replicas": "2"})
    create_topic(store.metadata, "ordinary", 1, EVIL)
    image = without_unsafe_configs(store.metadata.image)
    for topic in (CONSUMER_OFFSETS, TRANSACTION_STATE):
        kept = {"segment.ms": "1", "min.insync.replicas": "2"}
        assert image.topic_configs(topic) == {**needed(topic), **kept}
    assert image.topic_configs("ordinary") == EVIL
    store.logs.close()
