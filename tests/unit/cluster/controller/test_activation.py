"""The first records of a new cluster, and of a standalone broker, its own only controller."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from fencepost.cluster.controller.activation import (
    ELR_VERSION,
    METADATA_VERSION,
    MIN_INSYNC_REPLICAS,
    LocalBroker,
    bootstrap,
    new_leader_epoch,
    registration,
)
from fencepost.cluster.delta import MetadataDelta
from fencepost.cluster.image import BROKER_RESOURCE, MetadataImage
from fencepost.cluster.records import (
    BrokerEndpoint,
    BrokerFeature,
    ConfigRecord,
    FeatureLevelRecord,
    PartitionChangeRecord,
)

LEVELS = {METADATA_VERSION: 30, ELR_VERSION: 0, "group.version": 1}
BROKER = LocalBroker(
    3,
    UUID(int=5),
    (BrokerEndpoint("PLAINTEXT", "localhost", 9092, 0),),
    {ELR_VERSION: (0, 1), METADATA_VERSION: (7, 30)},
    "rack",
    UUID(int=1_000),
)


def test_bootstrap_finalizes_feature_levels_above_zero() -> None:
    assert [*bootstrap(MetadataImage(), LEVELS, "2")] == [
        FeatureLevelRecord("group.version", 1),
        FeatureLevelRecord(METADATA_VERSION, 30),
    ]


def test_bootstrap_with_elr_sets_cluster_wide_min_isr() -> None:
    records = [*bootstrap(MetadataImage(), {**LEVELS, ELR_VERSION: 1}, "2")]
    assert records[0] == FeatureLevelRecord(ELR_VERSION, 1)
    assert records[-1] == ConfigRecord(BROKER_RESOURCE, "", MIN_INSYNC_REPLICAS, "2")


@pytest.mark.parametrize("level", [7, 30])
def test_bootstrap_of_existing_cluster_writes_nothing(level: int) -> None:
    image = replace(MetadataImage(), features={METADATA_VERSION: level})
    assert [*bootstrap(image, {**LEVELS, ELR_VERSION: 1}, "2")] == []


def test_registration_is_unfenced_and_its_offset_is_the_broker_epoch() -> None:
    record = registration(BROKER, 17)
    assert record.features == (
        BrokerFeature(ELR_VERSION, 0, 1),
        BrokerFeature(METADATA_VERSION, 7, 30),
    )
    delta = MetadataDelta(MetadataImage())
    delta.replay(record)
    own = delta.apply(17, 1).brokers[3]
    assert (own.epoch, own.fenced, own.rack, own.is_active) == (17, False, "rack", True)
    assert (own.incarnation_id, own.directories) == (UUID(int=5), (UUID(int=1_000),))
    assert own.listeners["PLAINTEXT"].port == 9092


def test_new_leader_epoch_record_has_only_the_leader() -> None:
    assert new_leader_epoch(3) == PartitionChangeRecord(UUID(int=0), 0, leader=3)
