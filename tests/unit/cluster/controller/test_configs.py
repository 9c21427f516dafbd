"""Dynamic settings, feature levels and producer id blocks.

Kafka's classes are ConfigurationControlManager, FeatureControlManager and ProducerIdControlManager.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from uuid import uuid4

import pytest

from fencepost.cluster.controller.activation import (
    ELR_VERSION,
    METADATA_VERSION,
    MIN_INSYNC_REPLICAS,
)
from fencepost.cluster.controller.configs import AlterConfig, OpType
from fencepost.cluster.controller.errors import (
    InvalidConfigError,
    InvalidUpdateVersionError,
    PolicyViolationError,
    ProducerIdsExhaustedError,
    StaleBrokerEpochError,
    UnknownTopicOrPartitionError,
)
from fencepost.cluster.controller.features import FeatureUpdate, UpgradeType
from fencepost.cluster.image import BROKER_RESOURCE, GROUP_RESOURCE, TOPIC_RESOURCE
from fencepost.cluster.records import (
    BrokerFeature,
    ClearElrRecord,
    ConfigRecord,
    ControllerFeature,
    FeatureLevelRecord,
    ProducerIdsRecord,
    RegisterControllerRecord,
)
from tests.unit.cluster.controller.cluster_driver import SETTINGS, Cluster, any_config

FOO = (TOPIC_RESOURCE, "foo")
ALL_BROKERS = (BROKER_RESOURCE, "")


def default(_kind: int, key: str) -> str | None:
    return "a,b" if key == "list" else None


def with_foo() -> Cluster:
    cluster = Cluster()
    cluster.create("foo", [0])
    return cluster


def alter(cluster: Cluster, resource: tuple[int, str], *changes: AlterConfig) -> None:
    cluster.do(
        cluster.controller.incremental_alter_configs(
            resource, changes, check_configs=any_config, list_default=default
        )
    )


# --- settings ---


def test_configs_of_unknown_topic_are_refused_after_validation() -> None:
    cluster = Cluster()
    with pytest.raises(UnknownTopicOrPartitionError, match="'foo' does not exist"):
        alter(cluster, FOO, AlterConfig("x", OpType.SET, "1"))

    def refuses(*_of: object) -> None:
        raise InvalidConfigError("not so")

    with pytest.raises(InvalidConfigError, match="not so"):
        cluster.controller.legacy_alter_configs(FOO, {"x": "1"}, check_configs=refuses)


def test_alter_configs_with_validate_only_raises_errors_and_writes_nothing() -> None:
    cluster = with_foo()
    for outcome in (
        cluster.controller.incremental_alter_configs(
            FOO,
            [AlterConfig("x", OpType.SET, "1")],
            check_configs=any_config,
            list_default=default,
            validate_only=True,
        ),
        cluster.controller.legacy_alter_configs(
            FOO, {"x": "1"}, check_configs=any_config, validate_only=True
        ),
    ):
        assert not outcome.records
    with pytest.raises(UnknownTopicOrPartitionError):
        cluster.controller.legacy_alter_configs(
            (TOPIC_RESOURCE, "bar"), {}, check_configs=any_config, validate_only=True
        )


def test_configured_groups_are_limited_until_configs_are_deleted() -> None:
    cluster = Cluster(settings=replace(SETTINGS, max_configured_groups=2))
    one, two, three = ((GROUP_RESOURCE, name) for name in ("one", "two", "three"))
    own = AlterConfig("x", OpType.SET, "1")
    alter(cluster, one, own)
    alter(cluster, two, own)
    with pytest.raises(PolicyViolationError, match="2 groups have settings"):
        alter(cluster, three, own)
    alter(cluster, three, AlterConfig("x", OpType.DELETE))
    alter(cluster, two, AlterConfig("y", OpType.SET, "2"))
    alter(cluster, one, AlterConfig("x", OpType.DELETE))
    alter(cluster, three, own)
    assert {name for _, name in cluster.image.configs} == {"two", "three"}


def test_incremental_alter_configs_writes_only_changed_values() -> None:
    cluster = with_foo()
    alter(cluster, FOO, AlterConfig("x", OpType.SET, "1"), AlterConfig("y", OpType.SET, "2"))
    end = cluster.end
    alter(cluster, FOO, AlterConfig("x", OpType.SET, "1"), AlterConfig("y", OpType.DELETE))
    assert cluster.log[end:] == [ConfigRecord(*FOO, "y", None)]
    assert cluster.image.configs[FOO] == {"x": "1"}


def test_kafka_14136_unchanged_broker_config_is_written_again() -> None:
    """KAFKA-14136: the value may name a file whose contents have changed."""
    cluster = Cluster()
    for _ in range(2):
        end = cluster.end
        alter(cluster, ALL_BROKERS, AlterConfig("x", OpType.SET, "1"))
        assert cluster.log[end:] == [ConfigRecord(*ALL_BROKERS, "x", "1")]


@pytest.mark.parametrize(
    ("op", "value", "expected"),
    [
        (OpType.APPEND, "b,c", "a,b,c"),
        (OpType.SUBTRACT, "a", "b"),
        (OpType.SUBTRACT, "c", "a,b"),
        (OpType.SUBTRACT, "b,a", ""),
    ],
)
def test_append_and_subtract_start_from_the_default_list(
    op: OpType, value: str, expected: str
) -> None:
    cluster = with_foo()
    alter(cluster, FOO, AlterConfig("list", op, value))
    assert cluster.image.configs[FOO]["list"] == expected
    with pytest.raises(InvalidConfigError, match="not LIST"):
        alter(cluster, FOO, AlterConfig("x", op, value))


def test_legacy_alter_configs_replaces_all_configs() -> None:
    cluster = with_foo()
    alter(cluster, FOO, AlterConfig("x", OpType.SET, "1"), AlterConfig("y", OpType.SET, "2"))
    cluster.do(
        cluster.controller.legacy_alter_configs(FOO, {"x": "1", "z": "3"}, check_configs=any_config)
    )
    assert cluster.image.configs[FOO] == {"x": "1", "z": "3"}


def test_config_validation_sees_former_and_resulting_configs() -> None:
    cluster = with_foo()
    alter(cluster, FOO, AlterConfig("x", OpType.SET, "1"))
    seen = []

    def refuses(kind: int, name: str, after: Mapping[str, str], old: Mapping[str, str]) -> None:
        seen.append((kind, name, dict(after), dict(old)))
        raise InvalidConfigError("no")

    with pytest.raises(InvalidConfigError):
        cluster.controller.incremental_alter_configs(
            FOO, [AlterConfig("y", OpType.SET, "2")], check_configs=refuses, list_default=default
        )
    assert seen == [(*FOO, {"x": "1", "y": "2"}, {"x": "1"})]


def test_topic_config_falls_back_to_broker_cluster_and_static_configs() -> None:
    cluster = Cluster(min_isr=4)
    cluster.create("foo", [0])
    view = cluster.controller.view
    assert view.topic_config("foo", MIN_INSYNC_REPLICAS) == "4"
    for value, resource in (("3", ALL_BROKERS), ("2", (BROKER_RESOURCE, "3000")), ("1", FOO)):
        alter(cluster, resource, AlterConfig(MIN_INSYNC_REPLICAS, OpType.SET, value))
        assert cluster.controller.view.topic_config("foo", MIN_INSYNC_REPLICAS) == value


def test_effective_min_isr_is_bounded_by_replication_factor() -> None:
    cluster = Cluster(elr=True, min_isr=5)
    cluster.create("foo", [0, 1])
    cluster.alter_isr("foo", [0])
    assert cluster.partition("foo").elr == (1,)
    cluster.alter_isr("foo", [0, 1])
    assert cluster.partition("foo").elr == ()


# --- settings and eligible leader replicas ---


def below_min_isr() -> Cluster:
    cluster = Cluster(elr=True, min_isr=2)
    for name in ("foo", "bar"):
        cluster.create(name, [0, 1])
    cluster.fence(1)
    assert cluster.partition("foo").elr == cluster.partition("bar").elr == (1,)
    return cluster


def test_changed_min_isr_of_topic_clears_its_elr() -> None:
    cluster = below_min_isr()
    cluster.set_config("foo", MIN_INSYNC_REPLICAS, "1")
    assert cluster.log[-1] == ClearElrRecord("foo")
    assert (cluster.partition("foo").elr, cluster.partition("bar").elr) == ((), (1,))
    end = cluster.end
    cluster.set_config("foo", MIN_INSYNC_REPLICAS, "1")
    assert cluster.end == end


def test_changed_min_isr_of_cluster_clears_every_elr() -> None:
    cluster = below_min_isr()
    cluster.set_config("", MIN_INSYNC_REPLICAS, "1")
    assert cluster.log[-1] == ClearElrRecord("")
    assert (cluster.partition("foo").elr, cluster.partition("bar").elr) == ((), ())


def test_min_isr_with_elr_cannot_be_removed_or_set_per_broker() -> None:
    cluster = below_min_isr()
    with pytest.raises(InvalidConfigError, match="cannot be removed while ELR is enabled"):
        cluster.set_config("", MIN_INSYNC_REPLICAS, None)
    with pytest.raises(InvalidConfigError, match="cannot be altered while ELR is enabled"):
        alter(cluster, (BROKER_RESOURCE, "1"), AlterConfig(MIN_INSYNC_REPLICAS, OpType.SET, "1"))


# --- features ---


def update(cluster: Cluster, *updates: FeatureUpdate) -> Mapping[str, int]:
    return cluster.do(cluster.controller.update_features(updates))


def test_enabling_elr_sets_cluster_min_isr_and_removes_broker_min_isr() -> None:
    cluster = Cluster(min_isr=3)
    alter(cluster, (BROKER_RESOURCE, "1"), AlterConfig(MIN_INSYNC_REPLICAS, OpType.SET, "1"))
    end = cluster.end
    assert update(cluster, FeatureUpdate(ELR_VERSION, 1)) == {ELR_VERSION: 1}
    assert cluster.log[end:] == [
        ConfigRecord(*ALL_BROKERS, MIN_INSYNC_REPLICAS, "3"),
        ConfigRecord(BROKER_RESOURCE, "1", MIN_INSYNC_REPLICAS, None),
        FeatureLevelRecord(ELR_VERSION, 1),
    ]
    assert update(cluster, FeatureUpdate(ELR_VERSION, 1)) == {}
    assert update(cluster, FeatureUpdate(ELR_VERSION, 0, UpgradeType.SAFE_DOWNGRADE)) == {
        ELR_VERSION: 0
    }
    assert ELR_VERSION not in cluster.image.features


def test_update_features_with_validate_only_writes_nothing() -> None:
    cluster, end = Cluster(), Cluster().end
    outcome = cluster.controller.update_features(
        [FeatureUpdate(ELR_VERSION, 1)], validate_only=True
    )
    assert outcome.answer == {ELR_VERSION: 1}
    assert (outcome.records, outcome.events, cluster.end) == ((), (), end)
    with pytest.raises(InvalidUpdateVersionError):
        cluster.controller.update_features([FeatureUpdate("no.such", 1)], validate_only=True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (FeatureUpdate(ELR_VERSION, 1, UpgradeType.UNKNOWN), "given upgrade type"),
        (FeatureUpdate(ELR_VERSION, -1), "less than 0"),
        (FeatureUpdate("no.such", 1), "does not support this feature"),
        (FeatureUpdate(ELR_VERSION, 2), "Local controller 3000 only supports versions 0-1"),
        (FeatureUpdate(METADATA_VERSION, 29), "Can't downgrade"),
        (FeatureUpdate(METADATA_VERSION, 29, UpgradeType.SAFE_DOWNGRADE), "Refusing"),
        (FeatureUpdate(METADATA_VERSION, 29, UpgradeType.UNSAFE_DOWNGRADE), "Unsafe metadata"),
        (FeatureUpdate("kraft.version", 1), "Broker 0 does not support this feature"),
        (FeatureUpdate(ELR_VERSION, 1, UpgradeType.SAFE_DOWNGRADE), "downgrade to a newer"),
    ],
)
def test_invalid_feature_update_is_refused(changed: FeatureUpdate, words: str) -> None:
    cluster = Cluster()
    end = cluster.end
    with pytest.raises(InvalidUpdateVersionError, match=words):
        update(cluster, FeatureUpdate(ELR_VERSION, 1), changed)
    assert cluster.end == end


def test_feature_level_unsupported_by_a_broker_is_refused() -> None:
    cluster = Cluster()
    cluster.register(7, features=(BrokerFeature(METADATA_VERSION, 7, 30),))
    with pytest.raises(InvalidUpdateVersionError, match="Broker 7 does not support"):
        update(cluster, FeatureUpdate(ELR_VERSION, 1))


def test_feature_level_unsupported_by_another_controller_is_refused() -> None:
    cluster = Cluster()
    older = (ControllerFeature(METADATA_VERSION, 30, 30), ControllerFeature(ELR_VERSION, 0, 0))
    cluster.append([RegisterControllerRecord(3001, uuid4(), False, (), older)])
    with pytest.raises(InvalidUpdateVersionError, match="Controller 3001 only supports versions"):
        update(cluster, FeatureUpdate(ELR_VERSION, 1))


# --- producer ids ---


def test_producer_id_blocks_are_consecutive_and_need_the_broker_epoch() -> None:
    cluster = Cluster()
    blocks = [
        cluster.do(cluster.controller.allocate_producer_ids(broker_id, cluster.epoch(broker_id)))
        for broker_id in (0, 1, 0)
    ]
    assert blocks == [(0, 1_000), (1_000, 1_000), (2_000, 1_000)]
    assert cluster.log[-1] == ProducerIdsRecord(0, 3_000, cluster.epoch(0))
    with pytest.raises(StaleBrokerEpochError):
        cluster.controller.allocate_producer_ids(1, cluster.epoch(0))


def test_producer_ids_are_reserved_only_upwards_and_reset_to_any_value() -> None:
    cluster = Cluster(settings=replace(SETTINGS, node_id=1))
    epoch = cluster.epoch(1)
    cluster.do(cluster.controller.reserve_producer_ids(500))
    assert cluster.log[-1] == ProducerIdsRecord(1, 500, epoch)
    for below in (500, 499):
        assert cluster.controller.reserve_producer_ids(below).records == ()
    assert cluster.do(cluster.controller.allocate_producer_ids(0, cluster.epoch(0))).first == 500
    cluster.do(cluster.controller.reset_producer_ids(7))
    assert cluster.log[-1] == ProducerIdsRecord(1, 7, epoch)
    assert cluster.image.next_producer_id == 7
    nowhere = Cluster()
    nowhere.do(nowhere.controller.reset_producer_ids(7))
    assert nowhere.log[-1] == ProducerIdsRecord(nowhere.settings.node_id, 7, -1)


def test_producer_id_block_beyond_int64_is_refused() -> None:
    cluster = Cluster()
    last = (1 << 63) - 1_001
    cluster.append([ProducerIdsRecord(0, last)])
    assert cluster.do(cluster.controller.allocate_producer_ids(0, cluster.epoch(0))).first == last
    with pytest.raises(ProducerIdsExhaustedError):
        cluster.controller.allocate_producer_ids(0, cluster.epoch(0))
